"""Compiles a `.cu` file on first use and hands back a ctypes library.

The only caller of `torch.utils.cpp_extension.load`. Kernels never include a torch header: they are
`extern "C"` functions on pointers, so a build takes about a second and works with every torch. What
one build depends on (path, flags, architecture, versions, the contents of the source and of every
header of ours or the user's that it includes) is hashed into the extension's name, so that a change
of any of them is a new extension and nothing stale is ever loaded.

A build runs under a file lock in a folder that is made anew, so that what a killed builder left
behind (torch's own `lock` file, on which its `load()` would wait for ever, or half an object file)
is never met. `build.json` is written last: a folder that has it is complete and is loaded without a
lock and without starting a compiler, from a read-only cache too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minidecode.errors import MinidecodeError, MissingError, UsageError

# Where a CUDA toolkit is looked for when neither CUDA_HOME nor PATH nor a wheel has one.
SYSTEM_ROOTS: tuple[Path, ...] = (Path("/usr/local/cuda"),)

# torch defines __CUDA_NO_HALF_*, which takes `half2 * half2` away from kernels that rely on it.
# Hidden visibility keeps the inline and template statics of two loaded kernels apart.
BASE_FLAGS: tuple[str, ...] = (
    "-O3",
    "-std=c++17",
    "-lineinfo",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-Xcompiler=-fvisibility=hidden",
)

# What a user may write in TORCH_CUDA_ARCH_LIST beside numbers; the names are torch's.
NAMED_ARCHITECTURES: dict[str, str] = {
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}

# Variables that change what the compilers do, and so belong to the name of a build.
COMPILER_VARIABLES: tuple[str, ...] = (
    "CC",
    "CXX",
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "NVCC_APPEND_FLAGS",
    "NVCC_PREPEND_FLAGS",
    "PYTORCH_NVCC",
)

MARKER = "build.json"
LOG = "build.log"

# Called as on_build(kernel name, phase) with phase "waiting" (another process builds the same
# kernel), "compiling", "done" or "failed", so that a command can show progress. Called from worker
# threads when several kernels are built at once.
on_build: Callable[[str, str], None] | None = None

_loaded: dict[str, ctypes.CDLL] = {}
_failures: dict[str, int] = {}
_seconds = 0.0
_state = threading.Lock()
_environment = threading.RLock()


class CompileError(MinidecodeError):
    """A kernel file does not compile, link or load.

    `errors` holds the compilers' own lines as `file:line: message`, `output` all they said.
    """

    def __init__(self, message: str, errors: Sequence[str] = (), output: str = "") -> None:
        super().__init__(message)
        self.errors = tuple(errors)
        self.output = output


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: `root` has bin/nvcc and include/, `library_dir` a libcudart.so[.N]."""

    root: Path
    version: str
    library_dir: Path

    @property
    def nvcc(self) -> Path:
        return self.root / "bin" / "nvcc"

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])


@dataclass(frozen=True)
class BuildPlan:
    """All that one build does, decided before anything is started.

    source: the kernel file. contents: `source_hash` of it. name: the extension, unique for
    everything the build depends on. directory: where it is built and kept. cuda_flags: for nvcc,
    unquoted. arch: "90a", "86+PTX", …
    """

    source: Path
    contents: str
    name: str
    directory: Path
    cuda_flags: tuple[str, ...]
    arch: tuple[str, ...]
    toolkit: Toolkit

    @property
    def title(self) -> str:
        """What a person calls this kernel."""
        return self.source.stem

    @property
    def wrapper(self) -> Path:
        """The file that the compiler is given: ABI declarations, then the kernel file.

        Its name has no blanks or colons, which the build file's syntax would trip over, and the
        declarations come first so that a user's file exports its entry points although everything
        else in it is hidden, and a wrong signature is a compiler error.
        """
        return self.directory / f"{_identifier(self.source.stem)}.cu"

    def wrapper_text(self) -> str:
        return f"#include <minidecode/abi.cuh>\n#include {_c_string(self.source)}\n"

    def ld_flags(self) -> tuple[str, ...]:
        """Flags for the linker, unquoted: where libcudart is, when linking and when running."""
        libraries = self.toolkit.library_dir
        search = libraries if (libraries / "libcudart.so").exists() else link_dir(self.toolkit)
        return (f"-L{search}", f"-Wl,-rpath,{libraries}")


