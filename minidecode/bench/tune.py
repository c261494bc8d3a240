"""Choosing tiles and splits by measuring the whole step: a lone kernel's best is often not the
step's, because neighbours overlap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from minidecode.bench import steps
from minidecode.bench.stats import median
from minidecode.decode import STEPS_PER_GRAPH, Decoder, Runner, context_bucket
from minidecode.errors import MinidecodeError
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
from minidecode.models.stages import Attention
from minidecode.plan import KernelSet
from minidecode.plan.cuda import heads_of
from minidecode.plan.fused import file_of

# Replays that one candidate is measured for, after a first one.
_REPLAYS = 4
# Below this many bytes of weights the gap between replays matters: several steps in each.
_SMALL_MODEL = 2**30
# In the second round only candidates this close to the best of the first are measured again.
_CLOSE = 1.03
# A new choice must gain this much, or measuring noise would decide.
_LEAST_GAIN = 0.001

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Tuned:
    """Step time before and after, in microseconds, and the choices that made the difference.

    Without choices nothing was quicker, and both times are of the step as it was.
    """

    before_us: float
    after_us: float
    tiles: Mapping[str, Tile]
    splits: Mapping[str, Split]


def tune_step(decoder: Decoder, depth: int, progress: Progress, *, tiles: bool = True) -> Tuned:
    """Find the quickest attention split, and tile of each kind of linear layer, at `depth`.

    One choice is varied at a time while the others stay, twice around. Without `tiles` only the
    split is chosen, for contexts like this one. Nothing is stored. Raises MinidecodeError when no
    candidate runs on this GPU.
    """
    bucket = context_bucket(depth + 1)
    last = min(bucket, decoder.max_context)
    decoder.prepare(max(depth + 1, last))
    # All that is measured must be in the bucket of contexts that the choice is for.
    depth = max(0, min(depth, last - (_REPLAYS + 2) * STEPS_PER_GRAPH))
    steps.fill_cache(decoder, last)
    first = best = tune.choices(decoder.device)
    coordinates = list(_coordinates(decoder, best, bucket, tiles))
    total = sum(len(candidates) for _, candidates in coordinates)
    progress(0.0, "compiling candidates")
    step.compile_kernels(
        (file_of(key.split()[0]), tile)
        for key, candidates in coordinates
        for choice in candidates
        for tile in choice.tiles.values()
    )
    best_us = _step_us(decoder, best, depth)
    done = 0
    for again in (False, True):
        for at, (key, candidates) in enumerate(coordinates):
            measured: list[tuple[float, Choices]] = []
            for variation in candidates:
                trial = best.but(variation.tiles, variation.splits)
                measured.append((_step_us(decoder, trial, depth), variation))
                done += not again
                progress(done / total, f"{key}: {best_us:.1f} us a step")
            us, variation = min(measured, key=lambda pair: pair[0])
            if us == math.inf:
                raise MinidecodeError(f"tune: no candidate for {key} runs on this GPU")
            if us < best_us * (1 - _LEAST_GAIN):
                best, best_us = best.but(variation.tiles, variation.splits), us
            coordinates[at] = (key, [v for t, v in measured if t < us * _CLOSE])
    if best is first:
        return Tuned(best_us, best_us, {}, {})
    # The least of many measurements is partly luck: both once more, one after the other.
    before, after = (_step_us(decoder, choices, depth) for choices in (first, best))
    if after >= before:
        return Tuned(before, before, {}, {})
    keys = [key for key, _ in coordinates]
    return Tuned(
        before,
        after,
        {k: v for k, v in best.tiles.items() if k in keys},
        {k: v for k, v in best.splits.items() if k in keys},
    )


def _coordinates(
    decoder: Decoder, base: Choices, bucket: int, tiles: bool
) -> Iterator[tuple[str, list[Choices]]]:
    """What there is to choose: its key, and one Choices for each candidate."""
    heads, device = heads_of(decoder.config), base.device
    empty = Choices(device)
    stages = [stage for _, stage in decoder.blueprint.stages()]
    windows = [stage.window or bucket for stage in stages if isinstance(stage, Attention)]
    for context in sorted({min(bucket, window) for window in windows}):
        key = split_key(heads, context)
        splits = split_candidates(heads, device)
        yield key, [empty.but(splits={key: split}) for split in splits]
    if not tiles:
        return
    shapes = {s.kind: s.weight.shape for s in stages if not isinstance(s, Attention)}
    for kind, (n, k) in shapes.items():
        key = tile_key(kind, n, k)
        candidates = tile_candidates(k, device)
        yield key, [empty.but(tiles={key: tile}) for tile in candidates]


def _step_us(decoder: Decoder, choices: Choices, depth: int) -> float:
    """Median device time of one step, in microseconds; infinite for what does not launch."""
    runner = Runner(
        KernelSet("fused", "fused"),
        decoder.blueprint,
        decoder.weights,
        decoder.state,
        choices=choices,
    )
    count = STEPS_PER_GRAPH if decoder.weights.bytes < _SMALL_MODEL else 1
    decoder.start(steps.TOKEN, depth)
    try:
        runner.warm_up(count)
    except MinidecodeError:
        return math.inf
    # Replays follow each other without a gap, so the time between two events is the device's.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]
    runner.step(count)
    for mark in marks[:-1]:
        mark.record()
        runner.step(count)
    marks[-1].record()
    marks[-1].synchronize()
    return median([a.elapsed_time(b) * 1e3 / count for a, b in itertools.pairwise(marks)])
