"""Which tile a layer's fused kernel gets on this GPU: measured earlier, shipped, or by rule."""

from __future__ import annotations

import torch

from minidecode.kernels.tiles import Tile, default_tile


def tile_for(kind: str, n: int, k: int, device: torch.device) -> Tile:
    """The tile of a layer of `kind` with an [n, k] weight."""
    return default_tile(n, k)
