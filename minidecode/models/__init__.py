"""Model families: one file each, named by the `model_type` of config.json."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from minidecode.config import ModelConfig, read_json
from minidecode.errors import MinidecodeError
from minidecode.models.stages import Family

# Modules of this package that are no family.
_SHARED = ("stages", "synthetic")


def supported() -> tuple[str, ...]:
    """Every `model_type` that has a file here."""
    return tuple(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _SHARED)


def family(model_type: str) -> Family:
    """The family of a `model_type`. Raises MinidecodeError that lists the supported ones."""
    if model_type not in supported():
        raise MinidecodeError(
            f"model_type {model_type!r} is not supported; supported are {', '.join(supported())}"
        )
    module = importlib.import_module(f"{__name__}.{model_type}")
    found: Family = module.FAMILY
    return found


def load_config(directory: Path) -> ModelConfig:
    """The config of the Hugging Face directory `directory`."""
    raw = read_json(directory / "config.json")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise MinidecodeError(f"{directory / 'config.json'}: model_type is missing")
    return ModelConfig.from_hf(raw, family(model_type).defaults, name=directory.name)
