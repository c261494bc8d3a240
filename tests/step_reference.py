"""What the kernels of the decode step must compute, in FP64 NumPy from the textbook formulas."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Wide = npt.NDArray[np.float64]

NON_FINITE = 2**64 - 1


def wide(values: Array) -> Wide:
    return values.astype(np.float64)


def half(values: Wide) -> Wide:
    """Rounded to FP16."""
    return wide(values.astype(np.float16))


def rms_norm(x: Array, weight: Array, eps: float) -> Wide:
    v = wide(x)
    return v / np.sqrt(np.mean(v * v, axis=-1, keepdims=True) + eps) * wide(weight)


def half_rms_norm(x: Array, weight: Array, eps: float) -> Wide:
    """As the fused kernels have it: x times the weight is rounded to FP16, then scaled."""
    v = wide(x)
    return half(v * wide(weight)) / np.sqrt(np.mean(v * v) + eps)


def silu(v: Wide) -> Wide:
    with np.errstate(over="ignore"):
        return v / (1.0 + np.exp(-v))


def swiglu(gate_up: Array) -> Wide:
    gate, up = np.split(wide(gate_up), 2)
    return silu(gate) * up


def linear(w: Array, x: Wide, bias: Array | None) -> Wide:
    y = wide(w) @ x
    return y if bias is None else y + wide(bias)


def rotate(rows: Wide, cos_sin: Array) -> Wide:
    """Rotary embedding of [heads, head_dim] by the pairs (cos, sin), [head_dim / 2, 2]."""
    cos, sin = wide(cos_sin[:, 0]), wide(cos_sin[:, 1])
    low, high = np.split(rows, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def rope_table(capacity: int, head_dim: int, theta: float = 1e4) -> npt.NDArray[np.float32]:
    angle = np.arange(capacity)[:, None] * theta ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)


def attention(
    qkv: Array,
    keys: Array,
    values: Array,
    rope: Array,
    position: int,
    heads: int,
    window: int | None = None,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    eps: float = 1e-6,
) -> tuple[Wide, Wide, Wide]:
    """(output [heads, head_dim], the key and the value row [kv_heads, head_dim] to append).

    qkv [heads + 2 kv_heads, head_dim]; keys, values [kv_heads, capacity, head_dim]. q and k are
    FP16 after the normalisation and after the rotation, as in the model.
    """
    kv_heads = keys.shape[0]
    head_dim = keys.shape[2]
    rows = wide(qkv).reshape(heads + 2 * kv_heads, head_dim)
    q, k, v = np.split(rows, [heads, heads + kv_heads])
    if q_norm is not None and k_norm is not None:
        q, k = half(rms_norm(q, q_norm, eps)), half(rms_norm(k, k_norm, eps))
    q, k = half(rotate(q, rope[position])), half(rotate(k, rope[position]))
    first = 0 if window is None else max(0, position + 1 - window)
    out = np.empty((heads, head_dim))
    for head in range(heads):
        kv = head // (heads // kv_heads)
        seen_keys = np.concatenate([wide(keys[kv, first:position]), k[kv : kv + 1]])
        seen_values = np.concatenate([wide(values[kv, first:position]), v[kv : kv + 1]])
        scores = seen_keys @ q[head] / np.sqrt(head_dim)
        weights = np.exp(scores - scores.max())
        out[head] = weights @ seen_values / weights.sum()
    return out, k, v


def best(logits: npt.NDArray[np.float32]) -> int:
    """The packed (greatest logit, its smallest token) of `best.cuh`."""
    if not np.isfinite(logits).all():
        return NON_FINITE
    token = int(np.argmax(logits))
    bits = int(logits[token : token + 1].view(np.uint32)[0])
    ordered = ~bits & 0xFFFFFFFF if bits & 0x80000000 else bits | 0x80000000
    return ordered << 32 | (~token & 0xFFFFFFFF)


def token_of(packed: int) -> int:
    return ~packed & 0xFFFFFFFF


_MASK = 2**64 - 1


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def gumbel(seed: int, position: int, vocab: int) -> Wide:
    """The noise [vocab] that sampling adds to the scores of one step."""
    golden = 0x9E3779B97F4A7C15
    stream = _mix((seed + golden * (position + 1)) & _MASK)
    bits = [_mix((stream + golden * (token + 1)) & _MASK) for token in range(vocab)]
    uniform = (np.array(bits, dtype=np.float64) + 0.5) * 2.0**-64
    return -np.log(-np.log1p(-np.minimum(uniform, 1.0 - 2.0**-24)))


def chi_square(counts: Array, expected: Wide) -> tuple[float, int]:
    """(statistic, degrees of freedom); cells that expect fewer than 5 are joined."""
    order = np.argsort(expected)
    e, c = wide(expected)[order], wide(counts)[order]
    few = int(np.searchsorted(np.cumsum(e), 5.0)) + 1
    e = np.concatenate([[e[:few].sum()], e[few:]])
    c = np.concatenate([[c[:few].sum()], c[few:]])
    return float(((c - e) ** 2 / e).sum()), len(e) - 1


def chi_square_limit(freedom: int) -> float:
    """What a right sampler exceeds once in 10^5 tests (Wilson and Hilferty's approximation)."""
    z = 4.265
    return freedom * (1 - 2 / (9 * freedom) + z * (2 / (9 * freedom)) ** 0.5) ** 3


def wrong(out: Array, expected: Wide, scale: Wide | float = 0.0, relative: float = 1e-3) -> str:
    """What differs by more than rounding, or "". `scale` is what cancelled in each element."""
    got = wide(out).reshape(-1)
    expected = expected.reshape(-1)
    tiny = float(np.finfo(out.dtype).smallest_subnormal)
    allowed = relative * np.abs(expected) + 1e-5 * np.reshape(scale, -1) + tiny
    bad = np.flatnonzero(~(np.abs(got - expected) <= allowed))
    if not bad.size:
        return ""
    i = bad[0]
    return f"{bad.size} of {got.size} wrong, first [{i}]: {got[i]}, not {expected[i]}"
