"""Building kernels: names, flags and errors; and real builds through torch's `load()`.

torch for the CPU has all of `load()` but the two CUDA libraries that it links with, so empty
libraries of those names make the real thing work here, compiler, linker and loader included.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import needs
import pytest
import torch

from minidecode import cli
from minidecode.errors import MinidecodeError, MissingError, UsageError
from minidecode.kernels import build
from minidecode.kernels.build import CompileError, Toolkit

ROOT = Path(__file__).resolve().parent.parent
ARCH = ("90a",)
TOOLKIT = Toolkit(Path("/opt/cuda"), "13.0.88", Path("/opt/cuda/lib64"))

# A kernel file whose entry point needs no GPU to be called: it returns a number from its header.
SOURCE = """#include "code.cuh"
extern "C" cudaError_t minidecode_gemv(half*, const half*, const half*, int, int, cudaStream_t) {
  return static_cast<cudaError_t>(CODE);
}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MINIDECODE_CACHE_DIR", str(folder))
    return folder / "kernels"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*build.COMPILER_VARIABLES, "TORCH_CUDA_ARCH_LIST", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def stub_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    if torch.version.cuda is None:
        for name in ("libc10_cuda.so", "libtorch_cuda.so"):
            subprocess.run(
                ["g++", "-shared", "-x", "c++", "/dev/null", "-o", str(folder / name)], check=True
            )
    return folder


