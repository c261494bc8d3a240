"""What the commands that measure share: the depth, loading, the gate's text, the ceiling."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from minidecode.cli import options
from minidecode.errors import MinidecodeError

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
