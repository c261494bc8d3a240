"""What a model is made of: sizes, rotary embedding, windows, and the bytes one token reads.

`ModelConfig.from_hf` reads a Hugging Face `config.json` as transformers 4 and 5 write it. Keys
that are absent take the value that transformers gives them for that model family
(`FamilyDefaults`), because a checkpoint saved without a key was trained with that value. What
would change the result and is not understood is refused, never skipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from minidecode.errors import MinidecodeError

RopeKind = Literal["default", "linear", "llama3"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3")

FP16_BYTES = 2

# Far above any real model, low enough that a hostile config cannot make us allocate.
_MAX_LAYERS = 10_000
_MAX_SIZE = 2**31 - 1


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency, and its stretching for longer contexts.

    `factor` belongs to `linear` and `llama3`; the last three fields to `llama3` alone (they are 0
    otherwise). `original_max_position` is in tokens.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position: int = 0

    def inv_freq(self, head_dim: int) -> npt.NDArray[np.float32]:
        """Radians per position of each rotated pair, FP32 [head_dim / 2].

        Computed in FP64 and rounded once, so an entry is within half an ulp of the exact value.
        """
        pairs = np.arange(0, head_dim, 2, dtype=np.float64)
        unscaled = self.theta ** (-pairs / head_dim)
        return (unscaled * self._scale(unscaled)).astype(np.float32)

    def _scale(self, unscaled: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        if self.kind == "default":
            return np.ones_like(unscaled)
        if self.kind == "linear":
            return np.full_like(unscaled, 1.0 / self.factor)
        # Llama 3.1: fast pairs (many turns within the original context) are kept, slow ones are
        # divided by `factor`; between the two bounds the scale is linear in the number of turns.
        turns = self.original_max_position * unscaled / (2 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return blend + (1.0 - blend) / self.factor


@dataclass(frozen=True)
class FamilyDefaults:
    """What a model family fixes, and what it assumes when a key is absent from `config.json`.

    `None` means: num_kv_heads, as many as query heads; head_dim, hidden_size / num_heads;
    sliding_window, full attention; qkv_bias and o_bias, read `attention_bias`; mlp_bias, read
    `mlp_bias` (both false when absent). `reads_sliding_window` false means that the family knows
    no windows at all (Llama). `uses_max_window_layers` selects the Qwen rule (a window only with
    `use_sliding_window`, and only from layer `max_window_layers` on) over the Mistral rule
    (`sliding_window` holds for every layer).
    """

    num_kv_heads: int | None = None
    head_dim: int | None = None
    reads_sliding_window: bool = False
    sliding_window: int | None = None
    uses_max_window_layers: bool = False
    max_window_layers: int = 28
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer. Sizes are in elements, positions and windows in tokens.

    `windows[i]` is how many positions, its own included, a token of layer i sees; None is all.
    Query head h reads KV head h // (num_heads // num_kv_heads).
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    name: str = ""

    @classmethod
    def from_hf(
        cls, raw: Mapping[str, Any], defaults: FamilyDefaults, name: str = ""
    ) -> ModelConfig:
        """The model that a parsed `config.json` describes.

        Raises MinidecodeError that names the key when one is missing, out of range, contradicts
        another, or asks for something that is not supported (quantised weights, other rotary
        types, other activations).
        """
        model_type = raw.get("model_type")
        if not isinstance(model_type, str):
            raise MinidecodeError("config.json: model_type is missing")
        _refuse_quantised(raw)
        act = raw.get("hidden_act", "silu")
        if act not in ("silu", "swish"):
            raise MinidecodeError(
                f"config.json: hidden_act {act!r} is not supported, only 'silu' (SwiGLU)"
            )

        hidden = _int(raw, "hidden_size")
        layers = _int(raw, "num_hidden_layers", most=_MAX_LAYERS)
        heads = _int(raw, "num_attention_heads")
        kv_heads = _kv_heads(raw, heads, defaults)
        max_position = _int(raw, "max_position_embeddings", default=defaults.max_position)
        attention_bias = _bool(raw, "attention_bias", False)
        return cls(
            model_type=model_type,
            hidden_size=hidden,
            intermediate_size=_int(raw, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_head_dim(raw, hidden, heads, defaults),
            vocab_size=_int(raw, "vocab_size"),
            rms_norm_eps=_positive(raw, "rms_norm_eps", defaults.rms_norm_eps),
            rope=_rope(raw, defaults.rope_theta, max_position),
            max_position=max_position,
            tie_embeddings=_bool(raw, "tie_word_embeddings", defaults.tie_embeddings),
            qkv_bias=attention_bias if defaults.qkv_bias is None else defaults.qkv_bias,
            o_bias=attention_bias if defaults.o_bias is None else defaults.o_bias,
            mlp_bias=(
                _bool(raw, "mlp_bias", False) if defaults.mlp_bias is None else defaults.mlp_bias
            ),
            qk_norm=defaults.qk_norm,
            windows=_windows(raw, layers, defaults),
            bos_token_id=_bos(raw, defaults),
            eos_token_ids=token_ids(raw, "eos_token_id", defaults.eos_token_ids),
            name=name,
        )

    @property
    def q_size(self) -> int:
        """Rows of q_proj: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of k_proj, and of v_proj: num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Weights, biases and norms of one layer, in elements."""
        h, m, q, kv = self.hidden_size, self.intermediate_size, self.q_size, self.kv_size
        linears = (q + 2 * kv) * h + h * q + 3 * m * h
        biases = (q + 2 * kv) * self.qkv_bias + h * self.o_bias + (2 * m + h) * self.mlp_bias
        norms = 2 * h + 2 * self.head_dim * self.qk_norm
        return linears + biases + norms

    @property
    def parameters(self) -> int:
        """Number of distinct parameters; a tied head is the embedding and counts once."""
        embedding = self.vocab_size * self.hidden_size
        tables = embedding if self.tie_embeddings else 2 * embedding
        return tables + self.num_layers * self.layer_parameters + self.hidden_size

    def weight_bytes(self) -> int:
        """FP16 bytes of weights that one decode step reads.

        Every linear layer, the head included, every bias and norm once, and one row of the
        embedding table. A tied head is the table itself, read once as the head; the row is read
        besides, as it is without tying.
        """
        head = self.vocab_size * self.hidden_size
        norm_and_row = 2 * self.hidden_size
        return FP16_BYTES * (self.num_layers * self.layer_parameters + head + norm_and_row)

    def kv_read_bytes(self, pos: int) -> int:
        """FP16 bytes of K and V that the token at position `pos` reads, its own row included.

        Positions count from 0; a layer with a window reads no more than its window.
        """
        seen = sum(pos + 1 if w is None else min(pos + 1, w) for w in self.windows)
        return FP16_BYTES * 2 * self.kv_size * seen


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises MinidecodeError that names the file when there is none."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MinidecodeError(f"{path} does not exist") from None
    except OSError as error:
        raise MinidecodeError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise MinidecodeError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise MinidecodeError(f"{path} must hold a JSON object, found {type(parsed).__name__}")
    return parsed


def token_ids(
    raw: Mapping[str, Any],
    key: str,
    default: tuple[int, ...] = (),
    *,
    file: str | Path = "config.json",
) -> tuple[int, ...]:
    """Token ids under `key`: one id, a list of ids or null; `default` when the key is absent."""
    value = raw.get(key, list(default))
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(map(_is_token_id, ids)):
        raise MinidecodeError(f"{file}: {key} must be a token id or a list of them: {value!r}")
    return tuple(dict.fromkeys(ids))


def _is_token_id(value: object) -> bool:
    return _is_int(value) and 0 <= value < 2**31


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _int(
    raw: Mapping[str, Any], key: str, *, default: int | None = None, most: int = _MAX_SIZE
) -> int:
    """A positive integer; `default` where the key is absent or null, an error without one."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise MinidecodeError(f"config.json: {key} is missing")
    if not _is_int(value) or not 1 <= value <= most:
        raise MinidecodeError(f"config.json: {key} must be an integer from 1 to {most}: {value!r}")
    return int(value)


