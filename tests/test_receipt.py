"""tests/gpu_receipt.json is of the sources as they are, and cannot say more than what was run."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import receipt as receipts

GOOD = {"result": "passed", "summary": "", "seconds": 1.0}
BAD = {"result": "failed", "summary": "3 failed", "seconds": 1.0}
ALL = dict.fromkeys(receipts.PARTS, GOOD)


def test_receipt_is_of_these_sources() -> None:
    problem = receipts.problem(receipts.read())
    assert not problem, problem


def test_a_receipt_says_where_and_what() -> None:
    receipt = receipts.read()
    parts = receipt["parts"]
    if receipt["result"] == "passed":
        assert set(parts) == set(receipts.PARTS)
    if parts:
        assert receipt["environment"]["gpu"]
    if "tests" in parts:
        assert parts["tests"]["passed"] > 450
    if "sanitizer" in parts:
        assert parts["sanitizer"]["passed"] == 20
    if "bench" in parts:
        assert {row["kernel"] for row in parts["bench"]["rows"]} >= {"fused", "cublas"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with a few of the files that a receipt is about."""
    for name in ("cuda/gemv/a.cu", "cuda/include/b.cuh", "minidecode/plan/c.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"// {name}\n")
    (tmp_path / "minidecode/kernels").mkdir()
    (tmp_path / "minidecode/decode.py").write_text("decode\n")
    return tmp_path


def test_hash_is_that_of_names_and_contents(root: Path) -> None:
    first = receipts.source_hash(root)
    seen = {first}

    def changed() -> None:
        found = receipts.source_hash(root)
        assert found not in seen
        seen.add(found)

    (root / "cuda/gemv/a.cu").write_text("// changed\n")
    changed()
    (root / "minidecode/decode.py").write_text("changed\n")
    changed()
    (root / "minidecode/kernels/new.py").write_text("")
    changed()
    (root / "cuda/gemv/a.cu").rename(root / "cuda/gemv/z.cu")
    changed()
    (root / "cuda/include/b.cuh").write_text("// minidecode/plan/c.py\n")
    (root / "minidecode/plan/c.py").write_text("// cuda/include/b.cuh\n")
    changed()


def test_hash_is_not_that_of_anything_else(root: Path) -> None:
    first = receipts.source_hash(root)
    (root / "minidecode/plan/__pycache__").mkdir()
    (root / "minidecode/plan/__pycache__/c.cpython-312.pyc").write_bytes(b"x")
    (root / "minidecode/text.py").write_text("x")
    (root / "minidecode/plan/c.py").write_bytes(b"// minidecode/plan/c.py\r\n")
    assert receipts.source_hash(root) == first


def test_passed_needs_every_part(root: Path) -> None:
    made = receipts.make(ALL, {"gpu": "H200"}, root=root)
    assert (made["result"], made["reason"]) == ("passed", "")
    assert receipts.problem(made, root) == ""
    for name in receipts.PARTS:
        part = receipts.make({k: v for k, v in ALL.items() if k != name}, None, root=root)
        assert (part["result"], part["reason"]) == ("not run", f"not run yet: {name}")
        broken = receipts.make({**ALL, name: BAD}, None, root=root)
        assert (broken["result"], broken["reason"]) == ("failed", f"{name}: 3 failed")
        assert "3 failed" in receipts.problem(broken, root)


def test_parts_add_up_over_runs_on_the_same_sources(root: Path) -> None:
    first = receipts.make({"tests": GOOD, "bench": BAD}, None, root=root)
    second = receipts.make({"sanitizer": GOOD}, None, first, root)
    assert second["result"] == "failed"
    third = receipts.make({"bench": GOOD}, None, second, root)
    assert third["result"] == "passed"
    assert list(third["parts"]) == list(receipts.PARTS)
    (root / "minidecode/decode.py").write_text("changed\n")
    later = receipts.make({"bench": GOOD}, None, third, root)
    assert (later["result"], list(later["parts"])) == ("not run", ["bench"])
    assert "changed since" in receipts.problem(third, root)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"result": "passed"}, "its parts say 'not run'"),
        ({"reason": "  "}, "not why"),
        ({"sources": "0" * 64}, "changed since"),
        ({"parts": {"tests": BAD}}, "failed"),
        ({"result": "failed", "reason": "it was bad"}, "failed"),
    ],
)
def test_an_edited_receipt_is_noticed(root: Path, edit: dict[str, Any], words: str) -> None:
    receipt = receipts.not_run("no GPU was to be had", root=root)
    assert receipts.problem(receipt, root) == ""
    assert words in receipts.problem({**copy.deepcopy(receipt), **edit}, root)


@pytest.mark.parametrize("reason", ["", "   ", "no GPU"])
def test_not_run_needs_a_reason(root: Path, reason: str) -> None:
    with pytest.raises(receipts.ReceiptError, match="why"):
        receipts.not_run(reason, root=root)


def test_a_part_that_was_not_run_leaves_the_others(root: Path) -> None:
    machine = {"gpu": "H200"}
    ran = receipts.make({**ALL, "sanitizer": BAD}, machine, root=root)
    told = receipts.not_run("the tool did not start", ["sanitizer"], ran, root)
    assert told["result"] == "not run"
    assert told["reason"] == "the tool did not start; the suite said sanitizer: 3 failed"
    assert (told["parts"], told["environment"]) == ({"tests": GOOD, "bench": GOOD}, machine)
    assert receipts.problem(told, root) == ""
    assert receipts.make({"sanitizer": GOOD}, machine, told, root)["result"] == "passed"
    with pytest.raises(receipts.ReceiptError, match="3 failed"):
        receipts.not_run("the tool did not start", ["bench"], ran, root)
    with pytest.raises(receipts.ReceiptError, match="no part 'docs'"):
        receipts.not_run("the tool did not start", ["docs"], ran, root)
    (root / "minidecode/decode.py").write_text("changed\n")
    later = receipts.not_run("the tool did not start", ["sanitizer"], ran, root)
    assert (later["parts"], later["environment"]) == ({}, None)


def test_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "receipt.json"
    for function in (receipts.read, receipts.write):
        defaults = tuple(place if d == receipts.RECEIPT else d for d in function.__defaults__)
        monkeypatch.setattr(function, "__defaults__", defaults)
    assert receipts.main(["show"]) == 1
    assert "cannot be read" in capsys.readouterr().err
    assert receipts.main(["not-run", "because"]) == 1
    assert receipts.main(["not-run", "no machine was lent"]) == 0
    assert receipts.main(["not-run", "no machine was lent", "bench"]) == 0
    assert "no machine was lent" in capsys.readouterr().out
    made = tmp_path / "made.json"
    made.write_text(json.dumps(receipts.make(ALL, {"gpu": "H200"})))
    assert receipts.main(["take", str(made)]) == 0
    assert capsys.readouterr().out.startswith("passed")
    assert receipts.main(["show"]) == 0
    made.write_text(json.dumps({**receipts.make(ALL, None), "sources": "0"}))
    assert receipts.main(["take", str(made)]) == 1
    assert "other sources" in capsys.readouterr().err
    made.write_text("{}")
    assert receipts.main(["take", str(made)]) == 1
