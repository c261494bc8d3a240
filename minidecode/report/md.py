"""Markdown: tables that paste into an issue or a README."""

from __future__ import annotations

import re
from collections.abc import Sequence

from minidecode.records import GemvReport, LayerReport, LayerTotal, Run
from minidecode.report import _format
from minidecode.report._format import NONE, number, numbers, share, speed


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table with padded columns. Heads that end in ":" are right-aligned."""
    cells = [[_escaped(cell) for cell in row] for row in rows]
    right = [head.endswith(":") for head in heads]
    titles = [_escaped(head.removesuffix(":")) for head in heads]
    widths = [
        max(3, len(title), *(len(row[i]) for row in cells)) if cells else max(3, len(title))
        for i, title in enumerate(titles)
    ]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        return f"| {' | '.join(padded)} |\n"

    rule = "".join(
        f" {'-' * (width - 1)}{':' if to_right else '-'} |"
        for width, to_right in zip(widths, right, strict=True)
    )
    return line(titles) + f"|{rule}\n" + "".join(line(row) for row in cells)


def _escaped(cell: str) -> str:
    """A name that neither ends its cell nor starts a tag, a link or emphasis."""
    cell = re.sub(r"[\\|`*<\[]", r"\\\g<0>", " ".join(cell.split()))
    # Inside a word an underscore is only an underscore.
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", cell)


def _code(text: str) -> str:
    """`text` as a code block, whatever backticks it has."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text}\n{fence}\n"


def _note(text: str) -> str:
    return f"\n{_escaped(text)}\n"


def layers(report: LayerReport) -> str:
    """Totals by kind, the sum, the rest and the step, then totals by layer, and every op."""
    compared = report.vs is not None
    head = (
        f"One decode step of {report.model} with "
        f"{_format.with_engine(report)}{_format.against(report)}, "
        f"{report.depth} tokens in the cache, on {report.environment.hardware}; "
        f"{_format.ceiling(report)}. {report.method}, {report.samples} samples."
    )
    us = numbers(
        [*(t.us for t in report.by_kind), report.sum_us, report.unexplained_us, report.step_us]
    )
    digits = len(us[-1].partition(".")[2])
    versus = [f"{report.vs} µs:", "Δ µs:"] if compared else []
    rows = _totals(report, report.by_kind, digits)
    blank = ["", ""] if compared else []
    sum_share = _format.of_step(report.sum_pct)
    n_ops = str(len(report.rows))
    rows.append(["sum", n_ops, us[-3], *blank, sum_share, _format.size(report.bytes), "", ""])
    rest = _format.of_step(report.unexplained_pct)
    rows.append(["unexplained", "", us[-2], *blank, rest, "", "", ""])
    step_vs = [number(report.vs_step_us, digits), number(report.vs_delta_us, digits, signed=True)]
    rows.append(
        [
            "step",
            "",
            us[-1],
            *(step_vs if compared else []),
            "100.0",
            _format.size(report.bytes),
            speed(report.gb_s, report.read_bw_gb_s),
            share(report.pct_read_bw),
        ]
    )
    heads = ["ops:", "µs:", *versus, "% step:", "bytes:", "GB/s:", "% read:"]
    text = f"{_escaped(head)}\n\n{_table(['op', *heads], rows)}\n"
    text += f"{_table(['layer', *heads], _totals(report, report.by_layer))}\n"
    text += _layer_rows(report)
    text += "".join(map(_note, _format.layer_notes(report, every_row=True)))
    return f"{text}\n{_code(report.command)}"


def _totals(
    report: LayerReport, totals: Sequence[LayerTotal], digits: int | None = None
) -> list[list[str]]:
    return [
        [c.name, c.ops, c.us, *c.versus, c.of_step, c.size, c.speed, c.share]
        for c in _format.total_cells(report, totals, digits)
    ]


def _layer_rows(report: LayerReport) -> str:
    compared = report.vs is not None
    rows = report.rows
    columns = [
        numbers([row.median_us for row in rows]),
        numbers([row.p95_us for row in rows]),
        numbers([row.duration_us for row in rows]),
        numbers([row.alone_us for row in rows]),
    ]
    heads = ["op", "kernels", "shape", "bytes:", "µs:", "p95:", "own:", "alone:"]
    if compared:
        columns.append(numbers([row.vs_us for row in rows]))
        columns.append(numbers([row.delta_us for row in rows], signed=True))
        heads += [f"{report.vs} µs:", "Δ µs:"]
    heads += ["GB/s:", "% read:", "% step:"]
    table = [
        [
            row.name,
            ", ".join(row.kernels) or NONE,
            _format.shape(row.shape),
            _format.size(row.bytes),
            *(column[i] for column in columns),
            speed(row.gb_s, report.read_bw_gb_s),
            share(row.pct_read_bw),
            _format.of_step(row.pct_step),
        ]
        for i, row in enumerate(rows)
    ]
    return _table(heads, table)


def runs(results: Sequence[Run]) -> str:
    """llama-bench's columns (model, size, params, backend, test, t/s) and ours among them."""
    steps = numbers([run.step_us for run in results])
    heads = ["model", "size:", "params:", "backend", "kernel", "test:", "t/s:"]
    heads += ["step µs:", "GB/s:", "% read:"]
    rows = [
        [
            run.model_type,
            _format.binary_size(run.model_size),
            _format.count(run.model_n_params),
            run.backend,
            _format.if_mixed(run),
            run.test,
            _format.rate(run),
            step,
            speed(run.gb_s, run.read_bw_gb_s),
            share(run.pct_read_bw),
        ]
        for run, step in zip(results, steps, strict=True)
    ]
    text = _table(heads, rows)
    if results and results[0].build_commit:
        first = results[0]
        text += _note(
            f"build: {first.build_commit}, {first.environment.hardware}; {_format.ceiling(first)}"
        )
    return text + "".join(map(_note, _format.run_notes(results)))


def gemv(report: GemvReport) -> str:
    """A line a kernel and shape; what did not run is listed below with the reason."""
    us = numbers([row.median_us for row in report.rows])
    read = numbers([row.read_us for row in report.rows])
    rows = [
        [
            row.kernel,
            f"{row.n} × {row.k}",
            row.dtype,
            us[i],
            speed(row.gb_s, report.read_bw_gb_s),
            read[i],
            _format.gemv_share(row),
            NONE if row.vs_cublas is None else f"{row.vs_cublas:.2f}x",
            NONE if row.occupancy is None else f"{100 * row.occupancy:.0f} %",
            NONE if row.rel_err is None else f"{row.rel_err:.1e}",
        ]
        for i, row in enumerate(report.rows)
    ]
    heads = ["kernel", "n × k:", "dtype", "µs:", "GB/s:", "read µs:", "% read:"]
    text = _table([*heads, "vs cublas:", "occupancy:", "error:"], rows)
    notes = [f"{row.kernel}: {row.reason}" for row in report.rows if row.reason]
    if any(row.served_from_cache for row in report.rows):
        notes.append(_format.CACHED_NOTE)
    if any(_format.gemv_share(row).endswith(_format.ABOVE) for row in report.rows):
        notes.append(f"{_format.ABOVE} {_format.ABOVE_GEMV}")
    notes.append(
        "µs: median. % read: of a pure read of the same bytes. Occupancy: theoretical."
        f" {report.environment.hardware}; {_format.ceiling(report)}"
    )
    return f"{text}{''.join(_note(note) for note in dict.fromkeys(notes))}\n{_code(report.command)}"
