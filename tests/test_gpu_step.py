"""Every kernel of the decode step on the GPU, alone, against FP64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import step_reference as ref
import torch
import torch.nn.functional as F
from anywhere import same_anywhere

from minidecode.errors import MinidecodeError
from minidecode.kernels import registry, step, tune
from minidecode.kernels.ops import NotSupportedError
from minidecode.kernels.tiles import (
    Device,
    Heads,
    Split,
    Tile,
    default_split,
    default_tile,
    split_candidates,
    tile_candidates,
)
from minidecode.plan.state import sampling_bytes
from minidecode.sampling import Sampling, probabilities

pytestmark = pytest.mark.gpu

EPS = 1e-5
FILES = (step.NORM_LINEAR, step.LINEAR_RESIDUAL, step.NORM_SWIGLU, step.NORM_LOGITS)


def device() -> Device:
    return tune.device_of(torch.device("cuda", 0))


@pytest.fixture(scope="module")
def random() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(0)


@pytest.fixture(autouse=True)
def _clean_device() -> Iterator[None]:
    yield
    torch.cuda.synchronize()  # a fault belongs to the test that made it


def halves(random: torch.Generator, *shape: int, scale: float = 1.0, add: float = 0.0) -> Any:
    return torch.randn(shape, generator=random, device="cuda").mul_(scale).add_(add).half()


def nan(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def check(out: torch.Tensor, expected: torch.Tensor, terms: Any, what: object = "") -> None:
    """Element by element; `terms` is the size of what was added up in each."""
    allowed = 1e-3 * expected.abs() + 2e-5 * terms + 6e-8
    off = (out.double() - expected).abs()
    bad = (~(off <= allowed)).nonzero().flatten()
    assert not len(bad), f"{what}: {len(bad)} wrong, first [{int(bad[0])}]: off by {off[bad[0]]}"


def normed(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """RMSNorm in FP64 but for x times the weight, which the fused kernels round to FP16."""
    scaled, scale = step.scaled_norm(norm)
    product = (x.double() * scaled.double()).half().double()
    return product / scale / (x.double().square().mean() + EPS).sqrt()


def fused_linear_expected(
    stem: str,
    w: torch.Tensor,
    x: torch.Tensor,
    norm: torch.Tensor | None,
    bias: torch.Tensor | None,
    y: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the kernel must give, the size of the terms), FP64."""
    inputs = x.double() if norm is None else normed(x, norm)
    v, terms = w.double() @ inputs, w.double().abs() @ inputs.abs()
    if bias is not None:
        v, terms = v + bias.double(), terms + bias.double().abs()
    if stem == step.LINEAR_RESIDUAL:
        assert y is not None
        return v + y.double(), terms + y.double().abs()
    if stem == step.NORM_SWIGLU:
        (gate, up), (gate_terms, up_terms) = v.chunk(2), terms.chunk(2)
        return F.silu(gate) * up, gate_terms * up.abs() + up_terms * (1 + gate.abs())
    return v, terms


@pytest.mark.parametrize("stem", FILES)
@pytest.mark.parametrize("k", [64, 576, 1056, 1152, 2048, 2176, 4096, 14_336])
def test_fused_linear_with_every_tile(random: torch.Generator, stem: str, k: int) -> None:
    tiles = tile_candidates(k, device())
    step.compile_kernels((stem, tile) for tile in tiles)
    for rows, with_bias in ((1, True), (7, False), (130, True), (1001, False)):
        n = 2 * rows if stem == step.NORM_SWIGLU else rows
        w, x = halves(random, n, k, scale=k**-0.5), halves(random, k)
        norm = halves(random, k, scale=0.2, add=1.0)
        bias = halves(random, n) if with_bias else None
        before = halves(random, rows)
        gain = None if stem == step.LINEAR_RESIDUAL else norm
        expected, terms = fused_linear_expected(stem, w, x, gain, bias, before)
        for tile in tiles:
            run_fused_linear(stem, tile, w, x, gain, bias, before, expected, terms)


