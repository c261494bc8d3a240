"""The kernel set `torch`: every stage in plain torch operations, for any number of tokens.

It is the CPU's decode step, the prefill on every device, and what the CUDA kernels are tested
against. Weights and activations FP16; norms, scores and softmax FP32.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

from minidecode.models.stages import Attention, LinearResidual, NormLinear, Stage
from minidecode.plan.op import Launch, Op, attention_op, stage_bytes
from minidecode.plan.state import NON_FINITE, State
from minidecode.sampling import sample
from minidecode.weights import Weights


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, statistics in FP32.

    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def norm_linear(stage: NormLinear, weights: Weights, x: torch.Tensor, eps: float) -> torch.Tensor:
    """FP16 [..., hidden] -> [..., n], or [..., n / 2] through SwiGLU."""
    normed = rms_norm(x, weights[stage.norm], eps)
    bias = None if stage.bias is None else weights[stage.bias]
    y = F.linear(normed, weights[stage.weight], bias)
    if stage.act is None:
        return y
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def linear_residual(
    stage: LinearResidual, weights: Weights, x: torch.Tensor, inputs: torch.Tensor
) -> torch.Tensor:
    """x + W inputs + b, FP16 [..., hidden]."""
    bias = None if stage.bias is None else weights[stage.bias]
    return x + F.linear(inputs, weights[stage.weight], bias)


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split pairs (i, i + head_dim / 2).

    x FP16 [tokens, heads, head_dim]; rope FP32 [tokens, head_dim / 2, 2].
    """
    cos, sin = rope[:, None, :, 0], rope[:, None, :, 1]
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def attention(
    stage: Attention, weights: Weights, state: State, qkv: torch.Tensor, start: int
) -> torch.Tensor:
    """Append k and v of tokens start, start + 1, … to the cache; attend to all they may see.

    qkv FP16 [tokens, q_size + 2 kv_size] -> FP16 [tokens, q_size].
    """
    c = state.config
    n, end = qkv.shape[0], start + qkv.shape[0]
    heads, v = qkv.split([c.q_size + c.kv_size, c.kv_size], dim=-1)
    heads = heads.view(n, c.num_heads + c.num_kv_heads, c.head_dim)
    if stage.q_norm is not None and stage.k_norm is not None:
        q, k = heads.split([c.num_heads, c.num_kv_heads], dim=1)
        q = rms_norm(q, weights[stage.q_norm], c.rms_norm_eps)
        k = rms_norm(k, weights[stage.k_norm], c.rms_norm_eps)
        heads = torch.cat([q, k], dim=1)
    q, k = rotate(heads, state.rope[start:end]).split([c.num_heads, c.num_kv_heads], dim=1)
    keys, values = state.keys[stage.layer], state.values[stage.layer]
    keys[:, start:end] = k.transpose(0, 1)
    values[:, start:end] = v.view(n, c.num_kv_heads, c.head_dim).transpose(0, 1)

    first = 0 if stage.window is None else max(0, start + 1 - stage.window)
    seen = keys[:, first:end], values[:, first:end]
    if n == 1:
        out = _attend_one(q[0], *seen)
    else:
        out = _attend_many(q, *seen, start - first, stage.window)
    return out.reshape(n, c.q_size)


def _attend_one(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """q [heads, head_dim]; keys, values [kv_heads, seen, head_dim] -> [heads, head_dim]."""
    # Explicit and in FP32: on a CPU several times as fast as the library's FP16 attention.
    heads, head_dim = q.shape
    grouped = q.float().view(keys.shape[0], -1, head_dim) * head_dim**-0.5
    scores = torch.softmax(grouped @ keys.float().transpose(1, 2), dim=-1)
    return (scores @ values.float()).to(q.dtype).view(heads, head_dim)


def _attend_many(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, offset: int, window: int | None
) -> torch.Tensor:
    """q [n, heads, head_dim], of which row i may see the first offset + i + 1 keys, as [n, …]."""
    n, seen = q.shape[0], keys.shape[1]
    row = torch.arange(offset, offset + n, device=q.device)[:, None]
    column = torch.arange(seen, device=q.device)[None]
    mask = column <= row
    if window is not None:
        mask &= column > row - window
    if q.device.type == "cpu":
        q, keys, values = q.float(), keys.float(), values.float()
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )
    return out[0].transpose(0, 1).half()


