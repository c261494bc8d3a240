"""A safetensors directory as checked (name, tensor) pairs.

Everything a header says is verified before anything is allocated by it, since the files come from
strangers: lengths, offsets, duplicate names, shard paths. Nothing in the directory is executed:
config.json and the shard index are parsed as JSON, and `auto_map` is not looked at.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from minidecode.errors import MinidecodeError

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# The format's own limit. A longer header is damage or an attack, not a model.
_MAX_HEADER = 100_000_000
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
_WEIGHT_DTYPES = ("F16", "BF16", "F32")
# Old checkpoints carry the rotary frequencies. They follow from config.json, and some are wrong.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"

# Enough to use a model, and neither duplicates of the weights nor files of other formats.
_HUB_ALLOW = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_HUB_IGNORE = ["*/*", "consolidated*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as a header describes it; `file` is the safetensors file that holds it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The weights of one model directory; made by `open_checkpoint`."""

    def __init__(self, directory: Path, infos: dict[str, TensorInfo]) -> None:
        self.directory = directory
        self._infos = infos

    def names(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """dtype (F16, BF16 or F32) and shape of every tensor, from the headers alone."""
        return {name: (info.dtype, info.shape) for name, info in self._infos.items()}

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor, for messages."""
        return self._infos[name].file

    def fp16_bytes(self) -> int:
        """Bytes of all tensors together once they are FP16."""
        return sum(2 * math.prod(info.shape) for info in self._infos.values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once, FP16 on the CPU, one at a time and in the order of the files.

        What the file holds as FP16 is a view of the mapped file: copy it to keep it beyond the
        file. Raises MinidecodeError that names the tensor for values that FP16 cannot hold.
        """
        from safetensors import SafetensorError, safe_open

        by_file: dict[Path, list[str]] = {}
        for name, info in self._infos.items():
            by_file.setdefault(info.file, []).append(name)
        for file, names in by_file.items():
            try:
                with safe_open(file, framework="pt", device="cpu") as opened:
                    for name in names:
                        yield name, to_fp16(name, opened.get_tensor(name))
            except (SafetensorError, OSError) as error:
                raise MinidecodeError(f"{file} cannot be read: {_first_line(error)}") from None


def to_fp16(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as FP16, same shape; FP16 comes back as it is, without a copy.

    Raises MinidecodeError that names the tensor where a value is not finite, or would round to
    infinity (65520 and more). Small values become subnormals or 0, as rounding has it.
    """
    import torch

    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise MinidecodeError(f"{name} is {tensor.dtype}; only FP16, BF16 and FP32 are supported")
    half = tensor.to(torch.float16)
    if half.numel() == 0:
        return half
    # aminmax hands on nan and needs no temporary, unlike isfinite().all().
    low, high = (float(bound) for bound in torch.aminmax(half))
    if math.isfinite(low) and math.isfinite(high):
        return half
    low, high = (float(bound) for bound in torch.aminmax(tensor))
    if math.isfinite(low) and math.isfinite(high):
        worst = high if high >= -low else low
        raise MinidecodeError(f"{name} holds {worst:g}, which FP16 cannot (its largest is 65504)")
    raise MinidecodeError(f"{name} holds a value that is not finite (inf or nan)")


def open_checkpoint(directory: Path) -> Checkpoint:
    """Check every header of a model directory; reads no weights.

    With an index, exactly the tensors that it names are in the result, and no other file is
    opened. Raises MinidecodeError that names the file (and the tensor) for whatever is damaged,
    contradictory or outside the directory.
    """
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise MinidecodeError(f"model directory {directory} {what}")
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    has_single, has_index = os.path.lexists(single), os.path.lexists(index)
    if not has_single and not has_index:
        raise MinidecodeError(_no_weights(directory))
    if not has_index:
        file = _inside(directory, SINGLE_FILE, str(directory))
        return Checkpoint(directory, _weights(file, _read_header(file)))
    weight_map = _read_index(directory)
    if has_single and SINGLE_FILE not in weight_map.values():
        raise MinidecodeError(
            f"{directory} holds both {SINGLE_FILE} and {INDEX_FILE}, which does not name it; "
            "remove the one that is not the model"
        )
    return Checkpoint(directory, _read_shards(directory, weight_map))


def resolve_model(
    spec: str,
    progress: Callable[[float, str], None] | None = None,
    *,
    config_only: bool = False,
) -> Path:
    """The directory of a model: a path, `example`, or a hub id (`owner/name`).

    An existing directory wins over a hub id of the same spelling. `example` and hub ids are
    fetched when they are not in the cache; `progress` gets the share done and what is going on
    (the hub draws its own bars, unless there is no `progress`). With `config_only` a hub's model
    comes without its weights and tokenizer. Raises MinidecodeError when there is no such model.
    """
    if spec == "example":
        from minidecode import example

        return example.ensure(progress)
    path = Path(os.path.expanduser(spec))
    if os.path.isdir(path):
        if not os.path.exists(path / "config.json"):
            raise MinidecodeError(
                f"{path} is not a model directory: it has no config.json "
                "(a Hugging Face model has config.json and *.safetensors)"
            )
        return path
    if os.path.exists(path):
        raise MinidecodeError(f"{path} is a file; a model is a directory with config.json")
    if _HUB_ID.fullmatch(spec):
        return _from_hub(spec, ["config.json"] if config_only else _HUB_ALLOW, progress is None)
    raise MinidecodeError(
        f"there is no model {spec!r}: not a directory, not a hub id (owner/name), "
        "not synthetic:<name> or example"
    )


def _from_hub(repo: str, patterns: list[str], quiet: bool) -> Path:
    from huggingface_hub import constants, errors, snapshot_download
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    silence = quiet and not are_progress_bars_disabled()
    if silence:
        disable_progress_bars()
    try:
        found = snapshot_download(repo, allow_patterns=patterns, ignore_patterns=_HUB_IGNORE)
    except errors.GatedRepoError:
        reason = "the hub gives it only to accounts that accepted its terms; set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = "the hub has no such model, or it is private"
    except errors.LocalEntryNotFoundError:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        reason = f"it is not in the local hub cache, and {why}"
    except Exception as error:  # http, ssl, disk: the libraries below share no base class
        reason = _first_line(error)
    else:
        return Path(found)
    finally:
        if silence:
            enable_progress_bars()
    raise MinidecodeError(f"there is no directory {repo}, and as a hub id: {reason}")


def _no_weights(directory: Path) -> str:
    wanted = f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}"
    for pattern, kind in (("*.bin", "PyTorch pickles"), ("*.gguf", "GGUF")):
        if any(directory.glob(pattern)):
            return f"{wanted} (it has {kind}; only safetensors are read)"
    return wanted


def _inside(directory: Path, entry: str, where: str) -> Path:
    """The path of a shard; refuses what would read outside the model directory.

    The hub's cache keeps snapshots/<revision>/<file> as a link into its own blobs folder (which
    may in turn link to one that the whole cache shares), so those two folders count as inside.
    """
    relative = PurePosixPath(entry)
    escapes = relative.is_absolute() or ".." in relative.parts or "\\" in entry or "\0" in entry
    if escapes or not entry.endswith(".safetensors"):
        raise MinidecodeError(f"{where}: {entry!r} is not a safetensors file of the directory")
    home = directory.resolve()
    roots = [home]
    if home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--"):
        repo = home.parent.parent
        roots += [repo / "blobs", repo.parent / "blobs"]
    path = directory / entry
    try:
        target = path.resolve(strict=True)
    except FileNotFoundError:
        raise MinidecodeError(f"{path} does not exist") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise MinidecodeError(f"{path} cannot be read: {_first_line(error)}") from None
    if not any(target.is_relative_to(root) for root in roots):
        raise MinidecodeError(f"{path} is a link that leaves the model directory, to {target}")
    return path


def _read_index(directory: Path) -> dict[str, str]:
    """weight_map of the shard index: tensor name -> file name."""
    path = directory / INDEX_FILE
    try:
        parsed = _parse(path.read_bytes())
    except OSError as error:
        raise MinidecodeError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise MinidecodeError(f"{path}: {error}") from None
    weight_map = parsed.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MinidecodeError(f"{path} has no weight_map")
    for name, entry in weight_map.items():
        if not isinstance(entry, str):
            raise MinidecodeError(f"{path}: weight_map of {name} is not a file name: {entry!r}")
    return weight_map


def _read_shards(directory: Path, weight_map: dict[str, str]) -> dict[str, TensorInfo]:
    where = str(directory / INDEX_FILE)
    # Every path is checked before the first file is opened.
    files = {e: _inside(directory, e, where) for e in dict.fromkeys(weight_map.values())}
    holder: dict[str, Path] = {}
    infos: dict[str, TensorInfo] = {}
    for entry, file in files.items():
        header = _read_header(file)
        for name in header:
            if name in holder:
                raise MinidecodeError(f"{name} is in both {holder[name]} and {file}")
            holder[name] = file
        named = {name: info for name, info in header.items() if weight_map.get(name) == entry}
        infos.update(_weights(file, named))
    for name, entry in weight_map.items():
        if holder.get(name) != files[entry]:
            raise MinidecodeError(f"{files[entry]} lacks {name}, which {INDEX_FILE} says it holds")
    return infos


def _weights(file: Path, header: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    kept = {n: info for n, info in header.items() if not n.endswith(_IGNORED_SUFFIX)}
    for name, info in kept.items():
        if info.dtype not in _WEIGHT_DTYPES:
            raise MinidecodeError(
                f"{file}: {name} is {info.dtype}; only F16, BF16 and F32 weights are supported"
            )
    return kept


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, its layout verified byte for byte."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise MinidecodeError(f"{file} is not a regular file")
        with open(file, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            start = opened.read(8)
            if start == b"version ":
                raise MinidecodeError(f"{file} is a Git LFS pointer; 'git lfs pull' gets the file")
            length = int.from_bytes(start, "little")
            if size < 8 or length > size - 8:
                raise MinidecodeError(
                    f"{file} is truncated or no safetensors file: its header would be "
                    f"{length} bytes long, in a file of {size}"
                )
            if length > _MAX_HEADER:
                raise MinidecodeError(f"{file}: a header of {length} bytes is over the limit")
            header = opened.read(length)
    except OSError as error:
        raise MinidecodeError(f"{file} cannot be read: {error.strerror or error}") from None
    try:
        parsed = _parse(header)
    except ValueError as error:
        raise MinidecodeError(f"{file}: header: {error}") from None
    parsed.pop("__metadata__", None)
    spans: list[tuple[int, int, str]] = []
    infos: dict[str, TensorInfo] = {}
    for name, entry in parsed.items():
        dtype, shape, begin, end = _entry(file, name, entry)
        infos[name] = TensorInfo(file, dtype, shape)
        spans.append((begin, end, name))
    _check_layout(file, sorted(spans), size - 8 - length)
    return infos


def _entry(file: Path, name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and data offsets of one header entry; their sizes must agree."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    counts = isinstance(shape, list) and len(shape) <= 8 and all(_is_count(n) for n in shape)
    if not counts or not isinstance(offsets, list) or not all(_is_count(n) for n in offsets):
        raise MinidecodeError(f"{file}: header entry of {name} is malformed")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise MinidecodeError(f"{file}: {name} has dtype {dtype!r}, which is not supported")
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        raise MinidecodeError(f"{file}: data_offsets of {name} are {offsets!r}")
    assert isinstance(shape, list)
    wanted = math.prod(shape) * _ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != wanted:
        raise MinidecodeError(
            f"{file}: {name} has {offsets[1] - offsets[0]} bytes, "
            f"but {dtype} of shape {shape} needs {wanted}"
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _check_layout(file: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """The tensors must fill the data part exactly: no overlap, no hole, nothing left."""
    at = 0
    for begin, end, name in spans:
        if begin != at:
            kind = "overlaps the tensor before it" if begin < at else "leaves a hole before it"
            raise MinidecodeError(f"{file}: {name} {kind} (data starts at {begin}, not {at})")
        at = end
    if at > data_bytes:
        raise MinidecodeError(f"{file} is truncated: {at - data_bytes} bytes are missing")
    if at < data_bytes:
        raise MinidecodeError(f"{file} is too long: {data_bytes - at} bytes after the last tensor")


def _parse(text: bytes) -> dict[str, Any]:
    """A JSON object in which no key comes twice, at any level. Raises ValueError otherwise."""
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError("not a JSON object")
    return parsed


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for place, (key, value) in enumerate(pairs):
        if key in made:
            first = list(made).index(key)
            raise ValueError(f"{key!r} is there twice (entries {first + 1} and {place + 1})")
        made[key] = value
    return made


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
