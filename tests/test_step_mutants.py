"""The tests of the step kernels notice broken ones: each mutant here must be caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import needs
import pytest
import shim
import test_step_kernels_host as host
from shim import HostKernelError
from test_step_kernels_host import Case, Linear

from minidecode.kernels import step
from minidecode.sampling import Sampling

pytestmark = needs.present(shim.unavailable())

ATTENTION = "include/minidecode/attention.cuh"
ANY = "step/attention_any.cu"
LINEAR = "include/minidecode/fused_linear.cuh"
ROWS = "include/minidecode/rows.cuh"


@dataclass(frozen=True)
class Mutant:
    """`old`, which `where` below cuda/ has once, becomes `new`; `caught` runs a test on it."""

    stem: str
    name: str
    where: str
    old: str
    new: str
    caught: Callable[[], bool]

    def build(self) -> Path:
        file = shim.CUDA / self.where
        text = file.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{file} has {text.count(self.old)} x {self.old!r}"
        overlay = {file: text.replace(self.old, self.new)}
        return shim.build_library(shim.CUDA / "step" / f"{self.stem}.cu", overlay=overlay)


def attention(*fields: int, **named: object) -> Callable[[], bool]:
    return lambda: host.wrong_attention(Case(*fields, **named)) != ""  # type: ignore[arg-type]


def linear(stem: str, tile: int, rows: int, k: int) -> Callable[[], bool]:
    return lambda: host.wrong_linear(Linear(stem, tile, rows, k)) != ""


def norm_of_many() -> bool:
    return fails(lambda: host.test_rms_norm(9000))


def stays_stopped() -> bool:
    return fails(host.test_an_end_token_stops_the_steps_that_follow)


def draws_of_many() -> bool:
    return fails(lambda: host.test_a_draw_from_many_tokens(1025, (9, 0)))


def draws(sampling: Sampling) -> Callable[[], bool]:
    return lambda: fails(lambda: host.test_every_token_that_is_left_is_drawn_and_no_other(sampling))


def fails(test: Callable[[], None]) -> bool:
    try:
        test()
    except (AssertionError, HostKernelError):
        return True
    return False


MUTANTS = (
    Mutant(
        *("attention", "newest-position", ATTENTION),
        *("if (base + kKeys > seen.last) {", "if (base < 0) {"),
        attention(2, 1, 64, 20),
    ),
    Mutant(
        *("attention", "no-rescale", ATTENTION),
        *("shrink[c] = exp2_quick(greatest[c] - top);", "shrink[c] = 1.0f;"),
        attention(2, 1, 64, 300, 4, magnitude=3.0),
    ),
    Mutant(
        *("attention", "sees-the-future", ATTENTION),
        *("i / 2 * 8 <= seen.last", "i / 2 * 8 <= seen.last + 1"),
        attention(2, 1, 64, 20),
    ),
    Mutant(
        *("attention", "ring-of-one", ATTENTION),
        *("fetch(base + stages * stride, stage);", "fetch(base + stride, stage);"),
        attention(2, 1, 64, 400, 4, context=131_072),
    ),
    Mutant(
        *("attention_any", "window-too-wide", ATTENTION),
        *("last + 1 - a.window", "last - a.window"),
        attention(2, 1, 20, 20, 0, window=4),
    ),
    Mutant(
        *("attention_any", "split-not-weighted", ANY),
        *("__ldcg(parts.sums + lane) * share", "__ldcg(parts.sums + lane)"),
        attention(2, 1, 20, 300, 0, 4),
    ),
    Mutant(
        *("attention_any", "every-split-sees-all", ANY),
        *("seen.first + warp * splits + split", "seen.first + warp * splits"),
        attention(2, 1, 20, 300, 0, 4),
    ),
    Mutant(
        *("attention_any", "a-block-without-a-position", ANY),
        *("most == -INFINITY ? 0.0f : ", ""),
        attention(2, 1, 20, 2, 0, 4),
    ),
    Mutant(
        *("attention", "no-wait", ATTENTION),
        *("  pdl_trigger();\n  pdl_wait();", "  pdl_trigger();"),
        attention(2, 1, 64, 20),
    ),
    Mutant(
        *("attention", "split-not-weighted", ATTENTION),
        *("sum = warp_sum(sum * share);", "sum = warp_sum(sum);"),
        attention(2, 1, 64, 300, 4, 4),
    ),
    Mutant(
        *("attention", "first-block-joins", ATTENTION),
        *("splits - 1) == splits - 1;", "splits - 1) == 0;"),
        attention(2, 1, 64, 300, 4, 4),
    ),
    Mutant(
        *("attention", "counts-on", ATTENTION),
        *("atomicInc(counter, splits - 1)", "atomicAdd(counter, 1u)"),
        attention(2, 1, 64, 300, 4, 4),
    ),
    Mutant(
        *("linear_residual", "row-guard", LINEAR),
        *("first + slot < n : ", "true : "),
        linear(step.LINEAR_RESIDUAL, 0, 3, 64),
    ),
    Mutant(
        *("norm_linear", "nobody-waits-for-the-copy", LINEAR),
        *("      mbarrier_wait(&arrived, 0);\n", ""),
        linear(step.NORM_LINEAR, 1, 4, 576),
    ),
    Mutant(
        *("norm_linear_swiglu", "gate-and-up", LINEAR),
        *("first / 2 + slot / 2 + (slot % 2) * (n / 2)", "first + slot"),
        linear(step.NORM_SWIGLU, 0, 6, 64),
    ),
    Mutant(
        *("linear_residual", "columns-of-others-not-cleared", ROWS),
        *("R == 2 || row() % 2 == j % 2", "true"),
        linear(step.LINEAR_RESIDUAL, 0, 8, 576),
    ),
    Mutant(
        *("linear_residual", "one-matrix-of-the-vector", ROWS),
        *("j < R / 2 ? x.first : x.second", "x.first"),
        linear(step.LINEAR_RESIDUAL, 2, 8, 576),
    ),
    Mutant(
        *("linear_residual", "elements-of-other-pieces", ROWS),
        *("R == 4 || t % 2 == s / 2", "true"),
        linear(step.LINEAR_RESIDUAL, 2, 8, 576),
    ),
    Mutant(
        *("norm_linear", "scale-of-the-norm-lost", LINEAR),
        *("__fdividef(rsqrtf(mean + a.eps), a.norm_scale)", "rsqrtf(mean + a.eps)"),
        linear(step.NORM_LINEAR, 0, 8, 576),
    ),
    Mutant(
        *("helpers", "second-piece-lost", "step/helpers.cu"),
        *("if (i != begin) load(x, i, v);", "if (i != begin) load(weight, i, v);"),
        norm_of_many,
    ),
    Mutant(
        *("next_token", "moves-on-when-stopped", "step/next_token.cu"),
        *("if (!bad && !stopped) *a.position", "if (!bad) *a.position"),
        stays_stopped,
    ),
    Mutant(
        *("sample", "one-too-few", "step/sample.cu"),
        *("reached[d] >= target", "reached[d] > target"),
        draws(Sampling(1.0, top_k=5)),
    ),
    Mutant(
        *("sample", "blocks-do-not-wait", "step/sample.cu"),
        *("    cluster_sync();\n", "    __syncthreads();\n"),
        draws_of_many,
    ),
    Mutant(
        *("sample", "one-board", "step/sample.cu"),
        *("  turn ^= 1;\n", ""),
        draws_of_many,
    ),
    Mutant(
        *("sample", "mass-of-all-tokens", "step/sample.cu"),
        *("return c.key >= least ? c.mass", "return true ? c.mass"),
        draws(Sampling(1.0, top_k=8, top_p=0.4)),
    ),
)


@pytest.fixture(scope="module")
def built() -> Iterator[dict[Mutant, Future[Path]]]:
    """The compilers of all mutants, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {mutant: pool.submit(mutant.build) for mutant in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m.stem}-{m.name}" for m in MUTANTS])
def test_mutant_is_caught(
    built: dict[Mutant, Future[Path]], mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shim.Runner(built[mutant].result()) as broken:
        # The linear files are compiled with their own three tiles here.
        monkeypatch.setattr(host, "linear_library", lambda _: broken)
        monkeypatch.setattr(host, "library", lambda _: broken)
        assert mutant.caught()


def test_the_checks_pass_without_a_mutation() -> None:
    for mutant in MUTANTS:
        assert not mutant.caught(), mutant.name
