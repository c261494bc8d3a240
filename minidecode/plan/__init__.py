"""The decode step as one list of ops, which decoding, reports and A/B runs all read.

A kernel set says how each stage of a model runs; `build_plan` turns model + weights + state +
kernel set into ops. Nothing else knows their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from minidecode.errors import MissingError, UsageError
from minidecode.kernels import registry, step, tune
from minidecode.kernels.registry import ENGINES, Gemv
from minidecode.kernels.tiles import Choices
from minidecode.models.stages import (
    LINEAR_KINDS,
    Attention,
    Blueprint,
    LinearKind,
    Stage,
)
from minidecode.plan.composed import Composed
from minidecode.plan.cuda import CudaHelpers
from minidecode.plan.fused import Fused
from minidecode.plan.op import Engine, Op, naming_itself
from minidecode.plan.reference import Reference, TorchHelpers
from minidecode.plan.state import State
from minidecode.weights import Weights

__all__ = ["KernelSet", "Op", "Plan", "State", "build_plan", "kernel_set", "linear_kinds"]

# Takes over a stage whose size a fused kernel does not handle.
FALLBACK_GEMV = "half2_block"

_ALIASES: Mapping[str, LinearKind] = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "o_proj": "o",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "down_proj": "down",
    "lm_head": "head",
}


@dataclass(frozen=True)
class KernelSet:
    """Which kernels run a step: an engine, the GEMV of a composed one, and single swaps.

    `swapped` maps a kind of linear layer to the GEMV that replaces it there.
    """

    name: str
    engine: Engine
    gemv: Gemv | None = None
    swapped: Mapping[LinearKind, Gemv] = field(default_factory=dict)

    def swap(self, kinds: tuple[LinearKind, ...], other: KernelSet) -> KernelSet:
        """This set with `other`'s GEMV in the linear layers of these kinds.

        Raises UsageError when `other` is not a GEMV kernel.
        """
        if other.gemv is None:
            raise UsageError(f"--only swaps single GEMVs, and {other.name!r} is a whole engine")
        swapped = {**self.swapped, **dict.fromkeys(kinds, other.gemv)}
        return KernelSet(f"{self.name}+{other.name}", self.engine, self.gemv, swapped)


@dataclass(frozen=True)
class Plan:
    """The ops of one decode step, in order, and what they read."""

    kernel_set: KernelSet
    ops: tuple[Op, ...]

    def bytes_per_token(self, position: int) -> int:
        """Bytes of weights and cache that the step at `position` reads."""
        return sum(op.bytes(position) for op in self.ops)

    @property
    def engine(self) -> str:
        """ "fused", "composed" or "torch"; "mixed" when stages fell back or were swapped."""
        engines = {op.engine for op in self.ops if op.kind in (*LINEAR_KINDS, "attention")}
        return engines.pop() if len(engines) == 1 else "mixed"


def linear_kinds(names: str) -> tuple[LinearKind, ...]:
    """Kinds of linear layer from a list such as "down_proj,o". Raises UsageError."""
    kinds: dict[LinearKind, None] = {}
    for name in filter(None, (n.strip() for n in names.split(","))):
        kind = _ALIASES.get(name)
        if kind is None:
            kind = next((k for k in LINEAR_KINDS if k == name), None)
        if kind is None:
            known = ", ".join([*LINEAR_KINDS, *_ALIASES])
            raise UsageError(f"no linear layer is called {name!r}; there are {known}")
        kinds[kind] = None
    if not kinds:
        raise UsageError("--only: no linear layer in it")
    return tuple(kinds)


def kernel_set(spec: str | None, device: torch.device) -> KernelSet:
    """The kernel set of a `--kernel` value; None is the default of the device.

    "fused", and on the CPU "torch", is a whole engine; any other name or file is a GEMV that
    composes one ("torch" on a GPU is torch.mv: the engine would wait for the device in each op).
    Raises UsageError for an unknown name, MissingError for a kernel this machine cannot run.
    """
    name = spec or ("fused" if device.type == "cuda" else "torch")
    if name == "torch" and device.type == "cpu":
        return KernelSet("torch", "torch", registry.gemvs().get("torch"))
    if name == "fused":
        if device.type != "cuda":
            raise MissingError("the fused engine needs a CUDA GPU; on the CPU use --kernel torch")
        return KernelSet("fused", "fused")
    gemv = registry.resolve(name, also=ENGINES)
    if device.type not in gemv.devices:
        raise MissingError(
            f"kernel {gemv.name!r} runs on {', '.join(gemv.devices)}, not on {device.type}"
        )
    reason = gemv.unavailable()
    if reason is not None:
        raise MissingError(f"kernel {gemv.name!r} is not available: {reason}")
    return KernelSet(gemv.name, "composed", gemv)


def build_plan(
    kernels: KernelSet,
    blueprint: Blueprint,
    weights: Weights,
    state: State,
    *,
    context: int | None = None,
    sampled: bool = False,
    choices: Choices | None = None,
) -> Plan:
    """The step of `blueprint` under `kernels`, for positions below `context` (all by default).

    `sampled` picks by the state's sampling parameters instead of the greatest logit; `choices` are
    tiles and splits other than those kept for the GPU. Kernels are compiled and shapes checked
    here; nothing is launched. Raises MinidecodeError for what cannot be built, with the op named.
    """
    limit = context or state.capacity
    helpers: TorchHelpers | CudaHelpers
    whole: Reference | Fused | None = None
    if state.device.type == "cpu":
        helpers = TorchHelpers(weights, state)
    else:
        chosen = tune.choices(state.device) if choices is None else choices
        helpers = CudaHelpers(weights, state, limit, chosen)
        if kernels.engine == "fused":
            fused = [s for _, s in blueprint.stages() if _swap_of(kernels, s) is None]
            whole = Fused(fused, weights, state, helpers, chosen)
        else:
            step.compile_kernels()
    if kernels.engine == "torch":
        whole = Reference(weights, state)
    composed = Composed(weights, state, helpers)
    ops: list[Op] = []
    for layer, stage in blueprint.stages():
        gemv = _gemv_of(kernels, stage, whole)
        if whole is None or gemv is not None:
            ops += composed.ops(layer, stage, gemv)
        else:
            ops += composed.settle()
            ops.append(whole.op(layer, stage))
    if ops[-1].engine == "composed":
        ops.append(composed.argmax())
    ops += composed.next_token(blueprint.embedding, sampled)
    return Plan(kernels, tuple(map(naming_itself, ops)))


def _swap_of(kernels: KernelSet, stage: Stage) -> Gemv | None:
    return None if isinstance(stage, Attention) else kernels.swapped.get(stage.kind)


def _gemv_of(kernels: KernelSet, stage: Stage, whole: Reference | Fused | None) -> Gemv | None:
    """The GEMV that composes a linear stage, or None where the engine's own op runs it."""
    swapped = _swap_of(kernels, stage)
    if swapped is not None or isinstance(stage, Attention):
        return swapped
    if whole is None:
        return kernels.gemv
    return None if whole.takes(stage) else registry.resolve(FALLBACK_GEMV)
