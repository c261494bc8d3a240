"""What a measurement returns: frozen, versioned records that `bench` fills and `report` writes.

Units are in the names: `_us` microseconds, `_s` seconds, `_ns` nanoseconds, `_bytes` bytes, `_gb_s`
1e9 bytes a second, `pct_` per cent. A record holds only finite numbers: an optional number that
came out as NaN or infinity is stored as None, a required one is refused, so JSON never has a NaN.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from minidecode.errors import MinidecodeError

SCHEMA_VERSION = 1

FASTER = "faster"
SLOWER = "slower"
NO_DIFFERENCE = "no difference"

R = TypeVar("R", bound="Record")


@dataclass(frozen=True, kw_only=True)
class Record:
    """Base of all records: plain data that comes back unchanged through JSON."""

    def __post_init__(self) -> None:
        for name, kind in _fields(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, (list, tuple)):
                if any(isinstance(item, float) and not math.isfinite(item) for item in value):
                    raise MinidecodeError(f"{type(self).__name__}.{name} holds a NaN or infinity")
                object.__setattr__(self, name, tuple(value))
            elif isinstance(value, float) and not math.isfinite(value):
                if not _is_optional(kind):
                    raise MinidecodeError(f"{type(self).__name__}.{name} is {value}, not a number")
                object.__setattr__(self, name, None)

    def to_dict(self) -> dict[str, Any]:
        """Dicts, lists, strings, finite numbers, booleans and None, in the order of the fields."""
        return {name: _dump(getattr(self, name)) for name in _fields(type(self))}

    @classmethod
    def from_dict(cls: type[R], data: Mapping[str, Any]) -> R:
        """The record of `to_dict()`. Unknown keys are ignored: a later version may have added them.

        Raises MinidecodeError naming the field that is missing or of the wrong type, or the schema
        version if it is newer than ours.
        """
        version = data.get("schema_version", SCHEMA_VERSION)
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise MinidecodeError(
                f"{cls.__name__}: schema_version {version!r} is newer than {SCHEMA_VERSION}, "
                "the newest that this minidecode reads"
            )
        known = {}
        for name, kind in _fields(cls).items():
            if name in data:
                known[name] = _load(kind, data[name], f"{cls.__name__}.{name}")
        missing = sorted(_required(cls) - known.keys())
        if missing:
            raise MinidecodeError(f"{cls.__name__}: missing {', '.join(missing)}")
        return cls(**known)


def _fields(cls: type[Record]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _required(cls: type[Record]) -> frozenset[str]:
    return frozenset(
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )


def _is_optional(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType) and type(
        None
    ) in typing.get_args(kind)


def _dump(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_dump(item) for item in value]
    return value


def _load(kind: Any, value: Any, where: str) -> Any:
    if _is_optional(kind):
        if value is None:
            return None
        (kind,) = (arg for arg in typing.get_args(kind) if arg is not type(None))
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise MinidecodeError(f"{where} should be a list, is {type(value).__name__}")
        item = typing.get_args(kind)[0]
        return tuple(_load(item, each, f"{where}[{i}]") for i, each in enumerate(value))
    if isinstance(kind, type) and issubclass(kind, Record):
        if not isinstance(value, Mapping):
            raise MinidecodeError(f"{where} should be an object, is {type(value).__name__}")
        return kind.from_dict(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise MinidecodeError(f"{where} should be {kind.__name__}, is {type(value).__name__}")
    return value


def gb_per_s(n_bytes: float, us: float | None) -> float | None:
    """`n_bytes` in `us` microseconds, in 1e9 bytes a second; None without bytes or a time."""
    return n_bytes / us / 1e3 if us and n_bytes else None


def percent(part: float | None, whole: float | None) -> float | None:
    """`part` as a percentage of `whole`; None when either is unknown or `whole` is zero."""
    return 100.0 * part / whole if part is not None and whole else None


# What a share above 100 % can come from.
WHY_ABOVE = "a cache served part of it, or the machine was busy while its ceiling was measured"


def is_above(pct_read_bw: float | None) -> bool:
    """Whether a share of the read bandwidth, with one decimal as it is shown, is above 100 %."""
    return pct_read_bw is not None and round(pct_read_bw, 1) > 100.0


@dataclass(frozen=True, kw_only=True)
class GpuState(Record):
    """What drifts during a measurement. All None on a CPU or without the `gpu` extra (NVML)."""

    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    throttle: str | None = None  # NVML's reasons, comma separated; "" is none

    def describe(self) -> str:
        """One short phrase, such as `1980 MHz, 41 °C, 312 W`; `unknown` when nothing is known."""
        parts = [
            f"{value:.0f} {unit}"
            for value, unit in (
                (self.sm_clock_mhz, "MHz"),
                (self.temperature_c, "°C"),
                (self.power_w, "W"),
            )
            if value is not None
        ]
        if self.throttle:
            parts.append(f"throttled: {self.throttle}")
        return ", ".join(parts) or "unknown"


@dataclass(frozen=True, kw_only=True)
class Environment(Record):
    """Where a result was measured: enough to explain why two results differ."""

    schema_version: int = SCHEMA_VERSION
    minidecode: str
    commit: str | None = None  # of the checkout, "-dirty" appended; None for an installed wheel
    time: str  # ISO 8601, UTC
    python: str
    torch: str | None = None
    transformers: str | None = None
    safetensors: str | None = None
    numpy: str | None = None
    triton: str | None = None
    cuda: str | None = None  # the CUDA that torch was built with
    nvcc: str | None = None
    driver: str | None = None
    os: str
    cpu: str
    cpu_cores: int | None = None  # that this process may use
    cpu_threads: int | None = None  # that torch uses
    memory_bytes: int | None = None
    device: str = "cpu"  # the one measured, such as "cuda:0"
    gpu: str | None = None
    compute_capability: str | None = None  # "9.0"
    sm_count: int | None = None
    l2_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    sm_clock_max_mhz: float | None = None
    memory_clock_max_mhz: float | None = None
    state: GpuState = dataclasses.field(default_factory=GpuState)
    read_bw_gb_s: float | None = None  # measured, see bench/device.py

    @property
    def hardware(self) -> str:
        """The device measured, in words: the GPU's name, or the CPU's with its threads."""
        if self.gpu:
            return self.gpu
        threads = self.cpu_threads
        return f"{self.cpu}, {threads} thread{'' if threads == 1 else 's'}" if threads else self.cpu


@dataclass(frozen=True, kw_only=True)
class GenerateResult(Record):
    """One `generate`. Rates leave out load, build, prefill and the first token.

    None is what could not be measured.
    """

    text: str
    token_ids: tuple[int, ...]
    stop_reason: str
    n_prompt: int
    n_gen: int
    load_s: float | None = None
    build_s: float | None = None
    prefill_s: float | None = None
    ttft_s: float | None = None
    decode_tok_s: float | None = None  # wall clock of the loop
    step_us: float | None = None  # mean of the loop's wall clock, which the device sets
    gb_s: float | None = None
    read_bw_gb_s: float | None = None
    pct_read_bw: float | None = None
    peak_memory_bytes: int | None = None
    logits_hash: str | None = None
    kernel: str
    engine: str
    model: str
    environment: Environment
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class Run(Record):
    """One test of `bench`: llama-bench's fields under llama-bench's names, then ours.

    A generation test has n_gen > 0 and n_prompt 0, a prompt test the reverse; n_depth tokens are in
    the cache before either. `samples_ns` are whole tests (n_gen or n_prompt tokens each),
    `samples_ts` the same as tokens a second.
    """

    schema_version: int = SCHEMA_VERSION
    build_commit: str | None = None
    cpu_info: str
    gpu_info: str  # "" on a CPU
    backend: str  # "CUDA" or "CPU"
    model: str  # as asked for: a directory's name, a hub id, synthetic:...
    model_type: str  # such as "llama 1.24B F16"
    model_size: int  # bytes of the weights
    model_n_params: int
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str  # ISO 8601, UTC
    avg_ns: float
    stddev_ns: float
    avg_ts: float
    stddev_ts: float
    samples_ns: tuple[float, ...]
    samples_ts: tuple[float, ...]
    kernel: str
    engine: str  # "fused", "composed", "torch", or "mixed" where stages fell back
    step_us: float | None = None  # median device time of one decode step; None for a prompt test
    bytes_per_token: int | None = None
    gb_s: float | None = None  # bytes_per_token over step_us
    read_bw_gb_s: float | None = None
    pct_read_bw: float | None = None
    served_from_cache: bool = False  # the share passes 100 %
    peak_memory_bytes: int | None = None
    load_s: float | None = None
    build_s: float | None = None
    environment: Environment

    @property
    def test(self) -> str:
        """The name that llama-bench gives it: `pp512`, `tg128`, `tg128 @ d4096`."""
        name = f"pp{self.n_prompt}" if self.n_prompt else ""
        if self.n_gen:
            name += ("+" if name else "") + f"tg{self.n_gen}"
        return f"{name} @ d{self.n_depth}" if self.n_depth else name


@dataclass(frozen=True, kw_only=True)
class LayerRow(Record):
    """One op of the decode step. `LayerReport.build` fills gb_s and the shares from the rest."""

    name: str  # layers.3.mlp.gate_up
    kind: str  # gate_up
    layer: int | None = None  # None for what belongs to no layer, such as the head
    engine: str  # "fused", "composed" or "torch"
    kernels: tuple[str, ...] = ()  # as the profiler names them
    shape: tuple[int, ...] = ()  # of a linear: (rows, columns)
    bytes: int  # read and needed: weights, and the cache at this depth
    median_us: float  # exposed: its completion minus the completion before it
    p95_us: float | None = None  # of the exposed time
    duration_us: float | None = None  # the kernels' own start to end; overlaps its neighbours
    alone_us: float | None = None  # timed by itself, cold weights
    vs_us: float | None = None  # exposed, with the other kernel
    gb_s: float | None = None
    pct_read_bw: float | None = None
    above_ceiling: bool = False  # the share passes 100 %: early loads, or a cache served part of it
    pct_step: float | None = None
    delta_us: float | None = None  # vs_us - median_us: positive where the other kernel is slower


@dataclass(frozen=True, kw_only=True)
class LayerTotal(Record):
    """The sum of the rows of one kind (`name` is the kind) or of one layer (its number)."""

    name: str
    ops: int
    bytes: int
    us: float
    gb_s: float | None = None
    pct_read_bw: float | None = None
    above_ceiling: bool = False
    pct_step: float | None = None
    vs_us: float | None = None  # None unless every row has one
    delta_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerReport(Record):
    """Where one decode step spends its time. `build` derives every sum and share."""

    schema_version: int = SCHEMA_VERSION
    model: str
    kernel: str
    engine: str
    vs: str | None = None  # the other kernel
    only: tuple[str, ...] = ()  # the kinds of linear layer in which alone it differs; () is all
    depth: int  # tokens in the cache
    samples: int  # steps that each median is taken over
    method: str  # how the times were taken, in a few words
    step_us: float  # measured apart from the rows
    recorded_step_us: float | None = None  # the step while the rows were taken, which slows it
    vs_step_us: float | None = None
    sum_us: float
    unexplained_us: float  # step_us - sum_us
    unexplained_pct: float
    read_bw_gb_s: float | None = None
    bytes: int
    gb_s: float | None = None
    pct_read_bw: float | None = None
    rows: tuple[LayerRow, ...]
    by_kind: tuple[LayerTotal, ...]
    by_layer: tuple[LayerTotal, ...]
    command: str
    environment: Environment

    @classmethod
    def build(
        cls,
        rows: Sequence[LayerRow],
        *,
        step_us: float,
        read_bw_gb_s: float | None,
        **others: Any,
    ) -> LayerReport:
        """Fills the derived fields of `rows` and the totals. `others` are the fields that remain.

        Raises MinidecodeError if `step_us` is not positive: every share is a share of it.
        """
        if not step_us > 0:
            raise MinidecodeError(f"a decode step took {step_us} us: nothing to take shares of")
        filled = tuple(_filled(row, step_us, read_bw_gb_s) for row in rows)
        kinds = dict.fromkeys(row.kind for row in filled)
        layers = dict.fromkeys(_layer_name(row) for row in filled)
        sum_us = math.fsum(row.median_us for row in filled)
        total_bytes = sum(row.bytes for row in filled)
        speed = gb_per_s(total_bytes, step_us)
        return cls(
            rows=filled,
            by_kind=tuple(
                _total(kind, [row for row in filled if row.kind == kind], step_us, read_bw_gb_s)
                for kind in kinds
            ),
            by_layer=tuple(
                _total(
                    name,
                    [row for row in filled if _layer_name(row) == name],
                    step_us,
                    read_bw_gb_s,
                )
                for name in layers
            ),
            step_us=step_us,
            sum_us=sum_us,
            unexplained_us=step_us - sum_us,
            unexplained_pct=100.0 * (step_us - sum_us) / step_us,
            read_bw_gb_s=read_bw_gb_s,
            bytes=total_bytes,
            gb_s=speed,
            pct_read_bw=percent(speed, read_bw_gb_s),
            **others,
        )

    @property
    def sum_pct(self) -> float:
        """The ops' sum as a share of the step, in per cent."""
        return 100.0 * self.sum_us / self.step_us

    @property
    def vs_delta_us(self) -> float | None:
        """How much longer the other kernel's step takes, in µs."""
        return None if self.vs_step_us is None else self.vs_step_us - self.step_us


