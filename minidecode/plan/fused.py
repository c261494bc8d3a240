"""The fused engine: one kernel a stage, five a layer."""

from __future__ import annotations

from collections.abc import Iterable

from minidecode.kernels import step
from minidecode.kernels.tiles import Choices
from minidecode.models.stages import Attention, NormLinear, Stage
from minidecode.plan.cuda import CudaHelpers, heads_of
from minidecode.plan.op import Engine, Op, attention_op, linear_op
from minidecode.plan.state import State
from minidecode.weights import Weights

_FILES = {
    "qkv": step.NORM_LINEAR,
    "o": step.LINEAR_RESIDUAL,
    "gate_up": step.NORM_SWIGLU,
    "down": step.LINEAR_RESIDUAL,
    "head": step.NORM_LOGITS,
}


def file_of(kind: str) -> str:
    """The kernel file, without ".cu", that runs linear layers of this kind."""
    return _FILES[kind]


class Fused:
    """Turns stages into ops, with the tile that was chosen for the GPU and the layer's shape.

    `stages` are those that will be asked for: their kernels are compiled together.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        weights: Weights,
        state: State,
        helpers: CudaHelpers,
        choices: Choices,
    ) -> None:
        self._weights, self._state, self._helpers = weights, state, helpers
        self._tiles = {
            stage.kind: choices.tile(stage.kind, *stage.weight.shape)
            for stage in stages
            if not isinstance(stage, Attention) and self.takes(stage)
        }
        step.compile_kernels((file_of(kind), tile) for kind, tile in self._tiles.items())

    def takes(self, stage: Stage) -> bool:
        """Whether the fused kernels handle this size: rows of whole 16 bytes."""
        return isinstance(stage, Attention) or stage.weight.shape[1] % 8 == 0

    def op(self, layer: int | None, stage: Stage) -> Op:
        """The stage as one kernel."""
        if isinstance(stage, Attention):
            launch = self._helpers.attention(stage)
            kernel = step.attention_file(heads_of(self._state.config))
            engine: Engine = "composed" if kernel == step.ATTENTION_ANY else "fused"
            return attention_op(stage, launch, self._state, engine, kernel)
        s, w = self._state, self._weights
        is_head = stage.kind == "head"
        inputs, out = {
            "qkv": (s.x, s.qkv),
            "o": (s.attention, s.x),
            "gate_up": (s.x, s.activation),
            "down": (s.activation, s.x),
            "head": (s.x, s.logits),
        }[stage.kind]
        launch = step.fused_linear(
            file_of(stage.kind),
            self._tiles[stage.kind],
            w=w[stage.weight],
            x=inputs,
            y=None if is_head else out,
            norm=w[stage.norm] if isinstance(stage, NormLinear) else None,
            bias=None if stage.bias is None else w[stage.bias],
            logits=s.logits if is_head else None,
            best=s.best if is_head else None,
            eps=s.config.rms_norm_eps,
        )
        return linear_op(stage, layer, launch, out, "fused", file_of(stage.kind))
