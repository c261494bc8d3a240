"""The kernels alone: time, bandwidth and error of y[n] = w[n, k] @ x[k] over shapes.

A kernel passes the gate of `kernels/check.py` before anything is timed. Then it runs round and
round over copies of the weights that are together four times as large as the last cache, on a GPU
in one captured graph, so that each call reads memory. Then the same calls, captured once more, get
an input they have not seen and outputs full of NaN, and every output is compared with FP64.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minidecode.bench import device as machine
from minidecode.bench import occupancy, timer
from minidecode.errors import KernelWrongError, MinidecodeError
from minidecode.kernels import build, ops, registry
from minidecode.kernels.check import ROW_TOLERANCE, TINY, TOLERANCE, check
from minidecode.kernels.ops import gemv_bytes
from minidecode.memory import is_out_of_memory
from minidecode.records import GemvReport, GemvRow, gb_per_s, percent

if TYPE_CHECKING:
    import torch

    from minidecode.kernels.registry import Gemv

# What `vs_cublas` compares with.
BASELINE = "cublas"

# How far a measured ceiling may be off. A CPU has other work, which slows the read or the kernel.
_CEILING_ERROR = {"cuda": 0.02, "cpu": 0.25}

# Elements that the buffers of an operand are rounded up to, so that each copy starts aligned.
_ALIGNED = 128
# More copies of a tiny weight cost more than they tell: what it takes is the launch.
_MAX_COPIES = 4_096
# Weights of about the size that real ones have: results stay near 1.
_WEIGHT_SCALE = 0.02

# Called with the share of the work done, or None, and what is going on.
Progress = Callable[[float | None, str], None]


@dataclass(frozen=True)
class Problem:
    """One shape in one dtype ("fp16" or "fp32")."""

    n: int
    k: int
    dtype: str

    @property
    def bytes(self) -> int:
        """What has to be moved at least."""
        return gemv_bytes(self.n, self.k, self.dtype)

    def __str__(self) -> str:
        return f"{self.n}x{self.k} {self.dtype}"


@dataclass(frozen=True)
class Reads:
    """How fast memory is read, measured in the same run; None where it could not be.

    read_us: a pure read of the problem's bytes. ceiling_gb_s: of a buffer far beyond every cache.
    cold: False where the weights rotated over may all be in the cache. error: how much faster than
    measured memory may be.
    """

    read_us: float | None
    ceiling_gb_s: float | None
    cold: bool = True
    error: float = _CEILING_ERROR["cuda"]


def measure(
    gemvs: Sequence[Gemv],
    shapes: Sequence[tuple[int, int]],
    dtypes: Sequence[str],
    device: str | torch.device,
    *,
    command: str,
    progress: Progress = lambda share, label: None,
) -> GemvReport:
    """Every kernel at every shape (n, k), in each of `dtypes` that it has, on `device`.

    A row whose kernel cannot run here or does not take the shape says so in `reason`. Raises
    KernelWrongError, and reports no times at all, for a kernel that fails a check; CompileError
    for one that does not compile.
    """
    import torch

    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    problems = [Problem(n, k, dtype) for dtype in dtypes for n, k in dict.fromkeys(shapes)]
    timed = list(gemvs)
    baseline = registry.gemvs()[BASELINE]
    if all(gemv.name != BASELINE for gemv in timed) and device.type in baseline.devices:
        timed.append(baseline)

    reasons: dict[tuple[str, Problem], str] = {}
    runnable = []
    for gemv in timed:
        reason = gemv.unavailable()
        if reason is None:
            runnable.append(gemv)
        reasons |= {(gemv.name, problem): reason for problem in problems if reason is not None}
    _prepare(runnable, progress)
    for gemv in runnable:
        for dtype in dtypes:
            if dtype in gemv.dtypes:
                asked = [problem for problem in problems if problem.dtype == dtype]
                reasons |= _gate(gemv, asked, device, progress)

    progress(None, "measuring the read bandwidth")
    ceiling = _ceiling(device)
    rows: dict[tuple[str, Problem], GemvRow] = {}
    for done, problem in enumerate(problems):
        progress(done / len(problems), f"timing {problem}")
        here = [
            gemv
            for gemv in runnable
            if problem.dtype in gemv.dtypes and (gemv.name, problem) not in reasons
        ]
        copies, cold = _copies(problem, device)
        try:
            read_us = _read_us(problem, device) if cold else None
            operands = _Operands(problem, copies, device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reasons |= {(gemv.name, problem): f"too little memory for {problem}" for gemv in here}
            continue
        times = {gemv.name: _time(gemv, operands, device) for gemv in here}
        reads = Reads(read_us, ceiling, cold, _CEILING_ERROR[device.type])
        baseline_us = times[BASELINE][0] if BASELINE in times else None
        for name, (us, rel_err) in times.items():
            rows[name, problem] = filled(name, problem, us, reads, baseline_us, rel_err)
        del operands
        if device.type == "cuda":
            torch.cuda.empty_cache()

    if device.type == "cuda":
        progress(None, "reading the occupancy")
        _fill_occupancy(rows, {gemv.name: gemv for gemv in gemvs}, device)
    for (name, problem), reason in reasons.items():
        rows[name, problem] = _empty(name, problem, reason)
    return GemvReport(
        rows=tuple(
            rows[gemv.name, problem]
            for problem in problems
            for gemv in gemvs
            if (gemv.name, problem) in rows and problem.dtype in gemv.dtypes
        ),
        read_bw_gb_s=ceiling,
        command=command,
        environment=machine.environment(device),
    )


def filled(
    kernel: str,
    problem: Problem,
    median_us: float,
    reads: Reads,
    baseline_us: float | None = None,
    rel_err: float | None = None,
) -> GemvRow:
    """The row of one timing, with all that follows from it.

    A rate above what any read of memory reached in this run, and beyond its error, is a cache's.
    Below that a share of more than 100 % stands, for the writers to mark.
    """
    speed = gb_per_s(problem.bytes, median_us)
    measured = [reads.ceiling_gb_s, gb_per_s(problem.bytes, reads.read_us)]
    ceiling = max((rate for rate in measured if rate is not None), default=math.inf)
    limit = ceiling * (1.0 + reads.error)
    return GemvRow(
        kernel=kernel,
        n=problem.n,
        k=problem.k,
        dtype=problem.dtype,
        bytes=problem.bytes,
        median_us=median_us,
        gb_s=speed,
        read_us=reads.read_us,
        pct_of_read=percent(reads.read_us, median_us),
        vs_cublas=None if baseline_us is None else baseline_us / median_us,
        rel_err=rel_err,
        served_from_cache=speed is not None and speed > limit,
        reason=None if reads.cold else f"{problem} is too small to be read from memory each time",
    )


def _empty(kernel: str, problem: Problem, reason: str) -> GemvRow:
    return GemvRow(
        kernel=kernel,
        n=problem.n,
        k=problem.k,
        dtype=problem.dtype,
        bytes=problem.bytes,
        reason=reason,
    )


def _ceiling(device: torch.device) -> float | None:
    """The read bandwidth, GB/s; None where it cannot be measured, as for want of a compiler."""
    try:
        return machine.read_bandwidth(device)
    except MinidecodeError:
        return None


def _read_us(problem: Problem, device: torch.device) -> float | None:
    """Time of a pure read of the problem's bytes, like `_ceiling`."""
    try:
        return machine.read_us(device, problem.bytes)
    except MinidecodeError:
        return None


