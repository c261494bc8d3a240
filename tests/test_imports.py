"""Who may import whom, what must stay light, and who may print."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minidecode"
EVERYTHING = frozenset({""})

# Part of the package -> the parts it may import, `errors` aside, which all may. The longest name
# that fits counts, and a part includes what lies below it.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "": frozenset({"decode", "loading", "sampling"}),  # minidecode/__init__.py
    "__main__": frozenset({"cli"}),
    "cli": EVERYTHING,
    "bench": frozenset(
        {
            *("", "bench", "cache", "config", "decode", "kernels", "memory", "models.stages"),
            *("plan", "records"),
        }
    ),
    "bench.stats": frozenset(),
    "report": frozenset({"records", "report"}),
    "records": frozenset(),
    "loading": frozenset({"checkpoint", "decode", "memory", "models", "plan", "weights"}),
    "decode": frozenset(
        {
            *("config", "kernels.build", "kernels.tiles", "memory", "models", "plan"),
            *("sampling", "weights"),
        }
    ),
    "plan": frozenset({"config", "kernels", "models.stages", "plan", "sampling", "weights"}),
    "weights": frozenset({"checkpoint", "config", "models"}),
    "models": frozenset({"config", "models"}),
    "kernels": frozenset({"cache", "kernels", "memory"}),
    "text": frozenset({"config"}),
    "sampling": frozenset({"config"}),
    "checkpoint": frozenset({"cache", "config", "example"}),
    "example": frozenset({"cache", "checkpoint", "config"}),
    "config": frozenset(),
    "cache": frozenset(),
    "memory": frozenset(),
    "errors": frozenset(),
}

# Importing these must cost nothing: they are behind `--help`, or read results elsewhere.
LIGHT = ["__main__", "cli", "errors", "records", "bench.stats", "report", "text", "sampling"]
HEAVY = ["torch", "transformers", "rich", "matplotlib"]


def modules() -> dict[str, Path]:
    """Dotted name inside the package -> file; "" is the package itself."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def inside(module: str, part: str) -> bool:
    return module == part or module.startswith(f"{part}.") or part == ""


def imports(path: Path, known: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """Modules of ours that a file imports anywhere in it, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] != "minidecode":
                continue
            module = name.removeprefix("minidecode").removeprefix(".")
            while module not in known:  # a name in a module, not a module
                module = module.rpartition(".")[0]
            yield module, node.lineno


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_module_imports_only_what_it_may(module: str) -> None:
    known = modules()
    part = max((p for p in MAY_IMPORT if p and inside(module, p)), key=len, default=None)
    assert part is not None or module == "", f"minidecode/{module} has no import rule yet"
    allowed = MAY_IMPORT[part or ""]
    for imported, line in imports(known[module], known):
        ok = imported == "errors" or any(
            imported == other if other == "" and part != "cli" else inside(imported, other)
            for other in allowed
        )
        assert ok, f"{known[module]}:{line}: {module} may not import {imported or 'minidecode'}"


def test_the_rules_name_only_what_exists() -> None:
    assert not {part for part in MAY_IMPORT if part not in modules()}


def run(code: str) -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_light_modules_import_nothing_heavy() -> None:
    light = [m for m in modules() if m and any(inside(m, part) for part in LIGHT)]
    code = f"""
import importlib, json, sys
found = {{}}
for name in {light!r}:
    importlib.import_module("minidecode." + name)
    loaded = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]
    if loaded and not found: found[name] = loaded
print(json.dumps(found))
"""
    assert run(code) == {}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        [],
        ["generate", "--help"],
        ["nonsense"],
        ["generate", "--nonsense"],
        ["generate", "--prompt", "x", "--max-new-tokens", "0"],
        ["generate", "--prompt", "x", "--temperature", "nan"],
        ["generate", "--prompt", "x", "--device", "tpu"],
        ["generate", "--prompt", "x", "--kernel", "nonsense"],
        ["generate", "--prompt-file", "/no/such/file"],
    ],
    ids=" ".join,
)
def test_help_and_usage_errors_import_neither_torch_nor_transformers(arguments: list[str]) -> None:
    code = f"""
import json, sys
from minidecode.cli import main
try: code = main({arguments!r})
except SystemExit as end: code = end.code
print()
print(json.dumps({{"loaded": [m for m in {HEAVY!r} if m in sys.modules], "code": code}}))
"""
    found = run(code)
    assert found["loaded"] == []
    assert found["code"] in (0, 2)


def test_only_the_command_line_prints_or_exits() -> None:
    for module, path in modules().items():
        if inside(module, "cli") or module == "__main__":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert called not in ("print", "exit", "sys.exit", "os._exit", "SystemExit"), (
                f"{path}:{node.lineno} calls {called}"
            )


def test_the_compiler_is_called_in_one_place() -> None:
    users = [m for m, path in modules().items() if "cpp_extension" in path.read_text("utf-8")]
    assert users == ["kernels.build"]


def test_kernels_include_no_torch_header() -> None:
    sources = [p for p in (ROOT / "cuda").rglob("*") if p.suffix in (".cu", ".cuh", ".h")]
    assert sources
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert "#include <torch" not in text, path
        assert "#include <ATen" not in text, path
