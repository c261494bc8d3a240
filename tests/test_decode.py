"""Decoding on the CPU: logits against transformers in FP32, and the token loop."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from decoding import IDS, check_closing, relative_error, token_by_token
from safetensors.torch import load_file

import minidecode
from minidecode import decode, models
from minidecode.config import ModelConfig
from minidecode.decode import PREFILL_CHUNK, Decoder, Runner
from minidecode.errors import MinidecodeError, UsageError
from minidecode.kernels import registry
from minidecode.models.stages import Attention, LinearResidual
from minidecode.plan import KernelSet, exact, kernel_set, reference
from minidecode.plan.state import MAX_EOS, State, rope_table
from minidecode.sampling import Sampling, probabilities
from minidecode.text import Text
from minidecode.weights import Weights

CPU = torch.device("cpu")
LIMIT = 5e-3

LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
# Every option that changes the logits, by the arguments of tiny.build.
MODELS: dict[str, dict[str, Any]] = {
    **{name: {"model_type": name} for name in tiny.MODEL_TYPES},
    **{f"{name}-style4": {"model_type": name, "style": 4} for name in tiny.MODEL_TYPES},
    **{
        f"{name}-tied": {"model_type": name, "tie_word_embeddings": True}
        for name in tiny.MODEL_TYPES
    },
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-biases-tied": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama-linear-rope": {"rope_parameters": LINEAR},
    "llama-linear-rope-style4": {"rope_parameters": LINEAR, "style": 4},
    "llama-llama3-rope": {"rope_parameters": tiny.LLAMA3},
    "llama-llama3-rope-style4": {"rope_parameters": tiny.LLAMA3, "style": 4},
    "llama-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}},
    "llama-head-dim-32": {"head_dim": 32},
    "llama-head-dim-10": {"head_dim": 10},
    "llama-one-kv-head": {"num_key_value_heads": 1},
    "llama-no-gqa": {"num_key_value_heads": 4},
    "llama-six-heads-two-kv": {"num_attention_heads": 6, "hidden_size": 96},
    "llama-eps": {"rms_norm_eps": 0.05},
    "llama-bf16": {"dtype": torch.bfloat16},
    "llama-fp32": {"dtype": torch.float32},
    "llama-sharded": {"shards": 3},
    "mistral-window-4": {"model_type": "mistral", "sliding_window": 4},
    "mistral-no-window": {"model_type": "mistral", "sliding_window": None},
    "qwen2-window-off": {
        "model_type": "qwen2",
        "sliding_window": 4,
        "use_sliding_window": False,
        "max_window_layers": 0,
    },
    "qwen2-window-all": {
        "model_type": "qwen2",
        "sliding_window": 4,
        "use_sliding_window": True,
        "max_window_layers": 0,
    },
    "qwen2-window-upper": {
        "model_type": "qwen2",
        "sliding_window": 4,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "qwen3-head-dim-32": {"model_type": "qwen3", "head_dim": 32},
    "qwen3-window": {
        "model_type": "qwen3",
        "head_dim": 32,
        "sliding_window": 3,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "qwen3-biases": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
}


def load(directory: Path, **options: Any) -> Decoder:
    return minidecode.load(directory, device="cpu", **options)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny layers lose more by waking a second thread than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_logits(decoder: Decoder, expected: torch.Tensor, ids: Sequence[int] = IDS) -> None:
    """Prefill and token by token against `expected` [len(ids), vocab], row by row."""
    at_once = decoder.prefill(ids, every=True)
    one_by_one = token_by_token(decoder, ids)
    for position in range(len(ids)):
        for out in (at_once[position], one_by_one[position]):
            assert relative_error(out, expected[position]) < LIMIT, position
    assert torch.equal(decoder.prefill(ids), at_once[-1])


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(made: Callable[..., tiny.Tiny], name: str) -> None:
    model = made(**MODELS[name])
    decoder, expected = load(model.directory), model.logits(IDS)
    check_logits(decoder, expected)
    in_fp32 = exact.logits(decoder.blueprint, decoder.weights, decoder.config, IDS)
    rounded = MODELS[name].get("dtype") == torch.float32  # to FP16, the reference is not
    assert relative_error(in_fp32, expected) < (LIMIT if rounded else 1e-5)


@pytest.mark.parametrize("name", ["llama", "llama-llama3-rope", "qwen3-window", "mistral-window-4"])
def test_both_styles_of_config_give_the_same_bits(
    made: Callable[..., tiny.Tiny], name: str
) -> None:
    five = load(made(**MODELS[name]).directory).prefill(IDS, every=True)
    four = load(made(**{**MODELS[name], "style": 4}).directory).prefill(IDS, every=True)
    assert torch.equal(four, five)


def test_tied_head_is_stored_once(made: Callable[..., tiny.Tiny]) -> None:
    model = made(tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(model.directory / "model.safetensors")
    decoder = load(model.directory)
    head, embedding = decoder.blueprint.head.weight, decoder.blueprint.embedding
    assert decoder.weights[head].data_ptr() == decoder.weights[embedding].data_ptr()
    assert decoder.weights.bytes == 2 * sum(t.numel() for t in model.state.values())


@pytest.mark.parametrize("how", ["false", "absent"])
def test_untied_head_must_be_there(tmp_path: Path, how: str) -> None:
    model = tiny.build(
        tmp_path / "m", tie_word_embeddings=True, drop=["tie_word_embeddings"], write={}
    )
    if how == "false":
        model = tiny.build(
            tmp_path / "n", tie_word_embeddings=True, write={"tie_word_embeddings": False}
        )
    with pytest.raises(MinidecodeError, match=r"lm_head\.weight") as error:
        load(model.directory)
    assert error.value.exit_code == 1


def test_old_checkpoints_inv_freq_is_ignored(tmp_path: Path) -> None:
    model = tiny.build(tmp_path / "m")
    garbage = {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.full((8,), 1e3 * (i + 1))
        for i in range(2)
    }
    expected = load(model.directory).prefill(IDS, every=True)
    tiny.save(model.directory, {**model.state, **garbage})
    assert torch.equal(load(model.directory).prefill(IDS, every=True), expected)


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_linear_rope_under_both_keys(tmp_path: Path, kind: str) -> None:
    model = tiny.build(
        tmp_path / "m",
        rope_parameters=LINEAR,
        style=4,
        write={"rope_scaling": {kind: "linear", "factor": 4.0}},
    )
    check_logits(load(model.directory), model.logits(IDS))


def test_head_dim_of_qwen3_defaults_to_128(made: Callable[..., tiny.Tiny]) -> None:
    model = made(model_type="qwen3", head_dim=128, drop=("head_dim",))
    decoder = load(model.directory)
    assert decoder.config.head_dim == 128
    check_logits(decoder, model.logits(IDS))


@pytest.mark.parametrize(
    ("model_type", "kv_heads", "overrides"),
    [
        ("llama", 4, {}),
        ("qwen2", 32, {"num_attention_heads": 32, "hidden_size": 128}),
        ("qwen3", 32, {"num_attention_heads": 32, "head_dim": 4}),
        ("mistral", 8, {"num_attention_heads": 8}),
    ],
)
def test_absent_kv_heads(
    made: Callable[..., tiny.Tiny], model_type: str, kv_heads: int, overrides: Mapping[str, Any]
) -> None:
    model = made(
        model_type=model_type,
        num_key_value_heads=kv_heads,
        drop=("num_key_value_heads",),
        **overrides,
    )
    decoder = load(model.directory)
    assert decoder.config.num_kv_heads == kv_heads
    check_logits(decoder, model.logits(IDS))


# --- attention ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Bench:
    """One layer's attention alone, over a state that the test fills."""

    state: State
    stage: Attention
    weights: Weights

    def run(self, qkv: torch.Tensor, start: int) -> torch.Tensor:
        """The prefill's attention; for one token the decode step's, which must agree."""
        out = reference.attention(self.stage, self.weights, self.state, qkv, start)
        if len(qkv) > 1:
            return out
        self.state.qkv.copy_(qkv[0])
        self.state.position.fill_(start)
        self.state.attention.fill_(float("nan"))
        reference.TorchHelpers(self.weights, self.state).attention(self.stage)()
        one = self.state.attention.clone()[None]
        torch.testing.assert_close(one, out, rtol=2e-3, atol=2e-3)
        return one


