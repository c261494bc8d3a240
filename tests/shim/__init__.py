"""Runs the project's CUDA sources on the CPU, under AddressSanitizer and UBSan.

    from shim import STREAM, host_library

    library = host_library(Path("cuda/gemv/naive.cu"))
    y = np.full(3, np.nan, np.float16)
    status = library.call("minidecode_gemv", y, w, x, 3, 64, STREAM, late=[x])

The `.cu` file is compiled by g++ against `include/` here and NVIDIA's own `cuda_fp16.h`; CUDA
threads are fibers (`scheduler.cpp`). `Runner.call` copies arrays to a subprocess, calls the
`extern "C"` function there, copies what changed back into the same arrays and returns its status.
Skip with `unavailable()`'s words where there is no g++, no libasan or no CUDA header.

Arguments: a NumPy array or a CPU torch tensor (contiguous) is a pointer; None a null pointer; an
int a C int, a float a C float, a ctypes scalar its own type; STREAM the one stream that the kernels
may use; a ctypes Structure is passed by address, with its pointer fields (c_void_p, POINTER),
nested ones too, holding addresses of arrays that are listed in `buffers`:

    args = AttentionArgs(out=out.ctypes.data, k=cache.ctypes.data, position=7)   # or data_ptr()
    library.call("minidecode_attention", args, STREAM, buffers=[out, cache])

An array keeps its address modulo 16, so `storage[1:]` of an FP16 array is a misaligned one. Its
exact bounds are checked: one element past the end is an AddressSanitizer error. Arrays that overlap
stay overlapping. Writing into a NumPy array whose `flags.writeable` is False is a fault.

    late        arrays that the previous kernel of the step writes: with a dependent launch (PDL),
                touching them before minidecode::pdl_wait() is an AddressSanitizer error
    order       0 to 3, which threads and blocks run ahead of the others (forward, backward, halves
                turned, random); blocks of one launch take turns, so vary it where there are few
    max_groups  run only that many blocks (or clusters), half at each end of the grid
    capability  compute capability that the kernels see, (9, 0) by default; (8, 0) has no PDL

HostKernelError is what a caught fault raises: its text has the sanitizer's or scheduler's report. A
barrier that not every thread reaches, lanes that disagree about a shuffle, a launch on another
stream, reading a finished block's shared memory and a bulk copy nobody waits for are such faults;
shared memory is NaN at the start of a block.

`host_library(source, overlay={path: text})` compiles with other text for any file in `cuda/` (a
mutant). Results are cached by content in the temporary directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import pickle
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
CUDA = HERE.parent.parent / "cuda"

FLAGS = (
    *("-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-w"),
    *("-fno-strict-aliasing", "-fno-omit-frame-pointer", "-fvisibility=hidden", "-fno-gnu-unique"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DMINIDECODE_HOST_SHIM"),
)
RUNTIME_FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:quarantine_size_mb=16",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


class _Stream:
    """The stream argument of a call."""


STREAM = _Stream()
_STREAM_HANDLE = 0x5EED0


class HostKernelError(Exception):
    """A kernel was caught doing what it must not; str() is the report."""


class HostCompileError(Exception):
    """g++ refused a source; str() is what it said."""


# --- what is there to compile with ----------------------------------------------------------------


@functools.cache
def _toolkit_include() -> Path | None:
    """The folder of cuda_fp16.h: beside nvcc, or in the wheels that CUDA builds of torch bring."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:  # perhaps a script that starts another one: ask it where it lives
        said = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-E", os.devnull], capture_output=True)
        homes[:0] = re.findall(r"^#\$ TOP=(.*)$", said.stderr.decode(), re.MULTILINE)
    folders = [Path(home) / "include" for home in homes if home]
    wheels = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    folders += [*wheels.glob("cu*/include"), wheels / "cuda_runtime" / "include"]
    needed = ("cuda_fp16.h", "cuda_runtime_api.h", "crt/host_defines.h")
    for folder in folders:
        if all((folder / name).is_file() for name in needed):
            return folder
    return None


@functools.cache
def _compiler_file(name: str) -> str | None:
    """The path of one of g++'s own libraries."""
    gxx = shutil.which("g++")
    if gxx is None:
        return None
    said = subprocess.run([gxx, f"-print-file-name={name}"], capture_output=True, text=True)
    path = Path(said.stdout.strip())
    return str(path.resolve()) if path.is_absolute() and path.exists() else None


@functools.cache
def unavailable() -> str | None:
    """Why the shim cannot be built here, or None."""
    if sys.platform != "linux":
        return "the host shim needs Linux"
    if shutil.which("g++") is None:
        return "the host shim needs g++"
    if _compiler_file("libasan.so") is None:
        return "the host shim needs g++'s AddressSanitizer library (libasan)"
    if _toolkit_include() is None:
        return "the host shim needs cuda_fp16.h of a CUDA toolkit (nvcc on PATH or its wheels)"
    return None


