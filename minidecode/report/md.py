"""Markdown: tables that paste into an issue or a README."""

from __future__ import annotations

import re
from collections.abc import Sequence

from minidecode.records import (
    ABResult,
    CheckResult,
    Environment,
    GemvReport,
    LayerReport,
    LayerTotal,
    Run,
)
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
    sum_share = _format.of_step(100.0 * report.sum_us / report.step_us)
    n_ops = str(len(report.rows))
    rows.append(["sum", n_ops, us[-3], *blank, sum_share, _format.size(report.bytes), "", ""])
    rest = _format.of_step(report.unexplained_pct)
    rows.append(["unexplained", "", us[-2], *blank, rest, "", "", ""])
    change = None if report.vs_step_us is None else report.vs_step_us - report.step_us
    step_vs = [number(report.vs_step_us, digits), number(change, digits, signed=True)]
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
    times = _format.total_times(totals, digits)
    return [
        [
            total.name,
            str(total.ops),
            us,
            *(versus if report.vs is not None else []),
            _format.of_step(total.pct_step),
            _format.size(total.bytes),
            speed(total.gb_s, report.read_bw_gb_s),
            share(total.pct_read_bw),
        ]
        for total, (us, *versus) in zip(totals, times, strict=True)
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


def ab(result: ABResult) -> str:
    """The verdict, both arms, and the gate."""
    steps = numbers([result.a.step_us, result.b.step_us])
    arms = [
        [
            letter,
            arm.kernel,
            arm.engine,
            f"{arm.tokens_s:,.1f}",
            step,
            speed(arm.gb_s, result.read_bw_gb_s),
            share(arm.pct_read_bw),
        ]
        for letter, arm, step in zip("AB", (result.a, result.b), steps, strict=True)
    ]
    gates = [
        [
            gate.when,
            gate.kernel,
            gate.against,
            str(gate.positions),
            NONE if gate.rel_err is None else f"{gate.rel_err:.1e}",
            NONE if gate.kl is None else f"{gate.kl:.1e}",
            NONE if gate.top1_agreement is None else f"{100 * gate.top1_agreement:.1f} %",
            "yes" if gate.passed else f"no: {gate.reason}",
        ]
        for gate in result.gates
    ]
    where = (
        f"{result.model} on {result.environment.hardware}, {result.depth} tokens in the cache, "
        f"{result.rounds} pairs. A against itself: {result.noise_ratio:.3f} "
        f"({result.noise_low:.3f}–{result.noise_high:.3f}); the interval above is "
        f"{100 * result.noise_floor:.1f} % wider at both ends for it."
    )
    change = _format.state_change(result.state_before, result.state_after)
    text = f"**{_escaped(result.sentence)}**\n\n{_escaped(where)}\n\n"
    text += _table(["", "kernel", "engine", "device tok/s:", "step µs:", "GB/s:", "% read:"], arms)
    gate_heads = ["gate", "kernel", "against", "positions:", "error:", "KL:", "top-1:", "right"]
    text += f"\n{_table(gate_heads, gates)}"
    if change:
        text += _note(change)
    text += "".join(map(_note, _format.run_notes((result.a, result.b))))
    return f"{text}\n{_code(result.command)}"


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


def check(result: CheckResult) -> str:
    """Every case."""
    rows = [
        [
            case.name,
            str(case.n),
            str(case.k),
            case.dtype,
            NONE if case.rel_err is None else f"{case.rel_err:.1e}",
            "not supported" if not case.supported else "yes" if case.passed else "no",
            case.message,
        ]
        for case in result.cases
    ]
    verdict = "right" if result.passed else "wrong"
    head = f"**{_escaped(f'{result.kernel} on {result.device}: {verdict}')}**\n\n"
    return head + _table(["case", "n:", "k:", "dtype", "error:", "right", ""], rows)


def environment(env: Environment) -> str:
    """A table for an issue."""
    return _table(["", ""], [list(item) for item in _format.environment_items(env)])