def bench(window: int | None = None, **fields: Any) -> Bench:
    family = models.family("llama")
    config = ModelConfig.from_hf({**family.tiny, **fields}, family.defaults)
    config = dataclasses.replace(config, windows=(window,) * config.num_layers)
    blueprint = family.blueprint(config)
    stage = next(s for _, s in blueprint.stages() if isinstance(s, Attention))
    return Bench(State(config, CPU, 128), stage, Weights.random(blueprint, CPU))


def seen_positions(b: Bench, n: int, start: int) -> list[set[int]]:
    """For each of n tokens from `start`, the positions whose value reaches its output."""
    c = b.state.config
    b.state.keys.zero_()
    seen: list[set[int]] = [set() for _ in range(n)]
    for probe in range(start + n):
        b.state.values.zero_()
        qkv = torch.zeros(n, c.q_size + 2 * c.kv_size, dtype=torch.float16)
        if probe < start:
            b.state.values[b.stage.layer, :, probe] = 1.0
        else:
            qkv[probe - start, c.q_size + c.kv_size :] = 1.0
        out = b.run(qkv, start)
        for i in range(n):
            if bool((out[i] != 0).any()):
                assert bool((out[i] != 0).all())
                seen[i].add(probe)
    return seen


def test_window_of_four_sees_exactly_four() -> None:
    assert seen_positions(bench(window=4), 1, 9) == [{6, 7, 8, 9}]
    assert seen_positions(bench(window=4), 1, 2) == [{0, 1, 2}]
    assert seen_positions(bench(), 1, 9) == [set(range(10))]