def cuda_sources() -> Path:
    """The folder of the kernel sources: `cuda/` of a checkout, or its copy inside the wheel."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_cuda", package.parent / "cuda"):
        if (folder / "include" / "minidecode" / "abi.cuh").is_file():
            return folder
    raise MinidecodeError(f"the kernel sources are missing from {package}: reinstall minidecode")


def include_dirs() -> tuple[Path, ...]:
    """What every kernel file may include from: `#include <minidecode/…>`."""
    return (cuda_sources() / "include",)


def kernel_cache() -> Path:
    """The folder that holds one subfolder for each build."""
    from minidecode.cache import cache_dir

    return cache_dir() / "kernels"


def build_seconds() -> float:
    """Wall-clock seconds that this process has spent compiling or waiting for a compiler."""
    return _seconds


# --- what a source consists of --------------------------------------------------------------------

# Comments; in the group what only looks like one: strings, characters, <a//b.cuh>.
_COMMENT = re.compile(
    rb"""("(?:[^"\\\n]|\\.)*"|(?<![0-9A-Fa-f])'(?:[^'\\\n]|\\.)+'"""
    rb"""|^[ \t]*#[ \t]*include[ \t]*<[^>\n]+>)|//[^\n]*|/\*.*?\*/""",
    re.DOTALL | re.MULTILINE,
)
# `#define FILE "file.cuh"` as well: `#include FILE` may follow.
_INCLUDE = re.compile(
    rb'^[ \t]*#[ \t]*(?:include|define[ \t]+\w+)[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE
)


def included_files(source: Path, search: Sequence[Path] | None = None) -> list[Path]:
    """`source` and every header it includes, directly or not, that lies beside it or in `search`.

    By default in our own folder and those that the compilers' variables name. Headers of the
    toolkit and of the system are not followed: the compiler's version stands for them. Conditions
    are not evaluated, so a header behind an `#if` counts as included.
    """
    folders = (*include_dirs(), *_extra_dirs()) if search is None else tuple(search)
    found: dict[Path, None] = {}
    waiting = [_absolute(source)]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = None
        code = _COMMENT.sub(rb"\1 ", _read(path).replace(b"\\\n", b""))
        for quoted, angled in _INCLUDE.findall(code):
            name = os.fsdecode(quoted or angled)
            beside = (path.parent,) if quoted else ()
            for folder in (*beside, *folders):
                candidate = folder / name
                if os.path.isfile(candidate):  # False for a name that is none at all, too
                    waiting.append(_absolute(candidate))
                    break
    return list(found)


def _extra_dirs() -> list[Path]:
    """Folders of headers from the variables that the compilers read, without whole toolkits."""
    named = [os.environ.get(name, "") for name in ("CPATH", "CPLUS_INCLUDE_PATH")]
    folders = [folder for value in named for folder in value.split(os.pathsep)]
    for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        folders += re.findall(
            r"(?:-I|--include-path[= ]|-isystem)\s*(\S+)", os.environ.get(name, "")
        )
    paths = [Path(folder) for folder in dict.fromkeys(folders) if folder]
    return [path for path in paths if not (path / "cuda_runtime.h").is_file()]


def source_hash(source: Path, search: Sequence[Path] | None = None) -> str:
    """Hash of the contents of `source` and of all the headers of `included_files`."""
    digest = hashlib.sha256()
    for path in sorted(included_files(source, search)):
        digest.update(os.fsencode(path) + b"\0" + hashlib.sha256(_read(path)).digest())
    return digest.hexdigest()


