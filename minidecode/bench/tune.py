"""Choosing tiles and splits by measuring the whole step: a lone kernel's best is often not the
step's, because neighbours overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from minidecode.bench.stats import median
from minidecode.decode import Decoder, Runner, context_bucket
from minidecode.kernels import step, tune
from minidecode.kernels.tiles import (
    Choices,
    Split,
    Tile,
    split_candidates,
    split_key,
    tile_candidates,
    tile_key,
)
from minidecode.models.stages import LINEAR_KINDS, Attention
from minidecode.plan import KernelSet
from minidecode.plan.fused import file_of

# Time that one candidate is measured for, in microseconds, after a first replay.
_BUDGET_US = 30_000.0
# A new choice must gain this much, or measuring noise would decide.
_LEAST_GAIN = 0.001

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Tuned:
    """Step time before and after, in microseconds, and the choices that made the difference."""

    before_us: float
    after_us: float
    tiles: Mapping[str, Tile]
    splits: Mapping[str, Split]


def tune_step(decoder: Decoder, depth: int, progress: Progress, rounds: int = 2) -> Tuned:
    """Find the quickest tile of each kind of linear layer, and attention split, at `depth`.

    One choice is varied at a time, the others stay; twice around. Nothing is stored.
    """
    state = decoder.prepare(depth + 64)
    state.keys.normal_()
    state.values.normal_()
    best = tune.choices(decoder.device)
    steps = list(_coordinates(decoder, best, depth))
    total = rounds * sum(len(candidates) for _, candidates in steps)
    progress(0.0, "compiling candidates")
    step.build_fused_linears(
        (file_of(kind), choice.tiles[key])
        for key, candidates in steps
        for choice in candidates
        if (kind := key.split()[0]) in LINEAR_KINDS
    )
    before = best_us = _step_us(decoder, best, depth)
    done = 0
    for _ in range(rounds):
        for key, candidates in steps:
            for variation in candidates:
                trial = best.but(variation.tiles, variation.splits)
                us = _step_us(decoder, trial, depth)
                if us < best_us * (1 - _LEAST_GAIN):
                    best, best_us = trial, us
                done += 1
                progress(done / total, f"{key}: {best_us:.1f} us a step")
    keys = [key for key, _ in steps]
    return Tuned(
        before,
        _step_us(decoder, best, depth),
        {k: v for k, v in best.tiles.items() if k in keys},
        {k: v for k, v in best.splits.items() if k in keys},
    )


def _coordinates(
    decoder: Decoder, base: Choices, depth: int
) -> Iterator[tuple[str, list[Choices]]]:
    """What there is to choose: its key, and one Choices for each candidate."""
    c, device = decoder.config, base.device
    empty = Choices(device)
    context = min(context_bucket(depth + 1), decoder.state.capacity)
    key = split_key(c.num_heads, c.num_kv_heads, c.head_dim, context)
    splits = split_candidates(c.num_heads, c.num_kv_heads, c.head_dim, device)
    yield key, [empty.but(splits={key: split}) for split in splits]
    shapes = {
        stage.kind: stage.weight.shape
        for _, stage in decoder.blueprint.stages()
        if not isinstance(stage, Attention)
    }
    for kind, (n, k) in shapes.items():
        key = tile_key(kind, n, k)
        candidates = tile_candidates(k, device.sm90)
        yield key, [empty.but(tiles={key: tile}) for tile in candidates]


def _step_us(decoder: Decoder, choices: Choices, depth: int) -> float:
    """Median device time of one step, in microseconds; infinite if it cannot run."""
    runner = Runner(
        KernelSet("fused", "fused"),
        decoder.blueprint,
        decoder.weights,
        decoder.state,
        choices=choices,
    )
    samples: list[float] = []
    while sum(samples) < _BUDGET_US or len(samples) < 3:
        decoder.start(0, depth)
        runner.warm_up(8)
        began = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        began.record()
        runner.step(8)
        ended.record()
        ended.synchronize()
        samples.append(began.elapsed_time(ended) * 1e3 / 8)
    return median(samples[1:])
