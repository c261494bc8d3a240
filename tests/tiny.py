"""Tiny random models for tests: FP16 safetensors on disk, transformers' FP32 logits beside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
VOCAB = 97
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


# RoPE scaling as Llama 3.1 has it, for so few positions.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Tiny:
    """A model on disk and the same weights (already rounded to what the file holds) in FP32."""

    directory: Path
    model: Any
    state: dict[str, torch.Tensor]

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """FP32 [len(ids), vocab]: the logits after each of the tokens."""
        with torch.no_grad():
            return self.model(torch.tensor([list(ids)])).logits[0].float()

    def greedy(self, ids: Sequence[int], n: int) -> list[int]:
        """The next n tokens by argmax, end tokens ignored."""
        out = list(ids)
        for _ in range(n):
            out.append(int(self.logits(out)[-1].argmax()))
        return out[len(ids) :]


def build(
    directory: Path,
    model_type: str = "llama",
    *,
    seed: int = 0,
    shards: int = 1,
    dtype: torch.dtype = torch.float16,
    style: int = 5,
    drop: Sequence[str] = (),
    write: Mapping[str, Any] | None = None,
    tokenizer: bool = False,
    **overrides: Any,
) -> Tiny:
    """Make a model in `directory`, which is created.

    `overrides` go to the transformers config class (any key of it, `rope_parameters` too).
    `style` 4 writes config.json with the keys of transformers 4. `drop` takes keys out of the
    written config.json and `write` puts keys in, after the model was made, so the file can say
    something else than the model. `shards` above 1 writes that many files and an index.
    `tokenizer` adds one whose 97 tokens are newline, <s>=1, </s>=2 and the printable ASCII.
    """
    config = AutoConfig.for_model(model_type, **{**BASE, **overrides})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed, dtype)
    state = {
        name: tensor.to(dtype).contiguous()
        for name, tensor in model.state_dict().items()
        if not (name == "lm_head.weight" and config.tie_word_embeddings)
    }
    directory.mkdir(parents=True, exist_ok=True)
    raw = config_json(config, dtype, style)
    for key in drop:
        raw.pop(key, None)
    raw.update(write or {})
    (directory / "config.json").write_text(json.dumps(raw, indent=2))
    save(directory, state, shards)
    if tokenizer:
        write_tokenizer(directory)
    return Tiny(directory, model, state)


def randomise(model: torch.nn.Module, seed: int, dtype: torch.dtype) -> None:
    """Weights large enough that heads, biases, norms and rotary angles all show in the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim == 2:
                value = noise * (0.5 if "embed" in name else 1.5 / p.shape[1] ** 0.5)
            elif name.endswith("bias"):
                value = 0.3 * noise
            else:
                value = 1.0 + 0.2 * noise
            p.copy_(value.to(dtype).float())


def config_json(config: Any, dtype: torch.dtype, style: int = 5) -> dict[str, Any]:
    """config.json as the given major version of transformers writes it."""
    raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    name = str(dtype).removeprefix("torch.")
    raw["architectures"] = [
        {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[
            config.model_type
        ]
        + "ForCausalLM"
    ]
    if style == 5:
        raw["dtype"] = name
        return raw
    rope = dict(raw.pop("rope_parameters"))
    raw["rope_theta"] = rope.pop("rope_theta", 10000.0)
    raw["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    raw.pop("dtype", None)
    raw["torch_dtype"] = name
    raw["transformers_version"] = "4.57.1"
    if config.model_type in ("qwen2", "qwen3"):
        raw.pop("layer_types", None)
    return raw


def save(directory: Path, state: Mapping[str, torch.Tensor], shards: int = 1) -> None:
    """model.safetensors, or `shards` files dealt out in turn with their index."""
    if shards == 1:
        save_file(dict(state), directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(state.items())[shard::shards])
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    size = sum(t.numel() * t.element_size() for t in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(directory: Path) -> None:
    """One token a character; encode() adds <s> in front, as Llama's tokenizers do."""
    from tokenizers import Tokenizer, decoders, models, processors

    vocab = {"\n": 0, "<s>": 1, "</s>": 2}
    for code in range(32, 126):  # '~' gives its place to the newline
        vocab[chr(code)] = len(vocab)
    assert len(vocab) == VOCAB
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)


def reference(directory: Path, ids: Sequence[int]) -> torch.Tensor:
    """FP32 [len(ids), vocab]: what transformers computes from the files alone."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0].float()
