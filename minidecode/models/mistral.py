"""Mistral: Llama's block with one sliding window for every layer."""

from __future__ import annotations

from minidecode.config import FamilyDefaults
from minidecode.models import llama
from minidecode.models.stages import Family

FAMILY = Family(
    "mistral",
    FamilyDefaults(
        num_kv_heads=8,
        reads_sliding_window=True,
        sliding_window=4096,
        qkv_bias=False,
        o_bias=False,
        max_position=131_072,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    llama.blueprint,
    {**llama.TINY, "model_type": "mistral", "sliding_window": 4},
)
