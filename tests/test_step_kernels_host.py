"""The decode step's kernels on the host shim, against FP64, under AddressSanitizer and UBSan."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import needs
import numpy as np
import numpy.typing as npt
import pytest
import shim
import step_reference as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shim import STREAM, HostKernelError, Runner, host_library

from minidecode.kernels import step
from minidecode.kernels.tiles import Device, Heads, Tile, default_split
from minidecode.plan.state import sampling_bytes
from minidecode.sampling import Sampling, probabilities

pytestmark = needs.present(shim.unavailable())

NOT_SUPPORTED = 801  # cudaErrorNotSupported
EPS = 1e-5
STEP = shim.CUDA / "step"

# A tile of every kind: few and many rows and threads, unrolled, staged, both at once.
TILES = (
    Tile(32, 4, 3),
    Tile(32, 2, 1, 2),
    Tile(64, 4, 1),
    Tile(96, 4, 2),
    Tile(128, 8, 1),
    Tile(256, 2, 2),
    Tile(512, 4, 1),
    Tile(64, 0, 1, 2),
    Tile(128, 0, 1, 6),
    Tile(256, 4, 2, 12, 2),
    Tile(128, 2, 1, 2),
)
FILES = (step.NORM_LINEAR, step.LINEAR_RESIDUAL, step.NORM_SWIGLU, step.NORM_LOGITS)


@functools.cache
def library(stem: str) -> Runner:
    return host_library(STEP / f"{stem}.cu")


@functools.cache
def linear_library(stem: str) -> Runner:
    """A fused linear file compiled with all of TILES."""
    header = shim.CUDA / "include" / "minidecode" / "fused_linear.cuh"
    spelled = ", ".join(tile.spelled for tile in TILES)
    text, found = re.subn(
        r"(#else\n#define MINIDECODE_TILES )[^\n]*", rf"\g<1>{spelled}", header.read_text()
    )
    assert found == 1
    return host_library(STEP / f"{stem}.cu", overlay={header: text})


def address(array: npt.NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data


def aligned(values: npt.NDArray[Any], offset: int = 0) -> npt.NDArray[Any]:
    """A copy that starts `offset` elements past a 16-byte boundary."""
    storage = np.empty(values.size + offset + 16, values.dtype)
    start = -storage.ctypes.data // values.itemsize % (16 // values.itemsize) + offset
    placed = storage[start : start + values.size].reshape(values.shape)
    placed[...] = values
    return placed


def constant(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Marks what a kernel may not write."""
    array.flags.writeable = False
    return array


# --- fused linear layers --------------------------------------------------------------------------


@dataclass(frozen=True)
class Linear:
    """A layer of one of FILES; `rows` is the length of the result (SwiGLU has two for each)."""

    stem: str
    tile: int
    rows: int
    k: int
    bias: bool = False
    order: int = 0
    magnitude: float = 1.0
    gain: float = 1.0
    capability: tuple[int, int] = (9, 0)
    seed: int = 0


def wrong_linear(c: Linear) -> str:
    """What is wrong with the kernel's answer, or ""."""
    random = np.random.default_rng(c.seed)
    n = 2 * c.rows if c.stem == step.NORM_SWIGLU else c.rows

    def halves(*shape: int, scale: float = 1.0, add: float = 0.0) -> npt.NDArray[np.float16]:
        return aligned((random.standard_normal(shape) * scale + add).astype(np.float16))

    w = constant(halves(n, c.k, scale=c.k**-0.5))
    x = constant(halves(c.k, scale=c.magnitude))
    norm = None if c.stem == step.LINEAR_RESIDUAL else halves(c.k, scale=0.2, add=c.gain)
    bias = constant(halves(n)) if c.bias else None
    y = np.full(c.rows, np.nan, np.float16)
    logits = best = None
    late = [x]
    if c.stem == step.LINEAR_RESIDUAL:
        y = halves(c.rows)
        late.append(y)
    if c.stem == step.NORM_LOGITS:
        logits, best = np.full(n, np.nan, np.float32), np.zeros(1, np.uint64)
        late += [logits, best]
    before = y.copy()

    inputs, norm_scale = ref.wide(x), 1.0
    if norm is not None:
        scaled, norm_scale = step.scaled_norm(torch.from_numpy(norm))
        norm = constant(aligned(scaled.numpy()))
        inputs = ref.half_rms_norm(x, norm, EPS) / norm_scale
    arrays = [None if c.stem == step.NORM_LOGITS else y, w, x, norm, bias, logits, best]
    args = step._FusedLinear(*map(address, arrays), n, c.k, EPS, norm_scale)
    lib = linear_library(c.stem)
    try:
        status = lib.call(
            "minidecode_fused_linear",
            args,
            c.tile,
            STREAM,
            buffers=[a for a in arrays if a is not None],
            late=late,
            order=c.order,
            capability=c.capability,
        )
    except HostKernelError as error:
        return str(error)
    if status == NOT_SUPPORTED:
        if TILES[c.tile].staged and c.capability < (9, 0) and not lib.launches:
            return ""
        return "NotSupported"
    if status != 0:
        return f"status {status}"

    v = ref.linear(w, inputs, bias)
    terms = np.abs(ref.wide(w)) @ np.abs(inputs)
    if c.stem == step.LINEAR_RESIDUAL:
        return ref.wrong(y, before + v, terms + np.abs(before))
    if c.stem == step.NORM_SWIGLU:
        gate, up = np.split(v, 2)
        return ref.wrong(
            y, ref.silu(gate) * up, np.split(terms, 2)[0] * np.abs(up) + terms[c.rows :]
        )
    if c.stem == step.NORM_LINEAR:
        return ref.wrong(y, v, terms)
    assert logits is not None
    assert best is not None
    if int(best[0]) != ref.best(logits):
        return f"best is {int(best[0]):#x}, not {ref.best(logits):#x}"
    return ref.wrong(logits, v, terms)


