"""CSV: a header line, then a line a row, RFC 4180 quoting, empty where nothing is known."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from minidecode.records import GemvReport, LayerReport, Run

# Objects and lists of samples have no place in a cell; JSON has them.
_LEFT_OUT = {"environment", "samples_ns", "samples_ts"}


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    out = io.StringIO()
    names = [name for name in rows[0] if name not in _LEFT_OUT]
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(names)
    for row in rows:
        lines.writerow([_cell(row[name]) for name in names])
    return out.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return (
            "x".join(map(str, value)) if all(isinstance(v, int) for v in value) else ";".join(value)
        )
    return value


def layers(report: LayerReport) -> str:
    """A line an op; kernels are joined by `;`, a shape by `x`."""
    return _table([row.to_dict() for row in report.rows])


def runs(results: Sequence[Run]) -> str:
    """A line a run in llama-bench's names, then ours."""
    return _table([run.to_dict() for run in results])


def gemv(report: GemvReport) -> str:
    """A line a kernel and shape."""
    return _table([row.to_dict() for row in report.rows])
