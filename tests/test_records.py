"""Records survive JSON unchanged, refuse what is not a number, and LayerReport's sums add up."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from report_samples import (
    ab_result,
    check_result,
    environment,
    gemv_report,
    generate_result,
    layer_report,
    layer_row,
    run,
)

from minidecode.errors import MinidecodeError
from minidecode.records import (
    NO_DIFFERENCE,
    SCHEMA_VERSION,
    SLOWER,
    Environment,
    GemvRow,
    GenerateResult,
    GpuState,
    LayerReport,
    Record,
    Run,
    gb_per_s,
    is_above,
    percent,
)

DOCUMENTS = [
    environment(),
    generate_result(),
    run(),
    layer_report(),
    layer_report(vs=True),
    ab_result(),
    gemv_report(),
    check_result(),
]


@pytest.mark.parametrize("record", DOCUMENTS, ids=lambda record: type(record).__name__)
def test_round_trip_through_json(record: Record) -> None:
    text = json.dumps(record.to_dict(), allow_nan=False)
    again = type(record).from_dict(json.loads(text))
    assert again == record
    assert json.loads(text)["schema_version"] == SCHEMA_VERSION


@pytest.mark.parametrize("record", DOCUMENTS[1:], ids=lambda record: type(record).__name__)
def test_every_document_carries_its_environment(record: Record) -> None:
    assert Environment.from_dict(record.to_dict()["environment"]) == environment()


def test_generate_result_has_exactly_the_promised_fields() -> None:
    promised = (
        "text token_ids stop_reason n_prompt n_gen load_s build_s prefill_s ttft_s decode_tok_s "
        "step_us gb_s read_bw_gb_s pct_read_bw peak_memory_bytes logits_hash kernel engine model "
        "environment schema_version"
    )
    assert list(generate_result().to_dict()) == promised.split()


def test_run_has_llama_bench_names_and_ours() -> None:
    promised = (
        "model_type model_size model_n_params n_prompt n_gen n_depth avg_ns stddev_ns avg_ts "
        "stddev_ts samples_ns samples_ts gpu_info test_time build_commit kernel engine step_us "
        "bytes_per_token gb_s read_bw_gb_s pct_read_bw peak_memory_bytes schema_version environment"
    )
    assert set(promised.split()) <= set(run().to_dict())


@pytest.mark.parametrize(
    ("n_prompt", "n_gen", "n_depth", "name"),
    [
        (512, 0, 0, "pp512"),
        (0, 128, 0, "tg128"),
        (0, 128, 4096, "tg128 @ d4096"),
        (64, 16, 0, "pp64+tg16"),
    ],
)
def test_run_names_its_test_as_llama_bench_does(
    n_prompt: int, n_gen: int, n_depth: int, name: str
) -> None:
    assert run(n_prompt=n_prompt, n_gen=n_gen, n_depth=n_depth).test == name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_becomes_null_or_is_refused(bad: float) -> None:
    assert generate_result(gb_s=bad).gb_s is None
    assert GemvRow(kernel="k", n=1, k=1, dtype="fp16", bytes=2, rel_err=bad).rel_err is None
    with pytest.raises(MinidecodeError, match=r"LayerRow\.median_us"):
        layer_row(median_us=bad)
    with pytest.raises(MinidecodeError, match=r"Run\.samples_ns"):
        run(samples_ns=(1.0, bad))


def test_from_dict_ignores_what_it_does_not_know_and_names_what_is_wrong() -> None:
    data = run().to_dict()
    assert Run.from_dict({**data, "added_later": 1}) == run()

    def without(key: str) -> dict[str, Any]:
        return {name: value for name, value in data.items() if name != key}

    with pytest.raises(MinidecodeError, match="missing avg_ts"):
        Run.from_dict(without("avg_ts"))
    with pytest.raises(MinidecodeError, match=r"Run\.n_gen should be int, is str"):
        Run.from_dict({**data, "n_gen": "128"})
    with pytest.raises(MinidecodeError, match=r"Run\.n_gen should be int, is bool"):
        Run.from_dict({**data, "n_gen": True})
    with pytest.raises(MinidecodeError, match=r"Run\.samples_ts\[1\] should be float, is NoneType"):
        Run.from_dict({**data, "samples_ts": [1, None]})
    with pytest.raises(MinidecodeError, match=r"Run\.samples_ts should be a list"):
        Run.from_dict({**data, "samples_ts": 1.0})
    with pytest.raises(MinidecodeError, match=r"Run\.environment should be an object"):
        Run.from_dict({**data, "environment": "a GPU"})
    with pytest.raises(MinidecodeError, match="schema_version 2 is newer"):
        Run.from_dict({**data, "schema_version": SCHEMA_VERSION + 1})


def test_a_whole_number_in_json_is_a_float_again() -> None:
    data = {**generate_result().to_dict(), "load_s": 2}
    assert isinstance(GenerateResult.from_dict(data).load_s, float)


def test_layer_report_adds_up() -> None:
    rows = [
        layer_row(name="layers.0.attn.qkv", kind="qkv", layer=0, bytes=4_000_000, median_us=2.0),
        layer_row(name="layers.0.mlp.down", kind="down", layer=0, bytes=2_000_000, median_us=1.0),
        layer_row(name="layers.1.attn.qkv", kind="qkv", layer=1, bytes=4_000_000, median_us=3.0),
        layer_row(name="head", kind="head", layer=None, bytes=8_000_000, median_us=4.0),
    ]
    report = layer_report(rows=rows, step_us=12.5, read_bw_gb_s=4000.0)
    assert report.sum_us == 10.0
    assert report.unexplained_us == 2.5
    assert report.unexplained_pct == 20.0
    faster = layer_report(rows=rows, step_us=8.0)  # than its ops while they were recorded
    assert (faster.unexplained_us, faster.unexplained_pct) == (-2.0, -25.0)
    assert report.bytes == 18_000_000
    assert report.gb_s == pytest.approx(1440.0)
    assert report.pct_read_bw == pytest.approx(36.0)
    first = report.rows[0]
    assert first.gb_s == pytest.approx(2000.0)
    assert first.pct_read_bw == pytest.approx(50.0)
    assert not any(part.above_ceiling for part in (*report.rows, *report.by_kind))
    slow = layer_report(rows=rows, read_bw_gb_s=1990.0)
    assert [part.above_ceiling for part in (*slow.rows, *slow.by_kind, *slow.by_layer)] == [
        (part.gb_s or 0) > 1990.0 for part in (*slow.rows, *slow.by_kind, *slow.by_layer)
    ]
    assert slow.rows[0].above_ceiling
    assert first.pct_step == pytest.approx(16.0)
    by_kind = {total.name: (total.ops, total.bytes, total.us) for total in report.by_kind}
    assert by_kind == {
        "qkv": (2, 8_000_000, 5.0),
        "down": (1, 2_000_000, 1.0),
        "head": (1, 8_000_000, 4.0),
    }
    assert [total.name for total in report.by_layer] == ["0", "1", "other"]
    for totals in (report.by_kind, report.by_layer):
        assert sum(total.us for total in totals) == pytest.approx(report.sum_us)
        assert sum(total.bytes for total in totals) == report.bytes
        assert sum(total.ops for total in totals) == len(rows)
        assert sum(total.pct_step or 0 for total in totals) == pytest.approx(80.0)


def test_layer_report_compares_with_the_other_kernel() -> None:
    rows = [
        layer_row(name="a", kind="o", layer=0, median_us=2.0, vs_us=3.0),
        layer_row(name="b", kind="o", layer=1, median_us=2.0, vs_us=1.5),
        layer_row(name="c", kind="head", layer=None, median_us=2.0, vs_us=None),
    ]
    report = layer_report(rows=rows, step_us=6.0)
    assert [row.delta_us for row in report.rows] == [1.0, -0.5, None]
    totals = {total.name: (total.vs_us, total.delta_us) for total in report.by_kind}
    assert totals == {"o": (4.5, 0.5), "head": (None, None)}


def test_layer_report_needs_a_step_and_copes_without_a_ceiling() -> None:
    with pytest.raises(MinidecodeError, match="nothing to take shares of"):
        layer_report(step_us=0.0)
    report = layer_report(read_bw_gb_s=None)
    assert report.pct_read_bw is None
    assert all(row.pct_read_bw is None and row.gb_s for row in report.rows)


def test_zero_times_divide_into_none() -> None:
    assert gb_per_s(10, 0.0) is None
    assert gb_per_s(10, None) is None
    assert gb_per_s(0, 1.0) is None
    assert gb_per_s(4000, 1.0) == 4.0
    assert percent(1.0, 0.0) is None
    assert percent(None, 2.0) is None
    assert percent(1.0, 2.0) == 50.0
    assert [is_above(share) for share in (None, 99.9, 100.0, 100.1)] == [False] * 3 + [True]
    assert LayerReport.from_dict(layer_report().to_dict()).rows[0].gb_s


def test_ab_verdict_in_words() -> None:
    assert ab_result().sentence == (
        "half2_stream is 1.231x as fast as cublas (95 % interval 1.222–1.240)"
    )
    same = ab_result(verdict=NO_DIFFERENCE, ratio=1.001, ratio_low=0.999, ratio_high=1.003)
    assert same.sentence == (
        "no difference between half2_stream and cublas: ratio 1.001 (95 % interval 0.999–1.003)"
    )
    slower = ab_result(verdict=SLOWER, ratio=0.9, ratio_low=0.89, ratio_high=0.91, only=("down",))
    assert slower.sentence.startswith("half2_stream in down is 0.900x as fast as cublas")
    close = ab_result(verdict=SLOWER, ratio=0.99747, ratio_low=0.9953, ratio_high=0.99967)
    assert "is 0.9975x as fast" in close.sentence
    assert close.sentence.endswith("(95 % interval 0.9953–0.9997)")


def test_hardware_and_state_in_words() -> None:
    assert environment().hardware == "NVIDIA H200"
    assert environment(gpu=None, cpu="EPYC", cpu_threads=1).hardware == "EPYC, 1 thread"
    assert environment(gpu=None, cpu="EPYC", cpu_threads=None).hardware == "EPYC"
    assert GpuState().describe() == "unknown"
    state = GpuState(sm_clock_mhz=1980.0, temperature_c=41.0, throttle="power cap")
    assert state.describe() == "1980 MHz, 41 °C, throttled: power cap"
