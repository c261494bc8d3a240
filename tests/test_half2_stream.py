"""half2_stream's choice of tile on the host shim: every rule is met by some shape and is right.

The rules speak of thousands of rows. Here the kernel is compiled with 64 times fewer in each, so
that a shape for each rule is small enough for the shim.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import gemv_cases
import needs
import pytest
import shim
from gemv_cases import Case

pytestmark = needs.present(shim.unavailable())

SOURCE = shim.CUDA / "gemv" / "half2_stream.cu"
TEXT = SOURCE.read_text(encoding="utf-8")
RULE = re.compile(r"rule<(Tile<[\d, ]+>)>\((\d+), (\d+|INT_MAX)\)")
FEWER = 64
# Stands for any row longer than the rules know.
LONG = 8200


@dataclass(frozen=True)
class Rule:
    """A line of the tables in the source: a tile for n >= least_n and k <= most_k."""

    least_n: int
    most_k: int
    tile: str

    @property
    def staged(self) -> bool:
        return int(re.findall(r"\d+", self.tile)[3]) > 0

    def holds(self, n: int, k: int, sm90: bool) -> bool:
        return n >= self.least_n and k <= self.most_k and (sm90 or not self.staged)


RULES = [
    Rule(-(-int(n) // FEWER), LONG if k == "INT_MAX" else int(k), tile)
    for tile, n, k in RULE.findall(TEXT)
]


def fewer(text: str) -> str:
    """The source with FEWER times fewer rows in each rule."""
    return RULE.sub(lambda m: f"rule<{m[1]}>({-(-int(m[2]) // FEWER)}, {m[3]})", text)


@pytest.fixture(scope="module")
def library() -> Iterator[shim.Runner]:
    with shim.host_library(SOURCE, overlay={SOURCE: fewer(TEXT)}) as runner:
        yield runner


def test_all_rules_are_read() -> None:
    assert len(RULES) == TEXT.count("rule<") > 0
    assert sum(rule.staged for rule in RULES) == 2
    assert RULES[-1].holds(1, LONG, sm90=False)  # some tile for everything


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_rule_is_met_and_its_tile_right(library: shim.Runner, rule: Rule) -> None:
    n, k = rule.least_n, rule.most_k
    first = next(r for r in RULES if r.holds(n, k, sm90=True))
    assert first == rule, "no shape gets here: an earlier rule takes it"
    # One row more than whole blocks, and in a dependent launch.
    case = Case(n + 1, k, order=3, seed=n)
    assert gemv_cases.wrong(library, "fp16", case) is None
    assert library.launches == 1


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.staged], ids=str)
def test_without_bulk_copies_another_tile_is_right(library: shim.Runner, rule: Rule) -> None:
    case = Case(rule.least_n, rule.most_k, capability=(8, 9))
    assert gemv_cases.wrong(library, "fp16", case) is None


BOTH_ALIGNED = "minidecode::rows_aligned(w, k, bytes) && minidecode::rows_aligned(x, k, bytes)"


@pytest.mark.parametrize(
    ("old", "new", "case"),
    [
        pytest.param("aligned(sizeof(uint4))", "aligned(4)", Case(3, 66), id="16-byte-rows"),
        pytest.param("aligned(sizeof(half2))", "true", Case(3, 33), id="odd-rows"),
        pytest.param(
            BOTH_ALIGNED,
            "minidecode::rows_aligned(w, k, bytes)",
            Case(3, 64, x_offset=1),
            id="x-alignment",
        ),
        pytest.param(
            BOTH_ALIGNED,
            "minidecode::rows_aligned(x, k, bytes)",
            Case(3, 64, w_offset=1),
            id="w-alignment",
        ),
        pytest.param("if (row >= n) return;", "", Case(3, 33), id="row-guard"),
        pytest.param("i < pieces; i +=", "i + kWarp <= pieces; i +=", Case(3, 33), id="tail"),
        pytest.param("(n - 1) / kRows + 1", "n / kRows", Case(9, 33), id="grid"),
    ],
)
def test_mutants_are_caught(old: str, new: str, case: Case) -> None:
    assert TEXT.count(old) == 1
    with shim.host_library(SOURCE, overlay={SOURCE: TEXT.replace(old, new)}) as mutant:
        assert gemv_cases.wrong(mutant, "fp16", case) is not None
