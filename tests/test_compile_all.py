"""Every CUDA source compiles for every supported architecture: no warning, no spilled register."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import needs
import pytest

from minidecode.kernels import build, tune
from minidecode.kernels.tiles import Device, Tile, default_tile, tile_candidates
from minidecode.models.stages import LINEAR_KINDS
from minidecode.plan.fused import file_of

ARCHITECTURES = ("75", "80", "86", "89", "90a", "100", "120")
SOURCES = sorted(build.cuda_sources().glob("*/*.cu"))
USERS = sorted((Path(__file__).parent / "fixtures" / "hostile").glob("*.cu"))
FLAGS = [*build.BASE_FLAGS, "-Werror=all-warnings", "-Xcompiler=-Wall", "-Xptxas=-v"]

pytestmark = needs.nvcc


def compile_all(source: Path, cache: Path, architectures: tuple[str, ...]) -> str:
    """What nvcc and ptxas say about `source`, one compiler run for all architectures.

    Kept by the hash of all that goes into it, so that a second run of the tests costs nothing.
    """
    flags = [*FLAGS, *build.gencode_flags(architectures)]
    flags += [f"-I{folder}" for folder in build.include_dirs()]
    version = build.find_toolkit().version
    key = hashlib.sha256(repr([build.source_hash(source), flags, version]).encode()).hexdigest()
    kept = cache / f"{source.stem}-{key[:20]}.txt"
    if kept.exists():
        return kept.read_text()
    command = [str(build.find_toolkit().nvcc), *flags, "-c", str(source), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{source.name}:\n{output}"
    fresh = kept.with_suffix(f".{os.getpid()}")
    fresh.write_text(output)
    fresh.replace(kept)
    return output


@pytest.fixture(scope="module")
def outputs(request: pytest.FixtureRequest) -> Iterator[dict[Path, Future[str]]]:
    """The compilers, two at a time, started for all files that this run asks for."""
    cache = request.config.cache
    assert cache is not None
    folder = Path(str(cache.mkdir("nvcc")))
    wanted = {
        item.callspec.params.get("source")
        for item in request.session.items
        if item.fspath == request.path and hasattr(item, "callspec")
    }
    with ThreadPoolExecutor(2) as pool:
        yield {
            source: pool.submit(
                compile_all, source, folder, ("90a",) if source in USERS else ARCHITECTURES
            )
            for source in [*SOURCES, *USERS]
            if source in wanted
        }


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_compiles_everywhere_without_spills(source: Path, outputs: dict[Path, Future[str]]) -> None:
    output = outputs[source].result()
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", output)
    targets = set(re.findall(r"Compiling entry function '\w+' for 'sm_(\w+)'", output))
    assert targets == set(ARCHITECTURES)
    assert len(spills) >= len(ARCHITECTURES)
    assert all(pair == ("0", "0") for pair in spills), spilling(output)
    assert "warning" not in output.lower(), output


@pytest.mark.parametrize("source", USERS, ids=lambda path: path.stem)
def test_a_users_file_compiles(source: Path, outputs: dict[Path, Future[str]]) -> None:
    assert "Compiling entry function" in outputs[source].result() or source.stem in ("zeros", "nan")


@pytest.mark.parametrize("stem", sorted({file_of(kind) for kind in LINEAR_KINDS}))
def test_no_tile_spills(stem: str, tmp_path: Path) -> None:
    """Those that `tune` tries, that we ship, and the rule's, on the GPUs that have them all."""
    h200 = Device(sms=132, sm90=True)
    tiles = dict.fromkeys(tile_candidates(64, h200))
    for n, k in itertools.product((100, 500, 1000, 1500, 2000, 9000), (576, 2048, 8192)):
        tiles[default_tile(n, k, h200)] = None
    for file in (Path(tune.__file__).parent / "tuned").glob("*.json"):
        for key, fields in json.loads(file.read_text(encoding="utf-8"))["tiles"].items():
            if file_of(key.split()[0]) == stem:
                tiles[Tile(**fields)] = None
    text = (build.cuda_sources() / "step" / f"{stem}.cu").read_text(encoding="utf-8")
    source = tmp_path / f"{stem}.cu"
    source.write_text(
        text.replace("MINIDECODE_TILES", ", ".join(tile.spelled for tile in tiles)), "utf-8"
    )
    output = compile_all(source, tmp_path, ("90a",))
    assert output.count("Compiling entry function") == len(tiles) > 40
    assert not spilling(output)


def spilling(output: str) -> str:
    """The functions that spill, with their architectures."""
    lines, name, found = output.splitlines(), "", []
    for line in lines:
        entry = re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line)
        name = f"{entry.group(1)} on {entry.group(2)}" if entry else name
        if "spill" in line and "0 bytes spill stores, 0 bytes spill loads" not in line:
            found.append(f"{name}: {line.strip()}")
    return "\n".join(found)


def test_spills_would_be_seen(tmp_path: Path) -> None:
    """The check itself: a kernel held to few registers must show up."""
    source = tmp_path / "spills.cu"
    source.write_text(
        "__global__ void __launch_bounds__(1024, 2) hungry(float* y, const float* x) {\n"
        "  float v[96];\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 96; ++i) v[i] = x[i * 1024 + threadIdx.x];\n"
        "  __syncthreads();\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 96; ++i) y[i * 1024 + threadIdx.x] = v[i] * v[95 - i];\n"
        "}\n"
    )
    output = compile_all(source, tmp_path, ("90a",))
    assert "hungry" in spilling(output)


def test_a_warning_fails(tmp_path: Path) -> None:
    source = tmp_path / "warns.cu"
    source.write_text("__global__ void f(int* y) { int unused = 3; *y = 0; }\n")
    with pytest.raises(AssertionError, match="unused"):
        compile_all(source, tmp_path, ("90a",))
