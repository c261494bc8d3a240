"""Small real tokenizers, written to disk as Hugging Face directories have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

BOS, EOS, UNK = "<s>", "</s>", "<unk>"


def byte_level(directory: Path, *, add_bos: bool = False, **config: Any) -> Tokenizer:
    """Byte-level BPE with few merges: an emoji is four tokens.

    Ids 0 and 1 are BOS and EOS, 2 an added special token, 3 an added token that is text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=[BOS, EOS, "<|reserved|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hi hello there, the hat is here"] * 20, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    if add_bos:
        _add_bos(tokenizer)
    return _write(tokenizer, directory, config)


def llama2(directory: Path, *, add_bos: bool = True, **config: Any) -> Tokenizer:
    """In the style of Llama 2: ▁ for a space, one in front, and bytes for unknown characters."""
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyzDIN[],.", "\ufffd"]
    merged = ["▁a", "▁I", "▁[", "▁D", "he", "▁▁"]
    tokens = [UNK, BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *merged]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[("▁", "a"), ("▁", "I"), ("▁", "["), ("▁", "D"), ("h", "e"), ("▁", "▁")],
            unk_token=UNK,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([UNK, BOS, EOS])
    if add_bos:
        _add_bos(tokenizer)
    return _write(tokenizer, directory, config)


def metaspace(directory: Path, **config: Any) -> Tokenizer:
    """Unigram with a Metaspace decoder, as SentencePiece models are converted today."""
    pieces = [UNK, "▁", "▁hi", "▁the", "re", *"hiter!"]
    tokenizer = Tokenizer(
        models.Unigram([(piece, -float(i)) for i, piece in enumerate(dict.fromkeys(pieces))], 0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _write(tokenizer, directory, config)


def _add_bos(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )


def _write(tokenizer: Tokenizer, directory: Path, config: dict[str, Any]) -> Tokenizer:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": EOS}
    own = {key: token for key, token in names.items() if tokenizer.token_to_id(token) is not None}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **own, **config})
    )
    return tokenizer
