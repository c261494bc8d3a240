"""How numbers and names look, whatever the format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from minidecode.records import (
    WHY_ABOVE,
    Arm,
    Environment,
    GemvReport,
    GemvRow,
    GpuState,
    LayerReport,
    LayerRow,
    LayerTotal,
    Run,
    is_above,
)

NONE = "–"

# What a share above 100 % gets instead of being shown without a word, and what it says.
ABOVE = "*"
ABOVE_RUNS = f"above the measured read ceiling: {WHY_ABOVE}"
ABOVE_GEMV = "above 100 %: faster than our pure read of the same bytes"
CACHED = "cache"
CACHED_NOTE = "cache: faster than memory can be read, the weights came out of a cache"
# A share of the step that no op accounts for is worth a word from here, in per cent.
MUCH_UNEXPLAINED = 3.0
# The engine of a step whose ops are not all in one.
MIXED = "mixed"


def numbers(
    values: Sequence[float | None], *, signed: bool = False, digits: int | None = None
) -> list[str]:
    """A column with the same decimals for all, as many as its largest value leaves room for."""
    if digits is None:
        largest = max((abs(value) for value in values if value is not None), default=0.0)
        digits = 2 if largest < 1_000 else 1 if largest < 100_000 else 0
    return [_number(value, signed, digits) for value in values]


def _number(value: float | None, signed: bool, digits: int) -> str:
    if value is None:
        return NONE
    if round(value, digits) == 0:
        return f"{0:.{digits}f}"  # neither -0.0 nor +0.0
    return f"{value:{'+' if signed else ''},.{digits}f}"


def number(value: float | None, digits: int | None = None, *, signed: bool = False) -> str:
    """One value as `numbers` writes it."""
    return numbers([value], digits=digits, signed=signed)[0]


def speed(gb_s: float | None, ceiling: float | None = None) -> str:
    """GB/s without decimals for what reads 1000 and more, as the ceiling tells, else with one."""
    digits = 0 if max(gb_s or 0.0, ceiling or 0.0) >= 1_000 else 1
    return number(gb_s, digits)


def share(pct: float | None) -> str:
    """A share of what can be read, in per cent with one decimal, marked when it is above 100."""
    return NONE if pct is None else f"{pct:.1f}{ABOVE if is_above(pct) else ''}"


def of_step(pct: float | None) -> str:
    """A share of the step, in per cent."""
    return NONE if pct is None else f"{pct:.1f}"


def layer_notes(report: LayerReport, *, every_row: bool) -> list[str]:
    """What has to be said below the totals, and below `every_row` where they are shown too."""
    notes = []
    shares = [report.pct_read_bw, *(total.pct_read_bw for total in report.by_kind)]
    shares += [row.pct_read_bw for row in report.rows] if every_row else []
    if any(is_above(pct) for pct in shares):
        notes.append(above_layers(report))
    if report.vs is not None and report.environment.gpu:
        notes.append(
            "Δ: where kernels overlap, what an op saves may stand in its neighbour's row; a layer's"
            " sum and the step have it all"
        )
    if report.unexplained_pct <= -0.5 and report.recorded_step_us is not None:
        recorded = number(report.recorded_step_us)
        notes.append(
            f"unexplained is below zero: with every op recorded the step took {recorded} µs"
        )
    if report.unexplained_pct >= MUCH_UNEXPLAINED:
        notes.append(
            f"{of_step(report.unexplained_pct)} % is unexplained: the machine was busy with"
            " something else, too, or its clocks changed between the two measurements"
        )
    return notes + _engines(report)


def _engines(report: LayerReport) -> list[str]:
    """Which kinds of op ran in another engine than most, where the step is mixed."""
    if report.engine != MIXED:
        return []
    kinds: dict[str, dict[str, None]] = {}
    for row in report.rows:
        if row.shape or row.kind == "attention":  # what decides the step's engine
            kinds.setdefault(row.engine, {})[row.kind] = None
    most = max(kinds, key=lambda engine: len(kinds[engine]))
    others = [f"{engine}: {', '.join(kinds[engine])}" for engine in kinds if engine != most]
    return [f"{'; '.join(others)}; all else: {most}"]


def above_layers(report: LayerReport) -> str:
    """What a share of more than 100 % can come from; only a GPU's ops overlap."""
    early = "reading began while the op before still ran, or " if report.environment.gpu else ""
    return f"{ABOVE} above 100 %: {early}{WHY_ABOVE}"


def run_notes(runs: Iterable[Run | Arm]) -> list[str]:
    """What has to be said below the rates of some runs."""
    runs = list(runs)
    notes = []
    if any(is_above(run.pct_read_bw) for run in runs):
        notes.append(f"{ABOVE} {ABOVE_RUNS}")
    if any(run.engine == MIXED for run in runs):
        notes.append(f"{MIXED}: ops in more than one engine; report says which")
    return notes


def gemv_share(row: GemvRow) -> str:
    """A kernel's share of a pure read; "cache" when the result is above what memory gives."""
    return CACHED if row.served_from_cache else share(row.pct_of_read)