def test_the_last_token_of_a_mistral_depends_on_its_window_only(
    made: Callable[..., tiny.Tiny],
) -> None:
    model = made(model_type="mistral", num_hidden_layers=1, sliding_window=4)
    decoder = load(model.directory)
    ids = IDS[:10]
    last = token_by_token(decoder, ids)[9]
    seen = set()
    for i in range(10):
        other = [*ids[:i], (ids[i] + 1) % tiny.VOCAB, *ids[i + 1 :]]
        if not torch.equal(token_by_token(decoder, other)[9], last):
            seen.add(i)
    assert seen == {6, 7, 8, 9}


@pytest.mark.parametrize("start", [0, 3, 5])
def test_window_in_a_prefill_and_in_a_later_chunk_of_it(start: int) -> None:
    n = 10 - start
    for window in (4, None):
        expected = [
            set(range(max(0, p + 1 - (window or p + 1)), p + 1)) for p in range(start, start + n)
        ]
        assert seen_positions(bench(window=window), n, start) == expected


@pytest.mark.parametrize("n", [1, 3])
def test_query_heads_share_kv_heads_in_order(n: int) -> None:
    b = bench()
    c = b.state.config
    qkv = torch.zeros(n, c.q_size + 2 * c.kv_size, dtype=torch.float16)
    values = qkv[:, c.q_size + c.kv_size :].view(n, c.num_kv_heads, c.head_dim)
    values[:, 0], values[:, 1] = 1.0, 2.0
    out = b.run(qkv, 0).view(n, c.num_heads, c.head_dim)
    assert [out[:, h].unique().tolist() for h in range(4)] == [[1.0], [1.0], [2.0], [2.0]]


