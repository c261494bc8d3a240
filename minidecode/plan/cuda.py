"""The composed engine's helpers on CUDA: our kernels around the GEMVs."""

from __future__ import annotations

import torch

from minidecode.config import ModelConfig
from minidecode.kernels import step
from minidecode.kernels.tiles import Choices, Heads
from minidecode.models.stages import Attention
from minidecode.plan.op import Launch
from minidecode.plan.state import State
from minidecode.weights import Weights


def heads_of(config: ModelConfig) -> Heads:
    """The sizes that the attention's split depends on."""
    c = config
    return Heads(c.num_heads, c.num_kv_heads, c.head_dim)


class CudaHelpers:
    """Each method gives a call that enqueues one kernel of `cuda/step` on static buffers."""

    def __init__(self, weights: Weights, state: State, limit: int, choices: Choices) -> None:
        self._weights, self._state = weights, state
        self._limit, self._choices = limit, choices

    def rms_norm(
        self, out: torch.Tensor, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> Launch:
        """x += delta if there is one; out = rmsnorm(x) * weight."""
        return step.rms_norm(out, x, delta, weight, self._state.config.rms_norm_eps)

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> Launch:
        """x += delta."""
        return step.add(x, delta)

    def swiglu(self, out: torch.Tensor, gate_up: torch.Tensor) -> Launch:
        """out[n] = silu(gate_up[:n]) * gate_up[n:]."""
        return step.swiglu(out, gate_up)

    def attention(self, stage: Attention) -> Launch:
        """state.qkv -> state.attention, and the cache grows by one position."""
        s, w = self._state, self._weights
        context = min(self._limit, stage.window or self._limit)
        cache = step.Cache(
            keys=s.keys[stage.layer],
            values=s.values[stage.layer],
            rope=s.rope,
            position=s.position,
            q_norm=None if stage.q_norm is None else w[stage.q_norm],
            k_norm=None if stage.k_norm is None else w[stage.k_norm],
            window=stage.window,
            eps=s.config.rms_norm_eps,
            context=context,
        )
        split = self._choices.split(heads_of(s.config), context)
        return step.attention(s.attention, s.qkv, cache, split)

    def argmax(self, head_out: torch.Tensor) -> Launch:
        """state.logits = head_out in FP32, state.best = the greatest of them."""
        return step.argmax(self._state.logits, self._state.best, head_out)

    def sample(self) -> Launch:
        """state.best = a token drawn by the state's sampling parameters."""
        s = self._state
        return step.sample(s.best, s.logits, s.seen, s.position, s.sampling_parameters)

    def next_token(self, embedding: torch.Tensor) -> Launch:
        """Take the token of state.best and make it the next input."""
        s = self._state
        return step.next_token(
            x=s.x,
            embedding=embedding,
            best=s.best,
            position=s.position,
            token=s.token,
            stopped=s.stopped,
            eos=s.eos,
            seen=s.seen,
            out=s.out,
        )
