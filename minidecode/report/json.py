"""JSON of any record: what `from_dict` of the record reads back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from minidecode.records import ABResult, GemvReport, LayerReport, Record, Run


def _text(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def record(result: Record) -> str:
    """One record as one JSON object."""
    return _text(result.to_dict())


def runs(results: Sequence[Run]) -> str:
    """A list of objects, as llama-bench prints it."""
    return _text([run.to_dict() for run in results])


def layers(report: LayerReport) -> str:
    return record(report)


def ab(result: ABResult) -> str:
    return record(result)


def gemv(report: GemvReport) -> str:
    return record(report)
