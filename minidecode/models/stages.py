"""The vocabulary in which a model family writes down its decode step.

A family's block is a list of stages; a stage is the largest piece that one fused kernel can do.
A kernel set turns each stage into one op (fused) or into several (composed), so families know
nothing of kernels and kernels nothing of families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from minidecode.config import FamilyDefaults, ModelConfig

LinearKind = Literal["qkv", "o", "gate_up", "down", "head"]
LINEAR_KINDS: tuple[LinearKind, ...] = ("qkv", "o", "gate_up", "down", "head")


@dataclass(frozen=True)
class Parameter:
    """One tensor on the device: checkpoint tensors `sources` stacked along rows.

    `rows[i]` are the rows of `sources[i]`. `cols` is the width of a matrix; None is a vector.
    """

    sources: tuple[str, ...]
    rows: tuple[int, ...]
    cols: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        n = sum(self.rows)
        return (n,) if self.cols is None else (n, self.cols)

    def source_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The checkpoint tensors with the shapes they must have."""
        for name, n in zip(self.sources, self.rows, strict=True):
            yield name, ((n,) if self.cols is None else (n, self.cols))


@dataclass(frozen=True)
class NormLinear:
    """y = act(W rmsnorm(x) + b): the QKV, the gate/up and the head projection.

    `act` "swiglu" reads the first half of the rows as gate, the second as up, and gives
    silu(gate) * up.
    """

    name: str
    kind: LinearKind
    norm: Parameter
    weight: Parameter
    bias: Parameter | None = None
    act: Literal["swiglu"] | None = None


@dataclass(frozen=True)
class Attention:
    """q/k RMSNorm if there is one, RoPE, append of k and v to the cache, attention of one token."""

    name: str
    layer: int
    window: int | None
    q_norm: Parameter | None = None
    k_norm: Parameter | None = None


@dataclass(frozen=True)
class LinearResidual:
    """x += W y + b: the output and the down projection."""

    name: str
    kind: LinearKind
    weight: Parameter
    bias: Parameter | None = None


Stage = NormLinear | Attention | LinearResidual


@dataclass(frozen=True)
class Blueprint:
    """A whole model: the embedding table, the stages of each layer, and the head."""

    embedding: Parameter
    layers: tuple[tuple[Stage, ...], ...]
    head: NormLinear

    def stages(self) -> Iterator[tuple[int | None, Stage]]:
        """Every stage in order with its layer; the head's layer is None."""
        for i, layer in enumerate(self.layers):
            for stage in layer:
                yield i, stage
        yield None, self.head

    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter once, a tied head with the embedding."""
        found: dict[Parameter, None] = {self.embedding: None}
        for _, stage in self.stages():
            for field in ("norm", "weight", "bias", "q_norm", "k_norm"):
                parameter = getattr(stage, field, None)
                if parameter is not None:
                    found[parameter] = None
        return tuple(found)


@dataclass(frozen=True)
class Family:
    """One `model_type`: what its config leaves out, its blueprint, and a tiny config for tests."""

    model_type: str
    defaults: FamilyDefaults
    blueprint: Callable[[ModelConfig], Blueprint]
    tiny: dict[str, Any]
