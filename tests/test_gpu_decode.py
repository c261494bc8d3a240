"""Decoding on the GPU: kernel sets against transformers in FP32, graphs, sampling, the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from decoding import IDS, check_closing, relative_error, step, token_by_token

import minidecode
from minidecode import example
from minidecode.bench.gate import teacher_forced
from minidecode.bench.tune import tune_step
from minidecode.cli.measure import gate_ids
from minidecode.decode import STEPS_PER_GRAPH, Decoder, Runner, context_bucket
from minidecode.errors import MinidecodeError
from minidecode.kernels import registry, tune
from minidecode.kernels.tiles import Split, split_candidates, split_key
from minidecode.models.stages import LinearResidual
from minidecode.plan import KernelSet, exact, kernel_set
from minidecode.plan.cuda import heads_of
from minidecode.plan.state import PENDING
from minidecode.sampling import Sampling, probabilities
from minidecode.text import Text

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
LIMIT = 5e-3
KERNELS = ("fused", "half2_block", "cublas", "torch")

MODELS: dict[str, dict[str, Any]] = {
    **{name: {"model_type": name} for name in tiny.MODEL_TYPES},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-llama3-rope": {"rope_parameters": tiny.LLAMA3},
    "llama-eps": {"rms_norm_eps": 0.05},
    "llama-wide": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
                   "num_key_value_heads": 3},
    # Rows that are no multiple of 16 bytes: the fused engine falls back op by op.
    "llama-odd-hidden": {"hidden_size": 100, "head_dim": 16},
    "llama-odd-everything": {
        "hidden_size": 63,
        "head_dim": 10,
        "intermediate_size": 77,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama-odd-mlp": {"intermediate_size": 101},
    "llama-head-dim-72": {"head_dim": 72},
    "llama-head-dim-100": {"head_dim": 100},
    "mistral-window-4": {"model_type": "mistral", "sliding_window": 4},
    "qwen2-window-upper": {
        "model_type": "qwen2",
        "sliding_window": 4,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "qwen3-window": {
        "model_type": "qwen3",
        "head_dim": 32,
        "sliding_window": 3,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    **{
        f"qwen3-head-dim-{d}": {"model_type": "qwen3", "head_dim": d}
        for d in (20, 32, 48, 64, 80, 128, 256)
    },
    **{
        f"llama-{heads}-heads-{kv}-kv": {
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "hidden_size": 16 * heads,
            "head_dim": 64,
        }
        for heads, kv in ((2, 2), (6, 2), (4, 1), (7, 1), (8, 1), (16, 1))
    },
}  # fmt: skip


def load(directory: Path, **options: Any) -> Decoder:
    return minidecode.load(directory, device="cuda", **options)


@pytest.fixture(autouse=True)
def _clean_device() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


def kernels_of(name: str) -> KernelSet:
    return kernel_set(name, GPU)


def ids_of(n: int, vocab: int = tiny.VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(0, vocab, (n,), generator=generator).tolist()


# --- logits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(made: Callable[..., tiny.Tiny], name: str) -> None:
    model = made(**MODELS[name])
    expected = model.logits(IDS)
    decoder = load(model.directory)
    at_once = decoder.prefill(IDS, every=True)
    for position in range(len(IDS)):
        assert relative_error(at_once[position], expected[position]) < LIMIT, position
    for spec in KERNELS:
        out = token_by_token(decoder, IDS, kernels_of(spec))
        for position in range(len(IDS)):
            error = relative_error(out[position], expected[position])
            assert error < LIMIT, (spec, position, error)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("llama", "fused"),
        ("qwen3-head-dim-256", "fused"),
        ("llama-odd-hidden", "mixed"),
        ("llama-odd-mlp", "mixed"),
        ("llama-odd-everything", "composed"),
        ("llama-head-dim-72", "fused"),
        ("llama-head-dim-100", "mixed"),  # its attention is the one for any head size
    ],
)
def test_what_the_fused_engine_cannot_take_is_composed(
    made: Callable[..., tiny.Tiny], name: str, engine: str
) -> None:
    decoder = load(made(**MODELS[name]).directory)
    decoder.prepare(16)
    assert decoder.runner().plan().engine == engine


def test_bytes_of_the_plans(made: Callable[..., tiny.Tiny]) -> None:
    for name in ("llama-biases", "qwen3-window", "llama-odd-hidden"):
        decoder = load(made(**MODELS[name]).directory)
        decoder.prepare(256)
        for spec in KERNELS:
            for position in (0, 4, 255):
                plan = decoder.runner(kernels_of(spec)).plan(position)
                expected = decoder.config.weight_bytes() + decoder.config.kv_read_bytes(position)
                assert plan.bytes_per_token(position) == expected, (name, spec, position)


@pytest.mark.parametrize("kind", ["qkv", "o", "gate_up", "down", "head"])
def test_swapped_layers(made: Callable[..., tiny.Tiny], kind: Any) -> None:
    model = made(**MODELS["llama-biases"])
    expected = model.logits(IDS)
    decoder = load(model.directory)
    mixed = kernels_of("fused").swap((kind,), kernels_of("cublas"))
    assert relative_error(token_by_token(decoder, IDS, mixed), expected) < LIMIT
    assert decoder.runner(mixed).plan().engine == "mixed"


@pytest.mark.parametrize(
    "name", ["llama-wide", "llama-head-dim-100", "qwen3-head-dim-128", "mistral-window-4"]
)
def test_every_split_in_a_whole_step(made: Callable[..., tiny.Tiny], name: str) -> None:
    model = made(**MODELS[name])
    decoder = load(model.directory)
    expected = exact.logits(decoder.blueprint, decoder.weights, decoder.config, IDS)
    decoder.prepare(len(IDS))
    base = tune.choices(GPU)
    heads = heads_of(decoder.config)
    contexts = {min(context_bucket(1), w or context_bucket(1)) for w in decoder.config.windows}
    contexts |= {min(decoder.state.capacity, c) for c in contexts}
    for split in split_candidates(heads, base.device):
        choices = base.but(splits={split_key(heads, context): split for context in contexts})
        runner = Runner(
            kernels_of("fused"),
            *(decoder.blueprint, decoder.weights, decoder.state),
            choices=choices,
        )
        out = [step(decoder, runner, token, i) for i, token in enumerate(IDS)]
        assert relative_error(torch.stack(out), expected) < LIMIT, split


def test_tune_finds_a_quicker_split_that_is_right(
    made: Callable[..., tiny.Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load(made(max_position_embeddings=4096, **MODELS["llama-wide"]).directory)
    key = split_key(heads_of(decoder.config), 2048)
    slow = tune.choices(GPU).but(splits={key: Split(1, 4)})
    monkeypatch.setattr(tune, "choices", lambda _: slow)
    found = tune_step(decoder, 1500, lambda share, text: None, tiles=False)
    assert found.after_us < found.before_us
    assert set(found.splits) == {key}
    assert found.splits[key].splits > 1
    logits = []
    for choices in (slow, slow.but(splits=found.splits)):
        runner = Runner(
            kernels_of("fused"),
            *(decoder.blueprint, decoder.weights, decoder.state),
            choices=choices,
        )
        logits.append(step(decoder, runner, IDS[0], 1500))
    assert relative_error(logits[1], logits[0]) < LIMIT


@pytest.mark.parametrize("spec", ["fused", "half2_block"])
@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 64, "num_key_value_heads": 1},
        {"head_dim": 128, "model_type": "qwen3"},
        {"model_type": "mistral", "sliding_window": 300},
        {"head_dim": 20},
    ],
    ids=str,
)
def test_contexts_across_buckets(
    made: Callable[..., tiny.Tiny], options: dict[str, Any], spec: str
) -> None:
    decoder = load(made(max_position_embeddings=4096, **options).directory)
    ids = ids_of(2001)
    expected = exact.logits(decoder.blueprint, decoder.weights, decoder.config, ids)
    decoder.prepare(len(ids))
    decoder.prefill(ids)
    runner = decoder.runner(kernels_of(spec))
    for position in (1, 7, 8, 100, 255, 256, 257, 511, 512, 513, 1023, 1024, 1500, 1999, 2000):
        for logits in (
            step(decoder, runner, ids[position], position),
            graph_step(decoder, runner, ids[position], position),
        ):
            error = relative_error(logits, expected[position])
            assert error < LIMIT, (position, error)


def graph_step(decoder: Decoder, runner: Runner, token: int, position: int) -> torch.Tensor:
    decoder.start(token, position)
    runner.warm_up(1)
    decoder.state.logits.fill_(float("nan"))
    runner.step(1)
    return decoder.state.logits.cpu().clone()


def test_fused_is_no_less_exact_than_cublas(made: Callable[..., tiny.Tiny]) -> None:
    for name in ("llama", "qwen2", "qwen3", "mistral-window-4", "llama-wide"):
        model = made(**MODELS[name])
        expected = model.logits(IDS)
        decoder = load(model.directory)
        errors = {
            spec: relative_error(token_by_token(decoder, IDS, kernels_of(spec)), expected)
            for spec in ("fused", "cublas")
        }
        assert errors["fused"] < 1.1 * errors["cublas"] + 1e-4, (name, errors)


def test_fused_is_no_less_exact_than_cublas_on_the_example(example_dir: Path) -> None:
    decoder = load(example_dir)
    ids = gate_ids(decoder)
    expected = exact.logits(decoder.blueprint, decoder.weights, decoder.config, ids)
    errors = {
        spec: relative_error(teacher_forced(decoder, kernels_of(spec), ids), expected)
        for spec in ("fused", "cublas")
    }
    assert errors["fused"] < 1.05 * errors["cublas"], errors


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-0.6b", "qwen2.5-0.5b", "llama-3.2-1b"])
def test_real_dimensions(name: str) -> None:
    decoder = minidecode.load(f"synthetic:{name}", device="cuda")
    ids = ids_of(40, decoder.config.vocab_size)
    expected = exact.logits(decoder.blueprint, decoder.weights, decoder.config, ids)
    assert relative_error(decoder.prefill(ids), expected[-1]) < LIMIT
    for spec in ("fused", "half2_block", "cublas"):
        decoder.prefill(ids[:30])
        out = token_by_token(decoder, ids[30:], kernels_of(spec), first=30)
        assert relative_error(out, expected[30:]) < LIMIT, spec


def test_prefill_and_steps_agree(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made(**MODELS["llama-wide"]).directory)
    at_once = decoder.prefill(IDS[:8], every=True)
    for spec in KERNELS:
        assert relative_error(token_by_token(decoder, IDS[:8], kernels_of(spec)), at_once) < LIMIT


# --- graphs ---------------------------------------------------------------------------------------


def trace(decoder: Decoder, runner: Runner, counts: list[int], eager: bool) -> list[torch.Tensor]:
    """Logits after each group of steps, then the tokens, from the same start."""
    ids = IDS[:5]
    decoder.prefill(ids)
    decoder.start(9, len(ids))
    found = []
    for n in counts:
        if eager:
            for _ in range(n):
                runner.eager()
        else:
            runner.step(n)
        found.append(decoder.state.logits.clone())
    torch.cuda.synchronize()
    return [*found, decoder.state.out[len(ids) : len(ids) + sum(counts)].clone()]


@pytest.mark.parametrize("name", ["llama-wide", "mistral-window-4", "qwen3-window"])
@pytest.mark.parametrize("spec", ["fused", "half2_block", "cublas"])
def test_graphs_equal_eager_steps_bit_for_bit(
    made: Callable[..., tiny.Tiny], name: str, spec: str
) -> None:
    decoder = load(made(**MODELS[name]).directory)
    decoder.prepare(100)
    runner = decoder.runner(kernels_of(spec))
    steps = 2 * STEPS_PER_GRAPH + 3
    eager = trace(decoder, runner, [1] * steps, eager=True)
    single = trace(decoder, runner, [1] * steps, eager=False)
    for one, other in zip(eager, single, strict=True):
        assert torch.equal(one, other)
    assert PENDING not in eager[-1].tolist()
    grouped = trace(decoder, runner, [STEPS_PER_GRAPH, STEPS_PER_GRAPH, 3], eager=False)
    assert torch.equal(grouped[-1], eager[-1])
    for group, position in zip(grouped, (7, 15, 18), strict=False):
        assert torch.equal(group, eager[position])


def test_capture_leaves_the_state_as_it_was(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made(**MODELS["llama-wide"]).directory)
    decoder.prefill(IDS)
    decoder.start(9, len(IDS))
    state, runner = decoder.state, decoder.runner()
    before = [t.clone() for t in (state.x, state.position, state.token, state.seen, state.best)]
    cached = state.keys[:, :, : len(IDS)].clone()
    runner.warm_up(20)
    torch.cuda.synchronize()
    after = (state.x, state.position, state.token, state.seen, state.best)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(state.keys[:, :, : len(IDS)], cached)
    assert set(state.out[len(IDS) :].tolist()) == {PENDING}


def test_kernel_sets_share_one_cache(made: Callable[..., tiny.Tiny]) -> None:
    """A sequence may change kernels at any step."""
    model = made(**MODELS["llama-wide"])
    expected = model.logits(IDS)
    decoder = load(model.directory)
    decoder.prepare(len(IDS))
    for position, token in enumerate(IDS):
        spec = KERNELS[position % len(KERNELS)]
        logits = step(decoder, decoder.runner(kernels_of(spec)), token, position)
        assert relative_error(logits, expected[position]) < LIMIT, (spec, position)


@pytest.mark.parametrize("spec", ["fused", "half2_block", "cublas"])
def test_on_a_side_stream(made: Callable[..., tiny.Tiny], spec: str) -> None:
    decoder = load(made(**MODELS["llama-wide"]).directory)
    decoder.kernel_set = kernels_of(spec)
    expected = list(decoder.generate(IDS, 30))
    assert decoder.last is not None
    logits = decoder.last.logits_hash
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000)
        assert list(decoder.generate(IDS, 30)) == expected
        assert decoder.last.logits_hash == logits
        fresh = load(decoder.directory, kernel=spec)  # type: ignore[arg-type]
        assert list(fresh.generate(IDS, 30)) == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_gpu_that_is_not_the_current_one(made: Callable[..., tiny.Tiny]) -> None:
    model = made(**MODELS["llama-wide"])
    expected = list(load(model.directory).generate(IDS, 20))
    assert torch.cuda.current_device() == 0
    for spec in KERNELS:
        decoder = minidecode.load(model.directory, device="cuda:1", kernel=spec)
        logits = token_by_token(decoder, IDS)
        assert relative_error(logits, model.logits(IDS)) < LIMIT
        if spec == "fused":
            assert list(decoder.generate(IDS, 20)) == expected
        assert torch.cuda.current_device() == 0


# --- the token loop -------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", KERNELS)
def test_greedy_tokens_equal_transformers(made: Callable[..., tiny.Tiny], spec: str) -> None:
    model = made(seed=26)  # its smallest gap between the first two logits is 0.1
    expected = model.greedy(IDS, 20)
    decoder = load(model.directory, kernel=spec)
    assert list(decoder.generate(IDS, 20)) == expected
    for n in (1, 2, 8, 9, 10, 17):
        assert list(decoder.generate(IDS, n)) == expected[:n]


@pytest.mark.parametrize("spec", ["fused", "half2_block"])
def test_eos_stops_inside_a_graph(made: Callable[..., tiny.Tiny], spec: str) -> None:
    decoder = load(made(seed=26).directory, kernel=spec)
    free = list(decoder.generate(IDS, 24))
    assert decoder.last is not None
    for stop in range(24):
        if free[stop] in free[:stop]:
            continue
        eos = frozenset({free[stop]})
        assert list(decoder.generate(IDS, 24, eos_token_ids=eos)) == free[:stop]
        assert decoder.last.stop_reason == "eos"
        if stop:
            state = decoder.state
            torch.cuda.synchronize()
            assert int(state.out[len(IDS) + stop - 1]) == free[stop]
            assert set(state.out[len(IDS) + stop :].tolist()) == {PENDING}
    assert list(decoder.generate(IDS, 24)) == free


def test_across_buckets_in_one_generation(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made(max_position_embeddings=2048, seed=26).directory)
    ids = ids_of(240)
    tokens = list(decoder.generate(ids, 300))
    assert len(tokens) == 300
    expected = exact.logits(
        decoder.blueprint, decoder.weights, decoder.config, [*ids, *tokens[:-1]]
    )[len(ids) - 1 :]
    for i, token in enumerate(tokens):
        # The greatest, or as good as: FP16 may decide between near-equal ones.
        scale = float(expected[i].norm())
        assert float(expected[i].max() - expected[i][token]) < 2 * LIMIT * scale, i


def test_context_limit(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made(max_position_embeddings=64).directory)
    assert len(list(decoder.generate([5] * 60, 10))) == 4
    assert decoder.last is not None
    assert decoder.last.stop_reason == "length"
    with pytest.raises(MinidecodeError, match=r"70 tokens.*limit is 64"):
        next(decoder.generate([5] * 70, 1))


@pytest.mark.parametrize("kept", [1, 5, 12])
def test_closing_the_iterator(made: Callable[..., tiny.Tiny], kept: int) -> None:
    decoder = load(made(seed=26).directory)
    check_closing(decoder, kept, 60)


def test_statistics(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made().directory)
    list(decoder.generate(IDS, 20))
    last = decoder.last
    assert last is not None
    assert (last.n_prompt, last.n_gen, last.stop_reason) == (len(IDS), 20, "length")
    assert last.decode_tok_s is not None
    assert last.decode_tok_s > 100
    assert last.peak_memory_bytes is not None
    assert last.peak_memory_bytes > decoder.weights.bytes


# --- sampling -------------------------------------------------------------------------------------


def test_seeds(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made().directory)

    def run(seed: int, **options: Any) -> list[int]:
        sampling = Sampling(1.5, seed=seed, **options)
        return list(decoder.generate(IDS, 64, sampling))

    for options in ({}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.02}):
        assert run(1, **options) == run(1, **options)
        assert run(1, **options) != run(2, **options)


@pytest.mark.parametrize("spec", ["fused", "half2_block"])
def test_tokens_come_from_the_distribution(made: Callable[..., tiny.Tiny], spec: str) -> None:
    decoder = load(made().directory, kernel=spec)
    for sampling in (
        Sampling(1.0, top_k=3, seed=5),
        Sampling(2.0, top_p=0.3, seed=5),
        Sampling(1.0, top_k=5, top_p=0.7, min_p=0.1, seed=5),
    ):
        tokens = list(decoder.generate(IDS, 60, sampling))
        logits = decoder.prefill([*IDS, *tokens[:-1]], every=True)[len(IDS) - 1 :]
        loose = Sampling(
            sampling.temperature,
            top_k=sampling.top_k + (sampling.top_k > 0),  # a rounding may swap neighbours
            top_p=min(1.0, sampling.top_p + 0.02),
            min_p=sampling.min_p * 0.95,
        )
        for row, token in zip(logits, tokens, strict=True):
            assert float(probabilities(row, loose)[token]) > 0.0
        assert len(set(tokens)) > 5


def test_repetition_penalty(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made().directory)
    tokens = list(decoder.generate(IDS, 40, Sampling(repetition_penalty=1e6)))
    assert len(set(tokens) | set(IDS)) == 40 + len(set(IDS))


# --- values that are not finite -------------------------------------------------------------------


@pytest.mark.parametrize("spec", KERNELS)
def test_overflow_is_an_error_that_names_the_layer(
    made: Callable[..., tiny.Tiny], spec: str
) -> None:
    decoder = load(made().directory, kernel=spec)
    down = decoder.blueprint.layers[1][-1]
    assert isinstance(down, LinearResidual)
    produced: list[int] = []
    kept = decoder.weights[down.weight].clone()

    def break_after_three() -> None:
        for token in decoder.generate(IDS, 100):
            produced.append(token)
            if len(produced) == 3:
                decoder.weights[down.weight].zero_().fill_diagonal_(6e4)

    # The device is some steps ahead of the host, so the position is not known.
    with pytest.raises(MinidecodeError, match=r"layers\.1\.mlp\.(down|residual) .*not finite"):
        break_after_three()
    assert decoder.last is None
    with pytest.raises(MinidecodeError, match=r"layers\.1\.mlp\.down .*not finite"):
        decoder.prefill(IDS)
    decoder.weights[down.weight].copy_(kept)
    again = list(decoder.generate(IDS, len(produced)))
    assert again[:3] == produced[:3]


# --- the example ----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", KERNELS)
def test_example_text(spec: str) -> None:
    directory = example.directory()
    if not (directory / "config.json").exists():
        pytest.skip("the example is not in the cache")
    text = Text(directory)
    decoder = load(directory, kernel=spec)
    ids = text.encode("The capital of France is")
    tokens = list(decoder.generate(ids, 40, eos_token_ids=text.eos_token_ids()))
    assert decoder.last is not None
    assert decoder.last.stop_reason == "eos"
    expected = " Paris.\n\nThe answer is: 2018-01-22 12:12:53."
    assert text.decode(ids + tokens) == "The capital of France is" + expected


def test_every_registered_gemv_decodes(made: Callable[..., tiny.Tiny]) -> None:
    model = made(**MODELS["llama-wide"])
    expected = model.logits(IDS)
    decoder = load(model.directory)
    for name, gemv in registry.gemvs().items():
        if "cuda" not in gemv.devices or gemv.unavailable() is not None:
            continue
        kernels = KernelSet(name, "composed", gemv)
        out = token_by_token(decoder, IDS, kernels)
        assert relative_error(out, expected) < LIMIT, name
        again = trace(decoder, decoder.runner(kernels), [STEPS_PER_GRAPH], eager=False)
        assert bool(torch.isfinite(again[0]).all()), name
