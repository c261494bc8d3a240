"""The README's commands parse, its files exist and its kernel compiles."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import needs
import pytest

from minidecode import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


COMMANDS = [
    shlex.split(line)
    for block in blocks("sh")
    for line in block.splitlines()
    if line.startswith("minidecode ")
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_parses(command: list[str]) -> None:
    arguments = command[1:]
    assert cli._parser(arguments).parse_args(arguments).run


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 5


def test_every_command_is_in_the_tour() -> None:
    for name in cli.COMMANDS:
        assert re.search(rf"^\| `{name}\b", README, re.MULTILINE), name


def test_named_files_exist() -> None:
    named = set(re.findall(r"`((?:cuda|minidecode|scripts|tests)/[\w./]*)`", README))
    named |= {word for block in blocks("sh") for word in re.findall(r"scripts/[\w.]+", block)}
    assert "scripts/run.sh" in named
    assert not {name for name in named if not (ROOT / name).exists()}


@pytest.mark.usefixtures("example_dir")
def test_the_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (block for block in blocks("python") if "minidecode.load" in block)
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert out.startswith(" Paris.")
    assert out.rstrip().endswith(" eos")


@needs.nvcc
def test_the_kernel_compiles_against_the_declared_interface(tmp_path: Path) -> None:
    (source,) = blocks("cuda")
    assert source.count("\n") <= 30
    (tmp_path / "mine.cu").write_text(source)
    (tmp_path / "both.cu").write_text('#include <minidecode/abi.cuh>\n#include "mine.cu"\n')
    command = ["nvcc", "-std=c++17", "-arch=sm_90", "-cubin", "-o", "mine.cubin"]
    done = subprocess.run(
        [*command, f"-I{ROOT / 'cuda/include'}", "both.cu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