def test_attention_appends_rows_and_nothing_else() -> None:
    b = bench()
    c = b.state.config
    for n, start in ((1, 5), (3, 5)):
        b.state.keys.fill_(7.0)
        b.state.values.fill_(7.0)
        b.run(torch.randn(n, c.q_size + 2 * c.kv_size).half(), start)
        for cache in (b.state.keys, b.state.values):
            changed = (cache != 7.0).any(dim=-1).any(dim=1)  # [layers, capacity]
            expected = torch.zeros_like(changed)
            expected[b.stage.layer, start : start + n] = True
            assert torch.equal(changed, expected)


@pytest.mark.parametrize("n", [1, 4])
def test_large_scores_stay_finite(n: int) -> None:
    b = bench(head_dim=128)
    c = b.state.config
    qkv = torch.full((n, c.q_size + 2 * c.kv_size), 200.0, dtype=torch.float16)
    qkv[:, c.q_size + c.kv_size :] = 0.5
    out = b.run(qkv, 0)
    assert bool(torch.isfinite(out).all())
    torch.testing.assert_close(out, torch.full_like(out, 0.5))


@pytest.mark.parametrize("kind", ["default", "llama3"])
def test_rope_table_at_long_positions(kind: str) -> None:
    extra = {"rope_scaling": tiny.LLAMA3} if kind == "llama3" else {}
    family = models.family("llama")
    config = ModelConfig.from_hf(
        {**family.tiny, "head_dim": 128, "rope_theta": 10_000.0, **extra}, family.defaults
    )
    capacity = 140_000
    table = rope_table(config, CPU, capacity)
    assert table.dtype == torch.float32
    assert table.shape == (capacity, 64, 2)
    inv_freq = torch.from_numpy(config.rope.inv_freq(128)).double()
    for position in (0, 1, 2047, 2048, 2049, 4097, 65_537, capacity - 1):
        angle = position * inv_freq
        assert float((table[position, :, 0].double() - angle.cos()).abs().max()) < 1e-6
        assert float((table[position, :, 1].double() - angle.sin()).abs().max()) < 1e-6


def test_rms_norm_of_large_values() -> None:
    """A sum of squares in FP16 would be infinite, and the result 0."""
    x, b = torch.full((4096,), 300.0, dtype=torch.float16), bench()
    ones, out = torch.ones_like(x), torch.zeros_like(x)
    assert torch.equal(reference.rms_norm(x, ones, 1e-5), ones)
    reference.TorchHelpers(b.weights, b.state).rms_norm(out, x, None, ones)()
    assert torch.equal(out, ones)


# --- prefill --------------------------------------------------------------------------------------


def test_prefill_and_steps_agree(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made().directory)
    ids = IDS[:8]
    at_once, one_by_one = decoder.prefill(ids, every=True), token_by_token(decoder, ids)
    assert relative_error(one_by_one, at_once) < 2e-3


def test_steps_continue_a_prefill(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made(model_type="qwen3", head_dim=32).directory)
    expected = decoder.prefill(IDS, every=True)
    decoder.prefill(IDS[:5])
    assert relative_error(token_by_token(decoder, IDS[5:], first=5), expected[5:]) < 2e-3


@pytest.mark.parametrize("sliding_window", [None, 20])
def test_prefill_in_chunks(
    made: Callable[..., tiny.Tiny], monkeypatch: pytest.MonkeyPatch, sliding_window: int | None
) -> None:
    model = made(model_type="mistral", sliding_window=sliding_window)
    ids = [(7 * i + 1) % tiny.VOCAB for i in range(70)]
    expected = model.logits(ids)
    decoder = load(model.directory)
    assert len(ids) < PREFILL_CHUNK
    monkeypatch.setattr("minidecode.decode.PREFILL_CHUNK", 16)
    at_once = decoder.prefill(ids, every=True)
    assert at_once.shape == expected.shape
    for position in range(len(ids)):
        assert relative_error(at_once[position], expected[position]) < LIMIT, position
    assert torch.equal(decoder.prefill(ids), at_once[-1])


