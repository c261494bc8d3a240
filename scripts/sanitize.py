"""Every kernel of ours on small shapes: what compute-sanitizer looks at.

    python scripts/sanitize.py build DIR      compile all of cuda/ for the GPU of this machine
    compute-sanitizer --tool memcheck python scripts/sanitize.py run DIR
    compute-sanitizer --tool memcheck python scripts/sanitize.py python NAME [DTYPE ...]

Memory comes from the driver, one allocation an array, so that one element past the end is seen;
what a kernel may not read (outputs, positions to come) is left uninitialised. The third command is
for GEMVs in Python, which need torch: its memory, too, is one allocation an array, and filled
by copies from the host, so that none of torch's own kernels runs between them.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from minidecode.kernels import build
from minidecode.kernels.check import ODD_K, ODD_N, ROW_TOLERANCE, TOLERANCE
from minidecode.kernels.tiles import Heads

Array = npt.NDArray[Any]

NOT_SUPPORTED = 801  # cudaErrorNotSupported
EPS = 1e-5


@dataclass(frozen=True)
class Struct:
    """An argument passed by address: its fields in order (arrays are pointers)."""

    fields: tuple[Any, ...]


@dataclass(frozen=True)
class Shifted:
    """An array that starts some elements past an aligned address."""

    array: Array
    by: int


@dataclass(frozen=True)
class Call:
    """`function(*arguments, stream)` of cuda/<source>. NaN in an array is left uninitialised."""

    source: str
    function: str
    arguments: tuple[Any, ...]
    may_refuse: bool = False


def halves(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def unknown(*shape: int, dtype: type = np.float16) -> Array:
    return np.full(shape, np.nan, dtype)


def calls() -> Iterator[Call]:
    """Every kernel at least once."""
    yield from gemv_calls()
    yield from linear_calls()
    yield from attention_calls()
    yield from helper_calls()
    yield from end_calls()


# Tails, odd row lengths, one element; each with a weight that starts off its alignment as well. The
# last is for the rows that half2_stream stages by bulk copies.
GEMV_SHAPES = (
    *itertools.product(ODD_N, ODD_K),
    *((5, 64), (33, 1152), (2, 4096), (4610, 1032)),
)


def gemv_calls() -> Iterator[Call]:
    for path in sorted((build.cuda_sources() / "gemv").glob("*.cu")):
        text = path.read_text(encoding="utf-8")
        for function, dtype in (
            ("minidecode_gemv", np.float16),
            ("minidecode_gemv_f32", np.float32),
        ):
            if f"{function}(" not in text:
                continue
            for (n, k), by in itertools.product(GEMV_SHAPES, (0, 1)):
                w, x = (halves(*shape).astype(dtype) for shape in ((n, k), (k,)))
                arguments = (unknown(n, dtype=dtype), Shifted(w, by), x, n, k)
                yield Call(f"gemv/{path.name}", function, arguments, may_refuse=True)


def linear_calls() -> Iterator[Call]:
    # The files are compiled with one tile of each kind: in registers, staged, both.
    for tile, (rows, k) in itertools.product(range(3), ((10, 64), (7, 1032), (12, 4096))):
        x, norm = halves(k), halves(k)
        for name in ("norm_linear", "linear_residual", "norm_linear_swiglu", "norm_linear_logits"):
            n = 2 * rows if name == "norm_linear_swiglu" else rows
            residual, head = name == "linear_residual", name == "norm_linear_logits"
            y = None if head else halves(rows) if residual else unknown(rows)
            logits = unknown(n, dtype=np.float32) if head else None
            best = np.zeros(1, np.uint64) if head else None
            gain = None if residual else norm
            fields = (y, halves(n, k), x, gain, halves(n), logits, best, n, k, EPS, 1.0)
            arguments = (Struct(fields), tile)
            yield Call(f"step/{name}.cu", "minidecode_fused_linear", arguments, may_refuse=tile > 0)


def attention_fields(
    heads: int,
    kv_heads: int,
    head_dim: int,
    position: int,
    splits: int,
    *,
    window: int = 0,
    norm: bool = False,
) -> Struct:
    capacity = position + 9
    keys, values = (halves(kv_heads, capacity, head_dim, seed=s) for s in (1, 2))
    keys[:, position:] = values[:, position:] = np.nan
    if window:
        first = max(0, position + 1 - window)
        keys[:, :first] = values[:, :first] = np.nan
    angle = np.arange(capacity)[:, None] * 0.1 ** np.arange(head_dim // 2)
    rope = np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)
    parts = unknown(heads * splits * (head_dim + 2), dtype=np.float32) if splits > 1 else None
    blocks = Heads(heads, kv_heads, head_dim).blocks
    arrived = np.zeros(blocks, np.uint32) if splits > 1 else None
    return Struct(
        (
            unknown(heads, head_dim),
            keys,
            values,
            halves(heads + 2 * kv_heads, head_dim),
            *((halves(head_dim), halves(head_dim)) if norm else (None, None)),
            rope,
            np.array([position], np.int32),
            *(parts, arrived),
            *(heads, kv_heads, head_dim, capacity, window, EPS, splits, capacity),
        )
    )


def attention_calls() -> Iterator[Call]:
    attention, function = "step/attention.cu", "minidecode_attention"
    cases = ((64, 16, 70), (64, 8, 70), (128, 4, 0), (72, 8, 200), (16, 4, 33), (256, 4, 100))
    for head_dim, warps, position in cases:
        for window, norm in ((0, True), (20, False)):
            for splits in (1, 3, 16):
                fields = attention_fields(
                    6, 2, head_dim, position, splits, window=window, norm=norm
                )
                yield Call(attention, function, (fields, warps))
    for splits in (1, 2):
        yield Call(attention, function, (attention_fields(20, 2, 64, 40, splits), 8))
    for head_dim, position in ((20, 30), (130, 9), (320, 5)):
        for splits in (1, 5):
            fields = attention_fields(6, 2, head_dim, position, splits, norm=True, window=10)
            yield Call("step/attention_any.cu", "minidecode_attention_any", (fields,))


def helper_calls() -> Iterator[Call]:
    source = "step/helpers.cu"
    arguments: tuple[Any, ...]
    for n in (7, 64, 5000):
        for delta in (None, halves(n)):
            arguments = (unknown(n), halves(n), delta, halves(n), n, EPS)
            yield Call(source, "minidecode_rms_norm", arguments)
        yield Call(source, "minidecode_add", (halves(n), halves(n), n))
        yield Call(source, "minidecode_swiglu", (unknown(n), halves(2 * n), n))
        best = np.zeros(1, np.uint64)
        arguments = (unknown(n, dtype=np.float32), best, halves(n), n)
        yield Call(source, "minidecode_argmax", arguments)


def end_calls() -> Iterator[Call]:
    hidden, vocab = 70, 20
    fields: tuple[Any, ...]
    arguments: tuple[Any, ...]
    one, zero = np.array([1], np.int32), np.zeros(1, np.int32)
    for stopped, best in (
        (zero, 0xBF800000_FFFFFFF8),
        (one, 0xBF800000_FFFFFFF8),
        (zero, 2**64 - 1),
    ):
        writes = not stopped[0] and best != 2**64 - 1
        fields = (
            unknown(hidden) if writes else halves(hidden),
            halves(vocab, hidden),
            np.array([best], np.uint64),
            *(one.copy(), one.copy(), stopped.copy(), np.array([7, -1], np.int32)),
            np.zeros(vocab, np.uint8),
            np.zeros(8, np.int32),
            *(hidden, 2),
        )
        yield Call("step/next_token.cu", "minidecode_next_token", (Struct(fields),))
    logits = np.random.default_rng(0).standard_normal(3000).astype(np.float32)
    for temperature, top_p, min_p, top_k in ((0.0, 1.0, 0.0, 0), (1.0, 0.9, 0.05, 40)):
        packed = struct.pack("<Qffffi4x", 5, temperature, top_p, min_p, 1.3, top_k)
        fields = (
            np.zeros(1, np.uint64),
            logits,
            np.zeros(logits.size, np.uint8),
            one,
            np.frombuffer(packed, np.uint8),
            np.zeros((logits.size, 2), np.uint32),
            logits.size,
        )
        yield Call("step/sample.cu", "minidecode_sample", (Struct(fields),))
    data = np.zeros(4096, np.uint8)
    arguments = (data, ctypes.c_size_t(data.size), np.zeros(1, np.float32), 3, 64)
    yield Call("step/read_bandwidth.cu", "minidecode_read", arguments)


# --- on the GPU -----------------------------------------------------------------------------------


class Gpu:
    """The first GPU through the driver's own interface."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._check("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check("cuDeviceGet", ctypes.byref(device), 0)
        self.capability = tuple(self._attribute(device, which) for which in (75, 76))
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._check("cuCtxSetCurrent", context)
        self._stream = ctypes.c_void_p()
        self._check("cuStreamCreate", ctypes.byref(self._stream), 1)
        self._allocated: list[ctypes.c_uint64] = []

    def _check(self, function: str, *arguments: Any) -> None:
        status = getattr(self._driver, function)(*arguments)
        if status != 0:
            raise SystemExit(f"sanitize.py: {function} failed with CUDA error {status}")

    def _attribute(self, device: ctypes.c_int, which: int) -> int:
        value = ctypes.c_int()
        self._check("cuDeviceGetAttribute", ctypes.byref(value), which, device)
        return value.value

    def upload(self, array: Array, by: int = 0) -> int:
        """The address of a copy of the array; rows of NaN stay uninitialised."""
        shift = by * array.itemsize
        address = ctypes.c_uint64()
        size = ctypes.c_size_t(array.nbytes + shift)
        self._check("cuMemAlloc_v2", ctypes.byref(address), size)
        self._allocated.append(address)
        start = address.value + shift
        flat = np.ascontiguousarray(array)
        rows = flat.reshape(-1, flat.shape[-1]) if flat.ndim > 1 else flat.reshape(1, -1)
        known = np.ones(len(rows), bool)
        if flat.dtype.kind == "f":
            known = ~np.isnan(rows).all(axis=1)
        if known.all():  # in one piece
            rows, known = flat.reshape(1, -1), known[:1]
        for i in np.flatnonzero(known):
            row = rows[i]
            target = ctypes.c_uint64(start + int(i) * row.nbytes)
            source = ctypes.c_void_p(row.ctypes.data)
            self._check("cuMemcpyHtoD_v2", target, source, ctypes.c_size_t(row.nbytes))
        return start

    def convert(self, value: Any) -> Any:
        """An argument as ctypes has it."""
        if value is None:
            return ctypes.c_void_p()
        if isinstance(value, Shifted):
            return ctypes.c_void_p(self.upload(value.array, value.by))
        if isinstance(value, np.ndarray):
            return ctypes.c_void_p(self.upload(value))
        if isinstance(value, Struct):
            return ctypes.byref(structure([self.convert(field) for field in value.fields]))
        if isinstance(value, float):
            return ctypes.c_float(value)
        return ctypes.c_int(value) if isinstance(value, int) else value

    def run(self, library: ctypes.CDLL, call: Call) -> int:
        """The status of the call, which has finished."""
        arguments = [self.convert(argument) for argument in call.arguments]
        function = getattr(library, call.function)
        function.restype = ctypes.c_int
        status = int(function(*arguments, self._stream))
        self._check("cuStreamSynchronize", self._stream)
        while self._allocated:
            self._check("cuMemFree_v2", self._allocated.pop())
        return status


