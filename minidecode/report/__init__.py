"""Writers of records: one module a format, found by its name, so that a new format is one new file.

A format's module has a function for each kind of result that it can show, all with the same names:
`layers(LayerReport)`, `runs(Sequence[Run])`, `ab(ABResult)`, `gemv(GemvReport)`. They return str,
or bytes for a picture.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from minidecode.errors import UsageError

Writer = Callable[..., Any]


def formats(kind: str) -> list[str]:
    """The formats that can show `kind` ("layers", "runs", …), in alphabetical order."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    return [name for name in names if callable(getattr(_module(name), kind, None))]


def writer(format_name: str, kind: str) -> Writer:
    """The function that writes `kind` in that format. UsageError lists those that there are."""
    known = formats(kind)
    if format_name not in known:
        raise UsageError(f"no format {format_name!r} for {kind}; there are {', '.join(known)}")
    function: Writer = getattr(_module(format_name), kind)
    return function


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")
