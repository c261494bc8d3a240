"""Colours of the kinds of op, told apart with any kind of colour vision (Paul Tol's bright set)."""

from __future__ import annotations

from collections.abc import Iterable

NEUTRAL = "#9aa3b2"

# The ops that read weights or cache have a hue each; small helpers share a grey.
_KINDS = {
    "qkv": "#4477aa",
    "attention": "#ee6677",
    "o": "#66ccee",
    "gate_up": "#228833",
    "down": "#ccbb44",
    "head": "#aa3377",
}
_HELPERS = frozenset(
    {
        "norm",
        "rope",
        "kv_append",
        "residual",
        "swiglu",
        "bias",
        "embedding",
        "argmax",
        "sample",
        "next",
        "next_token",
    }
)
_OTHERS = ("#99712c", "#7a6fd0", "#3f9c8f", "#c2703d")


def kind_colours(kinds: Iterable[str]) -> dict[str, str]:
    """A colour for each kind; the same kind has the same one in every report."""
    result: dict[str, str] = {}
    others = 0
    for kind in kinds:
        if kind in result:
            continue
        if kind in _KINDS:
            result[kind] = _KINDS[kind]
        elif kind in _HELPERS:
            result[kind] = NEUTRAL
        else:
            result[kind] = _OTHERS[others % len(_OTHERS)]
            others += 1
    return result