# --- compiling ------------------------------------------------------------------------------------


def _cache() -> Path:
    folder = Path(tempfile.gettempdir()) / f"minidecode-shim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


@functools.cache
def _fixed_key() -> bytes:
    """A hash of all that goes into a library beside the project's sources."""
    digest = hashlib.sha256()
    version = subprocess.run(["g++", "-v"], capture_output=True).stderr
    digest.update(version + repr((FLAGS, RUNTIME_FLAGS, _toolkit_include())).encode())
    for path in sorted(HERE.rglob("*")):
        if path.suffix in (".h", ".cpp", ".cuh"):
            digest.update(str(path.relative_to(HERE)).encode() + path.read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.digest()


def _run_compiler(command: Sequence[str | Path], output: Path) -> None:
    """Runs g++ with its output put in place at once, so that a reader never sees half a file."""
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        made = Path(scratch) / output.name
        said = subprocess.run(
            ["g++", *command, "-o", made], capture_output=True, text=True, check=False
        )
        if said.returncode != 0:
            raise HostCompileError(said.stderr.strip())
        os.replace(made, output)


def _runtime() -> Path:
    library = _cache() / f"libruntime-{_fixed_key().hex()[:16]}.so"
    if not library.exists():
        include = ("-isystem", str(_toolkit_include()))
        _run_compiler([*RUNTIME_FLAGS, *include, *sorted(HERE.glob("*.cpp"))], library)
    return library


_DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:(?:alignas|__align__)\s*\([^)]*\)\s*)?"
    r"([A-Za-z_][\w:<>, ]*?)\s+(\w+)\s*\[\s*\]\s*;"
)
_SHARED_ALIGNAS = re.compile(r"__shared__\s+(alignas\s*\([^)]*\))")


def translate(text: str, origin: Path) -> str:
    """CUDA source as g++ takes it: line for line, but for two forms of shared memory.

    `__shared__` is the macro `static`, so a dynamic array (`extern`) becomes a pointer, and
    `alignas` goes before it.
    """
    text = _DYNAMIC_SHARED.sub(r"auto* const \2 = ::minidecode_shim::dynamic_shared<\1>();", text)
    text = _SHARED_ALIGNAS.sub(r"\1 __shared__", text)
    return f'#line 1 "{origin}"\n{text}'


def build_library(
    source: Path, defines: Sequence[str] = (), overlay: Mapping[Path, str] | None = None
) -> Path:
    """Compiles one `.cu` file for the host (or finds it compiled) and returns the shared library.

    defines: macros, as `NAME` or `NAME=VALUE`. overlay: other text for files of the project.
    """
    source = source.resolve()
    texts = {path: path.read_text(encoding="utf-8") for path in CUDA.rglob("*.cuh")}
    texts[source] = source.read_text(encoding="utf-8")
    for path, text in (overlay or {}).items():
        if path.resolve() not in texts:
            raise ValueError(f"{path} is neither {source} nor a header in {CUDA}")
        texts[path.resolve()] = text
    digest = hashlib.sha256(_fixed_key() + repr((source, tuple(defines))).encode())
    for path in sorted(texts):
        digest.update(f"{path}\0{texts[path]}\0".encode())
    library = _cache() / f"{source.stem}-{digest.hexdigest()[:24]}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        for path, text in texts.items():
            inside = path.relative_to(CUDA) if path.is_relative_to(CUDA) else Path(path.name)
            target = tree / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(translate(text, path), encoding="utf-8")
            if path == source:
                main = target
        runtime = _runtime()
        command: list[str | Path] = [*FLAGS, *(f"-D{define}" for define in defines)]
        command += ["-I", HERE / "include", "-I", tree / "include"]
        command += ["-isystem", str(_toolkit_include()), "-x", "c++", main]
        command += ["-x", "none", runtime, f"-Wl,-rpath,{runtime.parent}", "-Wl,-z,defs"]
        _run_compiler(command, library)
    return library


def host_library(
    source: Path, defines: Sequence[str] = (), overlay: Mapping[Path, str] | None = None
) -> Runner:
    """The functions of a `.cu` file, compiled for the host: see `build_library` and `Runner`."""
    return Runner(build_library(source, defines, overlay))


# --- calling --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Region:
    """Memory of this process that a call works on: [address, address + size)."""

    address: int
    size: int
    writable: bool

    def view(self) -> memoryview:
        return memoryview((ctypes.c_char * self.size).from_address(self.address)).cast("B")


def _as_region(value: Any) -> _Region:
    array = np.asarray(value)
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} is not contiguous")
    return _Region(array.ctypes.data, array.nbytes, array.flags.writeable)