def _absolute(path: Path) -> Path:
    """Without following links: a compiler looks for headers beside the name that it is given."""
    return Path(os.path.abspath(path))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"no such kernel file: {path}") from None
    except OSError as error:
        raise MinidecodeError(f"cannot read {path}: {error.strerror}") from None


# --- compilers ------------------------------------------------------------------------------------


def find_toolkit() -> Toolkit:
    """The CUDA toolkit to build with.

    CUDA_HOME (or CUDA_PATH) if set; else the first of the nvcc on PATH, the `nvcc` extra's wheels
    and /usr/local/cuda whose major version is torch's, else the first of them.
    Raises MissingError when there is none.
    """
    import torch

    explicit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or ""
    wanted = (torch.version.cuda or "").split(".")[0]
    return _find_toolkit(explicit, os.environ.get("PATH", ""), wanted, SYSTEM_ROOTS)


@functools.lru_cache(maxsize=8)
def _find_toolkit(explicit: str, path: str, wanted: str, roots: tuple[Path, ...]) -> Toolkit:
    if explicit:
        toolkit = _probe(Path(explicit) / "bin" / "nvcc")
        if toolkit is None:
            raise MissingError(
                f"CUDA_HOME is {explicit}, but there is no working {explicit}/bin/nvcc: set it to a"
                ' CUDA toolkit, or unset it and pip install "minidecode[nvcc]"'
            )
        return toolkit
    on_path = shutil.which("nvcc", path=path)
    candidates = [Path(on_path)] if on_path else []
    candidates += [root / "bin" / "nvcc" for root in (*_wheel_roots(), *roots)]
    first: Toolkit | None = None
    for candidate in candidates:
        toolkit = _probe(candidate)
        if toolkit is not None:
            if not wanted or str(toolkit.major) == wanted:
                return toolkit
            first = first or toolkit
    if first is None:
        raise MissingError(
            'no CUDA compiler (nvcc) found: pip install "minidecode[nvcc]", or install a CUDA'
            " toolkit and set CUDA_HOME"
        )
    return first


def _wheel_roots() -> list[Path]:
    """The toolkit folders that NVIDIA's wheels make, such as site-packages/nvidia/cu13."""
    spec = find_spec("nvidia")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return sorted((root for p in places for root in Path(p).glob("cu[0-9]*")), reverse=True)


def _probe(nvcc: Path) -> Toolkit | None:
    """The toolkit that `nvcc` belongs to, or None when it does not run."""
    text = _output_of([str(nvcc), "--version"])
    version = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    if version is None:
        return None
    root = nvcc.parent.parent
    if not (root / "include" / "cuda_runtime.h").is_file():
        # A script or link elsewhere on PATH: nvcc itself knows where the toolkit is.
        told = _output_of([str(nvcc), "--dryrun", "-E", "-x", "cu", os.devnull])
        top = re.search(r"^#\$ TOP=(.+)$", told, re.MULTILINE)
        if top is not None:
            root = Path(top.group(1).strip()).resolve()
    for name in ("lib64", "lib", *sorted(str(p) for p in root.glob("targets/*/lib"))):
        if any((root / name).glob("libcudart.so*")):
            return Toolkit(root, version.group(1), root / name)
    return Toolkit(root, version.group(1), root / "lib64")


