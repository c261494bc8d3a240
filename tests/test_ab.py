"""A/B runs: wrong kernels are refused, equal ones are equal, and a slow one is found."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import minidecode
from minidecode import cli
from minidecode.bench import ab, gate, steps
from minidecode.cli import measure
from minidecode.errors import KernelWrongError, MinidecodeError
from minidecode.plan import kernel_set
from minidecode.records import FASTER, NO_DIFFERENCE, SLOWER, ABResult, Environment

pytestmark = pytest.mark.usefixtures("quick_measuring")
FIXTURES = Path(__file__).parent / "fixtures"
RIGHT = f"{FIXTURES / 'hostile' / 'hostile.py'}:right"


def hostile(name: str) -> str:
    return f"{FIXTURES / 'hostile' / 'hostile.py'}:{name}"


def user(name: str) -> str:
    return f"{FIXTURES / 'user_kernels.py'}:{name}"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its down projections take a good part of the step."""
    directory = tmp_path_factory.mktemp("models") / "wide"
    tiny.build(directory, tokenizer=True, hidden_size=256, intermediate_size=8192)
    return str(directory)


Timed = Callable[[int], float]


def timed_by(monkeypatch: pytest.MonkeyPatch, *times: Timed) -> list[int]:
    """The arms (A, B, A again) take what `times` say of their n-th sample; the order is returned.

    The warm-up is one sample of each.
    """
    order: list[int] = []
    runners: list[Any] = []

    def timed_steps(decoder: Any, runner: Any, *, depth: int, n: int) -> float:
        if runner not in runners:
            runners.append(runner)
            return 1.0
        which = runners.index(runner)
        order.append(which)
        return times[which](order.count(which))

    monkeypatch.setattr(steps, "timed_steps", timed_steps)
    return order


def result_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> ABResult:
    assert cli.main(["ab", *arguments, "--json", "-"]) == 0
    return ABResult.from_dict(json.loads(capsys.readouterr().out))


# --- the gate -------------------------------------------------------------------------------------


def logits(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(64, 97, generator=torch.Generator().manual_seed(seed))


def noisy(reference: torch.Tensor, error: float) -> torch.Tensor:
    return reference + error * logits(1)


def test_the_noise_of_fp16_passes() -> None:
    reference = logits()
    agreement = gate.compare(noisy(reference, 3e-3), reference)
    assert agreement.reason is None
    assert agreement.rel_err == pytest.approx(3e-3, rel=0.1)
    assert agreement.kl is not None
    assert 0 < agreement.kl < 1e-4
    assert agreement.top1_agreement is not None
    assert agreement.top1_agreement > 0.9


def test_equal_logits_agree_exactly() -> None:
    agreement = gate.compare(logits(), logits())
    assert (agreement.rel_err, agreement.top1_agreement) == (0.0, 1.0)
    assert agreement.kl == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_logit_that_is_not_finite(bad: float) -> None:
    out = logits()
    out[40, 96] = bad
    agreement = gate.compare(out, logits())
    assert agreement.reason == "logits at position 40 are not finite"
    assert agreement.rel_err is None


def test_an_error_everywhere_or_at_one_position() -> None:
    reference = logits()
    everywhere = gate.compare(noisy(reference, 0.03), reference)
    assert "relative error 3." in str(everywhere.reason)
    out = reference.clone()
    out[17] = noisy(reference, 0.1)[17]
    once = gate.compare(out, reference)
    assert once.rel_err is not None
    assert once.rel_err < gate.MAX_REL_ERR
    assert "position 17" in str(once.reason)


def test_arms_may_differ_by_twice_as_much() -> None:
    reference = logits()
    out = noisy(reference, 0.03)
    assert gate.compare(out, reference).reason is not None
    between = gate.compare(out, reference, 2.0)
    assert between.reason is None


def test_arms_that_are_right_may_not_differ_by_more_than_that(
    monkeypatch: pytest.MonkeyPatch, tiny_model: str
) -> None:
    decoder = minidecode.load(tiny_model)
    checker = gate.Gate(decoder, measure.gate_ids(decoder))
    scales = iter((0.9801, 1.0199))  # 1.99 % from the reference, 4.06 % from each other
    monkeypatch.setattr(gate, "teacher_forced", lambda *_: next(scales) * checker._reference)
    plain = kernel_set(None, decoder.device)
    with pytest.raises(KernelWrongError, match=r"against the A: relative error 4\.1e-02"):
        checker.check([("A", plain), ("B", plain)], "before")


def test_kl_is_that_from_the_reference() -> None:
    quarter, half = torch.tensor([[1.0, 3.0]]).log(), torch.tensor([[2.0, 2.0]]).log()
    expected = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)
    assert gate.compare(half, quarter).kl == pytest.approx(expected, rel=1e-5)


