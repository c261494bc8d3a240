"""Options that several commands have, spelled and checked the same way everywhere."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from minidecode.errors import MissingError, UsageError

if TYPE_CHECKING:
    from minidecode.cli.progress import Progress
    from minidecode.decode import Decoder
    from minidecode.kernels.registry import Gemv

SYNTHETIC = "synthetic:"
MODEL_HELP = "directory, owner/name, synthetic:NAME or example (default: %(default)s)"


def add_model(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """MODEL, or `-m MODEL`; in `args.model`."""
    if positional:
        parser.add_argument("model", nargs="?", default="example", metavar="MODEL", help=MODEL_HELP)
    else:
        parser.add_argument("-m", "--model", default="example", metavar="MODEL", help=MODEL_HELP)


def add_kernel(parser: argparse.ArgumentParser) -> None:
    """`--kernel`, by default MINIDECODE_KERNEL, else None: the best for the device."""
    parser.add_argument(
        "--kernel",
        default=os.environ.get("MINIDECODE_KERNEL") or None,
        metavar="KERNEL",
        help="name from `kernels list`, file.cu or file.py:function (default: MINIDECODE_KERNEL,"
        " else the fastest for the device)",
    )


def check_kernel(spec: str | None) -> None:
    """UsageError for a kernel that is not there: known before torch is imported or a model read."""
    from minidecode.kernels import registry

    if spec not in (None, *registry.ENGINES):
        registry.resolve(spec, also=registry.ENGINES)


def gemv_kernel(spec: str, also: Sequence[str] = ()) -> Gemv:
    """The GEMV that a user names; UsageError for one that is not there, and for a whole engine.

    `also` are names that the caller handles itself, to be listed among those there are.
    """
    from minidecode.kernels import registry

    if spec in registry.ENGINES and spec not in registry.gemvs():
        raise UsageError(f"{spec} is an engine, a whole decode step; this takes GEMVs alone")
    return registry.resolve(spec, also)


def availability(gemv: Gemv, device: str) -> MissingError | None:
    """Why a GEMV does not run on a type of device, "cpu" or "cuda", as the error to raise."""
    if device not in gemv.devices:
        wanted = " or ".join(gemv.devices)
        return MissingError(f"kernel {gemv.name} needs a {wanted} device, and this is {device}")
    reason = gemv.unavailable()
    return None if reason is None else MissingError(f"kernel {gemv.name}: {reason}")


def check_device(name: str) -> None:
    """MissingError for a GPU that is not there: known before a model is fetched or read."""
    from minidecode.loading import resolve_device

    resolve_device(name)


def find_model(args: argparse.Namespace, progress: Progress) -> Path | None:
    """The directory of `args.model`, fetched if need be; None for a synthetic model."""
    from minidecode.checkpoint import resolve_model

    if args.model.startswith(SYNTHETIC):
        return None
    return resolve_model(args.model, progress if progress.visible else None)


def model_name(spec: str) -> str:
    """What results call a model: the last part of a directory's path, else what was asked for."""
    return Path(spec).expanduser().resolve().name if os.path.isdir(spec) else spec


def load(args: argparse.Namespace, progress: Progress, directory: Path | None = None) -> Decoder:
    """The decoder of `args`: its model, kernel, device and max_context; progress is shown.

    `directory` is where `find_model` found the model, if it was asked before.
    """
    import minidecode

    return minidecode.load(
        directory or find_model(args, progress) or args.model,
        kernel=args.kernel,
        device=args.device,
        max_context=args.max_context,
        progress=progress,
    )


@contextmanager
def show_builds(progress: Progress) -> Iterator[None]:
    """Shows which kernel is being compiled, while in the `with` block one is."""
    from minidecode.kernels import build

    def on_build(kernel: str, phase: str) -> None:
        if phase == "waiting":
            progress(None, f"waiting for another process to compile {kernel}")
        elif phase == "compiling":
            progress(None, f"compiling {kernel}")

    before, build.on_build = build.on_build, on_build
    try:
        yield
    finally:
        build.on_build = before


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device`, by default MINIDECODE_DEVICE, else auto."""
    parser.add_argument(
        "--device",
        type=device,
        default=os.environ.get("MINIDECODE_DEVICE") or "auto",
        metavar="DEVICE",
        help="auto, cuda, cuda:N or cpu (default: MINIDECODE_DEVICE, else auto)",
    )


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """`--quiet`: no progress on stderr."""
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")


def device(text: str) -> str:
    """auto, cpu, cuda or cuda:N."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"not auto, cuda, cuda:N or cpu: {text!r}")
    return text


def positive(text: str) -> int:
    """A whole number of at least 1, and of no more than an int of C holds."""
    value = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"not a whole number from 1 to 2147483647: {text!r}")
    return value


def positives(text: str) -> list[int]:
    """Whole numbers of at least 1, separated by commas."""
    return [positive(part.strip()) for part in text.split(",")]


def count(text: str) -> int:
    """A whole number of at least 0."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    """Whole numbers of at least 0, separated by commas."""
    return [count(part.strip()) for part in text.split(",")]
