"""Tests that need a tool: skipped where it is missing, but for CI, which has them all."""

from __future__ import annotations

import os
import shutil

import pytest


def present(missing: str | None) -> pytest.MarkDecorator:
    """A mark for tests that need what `missing` says is not there; None: it is."""
    return pytest.mark.skipif(missing is not None and not os.environ.get("CI"), reason=str(missing))


nvcc = present(None if shutil.which("nvcc") else "no nvcc on PATH")
