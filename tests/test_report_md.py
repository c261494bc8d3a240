"""Markdown tables: rectangular, llama-bench's columns, names that break nothing."""

from __future__ import annotations

import dataclasses
import re

import pytest
from report_samples import (
    gemv_report,
    layer_report,
    md_tables,
    run,
)

from minidecode.report import md

TEXTS = {
    "layers": md.layers(layer_report()),
    "vs": md.layers(layer_report(vs=True)),
    "runs": md.runs([run(), run(n_depth=4096)]),
    "gemv": md.gemv(gemv_report()),
}


@pytest.mark.parametrize("name", TEXTS)
def test_every_table_is_rectangular(name: str) -> None:
    found = md_tables(TEXTS[name])
    assert found
    for table in found:
        assert len(table) >= 3
        assert len({len(row) for row in table}) == 1
        assert all(re.fullmatch(r"-{2,}[-:]", cell) for cell in table[1])


def test_runs_have_llama_benchs_columns_in_its_order() -> None:
    (table,) = md_tables(md.runs([run(), run(n_prompt=512, n_gen=0, n_depth=0)]))
    heads = table[0]
    theirs = ["model", "size", "params", "backend", "test", "t/s"]
    assert [head for head in heads if head in theirs] == theirs
    assert set(heads) - set(theirs) == {"kernel", "step µs", "GB/s", "% read"}
    first = dict(zip(heads, table[2], strict=True))
    assert first["size"] == "14.96 GiB"
    assert first["params"] == "8.03 B"
    assert first["test"] == "tg128 @ d128"
    assert first["t/s"] == "271.34 ± 0.42"
    assert first["backend"] == "CUDA"
    assert table[3][heads.index("test")] == "pp512"
    small = run(model_size=269_060_280, model_n_params=134_515_008)
    cells = md_tables(md.runs([small]))[0][2]
    assert cells[1:3] == ["256.60 MiB", "134.52 M"]


def test_names_cannot_break_a_table_or_start_markup() -> None:
    name = "a|b_<script>*x*[y](z)`c`"
    (table,) = md_tables(md.runs([run(kernel=name, model_type="_m_\nn")]))
    assert table[2][4] == r"a\|b\_\<script>\*x\*\[y](z)\`c\`"
    assert table[2][0] == r"\_m\_ n"


def test_layers_list_every_op_and_the_command() -> None:
    report = layer_report(vs=True)
    totals, layers, rows = md_tables(TEXTS["vs"])
    assert [row[0] for row in rows[2:]] == [row.name for row in report.rows]
    assert [row[0] for row in totals[2:]] == [
        *(total.name for total in report.by_kind),
        "sum",
        "unexplained",
        "step",
    ]
    assert [row[0] for row in layers[2:]] == [total.name for total in report.by_layer]
    assert "cublas µs" in rows[0]
    assert f"```\n{report.command}\n```" in TEXTS["vs"]
    assert r"\* above 100 %" in TEXTS["vs"]
    assert "above" not in md.layers(layer_report(read_bw_gb_s=9000.0))
    odd = dataclasses.replace(report, vs="a|b<c>.cu")
    assert r"| a\|b\<c>.cu µs |" in md.layers(odd)


def test_a_command_with_backticks_stays_a_code_block() -> None:
    text = md.gemv(dataclasses.replace(gemv_report(), command="minidecode gemv `a` ```b```"))
    assert "````\nminidecode gemv `a` ```b```\n````\n" in text


def test_gemv_marks_what_a_cache_served() -> None:
    (table,) = md_tables(TEXTS["gemv"])
    share = table[0].index("% read")
    cached = [row for row in table[2:] if row[0] == "half2_stream" and row[1] == "1024 × 1024"]
    assert [row[share] for row in cached] == ["cache"]
    assert "the weights came out of a cache" in TEXTS["gemv"]
    assert "triton_rowblock: triton is not installed" in TEXTS["gemv"]
