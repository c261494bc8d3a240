"""The formats for programs: JSON, JSON lines, CSV, trace events; and the finding of formats."""

from __future__ import annotations

import csv as stdlib_csv
import io
import json as stdlib_json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from report_samples import (
    ab_result,
    environment,
    gemv_report,
    layer_report,
    layer_rows,
    run,
)

from minidecode import report
from minidecode.errors import UsageError
from minidecode.records import (
    ABResult,
    GemvReport,
    LayerReport,
    Run,
)
from minidecode.report import csv, json, jsonl, trace


def test_json_is_read_back_as_the_same_record() -> None:
    def parsed(text: str) -> Any:
        assert text.endswith("\n")
        return stdlib_json.loads(text, parse_constant=lambda word: pytest.fail(word))

    assert LayerReport.from_dict(parsed(json.layers(layer_report()))) == layer_report()
    assert ABResult.from_dict(parsed(json.ab(ab_result()))) == ab_result()
    assert GemvReport.from_dict(parsed(json.gemv(gemv_report()))) == gemv_report()
    odd = ab_result(command='ab "Grüße"\n')
    assert ABResult.from_dict(parsed(json.ab(odd))) == odd
    runs = [run(), run(n_depth=4096)]
    assert [Run.from_dict(item) for item in parsed(json.runs(runs))] == runs
    lines = jsonl.runs(runs).splitlines()
    assert [Run.from_dict(parsed(f"{line}\n")) for line in lines] == runs


def table(text: str) -> list[dict[str, str]]:
    return list(stdlib_csv.DictReader(io.StringIO(text)))


def test_csv_has_a_line_a_row() -> None:
    rows = table(csv.layers(layer_report(vs=True)))
    records = layer_report(vs=True).rows
    assert [row["name"] for row in rows] == [record.name for record in records]
    assert rows[0]["shape"] == "3072x2048"
    assert rows[0]["kernels"] == "gemv_qkv"
    assert [float(row["median_us"]) for row in rows] == [record.median_us for record in records]
    assert rows[-1]["layer"] == ""


def test_csv_of_runs_and_gemvs() -> None:
    rows = table(csv.runs([run(kernel='my "best", kernel\n.cu'), run(step_us=None)]))
    assert rows[0]["kernel"] == 'my "best", kernel\n.cu'
    assert rows[1]["step_us"] == ""
    assert float(rows[0]["avg_ts"]) == run().avg_ts
    assert "environment" not in rows[0]
    assert "samples_ns" not in rows[0]
    assert csv.runs([]) == ""
    gemvs = table(csv.gemv(gemv_report()))
    assert [row["served_from_cache"] for row in gemvs].count("True") == 1
    assert gemvs[-1]["reason"] == "triton is not installed"


# --- trace ----------------------------------------------------------------------------------------


def trace_of(result: LayerReport) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    document = stdlib_json.loads(trace.layers(result))
    return document, [event for event in document["traceEvents"] if event["ph"] == "X"]


def test_trace_events_are_complete_and_named() -> None:
    result = layer_report()
    document, complete = trace_of(result)
    for event in complete:
        assert set(event) == {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"}
        assert event["ts"] >= 0
        assert event["dur"] > 0
    rest = [event for event in document["traceEvents"] if event["ph"] != "X"]
    assert {event["ph"] for event in rest} == {"M"}
    named = {event["tid"] for event in rest if event["name"] == "thread_name"}
    assert named == {event["tid"] for event in complete}
    assert document["otherData"]["environment"] == environment().to_dict()
    other = stdlib_json.loads(trace.layers(layer_report(vs=True)))["otherData"]
    assert (other["vs"], other["vs_step_us"]) == ("cublas", 905.0)


def test_trace_shows_the_step_with_layers_around_their_ops() -> None:
    result = layer_report()
    _, complete = trace_of(result)
    step = [event for event in complete if event["tid"] == 1]
    ops = [event for event in step if event["cat"] != "layer"]
    layers = [event for event in step if event["cat"] == "layer"]
    assert [event["name"] for event in ops] == [row.name for row in result.rows]
    assert sum(event["dur"] for event in ops) == pytest.approx(result.sum_us, abs=1e-3)
    assert len(layers) == 16
    assert ops[0]["args"]["bytes"] == result.rows[0].bytes
    for before, after in pairwise(ops):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=1e-4)
    for event in ops[:-2]:
        around = [
            layer
            for layer in layers
            if layer["ts"] <= event["ts"] + 1e-4
            and event["ts"] + event["dur"] <= layer["ts"] + layer["dur"] + 1e-4
        ]
        assert [layer["name"] for layer in around] == [f"layer {event['args']['layer']}"]


def test_trace_puts_overlapping_kernels_on_tracks_of_their_own() -> None:
    result = layer_report()
    _, complete = trace_of(result)
    kernels = [event for event in complete if event["tid"] > 1]
    assert len(kernels) == len(result.rows)
    assert len({event["tid"] for event in kernels}) > 1  # they do overlap in this report
    for track in {event["tid"] for event in kernels}:
        events = sorted((e for e in kernels if e["tid"] == track), key=lambda e: e["ts"])
        for before, after in pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-4
    durations = sum(row.duration_us or 0 for row in result.rows)
    assert sum(event["dur"] for event in kernels) == pytest.approx(durations, abs=1e-3)


def test_trace_without_durations_has_only_the_step() -> None:
    rows = [row for row in layer_rows(1) if row.duration_us]
    bare = [type(row)(**{**row.to_dict(), "duration_us": None}) for row in rows]
    _, complete = trace_of(layer_report(rows=bare))
    assert {event["tid"] for event in complete} == {1}


# --- finding formats ------------------------------------------------------------------------------


def test_formats_are_found_by_their_files() -> None:
    assert report.formats("layers") == ["csv", "html", "json", "md", "png", "trace", "txt"]
    assert report.formats("runs") == ["csv", "json", "jsonl", "md", "txt"]
    assert report.formats("ab") == ["json", "txt"]
    assert report.formats("gemv") == ["csv", "json", "md", "png", "txt"]
    assert report.writer("csv", "runs") is csv.runs
    with pytest.raises(UsageError, match="no format 'yaml' for runs; there are csv, json, jsonl"):
        report.writer("yaml", "runs")
    with pytest.raises(UsageError, match="no format 'html' for runs"):
        report.writer("html", "runs")


def test_a_new_format_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokens.py").write_text(
        "def runs(results):\n    return ' '.join(str(run.avg_ts) for run in results)\n"
    )
    monkeypatch.setattr(report, "__path__", [*report.__path__, str(tmp_path)])
    assert "tokens" in report.formats("runs")
    assert "tokens" not in report.formats("layers")
    assert report.writer("tokens", "runs")([run(), run()]) == "271.34 271.34"
