"""`tune`: measure which tiles and splits are quickest for a model on this GPU, and keep them."""

from __future__ import annotations

import argparse
import dataclasses

from minidecode.cli import measure, options
from minidecode.cli.progress import Progress
from minidecode.errors import KernelWrongError, MissingError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_device(parser)
    parser.add_argument(
        "-d",
        "--depth",
        type=options.counts,
        default=[128],
        help="tokens in the cache while measuring (default 128); at further depths, separated by"
        " commas, only the attention's split is chosen",
    )
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument(
        "--show",
        action="store_true",
        help="print what was measured, here or by us; all else is by rule",
    )
    kept.add_argument("--clear", action="store_true", help="forget what was measured here")
    options.add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    from minidecode.loading import resolve_device

    device = resolve_device(args.device)
    if device.type != "cuda":
        raise MissingError("tune needs a CUDA GPU: the CPU has nothing to choose")
    from minidecode.bench.gate import Gate
    from minidecode.bench.tune import tune_step
    from minidecode.kernels import tune

    if args.clear:
        print("cleared" if tune.clear(device) else "there was nothing to clear")
        return 0
    if args.show:
        chosen = tune.choices(device)
        for key, tile in sorted(chosen.tiles.items()):
            print(f"{key:28s} {tile.spelled}")
        for key, split in sorted(chosen.splits.items()):
            print(f"{key:40s} {split.splits} x {split.warps} warps")
        return 0
    with Progress(args.quiet) as progress, options.show_builds(progress):
        decoder = measure.load(args, "fused", progress)
        kept = None
        for i, depth in enumerate(args.depth):
            found = tune_step(decoder, depth, progress, tiles=i == 0)
            line = f"depth {depth}: {found.before_us:.1f} us a step"
            if found.tiles or found.splits:
                kept = tune.save(device, found.tiles, found.splits)
                gain = 100 * (found.before_us / found.after_us - 1)
                line += f" before, {found.after_us:.1f} us after ({gain:+.1f} %)"
            else:
                line += ", nothing quicker found"
            progress.pause()
            print(line)
        if kept is not None:
            # A set of its own, so that its plans are made of what is kept now.
            arm = ("fused", dataclasses.replace(decoder.kernel_set))
            try:
                Gate(decoder, measure.gate_ids(decoder), progress).check([arm], "after")
            except KernelWrongError as error:
                tune.clear(device)
                said = f"{error}; what was kept for this GPU is forgotten"
                raise KernelWrongError(said) from error
    if kept is not None:
        print(f"kept in {kept}")
    return 0
