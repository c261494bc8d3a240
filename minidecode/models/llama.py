"""Llama 1 to 3.3, and everything saved with their layout (SmolLM2, TinyLlama, …)."""

from __future__ import annotations

from minidecode.config import FamilyDefaults, ModelConfig
from minidecode.models.stages import (
    Attention,
    Blueprint,
    Family,
    LinearResidual,
    NormLinear,
    Parameter,
    Stage,
)


def block(c: ModelConfig, i: int) -> tuple[Stage, ...]:
    """The stages of layer `i`. Mistral, Qwen2 and Qwen3 share it; the config tells them apart."""
    attn, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
    qkv = tuple(f"{attn}.{p}_proj" for p in "qkv")
    qkv_rows = (c.q_size, c.kv_size, c.kv_size)
    gate_up = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
    gate_up_rows = (c.intermediate_size, c.intermediate_size)

    def vector(name: str, n: int) -> Parameter:
        return Parameter((name,), (n,))

    def matrix(modules: tuple[str, ...], rows: tuple[int, ...], cols: int) -> Parameter:
        return Parameter(tuple(f"{m}.weight" for m in modules), rows, cols)

    def bias(present: bool, modules: tuple[str, ...], rows: tuple[int, ...]) -> Parameter | None:
        return Parameter(tuple(f"{m}.bias" for m in modules), rows) if present else None

    return (
        NormLinear(
            f"layers.{i}.attn.qkv",
            "qkv",
            norm=vector(f"model.layers.{i}.input_layernorm.weight", c.hidden_size),
            weight=matrix(qkv, qkv_rows, c.hidden_size),
            bias=bias(c.qkv_bias, qkv, qkv_rows),
        ),
        Attention(
            f"layers.{i}.attn.attention",
            layer=i,
            window=c.windows[i],
            q_norm=vector(f"{attn}.q_norm.weight", c.head_dim) if c.qk_norm else None,
            k_norm=vector(f"{attn}.k_norm.weight", c.head_dim) if c.qk_norm else None,
        ),
        LinearResidual(
            f"layers.{i}.attn.o",
            "o",
            weight=matrix((f"{attn}.o_proj",), (c.hidden_size,), c.q_size),
            bias=bias(c.o_bias, (f"{attn}.o_proj",), (c.hidden_size,)),
        ),
        NormLinear(
            f"layers.{i}.mlp.gate_up",
            "gate_up",
            norm=vector(f"model.layers.{i}.post_attention_layernorm.weight", c.hidden_size),
            weight=matrix(gate_up, gate_up_rows, c.hidden_size),
            bias=bias(c.mlp_bias, gate_up, gate_up_rows),
            act="swiglu",
        ),
        LinearResidual(
            f"layers.{i}.mlp.down",
            "down",
            weight=matrix((f"{mlp}.down_proj",), (c.hidden_size,), c.intermediate_size),
            bias=bias(c.mlp_bias, (f"{mlp}.down_proj",), (c.hidden_size,)),
        ),
    )


def blueprint(c: ModelConfig) -> Blueprint:
    """The whole model; a tied head is the embedding parameter itself, so it is stored once."""
    embedding = Parameter(("model.embed_tokens.weight",), (c.vocab_size,), c.hidden_size)
    untied = Parameter(("lm_head.weight",), (c.vocab_size,), c.hidden_size)
    return Blueprint(
        embedding,
        layers=tuple(block(c, i) for i in range(c.num_layers)),
        head=NormLinear(
            "head",
            "head",
            norm=Parameter(("model.norm.weight",), (c.hidden_size,)),
            weight=embedding if c.tie_embeddings else untied,
        ),
    )


TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}

FAMILY = Family(
    "llama",
    FamilyDefaults(qkv_bias=None, o_bias=None, mlp_bias=None, bos_token_id=1, eos_token_ids=(2,)),
    blueprint,
    TINY,
)