def _output_of(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def link_dir(toolkit: Toolkit) -> Path:
    """A folder of ours with a `libcudart.so` for toolkits that only have `libcudart.so.13`."""
    versions = sorted(toolkit.library_dir.glob("libcudart.so.*"), key=lambda p: len(p.name))
    if not versions:
        raise MissingError(
            f"the CUDA toolkit in {toolkit.root} has no libcudart.so: pip install"
            ' "minidecode[nvcc]", or set CUDA_HOME to a complete toolkit'
        )
    key = hashlib.sha256(os.fsencode(versions[0])).hexdigest()[:12]
    folder = kernel_cache() / f"cudart-{key}"
    link = folder / "libcudart.so"
    if not link.exists():
        with _cache_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            fresh = folder / f"libcudart.so.{os.getpid()}.{threading.get_ident()}"
            fresh.symlink_to(versions[0])
            fresh.replace(link)
    return folder


def host_compiler() -> str:
    """The C++ compiler that nvcc and the linker step use. MissingError when there is none."""
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else ("g++", "c++"):
        found = shutil.which(name)
        if found is not None:
            return found
    raise MissingError(
        f"the C++ compiler in CXX, {chosen}, is not there"
        if chosen
        else "no C++ compiler found: nvcc needs a host g++ (Debian, Ubuntu: apt install g++)"
    )


def ninja_dir() -> str | None:
    """The folder to add to PATH so that `ninja` is found; None when PATH has it already."""
    if shutil.which("ninja") is not None:
        return None
    try:
        import ninja
    except ImportError:
        raise MissingError("ninja is not installed: pip install ninja") from None
    return str(ninja.BIN_DIR)


# --- architectures --------------------------------------------------------------------------------


def architectures() -> tuple[str, ...]:
    """What to compile for: TORCH_CUDA_ARCH_LIST if set, and the visible GPUs in any case.

    A GPU could run the PTX of an older target, but without what that lacks (bulk copies, clusters),
    while what launches a kernel goes by the GPU.
    """
    import torch

    text = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    listed = parse_arch_list(text) if text and text.lower() != "native" else ()
    if not torch.cuda.is_available():
        if listed:
            return listed
        raise MissingError(
            "no CUDA GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES, or set"
            " TORCH_CUDA_ARCH_LIST to compile for a GPU that is not here"
        )
    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    own = [architecture(*capability) for capability in sorted(capabilities)]
    there = {_number(arch) for arch in listed}
    return (*listed, *(a for a in own if _number(a) not in there and (not listed or _known(a))))


def _known(arch: str) -> bool:
    """Whether nvcc can compile for it: not so for a GPU newer than the toolkit."""
    try:
        nvcc = find_toolkit().nvcc
    except MissingError:  # said where something is compiled
        return True
    return f"compute_{_number(arch)}" in _supported(nvcc)


@functools.lru_cache(maxsize=8)
def _supported(nvcc: Path) -> tuple[str, ...]:
    return tuple(_output_of([str(nvcc), "--list-gpu-arch"]).split())


def _number(arch: str) -> int:
    """90 of "90a+PTX"."""
    return int(re.sub(r"\D", "", arch))


def architecture(major: int, minor: int) -> str:
    """(9, 0) -> "90a": Hopper's own instructions are only in the architecture-specific target."""
    return f"{major}{minor}a" if (major, minor) == (9, 0) else f"{major}{minor}"


def parse_arch_list(text: str) -> tuple[str, ...]:
    """TORCH_CUDA_ARCH_LIST, such as "8.6;9.0a+PTX" or "Hopper", as ("86", "90a+PTX")."""
    result: dict[str, None] = {}
    for item in re.split(r"[;,\s]+", text.strip()):
        for part in NAMED_ARCHITECTURES.get(item, item).split(";"):
            match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", part)
            if match is None:
                raise UsageError(f"TORCH_CUDA_ARCH_LIST: unknown architecture {item!r}")
            major, minor, suffix, ptx = match.groups()
            result[f"{major}{minor}{suffix}{ptx or ''}"] = None
    return tuple(result)


def gencode_flags(arch: Sequence[str]) -> tuple[str, ...]:
    """("86", "90a+PTX") as nvcc flags."""
    flags = []
    for item in arch:
        number = item.removesuffix("+PTX")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if item.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return tuple(flags)


# --- building -------------------------------------------------------------------------------------


def plan_build(
    source: Path,
    arch: Sequence[str] | None = None,
    *,
    extra_flags: Sequence[str] = (),
    toolkit: Toolkit | None = None,
) -> BuildPlan:
    """Decides name, folder and flags; starts no compiler but `nvcc --version`, once a process."""
    import torch

    source = _absolute(source)
    if not source.is_file():
        raise UsageError(f"no such kernel file: {source}")
    toolkit = toolkit or find_toolkit()
    arch = tuple(arch if arch is not None else architectures())
    flags = [*BASE_FLAGS, *gencode_flags(arch)]
    flags += [f"-I{folder}" for folder in include_dirs()]
    if not os.environ.get("CC"):  # with CC set, torch passes -ccbin itself
        host = host_compiler()
        if os.environ.get("CXX") or Path(host).name != "g++":
            flags.append(f"-ccbin={host}")
    flags += extra_flags
    contents = source_hash(source)
    depends = {
        "path": str(source),
        "flags": flags,
        "arch": arch,
        "torch": torch.__version__,
        "nvcc": [str(toolkit.root), toolkit.version],
        "environment": {name: os.environ.get(name) for name in COMPILER_VARIABLES},
        "sources": contents,
        "abi": source_hash(cuda_sources() / "include" / "minidecode" / "abi.cuh"),
    }
    key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]
    name = f"minidecode_{_identifier(source.parent.name)}_{_identifier(source.stem)}_{key}"
    return BuildPlan(source, contents, name, kernel_cache() / name, tuple(flags), arch, toolkit)


