"""The layer report: profiler records onto ops, two plans side by side, and the command on a CPU."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_samples import environment

import minidecode
from minidecode import cli, example
from minidecode.bench import layers, steps
from minidecode.bench.layers import Activity, OpTimes, StepTimes
from minidecode.cli import outputs
from minidecode.decode import STEPS_PER_GRAPH
from minidecode.errors import MinidecodeError, MissingError
from minidecode.plan import kernel_set
from minidecode.records import LayerReport

pytestmark = pytest.mark.usefixtures("quick_measuring")
HOSTILE = Path(__file__).parent / "fixtures" / "hostile" / "hostile.py"
SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"


# --- records of the profiler ----------------------------------------------------------------------


def event(name: str, ts: float, dur: float, cat: str = "kernel", ph: str = "X") -> dict[str, Any]:
    return {"ph": ph, "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur}


def test_only_what_ran_on_the_gpu_is_read_in_the_order_of_its_start() -> None:
    trace = {
        "traceEvents": [
            event("late", 20.5, 1.25),
            event("cudaGraphLaunch", 1.0, 30.0, "cuda_runtime"),
            event("early", 10.5, 20.0),
            event("Memset (Device)", 12.0, 0.5, "gpu_memset"),
            event("Memcpy DtoD (Device -> Device)", 13.0, 0.5, "gpu_memcpy"),
            event("aten::mm", 2.0, 1.0, "cpu_op"),
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 1.0},
        ]
    }
    assert layers.activities(json.dumps(trace)) == [
        Activity("early", 0.0, 20.0),
        Activity("Memset (Device)", 1.5, 2.0),
        Activity("Memcpy DtoD (Device -> Device)", 2.5, 3.0),
        Activity("late", 10.0, 11.25),
    ]
    assert layers.activities('{"traceEvents": []}') == []


def test_nanoseconds_survive_a_clock_that_counts_from_1970() -> None:
    trace = (
        '{"traceEvents": ['
        '{"ph": "X", "cat": "kernel", "name": "a", "ts": 1764478800123456.001, "dur": 1.004},'
        '{"ph": "X", "cat": "kernel", "name": "b", "ts": 1764478800123457.008, "dur": 2}]}'
    )
    a, b = layers.activities(trace)
    assert (a.start, a.end) == (0.0, pytest.approx(1.004, abs=1e-9))
    assert (b.start, b.end) == (pytest.approx(1.007, abs=1e-9), pytest.approx(3.007, abs=1e-9))


class Gpu:
    """Makes records as a GPU would: kernels in order, each starting before the last has ended."""

    def __init__(self) -> None:
        self.records: list[Activity] = []
        self.now = 100.0

    def mark(self) -> None:
        self.run(SPIN, 2.0)

    def run(self, name: str, us: float, early: float = 0.0, gap: float = 0.0) -> None:
        """A kernel that completes `us` after the last one, having started `early` before that."""
        start = self.now + gap - early
        self.now += gap + us
        self.records.append(Activity(name, start, self.now))


# An op list of three: one kernel, two kernels, none.
KERNELS = ("void ns::qkv<8>(half*)",), ("splitk", "reduce"), ()


def alone_records(passes: int) -> list[Activity]:
    gpu = Gpu()
    for turn in range(passes):
        gpu.run("fill", 1.0)
        for op, names in enumerate(KERNELS):
            gpu.run("evict", 80.0)
            gpu.mark()
            for name in names:
                gpu.run(name, 10.0 * (op + 1) + turn, gap=0.5)
            gpu.mark()
    return gpu.records


def test_each_op_s_kernels_and_time_alone() -> None:
    rows = layers.alone_times(alone_records(passes=3), 3)
    assert [row.kernels for row in rows] == list(KERNELS)
    assert rows[0].alone == pytest.approx([11.0, 12.0])  # the first pass warms up
    assert rows[1].alone == pytest.approx([42.5, 44.5])
    assert rows[2].alone == []


def test_lost_records_are_noticed() -> None:
    records = alone_records(passes=3)
    markers = [i for i, activity in enumerate(records) if layers.MARKER in activity.name]
    del records[markers[-1] : markers[-1] + 1], records[markers[4] : markers[4] + 1]
    with pytest.raises(MinidecodeError, match="lost records"):
        layers.alone_times(records, 3)
    with pytest.raises(MinidecodeError, match="lost records"):
        layers.alone_times([], 3)


def steps_records(spans: int, times: Sequence[float], early: float = 1.5) -> list[Activity]:
    """Spans of a lead of 2 steps and 2 that count, of the kernels above, each begun early."""
    gpu = Gpu()
    names = [name for op in KERNELS for name in op]
    for _ in range(spans):
        gpu.run("copy", 1.0)
        gpu.mark()
        for graph in range(2):
            for step in range(2):
                first = graph > 0 and step == 0
                for i, (name, us) in enumerate(zip(names, times, strict=True)):
                    gpu.run(name, us, early=0.0 if first and i == 0 else early, gap=3.0 * first)
                    first = False
        gpu.mark()
    return gpu.records


def test_exposed_times_add_up_whatever_overlaps() -> None:
    rows = layers.step_times(steps_records(5, [4.0, 6.0, 1.0]), [1, 2, 0], 2)
    assert [row.kernels for row in rows] == list(KERNELS)
    qkv, split, nothing = rows
    assert len(qkv.exposed) == len(split.exposed) == len(nothing.exposed) == 10
    assert sorted(qkv.exposed) == pytest.approx(
        [4.0] * 5 + [7.0] * 5
    )  # with the gap before a graph
    assert split.exposed == pytest.approx([7.0] * 10)
    assert nothing.exposed == [0.0] * 10
    assert nothing.duration == []
    assert max(qkv.duration) == pytest.approx(5.5)
    assert split.duration == pytest.approx([8.5] * 10)
    total = sum(sum(row.exposed) for row in rows)
    assert total == pytest.approx(5 * (2 * 11.0 + 3.0))


def test_a_kernel_that_ends_within_the_one_before_takes_no_time() -> None:
    gpu = Gpu()
    gpu.mark()
    gpu.run("lead", 1.0)
    gpu.run("long", 10.0)
    gpu.records.append(Activity("short", gpu.now - 5, gpu.now - 2))
    gpu.mark()
    long, short = layers.step_times(gpu.records, [1, 1], 1)
    assert long.exposed == [10.0]
    assert short.exposed == [0.0]
    assert short.duration == [3.0]


def test_a_span_that_lost_a_record_is_left_out() -> None:
    records = steps_records(5, [4.0, 6.0, 1.0])
    lost = [i for i, activity in enumerate(records) if activity.name == "reduce"]
    del records[lost[10]]
    rows = layers.step_times(records, [1, 2, 0], 2)
    assert len(rows[0].exposed) == 8
    assert rows[1].exposed == pytest.approx([7.0] * 8)


def test_a_graph_of_other_kernels_than_the_ops_launch_is_an_error() -> None:
    records = steps_records(3, [4.0, 6.0, 1.0])
    for wrong in ([1, 1, 0], [2, 2, 0]):
        with pytest.raises(MinidecodeError, match="does not consist of"):
            layers.step_times(records, wrong, 2)
    with pytest.raises(MinidecodeError, match="does not consist of"):
        layers.step_times([], [1, 2, 0], 2)


def test_random_steps_add_up() -> None:
    chance = random.Random(7)
    for _ in range(20):
        ops = [chance.randrange(0, 3) for _ in range(6)] + [1]
        gpu = Gpu()
        ends = []
        for _ in range(3):
            gpu.mark()
            for step in range(4):
                for op, count in enumerate(ops):
                    for i in range(count):
                        gpu.run(f"{op}.{i}", chance.uniform(0.5, 9), early=chance.uniform(0, 0.4))
                if step in (1, 3):
                    ends.append(gpu.now)
            gpu.mark()
        rows = layers.step_times(gpu.records, ops, 2)
        assert [len(row.kernels) for row in rows] == ops
        spans = sum(b - a for a, b in itertools.islice(itertools.pairwise(ends), 0, None, 2))
        assert sum(sum(row.exposed) for row in rows) == pytest.approx(spans)


def test_both_passes_of_a_gpu_meet_in_the_rows(
    monkeypatch: pytest.MonkeyPatch, tiny_model: str
) -> None:
    """The whole way on a GPU but for the GPU: an op of kind k takes COST[k] µs, alone 5 more."""
    cost = {"qkv": 3.0, "attention": 4.0, "o": 2.0, "gate_up": 6.0, "down": 5.0, "head": 9.0}
    decoder = minidecode.load(tiny_model)
    decoder.prepare(64)
    real = decoder.runner().plan(20)
    gpu = Gpu()

    def lone(op: Any) -> Any:
        us = cost.get(op.kind, 1.0) + 5.0
        return dataclasses.replace(op, launch=lambda: gpu.run(f"{op.kind}<0>()", us))

    class Runner:
        def plan(self, position: int) -> Any:
            assert position == 20 + STEPS_PER_GRAPH - 1
            return dataclasses.replace(real, ops=tuple(map(lone, real.ops)))

        def step(self, n: int) -> None:
            assert n == STEPS_PER_GRAPH
            for _ in range(n):
                for op in real.ops:
                    gpu.run(f"{op.kind}<0>()", cost.get(op.kind, 1.0), early=0.5)

    def profile(_: object, work: Callable[[], None]) -> list[Activity]:
        gpu.records.clear()
        work()
        return gpu.records

    runner = Runner()
    monkeypatch.setattr(decoder, "runner", lambda _: runner)
    monkeypatch.setattr(layers, "_profile", profile)
    monkeypatch.setattr(layers, "_mark", lambda decoder, cycles=1: gpu.mark())
    monkeypatch.setattr(steps, "warm_up", lambda *_, **__: None)
    monkeypatch.setattr(steps, "timed_steps", lambda *_, **__: 50.0)
    (times,) = layers._measure_gpu(decoder, [decoder.kernel_set], 20, lambda share, label: None)
    assert times.step_us == 50.0
    whole = sum(cost.get(op.kind, 1.0) for op in real.ops)
    assert times.recorded_steps == pytest.approx([whole] * layers.PROFILED * STEPS_PER_GRAPH)
    assert [op.name for op in times.ops] == [op.name for op in real.ops]
    for op, row in zip(times.ops, times.rows, strict=True):
        us = cost.get(op.kind, 1.0)
        assert row.exposed == pytest.approx([us] * layers.PROFILED * STEPS_PER_GRAPH)
        assert row.duration == pytest.approx([us + 0.5] * layers.PROFILED * STEPS_PER_GRAPH)
        assert row.alone == pytest.approx([us + 5.0] * (layers.ALONE_PASSES - 1))
        assert row.kernels == (f"{op.kind}<0>()",)


@pytest.mark.parametrize(
    ("full", "short"),
    [
        (
            "void minidecode::(anonymous namespace)::norm_linear<4, 8>(Args)",
            "minidecode::norm_linear",
        ),
        ("gemvNSP_kernel", "gemvNSP_kernel"),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, (bool)1>(T<int>)",
            "internal::gemvx::kernel",
        ),
        ("triton_red_fused_mm_0", "triton_red_fused_mm_0"),
        (
            "void at::native::vectorized<4, at::native::Fill<half> >(int, F)",
            "at::native::vectorized",
        ),
        ("Memset (Device)", "Memset (Device)"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
    ],
)
def test_short_names(full: str, short: str) -> None:
    assert layers.short_name(full) == short


# --- two plans ------------------------------------------------------------------------------------


def plan_of(*ops: tuple[str, float]) -> StepTimes:
    made = [SimpleNamespace(name=name, kind=name.rpartition(".")[2]) for name, _ in ops]
    rows = [OpTimes(exposed=[us]) for _, us in ops]
    kernels: Any = None
    return StepTimes(kernels, "", tuple(made), rows)  # type: ignore[arg-type]


FUSED = plan_of(
    ("0.qkv", 3.0), ("0.o", 2.0), ("0.gate_up", 5.0), ("head", 9.0), ("next_token", 1.0)
)
COMPOSED = plan_of(
    ("0.norm", 1.0),
    ("0.qkv", 3.5),
    ("0.o", 2.5),
    ("0.mlp.norm", 1.5),
    ("0.gate_up", 5.5),
    ("0.swiglu", 0.25),
    ("0.residual", 0.5),
    ("head.norm", 1.25),
    ("head", 10.0),
    ("argmax", 2.0),
    ("next_token", 1.0),
)


def test_what_only_the_other_plan_has_goes_to_the_op_that_does_it_here() -> None:
    found = layers.folded(FUSED.ops, COMPOSED)
    assert found == {
        "0.qkv": 4.5,
        "0.o": 2.5,
        "0.gate_up": 1.5 + 5.5 + 0.25 + 0.5,
        "head": 1.25 + 10.0 + 2.0,
        "next_token": 1.0,
    }


def test_what_only_this_plan_has_costs_the_other_nothing() -> None:
    found = layers.folded(COMPOSED.ops, FUSED)
    assert found["0.norm"] == found["0.swiglu"] == found["argmax"] == 0.0
    assert found["0.qkv"] == 3.0
    assert sum(found.values()) == 20.0


def test_the_same_plan_is_itself() -> None:
    found = layers.folded(COMPOSED.ops, COMPOSED)
    assert list(found.values()) == [row.exposed[0] for row in COMPOSED.rows]


def test_each_time_gets_into_its_field(monkeypatch: pytest.MonkeyPatch, tiny_model: str) -> None:
    decoder = minidecode.load(tiny_model, device="cpu")
    decoder.prepare(64)
    kernels = decoder.kernel_set
    ops = decoder.runner().plan(20).ops[:2]
    first = OpTimes(("f<1>()",), [float(us) for us in range(21)], [13.0, 14.0, 99.0], [17.0])
    mine = StepTimes(kernels, "e", ops, [first, OpTimes((), [30.0] * 21)], [50.0, 60.0, 90.0])
    other = StepTimes(kernels, "e", ops, [OpTimes((), [7.0]), OpTimes((), [8.0])], [70.0])

    def measured(*_: object) -> list[StepTimes]:
        filled = (decoder.state.keys[:, :, :20], decoder.state.values[:, :, :20])
        assert all(bool(cache.all()) for cache in filled)  # as after a real text
        return [mine, other]

    monkeypatch.setattr(layers, "_measure_cpu", measured)
    found = layers.report(
        decoder, kernels, vs=kernels, depth=20, model="m", command="c", environment=environment()
    )
    fields = [(r.median_us, r.p95_us, r.duration_us, r.alone_us, r.vs_us) for r in found.rows]
    assert fields == [(10.0, 19.0, 14.0, 17.0, 7.0), (30.0, 30.0, None, None, 8.0)]
    assert [row.kernels for row in found.rows] == [("f",), ()]
    assert (found.step_us, found.recorded_step_us, found.vs_step_us) == (60.0, 40.0, 70.0)
    assert (found.engine, found.samples, found.unexplained_us) == ("e", 21, 20.0)


# --- the command on a CPU -------------------------------------------------------------------------


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> LayerReport:
    assert cli.main(["report", *arguments, "--json", "-"]) == 0
    return LayerReport.from_dict(json.loads(capsys.readouterr().out))


def test_a_row_for_every_op_and_sums_that_add_up(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    found = report_of(capsys, "-m", tiny_model, "-d", "30")
    decoder = minidecode.load(tiny_model)
    decoder.prepare(64)
    plan = decoder.runner().plan(30)
    assert [row.name for row in found.rows] == [op.name for op in plan.ops]
    assert [row.bytes for row in found.rows] == [op.bytes(30) for op in plan.ops]
    assert found.bytes == plan.bytes_per_token(30)
    assert found.sum_us == pytest.approx(sum(row.median_us for row in found.rows))
    assert found.unexplained_us == pytest.approx(found.step_us - found.sum_us)
    # The medians of parts and the median of wholes are near each other.
    assert found.recorded_step_us == pytest.approx(found.sum_us, rel=0.5)
    assert all(0 < row.median_us <= (row.p95_us or 0) for row in found.rows)
    assert all((row.alone_us or 0) > 0 for row in found.rows)
    # The clock itself, and whatever else runs on a busy machine.
    assert 0.3 < found.sum_us / found.step_us < 3.0
    assert found.samples >= layers.CPU_LEAST
    assert (found.kernel, found.engine, found.depth, found.vs) == ("torch", "torch", 30, None)
    assert found.command == f"minidecode report -m {tiny_model} -d 30 --device auto"
    assert found.environment.read_bw_gb_s == 20.0


def test_against_another_kernel_the_rows_still_add_up(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    kernel = f"{HOSTILE}:right"
    found = report_of(capsys, "-m", tiny_model, "--vs", kernel)
    assert found.vs == kernel
    assert all(row.vs_us is not None and row.vs_us > 0 for row in found.rows)
    assert found.vs_step_us is not None
    total = sum(row.vs_us or 0.0 for row in found.rows)
    assert 0.3 < total / found.vs_step_us < 3.0


def test_an_op_s_share_of_the_cache_is_that_of_the_depth(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    by_depth = [
        next(
            row.bytes
            for row in report_of(capsys, "-m", tiny_model, "-d", depth).rows
            if "att" in row.kind
        )
        for depth in ("0", "100")
    ]
    assert by_depth == [2 * 2 * 32, 101 * 2 * 2 * 32]


def test_the_terminal_table(capsys: pytest.CaptureFixture[str], tiny_model: str) -> None:
    assert cli.main(["report", "-m", tiny_model]) == 0
    short = capsys.readouterr().out
    assert max(map(len, short.splitlines())) <= 80
    assert "gate_up" in short
    assert "unexplained" in short
    assert "mlp.down" not in short
    assert cli.main(["report", "-m", tiny_model, "--layers"]) == 0
    assert capsys.readouterr().out.count("mlp.down") == 2


def test_files_of_every_format_in_one_run(
    capsys: pytest.CaptureFixture[str], tiny_model: str, tmp_path: Path
) -> None:
    names = ("html", "json", "csv", "md", "png", "trace")
    flags = [word for name in names for word in (f"--{name}", str(tmp_path / f"r.{name}"))]
    assert cli.main(["report", "-m", tiny_model, *flags]) == 0
    assert "unexplained" in capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text())))
    assert rows[1]["name"] == "layers.0.attn.attention"
    assert len(rows) == 12
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "</html>" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "| op " in (tmp_path / "r.md").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "r.trace").read_text())["traceEvents"]
    assert json.loads((tmp_path / "r.json").read_text())["schema_version"] == 1


@pytest.mark.usefixtures("example_dir")
def test_the_example(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = ("html", "json", "csv", "md", "png", "trace")
    flags = [word for name in names for word in (f"--{name}", str(tmp_path / f"r.{name}"))]
    assert cli.main(["report", "-d", "16", "--vs", f"{HOSTILE}:right", "--layers", *flags]) == 0
    out = capsys.readouterr().out
    found = LayerReport.from_dict(json.loads((tmp_path / "r.json").read_text()))
    decoder = minidecode.load(example.ensure())
    decoder.prepare(64)
    ops = [op.name for op in decoder.runner().plan(16).ops]
    assert len(ops) > 150
    assert [row.name for row in found.rows] == ops
    assert found.sum_us + found.unexplained_us == pytest.approx(found.step_us)
    assert sum(total.us for total in found.by_kind) == pytest.approx(found.sum_us)
    assert found.vs_step_us is not None
    rows = list(csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text())))
    assert [row["name"] for row in rows] == ops
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    table = (tmp_path / "r.md").read_text(encoding="utf-8")
    assert all(name in page and name in table for name in ops)
    assert out.count("mlp.down") == 30
    events = json.loads((tmp_path / "r.trace").read_text())
    assert events["otherData"]["vs_step_us"] == found.vs_step_us
    assert {event["name"] for event in events["traceEvents"]} >= set(ops)


def test_a_file_that_cannot_be_written_loses_nothing_else(
    capsys: pytest.CaptureFixture[str], tiny_model: str, tmp_path: Path
) -> None:
    kept = tmp_path / "r.csv"
    arguments = ["report", "-m", tiny_model, "--html", "/dev/full", "--csv", str(kept)]
    assert cli.main(arguments) == 1
    captured = capsys.readouterr()
    assert "unexplained" in captured.out
    assert captured.err == "minidecode: --html /dev/full: No space left on device\n"
    assert kept.read_text().startswith("name,kind,layer")


def test_a_file_is_replaced_once_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, link = tmp_path / "r.json", tmp_path / "link.json"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    outputs.write({("--json", str(link)): lambda: "new"})
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o640)
    assert link.is_symlink()

    def fail(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(MinidecodeError, match=r"--json .*r\.json: No space left on device"):
        outputs.write({("--json", str(file)): lambda: "newer"})
    assert file.read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "r.json"]


def test_what_cannot_be_made_loses_nothing_else(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise MissingError("a picture needs matplotlib")

    file = tmp_path / "r.csv"
    with pytest.raises(MinidecodeError, match=r"^--png p: a picture needs matplotlib$"):
        outputs.write({("--png", "p"): fail, ("--csv", str(file)): lambda: "a,b"})
    assert file.read_text() == "a,b"


def test_a_pipe_is_opened_once_and_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        outputs.check({"--json": str(pipe)})
        outputs.write({("--json", str(pipe)): lambda: "whole"})
        assert reader.communicate(timeout=20)[0] == b"whole"


def test_shells_pipes_and_a_reader_that_leaves(tiny_model: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m minidecode report -q -m {tiny_model}"
    shell = (
        f"{command} --json >(wc -c >{tmp_path}/count) >/dev/null; echo $? >{tmp_path}/code\n"
        f"{command} --json {tmp_path}/kept.json | true\n"
        f"{command} --json /dev/stdout >{tmp_path}/out.json\nsleep 0.5\n"
    )
    subprocess.run(["bash", "-c", shell], check=True)
    assert (tmp_path / "code").read_text() == "0\n"
    assert int((tmp_path / "count").read_text()) > 1000
    for name in ("kept.json", "out.json"):
        assert json.loads((tmp_path / name).read_text())["schema_version"] == 1


def test_stdout_has_one_document(
    capsysbinary: pytest.CaptureFixture[bytes], tiny_model: str, tmp_path: Path
) -> None:
    assert cli.main(["report", "-m", tiny_model, "--csv", "-", "--md", str(tmp_path / "r.md")]) == 0
    assert capsysbinary.readouterr().out.startswith(b"name,kind,layer")
    assert cli.main(["report", "-m", tiny_model, "--png", "-"]) == 0
    assert capsysbinary.readouterr().out.startswith(b"\x89PNG")
    assert cli.main(["report", "-m", tiny_model, "--png", "-", "--csv", "-"]) == 2
    captured = capsysbinary.readouterr()
    assert (captured.out, captured.err.count(b"\n")) == (b"", 1)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--only", "down"], 2, "--vs"),
        (["--vs", "torhc"], 2, "did you mean torch"),
        (["--vs", "torch", "--only", "nothing"], 2, "nothing"),
        (["--vs", "torch", "--only", ","], 2, "no linear layer in it"),
        (["--html", "/no/such/folder/r.html"], 2, "--html"),
        (["--json", "."], 2, "--json"),
        (["--json", "/proc/x.json"], 2, "--json /proc/x.json"),
        (["--json", "{0}/r", "--html", "{0}/../{0.name}/r"], 2, "--html and --json cannot both be"),
        (["-d", "5000"], 1, "timed tokens after 5000 do not fit the context limit of 256"),
        (["--kernel", f"{HOSTILE}:zeros"], 3, "zeros is wrong"),
        (["--vs", f"{HOSTILE}:nan", "--only", "down"], 3, "nan is wrong"),
    ],
)
def test_what_is_refused(
    capsys: pytest.CaptureFixture[str],
    tiny_model: str,
    tmp_path: Path,
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    words = [word.format(tmp_path) for word in arguments]
    assert cli.main(["report", "-m", tiny_model, *words]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_a_kernel_that_becomes_wrong_while_it_is_measured(
    capsys: pytest.CaptureFixture[str], tiny_model: str, tmp_path: Path
) -> None:
    # A copy counts its calls from 0, whatever ran before in this process.
    kernel = shutil.copy(HOSTILE.parents[1] / "user_kernels.py", tmp_path)
    page = tmp_path / "r.html"
    arguments = ["--kernel", f"{kernel}:wrong_later", "--device", "cpu", "--html", str(page)]
    assert cli.main(["report", "-m", tiny_model, *arguments]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "after the timed part" in captured.err
    assert not page.exists()


def test_a_swap_of_the_head_folds_its_helpers(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    """The composed head has a norm and an argmax of its own, which the engine's head contains."""
    found = report_of(capsys, "-m", tiny_model, "--vs", f"{HOSTILE}:right", "--only", "lm_head")
    assert found.vs == f"torch+{HOSTILE}:right"
    decoder = minidecode.load(tiny_model)
    decoder.prepare(64)
    swapped = kernel_set("torch", decoder.device).swap(
        ("head",), kernel_set(f"{HOSTILE}:right", decoder.device)
    )
    extra = {op.name for op in decoder.runner(swapped).plan(0).ops} - {r.name for r in found.rows}
    assert extra == {"head.norm", "argmax"}
    assert all(row.vs_us for row in found.rows)
