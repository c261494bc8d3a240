"""The `gemv` command on the CPU: what it takes, what it prints, what it refuses to time."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib.util
import io
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny
import torch
from report_samples import gemv_report

from minidecode import cli
from minidecode.bench import device as machine
from minidecode.bench import gemv as bench
from minidecode.bench import occupancy, timer
from minidecode.bench.gemv import Problem, Reads, filled
from minidecode.bench.occupancy import Launch, Multiprocessor, theoretical
from minidecode.cli import gemv as command
from minidecode.errors import MinidecodeError, MissingError
from minidecode.kernels import registry
from minidecode.kernels.ops import gemv_bytes
from minidecode.records import GemvReport
from minidecode.report import writer

ROOT = Path(__file__).parent.parent
READ_US = 5.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of tiny caches, whose reads are known; one thread, since others may be busy."""
    monkeypatch.setattr(timer, "_cpu_cache_bytes", lambda: 1 << 16)
    monkeypatch.setattr(machine, "read_bandwidth", lambda _: 1e6)
    monkeypatch.setattr(machine, "read_us", lambda _, n_bytes: READ_US)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `minidecode gemv` with these arguments."""
    code = cli.main(["gemv", "--device", "cpu", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def kernel_file(folder: Path, body: str) -> str:
    """A Python kernel `f` with this body, as `--kernel` takes it."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    path = folder / "mine.py"
    path.write_text(f"import torch\n\ncalls = []\n\ndef f(y, w, x):\n{lines}\n")
    return f"{path}:f"


# --- what it takes --------------------------------------------------------------------------------


def parse(*arguments: str) -> argparse.Namespace:
    return cli._parser(["gemv", *arguments]).parse_args(["gemv", *arguments])


def test_defaults() -> None:
    args = parse()
    assert (args.n, args.shapes, args.model, args.kernel) == (None, None, None, "all")
    assert (args.dtype, args.output, args.png) == ("fp16", None, None)
    assert command.SIZES == (1024, 2048, 4096, 8192)


