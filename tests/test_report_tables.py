"""Every figure of a table stands in its column, in each format that has tables."""

from __future__ import annotations

import dataclasses
import html as stdlib_html
import re
from collections.abc import Iterator

import pytest
from report_samples import ab_result, layer_report, layer_row, md_tables

from minidecode.records import LayerReport
from minidecode.report import html, md, txt

Row = dict[str, str]  # cells by the heads above them; txt leaves the empty ones out


def txt_rows(text: str) -> Iterator[Row]:
    """Of all tables; a cell belongs to the head above it, with which it overlaps."""
    heads: list[re.Match[str]] = []
    before: list[re.Match[str]] = []
    for line in text.splitlines():
        if not line.startswith(" "):  # as only tables do
            continue
        cells = list(re.finditer(r"\S+(?: \S+)*", line))
        if set(line) == {" ", "─"}:
            heads = before
        else:
            yield {
                head[0]: cell[0]
                for head in heads
                for cell in cells
                if head.start() < cell.end() and cell.start() < head.end()
            }
        before = cells


def md_rows(text: str) -> Iterator[Row]:
    for heads, _, *lines in md_tables(text):
        yield from (dict(zip(heads, line, strict=True)) for line in lines)


def html_rows(text: str) -> Iterator[Row]:
    for table in re.findall(r'<table class="data.*?</table>', text, re.DOTALL):
        heads, *lines = (
            [
                stdlib_html.unescape(re.sub(r"<[^>]*>", "", cell))
                for cell in re.findall(r"<t[hd][ >].*?</t[hd]>", line)
            ]
            for line in table.split("</tr>")[:-1]
        )
        yield from (dict(zip(heads, line, strict=True)) for line in lines)


def report(vs: str | None) -> LayerReport:
    """A step of 8 µs whose two ops take 10, and with `vs` its 11."""
    first = layer_row(bytes=8_000_000, median_us=4.0, p95_us=5.0, vs_us=3.0 if vs else None)
    last = layer_row(
        name="last",
        kind="head",
        layer=None,
        bytes=16_000_000,
        median_us=6.0,
        p95_us=8.0,
        duration_us=9.0,
        alone_us=10.5,
        vs_us=8.5 if vs else None,
    )
    made = layer_report([first, last], vs=bool(vs), step_us=8.0, read_bw_gb_s=5000.0)
    return dataclasses.replace(made, vs=vs, vs_step_us=11.0 if vs else None)


LAYERS = {
    "txt": list(txt_rows(txt.layers(report(None), layers=True, plain=True))),
    "txt vs": list(txt_rows(txt.layers(report("vs"), layers=True, plain=True))),
    "md": list(md_rows(md.layers(report("vs")))),
    "html": list(html_rows(html.layers(report("vs")))),
}
KIND = {"µs": "6.00", "vs µs": "8.50", "Δ µs": "+2.50", "% step": "75.0"}
KIND |= {"bytes": "16.0 MB", "GB/s": "2,667", "% read": "53.3"}
CELLS = {
    "last": KIND | {"p95": "8.00", "own": "9.00", "alone": "10.50"},
    "head": KIND | {"ops": "1"},
    "sum": {"ops": "2", "µs": "10.00", "% step": "125.0"},
    "unexplained": {"µs": "-2.00", "% step": "-25.0"},
    "step": {"µs": "8.00", "vs µs": "11.00", "Δ µs": "+3.00", "% step": "100.0"}
    | {"GB/s": "3,000", "% read": "60.0"},
}
VERSUS = {"vs µs", "Δ µs"}
# What there is no room for in 80 columns.
LEFT_OUT = {
    "txt": {"last": VERSUS | {"% step"}, "head": VERSUS, "step": VERSUS},
    "txt vs": {"last": {"own", "alone", "% step"}, "head": {"bytes"}},
}


@pytest.mark.parametrize("look", LAYERS)
def test_figures_of_a_step_stand_under_their_heads(look: str) -> None:
    rows = {row["op"]: row for row in LAYERS[look] if "op" in row}
    for label, cells in CELLS.items():
        left_out = LEFT_OUT.get(look, {}).get(label, set())
        found = {head: cell for head, cell in rows[label].items() if head in cells}
        assert found == {head: cells[head] for head in cells.keys() - left_out}


@pytest.mark.parametrize("look", LAYERS)
def test_totals_by_layer(look: str) -> None:
    rows = {row["layer"]: row for row in LAYERS[look] if "layer" in row and "op" not in row}
    assert [name for name in rows if name != "op"] == ["0", "other"]  # "op": of the next heads
    vs = {} if look == "txt" else {"vs µs": "8.50", "Δ µs": "+2.50"}
    size = {} if look == "txt vs" else {"bytes": "16.0 MB"}
    cells = {"ops": "1", "µs": "6.00", "% step": "75.0", "GB/s": "2,667", "% read": "53.3"}
    assert rows["other"] == {"layer": "other"} | cells | vs | size


def test_figures_of_both_arms_stand_under_their_heads() -> None:
    rows = txt_rows(txt.ab(ab_result(), plain=True))
    heads = ("device tok/s", "step µs", "GB/s", "% read")
    arms = [[row[head] for head in heads] for row in rows if "% read" in row]
    assert arms == [
        ["795.0", "1,257.9", "1,965", "46.1"],
        ["978.6", "1,021.9", "2,419", "56.7"],
    ]
