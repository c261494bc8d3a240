"""A model's parameters on the device, FP16, filled from a checkpoint or with random numbers."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from minidecode.config import FP16_BYTES
from minidecode.errors import MinidecodeError
from minidecode.models.stages import Blueprint, Parameter

# Fixed, so that two runs on a synthetic model see the same weights.
_RANDOM_SEED = 1

# Elements: each tensor starts a cache line of its own.
_CPU_ALIGNMENT = 64


class Weights:
    """One FP16 tensor for each Parameter of a blueprint: `weights[parameter]`, shape as declared.

    Every kernel set reads these same tensors.
    """

    def __init__(self, blueprint: Blueprint, device: torch.device) -> None:
        parameters = blueprint.parameters()
        if device.type == "cpu":
            self._tensors = _in_one_piece(parameters)
        else:
            self._tensors = {
                p: torch.empty(p.shape, dtype=torch.float16, device=device) for p in parameters
            }

    def __getitem__(self, parameter: Parameter) -> torch.Tensor:
        return self._tensors[parameter]

    @property
    def bytes(self) -> int:
        """Bytes that all parameters take on the device."""
        return sum(t.nbytes for t in self._tensors.values())

    @classmethod
    def from_checkpoint(
        cls,
        blueprint: Blueprint,
        device: torch.device,
        names: Mapping[str, tuple[int, ...]],
        tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        source: str,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Weights:
        """Fill from `tensors()`, one tensor at a time.

        `names` are the checkpoint's tensors with their shapes, from its headers: what is missing,
        has another shape or is read by nothing is refused before anything is allocated. A tied
        head's own copy is the exception: it may be there if it equals the embedding. `source`
        names the checkpoint in errors; `progress` gets the bytes of each tensor.
        """
        tied = {"lm_head.weight"} if blueprint.head.weight is blueprint.embedding else set()
        wanted = {name: shape for p in blueprint.parameters() for name, shape in p.source_shapes()}
        _check_names(wanted, names, tied, source)
        weights = cls(blueprint, device)
        place: dict[str, torch.Tensor] = {}
        for parameter, tensor in weights._tensors.items():
            for name, part in zip(
                parameter.sources, tensor.split(list(parameter.rows)), strict=True
            ):
                place[name] = part
        duplicate: torch.Tensor | None = None
        for name, tensor in tensors():
            if name in place:
                place[name].copy_(tensor)
            elif name in tied:
                duplicate = tensor.clone()  # the file that it is a view of is closed by then
            progress(tensor.nbytes)
        if duplicate is not None and not torch.equal(weights[blueprint.embedding].cpu(), duplicate):
            raise MinidecodeError(
                f"{source}: tie_word_embeddings is true, but lm_head.weight differs from "
                f"{blueprint.embedding.sources[0]}"
            )
        return weights

    @classmethod
    def random(cls, blueprint: Blueprint, device: torch.device) -> Weights:
        """Random weights that keep activations near 1: W from N(0, 1 / k), norms near 1."""
        generator = torch.Generator(device=device).manual_seed(_RANDOM_SEED)
        weights = cls(blueprint, device)
        for parameter, tensor in weights._tensors.items():
            if parameter.cols is not None:
                # In slices, so that the FP32 random numbers never need a second copy of the model.
                for rows in tensor.split(max(1, 2**26 // parameter.cols)):
                    noise = torch.randn(rows.shape, generator=generator, device=device)
                    rows.copy_(noise.mul_(parameter.cols**-0.5))
            else:
                noise = torch.randn(tensor.shape, generator=generator, device=device)
                is_bias = parameter.sources[0].endswith(".bias")
                tensor.copy_(noise.mul_(0.1).add_(0.0 if is_bias else 1.0))
        return weights


def _in_one_piece(parameters: Sequence[Parameter]) -> dict[Parameter, torch.Tensor]:
    """FP16 tensors on the CPU that lie side by side, in huge pages where the system has them.

    A decode step reads all of them: with small pages, address translation is a tenth of its time.
    """
    sizes = [math.prod(p.shape) for p in parameters]
    ends = list(itertools.accumulate(-(-n // _CPU_ALIGNMENT) * _CPU_ALIGNMENT for n in sizes))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages = mmap.mmap(-1, FP16_BYTES * ends[-1], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(pages, dtype=torch.float16)
    else:
        memory = torch.empty(ends[-1], dtype=torch.float16)
    starts = [0, *ends[:-1]]
    return {
        p: memory[start : start + n].view(p.shape)
        for p, start, n in zip(parameters, starts, sizes, strict=True)
    }


def _check_names(
    wanted: Mapping[str, tuple[int, ...]],
    names: Mapping[str, tuple[int, ...]],
    tied: set[str],
    source: str,
) -> None:
    for name, shape in wanted.items():
        if name not in names:
            raise MinidecodeError(f"{source}: tensor {name} is missing")
        if tuple(names[name]) != shape:
            raise MinidecodeError(
                f"{source}: tensor {name} has shape {list(names[name])}, "
                f"config.json asks for {list(shape)}"
            )
    left = sorted(name for name in names if name not in wanted and name not in tied)
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise MinidecodeError(f"{source}: nothing reads tensor {left[0]}{more}")