def test_sizes_and_shapes() -> None:
    assert parse("--n", "64, 8192").n == [64, 8192]
    assert parse("--shapes", "49152x576,1×3").shapes == [(49152, 576), (1, 3)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--n", "0"],
        ["--n", "12,"],
        ["--n", "1e3"],
        ["--n", "2147483648"],
        ["--shapes", "2147483648x1"],
        ["--shapes", "64"],
        ["--shapes", "64x"],
        ["--shapes", "64x64x64"],
        ["--shapes", "-64x64"],
        ["--n", "64", "--shapes", "64x64"],
        ["--n", "64", "-m", "synthetic:llama-3.2-1b"],
        ["--dtype", "bf16"],
        ["-o", "png"],
    ],
    ids=" ".join,
)
def test_a_command_line_that_cannot_be_parsed(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["gemv", *arguments])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kernel", "naiv"], "did you mean naive"),
        (["--kernel", "torch,all"], "--kernel"),
        (["--kernel", ","], "--kernel"),
        (["--kernel", "half2_block", "--dtype", "fp32"], "half2_block has no fp32"),
        (["-m", "synthetic:gpt-5"], "llama-3.2-1b"),
        (["--png", "/no/such/folder/p.png"], "/no/such/folder"),
    ],
)
def test_usage_errors_come_before_torch_is_imported(arguments: list[str], said: str) -> None:
    code = f"""
import sys
from minidecode.cli import main
code = main({["gemv", *arguments]!r})
sys.exit(99 if "torch" in sys.modules else code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_kernel_of_another_device_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--kernel", "torch,naive", "--n", "8")
    assert (code, out) == (5, "")
    assert "naive needs a cuda device" in err


def test_all_is_what_the_device_has() -> None:
    assert command._named("all", ("fp16",)) is None
    assert [gemv.name for gemv in command._on("cpu", None, ("fp16",))] == ["torch"]
    on_cuda = [gemv.name for gemv in command._on("cuda", None, ("fp16",))]
    assert set(on_cuda) == set(registry.gemvs())
    assert "half2_block" not in [gemv.name for gemv in command._on("cuda", None, ("fp32",))]


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    monkeypatch.setattr(bench, "measure", lambda *_, **__: pytest.fail("it was measured"))
    code, out, err = run(capsys, "--n", "8", "--png", str(tmp_path / "p.png"))
    assert (code, out) == (5, "")
    assert "matplotlib" in err


# --- shapes of models -----------------------------------------------------------------------------


def test_shapes_of_a_model_are_its_linear_layers() -> None:
    assert command._model_shapes("synthetic:llama-3.2-1b") == [
        (3072, 2048),
        (2048, 2048),
        (16384, 2048),
        (2048, 8192),
        (128256, 2048),
    ]
    # q is wider than the hidden size there: o is not square.
    assert (1024, 2048) in command._model_shapes("synthetic:qwen3-0.6b")


def test_shapes_of_the_example_need_no_example() -> None:
    assert command._model_shapes("example") == command._model_shapes("synthetic:smollm2-135m")


def test_shapes_of_a_directory_need_no_weights(tmp_path: Path) -> None:
    tiny.build(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert command._model_shapes(str(tmp_path)) == [
        (128, 64),
        (64, 64),
        (224, 64),
        (64, 112),
        (97, 64),
    ]


def test_a_hub_model_gives_its_config_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    tiny.build(tmp_path)
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert (97, 64) in command._model_shapes("owner/name")
    assert (asked["repo"], asked["allow_patterns"]) == ("owner/name", ["config.json"])


def test_no_such_model() -> None:
    for spec in ("nonsense", "/nonexistent", "./nothere"):
        with pytest.raises(MinidecodeError, match=f"no model '{spec}'"):
            command._model_shapes(spec)


# --- what it prints -------------------------------------------------------------------------------


def test_json_is_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys, "--shapes", "96x128,64x40", "--dtype", "both", "-o", "json", "--kernel", "torch"
    )
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["schema_version"] == 1
    report = GemvReport.from_dict(document)
    assert report.to_dict() == document
    assert report.environment.device == "cpu"
    assert report.read_bw_gb_s == 1e6
    rows = report.rows
    assert [(r.kernel, r.n, r.k, r.dtype) for r in rows] == [
        ("torch", 96, 128, "fp32"),
        ("torch", 64, 40, "fp32"),
        ("torch", 96, 128, "fp16"),
        ("torch", 64, 40, "fp16"),
    ]
    for row in rows:
        assert row.bytes == gemv_bytes(row.n, row.k, row.dtype)
        assert row.median_us is not None
        assert row.median_us > 0
        assert row.gb_s == pytest.approx(row.bytes / row.median_us / 1e3)
        assert row.read_us == READ_US
        assert row.pct_of_read == pytest.approx(100 * READ_US / row.median_us)
        assert row.rel_err is not None
        assert 0 < row.rel_err < (1e-3 if row.dtype == "fp16" else 2e-5)
        assert (row.vs_cublas, row.occupancy, row.reason) == (None, None, None)
        assert not row.served_from_cache


def test_the_command_in_the_record_repeats_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--n", "40", "-o", "json")
    words = json.loads(out)["command"].split()
    assert words[:2] == ["minidecode", "gemv"]
    again = parse(*words[2:])
    assert (again.n, again.kernel, again.dtype, again.device) == ([40], "all", "fp16", "cpu")


def test_a_shape_given_twice_is_measured_once(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--shapes", "40x40,40x40", "-o", "csv")
    assert len(list(csv.DictReader(io.StringIO(out)))) == 1


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    _, markdown, _ = run(capsys, "--n", "48")  # stdout is no terminal
    assert "| torch  | 48 × 48 | fp16  |" in markdown
    _, text, _ = run(capsys, "--n", "48", "-o", "txt")
    assert "48×48" in text
    assert "\x1b" not in text
    _, table, _ = run(capsys, "--n", "48", "-o", "csv")
    (row,) = csv.DictReader(io.StringIO(table))
    assert (row["kernel"], row["n"], row["served_from_cache"]) == ("torch", "48", "False")


def test_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "gemv.png"
    code, out, _ = run(capsys, "--n", "48,64", "--png", str(path))
    assert code == 0
    assert "64 × 64" in out
    assert path.read_bytes().startswith(b"\x89PNG")


# --- from a cache ---------------------------------------------------------------------------------

SQUARE = Problem(1000, 1000, "fp16")  # 2.004 MB


@pytest.mark.parametrize(
    ("us", "read_us", "ceiling_gb_s", "cached"),
    [
        (1.95, 2.5, 1000.0, True),  # 1028 GB/s, and no read was as fast
        (1.98, 2.5, 1000.0, False),  # 1012 GB/s: the ceiling may be off by as much
        (2.1, 2.5, 1000.0, False),  # 954 GB/s: faster than the same read, yet no faster than memory
        (1.9, 1.8, 1000.0, False),  # 1055 GB/s, but the read of the same bytes was faster still
        (1.7, 1.8, 1000.0, True),
        (1.7, 1.8, None, True),
        (1.9, 1.8, None, False),
        (1.9, None, 1000.0, True),
        (1e-3, None, None, False),  # nothing to compare with
    ],
)
def test_faster_than_memory_is_from_a_cache(
    us: float, read_us: float | None, ceiling_gb_s: float | None, cached: bool
) -> None:
    row = filled("k", SQUARE, us, Reads(read_us, ceiling_gb_s))
    assert row.served_from_cache is cached
    assert row.gb_s == pytest.approx(2004 / us)
    assert row.pct_of_read == (None if read_us is None else pytest.approx(100 * read_us / us))


def test_a_share_above_100_percent_is_never_shown_without_a_word() -> None:
    row = filled("k", SQUARE, 1.98, Reads(2.0, 1000.0))
    assert not row.served_from_cache
    report = gemv_report(rows=[row])
    for style in ("md", "txt"):
        shown = writer(style, "gemv")(report)
        assert "101.0" in shown
        assert "above 100 %" in shown


def test_a_cpus_ceiling_is_less_certain() -> None:
    assert filled("k", SQUARE, 1.8, Reads(2.5, 1000.0)).served_from_cache
    assert not filled("k", SQUARE, 1.8, Reads(2.5, 1000.0, error=0.25)).served_from_cache


def test_a_cached_result_is_shown_as_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "read_bandwidth", lambda _: 1e-6)
    monkeypatch.setattr(machine, "read_us", lambda _, n_bytes: 1e9)
    _, out, _ = run(capsys, "--n", "64", "-o", "md")
    (line,) = (line for line in out.splitlines() if line.startswith("| torch"))
    assert [cell.strip() for cell in line.split("|")][7] == "cache"
    assert "the weights came out of a cache" in out
    _, out, _ = run(capsys, "--n", "64", "-o", "json")
    (row,) = json.loads(out)["rows"]
    assert row["served_from_cache"] is True


def test_speed_against_the_baseline() -> None:
    row = filled("k", SQUARE, 2.0, Reads(1.9, 2000.0), baseline_us=3.0)
    assert row.vs_cublas == 1.5
    assert filled("k", SQUARE, 2.0, Reads(1.9, 2000.0)).vs_cublas is None


def test_the_baseline_is_timed_though_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = registry.gemvs()["torch"]
    stand_in = dataclasses.replace(torchs, name="cublas")
    monkeypatch.setattr(registry, "gemvs", lambda: {"cublas": stand_in})
    report = bench.measure([torchs], [(64, 64)], ["fp32"], "cpu", command="")
    (row,) = report.rows
    assert row.kernel == "torch"
    assert row.vs_cublas is not None
    report = bench.measure([stand_in, torchs], [(64, 64)], ["fp32"], "cpu", command="")
    assert [row.kernel for row in report.rows] == ["cublas", "torch"]
    assert report.rows[0].vs_cublas == 1.0


def test_weights_that_all_fit_the_cache_have_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "_cpu_cache_bytes", lambda: 1 << 30)
    copies, cold = bench._copies(Problem(3, 5, "fp16"), torch.device("cpu"))
    assert (copies, cold) == (4096, False)
    row = filled("k", Problem(3, 5, "fp16"), 2.0, Reads(None, 1000.0, cold))
    assert row.pct_of_read is None
    assert row.reason is not None
    assert "too small" in row.reason


def test_large_weights_are_rotated_beyond_the_cache() -> None:
    copies, cold = bench._copies(Problem(64, 64, "fp32"), torch.device("cpu"))
    assert (copies, cold) == (16, True)
    assert copies * 64 * 64 * 4 == 4 * timer.cache_bytes("cpu")


# --- what it refuses to time ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("y.zero_()", "shape, 64x48 fp16: relative error 1.0e+00"),
        ("y.fill_(float('nan'))", "is NaN"),
        ("torch.mv(w[:-1], x, out=y[:-1])", "row 63 of 64 is NaN"),
        ("raise ValueError('broken inside')", "broken inside"),
    ],
)
def test_a_wrong_kernel_has_no_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, body: str, said: str
) -> None:
    spec = kernel_file(tmp_path, body)
    code, out, err = run(capsys, "--kernel", f"torch,{spec}", "--shapes", "64x48", "-o", "json")
    assert (code, out) == (3, "")
    assert err.count("\n") == 1
    assert "mine.py:f is wrong" in err
    assert said in err


def test_a_kernel_that_goes_wrong_while_timed_has_no_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = kernel_file(tmp_path, "calls.append(1)\nif len(calls) < 500:\n    torch.mv(w, x, out=y)")
    code, out, err = run(capsys, "--kernel", spec, "--shapes", "64x48")
    assert (code, out) == (3, "")
    assert "wrong after being timed: 64x48 fp16: row 0 of 64 is nan" in err


def test_one_wrong_row_in_one_copy_is_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The error of a single row among all the outputs hardly moves their norm."""
    spec = kernel_file(
        tmp_path,
        "torch.mv(w, x, out=y)\ncalls.append(1)\nif len(calls) > 500:\n    y[17] *= 1.02",
    )
    code, out, err = run(capsys, "--kernel", spec, "--shapes", "2000x48")
    assert (code, out) == (3, "")
    assert "row 17 of 2000 is" in err


