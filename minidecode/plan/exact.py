"""The whole model in FP32 over the same FP16 weights: what every kernel set's logits are judged by.

It shares no code with the kernel sets. A slab of rows of one matrix is widened at a time, so a
model that fits the device in FP16 fits this as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from minidecode.config import ModelConfig
from minidecode.models.stages import Attention, Blueprint, NormLinear
from minidecode.plan.state import rope_table
from minidecode.weights import Weights

# Elements of a matrix that are FP32 at the same time.
_SLAB = 1 << 26


def logits(
    blueprint: Blueprint,
    weights: Weights,
    config: ModelConfig,
    ids: Sequence[int],
    on_layer: Callable[[int], None] = lambda _: None,
) -> torch.Tensor:
    """FP32 [len(ids), vocab]: the logits after each token of a text that starts with ids[0].

    On the weights' device. `on_layer` is told how many layers are done.
    """
    table = weights[blueprint.embedding]
    rope = rope_table(config, table.device, len(ids))
    with torch.inference_mode():
        x = y = table[torch.tensor(list(ids), device=table.device)].float()
        for done, layer in enumerate(blueprint.layers, 1):
            for stage in layer:
                if isinstance(stage, NormLinear):
                    y = _norm_linear(stage, weights, x, config.rms_norm_eps)
                elif isinstance(stage, Attention):
                    y = _attention(stage, weights, config, rope, y)
                else:
                    bias = None if stage.bias is None else weights[stage.bias]
                    x = x + _linear(y, weights[stage.weight], bias)
            on_layer(done)
        return _norm_linear(blueprint.head, weights, x, config.rms_norm_eps)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    slabs = weight.split(max(1, _SLAB // weight.shape[1]))
    y = torch.cat([F.linear(x, slab.float()) for slab in slabs], dim=-1)
    return y if bias is None else y + bias.float()


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    normed: torch.Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed * weight.float()


def _norm_linear(stage: NormLinear, weights: Weights, x: torch.Tensor, eps: float) -> torch.Tensor:
    bias = None if stage.bias is None else weights[stage.bias]
    y = _linear(_norm(x, weights[stage.norm], eps), weights[stage.weight], bias)
    if stage.act is None:
        return y
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def _attention(
    stage: Attention, weights: Weights, config: ModelConfig, rope: torch.Tensor, qkv: torch.Tensor
) -> torch.Tensor:
    """qkv FP32 [n, q_size + 2 kv_size] -> [n, q_size], token i seeing the tokens up to i."""
    n, c = qkv.shape[0], config
    q, k, v = (
        part.view(n, -1, c.head_dim).transpose(0, 1)
        for part in qkv.split([c.q_size, c.kv_size, c.kv_size], dim=-1)
    )
    if stage.q_norm is not None and stage.k_norm is not None:
        q = _norm(q, weights[stage.q_norm], c.rms_norm_eps)
        k = _norm(k, weights[stage.k_norm], c.rms_norm_eps)
    group = c.num_heads // c.num_kv_heads
    q, k = _rotate(q, rope), _rotate(k, rope).repeat_interleave(group, dim=0)
    ago = torch.arange(n, device=qkv.device)[:, None] - torch.arange(n, device=qkv.device)
    hidden = ago < 0 if stage.window is None else (ago < 0) | (ago >= stage.window)
    scores = (q @ k.transpose(1, 2) * c.head_dim**-0.5).masked_fill(hidden, float("-inf"))
    out: torch.Tensor = torch.softmax(scores, dim=-1) @ v.repeat_interleave(group, dim=0)
    return out.transpose(0, 1).reshape(n, c.q_size)


def _rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """x [heads, n, head_dim] turned by rope [n, head_dim / 2, 2], pairs (i, i + head_dim / 2)."""
    cos, sin = rope.unbind(-1)
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