def run_fused_linear(
    stem: str,
    tile: Tile,
    w: torch.Tensor,
    x: torch.Tensor,
    norm: torch.Tensor | None,
    bias: torch.Tensor | None,
    before: torch.Tensor,
    expected: torch.Tensor,
    terms: torch.Tensor,
) -> None:
    what = f"{stem} {tuple(w.shape)} {tile.spelled}"
    if stem == step.NORM_LOGITS:
        logits = nan(w.shape[0], dtype=torch.float32)
        best = torch.zeros(1, dtype=torch.int64, device="cuda")
        step.fused_linear(
            stem, tile, w=w, x=x, norm=norm, bias=bias, logits=logits, best=best, eps=EPS
        )()
        check(logits, expected, terms, what)
        assert token_of(best) == int(logits.argmax()), what
        return
    y = before.clone() if stem == step.LINEAR_RESIDUAL else torch.full_like(before, float("nan"))
    step.fused_linear(stem, tile, w=w, x=x, y=y, norm=norm, bias=bias, eps=EPS)()
    check(y, expected, terms, what)


def token_of(best: torch.Tensor) -> int:
    return ref.token_of(int(best) % 2**64)


def test_a_list_of_older_targets_leaves_this_gpu_its_own_code(
    random: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the PTX for sm_80 the driver would make code without bulk copies."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0+PTX")
    step._build_of.cache_clear()
    try:
        stem = step.LINEAR_RESIDUAL
        w, x, before = halves(random, 130, 576), halves(random, 576), halves(random, 130)
        expected, terms = fused_linear_expected(stem, w, x, None, None, before)
        tiles = [Tile(128, 4), *([Tile(128, 0, 1, 4)] if device().sm90 else [])]
        for tile in tiles:
            run_fused_linear(stem, tile, w, x, None, None, before, expected, terms)
    finally:
        step._build_of.cache_clear()


@pytest.mark.parametrize("n", [65_536, 128_256, 151_936])
def test_last_row_of_a_large_head(random: torch.Generator, n: int) -> None:
    w, x, norm = halves(random, n, 64), halves(random, 64), halves(random, 64)
    inputs = normed(x, norm)
    expected, terms = w.double() @ inputs, w.double().abs() @ inputs.abs()
    for tile in (default_tile(n, 64, device()), *tile_candidates(64, device())[-3:]):
        logits = nan(n, dtype=torch.float32)
        best = torch.zeros(1, dtype=torch.int64, device="cuda")
        step.fused_linear(
            step.NORM_LOGITS, tile, w=w, x=x, norm=norm, logits=logits, best=best, eps=EPS
        )()
        check(logits, expected, terms, tile.spelled)
        assert token_of(best) == int(logits.argmax())
        # The greatest in the very last row.
        w2 = w.clone()
        w2[-1] = inputs.sign().half() * 30
        best.zero_()
        step.fused_linear(
            step.NORM_LOGITS, tile, w=w2, x=x, norm=norm, logits=logits, best=best, eps=EPS
        )()
        assert token_of(best) == n - 1


@pytest.mark.parametrize("n", [65_536, 128_256, 151_936])
@pytest.mark.parametrize("name", list(registry.gemvs()))
def test_last_row_of_a_large_gemv(random: torch.Generator, name: str, n: int) -> None:
    gemv = registry.gemvs()[name]
    if "cuda" not in gemv.devices:
        pytest.skip("not a GPU kernel")
    if gemv.unavailable() is not None:
        pytest.skip(str(gemv.unavailable()))
    w, x, y = halves(random, n, 64), halves(random, 64), nan(n)
    try:
        gemv.bind(y, w, x)()
    except NotSupportedError:
        pytest.skip("not supported")
    check(y, w.double() @ x.double(), w.double().abs() @ x.double().abs(), name)


def test_a_shape_that_is_not_handled_is_named(random: torch.Generator) -> None:
    w, x, y = halves(random, 8, 12), halves(random, 12), nan(8)
    launch = step.fused_linear(step.LINEAR_RESIDUAL, Tile(128, 4), w=w, x=x, y=y)
    with pytest.raises(MinidecodeError, match=r"linear_residual\.cu .*n=8, k=12"):
        launch()
    # The error leaves nothing behind for the next call.
    assert bool((torch.ones(4, device="cuda") + 1 == 2).all())


# --- attention ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    position: int
    window: int | None = None
    norm: bool = False

    @property
    def first(self) -> int:
        return 0 if self.window is None else max(0, self.position + 1 - self.window)


