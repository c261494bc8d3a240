"""`load`: from a model's name to a Decoder on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from minidecode import checkpoint, models
from minidecode.decode import Decoder
from minidecode.errors import MinidecodeError, MissingError, UsageError
from minidecode.memory import free_memory
from minidecode.models import synthetic
from minidecode.models.stages import Blueprint
from minidecode.plan import kernel_set
from minidecode.weights import Weights

# Called with the fraction done and what is being done.
Progress = Callable[[float, str], None]


def load(
    model: str | Path = "example",
    *,
    kernel: str | None = None,
    device: str = "auto",
    max_context: int | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """A model, ready to decode.

    `model` is a Hugging Face directory, a hub id, "synthetic:<name>" or "example"; `kernel` a
    kernel set as for `--kernel`; `device` "auto", "cpu", "cuda" or "cuda:N"; `max_context` caps
    the context below what the config allows, in tokens.

    Raises UsageError, MissingError or MinidecodeError, each with one line that names the cause.
    """
    began = time.perf_counter()
    where = resolve_device(device)
    if max_context is not None and max_context < 1:
        raise UsageError(f"--max-context must be at least 1, not {max_context}")
    kernels = kernel_set(kernel, where)
    spec = str(model)
    directory: Path | None = None
    if spec.startswith(synthetic.PREFIX):
        config = synthetic.config(spec.removeprefix(synthetic.PREFIX))
    else:
        directory = checkpoint.resolve_model(spec)
        config = models.load_config(directory)
    blueprint = models.family(config.model_type).blueprint(config)
    _check_room(2 * config.parameters, where, spec)
    if directory is None:
        weights = Weights.random(blueprint, where)
    else:
        weights = _read(directory, blueprint, where, progress)
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return Decoder(
        config,
        blueprint,
        weights,
        where,
        kernels,
        directory,
        max_context,
        load_seconds=time.perf_counter() - began,
    )


def resolve_device(name: str) -> torch.device:
    """The device of a `--device` value. MissingError when a GPU is asked for and not there."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device must be auto, cpu, cuda or cuda:N, not {name!r}")
    if device.type == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise MissingError(
            f"--device {name}: this PyTorch ({torch.__version__}) is built without CUDA; "
            "install a CUDA build of torch, or use --device cpu"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= count:
        there = f"only {count} CUDA GPUs are" if count else "no CUDA GPU is"
        raise MissingError(f"--device {name}: {there} visible; use --device cpu without one")
    return torch.device("cuda", index)


def _read(
    directory: Path, blueprint: Blueprint, device: torch.device, progress: Progress | None
) -> Weights:
    """The weights of a model directory, with the share of bytes read as progress."""
    opened = checkpoint.open_checkpoint(directory)
    total, done = max(opened.fp16_bytes(), 1), 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done / total, f"loading {directory.name}")

    return Weights.from_checkpoint(
        blueprint,
        device,
        {name: shape for name, (_, shape) in opened.names().items()},
        opened.tensors,
        str(directory),
        advance,
    )


def _check_room(needed: int, device: torch.device, name: str) -> None:
    """Refuse weights of `needed` bytes that cannot fit the GPU, before any is read."""
    if device.type != "cuda":
        return
    free = free_memory(device)
    if needed > free:
        raise MinidecodeError(
            f"{name} needs {needed / 2**30:.1f} GiB for its weights, "
            f"{device} has {free / 2**30:.1f} GiB free"
        )
