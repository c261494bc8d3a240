"""Pictures: real PNG files with something on them, and a clear error without matplotlib."""

from __future__ import annotations

import dataclasses
import io
import sys
from typing import Any

import pytest
from report_samples import gemv_report, layer_report

from minidecode.errors import MinidecodeError, MissingError
from minidecode.report import png

image = pytest.importorskip("PIL.Image", reason="pillow comes with matplotlib")
pytest.importorskip("matplotlib", reason="the plot extra is not installed")


def colours(data: bytes) -> set[tuple[int, ...]]:
    with image.open(io.BytesIO(data)) as picture:
        assert picture.format == "PNG"
        assert picture.width > 600
        assert picture.height > 300
        counted = picture.convert("RGB").getcolors(maxcolors=1 << 24)
    return {colour for count, colour in counted if count > 50}


def test_layers_draw_every_kind_and_the_ceiling() -> None:
    seen = colours(png.layers(layer_report()))
    for colour in ("#4477aa", "#ee6677", "#66ccee", "#228833", "#ccbb44", "#aa3377"):
        assert tuple(bytes.fromhex(colour[1:])) in seen
    assert png.layers(layer_report(read_bw_gb_s=None)).startswith(b"\x89PNG")


def test_layers_draw_the_other_kernel_beside() -> None:
    compared = png.layers(layer_report(vs=True))
    with image.open(io.BytesIO(compared)) as picture:
        left = picture.convert("RGB").crop((0, 0, picture.width // 2, picture.height))
    with image.open(io.BytesIO(png.layers(layer_report()))) as picture:
        alone = picture.convert("RGB").crop((0, 0, picture.width // 2, picture.height))
    down = tuple(bytes.fromhex("ccbb44"))

    def runs(picture: Any) -> int:
        """How often the colour begins or ends on the way across: hatching does again and again."""
        return sum(
            picture.getpixel((x, y)) == down != picture.getpixel((x - 1, y))
            for x in range(1, picture.width)
            for y in range(picture.height)
        )

    assert runs(left) > 2 * runs(alone) > 0


def test_names_are_no_formulas() -> None:
    odd = r"a$\nope$b_$5 to $6"
    rows = [dataclasses.replace(row, kind=odd) for row in layer_report(vs=True).rows]
    named = layer_report(rows, vs=True, model=odd)
    assert png.layers(dataclasses.replace(named, vs=odd, kernel=odd)).startswith(b"\x89PNG")
    kernels = [dataclasses.replace(row, kernel=odd) for row in gemv_report().rows]
    assert png.gemv(gemv_report(rows=kernels)).startswith(b"\x89PNG")


def test_a_long_title_takes_lines_of_its_own() -> None:
    long = png.layers(dataclasses.replace(layer_report(vs=True), vs="long/" * 40))
    with (
        image.open(io.BytesIO(long)) as a,
        image.open(io.BytesIO(png.layers(layer_report(vs=True)))) as b,
    ):
        assert a.width == b.width
        assert a.height > b.height


def test_gemv_draws_square_sizes_and_other_shapes() -> None:
    square = png.gemv(gemv_report())
    assert tuple(bytes.fromhex("ee6677")) in colours(square)
    rows = [dataclasses.replace(row, k=row.k // 2) for row in gemv_report().rows]
    other = png.gemv(gemv_report(rows=rows))
    assert other != square
    both = [dataclasses.replace(row, dtype="fp32") for row in gemv_report().rows]
    wide = png.gemv(gemv_report(rows=[*gemv_report().rows, *both]))
    with image.open(io.BytesIO(wide)) as a, image.open(io.BytesIO(square)) as b:
        assert a.width > 1.8 * b.width


def test_nothing_to_draw_is_an_error() -> None:
    last = gemv_report().rows[-1]
    with pytest.raises(MinidecodeError, match="no kernel ran"):
        png.gemv(gemv_report(rows=[last]))


def test_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingError, match=r'pip install "minidecode\[plot\]"'):
        png.layers(layer_report())
