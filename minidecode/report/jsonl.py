"""JSON lines: one object a line, so that runs can be appended to a file and streamed."""

from __future__ import annotations

import json
from collections.abc import Sequence

from minidecode.records import Run


def runs(results: Sequence[Run]) -> str:
    """A line a run, complete in itself."""
    return "".join(
        json.dumps(run.to_dict(), ensure_ascii=False, allow_nan=False) + "\n" for run in results
    )
