"""The command line: exit codes, one-line errors, what goes to stdout, interruption.

Most of it runs in this process, which has imported torch already; what depends on a process of its
own (signals, pipes) runs in one.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import tiny_tokenizers
import torch

import minidecode
from minidecode import cli
from minidecode.cli import generate, progress
from minidecode.errors import MinidecodeError
from minidecode.records import GenerateResult

ROOT = Path(__file__).parent.parent
PROMPT = "The capital of France is"
# What transformers makes of the example in FP32, greedily.
ANSWER = " Paris.\n\nThe answer is: 2018-01-22 12:12:53."


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random model; its tokenizer has a token a character."""
    directory = tmp_path_factory.mktemp("model")
    tiny.build(directory, tokenizer=True)
    return str(directory)


@pytest.fixture(autouse=True)
def quick_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the read bandwidth takes a second, which no test here is about."""
    from minidecode.bench import device

    monkeypatch.setattr(device, "read_bandwidth", lambda _: 20.0)


def subprocess_cli(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "minidecode", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        **options,
    )


def give_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The error that was printed; nothing else may have been."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("minidecode")
    return captured.err


# The parser


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"\n    {name} " in out
    assert "130 interrupted" in out


def test_every_command_describes_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as end:
            cli.main([name, "--help"])
        assert end.value.code == 0
        assert f"usage: minidecode {name}" in capsys.readouterr().out
        assert importlib.import_module(f"minidecode.cli.{name}").__doc__


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["generate", "--nonsense"],
        ["generate", "--max-new", "3"],  # no abbreviations
        ["generate", "--prompt", "a", "--prompt-file", "b"],
        ["generate", "--prompt", "a", "--max-new-tokens", "0"],
        ["generate", "--prompt", "a", "--max-new-tokens", "1.5"],
        ["generate", "--prompt", "a", "--max-context", "-1"],
        ["generate", "--prompt", "a", "--temperature", "x"],
        ["generate", "--prompt", "a", "--device", "gpu"],
    ],
    ids=" ".join,
)
def test_a_command_line_that_cannot_be_parsed(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert "--help" in one_line(capsys)


# Errors


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--top-k", "-1"], "--top-k"),
        (["--top-p", "0"], "--top-p"),
        (["--min-p", "2"], "--min-p"),
        (["--repetition-penalty", "0"], "--repetition-penalty"),
        (["--seed", "-1"], "--seed"),
        (["--stop", ""], "--stop"),
        (["--system", "be brief"], "--chat"),
        (["--kernel", "half2_blok"], "did you mean half2_block"),
        (["--kernel", "nonsense"], "cublas"),
        (["--kernel", "/no/such.cu"], "/no/such.cu"),
    ],
)
def test_a_wrong_value_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert cli.main(["generate", "--prompt", "a", *options]) == 2
    assert said in one_line(capsys)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("bench -n 1 --odd", "minidecode bench"),
        ("kernels check torch --odd", "minidecode kernels check"),
        ("--odd env", "minidecode"),
    ],
)
def test_an_unknown_option_leads_to_the_help_of_its_command(
    capsys: pytest.CaptureFixture[str], words: str, name: str
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words.split())
    assert end.value.code == 2
    assert one_line(capsys) == f"{name}: unrecognized arguments: --odd (see {name} --help)\n"


def test_options_of_drawing_without_a_temperature_are_told(
    capsys: pytest.CaptureFixture[str], scripted: Any, model: str
) -> None:
    told = "minidecode: --top-k, --top-p: no effect without --temperature\n"
    for options, expected in (([], True), (["--temperature", "0.5"], False), (["-q"], False)):
        scripted("a")
        asked = ["--prompt", "a", "--top-p", "0.9", "--top-k", "5", *options]
        assert cli.main(["generate", model, *asked]) == 0
        assert (told in capsys.readouterr().err) is expected


def test_a_missing_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for spec in (str(tmp_path / "nothing"), "synthetic:nothing"):
        assert cli.main(["generate", spec, "--prompt", "a"]) in (1, 2)
        assert "nothing" in one_line(capsys)
    assert cli.main(["generate", str(tmp_path), "--prompt", "a"]) == 1
    assert str(tmp_path) in one_line(capsys)


def test_a_broken_shard(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny.build(tmp_path, tokenizer=True, shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert cli.main(["generate", str(tmp_path), "--prompt", "a"]) == 1
    assert shard.name in one_line(capsys)


def test_a_head_that_is_in_no_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    untied = {"tie_word_embeddings": False}
    tiny.build(tmp_path, tokenizer=True, tie_word_embeddings=True, write=untied)
    assert cli.main(["generate", str(tmp_path), "--prompt", "a"]) == 1
    assert "lm_head.weight" in one_line(capsys)


def test_an_unknown_kind_of_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny.build(tmp_path, tokenizer=True, write={"model_type": "mamba"})
    assert cli.main(["generate", str(tmp_path), "--prompt", "a"]) == 1
    error = one_line(capsys)
    assert "mamba" in error
    assert "llama" in error


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"rms_norm_eps": "1e-5"}, "config.json: rms_norm_eps must be a number: '1e-5'"),
        ({"tie_word_embeddings": "yes"}, "config.json: tie_word_embeddings must be true or false"),
        ({"bos_token_id": 2**31}, "config.json: bos_token_id must be a token id"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_bad_config_is_not_the_tokenizer_s(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, written: dict[str, Any], said: str
) -> None:
    tiny.build(tmp_path, tokenizer=True, write=written)
    assert cli.main(["generate", str(tmp_path), "--prompt", "a"]) == 1
    assert said in one_line(capsys)


def test_a_model_without_a_tokenizer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny.build(tmp_path)
    assert cli.main(["generate", str(tmp_path), "--prompt", "a"]) == 1
    assert "tokenizer" in one_line(capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("options", [["--device", "cuda"], ["--device", "cuda:1"]])
def test_cuda_without_a_gpu(
    capsys: pytest.CaptureFixture[str], model: str, options: list[str]
) -> None:
    assert cli.main(["generate", model, "--prompt", "a", *options]) == 5
    assert "cuda" in one_line(capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_kernel_of_the_gpu_on_the_cpu(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert cli.main(["generate", model, "--prompt", "a", "--kernel", "cublas"]) == 5
    assert "cublas" in one_line(capsys)


def test_chat_without_a_template(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert cli.main(["generate", model, "--chat", "--prompt", "a"]) == 2
    assert "chat template" in one_line(capsys)


def test_debug_shows_where(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINIDECODE_DEBUG", "1")
    assert cli.main(["generate", str(tmp_path), "--prompt", "a"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_error_of_ours_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(minidecode, "load", broken, raising=False)
    assert cli.main(["generate", model, "--prompt", "a"]) == 1
    error = one_line(capsys)
    assert "RuntimeError: first line" in error
    assert "MINIDECODE_DEBUG=1" in error


# generate, on a decoder whose tokens are known


class Scripted:
    """A decoder that yields the characters of `text` as tiny's tokenizer spells them."""

    def __init__(self, text: str, interrupt_after: int = 0) -> None:
        self.script = [0 if char == "\n" else ord(char) - 29 for char in text]
        self.interrupt_after = interrupt_after
        self.device = torch.device("cpu")
        self.kernel_set = SimpleNamespace(name="scripted", engine="torch", gemv=None)
        self.config = SimpleNamespace(eos_token_ids=(2,))
        self.load_seconds = self.build_seconds = 0.25
        self.last: Any = None
        self.asked: tuple[Any, ...] = ()

    def generate(
        self, ids: list[int], max_new_tokens: int, sampling: Any, eos: frozenset[int]
    ) -> Iterator[int]:
        self.asked = (ids, max_new_tokens, sampling, eos)
        made, reason = 0, "stop"
        try:
            for token in self.script[:max_new_tokens]:
                made += 1
                if made == self.interrupt_after:
                    signal.raise_signal(signal.SIGINT)
                yield token
            reason = "length"
        finally:
            self.last = SimpleNamespace(
                stop_reason=reason,
                engine="torch",
                n_prompt=len(ids),
                n_gen=made,
                prefill_s=0.012,
                ttft_s=0.034,
                decode_s=0.1,
                decode_tok_s=50.0 if made > 1 else None,
                step_us=20_000.0 if made > 1 else None,
                bytes_per_token=2e8 if made > 1 else None,
                logits_hash="0123456789abcdef",
                peak_memory_bytes=None,
            )


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(text: str, **options: Any) -> Scripted:
        decoder = Scripted(text, **options)
        monkeypatch.setattr(minidecode, "load", lambda *_, **__: decoder, raising=False)
        return decoder

    return install


