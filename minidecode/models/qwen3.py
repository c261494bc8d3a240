"""Qwen3 (dense): RMSNorm on each q and k head, and a head_dim of its own."""

from __future__ import annotations

from minidecode.config import FamilyDefaults
from minidecode.models import llama
from minidecode.models.stages import Family

FAMILY = Family(
    "qwen3",
    FamilyDefaults(
        num_kv_heads=32,
        head_dim=128,
        reads_sliding_window=True,
        sliding_window=4096,
        uses_max_window_layers=True,
        qk_norm=True,
        max_position=32_768,
    ),
    llama.blueprint,
    {**llama.TINY, "model_type": "qwen3", "head_dim": 32},
)
