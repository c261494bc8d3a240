"""ModelConfig: what config.json says, in both spellings, and what it leaves to the family."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minidecode.config import ModelConfig, RopeConfig, read_json
from minidecode.errors import MinidecodeError
from minidecode.models import family, load_config

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def raw_config(model_type: str = "llama", **keys: Any) -> dict[str, Any]:
    return {"model_type": model_type, **tiny.BASE, **keys}


def parse(raw: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_hf(raw, family(raw["model_type"]).defaults)


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}


@pytest.mark.parametrize("style", [4, 5])
@pytest.mark.parametrize("model_type", tiny.MODEL_TYPES)
def test_reads_what_transformers_writes(tmp_path, model_type, style):
    made = tiny.build(tmp_path / "m", model_type, style=style)
    theirs = made.model.config
    ours = load_config(tmp_path / "m")
    assert ours.name == "m"
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == made.model.model.layers[0].self_attn.head_dim
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope == RopeConfig(theirs.rope_parameters["rope_theta"])
    assert ours.max_position == 256
    assert ours.eos_token_ids == (2,)
    assert ours.bos_token_id == 1
    biased = made.model.model.layers[0].self_attn
    assert ours.qkv_bias == (biased.q_proj.bias is not None)
    assert ours.o_bias == (biased.o_proj.bias is not None)
    assert ours.qk_norm == hasattr(biased, "q_norm")
    assert ours.windows == ((4096, 4096) if model_type == "mistral" else (None, None))


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 7e4}, LINEAR, LLAMA3])
def test_both_spellings_are_the_same_model(tmp_path, rope):
    for style in (4, 5):
        tiny.build(tmp_path / str(style) / "m", style=style, rope_parameters=dict(rope))
    v4, v5 = (read_json(tmp_path / s / "m" / "config.json") for s in "45")
    assert "rope_parameters" not in v4
    assert "rope_theta" not in v5
    assert parse(v4) == parse(v5)
    assert parse(v4).rope.theta == rope["rope_theta"]
    assert parse(v4).rope.kind == rope["rope_type"]


def test_llama3_frequencies():
    scaled, plain = RopeConfig(5e5, "llama3", 32, 1, 4, 8192), RopeConfig(5e5)
    ratio = scaled.inv_freq(64) / plain.inv_freq(64)
    np.testing.assert_array_equal(ratio[:15], np.ones(15))
    np.testing.assert_allclose(ratio[15:18], [0.60557, 0.30374, 0.10345], atol=6e-6)
    np.testing.assert_array_equal(ratio[18:], np.full(14, 1 / 32))
    # Two values as FP32 arithmetic throughout gives them, a few roundings from ours.
    assert scaled.inv_freq(64)[16] == pytest.approx(4.29556705e-4, rel=3e-7)
    assert scaled.inv_freq(64)[31] == pytest.approx(9.41830649e-8, rel=3e-7)
    assert scaled.inv_freq(64).dtype == np.float32
    wide = RopeConfig(5e5, "llama3", 8, 1, 4, 8192).inv_freq(128) / plain.inv_freq(128)
    np.testing.assert_array_equal(wide[:29], np.ones(29))
    between = [0.8282, 0.6437, 0.4935, 0.3711, 0.2714, 0.1902]
    np.testing.assert_allclose(wide[29:35], between, atol=6e-5)
    np.testing.assert_array_equal(wide[35:], np.full(29, 0.125))


@pytest.mark.parametrize("rope", [LINEAR, LLAMA3])
def test_frequencies_agree_with_transformers(rope):
    theirs = AutoConfig.for_model("llama", **{**tiny.BASE, "head_dim": 64, "rope_parameters": rope})
    wanted, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs)
    ours = parse(raw_config(rope_parameters=rope)).rope.inv_freq(64)
    np.testing.assert_allclose(ours, wanted.numpy(), rtol=3e-7)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_linear_scaling_divides_every_frequency(key):
    scaled = parse(raw_config(rope_theta=1e4, rope_scaling={key: "linear", "factor": 4.0})).rope
    np.testing.assert_array_equal(scaled.inv_freq(64), RopeConfig(1e4).inv_freq(64) * 0.25)


def test_rope_keys_and_where_they_may_be():
    # Inside the dict wins over beside it, except for the length, which transformers keeps outside.
    both = parse(raw_config(rope_theta=1.0, rope_scaling={**LLAMA3}))
    assert both.rope.theta == 5e5
    outside = parse(raw_config(rope_scaling=LLAMA3, original_max_position_embeddings=4096))
    assert outside.rope.original_max_position == 4096
    implied = without(LLAMA3, "original_max_position_embeddings")
    assert parse(raw_config(rope_scaling=implied)).rope.original_max_position == 256
    assert parse(raw_config(rope_scaling=None, rope_theta=3e5)).rope == RopeConfig(3e5)
    assert parse(raw_config()).rope == RopeConfig(1e4)


def test_head_dim():
    assert parse(raw_config("qwen3", head_dim=32)).head_dim == 32
    assert parse(raw_config("qwen3")).head_dim == 128
    for model_type in ("llama", "mistral", "qwen2"):
        assert parse(raw_config(model_type)).head_dim == 16
        assert parse(raw_config(model_type, head_dim=None)).head_dim == 16
        assert parse(raw_config(model_type, head_dim=40)).head_dim == 40
    assert parse(raw_config("qwen3", head_dim=32)).q_size == 128
    assert parse(raw_config("qwen3", head_dim=32)).kv_size == 64


def test_absent_kv_heads():
    for model_type, heads, wanted in [("llama", 4, 4), ("qwen2", 32, 32), ("mistral", 8, 8)]:
        raw = without(
            raw_config(model_type, num_attention_heads=heads, hidden_size=64 * heads),
            "num_key_value_heads",
        )
        assert parse(raw).num_kv_heads == wanted
    # null is not absent: it is as many as query heads for everyone.
    for model_type in tiny.MODEL_TYPES:
        assert parse(raw_config(model_type, num_key_value_heads=None)).num_kv_heads == 4
    with pytest.raises(MinidecodeError, match=r"num_attention_heads 4 .* 32 \(assumed"):
        parse(without(raw_config("qwen2"), "num_key_value_heads"))


def test_mistral_windows():
    assert parse(raw_config("mistral", sliding_window=4)).windows == (4, 4)
    assert parse(raw_config("mistral", sliding_window=None)).windows == (None, None)
    assert parse(raw_config("mistral")).windows == (4096, 4096)
    says = {"layer_types": ["sliding_attention", "full_attention"]}
    with pytest.raises(MinidecodeError, match="layer_types"):
        parse(raw_config("mistral", **says))
    with pytest.raises(MinidecodeError, match="layer_types"):
        parse(raw_config("llama", **says))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize("use", [False, True])
@pytest.mark.parametrize("below", [0, 1, 2, 3, 28])
@pytest.mark.parametrize("style", [4, 5])
def test_qwen_windows(model_type, use, below, style):
    theirs = AutoConfig.for_model(
        model_type,
        **{**tiny.BASE, "num_hidden_layers": 3},
        use_sliding_window=use,
        sliding_window=4,
        max_window_layers=below,
    )
    raw = tiny.config_json(theirs, tiny.torch.float16, style)
    wanted = tuple(4 if use and layer >= below else None for layer in range(3))
    assert [w is not None for w in wanted] == [t != "full_attention" for t in theirs.layer_types]
    assert parse(raw).windows == wanted


def test_qwen_layer_types_decide():
    on = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    mixed = ["sliding_attention", "full_attention"]
    assert parse(raw_config("qwen2", **on, layer_types=mixed)).windows == (4, None)
    for bad in (["sliding_attention"], ["chunked_attention"] * 2, "full", [None, None], [[], {}]):
        with pytest.raises(MinidecodeError, match="layer_types"):
            parse(raw_config("qwen2", **on, layer_types=bad))
    with pytest.raises(MinidecodeError, match=r"layer_types\[0\].*sliding_window is off"):
        parse(raw_config("qwen2", layer_types=mixed, sliding_window=4))
    # Windows are off by default, and 4096 where they are on without a size.
    assert parse(raw_config("qwen2")).windows == (None, None)
    on_only = {"use_sliding_window": True, "max_window_layers": 1}
    assert parse(raw_config("qwen3", **on_only)).windows == (None, 4096)
    deep = {"use_sliding_window": True, "num_hidden_layers": 30}  # the first 28 stay full
    assert parse(raw_config("qwen3", **deep)).windows == (None,) * 28 + (4096,) * 2


def test_biases():
    both = raw_config("llama", attention_bias=True, mlp_bias=True)
    llama = parse(both)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    for key in ("attention_bias", "mlp_bias"):
        one = parse(raw_config("llama", **{key: True}))
        assert (one.qkv_bias, one.o_bias) == (key == "attention_bias",) * 2
        assert one.mlp_bias == (key == "mlp_bias")
    qwen2 = parse({**both, "model_type": "qwen2"})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)
    qwen3 = parse({**both, "model_type": "qwen3"})
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias) == (True, True, False)
    mistral = parse({**both, "model_type": "mistral"})
    assert (mistral.qkv_bias, mistral.o_bias, mistral.mlp_bias) == (False, False, False)


def test_tying_is_off_unless_said():
    assert not parse(without(raw_config(), "tie_word_embeddings")).tie_embeddings
    assert parse(raw_config(tie_word_embeddings=True)).tie_embeddings


def test_end_tokens():
    assert parse(raw_config(eos_token_id=[5, 7, 5])).eos_token_ids == (5, 7)
    assert parse(raw_config(eos_token_id=0)).eos_token_ids == (0,)
    assert parse(raw_config(eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize("model_type", tiny.MODEL_TYPES)
def test_absent_keys_mean_what_transformers_takes_them_for(model_type: str) -> None:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    heads = ("num_attention_heads", "num_key_value_heads")
    given = {key: tiny.BASE[key] for key in (*sizes, *heads)}
    theirs = AutoConfig.for_model(model_type, **given)
    ours = parse({"model_type": model_type, **given})
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.rope == RopeConfig(theirs.rope_parameters["rope_theta"])
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.windows == (getattr(theirs, "sliding_window", None),) * 2


@pytest.mark.parametrize(
    "key", ["tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"]
)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_switch_that_is_null_is_off(model_type: str, key: str) -> None:
    null, off = (
        parse(raw_config(model_type, sliding_window=4, max_window_layers=0, **{key: value}))
        for value in (None, False)
    )
    assert null == off


def test_quantised_weights_are_refused_by_name():
    for method in ("gptq", "awq", "fp8"):
        with pytest.raises(MinidecodeError, match=rf"quantised \({method}\)"):
            parse(raw_config(quantization_config={"quant_method": method, "bits": 4}))
    assert parse(raw_config(quantization_config=None)) == parse(raw_config())
    with pytest.raises(MinidecodeError, match="unknown method"):
        parse(raw_config(compression_config={"format": "x"}))


def test_unknown_model_type_lists_the_known_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw_config("gpt_neox")))
    with pytest.raises(MinidecodeError, match=r"'gpt_neox'.*llama, mistral, qwen2, qwen3") as error:
        load_config(tmp_path)
    assert error.value.exit_code == 1


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": 66, "head_dim": None}, "hidden_size 66"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'.*default, linear, llama3"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ({"rope_scaling": without(LLAMA3, "low_freq_factor")}, "lacks low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differs between layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"bos_token_id": [1]}, "bos_token_id"),
        ({"model_type": None}, "model_type"),
    ],
)
def test_refuses_what_it_does_not_understand(keys, says):
    with pytest.raises(MinidecodeError, match=says) as error:
        ModelConfig.from_hf(raw_config(**keys), family("llama").defaults)
    assert "\n" not in str(error.value)


def test_windows_and_head_dim_of_other_families_are_checked():
    for keys in ({"sliding_window": 0}, {"sliding_window": 2.5}):
        with pytest.raises(MinidecodeError, match="sliding_window"):
            parse(raw_config("mistral", **keys))
    with pytest.raises(MinidecodeError, match="max_window_layers"):
        parse(raw_config("qwen2", use_sliding_window=True, max_window_layers=-1))
    with pytest.raises(MinidecodeError, match="head_dim is null"):
        parse(raw_config("qwen3", head_dim=None))


anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
nested = st.recursive(
    anything,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
KEYS = [
    *tiny.BASE,
    "head_dim",
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "rms_norm_eps",
    "hidden_act",
    "quantization_config",
    "attention_bias",
    "partial_rotary_factor",
]


@given(
    st.sampled_from(tiny.MODEL_TYPES),
    st.dictionaries(st.sampled_from(KEYS), nested, min_size=1, max_size=3),
)
def test_any_value_gives_a_config_or_one_clear_error(model_type, keys):
    try:
        config = parse(raw_config(model_type, **keys))
    except MinidecodeError as refusal:
        said = str(refusal)
    else:
        assert len(config.windows) == config.num_layers
        return
    assert "config.json" in said


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("model_type", tiny.MODEL_TYPES)
def test_byte_model_counts_what_the_model_has(model_type, biased, tied):
    overrides = {**tiny.BASE, "tie_word_embeddings": tied}
    if biased and model_type in ("llama", "qwen3"):
        overrides["attention_bias"] = True
    if biased and model_type == "llama":
        overrides["mlp_bias"] = True
    theirs = AutoConfig.for_model(model_type, **overrides)
    model = AutoModelForCausalLM.from_config(theirs)
    ours = parse(tiny.config_json(theirs, tiny.torch.float16))
    assert ours.parameters == sum(p.numel() for p in model.parameters())
    read = sum(p.numel() for n, p in model.named_parameters() if "embed_tokens" not in n)
    read += 64 + (tied * 97 * 64)  # one row of the table, and the table itself where it is the head
    assert ours.weight_bytes() == 2 * read


def test_kv_bytes_respect_windows():
    full = parse(raw_config())
    row = 2 * 2 * 2 * 16  # K and V, two bytes, 2 heads of 16
    assert full.kv_read_bytes(0) == 2 * row
    assert full.kv_read_bytes(9) == 2 * 10 * row
    mixed = dataclasses.replace(full, windows=(4, None))
    assert mixed.kv_read_bytes(2) == 6 * row
    assert mixed.kv_read_bytes(9) == 14 * row


def test_known_sizes_of_a_real_model():
    smollm2 = parse(
        raw_config(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            tie_word_embeddings=True,
        )
    )
    assert smollm2.parameters == 134_515_008
    assert smollm2.weight_bytes() == 2 * (134_515_008 + 576)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"{", "not valid JSON"), (b"[1]", "JSON object, found list"), (b"\xff{}", "not valid JSON")],
)
def test_json_errors_name_the_file(tmp_path, content, says):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(MinidecodeError, match=f"config.json.*{says}"):
        read_json(path)


def test_json_that_is_not_there_or_too_deep(tmp_path):
    with pytest.raises(MinidecodeError, match=r"none\.json does not exist"):
        read_json(tmp_path / "none.json")
    with pytest.raises(MinidecodeError, match="cannot be read"):
        read_json(tmp_path)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(MinidecodeError, match=r"deep\.json is not valid JSON"):
        read_json(tmp_path / "deep.json")
