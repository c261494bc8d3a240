"""The HTML page as text: self-contained, well formed, escaped. tests/browser opens it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from report_samples import layer_report, layer_row, layer_rows

from minidecode.records import LayerReport
from minidecode.report import html

EVIL = """</script><script>alert(1)</script><!--"'><img src=x onerror=alert(2)>&amp;"""
VOID = {"meta", "input", "br", "img", "link", "line"}


class Page(HTMLParser):
    """What is in the page: every tag with its attributes, the texts of the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def with_class(self, name: str) -> list[dict[str, str | None]]:
        return [a for _, a in self.tags if name in (a.get("class") or "").split()]


def evil_report() -> LayerReport:
    rows = [
        layer_row(name=f"layers.0.{EVIL}", kind=EVIL, kernels=(EVIL,), engine=EVIL, vs_us=1.0),
        *layer_rows(1, vs=True),
    ]
    return layer_report(rows=rows, vs=True, model=EVIL, kernel=EVIL, command=EVIL, method=EVIL)


@pytest.mark.parametrize(
    "report",
    [
        layer_report(),
        layer_report(vs=True),
        layer_report(read_bw_gb_s=None),
        layer_report(rows=layer_rows(0)),
        layer_report(rows=[layer_row(bytes=0)]),
        layer_report(step_us=600.0),  # less than the sum of its ops
        evil_report(),
    ],
    ids=["plain", "vs", "no ceiling", "no layers", "no bytes", "negative rest", "evil"],
)
def test_page_is_well_formed_and_has_a_row_an_op(report: LayerReport) -> None:
    page = Page(html.layers(report))
    assert page.open == []
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    rows = [a for a in page.all("tr") if (a.get("id") or "").startswith("op-")]
    assert len(rows) == len(report.rows)
    targets = {(a.get("href") or "")[1:] for a in page.all("a") if a.get("href")}
    assert targets <= set(ids)
    assert len(page.all("script")) == 2


def test_page_reaches_for_nothing_else() -> None:
    text = html.layers(layer_report(vs=True))
    assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text)
    assert not re.search(r"@import|url\(|@font-face", text)
    page = Page(text)
    assert not [a for _, a in page.tags if "src" in a]
    assert not page.all("link")
    (policy,) = [a["content"] for a in page.all("meta") if "http-equiv" in a]
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_names_are_escaped_and_the_data_cannot_leave_its_element() -> None:
    report = evil_report()
    page = Page(html.layers(report))
    assert len(page.scripts) == 2
    assert not page.all("img")
    assert not any("onerror" in attributes for _, attributes in page.tags)
    assert any(EVIL in word for word in page.words)
    assert "<" not in page.scripts[0]
    assert LayerReport.from_dict(json.loads(page.scripts[0])) == report


def test_embedded_data_is_the_record() -> None:
    page = Page(html.layers(layer_report(vs=True)))
    assert page.all("script")[0] == {"type": "application/json", "id": "report"}
    assert LayerReport.from_dict(json.loads(page.scripts[0])) == layer_report(vs=True)


def widths(page: Page, text: str) -> list[float]:
    strip = text.split('class="strip"')[1].split("</div>")[0]
    return [float(width) for width in re.findall(r"flex-grow:([\d.]+)", strip)]


def test_strip_is_as_long_as_the_step() -> None:
    report = layer_report()
    text = html.layers(report)
    lengths = widths(Page(text), text)
    assert len(lengths) == len(report.rows) + 1  # and the unexplained rest
    assert sum(lengths) == pytest.approx(report.step_us, abs=0.01)
    assert lengths[0] == pytest.approx(report.rows[0].median_us, abs=1e-4)
    shorter = html.layers(layer_report(step_us=600.0))
    assert len(widths(Page(shorter), shorter)) == len(report.rows)


def test_heat_map_has_a_cell_an_op_of_every_layer() -> None:
    report = layer_report()
    text = html.layers(report).split('class="heat"')[1].split("</table>")[0]
    shades = [float(shade) for shade in re.findall(r"--s:([\d.]+)", text)]
    assert len(shades) == 16 * 5
    first = report.rows[0]
    assert first.pct_read_bw is not None
    assert shades[0] == pytest.approx(first.pct_read_bw, abs=0.06)
    assert max(shades) <= 100.0
    assert "--d:" not in text
    compared = html.layers(layer_report(vs=True)).split('class="heat"')[1].split("</table>")[0]
    assert compared.count("--d:") == 16 * 5
    assert "var(--worse)" in compared  # attention is slower in the sample
    assert "var(--better)" in compared


def test_a_layer_without_an_op_leaves_a_hole_in_the_heat_map() -> None:
    rows = [row for row in layer_rows(3) if row.name != "layers.1.mlp.down"]
    page = Page(html.layers(layer_report(rows=rows)))
    assert len([a for a in page.all("td") if a.get("class") == "none"]) == 1


def dots(text: str, look: str) -> list[tuple[float, float]]:
    svg = text.split(f'class="roof {look}"')[1].split("</svg>")[0]
    return [
        (float(x), float(y))
        for x, y in re.findall(r'<circle[^>]*cx="([\d.]+)"\s+cy="([\d.]+)"', svg)
    ]


def test_roofline_has_a_dot_an_op_that_reads_and_the_ceiling() -> None:
    rows = [*layer_rows(2), layer_row(name="layers.1.mlp.swiglu", kind="swiglu", bytes=0)]
    report = layer_report(rows=rows)
    text = html.layers(report)
    for look, width, height in (("wide", 1040, 420), ("narrow", 360, 330)):
        places = dots(text, look)
        assert len(places) == len(rows) - 1
        assert all(0 < x < width and 0 < y < height for x, y in places)
        svg = text.split(f'class="roof {look}"')[1].split("</svg>")[0]
        (ceiling,) = re.findall(r'class="ceiling"[^>]* y1="([\d.]+)"', svg)
        # Higher on the page is faster: above the line are exactly those above the ceiling.
        above = sum(y < float(ceiling) - 0.06 for _, y in places)
        assert above == sum((row.pct_read_bw or 0) > 100.2 for row in report.rows)
    assert "1 op that reads neither weights nor cache is not shown." in text
    assert 'class="ceiling"' not in html.layers(layer_report(read_bw_gb_s=None))


def test_shares_above_the_ceiling_are_explained() -> None:
    assert "reading began while the op before still ran" in html.layers(layer_report())
    calm = html.layers(layer_report(read_bw_gb_s=9000.0))
    assert "reading began" not in calm


def test_rows_carry_values_to_sort_by() -> None:
    report = layer_report(vs=True)
    text = html.layers(report)
    body = text.split('id="rows"')[1].split("<tbody>")[1].split("</tbody>")[0]
    first: Any = body.split("</tr>")[0]
    values = re.findall(r'data-v="([^"]*)"', first)
    row = report.rows[0]
    assert values[0] == row.name
    assert float(values[1]) == pytest.approx(row.median_us, rel=1e-5)
    assert 'class="faster">+' in first