def test_a_shape_that_a_kernel_refuses_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = kernel_file(
        tmp_path, "if len(y) == 64:\n    raise NotImplementedError\ntorch.mv(w, x, out=y)"
    )
    for shapes, times in (("64x48,32x48", 1), ("64x48", 0)):
        code, out, err = run(capsys, "--kernel", spec, "--shapes", shapes, "-o", "json")
        assert code == (0 if times else 1)
        assert ("nothing was measured: " in err) == (not times)
        rows = json.loads(out)["rows"]
        assert rows[0]["median_us"] is None
        assert "does not support n=64, k=48" in rows[0]["reason"]
        assert sum(row["median_us"] is not None for row in rows) == times


def test_what_does_not_fit_in_memory_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_device: object, n_bytes: int) -> float:
        if n_bytes > 10_000:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")
        return READ_US

    monkeypatch.setattr(machine, "read_us", fail)
    code, out, _ = run(capsys, "--n", "32,96", "-o", "json")
    assert code == 0
    small, large = json.loads(out)["rows"]
    assert small["median_us"] > 0
    assert large["median_us"] is None
    assert large["reason"] == "too little memory for 96x96 fp16"


@pytest.mark.usefixtures("example_dir")
def test_the_example_s_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "-m", "example", "--kernel", "torch", "-o", "json")
    assert code == 0
    rows = json.loads(out)["rows"]
    shapes = {(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)}
    assert {(row["n"], row["k"]) for row in rows} == shapes
    assert all(row["median_us"] > 0 for row in rows)