def _layer_name(row: LayerRow) -> str:
    return "other" if row.layer is None else str(row.layer)


def _filled(row: LayerRow, step_us: float, read_bw_gb_s: float | None) -> LayerRow:
    speed = gb_per_s(row.bytes, row.median_us)
    share = percent(speed, read_bw_gb_s)
    return dataclasses.replace(
        row,
        gb_s=speed,
        pct_read_bw=share,
        above_ceiling=is_above(share),
        pct_step=percent(row.median_us, step_us),
        delta_us=None if row.vs_us is None else row.vs_us - row.median_us,
    )


def _total(
    name: str, rows: Sequence[LayerRow], step_us: float, read_bw_gb_s: float | None
) -> LayerTotal:
    us = math.fsum(row.median_us for row in rows)
    n_bytes = sum(row.bytes for row in rows)
    others = [row.vs_us for row in rows if row.vs_us is not None]
    vs_us = math.fsum(others) if len(others) == len(rows) else None
    speed = gb_per_s(n_bytes, us)
    share = percent(speed, read_bw_gb_s)
    return LayerTotal(
        name=name,
        ops=len(rows),
        bytes=n_bytes,
        us=us,
        gb_s=speed,
        pct_read_bw=share,
        above_ceiling=is_above(share),
        pct_step=percent(us, step_us),
        vs_us=vs_us,
        delta_us=None if vs_us is None else vs_us - us,
    )


