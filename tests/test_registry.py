"""Finding kernels by name and by file, and binding them to tensors."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minidecode import cli
from minidecode.errors import MinidecodeError, MissingError, UsageError
from minidecode.kernels import build, registry
from minidecode.kernels.ops import NotSupportedError, gemv_reference, relative_error

ROOT = Path(__file__).resolve().parent.parent
BUILT_IN = {
    "naive": ("fp16", "fp32"),
    "column_atomic": ("fp16", "fp32"),
    "shared_tree": ("fp16", "fp32"),
    "warp_row": ("fp16", "fp32"),
    "half2_block": ("fp16",),
    "half2_stream": ("fp16",),
    "triton_rowblock": ("fp16", "fp32"),
    "cublas": ("fp16", "fp32"),
    "inductor": ("fp16", "fp32"),
    "torch": ("fp16", "fp32"),
}


def operands(
    n: int = 5, k: int = 7, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n * 1000 + k)
    w = torch.randn(n, k, generator=generator).to(dtype)
    x = torch.randn(k, generator=generator).to(dtype)
    return torch.full((n,), float("nan"), dtype=dtype), w, x


# --- the list -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_kernels_are_found(name: str) -> None:
    gemv = registry.gemvs()[name]
    assert gemv.name == name == gemv.origin.stem
    assert gemv.dtypes == BUILT_IN[name]
    assert gemv.summary
    assert gemv.builtin
    assert registry.resolve(name) == gemv


def test_listing_and_unknown_names_do_not_load_torch() -> None:
    code = (
        "import sys; from minidecode.kernels import registry; registry.gemvs()\n"
        "try: registry.resolve('cubles')\n"
        "except registry.UsageError as error: print(error)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "did you mean cublas?" in done.stdout


def test_one_file_is_all_that_a_new_kernel_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = tmp_path / "cuda"
    shutil.copytree(build.cuda_sources(), cuda)
    (cuda / "gemv" / "brand_new.cu").write_text(
        "// The newest.\n#include <minidecode/abi.cuh>\n"
        'extern "C" cudaError_t minidecode_gemv_f32(float*, const float*, const float*, int, int,\n'
        "                                           cudaStream_t) { return cudaSuccess; }\n"
    )
    monkeypatch.setattr(build, "cuda_sources", lambda: cuda)
    python = tmp_path / "kernels"
    (python / "gemv").mkdir(parents=True)
    (python / "gemv" / "newer.py").write_text(
        'SUMMARY = "Newer."\nDTYPES = ("fp32",)\nDEVICES: tuple[str, ...] = ("cpu",)\n'
        "def gemv(y, w, x): ...\n"
    )
    monkeypatch.setattr(registry, "__file__", str(python / "registry.py"))
    found = registry.gemvs()
    assert (found["brand_new"].summary, found["brand_new"].dtypes) == ("The newest.", ("fp32",))
    newer = found["newer"]
    assert (newer.summary, newer.dtypes, newer.devices) == ("Newer.", ("fp32",), ("cpu",))


@pytest.mark.parametrize(
    ("code", "dtypes"),
    [
        ('extern "C" cudaError_t minidecode_gemv(half* y) {}', ("fp16",)),
        ("cudaError_t minidecode_gemv_f32(float* y) {}", ("fp32",)),
        ("DEFINE(minidecode_gemv, half)\nDEFINE(minidecode_gemv_f32, float)", ("fp16", "fp32")),
        ("// like minidecode_gemv_f32\n/* minidecode_gemv_f32\n */ minidecode_gemv()", ("fp16",)),
        ('#include "entry.cuh"', ("fp32",)),
        ("#include <minidecode/abi.cuh>", ("fp16",)),
    ],
    ids=["half", "float", "both", "comments", "in a header of the user's", "none"],
)
def test_dtypes_are_the_entry_points_of_the_source(
    code: str, dtypes: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "entry.cuh").write_text("minidecode_gemv_f32();")
    (tmp_path / "k.cu").write_text(f"{code}\n")
    assert registry.cuda_gemv("k", tmp_path / "k.cu", builtin=False).dtypes == dtypes


# --- names and files ------------------------------------------------------------------------------


def test_a_users_files_are_kernels(tmp_path: Path) -> None:
    (tmp_path / "my k.cu").write_text("/* Fast. */\nminidecode_gemv")
    (tmp_path / "my k.py").write_text('def f(y, w, x):\n    """Also fast.\n\n    More."""\n')
    cuda = registry.resolve(str(tmp_path / "my k.cu"))
    assert (cuda.summary, cuda.function, cuda.devices) == ("Fast.", None, ("cuda",))
    python = registry.resolve(f"{tmp_path / 'my k.py'}:f")
    assert (python.summary, python.function) == ("Also fast.", "f")
    assert python.devices == ("cpu", "cuda")
    assert python.name == f"{tmp_path / 'my k.py'}:f"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nonsense", r"unknown kernel 'nonsense' \(known: fused, .*naive"),
        ("naiv", r"did you mean naive\?"),
        ("fuse", r"did you mean fused\?"),
        ("gone.cu", r"no such kernel file: gone\.cu"),
        ("gone.py:f", r"no such kernel file: gone\.py"),
        ("{}/k.py", r"say which function: .*k\.py:NAME \(functions there: first, second\)"),
        ("{}/k.py:secnd", r"no function 'secnd'; did you mean second\?"),
        ("{}/k.py:", r"no function ''"),
        ("", "unknown kernel ''"),
    ],
)
def test_what_is_no_kernel_is_a_usage_error(spec: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text("def first(y, w, x): ...\ndef second(y, w, x): ...\n")
    with pytest.raises(UsageError, match=words):
        registry.resolve(spec.format(tmp_path), also=("fused",))


def test_a_python_file_that_does_not_parse_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(MinidecodeError, match=r"k\.py:2: "):
        registry.resolve(f"{tmp_path / 'k.py'}:f")


def test_a_python_file_that_does_not_import_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text("def f(y, w, x): ...\n\nimport no_such_module_at_all\n")
    gemv = registry.resolve(f"{tmp_path / 'k.py'}:f")
    with pytest.raises(MinidecodeError, match=r"k\.py:3: ModuleNotFoundError"):
        gemv.prepare()


def test_an_edited_python_file_is_run_again(tmp_path: Path) -> None:
    (tmp_path / "helper_of_k.py").write_text("SCALE = 2\n")
    file = tmp_path / "k.py"
    file.write_text("import helper_of_k\ndef f(y, w, x): y.fill_(helper_of_k.SCALE)\n")
    y, w, x = operands()
    registry.resolve(f"{file}:f").bind(y, w, x)()
    assert y.tolist() == [2.0] * 5
    assert str(tmp_path) not in sys.path
    # Of the same size and within the same second, as a compiled file would not tell.
    file.write_text(file.read_text().replace("SCALE)", "OTHER)"))
    (tmp_path / "helper_of_k.py").write_text("OTHER = 3\n")
    registry.resolve(f"{file}:f").bind(y, w, x)()
    assert y.tolist() == [3.0] * 5
    (tmp_path / "helper_of_k.py").write_text("OTHER = 4\n")
    registry.resolve(f"{file}:f").bind(y, w, x)()
    assert y.tolist() == [4.0] * 5


def test_helpers_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for name, value in (("one", 1), ("two", 2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "helper.py").write_text(f"VALUE = {value}\n")
        (folder / "k.py").write_text("import helper\ndef f(y, w, x): y.fill_(helper.VALUE)\n")
    y, w, x = operands()
    calls = [
        registry.resolve(f"{tmp_path / name / 'k.py'}:f").bind(y, w, x)
        for name in ("one", "two", "one")
    ]
    for call, value in zip(calls, (1.0, 2.0, 1.0), strict=True):
        call()
        assert y.tolist() == [value] * 5


def test_each_kernel_finds_its_own_helpers_while_it_runs(tmp_path: Path) -> None:
    """Imports inside the function, of a module that is there already and of a new one inside it."""
    for name, value in (("one", 1), ("two", 2)):
        (tmp_path / name / "hp").mkdir(parents=True)
        (tmp_path / name / "hp" / "__init__.py").write_text(f"VALUE = {value}\n")
        (tmp_path / name / "hp" / "core.py").write_text(f"VALUE = {10 * value}\n")
        (tmp_path / name / "k.py").write_text(
            "import hp\ndef f(y, w, x):\n"
            "    from hp import VALUE as a\n    from hp.core import VALUE as b\n"
            "    y.fill_(a + b)\n"
        )
    y, w, x = operands()
    one, two = (
        registry.resolve(f"{tmp_path / n / 'k.py'}:f").bind(y, w, x) for n in ("one", "two")
    )
    for call, value in ((one, 11.0), (two, 22.0), (one, 11.0), (two, 22.0)):
        call()
        assert y.tolist() == [value] * 5


def test_a_file_that_failed_is_run_again(tmp_path: Path) -> None:
    (tmp_path / "helper_of_f.py").write_text("VALUE = 1\n")
    file = tmp_path / "k.py"
    file.write_text("import helper_of_f\ndef f(y, w, x): ...\nraise ValueError\n")
    for _ in range(2):
        with pytest.raises(MinidecodeError, match=r"k\.py:3: ValueError"):
            registry.resolve(f"{file}:f").prepare()
        assert "helper_of_f" not in sys.modules


def test_a_user_s_annotations_are_as_they_wrote_them(tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text("def f(y: int, w, x): y.fill_(f.__annotations__['y'](2))\n")
    y, w, x = operands()
    registry.resolve(f"{tmp_path / 'k.py'}:f").bind(y, w, x)()
    assert y.tolist() == [2.0] * 5


def test_a_kernel_beside_the_package_leaves_it_loaded(tmp_path: Path) -> None:
    """Its folder holds modules that are not its own."""
    code = (
        "import sys\nfrom minidecode.kernels import registry\n"
        "first = registry.resolve(sys.argv[1] + ':f')\nfirst.prepare()\n"
        "registry.resolve(sys.argv[2] + ':f').prepare()\n"
        "assert sys.modules['minidecode.kernels.registry'] is registry\n"
        "from minidecode.kernels import ops\nassert first._module().ops is ops\n"
    )
    shutil.copytree(ROOT / "minidecode", tmp_path / "minidecode")
    (tmp_path / "cuda").symlink_to(ROOT / "cuda")
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("from minidecode.kernels import ops\ndef f(y, w, x): ...\n")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.py"), str(tmp_path / "b.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_python_file_that_exits_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "k.py"
    file.write_text("import sys\ndef f(y, w, x): sys.exit(0)\n")
    y, w, x = operands()
    with pytest.raises(MinidecodeError, match=r"f in .* failed for n=5, k=7: SystemExit: 0"):
        registry.resolve(f"{file}:f").bind(y, w, x)()
    file.write_text("import sys\ndef f(y, w, x): ...\nsys.exit(0)\n")
    with pytest.raises(MinidecodeError, match=r"k\.py:3: SystemExit: 0"):
        registry.resolve(f"{file}:f").prepare()


@pytest.mark.parametrize(
    "code",
    [
        "def _f(y, w, x): y.fill_(2)\nf = _f\n",
        "try:\n    import gone\nexcept ImportError:\n    def f(y, w, x): y.fill_(2)\n",
        "if True:\n    def f(y, w, x): y.fill_(2)\n",
        "from inner import f\n",
        "import inner as other\nf, g = other.f, 1\n",
        "from inner import *\n",
        "match 1:\n    case 1:\n        def f(y, w, x): y.fill_(2)\n",
        "class K:\n    def __call__(self, y, w, x): y.fill_(2)\nf: K = K()\n",
    ],
)
def test_a_function_may_get_its_name_in_any_way(code: str, tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text("def f(y, w, x): y.fill_(2)\n")
    (tmp_path / "k.py").write_text(code)
    y, w, x = operands()
    registry.resolve(f"{tmp_path / 'k.py'}:f").bind(y, w, x)()
    assert y.tolist() == [2.0] * 5


@pytest.mark.parametrize(
    "line",
    [
        "DTYPES = ()",
        'DTYPES = (["fp16"],)',
        'DTYPES = "fp16"',
        'DTYPES = ("float16",)',
        'DEVICES = "cpu"',
        "DEVICES = 3",
    ],
)
def test_a_constant_that_says_nothing_known_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text(f"{line}\ndef f(y, w, x): ...\n")
    with pytest.raises(UsageError, match=rf"k\.py: {line[:6]}.* is .*, not a tuple of"):
        registry.resolve(f"{tmp_path / 'k.py'}:f")


# --- binding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bound_kernel_computes(dtype: torch.dtype) -> None:
    y, w, x = operands(33, 129, dtype)
    call = registry.gemvs()["torch"].bind(y, w, x)
    call()
    assert relative_error(y, gemv_reference(w, x)) < (1e-3 if dtype == torch.float16 else 1e-6)
    x.mul_(2)
    call()
    assert relative_error(y, gemv_reference(w, x)) < (1e-3 if dtype == torch.float16 else 1e-6)


Change = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda y, w, x: (y, w, x[1:]), MinidecodeError, r"w\[5, 7\] @ x\[6\]"),
        (lambda y, w, x: (y[1:], w, x), MinidecodeError, r"y\[4\]"),
        (lambda y, w, x: (y, w[0], x), MinidecodeError, "shapes do not match"),
        (lambda y, w, x: (y[:0], w[:0], x), MinidecodeError, "out of range"),
        (lambda y, w, x: (y.half(), w, x), MinidecodeError, "dtypes differ: y torch.float16"),
        (lambda y, w, x: (y.to("meta"), w, x), MinidecodeError, "devices differ: y meta"),
        (lambda y, w, x: (y, w.t().contiguous().t(), x), MinidecodeError, "contiguous"),
        (lambda y, w, x: (y.double(), w.double(), x.double()), UsageError, "takes fp16 and fp32"),
    ],
)
def test_what_does_not_fit_is_refused_when_bound(
    change: Change, error: type[MinidecodeError], words: str
) -> None:
    with pytest.raises(error, match=words):
        registry.gemvs()["torch"].bind(*change(*operands()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_cuda_kernel_on_a_cpu_is_missing_its_gpu() -> None:
    with pytest.raises(MissingError, match="kernel cublas runs on cuda, and no CUDA GPU"):
        registry.gemvs()["cublas"].bind(*operands())


def test_python_kernels_failures_are_named(tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text(
        "def bad(y, w, x):\n    raise ValueError('odd\\nmore')\n"
        "def no(y, w, x):\n    raise NotImplementedError\n"
    )
    with pytest.raises(
        MinidecodeError, match=r"bad in .*k\.py failed for n=5, k=7: ValueError: odd$"
    ):
        registry.resolve(f"{tmp_path / 'k.py'}:bad").bind(*operands())()
    with pytest.raises(NotSupportedError, match=r"no in .*k\.py does not support n=5, k=7"):
        registry.resolve(f"{tmp_path / 'k.py'}:no").bind(*operands())()


HOST_LIBRARY = """
extern "C" int minidecode_gemv_f32(float* y, const float* w, const float* x, int n, int k,
                                   void* s) {
  if (k == 2) return 801;
  if (k == 3) return 700;
  for (int i = 0; i < n; ++i) {
    y[i] = 0;
    for (int j = 0; j < k; ++j) y[i] += w[(long)i * k + j] * x[j];
  }
  return s == nullptr ? 0 : 1;
}
extern "C" const char* cudaGetErrorString(int code) { return code == 700 ? "illegal address" : ""; }
"""


@pytest.fixture(scope="module")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A library with the C ABI that works on host memory."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "host.cc").write_text(HOST_LIBRARY)
    command = ["g++", "-shared", "-fPIC", str(folder / "host.cc"), "-o", str(folder / "host.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "host.so"))


def bind_host(library: ctypes.CDLL, n: int, k: int, symbol: str = "minidecode_gemv_f32"):  # type: ignore[no-untyped-def]
    y, w, x = operands(n, k)
    gemv = registry.Gemv("mine.cu", "", ("fp32",), Path("/a/mine.cu"), ("cpu",))
    return y, w, x, gemv._bind_library(library, symbol, y, w, x)


def test_a_library_gets_pointers_sizes_and_stream(host_library: ctypes.CDLL) -> None:
    y, w, x, call = bind_host(host_library, 9, 11)
    call()
    assert relative_error(y, gemv_reference(w, x)) < 1e-6


def test_a_bound_call_keeps_its_tensors(host_library: ctypes.CDLL) -> None:
    y, w, x, call = bind_host(host_library, 9, 11)
    alive = [weakref.ref(tensor) for tensor in (y, w, x)]
    del y, w, x
    gc.collect()
    assert all(tensor() is not None for tensor in alive)
    del call
    gc.collect()
    assert all(tensor() is None for tensor in alive)


def test_a_bad_status_names_kernel_and_sizes(host_library: ctypes.CDLL) -> None:
    with pytest.raises(NotSupportedError, match=r"_f32 in /a/mine\.cu does not support n=4, k=2"):
        bind_host(host_library, 4, 2)[3]()
    with pytest.raises(
        MinidecodeError, match="n=4, k=3: CUDA error 700, illegal address"
    ) as caught:
        bind_host(host_library, 4, 3)[3]()
    assert not isinstance(caught.value, NotSupportedError)


def test_a_missing_entry_point_is_named(host_library: ctypes.CDLL) -> None:
    with pytest.raises(MinidecodeError, match=r"/a/mine\.cu does not define minidecode_gemv\("):
        bind_host(host_library, 4, 4, "minidecode_gemv")


# --- availability and the command -----------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_reasons_on_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry.gemvs()
    assert found["torch"].unavailable() is None
    assert all(found[name].unavailable() for name in ("cublas", "naive", "triton_rowblock"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert found["naive"].unavailable() == "no CUDA GPU is visible"


def test_triton_that_is_not_installed_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from minidecode.kernels.gemv import triton_rowblock

    monkeypatch.setattr(triton_rowblock, "triton", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reason = registry.gemvs()["triton_rowblock"].unavailable()
    assert reason == "triton is not installed: pip install triton"
    with pytest.raises(MissingError, match="triton"):
        triton_rowblock.gemv(*operands())


def test_kernels_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kernels", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines[1:] if line[0].isalpha()}
    assert set(rows) == {"fused", "torch", *BUILT_IN}
    assert rows["half2_block"].endswith(" cuda/gemv/half2_block.cu")
    assert "half2 loads" in lines[lines.index(rows["half2_block"]) + 1]
    assert max(map(len, lines)) <= 80
    assert " yes " in rows["torch"]
    if not torch.cuda.is_available():
        assert " no [1] " in rows["half2_block"]
        assert any(line.startswith("[1] ") and "CUDA" in line for line in lines)


def test_kernels_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kernels", "list", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"schema_version", "environment", "kernels"} == set(document)
    assert {"torch", "fused"} <= {row["name"] for row in document["kernels"]}


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_kernels_check_begins_when_all_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Path(__file__).parent / "fixtures" / "hostile" / "hostile.py"
    assert cli.main(["kernels", "check", f"{wrong}:zeros", "cublas"]) == 5
    out, err = capsys.readouterr()
    assert (out, err) == ("", "minidecode: kernel cublas needs a cuda device, and this is cpu\n")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_kernels_build_without_cuda_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kernels", "build"]) == 5
    error = capsys.readouterr().err
    assert "without CUDA" in error
    assert len(error.splitlines()) == 1


def test_kernels_build_of_a_python_kernel_is_a_usage_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["kernels", "build", "torch"]) == 2
    assert "nothing to compile" in capsys.readouterr().err


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_users_cuda_file_and_its_edits_in_one_process(tmp_path: Path) -> None:
    hostile = Path(__file__).parent / "fixtures" / "hostile"
    for name in ("right.cu", "rows.cuh"):
        shutil.copy(hostile / name, tmp_path)
    y, w, x = (tensor.cuda() for tensor in operands(100, 64, torch.float16))
    spec = str(tmp_path / "right.cu")
    registry.resolve(spec).bind(y, w, x)()
    assert relative_error(y, gemv_reference(w, x)) < 1e-3
    header = tmp_path / "rows.cuh"
    header.write_text(header.read_text().replace("float sum = 0.0f", "float sum = 100.0f"))
    registry.resolve(spec).bind(y, w, x)()
    assert relative_error(y, gemv_reference(w, x) + 100) < 1e-3


@pytest.mark.gpu
def test_tensors_on_a_gpu_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for name in ("half2_block", "half2_stream", "cublas", "triton_rowblock"):
        y, w, x = (tensor.to("cuda:1") for tensor in operands(1000, 1056, torch.float16))
        registry.gemvs()[name].bind(y, w, x)()
        assert relative_error(y, gemv_reference(w, x)) < 1e-3
        assert torch.cuda.current_device() == 0


def test_what_a_users_file_prints_is_no_output_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / os.fsdecode(b"mine\xff.py")  # a name that is no UTF-8
    path.write_text("print('imported')\ndef f(y, w, x):\n    print('called')\n    y.copy_(w @ x)\n")
    y, w, x = operands(3, 5, torch.float32)
    registry.resolve(f"{path}:f").bind(y, w, x)()
    assert capsys.readouterr() == ("", "imported\ncalled\n")
