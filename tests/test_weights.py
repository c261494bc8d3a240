"""Filling the device's parameters from a checkpoint, or with random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import minidecode
from minidecode import loading, models
from minidecode.checkpoint import open_checkpoint
from minidecode.config import ModelConfig
from minidecode.errors import MinidecodeError
from minidecode.models.stages import Blueprint, LinearResidual, NormLinear, Parameter
from minidecode.weights import Weights

CPU = torch.device("cpu")


def blueprint_of(**overrides: Any) -> Blueprint:
    family = models.family(overrides.get("model_type", "llama"))
    config = ModelConfig.from_hf({**family.tiny, **overrides}, family.defaults)
    return family.blueprint(config)


def fill(blueprint: Blueprint, state: dict[str, torch.Tensor], **options: Any) -> Weights:
    return Weights.from_checkpoint(
        blueprint,
        CPU,
        {name: tuple(t.shape) for name, t in state.items()},
        lambda: iter(state.items()),
        "the-model",
        **options,
    )


def parameters_of(blueprint: Blueprint) -> dict[str, torch.Tensor]:
    """A checkpoint with every tensor that the blueprint wants."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).half()
        for parameter in blueprint.parameters()
        for name, shape in parameter.source_shapes()
    }


@pytest.mark.parametrize("model_type", tiny.MODEL_TYPES)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_of_the_file_is_in_its_place(
    tmp_path: Path, model_type: str, shards: int
) -> None:
    overrides = {"attention_bias": True, "mlp_bias": True} if model_type == "llama" else {}
    model = tiny.build(tmp_path / "m", model_type, shards=shards, **overrides)
    weights = minidecode.load(model.directory, device="cpu")
    found = {}
    for parameter in weights.blueprint.parameters():
        parts = weights.weights[parameter].split(list(parameter.rows))
        found.update(zip(parameter.sources, parts, strict=True))
    assert found.keys() == model.state.keys()
    for name, tensor in model.state.items():
        assert torch.equal(found[name], tensor), name


def test_projections_are_stacked_in_order() -> None:
    blueprint = blueprint_of(attention_bias=True)
    state = parameters_of(blueprint)
    weights = fill(blueprint, state)
    qkv, _, _, gate_up, _ = blueprint.layers[1]
    assert isinstance(qkv, NormLinear)
    assert isinstance(gate_up, NormLinear)
    attn, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    for stage, names in ((qkv, [f"{attn}.{p}_proj" for p in "qkv"]),):
        assert stage.bias is not None
        assert torch.equal(weights[stage.bias], torch.cat([state[f"{n}.bias"] for n in names]))
        assert torch.equal(weights[stage.weight], torch.cat([state[f"{n}.weight"] for n in names]))
    halves = [state[f"{mlp}.{p}_proj.weight"] for p in ("gate", "up")]
    assert torch.equal(weights[gate_up.weight], torch.cat(halves))


def never() -> Iterator[tuple[str, torch.Tensor]]:
    raise AssertionError("read a tensor of a checkpoint that should have been refused")


def refused(blueprint: Blueprint, names: dict[str, tuple[int, ...]]) -> str:
    with pytest.raises(MinidecodeError) as caught:
        Weights.from_checkpoint(blueprint, CPU, names, never, "the-model")
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.1.post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str) -> None:
    blueprint = blueprint_of(attention_bias=True)
    names = {k: tuple(v.shape) for k, v in parameters_of(blueprint).items()}
    del names[name]
    assert refused(blueprint, names) == f"the-model: tensor {name} is missing"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.mlp.down_proj.weight", (160, 64)),
        ("model.layers.0.self_attn.v_proj.weight", (64, 64)),
        ("model.norm.weight", (65,)),
        ("model.norm.weight", (1, 64)),
        ("lm_head.weight", (98, 64)),
    ],
)
def test_a_wrong_shape_is_named(name: str, shape: tuple[int, ...]) -> None:
    blueprint = blueprint_of()
    names = {k: tuple(v.shape) for k, v in parameters_of(blueprint).items()}
    expected = list(names[name])
    names[name] = shape
    message = refused(blueprint, names)
    assert message == (
        f"the-model: tensor {name} has shape {list(shape)}, config.json asks for {expected}"
    )


