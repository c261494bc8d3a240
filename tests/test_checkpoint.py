"""Checkpoints from strangers: what is damaged, ambiguous or reaches outside is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from minidecode.checkpoint import open_checkpoint, resolve_model, to_fp16
from minidecode.errors import MinidecodeError
from minidecode.models import load_config

INDEX = "model.safetensors.index.json"


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file by hand: `header` is JSON-encoded unless it is bytes already."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F16") -> Any:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 2] if shape is None else shape,
        "data_offsets": [begin, end],
    }


def refuses(directory: Path, says: str) -> str:
    """The one-line message with which opening and reading `directory` fails."""
    with pytest.raises(MinidecodeError, match=says) as error:
        list(open_checkpoint(directory).tensors())
    assert error.value.exit_code == 1
    assert "\n" not in str(error.value)
    return str(error.value)


def refuses_unopened(directory: Path, says: str) -> str:
    """`refuses`, and until then no shard was opened, from Python in whatever way."""
    opened: list[str] = []

    def watching(file: Any, *args: Any, real_open: Any = open, **kwargs: Any) -> Any:
        opened.append(str(file))
        return real_open(file, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("builtins.open", "io.open"):
            patch.setattr(name, watching)
        said = refuses(directory, says)
    assert [name for name in opened if name.endswith(".safetensors")] == []
    return said


def edit_index(directory: Path, name: str, entry: object) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"][name] = entry
    (directory / INDEX).write_text(json.dumps(index))


@pytest.fixture
def sharded(tmp_path):
    return tiny.build(tmp_path / "sharded", shards=3)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_reads_every_tensor_once_as_fp16(tmp_path, shards, dtype):
    made = tiny.build(tmp_path / "m", shards=shards, dtype=dtype)
    checkpoint = open_checkpoint(made.directory)
    short = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]
    assert checkpoint.names() == {n: (short, tuple(t.shape)) for n, t in made.state.items()}
    read = list(checkpoint.tensors())
    assert len(read) == len(made.state)
    for name, tensor in read:
        assert tensor.dtype == torch.float16
        assert torch.equal(tensor, made.state[name].half())
    assert checkpoint.fp16_bytes() == sum(2 * t.numel() for t in made.state.values())


def test_tied_head_is_absent_and_untied_head_is_seen_missing(tmp_path):
    tied = tiny.build(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in open_checkpoint(tied.directory).names()
    assert load_config(tied.directory).tie_embeddings
    untied = tiny.build(tmp_path / "untied", tie_word_embeddings=True, drop=["tie_word_embeddings"])
    assert "lm_head.weight" not in open_checkpoint(untied.directory).names()
    assert not load_config(untied.directory).tie_embeddings


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 101_000_000, 93])
def test_header_length_beyond_the_file(tmp_path, length):
    path = write(tmp_path / "model.safetensors", b"{}" + b" " * 90, length=length)
    assert path.stat().st_size == 100
    tracemalloc.start()
    start = time.perf_counter()
    said = refuses(tmp_path, "header would be")
    seconds = time.perf_counter() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(path) in said
    assert seconds < 1
    assert peak < 1_000_000


def test_header_over_the_limit_of_the_format(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((101_000_000).to_bytes(8, "little"))
    os.truncate(path, 200_000_000)  # sparse
    start = time.perf_counter()
    refuses(tmp_path, "header of 101000000 bytes")
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9])
def test_files_too_short_for_a_header(tmp_path, size):
    (tmp_path / "model.safetensors").write_bytes((b"\x02" + b"\0" * 7 + b"{}")[:size])
    refuses(tmp_path, r"model\.safetensors")


def test_git_lfs_pointer_is_recognised(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 269060280\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    refuses(tmp_path, "Git LFS pointer")


@pytest.mark.parametrize("shards", [1, 3])
def test_one_byte_missing_and_one_too_many(tmp_path, shards):
    name = "model.safetensors" if shards == 1 else "model-00002-of-00003.safetensors"
    for change, says in ((-1, "truncated: 1 bytes"), (1, "too long: 1 bytes")):
        made = tiny.build(tmp_path / f"m{change}", shards=shards)
        path = made.directory / name
        os.truncate(path, path.stat().st_size + change)
        assert name in refuses(made.directory, says)


def test_a_name_twice_in_one_header(tmp_path):
    one, two = json.dumps(entry(0, 2)), json.dumps(entry(2, 4))
    header = f'{{"a": {one}, "b": {two}, "a": {two}}}'.encode()
    write(tmp_path / "model.safetensors", header, b"\0" * 4)
    refuses(tmp_path, r"model\.safetensors.*'a' is there twice \(entries 1 and 3\)")


def test_a_key_twice_inside_an_entry_or_the_index(tmp_path, sharded):
    header = b'{"a": {"dtype": "F16", "shape": [1], "shape": [2], "data_offsets": [0, 4]}}'
    write(tmp_path / "model.safetensors", header, b"\0" * 4)
    refuses(tmp_path, "'shape' is there twice")
    text = (sharded.directory / INDEX).read_text()
    first = '"model.norm.weight": "model-00001-of-00003.safetensors", '
    doubled = text.replace('"weight_map": {', f'"weight_map": {{{first}')
    assert doubled != text
    (sharded.directory / INDEX).write_text(doubled)
    refuses(sharded.directory, rf"{INDEX}.*'model\.norm\.weight' is there twice")


def test_a_name_in_two_shards(tmp_path, sharded):
    extra = sharded.directory / "model-00002-of-00003.safetensors"
    held = open_checkpoint(sharded.directory)
    name = next(n for n in held.names() if held.file_of(n).name.startswith("model-00001"))
    other = {n: t for n, t in held.tensors() if held.file_of(n) == extra}
    save_file({**other, name: torch.zeros(2, dtype=torch.float16)}, extra)
    said = refuses(sharded.directory, name)
    assert "model-00001-of-00003.safetensors" in said
    assert "model-00002-of-00003.safetensors" in said


@pytest.mark.parametrize(
    "where",
    [
        "../other/model.safetensors",
        "{other}/model.safetensors",
        "sub/../../other/model.safetensors",
        "..\\other\\model.safetensors",
        "../sharded/../other/model.safetensors",
        "",
        "config.json",
        "model\0.safetensors",
    ],
)
def test_shard_paths_that_leave_the_directory(tmp_path, sharded, where):
    other = tiny.build(tmp_path / "other", seed=1).directory
    edit_index(sharded.directory, "lm_head.weight", where.format(other=other))
    assert INDEX in refuses_unopened(sharded.directory, "not a safetensors file of the directory")


@pytest.mark.parametrize("name", ["model-00003-of-00003.safetensors", "model.safetensors"])
def test_links_that_leave_the_directory(tmp_path, name):
    outside = tiny.build(tmp_path / "outside", seed=1).directory / "model.safetensors"
    made = tiny.build(tmp_path / "m", shards=1 if name == "model.safetensors" else 3)
    (made.directory / name).unlink()
    (made.directory / name).symlink_to(outside)
    refuses_unopened(made.directory, "link that leaves the model directory")


def test_linked_directories_on_the_way_to_a_shard(tmp_path, sharded):
    other = tiny.build(tmp_path / "other").directory
    (sharded.directory / "sub").symlink_to(other)
    edit_index(sharded.directory, "lm_head.weight", "sub/model.safetensors")
    refuses_unopened(sharded.directory, "link that leaves the model directory")


def test_links_within_the_directory_and_to_the_directory_load(tmp_path, sharded):
    shard = sharded.directory / "model-00003-of-00003.safetensors"
    shard.rename(sharded.directory / "renamed.safetensors")
    shard.symlink_to("renamed.safetensors")
    (tmp_path / "link").symlink_to(sharded.directory)
    assert len(list(open_checkpoint(tmp_path / "link").tensors())) == len(sharded.state)


def test_links_in_a_circle_and_to_nothing(tmp_path, sharded):
    shard = sharded.directory / "model-00003-of-00003.safetensors"
    shard.unlink()
    refuses(sharded.directory, "model-00003-of-00003.safetensors does not exist")
    shard.symlink_to(shard.name)
    refuses(sharded.directory, "model-00003-of-00003.safetensors")
    shard.unlink()
    os.mkfifo(shard)
    refuses(sharded.directory, "not a regular file")


def hub_cache(root: Path, source: Path, *, shared: bool = False) -> Path:
    """A local hub cache under `root` that has `source` as acme/tiny; returns the snapshot."""
    repo = root / "hub" / "models--acme--tiny"
    snapshot = repo / "snapshots" / ("a" * 40)
    for folder in (snapshot, repo / "blobs", repo / "refs", root / "hub" / "blobs" / "ab"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(snapshot.name)
    for file in source.iterdir():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        blob = repo / "blobs" / digest
        if shared:
            shutil.copy(file, root / "hub" / "blobs" / "ab" / digest)
            blob.symlink_to(Path("../../blobs/ab") / digest)
        else:
            shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / digest)
    return snapshot


@pytest.mark.parametrize("shared", [False, True])
def test_the_hub_caches_links_load(tmp_path, sharded, shared):
    snapshot = hub_cache(tmp_path, sharded.directory, shared=shared)
    assert len(list(open_checkpoint(snapshot).tensors())) == len(sharded.state)
    # The same links are refused where the folder is no snapshot of a hub cache.
    moved = tmp_path / "x" / "y" / "z"
    moved.parent.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    snapshot.rename(moved)
    for link in moved.iterdir():
        target = (snapshot / os.readlink(link)).resolve()
        shutil.copy(target, tmp_path / "blobs" / link.name)
        link.unlink()
        link.symlink_to(Path("../../../blobs") / link.name)
    refuses_unopened(moved, "link that leaves the model directory")


def test_only_what_the_index_names_is_read(tmp_path, sharded):
    stray = {name: torch.full_like(tensor, 7.0) for name, tensor in sharded.state.items()}
    save_file(stray, sharded.directory / "consolidated.safetensors")
    (sharded.directory / "damaged.safetensors").write_bytes(b"\xff" * 20)
    for name, tensor in open_checkpoint(sharded.directory).tensors():
        assert torch.equal(tensor, sharded.state[name])
    # And of a shard, only the tensors that the index gives to it.
    index = json.loads((sharded.directory / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (sharded.directory / INDEX).write_text(json.dumps(index))
    left = set(sharded.state) - {"model.norm.weight"}
    assert set(open_checkpoint(sharded.directory).names()) == left


def test_an_index_beside_a_single_file(tmp_path, sharded):
    tiny.save(sharded.directory, sharded.state)
    refuses(sharded.directory, "holds both model.safetensors and model.safetensors.index.json")
    for file in sharded.directory.glob("model-*"):
        file.unlink()
    index = {"weight_map": dict.fromkeys(sharded.state, "model.safetensors")}
    (sharded.directory / INDEX).write_text(json.dumps(index))
    assert len(open_checkpoint(sharded.directory).names()) == len(sharded.state)


def test_an_index_that_lies(tmp_path, sharded):
    edit_index(sharded.directory, "model.extra.weight", "model-00001-of-00003.safetensors")
    refuses(sharded.directory, r"model-00001-of-00003\.safetensors lacks model\.extra\.weight")
    edit_index(sharded.directory, "model.extra.weight", 3)
    refuses(sharded.directory, r"model\.extra\.weight is not a file name: 3")
    for text in ('{"weight_map": []}', "{}", '{"weight_map": {}}'):
        (sharded.directory / INDEX).write_text(text)
        refuses(sharded.directory, "has no weight_map")
    (sharded.directory / INDEX).write_text("[" * 100_000)
    refuses(sharded.directory, "nested too deeply")


def test_old_rotary_frequencies_are_ignored(tmp_path):
    made = tiny.build(tmp_path / "m")
    garbage = {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.full((8,), float("nan"))
        for i in range(2)
    }
    garbage["model.rotary_emb.inv_freq"] = torch.zeros(3, dtype=torch.int64)
    tiny.save(made.directory, {**made.state, **garbage})
    assert set(open_checkpoint(made.directory).names()) == set(made.state)
    assert {name for name, _ in open_checkpoint(made.directory).tensors()} == set(made.state)


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"[]", 0, "not a JSON object"),
        (b"{,}", 0, "not valid JSON"),
        (b"\xff\xfe", 0, "not UTF-8"),
        (b"[" * 50_000, 0, "nested too deeply"),
        ({"a": 3}, 0, "entry of a is malformed"),
        ({"a": {"dtype": "F16", "shape": [1]}}, 2, "entry of a is malformed"),
        ({"a": entry(0, 2, shape=[-1])}, 2, "entry of a is malformed"),
        ({"a": entry(0, 2, shape=[True])}, 2, "entry of a is malformed"),
        ({"a": entry(0, 2, shape=[1.0])}, 2, "entry of a is malformed"),
        ({"a": entry(0, 2, shape=[2**64, 2**64])}, 2, "entry of a is malformed"),
        ({"a": entry(0, 2, shape=[1] * 1000)}, 2, "entry of a is malformed"),
        ({"a": {**entry(0, 2), "data_offsets": [0, 2, 4]}}, 4, "data_offsets of a"),
        ({"a": {**entry(0, 2), "data_offsets": [2, 0]}}, 2, "data_offsets of a"),
        ({"a": entry(0, 2, shape=[3])}, 2, r"a has 2 bytes, but F16 of shape \[3\] needs 6"),
        ({"a": entry(0, 2, shape=[2**40, 2**40])}, 2, "a has 2 bytes"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "b overlaps the tensor before it"),
        ({"a": entry(0, 2), "b": entry(4, 6)}, 6, "b leaves a hole before it"),
        ({"a": entry(2, 4)}, 4, "a leaves a hole before it"),
        ({"a": entry(0, 2), "b": entry(0, 2)}, 2, "b overlaps the tensor before it"),
        ({"a": entry(0, 2**40)}, 2, "truncated: 1099511627774 bytes"),
        ({"a": entry(0, 4, shape=[1], dtype="F32"), "b": entry(4, 6)}, 9, "too long: 3 bytes"),
        ({"a": entry(0, 2, shape=[2], dtype="F8_E4M3")}, 2, "a is F8_E4M3"),
        ({"a": entry(0, 8, shape=[1], dtype="F64")}, 8, "a is F64"),
        ({"a": entry(0, 2, dtype="Q4_1")}, 2, "dtype 'Q4_1'"),
        ({"a": {**entry(0, 2), "dtype": ["F16"]}}, 2, "dtype"),
    ],
)
def test_headers_that_contradict_themselves(tmp_path, header, data, says):
    path = write(tmp_path / "model.safetensors", header, b"\0" * data)
    assert str(path) in refuses(tmp_path, says)


def test_empty_tensors_and_metadata_are_no_contradiction(tmp_path):
    header = {"__metadata__": {"format": "pt"}, "a": entry(0, 0, shape=[0, 3]), "b": entry(0, 2)}
    write(tmp_path / "model.safetensors", header, b"\0\x3c")
    read = dict(open_checkpoint(tmp_path).tensors())
    assert read["a"].shape == (0, 3)
    assert read["b"].tolist() == [1.0]


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_damage_anywhere_is_one_clear_error_or_harmless(tmp_path, data):
    state = {"a": torch.arange(6).half().reshape(2, 3), "b.weight": torch.ones(4).half()}
    directory = tmp_path / "m"
    directory.mkdir(exist_ok=True)
    tiny.save(directory, state)
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    kept = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    path.write_bytes(content[:kept])
    try:
        read = list(open_checkpoint(directory).tensors())
    except MinidecodeError as refusal:
        said = str(refusal)
    else:
        assert sum(tensor.numel() for _, tensor in read) == 10
        return
    assert said


@pytest.mark.parametrize(
    ("dtype", "fits", "too_large"),
    [(torch.bfloat16, 65280.0, 65536.0), (torch.float32, 65519.0, 65520.0)],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_what_fp16_cannot_hold_is_refused(tmp_path, dtype, fits, too_large, sign):
    small = torch.tensor([3e-6, 1e-9], dtype=dtype)
    save_file(
        {"small": small, "large": torch.tensor([0.0, sign * fits], dtype=dtype)},
        tmp_path / "model.safetensors",
    )
    read = dict(open_checkpoint(tmp_path).tensors())
    assert read["large"][1] == torch.tensor(sign * fits).half()
    assert 2.9e-6 < read["small"][0].item() < 3.1e-6  # a subnormal, not 0
    assert read["small"][1] == 0
    save_file(
        {"w": torch.tensor([1.0, sign * too_large], dtype=dtype)}, tmp_path / "model.safetensors"
    )
    refuses(tmp_path, f"w holds {sign * too_large:g}, which FP16 cannot")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_weights_that_are_not_finite_are_refused(tmp_path, dtype, value):
    weights = torch.zeros(1000, 3, dtype=dtype)
    weights[700, 1] = value
    save_file({"model.norm.weight": weights}, tmp_path / "model.safetensors")
    refuses(tmp_path, r"model\.norm\.weight holds a value that is not finite")


def test_to_fp16_keeps_what_is_fp16_and_refuses_other_types():
    half = torch.tensor([1.0, 65504.0, 5.96e-8], dtype=torch.float16)
    assert to_fp16("w", half) is half
    with pytest.raises(MinidecodeError, match=r"w is torch\.int8"):
        to_fp16("w", torch.zeros(2, dtype=torch.int8))


def test_auto_map_is_never_executed(tmp_path):
    touched = tmp_path / "touched"
    made = tiny.build(
        tmp_path / "m",
        write={
            "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
        },
    )
    code = f"import pathlib; pathlib.Path({str(touched)!r}).touch()\nclass C: pass\nclass M: pass\n"
    (made.directory / "evil.py").write_text(code)
    (made.directory / "__init__.py").write_text(code)
    directory = resolve_model(str(made.directory))
    assert load_config(directory).num_layers == 2
    assert len(list(open_checkpoint(directory).tensors())) == len(made.state)
    assert not touched.exists()
    exec(code, {})
    assert touched.exists()  # the trap works


def test_directories_that_are_no_model(tmp_path):
    refuses(tmp_path / "none", "does not exist")
    (tmp_path / "file").write_text("x")
    refuses(tmp_path / "file", "is not a directory")
    (tmp_path / "empty").mkdir()
    refuses(tmp_path / "empty", r"neither model\.safetensors nor")
    for name, kind in (("pytorch_model.bin", "PyTorch pickles"), ("m.gguf", "GGUF")):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).touch()
        refuses(folder, rf"it has {kind}; only safetensors are read")


def test_resolving_paths(tmp_path, monkeypatch):
    made = tiny.build(tmp_path / "owner" / "m").directory
    assert resolve_model(str(made)) == made
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/m") == Path("owner/m")  # a directory wins over a hub id
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/owner/m") == made
    for spec, says in [
        (str(tmp_path), "not a model directory: it has no config.json"),
        (str(made / "config.json"), "is a file"),
        (str(tmp_path / "none"), "there is no model"),
        ("none", "there is no model 'none'"),
        ("a/b/c", "there is no model 'a/b/c'"),
        ("", "not a model directory"),
        ("x" * 5000, "there is no model"),
    ]:
        with pytest.raises(MinidecodeError, match=says) as error:
            resolve_model(spec)
        assert "\n" not in str(error.value)
        assert error.value.exit_code == 1


RESOLVE = """
import sys, time
from minidecode.checkpoint import open_checkpoint, resolve_model
from minidecode.errors import MinidecodeError
for spec in sys.argv[1:]:
    try:
        directory = resolve_model(spec)
        print(directory, len(open_checkpoint(directory).names()))
    except MinidecodeError as error:
        print(error)
"""


def test_hub_ids_come_from_the_local_cache(tmp_path, sharded):
    snapshot = hub_cache(tmp_path, sharded.directory)
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, "acme/tiny", "acme/other"],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found, missing = done.stdout.splitlines()
    assert found == f"{snapshot} {len(sharded.state)}"
    assert missing == (
        "there is no directory acme/other, and as a hub id: "
        "it is not in the local hub cache, and HF_HUB_OFFLINE is set"
    )
    assert done.stderr == ""


def test_hub_errors_are_one_line(monkeypatch):
    import huggingface_hub

    asked: dict[str, Any] = {}

    def fails(repo: str, **options: Any) -> str:
        asked.update(options)
        raise RuntimeError("no route\nTraceback: …\n")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(MinidecodeError, match=r"as a hub id: no route$") as error:
        resolve_model("acme/tiny")
    assert error.value.exit_code == 1
    wanted = {"*.safetensors", "*.json", "*.jinja", "tokenizer.model"}
    assert set(asked["allow_patterns"]) == wanted
    assert "consolidated*" in asked["ignore_patterns"]
