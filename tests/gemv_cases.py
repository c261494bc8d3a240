"""One GEMV call on the host shim, judged against the FP64 dot product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from shim import STREAM, HostKernelError, Runner

FUNCTIONS = {"fp16": ("minidecode_gemv", np.float16), "fp32": ("minidecode_gemv_f32", np.float32)}
NOT_SUPPORTED = 801  # cudaErrorNotSupported


@dataclass(frozen=True)
class Case:
    """A shape and where its arrays start: offsets are elements past a 16-byte boundary."""

    n: int
    k: int
    w_offset: int = 0
    x_offset: int = 0
    y_offset: int = 0
    order: int = 0
    dependent: bool = True  # x comes from the previous kernel
    capability: tuple[int, int] = (9, 0)
    max_groups: int = 0
    magnitude: float = 1.0
    seed: int = 0


def _place(values: np.ndarray, offset: int) -> np.ndarray:
    """A copy that starts `offset` elements past a 16-byte boundary."""
    storage = np.empty(values.size + offset + 16, values.dtype)
    start = -storage.ctypes.data // values.itemsize % (16 // values.itemsize) + offset
    placed = storage[start : start + values.size].reshape(values.shape)
    placed[...] = values
    return placed


def wrong(library: Runner, dtype: str, case: Case) -> str | None:
    """What is wrong with the kernel's answer to this case, or None.

    A NotSupported status is right if nothing was launched and y is untouched. Rows that were not
    run because of max_groups are not judged, but for the first and the last.
    """
    function, element = FUNCTIONS[dtype]
    random = np.random.default_rng(case.seed)
    shape = (case.n, case.k)
    w = _place(random.standard_normal(shape, np.float32).astype(element), case.w_offset)
    x = _place(
        (random.standard_normal(case.k, np.float32) * case.magnitude).astype(element),
        case.x_offset,
    )
    y = _place(np.full(case.n, np.nan, element), case.y_offset)
    w.flags.writeable = x.flags.writeable = False
    try:
        status = library.call(
            function,
            *(y, w, x, case.n, case.k, STREAM),
            late=[x] if case.dependent else [],
            order=case.order,
            capability=case.capability,
            max_groups=case.max_groups,
        )
    except HostKernelError as error:
        return str(error)
    if status == NOT_SUPPORTED:
        if library.launches or not np.isnan(y).all():
            return "NotSupported, but something was launched or written"
        return None
    if status != 0:
        return f"status {status}"

    rows = np.arange(case.n)
    if case.max_groups:
        if np.isnan(y[[0, -1]]).any():
            return f"first and last row: {y[0]}, {y[-1]}"
        rows = np.flatnonzero(~np.isnan(y))
    wide_x = x.astype(np.float64)
    expected = w[rows].astype(np.float64) @ wide_x
    # Terms that cancel leave FP32 rounding of the terms, not of the sum.
    rounding = 1e-6 * (np.abs(w[rows].astype(np.float64)) @ np.abs(wide_x))
    allowed = 1e-3 * np.abs(expected) + rounding + np.finfo(element).smallest_subnormal
    bad = np.flatnonzero(~(np.abs(y[rows] - expected) <= allowed))
    if bad.size:
        i = bad[0]
        return f"{bad.size} wrong rows, first {rows[i]}: {y[rows[i]]}, not {expected[i]}"
    return None