def test_a_shape_that_no_memory_holds_leaves_the_others_their_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, "--shapes", "32x32,1000000x1000000", "-o", "json")
    assert code == 0
    small, large = json.loads(out)["rows"]
    assert small["median_us"] > 0
    assert large["reason"] == "not run: too little memory"


def test_other_failures_are_not_taken_for_a_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_device: object, n_bytes: int) -> float:
        raise RuntimeError("something else")

    monkeypatch.setattr(machine, "read_us", fail)
    with pytest.raises(RuntimeError, match="something else"):
        bench.measure([registry.gemvs()["torch"]], [(8, 8)], ["fp32"], "cpu", command="")


def test_a_kernel_that_cannot_run_here_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gemv = registry.gemvs()["torch"]
    monkeypatch.setattr(type(gemv), "unavailable", lambda self: "no such luck")
    report = bench.measure([gemv], [(8, 8)], ["fp32"], "cpu", command="")
    (row,) = report.rows
    assert (row.median_us, row.reason) == (None, "no such luck")


def test_no_compiler_for_the_read_kernel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> float:
        raise MissingError("no nvcc")

    monkeypatch.setattr(machine, "read_bandwidth", missing)
    monkeypatch.setattr(machine, "read_us", missing)
    code, out, err = run(capsys, "--n", "64", "-o", "json")
    assert code == 0
    assert "no read ceiling" in err
    document = json.loads(out)
    assert document["read_bw_gb_s"] is None
    (row,) = document["rows"]
    assert row["median_us"] > 0
    assert (row["read_us"], row["pct_of_read"]) == (None, None)


