"""The decode step as data: names and order of the ops, kernel sets, the byte model, work splits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from decoding import IDS

import minidecode
from minidecode import models
from minidecode.decode import Decoder
from minidecode.errors import MinidecodeError, MissingError, UsageError
from minidecode.kernels import registry, step
from minidecode.kernels.tiles import (
    ANY_WARPS,
    HEADS_PER_BLOCK,
    MAX_SPLITS,
    Choices,
    Device,
    Heads,
    Split,
    Tile,
    default_split,
    default_tile,
    split_candidates,
    split_key,
    tile_candidates,
    tile_key,
)
from minidecode.models import synthetic
from minidecode.models.stages import Attention
from minidecode.plan import KernelSet, Plan, build_plan, kernel_set, linear_kinds
from minidecode.plan.op import stage_bytes
from minidecode.plan.state import PENDING

CPU = torch.device("cpu")

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 4},
    "qwen2": {
        "model_type": "qwen2",
        "sliding_window": 5,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
}


@pytest.fixture(scope="module", params=MODELS)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    model = tiny.build(tmp_path_factory.mktemp("tiny") / "model", **MODELS[request.param])
    decoder = minidecode.load(model.directory, device="cpu")
    decoder.prefill(IDS)
    return decoder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    model = tiny.build(
        tmp_path_factory.mktemp("tiny") / "model", attention_bias=True, mlp_bias=True
    )
    decoder = minidecode.load(model.directory, device="cpu")
    decoder.prefill(IDS)
    return decoder


def composed() -> KernelSet:
    return KernelSet("torch-composed", "composed", registry.gemvs()["torch"])


def plan_of(decoder: Decoder, kernels: KernelSet, **options: Any) -> Plan:
    return build_plan(kernels, decoder.blueprint, decoder.weights, decoder.state, **options)


# --- ops ------------------------------------------------------------------------------------------


def test_reference_plan_has_one_op_a_stage(decoder: Decoder) -> None:
    plan = plan_of(decoder, decoder.kernel_set)
    assert [op.name for op in plan.ops] == [
        *(
            f"layers.{i}.{name}"
            for i in range(2)
            for name in ("attn.qkv", "attn.attention", "attn.o", "mlp.gate_up", "mlp.down")
        ),
        "head",
        "next_token",
    ]
    assert [op.layer for op in plan.ops] == [0] * 5 + [1] * 5 + [None] * 2
    assert plan.engine == "torch"


def test_composed_plan(llama: Decoder) -> None:
    plan = plan_of(llama, composed())
    names = [op.name for op in plan.ops]
    layer = [
        "attn.norm",
        "attn.qkv",
        "attn.qkv.bias",
        "attn.attention",
        "attn.o",
        "attn.o.bias",
        "mlp.norm",
        "mlp.gate_up",
        "mlp.gate_up.bias",
        "mlp.swiglu",
        "mlp.down",
        "mlp.down.bias",
    ]
    assert names == [
        *(f"layers.{i}.{name}" for i in range(2) for name in layer),
        *("head.norm", "head", "argmax", "next_token"),
    ]
    assert len(set(names)) == len(names)
    # Each addition to the residual stream is made by the norm that follows.
    kernels = {op.name: op.kernel for op in plan.ops}
    assert kernels["layers.0.attn.norm"] == "rms_norm"
    for name in ("layers.0.mlp.norm", "layers.1.attn.norm", "layers.1.mlp.norm", "head.norm"):
        assert kernels[name] == "add_rms_norm"
    assert plan.engine == "composed"


@pytest.mark.parametrize(
    ("kind", "added"),
    [
        ("qkv", {"attn.norm", "attn.qkv.bias"}),
        ("o", {"attn.o.bias", "attn.residual"}),
        ("gate_up", {"mlp.norm", "mlp.gate_up.bias", "mlp.swiglu"}),
        ("down", {"mlp.down.bias", "mlp.residual"}),
    ],
)
def test_a_swap_composes_its_layers_alone(llama: Decoder, kind: Any, added: set[str]) -> None:
    whole = [op.name for op in plan_of(llama, llama.kernel_set).ops]
    swapped = plan_of(llama, llama.kernel_set.swap((kind,), composed()))
    names = [op.name for op in swapped.ops]
    assert [n for n in names if n in whole] == whole
    assert set(names) - set(whole) == {f"layers.{i}.{n}" for i in range(2) for n in added}
    assert swapped.engine == "mixed"
    engines = {op.kind: op.engine for op in swapped.ops if op.kind in ("qkv", "o", "down", "head")}
    assert engines.get(kind, "composed") == "composed"
    assert list(engines.values()).count("torch") >= 3


def test_a_swapped_head_gets_an_argmax(llama: Decoder) -> None:
    plan = plan_of(llama, llama.kernel_set.swap(("head",), composed()))
    assert [op.name for op in plan.ops][-4:] == ["head.norm", "head", "argmax", "next_token"]


def test_shapes_are_those_of_the_weights(decoder: Decoder) -> None:
    c = decoder.config
    shapes = {op.name: op.shape for op in plan_of(decoder, composed()).ops}
    assert shapes["layers.1.attn.qkv"] == (c.q_size + 2 * c.kv_size, c.hidden_size)
    assert shapes["layers.1.attn.o"] == (c.hidden_size, c.q_size)
    assert shapes["layers.1.mlp.gate_up"] == (2 * c.intermediate_size, c.hidden_size)
    assert shapes["layers.1.mlp.down"] == (c.hidden_size, c.intermediate_size)
    assert shapes["head"] == (c.vocab_size, c.hidden_size)
    assert shapes["layers.1.attn.attention"] == (c.num_heads, c.head_dim)


def test_plans_share_buffers(decoder: Decoder) -> None:
    one, other = plan_of(decoder, decoder.kernel_set), plan_of(decoder, composed())
    outputs = {op.name: op.output.data_ptr() for op in one.ops}
    for op in other.ops:
        if op.kind in ("qkv", "attention", "next_token"):
            assert op.output.data_ptr() == outputs[op.name]


def test_every_op_writes_its_output(decoder: Decoder) -> None:
    for kernels in (decoder.kernel_set, composed()):
        decoder.prefill(IDS)
        decoder.start(5, len(IDS))
        for op in plan_of(decoder, kernels).ops:
            if op.output is not decoder.state.x and op.kind != "bias":  # these are added to
                op.output.fill_(float("nan") if op.output.is_floating_point() else -1)
            before = op.output.clone()
            op.launch()
            assert bool(torch.isfinite(op.output).all()), op.name
            assert not torch.equal(op.output, before), op.name


def test_sampling_has_an_op_only_where_a_kernel_draws(decoder: Decoder) -> None:
    names = [op.name for op in plan_of(decoder, composed(), sampled=True).ops]
    assert "sample" not in names  # the CPU's next_token draws


# --- kernel sets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        ("qkv", ("qkv",)),
        ("down_proj,o", ("down", "o")),
        ("q_proj,k_proj,v_proj,qkv", ("qkv",)),
        (" gate_proj , up_proj ,", ("gate_up",)),
        ("lm_head,o_proj", ("head", "o")),
    ],
)
def test_names_of_linear_layers(names: str, kinds: tuple[str, ...]) -> None:
    assert linear_kinds(names) == kinds


def test_unknown_linear_layer() -> None:
    with pytest.raises(UsageError, match=r"'attn'; there are qkv, o, gate_up, down, head, q_proj"):
        linear_kinds("o,attn")
    for empty in ("", " , "):
        with pytest.raises(UsageError, match="--only: no linear layer in it"):
            linear_kinds(empty)


def test_default_kernel_set_of_the_cpu() -> None:
    for spec in (None, "torch"):
        kernels = kernel_set(spec, CPU)
        assert (kernels.name, kernels.engine) == ("torch", "torch")


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("fused", MissingError, "fused engine needs a CUDA GPU"),
        ("half2_block", MissingError, "'half2_block' runs on cuda, not on cpu"),
        ("half2_blok", UsageError, "did you mean half2_block"),
        ("fusd", UsageError, "did you mean fused"),
        ("nowhere.cu", UsageError, r"nowhere\.cu"),
    ],
)
def test_kernel_sets_that_cannot_be(spec: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        kernel_set(spec, CPU)


def test_a_whole_engine_is_no_swap() -> None:
    fused = KernelSet("fused", "fused")
    with pytest.raises(UsageError, match="'fused' is a whole engine"):
        composed().swap(("o",), fused)


def test_swaps_add_up(llama: Decoder, tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text("def f(y, w, x):\n    y.copy_(w @ x)\n")
    mine = kernel_set(f"{tmp_path / 'k.py'}:f", CPU)
    both = llama.kernel_set.swap(("o", "down"), composed()).swap(("down",), mine)
    kernels = {op.kind: op.kernel for op in plan_of(llama, both).ops}
    assert kernels["o"] == "torch"
    assert kernels["down"] == mine.name
    assert kernels["qkv"] == "torch"
    assert "+" in both.name


# --- bytes ----------------------------------------------------------------------------------------


def test_bytes_of_the_plan_equal_the_model_of_the_config(decoder: Decoder) -> None:
    c = decoder.config
    for kernels in (decoder.kernel_set, composed()):
        plan = plan_of(decoder, kernels)
        for position in (0, 1, 3, 4, 5, 100):
            expected = c.weight_bytes() + c.kv_read_bytes(position)
            assert plan.bytes_per_token(position) == expected, (kernels.name, position)


def test_weights_on_the_device_are_the_parameters(decoder: Decoder) -> None:
    assert decoder.weights.bytes == 2 * decoder.config.parameters


@pytest.mark.parametrize("name", synthetic.SHAPES)
def test_bytes_of_real_dimensions(name: str) -> None:
    config = synthetic.config(name)
    blueprint = models.family(config.model_type).blueprint(config)
    linears = sum(stage_bytes(s) for _, s in blueprint.stages() if not isinstance(s, Attention))
    norms = [
        p
        for _, s in blueprint.stages()
        if isinstance(s, Attention)
        for p in (s.q_norm, s.k_norm)
        if p is not None
    ]
    row = 2 * config.hidden_size
    assert linears + 2 * sum(math.prod(p.shape) for p in norms) + row == config.weight_bytes()
    assert sum(math.prod(p.shape) for p in blueprint.parameters()) == config.parameters


# --- state ----------------------------------------------------------------------------------------


def test_snapshot_and_restore(llama: Decoder) -> None:
    llama.prefill(IDS)
    llama.start(5, len(IDS))
    runner, state = llama.runner(), llama.state
    saved, enqueued = state.snapshot(), state.enqueued
    runner.step(1)
    first = state.logits.clone(), int(state.out[len(IDS)])
    assert int(state.position) == len(IDS) + 1
    assert first[1] != PENDING
    state.enqueued = enqueued
    state.restore(saved)
    assert int(state.out[len(IDS)]) == PENDING
    assert int(state.position) == len(IDS)
    runner.step(1)
    assert torch.equal(state.logits, first[0])
    assert int(state.out[len(IDS)]) == first[1]


def test_a_stopped_state_does_not_advance(llama: Decoder) -> None:
    llama.prefill(IDS)
    llama.start(5, len(IDS))
    runner, state = llama.runner(), llama.state
    runner.step(1)
    token = int(state.out[len(IDS)])
    state.set_eos((token,))
    llama.start(5, len(IDS))
    runner.step(3)
    assert int(state.position) == len(IDS) + 1
    assert state.out[len(IDS) : len(IDS) + 3].tolist() == [token, PENDING, PENDING]
    state.set_eos(())


# --- how work is divided --------------------------------------------------------------------------

H200 = Device(132, True)
A100 = Device(108, False, 163 * 1024)
RTX_5090 = Device(170, True, 99 * 1024)


@pytest.mark.parametrize("k", [8, 576, 1536, 2048, 4096, 14_336])
@pytest.mark.parametrize("n", [8, 960, 3072, 28_672, 151_936])
def test_default_tile_runs_everywhere(n: int, k: int) -> None:
    for device in (A100, H200, RTX_5090):
        tile = default_tile(n, k, device)
        assert tile.fits(k, device)
        assert tile.staged * k * 2 < device.shared_bytes
        assert device.sm90 or not tile.staged
        assert tile.rows % 2 == tile.staged % 2 == 0  # multiplied in pairs
        assert tile.threads % 32 == 0


@pytest.mark.parametrize("k", [576, 4096, 14_336])
def test_tile_candidates(k: int) -> None:
    tiles = tile_candidates(k, H200)
    assert len(set(tiles)) == len(tiles)
    for tile in tiles:
        assert tile.threads % 32 == 0
        assert 0 < tile.rows + tile.staged < 32
        assert tile.rows % 2 == tile.staged % 2 == 0
        assert tile.resident * tile.staged * k * 2 < H200.shared_bytes
    assert not any(tile.staged for tile in tile_candidates(k, A100))
    smaller = tile_candidates(k, RTX_5090)
    assert len(smaller) < len(tiles) or k < 2048
    assert all(tile.staged * k * 2 < RTX_5090.shared_bytes for tile in smaller)


@pytest.mark.parametrize("device", [H200, A100])
@pytest.mark.parametrize("heads", [(9, 3), (32, 8), (32, 32), (14, 2), (64, 2)])
def test_splits(device: Device, heads: tuple[int, int]) -> None:
    for head_dim in (64, 128, 256):
        sizes = Heads(*heads, head_dim)
        assert sizes.blocks == heads[1] * math.ceil(heads[0] // heads[1] / HEADS_PER_BLOCK)
        before = 0
        for context in (1, 256, 512, 4096, 131_072):
            split = default_split(sizes, context, device)
            assert split.splits >= before
            before = split.splits
            assert split.splits == 1 or split.splits * sizes.blocks <= device.sms
            assert split.splits <= MAX_SPLITS
        assert default_split(sizes, 1, device).splits == 1
        candidates = split_candidates(sizes, device)
        assert candidates
        for split in candidates:
            assert split.warps in {64: (4, 8, 16), 128: (4, 8), 256: (2, 4)}[head_dim]


def test_heads_that_no_attention_on_a_gpu_takes() -> None:
    assert step.attention_file(Heads(8, 2, 512)) == step.ATTENTION_ANY
    with pytest.raises(MinidecodeError, match="head_dim 514: attention on a GPU goes to 512"):
        step.attention_file(Heads(8, 2, 514))


@pytest.mark.parametrize("device", [H200, A100])
def test_splits_for_any_head_size(device: Device) -> None:
    for heads, head_dim in ((32, 100), (8, 20), (512, 100), (4, 320)):
        sizes = Heads(heads, max(1, heads // 4), head_dim)
        assert not sizes.on_tensor_cores
        assert sizes.blocks == heads  # one a query head
        splits = [default_split(sizes, c, device) for c in (1, 31, 256, 4096, 131_072)]
        assert {split.warps for split in splits} == {ANY_WARPS}
        counts = [split.splits for split in splits]
        assert counts[:2] == [1, 1]
        assert counts == sorted(counts)
        assert counts[-1] == min(MAX_SPLITS, max(1, 8 * device.sms // heads))
        assert {split.splits for split in split_candidates(sizes, device)} >= {1, MAX_SPLITS}
    assert all(Heads(32, 8, d).on_tensor_cores for d in (64, 72, 80, 88, 104, 256))


def test_choices_that_a_gpu_cannot_run_are_left() -> None:
    staged, sizes = Tile(128, 0, 1, 4), Heads(9, 3, 64)
    measured = Choices(
        A100,
        tiles={tile_key("qkv", 960, 576): staged, tile_key("o", 576, 576): Tile(64, 4)},
        splits={split_key(sizes, 256): Split(4, 8)},
    )
    assert measured.tile("qkv", 960, 576) == default_tile(960, 576, A100)
    assert measured.tile("o", 576, 576) == Tile(64, 4)
    on_h200 = Choices(H200, measured.tiles, measured.splits)
    assert on_h200.tile("qkv", 960, 576) == staged
    assert on_h200.tile("qkv", 961, 576) == default_tile(961, 576, H200)
    assert on_h200.split(sizes, 256) == Split(4, 8)
    assert on_h200.split(sizes, 512) == default_split(sizes, 512, H200)
    swapped = on_h200.but({tile_key("qkv", 960, 576): Tile(64, 4)})
    assert swapped.tile("qkv", 960, 576) == Tile(64, 4)
