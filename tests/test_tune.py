"""`tune` without a GPU: what it varies, when it takes a choice, and what is kept of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch

import minidecode
from minidecode import cli
from minidecode.bench import gate
from minidecode.bench import tune as tuning
from minidecode.cli import measure, options
from minidecode.errors import KernelWrongError, MinidecodeError
from minidecode.kernels import build, step, tune
from minidecode.kernels.tiles import (
    Choices,
    Device,
    Split,
    Tile,
    default_tile,
    split_key,
    tile_key,
)
from minidecode.plan import KernelSet
from minidecode.plan.cuda import heads_of

GPU = torch.device("cuda", 0)
H200 = Device(132, True)
NAME = "NVIDIA Made Up 1"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Properties of a GPU that is not there, which a test may change; an empty cache."""
    properties = SimpleNamespace(
        name=NAME,
        major=9,
        multi_processor_count=132,
        shared_memory_per_multiprocessor=228 * 1024,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setenv("MINIDECODE_CACHE_DIR", str(tmp_path / "cache"))
    return properties


# --- what is kept ---------------------------------------------------------------------------------

KEY = tile_key("qkv", 960, 576)
SPLIT = Split(2, 8)


def test_what_was_measured_is_used_and_forgotten(gpu: SimpleNamespace) -> None:
    assert tune.choices(GPU) == Choices(H200)
    path = tune.save(GPU, {KEY: Tile(64, 4)}, {})
    tune.save(GPU, {}, {"context": Split(2, 8)})
    assert "made-up-1" in path.name
    found = tune.choices(GPU)
    assert found.tile("qkv", 960, 576) == Tile(64, 4)
    assert found.splits == {"context": Split(2, 8)}
    assert tune.clear(GPU)
    assert not tune.clear(GPU)
    assert tune.choices(GPU) == Choices(H200)


def test_what_other_kernels_were_measured_with_is_not_used(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune.save(GPU, {KEY: Tile(64, 4)}, {})
    monkeypatch.setattr(tune, "source_hash", lambda: "another")
    assert tune.choices(GPU) == Choices(H200)
    path = tune.save(GPU, {}, {"context": Split(2, 8)})
    assert json.loads(path.read_text())["tiles"] == {}


SPLITS = '{"sources": "HASH", "splits": {"context": %s}}'
TILES = '{"sources": "HASH", "tiles": {"qkv 960x576": %s}}'


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]"),
        *(TILES % t for t in ('{"x": 1}', '{"threads": 33, "rows": 2}', '{"threads": 64}')),
        TILES % '{"threads": 64, "rows": 4, "resident": null}',
        TILES % '{"threads": 64, "rows": 0}',
        TILES % '{"threads": 64, "rows": "1;"}',
        *(SPLITS % s for s in ('{"splits": 99, "warps": 8}', '{"splits": 2, "warps": 0}')),
        SPLITS % '{"splits": 2, "warps": true}',
    ],
)
def test_a_damaged_file_counts_as_empty(text: str, gpu: SimpleNamespace) -> None:
    path = tune.cache_file(GPU)
    path.parent.mkdir(parents=True)
    path.write_text(text.replace("HASH", tune.source_hash()))
    assert tune.choices(GPU) == Choices(H200)
    tune.save(GPU, {KEY: Tile(64, 4)}, {})
    assert tune.choices(GPU).tiles[KEY] == Tile(64, 4)


def test_what_was_measured_here_comes_before_what_we_ship(gpu: SimpleNamespace) -> None:
    gpu.name = "NVIDIA H200"
    shipped = tune.choices(GPU)
    assert shipped.tile("qkv", 960, 576) != default_tile(960, 576, H200)
    tune.save(GPU, {KEY: Tile(64, 4)}, {})
    assert tune.choices(GPU).tile("qkv", 960, 576) == Tile(64, 4)
    assert tune.choices(GPU).tile("o", 576, 576) == shipped.tile("o", 576, 576)


def test_the_hash_is_of_all_that_the_kernels_include(monkeypatch: pytest.MonkeyPatch) -> None:
    tune.source_hash.cache_clear()
    before = tune.source_hash()
    header = build.cuda_sources() / "include" / "minidecode" / "rows.cuh"
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda p: read(p) + b" " * (p == header))
    tune.source_hash.cache_clear()
    assert tune.source_hash() != before
    monkeypatch.undo()
    tune.source_hash.cache_clear()


