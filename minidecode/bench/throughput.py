"""Tokens a second of the real loop: llama-bench's tests, one Run each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minidecode.bench import device as machine
from minidecode.bench import stats, steps
from minidecode.bench.gate import Progress, random_ids
from minidecode.decode import peak_memory
from minidecode.records import Run, gb_per_s, is_above, percent

if TYPE_CHECKING:
    from minidecode.decode import Decoder, Runner
    from minidecode.plan import KernelSet
    from minidecode.records import Environment


@dataclass(frozen=True)
class Case:
    """One line of the table: a prompt of `n_prompt` tokens or a text of `n_gen`, after `depth`."""

    n_prompt: int
    n_gen: int
    depth: int

    def positions(self, decoder: Decoder) -> int:
        """What the KV cache must hold."""
        if self.n_prompt:
            return self.depth + self.n_prompt
        return steps.room(decoder, self.depth, self.n_gen)


def cases(prompts: list[int], texts: list[int], depths: list[int]) -> list[Case]:
    """Prompt and text tests of each length at each depth; a length of 0 is no case."""
    found = []
    for depth in depths:
        found += [Case(n, 0, depth) for n in prompts if n]
        found += [Case(0, n, depth) for n in texts if n]
    return found


def run_case(
    decoder: Decoder,
    kernels: KernelSet,
    case: Case,
    *,
    repeats: int,
    model: str,
    environment: Environment,
    progress: Progress | None = None,
) -> Run:
    """One test: a warm-up that does not count, then `repeats` times, by the wall clock.

    A prompt test runs torch's kernels whatever the kernel set, and says so. Raises MinidecodeError
    when the test does not fit the context or a step gives no token.
    """
    on_gpu = decoder.device.type == "cuda"
    state = decoder.prepare(case.positions(decoder))
    state.set_eos(())
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(decoder.device)
    steps.fill_cache(decoder, case.depth)
    n = case.n_prompt + case.n_gen

    def show(done: int) -> None:
        if progress is not None:
            name = f"prompt of {n}" if case.n_prompt else f"{n} tokens with {kernels.name}"
            progress(done / (repeats + 1), f"measuring {name} after {case.depth}")

    if case.n_prompt:
        ids = random_ids(decoder.config.vocab_size, case.n_prompt)
        samples = _repeat(lambda: _prompt_ns(decoder, ids, case.depth), repeats, show)
        return record(decoder, case, samples, "torch", "torch", model, environment)
    runner = decoder.runner(kernels)
    show(0)
    decoder.start(steps.TOKEN, case.depth)
    runner.warm_up(n)
    samples = _repeat(lambda: _text_ns(decoder, runner, case.depth, n), repeats, show)
    if on_gpu:
        steps.warm_up(decoder, runner, depth=case.depth, n=n)
        step_us = [
            steps.timed_steps(decoder, runner, depth=case.depth, n=n) for _ in range(repeats)
        ]
    else:
        step_us = [ns / 1e3 / n for ns in samples]
    middle = steps.mean_position(case.depth, n)
    plan = runner.plan(middle)
    return record(
        decoder,
        case,
        samples,
        kernels.name,
        plan.engine,
        model,
        environment,
        step_us=stats.median(step_us),
        bytes_per_token=plan.bytes_per_token(middle),
    )


def _repeat(sample: Callable[[], int], repeats: int, show: Callable[[int], None]) -> list[int]:
    samples = []
    for i in range(repeats + 1):
        show(i)
        samples.append(sample())
    return samples[1:]


def _prompt_ns(decoder: Decoder, ids: list[int], depth: int) -> int:
    begin = time.perf_counter_ns()
    decoder.prefill(ids, start=depth)  # waits for the logits
    return time.perf_counter_ns() - begin


def _text_ns(decoder: Decoder, runner: Runner, depth: int, n: int) -> int:
    decoder.start(steps.TOKEN, depth)
    _wait(decoder)
    begin = time.perf_counter_ns()
    runner.step(n)
    _wait(decoder)
    ns = time.perf_counter_ns() - begin
    steps.check_tokens(decoder, runner, depth, n)
    return ns


def _wait(decoder: Decoder) -> None:
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)


def record(
    decoder: Decoder,
    case: Case,
    samples: Sequence[int],
    kernel: str,
    engine: str,
    model: str,
    environment: Environment,
    *,
    step_us: float | None = None,
    bytes_per_token: int | None = None,
) -> Run:
    """The Run of `samples`, ns of a whole test each; rates, means and shares follow from them."""
    on_gpu = decoder.device.type == "cuda"
    rates = [(case.n_prompt + case.n_gen) * 1e9 / ns for ns in samples]
    avg_ns, stddev_ns = stats.mean_sd(samples)
    avg_ts, stddev_ts = stats.mean_sd(rates)
    speed = gb_per_s(bytes_per_token or 0, step_us)
    share = percent(speed, environment.read_bw_gb_s)
    config = decoder.config
    return Run(
        build_commit=environment.commit,
        cpu_info=environment.cpu,
        gpu_info=environment.gpu or "",
        backend="CUDA" if on_gpu else "CPU",
        model=model,
        model_type=f"{config.model_type} {_count(config.parameters)} F16",
        model_size=decoder.weights.bytes,
        model_n_params=config.parameters,
        n_prompt=case.n_prompt,
        n_gen=case.n_gen,
        n_depth=case.depth,
        test_time=machine.utc_now(),
        avg_ns=avg_ns,
        stddev_ns=stddev_ns,
        avg_ts=avg_ts,
        stddev_ts=stddev_ts,
        samples_ns=tuple(map(float, samples)),
        samples_ts=tuple(rates),
        kernel=kernel,
        engine=engine,
        step_us=step_us,
        bytes_per_token=bytes_per_token,
        gb_s=speed,
        read_bw_gb_s=environment.read_bw_gb_s,
        pct_read_bw=share,
        served_from_cache=is_above(share),
        peak_memory_bytes=peak_memory(decoder.device),
        load_s=decoder.load_seconds,
        build_s=decoder.build_seconds,
        environment=environment,
    )


def _count(parameters: int) -> str:
    """A number of parameters as llama-bench has it in a model's type: 134.52M, 8.03B."""
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"
