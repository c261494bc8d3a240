"""One self-contained HTML page of a decode step: no network, no fonts, no library.

Everything is drawn here and readable without JavaScript; the script only sorts and filters the
rows. The report itself is in the page as JSON, under the id `report`.
"""

from __future__ import annotations

import html
import json
import math
import statistics
from collections.abc import Sequence
from importlib import resources
from itertools import groupby
from typing import TypeAlias

from minidecode.records import LayerReport, LayerRow, LayerTotal
from minidecode.report import _format
from minidecode.report._format import NONE, number, numbers, share, speed
from minidecode.report._palette import kind_colours

# The page may run its own script and style and reach for nothing else.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

# A layer label takes about this share of the width; more of them would run into each other.
_MAX_LABELS = 8

# Width of a character in a chart, px: no text is measured here, so this is on the wide side.
_CHARACTER = 6.8

Box: TypeAlias = tuple[float, float, float, float]  # left, top, right, bottom


def layers(report: LayerReport) -> str:
    """The whole page."""
    esc = html.escape
    colours = kind_colours(row.kind for row in report.rows)
    classes = {kind: f"kind k{i}" for i, kind in enumerate(colours)}
    palette = "".join(f".k{i} {{ --k: {colour}; }}\n" for i, colour in enumerate(colours.values()))
    title = f"Decode step of {report.model}"
    sections = [
        _strip(report, classes),
        _kinds(report, classes),
        _heat_map(report),
        _roofline(report, classes),
        _rows(report, classes),
        _about(report),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{esc(title)}: {esc(_format.with_engine(report))}</title>
<style>
{_asset("html.css")}{palette}</style>
</head>
<body>
<div class="page">
<header>
<h1>{esc(title)}</h1>
<p class="sub">{esc(_subtitle(report))}</p>
{_figures(report)}
</header>
<main>
{"".join(sections)}</main>
</div>
<script type="application/json" id="report">{_embedded(report)}</script>
<script>
{_asset("html.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _embedded(report: LayerReport) -> str:
    """JSON that cannot end its script element nor open a comment in it."""
    text = json.dumps(report.to_dict(), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _subtitle(report: LayerReport) -> str:
    return (
        f"{_format.with_engine(report)}{_format.against(report)} · "
        f"{report.depth} tokens in the cache · "
        f"{report.environment.hardware} · {report.environment.time}"
    )


def _figures(report: LayerReport) -> str:
    """The numbers that one wants first."""
    of_ceiling = (
        f"{speed(report.gb_s, report.read_bw_gb_s)} of {speed(report.read_bw_gb_s)} GB/s"
        if report.read_bw_gb_s
        else "ceiling not measured"
    )
    of_what = "%" if report.read_bw_gb_s else ""
    items = [
        ("One step", number(report.step_us), "µs", ""),
        ("Tokens a second", f"{_format.tokens_per_s(report.step_us):,.1f}", "", "device time"),
        ("Of the read ceiling", share(report.pct_read_bw), of_what, of_ceiling),
        ("Read for a token", *_format.size(report.bytes).split(" "), ""),
        (
            "Unexplained",
            _format.of_step(report.unexplained_pct),
            "%",
            f"{number(report.unexplained_us)} µs",
        ),
    ]
    if report.vs and report.vs_step_us:
        ratio = report.vs_step_us / report.step_us
        what = f"{ratio:.3f} times as long"
        items.insert(1, (f"One step with {report.vs}", number(report.vs_step_us), "µs", what))
    cells = []
    for label, value, unit, aside in items:
        below = f'<div class="aside">{html.escape(aside)}</div>' if aside else ""
        cells.append(
            f"<div><dt>{html.escape(label)}</dt>"
            f"<dd>{html.escape(value)} <small>{html.escape(unit)}</small>{below}</dd></div>"
        )
    return f'<dl class="figures">{"".join(cells)}</dl>'


def _section(name: str, title: str, say: str, content: str) -> str:
    return (
        f'<section id="{name}" aria-labelledby="{name}-title">\n'
        f'<h2 id="{name}-title">{title}</h2>\n<p class="say">{html.escape(say)}</p>\n'
        f"{content}\n</section>\n"
    )


def _tooltip(row: LayerRow, report: LayerReport) -> str:
    """What there is to say of an op, for a title attribute."""
    lines = [
        row.name,
        f"{number(row.median_us)} µs, {_format.of_step(row.pct_step)} % of the step",
    ]
    if row.gb_s is not None:
        line = f"{_format.size(row.bytes)} at {speed(row.gb_s, report.read_bw_gb_s)} GB/s"
        if row.pct_read_bw is not None:
            line += f", {share(row.pct_read_bw)} % of the ceiling"
        lines.append(line)
    if row.vs_us is not None:
        lines.append(f"other kernel: {number(row.vs_us)} µs ({number(row.delta_us, signed=True)})")
    if row.kernels:
        lines.append(", ".join(row.kernels))
    return html.escape("\n".join(lines))


# --- the step as a strip --------------------------------------------------------------------------


def _strip(report: LayerReport, classes: dict[str, str]) -> str:
    segments = [
        f'<a class="{classes[row.kind]}" style="flex-grow:{row.median_us:.4f}" href="#op-{i}" '
        f'tabindex="-1" title="{_tooltip(row, report)}"></a>'
        for i, row in enumerate(report.rows)
    ]
    rest = max(0.0, report.unexplained_us)
    length = report.sum_us + rest
    if rest:
        title = f"unexplained: {number(rest)} µs"
        segments.append(f'<span class="rest" style="flex-grow:{rest:.4f}" title="{title}"></span>')
    content = (
        f'<div class="axis"><span>0</span><span>{number(length)} µs</span></div>\n'
        f'<div class="strip" role="img" aria-label="Every op of the step in order, as wide as its '
        f'time">{"".join(segments)}</div>\n{_bands(report, rest)}{_mean_layer(report, classes)}'
    )
    return _section(
        "step",
        "The step",
        "Every op in order, as wide as the time by which it held up the step. The colours are "
        "those of the table below; a segment leads to its row.",
        content,
    )


def _bands(report: LayerReport, rest: float) -> str:
    """Which layer is where, under the strip."""
    runs = [
        (layer, math.fsum(row.median_us for row in group), max(group, key=lambda r: r.median_us))
        for layer, group in (
            (layer, list(rows)) for layer, rows in groupby(report.rows, key=lambda row: row.layer)
        )
    ]
    numbered = sum(layer is not None for layer, _, _ in runs)
    every = max(1, math.ceil(numbered / _MAX_LABELS))
    spans = []
    for layer, us, longest in runs:
        if layer is None:
            # Wide enough for a word, it gets that of its longest op.
            name = longest.name if us > 0.06 * report.step_us else ""
            spans.append(
                f'<span class="blank" style="flex-grow:{us:.4f}">{html.escape(name)}</span>'
            )
            continue
        text = str(layer) if layer % every == 0 else ""
        title = f"layer {layer}: {number(us)} µs"
        spans.append(f'<span style="flex-grow:{us:.4f}" title="{title}">{text}</span>')
    if rest:
        spans.append(f'<span class="blank" style="flex-grow:{rest:.4f}"></span>')
    return f'<div class="bands" aria-hidden="true">{"".join(spans)}</div>\n'


def _mean_layer(report: LayerReport, classes: dict[str, str]) -> str:
    """The strip of one layer, each op as long as it is on average over the layers."""
    times: dict[str, list[LayerRow]] = {}
    for row in report.rows:
        if row.layer is not None:
            times.setdefault(_format.op_in_layer(row), []).append(row)
    if not times:
        return ""
    count = len({row.layer for row in report.rows if row.layer is not None})
    means = {name: math.fsum(row.median_us for row in rows) / count for name, rows in times.items()}
    total = math.fsum(means.values())
    segments, names = [], []
    for name, us in means.items():
        title = html.escape(f"{name}: {number(us)} µs")
        style = f"flex-grow:{us:.4f}"
        look = classes[times[name][0].kind]
        segments.append(f'<a class="{look}" style="{style}" title="{title}"></a>')
        # Only where a word has room.
        word = html.escape(name.rpartition(".")[2]) if us > 0.04 * total else ""
        names.append(f'<span style="{style}" title="{title}">{word}</span>')
    return (
        f'<div class="zoom"><div class="axis"><span>a layer, on average</span>'
        f"<span>{number(total)} µs</span></div>\n"
        f'<div class="strip" role="img" aria-label="The ops of an average layer">'
        f'{"".join(segments)}</div>\n<div class="names">{"".join(names)}</div></div>'
    )


# --- totals ---------------------------------------------------------------------------------------


def _kinds(report: LayerReport, classes: dict[str, str]) -> str:
    compared = report.vs is not None
    longest = max(
        (max(total.us, total.vs_us or 0.0) for total in report.by_kind),
        default=0.0,
    )
    us = numbers([*(t.us for t in report.by_kind), report.sum_us, report.step_us])
    digits = len(us[-1].partition(".")[2])
    heads = ['<th scope="col" class="text">op</th>']
    heads += [
        f'<th scope="col">{html.escape(head)}</th>'
        for head in ("ops", "µs", "% step", "", *_versus_heads(report), "bytes", "GB/s", "% read")
    ]
    lines = []
    shown = _format.total_cells(report, report.by_kind, digits)
    for total, c in zip(report.by_kind, shown, strict=True):
        swatch = f'<span class="swatch {classes[total.name]}"></span>'
        cells = [
            f"<td>{c.ops}</td><td>{c.us}</td><td>{c.of_step}</td>",
            f'<td class="bar {classes[total.name]}">{_track(total, longest, report)}</td>',
            _versus_cells(c.versus),
            f"<td>{c.size}</td><td>{c.speed}</td><td>{c.share}</td>",
        ]
        name = html.escape(c.name)
        lines.append(f'<tr><th scope="row" title="{name}">{swatch}{name}</th>{"".join(cells)}</tr>')
    blank = "<td></td><td></td>" if compared else ""
    sum_share = _format.of_step(report.sum_pct)
    versus = number(report.vs_step_us, digits), number(report.vs_delta_us, digits, signed=True)
    step_vs = _versus_cells(versus if compared else ())
    foot = (
        f'<tr><th scope="row">sum</th><td>{len(report.rows)}</td><td>{us[-2]}</td>'
        f"<td>{sum_share}</td><td></td>{blank}<td>{_format.size(report.bytes)}</td>"
        f"<td></td><td></td></tr>"
        f'<tr><th scope="row">unexplained</th><td></td>'
        f"<td>{number(report.unexplained_us, digits)}</td>"
        f"<td>{_format.of_step(report.unexplained_pct)}</td><td></td>{blank}"
        f"<td></td><td></td><td></td></tr>"
        f'<tr class="total"><th scope="row">step</th><td></td><td>{us[-1]}</td><td>100.0</td>'
        f"<td></td>{step_vs}<td></td><td>{speed(report.gb_s, report.read_bw_gb_s)}</td>"
        f"<td>{share(report.pct_read_bw)}</td></tr>"
    )
    table = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Totals by kind of op">'
        f'<table class="data"><thead><tr>{"".join(heads)}</tr></thead>\n'
        f"<tbody>{''.join(lines)}</tbody>\n<tfoot>{foot}</tfoot></table></div>"
    )
    say = "Time by kind of op. "
    if report.read_bw_gb_s:
        say += "The upright mark is the least that its bytes can take at the measured ceiling."
    if compared:
        say += f" The thin grey bar is {report.vs}."
    return _section("kinds", "Where the time goes", say, table + _notes(report))


def _versus_heads(report: LayerReport) -> tuple[str, ...]:
    return (f"{report.vs} µs", "Δ µs") if report.vs is not None else ()


def _versus_cells(versus: Sequence[str]) -> str:
    """Cells of the other kernel's µs and the difference, or none."""
    if not versus:
        return ""
    us, delta = versus
    return f"<td>{us}</td><td{_side(delta)}>{delta}</td>"


def _side(delta: str) -> str:
    """The class of a difference as shown: the other kernel is slower, or faster, or neither."""
    return {"+": ' class="faster"', "-": ' class="slower"'}.get(delta[0], "")


def _track(total: LayerTotal, longest: float, report: LayerReport) -> str:
    """A bar of the time, a mark at the least its bytes allow, a thin bar of the other kernel."""

    def place(us: float) -> str:
        return f"{100.0 * us / longest if longest else 0.0:.2f}%"

    parts = f'<i style="width:{place(total.us)}"></i>'
    title = f"{number(total.us)} µs"
    if report.read_bw_gb_s and total.bytes:
        bound = total.bytes / report.read_bw_gb_s / 1e3
        title += f"; {number(bound)} µs at the ceiling"
        parts += f'<b style="left:min({place(bound)}, 100% - 2px)"></b>'
    if total.vs_us is not None:
        title += f"; {report.vs}: {number(total.vs_us)} µs"
        parts += f'<u style="width:{place(total.vs_us)}"></u>'
    return f'<div class="track" title="{html.escape(title)}">{parts}</div>'


def _notes(report: LayerReport) -> str:
    notes = _format.layer_notes(report, every_row=True)
    return "".join(f'<p class="note">{html.escape(note)}.</p>' for note in notes)


# --- heat map -------------------------------------------------------------------------------------


def _heat_map(report: LayerReport) -> str:
    grid: dict[str, dict[int, tuple[int, LayerRow]]] = {}
    for i, row in enumerate(report.rows):
        if row.layer is not None:
            grid.setdefault(_format.op_in_layer(row), {})[row.layer] = (i, row)
    if not grid:
        return ""
    columns = sorted({layer for cells in grid.values() for layer in cells})
    longest = max(row.median_us for cells in grid.values() for _, row in cells.values())
    compared = report.vs is not None
    every = max(1, math.ceil(len(columns) / (1.5 * _MAX_LABELS)))
    heads = "".join(
        f'<th scope="col">{layer if i % every == 0 else ""}</th>' for i, layer in enumerate(columns)
    )
    lines = []
    for name, cells in grid.items():
        tds = [_heat_cell(cells.get(layer), longest, report) for layer in columns]
        lines.append(f'<tr><th scope="row">{html.escape(name)}</th>{"".join(tds)}</tr>')
    measured = report.read_bw_gb_s is not None
    modes = [("share", "share of the read ceiling")] if measured else []
    modes.append(("time", "time"))
    if compared:
        modes.append(("vs", f"against {report.vs}"))
    radios = "".join(
        f'<label><input type="radio" name="mode" id="mode-{mode}"{" checked" if i == 0 else ""}>'
        f"{html.escape(words)}</label>"
        for i, (mode, words) in enumerate(modes)
    )
    scales = _scale("share", "ramp", "0 %", "100 % of the read ceiling")
    scales += _scale("time", "ramp", "0", f"{number(longest)} µs")
    if compared:
        other = html.escape(report.vs or "")
        scales += _scale("vs", "split", f"{other} twice as fast", f"{other} half as fast")
    content = (
        f'<div class="heatbox"><fieldset class="modes" aria-label="What the colour shows">{radios}'
        f'</fieldset>\n<div class="scroll panel" tabindex="0" role="region" '
        f'aria-label="Layers by ops"><table class="heat"><thead><tr><th scope="col">layer</th>'
        f"{heads}</tr></thead>\n<tbody>{''.join(lines)}</tbody></table></div>\n{scales}</div>"
    )
    return _section(
        "heat",
        "Layer by layer",
        "One column a layer, one line an op. Layers of the same shape should look the same: one "
        "that stands out is worth a look.",
        content,
    )


def _heat_cell(item: tuple[int, LayerRow] | None, longest: float, report: LayerReport) -> str:
    if item is None:
        return '<td class="none"></td>'
    i, row = item
    shade = min(row.pct_read_bw or 0.0, 100.0)
    style = f"--s:{shade:.1f};--t:{100.0 * row.median_us / longest:.1f}"
    if row.vs_us and row.median_us:
        # Full colour at a factor of two either way.
        weight = math.log2(row.vs_us / row.median_us)
        side = "better" if weight > 0 else "worse"
        style += f";--d:{min(100.0, 100.0 * abs(weight)):.1f};--side:var(--{side})"
    look = "" if row.gb_s is not None else ' class="nobytes"'
    words = _tooltip(row, report)
    return (
        f'<td{look} style="{style}"><a href="#op-{i}" tabindex="-1" title="{words}" '
        f'aria-label="{words}"></a></td>'
    )


def _scale(mode: str, look: str, low: str, high: str) -> str:
    return (
        f'<div class="scale for-{mode}"><span>{low}</span><i class="{look}"></i>'
        f"<span>{high}</span></div>"
    )


# --- roofline -------------------------------------------------------------------------------------


def _roofline(report: LayerReport, classes: dict[str, str]) -> str:
    points = [(i, row) for i, row in enumerate(report.rows) if row.gb_s]
    if not points:
        return ""
    charts = "".join(
        _roofline_svg(report, points, classes, look, width, height)
        for look, width, height in (("wide", 1040, 420), ("narrow", 360, 330))
    )
    left_out = len(report.rows) - len(points)
    them = "op that reads neither weights nor cache is"
    if left_out > 1:
        them = "ops that read neither weights nor cache are"
    note = f'<p class="note">{left_out} {them} not shown.</p>' if left_out else ""
    say = (
        "Bytes that an op reads against the speed it reads them at. Ops at the ceiling are bound "
        "by memory, ops far below it by latency; along a dashed line all take the same time."
    )
    content = f'<div class="scroll panel">{charts}</div>{note}'
    return _section("roofline", "How far from the memory limit", say, content)


class _Axis:
    """A logarithmic scale from `low` to `high` onto `start` to `end`."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: float) -> float:
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + part * (self.end - self.start)

    def decades(self) -> list[float]:
        first = math.ceil(math.log10(self.low) - 1e-9)
        last = math.floor(math.log10(self.high) + 1e-9)
        return [10.0**exponent for exponent in range(first, last + 1)]


def _roofline_svg(
    report: LayerReport,
    points: Sequence[tuple[int, LayerRow]],
    classes: dict[str, str],
    look: str,
    width: int,
    height: int,
) -> str:
    left, right, top, bottom = 56, width - 16, 16, height - 40
    sizes = [row.bytes for _, row in points]
    speeds = [row.gb_s or 0.0 for _, row in points]
    fastest = max([*speeds, report.read_bw_gb_s or 0.0])
    x = _Axis(min(sizes) / 2.5, max(sizes) * 3.0, left, right)
    y = _Axis(min(speeds) / 2.0, fastest * 1.8, bottom, top)
    parts = [_grid(x, y, left, right, top, bottom)]
    taken = [_around(x(row.bytes), y(row.gb_s or 1.0)) for _, row in points]
    if report.read_bw_gb_s:
        at = y(report.read_bw_gb_s)
        words = f"{speed(report.read_bw_gb_s)} GB/s, measured"
        parts.append(
            f'<line class="ceiling" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(f'<text class="strong" x="{left + 6}" y="{at - 6:.1f}">{words}</text>')
        taken.append(_text_box(left + 6, at - 6, words))
        taken.append((left, at - 2, right, at + 2))
    parts.append(_equal_times(x, y, [row.median_us for _, row in points], taken))
    for i, row in points:
        parts.append(
            f'<a href="#op-{i}" tabindex="-1"><circle class="dot {classes[row.kind]}" '
            f'cx="{x(row.bytes):.1f}" cy="{y(row.gb_s or 1.0):.1f}" r="4.5">'
            f"<title>{_tooltip(row, report)}</title></circle></a>"
        )
    parts += _labels(points, x, y, (left, top, right, bottom), taken)
    return (
        f'<svg class="roof {look}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Bytes an op reads against GB/s achieved">{"".join(parts)}</svg>'
    )


def _grid(x: _Axis, y: _Axis, left: float, right: float, top: float, bottom: float) -> str:
    parts = []
    for value in x.decades():
        at = f"{x(value):.1f}"
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{top}" y2="{bottom}"/>')
        label = f"{value:.0f} B" if value < 1e3 else _format.size(value).replace(".00", "")
        label = label.replace(".0 ", " ")
        parts.append(f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    for value in y.decades():
        at = f"{y(value):.1f}"
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at}" y2="{at}"/>')
        middle = f"{y(value) + 4:.1f}"
        parts.append(f'<text x="{left - 8}" y="{middle}" text-anchor="end">{value:,g}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 35}" text-anchor="end">bytes an op reads</text>')
    parts.append(f'<text x="4" y="{bottom + 35}">GB/s achieved ↑</text>')
    return "".join(parts)


def _equal_times(x: _Axis, y: _Axis, times_us: Sequence[float], taken: list[Box]) -> str:
    """Lines of one, ten, … µs about the times that occur: bytes / time is the speed."""
    parts = []
    first, last = math.floor(math.log10(min(times_us))), math.ceil(math.log10(max(times_us)))
    for exponent in range(first, last + 1):
        us = 10.0**exponent
        # Where the line enters and leaves the frame.
        low = max(x.low, y.low * us * 1e3)
        high = min(x.high, y.high * us * 1e3)
        if x(high) - x(low) < 40:
            continue
        x1, x2 = x(low), x(high)
        y1, y2 = y(low / us / 1e3), y(high / us / 1e3)
        parts.append(f'<line class="iso" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>')
        words = f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} µs"
        # From the lower end upwards, where nothing is in the way.
        for part in (0.0, 0.12, 0.24, 0.36, 0.48):
            px, py = x1 + 6 + part * (x2 - x1), y1 - 5 + part * (y2 - y1)
            box = _text_box(px, py, words)
            if not any(_overlap(box, other) for other in taken):
                taken.append(box)
                parts.append(f'<text x="{px:.1f}" y="{py:.1f}">{words}</text>')
                break
    return "".join(parts)


def _labels(
    points: Sequence[tuple[int, LayerRow]],
    x: _Axis,
    y: _Axis,
    frame: Box,
    taken: list[Box],
) -> list[str]:
    """The name of each kind beside its middle point, where there is room for it."""
    left, top, right, bottom = frame
    groups: dict[str, list[LayerRow]] = {}
    for _, row in points:
        groups.setdefault(row.kind, []).append(row)
    parts = []
    for kind, rows in groups.items():
        cx = x(statistics.median(row.bytes for row in rows))
        ys = [y(row.gb_s or 1.0) for row in rows]
        cy, highest, lowest = statistics.median(ys), min(ys), max(ys)
        wide = _CHARACTER * len(kind)
        places = [
            (cx + 9, cy + 4),
            (cx - 9 - wide, cy + 4),
            (cx - wide / 2, highest - 10),
            (cx - wide / 2, lowest + 19),
            (cx - wide / 2, lowest + 36),
        ]
        for px, py in places:
            box = _text_box(px, py, kind)
            inside = left <= box[0] and box[2] <= right and top <= box[1] and box[3] <= bottom
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                name = html.escape(kind)
                parts.append(f'<text class="label" x="{px:.1f}" y="{py:.1f}">{name}</text>')
                break
    return parts


def _around(cx: float, cy: float) -> Box:
    """The box of a dot."""
    return cx - 5, cy - 5, cx + 5, cy + 5


def _text_box(px: float, py: float, text: str) -> Box:
    """The box of a text that starts at px on the base line py."""
    return px, py - 11, px + _CHARACTER * len(text), py + 3


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


# --- rows -----------------------------------------------------------------------------------------


def _rows(report: LayerReport, classes: dict[str, str]) -> str:
    rows = report.rows
    compared = report.vs is not None
    heads = [
        ("op", True, "what runs"),
        ("µs", False, "its completion minus the completion before it, median"),
        ("p95", False, "95th percentile of the same, µs"),
        ("% step", False, "share of the step"),
    ]
    if compared:
        heads.append((f"{report.vs} µs", False, "the other kernel"))
        heads.append(("Δ µs", False, "positive: the other kernel is slower"))
    heads += [
        ("GB/s", False, "bytes over time"),
        ("% read", False, "share of the measured read ceiling"),
        ("bytes", False, "weights and cache that it reads"),
        ("own", False, "the kernel from its start to its end, µs; overlaps its neighbours"),
        ("alone", False, "run by itself with cold weights, µs"),
        ("shape", True, "rows × columns of a linear layer"),
        ("engine", True, "fused, composed or torch"),
        ("kernels", True, "as the profiler names them"),
        ("order", False, "place in the step, from 0"),
    ]
    head_cells = "".join(
        f'<th scope="col" aria-sort="none"{" class=text" if text else ""} '
        f'title="{html.escape(what)}"><button type="button" class="sort">'
        f"{html.escape(label)}</button></th>"
        for label, text, what in heads
    )
    us = numbers([row.median_us for row in rows])
    p95 = numbers([row.p95_us for row in rows])
    own = numbers([row.duration_us for row in rows])
    alone = numbers([row.alone_us for row in rows])
    vs = numbers([row.vs_us for row in rows])
    delta = numbers([row.delta_us for row in rows], signed=True)
    lines = []
    for i, row in enumerate(rows):
        versus = [_cell(row.vs_us, vs[i]), _delta_cell(row.delta_us, delta[i])] if compared else []
        kernels = ", ".join(row.kernels)
        shape = _format.shape(row.shape)
        cells = [
            _cell(row.median_us, us[i]),
            _cell(row.p95_us, p95[i]),
            _cell(row.pct_step, _format.of_step(row.pct_step)),
            *versus,
            _cell(row.gb_s, speed(row.gb_s, report.read_bw_gb_s)),
            _cell(row.pct_read_bw, share(row.pct_read_bw)),
            _cell(row.bytes, _format.size(row.bytes)),
            _cell(row.duration_us, own[i]),
            _cell(row.alone_us, alone[i]),
            _text_cell(shape if row.shape else ""),
            _text_cell(row.engine),
            _text_cell(kernels, code=True),
            _cell(i, str(i)),
        ]
        name = html.escape(row.name)
        text = html.escape(f"{row.name} {row.kind} {row.engine} {kernels}".lower())
        swatch = f'<span class="swatch {classes[row.kind]}"></span>'
        lines.append(
            f'<tr id="op-{i}" data-i="{i}" data-text="{text}"><th scope="row" data-v="{name}" '
            f'title="{name}">{swatch}{name}</th>{"".join(cells)}</tr>'
        )
    content = (
        f'<div class="tools"><label for="filter">Filter</label>'
        f'<input id="filter" type="search" placeholder="gate_up, layers.3, …" autocomplete="off" '
        f'spellcheck="false"><span id="shown" role="status">{len(rows)} of {len(rows)} ops</span>'
        f'</div>\n<div class="scroll tall" tabindex="0" role="region" aria-label="All ops">'
        f'<table class="data rows" id="rows"><thead><tr>{head_cells}</tr></thead>\n'
        f"<tbody>{chr(10).join(lines)}</tbody></table></div>{_layer_totals(report)}"
    )
    return _section(
        "ops", "Every op", "Sort by any column; the headings say what it holds.", content
    )


def _cell(value: float | None, shown: str) -> str:
    return f"<td>{NONE}</td>" if value is None else f'<td data-v="{value:.6g}">{shown}</td>'


def _delta_cell(value: float | None, shown: str) -> str:
    if value is None:
        return f"<td>{NONE}</td>"
    return f'<td data-v="{value:.6g}"{_side(shown)}>{shown}</td>'


def _text_cell(text: str, *, code: bool = False) -> str:
    if not text:
        return f'<td class="text">{NONE}</td>'
    safe = html.escape(text)
    inner = f"<code>{safe}</code>" if code else safe
    return f'<td class="text" data-v="{safe}">{inner}</td>'


def _layer_totals(report: LayerReport) -> str:
    """The totals by layer, folded away."""
    heads = ("layer", "ops", "µs", "% step", *_versus_heads(report), "bytes", "GB/s", "% read")
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in heads)
    lines = []
    for c in _format.total_cells(report, report.by_layer):
        lines.append(
            f'<tr><th scope="row">{html.escape(c.name)}</th><td>{c.ops}</td>'
            f"<td>{c.us}</td><td>{c.of_step}</td>{_versus_cells(c.versus)}"
            f"<td>{c.size}</td><td>{c.speed}</td><td>{c.share}</td></tr>"
        )
    return (
        f"<details><summary>Totals by layer</summary>"
        f'<div class="scroll tall" tabindex="0" role="region" aria-label="Totals by layer">'
        f'<table class="data" id="by-layer"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div></details>"
    )


# --- how it was measured --------------------------------------------------------------------------


def _about(report: LayerReport) -> str:
    facts = [
        ("method", report.method),
        ("samples", f"{report.samples}, medians shown"),
        ("ceiling", _format.ceiling(report)),
        *_format.environment_items(report.environment),
    ]
    items = "".join(
        f"<dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd>" for label, value in facts
    )
    content = (
        f'<div class="scroll"><pre tabindex="0">{html.escape(report.command)}</pre></div>\n'
        f'<dl class="facts">{items}</dl>'
    )
    say = "The command that made this page, and the machine it ran on."
    return _section("about", "How this was measured", say, content)