@pytest.mark.parametrize("tile", range(len(TILES)), ids=[t.spelled for t in TILES])
@pytest.mark.parametrize("stem", FILES)
def test_fused_linear(stem: str, tile: int) -> None:
    # One piece of 8, fewer pieces than threads, a tail, several rounds of every tile.
    for i, k in enumerate((8, 64, 576, 1032, 2056, 8200)):
        for rows in (1, 3, 17) if k < 2000 else (5,):
            case = Linear(stem, tile, rows, k, bias=rows == 3, order=(i + rows) % 4)
            assert wrong_linear(case) == "", case


@pytest.mark.parametrize("stem", FILES)
def test_fused_linear_before_sm_90(stem: str) -> None:
    for tile in range(len(TILES)):
        for capability in ((8, 0), (7, 5)):
            case = Linear(stem, tile, 7, 576, bias=True, capability=capability)
            assert wrong_linear(case) == "", case


@settings(max_examples=40)
@given(
    case=st.builds(
        Linear,
        stem=st.sampled_from(FILES),
        tile=st.integers(0, len(TILES) - 1),
        rows=st.integers(1, 40),
        k=st.integers(1, 300).map(lambda pieces: 8 * pieces),
        bias=st.booleans(),
        order=st.integers(0, 3),
        magnitude=st.sampled_from([1e-3, 1.0, 300.0]),
        gain=st.sampled_from([0.0, 1.0, 40.0]),
        seed=st.integers(0, 2**32 - 1),
    )
)
def test_drawn_fused_linear(case: Linear) -> None:
    assert wrong_linear(case) == ""


def call_linear(
    stem: str, arrays: Sequence[Any], n: int, k: int, tile: int = 0, norm_scale: float = 1.0
) -> int:
    args = step._FusedLinear(*map(address, arrays), n, k, EPS, norm_scale)
    buffers = [a for a in arrays if a is not None]
    return linear_library(stem).call("minidecode_fused_linear", args, tile, STREAM, buffers=buffers)


@pytest.mark.parametrize("what", ["k", "alignment", "tile", "negative tile"])
def test_what_a_fused_linear_does_not_take(what: str) -> None:
    k = 12 if what == "k" else 16
    w = aligned(np.ones((4, k), np.float16), offset=what == "alignment")
    x, norm, y = (aligned(np.ones(s, np.float16)) for s in (k, k, 4))
    tile = {"tile": len(TILES), "negative tile": -1}.get(what, 0)
    arrays = [y, w, x, norm, None, None, None]
    assert call_linear(step.NORM_LINEAR, arrays, 4, k, tile) == NOT_SUPPORTED
    assert linear_library(step.NORM_LINEAR).launches == 0


