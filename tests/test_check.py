"""The gate: right kernels pass, and every kind of wrong kernel is refused for what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minidecode import cli
from minidecode.errors import MinidecodeError
from minidecode.kernels import registry
from minidecode.kernels.check import CheckReport, _Problem, check
from minidecode.records import CheckResult

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = ROOT / "tests" / "fixtures" / "hostile"

# What each must be refused for, wherever it is met first.
REFUSED_FOR = {
    "zeros": "is 0, not",
    "nan": "is NaN",
    "skips_last_row": "is NaN: not written",
    "previous_result": "relative error",
    "wrong_after_ten": "relative error",
    "one_past_the_end": "it wrote past the end of y",
    "nothing_for_odd_k": "is NaN: not written",
}


def check_function(
    tmp_path: Path, body: str, dtypes: tuple[str, ...] = ("fp16", "fp32"), **options: object
) -> CheckReport:
    """The report on a Python kernel with this body."""
    file = tmp_path / "kernel.py"
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    file.write_text(f"import torch\nDTYPES = {dtypes}\ndef f(y, w, x):\n{indented}\n")
    return check(registry.resolve(f"{file}:f"), "cpu", **options)  # type: ignore[arg-type]


def hostile(name: str) -> registry.Gemv:
    return registry.resolve(f"{HOSTILE / 'hostile.py'}:{name}")


# --- right kernels --------------------------------------------------------------------------------


def test_a_right_kernel_passes_every_case() -> None:
    seen: list[str] = []
    report = check(registry.gemvs()["torch"], "cpu", on_case=seen.append)
    assert report.passed, report.summary()
    assert len(seen) == len(report.cases) > 100
    assert {case.dtype for case in report.cases} == {"fp16", "fp32"}
    shapes = {(case.n, case.k) for case in report.cases}
    odd_k = (1, 2, 3, 7, 255, 257, 1056, 1152, 2049, 2176, 4095)
    assert {(n, k) for n in (1, 3, 1000) for k in odd_k} < shapes
    assert {(65536, 64), (128256, 64), (151936, 64), (49152, 576)} < shapes
    # Every odd length; and many rows, with a rest of either parity and none.
    off = {*((3, k) for k in odd_k), (1000, 257), (1000, 1056), (1000, 2049), (64, 4096)}
    for which in ("w", "x", "y", "w, x and y"):
        name = f"{which} one element off alignment"
        assert {(case.n, case.k) for case in report.cases if case.name == name} == off
    names = {case.name for case in report.cases}
    assert {
        "weights of 1e-4",
        "200 x ±200 in turn",
        "twenty calls with fresh inputs",
        "after being timed",
    } <= names
    assert all(case.rel_err is not None and case.rel_err < 1e-3 for case in report.cases)
    assert report.summary().startswith("kernel torch is right in ")


def test_a_kernel_may_refuse_shapes(tmp_path: Path) -> None:
    report = check_function(
        tmp_path,
        "if len(x) % 8: raise NotImplementedError\ntorch.mv(w, x, out=y)",
        ("fp32",),
        shapes=[(64, 7), (64, 8), (64, 9)],
    )
    assert report.passed, report.summary()
    refused = [case for case in report.cases if not case.supported]
    assert refused
    assert all(case.k % 8 for case in refused)
    assert f"{len(refused)} shapes not supported" in report.summary()


# --- wrong kernels --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED_FOR)
def test_hostile_kernels_are_refused(name: str) -> None:
    report = check(hostile(name), "cpu", stop_at_failure=True)
    assert not report.passed
    assert report.first_failure is not None
    assert REFUSED_FOR[name] in report.first_failure.message
    assert report.first_failure.label in report.summary()


@pytest.mark.parametrize("name", REFUSED_FOR)
def test_a_quick_check_of_one_shape_is_enough(name: str) -> None:
    """What runs before anything is timed: the shapes of a model only."""
    shapes = [(64, 33)] if name == "nothing_for_odd_k" else [(64, 32)]
    report = check(hostile(name), "cpu", dtypes=["fp16"], shapes=shapes)
    assert not report.passed
    assert any(REFUSED_FOR[name] in case.message for case in report.cases if not case.passed)


@pytest.mark.parametrize("name", ["right", "default_stream"])
def test_the_controls_pass(name: str) -> None:
    """On a CPU there is no stream to launch on wrongly."""
    report = check(hostile(name), "cpu", shapes=[(64, 32), (64, 33)])
    assert report.passed, report.summary()


RIGHT = "torch.mv(w, x, out=y)\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (RIGHT + "if len(y) > 9e5: y[777] = 0", "row 777 of 2000000 is 0, not"),
        (RIGHT + "if len(y) > 9e5: y[-1] = 0", "row 1999999 of 2000000 is 0, not"),
        (
            RIGHT + "y.as_strided((1,), (1,), y.storage_offset() - 1).fill_(1)",
            "before the start of y",
        ),
        (RIGHT + "x[0] = 0", "it changed x"),
        (RIGHT + "w[-1, -1] += 1", "it changed w"),
        (RIGHT + "w.as_strided((1,), (1,), w.storage_offset() + w.numel()).fill_(0)", "changed w"),
        (
            RIGHT + "y += 0 * x.as_strided((1,), (1,), x.storage_offset() + len(x))",
            "is NaN",
        ),
        ("y += w @ x", "is NaN"),
        (
            "t = (w * x).half()\nwhile t.shape[1] > 1:\n"
            "    h = t.shape[1] // 2\n"
            "    t = torch.cat([t[:, :h] + t[:, h:2 * h], t[:, 2 * h:]], 1)\n"
            "y.copy_(t[:, 0])",
            "is infinite|is NaN",
        ),
        (RIGHT + "if w.data_ptr() % 16: y[0] = 1e3", "one element off"),
        (RIGHT + "raise ValueError('boom')", "ValueError: boom"),
        (RIGHT + "raise NotImplementedError", "wrote something and said not supported"),
        ("raise NotImplementedError", "supports none"),
        (RIGHT + "if float(w.abs().max()) < 1e-2: y.zero_()", "weights of 1e-4.* is 0, not"),
    ],
    ids=[
        "one wrong row of many",
        "the last row of many",
        "writes before y",
        "changes x",
        "changes w",
        "writes behind w",
        "reads behind x",
        "adds to what y held",
        "sums in half",
        "unaligned weights",
        "raises",
        "writes and says not supported",
        "supports nothing",
        "only small weights",
    ],
)
def test_other_faults_are_refused(body: str, words: str, tmp_path: Path) -> None:
    # A norm over so many rows does not notice one that is wrong.
    shapes = [(64, 32), (64, 33), *([(2_000_000, 4)] if "len(y)" in body else [])]
    report = check_function(tmp_path, body, ("fp16",), shapes=shapes)
    assert not report.passed
    failures = "\n".join(f"{c.label}: {c.message}" for c in report.cases if not c.passed)
    assert re.search(words, failures), failures


def test_rows_whose_ones_fp16_could_not_add_up(tmp_path: Path) -> None:
    report = check_function(tmp_path, RIGHT, ("fp16",), shapes=[(4, 70_000)])
    assert report.passed, report.summary()


def test_what_there_is_no_memory_for_is_neither_right_nor_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gemv = registry.gemvs()["torch"]
    monkeypatch.setattr("minidecode.kernels.check.free_memory", lambda _: 50_000)
    shapes = [(64, 32), (400, 400)]
    report = check(gemv, "cpu", dtypes=["fp16"], shapes=shapes)
    assert report.passed
    assert report.summary().endswith(", 1 not run: too little memory")
    none = check(gemv, "cpu", dtypes=["fp16"], shapes=shapes[1:])
    assert not none.passed
    assert none.first_failure is None
    assert none.summary() == "kernel torch was not checked: too little memory"
    with pytest.raises(MinidecodeError, match="was not checked"):
        none.require()


def test_no_case_at_all_is_no_pass() -> None:
    assert not check(registry.gemvs()["torch"], "cpu", dtypes=()).passed


def test_a_kernel_that_loses_digits_is_refused_in_fp32(tmp_path: Path) -> None:
    """As TF32 or a half accumulator would; the same digits are enough for FP16."""
    body = "y.copy_(torch.mv(w.half().float(), x.float()))"
    assert check_function(tmp_path, body, ("fp16",), shapes=[(64, 32)]).passed
    assert not check_function(tmp_path, body, ("fp32",), shapes=[(64, 32)]).passed


def test_a_kernel_that_cannot_be_built_is_one_failed_case(tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text("import no_such_module\ndef f(y, w, x): ...\n")
    report = check(registry.resolve(f"{tmp_path / 'k.py'}:f"), "cpu")
    assert [case.name for case in report.cases] == ["build"]
    assert not report.passed
    assert "no_such_module" in report.summary()


# --- the command ----------------------------------------------------------------------------------


def test_command_passes_a_right_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kernels", "check", "torch", "--dtype", "fp16", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("torch: right in ")
    assert err == ""


@pytest.mark.parametrize("name", ["zeros", "nan", "skips_last_row"])
def test_command_refuses_a_wrong_kernel(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = f"{HOSTILE / 'hostile.py'}:{name}"
    assert cli.main(["kernels", "check", spec, "--dtype", "fp16", "--device", "cpu"]) == 3
    out, err = capsys.readouterr()
    assert "WRONG in " in out
    assert "more" in out
    assert len(err.splitlines()) == 1
    assert "odd shape, 1x1 fp16" in err
    assert all(line.count("relative error") <= 1 for line in out.splitlines())


def test_command_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["kernels", "check", "all", "--dtype", "fp32", "--device", "cpu", "--json"]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    (document,) = json.loads(out)
    assert "minidecode: cublas: not checked: kernel cublas needs a cuda device" in err
    assert "minidecode: half2_block: not checked: kernel half2_block has no fp32" in err
    result = CheckResult.from_dict(document)
    assert result.passed
    assert len(result.cases) > 50
    assert {"schema_version", "environment"} <= set(document)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nonsense"], 2, "unknown kernel 'nonsense'"),
        (["torch", "all"], 2, "all stands alone"),
        (["torch", "fused"], 2, "fused is an engine"),
        (["/gone/k.cu"], 2, "no such kernel file"),
        (["naive", "--device", "cpu"], 5, "kernel naive needs a cuda device"),
        (["half2_block", "--dtype", "fp32", "--device", "cpu"], 2, "has no fp32"),
    ],
)
def test_command_used_wrongly_is_one_line(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["kernels", "check", *arguments]) == code
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_a_file_that_does_not_import_is_no_wrong_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "k.py").write_text("import no_such_module\ndef f(y, w, x): ...\n")
    assert cli.main(["kernels", "check", f"{tmp_path / 'k.py'}:f", "--device", "cpu"]) == 1
    assert "k.py:1: ModuleNotFoundError" in capsys.readouterr().err


def test_what_cannot_be_built_does_not_end_the_check_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "k.py").write_text("import no_such_module\ndef f(y, w, x): ...\n")
    broken, zeros = f"{tmp_path / 'k.py'}:f", f"{HOSTILE / 'hostile.py'}:zeros"
    asked = ["--dtype", "fp16", "--device", "cpu", "--json"]
    assert cli.main(["kernels", "check", broken, "torch", *asked]) == 1
    out, err = capsys.readouterr()
    assert [document["passed"] for document in json.loads(out)] == [True]
    assert "k.py:1: ModuleNotFoundError" in err
    assert cli.main(["kernels", "check", zeros, broken, "torch", *asked]) == 3
    out, err = capsys.readouterr()
    assert [document["passed"] for document in json.loads(out)] == [False, True]
    assert re.search(r"k\.py:1: ModuleNotFoundError.*\n.*zeros is wrong", err)


@pytest.mark.parametrize(("share", "right"), [(1e-5, True), (3e-5, False)])
def test_a_sum_that_cancels_is_judged_by_its_size_by_chance(share: float, right: bool) -> None:
    problem = _Problem((1, 2176), "fp32", torch.device("cpu"), 0)
    problem.w[0, 0] -= problem.reference[0] / problem.x[0]
    problem.settle()
    size = float(problem.row_scale)
    assert abs(float(problem.reference)) < 1e-6 * size
    problem.y.copy_(problem.reference + share * size)
    relative, fault = problem.fault()
    assert relative is not None
    assert relative > 1
    assert (fault == "") is right


# --- on a GPU -------------------------------------------------------------------------------------

CUDA_REFUSED_FOR = {**REFUSED_FOR, "default_stream": "on a side stream"}


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(registry.gemvs()))
def test_every_built_in_kernel_passes(name: str) -> None:
    gemv = registry.gemvs()[name]
    # Inductor compiles anew for each shape and alignment, so it gets one shape of each kind.
    shapes = [(1000, 1056), (1, 1), (1000, 257), (65536, 64), (2048, 8192)]
    report = check(gemv, "cuda", shapes=shapes if name == "inductor" else None)
    assert report.passed, report.summary()
    assert any(case.name == "in a captured graph with changed inputs" for case in report.cases)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUDA_REFUSED_FOR)
@pytest.mark.parametrize("suffix", [".cu", ".py"])
def test_hostile_kernels_are_refused_on_the_gpu(name: str, suffix: str) -> None:
    gemv = hostile(name) if suffix == ".py" else registry.resolve(str(HOSTILE / f"{name}.cu"))
    report = check(gemv, "cuda", dtypes=["fp16"], stop_at_failure=True)
    assert not report.passed
    assert CUDA_REFUSED_FOR[name] in report.summary()


@pytest.mark.gpu
def test_the_control_passes_on_the_gpu() -> None:
    report = check(registry.resolve(str(HOSTILE / "right.cu")), "cuda")
    assert report.passed, report.summary()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["zeros", "default_stream"])
def test_command_refuses_a_wrong_cuda_file(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minidecode", "kernels", "check", str(HOSTILE / f"{name}.cu")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
def test_an_illegal_access_ends_the_check_and_not_the_program(tmp_path: Path) -> None:
    """After such a fault the process cannot use the GPU again, so it has one of its own."""
    file = tmp_path / "wild.cu"
    file.write_text(
        "#include <minidecode/abi.cuh>\n"
        "__global__ void wild(half* y) { y[size_t(threadIdx.x + 1) << 40] = y[0]; }\n"
        'extern "C" cudaError_t minidecode_gemv(half* y, const half*, const half*, int, int,\n'
        "                                       cudaStream_t stream) {\n"
        "  wild<<<1, 1, 0, stream>>>(y);\n  return cudaGetLastError();\n}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "minidecode", "kernels", "check", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert "illegal" in done.stderr
