"""One operation of the decode step, as data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from minidecode.config import FP16_BYTES
from minidecode.errors import MinidecodeError
from minidecode.models.stages import Attention, LinearResidual, NormLinear
from minidecode.plan.state import State

Engine = Literal["fused", "composed", "torch"]
Launch = Callable[[], None]


@dataclass(frozen=True)
class Op:
    """What runs, what it reads, and how to enqueue it.

    `name` is unique in a step ("layers.3.mlp.gate_up"); `kind` groups ops across layers; `layer`
    is None for the head and what follows. `shape` is [n, k] of a linear layer and the size of the
    output otherwise. `weight_bytes` are read once a step; `kv_bytes_per_pos` are read once for
    each position seen, at most `window` of them. `launch` only enqueues; `output` is the buffer it
    writes, looked at when a step went non-finite.
    """

    name: str
    kind: str
    layer: int | None
    shape: tuple[int, ...]
    launch: Launch
    output: torch.Tensor
    engine: Engine
    kernel: str
    weight_bytes: int = 0
    kv_bytes_per_pos: int = 0
    window: int | None = None

    def bytes(self, position: int) -> int:
        """Bytes of weights and cache that the op reads in the step at `position` (from 0)."""
        seen = position + 1 if self.window is None else min(position + 1, self.window)
        return self.weight_bytes + self.kv_bytes_per_pos * seen


def stage_bytes(stage: NormLinear | LinearResidual) -> int:
    """Bytes of weight, bias and norm that a linear stage reads."""
    parts = (stage.weight, stage.bias, stage.norm if isinstance(stage, NormLinear) else None)
    return sum(FP16_BYTES * math.prod(p.shape) for p in parts if p is not None)


def attention_op(stage: Attention, launch: Launch, state: State, engine: Engine, kernel: str) -> Op:
    """The attention of one layer as an op; its output is `state.attention`."""
    c = state.config
    norms = (stage.q_norm, stage.k_norm)
    return Op(
        stage.name,
        "attention",
        stage.layer,
        (c.num_heads, c.head_dim),
        launch,
        state.attention,
        engine,
        kernel,
        weight_bytes=sum(FP16_BYTES * math.prod(p.shape) for p in norms if p is not None),
        kv_bytes_per_pos=FP16_BYTES * 2 * c.kv_size,
        window=stage.window,
    )


def linear_op(
    stage: NormLinear | LinearResidual,
    layer: int | None,
    launch: Launch,
    output: torch.Tensor,
    engine: Engine,
    kernel: str,
) -> Op:
    """A linear stage in one op, with all that it reads."""
    shape = stage.weight.shape
    return Op(
        stage.name, stage.kind, layer, shape, launch, output, engine, kernel, stage_bytes(stage)
    )


def naming_itself(op: Op) -> Op:
    """The op with its name before whatever goes wrong in its launch."""
    launch = op.launch

    def named() -> None:
        try:
            launch()
        except MinidecodeError as error:
            raise type(error)(f"{op.name}: {error}") from error

    return replace(op, launch=named)
