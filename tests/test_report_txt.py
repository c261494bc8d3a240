"""Terminal tables: they fit 80 columns, lose nothing, and are plain when asked."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import pytest
from report_samples import (
    ab_result,
    environment,
    gates,
    gemv_report,
    layer_report,
    layer_rows,
    run,
)

from minidecode.records import NO_DIFFERENCE, GpuState, LayerReport
from minidecode.report import html, md, txt

LONG = "./some/folder/with a long name/my_[bold]kernel[/bold]_version_12.cu"


def cpu_report(vs: bool = False) -> LayerReport:
    """Times a thousand times as long, as a slow CPU's are."""
    rows = [
        dataclasses.replace(
            row,
            median_us=row.median_us * 1e3,
            p95_us=None,
            duration_us=None,
            alone_us=row.median_us * 1e3,
            vs_us=None if row.vs_us is None else row.vs_us * 1e3,
        )
        for row in layer_rows(2, vs=vs)
    ]
    env = environment(gpu=None, cpu="AMD EPYC 9654 96-Core Processor", cpu_threads=2)
    return layer_report(rows=rows, vs=vs, read_bw_gb_s=36.8, environment=env, vs_step_us=190_000.0)


def many_gemvs() -> str:
    rows = [
        dataclasses.replace(row, n=128_256, k=14_336, kernel=LONG, median_us=123_456.7)
        for row in gemv_report().rows
    ]
    return txt.gemv(gemv_report(rows=rows), plain=True)


TEXTS = {
    "layers": lambda plain: txt.layers(layer_report(), plain=plain),
    "all layers": lambda plain: txt.layers(layer_report(), layers=True, plain=plain),
    "vs": lambda plain: txt.layers(layer_report(vs=True), layers=True, plain=plain),
    "long name": lambda plain: txt.layers(layer_report(kernel=LONG, vs=True), plain=plain),
    "cpu": lambda plain: txt.layers(cpu_report(), layers=True, plain=plain),
    "cpu vs": lambda plain: txt.layers(cpu_report(vs=True), layers=True, plain=plain),
    "runs": lambda plain: txt.runs([run(), run(kernel=LONG, avg_ts=28123.2)], plain=plain),
    "ab": lambda plain: txt.ab(ab_result(), plain=plain),
    "ab wrong": lambda plain: txt.ab(
        ab_result(gates=gates(passed=False, rel_err=None, reason="logits are not finite")),
        plain=plain,
    ),
    "gemv": lambda plain: txt.gemv(gemv_report(), plain=plain),
}


@pytest.mark.parametrize("name", TEXTS)
def test_fits_eighty_columns_and_cuts_nothing_off(name: str) -> None:
    text = TEXTS[name](True)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    assert text.endswith("\n")
    assert "\n\n\n" not in text
    assert "\x1b" not in text


def test_a_table_of_large_gemvs_fits_too() -> None:
    text = many_gemvs()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    assert "123,457" in text


@pytest.mark.parametrize("name", ["layers", "runs", "ab"])
def test_colour_only_where_it_is_wanted(name: str) -> None:
    coloured = TEXTS[name](False)
    assert "\x1b[" in coloured
    without = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in without.splitlines()] == TEXTS[name](True).splitlines()


