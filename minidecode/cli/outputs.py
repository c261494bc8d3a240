"""Where results go: files that are checked before anything is measured, or stdout."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from minidecode.cli import streams
from minidecode.errors import MinidecodeError, UsageError


def check(targets: Mapping[str, str | None]) -> None:
    """UsageError for files that cannot be written, which should not wait for the measurement.

    `targets` are file names by flag; "-" is stdout, which only one of them can be. MissingError for
    a picture where matplotlib is not installed.
    """
    if targets.get("--png") is not None:
        from minidecode.report import png

        png.require()
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