def _copies(problem: Problem, device: torch.device) -> tuple[int, bool]:
    """How many copies of the weight to rotate over, and whether a call finds its own uncached."""
    size = _rounded_up(problem.n * problem.k) * ops.BYTES[problem.dtype]
    copies = min(timer.copies_beyond_cache(size, device), _MAX_COPIES)
    return copies, copies * size >= 2 * timer.cache_bytes(device)


def _prepare(gemvs: Sequence[Gemv], progress: Progress) -> None:
    """Compiles what has to be, side by side. Raises for the first kernel that does not compile."""
    sources = [gemv.origin for gemv in gemvs if gemv.function is None]
    if sources:
        with contextlib.suppress(MinidecodeError):
            build.build_many(sources)
    for gemv in gemvs:
        progress(None, f"preparing {gemv.name}")
        gemv.prepare()


def _gate(
    gemv: Gemv, problems: Sequence[Problem], device: torch.device, progress: Progress
) -> dict[tuple[str, Problem], str]:
    """Checks a kernel on what is to be timed, all of one dtype; says why it will not be where so.

    Raises KernelWrongError.
    """
    dtype = problems[0].dtype
    smallest_first = sorted(((p.n, p.k) for p in problems), key=math.prod)
    report = check(
        gemv,
        device,
        dtypes=[dtype],
        shapes=smallest_first,
        stop_at_failure=True,
        on_case=lambda case: progress(None, f"checking {gemv.name}: {case}"),
    )
    left_out = {
        (gemv.name, Problem(case.n, case.k, dtype)): case.message
        for case in report.cases
        if case.passed and case.rel_err is None
    }
    # The gate does not let a kernel pass that took none of the shapes, which here is no mistake.
    if not report.passed and len(left_out) < len(problems):
        raise KernelWrongError(report.summary())
    return left_out


