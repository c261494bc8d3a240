"""What the compiler made of the dependent-launch wait: nothing written before it, nothing moved.

Kernels of one step overlap: what an earlier kernel writes may be read only after
`griddepcontrol.wait`, and nothing may be written before it. The host shim checks the source; this
checks the PTX, since a load that is not volatile may be moved by the compiler (CUDA's own __ldcg of
a half is such a one).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import needs
import pytest

from minidecode.kernels import build

SOURCES = sorted((build.cuda_sources() / "step").glob("*.cu"))
SOURCES.append(build.cuda_sources() / "gemv" / "half2_stream.cu")
# Reads of what earlier kernels wrote that are meant to come before the wait: the position, which
# changes only at the end of a step.
EARLY = {"attend": 1}
# Kernels that ask for weights before the wait.
WEIGHTS_EARLY = ("fused_linear",)
# Kernels that are not launched dependently.
INDEPENDENT = ("read", "gemv_pieces")

pytestmark = needs.nvcc


def kernels(source: Path, folder: Path) -> dict[str, list[str]]:
    """The PTX instructions of each kernel, by its mangled name."""
    target = folder / "kernel.ptx"
    command = [str(build.find_toolkit().nvcc), *build.BASE_FLAGS, "-ptx", "-arch=compute_90a"]
    command += [*(f"-I{path}" for path in build.include_dirs()), str(source), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True)
    found: dict[str, list[str]] = {}
    name = ""
    for line in target.read_text().splitlines():
        entry = re.search(r"\.entry (\w+)\(", line)
        if entry is not None:
            name = entry.group(1)
            found[name] = []
        elif name:
            found[name].append(line.strip())
    return found


def plain_name(mangled: str, source: Path) -> str:
    """ "attend" of "_ZN10minidecode6attendILi128…": the last part before the template arguments."""
    parts, rest = [], mangled.removeprefix("_ZN")
    while match := re.match(r"(\d+)", rest):
        rest = rest[match.end() :]
        length = int(match.group(1))
        parts.append(rest[:length])
        rest = rest[length:]
    assert parts, (mangled, source)
    return parts[-1]


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_nothing_passes_the_wait(source: Path, tmp_path: Path) -> None:
    found = kernels(source, tmp_path)
    assert found
    for mangled, code in found.items():
        name = plain_name(mangled, source)
        waits = [i for i, line in enumerate(code) if "griddepcontrol.wait" in line]
        if name in INDEPENDENT:
            assert not waits
            continue
        assert len(waits) == 1, (name, waits)
        before = code[: waits[0]]
        fresh = [line for line in before if "ld.global.cg" in line]
        assert len(fresh) == EARLY.get(name, 0), (name, fresh)
        writes = [line for line in before if re.match(r"(@\S+ )?(st\.global|red\.|atom\.)", line)]
        assert not writes, (name, writes)
        if name in WEIGHTS_EARLY:
            assert any(re.search(r"ld\.global\.nc|cp\.async", line) for line in before), name


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_no_load_that_the_compiler_may_move(source: Path, tmp_path: Path) -> None:
    """`__ldcg(const half*)` is the only one with this spelling."""
    for name, code in kernels(source, tmp_path).items():
        moved = [line for line in code if "ld.global.cg.b16" in line]
        assert not moved, (name, moved[:3])
