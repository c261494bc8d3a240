"""The gate: is a kernel right on every input that has been known to break one?

Nothing is timed and no tokens a second are printed for a kernel that does not pass. Each case puts
the operands between guard elements, fills the output with NaN, runs the kernel once and compares
with an FP64 product:

- every element of y is written, and nothing around it; w and x are left alone; what lies around w
  and x is NaN, so that reading past their ends shows;
- ‖out − ref‖ / ‖ref‖ is at most 1e-3 for FP16 (the rounding of the output alone is 2e-4) and 2e-5
  for FP32; where the sums of a few rows cancel, of the size that ref has by chance, ‖√Σ(wx)²‖;
- each row is right by itself, since one wrong row among 100,000 hardly moves the norm: its error is
  at most 4e-3 (FP16) or 1e-4 (FP32) of √Σ(wx)².
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minidecode.errors import KernelWrongError, MinidecodeError
from minidecode.kernels import ops
from minidecode.kernels.ops import NotSupportedError
from minidecode.memory import free_memory

if TYPE_CHECKING:
    import torch

    from minidecode.kernels.registry import Gemv

TOLERANCE: dict[str, float] = {"fp16": 1e-3, "fp32": 2e-5}
ROW_TOLERANCE: dict[str, float] = {"fp16": 4e-3, "fp32": 1e-4}
# Half a step between the smallest FP16 numbers, rounded up: results this small have no more digits.
TINY: dict[str, float] = {"fp16": 2.0**-24, "fp32": 0.0}

ODD_K = (1, 2, 3, 7, 255, 257, 1056, 1152, 2049, 2176, 4095)
ODD_N = (1, 3, 1000)
# Heads of real vocabularies: more rows than a 16-bit grid dimension has blocks.
MANY_ROWS = ((65536, 64), (128256, 64), (151936, 64))
SMALL_MODEL = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
LARGE_MODELS = (
    (3072, 2048),
    (2048, 2048),
    (16384, 2048),
    (2048, 8192),
    (128256, 2048),
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
)
UNALIGNED = (
    *((3, k) for k in ODD_K),
    *((1000, 257), (1000, 1056), (1000, 2049), (64, 4096)),
)
# Which operands start one element off a 16-byte boundary.
OFFSETS = {"w": (0, 1, 0), "x": (0, 0, 1), "y": (1, 0, 0), "w, x and y": (1, 1, 1)}
USUAL_SHAPE = (1000, 1056)

GUARD = 64
SENTINEL = 4660.0  # exact in FP16
FRESH_CALLS = 20
TIMED_CALLS = 100
# Up to here every partial sum of 200 x ±200 is an FP32 number.
MOST_EXACT_K = 1 << 14
# About 10 ms of a GPU: whatever is not ordered after it runs long before it ends.
SLEEP_CYCLES = 20_000_000
TOO_LARGE = "not run: too little memory"
# Larger weights are not copied just to see that they were left alone.
COMPARED_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class CheckCase:
    """One input that a kernel was run on; `rel_err` is None where there was nothing finite."""

    name: str
    n: int
    k: int
    dtype: str
    rel_err: float | None = None
    passed: bool = True
    supported: bool = True
    message: str = ""

    @property
    def label(self) -> str:
        return f"{self.name}, {self.n}x{self.k} {self.dtype}" if self.n else self.name


@dataclass(frozen=True)
class CheckReport:
    """What the gate found; a kernel passes when some case ran and none failed."""

    kernel: str
    device: str
    cases: tuple[CheckCase, ...]

    @property
    def passed(self) -> bool:
        ran = any(case.rel_err is not None for case in self.cases)
        return ran and all(case.passed for case in self.cases)

    @property
    def first_failure(self) -> CheckCase | None:
        return next((case for case in self.cases if not case.passed), None)

    def summary(self) -> str:
        """One line: what was checked, or the first case that failed and how."""
        failed = self.first_failure
        if failed is not None:
            return f"kernel {self.kernel} is wrong: {failed.label}: {failed.message}"
        if not self.passed:
            return f"kernel {self.kernel} was not checked: too little memory"
        return f"kernel {self.kernel} is right in {self.counts}"

    def require(self) -> None:
        """Raises KernelWrongError for a wrong kernel, MinidecodeError if nothing could be run."""
        if self.first_failure is not None:
            raise KernelWrongError(self.summary())
        if not self.passed:
            raise MinidecodeError(self.summary())

    @property
    def counts(self) -> str:
        """How many cases the kernel was right in, did not support, and there was no memory for."""
        refused = sum(not case.supported for case in self.cases)
        large = sum(case.message == TOO_LARGE for case in self.cases)
        text = f"{len(self.cases) - refused - large} cases"
        text += f", {refused} shapes not supported" if refused else ""
        return text + (f", {large} {TOO_LARGE}" if large else "")


def check(
    gemv: Gemv,
    device: str | torch.device,
    *,
    dtypes: Sequence[str] | None = None,
    shapes: Sequence[tuple[int, int]] | None = None,
    stop_at_failure: bool = False,
    on_case: Callable[[str], None] | None = None,
) -> CheckReport:
    """Runs every case of the gate on `device` and reports; raises nothing a kernel does.

    `shapes` (n, k) takes the place of the built-in ones, for a quick check of what is about to be
    timed. `on_case` is called with each case's name before it runs.
    """
    import torch

    runner = _Runner(gemv, torch.device(device), stop_at_failure, on_case)
    try:
        gemv.prepare()
    except MinidecodeError as error:
        failed = CheckCase("build", 0, 0, "", None, False, True, str(error))
        return CheckReport(gemv.name, str(runner.device), (failed,))
    for dtype in dtypes if dtypes is not None else gemv.dtypes:
        runner.check_dtype(dtype, shapes)
        if runner.over:
            break
    return CheckReport(gemv.name, str(runner.device), tuple(runner.cases))


class _Problem:
    """Guarded operands of y[n] = w[n, k] @ x[k] and the right answer for what is in them."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: str,
        device: torch.device,
        seed: int,
        *,
        offsets: tuple[int, int, int] = (0, 0, 0),
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        import torch

        self.shape, self.dtype, self.scales = shape, dtype, scales
        n, k = shape
        kind = ops.torch_dtype(dtype)

        def guarded(size: int, offset: int, guard: float) -> tuple[torch.Tensor, torch.Tensor]:
            first = GUARD + offset
            buffer = torch.full((first + size + GUARD,), guard, dtype=kind, device=device)
            return buffer, buffer[first : first + size]

        self.y_buffer, self.y = guarded(n, offsets[0], SENTINEL)
        self.w_buffer, flat = guarded(n * k, offsets[1], math.nan)
        self.x_buffer, self.x = guarded(k, offsets[2], math.nan)
        self.w = flat.view(n, k)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.randomise()

    def randomise(self) -> None:
        """Fresh normal values of the two scales in w and x."""
        import torch

        for tensor, scale in zip((self.w, self.x), self.scales, strict=True):
            fresh = torch.randn(tensor.shape, generator=self.generator, device=tensor.device)
            tensor.copy_(fresh.mul_(scale))
        self.settle()

    def settle(self) -> None:
        """Takes what is in w and x as the input: works out the answer and what must not change."""
        import torch

        self.reference, self.row_scale = ops.gemv_reference_and_scale(self.w, self.x)
        whole = self.w.numel() <= COMPARED_ELEMENTS
        self.w_before = _bits(self.w_buffer).clone() if whole else torch.empty(0)
        self.x_before = _bits(self.x_buffer).clone()

    def poison(self) -> None:
        """NaN where the answer belongs: what is not written shows."""
        self.y.fill_(math.nan)

    def untouched(self) -> bool:
        """True while y is as `poison` left it."""
        return bool(self.y.isnan().all()) and not self._guard_fault()

    def fault(self, exact_sum: float | None = None) -> tuple[float | None, str]:
        """The relative error and what is wrong with the operands now; "" when nothing is.

        exact_sum: for inputs whose true result is 0, Σ|w·x| of a row, which its error is compared
        with instead.
        """
        import torch

        message = self._guard_fault()
        if message:
            return None, message
        out = self.y.detach().cpu().double()
        odd = (~torch.isfinite(out)).nonzero().flatten()
        if len(odd):
            row = int(odd[0])
            nan = math.isnan(float(out[row]))
            what = "is NaN: not written, or wrong" if nan else "is infinite"
            return None, f"row {row} of {len(out)} {what} ({len(odd)} such rows)"
        error = (out - self.reference).abs()
        relative = ops.relative_error(out, self.reference)
        tolerance, tiny = TOLERANCE[self.dtype], TINY[self.dtype]
        if exact_sum is not None:
            relative = float(error.max()) / exact_sum
            limit = torch.full_like(error, 1e-6 * exact_sum)
        else:
            limit = ROW_TOLERANCE[self.dtype] * self.row_scale
            limit += tolerance * self.reference.abs() + tiny
            size = max(float(self.reference.norm()), float(self.row_scale.norm()))
            allowed = tolerance * size + tiny * math.sqrt(len(out))
            if float(error.norm()) > allowed:
                row = int((error / limit.clamp_min(1e-300)).argmax())
                return relative, (
                    f"relative error {relative:.1e}, allowed {tolerance:.0e}; "
                    + self._row(row, out)
                )
        wrong = (error > limit).nonzero().flatten()
        if len(wrong):
            return relative, f"{self._row(int(wrong[0]), out)} ({len(wrong)} such rows)"
        return relative, ""

    def _row(self, row: int, out: torch.Tensor) -> str:
        got, expected = float(out[row]), float(self.reference[row])
        return f"row {row} of {len(out)} is {got:.6g}, not {expected:.6g}"

    def _guard_fault(self) -> str:
        import torch

        first = self.y.storage_offset()
        before, after = self.y_buffer[:first], self.y_buffer[first + len(self.y) :]
        if not bool((after == SENTINEL).all()):
            return "it wrote past the end of y"
        if not bool((before == SENTINEL).all()):
            return "it wrote before the start of y"
        if not torch.equal(_bits(self.x_buffer), self.x_before):
            return "it changed x"
        if len(self.w_before) and not torch.equal(_bits(self.w_buffer), self.w_before):
            return "it changed w"
        return ""


