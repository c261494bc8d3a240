"""Where minidecode keeps what it makes: the example model, built kernels, tuned tiles."""

from __future__ import annotations

import os
from pathlib import Path

from minidecode.errors import MinidecodeError


def cache_dir() -> Path:
    """`MINIDECODE_CACHE_DIR`, or ~/.cache/minidecode; absolute, and not created here."""
    configured = os.environ.get("MINIDECODE_CACHE_DIR", "")
    try:
        chosen = Path(configured) if configured else Path("~/.cache/minidecode")
        return chosen.expanduser().absolute()
    except RuntimeError:
        raise MinidecodeError(
            "there is no home directory to keep a cache in; set MINIDECODE_CACHE_DIR"
        ) from None


def size_of(folder: Path) -> int:
    """Bytes of the files below `folder`, without those that another process removes meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def cache_subdir(name: str) -> Path:
    """The folder `name` in the cache, made if needed. Raises MinidecodeError when it cannot be."""
    folder = cache_dir() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MinidecodeError(
            f"cannot make the cache folder {folder}: {error.strerror or error}; "
            "set MINIDECODE_CACHE_DIR to a folder that can be written"
        ) from None
    return folder
