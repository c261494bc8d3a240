"""Prefill, the captured decode step, and the token loop that never waits inside it."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from minidecode.config import ModelConfig
from minidecode.errors import MinidecodeError, UsageError
from minidecode.kernels.tiles import Choices
from minidecode.memory import is_out_of_memory
from minidecode.models.stages import Attention, Blueprint, NormLinear
from minidecode.plan import KernelSet, Plan, State, build_plan, reference
from minidecode.plan.state import NON_FINITE, PENDING
from minidecode.sampling import Sampling, sample
from minidecode.weights import Weights

PREFILL_CHUNK = 512

# Several tokens in one graph: back-to-back replays leave a gap that costs a small model up to 7 %.
STEPS_PER_GRAPH = 8

# Contexts up to this length share one captured step; then every doubling has its own.
_FIRST_BUCKET = 256

# The cache grows in pieces, so that a longer second run does not always capture anew.
_CAPACITY_STEP = 256


@dataclass(frozen=True)
class GenerationStats:
    """What one `generate` did. Times in seconds of wall clock; `step_us` is per decode step.

    `decode_tok_s` excludes the first token and whatever was compiled or captured before it.
    Compiling and capturing come before all of them. `engine` is the plan's, "mixed" where stages
    fell back; the kernel set's where nothing was decoded. `bytes_per_token` is the mean over the
    decode steps, `peak_memory_bytes` of the device's allocations, on the CPU of the process. What
    cannot be computed is None.
    """

    stop_reason: str
    engine: str
    n_prompt: int
    n_gen: int
    prefill_s: float
    ttft_s: float
    decode_s: float
    decode_tok_s: float | None
    step_us: float | None
    bytes_per_token: float | None
    logits_hash: str
    peak_memory_bytes: int | None


class Runner:
    """One kernel set's step over a decoder's state: eager on the CPU, CUDA graphs on a GPU.

    Graphs are captured on first use, for a number of steps and a bucket of context lengths, since
    the attention's split follows the context. `choices` are tiles and splits to try instead of
    those kept for the GPU.
    """

    def __init__(
        self,
        kernels: KernelSet,
        blueprint: Blueprint,
        weights: Weights,
        state: State,
        sampled: bool = False,
        choices: Choices | None = None,
    ) -> None:
        self.kernels = kernels
        self._model = (blueprint, weights, state)
        self._state, self._sampled, self._choices = state, sampled, choices
        self._plans: dict[int, Plan] = {}
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        # Of the graphs enqueued last: the position that each begins at, and its context.
        self._recent: deque[tuple[int, int]] = deque(maxlen=2 * STEPS_PER_GRAPH)

    def plan(self, position: int | None = None) -> Plan:
        """The plan that the step at `position` runs (by default, the next one)."""
        at = self._state.enqueued if position is None else position
        return self._plan(context_bucket(at + 1))

    def _plan(self, context: int) -> Plan:
        if context not in self._plans:
            self._plans[context] = build_plan(
                self.kernels,
                *self._model,
                context=context,
                sampled=self._sampled,
                choices=self._choices,
            )
        return self._plans[context]

    def eager(self, context: int | None = None) -> None:
        """Enqueue one step op by op, of the plan for `context` instead of the position's own."""
        plan = self.plan() if context is None else self._plan(context)
        self._count(1)
        for op in plan.ops:
            op.launch()

    def step(self, n: int = 1) -> None:
        """Enqueue n steps; on a GPU this returns before they have run."""
        if self._state.device.type == "cpu":
            for _ in range(n):
                self.eager()
            return
        for context, count in _schedule(self._state.enqueued, n):
            self._recent.append((self._state.enqueued, context))
            self._count(count)
            self._graph(context, count).replay()

    def repeat(self) -> None:
        """Enqueue the next step op by op, in the plan of the graph that ran it last."""
        at = self._state.enqueued
        ran = (context for start, context in reversed(self._recent) if start <= at)
        self.eager(next(ran, None))

    def warm_up(self, n: int) -> None:
        """Build, and on a GPU capture, all that the next n steps need."""
        if self._state.device.type == "cpu":
            self.plan()
            return
        for context, count in _schedule(self._state.enqueued, n):
            self._graph(context, count)

    def _graph(self, context: int, count: int) -> torch.cuda.CUDAGraph:
        if (context, count) not in self._graphs:
            self._graphs[context, count] = _capture(self._plan(context), self._state, count)
        return self._graphs[context, count]

    def _count(self, n: int) -> None:
        if self._state.enqueued + n > self._state.capacity:
            raise MinidecodeError(
                f"the KV cache holds {self._state.capacity} positions, "
                f"{self._state.enqueued + n} are needed"
            )
        self._state.enqueued += n

    def explain_non_finite(self, position: int) -> MinidecodeError:
        """Run the step at `position` again op by op; the error names the first op gone wrong."""
        blueprint, weights, state = self._model
        token = int(state.token)
        state.seek(position)
        state.take(token, weights[blueprint.embedding][token], position)
        for op in self.plan(position).ops:
            op.launch()
            if op.output.is_floating_point() and not bool(torch.isfinite(op.output).all()):
                return _non_finite(op.name, position)
        return _non_finite("head", position)


