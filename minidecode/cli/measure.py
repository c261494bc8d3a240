"""What the commands that measure a decoder share: loading it, its gate's text, the ceiling."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from minidecode.cli import options
from minidecode.errors import MinidecodeError, UsageError

if TYPE_CHECKING:
    from minidecode.cli.progress import Progress
    from minidecode.decode import Decoder
    from minidecode.records import Environment


DEPTH = 128


def add_depth(parser: argparse.ArgumentParser) -> None:
    """`-d N`, one number of tokens; in `args.depth`."""
    parser.add_argument(
        "-d",
        dest="depth",
        type=count,
        default=DEPTH,
        metavar="N",
        help=f"tokens in the cache before (default {DEPTH})",
    )


def load(args: argparse.Namespace, kernel: str | None, progress: Progress) -> Decoder:
    """The decoder of `args.model` on `args.device` with `kernel` as its own."""
    asked = {**vars(args), "kernel": kernel, "max_context": None}
    return options.load(argparse.Namespace(**asked), progress)


def gate_ids(decoder: Decoder) -> list[int]:
    """Token ids of the text that kernels are judged on; pseudo-random without a tokenizer."""
    from minidecode.bench.gate import PASSAGE, POSITIONS, random_ids
    from minidecode.text import Text

    ids = random_ids(decoder.config.vocab_size)
    if decoder.directory is not None:
        try:
            found = Text(decoder.directory).encode(PASSAGE)
        except MinidecodeError:  # a directory without a tokenizer can be measured, too
            found = []
        # A tokenizer may know more tokens than the model has.
        known = [token for token in found if token < decoder.config.vocab_size]
        ids = known if len(known) >= POSITIONS else ids
    return ids[: min(POSITIONS, decoder.max_context)]


def environment(decoder: Decoder, progress: Progress) -> Environment:
    """The machine with its read ceiling, measured now; without one where it cannot be."""
    from minidecode.bench import device

    progress(None, "measuring the read bandwidth")
    ceiling = None
    try:
        ceiling = device.read_bandwidth(decoder.device)
    except MinidecodeError as error:
        progress.stop()
        print(f"minidecode: no read ceiling: {error}", file=sys.stderr)
    return dataclasses.replace(device.environment(decoder.device), read_bw_gb_s=ceiling)


def command_line(name: str, positional: tuple[str, ...], flags: Mapping[str, object]) -> str:
    """The command that repeats this run; flags that are None or False are left out."""
    words = ["minidecode", name, *positional]
    for flag, value in flags.items():
        if isinstance(value, list):
            value = ",".join(map(str, value))
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return shlex.join(words)


def count(text: str) -> int:
    """A whole number of at least 0."""
    found = options.counts(text)
    if len(found) != 1:
        raise argparse.ArgumentTypeError(f"not one whole number: {text!r}")
    return found[0]


def check_outputs(targets: Mapping[str, str | None]) -> None:
    """UsageError for files that cannot be written, which should not wait for the measurement.

    `targets` are file names by flag; "-" is stdout, which only one of them can be.
    """
    taken: dict[str, str] = {}
    for flag, target in targets.items():
        if target is None:
            continue
        path = target if target == "-" else os.path.realpath(Path(target).expanduser())
        if path in taken:
            raise UsageError(f"{taken[path]} and {flag} cannot both be {target}")
        taken[path] = flag
        if target != "-":
            _check_writable(flag, target, Path(path))


def _check_writable(flag: str, target: str, path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{flag} {target}: no such folder, or a folder itself")
    new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{flag} {target}: {error.strerror}") from error


def write(contents: Mapping[tuple[str, str], str | bytes]) -> None:
    """Write each content to the file of its (flag, file name), or to stdout for "-".

    A file is replaced once all of it is written. Raises MinidecodeError for what could not be
    written, after the rest.
    """
    failed = []
    for (flag, target), content in contents.items():
        try:
            _write(target, content.encode("utf-8") if isinstance(content, str) else content)
        except OSError as error:
            failed.append(f"{flag} {target}: {error.strerror}")
    if failed:
        raise MinidecodeError("; ".join(failed))


def _write(target: str, data: bytes) -> None:
    if target == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        return
    path = Path(os.path.realpath(Path(target).expanduser()))
    if path.exists() and not path.is_file():  # a pipe or a device
        path.write_bytes(data)
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(data)
        if path.exists():
            shutil.copymode(path, fresh)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def plain() -> bool:
    """Whether what goes to stdout should carry no colour."""
    return not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR"))
