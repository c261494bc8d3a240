"""Which tile and split the fused kernels get on this GPU: measured here, shipped, or by rule.

Measured choices are kept in the cache, one file a GPU model, and hold for the kernel sources that
they were measured with. `tuned/` in the package has those of GPUs that we measured ourselves.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from minidecode.cache import cache_dir
from minidecode.kernels import build
from minidecode.kernels.tiles import Choices, Device, Split, Tile

_SHIPPED = Path(__file__).parent / "tuned"
# What a measured choice depends on.
_SOURCES = (
    "norm_linear.cu",
    "linear_residual.cu",
    "norm_linear_swiglu.cu",
    "norm_linear_logits.cu",
    "attention.cu",
    "attention_any.cu",
)


def choices(device: torch.device) -> Choices:
    """The choices for a GPU: those of its cache file over those shipped for its model."""
    name = torch.cuda.get_device_properties(device).name
    found = Choices(device_of(device))
    for path in (_SHIPPED / f"{_slug(name)}.json", cache_file(device)):
        stored = _read(path)
        if path.parent == _SHIPPED or stored.get("sources") == source_hash():
            found = found.but(*_parse(stored))
    return found


def device_of(device: torch.device) -> Device:
    """The GPU as the rules see it."""
    properties = torch.cuda.get_device_properties(device)
    # A kilobyte of each block's is the system's.
    shared = properties.shared_memory_per_multiprocessor - 1024
    return Device(properties.multi_processor_count, properties.major >= 9, shared)


def cache_file(device: torch.device) -> Path:
    """Where the choices measured on this GPU model are kept."""
    name = torch.cuda.get_device_properties(device).name
    return cache_dir() / "tuned" / f"{_slug(name)}.json"


def save(device: torch.device, tiles: Mapping[str, Tile], splits: Mapping[str, Split]) -> Path:
    """Add measured choices to the cache file, which is replaced in one step."""
    path = cache_file(device)
    stored = _read(path)
    kept = _parse(stored if stored.get("sources") == source_hash() else {})
    document = {
        "gpu": torch.cuda.get_device_properties(device).name,
        "sources": source_hash(),
        "tiles": {key: asdict(tile) for key, tile in {**kept[0], **tiles}.items()},
        "splits": {key: asdict(split) for key, split in {**kept[1], **splits}.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    fresh.replace(path)
    return path


def clear(device: torch.device) -> bool:
    """Forget what was measured on this GPU model; whether there was anything."""
    path = cache_file(device)
    there = path.is_file()
    path.unlink(missing_ok=True)
    return there


@functools.cache
def source_hash() -> str:
    """Short hash of the kernels that the choices are for, with all that they include."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        for file in build.included_files(build.cuda_sources() / "step" / name):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        stored = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(stored, dict):
            return stored
    return {}


def _parse(stored: Mapping[str, Any]) -> tuple[dict[str, Tile], dict[str, Split]]:
    """What a stored document holds; one that is damaged or of another version counts as empty."""
    try:
        tiles = {key: Tile(**fields) for key, fields in stored.get("tiles", {}).items()}
        splits = {key: Split(**fields) for key, fields in stored.get("splits", {}).items()}
    except (TypeError, ValueError, AttributeError):
        return {}, {}
    return tiles, splits
