"""`bench`: tokens a second of prompts and texts, in the columns of llama-bench."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from minidecode.cli import measure, options, outputs, streams
from minidecode.cli.progress import Progress
from minidecode.errors import UsageError

if TYPE_CHECKING:
    from minidecode.plan import KernelSet
    from minidecode.records import Run

FORMATS = ("txt", "md", "json", "jsonl", "csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument(
        "-p",
        dest="prompts",
        type=options.counts,
        default=[512],
        metavar="N,…",
        help="prompt lengths (default 512; 0 is no prompt test); torch runs prompts whatever the"
        " kernel",
    )
    parser.add_argument(
        "-n",
        dest="texts",
        type=options.counts,
        default=[128],
        metavar="N,…",
        help="tokens to generate (default 128; 0 is no generation test)",
    )
    parser.add_argument(
        "-d",
        dest="depths",
        type=options.counts,
        default=[0],
        metavar="N,…",
        help="tokens in the cache before (default 0)",
    )
    parser.add_argument(
        "-r",
        dest="repeats",
        type=options.positive,
        default=5,
        metavar="N",
        help="repeats of each test, after a warm-up (default 5)",
    )
    parser.add_argument(
        "--kernel",
        default=os.environ.get("MINIDECODE_KERNEL") or None,
        metavar="KERNEL,…",
        help="names from `kernels list`, file.cu or file.py:function (default: MINIDECODE_KERNEL,"
        " else the fastest for the device)",
    )
    options.add_device(parser)
    parser.add_argument(
        "-o",
        "--output",
        choices=FORMATS,
        help="what goes to stdout (default: txt for a terminal, else md)",
    )
    options.add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    specs = _kernels(args.kernel)
    for spec in specs:
        options.check_kernel(spec)
    if not any(args.prompts + args.texts):
        raise UsageError("nothing to measure: -p and -n are both 0")
    from minidecode.loading import resolve_device
    from minidecode.plan import kernel_set

    device = resolve_device(args.device)
    sets = [kernel_set(spec, device) for spec in specs]
    with Progress(args.quiet) as progress, options.show_builds(progress):
        results = _measure(args, sets, specs[0], progress)
    chosen = args.output or ("txt" if sys.stdout.isatty() else "md")
    streams.show(outputs.rendered(chosen, "runs", results))
    if chosen in ("txt", "md"):
        print(_apart(results[-1]), file=sys.stderr)
    return 0


def _kernels(spec: str | None) -> list[str | None]:
    if spec is None:
        return [None]
    names: list[str | None] = [name.strip() for name in spec.split(",") if name.strip()]
    if not names:
        raise UsageError("--kernel: no name in it")
    return names


def _measure(
    args: argparse.Namespace, sets: list[KernelSet], first: str | None, progress: Progress
) -> list[Run]:
    from minidecode.bench import throughput
    from minidecode.bench.gate import Gate

    decoder = measure.load(args, first, progress)
    cases = throughput.cases(args.prompts, args.texts, args.depths)
    # What does not fit should show before minutes of measuring, and one cache serves all.
    decoder.prepare(max(case.positions(decoder) for case in cases))
    environment = measure.environment(decoder, progress)
    named = [(kernels.name, kernels) for kernels in sets]
    gate = Gate(decoder, measure.gate_ids(decoder), progress) if any(args.texts) else None
    if gate is not None:
        for arm in named:
            gate.check([arm], "before")
    results = [
        throughput.run_case(
            decoder,
            kernels,
            case,
            repeats=args.repeats,
            model=options.model_name(args.model),
            environment=environment,
            progress=progress,
        )
        for case in cases
        # A prompt is the same whatever the kernel: once is enough.
        for kernels in (sets[:1] if case.n_prompt else sets)
    ]
    if gate is not None:
        for arm in named:
            gate.check([arm], "after")
    return results


def _apart(run: Run) -> str:
    """What the rates leave out."""
    peak = run.peak_memory_bytes
    parts = [f"load {run.load_s:.2f} s", f"build {run.build_s:.2f} s"]
    parts += [] if peak is None else [f"peak memory {peak / 1e9:.2f} GB"]
    return "not in the rates: " + ", ".join(parts)