@pytest.mark.parametrize(("major", "sm90"), [(8, False), (9, True), (12, True)])
def test_a_gpu_as_the_rules_see_it(major: int, sm90: bool, gpu: SimpleNamespace) -> None:
    gpu.major, gpu.shared_memory_per_multiprocessor = major, 100 * 1024
    assert tune.device_of(GPU) == Device(132, sm90, 99 * 1024)


# --- how it chooses -------------------------------------------------------------------------------


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuning.Tuned]:
    """Tunes a tiny model on the CPU for an H200, where `us(choices)` is what a step takes."""

    def run(
        model: tiny.Tiny, us: Callable[[Choices], float], depth: int = 128, **options: Any
    ) -> tuning.Tuned:
        decoder = minidecode.load(model.directory)
        monkeypatch.setattr(tune, "choices", lambda _: Choices(H200))
        monkeypatch.setattr(step, "compile_kernels", lambda fused: list(fused))
        monkeypatch.setattr(tuning, "_step_us", lambda _, choices, depth: us(choices))
        return tuning.tune_step(decoder, depth, lambda share, text: None, **options)

    return run


def test_the_quickest_of_each_kind_is_found(
    made: Callable[..., tiny.Tiny], tuned: Callable[..., tuning.Tuned]
) -> None:
    model = made(max_position_embeddings=1024)
    heads = heads_of(minidecode.load(model.directory).config)
    wanted = Tile(64, 8, 1, 0, 10)

    mlp = tiny.BASE["intermediate_size"]
    shapes = {"qkv": (128, 64), "o": (64, 64), "gate_up": (2 * mlp, 64), "down": (64, mlp)}
    shapes["head"] = tiny.VOCAB, 64

    def us(choices: Choices) -> float:
        away = [choices.tile(kind, *shape) != wanted for kind, shape in shapes.items()]
        return 100.0 + sum(away) + (choices.split(heads, 256) != Split(2, 8))

    found = tuned(model, us)
    assert (found.before_us, found.after_us) == (106.0, 100.0)
    assert set(found.tiles.values()) == {wanted}
    assert len(found.tiles) == 5
    assert found.splits == {split_key(heads, 256): Split(2, 8)}
    assert set(tuned(model, us, tiles=False).tiles) == set()


def test_a_choice_that_gains_nothing_is_not_made(
    made: Callable[..., tiny.Tiny], tuned: Callable[..., tuning.Tuned]
) -> None:
    turns = iter(range(10**6))
    found = tuned(made(max_position_embeddings=1024), lambda _: 100.0 - next(turns) * 1e-6)
    assert (found.tiles, found.splits) == ({}, {})
    assert found.before_us == found.after_us


def test_a_choice_that_was_only_luck_is_not_made(
    made: Callable[..., tiny.Tiny], tuned: Callable[..., tuning.Tuned]
) -> None:
    seen: set[str] = set()

    def us(choices: Choices) -> float:
        """What has not been measured before is quick, once."""
        key = repr((sorted(choices.tiles.items()), sorted(choices.splits.items())))
        known = key in seen
        seen.add(key)
        return 100.0 if known else 99.0 - len(seen) * 1e-3

    found = tuned(made(max_position_embeddings=1024), us)
    assert (found.before_us, found.after_us) == (100.0, 100.0)
    assert (found.tiles, found.splits) == ({}, {})


def test_a_window_is_the_context_that_is_tuned(
    made: Callable[..., tiny.Tiny], tuned: Callable[..., tuning.Tuned]
) -> None:
    """Only the split that the step looks up is varied: any other would be decided by noise."""
    model = made(model_type="mistral", sliding_window=100, max_position_embeddings=1024)
    heads = heads_of(minidecode.load(model.directory).config)
    asked: set[str] = set()

    def us(choices: Choices) -> float:
        asked.update(choices.splits)
        return 100.0

    tuned(model, us, depth=600, tiles=False)
    assert asked == {split_key(heads, 100)}