def test_a_second_prompt_forgets_the_first(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made().directory)
    expected = decoder.prefill(IDS[:5])
    decoder.prefill(IDS)
    assert torch.equal(decoder.prefill(IDS[:5]), expected)


@pytest.mark.parametrize("ids", [[97], [5, -1], [10**9]])
def test_ids_outside_the_vocabulary(made: Callable[..., tiny.Tiny], ids: list[int]) -> None:
    with pytest.raises(MinidecodeError, match=rf"{ids[-1]} is outside the vocabulary of 97"):
        load(made().directory).prefill(ids)


# --- kernel sets ----------------------------------------------------------------------------------

KERNEL = """
import torch

def gemv(y, w, x):
    y.copy_((w.float() @ x.float()).half())

def doubled(y, w, x):
    y.copy_((2 * (w.float() @ x.float())).half())

def refuses(y, w, x):
    raise NotImplementedError
"""


@pytest.fixture(scope="module")
def kernel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("kernel") / "mine.py"
    file.write_text(KERNEL)
    return file


def composed_of_torch() -> KernelSet:
    return KernelSet("torch-composed", "composed", registry.gemvs()["torch"])


@pytest.mark.parametrize(
    "name", ["llama", "llama-biases-tied", "mistral-window-4", "qwen2", "qwen3-window"]
)
def test_composed_steps_equal_transformers_and_the_reference(
    made: Callable[..., tiny.Tiny], kernel_file: Path, name: str
) -> None:
    model = made(**MODELS[name])
    decoder = load(model.directory)
    expected, own = model.logits(IDS), token_by_token(decoder, IDS)
    for kernels in (composed_of_torch(), kernel_set(f"{kernel_file}:gemv", CPU)):
        out = token_by_token(decoder, IDS, kernels)
        for position in range(len(IDS)):
            assert relative_error(out[position], expected[position]) < LIMIT, position
        assert relative_error(out, own) < 3e-3
        assert decoder.runner(kernels).plan().engine == "composed"


@pytest.mark.parametrize("kind", ["qkv", "o", "gate_up", "down", "head"])
def test_a_swapped_layer_runs_the_other_kernel(
    made: Callable[..., tiny.Tiny], kernel_file: Path, kind: Any
) -> None:
    decoder = load(made(**MODELS["llama-biases"]).directory)
    own = decoder.kernel_set
    expected = token_by_token(decoder, IDS)
    right = own.swap((kind,), kernel_set(f"{kernel_file}:gemv", CPU))
    assert relative_error(token_by_token(decoder, IDS, right), expected) < 5e-3
    assert decoder.runner(right).plan().engine == "mixed"
    wrong = own.swap((kind,), kernel_set(f"{kernel_file}:doubled", CPU))
    assert relative_error(token_by_token(decoder, IDS, wrong), expected) > 0.05


def test_a_kernel_that_refuses_is_named_with_its_layer(
    made: Callable[..., tiny.Tiny], kernel_file: Path
) -> None:
    decoder = load(made().directory, kernel=f"{kernel_file}:refuses")
    with pytest.raises(MinidecodeError, match=r"layers\.0\.attn\.qkv: .*refuses.*mine\.py"):
        token_by_token(decoder, IDS)


# --- values that are not finite -------------------------------------------------------------------


def overflowing(directory: Path, layer: int) -> tiny.Tiny:
    """A model whose down projection in `layer` leaves the range of FP16."""
    model = tiny.build(directory, num_hidden_layers=3)
    name = f"model.layers.{layer}.mlp.down_proj.weight"
    state = {**model.state, name: torch.full_like(model.state[name], 3e4)}
    tiny.save(directory, state)
    return model