# --- occupancy ------------------------------------------------------------------------------------

H200 = Multiprocessor(2048, 32, 65536, 233472, 1024)
T4 = Multiprocessor(1024, 16, 65536, 65536)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "sm", "expected"),
    [
        (256, 32, 0, H200, 1.0),
        (256, 33, 0, H200, 0.75),  # 40 registers: 12 warps a quarter, 6 blocks of 8
        (512, 64, 512, H200, 0.5),
        (256, 85, 256, H200, 0.25),  # 88 registers: 5 warps a quarter, 2 blocks of 8
        (192, 85, 256, H200, 18 / 64),
        (256, 56, 65536 + 384, H200, 24 / 64),  # 3 blocks by shared memory
        (32, 16, 0, H200, 0.5),  # 32 blocks of a warp
        (1024, 64, 0, H200, 0.5),
        (1000, 32, 0, H200, 1.0),  # a block takes whole warps
        (1024, 128, 0, H200, 0.0),  # cannot run at all: 16 warps of 32
        (256, 32, 0, T4, 1.0),
        (32, 16, 0, T4, 0.5),
        (256, 32, 33000, T4, 0.25),
    ],
)
def test_theoretical_occupancy(
    threads: int, registers: int, shared: int, sm: Multiprocessor, expected: float
) -> None:
    assert theoretical(Launch("k", threads, registers, shared, 1.0), sm) == expected