@pytest.mark.parametrize(
    "extra",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.mlp.down_proj.bias",
        "model.layers.2.mlp.down_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
    ],
)
def test_a_tensor_that_nothing_reads_is_named(extra: str) -> None:
    blueprint = blueprint_of()
    names = {k: tuple(v.shape) for k, v in parameters_of(blueprint).items()}
    assert refused(blueprint, {**names, extra: (64,)}) == (
        f"the-model: nothing reads tensor {extra}"
    )
    both = refused(blueprint, {**names, extra: (64,), "zzz": (1,)})
    assert both == f"the-model: nothing reads tensor {extra} and 1 more"


def test_a_bias_that_the_config_denies_is_refused(tmp_path: Path) -> None:
    model = tiny.build(tmp_path / "m", attention_bias=True, write={"attention_bias": False})
    with pytest.raises(MinidecodeError, match=r"nothing reads tensor .*_proj\.bias"):
        minidecode.load(model.directory, device="cpu")


def test_a_tied_heads_own_copy_must_be_equal() -> None:
    blueprint = blueprint_of(tie_word_embeddings=True)
    state = parameters_of(blueprint)
    assert "lm_head.weight" not in state
    table = state["model.embed_tokens.weight"]
    for position in (0, -1):
        first, last = {"lm_head.weight": table.clone()}, state
        both = {**first, **last} if position == 0 else {**last, **first}
        weights = fill(blueprint, both)
        assert torch.equal(weights[blueprint.embedding], table)
    other = table.clone()
    other[-1, -1] += 1
    with pytest.raises(MinidecodeError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        fill(blueprint, {**state, "lm_head.weight": other})


def test_progress_is_told_all_bytes() -> None:
    blueprint = blueprint_of()
    state = parameters_of(blueprint)
    told: list[int] = []
    fill(blueprint, state, progress=told.append)
    assert len(told) == len(state)
    assert sum(told) == sum(t.nbytes for t in state.values())


def test_tensors_are_read_one_at_a_time(tmp_path: Path) -> None:
    model = tiny.build(tmp_path / "m", dtype=torch.bfloat16)
    opened = open_checkpoint(model.directory)
    blueprint = blueprint_of(intermediate_size=112)
    waiting = 0

    def one_at_a_time() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal waiting
        for name, tensor in opened.tensors():
            waiting += 1
            yield name, tensor
            waiting -= 1

    def one_is_out(_: int) -> None:
        assert waiting == 1

    names = {name: shape for name, (_, shape) in opened.names().items()}
    Weights.from_checkpoint(blueprint, CPU, names, one_at_a_time, "m", one_is_out)
    assert waiting == 0


def test_weights_larger_than_the_free_memory_of_a_gpu_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "free_memory", lambda _: 3 << 29)
    gpu = torch.device("cuda", 0)
    loading._check_room(3 << 29, gpu, "m")
    with pytest.raises(MinidecodeError) as caught:
        loading._check_room((3 << 29) + 1, gpu, "m")
    assert str(caught.value) == "m needs 1.5 GiB for its weights, cuda:0 has 1.5 GiB free"


# --- random weights -------------------------------------------------------------------------------


def test_random_weights_are_the_same_every_time_and_of_a_sensible_size() -> None:
    blueprint = blueprint_of(attention_bias=True, hidden_size=256, head_dim=16)
    one, other = Weights.random(blueprint, CPU), Weights.random(blueprint, CPU)
    seen = set()
    for parameter in blueprint.parameters():
        tensor = one[parameter]
        assert torch.equal(tensor, other[parameter])
        assert bool(torch.isfinite(tensor).all())
        assert float(tensor.float().std()) > 0
        seen.add(round(float(tensor.float().sum()), 2))
        if parameter.cols is not None:
            assert float(tensor.float().std()) == pytest.approx(parameter.cols**-0.5, rel=0.1)
        else:
            middle = 0.0 if parameter.sources[0].endswith(".bias") else 1.0
            assert float(tensor.float().mean()) == pytest.approx(middle, abs=0.1)
    assert len(seen) == len(blueprint.parameters())  # no two are alike


def test_random_matrices_have_no_equal_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = Parameter(("w",), (2**13 + 3,), 2**14)  # more than one slice of random numbers
    stage = LinearResidual("o", "o", parameter)
    head = NormLinear("head", "head", Parameter(("n",), (4,)), Parameter(("h",), (4,), 4))
    blueprint = Blueprint(Parameter(("e",), (4,), 4), ((stage,),), head)
    weight = Weights.random(blueprint, CPU)[parameter]
    assert bool((weight[-3:] != 0).any())
    assert not torch.equal(weight[:3], weight[2**12 : 2**12 + 3])
    assert not torch.equal(weight[:3], weight[-3:])