@pytest.mark.parametrize("layer", [0, 2])
def test_overflow_is_an_error_that_names_the_layer(tmp_path: Path, layer: int) -> None:
    decoder = load(overflowing(tmp_path / "m", layer).directory)
    with pytest.raises(MinidecodeError, match=rf"layers\.{layer}\.mlp\.down .* not finite"):
        decoder.prefill(IDS)
    with pytest.raises(MinidecodeError, match=rf"layers\.{layer}\.mlp\.down .* not finite"):
        list(decoder.generate(IDS, 4))
    assert decoder.last is None


@pytest.mark.parametrize("engine", ["torch", "composed"])
def test_overflow_in_the_token_loop(made: Callable[..., tiny.Tiny], engine: str) -> None:
    decoder = load(made().directory)
    if engine == "composed":
        decoder.kernel_set = composed_of_torch()
    down = decoder.blueprint.layers[1][-1]
    assert isinstance(down, LinearResidual)
    produced: list[int] = []

    def break_after_three() -> None:
        for token in decoder.generate(IDS, 10):
            produced.append(token)
            if len(produced) == 3:
                decoder.weights[down.weight].zero_().fill_diagonal_(6e4)

    with pytest.raises(MinidecodeError, match=r"layers\.1\.mlp\.down .* at position 14"):
        break_after_three()
    assert len(produced) == 3
    assert decoder.last is None


# --- the token loop -------------------------------------------------------------------------------


def test_greedy_tokens_equal_transformers(made: Callable[..., tiny.Tiny]) -> None:
    model = made(seed=26)
    expected = model.greedy(IDS, 20)
    gaps = [model.logits([*IDS, *expected[:i]])[-1].topk(2).values for i in range(20)]
    assert min(float(a - b) for a, b in gaps) > 0.01  # else a rounding could decide
    decoder = load(model.directory)
    assert list(decoder.generate(IDS, 20)) == expected
    decoder.kernel_set = composed_of_torch()
    assert list(decoder.generate(IDS, 20)) == expected


def test_greedy_does_not_depend_on_the_seed(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made().directory)
    runs = [list(decoder.generate(IDS, 12, Sampling(seed=seed))) for seed in (0, 0, 1, 2**62)]
    assert all(run == runs[0] for run in runs)


def test_seeds(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made().directory)

    def run(seed: int) -> list[int]:
        return list(decoder.generate(IDS, 64, Sampling(temperature=1.5, seed=seed)))

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_sampling_follows_the_distribution(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made().directory)
    for sampling in (Sampling(1.0, top_k=3, seed=5), Sampling(2.0, top_p=0.3, seed=5)):
        tokens = list(decoder.generate(IDS, 40, sampling))
        logits = decoder.prefill([*IDS, *tokens[:-1]], every=True)[len(IDS) - 1 :]
        for row, token in zip(logits, tokens, strict=True):
            assert float(probabilities(row, sampling)[token]) > 0.0


def test_repetition_penalty_counts_prompt_and_output(made: Callable[..., tiny.Tiny]) -> None:
    decoder, penalised = load(made().directory), Sampling(repetition_penalty=1e6)
    expected = list(decoder.generate(IDS, 40, penalised))
    assert len(set(expected) | set(IDS)) == 40 + len(set(IDS))
    list(decoder.generate([5, 6], 40, penalised))  # of which the next text knows nothing
    assert list(decoder.generate(IDS, 40, penalised)) == expected


def test_eos_ends_the_loop_and_is_not_given(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made().directory)
    free = list(decoder.generate(IDS, 12))
    assert decoder.last is not None
    assert decoder.last.stop_reason == "length"
    for stop in range(12):
        if free[stop] in free[:stop]:
            continue
        eos = frozenset({free[stop], 96, 95} - set(free[:stop]))
        assert list(decoder.generate(IDS, 12, eos_token_ids=eos)) == free[:stop]
        assert decoder.last.stop_reason == "eos"
        assert decoder.last.n_gen == stop


