"""Every kernel in cuda/gemv on the host shim: hostile shapes under AddressSanitizer and UBSan."""

from __future__ import annotations

import re
from collections.abc import Iterator

import gemv_cases
import needs
import pytest
import shim
from gemv_cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = needs.present(shim.unavailable())

ENTRIES = [
    (source, dtype)
    for source in sorted((shim.CUDA / "gemv").glob("*.cu"))
    for dtype, (function, _) in gemv_cases.FUNCTIONS.items()
    if re.search(rf"\b{function}\b", source.read_text(encoding="utf-8"))
]


@pytest.fixture(
    scope="module", params=ENTRIES, ids=[f"{source.stem}-{dtype}" for source, dtype in ENTRIES]
)
def entry(request: pytest.FixtureRequest) -> Iterator[tuple[shim.Runner, str]]:
    source, dtype = request.param
    with shim.host_library(source) as library:
        yield library, dtype


def test_supports_ordinary_shapes(entry: tuple[shim.Runner, str]) -> None:
    library, dtype = entry
    assert gemv_cases.wrong(library, dtype, Case(n=40, k=576)) is None
    assert library.launches > 0


@pytest.mark.parametrize("k", [1, 2, 3, 7, 255, 257, 1056, 1152, 2049, 2176, 4095])
def test_awkward_lengths(entry: tuple[shim.Runner, str], k: int) -> None:
    library, dtype = entry
    for n in (1, 3):
        for offset in (0, 1):
            for order in range(4):
                case = Case(n, k, w_offset=offset, order=order, dependent=order < 2)
                assert gemv_cases.wrong(library, dtype, case) is None, case


@pytest.mark.parametrize("k", [1, 2, 3, 7, 255, 257, 1056, 1152, 2049, 2176, 4095])
def test_a_thousand_rows(entry: tuple[shim.Runner, str], k: int) -> None:
    library, dtype = entry
    for offset in (0, 1):
        case = Case(1000, k, w_offset=offset)
        assert gemv_cases.wrong(library, dtype, case) is None, case


@pytest.mark.parametrize("n", [65536, 128256, 151936])
def test_last_row_of_a_head(entry: tuple[shim.Runner, str], n: int) -> None:
    library, dtype = entry
    case = Case(n, 64, max_groups=16)
    assert gemv_cases.wrong(library, dtype, case) is None, case


@settings(max_examples=50)
@given(
    case=st.builds(
        Case,
        n=st.integers(1, 70),
        k=st.integers(1, 700),
        w_offset=st.integers(0, 7),
        x_offset=st.integers(0, 7),
        y_offset=st.integers(0, 7),
        order=st.integers(0, 3),
        dependent=st.booleans(),
        capability=st.sampled_from([(7, 5), (8, 0), (9, 0)]),
        magnitude=st.sampled_from([1e-2, 1.0, 100.0]),
        seed=st.integers(0, 2**32 - 1),
    )
)
def test_drawn_shapes(entry: tuple[shim.Runner, str], case: Case) -> None:
    library, dtype = entry
    assert gemv_cases.wrong(library, dtype, case) is None