def test_a_distribution_that_moved() -> None:
    """All logits off by little, but the likely ones all downwards."""
    reference = torch.zeros(64, 1000)
    reference[:, :10] = 12.0
    reference[:, 10:] += 5.0
    out = reference.clone()
    out[:, :10] -= 0.2
    out[:, 5:10] += 0.4
    assert "KL divergence" in str(gate.compare(out, reference).reason)


def test_another_token_matters_only_where_the_choice_was_clear() -> None:
    reference = torch.zeros(64, 97)
    reference[:, 0] = 0.02
    reference[:, 2:] = logits()[:, 2:].clamp(max=-0.5)
    tied = reference.clone()
    tied[3, 1] = 0.03
    agreement = gate.compare(tied, reference)
    assert agreement.reason is None
    assert agreement.top1_agreement == pytest.approx(63 / 64)
    reference[3, 0] = 0.2  # clear from 0.114 on, between arms from twice that
    tied[3, 0], tied[3, 1] = 0.1, 0.11
    assert "clear choice at position 3" in str(gate.compare(tied, reference).reason)
    assert gate.compare(tied, reference, 2.0).reason is None


def test_the_gate_sees_through_what_another_kernel_left_behind(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that leaves a row out would find the right value there, were it not for the NaN."""
    decoder = minidecode.load(tiny_model)
    ids = measure.gate_ids(decoder)
    whole = kernel_set(RIGHT, decoder.device)
    lazy = kernel_set(hostile("skips_last_row"), decoder.device)
    checker = gate.Gate(decoder, ids)
    monkeypatch.setattr(gate, "check_gemvs", lambda *_: None)
    assert all(each.passed for each in checker.check([("right", whole)], "before"))
    with pytest.raises(KernelWrongError, match="position 0 are not finite"):
        checker.check([("lazy", lazy)], "before")


def test_the_gate_takes_the_model_s_own_tokens(tiny_model: str, tmp_path: Path) -> None:
    decoder = minidecode.load(tiny_model)
    ids = measure.gate_ids(decoder)
    assert len(ids) == gate.POSITIONS == 64
    assert bytes(ids[1:8]) == bytes(ord(c) - 29 for c in "Alice w")  # after <s>
    tiny.build(tmp_path / "bare")
    bare = measure.gate_ids(minidecode.load(tmp_path / "bare"))
    assert len(set(bare)) > 20
    assert max(bare) < tiny.VOCAB
    tiny.build(tmp_path / "fewer", tokenizer=True, vocab_size=90)  # the tokenizer has 97
    fewer = measure.gate_ids(minidecode.load(tmp_path / "fewer"))
    assert bytes(fewer[1:8]) == bytes(ord(c) - 29 for c in "Alice a")
    short = minidecode.load(tiny_model, max_context=40)
    assert len(measure.gate_ids(short)) == 40


@pytest.mark.parametrize(
    "kernel",
    ["zeros", "nan", "skips_last_row", "wrong_after_ten", "one_past_the_end", "previous_result"],
)
@pytest.mark.parametrize("place", ["a", "b", "only"])
@pytest.mark.parametrize("which", ["tiny_model", "small_weights"])
def test_a_wrong_kernel_is_refused_before_any_number_is_printed(
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    kernel: str,
    place: str,
    which: str,
) -> None:
    wrong = hostile(kernel)
    arms = [wrong, "torch"] if place == "a" else ["torch", wrong]
    only = ["--only", "o_proj"] if place == "only" else []
    directory = request.getfixturevalue(which)
    out = tmp_path / "result.json"
    assert cli.main(["ab", *arms, *only, "-m", directory, "--json", str(out)]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert f"{kernel} is wrong" in captured.err
    assert not out.exists()


@pytest.mark.parametrize("command", ["generate", "ab"])
def test_a_layer_that_a_kernel_refuses_is_told_before_anything_is_printed(
    capsys: pytest.CaptureFixture[str], tiny_model: str, tmp_path: Path, command: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\ndef f(y, w, x):\n    if len(y) == len(x):\n"
        "        raise NotImplementedError\n    torch.mv(w, x, out=y)\n"
    )
    kernel = f"{file}:f"
    arguments = {
        "generate": ["generate", tiny_model, "--kernel", kernel, "--prompt", "a"],
        "ab": ["ab", "torch", kernel, "-m", tiny_model],
    }
    assert cli.main(arguments[command]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert re.search(r"layers\.0\.attn\.o: kernel .*:f does not support n=\d+, k=", captured.err)


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("raise NotImplementedError", 1, "layers.0.attn.qkv: kernel .* does not support n="),
        ("y.fill_(1)\n    raise NotImplementedError", 3, "wrote something and said not supported"),
        (
            "if w.storage_offset() % 8:\n        raise NotImplementedError\n"
            "    torch.mv(w, x, out=y)",
            0,
            "",
        ),
    ],
    ids=["all", "but writes", "off alignment"],
)
def test_what_a_kernel_may_refuse(
    capsys: pytest.CaptureFixture[str],
    tiny_model: str,
    tmp_path: Path,
    body: str,
    code: int,
    said: str,
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import torch\ndef f(y, w, x):\n    {body}\n")
    asked = ["--kernel", f"{file}:f", "--prompt", "a", "--max-new-tokens", "2"]
    assert cli.main(["generate", tiny_model, *asked]) == code
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize("kernel", ["zeros", "nan", "skips_last_row", "wrong_after_ten"])
@pytest.mark.parametrize("which", ["tiny_model", "small_weights"])
def test_a_wrong_kernel_decodes_nothing(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest, kernel: str, which: str
) -> None:
    directory = request.getfixturevalue(which)
    assert cli.main(["generate", directory, "--prompt", "hi", "--kernel", hostile(kernel)]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert f"{kernel} is wrong" in captured.err
    assert cli.main(["generate", directory, "--prompt", "hi", "--kernel", RIGHT]) == 0


@pytest.mark.parametrize("command", [["ab", "torch"], ["bench", "-p", "0", "--kernel"]])
def test_a_kernel_that_becomes_wrong_while_it_is_timed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: str, command: list[str]
) -> None:
    own = shutil.copy(FIXTURES / "user_kernels.py", tmp_path)  # imported anew: no calls yet
    assert cli.main([*command, f"{own}:wrong_later", "-m", tiny_model]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "after the timed part" in captured.err


# --- the verdict ----------------------------------------------------------------------------------


def test_the_arms_take_turns(monkeypatch: pytest.MonkeyPatch, tiny_model: str) -> None:
    # The medians are 4 and 2; pair by pair B is 4, 2 and 4 times as fast.
    a, b = [2.0] * 4 + [4.0] * 4 + [8.0] * 4, [0.5] * 4 + [2.0] * 8
    order = timed_by(
        monkeypatch,
        lambda i: a[i // 2] if i % 2 else 5.0,  # every other sample of A is one of the noise
        lambda i: b[i - 1],
        lambda i: 5.0,
    )
    decoder = minidecode.load(tiny_model)
    plain = kernel_set(None, decoder.device)
    result = ab.run(
        decoder,
        ("torch", plain),
        ("torch", plain),
        gate.random_ids(tiny.VOCAB),
        n=4,
        depth=80,
        rounds=12,
        model="little",
        command="",
        environment=Environment(minidecode="0", time="", python="", os="", cpu=""),
    )
    assert order == [0, 1, 0, 2, 1, 0, 2, 0] * 6
    assert result.a.samples_us == tuple(a)
    assert result.b.samples_us == tuple(b)
    assert result.noise_samples_us == (5.0,) * 24
    assert result.ratio == pytest.approx(4.0)
    assert result.drift_pct == pytest.approx(300.0)
    assert result.verdict == FASTER
    # Where the gate's 64 tokens did not reach, the cache is still as it was timed.
    assert 0.9 < float(decoder.state.keys[:, :, 64:80].float().std()) < 1.1


def test_the_same_kernel_twice_is_no_difference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_model: str
) -> None:
    def drifting(phase: float) -> Timed:
        return lambda i: 100.0 * (1 + 0.02 * math.sin(13 * i + phase)) * (1 + 0.002 * i)

    timed_by(monkeypatch, drifting(0.0), drifting(1.0), drifting(2.0))
    result = result_of(capsys, "torch", "torch", "-m", tiny_model)
    assert result.ratio_low <= 1.0 <= result.ratio_high
    assert result.verdict == NO_DIFFERENCE
    assert result.sentence.startswith("no difference between torch and torch")
    assert result.drift_pct is not None
    assert result.drift_pct > 2


def test_the_document_holds_everything(capsys: pytest.CaptureFixture[str], tiny_model: str) -> None:
    result = result_of(
        capsys, "torch", RIGHT, "-m", tiny_model, "-n", "2", "-d", "20", "--rounds", "12"
    )
    assert (result.a.kernel, result.a.engine) == ("torch", "torch")
    assert (result.b.kernel, result.b.engine) == (RIGHT, "composed")
    assert (result.rounds, result.depth, result.model) == (12, 20, "little")
    assert len(result.a.samples_us) == len(result.b.samples_us) == 12
    assert len(result.noise_samples_us) == 24
    assert [(g.when, g.against) for g in result.gates] == [
        (when, against)
        for when in ("before", "after")
        for against in ("fp32 reference", "fp32 reference", "torch")
    ]
    assert all(g.passed and g.positions == 64 and g.rel_err is not None for g in result.gates)
    config = minidecode.load(tiny_model).config
    assert result.a.bytes_per_token == config.weight_bytes() + config.kv_read_bytes(20)
    assert result.a.tokens_s == pytest.approx(1e6 / result.a.step_us)
    assert result.a.pct_read_bw == pytest.approx(100 * (result.a.gb_s or 0) / 20.0)
    assert result.a.served_from_cache is (result.a.pct_read_bw > 100)
    assert f"minidecode ab torch {RIGHT} -m {tiny_model} -n 2 -d 20" in result.command


def test_the_table_ends_with_the_verdict(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: str,
    tmp_path: Path,
) -> None:
    timed_by(monkeypatch, lambda i: 8.0, lambda i: 10.0, lambda i: 8.0)
    file = tmp_path / "ab.json"
    assert cli.main(["ab", "torch", RIGHT, "-m", tiny_model, "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[:5] == ["A", "torch", "(torch)", "125,000.0", "8.00"] for line in lines)
    assert "is 0.800x as fast as torch" in " ".join(lines[-2:])
    assert ABResult.from_dict(json.loads(file.read_text())).verdict == SLOWER


@pytest.mark.parametrize(("b_us", "code"), [(10.0, 0), (10.54, 0), (10.55, 4), (9.0, 0)])
def test_fail_if_slower(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: str,
    b_us: float,
    code: int,
) -> None:
    """The interval ends 0.2 % above the ratio: 1.002 / 1.0548 is 5 % below 1."""
    timed_by(monkeypatch, lambda i: 10.0, lambda i: b_us, lambda i: 10.0)
    arguments = ["ab", "torch", RIGHT, "-m", tiny_model, "--fail-if-slower", "5"]
    assert cli.main(arguments) == code
    captured = capsys.readouterr()
    assert "device tok/s" in captured.out
    assert ("more than 5 % slower" in captured.err) == (code == 4)


def test_fail_if_slower_wants_to_be_sure(monkeypatch: pytest.MonkeyPatch, tiny_model: str) -> None:
    """8 % slower in the middle, but the interval reaches down to less than 5."""
    timed_by(
        monkeypatch,
        lambda i: 10.0,
        lambda i: 10.8 if i % 4 else 10.2,
        lambda i: 10.0,
    )
    assert cli.main(["ab", "torch", RIGHT, "-m", tiny_model, "--fail-if-slower", "7.3"]) == 0


def test_a_slow_kernel_in_one_place_is_found_with_the_right_ratio(
    capsys: pytest.CaptureFixture[str], wide: str
) -> None:
    """The step grows by what the report says that down takes."""
    right, slow = RIGHT, user("half_as_fast")
    report = ["report", "-m", wide, "--kernel", right, "--vs", slow, "--only", "down_proj"]
    assert cli.main([*report, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    kinds = {total["name"]: total for total in found["by_kind"]}
    down = kinds["down"]
    assert 1.5 < down["vs_us"] / down["us"] < 3.0
    assert max(kinds.values(), key=lambda total: total["delta_us"]) is down
    by_row = {row["name"]: row["delta_us"] for row in found["rows"]}
    assert set(sorted(by_row, key=lambda name: by_row[name])[-2:]) == {
        "layers.0.mlp.down",
        "layers.1.mlp.down",
    }

    result = result_of(capsys, right, slow, "--only", "down_proj", "-m", wide, "--rounds", "16")
    assert result.only == ("down",)
    assert result.a.bytes_per_token == result.b.bytes_per_token
    expected = found["sum_us"] / (found["sum_us"] + down["us"])
    assert expected < 0.9
    assert expected**2 < result.ratio < expected**0.4


@pytest.mark.usefixtures("example_dir")
def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of(
        capsys, "torch", RIGHT, "--only", "down_proj", "--rounds", "12", "-n", "1", "-d", "16"
    )
    assert result.model == "example"
    assert [gate.passed for gate in result.gates] == [True] * len(result.gates)
    assert {gate.positions for gate in result.gates} == {64}
    assert result.ratio_low <= result.ratio <= result.ratio_high
    assert len(result.a.samples_us) == len(result.b.samples_us) == 12
    assert result.a.bytes_per_token > 269_000_000


# --- usage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["torch", "torch", "--rounds", "5"], "at least 12"),
        (["torch", "torhc"], "did you mean torch"),
        (["nonsense.cu", "torch"], "nonsense.cu"),
        (["torch", "torch", "--only", "nonsense"], "no linear layer is called 'nonsense'"),
        (["torch", "torch", "--only", ","], "--only"),
        (["torch", "torch", "--json", "/no/such/folder/x.json"], "--json"),
    ],
)
def test_a_wrong_value_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], tiny_model: str, arguments: list[str], said: str
) -> None:
    assert cli.main(["ab", *arguments, "-m", tiny_model]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err


@pytest.mark.parametrize("value", ["-1", "x", "nan", "100"])
def test_fail_if_slower_is_a_percentage(capsys: pytest.CaptureFixture[str], value: str) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["ab", "torch", "torch", "--fail-if-slower", value])
    assert end.value.code == 2
    assert "percentage" in capsys.readouterr().err


def test_a_depth_beyond_the_context(capsys: pytest.CaptureFixture[str], tiny_model: str) -> None:
    assert cli.main(["ab", "torch", "torch", "-m", tiny_model, "-d", "5000"]) == 1
    assert "context limit of 256" in capsys.readouterr().err


def test_an_engine_cannot_take_one_layer(tiny_model: str) -> None:
    decoder = minidecode.load(tiny_model)
    engine = kernel_set("torch", decoder.device)
    bare = type(engine)("whole", "fused")
    with pytest.raises(MinidecodeError, match="whole engine"):
        engine.swap(("down",), bare)