class _Runner:
    """Runs cases one after the other and keeps what they found."""

    def __init__(
        self,
        gemv: Gemv,
        device: torch.device,
        stop_at_failure: bool,
        on_case: Callable[[str], None] | None,
    ) -> None:
        import torch

        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.gemv, self.device = gemv, device
        self.stop_at_failure, self.on_case = stop_at_failure, on_case
        self.cases: list[CheckCase] = []
        self.over = False
        self.seed = 0

    def check_dtype(self, dtype: str, shapes: Sequence[tuple[int, int]] | None) -> None:
        first = len(self.cases)
        for name, shape in self._sweep(shapes):
            if not self._fits(shape, dtype):
                self._add(CheckCase(name, *shape, dtype, message=TOO_LARGE))
                continue
            self._numbers(name, _Problem(shape, dtype, self.device, self._next_seed()))
            if self.over:
                return
        done = [case for case in self.cases[first:] if case.passed and case.rel_err is not None]
        if not done:
            cases = self.cases[first:]
            if all(case.passed for case in cases) and not all(c.supported for c in cases):
                self._add(
                    CheckCase("any shape", 0, 0, dtype, None, False, False, "it supports none")
                )
            return
        ran = [(case.n, case.k) for case in done]
        usual = USUAL_SHAPE if USUAL_SHAPE in ran else min(ran, key=math.prod)
        steps: tuple[Callable[[str, tuple[int, int]], None], ...] = (
            self._magnitudes,
            self._fresh,
            self._streams,
            self._after_timing,
        )
        self._unaligned(dtype, shapes)
        for step in steps:
            if self.over:
                return
            step(dtype, usual)

    def _sweep(
        self, shapes: Sequence[tuple[int, int]] | None
    ) -> Iterator[tuple[str, tuple[int, int]]]:
        if shapes is not None:
            yield from (("shape", shape) for shape in shapes)
            return
        yield from (("odd shape", (n, k)) for k in ODD_K for n in ODD_N)
        yield from (("many rows", shape) for shape in MANY_ROWS)
        models = SMALL_MODEL if self.device.type == "cpu" else SMALL_MODEL + LARGE_MODELS
        yield from (("model shape", shape) for shape in models)

    def _fits(self, shape: tuple[int, int], dtype: str) -> bool:
        need = shape[0] * shape[1] * (ops.BYTES[dtype] + 4)  # the weights and FP32 random numbers
        return need < free_memory(self.device) * 0.9

    # --- what is checked --------------------------------------------------------------------------

    def _unaligned(self, dtype: str, shapes: Sequence[tuple[int, int]] | None) -> None:
        for shape in UNALIGNED if shapes is None else list(shapes)[:1]:
            for which, offsets in OFFSETS.items():
                name = f"{which} one element off alignment"
                seed = self._next_seed()
                self._numbers(name, _Problem(shape, dtype, self.device, seed, offsets=offsets))
                if self.over:
                    return

    def _magnitudes(self, dtype: str, shape: tuple[int, int]) -> None:
        import torch

        k = shape[1]
        large = math.sqrt(3000.0 / math.sqrt(k))  # results of about 3000; FP16 ends at 65504
        for name, scales in (
            ("weights of 1e-4", (1e-4, 1.0)),
            ("small results", (0.02, 1e-3)),
            ("large results", (large, large)),
        ):
            seed = self._next_seed()
            self._numbers(name, _Problem(shape, dtype, self.device, seed, scales=scales))
            if self.over:
                return
        problem = _Problem(shape, dtype, self.device, self._next_seed())
        problem.w.fill_(2.0 ** -max(0, (k - 1).bit_length() - 15))  # the sum is at most 2^15
        problem.x.fill_(1.0)
        problem.settle()
        self._numbers("all alike", problem)
        # The true sum is 0 and FP32 adds it up without rounding; FP16 overflows on the way.
        for name, group in (("200 x ±200 in turn", 1), ("200 x +200, then 200 x -200", k // 2)):
            if self.over or k % 2 or k > MOST_EXACT_K:
                return
            problem = _Problem(shape, dtype, self.device, self._next_seed())
            index = torch.arange(k, device=self.device)
            problem.w.fill_(200.0)
            problem.x.copy_(200.0 - 400.0 * ((index // group) % 2))
            problem.settle()
            self._numbers(name, problem, exact_sum=k * 200.0 * 200.0)

    def _fresh(self, dtype: str, shape: tuple[int, int]) -> None:
        problem = _Problem(shape, dtype, self.device, self._next_seed())
        self._repeat("twenty calls with fresh inputs", problem, FRESH_CALLS, self._call(problem))

    def _after_timing(self, dtype: str, shape: tuple[int, int]) -> None:
        problem = _Problem(shape, dtype, self.device, self._next_seed())
        call = self._call(problem)

        def then_checked() -> None:
            for _ in range(TIMED_CALLS):
                call()
            self._synchronise()
            problem.randomise()
            problem.poison()
            call()

        self._repeat("after being timed", problem, 1, then_checked)

    def _streams(self, dtype: str, shape: tuple[int, int]) -> None:
        if self.device.type != "cuda":
            return
        import torch

        problem = _Problem(shape, dtype, self.device, self._next_seed())
        call = self._call(problem)
        stream = torch.cuda.Stream(self.device)
        late = torch.empty_like(problem.y)

        def on_side_stream() -> None:
            fresh = problem.x.clone()
            problem.x.zero_()
            self._synchronise()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP_CYCLES)
                problem.x.copy_(fresh)
                problem.poison()
                call()
                late.copy_(problem.y)
            stream.synchronize()
            problem.y.copy_(late)

        self._repeat("on a side stream", problem, 2, on_side_stream)
        if self.over:
            return
        graph: list[torch.cuda.CUDAGraph] = []

        def replayed() -> None:
            if not graph:
                call()  # what compiles on the first call may not do so under capture
                problem.poison()
                self._synchronise()
                captured = torch.cuda.CUDAGraph()
                with torch.cuda.graph(captured):
                    call()
                self._synchronise()
                if not problem.untouched():
                    raise RuntimeError("it ran while the graph was captured")
                graph.append(captured)
            graph[0].replay()

        self._repeat("in a captured graph with changed inputs", problem, 3, replayed)
        if self.over or torch.cuda.device_count() < 2:
            return
        other = (self.device.index + 1) % torch.cuda.device_count()

        def elsewhere() -> None:
            with torch.cuda.device(other):
                call()
                if torch.cuda.current_device() != other:
                    raise RuntimeError("it changed the current device")

        self._repeat("while another GPU is the current one", problem, 1, elsewhere)

    # --- how it is run ----------------------------------------------------------------------------

    def _next_seed(self) -> int:
        self.seed += 1
        return self.seed

    def _call(self, problem: _Problem) -> Callable[[], None]:
        bound: list[Callable[[], None]] = []

        def call() -> None:
            if not bound:
                bound.append(self.gemv.bind(problem.y, problem.w, problem.x))
            bound[0]()

        return call

    def _numbers(self, name: str, problem: _Problem, exact_sum: float | None = None) -> None:
        self._repeat(name, problem, 1, self._call(problem), exact_sum)

    def _repeat(
        self,
        name: str,
        problem: _Problem,
        times: int,
        call: Callable[[], None],
        exact_sum: float | None = None,
    ) -> None:
        """Calls `times` times, each with fresh inputs and a poisoned output: one case."""
        if self.on_case is not None:
            self.on_case(name)
        n, k = problem.shape
        worst = 0.0
        for turn in range(times):
            where = f"call {turn + 1} of {times}: " if times > 1 else ""
            if turn:
                problem.randomise()
            problem.poison()
            self._synchronise()
            try:
                call()
                self._synchronise()
            except NotSupportedError as error:
                fault = "" if problem.untouched() else "it wrote something and said not supported"
                self._add(
                    CheckCase(
                        name, n, k, problem.dtype, None, not fault, False, fault or str(error)
                    )
                )
                return
            except Exception as error:
                words = (str(error).strip().splitlines() or [type(error).__name__])[0]
                self._add(CheckCase(name, n, k, problem.dtype, None, False, True, where + words))
                self.over = self.over or not self._device_works()
                return
            relative, fault = problem.fault(exact_sum)
            if fault:
                self._add(
                    CheckCase(name, n, k, problem.dtype, relative, False, True, where + fault)
                )
                return
            worst = max(worst, relative or 0.0)
        self._add(CheckCase(name, n, k, problem.dtype, worst))

    def _add(self, case: CheckCase) -> None:
        self.cases.append(case)
        if not case.passed and self.stop_at_failure:
            self.over = True

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def _device_works(self) -> bool:
        """False after a fault that leaves the process's GPU context unusable."""
        import torch

        try:
            self._synchronise()
            return bool((torch.ones(1, device=self.device) == 1).all())
        except Exception:
            return False


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, so that NaN equals NaN."""
    import torch

    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