class Decoder:
    """A model on a device, ready to decode one sequence with any kernel set.

    Made by `minidecode.load`. `directory` holds the tokenizer; None for a synthetic model.
    """

    def __init__(
        self,
        config: ModelConfig,
        blueprint: Blueprint,
        weights: Weights,
        device: torch.device,
        kernel_set: KernelSet,
        directory: Path | None = None,
        max_context: int | None = None,
        load_seconds: float = 0.0,
    ) -> None:
        self.config, self.blueprint, self.weights = config, blueprint, weights
        self.device, self.kernel_set, self.directory = device, kernel_set, directory
        self.max_context = min(max_context or config.max_position, config.max_position)
        self.load_seconds = load_seconds
        self.last: GenerationStats | None = None
        self._state: State | None = None
        self._runners: dict[tuple[int, bool], tuple[KernelSet, Runner]] = {}

    @property
    def build_seconds(self) -> float:
        """Wall-clock seconds that this process has spent compiling kernels."""
        from minidecode.kernels.build import build_seconds

        return build_seconds()

    @property
    def state(self) -> State:
        """The buffers of the sequence. `prepare` makes them."""
        if self._state is None:
            raise MinidecodeError("prepare() or prefill() must come first: there is no KV cache")
        return self._state

    def prepare(self, tokens: int) -> State:
        """Make sure that the KV cache holds `tokens` positions; what it held may be lost.

        Raises MinidecodeError when that is more than the context limit or than there is memory for.
        """
        if tokens > self.max_context:
            raise MinidecodeError(
                f"{tokens} tokens do not fit the context limit of {self.max_context}"
            )
        if self._state is None or self._state.capacity < tokens:
            self._runners.clear()
            self._state = None
            rounded = min(-(-tokens // _CAPACITY_STEP) * _CAPACITY_STEP, self.max_context)
            try:
                self._state = State(self.config, self.device, rounded)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise MinidecodeError(
                    f"there is no memory on {self.device} for a KV cache of {rounded} tokens"
                ) from error
        return self._state

    def runner(self, kernels: KernelSet | None = None, *, sampled: bool = False) -> Runner:
        """The step under `kernels` (by default the decoder's own) on the state as it is now."""
        chosen = kernels or self.kernel_set
        key = (id(chosen), sampled)
        if key not in self._runners:
            runner = Runner(chosen, self.blueprint, self.weights, self.state, sampled)
            self._runners[key] = (chosen, runner)
        return self._runners[key][1]

    def start(self, token: int, position: int) -> None:
        """Make `token` the next to be processed, at `position`; the cache before it stays."""
        state = self.state
        state.seek(position)
        state.take(token, self.weights[self.blueprint.embedding][token], position)

    def prefill(self, ids: Sequence[int], *, every: bool = False, start: int = 0) -> torch.Tensor:
        """Process a prompt from position `start` and fill the cache; what is before it stays.

        Returns FP32 logits [vocab] after the last token, or [len(ids), vocab] if `every`.
        Raises MinidecodeError for an id outside the vocabulary and for non-finite logits.
        """
        state = self.prepare(max(start + len(ids), 1))
        _check_ids(ids, self.config.vocab_size)
        state.seek(start)
        tokens = torch.tensor(list(ids), device=self.device)
        logits: list[torch.Tensor] = []
        with torch.inference_mode():
            for i in range(0, len(ids), PREFILL_CHUNK):
                x = self._layers(tokens[i : i + PREFILL_CHUNK], start + i, check=False)
                last = i + PREFILL_CHUNK >= len(ids)
                if every or last:
                    logits.append(self._head(x if every else x[-1:]))
            result = torch.cat(logits)
            if not bool(torch.isfinite(result).all()):
                self._find_non_finite(tokens, start)
        state.enqueued = start + len(ids)
        return result if every else result[0]

    def _layers(self, tokens: torch.Tensor, start: int, check: bool) -> torch.Tensor:
        """FP16 [n, hidden] after the last layer, of n tokens from position `start`."""
        weights, state, eps = self.weights, self.state, self.config.rms_norm_eps
        x = weights[self.blueprint.embedding][tokens]
        y = x
        for layer in self.blueprint.layers:
            for stage in layer:
                if isinstance(stage, NormLinear):
                    y = reference.norm_linear(stage, weights, x, eps)
                elif isinstance(stage, Attention):
                    y = reference.attention(stage, weights, state, y, start)
                else:
                    y = x = reference.linear_residual(stage, weights, x, y)
                if check and not bool(torch.isfinite(y).all()):
                    raise _non_finite(stage.name, start)
        return x

    def _head(self, x: torch.Tensor) -> torch.Tensor:
        head = self.blueprint.head
        return reference.norm_linear(head, self.weights, x, self.config.rms_norm_eps).float()

    def _find_non_finite(self, tokens: torch.Tensor, start: int) -> None:
        for i in range(0, len(tokens), PREFILL_CHUNK):
            x = self._layers(tokens[i : i + PREFILL_CHUNK], start + i, check=True)
            if not bool(torch.isfinite(self._head(x)).all()):
                raise _non_finite("head", start + i)

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> Generator[int, None, None]:
        """Yield the tokens that follow the prompt, at most `max_new_tokens`, without the EOS.

        Stops at an id of `eos_token_ids` ("eos"), at the number of tokens or the context limit
        ("length"), or when the caller closes the iterator ("stop"); then `last` says how it went.
        After an error `last` is None.
        """
        if not prompt_ids:
            raise UsageError("the prompt is empty")
        if len(prompt_ids) > self.max_context:
            raise MinidecodeError(
                f"the prompt has {len(prompt_ids)} tokens, the context limit is {self.max_context}"
            )
        sampling = sampling or Sampling()
        total = max(0, min(max_new_tokens, self.max_context - len(prompt_ids)))
        self.last = None
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        state = self.prepare(len(prompt_ids) + total)
        state.set_sampling(sampling)
        state.set_eos(tuple(sorted(eos_token_ids)))
        state.seen.zero_()
        state.seen[torch.tensor(list(prompt_ids), device=self.device)] = True
        runner: Runner | None = None
        if total > 1:
            # Before the clock starts and before any text appears: it may compile and capture.
            runner = self.runner(sampled=not sampling.greedy or sampling.penalises)
            state.seek(len(prompt_ids))
            runner.warm_up(total - 1)
        run = _Run(len(prompt_ids), runner)
        try:
            for token in self._tokens(list(prompt_ids), total, run):
                run.last = time.perf_counter()
                if token in eos_token_ids:
                    run.reason = "eos"
                    break
                run.produced.append(token)
                yield token
            else:
                run.reason = "length"
        except GeneratorExit:
            self.last = self._stats(run)
            raise
        self.last = self._stats(run)

    def _tokens(self, prompt_ids: list[int], total: int, run: _Run) -> Iterator[int]:
        """At most `total` tokens; the first comes from the prefill."""
        state = self.state
        logits = self.prefill(prompt_ids)
        state.logits.copy_(logits)
        run.prefilled = run.first = run.decode_began = run.last = time.perf_counter()
        if total < 1:
            return
        token = int(sample(state.logits, state.sampling, state.generator, state.seen))
        run.first = run.decode_began = run.last = time.perf_counter()
        self.start(token, len(prompt_ids))
        yield token
        if run.runner is not None:
            run.decode_began = time.perf_counter()
            yield from self._decode(run.runner, len(prompt_ids), total - 1)

    def _decode(self, runner: Runner, first: int, n: int) -> Iterator[int]:
        """The tokens picked at positions first, first + 1, …, while the device runs ahead."""
        ahead = 2 * STEPS_PER_GRAPH if self.device.type == "cuda" else 1
        for done in range(n):
            queued = self.state.enqueued - first
            # A whole graph as soon as there is room for one, single steps only at the end.
            while queued < n and (queued - done) <= ahead - min(STEPS_PER_GRAPH, ahead):
                runner.step(min(STEPS_PER_GRAPH, ahead, n - queued))
                queued = self.state.enqueued - first
            token = self._read(first + done)
            if token == NON_FINITE:
                raise runner.explain_non_finite(first + done)
            yield token

    def _read(self, position: int) -> int:
        """The token picked at `position`, as soon as the device has written it."""
        out = self.state.out
        for spin in itertools.count():
            token = int(out[position])
            if token != PENDING:
                return token
            # The query raises what the device has to say, should a kernel have failed.
            if spin % 1000 == 999 and torch.cuda.current_stream(self.device).query():
                token = int(out[position])
                if token == PENDING:
                    raise MinidecodeError(f"the step at position {position} gave no token")
        raise AssertionError("unreachable")

    def _stats(self, run: _Run) -> GenerationStats:
        n_gen = len(run.produced)
        steps = n_gen - 1 + (run.reason == "eos")
        decode_s = run.last - run.decode_began
        timed = run.runner is not None and steps > 0
        plan = run.runner.plan(run.n_prompt) if timed and run.runner is not None else None
        return GenerationStats(
            stop_reason=run.reason,
            engine=self.kernel_set.engine if plan is None else plan.engine,
            n_prompt=run.n_prompt,
            n_gen=n_gen,
            prefill_s=run.prefilled - run.began,
            ttft_s=run.first - run.began,
            decode_s=decode_s,
            decode_tok_s=steps / decode_s if timed else None,
            step_us=decode_s / steps * 1e6 if timed else None,
            bytes_per_token=(
                sum(plan.bytes_per_token(run.n_prompt + i) for i in range(steps)) / steps
                if plan is not None
                else None
            ),
            logits_hash=self._logits_hash(run, steps),
            peak_memory_bytes=peak_memory(self.device),
        )

    def _logits_hash(self, run: _Run, steps: int) -> str:
        """A short SHA-256 of the FP32 logits from which the last token was picked."""
        state = self.state
        last = run.n_prompt + steps - 1
        if run.runner is not None and steps > 0 and state.enqueued > last + 1:
            # The device ran ahead of a stop: that step once more, for its logits.
            token = run.produced[steps - 1]
            self.start(token, last)
            run.runner.repeat()
        return hashlib.sha256(state.logits.cpu().numpy().tobytes()).hexdigest()[:16]


@dataclass
class _Run:
    """Clock readings and tokens of one `generate`, in seconds of time.perf_counter."""

    n_prompt: int
    runner: Runner | None
    produced: list[int] = field(default_factory=list)
    reason: str = "stop"
    began: float = field(default_factory=time.perf_counter)
    prefilled: float = 0.0
    first: float = 0.0
    decode_began: float = 0.0
    last: float = 0.0


def peak_memory(device: torch.device) -> int | None:
    """Most bytes that were allocated on a GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def context_bucket(context: int) -> int:
    """The smallest context limit, of a few, that holds `context` positions."""
    bucket = _FIRST_BUCKET
    while bucket < context:
        bucket *= 2
    return bucket


def _schedule(start: int, n: int) -> Iterator[tuple[int, int]]:
    """(context bucket, number of steps) of the graphs that run n steps from position `start`."""
    while n > 0:
        count = STEPS_PER_GRAPH if n >= STEPS_PER_GRAPH else 1
        yield context_bucket(start + count), count
        start, n = start + count, n - count


def _capture(plan: Plan, state: State, count: int) -> torch.cuda.CUDAGraph:
    """`count` steps of `plan` as one graph; the state is left as it was."""
    saved = state.snapshot()
    stream = torch.cuda.Stream(state.device)
    stream.wait_stream(torch.cuda.current_stream(state.device))
    with torch.cuda.stream(stream):
        # Once outside the capture: libraries allocate and modules load on their first call.
        for op in plan.ops:
            op.launch()
    stream.synchronize()
    state.restore(saved)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            for op in plan.ops:
                op.launch()
    torch.cuda.current_stream(state.device).wait_stream(stream)
    _upload(graph, stream)
    return graph


def _upload(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Bring a graph to the GPU; else its first replay does, within what is timed."""
    upload = ctypes.CDLL("libcuda.so.1").cuGraphUpload
    pointers = (graph.raw_cuda_graph_exec(), stream.cuda_stream)
    status = upload(*map(ctypes.c_void_p, pointers))
    if status != 0:
        raise MinidecodeError(f"a graph could not be uploaded: CUDA error {status}")


def _check_ids(ids: Sequence[int], vocab: int) -> None:
    if not ids:
        raise UsageError("the prompt is empty")
    for token in ids:
        if not 0 <= token < vocab:
            raise MinidecodeError(f"token id {token} is outside the vocabulary of {vocab}")


def _non_finite(op: str, position: int) -> MinidecodeError:
    return MinidecodeError(
        f"{op} gave values that are not finite (FP16 overflow?) at position {position}"
    )