def test_any_of_many_end_tokens_stops(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made().directory)
    free = list(decoder.generate(IDS, 6))
    many = frozenset(range(tiny.VOCAB)) - set(free[:5])
    assert len(many) > MAX_EOS  # more than the device looks for
    assert list(decoder.generate(IDS, 6, eos_token_ids=many | {free[5]})) == free[:5]
    assert decoder.last is not None
    assert decoder.last.stop_reason == "eos"


def test_context_limit(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made(max_position_embeddings=64).directory)
    with pytest.raises(MinidecodeError, match=r"70 tokens.*limit is 64"):
        next(decoder.generate([5] * 70, 1))
    tokens = list(decoder.generate([5] * 60, 10))
    assert len(tokens) == 4
    assert decoder.last is not None
    assert decoder.last.stop_reason == "length"
    assert list(decoder.generate([5] * 64, 10)) == []
    assert decoder.last.stop_reason == "length"


def test_max_context_lowers_the_limit(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made().directory, max_context=16)
    assert len(list(decoder.generate(IDS, 10))) == 4
    with pytest.raises(MinidecodeError, match="16"):
        decoder.prefill([1] * 17)
    assert load(made().directory, max_context=10**9).max_context == 256


def test_cache_is_sized_by_need(tmp_path: Path) -> None:
    model = tiny.build(tmp_path / "m", write={"max_position_embeddings": 10_000_000})
    decoder = load(model.directory)
    assert list(decoder.generate(IDS, 3)) == model.greedy(IDS, 3)
    assert decoder.state.capacity < 1000
    long = list(decoder.generate([1, 2] * 700, 3))
    assert len(long) == 3
    assert decoder.state.capacity < 2000


def test_empty_prompt(made: Callable[..., tiny.Tiny]) -> None:
    with pytest.raises(UsageError, match="empty"):
        next(load(made().directory).generate([], 3))


@pytest.mark.parametrize("n", [0, 1, 2, 9])
def test_statistics(made: Callable[..., tiny.Tiny], n: int) -> None:
    decoder = load(made().directory)
    tokens = list(decoder.generate(IDS, n))
    last = decoder.last
    assert last is not None
    assert (last.stop_reason, last.n_prompt, last.n_gen) == ("length", len(IDS), n)
    assert len(tokens) == n
    assert 0 < last.prefill_s <= last.ttft_s < 60
    assert 0 <= last.decode_s < 60
    assert last.peak_memory_bytes is not None
    assert last.peak_memory_bytes > 2**20
    if n < 2:
        assert last.decode_tok_s is last.step_us is last.bytes_per_token is None
    else:
        steps = n - 1
        assert last.decode_tok_s == pytest.approx(steps / last.decode_s)
        assert last.step_us == pytest.approx(1e6 * last.decode_s / steps)
        kv = sum(decoder.config.kv_read_bytes(len(IDS) + i) for i in range(steps)) / steps
        assert last.bytes_per_token == pytest.approx(decoder.config.weight_bytes() + kv)