@pytest.fixture
def linkable(stub_libraries: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes real builds possible; returns the folder of the builds."""
    monkeypatch.setenv("LIBRARY_PATH", str(stub_libraries))
    return cache


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Called with names, makes a PATH of all that the present one has but those."""

    def hide(*names: str) -> None:
        folder = tmp_path / "tools"
        folder.mkdir()
        found: dict[str, Path] = {}
        for place in map(Path, os.environ["PATH"].split(os.pathsep)):
            for tool in place.iterdir() if place.is_dir() else ():
                found.setdefault(tool.name, tool)
        for name, tool in found.items():
            if name not in names:
                (folder / name).symlink_to(tool)
        monkeypatch.setenv("PATH", str(folder))

    return hide


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What `on_build` is told."""
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(build, "on_build", lambda name, phase: seen.append((name, phase)))
    return seen


def write_kernel(folder: Path, code: int = 7, name: str = "mine.cu") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "code.cuh").write_text(f"#define CODE {code}\n")
    (folder / name).write_text(SOURCE)
    return folder / name


def plan(source: Path, **options: object) -> build.BuildPlan:
    return build.plan_build(source, ARCH, **{"toolkit": TOOLKIT, **options})  # type: ignore[arg-type]


def compile_(source: Path) -> ctypes.CDLL:
    return build.run_builds([build.plan_build(source, ARCH)])[0]


def status(library: ctypes.CDLL) -> int:
    return int(library.minidecode_gemv(None, None, None, 1, 1, None))


# --- names ----------------------------------------------------------------------------------------


def test_name_says_what_it_is_and_is_stable(tmp_path: Path, cache: Path) -> None:
    source = write_kernel(tmp_path / "my kernels", name="fast (2).cu")
    first = plan(source)
    assert first.name.startswith("minidecode_my_kernels_fast__2__")
    assert first.name.isidentifier()
    assert first.directory == cache / first.name
    assert plan(source) == first
    assert not cache.exists(), "planning writes nothing"


@pytest.mark.parametrize(
    "change",
    ["path", "flags", "arch", "torch", "nvcc", "toolkit", "source", "header", "deep header", "CXX"],
)
def test_whatever_a_build_depends_on_changes_its_name(
    change: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_kernel(tmp_path / "a")
    (tmp_path / "a" / "code.cuh").write_text('#include "deep.cuh"\n')
    (tmp_path / "a" / "deep.cuh").write_text("#define CODE 1\n")
    before = plan(source).name
    options: dict[str, object] = {}
    arch = ARCH
    if change == "path":
        source = Path(shutil.copytree(tmp_path / "a", tmp_path / "b")) / "mine.cu"
    elif change == "flags":
        options["extra_flags"] = ["-DROWS=4"]
    elif change == "arch":
        arch = ("80",)
    elif change == "torch":
        monkeypatch.setattr(torch, "__version__", "99.0")
    elif change == "nvcc":
        options["toolkit"] = Toolkit(TOOLKIT.root, "13.1.0", TOOLKIT.library_dir)
    elif change == "toolkit":
        options["toolkit"] = Toolkit(Path("/opt/other"), TOOLKIT.version, TOOLKIT.library_dir)
    elif change == "source":
        source.write_text(SOURCE + "\n")
    elif change == "header":
        (tmp_path / "a" / "code.cuh").write_text('#include "deep.cuh"\n// edited\n')
    elif change == "deep header":
        (tmp_path / "a" / "deep.cuh").write_text("#define CODE 2\n")
    else:
        monkeypatch.setenv(change, "g++")
    after = build.plan_build(source, arch, **{"toolkit": TOOLKIT, **options})  # type: ignore[arg-type]
    assert after.name != before


def test_a_header_that_appears_changes_the_name(tmp_path: Path, cache: Path) -> None:
    source = write_kernel(tmp_path)
    source.write_text('#if __has_include("extra.cuh")\n#include "extra.cuh"\n#endif\n')
    before = plan(source).name
    (tmp_path / "extra.cuh").write_text("")
    assert plan(source).name != before


def test_includes_are_followed_as_a_compiler_does(tmp_path: Path) -> None:
    here, include = tmp_path / "here", tmp_path / "include"
    for folder in (here, include / "lib"):
        folder.mkdir(parents=True)
    (here / "k.cu").write_text(
        '#include <lib/a.cuh>\n  #  include "b.cuh"\n#include <cuda_fp16.h>\n#include "gone.h"\n'
        '// #include "not.cuh"\n/* x */ #include /* y */ "d.cuh"\n#define FILE "e.cuh"\n'
        "#include FILE\n#include \\\n<lib/f.cuh>\n"
        "bool b = c == '\"' || s == \"/*\"; int n = 1'000'000;\n#include <lib//g.cuh>\n"
        f'#define HELP "{300 * "x"}"\n#include "late.cuh"\n'
    )
    (here / "not.cuh").write_text("")
    for header in (
        *(here / "d.cuh", here / "e.cuh", here / "late.cuh"),
        *(include / "lib" / "f.cuh", include / "lib" / "g.cuh"),
    ):
        header.write_text("")
    (include / "lib" / "a.cuh").write_text('#include "c.cuh"\n#include "a.cuh"\n')
    (include / "lib" / "c.cuh").write_text("")
    (here / "b.cuh").write_text("")
    (include / "b.cuh").write_text("the one beside the file comes first")
    found = {p.relative_to(tmp_path) for p in build.included_files(here / "k.cu", [include])}
    assert {str(path) for path in found} == {
        *("here/k.cu", "here/b.cuh", "here/d.cuh", "here/e.cuh", "here/late.cuh"),
        *("include/lib/a.cuh", "include/lib/c.cuh", "include/lib/f.cuh", "include/lib/g.cuh"),
    }


@pytest.mark.parametrize(
    ("variable", "value"),
    [("CPATH", "{}"), ("CPLUS_INCLUDE_PATH", "/nowhere:{}"), ("NVCC_APPEND_FLAGS", "-O2 -I {}")],
)
def test_headers_that_a_compilers_variable_leads_to(
    variable: str, value: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = tmp_path / "k.cu", tmp_path / "elsewhere"
    folder.mkdir()
    source.write_text("#include <mine.cuh>\n#include <cuda_runtime.h>\n")
    (folder / "mine.cuh").write_text("one")
    monkeypatch.setenv(variable, value.format(folder))
    before = plan(source).name
    (folder / "mine.cuh").write_text("two")
    assert plan(source).name != before
    # A toolkit is known by its version; its thousands of lines are not read for each kernel.
    (folder / "cuda_runtime.h").write_text("")
    assert build.included_files(source) == [source]


def test_headers_beside_a_link_are_found_as_a_compiler_does(tmp_path: Path) -> None:
    real = write_kernel(tmp_path / "real")
    link = tmp_path / "link" / "mine.cu"
    link.parent.mkdir()
    link.symlink_to(real)
    (link.parent / "code.cuh").write_text("")
    assert build.included_files(link, []) == [link, link.parent / "code.cuh"]


def test_every_source_of_ours_is_hashed_with_its_headers() -> None:
    sources = sorted(build.cuda_sources().glob("*/*.cu"))
    assert sources
    for source in sources:
        headers = build.included_files(source)[1:]
        assert any(build.cuda_sources() / "include" in header.parents for header in headers)


@pytest.mark.parametrize("place", ["minidecode/_cuda", "cuda"], ids=["wheel", "checkout"])
def test_sources_are_found_where_they_are_installed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "__file__", str(tmp_path / "minidecode" / "kernels" / "build.py"))
    with pytest.raises(MinidecodeError, match="kernel sources are missing"):
        build.cuda_sources()
    shutil.copytree(ROOT / "cuda", tmp_path / place)
    assert build.cuda_sources() == tmp_path / place


def test_missing_file_is_a_usage_error(cache: Path) -> None:
    with pytest.raises(UsageError, match=r"no such kernel file: .*nope\.cu"):
        plan(Path("nope.cu"))


# --- flags ----------------------------------------------------------------------------------------


def test_flags_of_a_build(tmp_path: Path, cache: Path) -> None:
    made = build.plan_build(
        write_kernel(tmp_path), ("90a", "80+PTX"), toolkit=TOOLKIT, extra_flags=["-DROWS=4"]
    )
    for flag in (
        "-U__CUDA_NO_HALF_OPERATORS__",
        "-U__CUDA_NO_HALF2_OPERATORS__",
        "-U__CUDA_NO_HALF_CONVERSIONS__",
        "-Xcompiler=-fvisibility=hidden",
        f"-I{build.cuda_sources() / 'include'}",
        "-DROWS=4",
    ):
        assert flag in made.cuda_flags
    assert [flag for flag in made.cuda_flags if "gencode" in flag] == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=compute_80",
    ]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), "75"), ((8, 6), "86"), ((9, 0), "90a"), ((10, 0), "100"), ((12, 0), "120")],
)
def test_architecture_of_a_gpu(capability: tuple[int, int], expected: str) -> None:
    assert build.architecture(*capability) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9.0a", ("90a",)),
        ("8.6;9.0+PTX", ("86", "90+PTX")),
        ("8.6 8.6, 12.0", ("86", "120")),
        ("Ampere", ("80", "86+PTX")),
    ],
)
def test_arch_list_is_honoured(
    text: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert build.architectures() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("90a",)),
        ("native", ("90a",)),
        ("8.0+PTX", ("80+PTX", "90a")),
        ("8.6;9.0a+PTX", ("86", "90a+PTX")),
        ("9.0", ("90",)),
    ],
)
def test_the_gpu_at_hand_always_gets_its_own_code(
    text: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert build.architectures() == expected


@needs.nvcc
def test_a_gpu_that_the_compiler_does_not_know_runs_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0+PTX")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (19, 7))
    assert build.architectures() == ("90+PTX",)


@pytest.mark.parametrize("text", ["sm_90", "9", "Hoper"])
def test_unknown_architecture_is_a_usage_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    with pytest.raises(UsageError, match=f"TORCH_CUDA_ARCH_LIST.*{text}"):
        build.architectures()


# --- what may be missing --------------------------------------------------------------------------


def fake_nvcc(path: Path, version: str, top: Path | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --dryrun ]; then echo "#$ TOP=' + str(top) + '"; exit; fi\n'
        f'echo "Cuda compilation tools, release 0.0, V{version}"\n'
    )
    path.chmod(0o755)
    return path


def fake_toolkit(root: Path, version: str) -> Path:
    fake_nvcc(root / "bin" / "nvcc", version)
    for file in ("include/cuda_runtime.h", "lib64/libcudart.so"):
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).touch()
    return root


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any CUDA toolkit; returns an empty folder that is its whole PATH."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "bin"
    path.mkdir()
    monkeypatch.setenv("PATH", f"{path}:/nowhere")
    monkeypatch.setattr(build, "SYSTEM_ROOTS", ())
    monkeypatch.setattr(build, "_wheel_roots", list)
    return path


def needs_shell(path: Path) -> None:
    (path / "sh").symlink_to("/bin/sh")


def test_no_nvcc_says_what_to_install(no_toolkit: Path) -> None:
    with pytest.raises(MissingError, match=r'pip install "minidecode\[nvcc\]".*CUDA toolkit'):
        build.find_toolkit()


def test_no_nvcc_is_one_line_and_the_cpu_needs_none(
    no_toolkit: Path,
    tiny_model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert cli.main(["kernels", "build", "naive"]) == 5
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert 'pip install "minidecode[nvcc]"' in err
    asked = ["--prompt", "hi", "--device", "cpu", "--max-new-tokens", "2", "--ignore-eos"]
    assert cli.main(["generate", tiny_model, *asked]) == 0
    assert capsys.readouterr().out


def test_cuda_home_wins_and_is_named_when_it_is_wrong(
    no_toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(no_toolkit / "nvcc", "13.0.1")
    root = fake_toolkit(tmp_path / "my cuda", "12.4.99")
    monkeypatch.setenv("CUDA_HOME", str(root))
    assert build.find_toolkit() == Toolkit(root, "12.4.99", root / "lib64")
    monkeypatch.setenv("CUDA_HOME", "/not/there")
    with pytest.raises(MissingError, match="CUDA_HOME is /not/there"):
        build.find_toolkit()


def test_toolkit_of_torchs_major_version_is_preferred(
    no_toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = fake_toolkit(tmp_path / "old", "12.4.99"), fake_toolkit(tmp_path / "new", "13.0.1")
    (no_toolkit / "nvcc").symlink_to(old / "bin" / "nvcc")
    monkeypatch.setattr(build, "_wheel_roots", lambda: [new])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert build.find_toolkit().root == new
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert build.find_toolkit().version == "12.4.99"
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    assert build.find_toolkit().version == "12.4.99", "none fits: the first"


def test_a_script_on_path_leads_to_its_toolkit(no_toolkit: Path, tmp_path: Path) -> None:
    root = fake_toolkit(tmp_path / "cuda", "13.0.88")
    fake_nvcc(no_toolkit / "nvcc", "13.0.88", top=root / "bin" / "..")
    assert build.find_toolkit() == Toolkit(root, "13.0.88", root / "lib64")


def test_no_host_compiler_says_what_to_install(no_toolkit: Path) -> None:
    with pytest.raises(MissingError, match=r"host g\+\+"):
        build.host_compiler()


def test_a_wrong_cxx_is_named(no_toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++-99")
    with pytest.raises(MissingError, match=r"CXX, g\+\+-99"):
        build.host_compiler()


def test_ninja_is_found_off_the_path(no_toolkit: Path) -> None:
    folder = build.ninja_dir()
    assert folder is not None
    assert (Path(folder) / "ninja").is_file()


def test_ninja_on_the_path_is_used(no_toolkit: Path) -> None:
    (no_toolkit / "ninja").touch(0o755)
    assert build.ninja_dir() is None


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_torch_without_cuda_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="without CUDA") as caught:
        build.build(write_kernel(tmp_path))
    assert caught.value.exit_code == 5


def test_no_gpu_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingError, match="no CUDA GPU is visible"):
        build.architectures()


def test_toolkit_without_a_runtime_library_is_named(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"libcudart.*minidecode\[nvcc\]"):
        build.link_dir(Toolkit(tmp_path, "13.0.1", tmp_path / "lib"))


def test_link_folder_for_a_wheels_runtime_library(cache: Path, tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libcudart.so.13"
    library.parent.mkdir()
    library.touch()
    toolkit = Toolkit(tmp_path, "13.0.1", library.parent)
    for _ in range(2):
        link = build.link_dir(toolkit) / "libcudart.so"
        assert link.resolve() == library
        assert link.parent.parent == cache


# --- words of the compilers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            '/a/k.cu(12): error: identifier "x" is undefined',
            '/a/k.cu:12: identifier "x" is undefined',
        ),
        ("/my dir/k.cu(3): error #20: odd", "/my dir/k.cu:3: odd"),
        ("/dl (1)/k (2).cu(3): error: a(4): b", "/dl (1)/k (2).cu:3: a(4): b"),
        ("k.cu:5:10: fatal error: no.h: No such file", "k.cu:5: no.h: No such file"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_10'",) * 2,
        ("ptxas error   : Entry function 'f' uses too much shared data",) * 2,
        ("/usr/bin/ld: cannot find -lcudart: No such file", "cannot find -lcudart: No such file"),
        ("/a b/k.so: undefined symbol: _Z4gonev", "undefined symbol: _Z4gonev"),
        ("k.cu(4): warning #177-D: variable was declared", None),
        ("1 error detected in the compilation of k.cu.", None),
    ],
)
def test_error_lines_are_recognised(line: str, expected: str | None) -> None:
    output = f"[1/2] nvcc -c k.cu\n{line}\nninja: build stopped: subcommand failed.\n"
    assert build.compiler_errors(output) == ([] if expected is None else [expected])


# --- real builds ----------------------------------------------------------------------------------


@needs.nvcc
def test_build_in_folders_with_blanks(
    tmp_path: Path, linkable: Path, monkeypatch: pytest.MonkeyPatch, phases: list[tuple[str, str]]
) -> None:
    """Source, header, cache and toolkit: blanks everywhere; hidden symbols; half operators."""
    monkeypatch.setenv("MINIDECODE_CACHE_DIR", str(tmp_path / "my cache"))
    (tmp_path / "my cuda").symlink_to(build.find_toolkit().root)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "my cuda"))
    source = write_kernel(tmp_path / "my kernels", name="my kernel.cu")
    source.write_text(
        SOURCE + "void helper() {}\n__device__ half2 square(half2 a) { return a * a; }\n"
    )
    library = compile_(source)
    assert status(library) == 7
    assert phases == [("my kernel", "compiling"), ("my kernel", "done")]
    assert build.build_seconds() > 0.1
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", str(library._name)], capture_output=True, text=True
    ).stdout
    assert "minidecode_gemv" in symbols
    assert "helper" not in symbols

    # Built once: a second process would load it without a lock, a compiler or a writable cache.
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_locked_build", None)
    assert status(compile_(source)) == 7


@needs.nvcc
def test_edits_are_seen_and_errors_are_readable_in_one_process(
    tmp_path: Path, linkable: Path
) -> None:
    source = write_kernel(tmp_path, 1)
    first = compile_(source)
    assert status(first) == 1
    (tmp_path / "code.cuh").write_text("#define CODE 2\n")
    assert status(compile_(source)) == 2, "an edited header"
    source.write_text(SOURCE.replace("(CODE)", "(CODE + missing_name)"))
    for _ in range(2):
        with pytest.raises(CompileError) as caught:
            compile_(source)
        assert f"{source}:3: identifier" in str(caught.value)
        assert "missing_name" in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
        assert caught.value.exit_code == 1
        assert "missing_name" in Path(str(caught.value).rsplit(" ", 1)[1]).read_text()
    source.write_text(SOURCE.replace("(CODE)", "(CODE + 40)"))
    assert status(compile_(source)) == 42, "a corrected file"
    assert status(first) == 1, "the old library lives on"


@needs.nvcc
def test_an_edit_during_a_build_is_not_kept_under_the_old_name(
    tmp_path: Path, linkable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_kernel(tmp_path, 1)
    header = tmp_path / "code.cuh"

    def edit(_: str, phase: str) -> None:
        if phase == "compiling":
            header.write_text("#define CODE 2\n")

    monkeypatch.setattr(build, "on_build", edit)
    with pytest.raises(MinidecodeError, match="was changed while it was compiled"):
        compile_(source)
    monkeypatch.setattr(build, "on_build", None)
    assert status(compile_(source)) == 2
    header.write_text("#define CODE 1\n")
    assert status(compile_(source)) == 1


@needs.nvcc
@pytest.mark.parametrize("name", ["with:colon", "with$dollar"])
def test_a_cache_where_ninja_does_not_build_is_refused(
    name: str, tmp_path: Path, linkable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIDECODE_CACHE_DIR", str(tmp_path / name))
    with pytest.raises(MinidecodeError, match="no folder with ':' or") as caught:
        compile_(write_kernel(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


@needs.nvcc
def test_a_failure_that_was_not_the_files_can_be_retried(
    tmp_path: Path, linkable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would take the second, identical build for done and load a file that is not there."""
    source = write_kernel(tmp_path, 5)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("Error building extension: Killed")

    with monkeypatch.context() as patch:
        import torch.utils.cpp_extension as extension

        patch.setattr(extension, "_run_ninja_build", broken)
        with pytest.raises(CompileError, match="Killed"):
            compile_(source)
    assert status(compile_(source)) == 5
    record = json.loads(next(linkable.glob("*/build.json")).read_text())
    assert record["library"].endswith("_r1.so")
    monkeypatch.setattr(build, "_loaded", {})
    assert status(compile_(source)) == 5, "found again under its new name"


@needs.nvcc
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            'extern "C" void minidecode_gemv(half*, const half*, const half*, int, int,'
            " cudaStream_t) {}\n",
            "mine.cu:1: ",
        ),
        ("void gone();\n" + SOURCE.replace("return", "gone(); return"), "undefined symbol"),
    ],
    ids=["wrong signature", "undefined function"],
)
def test_what_cannot_be_loaded_is_explained(
    code: str, words: str, tmp_path: Path, linkable: Path
) -> None:
    source = write_kernel(tmp_path)
    source.write_text(code)
    with pytest.raises(CompileError, match=words) as caught:
        compile_(source)
    assert str(source) in str(caught.value)