class TorchHelpers:
    """What a composed step needs besides its GEMVs, in torch operations: the CPU's helpers.

    Each method gives a call that does the operation in place on static buffers.
    """

    def __init__(self, weights: Weights, state: State) -> None:
        self._weights, self._state = weights, state

    def rms_norm(
        self, out: torch.Tensor, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> Launch:
        """x += delta if there is one; out = rmsnorm(x) * weight."""
        eps = self._state.config.rms_norm_eps

        def launch() -> None:
            if delta is not None:
                x.add_(delta)
            out.copy_(rms_norm(x, weight, eps))

        return launch

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> Launch:
        """x += delta."""
        return lambda: cast(None, x.add_(delta))

    def swiglu(self, out: torch.Tensor, gate_up: torch.Tensor) -> Launch:
        """out[n] = silu(gate_up[:n]) * gate_up[n:]."""
        gate, up = gate_up.chunk(2)
        return lambda: cast(None, out.copy_(F.silu(gate).mul_(up)))

    def attention(self, stage: Attention) -> Launch:
        """state.qkv -> state.attention, and the cache grows by one position."""
        state, weights = self._state, self._weights

        def launch() -> None:
            position = int(state.position)
            out = attention(stage, weights, state, state.qkv[None], position)
            state.attention.copy_(out[0])

        return launch

    def argmax(self, head_out: torch.Tensor) -> Launch:
        """state.logits = head_out in FP32; `next_token` looks for the greatest itself."""
        return lambda: cast(None, self._state.logits.copy_(head_out))

    def sample(self) -> None:
        """Nothing: `next_token` draws."""

    def next_token(self, embedding: torch.Tensor) -> Launch:
        """Pick a token from state.logits and make it the next input."""
        state = self._state

        def launch() -> None:
            if int(state.stopped):
                return
            position = int(state.position)
            if not bool(torch.isfinite(state.logits).all()):
                state.out[position] = NON_FINITE
                state.stopped.fill_(1)
                return
            token = int(sample(state.logits, state.sampling, state.generator, state.seen))
            state.out[position] = token
            state.take(token, embedding[token], position + 1)

        return launch


class Reference:
    """The engine `torch`: one op a stage, for one token."""

    def __init__(self, weights: Weights, state: State) -> None:
        self._weights, self._state = weights, state

    def takes(self, stage: Stage) -> bool:
        """Torch runs every size."""
        return True

    def op(self, layer: int | None, stage: Stage) -> Op:
        """The stage as one op over the state's buffers."""
        state, weights = self._state, self._weights
        eps = state.config.rms_norm_eps
        if isinstance(stage, Attention):
            launch = TorchHelpers(weights, state).attention(stage)
            return attention_op(stage, launch, state, "torch", "torch")
        if isinstance(stage, NormLinear):
            out = {"qkv": state.qkv, "gate_up": state.activation, "head": state.logits}[stage.kind]
            norm_stage = stage

            def launch() -> None:
                out.copy_(norm_linear(norm_stage, weights, state.x[None], eps)[0])
        else:
            out, inputs = state.x, state.attention if stage.kind == "o" else state.activation
            residual_stage = stage

            def launch() -> None:
                x = linear_residual(residual_stage, weights, state.x[None], inputs[None])
                state.x.copy_(x[0])

        return Op(
            stage.name,
            stage.kind,
            layer,
            stage.weight.shape,
            launch,
            out,
            engine="torch",
            kernel="torch",
            weight_bytes=stage_bytes(stage),
        )