@pytest.mark.parametrize(("value", "gain"), [(300, 1), (60_000, 100), (1e-4, 3)])
def test_rms_norm_of_extreme_values_inside_a_linear(value: float, gain: float) -> None:
    """In FP16 the sum of squares would be infinite or 0, and so would the value times its gain."""
    k = 4096
    w = np.zeros((3, k), np.float16)
    w[0, 0] = w[1, k // 2] = w[2, k - 1] = 1.0
    x = np.full(k, value, np.float16)
    norm, scale = step.scaled_norm(torch.full((k,), gain, dtype=torch.float16))
    expected = (ref.half_rms_norm(x, norm.numpy(), EPS)[:3] / scale).astype(np.float16)
    y, *rest = map(aligned, (np.empty(3, np.float16), w, x, norm.numpy()))
    for tile in range(len(TILES)):
        y[:] = np.nan
        arrays = [y, *rest, None, None, None]
        assert call_linear(step.NORM_LINEAR, arrays, 3, k, tile, scale) == 0
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(("small_x", "small_norm"), [(3e-3, 1e-2), (1e-3, 3e-3), (3e-4, 3e-3)])
def test_small_inputs_and_norms_keep_their_digits(small_x: float, small_norm: float) -> None:
    """Their product would be next to the smallest numbers of FP16; compared without rounding it."""
    random = np.random.default_rng(3)
    k = 2048
    w, x, weight = (
        (random.standard_normal(shape) * scale).astype(np.float16)
        for shape, scale in (((64, k), k**-0.5), (k, small_x), (k, small_norm))
    )
    norm, scale = step.scaled_norm(torch.from_numpy(weight))
    expected = ref.linear(w, ref.rms_norm(x, weight, EPS), None)
    y, *rest = map(aligned, (np.empty(64, np.float16), w, x, norm.numpy()))
    assert call_linear(step.NORM_LINEAR, [y, *rest, None, None, None], 64, k, 0, scale) == 0
    error = np.linalg.norm(y.astype(np.float64) - expected) / np.linalg.norm(expected)
    assert error < 5e-4


def test_a_scaled_norm_has_its_greatest_element_next_to_one() -> None:
    def scaled(*values: float) -> tuple[list[float], float]:
        norm, scale = step.scaled_norm(torch.tensor(values, dtype=torch.float16))
        return norm.tolist(), scale

    assert scaled(0.5, -1.0) == ([0.5, -1.0], 1.0)
    assert scaled(2.0, -1.0) == ([1.0, -0.5], 0.5)
    assert scaled(1.0, -3.0) == ([0.25, -0.75], 0.25)
    assert scaled(65504.0) == ([65504 / 65536], 2**-16)
    assert scaled(0.25, -0.125) == ([1.0, -0.5], 4.0)
    assert scaled(2.0**-24) == ([1.0], 2.0**24)
    assert scaled(float("inf")) == ([float("inf")], 1.0)
    assert scaled(0.0) == ([0.0], 1.0)


def head(logits: Sequence[float]) -> int:
    """What the head leaves in `best` for these logits (through a weight column of them)."""
    n, k = len(logits), 8
    w = np.zeros((n, k), np.float16)
    w[:, 0] = logits
    x = np.zeros(k, np.float16)
    x[0] = 1.0
    norm = np.full(k, np.sqrt(1 / 8 + EPS), np.float32).astype(np.float16)
    best = np.zeros(1, np.uint64)
    arrays = [None, aligned(w), aligned(x), aligned(norm), None, np.empty(n, np.float32), best]
    assert call_linear(step.NORM_LOGITS, arrays, n, k) == 0
    return int(best[0])


def test_head_takes_the_first_of_equal_logits() -> None:
    assert ref.token_of(head([1, 3, 2, 3, 3, 0, 3])) == 1
    assert ref.token_of(head([-4, -3, -3, -9])) == 1
    assert ref.token_of(head([0.0] * 9)) == 0
    assert ref.token_of(head([*[-1.0] * 40, -0.5])) == 40


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_head_marks_values_that_are_not_finite(bad: float) -> None:
    for place in (0, 5, 20):
        logits = [1.0] * 21
        logits[place] = bad
        assert head(logits) == ref.NON_FINITE


# --- attention ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One call of an attention kernel; `warps` 0 is the kernel for any head size."""

    heads: int
    kv_heads: int
    head_dim: int
    position: int
    warps: int = 8
    splits: int = 1
    window: int | None = None
    norm: bool = False
    order: int = 0
    capability: tuple[int, int] = (9, 0)
    magnitude: float = 1.0
    context: int = 0  # that the call is made for; 0 is just what there is
    seed: int = 0

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The numbers of the argument structure, from the capacity on."""
        capacity = self.position + 3
        return (capacity, self.window or 0, EPS, self.splits, self.context or capacity)


@dataclass
class Cache:
    """What an attention call reads and writes."""

    qkv: npt.NDArray[np.float16]
    keys: npt.NDArray[np.float16]
    values: npt.NDArray[np.float16]
    rope: npt.NDArray[np.float32]
    out: npt.NDArray[np.float16]
    position: npt.NDArray[np.int32]
    q_norm: npt.NDArray[np.float16] | None
    k_norm: npt.NDArray[np.float16] | None
    parts: npt.NDArray[np.float32] | None
    arrived: npt.NDArray[np.uint32] | None

    def arrays(self) -> list[npt.NDArray[Any] | None]:
        """In the order of the argument structure."""
        return [
            *(self.out, self.keys, self.values, self.qkv, self.q_norm, self.k_norm, self.rope),
            *(self.position, self.parts, self.arrived),
        ]


def fill(c: Case) -> Cache:
    """Random inputs; NaN where nothing may be read: positions to come and out of the window."""
    random = np.random.default_rng(c.seed)

    def halves(*shape: int) -> npt.NDArray[np.float16]:
        return aligned(random.standard_normal(shape).astype(np.float16))

    capacity = c.position + 3
    keys, values = (halves(c.kv_heads, capacity, c.head_dim) for _ in range(2))
    first = 0 if c.window is None else max(0, c.position + 1 - c.window)
    for cache in (keys, values):
        cache[:, c.position :] = np.nan
        cache[:, :first] = np.nan
    q_norm, k_norm = (constant(aligned(halves(c.head_dim) / 4 + 1)) for _ in range(2))
    parts = np.full(c.heads * c.splits * (c.head_dim + 2), np.nan, np.float32)
    # Every head has a counter of its own in the attention for any head size.
    blocks = c.heads if c.warps == 0 else Heads(c.heads, c.kv_heads, c.head_dim).blocks
    arrived = np.zeros(blocks, np.uint32)
    return Cache(
        qkv=constant(aligned(c.magnitude * halves(c.heads + 2 * c.kv_heads, c.head_dim))),
        keys=keys,
        values=values,
        rope=constant(ref.rope_table(capacity, c.head_dim)),
        out=np.full((c.heads, c.head_dim), np.nan, np.float16),
        position=constant(np.array([c.position], np.int32)),
        q_norm=q_norm if c.norm else None,
        k_norm=k_norm if c.norm else None,
        parts=parts if c.splits > 1 else None,
        arrived=arrived if c.splits > 1 else None,
    )


def call_attention(c: Case, b: Cache) -> int:
    arrays = b.arrays()
    args = step._Attention(
        *map(address, arrays),
        *(c.heads, c.kv_heads, c.head_dim, *c.sizes),
    )
    rest = (args, STREAM) if c.warps == 0 else (args, c.warps, STREAM)
    stem = "attention_any" if c.warps == 0 else "attention"
    return library(stem).call(
        f"minidecode_{stem}",
        *rest,
        buffers=[a for a in arrays if a is not None],
        late=[b.qkv],
        order=c.order,
        capability=c.capability,
    )


def wrong_attention(c: Case) -> str:
    b = fill(c)
    before = b.keys.copy(), b.values.copy()
    try:
        status = call_attention(c, b)
    except HostKernelError as error:
        return str(error)
    if status != 0:
        return f"status {status}"
    if b.arrived is not None and b.arrived.any():
        return f"arrived is left at {b.arrived}"
    return wrong_result(c, b, before, b.qkv)


def wrong_result(c: Case, b: Cache, before: tuple[Any, Any], qkv: npt.NDArray[Any]) -> str:
    """What is wrong with the output and the cache after a call, or ""; `before` are the caches."""
    out, k, v = ref.attention(
        qkv, *before, b.rope, c.position, c.heads, c.window, b.q_norm, b.k_norm, EPS
    )
    # A result is a mean of values: its rounding is that of the values.
    scale = np.abs(ref.wide(b.values[:, : c.position + 1]))
    scale = np.nan_to_num(scale).max() * np.ones(out.size)
    said = ref.wrong(b.out, out, 100 * scale, relative=2e-3)
    if said:
        return said
    for name, cache, old, row in (
        ("keys", b.keys, before[0], k),
        ("values", b.values, before[1], v),
    ):
        said = ref.wrong(cache[:, c.position], row, 150 * np.abs(row).max() * np.ones(row.size))
        if said:
            return f"appended {name}: {said}"
        untouched = np.delete(cache, c.position, axis=1).view(np.uint16)
        if not np.array_equal(untouched, np.delete(old, c.position, axis=1).view(np.uint16)):
            return f"{name} changed beside the new row"
    return ""


GQA = ((1, 1), (3, 3), (4, 2), (9, 3), (4, 1), (5, 1), (12, 2), (7, 1), (8, 1))


@pytest.mark.parametrize(
    "head_dim", [8, 16, 32, 48, 64, 72, 80, 88, 96, 104, 112, 128, 136, 144, 192, 256]
)
def test_attention(head_dim: int) -> None:
    # Around a tile of 16, a warp's tiles, a block's pass, and beyond.
    for i, position in enumerate((0, 1, 15, 16, 17, 31, 127, 128, 255, 300)):
        heads, kv_heads = GQA[(i + head_dim // 8) % len(GQA)]
        case = Case(heads, kv_heads, head_dim, position, norm=i % 2 == 1, order=i % 4)
        assert wrong_attention(case) == "", case


@pytest.mark.parametrize("gqa", [*GQA, (16, 1), (10, 1), (24, 2), (36, 4)], ids=str)
def test_attention_of_every_ratio(gqa: tuple[int, int]) -> None:
    for case in (
        Case(*gqa, 64, 70, norm=True),
        Case(*gqa, 128, 40, warps=4, splits=3),
        Case(*gqa, 256, 40, warps=2, splits=2),
        Case(*gqa, 64, 40, splits=2, order=1),
    ):
        assert wrong_attention(case) == "", case


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 8, 16, 31, 32])
def test_splits(splits: int) -> None:
    for i, position in enumerate((0, 5, 130, 700)):  # blocks without a position, and all with some
        for head_dim, warps in (
            (64, 4),
            (64, 16),
            (104, 4),
            (128, 4),
            (256, 2),
            (100, 0),
            (130, 0),
            (320, 0),
        ):
            case = Case(3, 1, head_dim, position, warps, splits, order=(i + splits) % 4)
            assert wrong_attention(case) == "", case


@pytest.mark.parametrize("window", [1, 2, 4, 16, 33, 100])
def test_windows(window: int) -> None:
    for i, position in enumerate((0, 3, 4, 40, 101, 250)):
        for case in (
            Case(4, 2, 64, position, window=window, order=i % 4),
            Case(4, 2, 64, position, warps=4, splits=2, window=window),
            Case(4, 2, 20, position, warps=0, window=window, order=i % 4),
            Case(4, 2, 20, position, warps=0, splits=3, window=window, order=i % 4),
        ):
            assert wrong_attention(case) == "", case


@pytest.mark.parametrize("head_dim", [2, 6, 10, 20, 34, 72, 130, 160, 256, 320, 512])
def test_attention_of_any_head_size(head_dim: int) -> None:
    for i, position in enumerate((0, 1, 2, 3, 4, 50)):
        heads, kv_heads = ((1, 1), (4, 2), (6, 2), (3, 1))[i % 4]
        case = Case(*(heads, kv_heads, head_dim, position), warps=0, norm=i % 2 == 0, order=i % 4)
        assert wrong_attention(case) == "", case


@settings(max_examples=40)
@given(
    gqa=st.sampled_from([*GQA, (16, 1), (11, 1)]),
    head_dim=st.integers(1, 32).map(lambda n: 8 * n),
    position=st.integers(0, 400),
    warps=st.sampled_from([4, 8]),
    splits=st.sampled_from([1, 2, 3, 4]),
    window=st.one_of(st.none(), st.integers(1, 420)),
    norm=st.booleans(),
    order=st.integers(0, 3),
    magnitude=st.sampled_from([0.1, 1.0, 3.0]),
    context=st.sampled_from([0, 512, 131_072]),
    seed=st.integers(0, 2**32 - 1),
)
def test_drawn_attention(gqa: tuple[int, int], **fields: Any) -> None:
    case = Case(*gqa, **fields)
    assert wrong_attention(case) == "", case


@pytest.mark.parametrize(("warps", "splits"), [(0, 1), (4, 1), (8, 1), (0, 4), (8, 2)])
def test_large_scores_stay_finite(warps: int, splits: int) -> None:
    case = Case(2, 1, 128, 20, warps=warps, splits=splits)
    b = fill(case)
    for rows in (b.qkv, b.rope):
        rows.flags.writeable = True
    b.qkv[:3] = 200.0  # a score of 200 * 200 * 128 / sqrt(128) is beyond FP16
    b.qkv[3] = 0.5
    b.keys[:, :20] = 200.0
    b.values[:, :20] = 0.5
    b.rope[:] = (1.0, 0.0)
    if splits > 1:  # what the first split has is as far below
        b.keys[:, slice(0, 20, splits) if warps == 0 else slice(0, 16)] = -200.0
        b.qkv[2] = -200.0
    assert call_attention(case, b) == 0
    np.testing.assert_allclose(b.out.astype(np.float32), 0.5, rtol=1e-3)


@pytest.mark.parametrize(("warps", "splits"), [(0, 1), (8, 1), (0, 32), (8, 2)])
def test_values_that_are_not_finite_are_not_hidden(warps: int, splits: int) -> None:
    for place in ("q", "old key", "old value", "new value"):
        case = Case(2, 1, 64, 20, warps=warps, splits=splits)
        b = fill(case)
        b.qkv.flags.writeable = True
        target = {"q": b.qkv[0], "old key": b.keys[0, 7], "old value": b.values[0, 7]}
        target.get(place, b.qkv[3])[:] = np.nan
        assert call_attention(case, b) == 0
        assert np.isnan(b.out[0]).all(), place


@pytest.mark.parametrize("warps", [0, 8])
@pytest.mark.parametrize(("position", "row"), [(1, 0), (4, 3), (20, 19), (65, 64)])
def test_an_infinite_value_stays_infinite(warps: int, position: int, row: int) -> None:
    case = Case(2, 1, 64, position, warps=warps)
    b = fill(case)
    b.values[0, row, 3] = np.inf
    assert call_attention(case, b) == 0
    assert np.isposinf(b.out[:, 3]).all()
    assert np.isfinite(np.delete(b.out, 3, axis=1)).all()


def test_what_attention_does_not_take() -> None:
    for case in (
        Case(2, 1, 20, 3),
        Case(2, 1, 272, 3),
        Case(2, 1, 64, 3, warps=5),
        Case(2, 1, 64, 3, warps=32),
        Case(2, 1, 64, 3, warps=2),
        Case(2, 1, 128, 3, warps=16),
        Case(2, 1, 64, 3, splits=33),
        Case(2, 1, 64, 3, splits=0),
        Case(3, 2, 64, 3),
        Case(2, 1, 514, 3, warps=0),
        Case(2, 1, 20, 3, warps=0, splits=33),
        Case(3, 2, 20, 3, warps=0),
    ):
        b = fill(case)
        assert call_attention(case, b) == NOT_SUPPORTED, case
        assert np.isnan(b.out).all()


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (7, 5), (12, 0)], ids=str)
def test_attention_where_shared_memory_is_smaller(capability: tuple[int, int]) -> None:
    """The split that the rule gives, and the kernel finds how much it can keep in flight."""
    for heads, kv_heads, head_dim in ((4, 2, 64), (9, 3, 64), (8, 1, 128), (2, 2, 256)):
        for position, context in ((5, 256), (300, 512), (300, 131_072)):
            sizes = Heads(heads, kv_heads, head_dim)
            split = default_split(sizes, context, Device(46, capability >= (9, 0)))
            case = Case(
                *(heads, kv_heads, head_dim, position, split.warps, split.splits),
                context=context,
                capability=capability,
            )
            assert wrong_attention(case) == "", case
    for splits in (1, 8):
        case = Case(4, 2, 20, 70, warps=0, splits=splits, capability=capability)
        assert wrong_attention(case) == "", case


# --- helpers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7, 8, 64, 576, 1025, 4096, 9000])
def test_rms_norm(n: int) -> None:
    random = np.random.default_rng(n)
    for offset in (0, 1):
        for with_delta in (False, True):
            x, delta, weight = (
                aligned(random.standard_normal(n).astype(np.float16), offset) for _ in range(3)
            )
            out = aligned(np.full(n, np.nan, np.float16), offset)
            total = (x.astype(np.float32) + delta).astype(np.float16) if with_delta else x.copy()
            constant(weight)
            status = library("helpers").call(
                "minidecode_rms_norm",
                *(out, x, delta if with_delta else None, weight, n, EPS, STREAM),
                late=[x, delta, out],
                order=n % 4,
            )
            assert status == 0
            np.testing.assert_array_equal(x, total)
            assert ref.wrong(out, ref.rms_norm(total, weight, EPS)) == "", (offset, with_delta)


def test_rms_norm_of_large_values() -> None:
    x, weight = aligned(np.full(4096, 300.0, np.float16)), aligned(np.ones(4096, np.float16))
    out = np.empty_like(x)
    library("helpers").call("minidecode_rms_norm", out, x, None, weight, 4096, EPS, STREAM)
    np.testing.assert_array_equal(out, np.ones(4096, np.float16))


@pytest.mark.parametrize("n", [1, 255, 256, 257, 1000])
def test_add(n: int) -> None:
    random = np.random.default_rng(n)
    x, delta = (random.standard_normal(n).astype(np.float16) for _ in range(2))
    expected = (x.astype(np.float32) + delta).astype(np.float16)
    constant(delta)
    assert library("helpers").call("minidecode_add", x, delta, n, STREAM, late=[x, delta]) == 0
    np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("n", [1, 255, 256, 257, 1000])
def test_swiglu(n: int) -> None:
    gate_up = constant((np.random.default_rng(n).standard_normal(2 * n) * 8).astype(np.float16))
    out = np.full(n, np.nan, np.float16)
    status = library("helpers").call("minidecode_swiglu", out, gate_up, n, STREAM, late=[gate_up])
    assert status == 0
    assert ref.wrong(out, ref.swiglu(gate_up)) == ""


def test_swiglu_of_extreme_gates() -> None:
    gate_up = np.array([-6e4, 6e4, -100, 100, 0, *[1.0] * 5], np.float16)
    out = np.empty(5, np.float16)
    assert library("helpers").call("minidecode_swiglu", out, gate_up, 5, STREAM) == 0
    np.testing.assert_array_equal(out, np.array([0, 6e4, 0, 100, 0], np.float16))


def argmax(values: npt.NDArray[np.float16], order: int = 0) -> tuple[int, npt.NDArray[np.float32]]:
    logits = np.full(values.size, np.nan, np.float32)
    best = np.zeros(1, np.uint64)
    status = library("helpers").call(
        "minidecode_argmax",
        *(logits, best, values, values.size, STREAM),
        late=[values, best, logits],
        order=order,
    )
    assert status == 0
    return int(best[0]), logits


@pytest.mark.parametrize("n", [1, 97, 256, 257, 33_000])
def test_argmax(n: int) -> None:
    for order in range(4):
        values = np.random.default_rng(n + order).standard_normal(n).astype(np.float16)
        best, logits = argmax(constant(values), order)
        np.testing.assert_array_equal(logits, values.astype(np.float32))
        assert best == ref.best(logits)
        assert ref.token_of(best) == int(values.argmax())  # the first of equal ones
    values = np.zeros(n, np.float16)
    values[n // 2] = np.nan
    assert argmax(values)[0] == ref.NON_FINITE


# --- the end of a step ----------------------------------------------------------------------------


class Step:
    """The buffers of minidecode_next_token for a vocabulary of 20 and a position of 3."""

    def __init__(self, hidden: int = 70, eos: Sequence[int] = ()) -> None:
        self.x = np.full(hidden, np.nan, np.float16)
        rows = np.random.default_rng(hidden).standard_normal((20, hidden))
        self.embedding = constant(rows.astype(np.float16))
        self.best = np.zeros(1, np.uint64)
        self.position, self.token = np.array([3], np.int32), np.array([9], np.int32)
        self.stopped = np.zeros(1, np.int32)
        self.eos = constant(np.array([*eos, *[-1] * (4 - len(eos))], np.int32))
        self.seen = np.zeros(20, np.uint8)
        self.out = np.full(6, -1, np.int32)

    def run(self, logits: npt.NDArray[np.float32], order: int = 0) -> None:
        self.best[0] = ref.best(logits)
        arrays = [
            *(self.x, self.embedding, self.best, self.position, self.token, self.stopped),
            *(self.eos, self.seen, self.out),
        ]
        args = step._NextToken(*map(address, arrays), self.x.size, self.eos.size)
        late = [self.best, self.x]
        status = library("next_token").call(
            "minidecode_next_token", args, STREAM, buffers=arrays, late=late, order=order
        )
        assert status == 0


def one_hot(token: int) -> npt.NDArray[np.float32]:
    logits = np.zeros(20, np.float32)
    logits[token] = 1.0
    return logits


@pytest.mark.parametrize("hidden", [1, 70, 256, 1000])
def test_next_token(hidden: int) -> None:
    for order, token in enumerate((0, 7, 19)):
        s = Step(hidden)
        s.run(one_hot(token), order)
        np.testing.assert_array_equal(s.x, s.embedding[token])
        assert (int(s.position[0]), int(s.token[0]), int(s.stopped[0])) == (4, token, 0)
        assert int(s.best[0]) == 0
        assert s.seen.nonzero()[0].tolist() == [token]
        assert s.out.tolist() == [-1, -1, -1, token, -1, -1]


def test_an_end_token_stops_the_steps_that_follow() -> None:
    for eos in ([7], [2, 7], [2, 3, 4, 7]):
        s = Step(eos=eos)
        s.run(one_hot(7))
        assert (int(s.position[0]), int(s.stopped[0])) == (4, 1)
        assert int(s.out[3]) == 7
        before = {name: array.copy() for name, array in vars(s).items() if name != "best"}
        s.run(one_hot(5))
        for name, array in before.items():
            np.testing.assert_array_equal(vars(s)[name], array, err_msg=name)
    s = Step(eos=[2, 3])
    s.run(one_hot(7))
    assert int(s.stopped[0]) == 0


def test_unused_end_tokens_match_nothing() -> None:
    s = Step(eos=[])
    for token in range(3):
        s.run(one_hot(token))
        assert int(s.stopped[0]) == 0


def test_logits_that_are_not_finite_stop_without_a_token() -> None:
    s = Step()
    logits = one_hot(3)
    logits[11] = np.nan
    s.run(logits)
    assert s.out.tolist() == [-1, -1, -1, -2, -1, -1]
    assert (int(s.position[0]), int(s.token[0]), int(s.stopped[0])) == (3, 9, 1)
    assert not s.seen.any()


# --- sampling -------------------------------------------------------------------------------------


def draw(
    logits: npt.NDArray[np.float32],
    sampling: Sampling,
    seen: Sequence[int] = (),
    position: int = 5,
    order: int = 0,
    capability: tuple[int, int] = (9, 0),
) -> int:
    """What minidecode_sample leaves in `best`."""
    marks = np.zeros(logits.size, np.uint8)
    marks[list(seen)] = 1
    parameters = constant(sampling_bytes(sampling).numpy())
    best = np.array([ref.best(logits)], np.uint64)
    where = constant(np.array([position], np.int32))
    scratch = np.zeros((logits.size, 2), np.uint32)
    arrays = [best, logits, marks, where, parameters, scratch]
    args = step._Sample(*map(address, arrays), logits.size)
    status = library("sample").call(
        *("minidecode_sample", args, STREAM),
        buffers=arrays,
        late=[best, logits, marks],
        order=order,
        capability=capability,
    )
    assert status == 0
    return int(best[0])


def distribution(
    logits: npt.NDArray[np.float32], sampling: Sampling, seen: Sequence[int] = ()
) -> npt.NDArray[np.float64]:
    marks = torch.zeros(logits.size, dtype=torch.bool)
    marks[list(seen)] = True
    return probabilities(torch.tensor(logits), sampling, marks).double().numpy()


SAMPLINGS = (
    Sampling(1.0),
    Sampling(0.7),
    Sampling(1.5),
    Sampling(1.0, top_k=1),
    Sampling(1.0, top_k=5),
    Sampling(2.0, top_k=96),
    Sampling(1.0, top_k=500),
    Sampling(1.0, top_p=0.01),
    Sampling(1.0, top_p=0.5),
    Sampling(1.3, top_p=0.97),
    Sampling(1.0, min_p=0.1),
    Sampling(0.8, min_p=0.9),
    Sampling(1.0, min_p=1.0),
    Sampling(1.0, top_k=20, top_p=0.8),
    Sampling(1.2, top_k=30, top_p=0.9, min_p=0.05),
    Sampling(1.0, repetition_penalty=1.8),
    Sampling(0.9, top_k=12, top_p=0.9, min_p=0.02, repetition_penalty=0.6),
)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_draw_is_the_greatest_score_with_noise(sampling: Sampling) -> None:
    """Among the tokens that sampling.py leaves, and with its probabilities: no other token."""
    vocab, seen = 97, (3, 50, 96)
    for seed in range(24):
        random = np.random.default_rng(seed)
        spread = (0.3, 1.0, 3.0)[seed % 3]
        logits = constant((random.standard_normal(vocab) * spread).astype(np.float32))
        s = Sampling(**{**vars(sampling), "seed": seed * 2**58 + seed})
        p = distribution(logits, s, seen)
        with np.errstate(divide="ignore"):
            noisy = np.log(p) + ref.gumbel(s.seed, seed, vocab)
        order = np.argsort(noisy)
        if noisy[order[-1]] - noisy[order[-2]] < 1e-4:
            continue  # FP32 may decide either way
        assert ref.token_of(draw(logits, s, seen, seed, order=seed % 4)) == order[-1]


@pytest.mark.parametrize("vocab", [1024, 1025, 5003, 30_000])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_draw_from_many_tokens(vocab: int, capability: tuple[int, int]) -> None:
    """By one block and by a cluster, its candidates in shared memory or, 30,000 of one, not."""
    random = np.random.default_rng(vocab)
    seen = (3, vocab - 1)
    for seed in range(4 if vocab < 10_000 else 2):
        s = Sampling(
            0.9, top_k=vocab // 2, top_p=0.9, min_p=1e-3, repetition_penalty=1.2, seed=seed
        )
        logits = constant((random.standard_normal(vocab) * 2).astype(np.float32))
        p = distribution(logits, s, seen)
        with np.errstate(divide="ignore"):
            noisy = np.log(p) + ref.gumbel(seed, seed, vocab)
        best, second = np.sort(noisy)[[-1, -2]]
        assert best - second > 1e-4
        drawn = draw(logits, s, seen, seed, order=seed, capability=capability)
        assert ref.token_of(drawn) == noisy.argmax()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, top_k=3),
        Sampling(1.0, top_p=0.24),
        Sampling(1.0, top_p=0.26),
        Sampling(0.02, min_p=0.5),
        Sampling(1.0, top_k=8, top_p=0.4),
        Sampling(0.02, top_k=9, top_p=0.9, min_p=0.4),
        Sampling(1.0, top_k=4, repetition_penalty=1.5),
    ],
    ids=str,
)
def test_every_token_that_is_left_is_drawn_and_no_other(sampling: Sampling) -> None:
    logits = np.linspace(1.0, 1.02, 12, dtype=np.float32)[[*range(0, 12, 2), *range(1, 12, 2)]]
    seen = (11, 4)
    support = set(np.flatnonzero(distribution(logits, sampling, seen)))
    assert 1 < len(support) < 12
    drawn = {
        ref.token_of(draw(logits, Sampling(**{**vars(sampling), "seed": seed}), seen))
        for seed in range(10 * len(support))
    }
    assert drawn == support


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_noise_gives_the_distribution(sampling: Sampling) -> None:
    """Chi-square over many seeds of what the test above shows a draw to be."""
    vocab, n = 12, 3000
    logits = (np.random.default_rng(1).standard_normal(vocab) * 1.5).astype(np.float32)
    p = distribution(logits, sampling)
    with np.errstate(divide="ignore"):
        scores = np.log(p)
    picks = [int(np.argmax(scores + ref.gumbel(seed, seed % 7, vocab))) for seed in range(n)]
    counts = np.bincount(picks, minlength=vocab)
    assert not counts[p == 0].any()
    if (p > 0).sum() > 1:
        statistic, freedom = ref.chi_square(counts[p > 0], n * p[p > 0])
        assert statistic < ref.chi_square_limit(freedom)


def test_noise_is_finite_and_independent() -> None:
    rows = np.stack([ref.gumbel(seed, 0, 400) for seed in range(100)])
    rows = np.concatenate([rows, [ref.gumbel(0, position, 400) for position in range(1, 100)]])
    assert np.isfinite(rows).all()
    assert abs(rows.mean() - 0.5772) < 0.03
    assert abs(rows.var() - np.pi**2 / 6) < 0.06
    assert np.abs(np.corrcoef(rows) - np.eye(len(rows))).max() < 0.3
    assert np.abs(np.corrcoef(rows[:, :-1].ravel(), rows[:, 1:].ravel())[0, 1]) < 0.03


@pytest.mark.parametrize("seed", range(3))
def test_temperature_zero_is_the_greatest(seed: int) -> None:
    logits = np.random.default_rng(seed).standard_normal(97).astype(np.float32)
    assert draw(logits, Sampling(seed=seed)) == ref.best(logits)
    top = int(logits.argmax())
    penalised = Sampling(repetition_penalty=1e6)
    assert ref.token_of(draw(logits, penalised, [top])) == int(np.argsort(logits)[-2])
    assert ref.token_of(draw(logits, Sampling(1e-9, seed=seed))) == top


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_sampling_marks_values_that_are_not_finite(bad: float) -> None:
    logits = np.zeros(97, np.float32)
    logits[60] = bad
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_k=4, top_p=0.5)):
        assert draw(logits, sampling) == ref.NON_FINITE


def test_equal_scores_at_a_threshold_stay_together() -> None:
    logits = np.array([2.0, 1.0, 1.0, 1.0, -5.0], np.float32)
    drawn = {ref.token_of(draw(logits, Sampling(1.0, top_k=2, seed=s))) for s in range(40)}
    assert drawn == {0, 1, 2, 3}


def test_far_apart_logits() -> None:
    logits = np.array([3e38, -3e38, 0.0, 2.9e38], np.float32)
    for sampling in (Sampling(1.0), Sampling(1e-30, top_p=0.9), Sampling(5.0, top_k=3, min_p=0.1)):
        assert ref.token_of(draw(logits, sampling)) == 0


def test_one_token_in_the_vocabulary() -> None:
    for sampling in SAMPLINGS:
        assert ref.token_of(draw(np.array([-4.0], np.float32), sampling)) == 0


def test_parameters_are_laid_out_as_the_kernel_reads_them() -> None:
    assert ctypes.sizeof(step.SamplingParameters) % 8 == 0
    distinct = Sampling(1.25, top_k=3, top_p=0.75, min_p=0.5, repetition_penalty=2.0, seed=9)
    logits = np.array([1.0, 0.9, 0.8, -4.0, 3.0], np.float32)
    p = distribution(logits, distinct, [4])

    def drawn(seed: int) -> int:
        return ref.token_of(draw(logits, Sampling(**{**vars(distinct), "seed": seed}), [4]))

    assert {drawn(s) for s in range(60)} == set(np.flatnonzero(p))


# --- the read that ceilings are measured with -----------------------------------------------------


@pytest.mark.parametrize("pieces", [1, 256, 6250])
def test_read_bandwidth_reads_the_whole_buffer_and_no_more(pieces: int) -> None:
    """The kernel says when all words, exclusive-or, are this one: wherever it is, it was read."""
    data = aligned(np.zeros(4 * pieces, np.uint32))
    last = 4 * pieces - 1
    for place in sorted({0, last, *(min(769 * i, last) for i in range(33))}):
        out = np.zeros(1, np.float32)
        for expected in (1.0, 0.0):
            data[place] = 0x9E3779B9 if expected else 0
            status = library("read_bandwidth").call(
                "minidecode_read",
                *(data, ctypes.c_size_t(data.nbytes), out, 3, 64, STREAM),
            )
            assert (status, out[0]) == (0, expected), place
            out[0] = 0.0
