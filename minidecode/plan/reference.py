"""The kernel set `torch`: every stage in plain torch operations, for any number of tokens.

It is the CPU's decode step, the prefill on every device, and what the CUDA kernels are tested
against. Weights and activations FP16; norms, scores and softmax FP32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F

from minidecode.models.stages import Attention, LinearResidual, NormLinear, Stage
from minidecode.plan.op import Launch, Op, attention_op, linear_op
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
    row = torch.arange(start, end, device=qkv.device)[:, None]
    column = torch.arange(first, end, device=qkv.device)[None]
    mask = column <= row
    if stage.window is not None:
        mask &= column > row - stage.window
    seen_keys, seen_values = keys[:, first:end], values[:, first:end]
    if q.device.type == "cpu":  # several times as fast there as in FP16
        q, seen_keys, seen_values = q.float(), seen_keys.float(), seen_values.float()
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        seen_keys[None],
        seen_values[None],
        attn_mask=mask,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).half().reshape(n, c.q_size)


class _Position:
    """What all layers of the step at one position share: rotary factors, and views of the cache.

    cos FP32 [heads + kv_heads, 1, head_dim / 2], and sin without the 1, rotate q and k and scale q
    by 1 / sqrt(head_dim); key_rows, value_rows FP16 [kv_heads, head_dim] for each layer.
    """

    def __init__(self, state: State, position: int) -> None:
        c = state.config
        scale = torch.ones(c.num_heads + c.num_kv_heads, 1)
        scale[: c.num_heads] = c.head_dim**-0.5
        cos, sin = state.rope[position].unbind(-1)
        self.cos, self.sin = (scale * cos)[:, None], scale * sin
        self.key_rows = state.keys.select(2, position).unbind()
        self.value_rows = state.values.select(2, position).unbind()
        self.position, self._state = position, state
        self._seen: dict[int | None, tuple[Sequence[torch.Tensor], ...]] = {}

    def seen(self, layer: int, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys FP32 [kv_heads, head_dim, seen] and values [kv_heads, seen, head_dim] of a layer.

        They last until the next call.
        """
        if window not in self._seen:
            first = 0 if window is None else max(0, self.position + 1 - window)
            keys, values = (
                cache.narrow(2, first, self.position + 1 - first)
                for cache in (self._state.keys, self._state.values)
            )
            wide = torch.empty(keys.shape[1:]), torch.empty(keys.shape[1:])
            self._seen[window] = keys.unbind(), values.unbind(), (*wide, wide[0].transpose(1, 2))
        keys_of, values_of, (wide_keys, wide_values, turned_keys) = self._seen[window]
        wide_keys.copy_(keys_of[layer])
        return turned_keys, wide_values.copy_(values_of[layer])


