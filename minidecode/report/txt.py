"""Tables for a terminal, 80 columns wide. With `plain` they carry no colour (NO_COLOR, a file)."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from minidecode.records import (
    FASTER,
    NO_DIFFERENCE,
    ABResult,
    GemvReport,
    LayerReport,
    LayerTotal,
    Run,
)
from minidecode.report import _format
from minidecode.report._format import NONE, number, numbers, share, speed

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

WIDTH = 80
_BAR = 9


def _render(parts: Iterable[Any], *, plain: bool, width: int) -> str:
    """`parts` (text, tables, "" for an empty line) below each other, no line wider than `width`."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        color_system=None if plain else "standard",
        force_terminal=not plain,
        no_color=plain,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    for part in parts:
        console.print(part)
    lines: list[str] = []
    for line in out.getvalue().splitlines():
        if line.strip() or (lines and lines[-1]):
            lines.append(line.rstrip())
    return "\n".join(lines).rstrip("\n") + "\n"


def _table(columns: Sequence[str | tuple[str, str]]) -> Table:
    """A quiet table; a column is a right-aligned title, or (title, "left")."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        if isinstance(column, tuple):
            table.add_column(column[0], overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def _text(words: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(words, style=style)


def _bar(pct: float | None) -> str:
    """Up to 100 % as a bar of blocks, to an eighth of a character."""
    if pct is None:
        return ""
    eighths = round(min(max(pct, 0.0), 100.0) / 100 * _BAR * 8)
    return "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")


# --- report ---------------------------------------------------------------------------------------


def layers(
    report: LayerReport, *, layers: bool = False, plain: bool = False, width: int = WIDTH
) -> str:
    """Totals by kind of op, the sum, the rest and the step.

    With `layers` a line an op and the totals by layer come first.
    """
    parts: list[Any] = [
        _text(_headline(report), "bold"),
        _text(
            f"{report.environment.hardware}; {_format.ceiling(report)}; {report.method}, "
            f"{report.samples} samples",
            "dim",
        ),
    ]
    if layers:
        parts += [_rows_table(report), _layers_table(report)]
    parts.append(_kinds_table(report))
    parts += [_text(line) for line in _step_lines(report)]
    parts += [_text(note, "dim") for note in _format.layer_notes(report, every_row=layers)]
    return _render(parts, plain=plain, width=width)


def _headline(report: LayerReport) -> str:
    return (
        f"One decode step of {report.model} with "
        f"{_format.with_engine(report)}{_format.against(report)}, "
        f"{report.depth} tokens in the cache"
    )


def _step_lines(report: LayerReport) -> list[str]:
    lines = [
        f"step {number(report.step_us)} µs, {_format.tokens_per_s(report.step_us):,.1f} device "
        f"tok/s, {speed(report.gb_s, report.read_bw_gb_s)} GB/s, {share(report.pct_read_bw)} % of "
        "the read ceiling"
    ]
    if report.vs and report.vs_step_us:
        ratio = report.vs_step_us / report.step_us
        lines.append(f"{report.vs}: step {number(report.vs_step_us)} µs, {ratio:.3f} times as long")
    return lines


def _totals(
    report: LayerReport, totals: Sequence[LayerTotal], digits: int | None = None
) -> list[list[str]]:
    """The cells of these totals, under the heads of `_total_heads`."""
    return [
        [c.name, c.ops, c.us, c.of_step, *(c.versus or [c.size]), c.speed, c.share]
        for c in _format.total_cells(report, totals, digits)
    ]


def _total_heads(report: LayerReport, first: str) -> list[str | tuple[str, str]]:
    middle = ["vs µs", "Δ µs"] if report.vs is not None else ["bytes"]
    return [(first, "left"), "ops", "µs", "% step", *middle, "GB/s", "% read"]


def _layers_table(report: LayerReport) -> Table:
    table = _table(_total_heads(report, "layer"))
    for cells in _totals(report, report.by_layer):
        table.add_row(*cells)
    return table


def _kinds_table(report: LayerReport) -> Table:
    totals = report.by_kind
    compared = report.vs is not None
    # The other kernel's columns take the place of the bars.
    table = _table([*_total_heads(report, "op"), *([] if compared else [("", "left")])])
    us = numbers([*(t.us for t in totals), report.sum_us, report.unexplained_us, report.step_us])
    digits = len(us[-1].partition(".")[2])
    for total, cells in zip(totals, _totals(report, totals, digits), strict=True):
        bar = [] if compared else [_text(_bar(total.pct_read_bw), "cyan")]
        table.add_row(*cells, *bar)
    table.add_section()
    blank = ["", ""] if compared else [""]
    vs_step = number(report.vs_step_us, digits)
    step = [vs_step, number(report.vs_delta_us, digits, signed=True)]
    table.add_row(
        "sum",
        str(len(report.rows)),
        us[-3],
        _format.of_step(report.sum_pct),
        *(blank if compared else [_format.size(report.bytes)]),
    )
    table.add_row("unexplained", "", us[-2], _format.of_step(report.unexplained_pct), *blank)
    table.add_row(
        "step",
        "",
        us[-1],
        "100.0",
        *(step if compared else blank),
        speed(report.gb_s, report.read_bw_gb_s),
        share(report.pct_read_bw),
        *([] if compared else [_text(_bar(report.pct_read_bw), "cyan")]),
        style="bold",
    )
    return table


def _rows_table(report: LayerReport) -> Table:
    rows = report.rows
    compared = report.vs is not None
    heads: list[str | tuple[str, str]] = ["layer", ("op", "left"), "µs", "p95"]
    heads += ["vs µs", "Δ µs"] if compared else ["own", "alone"]
    heads += ["bytes", "GB/s", "% read"]
    table = _table(heads)
    us = numbers([row.median_us for row in rows])
    p95 = numbers([row.p95_us for row in rows])
    if compared:
        left = numbers([row.vs_us for row in rows])
        right = numbers([row.delta_us for row in rows], signed=True)
    else:
        left = numbers([row.duration_us for row in rows])
        right = numbers([row.alone_us for row in rows])
    for i, row in enumerate(rows):
        table.add_row(
            "" if row.layer is None else str(row.layer),
            _format.op_in_layer(row),
            us[i],
            p95[i],
            left[i],
            right[i],
            _format.size(row.bytes),
            speed(row.gb_s, report.read_bw_gb_s),
            share(row.pct_read_bw),
        )
    return table


# --- bench ----------------------------------------------------------------------------------------


def runs(results: Sequence[Run], *, plain: bool = False, width: int = WIDTH) -> str:
    """A line a test: tokens/s as mean ± standard deviation, GB/s, share of the ceiling."""
    if not results:
        return ""
    table = _table([("model", "left"), ("kernel", "left"), "test", "tokens/s", "GB/s", "% read"])
    for run in results:
        table.add_row(
            run.model_type,
            _format.if_mixed(run),
            run.test,
            _text(_format.rate(run), "bold"),
            speed(run.gb_s, run.read_bw_gb_s),
            share(run.pct_read_bw),
        )
    first = results[0]
    line = f"{first.environment.hardware}, {len(first.samples_ns)} repeats"
    if first.read_bw_gb_s is not None:
        line += f", read ceiling {speed(first.read_bw_gb_s)} GB/s, measured"
    parts: list[Any] = [table, _text(line, "dim")]
    parts += [_text(note, "dim") for note in _format.run_notes(results)]
    return _render(parts, plain=plain, width=width)


# --- ab -------------------------------------------------------------------------------------------


def ab(result: ABResult, *, plain: bool = False, width: int = WIDTH) -> str:
    """Both arms, the gate before and after, the noise floor, and the verdict last."""
    arms = _table([("", "left"), ("kernel", "left"), "device tok/s", "step µs", "GB/s", "% read"])
    steps = numbers([result.a.step_us, result.b.step_us])
    for letter, arm, step in zip("AB", (result.a, result.b), steps, strict=True):
        arms.add_row(
            letter,
            f"{arm.kernel} ({arm.engine})",
            _text(f"{arm.tokens_s:,.1f}", "bold"),
            step,
            speed(arm.gb_s, result.read_bw_gb_s),
            share(arm.pct_read_bw),
        )
    what = f", only {', '.join(result.only)} swapped" if result.only else ""
    parts: list[Any] = [
        _text(
            f"{result.model} on {result.environment.hardware}, {result.depth} tokens in the "
            f"cache, {result.rounds} pairs{what}",
            "bold",
        ),
        _gates_table(result),
        arms,
    ]
    noise = (
        f"A against itself: ratio {result.noise_ratio:.3f} (95 % interval "
        f"{result.noise_low:.3f}–{result.noise_high:.3f}); the interval below is "
        f"{100 * result.noise_floor:.1f} % wider at both ends for it"
    )
    if result.drift_pct is not None:
        noise += f"; drift over the run {result.drift_pct:+.1f} %"
    parts.append(_text(noise, "dim"))
    change = _format.state_change(result.state_before, result.state_after)
    if change:
        parts.append(_text(change, "dim"))
    parts += [_text(note, "dim") for note in _format.run_notes((result.a, result.b))]
    colour = {FASTER: "green", NO_DIFFERENCE: "yellow"}.get(result.verdict, "red")
    parts += ["", _text(result.sentence, f"bold {colour}")]
    return _render(parts, plain=plain, width=width)


def _gates_table(result: ABResult) -> Table:
    table = _table(
        [("gate", "left"), ("kernel", "left"), ("against", "left"), "error", "KL", "top-1", "right"]
    )
    for gate in result.gates:
        table.add_row(
            gate.when,
            gate.kernel,
            gate.against,
            NONE if gate.rel_err is None else f"{gate.rel_err:.1e}",
            NONE if gate.kl is None else f"{gate.kl:.1e}",
            NONE if gate.top1_agreement is None else f"{100 * gate.top1_agreement:.1f} %",
            _text("yes", "green") if gate.passed else _text(f"no: {gate.reason}", "red"),
        )
    return table


# --- gemv, check, env -----------------------------------------------------------------------------


def gemv(report: GemvReport, *, plain: bool = False, width: int = WIDTH) -> str:
    """A line a kernel and shape, grouped by shape."""
    table = _table(
        [
            ("n × k", "left"),
            ("kernel", "left"),
            "µs",
            "GB/s",
            "% read",
            "/ cublas",
            "occ.",
            "error",
        ]
    )
    groups: dict[tuple[int, int, str], list[int]] = {}
    for i, row in enumerate(report.rows):
        groups.setdefault((row.n, row.k, row.dtype), []).append(i)
    us = numbers([row.median_us for row in report.rows])
    notes = []
    for (n, k, dtype), members in groups.items():
        for place, i in enumerate(members):
            row = report.rows[i]
            table.add_row(
                ("" if place > 1 else dtype if place else f"{n}×{k}"),
                row.kernel,
                us[i],
                speed(row.gb_s, report.read_bw_gb_s),
                _format.gemv_share(row),
                number(row.vs_cublas, 2),
                NONE if row.occupancy is None else f"{100 * row.occupancy:.0f}%",
                NONE if row.rel_err is None else f"{row.rel_err:.0e}",
            )
            if row.reason:
                notes.append(f"{row.kernel}: {row.reason}")
        table.add_section()
    if any(row.served_from_cache for row in report.rows):
        notes.append(_format.CACHED_NOTE)
    if any(_format.gemv_share(row).endswith(_format.ABOVE) for row in report.rows):
        notes.append(f"{_format.ABOVE} {_format.ABOVE_GEMV}")
    line = report.environment.hardware
    if report.read_bw_gb_s is not None:
        line += f", read ceiling {speed(report.read_bw_gb_s)} GB/s, measured"
    line += "; µs: median; % read: of a pure read of the same bytes; / cublas: speed over"
    line += " cuBLAS's; occ.: theoretical occupancy"
    lines = [_text(note, "dim") for note in (line, *dict.fromkeys(notes))]
    return _render([table, *lines], plain=plain, width=width)