def test_the_text_and_nothing_else_goes_to_stdout(
    capsys: pytest.CaptureFixture[str], scripted: Any, model: str
) -> None:
    for options, ended in (
        ([], "the context was full"),
        (["--no-stream", "--max-new-tokens", "14"], "length"),
    ):
        scripted(" Paris.\n\nIt is")
        assert cli.main(["generate", model, "--prompt", "a", *options]) == 0
        captured = capsys.readouterr()
        assert captured.out == " Paris.\n\nIt is"
        assert captured.err == (
            "\n"
            "load    250 ms   build 250 ms   prefill 12.0 ms (2 tokens)   first token 34.0 ms\n"
            "decode  50.0 tokens/s   20.0 ms a token   10.0 GB/s, 50.0 % of the 20.0 GB/s"
            " measured\n"
            f"tokens  14, then {ended}   peak memory –   last logits 0123456789abcdef\n"
            f"kernel  scripted (torch)   {Path(model).name}   {captured.err.split('   ')[-1]}"
        )


def test_text_appears_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, scripted: Any, model: str
) -> None:
    class Recorder(io.StringIO):
        pieces: list[str] = []  # noqa: RUF012

        def flush(self) -> None:
            self.pieces.append(self.getvalue())

    scripted("abc")
    monkeypatch.setattr(sys, "stdout", Recorder())
    assert cli.main(["generate", model, "--prompt", "a"]) == 0
    assert Recorder.pieces[:3] == ["a", "ab", "abc"]


