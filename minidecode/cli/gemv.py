"""`gemv`: the kernels alone, over square sizes, any shapes, or those of a model."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from typing import TYPE_CHECKING

from minidecode.cli import measure, options, outputs, streams
from minidecode.cli.progress import Progress
from minidecode.errors import MinidecodeError, UsageError

if TYPE_CHECKING:
    from minidecode.config import ModelConfig
    from minidecode.kernels.registry import Gemv

SIZES = (1024, 2048, 4096, 8192)
DTYPES = {"fp16": ("fp16",), "fp32": ("fp32",), "both": ("fp32", "fp16")}
FORMATS = ("txt", "md", "json", "csv")
# The example model's dimensions, known without having it.
EXAMPLE = "synthetic:smollm2-135m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument(
        "--n",
        type=options.positives,
        metavar="N,…",
        help=f"square sizes (default: {','.join(map(str, SIZES))})",
    )
    shapes.add_argument("--shapes", type=_shapes, metavar="NxK,…", help="rows x columns")
    shapes.add_argument(
        "-m",
        "--model",
        metavar="MODEL",
        help="the linear layers of a model, read off its config: directory, owner/name,"
        " synthetic:NAME or example",
    )
    parser.add_argument(
        "--kernel",
        default="all",
        metavar="KERNEL,…",
        help="names from `kernels list`, file.cu, file.py:function; all (the default) is every one"
        " that runs on the device",
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp16", help="default fp16")
    options.add_device(parser)
    parser.add_argument(
        "-o", "--output", choices=FORMATS, help="default: txt on a terminal, else md"
    )
    parser.add_argument("--png", metavar="F", help="a picture, too (needs matplotlib)")
    options.add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    from minidecode.report import writer

    dtypes = DTYPES[args.dtype]
    gemvs = _named(args.kernel, dtypes)
    outputs.check({"the table": "-", "--png": args.png})
    shapes = args.shapes or [(n, n) for n in args.n or SIZES]
    if args.model is not None:
        shapes = _model_shapes(args.model)

    from minidecode.bench import gemv as bench
    from minidecode.loading import resolve_device

    device = resolve_device(args.device)
    gemvs = _on(device.type, gemvs, dtypes)
    with Progress(args.quiet) as progress, options.show_builds(progress):
        report = bench.measure(
            gemvs, shapes, dtypes, device, command=_command(args), progress=progress
        )
    if report.read_bw_gb_s is None:
        print("minidecode: no read ceiling: it cannot be measured here, see env", file=sys.stderr)
    chosen = args.output or ("txt" if sys.stdout.isatty() else "md")
    try:
        if args.png is not None:
            picture = functools.partial(writer("png", "gemv"), report)
            outputs.write({("--png", args.png): picture})
    finally:
        streams.show(outputs.rendered(chosen, "gemv", report))
    if all(row.median_us is None for row in report.rows):
        raise MinidecodeError(f"nothing was measured: {report.rows[0].reason}")
    return 0


# --- kernels --------------------------------------------------------------------------------------


def _named(spec: str, dtypes: tuple[str, ...]) -> list[Gemv] | None:
    """The kernels asked for; None is all. UsageError for one that is not there or has no dtype."""
    names = [name.strip() for name in spec.split(",") if name.strip()]
    if names == ["all"]:
        return None
    if not names or "all" in names:
        raise UsageError("--kernel takes names with commas between them, or all alone")
    found = {name: options.gemv_kernel(name, also=("all",)) for name in names}
    for gemv in found.values():
        if not set(dtypes) & set(gemv.dtypes):
            has = " and ".join(gemv.dtypes)
            raise UsageError(f"kernel {gemv.name} has no {' or '.join(dtypes)}, only {has}")
    return list(found.values())


def _on(device: str, asked: list[Gemv] | None, dtypes: tuple[str, ...]) -> list[Gemv]:
    """Those of the kernels to measure on a device; what was asked for by name must run there."""
    from minidecode.kernels import registry

    if asked is None:
        return [
            gemv
            for gemv in registry.gemvs().values()
            if device in gemv.devices and set(dtypes) & set(gemv.dtypes)
        ]
    for gemv in asked:
        problem = options.availability(gemv, device)
        if problem is not None:
            raise problem
    return asked


# --- shapes ---------------------------------------------------------------------------------------


def _shapes(text: str) -> list[tuple[int, int]]:
    """ "4096x14336,1024x1024" as (n, k)."""
    found = []
    for part in text.split(","):
        sides = re.fullmatch(r"\s*([^x×]+)[x×]([^x×]+)\s*", part)
        if sides is None:
            raise argparse.ArgumentTypeError(f"not rows x columns, such as 4096x1024: {part!r}")
        found.append((options.positive(sides[1].strip()), options.positive(sides[2].strip())))
    return found


def _model_shapes(spec: str) -> list[tuple[int, int]]:
    """(n, k) of each different linear layer of a model, in the order they run."""
    from minidecode import models
    from minidecode.models.stages import Attention

    config = _config(spec)
    blueprint = models.family(config.model_type).blueprint(config)
    shapes: dict[tuple[int, int], None] = {}
    for _, stage in blueprint.stages():
        if not isinstance(stage, Attention):
            n, k = stage.weight.shape
            shapes[n, k] = None
    return list(shapes)


def _config(spec: str) -> ModelConfig:
    """The config of a model, of a hub's without its weights."""
    from minidecode import models
    from minidecode.checkpoint import resolve_model
    from minidecode.models import synthetic

    spec = EXAMPLE if spec == "example" else spec
    if spec.startswith(options.SYNTHETIC):
        return synthetic.config(spec.removeprefix(options.SYNTHETIC))
    return models.load_config(resolve_model(spec, config_only=True))


# --- output ---------------------------------------------------------------------------------------


def _command(args: argparse.Namespace) -> str:
    """The command line that repeats this run."""
    named = args.model is not None or args.shapes
    flags = {
        "-m": args.model,
        "--shapes": [f"{n}x{k}" for n, k in args.shapes] if args.shapes else None,
        "--n": None if named else args.n or list(SIZES),
        "--kernel": args.kernel,
        "--dtype": args.dtype,
        "--device": args.device,
    }
    return measure.command_line("gemv", (), flags)