def test_each_part_of_a_run_has_its_own_time(
    made: Callable[..., tiny.Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, skew = load(made().directory), 0.0

    def slow(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal skew
            skew += seconds
            return function(*arguments)

        return call

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + skew)
    monkeypatch.setattr(decode, "time", clock)
    monkeypatch.setattr(decoder, "prefill", slow(200.0, decoder.prefill))
    monkeypatch.setattr(decode, "sample", slow(1000.0, decode.sample))
    list(decoder.generate(IDS, 3))
    last = decoder.last
    assert last is not None
    parts = (last.prefill_s, last.ttft_s - last.prefill_s, last.decode_s)
    assert parts == pytest.approx((200.0, 1000.0, 0.0), abs=20.0)


def test_logits_hash_is_of_the_last_pick(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made().directory)

    def hash_after(n: int, eos: frozenset[int] = frozenset()) -> str:
        list(decoder.generate(IDS, n, eos_token_ids=eos))
        assert decoder.last is not None
        return decoder.last.logits_hash

    tokens = list(decoder.generate(IDS, 6))
    hashes = [hash_after(n) for n in range(1, 7)]
    assert len(set(hashes)) == 6
    assert hashes == [hash_after(n) for n in range(1, 7)]
    # The end token was picked from the same logits as the sixth token.
    if tokens[5] not in tokens[:5]:
        assert hash_after(20, frozenset({tokens[5]})) == hashes[5]


@pytest.mark.parametrize("kept", [1, 4])
def test_closing_the_iterator(made: Callable[..., tiny.Tiny], kept: int) -> None:
    decoder = load(made().directory)
    check_closing(decoder, kept, 12)


def test_a_full_cache_is_an_error(made: Callable[..., tiny.Tiny]) -> None:
    decoder = load(made(max_position_embeddings=16).directory)
    decoder.prefill(IDS)
    decoder.start(5, 14)
    runner = decoder.runner()
    runner.step(2)
    with pytest.raises(MinidecodeError, match="holds 16 positions, 17 are needed"):
        runner.step(1)


def test_state_before_prepare(made: Callable[..., tiny.Tiny]) -> None:
    with pytest.raises(MinidecodeError, match="no KV cache"):
        _ = load(made().directory).state


# --- the example ----------------------------------------------------------------------------------


def test_example_text(example_dir: Path) -> None:
    text = Text(example_dir)
    decoder = load(example_dir)
    ids = text.encode("The capital of France is")
    tokens = list(decoder.generate(ids, 40, eos_token_ids=frozenset(text.eos_token_ids())))
    assert decoder.last is not None
    assert decoder.last.stop_reason == "eos"
    expected = " Paris.\n\nThe answer is: 2018-01-22 12:12:53."
    assert text.decode(ids + tokens) == "The capital of France is" + expected


def test_example_logits(example_dir: Path) -> None:
    decoder = load(example_dir)
    ids = [504, 3575, 282, 4649, 314, 7042, 30, 198]
    expected = tiny.reference(example_dir, ids)
    assert relative_error(decoder.prefill(ids, every=True), expected) < LIMIT
    assert relative_error(token_by_token(decoder, ids), expected) < LIMIT
    assert relative_error(token_by_token(decoder, ids, composed_of_torch()), expected) < LIMIT


def test_a_step_is_repeated_in_the_plan_of_the_graph_that_ran_it() -> None:
    """Wherever a text is stopped, beside the edge of a bucket of contexts, whatever runs ahead."""
    for first, n in itertools.product(range(244, 258), range(1, 40)):
        state = SimpleNamespace(device=torch.device("cuda"), enqueued=first, capacity=10_000)
        runner: Any = Runner(*(4 * (None,)))  # type: ignore[arg-type]
        runner._state = state
        ran: dict[int, int] = {}
        again: list[int] = []

        def graph(context: int, count: int, state: Any = state, ran: Any = ran) -> Any:
            end = state.enqueued
            positions = range(end - count, end)
            return SimpleNamespace(replay=lambda: ran.update(dict.fromkeys(positions, context)))

        def plan(context: int, again: Any = again) -> Any:
            again.append(context)
            return SimpleNamespace(ops=())

        runner._graph, runner._plan = graph, plan
        decoder: Any = SimpleNamespace(device=state.device, state=state, _read=lambda _: 5)
        for stop, _ in enumerate(Decoder._decode(decoder, runner, first, n), first):
            ahead, state.enqueued = state.enqueued, stop
            runner.repeat()
            state.enqueued = ahead
            assert again[-1] == ran[stop], (first, n, stop)


def test_a_cache_that_no_memory_holds_is_refused(tmp_path: Path) -> None:
    directory = tiny.build(tmp_path, max_position_embeddings=2**31 - 1).directory
    with pytest.raises(MinidecodeError, match="no memory on cpu for a KV cache of 2000000"):
        minidecode.load(directory).prepare(2_000_000_000)
