"""Timed decode steps after a context of random keys and values, for every measurement of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from minidecode.decode import STEPS_PER_GRAPH
from minidecode.errors import MinidecodeError
from minidecode.plan.state import NON_FINITE, PENDING

if TYPE_CHECKING:
    from minidecode.decode import Decoder, Runner

# Every measured text goes on from the same token.
TOKEN = 0

_FILL_SEED = 2


def lead(decoder: Decoder) -> int:
    """Untimed steps before timed ones: on a GPU the host must be ahead when the clock starts."""
    return STEPS_PER_GRAPH if decoder.device.type == "cuda" else 0


def room(decoder: Decoder, depth: int, n: int) -> int:
    """Positions that `n` timed steps after `depth` tokens need, lead included.

    Raises MinidecodeError when the context does not hold as many.
    """
    before = max(depth, lead(decoder))
    if before + n > decoder.max_context:
        raise MinidecodeError(
            f"{n} timed tokens after {before} do not fit the context limit of {decoder.max_context}"
        )
    return before + n


def fill_cache(decoder: Decoder, depth: int) -> None:
    """`depth` tokens in the cache: random keys and values, never zeros, the same every time."""
    state = decoder.state
    generator = torch.Generator(state.device).manual_seed(_FILL_SEED)
    for cache in (state.keys, state.values):
        cache[:, :, :depth].normal_(generator=generator)


def timed_steps(decoder: Decoder, runner: Runner, *, depth: int, n: int) -> float:
    """µs a step, the mean of `n` steps from position `depth` on, after fill_cache and warm-up.

    On a GPU events around graph replays, with `lead` untimed steps before; on the CPU a clock.
    Raises MinidecodeError when a step gives no token.
    """
    ahead = lead(decoder)
    first = max(0, depth - ahead)
    decoder.start(TOKEN, first)
    if decoder.device.type != "cuda":
        begin = time.perf_counter_ns()
        runner.step(n)
        us = (time.perf_counter_ns() - begin) / 1e3 / n
    else:
        stream = torch.cuda.current_stream(decoder.device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        runner.step(ahead)
        events[0].record(stream)
        runner.step(n)
        events[1].record(stream)
        events[1].synchronize()
        us = 1e3 * events[0].elapsed_time(events[1]) / n
    check_tokens(decoder, runner, first, ahead + n)
    return us


def warm_up(decoder: Decoder, runner: Runner, *, depth: int, n: int) -> None:
    """Builds and captures what `timed_steps` needs, and runs it once."""
    first = max(0, depth - lead(decoder))
    for position, steps in ((first, lead(decoder)), (first + lead(decoder), n)):
        decoder.start(TOKEN, position)
        runner.warm_up(steps)
    timed_steps(decoder, runner, depth=depth, n=n)


def check_tokens(decoder: Decoder, runner: Runner, first: int, n: int) -> None:
    """MinidecodeError unless each of the n steps from position `first` on has picked a token."""
    picked = decoder.state.out[first : first + n]
    for offset in (picked < 0).nonzero().flatten().tolist()[:1]:
        position, value = first + offset, int(picked[offset])
        if value == NON_FINITE:
            raise runner.explain_non_finite(position)
        assert value == PENDING
        raise MinidecodeError(f"the step at position {position} gave no token")


def mean_position(depth: int, n: int) -> int:
    """The middle of the positions depth, …, depth + n − 1."""
    return depth + (n - 1) // 2