@needs.nvcc
def test_stale_lock_and_half_a_build_are_cleared(tmp_path: Path, linkable: Path) -> None:
    """torch's own load() would wait for this lock for ever."""
    start = time.monotonic()
    compile_(write_kernel(tmp_path / "clean"))
    clean = time.monotonic() - start
    source = write_kernel(tmp_path)
    folder = build.plan_build(source, ARCH).directory
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    (folder / f"{folder.name}.so").write_bytes(b"half a library")
    (folder / "build.ninja").write_text("nonsense")
    start = time.monotonic()
    assert status(compile_(source)) == 7
    assert time.monotonic() - start < 2 * clean + 10
    assert not (folder / "lock").exists()


@needs.nvcc
def test_a_damaged_library_is_built_again(
    tmp_path: Path, linkable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_ = build.plan_build(write_kernel(tmp_path), ARCH)
    plan_.directory.mkdir(parents=True)
    (plan_.directory / "x.so").write_bytes(b"half a library")
    (plan_.directory / build.MARKER).write_text('{"library": "x.so"}')
    assert status(build.run_builds([plan_])[0]) == 7


HOLDER = """
import select, sys, time
from pathlib import Path
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    select.select([sys.stdin], [], [], 20)  # until the other one waits
    time.sleep(2)
    Path(sys.argv[2]).touch()
"""


@needs.nvcc
def test_a_live_builder_in_another_process_is_waited_for(
    tmp_path: Path, linkable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, ended = write_kernel(tmp_path), tmp_path / "ended"
    linkable.mkdir(parents=True)
    lock = f"{build.plan_build(source, ARCH).directory}.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, lock, ended], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    stdin, stdout = holder.stdin, holder.stdout
    assert stdin is not None
    assert stdout is not None
    assert stdout.readline() == b"held\n"
    seen: list[tuple[str, bool]] = []

    def on_build(_: str, phase: str) -> None:
        seen.append((phase, ended.exists()))
        if phase == "waiting":
            stdin.close()

    monkeypatch.setattr(build, "on_build", on_build)
    assert status(compile_(source)) == 7
    assert seen == [("waiting", False), ("compiling", True), ("done", True)]
    assert holder.wait(10) == 0
    stdout.close()


BUILDER = """
import sys
from pathlib import Path
from minidecode.kernels import build
build.on_build = lambda name, phase: print(phase, flush=True)
plan = build.plan_build(Path(sys.argv[1]), ("90a",))
print(build.run_builds([plan])[0].minidecode_gemv(None, None, None, 1, 1, None))
"""


def start_builder(source: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(source)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@needs.nvcc
def test_several_processes_build_once_and_a_killed_one_is_no_matter(
    tmp_path: Path, linkable: Path
) -> None:
    source = write_kernel(tmp_path)
    killed = start_builder(source)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "compiling\n"
    others = [start_builder(source) for _ in range(2)]
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    said = [other.communicate(timeout=120)[0].split() for other in others]
    assert [words[-1] for words in said] == ["7", "7"]
    assert sorted(word for words in said for word in words if word in ("compiling", "done")) == [
        "compiling",
        "done",
    ], "one of the two builds, the other waits or comes late"


@needs.nvcc
def test_builds_run_side_by_side(tmp_path: Path, linkable: Path) -> None:
    sources = [write_kernel(tmp_path / name, code) for code, name in enumerate("abc", 1)]
    libraries = build.run_builds([build.plan_build(source, ARCH) for source in sources])
    assert [status(library) for library in libraries] == [1, 2, 3]


@needs.nvcc
def test_ninja_off_the_path_and_no_activated_environment(
    tmp_path: Path, linkable: Path, tools: Callable[..., None]
) -> None:
    tools("ninja", "c++")
    path = os.environ["PATH"]
    assert shutil.which("ninja") is None
    assert status(compile_(write_kernel(tmp_path))) == 7
    assert os.environ["PATH"] == path, "put back"
    assert "CXX" not in os.environ


# --- caches that refuse ---------------------------------------------------------------------------


def unwritable(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    (tmp_path / "file").touch()
    patch.setenv("MINIDECODE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    return "cannot write the kernel cache"


def read_only(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(Path, "mkdir", functools.partial(_refuse, errno.EROFS))
    return "Read-only file system"


def full(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(Path, "write_text", functools.partial(_refuse, errno.ENOSPC))
    return "no space left for the kernel cache"


def full_while_compiling(tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\necho "k.o: No space left on device" >&2\nexit 1\n')
    nvcc.chmod(0o755)
    patch.setenv("PYTORCH_NVCC", str(nvcc))
    return "no space left while compiling"


def _refuse(code: int, *_: object, **__: object) -> None:
    raise OSError(code, os.strerror(code))


@needs.nvcc
@pytest.mark.parametrize("how", [unwritable, read_only, full, full_while_compiling])
def test_a_cache_that_refuses_is_one_clear_line(
    how: Callable[[Path, pytest.MonkeyPatch], str],
    tmp_path: Path,
    linkable: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = write_kernel(tmp_path)
    build.find_toolkit()
    with monkeypatch.context() as patch:
        words = how(tmp_path, patch)
        with pytest.raises(MinidecodeError, match=words) as caught:
            compile_(source)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert "MINIDECODE_CACHE_DIR" in message or "TMPDIR" in message


# --- the nvcc extra -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def nvcc_wheels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What `pip install "minidecode[nvcc]"` brings, in a folder whose name has a blank."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("nvcc extra")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target"]
    command += [str(folder), *project["optional-dependencies"]["nvcc"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if os.environ.get("CI"):
            pytest.fail(done.stderr)
        pytest.skip(f"cannot install the nvcc extra: {done.stderr.strip()[-200:]}")
    yield folder
    shutil.rmtree(folder)


def test_the_nvcc_extra_compiles_and_links_with_no_system_cuda(
    nvcc_wheels: Path,
    linkable: Path,
    tools: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tools("nvcc", "ptxas", "cicc")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(build, "SYSTEM_ROOTS", ())
    with pytest.raises(MissingError, match="no CUDA compiler"):
        build.find_toolkit()

    monkeypatch.syspath_prepend(str(nvcc_wheels))
    build._find_toolkit.cache_clear()
    toolkit = build.find_toolkit()
    assert toolkit.root.parent == nvcc_wheels / "nvidia"
    assert not (toolkit.library_dir / "libcudart.so").exists(), "or our link folder is not needed"
    library = compile_(build.cuda_sources() / "gemv" / "half2_block.cu")
    told = subprocess.run(["readelf", "-d", library._name], capture_output=True, text=True).stdout
    assert "[libcudart.so.13]" in told
    assert f"[{toolkit.library_dir}]" in told, "the wheel's library is found when running, too"
