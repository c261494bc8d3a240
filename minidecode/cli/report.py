"""`report`: where one decode step spends its time, op by op."""

from __future__ import annotations

import argparse
import functools

from minidecode.cli import measure, options, outputs, streams
from minidecode.cli.progress import Progress
from minidecode.errors import UsageError

# Formats that a file can have, with what each is good for.
FILES = {
    "html": "one page to look at and pass on",
    "json": "everything",
    "csv": "a line an op",
    "md": "tables for an issue",
    "png": "a picture (needs matplotlib)",
    "trace": "for ui.perfetto.dev and chrome://tracing",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_kernel(parser)
    parser.add_argument("--vs", metavar="KERNEL", help="measure this one, too, and subtract")
    parser.add_argument(
        "--only",
        metavar="OP,…",
        help="with --vs: swap only these linear layers: qkv, o, gate_up, down, head, or as"
        " checkpoints name them (down_proj; q_proj is all of qkv)",
    )
    measure.add_depth(parser)
    parser.add_argument("--layers", action="store_true", help="a line an op in the table, too")
    for name, purpose in FILES.items():
        parser.add_argument(f"--{name}", metavar="F", help=f"{purpose}; - is stdout, with no table")
    options.add_device(parser)
    options.add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    options.check_kernel(args.kernel)
    options.check_kernel(args.vs)
    if args.only is not None and args.vs is None:
        raise UsageError("--only says what --vs swaps: it needs --vs")
    targets = {name: getattr(args, name) for name in FILES if getattr(args, name) is not None}
    outputs.check({f"--{name}": target for name, target in targets.items()})

    from minidecode.bench import layers
    from minidecode.bench.gate import Gate
    from minidecode.loading import resolve_device
    from minidecode.plan import kernel_set, linear_kinds
    from minidecode.report import writer

    only = () if args.only is None else linear_kinds(args.only)
    device = resolve_device(args.device)
    kernels, vs = kernel_set(args.kernel, device), None
    if args.vs is not None:
        vs = kernel_set(args.vs, device)
        vs = kernels.swap(only, vs) if only else vs
    with Progress(args.quiet) as progress, options.show_builds(progress):
        decoder = measure.load(args, args.kernel, progress)
        environment = measure.environment(decoder, progress)
        gate = Gate(decoder, measure.gate_ids(decoder), progress)
        arms = [(each.name, each) for each in (kernels, vs) if each is not None]
        gate.check(arms, "before")
        result = layers.report(
            decoder,
            kernels,
            vs=vs,
            depth=args.depth,
            model=options.model_name(args.model),
            command=_command(args),
            environment=environment,
            progress=progress,
        )
        gate.check(arms, "after")
    files = {
        (f"--{name}", target): functools.partial(writer(name, "layers"), result)
        for name, target in targets.items()
    }
    try:
        outputs.write(files)
    finally:
        if not any(map(outputs.is_stdout, targets.values())):
            streams.show(writer("txt", "layers")(result, layers=args.layers, plain=outputs.plain()))
    return 0


def _command(args: argparse.Namespace) -> str:
    flags = {
        "-m": args.model,
        "--kernel": args.kernel,
        "--vs": args.vs,
        "--only": args.only,
        "-d": args.depth,
        "--device": args.device,
    }
    return measure.command_line("report", (), flags)