def test_launches_are_read_off_a_trace() -> None:
    def event(cat: str, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": f"a {cat}", "dur": 2.5, "args": args}

    kernel = {"registers per thread": 40, "shared memory": 512, "block": [32, 8, 1]}
    trace = {"traceEvents": [event("kernel", **kernel), event("gpu_memset"), {"ph": "M"}]}
    assert occupancy.launches_of(trace) == [Launch("a kernel", 256, 40, 512, 2.5)]


def test_occupancy_is_that_of_the_longest_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = Launch("reduce", 256, 32, 0, 1.0), Launch("gemv", 512, 64, 0, 9.0)
    sessions = iter([[], [short, long]])  # the first may be lost
    monkeypatch.setattr(occupancy, "multiprocessor", lambda _: H200)
    monkeypatch.setattr(occupancy, "_profiled", lambda call, device: next(sessions))
    assert occupancy.of_call(lambda: None, torch.device("cuda", 0)) == 0.5
    monkeypatch.setattr(occupancy, "_profiled", lambda call, device: [])
    assert occupancy.of_call(lambda: None, torch.device("cuda", 0)) is None
    monkeypatch.setattr(occupancy, "multiprocessor", lambda _: None)
    assert occupancy.of_call(lambda: None, torch.device("cuda", 0)) is None


def test_occupancy_is_added_to_the_rows_of_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = []

    def of_call(call: Callable[[], None], device: torch.device) -> float:
        call()
        ran.append(device)
        return 0.75

    monkeypatch.setattr(occupancy, "of_call", of_call)
    problem = Problem(8, 16, "fp16")
    rows = {(name, problem): filled(name, problem, 1.0, Reads(1.0, 1e3)) for name in ("torch", "b")}
    cpu = torch.device("cpu")
    bench._fill_occupancy(rows, {"torch": registry.gemvs()["torch"]}, cpu)
    assert rows["torch", problem].occupancy == 0.75
    assert rows["torch", problem].median_us == 1.0
    assert rows["b", problem].occupancy is None
    assert ran == [cpu]


# --- scripts/ncu_driver.py ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ncu_driver", ROOT / "scripts" / "ncu_driver.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ncu_driver"] = module
    spec.loader.exec_module(module)
    return module


def ncu_log(driver: ModuleType, rows: Sequence[tuple[str, float, float, float]]) -> str:
    """What `ncu --csv --page raw` writes of launches (name, DRAM %, warps %, ns)."""
    out = io.StringIO()
    table = csv.writer(out, quoting=csv.QUOTE_ALL)
    table.writerow(["ID", "Kernel Name", driver.DRAM, driver.TIME, driver.WARPS])
    table.writerow(["", "", "%", "ns", "%"])
    for i, (name, dram, warps, ns) in enumerate(rows):
        table.writerow([i, name, dram, f"{ns:,.2f}", warps])
    return f"==PROF== Connected to process 7 (python)\n{out.getvalue()}"


def test_tables_of_an_ncu_log(driver: ModuleType) -> None:
    spin = ("at::cuda::(anonymous namespace)::spin_kernel(long)", 0.01, 1.5, 900.0)
    log = ncu_log(
        driver,
        [
            spin,
            ("gemv_naive<float>", 4.83, 12.5, 401_000.0),
            spin,
            ("gemv_splitk", 90.0, 80.0, 3_000.0),
            ("reduce", 10.0, 40.0, 1_000.0),
            spin,
            ("gemv_naive<float>", 9.35, 25.0, 567_000.0),
            spin,
            ("gemv", 95.0, 60.0, 7_000.0),
        ],
    )
    calls = [driver.Call(kernel, n, "fp32") for n in (1024, 2048) for kernel in ("naive", "cublas")]
    head = "| n | naive | cublas |\n|---:|---:|---:|\n"
    assert driver.tables(calls, log) == (
        "fp32: DRAM throughput, % of peak\n\n"
        f"{head}| 1024 | 4.83 | 70.00 |\n| 2048 | 9.35 | 95.00 |\n"
        "\nfp32: achieved occupancy, %\n\n"
        f"{head}| 1024 | 12.50 | 70.00 |\n| 2048 | 25.00 | 60.00 |\n"
        "\nfp32: time, µs\n\n"
        f"{head}| 1024 | 401.00 | 4.00 |\n| 2048 | 567.00 | 7.00 |\n"
    )
    assert "commit" in driver.heading()


def test_an_ncu_log_that_lacks_calls(driver: ModuleType) -> None:
    log = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n"
    with pytest.raises(MinidecodeError, match="0 calls of 1") as error:
        driver.tables([driver.Call("naive", 1024, "fp32")], log)
    assert "ERR_NVGPUCTRPERM" in str(error.value)


def test_a_call_without_launches_has_no_numbers(driver: ModuleType) -> None:
    assert all(map(math.isnan, driver._weighted([])))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_the_driver_needs_a_gpu(
    driver: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert driver.main(["run", str(tmp_path / "order.json")]) == 5
    assert "no CUDA GPU" in capsys.readouterr().err


def test_ncu_missing_is_told(tmp_path: Path) -> None:
    done = subprocess.run(
        ["/bin/bash", ROOT / "scripts" / "ncu.sh"],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path), "PYTHON": sys.executable},
    )
    assert done.returncode == 5