@pytest.mark.parametrize("depth", [0, 128, 250, 255, 256, 1000])
def test_all_steps_are_in_one_bucket(
    depth: int, made: Callable[..., tiny.Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = minidecode.load(made(max_position_embeddings=1024).directory)
    begun: set[int] = set()
    monkeypatch.setattr(tune, "choices", lambda _: Choices(H200))
    monkeypatch.setattr(step, "compile_kernels", lambda fused: list(fused))
    monkeypatch.setattr(tuning, "_step_us", lambda _, c, depth: begun.add(depth) or 1.0)
    tuning.tune_step(decoder, depth, lambda share, text: None, tiles=False)
    (first,) = begun
    steps = (tuning._REPLAYS + 2) * tuning.STEPS_PER_GRAPH
    bucket = tuning.context_bucket(depth + 1)
    assert tuning.context_bucket(first + 1) == tuning.context_bucket(first + steps) == bucket
    assert first <= depth


def test_nothing_that_runs_is_an_error_that_names_it(
    made: Callable[..., tiny.Tiny], tuned: Callable[..., tuning.Tuned]
) -> None:
    with pytest.raises(MinidecodeError, match=r"no candidate for .* heads of .* runs on this GPU"):
        tuned(made(max_position_embeddings=1024), lambda _: math.inf)


# --- the command ----------------------------------------------------------------------------------


def test_show_and_clear(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("minidecode.loading.resolve_device", lambda _: GPU)
    tune.save(GPU, {KEY: Tile(64, 4)}, {"9/3 heads of 64, context 256": Split(2, 8)})
    assert cli.main(["tune", "--show"]) == 0
    out = capsys.readouterr().out
    assert f"{KEY:28s} Tile<64,4,1,0,1>" in out
    assert "2 x 8 warps" in out
    for said in ("cleared", "there was nothing to clear"):
        assert cli.main(["tune", "--clear"]) == 0
        assert capsys.readouterr().out.strip() == said


@pytest.fixture
def gated(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[KernelSet]:
    """`tune` with a decoder that is not there; the kernel sets that its gate has seen."""
    decoder = SimpleNamespace(kernel_set=KernelSet("fused", "fused"))
    seen: list[KernelSet] = []

    class Gate:
        def __init__(self, *_: object) -> None: ...

        def check(self, arms: list[tuple[str, KernelSet]], when: str) -> None:
            ((_, kernels),) = arms
            assert kernels is not decoder.kernel_set
            assert when == "after"
            seen.append(kernels)

    monkeypatch.setattr("minidecode.loading.resolve_device", lambda _: GPU)
    monkeypatch.setattr(options, "load", lambda *_: decoder)
    monkeypatch.setattr(measure, "gate_ids", lambda _: [1])
    monkeypatch.setattr(gate, "Gate", Gate)
    return seen


def test_only_what_gained_is_kept(
    gated: list[KernelSet],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = [tuning.Tuned(100.0, 100.0, {}, {}), tuning.Tuned(110.0, 100.0, {}, {KEY: SPLIT})]
    monkeypatch.setattr(tuning, "tune_step", lambda *_, tiles: chosen.pop(0))
    assert cli.main(["tune", "-d", "128"]) == 0
    assert capsys.readouterr().out == "depth 128: 100.0 us a step, nothing quicker found\n"
    assert not tune.cache_file(GPU).exists()
    assert not gated
    assert cli.main(["tune", "-d", "128"]) == 0
    assert len(gated) == 1
    said, kept = capsys.readouterr().out.splitlines()
    assert said == "depth 128: 110.0 us a step before, 100.0 us after (+10.0 %)"
    assert kept == f"kept in {tune.cache_file(GPU)}"
    assert tune.choices(GPU).splits[KEY] == SPLIT


def test_wrong_tiles_are_forgotten(
    gated: list[KernelSet], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        assert tune.cache_file(GPU).exists()
        raise KernelWrongError("kernel fused is wrong")

    found = tuning.Tuned(110.0, 100.0, {KEY: Tile(64, 4)}, {})
    monkeypatch.setattr(tuning, "tune_step", lambda *_, tiles: found)
    monkeypatch.setattr(gate.Gate, "check", refuse)
    assert cli.main(["tune"]) == 3
    captured = capsys.readouterr()
    assert "kept in" not in captured.out
    assert "kernel fused is wrong; what was kept for this GPU is forgotten" in captured.err
    assert not tune.cache_file(GPU).exists()


def test_the_cpu_has_nothing_to_choose(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--device", "cpu"]) == 5
    assert len(capsys.readouterr().err.splitlines()) == 1
