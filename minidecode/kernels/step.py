"""The kernels of `cuda/step`, bound to tensors: each function gives a call that enqueues.

Shapes, dtypes and devices are checked here once; a call takes the current stream and starts one
kernel. The calls keep their tensors alive.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from minidecode.errors import MinidecodeError
from minidecode.kernels import build
from minidecode.kernels.enqueue import enqueue
from minidecode.kernels.tiles import MOST_HEAD_DIM, Heads, Split, Tile

Launch = Callable[[], None]

# The files with a fused linear layer, by what the layer does around W x.
NORM_LINEAR = "norm_linear"
LINEAR_RESIDUAL = "linear_residual"
NORM_SWIGLU = "norm_linear_swiglu"
NORM_LOGITS = "norm_linear_logits"

# Those with the attention: on tensor cores, and for head sizes that these do not take.
ATTENTION, ATTENTION_ANY = "attention", "attention_any"

# All files of a step without tiles.
_HELPERS = ("helpers", ATTENTION, ATTENTION_ANY, "next_token", "sample")


_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class _FusedLinear(ctypes.Structure):
    _fields_ = (
        ("y", _pointer),
        ("w", _pointer),
        ("x", _pointer),
        ("norm", _pointer),
        ("bias", _pointer),
        ("logits", _pointer),
        ("best", _pointer),
        ("n", _int),
        ("k", _int),
        ("eps", _float),
        ("norm_scale", _float),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        ("out", _pointer),
        ("keys", _pointer),
        ("values", _pointer),
        ("qkv", _pointer),
        ("q_norm", _pointer),
        ("k_norm", _pointer),
        ("rope", _pointer),
        ("position", _pointer),
        ("parts", _pointer),
        ("arrived", _pointer),
        ("heads", _int),
        ("kv_heads", _int),
        ("head_dim", _int),
        ("capacity", _int),
        ("window", _int),
        ("eps", _float),
        ("splits", _int),
        ("context", _int),
    )


class _NextToken(ctypes.Structure):
    _fields_ = (
        ("x", _pointer),
        ("embedding", _pointer),
        ("best", _pointer),
        ("position", _pointer),
        ("token", _pointer),
        ("stopped", _pointer),
        ("eos", _pointer),
        ("seen", _pointer),
        ("out", _pointer),
        ("hidden", _int),
        ("eos_count", _int),
    )


class _Sample(ctypes.Structure):
    _fields_ = (
        ("best", _pointer),
        ("logits", _pointer),
        ("seen", _pointer),
        ("position", _pointer),
        ("parameters", _pointer),
        ("scratch", _pointer),
        ("vocab", _int),
    )


class SamplingParameters(ctypes.Structure):
    """What `sample.cu` reads from the device; see there."""

    _fields_ = (
        ("seed", ctypes.c_ulonglong),
        ("temperature", _float),
        ("top_p", _float),
        ("min_p", _float),
        ("repetition_penalty", _float),
        ("top_k", _int),
    )


def rms_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> Launch:
    """x += delta if there is one; out = x / rms(x) * weight. All FP16 [n]."""
    held = _same(out, x, weight, *(() if delta is None else (delta,)))
    arguments = (_p(out), _p(x), _p(delta), _p(weight), _int(out.numel()), _float(eps))
    return _bound("helpers", "minidecode_rms_norm", arguments, held)


def add(x: torch.Tensor, delta: torch.Tensor) -> Launch:
    """x += delta, FP16 [n]."""
    held = _same(x, delta)
    return _bound("helpers", "minidecode_add", (_p(x), _p(delta), _int(x.numel())), held)


def swiglu(out: torch.Tensor, gate_up: torch.Tensor) -> Launch:
    """out[n] = silu(gate_up[:n]) * gate_up[n:], FP16."""
    held = _contiguous(torch.float16, out, gate_up)
    if gate_up.numel() != 2 * out.numel():
        raise MinidecodeError(f"swiglu: {gate_up.numel()} inputs for {out.numel()} outputs")
    arguments = (_p(out), _p(gate_up), _int(out.numel()))
    return _bound("helpers", "minidecode_swiglu", arguments, held)


def argmax(logits: torch.Tensor, best: torch.Tensor, head_out: torch.Tensor) -> Launch:
    """logits FP32 [n] = head_out FP16 [n]; best INT64 [1] = the greatest and its token."""
    held = (logits, best, *_contiguous(torch.float16, head_out))
    arguments = (_p(logits), _p(best), _p(head_out), _int(head_out.numel()))
    return _bound("helpers", "minidecode_argmax", arguments, held)


def sample(
    best: torch.Tensor,
    logits: torch.Tensor,
    seen: torch.Tensor,
    position: torch.Tensor,
    parameters: torch.Tensor,
) -> Launch:
    """best = a token drawn from FP32 logits [vocab] by SamplingParameters on the device.

    seen: bool [vocab]; position: INT32 [1].
    """
    scratch = torch.empty((logits.numel(), 2), dtype=torch.int32, device=logits.device)
    held = (best, logits, seen, position, parameters, scratch)
    args = _Sample(*(_p(t) for t in held), logits.numel())
    return _bound("sample", "minidecode_sample", (args,), held)


def next_token(
    *,
    x: torch.Tensor,
    embedding: torch.Tensor,
    best: torch.Tensor,
    position: torch.Tensor,
    token: torch.Tensor,
    stopped: torch.Tensor,
    eos: torch.Tensor,
    seen: torch.Tensor,
    out: torch.Tensor,
) -> Launch:
    """The end of a step: best -> token, out[position], x = embedding[token], position + 1."""
    held = (x, embedding, best, position, token, stopped, eos, seen, out)
    args = _NextToken(*(_p(t) for t in held), x.numel(), eos.numel())
    return _bound("next_token", "minidecode_next_token", (args,), held, device=x.device)


@dataclass(frozen=True)
class Cache:
    """What the attention of one layer works on besides q, k and v.

    keys, values FP16 [kv_heads, capacity, head_dim]; rope FP32 [capacity, head_dim / 2, 2];
    position INT32 [1]; q_norm, k_norm FP16 [head_dim] or None; window in positions or None;
    context: the most positions that a call will see.
    """

    keys: torch.Tensor
    values: torch.Tensor
    rope: torch.Tensor
    position: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    window: int | None
    eps: float
    context: int


def attention_file(heads: Heads) -> str:
    """The kernel file, without ".cu", for heads of this size; MinidecodeError where none is."""
    if heads.head_dim > MOST_HEAD_DIM:
        raise MinidecodeError(
            f"head_dim {heads.head_dim}: attention on a GPU goes to {MOST_HEAD_DIM}; use the CPU"
        )
    return ATTENTION if heads.on_tensor_cores else ATTENTION_ANY


def attention(out: torch.Tensor, qkv: torch.Tensor, cache: Cache, split: Split) -> Launch:
    """Attention of one token, with q/k norm, RoPE and the append to the cache before it.

    out FP16 [heads * head_dim]; qkv FP16 [(heads + 2 kv_heads) * head_dim].
    """
    kv_heads, capacity, head_dim = cache.keys.shape
    heads = Heads(out.numel() // head_dim, kv_heads, head_dim)
    parts = arrived = None
    if split.splits > 1:
        size = heads.heads * split.splits * (head_dim + 2)
        parts = torch.empty(size, dtype=torch.float32, device=out.device)
        arrived = torch.zeros(heads.blocks, dtype=torch.int32, device=out.device)
    tensors = (
        *(out, cache.keys, cache.values, qkv, cache.q_norm, cache.k_norm),
        *(cache.rope, cache.position, parts, arrived),
    )
    sizes = (heads.heads, kv_heads, head_dim, capacity, cache.window or 0)
    args = _Attention(*(_p(t) for t in tensors), *sizes, cache.eps, split.splits, cache.context)
    stem = attention_file(heads)
    arguments = (args,) if stem == ATTENTION_ANY else (args, _int(split.warps))
    held = tuple(t for t in tensors if t is not None)
    return _bound(stem, f"minidecode_{stem}", arguments, held)


def compile_kernels(fused: Iterable[tuple[str, Tile]] = ()) -> None:
    """Compile the kernels of a step side by side: those without tiles, and these (file, tile)."""
    wanted = [*((stem, None) for stem in _HELPERS), *dict.fromkeys(fused)]
    build.run_builds([_build_of(stem, tile) for stem, tile in wanted])


def fused_linear(
    stem: str,
    tile: Tile,
    *,
    w: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
    best: torch.Tensor | None = None,
    eps: float = 0.0,
) -> Launch:
    """y = epilogue(w rmsnorm(x) + bias); see `fused_linear.cuh`. w FP16 [n, k]; x FP16 [k]."""
    n, k = w.shape
    norm, norm_scale = (None, 1.0) if norm is None else scaled_norm(norm)
    tensors = (y, w, x, norm, bias, logits, best)
    held = tuple(t for t in tensors if t is not None)
    _contiguous(None, *held)
    if x.numel() != k:
        raise MinidecodeError(f"{stem}: x has {x.numel()} elements, w has {k} columns")
    args = _FusedLinear(*(_p(t) for t in tensors), n, k, eps, norm_scale)
    library = build.run_builds([_build_of(stem, tile)])[0]
    function = _function(library, "minidecode_fused_linear")
    what = f"{_source(stem)} with {tile.spelled} for n={n}, k={k}"
    # The library is compiled with one tile: number 0.
    return enqueue(function, (ctypes.byref(args), _int(0)), w.device, (args, held), what, library)


def scaled_norm(norm: torch.Tensor) -> tuple[torch.Tensor, float]:
    """(norm times the power of two that brings its greatest element into (1/2, 1], that power).

    The fused kernels multiply it with the input in FP16, where a product of both may be infinite,
    or so small that it has few digits.
    """
    greatest = float(norm.abs().max())
    if not 0.0 < greatest < math.inf:
        return norm, 1.0
    scale = 2.0 ** -math.ceil(math.log2(greatest))
    return norm * scale, scale


@functools.cache
def _build_of(stem: str, tile: Tile | None = None) -> build.BuildPlan:
    fields = {} if tile is None else asdict(tile)
    # One macro a field: nvcc takes a comma in -D for the end of the definition.
    flags = [f"-DMINIDECODE_{name.upper()}={value}" for name, value in fields.items()]
    return build.plan_build(_source(stem), extra_flags=flags)


def _source(stem: str) -> Path:
    return build.cuda_sources() / "step" / f"{stem}.cu"


def _function(library: ctypes.CDLL, symbol: str) -> Callable[..., int]:
    function = getattr(library, symbol)
    function.restype = _int
    return function  # type: ignore[no-any-return]


def _bound(
    stem: str,
    symbol: str,
    arguments: tuple[object, ...],
    held: tuple[torch.Tensor, ...],
    device: torch.device | None = None,
) -> Launch:
    library = build.run_builds([_build_of(stem)])[0]
    function = _function(library, symbol)
    passed = tuple(ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in arguments)
    where = held[0].device if device is None else device
    what = f"{symbol} in {_source(stem)}"
    return enqueue(function, passed, where, (arguments, held), what, library)


def _p(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return _pointer(None if tensor is None else tensor.data_ptr())


def _contiguous(dtype: torch.dtype | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise MinidecodeError(f"a tensor of shape {list(tensor.shape)} is not contiguous")
        if dtype is not None and tensor.dtype != dtype:
            raise MinidecodeError(f"a tensor is {tensor.dtype}, {dtype} is needed")
        if tensor.device != tensors[0].device:
            raise MinidecodeError(f"tensors on {tensors[0].device} and {tensor.device}")
    return tensors


def _same(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    shapes = {tuple(t.shape) for t in tensors}
    if len(shapes) != 1:
        raise MinidecodeError(f"tensors of one shape are needed, not {sorted(shapes)}")
    return _contiguous(torch.float16, *tensors)
