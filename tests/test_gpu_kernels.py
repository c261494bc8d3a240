"""Every GEMV on a GPU, beyond what the gate asks (test_check.py)."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from anywhere import same_anywhere

from minidecode.kernels import ops, registry
from minidecode.kernels.check import ODD_K, ODD_N, ROW_TOLERANCE, TOLERANCE
from minidecode.kernels.registry import Gemv

pytestmark = pytest.mark.gpu


def names(*left_out: str) -> list[str]:
    found = registry.gemvs().items()
    return sorted(name for name, gemv in found if "cuda" in gemv.devices and name not in left_out)


def available(name: str) -> Gemv:
    gemv = registry.gemvs()[name]
    reason = gemv.unavailable()
    if reason:
        pytest.skip(reason)
    return gemv


@pytest.mark.parametrize("name", names())
def test_a_side_stream_and_a_graph_change_no_bit(name: str) -> None:
    gemv = available(name)
    # The order in which column_atomic adds up is chance.
    same = functools.partial(torch.allclose, rtol=1e-2, atol=1e-2)
    for kind in map(ops.torch_dtype, gemv.dtypes):
        w = torch.randn(1000, 1056, device="cuda").to(kind)
        inputs = [torch.randn(1056, device="cuda").to(kind) for _ in range(2)]
        x, y = torch.empty_like(inputs[0]), w.new_empty(1000)
        launch = gemv.bind(y, w, x)
        same_anywhere(launch, x, y, inputs, same if name == "column_atomic" else torch.equal)


@pytest.mark.parametrize("name", names("inductor"))  # it compiles for each shape
def test_odd_shapes_of_weights_off_their_alignment(name: str) -> None:
    gemv = available(name)
    for dtype, n, k in itertools.product(gemv.dtypes, ODD_N, ODD_K):
        kind = ops.torch_dtype(dtype)
        w = torch.randn(n * k + 1, device="cuda").to(kind)[1:].view(n, k)
        x = torch.randn(k, device="cuda").to(kind)
        y = torch.full((n,), math.nan, device="cuda", dtype=kind)
        try:
            gemv.bind(y, w, x)()
        except ops.NotSupportedError:
            continue
        expected, scale = ops.gemv_reference_and_scale(w, x)
        off = (y.cpu().double() - expected).abs()
        allowed = ROW_TOLERANCE[dtype] * scale + TOLERANCE[dtype] * expected.abs()
        assert bool((off <= allowed).all()), (dtype, n, k, float(off.max()))
