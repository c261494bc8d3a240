"""Finds GEMV kernels by name or by file, and binds one to its tensors.

The registry is the folders `cuda/gemv/*.cu` and `minidecode/kernels/gemv/*.py`: adding a kernel is
adding one file. Listing them reads the files and runs none of them: what a CUDA kernel offers is
read off the entry points in its source, what a Python kernel offers off its constants.

A built-in Python kernel file has SUMMARY (str), DTYPES and DEVICES (tuples of str), a function
`gemv(y, w, x) -> None` and, where it may be missing something, `unavailable() -> str | None`.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import difflib
import hashlib
import importlib
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from minidecode.errors import MinidecodeError, MissingError, UsageError
from minidecode.kernels import build
from minidecode.kernels.ops import DTYPES, NotSupportedError, dtype_name

if TYPE_CHECKING:
    import torch

# Kernel sets that are whole engines and no single GEMV; the plan makes them.
ENGINES = ("fused", "torch")

DEVICES = ("cpu", "cuda")

SYMBOLS: dict[str, str] = {"fp16": "minidecode_gemv", "fp32": "minidecode_gemv_f32"}

# cudaError_t values that have a meaning here.
NOT_SUPPORTED = 801
NO_KERNEL_IMAGE = 209


@dataclass(frozen=True)
class Gemv:
    """One implementation of y[n] = w[n, k] @ x[k].

    name: what the user typed or the file's stem. dtypes: of "fp16", "fp32". origin: its file.
    devices: of "cpu", "cuda". function: the Python function in `origin`; None for a CUDA file.
    """

    name: str
    summary: str
    dtypes: tuple[str, ...]
    origin: Path
    devices: tuple[str, ...]
    function: str | None = None
    builtin: bool = False

    def unavailable(self) -> str | None:
        """Why this kernel cannot run on this machine, in a few words; None when it can."""
        import torch

        try:
            if "cpu" not in self.devices:
                build.require_cuda_torch()
                if not torch.cuda.is_available():
                    return "no CUDA GPU is visible"
            if self.function is None:
                build.find_toolkit()
                build.host_compiler()
            elif self.builtin:
                reason = getattr(self._module(), "unavailable", None)
                return None if reason is None else reason()
        except MissingError as error:
            return str(error)
        return None

    def prepare(self) -> None:
        """Compiles or imports the kernel. Raises CompileError, MissingError, MinidecodeError."""
        if self.function is None:
            build.build(self.origin)
        else:
            self._python_function()

    def bind(self, y: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Callable[[], None]:
        """A call that enqueues y[n] = w[n, k] @ x[k] on the current stream of the tensors' device.

        Everything is checked here, once; the call itself only takes the stream and starts the
        kernel (a few microseconds). It keeps the tensors alive, leaves the current device as it
        was, and raises NotSupportedError when the kernel does not handle this shape,
        MinidecodeError when it fails.
        """
        dtype = self._check(y, w, x)
        if self.function is None:
            library = build.build(self.origin)
            return self._bind_library(library, SYMBOLS[dtype], y, w, x)
        return self._bind_python(self._python_function(), y, w, x)

    def _check(self, y: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> str:
        """The tensors' dtype name, if this kernel can be asked for y = w @ x at all."""
        import torch

        shapes = f"y{list(y.shape)} = w{list(w.shape)} @ x{list(x.shape)}"
        if w.dim() != 2 or tuple(y.shape) != (w.shape[0],) or tuple(x.shape) != (w.shape[1],):
            raise MinidecodeError(f"kernel {self.name}: the shapes do not match: {shapes}")
        if w.shape[0] < 1 or w.shape[1] < 1 or max(w.shape) > 0x7FFFFFFF:
            raise MinidecodeError(f"kernel {self.name}: a size is out of range: {shapes}")
        if not (y.dtype == w.dtype == x.dtype):
            raise MinidecodeError(
                f"kernel {self.name}: the dtypes differ: y {y.dtype}, w {w.dtype}, x {x.dtype}"
            )
        if not (y.device == w.device == x.device):
            raise MinidecodeError(
                f"kernel {self.name}: the devices differ: y {y.device}, w {w.device}, x {x.device}"
            )
        if not (y.is_contiguous() and w.is_contiguous() and x.is_contiguous()):
            raise MinidecodeError(f"kernel {self.name}: the tensors must be contiguous: {shapes}")
        dtype = dtype_name(w.dtype)
        if dtype not in self.dtypes:
            raise UsageError(f"kernel {self.name} takes {' and '.join(self.dtypes)}, not {dtype}")
        if w.device.type not in self.devices:
            message = f"kernel {self.name} runs on {' and '.join(self.devices)}"
            if torch.cuda.is_available():
                raise UsageError(f"{message}, not on {w.device.type}")
            raise MissingError(f"{message}, and no CUDA GPU is visible")
        return dtype

    def _bind_library(
        self,
        library: ctypes.CDLL,
        symbol: str,
        y: torch.Tensor,
        w: torch.Tensor,
        x: torch.Tensor,
    ) -> Callable[[], None]:
        import torch

        from minidecode.kernels.enqueue import raw_stream_getter

        try:
            function = getattr(library, symbol)
        except AttributeError:
            raise MinidecodeError(
                f"{self.origin} does not define {symbol}(y, w, x, n, k, stream): see"
                " minidecode/abi.cuh"
            ) from None
        pointer = ctypes.c_void_p
        function.argtypes = [pointer, pointer, pointer, ctypes.c_int, ctypes.c_int, pointer]
        function.restype = ctypes.c_int
        n, k = w.shape
        pointers = (y.data_ptr(), w.data_ptr(), x.data_ptr())
        device = w.device
        if device.type == "cuda":
            index = device.index
            stream_of = raw_stream_getter()
            current_device = torch.cuda.current_device
        else:  # a library built for the host, as in tests
            index = 0
            stream_of = current_device = _zero

        def call(held: tuple[torch.Tensor, ...] = (y, w, x)) -> None:
            if current_device() == index:
                status = function(*pointers, n, k, stream_of(index))
            else:
                with torch.cuda.device(index):
                    status = function(*pointers, n, k, stream_of(index))
            if status != 0:
                raise self._failure(library, symbol, status, n, k)

        return call

    def _failure(
        self, library: ctypes.CDLL, symbol: str, status: int, n: int, k: int
    ) -> MinidecodeError:
        from minidecode.kernels.enqueue import status_name

        where = f"{symbol} in {self.origin}"
        if status == NOT_SUPPORTED:
            return NotSupportedError(f"{where} does not support n={n}, k={k}")
        message = f"{where} failed for n={n}, k={k}: {status_name(library, status)}"
        if status == NO_KERNEL_IMAGE:
            message += f" (it was compiled for {', '.join(build.architectures())})"
        return MinidecodeError(message)

    def _bind_python(
        self,
        function: Callable[[Any, Any, Any], None],
        y: torch.Tensor,
        w: torch.Tensor,
        x: torch.Tensor,
    ) -> Callable[[], None]:
        import torch

        index = w.device.index if w.device.type == "cuda" else None
        path = None if self.builtin else self.origin

        def call() -> None:
            try:
                if path is not None:
                    _activate(path)
                here = index is None or torch.cuda.current_device() == index
                with (
                    contextlib.nullcontext() if here else torch.cuda.device(index),
                    # stdout is for texts and documents
                    contextlib.nullcontext() if path is None else redirect_stdout(sys.stderr),
                ):
                    function(y, w, x)
            except MinidecodeError:
                raise
            except NotImplementedError as error:
                raise NotSupportedError(self._python_failure("does not support", w)) from error
            except (Exception, SystemExit) as error:
                words = str(error).strip().splitlines() or [""]
                raise MinidecodeError(
                    f"{self._python_failure('failed for', w)}: {type(error).__name__}: {words[0]}"
                ) from error

        return call

    def _python_failure(self, verb: str, w: torch.Tensor) -> str:
        return f"{self.function} in {self.origin} {verb} n={w.shape[0]}, k={w.shape[1]}"

    def _module(self) -> ModuleType:
        if self.builtin:
            return importlib.import_module(f"minidecode.kernels.gemv.{self.origin.stem}")
        return _import_file(self.origin)

    def _python_function(self) -> Callable[[Any, Any, Any], None]:
        function = getattr(self._module(), self.function or "", None)
        if not callable(function):
            raise UsageError(f"{self.origin} has no function {self.function}")
        return function  # type: ignore[no-any-return]