def build(source: Path, *, extra_flags: Sequence[str] = (), verbose: bool = False) -> ctypes.CDLL:
    """The library made from `source`, compiled if it or anything it depends on has changed.

    Raises CompileError with the compiler's words, MissingError when torch has no CUDA, or nvcc, g++
    or a GPU is missing, UsageError when there is no such file.
    """
    return build_many([source], extra_flags=extra_flags, verbose=verbose)[0]


def build_many(
    sources: Sequence[Path], *, extra_flags: Sequence[str] = (), verbose: bool = False
) -> list[ctypes.CDLL]:
    """Like `build` for each file, with the compilers running side by side (at most MAX_JOBS)."""
    require_cuda_torch()
    plans = [plan_build(source, extra_flags=extra_flags) for source in sources]
    return run_builds(plans, verbose=verbose)


def require_cuda_torch() -> None:
    """MissingError when this torch cannot use CUDA at all."""
    import torch

    if torch.version.cuda is None:
        raise MissingError(
            f"this PyTorch ({torch.__version__}) is built without CUDA: a CUDA build is needed"
        )


def run_builds(plans: Sequence[BuildPlan], *, verbose: bool = False) -> list[ctypes.CDLL]:
    """Loads what is built already and builds the rest, in parallel."""
    missing = {plan.name: plan for plan in plans if _load_built(plan) is None}
    if missing:
        global _seconds
        start = time.perf_counter()
        jobs = os.environ.get("MAX_JOBS", "")
        limit = int(jobs) if jobs.isdigit() and int(jobs) > 0 else os.cpu_count() or 1
        try:
            with (
                _torch_environment(next(iter(missing.values())).toolkit) as extension,
                ThreadPoolExecutor(min(limit, len(missing))) as pool,
            ):
                todo = list(missing.values())
                list(pool.map(lambda plan: _locked_build(plan, extension, verbose), todo))
        finally:
            with _state:
                _seconds += time.perf_counter() - start
    return [_loaded[plan.name] for plan in plans]


