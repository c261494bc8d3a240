"""Trace events of one decode step, for Perfetto (ui.perfetto.dev) and chrome://tracing.

The first track has the layers and in them the ops, each as long as it held up the step. The tracks
below have the kernels themselves from start to end; there are several because they overlap.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from minidecode.records import LayerReport, LayerRow

_PID = 1
_STEP = 1  # the first kernels' track comes after it
_SLACK_US = 1e-6  # rounding must not make neighbours overlap


def layers(report: LayerReport) -> str:
    """JSON with `traceEvents`: complete events ("X"), `ts` and `dur` in microseconds."""
    events: list[dict[str, Any]] = []
    ends = list(itertools.accumulate(row.median_us for row in report.rows))
    starts = [0.0, *ends[:-1]]
    placed = list(zip(report.rows, starts, ends, strict=True))

    for layer, group in itertools.groupby(placed, key=lambda item: item[0].layer):
        if layer is not None:
            members = list(group)
            begin, end = members[0][1], members[-1][2]
            events.append(_event(f"layer {layer}", "layer", _STEP, begin, end - begin, {}))
    lanes: list[float] = []
    for row, start, end in placed:
        args = _args(row)
        events.append(_event(row.name, row.kind, _STEP, start, end - start, args))
        if row.duration_us is not None:
            begin = end - row.duration_us
            lane = next(
                (i for i, busy in enumerate(lanes) if busy <= begin + _SLACK_US), len(lanes)
            )
            lanes[lane : lane + 1] = [end]
            name = ", ".join(row.kernels) or row.name
            track = _STEP + 1 + lane
            events.append(_event(name, row.kind, track, begin, row.duration_us, args))
    # Overlap can put the first kernel's start before zero, which viewers do not expect.
    offset = -min((event["ts"] for event in events), default=0.0)
    for event in events:
        event["ts"] = round(event["ts"] + offset, 6)
    names = ["step, by exposed time", *(f"kernels {i + 1}" for i in range(len(lanes)))]
    title = f"{report.model}, {report.kernel}, {report.depth} tokens in the cache"
    events[:0] = [
        _meta("process_name", 0, {"name": title}),
        *(_meta("thread_name", _STEP + i, {"name": name}) for i, name in enumerate(names)),
        *(_meta("thread_sort_index", _STEP + i, {"sort_index": i}) for i in range(len(names))),
    ]
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "schema_version": report.schema_version,
            "model": report.model,
            "kernel": report.kernel,
            "engine": report.engine,
            "depth": report.depth,
            "step_us": report.step_us,
            "vs": report.vs,
            "vs_step_us": report.vs_step_us,
            "unexplained_us": report.unexplained_us,
            "recorded_step_us": report.recorded_step_us,
            "read_bw_gb_s": report.read_bw_gb_s,
            "command": report.command,
            "environment": report.environment.to_dict(),
        },
    }
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


def _event(
    name: str, category: str, track: int, start: float, duration: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": _PID,
        "tid": track,
        "ts": start,
        "dur": round(duration, 6),
        "args": args,
    }


def _meta(name: str, track: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": _PID, "tid": track, "args": args}


def _args(row: LayerRow) -> dict[str, Any]:
    """What is known of the op and is not said by the event's own name and times."""
    data = row.to_dict()
    return {key: data[key] for key in data if key not in ("name", "kind") and data[key] is not None}