def gemvs() -> dict[str, Gemv]:
    """Every registered kernel by name: the CUDA files first, then the Python ones."""
    found = {}
    for path in sorted((build.cuda_sources() / "gemv").glob("*.cu")):
        found[path.stem] = cuda_gemv(path.stem, path, builtin=True)
    for path in sorted((Path(__file__).parent / "gemv").glob("*.py")):
        if path.stem != "__init__":
            found[path.stem] = _python_gemv(path.stem, path, "gemv", builtin=True)
    return found


def resolve(spec: str, also: Sequence[str] = ()) -> Gemv:
    """The kernel that a user names: a registered name, `file.cu`, or `file.py:function`.

    `also` are names that the caller handles itself, to be listed in the UsageError for an unknown
    name.
    """
    known = gemvs()
    if spec in known:
        return known[spec]
    if spec.endswith(".cu"):
        return cuda_gemv(spec, _existing(spec), builtin=False)
    match = re.fullmatch(r"(.+\.py):([^:/\\]*)", spec)
    if match is not None:
        return _python_gemv(spec, _existing(match.group(1)), match.group(2), builtin=False)
    if spec.endswith(".py"):
        there = ", ".join(_functions(_parse(_existing(spec)))) or "none"
        raise UsageError(f"say which function: {spec}:NAME (functions there: {there})")
    names = list(dict.fromkeys([*also, *known]))
    close = difflib.get_close_matches(spec, names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise UsageError(
        f"unknown kernel {spec!r}{hint} (known: {', '.join(names)}; or a path to a .cu file or"
        " file.py:function)"
    )


def cuda_gemv(name: str, path: Path, *, builtin: bool) -> Gemv:
    """A kernel file as a Gemv; its dtypes are the entry points that its own code mentions."""
    ours = build.include_dirs()
    code = "\n".join(
        _without_comments(file.read_text(encoding="utf-8", errors="replace"))
        for file in build.included_files(path)
        if not any(file.is_relative_to(folder) for folder in ours)
    )
    dtypes = tuple(d for d, symbol in SYMBOLS.items() if re.search(rf"\b{symbol}\b", code))
    text = path.read_text(encoding="utf-8", errors="replace")
    comment = re.search(r"^\s*(?://+|/\*+)[ \t]*(.*?)[ \t]*(?:\*/)?[ \t]*$", text, re.MULTILINE)
    summary = comment.group(1) if comment else ""
    return Gemv(name, summary, dtypes or ("fp16",), path.absolute(), ("cuda",), None, builtin)


def _python_gemv(name: str, path: Path, function: str, *, builtin: bool) -> Gemv:
    tree = _parse(path)
    functions = _functions(tree)
    if function not in functions and not {function, "*"} & _bound_names(tree.body):
        close = difflib.get_close_matches(function, functions, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(
            f"{path} has no function {function!r}{hint} (it has: {', '.join(functions) or 'none'})"
        )
    constants = _constants(tree)
    doc = ast.get_docstring(functions[function]) if function in functions else None
    doc = doc or ast.get_docstring(tree) or ""
    return Gemv(
        name,
        str(constants.get("SUMMARY", doc.strip().split("\n")[0])),
        _some_of(DTYPES, "DTYPES", constants, path),
        path.absolute(),
        _some_of(DEVICES, "DEVICES", constants, path),
        function,
        builtin,
    )


def _some_of(
    known: tuple[str, ...], name: str, constants: Mapping[str, Any], path: Path
) -> tuple[str, ...]:
    """The constant of a kernel file that is a tuple of known words; all of them by default."""
    value = constants.get(name, known)
    named = isinstance(value, (tuple, list)) and value and all(word in known for word in value)
    if not named:
        raise UsageError(f"{path}: {name} is {value!r}, not a tuple of {', '.join(known)}")
    return tuple(value)


# --- reading files --------------------------------------------------------------------------------


def _existing(path: str) -> Path:
    if not Path(path).is_file():
        raise UsageError(f"no such kernel file: {path}")
    return Path(path)


def _without_comments(code: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", code, flags=re.DOTALL)


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise MinidecodeError(f"{path}:{error.lineno}: {error.msg}") from error


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _bound_names(body: Sequence[ast.stmt]) -> set[str]:
    """Names that a module's statements bind, whatever to; not those inside functions."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
            found.update(n.id for n in stored if isinstance(n.ctx, ast.Store))
        else:  # if, try, with, match, …: their statements, and those of their branches
            for name in ("body", "orelse", "finalbody"):
                found |= _bound_names(getattr(node, name, []))
            for branch in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
                found |= _bound_names(branch.body)
    return found


def _constants(tree: ast.Module) -> dict[str, Any]:
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name) and target.id in ("SUMMARY", "DTYPES", "DEVICES"):
                with contextlib.suppress(ValueError):
                    found[target.id] = ast.literal_eval(value)
    return found


@dataclass
class _UserModule:
    """A user's Python file that has run.

    files: what it and the modules beside it that its import loaded held then. helpers: these
    modules, and those that came later from inside them, by name.
    """

    module: ModuleType
    files: Mapping[Path, bytes | None]
    helpers: dict[str, ModuleType]


_user_modules: dict[Path, _UserModule] = {}
# The file whose helpers are in sys.modules: those of two files may have the same names.
_active: Path | None = None


def _activate(path: Path) -> None:
    """Let imports find the modules beside `path` and none beside another user's file."""
    global _active
    if _active == path:
        return
    before, now = _user_modules.get(_active or path), _user_modules.get(path)
    _active = path
    if before is not None:
        before.helpers.update(_taken_out(before.helpers))
    if now is not None:
        sys.modules.update(now.helpers)


def _taken_out(helpers: Mapping[str, ModuleType]) -> dict[str, ModuleType]:
    """These modules and those inside them, which are in sys.modules no more."""
    names = [name for name in helpers if name in sys.modules]
    packages = tuple(f"{name}." for name, m in helpers.items() if hasattr(m, "__path__"))
    if packages:  # or there is no need to look through thousands
        names += [n for n in sys.modules if n.startswith(packages) and n not in helpers]
    return {name: sys.modules.pop(name) for name in names}


def _import_file(path: Path) -> ModuleType:
    """Runs a user's Python file as a module; again when it or a module beside it has changed.

    The modules beside it that it imports at once are then imported anew.
    """
    held = _user_modules.get(path)
    _activate(path)
    if held is not None:
        if all(_content(file) == was for file, was in held.files.items()):
            return held.module
        _taken_out(held.helpers)
    source = path.read_bytes()
    key = hashlib.sha256(os.fsencode(path) + b"\0" + source).hexdigest()[:16]
    module = ModuleType(f"minidecode_user_{path.stem}_{key}")
    module.__file__ = str(path)
    # Decorators such as triton.jit look their module up.
    sys.modules[module.__name__] = module
    before = set(sys.modules)
    sys.path.insert(0, str(path.parent))
    # Compiled files are told apart by whole seconds and size alone: none are left for next time.
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with redirect_stdout(sys.stderr):
            exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        _taken_out(_helpers_since(before, path.parent))
        line = _line_in(path, error)
        raise MinidecodeError(f"{path}{line}: {type(error).__name__}: {error}") from error
    finally:
        sys.dont_write_bytecode = written
        with contextlib.suppress(ValueError):
            sys.path.remove(str(path.parent))
    helpers = _helpers_since(before, path.parent)
    files: dict[Path, bytes | None] = {path: source}
    files |= {file: _content(file) for m in helpers.values() if (file := _file_of(m)) is not None}
    _user_modules[path] = _UserModule(module, files, helpers)
    return module


def _helpers_since(before: set[str], folder: Path) -> dict[str, ModuleType]:
    new = {name: sys.modules[name] for name in set(sys.modules) - before}
    return {name: module for name, module in new.items() if _is_helper(module, folder)}


def _is_helper(module: ModuleType, folder: Path) -> bool:
    """Whether the module is a user's own in `folder` or below it, and no installed package."""
    file = _file_of(module)
    if file is None or not file.is_relative_to(folder):
        return False
    ours = module.__name__.partition(".")[0] == __name__.partition(".")[0]
    library = file.is_relative_to(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    return not (ours or library or installed)


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file) if isinstance(file, str) else None


def _content(file: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        return file.read_bytes()
    return None


def _line_in(path: Path, error: BaseException) -> str:
    """`:12` for the deepest line of `path` on the error's traceback."""
    line, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = f":{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def _zero(*_: object) -> int:
    return 0