class TorchHelpers:
    """What a step on the CPU needs besides matrix products: in torch operations, for one token.

    Each method gives a call that works in place on static buffers. A small model's step is a
    thousand such operations, so views and FP32 copies of what is constant are made beforehand.
    """

    def __init__(self, weights: Weights, state: State) -> None:
        self._weights, self._state = weights, state
        self._now: _Position | None = None

    def rms_norm(
        self, out: torch.Tensor, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> Launch:
        """x += delta if there is one; out = rmsnorm(x) * weight."""
        n, eps = x.numel(), self._state.config.rms_norm_eps
        gain, wide, zero = weight.float(), torch.empty(n), torch.zeros(())

        def launch() -> None:
            if delta is not None:
                x.add_(delta)
            wide.copy_(x)
            scale = 1.0 / math.sqrt(float(wide.dot(wide)) / n + eps)
            torch.addcmul(zero, wide, gain, value=scale, out=out)

        return launch

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> Launch:
        """x += delta."""
        return lambda: cast(None, x.add_(delta))

    def swiglu(self, out: torch.Tensor, gate_up: torch.Tensor) -> Launch:
        """out[n] = silu(gate_up[:n]) * gate_up[n:]."""
        gate, up = gate_up.chunk(2)
        return lambda: cast(None, torch.mul(F.silu(gate), up, out=out))

    def attention(self, stage: Attention) -> Launch:
        """state.qkv -> state.attention, and the cache grows by one position."""
        s, c = self._state, self._state.config
        turning = c.num_heads + c.num_kv_heads
        rows = s.qkv.view(turning + c.num_kv_heads, c.head_dim)
        qk, v = rows[:turning], rows[turning:]
        before, after = torch.empty(qk.shape), torch.empty(qk.shape)
        halves = (turning, 2, c.head_dim // 2)
        (low, high), (new_low, new_high) = before.chunk(2, dim=-1), after.chunk(2, dim=-1)
        split_before, split_after = before.view(halves), after.view(halves)
        q = after[: c.num_heads].view(c.num_kv_heads, -1, c.head_dim)
        k = after[c.num_heads :]
        out = s.attention.view(q.shape)
        normalise = self._qk_norm(stage, before)
        layer = stage.layer

        def launch() -> None:
            now = self._at(int(s.position))
            before.copy_(qk)
            if normalise is not None:
                normalise()
            torch.mul(split_before, now.cos, out=split_after)
            new_low.addcmul_(high, now.sin, value=-1)
            new_high.addcmul_(low, now.sin)
            now.key_rows[layer].copy_(k)
            now.value_rows[layer].copy_(v)
            seen_keys, seen_values = now.seen(layer, stage.window)
            weights = torch.softmax(torch.bmm(q, seen_keys), dim=-1)
            out.copy_(torch.bmm(weights, seen_values))

        return launch

    def _at(self, position: int) -> _Position:
        if self._now is None or self._now.position != position:
            self._now = _Position(self._state, position)
        return self._now

    def _qk_norm(self, stage: Attention, rows: torch.Tensor) -> Launch | None:
        """Normalises q and k, FP32 [heads + kv_heads, head_dim], in place; None: no such norm."""
        if stage.q_norm is None or stage.k_norm is None:
            return None
        c, eps = self._state.config, self._state.config.rms_norm_eps
        gains = [
            self._weights[norm].float().expand(n, -1)
            for norm, n in ((stage.q_norm, c.num_heads), (stage.k_norm, c.num_kv_heads))
        ]
        gain = torch.cat(gains)

        def launch() -> None:
            mean = rows.square().mean(dim=-1, keepdim=True)
            rows.mul_(mean.add_(eps).rsqrt_()).mul_(gain)

        return launch

    def argmax(self, head_out: torch.Tensor) -> Launch:
        """state.logits = head_out in FP32; `next_token` looks for the greatest itself."""
        return lambda: cast(None, self._state.logits.copy_(head_out))

    def sample(self) -> None:
        """Nothing: `next_token` draws."""

    def next_token(self, embedding: torch.Tensor) -> Launch:
        """Pick a token from state.logits and make it the next input."""
        state = self._state
        logits = state.logits.numpy()  # the same memory

        def launch() -> None:
            if int(state.stopped):
                return
            position, sampling = int(state.position), state.sampling
            # Finite FP16 values have a finite sum.
            if not math.isfinite(float(state.logits.sum())):
                state.out[position] = NON_FINITE
                state.stopped.fill_(1)
                return
            if sampling.greedy and not sampling.penalises:
                token = int(logits.argmax())  # ten times as fast as torch's
            else:
                token = int(sample(state.logits, sampling, state.generator, state.seen))
            state.out[position] = token
            state.take(token, embedding[token], position + 1)

        return launch


class Reference:
    """The engine `torch`: one op a stage, for one token on the CPU."""

    def __init__(self, weights: Weights, state: State) -> None:
        self._weights, self._state = weights, state
        self._helpers = TorchHelpers(weights, state)

    def takes(self, stage: Stage) -> bool:
        """Torch runs every size."""
        return True

    def op(self, layer: int | None, stage: Stage) -> Op:
        """The stage as one op over the state's buffers."""
        if isinstance(stage, Attention):
            launch = self._helpers.attention(stage)
            return attention_op(stage, launch, self._state, "torch", "torch")
        if isinstance(stage, NormLinear):
            launch, out = self._norm_linear(stage)
        else:
            launch, out = self._linear_residual(stage), self._state.x
        return linear_op(stage, layer, launch, out, "torch", "torch")

    def _norm_linear(self, stage: NormLinear) -> tuple[Launch, torch.Tensor]:
        """The stage's call and the buffer that it fills."""
        s, w = self._state, self._weights
        norm = self._helpers.rms_norm(s.normed, s.x, None, w[stage.norm])
        y = {"qkv": s.qkv, "gate_up": s.gate_up, "head": s.head_out}[stage.kind]
        weight, bias = w[stage.weight], None if stage.bias is None else w[stage.bias]
        after, out = {
            "qkv": (None, s.qkv),
            "gate_up": (self._helpers.swiglu(s.activation, s.gate_up), s.activation),
            "head": (self._helpers.argmax(s.head_out), s.logits),
        }[stage.kind]

        def launch() -> None:
            norm()
            if bias is None:
                torch.mv(weight, s.normed, out=y)
            else:
                torch.addmv(bias, weight, s.normed, out=y)
            if after is not None:
                after()

        return launch, out

    def _linear_residual(self, stage: LinearResidual) -> Launch:
        s, weight = self._state, self._weights[stage.weight]
        bias = None if stage.bias is None else self._weights[stage.bias]
        inputs = s.attention if stage.kind == "o" else s.activation

        def launch() -> None:
            s.x.addmv_(weight, inputs)
            if bias is not None:
                s.x.add_(bias)

        return launch
