"""`kernels`: what is registered, whether a kernel is right, and compiling ahead of time."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidecode.cli import options, streams
from minidecode.cli.progress import Progress
from minidecode.errors import KernelWrongError, MinidecodeError, MissingError, UsageError

if TYPE_CHECKING:
    from minidecode.kernels.check import CheckReport
    from minidecode.kernels.registry import Gemv

# Failing cases printed for one kernel: enough to see the pattern.
MOST_FAILURES = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="kernels and engines, and which run here")
    listing.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    checking = actions.add_parser("check", help="is a kernel right on the inputs that break them")
    checking.add_argument(
        "kernel",
        nargs="+",
        metavar="KERNEL",
        help="name, file.cu or file.py:function; all is every kernel that runs here",
    )
    checking.add_argument("--dtype", choices=("fp16", "fp32"), help="default: all it has")
    options.add_device(checking)
    checking.add_argument("-v", "--verbose", action="store_true", help="print every case")
    checking.add_argument("--json", action="store_true", help="a JSON list, one object a kernel")
    options.add_quiet(checking)
    building = actions.add_parser(
        "build",
        help="compile now what would be compiled on first use",
        description="Compiles for the GPUs here, or for TORCH_CUDA_ARCH_LIST.",
    )
    building.add_argument(
        "kernel", nargs="*", metavar="KERNEL", help="default: all of minidecode's own"
    )
    options.add_quiet(building)


def run(args: argparse.Namespace) -> int:
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "list": _list,
        "check": _check,
        "build": _build,
    }
    return actions[args.action](args)


# --- list -----------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    rows = _rows()
    if args.json:
        from minidecode.bench.device import environment
        from minidecode.records import SCHEMA_VERSION

        document = {
            "schema_version": SCHEMA_VERSION,
            "environment": environment(_some_device()).to_dict(),
            "kernels": rows,
        }
        print(json.dumps(document))
        return 0
    notes: dict[str, int] = {}
    lines = [("name", "dtypes", "here", "from")]
    for row in rows:
        reason = row["unavailable"]
        here = "yes" if reason is None else f"no [{notes.setdefault(reason, len(notes) + 1)}]"
        lines.append((row["name"], " ".join(row["dtypes"]), here, row["from"]))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    whats = ["", *(row["summary"] for row in rows)]
    for line, what in zip(lines, whats, strict=True):
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(padded).rstrip())
        _wrapped(what, " " * (widths[0] + 2))
    for reason, number in notes.items():
        _wrapped(f"[{number}] {reason}", "", "    ")
    return 0


def _wrapped(text: str, indent: str, more: str = "") -> None:
    for line in textwrap.wrap(
        text, 80, initial_indent=indent, subsequent_indent=indent + more, break_long_words=False
    ):
        print(line)


def _rows() -> list[dict[str, Any]]:
    """One row for what `--kernel` takes: the engines, then every GEMV, which composes one."""
    from minidecode.kernels import build, registry

    gemvs = registry.gemvs()
    engines = {
        "fused": "the fastest: five kernels a layer, made for the decode step",
        "torch": "plain torch operations, on the CPU too",
    }
    step = build.cuda_sources() / "step"
    rows = [
        {
            "name": name,
            "engine": name,
            "dtypes": ["fp16"],
            "from": _short(step if name == "fused" else gemvs[name].origin),
            "summary": summary,
            "unavailable": _cuda_problem() if name == "fused" else None,
        }
        for name, summary in engines.items()
    ]
    return rows + [
        {
            "name": gemv.name,
            "engine": "composed",
            "dtypes": list(gemv.dtypes),
            "from": _short(gemv.origin),
            "summary": gemv.summary,
            "unavailable": gemv.unavailable(),
        }
        for gemv in gemvs.values()
        if gemv.name not in engines
    ]


def _cuda_problem() -> str | None:
    """Why no CUDA kernel can be compiled and run here; None when it can."""
    from minidecode.kernels import build

    try:
        build.require_cuda_torch()
        build.architectures()
        build.find_toolkit()
        build.host_compiler()
    except MissingError as error:
        return str(error)
    return None


def _short(path: Path) -> str:
    """A path below the checkout, or below the folder that the package is installed in."""
    import minidecode

    root = Path(minidecode.__file__).resolve().parent.parent
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _some_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


# --- check ----------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> int:
    chosen = _chosen(args.kernel, "all")
    from minidecode.kernels.check import check
    from minidecode.loading import resolve_device

    device = resolve_device(args.device)
    everything = "all" in args.kernel
    reports: list[CheckReport] = []
    errors: list[MinidecodeError] = []
    problems = {gemv.name: _problem(gemv, device.type, args.dtype) for gemv in chosen}
    if not everything:  # known before minutes of checking others
        for problem in filter(None, problems.values()):
            raise problem
    with Progress(args.quiet) as progress:
        for gemv in chosen:
            if problems[gemv.name] is not None:
                skipped = f"{gemv.name}: not checked: {problems[gemv.name]}"
                if args.json:
                    print(f"minidecode: {skipped}", file=sys.stderr)
                else:
                    _say(progress, skipped)
                continue
            start = time.perf_counter()
            progress(None, f"compiling {gemv.name}")
            try:
                gemv.prepare()
            except MinidecodeError as error:  # what cannot be built is no wrong kernel
                errors.append(error)
                continue

            def show(case: str, name: str = gemv.name) -> None:
                progress(None, f"{name}: {case}")

            report = check(gemv, device, dtypes=[args.dtype] if args.dtype else None, on_case=show)
            reports.append(report)
            seconds = time.perf_counter() - start
            if not args.json:
                _say(progress, *_lines(report, seconds, args.verbose))
    if args.json:
        streams.show(f"{json.dumps([_document(report) for report in reports])}\n")
    for report in reports:
        try:
            report.require()
        except MinidecodeError as error:
            errors.append(error)
    if errors:
        errors.sort(key=lambda error: isinstance(error, KernelWrongError))  # the worst is last
        for other in errors[:-1]:
            print(f"minidecode: {other}", file=sys.stderr)
        raise errors[-1]
    if not reports:
        raise MissingError(f"none of these kernels runs on {device.type} here")
    return 0


def _chosen(specs: list[str], all_word: str) -> list[Gemv]:
    from minidecode.kernels import registry

    if all_word in specs:
        if len(specs) > 1:
            raise UsageError(f"{all_word} stands alone")
        return list(registry.gemvs().values())
    return [options.gemv_kernel(spec) for spec in specs]


def _problem(gemv: Gemv, device: str, dtype: str | None) -> Exception | None:
    """Why `gemv` cannot be checked on `device`, as the error to raise."""
    if dtype is not None and dtype not in gemv.dtypes:
        return UsageError(f"kernel {gemv.name} has no {dtype}, only {', '.join(gemv.dtypes)}")
    return options.availability(gemv, device)


def _document(report: CheckReport) -> dict[str, Any]:
    """The report as its record."""
    import dataclasses

    from minidecode.bench.device import environment
    from minidecode.records import CheckCase, CheckResult

    cases = tuple(CheckCase(**dataclasses.asdict(case)) for case in report.cases)
    return CheckResult(
        kernel=report.kernel,
        device=report.device,
        passed=report.passed,
        cases=cases,
        environment=environment(report.device),
    ).to_dict()


def _lines(report: CheckReport, seconds: float, verbose: bool) -> list[str]:
    """What a person reads: one line for a kernel that passed, the failures of one that did not."""
    shown = [case for case in report.cases if verbose or not case.passed]
    if not verbose:
        shown = shown[:MOST_FAILURES]
    lines = []
    for case in shown:
        error = "" if case.rel_err is None else f"relative error {case.rel_err:.1e}"
        said = case.message or error  # a message that tells of an error has its size
        lines.append(f"  {'ok' if case.passed else 'WRONG':5}  {case.label}: {said}".rstrip(": "))
    failures = sum(not case.passed for case in report.cases)
    if not verbose and failures > MOST_FAILURES:
        lines.append(f"  … and {failures - MOST_FAILURES} more")
    if failures:
        return [f"{report.kernel}: WRONG in {failures} of {len(report.cases)} cases", *lines]
    worst = max((case.rel_err or 0.0 for case in report.cases), default=0.0)
    return [
        f"{report.kernel}: right in {report.counts}"
        f" (largest relative error {worst:.1e}, {seconds:.0f} s)",
        *lines,
    ]


def _say(progress: Progress, *lines: str) -> None:
    progress.pause()
    streams.show("".join(f"{line}\n" for line in lines))


# --- build ----------------------------------------------------------------------------------------


def _build(args: argparse.Namespace) -> int:
    from minidecode.kernels import build

    chosen = _chosen(args.kernel or ["all"], "all")
    sources = [gemv.origin for gemv in chosen if gemv.function is None]
    if not args.kernel:
        sources += sorted((build.cuda_sources() / "step").glob("*.cu"))
    python = [gemv for gemv in chosen if gemv.function is not None]
    if args.kernel and python:
        raise UsageError(f"{python[0].name} is a Python kernel: there is nothing to compile")
    with Progress(args.quiet) as progress:
        compiled: list[str] = []

        def on_build(kernel: str, phase: str) -> None:
            if phase == "done":
                compiled.append(kernel)
            elif phase in ("compiling", "waiting"):
                share = len(compiled) / max(1, len(sources))
                progress(
                    share, f"{phase} {kernel}" if phase == "compiling" else f"waiting: {kernel}"
                )

        build.on_build = on_build
        try:
            build.build_many(sources)
        finally:
            build.on_build = None
    ready = len(sources) - len(compiled)
    print(
        f"compiled {len(compiled)} kernels in {build.build_seconds():.1f} s"
        f"{f', {ready} were ready' if ready else ''}: {build.kernel_cache()}"
    )
    return 0