def size(n_bytes: float) -> str:
    """Bytes in B, kB, MB or GB (powers of 1000, as in GB/s)."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= factor:
            value = n_bytes / factor
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{n_bytes:.0f} B"


def binary_size(n_bytes: float) -> str:
    """Bytes in MiB or GiB, as llama-bench shows a model's size."""
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.2f} MiB"


def count(n: float) -> str:
    """A number of parameters in M or B, as llama-bench shows it."""
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


class TotalCells(NamedTuple):
    """A total as it is shown; `versus` are the other kernel's µs and the difference, if any."""

    name: str
    ops: str
    us: str
    versus: tuple[str, ...]
    of_step: str
    size: str
    speed: str
    share: str


def total_cells(
    report: LayerReport, totals: Sequence[LayerTotal], digits: int | None = None
) -> list[TotalCells]:
    """The cells of some totals, all times with as many digits."""
    us = numbers([total.us for total in totals], digits=digits)
    digits = len(us[0].partition(".")[2])
    vs = numbers([total.vs_us for total in totals], digits=digits)
    delta = numbers([total.delta_us for total in totals], signed=True, digits=digits)
    return [
        TotalCells(
            total.name,
            str(total.ops),
            us[i],
            () if report.vs is None else (vs[i], delta[i]),
            of_step(total.pct_step),
            size(total.bytes),
            speed(total.gb_s, report.read_bw_gb_s),
            share(total.pct_read_bw),
        )
        for i, total in enumerate(totals)
    ]


def shape(sizes: Sequence[int]) -> str:
    """(3072, 2048) as 3072 × 2048."""
    return " × ".join(str(size) for size in sizes) or NONE


def rate(run: Run) -> str:
    """Tokens a second of a run as mean ± standard deviation, which one repeat has not."""
    spread = f" ± {run.stddev_ts:.2f}" if len(run.samples_ns) > 1 else ""
    return f"{run.avg_ts:.2f}{spread}"


def op_in_layer(row: LayerRow) -> str:
    """The op's name without its layer: `mlp.down` of `layers.3.mlp.down`."""
    prefix = f"layers.{row.layer}."
    return row.name.removeprefix(prefix) if row.layer is not None else row.name


def tokens_per_s(step_us: float) -> float:
    """Tokens a second that a step of `step_us` allows."""
    return 1e6 / step_us


def with_engine(result: LayerReport | Run) -> str:
    """The kernel, and the engine it runs in where its name does not say that."""
    if result.kernel == result.engine:
        return result.kernel
    return f"{result.kernel} ({result.engine})"


def if_mixed(run: Run) -> str:
    """The kernel, and the engine only where that is not one alone."""
    return with_engine(run) if run.engine == MIXED else run.kernel


def against(report: LayerReport) -> str:
    """The other kernel, and where alone it is in use."""
    if not report.vs:
        return ""
    where = f" in {', '.join(report.only)}" if report.only else ""
    return f" against {report.vs}{where}"


def ceiling(report: LayerReport | GemvReport | Run) -> str:
    """The read ceiling in words."""
    if report.read_bw_gb_s is None:
        return "read ceiling not measured"
    return f"read ceiling {speed(report.read_bw_gb_s)} GB/s, measured"


def state_change(before: GpuState, after: GpuState) -> str:
    """Clocks and temperature before and after; "" when neither is known."""
    if before == after == GpuState():
        return ""
    return f"before: {before.describe()}; after: {after.describe()}"


def environment_items(env: Environment) -> list[tuple[str, str]]:
    """Label and value of all that is known, in the order to show it."""
    gpu = [
        env.gpu,
        f"compute capability {env.compute_capability}" if env.compute_capability else None,
        f"{env.sm_count} SMs" if env.sm_count else None,
        f"{size(env.gpu_memory_bytes)} memory" if env.gpu_memory_bytes else None,
        f"L2 {env.l2_bytes / 2**20:.0f} MiB" if env.l2_bytes else None,
    ]
    cpu = [
        env.cpu,
        f"{env.cpu_cores} cores" if env.cpu_cores else None,
        f"{env.cpu_threads} threads" if env.cpu_threads else None,
        f"{size(env.memory_bytes)} memory" if env.memory_bytes else None,
    ]
    items = [
        ("minidecode", _joined([env.minidecode, env.commit])),
        ("time", env.time),
        ("device", env.device),
        ("GPU", _joined(gpu) if env.gpu else None),
        ("clocks", env.state.describe() if env.gpu and env.state != GpuState() else None),
        ("read bandwidth", f"{speed(env.read_bw_gb_s)} GB/s" if env.read_bw_gb_s else None),
        ("driver", env.driver),
        ("CUDA", env.cuda),
        ("nvcc", env.nvcc),
        ("CPU", _joined(cpu)),
        ("OS", env.os),
        ("Python", env.python),
        ("torch", env.torch),
        ("transformers", env.transformers),
        ("safetensors", env.safetensors),
        ("triton", env.triton),
        ("numpy", env.numpy),
    ]
    return [(label, value) for label, value in items if value]


def _joined(parts: Sequence[str | None]) -> str:
    return ", ".join(part for part in parts if part)
