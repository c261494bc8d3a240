"""The command line. Nothing outside this package prints or exits.

Each command is a module with `add_arguments(parser)` and `run(args) -> int`. Only the module of the
command that is asked for is imported, and it imports what is slow (torch, transformers) inside
`run`, so that `--help` and usage errors answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from minidecode import __version__
from minidecode.cli import streams
from minidecode.errors import MinidecodeError

# name -> what it does; its module has the same name.
COMMANDS = {
    "generate": "write text with a model",
    "bench": "tokens a second, in the columns of llama-bench",
    "report": "where one decode step spends its time, layer by layer",
    "ab": "two kernels in turn in one decoder: which is faster, and are both right",
    "gemv": "the kernels alone, over sizes or a model's shapes",
    "kernels": "list, check or compile the kernels",
    "tune": "choose tile sizes for this GPU and model",
    "fetch": "put the example or a hub model into the cache",
    "env": "versions, hardware and measured read bandwidth",
}

DESCRIPTION = """\
Batch-one LLM decoding with swappable GEMV kernels, and measurements of them.

MODEL is a Hugging Face directory, a hub id (owner/name), synthetic:NAME (real
dimensions, random weights) or example (the default: SmolLM2-135M-Instruct).
KERNEL is a name from `kernels list`, a path to a .cu file, or path.py:function."""

EPILOG = """\
exit codes: 0 done, 1 failed, 2 wrong usage, 3 a kernel is wrong, 4 slower than
allowed, 5 something needed is missing, 130 interrupted"""

INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Errors in one line; no abbreviated options, which would break when one is added."""

    def __init__(self, **options: object) -> None:
        super().__init__(
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,  # type: ignore[arg-type]
        )

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Knows all or fails: a command's own error leads to its own help."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    asked = sys.argv[1:] if arguments is None else arguments

    def run() -> int:
        args = _parser(asked).parse_args(asked)
        return int(args.run(args))

    return guarded("minidecode", run)


def guarded(program: str, run: Callable[[], int]) -> int:
    """What `run` returns; whatever goes wrong in it is one line on stderr and an exit code."""
    streams.prepare()
    failed: Exception | None = None
    with _noticed_interrupt() as interrupted:
        try:
            code = run()
        except KeyboardInterrupt:
            code = INTERRUPTED
        except BrokenPipeError:
            code = 0  # whoever read our output has enough
        except Exception as error:
            if interrupted():  # a library may make an error of its own of it
                code = INTERRUPTED
            else:
                failed, code = error, error.exit_code if isinstance(error, MinidecodeError) else 1
    lost = streams.finish()
    if failed is not None:
        if os.environ.get("MINIDECODE_DEBUG") == "1":
            traceback.print_exception(failed)
        words = lost if lost and isinstance(failed, OSError) else _message(failed)
        print(f"{program}: {words}", file=sys.stderr)
    elif lost:
        print(f"{program}: {lost}", file=sys.stderr)
        code = code or 1
    return code


@contextmanager
def _noticed_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields whether Ctrl-C came, which raises KeyboardInterrupt as ever."""
    came = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    before = signal.signal(signal.SIGINT, handle) if ours else None
    try:
        yield lambda: came
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def _parser(arguments: Sequence[str]) -> Parser:
    """The parser, with the options of the one command that `arguments` name."""
    parser = Parser(prog="minidecode", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"minidecode {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for name, help_line in COMMANDS.items():
        command = commands.add_parser(name, help=help_line, description=_sentence(help_line))
        if name == asked:
            module = importlib.import_module(f"{__name__}.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _sentence(line: str) -> str:
    return f"{line[0].upper()}{line[1:]}."


def _message(error: Exception) -> str:
    if isinstance(error, MinidecodeError):
        return str(error)
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first} (MINIDECODE_DEBUG=1 shows where)"
