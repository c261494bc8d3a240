"""`ab`: two kernels in turn in one decoder, with a verdict that says how sure it is."""

from __future__ import annotations

import argparse
import functools
import math

from minidecode.cli import measure, options, outputs, streams
from minidecode.cli.progress import Progress
from minidecode.errors import SlowerError, UsageError

ROUNDS = 20
# Steps of one sample: about a tenth of a second either way.
STEPS = {"cuda": 64, "cpu": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("a", "b"):
        parser.add_argument(
            name,
            metavar=name.upper(),
            help="name from `kernels list`, file.cu or file.py:function",
        )
    options.add_model(parser)
    parser.add_argument(
        "--only",
        metavar="OP,…",
        help="swap only these linear layers: qkv, o, gate_up, down, head, or as checkpoints name"
        " them (down_proj; q_proj is all of qkv); the rest stays A's",
    )
    parser.add_argument(
        "-n",
        dest="steps",
        type=options.positive,
        metavar="N",
        help=f"tokens of one sample (default {STEPS['cuda']}, on the CPU {STEPS['cpu']})",
    )
    measure.add_depth(parser)
    parser.add_argument(
        "--rounds",
        type=options.positive,
        default=ROUNDS,
        metavar="N",
        help=f"pairs of samples of A and B, and of A and A (default {ROUNDS}, at least 12)",
    )
    options.add_device(parser)
    parser.add_argument(
        "--json", metavar="F", help="every sample and verdict as JSON; - is stdout, with no table"
    )
    parser.add_argument(
        "--fail-if-slower",
        type=_percent,
        metavar="PCT",
        help="exit with 4 when the whole interval of B's speed is more than PCT %% below A's",
    )
    options.add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    from minidecode.bench.stats import MIN_PAIRS

    for spec in (args.a, args.b):
        options.check_kernel(spec)
    if args.rounds < MIN_PAIRS:
        raise UsageError(f"--rounds {args.rounds}: an interval takes at least {MIN_PAIRS}")
    outputs.check({"--json": args.json})

    from minidecode.bench import ab
    from minidecode.loading import resolve_device
    from minidecode.plan import kernel_set, linear_kinds
    from minidecode.report import writer

    only = () if args.only is None else linear_kinds(args.only)
    device = resolve_device(args.device)
    a, b = kernel_set(args.a, device), kernel_set(args.b, device)
    names = (a.name, b.name)
    if only:
        b = a.swap(only, b)
    with Progress(args.quiet) as progress, options.show_builds(progress):
        decoder = measure.load(args, args.a, progress)
        steps = args.steps or STEPS[decoder.device.type]
        environment = measure.environment(decoder, progress)
        result = ab.run(
            decoder,
            (names[0], a),
            (names[1], b),
            measure.gate_ids(decoder),
            only=only,
            n=steps,
            depth=args.depth,
            rounds=args.rounds,
            model=options.model_name(args.model),
            command=_command(args, steps),
            environment=environment,
            progress=progress,
        )
    try:
        if args.json is not None:
            document = functools.partial(writer("json", "ab"), result)
            outputs.write({("--json", args.json): document})
    finally:
        if args.json is None or not outputs.is_stdout(args.json):
            streams.show(outputs.rendered("txt", "ab", result))
    allowed = args.fail_if_slower
    if allowed is not None and 100.0 * (1.0 - result.ratio_high) > allowed:
        raise SlowerError(f"{result.sentence}: more than {allowed:g} % slower")
    return 0


def _command(args: argparse.Namespace, steps: int) -> str:
    flags = {
        "-m": args.model,
        "--only": args.only,
        "-n": steps,
        "-d": args.depth,
        "--rounds": args.rounds,
        "--device": args.device,
        "--fail-if-slower": args.fail_if_slower,
    }
    return measure.command_line("ab", (args.a, args.b), flags)


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"not a percentage from 0 to 100: {text!r}")
    return value
