"""Pictures through matplotlib (the `plot` extra), as the bytes of a PNG file."""

from __future__ import annotations

import importlib.util
import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from minidecode.errors import MinidecodeError, MissingError
from minidecode.records import GemvReport, GemvRow, LayerReport, is_above
from minidecode.report import _format
from minidecode.report._palette import NEUTRAL, kind_colours

_INK = "#1d2430"
_MUTED = "#687182"
_GRID = "#e3e7ee"
_SERIES = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#66ccee", "#ccbb44", "#99712c", "#687182")
_MARKERS = "osD^vPX*"
_NEEDED = 'a picture needs matplotlib: pip install "minidecode[plot]"'
# Characters of a line above two panels.
_TITLE_WIDTH = 130


def require() -> None:
    """MissingError where there is no matplotlib to draw with, without importing it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingError(_NEEDED)


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingError(_NEEDED) from None
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _bytes(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150)
    return out.getvalue()


def _plain(name: str) -> str:
    """A name in which a dollar sign begins no formula."""
    return name.replace("$", r"\$")


def _quiet(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_GRID)
    axes.tick_params(which="both", colors=_MUTED, labelsize=9, length=0)
    axes.xaxis.label.set_color(_MUTED)
    axes.yaxis.label.set_color(_MUTED)
    axes.set_axisbelow(True)


def layers(report: LayerReport) -> bytes:
    """Time by kind of op beside the least its bytes allow, and a roofline of every op."""
    notes = [
        f"{report.model} · {_format.with_engine(report)} · {report.depth} tokens in the cache · "
        f"{report.environment.hardware}",
        f"step {_format.number(report.step_us)} µs, "
        f"{_format.tokens_per_s(report.step_us):,.0f} device tokens/s, "
        f"{_format.share(report.pct_read_bw)} % of the read ceiling",
    ]
    if report.vs and report.vs_step_us:
        notes[1] += f"; {report.vs}, the hatched bars: step {_format.number(report.vs_step_us)} µs"
    # Of an op above the line it must be said, too.
    if any(map(is_above, [report.pct_read_bw, *(row.pct_read_bw for row in report.rows)])):
        notes.append(_format.above_layers(report))
    lines = [line for note in notes for line in textwrap.wrap(_plain(note), _TITLE_WIDTH)]
    figure = _figure(11, 0.32 * len(report.by_kind) + 2.9 + 0.2 * len(lines))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    figure.suptitle(
        "\n".join(lines),
        x=0.01,
        ha="left",
        fontsize=11,
        color=_INK,
    )
    colours = kind_colours(total.name for total in report.by_kind)
    _time_by_kind(left, report, colours)
    _roofline(right, report, colours)
    return _bytes(figure)


def _time_by_kind(axes: Any, report: LayerReport, colours: dict[str, str]) -> None:
    totals = report.by_kind
    others = [total.vs_us or 0.0 for total in totals]
    compared = report.vs is not None
    height = 0.36 if compared else 0.62
    shift = 0.2 if compared else 0.0
    colour = [colours[total.name] for total in totals]
    axes.barh([i - shift for i in range(len(totals))], [t.us for t in totals], height, color=colour)
    if compared:
        places = [i + shift for i in range(len(totals))]
        axes.barh(
            places, others, height, color="white", edgecolor=colour, hatch="////", linewidth=0
        )
    names = [f"{_plain(total.name)}  ×{total.ops}" for total in totals]
    axes.set_yticks(range(len(totals)), names)
    axes.invert_yaxis()
    bounds = [0.0] * len(totals)
    if report.read_bw_gb_s:
        bounds = [total.bytes / report.read_bw_gb_s / 1e3 for total in totals]
        axes.scatter(bounds, range(len(totals)), marker="|", s=260, color=_INK, linewidths=1.6)
        axes.set_xlabel("µs in one step; | the least that reading its bytes can take")
    else:
        axes.set_xlabel("µs in one step")
    for i, total in enumerate(totals):
        delta = f" ({_format.number(total.delta_us, signed=True)})" if compared else ""
        axes.annotate(
            f"{_format.number(total.us)}{delta}",
            (max(total.us, bounds[i], others[i]), i),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=_MUTED,
        )
    axes.margins(x=0.12)
    axes.grid(axis="x", color=_GRID)
    _quiet(axes)


def _roofline(axes: Any, report: LayerReport, colours: dict[str, str]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for index, kind in enumerate(dict.fromkeys(row.kind for row in report.rows)):
        rows = [row for row in report.rows if row.kind == kind and row.gb_s]
        if rows:
            axes.scatter(
                [row.bytes for row in rows],
                [row.gb_s for row in rows],
                s=26,
                color=colours[kind],
                marker=_MARKERS[index % len(_MARKERS)],
                alpha=0.8,
                linewidths=0,
                label=_plain(kind),
            )
    if report.read_bw_gb_s:
        axes.axhline(report.read_bw_gb_s, color=_INK, linewidth=1.2)
        axes.annotate(
            f"{_format.speed(report.read_bw_gb_s)} GB/s, measured",
            (0.01, report.read_bw_gb_s),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            fontsize=8.5,
            color=_INK,
        )
    axes.set_xlabel("bytes an op reads")
    axes.set_ylabel("GB/s achieved")
    axes.grid(color=_GRID)
    if axes.collections:
        axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK, loc="lower right")
    _quiet(axes)


def gemv(report: GemvReport) -> bytes:
    """Share of a pure read by kernel, one panel a dtype: lines over n if square, else by shape."""
    rows = [row for row in report.rows if row.median_us is not None]
    if not rows:
        raise MinidecodeError("no kernel ran, so there is nothing to draw")
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    figure = _figure(6.4 * len(dtypes), 4.4)
    panels = figure.subplots(1, len(dtypes), squeeze=False)[0]
    for axes, dtype in zip(panels, dtypes, strict=True):
        _gemv_panel(axes, [row for row in rows if row.dtype == dtype])
        axes.set_title(
            f"{dtype}, {_plain(report.environment.hardware)}",
            loc="left",
            fontsize=11,
            color=_INK,
        )
    return _bytes(figure)


def _gemv_panel(axes: Any, rows: Sequence[GemvRow]) -> None:
    shapes = list(dict.fromkeys((row.n, row.k) for row in rows))
    square = all(n == k for n, k in shapes)
    names = [str(n) if square else f"{n}×{k}" for n, k in shapes]
    for index, kernel in enumerate(dict.fromkeys(row.kernel for row in rows)):
        mine = [row for row in rows if row.kernel == kernel and row.pct_of_read is not None]
        # What a cache served is no share of a read: it breaks the line and is marked at 100 %.
        shares = [math.nan if row.served_from_cache else row.pct_of_read for row in mine]
        places = [shapes.index((row.n, row.k)) for row in mine]
        style: dict[str, Any] = {
            "color": _SERIES[index % len(_SERIES)],
            "marker": _MARKERS[index % len(_MARKERS)],
        }
        # Lines only where the order along the axis means something.
        width = 1.6 if square else 0
        axes.plot(places, shares, markersize=5, linewidth=width, label=_plain(kernel), **style)
        cached = [p for p, row in zip(places, mine, strict=True) if row.served_from_cache]
        axes.scatter(
            cached,
            [100] * len(cached),
            s=60,
            facecolors="white",
            zorder=3,
            edgecolors=style["color"],
            marker=style["marker"],
        )
    if any(row.served_from_cache for row in rows):
        label = "from a cache, not memory"
        axes.scatter([], [], s=60, facecolors="white", edgecolors=_MUTED, label=label)
    axes.axhline(100, color=NEUTRAL, linewidth=1, linestyle="--")
    axes.set_xticks(
        range(len(names)), names, rotation=0 if square else 40, ha="center" if square else "right"
    )
    axes.set_xlabel("n = k" if square else "n × k")
    axes.set_ylabel("% of a pure read of the same bytes")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=_GRID)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK)
    _quiet(axes)
