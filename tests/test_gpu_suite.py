"""The scripts of the GPU suite, without a GPU: how they read results, and the sanitizer's calls."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
import shim

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import gpu_suite
import sanitize
from gpu_suite import ROOT, Done

from minidecode.kernels import check


def junit(path: Path, cases: str, **counts: int) -> Path:
    attributes = " ".join(f'{name}="{n}"' for name, n in counts.items())
    path.write_text(f"<testsuites><testsuite {attributes}>{cases}</testsuite></testsuites>")
    return path


def test_a_report_of_pytest(tmp_path: Path) -> None:
    done = Done(0, "", 12.34)
    report = junit(tmp_path / "a.xml", "", tests=10, failures=0, errors=0, skipped=3)
    found = gpu_suite.tests_outcome(report, done)
    assert found["result"] == "passed"
    assert (found["passed"], found["failed"], found["skipped"]) == (7, 0, 3)
    assert found["seconds"] == 12.3


@pytest.mark.parametrize(
    ("counts", "status"),
    [
        ({"tests": 3, "failures": 1, "errors": 0, "skipped": 0}, 1),
        ({"tests": 3, "failures": 0, "errors": 2, "skipped": 0}, 1),
        ({"tests": 3, "failures": 0, "errors": 0, "skipped": 3}, 0),  # no GPU was seen
        ({"tests": 0, "failures": 0, "errors": 0, "skipped": 0}, 5),
        ({"tests": 3, "failures": 0, "errors": 0, "skipped": 0}, 3),  # pytest itself failed
    ],
)
def test_reports_that_are_failures(tmp_path: Path, counts: dict[str, int], status: int) -> None:
    case = '<testcase classname="t" name="x"><failure/></testcase><testcase name="y"/>'
    found = gpu_suite.tests_outcome(junit(tmp_path / "a.xml", case, **counts), Done(status, "", 1))
    assert found["result"] == "failed"
    assert found["failures"] == ["t::x"]


def test_no_report_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "half.xml").write_text("<testsuites><test")
    for name in ("none.xml", "half.xml"):
        found = gpu_suite.tests_outcome(tmp_path / name, Done(0, "", 1))
        assert found["result"] == "failed"


CALLED = "sanitize.py: 90 calls of 16 files, 4 refused, 0 wrong\n"


@pytest.mark.parametrize(
    ("status", "output", "fault"),
    [
        (0, CALLED + "========= ERROR SUMMARY: 0 errors", ""),
        (0, CALLED + "== RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", ""),
        (99, CALLED + "========= ERROR SUMMARY: 12 errors", "12 errors"),
        (0, CALLED + "========= ERROR SUMMARY: 10 errors", "10 errors"),
        (
            1,
            "ERROR SUMMARY: 485 errors\n= ERROR SUMMARY: 385 errors were not printed",
            "485 errors",
        ),
        (1, CALLED + "========= ERROR SUMMARY: 0 errors", "exit status 1"),
        (0, "========= ERROR SUMMARY: 0 errors", "exit status 0"),
        (0, CALLED.replace("90", "0") + "========= ERROR SUMMARY: 0 errors", "exit status 0"),
        (0, CALLED.replace("4 r", "90 r") + "========= ERROR SUMMARY: 0 errors", "exit status 0"),
        (1, CALLED.replace("0 wrong", "2 wrong") + "ERROR SUMMARY: 0 errors", "exit status 1"),
        (0, CALLED, "exit status 0 and no summary"),
        (None, "", "no end after 7 s"),
    ],
)
def test_what_a_sanitizer_says(status: int | None, output: str, fault: str) -> None:
    assert gpu_suite.sanitizer_fault(Done(status, output, 7.0)) == fault


def test_every_tool_looks_at_every_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    broken = ""

    def run(command: list[str], limit: float, log: Path, **environment: str) -> Done:
        ran.append(command)
        clean = "ERROR SUMMARY: 0 errors" if "--tool" in command else ""
        return Done(int(command[-1] == broken), CALLED + clean, 1.0)

    monkeypatch.setattr(gpu_suite, "run", run)
    monkeypatch.setattr(gpu_suite.shutil, "which", lambda name: f"/usr/bin/{name}")
    found = gpu_suite.run_sanitizer(tmp_path, 60)
    assert (found["result"], found["passed"], found["failed"]) == ("passed", 20, 0)
    tools = [command[command.index("--tool") + 1] for command in ran if "--tool" in command]
    assert {tool: tools.count(tool) for tool in gpu_suite.TOOLS} == dict.fromkeys(
        gpu_suite.TOOLS, 5
    )
    for arguments in (["triton_rowblock"], ["inductor", "fp16"], ["inductor", "fp32"], ["cublas"]):
        own = [command for command in ran if command[-len(arguments) :] == arguments]
        assert ["--tool" in command for command in own] == [False, True, True, True, True]
    builds = [i for i, command in enumerate(ran) if "build" in command]
    runs = [i for i, command in enumerate(ran) if "run" in command]
    assert (len(builds), len(runs)) == (1, 4)
    assert builds[0] < runs[0]  # compiled before a tool looks

    broken = "fp32"
    found = gpu_suite.run_sanitizer(tmp_path, 60)
    assert (found["result"], found["passed"], found["failed"]) == ("failed", 16, 1)
    assert found["summary"] == "inductor fp32 without a tool: exit status 1 and no summary"


def test_rows_of_the_bench() -> None:
    rows = [
        {"kernel": k, "engine": "e", "n_depth": 128, "avg_ts": 100.0, "pct_read_bw": 50.0}
        for k in ("fused", "half2_block", "cublas")
    ]
    found = gpu_suite.bench_outcome(rows, Done(0, "", 1))
    assert found["result"] == "passed"
    assert "fused 100 tok/s" in found["summary"]
    assert gpu_suite.bench_outcome(rows[:2], Done(0, "", 1))["result"] == "failed"
    assert gpu_suite.bench_outcome([*rows[:2], {**rows[2], "avg_ts": None}], Done(0, "", 1))[
        "result"
    ] == ("failed")
    failed = gpu_suite.bench_outcome(rows, Done(3, "", 1), "kernel cublas is wrong")
    assert (failed["result"], failed["summary"]) == ("failed", "kernel cublas is wrong")


def test_a_command_and_its_children_end_at_the_limit(tmp_path: Path) -> None:
    began = time.monotonic()
    script = f"sleep 60 & echo $! > {tmp_path / 'child'}; echo begun; wait"
    done = gpu_suite.run(["bash", "-c", script], 1.0, tmp_path / "log")
    assert done.status is None
    assert "begun" in done.output
    assert time.monotonic() - began < 20
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and Path(f"/proc/{child}").exists():
        time.sleep(0.05)
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    before = (ROOT / "tests" / "gpu_receipt.json").read_bytes()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OUT": str(tmp_path)}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_suite.sh"), "tests"],
        env={**environment, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert "no CUDA GPU" in done.stderr
    assert not list(tmp_path.iterdir())
    assert (ROOT / "tests" / "gpu_receipt.json").read_bytes() == before


def test_unknown_parts_are_usage_errors() -> None:
    with pytest.raises(SystemExit) as caught:
        gpu_suite.main(["benhc"])
    assert caught.value.code == 2


# --- what the sanitizers look at ------------------------------------------------------------------


def test_every_kernel_file_is_called() -> None:
    called = {call.source for call in sanitize.calls()}
    cuda = sanitize.build.cuda_sources()
    assert called == {str(path.relative_to(cuda)) for path in cuda.glob("*/*.cu")}


def test_odd_shapes_are_called() -> None:
    assert set(itertools.product(check.ODD_N, check.ODD_K)) <= set(sanitize.GEMV_SHAPES)


def on_host(value: Any, buffers: list[Any]) -> Any:
    """An argument of a Call for the host shim; the arrays go to `buffers`."""
    if isinstance(value, sanitize.Shifted):
        size = value.array.itemsize
        storage = np.empty(value.array.size + value.by + 16, value.array.dtype)
        start = -storage.ctypes.data // size % (16 // size) + value.by
        placed = storage[start : start + value.array.size].reshape(value.array.shape)
        placed[...] = value.array
        value = placed
    if isinstance(value, np.ndarray):
        value = np.ascontiguousarray(value).copy() if not value.flags.writeable else value
        buffers.append(value)
        return value
    if isinstance(value, sanitize.Struct):
        fields: list[Any] = []
        for field in value.fields:
            if field is None or isinstance(field, np.ndarray):
                array = None if field is None else on_host(field, buffers)
                fields.append(ctypes.c_void_p(None if array is None else array.ctypes.data))
            else:
                number = ctypes.c_float if isinstance(field, float) else ctypes.c_int
                fields.append(number(field))
        return sanitize.structure(fields)
    return value


def output(call: sanitize.Call) -> Any:
    """The first array of which nothing is known before the call."""
    first = call.arguments[0]
    arguments = first.fields if isinstance(first, sanitize.Struct) else call.arguments
    floats = (a for a in arguments if isinstance(a, np.ndarray) and a.dtype.kind == "f")
    return next((array for array in floats if np.isnan(array).all()), np.zeros(1))


@needs.present(shim.unavailable())
def test_the_calls_are_right() -> None:
    """On the host shim: no status, no fault, and every output is written."""
    libraries: dict[str, shim.Runner] = {}
    for call in sanitize.calls():
        weights = [a.array for a in call.arguments if isinstance(a, sanitize.Shifted)]
        if any(array.size > 300_000 for array in weights):
            continue  # long to run here, and only more of the same
        if call.source not in libraries:
            libraries[call.source] = shim.host_library(shim.CUDA / call.source)
        written = output(call)
        buffers: list[Any] = []
        arguments = [on_host(argument, buffers) for argument in call.arguments]
        status = libraries[call.source].call(
            call.function, *arguments, shim.STREAM, buffers=buffers
        )
        assert status == 0 or (status == sanitize.NOT_SUPPORTED and call.may_refuse), call
        if status == 0:
            assert not np.isnan(written).any(), call
    for library in libraries.values():
        library.close()