class _Operands:
    """Copies of a weight, more than a cache holds; an input for all; an output for each."""

    def __init__(self, problem: Problem, copies: int, device: torch.device) -> None:
        import torch

        self.problem = problem
        n, k = problem.n, problem.k
        kind = ops.torch_dtype(problem.dtype)
        size = _rounded_up(n * k)
        generator = torch.Generator(device).manual_seed(0)
        weights = torch.empty((copies, size), dtype=kind, device=device)
        weights[0].normal_(0.0, _WEIGHT_SCALE, generator=generator)
        weights[1:] = weights[0]
        self.w = [row[: n * k].view(n, k) for row in weights]
        self.inputs = torch.empty((2, k), dtype=kind, device=device).normal_(generator=generator)
        self.x = self.inputs[0].clone()
        outputs = torch.empty((copies, _rounded_up(n)), dtype=kind, device=device)
        self.outputs = outputs[:, :n]
        self.y = list(self.outputs)
        self._answer: tuple[torch.Tensor, torch.Tensor] | None = None

    def fault(self) -> tuple[float, str]:
        """The worst output's relative error for the second input, and what is wrong if anything."""
        if self._answer is None:
            self._answer = ops.gemv_reference_and_scale(self.w[0], self.inputs[1])
        reference, scale = self._answer
        dtype = self.problem.dtype
        tolerance, tiny = TOLERANCE[dtype], TINY[dtype]
        out = self.outputs.cpu().double()
        error = (out - reference).abs()
        norms = error.norm(dim=1)
        norm = float(reference.norm())
        relative = float(norms.max()) / norm if norm > 0 else math.inf
        wrong = (
            ~(error <= ROW_TOLERANCE[dtype] * scale + tolerance * reference.abs() + tiny)
        ).nonzero()
        if len(wrong):
            copy, row = (int(i) for i in wrong[0])
            got, expected = float(out[copy, row]), float(reference[row])
            return relative, f"row {row} of {len(reference)} is {got:.6g}, not {expected:.6g}"
        if float(norms.max()) > tolerance * norm + tiny * math.sqrt(len(reference)):
            return relative, f"relative error {relative:.1e}, allowed {tolerance:.0e}"
        return relative, ""


def _time(gemv: Gemv, operands: _Operands, device: torch.device) -> tuple[float, float]:
    """Median time in µs, and the relative error afterwards. Raises KernelWrongError."""
    import torch

    operands.x.copy_(operands.inputs[0])
    calls = [gemv.bind(y, w, operands.x) for y, w in zip(operands.y, operands.w, strict=True)]
    median_us = timer.time_rotation(calls, device).median_us
    replay = timer.capture(calls, device)
    operands.x.copy_(operands.inputs[1])
    operands.outputs.fill_(math.nan)
    replay()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    relative, fault = operands.fault()
    if fault:
        raise KernelWrongError(
            f"kernel {gemv.name} is wrong after being timed: {operands.problem}: {fault}"
        )
    return median_us, relative


def _fill_occupancy(
    rows: dict[tuple[str, Problem], GemvRow], gemvs: dict[str, Gemv], device: torch.device
) -> None:
    """Adds the occupancy: apart from the timings, which a profiler must not be near."""
    import torch

    for (name, problem), row in rows.items():
        if name not in gemvs:
            continue
        kind = ops.torch_dtype(problem.dtype)
        w = torch.zeros((problem.n, problem.k), dtype=kind, device=device)
        y, x = w.new_empty(problem.n), w.new_zeros(problem.k)
        call = gemvs[name].bind(y, w, x)
        rows[name, problem] = replace(row, occupancy=occupancy.of_call(call, device))


def _rounded_up(elements: int) -> int:
    return -(-elements // _ALIGNED) * _ALIGNED