def built_library(plan: BuildPlan) -> Path | None:
    """The finished library of `plan` in the cache, or None."""
    try:
        record = json.loads((plan.directory / MARKER).read_text(encoding="utf-8"))
        library = plan.directory / str(record["library"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return library if library.is_file() else None


def _load_built(plan: BuildPlan) -> ctypes.CDLL | None:
    with _state:
        if plan.name in _loaded:
            return _loaded[plan.name]
        path = built_library(plan)
        if path is None:
            return None
        try:
            library = ctypes.CDLL(str(path))
        except OSError:  # damaged in the cache: built again
            return None
        _loaded[plan.name] = library
        return library


def _locked_build(plan: BuildPlan, extension: Any, verbose: bool) -> None:
    from filelock import FileLock, Timeout

    with _cache_errors(plan.directory):
        plan.directory.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(plan.directory) + ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _report(plan, "waiting")
            lock.acquire()  # the system frees the lock of a process that dies
    try:
        if _load_built(plan) is None:
            _report(plan, "compiling")
            _build(plan, extension, verbose)
            _report(plan, "done")
    except BaseException:
        _report(plan, "failed")
        raise
    finally:
        lock.release()


def _build(plan: BuildPlan, extension: Any, verbose: bool) -> None:
    """Compiles and loads `plan`; the caller holds its lock."""
    if re.search(r"[:$\n]", str(plan.directory)):
        raise MinidecodeError(
            f"ninja builds in no folder with ':' or '$' in its path, {plan.directory.parent}: set"
            " MINIDECODE_CACHE_DIR to another one"
        )
    # After a failure torch would take the same name and inputs for done: a new name each time.
    attempt = _failures.get(plan.name, 0)
    name = f"{plan.name}_r{attempt}" if attempt else plan.name
    with _cache_errors(plan.directory):
        # Anew: a builder that was killed may have left its compilers running. They keep the old
        # folder, and the `lock` file and half-written objects go with it.
        shutil.rmtree(plan.directory, ignore_errors=True)
        plan.directory.mkdir()
        plan.wrapper.write_text(plan.wrapper_text(), encoding="utf-8")
        if not _is_plain(plan.toolkit.root):
            (plan.directory / "cuda").symlink_to(plan.toolkit.root, target_is_directory=True)
    start = time.perf_counter()
    try:
        extension.load(
            name=name,
            sources=[str(plan.wrapper)],
            extra_cuda_cflags=[_ninja_word(flag) for flag in plan.cuda_flags],
            extra_ldflags=[_ninja_word(flag) for flag in plan.ld_flags()],
            build_directory=str(plan.directory),
            is_python_module=False,
            verbose=verbose,
        )
        library = plan.directory / f"{name}.so"
        loaded = ctypes.CDLL(str(library))
        if source_hash(plan.source) != plan.contents:
            raise MinidecodeError(f"{plan.source} was changed while it was compiled: run it again")
    except (RuntimeError, OSError) as error:
        _failures[plan.name] = attempt + 1
        said = str(error)
        if isinstance(error.__cause__, OSError):  # the dynamic linker's words, behind torch's
            said += f"\n{error.__cause__}"
        raise _explain(plan, said) from error
    except BaseException:
        _failures[plan.name] = attempt + 1
        raise
    record = {
        "library": library.name,
        "source": str(plan.source),
        "arch": plan.arch,
        "flags": plan.cuda_flags,
        "nvcc": plan.toolkit.version,
        "seconds": round(time.perf_counter() - start, 3),
    }
    with _cache_errors(plan.directory):
        fresh = plan.directory / f"{MARKER}.new"
        fresh.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        fresh.replace(plan.directory / MARKER)
    with _state:
        _loaded[plan.name] = loaded


def _report(plan: BuildPlan, phase: str) -> None:
    if on_build is not None:
        on_build(plan.title, phase)


@contextlib.contextmanager
def _torch_environment(toolkit: Toolkit) -> Iterator[Any]:
    """torch.utils.cpp_extension, set to our toolkit and able to find ninja and a linker."""
    import torch.utils.cpp_extension as extension

    with _environment:
        before = dict(os.environ)
        home, libraries = extension.CUDA_HOME, extension.TORCH_LIB_PATH
        folder = ninja_dir()
        if folder is not None:
            os.environ["PATH"] = folder + os.pathsep + os.environ.get("PATH", "")
        if not os.environ.get("CXX") and shutil.which("c++") is None:
            os.environ["CXX"] = host_compiler()
        # torch puts these two on the linker's command line without quotes. ninja runs in the build
        # folder, where _build leaves a link for a root that needs quoting.
        extension.CUDA_HOME = str(toolkit.root) if _is_plain(toolkit.root) else "cuda"
        extension.TORCH_LIB_PATH = _ninja_word(str(libraries))
        try:
            yield extension
        finally:
            extension.CUDA_HOME, extension.TORCH_LIB_PATH = home, libraries
            for key in ("PATH", "CXX"):
                if key in before:
                    os.environ[key] = before[key]
                else:
                    os.environ.pop(key, None)


@contextlib.contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    """Turns what the file system refuses into one line that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MinidecodeError(
                f"no space left for the kernel cache in {folder.parent}: free some, or set"
                " MINIDECODE_CACHE_DIR to another folder"
            ) from error
        raise MinidecodeError(
            f"cannot write the kernel cache {folder.parent} ({error.strerror}): set"
            " MINIDECODE_CACHE_DIR to a folder that is writable"
        ) from error


# --- words of the compilers -----------------------------------------------------------------------

_ERROR_LINES = (
    # nvcc: kernel.cu(12): error: identifier "x" is undefined
    re.compile(r"^(?P<file>\S.*?)\((?P<line>\d+)\): (?:\w+ )?error(?: #[\w-]+)?: (?P<text>.+)$"),
    # g++: kernel.cu:12:10: fatal error: no.h: No such file or directory
    re.compile(r"^(?P<file>[^\s:][^:\n]*):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<text>.+)$"),
    # ptxas, nvlink, ld and nvcc without a place in the source
    re.compile(r"^(?P<text>(?:nvcc|ptxas|nvlink|cicc)\b.*?\b(?:fatal|error)\s*:.+)$"),
    re.compile(r"^(?:\S*/)?ld: (?P<text>(?:cannot find|.*undefined reference).+)$"),
    re.compile(r"^/.*\.so: (?P<text>undefined symbol: .+)$"),
)


def compiler_errors(output: str) -> list[str]:
    """The error lines in a compiler's output, as `file:line: message` or the message alone."""
    found: dict[str, None] = {}
    for line in output.splitlines():
        for pattern in _ERROR_LINES:
            match = pattern.match(line.strip())
            if match is not None:
                parts = match.groupdict()
                place = f"{parts['file']}:{parts['line']}: " if "file" in parts else ""
                found[place + parts["text"].strip()] = None
                break
    return list(found)


def _explain(plan: BuildPlan, output: str) -> MinidecodeError:
    if "No space left on device" in output:
        return MinidecodeError(
            f"no space left while compiling {plan.source}, in {plan.directory.parent} or in the"
            " folder for temporary files (TMPDIR)"
        )
    log = plan.directory / LOG
    with contextlib.suppress(OSError):
        log.write_text(output + "\n", encoding="utf-8")
    errors = compiler_errors(output)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    shown = errors or lines[-1:] or ["the compiler said nothing"]
    more = f" (and {len(shown) - 1} more)" if len(shown) > 1 else ""
    return CompileError(
        f"cannot compile {plan.source}: {shown[0]}{more}; all of it is in {log}", errors, output
    )


# --- quoting --------------------------------------------------------------------------------------


def _identifier(text: str) -> str:
    return re.sub(r"[^0-9A-Za-z_]", "_", text) or "kernel"


def _is_plain(path: Path) -> bool:
    """True for a path that a shell and a ninja file take as it is."""
    return re.fullmatch(r"[\w@%+=./,-]+", str(path), re.ASCII) is not None


def _ninja_word(flag: str) -> str:
    """One word of a command line inside a ninja file, whatever characters it has."""
    return shlex.quote(flag).replace("$", "$$")


def _c_string(path: Path) -> str:
    text = str(path)
    if any(c in text for c in '"\\\n'):
        raise UsageError(f"a kernel file's path may not hold quotes or backslashes: {text}")
    return f'"{text}"'
