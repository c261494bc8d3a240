"""The command line on closed, narrow and full streams, and with readers that leave."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from minidecode import cli
from minidecode.cli import streams
from minidecode.errors import KernelWrongError

HOSTILE = Path(__file__).parent / "fixtures" / "hostile" / "hostile.py"


def stdout_on(monkeypatch: pytest.MonkeyPatch, descriptor: int) -> None:
    monkeypatch.setattr(sys, "stdout", os.fdopen(descriptor, "w", encoding="utf-8"))


def unread() -> int:
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def wrong() -> int:
    streams.show("WRONG\n")
    raise KernelWrongError("it is wrong")


def right() -> int:
    print("a table")
    return 0


def slower() -> int:
    print("a table")
    return 4


@pytest.mark.parametrize(("run", "code"), [(wrong, 3), (slower, 4), (right, 0)])
def test_a_verdict_outlasts_its_reader(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], int], code: int
) -> None:
    stdout_on(monkeypatch, unread())
    assert cli.guarded("minidecode", run) == code
    print("later")
    sys.stdout.flush()  # leads nowhere, and is no error at the end of the program


def test_a_text_ends_with_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout_on(monkeypatch, unread())

    def text() -> int:
        for _ in range(3):
            sys.stdout.write("word ")
            sys.stdout.flush()
        raise AssertionError("nobody listens")

    assert cli.guarded("minidecode", text) == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_wrong_kernel_is_wrong_whoever_listens(unbuffered: str) -> None:
    writer = unread()
    done = subprocess.run(
        [sys.executable, "-m", "minidecode", "kernels", "check", "-v", f"{HOSTILE}:zeros"],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert "hostile.py:zeros is wrong" in done.stderr


def test_a_disk_that_is_full_is_said_of_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdout_on(monkeypatch, os.open("/dev/full", os.O_WRONLY))
    assert cli.guarded("minidecode", lambda: print("lost") or 0) == 1
    assert capsys.readouterr().err == "minidecode: stdout: No space left on device\n"


def test_no_character_is_beyond_a_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))

    def both() -> int:
        streams.show("5 µs, ")
        streams.show('{"unit": "µs"}'.encode())
        return 0

    assert cli.guarded("minidecode", both) == 0
    assert written.getvalue() == b'5 \\xb5s, {"unit": "\xc2\xb5s"}'


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_closed_stream_is_an_empty_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(sys, name, None)
    assert cli.main(["generate"] if name == "stdin" else ["kernels", "list"]) == (
        2 if name == "stdin" else 0
    )
    out, err = capsys.readouterr()
    assert ("nothing to continue" in err) is (name == "stdin")
    assert ("half2_block" in out) is (name == "stderr")


def test_ctrl_c_that_a_library_swallows_is_still_one() -> None:
    def importing() -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("cannot load module more than once per process") from None
        raise AssertionError("no signal came")

    before = signal.getsignal(signal.SIGINT)
    assert cli.guarded("minidecode", importing) == 130
    assert signal.getsignal(signal.SIGINT) is before
