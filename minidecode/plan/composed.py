"""The composed engine: each stage as a GEMV between small helper kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from minidecode.config import FP16_BYTES
from minidecode.kernels.registry import Gemv
from minidecode.models.stages import Attention, LinearResidual, NormLinear, Parameter, Stage
from minidecode.plan.op import Launch, Op, attention_op
from minidecode.plan.state import State
from minidecode.weights import Weights


class Helpers(Protocol):
    """The operations around the GEMVs, on one kind of device."""

    def rms_norm(
        self, out: torch.Tensor, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> Launch: ...
    def add(self, x: torch.Tensor, delta: torch.Tensor) -> Launch: ...
    def swiglu(self, out: torch.Tensor, gate_up: torch.Tensor) -> Launch: ...
    def attention(self, stage: Attention) -> Launch: ...
    def argmax(self, head_out: torch.Tensor) -> Launch: ...
    def sample(self) -> Launch | None: ...
    def next_token(self, embedding: torch.Tensor) -> Launch: ...


class Composed:
    """Turns stages into ops around a GEMV.

    The residual addition after a projection is held back: where a composed norm follows, one
    kernel does both. `settle` gives the addition that is still owed.
    """

    def __init__(self, weights: Weights, state: State, helpers: Helpers) -> None:
        self._weights, self._state, self._helpers = weights, state, helpers
        self._owed: Op | None = None

    def ops(self, layer: int | None, stage: Stage, gemv: Gemv | None) -> Iterator[Op]:
        """The stage's ops; `gemv` is used by linear stages alone."""
        if isinstance(stage, Attention):
            launch = self._helpers.attention(stage)
            yield attention_op(stage, launch, self._state, "composed", "attention")
            return
        if gemv is None:
            raise ValueError(f"{stage.name} needs a GEMV")
        if isinstance(stage, NormLinear):
            yield from self._norm_linear(layer, stage, gemv)
        else:
            yield from self._linear_residual(layer, stage, gemv)

    def settle(self) -> Iterator[Op]:
        """The residual addition that no norm has taken over, if there is one."""
        if self._owed is not None:
            yield self._owed
            self._owed = None

    def argmax(self) -> Op:
        """The greatest logit of a composed head."""
        s = self._state
        return self._helper("argmax", None, self._helpers.argmax(s.head_out), s.logits, "argmax")

    def next_token(self, embedding: Parameter, sampled: bool) -> Iterator[Op]:
        """Sampling if asked for, then the token, its embedding and the position."""
        s = self._state
        draw = self._helpers.sample() if sampled else None
        if draw is not None:
            yield self._helper("sample", None, draw, s.best, "sample")
        launch = self._helpers.next_token(self._weights[embedding])
        row = FP16_BYTES * s.x.numel()
        yield self._helper("next_token", None, launch, s.x, "next_token", row)

    def _norm_linear(self, layer: int | None, stage: NormLinear, gemv: Gemv) -> Iterator[Op]:
        s, h = self._state, self._helpers
        owed, self._owed = self._owed, None
        norm = h.rms_norm(
            s.normed, s.x, s.delta if owed is not None else None, self._weights[stage.norm]
        )
        norm_bytes = FP16_BYTES * stage.norm.shape[0]
        name = f"{stage.name.rpartition('.')[0] or stage.name}.norm"
        kernel = "rms_norm" if owed is None else "add_rms_norm"
        yield self._helper(name, layer, norm, s.normed, kernel, norm_bytes, kind="norm")
        out = {"qkv": s.qkv, "gate_up": s.gate_up, "head": s.head_out}[stage.kind]
        yield from self._gemv(layer, stage, gemv, out, s.normed)
        if stage.act == "swiglu":
            act = h.swiglu(s.activation, s.gate_up)
            name = stage.name.replace("gate_up", "swiglu")
            yield self._helper(name, layer, act, s.activation, "swiglu")

    def _linear_residual(
        self, layer: int | None, stage: LinearResidual, gemv: Gemv
    ) -> Iterator[Op]:
        s = self._state
        inputs = s.attention if stage.kind == "o" else s.activation
        yield from self._gemv(layer, stage, gemv, s.delta, inputs)
        name = f"{stage.name.rpartition('.')[0]}.residual"
        self._owed = self._helper(name, layer, self._helpers.add(s.x, s.delta), s.x, "add")

    def _gemv(
        self,
        layer: int | None,
        stage: NormLinear | LinearResidual,
        gemv: Gemv,
        out: torch.Tensor,
        inputs: torch.Tensor,
    ) -> Iterator[Op]:
        weight = self._weights[stage.weight]
        yield Op(
            stage.name,
            stage.kind,
            layer,
            stage.weight.shape,
            gemv.bind(out, weight, inputs),
            out,
            "composed",
            gemv.name,
            weight_bytes=weight.nbytes,
        )
        if stage.bias is not None:
            bias = self._weights[stage.bias]
            add = self._helpers.add(out, bias)
            yield self._helper(f"{stage.name}.bias", layer, add, out, "add", bias.nbytes, "bias")

    def _helper(
        self,
        name: str,
        layer: int | None,
        launch: Launch,
        out: torch.Tensor,
        kernel: str,
        weight_bytes: int = 0,
        kind: str | None = None,
    ) -> Op:
        kind = kind or name.rpartition(".")[2]
        shape = tuple(out.shape)
        return Op(name, kind, layer, shape, launch, out, "composed", kernel, weight_bytes)
