"""Public dimensions of real models, for random weights made on the device without a download.

Sizes as in the `config.json` that each model is published with.
"""

from __future__ import annotations

from typing import Any

from minidecode.config import ModelConfig
from minidecode.errors import UsageError
from minidecode.models import family

PREFIX = "synthetic:"


def _shape(
    model_type: str,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    **rest: Any,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        **rest,
    }


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


_TIED = {"tie_word_embeddings": True}
_QWEN = {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6}

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _shape("llama", 576, 1536, 30, 9, 3, 49_152, rope_theta=100_000.0, **_TIED),
    "smollm2-360m": _shape("llama", 960, 2560, 32, 15, 5, 49_152, rope_theta=100_000.0, **_TIED),
    "smollm2-1.7b": _shape("llama", 2048, 8192, 24, 32, 32, 49_152, rope_theta=130_000.0, **_TIED),
    "llama-3.2-1b": _shape(
        "llama", 2048, 8192, 16, 32, 8, 128_256, head_dim=64, **_llama3(32.0), **_TIED
    ),
    "llama-3.2-3b": _shape(
        "llama", 3072, 8192, 28, 24, 8, 128_256, head_dim=128, **_llama3(32.0), **_TIED
    ),
    "llama-3.1-8b": _shape("llama", 4096, 14_336, 32, 32, 8, 128_256, **_llama3(8.0)),
    "mistral-7b": _shape(
        "mistral", 4096, 14_336, 32, 32, 8, 32_768, rope_theta=1e6, sliding_window=None
    ),
    "qwen2.5-0.5b": _shape("qwen2", 896, 4864, 24, 14, 2, 151_936, **_QWEN, **_TIED),
    "qwen2.5-7b": _shape("qwen2", 3584, 18_944, 28, 28, 4, 152_064, **_QWEN),
    "qwen3-0.6b": _shape("qwen3", 1024, 3072, 28, 16, 8, 151_936, head_dim=128, **_QWEN, **_TIED),
    "qwen3-8b": _shape("qwen3", 4096, 12_288, 36, 32, 8, 151_936, head_dim=128, **_QWEN),
}


def config(name: str) -> ModelConfig:
    """The config of `synthetic:<name>`. Raises UsageError that lists the names."""
    raw = SHAPES.get(name)
    if raw is None:
        raise UsageError(f"no synthetic model {name!r}; there are {', '.join(SHAPES)}")
    return ModelConfig.from_hf(raw, family(raw["model_type"]).defaults, name=PREFIX + name)