def make_cache(c: Case, random: torch.Generator) -> step.Cache:
    """Random keys and values; NaN where nothing may be read."""
    capacity = c.position + 5
    keys, values = (halves(random, c.kv_heads, capacity, c.head_dim) for _ in range(2))
    for cache in (keys, values):
        cache[:, c.position :] = float("nan")
        cache[:, : c.first] = float("nan")
    norms = [halves(random, c.head_dim, scale=0.2, add=1.0) if c.norm else None for _ in range(2)]
    return step.Cache(
        keys=keys,
        values=values,
        rope=torch.from_numpy(ref.rope_table(capacity, c.head_dim)).cuda(),
        position=torch.tensor([c.position], dtype=torch.int32, device="cuda"),
        q_norm=norms[0],
        k_norm=norms[1],
        window=c.window,
        eps=EPS,
        # How much is kept in flight follows the context that the call is made for.
        context=capacity if c.position % 2 else 131_072,
    )


def expected_attention(
    c: Case, qkv: torch.Tensor, cache: step.Cache
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output [heads, head_dim], key row, value row [kv_heads, head_dim]), FP64 on the GPU."""
    rows = qkv.double().view(-1, c.head_dim)
    q, k, v = rows.split([c.heads, c.kv_heads, c.kv_heads])
    if cache.q_norm is not None and cache.k_norm is not None:
        norms = ((q, cache.q_norm), (k, cache.k_norm))
        q, k = (
            (r / (r.square().mean(-1, keepdim=True) + EPS).sqrt() * w.double()).half().double()
            for r, w in norms
        )
    cos, sin = cache.rope[c.position].double().unbind(-1)

    def rotate(r: torch.Tensor) -> torch.Tensor:
        low, high = r.chunk(2, dim=-1)
        turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
        return turned.half().double()

    q, k = rotate(q), rotate(k)
    old = slice(c.first, c.position)
    keys = torch.cat([cache.keys[:, old].double(), k[:, None]], dim=1)
    values = torch.cat([cache.values[:, old].double(), v[:, None]], dim=1)
    grouped = q.view(c.kv_heads, -1, c.head_dim)
    weights = torch.softmax(grouped @ keys.transpose(1, 2) / c.head_dim**0.5, dim=-1)
    return (weights @ values).view(c.heads, c.head_dim), k, v


def check_attention(
    c: Case, out: torch.Tensor, qkv: torch.Tensor, cache: step.Cache, before: step.Cache, what: str
) -> None:
    expected, k, v = expected_attention(c, qkv, before)
    seen = slice(c.first, c.position + 1)
    size = cache.values[:, seen].abs().double().amax()
    check(out.view(-1), expected.view(-1), 75 * size, f"{what} {c}")
    for cached, old, row in ((cache.keys, before.keys, k), (cache.values, before.values, v)):
        check(
            cached[:, c.position].reshape(-1),
            row.reshape(-1),
            75 * row.abs().amax(),
            f"{what} {c}: appended row",
        )
        same = cached.view(torch.int16) == old.view(torch.int16)
        same[:, c.position] = True
        assert bool(same.all()), f"{what} {c}: the cache changed beside the new row"


def copied(cache: step.Cache) -> step.Cache:
    return replace(cache, keys=cache.keys.clone(), values=cache.values.clone())


GQA = ((1, 1), (3, 1), (9, 3), (4, 1), (28, 4), (8, 1), (32, 8), (16, 1), (32, 32))
POSITIONS = (0, 1, 15, 16, 31, 127, 128, 255, 256, 511, 1000, 2047)


def splits_of(c: Case) -> list[Split]:
    heads = Heads(c.heads, c.kv_heads, c.head_dim)
    found = [default_split(heads, context, device()) for context in (1, 4096)]
    found += split_candidates(heads, device())
    found += [Split(splits, 4) for splits in (2, 5, 31)]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("gqa", GQA, ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 72, 80, 88, 96, 100, 104, 128, 160, 256])
def test_attention_with_every_split(
    random: torch.Generator, gqa: tuple[int, int], head_dim: int
) -> None:
    for i, position in enumerate(POSITIONS):
        if (i + head_dim // 16) % 2:
            continue  # every other one, in turns
        window = (None, None, 100, None, 1, 4)[i % 6]
        case = Case(*gqa, head_dim, position, window, norm=i % 2 == 1)
        qkv = halves(random, (gqa[0] + 2 * gqa[1]) * head_dim)
        before = make_cache(case, random)
        for split in splits_of(case):
            cache, out = copied(before), nan(gqa[0] * head_dim)
            step.attention(out, qkv, cache, split)()
            check_attention(case, out, qkv, cache, before, str(split))


@pytest.mark.parametrize("head_dim", [2, 20, 34, 130, 250, 320, 512])
def test_attention_of_any_head_size(random: torch.Generator, head_dim: int) -> None:
    for gqa in ((1, 1), (6, 2), (7, 1)):
        for i, position in enumerate(POSITIONS):
            case = Case(*gqa, head_dim, position, (None, 10)[i % 2], norm=i % 3 == 0)
            qkv = halves(random, (gqa[0] + 2 * gqa[1]) * head_dim)
            before = make_cache(case, random)
            for split in (Split(1, 4), Split(3, 4)):
                cache, out = copied(before), nan(gqa[0] * head_dim)
                step.attention(out, qkv, cache, split)()
                check_attention(case, out, qkv, cache, before, str(split))


@pytest.mark.parametrize("context", [16_384, 131_072])
def test_long_contexts(random: torch.Generator, context: int) -> None:
    for head_dim in (64, 100, 128, 256):
        case = Case(8, 2, head_dim, context - 1)
        qkv, before = halves(random, 12 * head_dim), make_cache(case, random)
        heads = Heads(8, 2, head_dim)
        for split in (default_split(heads, context, device()), Split(1, 4)):
            cache, out = copied(before), nan(8 * head_dim)
            step.attention(out, qkv, cache, split)()
            check_attention(case, out, qkv, cache, before, str(split))


@pytest.mark.parametrize("head_dim", [20, 64, 128])
def test_large_scores_stay_finite(random: torch.Generator, head_dim: int) -> None:
    case = Case(2, 1, head_dim, 600)
    cache = make_cache(case, random)
    cache.keys[:, :600] = 200.0
    cache.values[:, :600] = 0.5
    cache.rope[..., 0], cache.rope[..., 1] = 1.0, 0.0
    qkv = torch.full((4 * head_dim,), 200.0, dtype=torch.float16, device="cuda")
    qkv[3 * head_dim :] = 0.5
    for split in splits_of(case):
        out = nan(2 * head_dim)
        step.attention(out, qkv, cache, split)()
        torch.testing.assert_close(out, torch.full_like(out, 0.5), rtol=1e-3, atol=0)


# --- helpers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7, 8, 64, 576, 4095, 4096, 20_000])
def test_rms_norm(random: torch.Generator, n: int) -> None:
    for with_delta in (False, True):
        x, delta, weight = (halves(random, n) for _ in range(3))
        total = x + delta if with_delta else x.clone()
        out = nan(n)
        step.rms_norm(out, x, delta if with_delta else None, weight, EPS)()
        assert torch.equal(x, total)
        wide = total.double()
        expected = wide / (wide.square().mean() + EPS).sqrt() * weight.double()
        check(out, expected, 0)


def test_rms_norm_of_large_values() -> None:
    x, weight, out = (torch.full((4096,), v, device="cuda").half() for v in (300.0, 1.0, 0.0))
    step.rms_norm(out, x, None, weight, EPS)()
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("n", [1, 255, 256, 257, 14_336])
def test_add_and_swiglu(random: torch.Generator, n: int) -> None:
    x, delta = halves(random, n), halves(random, n)
    expected = x + delta
    step.add(x, delta)()
    assert torch.equal(x, expected)
    gate_up, out = halves(random, 2 * n, scale=4.0), nan(n)
    step.swiglu(out, gate_up)()
    gate, up = gate_up.double().chunk(2)
    check(out, F.silu(gate) * up, 0)


@pytest.mark.parametrize("n", [1, 97, 257, 49_152, 151_936])
def test_argmax(random: torch.Generator, n: int) -> None:
    head_out, logits = halves(random, n), nan(n, dtype=torch.float32)
    best = torch.zeros(1, dtype=torch.int64, device="cuda")
    step.argmax(logits, best, head_out)()
    assert torch.equal(logits, head_out.float())
    assert token_of(best) == int((head_out == head_out.max()).nonzero()[0])
    for bad in (float("nan"), float("inf"), -float("inf")):
        head_out[n // 2] = bad
        best.zero_()
        step.argmax(logits, best, head_out)()
        assert int(best) == -1


# --- the end of a step ----------------------------------------------------------------------------


def test_next_token(random: torch.Generator) -> None:
    vocab, hidden, capacity = 50, 300, 8
    embedding, x = halves(random, vocab, hidden), nan(hidden)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    best = torch.zeros(1, dtype=torch.int64, device="cuda")
    position, token, stopped, eos = ints(3), ints(9), ints(0), ints(-1, 17, -1)
    seen = torch.zeros(vocab, dtype=torch.bool, device="cuda")
    out = torch.full((capacity,), -1, dtype=torch.int32, pin_memory=True)
    launch = step.next_token(
        x=x,
        embedding=embedding,
        best=best,
        position=position,
        token=token,
        stopped=stopped,
        eos=eos,
        seen=seen,
        out=out,
    )

    def run(picked: int) -> None:
        logits = np.zeros(vocab, np.float32)
        logits[picked] = 1.0
        best.fill_(ref.best(logits) - 2**64 if ref.best(logits) >= 2**63 else ref.best(logits))
        launch()
        torch.cuda.synchronize()

    run(49)
    assert torch.equal(x, embedding[49])
    assert (int(position), int(token), int(stopped), int(best)) == (4, 49, 0, 0)
    run(17)
    assert (int(position), int(token), int(stopped)) == (5, 17, 1)
    run(5)
    assert (int(position), int(token), int(stopped)) == (5, 17, 1)
    assert out.tolist() == [-1, -1, -1, 49, 17, -1, -1, -1]
    assert seen.nonzero().flatten().tolist() == [17, 49]
    stopped.zero_()
    best.fill_(-1)
    launch()
    torch.cuda.synchronize()
    assert (int(position), int(token), int(stopped)) == (5, 17, 1)
    assert out.tolist() == [-1, -1, -1, 49, 17, -2, -1, -1]


# --- sampling -------------------------------------------------------------------------------------


def draws(
    logits: torch.Tensor, sampling: Sampling, n: int, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """n tokens, INT64 on the CPU, each with the noise of another position."""
    parameters = sampling_bytes(sampling).cuda()
    best = torch.zeros(1, dtype=torch.int64, device="cuda")
    position = torch.zeros(1, dtype=torch.int32, device="cuda")
    marks = torch.zeros(logits.numel(), dtype=torch.bool, device="cuda") if seen is None else seen
    launch = step.sample(best, logits, marks, position, parameters)
    picked = torch.zeros(n, dtype=torch.int64, device="cuda")
    for i in range(n):
        position.fill_(i)
        launch()
        picked[i : i + 1].copy_(best)
    assert not bool((picked == -1).any())  # not finite
    return ~picked.cpu() & 0xFFFFFFFF


SAMPLINGS = (
    Sampling(1.0),
    Sampling(0.7, seed=1),
    Sampling(1.5, top_k=40, seed=2),
    Sampling(1.0, top_p=0.9, seed=3),
    Sampling(1.2, min_p=0.05, seed=4),
    Sampling(0.9, top_k=100, top_p=0.95, min_p=0.01, seed=5),
    Sampling(1.0, top_k=50, repetition_penalty=1.5, seed=6),
)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_draws_follow_the_distribution(random: torch.Generator, sampling: Sampling) -> None:
    vocab, n = 300, 6000
    logits = torch.randn(vocab, generator=random, device="cuda") * 2
    seen = torch.zeros(vocab, dtype=torch.bool, device="cuda")
    seen[::3] = True
    p = probabilities(logits, sampling, seen).double().cpu().numpy()
    picked = draws(logits, sampling, n, seen)
    counts = np.bincount(picked.numpy(), minlength=vocab)
    assert len(counts) == vocab
    assert not counts[p == 0].any()
    statistic, freedom = ref.chi_square(counts[p > 0], n * p[p > 0])
    assert statistic < ref.chi_square_limit(freedom)


@pytest.mark.parametrize(("vocab", "n"), [(97, 100), (49_152, 3), (151_936, 1)])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_draws_are_those_of_the_formula(
    random: torch.Generator, sampling: Sampling, vocab: int, n: int
) -> None:
    logits = torch.randn(vocab, generator=random, device="cuda") * 2
    seen = torch.zeros(vocab, dtype=torch.bool, device="cuda")
    seen[::3] = True
    p = probabilities(logits, sampling, seen).double().cpu().numpy()
    for position, token in enumerate(draws(logits, sampling, n, seen).tolist()):
        with np.errstate(divide="ignore"):
            noisy = np.log(p) + ref.gumbel(sampling.seed, position, vocab)
        order = np.argsort(noisy)
        assert token == order[-1] or noisy[order[-1]] - noisy[order[-2]] < 1e-4


def test_draws_from_a_large_vocabulary_stay_finite() -> None:
    """Noise that is infinite once in 2^24 draws would show: there are 1.5e8 here."""
    logits = torch.zeros(151_936, device="cuda")
    picked = draws(logits, Sampling(1.0), 1000)
    # Uniform: the mean of 1000 is within 5 sigma of the middle.
    assert abs(float(picked.double().mean()) / 151_936 - 0.5) < 5 * (1 / 12 / 1000) ** 0.5
    assert len(picked.unique()) > 980


def test_draws_repeat_and_differ(random: torch.Generator) -> None:
    logits = torch.randn(1000, generator=random, device="cuda")
    one = draws(logits, Sampling(1.0, top_p=0.9, seed=1), 200)
    assert torch.equal(one, draws(logits, Sampling(1.0, top_p=0.9, seed=1), 200))
    assert not torch.equal(one, draws(logits, Sampling(1.0, top_p=0.9, seed=2), 200))


def test_greedy_draws(random: torch.Generator) -> None:
    logits = torch.randn(49_152, generator=random, device="cuda")
    assert set(draws(logits, Sampling(), 3).tolist()) == {int(logits.argmax())}
    assert set(draws(logits, Sampling(1e-6), 3).tolist()) == {int(logits.argmax())}
    assert set(draws(logits, Sampling(1.0, top_k=1), 3).tolist()) == {int(logits.argmax())}
    seen = torch.zeros(49_152, dtype=torch.bool, device="cuda")
    seen[logits.argmax()] = True
    second = int(logits.topk(2).indices[1])
    assert set(draws(logits, Sampling(repetition_penalty=1e6), 3, seen).tolist()) == {second}


def test_the_norm_in_a_linear_of_large_values() -> None:
    """A sum of 4,096 squares of 300 in FP16 would be infinite, and its norm 0."""
    w, norm = (torch.zeros(*shape, device="cuda").half() for shape in ((64, 4096), (4096,)))
    w.fill_diagonal_(1.0)
    norm.fill_(1.0)
    x, y = torch.full_like(norm, 300.0), nan(64)
    tile = default_tile(64, 4096, device())
    step.fused_linear(step.NORM_LINEAR, tile, w=w, x=x, y=y, norm=norm, eps=EPS)()
    assert bool((y == 1.0).all())


# --- streams and devices --------------------------------------------------------------------------


def test_on_a_side_stream_and_in_a_graph_with_other_inputs(random: torch.Generator) -> None:
    w, x, norm = halves(random, 960, 576), halves(random, 576), halves(random, 576)
    y = nan(960)
    launch = step.fused_linear(
        step.NORM_LINEAR, default_tile(960, 576, device()), w=w, x=x, y=y, norm=norm, eps=EPS
    )
    same_anywhere(launch, x, y, [x.clone(), halves(random, 576)])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_gpu_that_is_not_the_current_one() -> None:
    assert torch.cuda.current_device() == 0
    x, delta, weight, out = (torch.full((64,), v, device="cuda:1").half() for v in (3, 1, 2, 0))
    step.rms_norm(out, x, delta, weight, EPS)()
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(out, torch.full_like(out, 2.0))
    assert torch.equal(x, torch.full_like(x, 4.0))
