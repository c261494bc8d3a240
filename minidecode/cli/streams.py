"""stdin, stdout and stderr: closed or not, in any encoding, with a reader that may leave."""

from __future__ import annotations

import codecs
import io
import os
import sys


def prepare() -> None:
    """Make all three usable: closed ones are empty, and no character is beyond an encoding."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper) and not _is_utf8(stream):
            stream.reconfigure(errors="backslashreplace")


def _is_utf8(stream: io.TextIOWrapper) -> bool:
    return codecs.lookup(stream.encoding).name == "utf-8"


def show(content: str | bytes) -> None:
    """Print a text, or a document's bytes, whatever the encoding of stdout.

    A reader that has enough is no reason to stop: a verdict may be to come.
    """
    try:
        if isinstance(content, str):
            sys.stdout.write(content)
        else:
            sys.stdout.flush()
            sys.stdout.buffer.write(content)
        sys.stdout.flush()
    except BrokenPipeError:
        _leave()


def finish() -> str:
    """Write out what stdout still holds; what went wrong, in a few words, or ""."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _leave()
    except OSError as error:
        _leave()
        return f"stdout: {error.strerror}"
    return ""


def _leave() -> None:
    """Let stdout lead nowhere; Python would complain of it again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
