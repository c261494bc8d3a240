"""Two kernel sets in turn on one model: which decodes faster, and is the difference real?

Both arms run over the same weights, cache and buffers in one process. The gate comes first and
again at the end. In between each round times the two arms next to each other, AB BA AB …, and next
to that A against another capture of itself, whose spread is the noise floor: what the machine
calls a difference where there is none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from minidecode.bench import device as machine
from minidecode.bench import stats, steps
from minidecode.bench.gate import Gate, Progress
from minidecode.records import ABResult, Arm, gb_per_s, is_above, percent

if TYPE_CHECKING:
    from minidecode.decode import Decoder, Runner
    from minidecode.plan import KernelSet
    from minidecode.records import Environment

# What people call a kernel set, and the set.
Named: TypeAlias = "tuple[str, KernelSet]"


def run(
    decoder: Decoder,
    a: Named,
    b: Named,
    ids: Sequence[int],
    *,
    only: tuple[str, ...] = (),
    n: int,
    depth: int,
    rounds: int,
    model: str,
    command: str,
    environment: Environment,
    progress: Progress | None = None,
) -> ABResult:
    """`rounds` pairs of `n` steps each after `depth` tokens.

    `ids` is the text that the gate runs over; `only` says in which linear layers B differs from A,
    if not in all. Raises KernelWrongError when an arm is wrong, before or after the timed part;
    MinidecodeError for too few rounds or a depth that does not fit.
    """
    show = progress or (lambda share, label: None)
    # Sets of their own, so that each arm is captured for itself even when both have one kernel.
    sets = [a[1], dataclasses.replace(b[1]), dataclasses.replace(a[1])]
    decoder.prepare(max(len(ids), steps.room(decoder, depth, n))).set_eos(())
    gate = Gate(decoder, ids, progress)
    named = ((a[0], sets[0]), (b[0], sets[1]))
    before = gate.check(named, "before")
    steps.fill_cache(decoder, depth)
    runners = [decoder.runner(kernels) for kernels in sets]
    for runner in runners:
        show(None, f"warming up {runner.kernels.name}")
        steps.warm_up(decoder, runner, depth=depth, n=n)
    state_before = machine.gpu_state(decoder.device)
    times: list[list[float]] = [[], [], [], []]
    arms = [(runners[0], times[0]), (runners[1], times[1])]
    noise = [(runners[0], times[2]), (runners[2], times[3])]
    for done in range(rounds):
        show(done / rounds, f"timing {a[0]} and {b[0]} in turn")
        for pair in (arms, noise):
            for runner, samples in pair if done % 2 == 0 else pair[::-1]:
                samples.append(steps.timed_steps(decoder, runner, depth=depth, n=n))
    state_after = machine.gpu_state(decoder.device)
    compared = stats.compare(*times)
    after = gate.check(named, "after")
    middle = steps.mean_position(depth, n)
    return ABResult(
        model=model,
        depth=depth,
        only=only,
        rounds=rounds,
        a=_arm(a[0], runners[0], middle, times[0], environment),
        b=_arm(b[0], runners[1], middle, times[1], environment),
        gates=before + after,
        ratio=compared.ratio.value,
        ratio_low=compared.ratio.low,
        ratio_high=compared.ratio.high,
        noise_floor=compared.floor,
        noise_ratio=compared.noise.value,
        noise_low=compared.noise.low,
        noise_high=compared.noise.high,
        noise_samples_us=tuple(x for pair in zip(times[2], times[3], strict=True) for x in pair),
        verdict=compared.verdict,
        read_bw_gb_s=environment.read_bw_gb_s,
        drift_pct=100.0 * stats.drift(times[0]),
        state_before=state_before,
        state_after=state_after,
        command=command,
        environment=environment,
    )


def _arm(
    name: str,
    runner: Runner,
    position: int,
    samples_us: Sequence[float],
    environment: Environment,
) -> Arm:
    """One arm; its bytes are those of the step at `position`, the middle of what was timed."""
    plan = runner.plan(position)
    n_bytes = plan.bytes_per_token(position)
    step_us = stats.median(samples_us)
    speed = gb_per_s(n_bytes, step_us)
    share = percent(speed, environment.read_bw_gb_s)
    return Arm(
        kernel=name,
        engine=plan.engine,
        tokens_s=1e6 / step_us,
        step_us=step_us,
        bytes_per_token=n_bytes,
        gb_s=speed,
        pct_read_bw=share,
        served_from_cache=is_above(share),
        samples_us=tuple(samples_us),
    )
