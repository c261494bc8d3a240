"""The program that `ncu.sh` profiles (`run`), and the tables made of what ncu logged (`table`).

ncu numbers the launches that it sees and knows nothing of which call they belong to. So every call
comes after one launch of a marker kernel, and `run` writes down the order of the calls.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from minidecode.cli import options
from minidecode.cli.gemv import SIZES
from minidecode.errors import KernelWrongError, MinidecodeError, MissingError
from minidecode.kernels.ops import DTYPES

# The kernel behind torch.cuda._sleep.
MARKER = "spin_kernel"
NAME = "Kernel Name"
DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
TIME = "gpu__time_duration.sum"


@dataclass(frozen=True)
class Call:
    """One profiled call."""

    kernel: str
    n: int
    dtype: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one of the two commands and returns the exit code."""
    parser = argparse.ArgumentParser(prog="ncu.sh", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("order", type=Path)
    running.add_argument("--kernel", default="all")
    running.add_argument("--n", type=options.positives, default=SIZES)
    running.add_argument("--dtype", type=_dtypes, default=["fp32", "fp16"])
    tabling = commands.add_parser("table")
    tabling.add_argument("order", type=Path)
    tabling.add_argument("log", type=Path)
    args = parser.parse_args(arguments)
    try:
        if args.command == "run":
            calls = run(args.kernel, args.n, args.dtype)
            args.order.write_text(json.dumps([asdict(call) for call in calls]))
        else:
            calls = [Call(**call) for call in json.loads(args.order.read_text())]
            print(f"{heading()}\n\n{tables(calls, args.log.read_text(errors='replace'))}", end="")
    except MinidecodeError as error:
        print(f"ncu.sh: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _dtypes(text: str) -> list[str]:
    named = text.split(",")
    if not set(named) <= set(DTYPES):
        raise argparse.ArgumentTypeError(f"not of {', '.join(DTYPES)}: {text!r}")
    return named


def run(kernel: str, sizes: Sequence[int], dtypes: Sequence[str]) -> list[Call]:
    """Checks the kernels, then calls each once at each size, under the profiler if there is one."""
    import torch

    from minidecode.kernels import ops, registry
    from minidecode.kernels.check import check

    if not torch.cuda.is_available():
        raise MissingError("no CUDA GPU is visible")
    gemvs = (
        [gemv for gemv in registry.gemvs().values() if gemv.unavailable() is None]
        if kernel == "all"
        else [registry.resolve(name) for name in kernel.split(",")]
    )
    done = []
    for dtype in dtypes:
        chosen = [gemv for gemv in gemvs if dtype in gemv.dtypes]
        for gemv in chosen:
            report = check(gemv, "cuda", dtypes=[dtype], shapes=[(1024, 1024)])
            if not report.passed:
                raise KernelWrongError(report.summary())
        for n in sizes:
            w = torch.randn(n, n, device="cuda").to(ops.torch_dtype(dtype))
            x, y = w[0].clone(), w.new_empty(n)
            for gemv in chosen:
                call = gemv.bind(y, w, x)
                call()  # what compiles or tunes on the first call for a shape does so unseen
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                torch.cuda._sleep(1)
                call()
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
                done.append(Call(gemv.name, n, dtype))
    return done


def heading() -> str:
    """What was profiled and where."""
    import torch

    from minidecode.bench.device import environment

    here = environment("cuda" if torch.cuda.is_available() else "cpu")
    return f"{here.hardware}, commit {here.commit or 'unknown'}: scripts/ncu.sh"


def tables(calls: Sequence[Call], log: str) -> str:
    """Markdown: DRAM throughput, achieved occupancy and time, a row a size, a column a kernel.

    Where a call launched several kernels, their mean weighted by time. Raises MinidecodeError when
    the log does not hold what the calls launched.
    """
    groups = launches(log)
    if len(groups) != len(calls):
        raise MinidecodeError(f"ncu logged {len(groups)} calls of {len(calls)}:\n{log[-2000:]}")
    values = dict(zip(calls, map(_weighted, groups), strict=True))
    text = ""
    for dtype in dict.fromkeys(call.dtype for call in calls):
        kernels = list(dict.fromkeys(call.kernel for call in calls if call.dtype == dtype))
        sizes = list(dict.fromkeys(call.n for call in calls if call.dtype == dtype))
        titles = ("DRAM throughput, % of peak", "achieved occupancy, %", "time, µs")
        for metric, title in enumerate(titles):
            text += f"\n{dtype}: {title}\n\n| n | {' | '.join(kernels)} |\n"
            text += f"|{'---:|' * (1 + len(kernels))}\n"
            for n in sizes:
                cells = (values[Call(kernel, n, dtype)][metric] for kernel in kernels)
                text += f"| {n} | {' | '.join(f'{cell:.2f}' for cell in cells)} |\n"
    return text.removeprefix("\n")


def launches(log: str) -> list[list[dict[str, float]]]:
    """The metrics of the launches after each marker in ncu's raw CSV page."""
    lines = log.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    groups: list[list[dict[str, float]]] = []
    for row in csv.DictReader(lines[start:]):
        if not (row["ID"] or "").isdigit():  # the line of units, and what ncu says at the end
            continue
        if MARKER in row[NAME]:
            groups.append([])
        elif groups:
            groups[-1].append({key: _number(row.get(key)) for key in (DRAM, WARPS, TIME)})
    return groups


def _weighted(group: Sequence[dict[str, float]]) -> tuple[float, float, float]:
    """(DRAM throughput, occupancy, µs) of one call."""
    total = sum(launch[TIME] for launch in group)
    if not total:
        return math.nan, math.nan, math.nan
    dram, warps = (sum(launch[TIME] * launch[m] for launch in group) / total for m in (DRAM, WARPS))
    return dram, warps, total / 1e3


def _number(cell: str | None) -> float:
    """A number as ncu prints it, with commas between thousands."""
    try:
        return float((cell or "").replace(",", ""))
    except ValueError:
        return math.nan


if __name__ == "__main__":
    sys.exit(main())
