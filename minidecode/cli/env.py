"""`env`: what a bug report needs to say about the machine."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from typing import Any

from minidecode.cli import options
from minidecode.cli.progress import Progress
from minidecode.errors import MinidecodeError

VARIABLES = (
    "MINIDECODE_CACHE_DIR",
    "MINIDECODE_KERNEL",
    "MINIDECODE_DEVICE",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "TORCH_CUDA_ARCH_LIST",
    "MAX_JOBS",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_device(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options.add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    from minidecode.bench import device
    from minidecode.cache import cache_dir, size_of
    from minidecode.loading import resolve_device
    from minidecode.records import SCHEMA_VERSION

    chosen = resolve_device(args.device)
    with Progress(args.quiet) as progress:
        progress(None, "measuring the read bandwidth")
        try:
            device.read_bandwidth(chosen)
            problem = None
        except MinidecodeError as error:
            problem = str(error)
    environment = device.environment(chosen).to_dict()
    others = {
        "read_bw_problem": problem,
        "compiler": shutil.which(os.environ.get("CXX") or "g++"),
        "cache": str(cache_dir()),
        "cache_bytes": size_of(cache_dir()),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    if args.json:
        print(json.dumps({"schema_version": SCHEMA_VERSION, "environment": environment, **others}))
        return 0
    for name, value in _lines({**environment, **others}):
        print(f"{name:<22}{value}")
    return 0


def _lines(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Names with their values in words; what is not known is left out."""
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += _lines(value)
        elif name.endswith("_bytes") and value is not None:
            lines.append((name.removesuffix("_bytes"), f"{value / 1e9:.3f} GB"))
        elif isinstance(value, float):
            lines.append((name, f"{value:.1f}"))
        elif value not in (None, "") and name != "schema_version":
            lines.append((name, str(value)))
    return lines