@dataclass(frozen=True, kw_only=True)
class GateResult(Record):
    """Whether an arm's logits are right, over teacher-forced positions of a real text."""

    kernel: str
    when: str  # "before" or "after" the timed part
    against: str  # "fp32 reference" or the other arm's kernel
    positions: int
    rel_err: float | None = None  # ‖logits − reference‖ / ‖reference‖; None: not finite
    kl: float | None = None  # mean KL(reference ‖ arm) in nats
    top1_agreement: float | None = None  # 0 to 1
    passed: bool
    reason: str | None = None  # why it did not pass


@dataclass(frozen=True, kw_only=True)
class Arm(Record):
    """One side of an A/B run."""

    kernel: str
    engine: str
    tokens_s: float  # 1e6 / the median step_us
    step_us: float  # median over all samples
    bytes_per_token: int
    gb_s: float | None = None
    pct_read_bw: float | None = None
    served_from_cache: bool = False  # the share passes 100 %
    samples_us: tuple[float, ...]  # one step each, in the order measured


@dataclass(frozen=True, kw_only=True)
class ABResult(Record):
    """An A/B run. `ratio` is the speed of `b` over the speed of `a`: above 1, `b` is the faster."""

    schema_version: int = SCHEMA_VERSION
    model: str
    depth: int
    only: tuple[str, ...] = ()  # the linears that were swapped; () is all
    rounds: int  # pairs
    a: Arm
    b: Arm
    gates: tuple[GateResult, ...]
    ratio: float  # median over pairs of a's time / b's time
    ratio_low: float  # the 95 % interval of the pairs, wider by `noise_floor` at both ends
    ratio_high: float
    noise_floor: float = 0.0  # 0.002 is 0.2 %: the least difference that a run could tell
    noise_low: float  # the 95 % interval of the same ratio with `a` in both arms
    noise_high: float
    noise_ratio: float
    noise_samples_us: tuple[float, ...] = ()  # the A/A run, the two of each pair in turn
    verdict: str  # of b against a: FASTER, SLOWER or NO_DIFFERENCE
    read_bw_gb_s: float | None = None
    drift_pct: float | None = None  # how far the step time moved from the first to the last rounds
    state_before: GpuState
    state_after: GpuState
    command: str
    environment: Environment

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        # As many digits as tell a bound from 1, where the verdict says that it is not.
        bounds = (self.ratio_low, self.ratio_high)
        told = (d for d in (3, 4, 5) if all(round(bound, d) != 1.0 for bound in bounds))
        digits = 3 if self.verdict == NO_DIFFERENCE else next(told, 6)
        ratio, low, high = (f"{value:.{digits}f}" for value in (self.ratio, *bounds))
        interval = f"95 % interval {low}–{high}"
        what = f" in {', '.join(self.only)}" if self.only else ""
        if self.verdict == NO_DIFFERENCE:
            return (
                f"no difference between {self.b.kernel} and {self.a.kernel}{what}: "
                f"ratio {ratio} ({interval})"
            )
        return f"{self.b.kernel}{what} is {ratio}x as fast as {self.a.kernel} ({interval})"