def test_json_is_one_object_with_the_promised_fields(
    capsys: pytest.CaptureFixture[str], scripted: Any, model: str
) -> None:
    scripted("ab ")
    assert cli.main(["generate", model, "--prompt", "a", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found = json.loads(captured.out)
    promised = """text token_ids stop_reason n_prompt n_gen load_s build_s prefill_s ttft_s
        decode_tok_s step_us gb_s read_bw_gb_s pct_read_bw peak_memory_bytes logits_hash kernel
        engine model environment schema_version"""
    assert sorted(found) == sorted(re.findall(r"\w+", promised))
    assert found["text"] == "ab "
    assert found["n_gen"] == len(found["token_ids"]) == 3
    assert found["gb_s"] == pytest.approx(10.0)
    assert found["pct_read_bw"] == pytest.approx(50.0)
    assert found["peak_memory_bytes"] is None
    assert GenerateResult.from_dict(found).to_dict() == found


def test_what_cannot_be_computed_is_null(
    capsys: pytest.CaptureFixture[str], scripted: Any, model: str
) -> None:
    scripted("abc")
    run = ["generate", model, "--prompt", "a", "--max-new-tokens", "1"]
    assert cli.main([*run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ("decode_tok_s", "step_us", "gb_s", "pct_read_bw"):
        assert found[name] is None
    assert cli.main(run) == 0
    assert "decode  –   – a token   –\n" in capsys.readouterr().err


def test_a_ceiling_that_cannot_be_measured_costs_no_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, scripted: Any, model: str
) -> None:
    def fails(_: Any) -> float:
        raise MinidecodeError("no room for it")

    monkeypatch.setattr("minidecode.bench.device.read_bandwidth", fails)
    scripted("abc")
    assert cli.main(["generate", model, "--prompt", "a", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["gb_s"]) == ("abc", pytest.approx(10.0))
    assert found["read_bw_gb_s"] is found["pct_read_bw"] is None


@pytest.mark.parametrize(("ceiling", "said"), [(1e-6, True), (9.99, True), (10.0, False)])
def test_more_than_the_memory_gives_is_explained(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    scripted: Any,
    model: str,
    ceiling: float,
    said: bool,
) -> None:
    monkeypatch.setattr("minidecode.bench.device.read_bandwidth", lambda _: ceiling)
    scripted("abc")
    assert cli.main(["generate", model, "--prompt", "a"]) == 0
    assert ("GB/s measured: a cache served part of it, or" in capsys.readouterr().err) == said


def test_a_stop_string_ends_the_run(
    capsys: pytest.CaptureFixture[str], scripted: Any, model: str
) -> None:
    decoder = scripted("one two. three")
    run = ["generate", model, "--prompt", "a", "--stop", "xyz", "--stop", ". ", "--json"]
    assert cli.main(run) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == "one two"
    assert found["stop_reason"] == "stop"
    assert found["n_gen"] == len("one two. ")
    assert decoder.last.n_gen == found["n_gen"]


def test_what_looked_like_a_stop_string_is_printed_in_the_end(
    capsys: pytest.CaptureFixture[str], scripted: Any, model: str
) -> None:
    scripted("one two.")
    assert cli.main(["generate", model, "--prompt", "a", "--stop", ".."]) == 0
    assert capsys.readouterr().out == "one two."


def test_a_character_cut_short_may_complete_a_stop_string(
    capsys: pytest.CaptureFixture[str], scripted: Any, tmp_path: Path
) -> None:
    tiny.build(tmp_path)
    decoder = scripted("")
    decoder.script = tiny_tokenizers.byte_level(tmp_path).encode("hi 😸").ids[:-1]
    run = ["generate", str(tmp_path), "--prompt", "a"]
    for stop, expected in (("!", "hi \ufffd"), (" \ufffd", "hi")):
        assert cli.main([*run, "--stop", stop]) == 0
        assert capsys.readouterr().out == expected


def test_the_options_reach_the_decoder(scripted: Any, tmp_path: Path) -> None:
    decoder = scripted("a")
    tiny_tokenizers.byte_level(tmp_path)
    tiny.build(tmp_path, write={"eos_token_id": 7})
    run = ["generate", str(tmp_path), "--prompt", "a"]
    options = ["--max-new-tokens", "9", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9"]
    options += ["--min-p", "0.1", "--repetition-penalty", "1.2", "--seed", "4"]
    assert cli.main([*run, *options]) == 0
    _, n, sampling, eos = decoder.asked
    assert n == 9
    assert sampling == minidecode.Sampling(0.5, 3, 0.9, 0.1, 1.2, 4)
    assert eos == {1, 7}
    assert cli.main([*run, "--ignore-eos"]) == 0
    assert decoder.asked[3] == frozenset()


def test_a_text_ends_as_its_family_does_where_no_file_says_how(
    monkeypatch: pytest.MonkeyPatch, scripted: Any, model: str
) -> None:
    monkeypatch.setattr("minidecode.text.Text.eos_token_ids", lambda _: frozenset())
    decoder = scripted("abc")
    for options, eos in (([], {2}), (["--ignore-eos"], set())):
        assert cli.main(["generate", model, "--prompt", "a", *options]) == 0
        assert decoder.asked[-1] == eos


# Prompts


def spelled(text: str) -> list[int]:
    return [1, *(0 if char == "\n" else ord(char) - 29 for char in text)]


def test_where_a_prompt_comes_from(
    monkeypatch: pytest.MonkeyPatch, scripted: Any, model: str, tmp_path: Path
) -> None:
    decoder = scripted("a")
    file = tmp_path / "prompt"
    file.write_bytes(b"from\nfile\n")
    assert cli.main(["generate", model, "--prompt-file", str(file)]) == 0
    assert decoder.asked[0] == spelled("from\nfile")
    for options in ([], ["--prompt", "-"], ["--prompt-file", "-"]):
        give_stdin(monkeypatch, b"from stdin\r\n")
        assert cli.main(["generate", model, *options]) == 0
        assert decoder.asked[0] == spelled("from stdin")
    assert cli.main(["generate", model, "--prompt", "as it is\n"]) == 0
    assert decoder.asked[0] == spelled("as it is\n")
    assert cli.main(["generate", model, "--prompt", ""]) == 0
    assert decoder.asked[0] == [1]


@pytest.mark.parametrize(
    ("content", "prompt"), [("a\n\n", "a\n"), ("a\r\n", "a"), ("a\r", "a\r"), ("\n", "")]
)
def test_one_newline_at_the_end_is_dropped(
    monkeypatch: pytest.MonkeyPatch, content: str, prompt: str
) -> None:
    give_stdin(monkeypatch, content.encode())
    assert generate._read_prompt(Namespace(prompt="-", prompt_file=None)) == prompt


def test_no_prompt_at_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    for at_terminal in (True, False):
        give_stdin(monkeypatch, b"")
        monkeypatch.setattr(sys.stdin, "isatty", lambda: at_terminal)  # noqa: B023
        assert cli.main(["generate", model]) == 2
        assert "--prompt" in one_line(capsys)


def test_a_prompt_that_is_not_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    give_stdin(monkeypatch, b"caf\xe9")
    assert cli.main(["generate", model]) == 2
    assert "UTF-8" in one_line(capsys)
    assert cli.main(["generate", model, "--prompt", "caf\udce9"]) == 2
    assert "UTF-8" in one_line(capsys)


def test_a_chat_goes_through_the_template(scripted: Any, tmp_path: Path) -> None:
    decoder = scripted("a")
    tiny.build(tmp_path, tokenizer=True)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    run = ["generate", str(tmp_path), "--chat", "--prompt", "hi", "--system", "be"]
    assert cli.main(run) == 0
    assert decoder.asked[0] == spelled("[system]be[user]hi")


def test_a_continuation_has_its_space_and_an_answer_has_not(
    capsys: pytest.CaptureFixture[str], scripted: Any, tmp_path: Path
) -> None:
    tiny.build(tmp_path)
    tokenizer = tiny_tokenizers.llama2(tmp_path, chat_template="{{ messages[0].content }}")
    decoder = scripted("")
    decoder.script = [tokenizer.token_to_id("▁a"), tokenizer.token_to_id("he")]
    assert cli.main(["generate", str(tmp_path), "--prompt", "D"]) == 0
    assert capsys.readouterr().out == " ahe"
    assert cli.main(["generate", str(tmp_path), "--chat", "--prompt", "D"]) == 0
    assert capsys.readouterr().out == "ahe"


# Interruption


def test_ctrl_c_keeps_what_was_generated(
    capsys: pytest.CaptureFixture[str], scripted: Any, model: str
) -> None:
    before = signal.getsignal(signal.SIGINT)
    scripted("abcdef", interrupt_after=3)
    assert cli.main(["generate", model, "--prompt", "a"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "abc"
    assert "tokens  3, then interrupted" in captured.err
    assert cli.main(["generate", model, "--prompt", "a", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["stop_reason"] == "interrupted"
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_the_first_token_ends_at_once(
    capsys: pytest.CaptureFixture[str], scripted: Any, model: str
) -> None:
    scripted("abcdef", interrupt_after=1)
    assert cli.main(["generate", model, "--prompt", "a"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_real_ctrl_c(model: str) -> None:
    run = subprocess_cli(
        *["generate", model, "--prompt", "a", "--ignore-eos", "--max-new-tokens", "100000"],
        *["--max-context", "256", "--temperature", "2"],
    )
    assert run.stdout is not None
    first = run.stdout.read(1)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert first
    assert "Traceback" not in err
    # A quick machine may have come to the context limit already.
    assert (run.returncode, "interrupted" in err) in ((130, True), (0, False))


def test_a_reader_that_has_enough(model: str) -> None:
    run = subprocess_cli(
        "generate", model, "--prompt", "a", "--ignore-eos", "--max-new-tokens", "200"
    )
    assert run.stdout is not None
    assert run.stderr is not None
    run.stdout.read(1)
    run.stdout.close()
    assert run.stderr.read() == ""
    assert run.wait(timeout=60) == 0


# Real runs


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_tiny_model_in_a_process_of_its_own(model: str, device: str) -> None:
    """The CPU needs no compiler: there, CUDA_HOME may be wrong."""
    run = subprocess_cli(
        *["generate", model, "--prompt", "hi", "--max-new-tokens", "8", "--ignore-eos", "--json"],
        *["--device", device],
        env={**os.environ, **({"CUDA_HOME": "/not/there"} if device == "cpu" else {})},
    )
    out, err = run.communicate(timeout=120)
    assert (run.returncode, err) == (0, "")
    found = json.loads(out)
    assert found["n_gen"] == 8
    assert found["stop_reason"] == "length"
    assert found["kernel"] == "torch" or (torch.cuda.is_available() and device == "auto")
    assert found["decode_tok_s"] > 0
    assert found["environment"]["torch"]


def generated(capsys: pytest.CaptureFixture[str], model: str, *options: str) -> dict[str, Any]:
    run = ["generate", model, "--prompt", "hi", "--device", "cpu", "--json", *options]
    assert cli.main(run) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_environment_has_the_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    run = ["generate", model, "--prompt", "a", "--max-new-tokens", "2"]
    for name, value, said, code, option in (
        ("MINIDECODE_KERNEL", "half2_blok", "did you mean half2_block", 2, "--kernel=torch"),
        ("MINIDECODE_DEVICE", "cuda:99", "cuda:99", 5, "--device=cpu"),
    ):
        monkeypatch.setenv(name, value)
        assert cli.main(run) == code
        assert said in one_line(capsys)
        run.append(option)
    assert cli.main(run) == 0  # what is asked for wins


def test_an_end_token_of_any_source_ends_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = tiny.build(tmp_path, tokenizer=True)
    n = ["--max-new-tokens", "12"]
    free = generated(capsys, str(tmp_path), "--ignore-eos", *n)["token_ids"]
    end = next(token for i, token in enumerate(free) if i > 2 and token not in free[:i])
    ids = [end, *sorted(set(range(3, tiny.VOCAB)) - set(free))[:3]]

    def write(file: str, eos: Any, key: str = "eos_token_id") -> None:
        path = made.directory / file
        raw = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**raw, key: eos}))

    for turn in range(4):
        one, two, three, own = ids[turn:] + ids[:turn]
        write("generation_config.json", [one, two])
        write("config.json", three)
        write("tokenizer_config.json", chr(own + 29), "eos_token")
        found = generated(capsys, str(tmp_path), *n)
        assert (found["stop_reason"], found["token_ids"]) == ("eos", free[: free.index(end)])


def test_code_beside_a_model_is_never_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    tiny.build(tmp_path / "m", tokenizer=True, write={"auto_map": names})
    path = tmp_path / "m" / "tokenizer_config.json"
    names["AutoTokenizer"] = ["evil.T", "evil.T"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": names}))
    (tmp_path / "m" / "evil.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')\n")
    assert generated(capsys, str(tmp_path / "m"), "--max-new-tokens", "2")["n_prompt"] == 3
    assert not (tmp_path / "touched").exists()


def test_seeds(capsys: pytest.CaptureFixture[str], model: str) -> None:
    def text(seed: int, temperature: str) -> str:
        options = ["--temperature", temperature, "--seed", str(seed), "--ignore-eos"]
        return str(generated(capsys, model, *options, "--max-new-tokens", "64")["text"])

    assert text(1, "1.5") == text(1, "1.5")
    assert text(1, "1.5") != text(2, "1.5")
    assert text(1, "0") == text(2, "0")


def test_the_context_limit(capsys: pytest.CaptureFixture[str], model: str) -> None:
    prompt = ["--max-context", "64", "--ignore-eos", "--max-new-tokens", "10", "--prompt"]
    found = generated(capsys, model, *prompt, "x" * 59)
    assert found["n_prompt"] == 60
    assert (found["n_gen"], found["stop_reason"]) == (4, "length")
    run = ["generate", model, "--device", "cpu", *prompt, "x" * 69]
    assert cli.main(run) == 1
    assert "70" in one_line(capsys)


def test_a_context_of_ten_million_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tiny.build(tmp_path, tokenizer=True, write={"max_position_embeddings": 10_000_000})
    assert generated(capsys, str(tmp_path), "--max-new-tokens", "2")["n_prompt"] == 3


def test_a_synthetic_model_speaks_in_ids(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, scripted: Any
) -> None:
    decoder = scripted("abc")
    assert cli.main(["generate", "synthetic:smollm2-135m", "--prompt", "hi"]) == 0
    assert decoder.asked[0] == [ord("h"), ord("i")]
    assert capsys.readouterr().out == "68 69 70"


ON_EVERY_DEVICE = [
    ["--device", "cpu"],
    *(
        pytest.param(["--device", "cuda", "--kernel", kernel], marks=pytest.mark.gpu)
        for kernel in ("fused", "half2_block", "cublas")
    ),
]


@pytest.mark.parametrize("where", ON_EVERY_DEVICE, ids=" ".join)
def test_the_example_says_what_the_reference_says(
    capsys: pytest.CaptureFixture[str], example_dir: Path, where: list[str]
) -> None:
    run = ["generate", str(example_dir), *where]
    assert cli.main([*run, "--prompt", PROMPT, "--max-new-tokens", "40"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ANSWER
    assert "then eos" in captured.err
    question = "Explain in two sentences why the sky is blue."
    assert cli.main([*run, "--chat", "--prompt", question, "--max-new-tokens", "40"]) == 0
    assert capsys.readouterr().out.startswith(
        "The sky is blue because of a process called Rayleigh scattering, where light encounters"
        " tiny molecules of air and is deflected by them."
    )


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    lines = capsys.readouterr().out
    assert f"torch                 {torch.__version__}\n" in lines
    assert cli.main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema_version"] == found["environment"]["schema_version"]
    assert found["environment"]["torch"] == torch.__version__
    assert found["cache"]


# Progress


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stderr = io.StringIO()
    stderr.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stderr


def test_progress_is_shown_after_a_while_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = terminal(monkeypatch)
    monkeypatch.setattr(progress, "DELAY_S", 0.3)
    with progress.Progress() as show:
        show(0.0, "loading [weights]")
        time.sleep(0.1)
        assert "loading" not in stderr.getvalue()
        time.sleep(0.5)
        show(0.25, "loading [weights]")
        time.sleep(0.3)
        assert "loading [weights]" in stderr.getvalue()
        assert "25 %" in stderr.getvalue()
        show(None, "compiling half2_block")
        time.sleep(0.3)
    assert "compiling half2_block" in stderr.getvalue()
    assert stderr.getvalue().endswith("\x1b[2K")  # the line is cleared


@pytest.mark.parametrize("why", ["quiet", "no colour", "no terminal"])
def test_no_progress(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    stderr = terminal(monkeypatch)
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    if why == "no colour":
        monkeypatch.setenv("NO_COLOR", "1")
    if why == "no terminal":
        stderr.isatty = lambda: False  # type: ignore[method-assign]
    with progress.Progress(quiet=why == "quiet") as show:
        show(0.5, "loading")
        time.sleep(0.2)
    assert stderr.getvalue() == ""


# Scripts


def test_run_without_a_prompt_says_how() -> None:
    done = subprocess.run(["bash", ROOT / "scripts/run.sh"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage: scripts/run.sh" in done.stderr


def test_scripts_can_be_started() -> None:
    for name in ("scripts/run.sh", "scripts/test.sh", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name
