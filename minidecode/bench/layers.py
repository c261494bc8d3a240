"""Where one decode step spends its time, op by op, as it really runs.

On a GPU the times come from the kernel records that CUPTI takes of graph replays, mapped onto the
plan's ops by their order. Under programmatic dependent launch kernels overlap, so an op's time is
its *exposed* time, its completion minus the completion of the op before: that adds up to the step.
How many kernels an op launches, and what it takes by itself, is learnt from a first pass in which
every op runs alone between two markers, after a read that drives its weights out of the cache.

On the CPU it is a clock around every op.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minidecode.bench import stats, steps, timer
from minidecode.bench.gate import Progress
from minidecode.decode import STEPS_PER_GRAPH
from minidecode.errors import MinidecodeError
from minidecode.records import LayerReport, LayerRow

if TYPE_CHECKING:
    from minidecode.decode import Decoder, Runner
    from minidecode.plan import KernelSet, Op
    from minidecode.records import Environment

# Passes with every op alone, of which the first is not counted.
ALONE_PASSES = 6
# Profiled replays of several steps each, and unprofiled ones that give the step's own time.
PROFILED = 12
MEASURED = 20
# On the CPU, steps with a clock around each op; fewer when steps are slow, until CPU_SECONDS.
CPU_STEPS = 30
CPU_LEAST = 5
CPU_SECONDS = 8.0

# Part of the name of the kernel that torch.cuda._sleep launches.
MARKER = "spin_kernel"
# About 1 ms: the host has enqueued all steps before the first one starts.
HEAD_START_CYCLES = 2_000_000
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Activity:
    """Something that ran on the GPU: a kernel, a copy or a fill. Times in µs of one clock."""

    name: str
    start: float
    end: float


@dataclass
class OpTimes:
    """Samples of one op, µs. `exposed` adds up to the step, `duration` overlaps its neighbours."""

    kernels: tuple[str, ...] = ()
    exposed: list[float] = field(default_factory=list)
    duration: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)


@dataclass
class StepTimes:
    """What was measured of one kernel set: a row for each op of `ops`, and steps as a whole."""

    kernels: KernelSet
    engine: str
    ops: tuple[Op, ...]
    rows: list[OpTimes]
    steps: list[float] = field(default_factory=list)  # µs, not profiled

    @property
    def step_us(self) -> float:
        return stats.median(self.steps)

    @property
    def recorded_steps(self) -> list[float]:
        """What the steps took that the rows are of, µs."""
        return [math.fsum(step) for step in zip(*(row.exposed for row in self.rows), strict=True)]


def report(
    decoder: Decoder,
    kernels: KernelSet,
    *,
    vs: KernelSet | None = None,
    depth: int,
    model: str,
    command: str,
    environment: Environment,
    progress: Progress | None = None,
) -> LayerReport:
    """Measures the step of `kernels` after `depth` tokens, and that of `vs` beside it.

    Raises MinidecodeError when the depth does not fit the context, or when the profiler does not
    see the kernels that the plan launches.
    """
    decoder.prepare(steps.room(decoder, depth, STEPS_PER_GRAPH)).set_eos(())
    steps.fill_cache(decoder, depth)
    sets = [kernels] if vs is None else [kernels, vs]
    on_gpu = decoder.device.type == "cuda"
    measure = _measure_gpu if on_gpu else _measure_cpu
    measured = measure(decoder, sets, depth, progress or (lambda share, label: None))
    times = measured[0]
    others = folded(times.ops, measured[1]) if vs is not None else {}
    rows = [
        LayerRow(
            name=op.name,
            kind=op.kind,
            layer=op.layer,
            engine=op.engine,
            kernels=tuple(map(short_name, row.kernels)),
            shape=op.shape,
            bytes=op.bytes(depth),
            median_us=stats.median(row.exposed),
            p95_us=stats.percentile(row.exposed, 95),
            duration_us=stats.median(row.duration) if row.duration else None,
            alone_us=stats.median(row.alone) if row.alone else None,
            vs_us=others.get(op.name),
        )
        for op, row in zip(times.ops, times.rows, strict=True)
    ]
    return LayerReport.build(
        rows,
        step_us=times.step_us,
        read_bw_gb_s=environment.read_bw_gb_s,
        model=model,
        kernel=kernels.name,
        engine=times.engine,
        vs=None if vs is None else vs.name,
        only=() if vs is None else tuple(vs.swapped),
        depth=depth,
        samples=len(times.rows[0].exposed),
        recorded_step_us=stats.median(times.recorded_steps),
        method="kernel records of graph replays" if on_gpu else "a clock around every op",
        vs_step_us=measured[1].step_us if vs is not None else None,
        command=command,
        environment=environment,
    )


def folded(ops: Sequence[Op], other: StepTimes) -> dict[str, float]:
    """The other kernel set's median µs for each of `ops`, by name; they add up to all its ops'.

    Where the other set has an op of its own, its time goes to the op that does that work here: a
    norm's to the projection after it, any other's to the op before it. An op that the other set
    does not have costs it nothing by itself: 0.
    """
    found = dict.fromkeys((op.name for op in ops), 0.0)
    waiting, before = 0.0, ops[0].name
    for op, row in zip(other.ops, other.rows, strict=True):
        us = stats.median(row.exposed)
        if op.name in found:
            found[op.name] += us + waiting
            waiting, before = 0.0, op.name
        elif op.kind == "norm":
            waiting += us
        else:
            found[before] += us
    found[before] += waiting
    return found


# --- the CPU --------------------------------------------------------------------------------------


def _measure_cpu(
    decoder: Decoder, sets: Sequence[KernelSet], depth: int, progress: Progress
) -> list[StepTimes]:
    """All sets in turn, step by step, so that a drift of the machine meets them all."""
    measured = []
    for kernels in sets:
        runner = decoder.runner(kernels)
        plan = runner.plan(depth)
        rows = [OpTimes((op.kernel,)) for op in plan.ops]
        measured.append((runner, StepTimes(kernels, plan.engine, plan.ops, rows)))
    for runner, _ in measured:  # the first step of each allocates
        decoder.start(steps.TOKEN, depth)
        runner.eager()
    begin = time.perf_counter()
    for done in range(CPU_STEPS):
        if done >= CPU_LEAST and time.perf_counter() - begin > CPU_SECONDS:
            break
        progress(done / CPU_STEPS, "measuring every op")
        for runner, times in measured:
            _clocked_step(decoder, times, depth)
            times.steps.append(steps.timed_steps(decoder, runner, depth=depth, n=1))
    for _, times in measured[:1]:
        _alone_cpu(decoder, times, depth, progress)
    return [times for _, times in measured]


def _clocked_step(decoder: Decoder, times: StepTimes, depth: int) -> None:
    decoder.start(steps.TOKEN, depth)
    before = time.perf_counter_ns()
    for op, row in zip(times.ops, times.rows, strict=True):
        op.launch()
        now = time.perf_counter_ns()
        row.exposed.append((now - before) / 1e3)
        before = now


def _alone_cpu(decoder: Decoder, times: StepTimes, depth: int, progress: Progress) -> None:
    """Each kind of op by itself, through all layers, so that its weights are not in a cache."""
    kinds: dict[str, list[tuple[Op, OpTimes]]] = {}
    for op, row in zip(times.ops, times.rows, strict=True):
        kinds.setdefault(op.kind, []).append((op, row))
    for done, (kind, group) in enumerate(kinds.items()):
        progress(done / len(kinds), f"measuring {kind} alone")
        for _ in range(CPU_LEAST):
            # An op alone changes the state by itself: additions pile up, the position moves on.
            decoder.start(steps.TOKEN, depth)
            for op, row in group:
                begin = time.perf_counter_ns()
                op.launch()
                row.alone.append((time.perf_counter_ns() - begin) / 1e3)


# --- the GPU --------------------------------------------------------------------------------------


def _measure_gpu(
    decoder: Decoder, sets: Sequence[KernelSet], depth: int, progress: Progress
) -> list[StepTimes]:
    measured = []
    for kernels in sets:
        runner = decoder.runner(kernels)
        progress(None, f"capturing {kernels.name}")
        steps.warm_up(decoder, runner, depth=depth, n=STEPS_PER_GRAPH)
        progress(None, f"timing steps of {kernels.name}")
        whole = [
            steps.timed_steps(decoder, runner, depth=depth, n=STEPS_PER_GRAPH)
            for _ in range(MEASURED)
        ]
        # The plan of the graph that is timed, whose last step may need a longer context.
        plan = runner.plan(max(depth, STEPS_PER_GRAPH) + STEPS_PER_GRAPH - 1)
        progress(None, f"profiling the ops of {kernels.name} alone")
        lone = alone_times(_profile(decoder, _alone_work(decoder, plan.ops, depth)), len(plan.ops))
        progress(None, f"profiling steps of {kernels.name}")
        activities = _profile(decoder, _steps_work(decoder, runner, depth))
        rows = step_times(activities, [len(row.kernels) for row in lone], STEPS_PER_GRAPH)
        for row, own in zip(rows, lone, strict=True):
            row.alone = own.alone
        measured.append(StepTimes(kernels, plan.engine, plan.ops, rows, whole))
    return measured


def _alone_work(decoder: Decoder, ops: Sequence[Op], depth: int) -> Callable[[], None]:
    """Every op alone between two markers, after a read of other memory, ALONE_PASSES times."""
    size = timer.copies_beyond_cache(1, decoder.device)
    other = torch.empty(size // 4, dtype=torch.float32, device=decoder.device).uniform_(0.5, 1.0)

    def work() -> None:
        for _ in range(ALONE_PASSES):
            decoder.start(steps.TOKEN, depth)
            for op in ops:
                other.sum()
                _mark(decoder)
                op.launch()
                _mark(decoder)

    return work


def _steps_work(decoder: Decoder, runner: Runner, depth: int) -> Callable[[], None]:
    """A lead of one graph and the graph that counts, between two markers, PROFILED times."""
    first = max(0, depth - STEPS_PER_GRAPH)

    def work() -> None:
        for _ in range(PROFILED):
            decoder.start(steps.TOKEN, first)
            _mark(decoder, HEAD_START_CYCLES)
            runner.step(STEPS_PER_GRAPH)
            runner.step(STEPS_PER_GRAPH)
            _mark(decoder)

    return work


def _mark(decoder: Decoder, cycles: int = 1) -> None:
    with torch.cuda.device(decoder.device):
        torch.cuda._sleep(cycles)


def _profile(decoder: Decoder, work: Callable[[], None]) -> list[Activity]:
    # Or the profiler tells on stderr when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(decoder.device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize(decoder.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found = activities(path.read_text(encoding="utf-8", errors="replace"))
    if not found:
        raise MinidecodeError(
            "the profiler saw nothing on the GPU: CUPTI is missing, or another profiler holds it"
        )
    return found


def activities(trace: str) -> list[Activity]:
    """What ran on the GPU, by its start, from a trace that torch.profiler exports as JSON."""
    # Decimal: as a float, a time since 1970 in µs is good to a quarter of a µs only.
    events = [
        event
        for event in json.loads(trace, parse_float=Decimal)["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in _DEVICE_CATEGORIES
    ]
    origin = min((event["ts"] for event in events), default=0)
    found = [
        Activity(
            event["name"],
            float(event["ts"] - origin),
            float(event["ts"] - origin + event["dur"]),
        )
        for event in events
    ]
    return sorted(found, key=lambda activity: activity.start)


def between_markers(found: Iterable[Activity]) -> list[list[Activity]]:
    """The activities between the first and the second marker, the third and the fourth, …"""
    spans: list[list[Activity]] = []
    inside = False
    for activity in found:
        if MARKER in activity.name:
            inside = not inside
            if inside:
                spans.append([])
        elif inside:
            spans[-1].append(activity)
    return spans


def alone_times(found: Iterable[Activity], n_ops: int) -> list[OpTimes]:
    """The kernels of each op and its time alone, from passes with each op between markers.

    Raises MinidecodeError when the markers do not add up.
    """
    spans = between_markers(found)
    if len(spans) < 2 * n_ops or len(spans) % n_ops:
        raise MinidecodeError(
            f"the profiler lost records: {len(spans)} ops alone, of passes of {n_ops}"
        )
    rows = [OpTimes(tuple(a.name for a in span)) for span in spans[-n_ops:]]
    for i, span in enumerate(spans[n_ops:]):
        if span:
            rows[i % n_ops].alone.append(max(a.end for a in span) - span[0].start)
    return rows


def step_times(
    found: Iterable[Activity], kernels: Sequence[int], steps_per_graph: int
) -> list[OpTimes]:
    """Exposed times and durations of each op, which launches `kernels[i]` kernels.

    Each span between markers is a lead and then `steps_per_graph` steps, which count. A span whose
    steps do not all have the same kernels is left out; MinidecodeError when none is left.
    """
    per_step = sum(kernels)
    counted = per_step * steps_per_graph
    rows = [OpTimes() for _ in kernels]
    for span in between_markers(found):
        lead, tail = span[:-counted], span[-counted:]
        names = [activity.name for activity in tail]
        if not lead or names[per_step:] != names[:-per_step]:
            continue
        done = max(activity.end for activity in lead)
        place = iter(tail)
        for _ in range(steps_per_graph):
            for row, count in zip(rows, kernels, strict=True):
                group = list(itertools.islice(place, count))
                ended = max([done, *(a.end for a in group)])
                row.exposed.append(ended - done)
                if group:
                    row.kernels = tuple(a.name for a in group)
                    row.duration.append(max(a.end for a in group) - group[0].start)
                done = ended
    if not rows or not rows[0].exposed:
        raise MinidecodeError(
            f"a captured step does not consist of the {per_step} kernels that its {len(kernels)} "
            "ops launch one by one, or the profiler lost some: no times can be told from it"
        )
    return rows


def short_name(kernel: str) -> str:
    """`void ns::(anonymous namespace)::f<int, 8>(int const*)` as `ns::f`."""
    if kernel.startswith(("Memset", "Memcpy")):
        return kernel
    text, before = kernel.replace("(anonymous namespace)::", ""), ""
    while text != before:
        text, before = re.sub(r"<[^<>]*>|\([^()]*\)", "", text), text
    return text.split()[-1] if text.split() else kernel