@dataclass(frozen=True, kw_only=True)
class GemvRow(Record):
    """One kernel at one shape, y[n] = w[n, k] @ x[k].

    Times are None when it did not run; `reason` says why.
    """

    kernel: str
    n: int
    k: int
    dtype: str  # "fp16" or "fp32"
    bytes: int
    median_us: float | None = None
    gb_s: float | None = None
    read_us: float | None = None  # a pure read of the same bytes in the same run
    pct_of_read: float | None = None  # read_us / median_us
    vs_cublas: float | None = None  # speed over cuBLAS's: above 1 is faster
    occupancy: float | None = None  # theoretical, 0 to 1
    rel_err: float | None = None  # ‖out − ref‖ / ‖ref‖, FP64 reference
    served_from_cache: bool = False  # faster than memory can be read: the weights were in a cache
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class GemvReport(Record):
    """A table of kernels alone."""

    schema_version: int = SCHEMA_VERSION
    rows: tuple[GemvRow, ...]
    read_bw_gb_s: float | None = None
    command: str
    environment: Environment


@dataclass(frozen=True, kw_only=True)
class CheckCase(Record):
    """One input that a kernel was checked on."""

    name: str
    n: int
    k: int
    dtype: str
    rel_err: float | None = None  # None: not finite, or it did not run
    passed: bool
    supported: bool = True  # False: the kernel refused this shape, which is allowed
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckResult(Record):
    """What `kernels check` found for one kernel."""

    schema_version: int = SCHEMA_VERSION
    kernel: str
    device: str
    passed: bool
    cases: tuple[CheckCase, ...]
    environment: Environment
