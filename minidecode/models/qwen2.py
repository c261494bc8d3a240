"""Qwen2 and Qwen2.5: Llama's block with biases on q, k and v, and windows in the upper layers."""

from __future__ import annotations

from minidecode.config import FamilyDefaults
from minidecode.models import llama
from minidecode.models.stages import Family

FAMILY = Family(
    "qwen2",
    FamilyDefaults(
        num_kv_heads=32,
        reads_sliding_window=True,
        sliding_window=4096,
        uses_max_window_layers=True,
        qkv_bias=True,
        o_bias=False,
        max_position=32_768,
    ),
    llama.blueprint,
    {**llama.TINY, "model_type": "qwen2"},
)
