"""What the commands that measure a decoder share: loading it, its gate's text, the ceiling."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from minidecode.cli import options, streams
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
        type=options.count,
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


def check_outputs(targets: Mapping[str, str | None]) -> None:
    """UsageError for files that cannot be written, which should not wait for the measurement.

    `targets` are file names by flag; "-" is stdout, which only one of them can be.
    """
    taken: dict[str, str] = {}
    for flag, target in targets.items():
        if target is None:
            continue
        place = "-" if is_stdout(target) else os.path.realpath(Path(target).expanduser())
        if place in taken:
            raise UsageError(f"{taken[place]} and {flag} cannot both be {target}")
        taken[place] = flag
        if place != "-":
            _check_writable(flag, target)


def _check_writable(flag: str, target: str) -> None:
    path = Path(target).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{flag} {target}: no such folder, or a folder itself")
    if _is_special(path):  # opened but once: its reader would take an end for the end
        if not os.access(path, os.W_OK):
            raise UsageError(f"{flag} {target}: {os.strerror(errno.EACCES)}")
        return
    new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{flag} {target}: {error.strerror}") from error


def write(contents: Mapping[tuple[str, str], Callable[[], str | bytes]]) -> None:
    """Write what each makes to the file of its (flag, file name), or to stdout for "-".

    A file is replaced once all of it is written. Raises MinidecodeError for what could not be made
    or written, after the rest.
    """
    failed = []
    for (flag, target), make in contents.items():
        try:
            content = make()
            _write(target, content.encode("utf-8") if isinstance(content, str) else content)
        except MinidecodeError as error:
            failed.append(f"{flag} {target}: {error}")
        except OSError as error:
            if is_stdout(target):
                raise
            failed.append(f"{flag} {target}: {error.strerror}")
    if failed:
        raise MinidecodeError("; ".join(failed))


def _write(target: str, data: bytes) -> None:
    if is_stdout(target):
        streams.show(data)
        return
    path = Path(target).expanduser()
    if _is_special(path):
        path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(data)
        if path.exists():
            shutil.copymode(path, fresh)
        fresh.replace(path)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or not path.exists():
            raise
        path.write_bytes(data)  # a file of ours in a folder that is not, or mounted by itself
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)


def rendered(form: str, kind: str, result: object) -> str | bytes:
    """What a writer makes of a result: a table for people, or the bytes of a document."""
    from minidecode.report import writer

    make = writer(form, kind)
    if form == "txt":
        return cast("str", make(result, plain=plain()))
    return cast("str", make(result)).encode()


def is_stdout(target: str) -> bool:
    """Whether the file name is one of stdout's."""
    return target in ("-", "/dev/stdout", "/dev/fd/1")


def _is_special(path: Path) -> bool:
    """Whether it is a pipe, a device, or one of the names of an open file."""
    named = path.is_absolute() and path.parts[1] in ("dev", "proc")
    return path.exists() and (named or not path.is_file())


def plain() -> bool:
    """Whether what goes to stdout should carry no colour."""
    return not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR"))