def _positive(raw: Mapping[str, Any], key: str, default: float | None) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise MinidecodeError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MinidecodeError(f"config.json: {key} must be a number: {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise MinidecodeError(f"config.json: {key} must be finite and above 0: {value!r}")
    return number


def _bool(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    value = raw.get(key, default)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise MinidecodeError(f"config.json: {key} must be true or false: {value!r}")
    return value


def _refuse_quantised(raw: Mapping[str, Any]) -> None:
    for key in ("quantization_config", "compression_config"):
        quantised = raw.get(key)
        if quantised is None:
            continue
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise MinidecodeError(
            f"config.json: {key}: the weights are quantised ({method or 'unknown method'}); "
            "only FP16, BF16 and FP32 weights are supported"
        )


def _kv_heads(raw: Mapping[str, Any], heads: int, defaults: FamilyDefaults) -> int:
    # An absent key and a null differ: null is "as many as query heads" in every family.
    absent = "num_key_value_heads" not in raw
    default = defaults.num_kv_heads if absent and defaults.num_kv_heads is not None else heads
    kv_heads = _int(raw, "num_key_value_heads", default=default)
    if heads % kv_heads:
        assumed = " (assumed, the key is absent)" if absent else ""
        raise MinidecodeError(
            f"config.json: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}{assumed}"
        )
    return kv_heads


def _head_dim(raw: Mapping[str, Any], hidden: int, heads: int, defaults: FamilyDefaults) -> int:
    default = defaults.head_dim
    if default is None:
        if raw.get("head_dim") is None and hidden % heads:
            raise MinidecodeError(
                f"config.json: hidden_size {hidden} is not a multiple of "
                f"num_attention_heads {heads}, and there is no head_dim"
            )
        default = hidden // heads or None
    elif "head_dim" in raw and raw["head_dim"] is None:
        raise MinidecodeError("config.json: head_dim is null, a number is needed")
    head_dim = _int(raw, "head_dim", default=default)
    if head_dim % 2:
        raise MinidecodeError(f"config.json: head_dim {head_dim} is odd, rotary pairs need it even")
    return head_dim


def _rope(raw: Mapping[str, Any], theta: float, max_position: int) -> RopeConfig:
    """transformers 4 has rope_theta beside rope_scaling, 5 has both in rope_parameters."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    scaling = raw.get(key) or {}
    if not isinstance(scaling, dict):
        raise MinidecodeError(f"config.json: {key} must be an object: {scaling!r}")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise MinidecodeError(f"config.json: {key} differs between layers, which is not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise MinidecodeError(
            f"config.json: {key} has type {kind!r}; supported are {', '.join(ROPE_KINDS)}"
        )
    for holder in (raw, scaling):
        if holder.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise MinidecodeError(
                "config.json: partial_rotary_factor other than 1 is not supported"
            )

    theta = _positive(scaling, "rope_theta", _positive(raw, "rope_theta", theta))
    if kind == "default":
        return RopeConfig(theta)
    factor = _rope_number(scaling, key, "factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low = _rope_number(scaling, key, "low_freq_factor")
    high = _rope_number(scaling, key, "high_freq_factor")
    if high <= low:
        raise MinidecodeError(
            f"config.json: {key}.high_freq_factor {high} must be above low_freq_factor {low}"
        )
    # A value beside the dict wins over the one inside it, as in transformers.
    original = "original_max_position_embeddings"
    inside = _int(scaling, original, default=max_position)
    return RopeConfig(theta, kind, factor, low, high, _int(raw, original, default=inside))


def _rope_number(scaling: Mapping[str, Any], key: str, field: str) -> float:
    if scaling.get(field) is None:
        raise MinidecodeError(f"config.json: {key} lacks {field}")
    return _positive(scaling, field, None)


def _windows(
    raw: Mapping[str, Any], layers: int, defaults: FamilyDefaults
) -> tuple[int | None, ...]:
    types = raw.get("layer_types")
    if not defaults.reads_sliding_window:
        windows: tuple[int | None, ...] = (None,) * layers
        _check_layer_types(types, windows)
        return windows

    window = None
    if raw.get("sliding_window", defaults.sliding_window) is not None:
        window = _int(raw, "sliding_window", default=defaults.sliding_window)
    if not defaults.uses_max_window_layers:
        windows = (window,) * layers
        _check_layer_types(types, windows)
        return windows

    if not _bool(raw, "use_sliding_window", False):
        window = None
    if types is not None:
        # Qwen's own layers follow layer_types where it is given, so it decides here as well.
        return _from_layer_types(types, layers, window)
    first = raw.get("max_window_layers", defaults.max_window_layers)
    if not _is_int(first) or first < 0:
        raise MinidecodeError(
            f"config.json: max_window_layers must be an integer from 0: {first!r}"
        )
    return tuple(window if layer >= first else None for layer in range(layers))


def _from_layer_types(types: object, layers: int, window: int | None) -> tuple[int | None, ...]:
    if not isinstance(types, list) or len(types) != layers:
        raise MinidecodeError(f"config.json: layer_types must list {layers} layers")
    of: dict[str, Callable[[], int | None]] = {
        "full_attention": lambda: None,
        "sliding_attention": lambda: window,
    }
    for layer, kind in enumerate(types):
        if not isinstance(kind, str) or kind not in of:
            raise MinidecodeError(f"config.json: layer_types[{layer}] is {kind!r}, not supported")
        if kind == "sliding_attention" and window is None:
            raise MinidecodeError(
                f"config.json: layer_types[{layer}] is sliding_attention, but sliding_window is off"
            )
    return tuple(of[kind]() for kind in types)


def _check_layer_types(types: object, windows: tuple[int | None, ...]) -> None:
    """These families do not read layer_types; a list that says otherwise is an unknown model."""
    if types is None:
        return
    says = ["full_attention" if w is None else "sliding_attention" for w in windows]
    if types != says:
        raise MinidecodeError(
            f"config.json: layer_types does not fit this model type: expected {says[0]!r} "
            f"for each of {len(says)} layers"
        )


def _bos(raw: Mapping[str, Any], defaults: FamilyDefaults) -> int | None:
    bos = raw.get("bos_token_id", defaults.bos_token_id)
    if bos is not None and not _is_token_id(bos):
        raise MinidecodeError(f"config.json: bos_token_id must be a token id or null: {bos!r}")
    return cast("int | None", bos)