def _merge(regions: Sequence[_Region]) -> list[_Region]:
    """Disjoint regions that cover the given ones, which may overlap."""
    merged: list[_Region] = []
    for region in sorted(regions, key=lambda r: (r.address, -r.size)):
        if merged and region.address < merged[-1].address + merged[-1].size:
            last = merged.pop()
            end = max(last.address + last.size, region.address + region.size)
            merged.append(
                _Region(last.address, end - last.address, last.writable or region.writable)
            )
        elif region.size > 0:
            merged.append(region)
    return merged


def _locate(regions: Sequence[_Region], address: int) -> tuple[int, int]:
    """(index of the region, offset in it) of an address."""
    for i, region in enumerate(regions):
        if region.address <= address < region.address + region.size:
            return i, address - region.address
    raise ValueError(f"pointer {address:#x} is in none of the call's arrays (list it in buffers)")


def _pointer_fields(kind: Any, offset: int = 0) -> Iterator[int]:
    """Byte offsets of all pointers in a ctypes type, nested structures and arrays included."""
    if kind is ctypes.c_void_p or issubclass(kind, ctypes._Pointer):
        yield offset
    elif issubclass(kind, ctypes.Array):
        for i in range(kind._length_):
            yield from _pointer_fields(kind._type_, offset + i * ctypes.sizeof(kind._type_))
    elif issubclass(kind, ctypes.Structure):
        for owner in kind.__mro__:
            for name, field_type, *_ in owner.__dict__.get("_fields_", ()):
                yield from _pointer_fields(field_type, offset + getattr(kind, name).offset)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "data_ptr")


class Runner:
    """A library in a subprocess, started with the first call and again after a fault."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self.launches = 0  # kernels that the last call launched
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def close(self) -> None:
        """Ends the subprocess."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def has(self, function: str) -> bool:
        """Whether the library exports a function."""
        return bool(self._request({"has": function}, 60.0)["has"])

    def call(
        self,
        function: str,
        *args: Any,
        buffers: Sequence[Any] = (),
        late: Sequence[Any] = (),
        order: int = 0,
        max_groups: int = 0,
        capability: tuple[int, int] = (9, 0),
        multiprocessors: int = 4,
        timeout: float = 60.0,
    ) -> int:
        """Calls an `extern "C"` function that returns an int; see the module's text.

        Raises HostKernelError for a fault and for a call that takes longer than `timeout` seconds.
        """
        arrays = [*(a for a in args if _is_array(a)), *buffers, *late]
        regions = _merge([_as_region(a) for a in arrays])
        reply = self._request(
            {
                "function": function,
                "args": [self._encode(a, regions) for a in args],
                "regions": [(r.address % 16, bytes(r.view())) for r in regions],
                "late": [(*_locate(regions, r.address), r.size) for r in map(_as_region, late)],
                "settings": (order, max_groups, _STREAM_HANDLE, *capability, multiprocessors),
            },
            timeout,
        )
        for region, data in zip(regions, reply["regions"], strict=True):
            if data is not None:
                if not region.writable:
                    raise HostKernelError(f"{function} wrote into a read-only array")
                region.view()[:] = data
        self.launches = reply["launches"]
        return int(reply["status"])

    def _encode(self, value: Any, regions: Sequence[_Region]) -> tuple[Any, ...]:
        if value is None:
            return ("c_void_p", 0)
        if value is STREAM:
            return ("c_void_p", _STREAM_HANDLE)
        if _is_array(value):
            return ("region", *_locate(regions, _as_region(value).address))
        if isinstance(value, ctypes.Structure):
            places = []
            for offset in _pointer_fields(type(value)):
                address = ctypes.c_uint64.from_buffer(value, offset).value
                if address != 0:
                    places.append((offset, *_locate(regions, address)))
            return ("struct", bytes(value), places)
        if isinstance(value, ctypes._SimpleCData):
            return (type(value).__name__, value.value)
        if isinstance(value, float):
            return ("c_float", value)
        if isinstance(value, int):
            return ("c_int", value)
        raise TypeError(f"cannot pass a {type(value).__name__}")

    def _start(self) -> subprocess.Popen[bytes]:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (close() closes it)
        preload = filter(None, map(_compiler_file, ("libasan.so", "libstdc++.so")))
        environment = {**os.environ, **SANITIZER_OPTIONS, "LD_PRELOAD": ":".join(preload)}
        return subprocess.Popen(
            [sys.executable, "-I", "-S", HERE / "runner.py", self.library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )

    def _request(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(timeout, stop)
        timer.start()
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            reply = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            process.wait()
            self._log.seek(0)
            report = self._log.read().decode(errors="replace").strip()
            if late.is_set():
                report = f"no answer in {timeout:g} s\n{report}"
            self.close()
            what = request.get("function", self.library.name)
            raise HostKernelError(f"{what}: exit status {process.returncode}\n{report}") from None
        finally:
            timer.cancel()
        if "error" in reply:
            raise HostKernelError(reply["error"])
        return reply  # type: ignore[no-any-return]
