"""The HTML report in a real browser: no errors, every op a row, sorting, both schemes, a phone.

Set MINIDECODE_SCREENSHOTS to a folder to keep the pictures and look at them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
import webdriver
from report_samples import layer_report, layer_row, layer_rows

from minidecode import cli
from minidecode.records import LayerReport
from minidecode.report import html

image = pytest.importorskip("PIL.Image", reason="pillow comes with matplotlib")

pytestmark = needs.present(webdriver.missing())

EVIL = """</script><script>document.title="broken"</script><img src=x onerror=throw(1)>"""
LONG = "some/folder/kernels.py:right+" + "quite_long_" * 6 + "name.cu"
SCREENS = {"light": (1200, False), "dark": (1200, True), "phone": (360, False)}


def reports() -> dict[str, LayerReport]:
    evil = layer_row(name=EVIL, kind=EVIL, layer=None, kernels=(EVIL,), median_us=50.0)
    return {
        "plain": layer_report(),
        "vs": layer_report(vs=True),
        "evil": layer_report(rows=[evil, *layer_rows(40)], model=EVIL, command=f"{EVIL} " * 9),
        "long": dataclasses.replace(layer_report(vs=True), kernel=LONG[:40], vs=LONG),
        "bare": layer_report(rows=[layer_row(bytes=0)], read_bw_gb_s=None),
    }


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    paths = {}
    for name, report in reports().items():
        paths[name] = folder / f"{name}.html"
        paths[name].write_text(html.layers(report), encoding="utf-8")
    return paths


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Browser]:
    with webdriver.Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def column(browser: webdriver.Browser, index: int) -> list[str]:
    """The texts of a column, the visible rows only, as they stand."""
    script = """
        const rows = Array.from(document.querySelectorAll("#rows tbody tr"));
        const shown = rows.filter((row) => row.offsetParent !== null);
        return shown.map((row) => row.cells[arguments[0]].textContent);"""
    texts: list[str] = browser.run(script, index)
    return texts


def head(browser: webdriver.Browser, label: str) -> int:
    script = """
        const heads = Array.from(document.querySelectorAll("#rows thead th"));
        return heads.findIndex((head) => head.textContent.trim() === arguments[0]);"""
    index: int = browser.run(script, label)
    assert index >= 0
    return index


def press(browser: webdriver.Browser, label: str) -> int:
    """Clicks a heading of the rows and returns which column it is."""
    index = head(browser, label)
    browser.click(f"#rows thead th:nth-child({index + 1}) button")
    return index


@pytest.mark.usefixtures("example_dir")
def test_the_example_s_page(browser: webdriver.Browser, tmp_path: Path) -> None:
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    command = ["report", "-d", "16", "--device", "cpu", "--html", str(page), "--json", str(data)]
    assert cli.main(command) == 0
    report = LayerReport.from_dict(json.loads(data.read_text()))
    browser.show(width=1200, dark=False)
    browser.open(page)
    assert browser.console() == []
    assert len(column(browser, 0)) == len(report.rows) > 150
    falling = numbers(column(browser, press(browser, "µs")))
    assert falling == sorted(falling, reverse=True)
    assert browser.console() == []


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", ["plain", "vs", "evil", "long", "bare"])
def test_page_opens_without_a_complaint_and_fits(
    browser: webdriver.Browser, pages: dict[str, Path], tmp_path: Path, name: str, screen: str
) -> None:
    width, dark = SCREENS[screen]
    browser.show(width=width, dark=dark)
    browser.open(pages[name])
    assert browser.console() == []
    assert browser.run("return document.title").startswith("Decode step of")
    assert len(column(browser, 0)) == len(reports()[name].rows)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    # Whatever is wider than the page scrolls inside a container of its own.
    beyond = browser.run(
        """return Array.from(document.querySelectorAll("main *, header *"))
            .filter((e) => !e.closest(".scroll, .names, .bands, svg"))
            .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
            .map((e) => e.outerHTML.slice(0, 80));"""
    )
    assert beyond == []
    wider = browser.run(
        """return Array.from(document.querySelectorAll(".figures > div"))
            .filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.textContent);"""
    )
    assert wider == []
    kept = os.environ.get("MINIDECODE_SCREENSHOTS")
    folder = Path(kept) if kept else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    shot = folder / f"{name}-{screen}.png"
    browser.screenshot(shot)
    with image.open(shot) as picture:
        assert picture.width == width
        corner = picture.convert("L").getpixel((1, 1))
        colours = picture.convert("RGB").getcolors(maxcolors=1 << 24)
    assert corner < 60 if dark else corner > 200
    assert len(colours) > 50


def numbers(texts: list[str]) -> list[float]:
    return [float(text.rstrip("*").replace(",", "")) for text in texts if text != "–"]


def test_sorting_by_a_number_both_ways_and_back(
    browser: webdriver.Browser, pages: dict[str, Path]
) -> None:
    browser.show()
    browser.open(pages["plain"])
    original = column(browser, 0)
    index = press(browser, "µs")
    falling = numbers(column(browser, index))
    assert falling == sorted(falling, reverse=True)
    assert falling[0] == 121.0
    assert column(browser, 0)[0] == "head"
    press(browser, "µs")
    rising = numbers(column(browser, index))
    assert rising == sorted(rising)
    sorts = browser.run(
        """return Array.from(document.querySelectorAll("#rows th[aria-sort]"))
            .map((th) => th.getAttribute("aria-sort")).filter((s) => s !== "none");"""
    )
    assert sorts == ["ascending"]
    press(browser, "order")
    assert column(browser, 0) == original[::-1]
    press(browser, "order")
    assert column(browser, 0) == original
    assert browser.console() == []


def test_bytes_sort_by_size_and_names_by_number(
    browser: webdriver.Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["plain"])
    press(browser, "bytes")
    assert column(browser, 0)[0] == "head"  # 525 MB before 67.1 MB
    assert column(browser, 0)[-1] == "next"  # 4.10 kB
    press(browser, "op")
    names = [name for name in column(browser, 0) if name.endswith("mlp.down")]
    assert names == [f"layers.{i}.mlp.down" for i in range(16)]  # 2 before 10


def test_what_is_not_known_stays_last(browser: webdriver.Browser, tmp_path: Path) -> None:
    rows = layer_rows(1)
    unknown = [type(row)(**{**row.to_dict(), "alone_us": None}) for row in rows[:2]]
    page = tmp_path / "page.html"
    page.write_text(html.layers(layer_report(rows=[*unknown, *rows[2:]])), encoding="utf-8")
    browser.open(page)
    for _ in range(2):
        index = press(browser, "alone")
        texts = column(browser, index)
        assert texts[-2:] == ["–", "–"]
        assert "–" not in texts[:-2]


def test_sorting_with_the_keyboard(browser: webdriver.Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["plain"])
    index = head(browser, "GB/s")
    selector = f"#rows thead th:nth-child({index + 1}) button"
    assert browser.run("return document.querySelector(arguments[0]).tabIndex", selector) == 0
    browser.type(selector, "\ue007")  # Enter
    speeds = numbers(column(browser, index))
    assert speeds == sorted(speeds, reverse=True)


def test_filter_counts_and_a_segment_leads_to_its_row(
    browser: webdriver.Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["plain"])
    browser.type("#filter", "layers.3. gate")
    assert column(browser, 0) == ["layers.3.mlp.gate_up"]
    assert browser.run("return document.getElementById('shown').textContent") == "1 of 82 ops"
    browser.run("document.querySelector('.strip a[href=\"#op-80\"]').click()")
    assert browser.run("return document.querySelector(':target th').textContent") == "head"
    visible: Any = browser.run(
        """return new Promise((done) => setTimeout(() => {
            const box = document.querySelector(":target").getBoundingClientRect();
            done(box.height > 0 && box.top >= 0 && box.bottom <= innerHeight);
        }, 200));"""
    )
    assert visible is True
    assert len(column(browser, 0)) == 82


def shade(browser: webdriver.Browser, row: int) -> str:
    """The colour of the first cell of a line of the heat map."""
    script = """
        const line = document.querySelectorAll(".heat tbody tr")[arguments[0]];
        return getComputedStyle(line.querySelector("td")).backgroundColor;"""
    colour: str = browser.run(script, row)
    return colour


def test_heat_map_changes_with_its_mode(browser: webdriver.Browser, pages: dict[str, Path]) -> None:
    browser.show()
    browser.open(pages["vs"])
    shares = [shade(browser, row) for row in range(5)]
    assert shares[3] != shares[1]  # gate_up is near the ceiling, attention far below
    browser.click("#mode-time")
    times = [shade(browser, row) for row in range(5)]
    assert times != shares
    browser.click("#mode-vs")
    against = [shade(browser, row) for row in range(5)]
    # Four ops are 1.25 times as fast, attention is a little slower: two colours.
    assert len({against[0], against[2], against[3], against[4]}) == 1
    assert against[1] != against[0]
    shown = browser.run(
        """return Array.from(document.querySelectorAll(".scale"))
            .filter((e) => e.offsetParent !== null).map((e) => e.className);"""
    )
    assert shown == ["scale for-vs"]


def test_page_reads_without_javascript(browser: webdriver.Browser, pages: dict[str, Path]) -> None:
    browser.devtools("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(pages["plain"])
        root = browser.devtools("DOM.getDocument", depth=1)["root"]["nodeId"]
        found = browser.devtools("DOM.querySelectorAll", nodeId=root, selector="#rows tbody tr")
        assert len(found["nodeIds"]) == 82
    finally:
        browser.devtools("Emulation.setScriptExecutionDisabled", value=False)