def structure(fields: Sequence[Any]) -> ctypes.Structure:
    """A C struct of these ctypes values."""
    named = [(f"f{i}", type(field)) for i, field in enumerate(fields)]
    kind = type("Fields", (ctypes.Structure,), {"_fields_": named})
    made: ctypes.Structure = kind(*fields)
    return made


def library_of(folder: Path, source: str) -> Path:
    return folder / source.replace("/", "-").replace(".cu", ".so")


def build_all(folder: Path, arch: str) -> None:
    """Compile every .cu below cuda/ for `arch` ("90a") into `folder`, one a core at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    common = [str(build.find_toolkit().nvcc), "-shared", "-Xcompiler=-fPIC", *build.BASE_FLAGS]
    common += [*build.gencode_flags([arch]), *(f"-I{path}" for path in build.include_dirs())]
    root = build.cuda_sources()

    def compile_one(path: Path) -> None:
        output = library_of(folder, str(path.relative_to(root)))
        done = subprocess.run(
            [*common, str(path), "-o", str(output)], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise SystemExit(f"sanitize.py: {path} does not compile:\n{done.stderr}")

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, sorted(root.glob("*/*.cu"))))


def run_all(folder: Path) -> int:
    """Make every call; the number of those that went wrong."""
    gpu = Gpu()
    libraries: dict[str, ctypes.CDLL] = {}
    wrong = done = refused = 0
    for call in calls():
        if call.source not in libraries:
            print(f"sanitize.py: {call.source}", flush=True)  # where a run that does not end was
            libraries[call.source] = ctypes.CDLL(str(library_of(folder, call.source)))
        status = gpu.run(libraries[call.source], call)
        done += 1
        refused += status == NOT_SUPPORTED
        if status != 0 and not (status == NOT_SUPPORTED and call.may_refuse):
            wrong += 1
            print(f"sanitize.py: {call.source} {call.function}: CUDA error {status}", flush=True)
    print(f"sanitize.py: {done} calls of {len(libraries)} files, {refused} refused, {wrong} wrong")
    return wrong


def run_python(name: str, dtypes: Sequence[str]) -> int:
    """Call a GEMV in Python at GEMV_SHAPES; the number of calls that went wrong."""
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes of its own
    import torch
    from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner

    from minidecode.kernels import ops, registry
    from minidecode.kernels.gemv import inductor

    # Under a tool there is no end of inductor's trials: its kernels as they are, with the first
    # tile instead of the best. Coordinate descent stays on, without a step: it is what makes a
    # reduction of the product, where otherwise kernels of cuBLASLt would be among the choices.
    inductor.OPTIONS["max_autotune"] = False
    mock.patch.object(CoordescTuner, "autotune", lambda tuner, timed, first, *_: first).start()
    wrong = done = refused = 0
    gemv = registry.resolve(name)
    cases = list(itertools.product(GEMV_SHAPES, (0, 1)))
    if name == "inductor":
        # A case is a compilation, under a tool as well: of each shape in turn one of the two.
        cases = [(shape, i % 2) for i, shape in enumerate(GEMV_SHAPES)]
    if name == "cublas":
        # At 1,000 aligned rows initcheck took a y that was right for unwritten, and racecheck told
        # of hazards in NVIDIA's nvjet kernels: these use TMA, we think, which neither follows.
        cases = [((n, k), by) for (n, k), by in cases if n < 1000 or k % 8 or by]
    for dtype, ((n, k), by) in itertools.product(dtypes or gemv.dtypes, cases):
        kind = ops.torch_dtype(dtype)
        host = [torch.from_numpy(halves(*shape)).to(kind) for shape in ((n, k), (k,))]
        w = torch.empty(n * k + by, dtype=kind, device="cuda")[by:].view(n, k)
        x, y = (torch.empty(size, dtype=kind, device="cuda") for size in (k, n))
        w.copy_(host[0])
        x.copy_(host[1])
        done += 1
        try:
            gemv.bind(y, w, x)()
        except ops.NotSupportedError:
            refused += 1
            continue
        expected, scale = ops.gemv_reference_and_scale(*host)
        off = (y.cpu().double() - expected).abs()
        allowed = ROW_TOLERANCE[dtype] * scale + TOLERANCE[dtype] * expected.abs()
        if not bool((off <= allowed).all()):
            wrong += 1
            print(f"sanitize.py: {name} {dtype} {n}x{k}: off by {off.max()}", flush=True)
    print(f"sanitize.py: {done} calls of {name}, {refused} refused, {wrong} wrong")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("build", "run"):
        commands.add_parser(name).add_argument("folder", type=Path)
    python = commands.add_parser("python")
    python.add_argument("name", metavar="NAME")
    python.add_argument("dtypes", nargs="*", metavar="DTYPE")
    args = parser.parse_args(arguments)
    if args.command == "build":
        build_all(args.folder, build.architecture(*Gpu().capability))
        return 0
    wrong = run_python(args.name, args.dtypes) if args.command == "python" else run_all(args.folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