def columns(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_layers_show_totals_that_add_up() -> None:
    report = layer_report()
    text = txt.layers(report, plain=True)
    lines = {columns(line)[0]: columns(line) for line in text.splitlines() if line.strip()}
    shown = [float(lines[total.name][2]) for total in report.by_kind]
    assert sum(shown) == pytest.approx(float(lines["sum"][2]), abs=0.05)
    rest = float(lines["unexplained"][1])
    assert float(lines["sum"][2]) + rest == pytest.approx(float(lines["step"][1]), abs=0.02)
    assert lines["qkv"][1] == "16"
    assert "128 tokens in the cache" in text
    assert "read ceiling 4,265 GB/s, measured" in text
    assert "layers.3" not in text


def test_every_op_has_its_line_when_asked() -> None:
    report = layer_report()
    text = txt.layers(report, layers=True, plain=True)
    for row in report.rows:
        number = "" if row.layer is None else f"{row.layer} +"
        name = row.name.removeprefix(f"layers.{row.layer}.")
        assert re.search(rf"^ +{number}{re.escape(name)} ", text, re.MULTILINE), row.name


def test_a_rest_below_zero_gets_a_word() -> None:
    report = layer_report()
    slower = layer_report(step_us=report.sum_us * 0.96, recorded_step_us=654.32)
    for write in (partial(txt.layers, plain=True), md.layers, html.layers):
        assert "below zero" not in write(report)
        assert "below zero: with every op recorded the step took 654.32 µs" in write(slower)
    assert re.search(r"^ sum .* 104\.2 ", txt.layers(slower, plain=True), re.MULTILINE)


def test_a_step_in_more_than_one_engine_says_so() -> None:
    rows = layer_rows()
    rows[1] = dataclasses.replace(rows[1], engine="composed")
    said = f"composed: {rows[1].kind}; all else: fused"
    fallback = run(engine="mixed")
    for table, bench in (
        (txt.layers(layer_report(rows, engine="mixed"), plain=True), txt.runs([fallback])),
        (md.layers(layer_report(rows, engine="mixed")), md.runs([fallback])),
    ):
        assert said in table
        assert "fused (mixed)" in bench
        assert "mixed: ops in more than one engine; report says which" in bench
    for runs in (txt.runs, md.runs):
        assert "mixed" not in runs([run(), run(kernel="cublas", engine="composed")])
        assert "composed" not in runs([run(kernel="cublas", engine="composed")])


def test_where_alone_the_other_kernel_runs_is_in_the_headline() -> None:
    report = layer_report(vs=True, only=("down", "o"))
    for text in (txt.layers(report, plain=True), md.layers(report), html.layers(report)):
        assert " against cublas in down, o" in " ".join(text.split())


def test_one_repeat_has_no_spread() -> None:
    once = run(samples_ns=(4.7e8,), samples_ts=(272.3,))
    for runs in (txt.runs, md.runs):
        assert "±" in runs([run()])
        assert "±" not in runs([once])


def test_much_that_is_unexplained_gets_a_word() -> None:
    rows = layer_rows(1)
    total = sum(row.median_us for row in rows)
    for share, told in ((0.98, False), (0.9, True)):
        report = layer_report(rows, step_us=total / share)
        for text in (txt.layers(report, plain=True), md.layers(report)):
            assert ("10.0 % is unexplained: the machine was busy" in text) is told


def test_a_share_above_the_ceiling_gets_a_word() -> None:
    text = txt.layers(layer_report(), plain=True)
    assert "106.3*" in text
    assert "* above 100 %: reading began" in text
    honest = txt.layers(layer_report(read_bw_gb_s=9000.0), plain=True)
    assert "*" not in honest
    assert "* above the measured" in txt.runs([run(pct_read_bw=104.2)], plain=True)
    assert "*" not in txt.runs([run(pct_read_bw=100.04)], plain=True)


def test_compared_layers_show_both_and_the_difference() -> None:
    text = txt.layers(layer_report(vs=True), plain=True)
    assert "against cublas" in text
    assert "+12.77" in text
    assert "-0.85" in text
    assert "cublas: step 905.00 µs, 1.295 times as long" in text


def test_runs_without_a_device_time_show_a_dash() -> None:
    prompt = run(n_prompt=512, n_gen=0, n_depth=0, step_us=None, gb_s=None, pct_read_bw=None)
    text = txt.runs([run(), prompt], plain=True)
    assert "271.34 ± 0.42" in text
    assert re.search(r"pp512 +271\.34 ± 0\.42 +– +–", text)
    assert txt.runs([], plain=True) == ""


def test_ab_ends_with_the_verdict() -> None:
    result = ab_result()
    text = txt.ab(result, plain=True)
    assert text.rstrip().splitlines()[-1] == result.sentence
    assert "A against itself: ratio 1.000" in text
    assert "before: 1980 MHz, 41 °C, 310 W; after" in text
    no = ab_result(verdict=NO_DIFFERENCE, state_before=GpuState(), state_after=GpuState())
    quiet = txt.ab(no, plain=True)
    assert "no difference between" in quiet
    assert "MHz" not in quiet
    some = txt.ab(ab_result(only=("down", "o")), plain=True, width=120)
    assert "3 pairs, only down, o swapped" in some


def test_a_failed_gate_says_why() -> None:
    text = TEXTS["ab wrong"](True)
    assert "no: logits" in text


def test_what_a_cache_served_is_no_share_of_memory() -> None:
    text = txt.gemv(gemv_report(), plain=True)
    line = next(line for line in text.splitlines() if "8,530" in line)
    assert "cache" in line
    assert "200" not in line
    assert "the weights came out of a cache" in text
    assert "triton_rowblock: triton is not installed" in text


def test_names_are_not_markup() -> None:
    assert LONG in txt.runs([run(kernel=LONG)], plain=True, width=200)
    smile = txt.layers(layer_report(model=":smile: [red]m"), plain=True)
    assert ":smile: [red]m" in smile
