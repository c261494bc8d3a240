"""The fused engine: one kernel a stage, five a layer."""

from __future__ import annotations

from collections.abc import Iterable

from minidecode.kernels import step, tune
from minidecode.kernels.tiles import Tile
from minidecode.models.stages import Attention, NormLinear, Stage
from minidecode.plan.cuda import CudaHelpers
from minidecode.plan.op import Op, attention_op, stage_bytes
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
    """Turns stages into ops, with the tile that was tuned for the GPU and the layer's shape.

    `tiles` overrides the tile of a kind of layer; tuning uses it.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        weights: Weights,
        state: State,
        limit: int,
        tiles: dict[str, Tile] | None = None,
    ) -> None:
        self._weights, self._state = weights, state
        self._attention = CudaHelpers(weights, state, limit)
        self._tiles: dict[str, Tile] = {}
        wanted: dict[str, list[Tile]] = {}
        for stage in stages:
            if isinstance(stage, Attention) or not self.takes(stage):
                continue
            n, k = stage.weight.shape
            if stage.kind not in self._tiles:
                chosen = (tiles or {}).get(stage.kind) or tune.tile_for(
                    stage.kind, n, k, state.device
                )
                self._tiles[stage.kind] = chosen
                wanted.setdefault(file_of(stage.kind), []).append(chosen)
        self._linears = step.FusedLinears(wanted)

    def takes(self, stage: Stage) -> bool:
        """Whether the fused kernels handle this size: 16-byte rows, and gate/up in pairs."""
        return isinstance(stage, Attention) or stage.weight.shape[1] % 8 == 0

    def op(self, layer: int | None, stage: Stage) -> Op:
        """The stage as one kernel."""
        if isinstance(stage, Attention):
            launch = self._attention.attention(stage)
            return attention_op(stage, launch, self._state, "fused", "attention")
        s, w = self._state, self._weights
        is_head = stage.kind == "head"
        inputs, out = {
            "qkv": (s.x, s.qkv),
            "o": (s.attention, s.x),
            "gate_up": (s.x, s.activation),
            "down": (s.activation, s.x),
            "head": (s.x, s.logits),
        }[stage.kind]
        launch = self._linears.bind(
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
        return Op(
            stage.name,
            stage.kind,
            layer,
            stage.weight.shape,
            launch,
            out,
            "fused",
            file_of(stage.kind),
            weight_bytes=stage_bytes(stage),
        )
