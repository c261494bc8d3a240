"""`bench`: llama-bench's names and columns, what is measured, and what is refused."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch

import minidecode
from minidecode import cli
from minidecode.bench import device, gate, throughput
from minidecode.bench import steps as timing
from minidecode.bench.throughput import Case
from minidecode.errors import MinidecodeError
from minidecode.plan.state import NON_FINITE, PENDING
from minidecode.records import Run

pytestmark = pytest.mark.usefixtures("quick_measuring")
HOSTILE = Path(__file__).parent / "fixtures" / "hostile" / "hostile.py"
LLAMA_BENCH = [
    "build_commit",
    "cpu_info",
    "gpu_info",
    "model_type",
    "model_size",
    "model_n_params",
    "n_prompt",
    "n_gen",
    "n_depth",
    "test_time",
    "avg_ns",
    "stddev_ns",
    "avg_ts",
    "stddev_ts",
    "samples_ns",
    "samples_ts",
]
OURS = [
    "kernel",
    "engine",
    "step_us",
    "bytes_per_token",
    "gb_s",
    "read_bw_gb_s",
    "pct_read_bw",
    "served_from_cache",
    "peak_memory_bytes",
    "schema_version",
    "environment",
]


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert cli.main(["bench", *arguments, "-o", "json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_every_field_under_its_name(capsys: pytest.CaptureFixture[str], tiny_model: str) -> None:
    for run in bench(capsys, "-m", tiny_model, "-p", "8", "-n", "4", "-r", "3"):
        assert set(LLAMA_BENCH + OURS) <= set(run)
        assert Run.from_dict(run).to_dict() == run
        assert run["environment"]["read_bw_gb_s"] == run["read_bw_gb_s"] == 20.0
        assert run["model"] == "little"
        assert run["model_type"] == "llama 0.08M F16"
        assert run["model_size"] == 2 * run["model_n_params"]
        assert (run["backend"], run["gpu_info"]) == ("CPU", "")
        assert run["peak_memory_bytes"] > 2**20


def test_the_numbers_of_a_test_follow_from_its_samples(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    (run,) = bench(capsys, "-m", tiny_model, "-p", "0", "-n", "6", "-d", "9", "-r", "4")
    ns, rates = run["samples_ns"], run["samples_ts"]
    assert len(ns) == len(rates) == 4
    assert rates == pytest.approx([6e9 / each for each in ns])
    assert run["avg_ns"] == pytest.approx(statistics.mean(ns))
    assert run["stddev_ns"] == pytest.approx(statistics.stdev(ns))
    assert run["avg_ts"] == pytest.approx(statistics.mean(rates))
    assert run["stddev_ts"] == pytest.approx(statistics.stdev(rates))
    assert run["step_us"] == pytest.approx(statistics.median(ns) / 6e3)
    assert run["gb_s"] == pytest.approx(run["bytes_per_token"] / run["step_us"] / 1e3)
    assert run["pct_read_bw"] == pytest.approx(5 * run["gb_s"])
    assert run["served_from_cache"] is (run["pct_read_bw"] > 100)


def test_bytes_are_those_of_the_positions_in_the_middle(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    config = minidecode.load(tiny_model).config
    runs = bench(capsys, "-m", tiny_model, "-p", "0", "-n", "5", "-d", "0,100", "-r", "1")
    kv = 2 * 2 * config.num_layers * config.kv_size
    # The third of five steps sees two tokens and its own, after the depth.
    expected = [config.weight_bytes() + rows * kv for rows in (3, 103)]
    assert [run["bytes_per_token"] for run in runs] == expected


def test_a_text_may_fill_the_context(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = str(tiny.build(tmp_path, max_position_embeddings=80).directory)
    (run,) = bench(capsys, "-m", directory, "-p", "0", "-n", "80", "-r", "1", "--device", "cpu")
    assert run["n_gen"] == 80
    assert cli.main(["bench", "-m", directory, "-p", "0", "-n", "81", "--device", "cpu"]) == 1
    assert "81 timed tokens after 0 do not fit the context limit of 80" in capsys.readouterr().err


def test_every_length_depth_and_kernel_in_one_call(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    kernel = f"{HOSTILE}:right"
    arguments = ["-p", "8,16", "-n", "2,4", "-d", "0,32", "-r", "1", "--kernel", f"torch,{kernel}"]
    runs = [Run.from_dict(run) for run in bench(capsys, "-m", tiny_model, *arguments)]
    names = ["pp8", "pp16", "tg2", "tg4"]
    found = [(run.test, run.kernel, run.engine) for run in runs]
    expected = []
    for depth in ("", " @ d32"):
        for name in names:
            expected.append((name + depth, "torch", "torch"))
            if name.startswith("tg"):  # prompts run on torch alone
                expected.append((name + depth, kernel, "composed"))
    assert found == expected
    assert all((run.step_us is None) == (run.n_prompt > 0) for run in runs)


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch, tiny_model: str) -> None:
    """A warm-up and r repeats, each from the depth on, over a cache that is not zeros.

    By this clock the warm-up takes 1 ms, the first repeat 2 ms and so on.
    """
    now = 0

    def take(ms: int) -> None:
        nonlocal now
        now += 1_000_000 * ms

    for module in (throughput, timing):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter_ns=lambda: now))
    decoder = minidecode.load(tiny_model)
    decoder.prepare(64)
    runner = decoder.runner()
    steps: list[tuple[int, int]] = []
    real = runner.step

    def step(n: int) -> None:
        steps.append((decoder.state.enqueued, n))
        take(len(steps))
        real(n)

    monkeypatch.setattr(runner, "step", step)
    environment = dataclasses.replace(device.environment("cpu"), commit="0123456789ab")
    run = throughput.run_case(
        decoder,
        decoder.kernel_set,
        Case(0, 5, 20),
        repeats=3,
        model="little",
        environment=environment,
    )
    assert steps == [(20, 5)] * 4
    assert run.samples_ns == (2e6, 3e6, 4e6)
    assert run.step_us == 600.0
    assert run.build_commit == "0123456789ab"
    assert timing.timed_steps(decoder, runner, depth=20, n=5) == 1_000.0
    cache = decoder.state.keys[:, :, :20].float()
    assert 0.9 < float(cache.std()) < 1.1
    assert not torch.equal(decoder.state.keys, decoder.state.values)
    assert bool((decoder.state.out[20:25] >= 0).all())

    starts: list[int] = []
    whole = decoder.prefill

    def prefill(ids: list[int], *, start: int = 0) -> torch.Tensor:
        starts.append(start)
        take(len(starts))
        assert ids == gate.random_ids(tiny.VOCAB, 7)
        return whole(ids, start=start)

    monkeypatch.setattr(decoder, "prefill", prefill)
    prompt = Case(7, 0, 20)
    run = throughput.run_case(
        decoder, decoder.kernel_set, prompt, repeats=2, model="", environment=environment
    )
    assert starts == [20] * 3
    assert run.samples_ns == (2e6, 3e6)


@pytest.mark.parametrize("value", [NON_FINITE, PENDING])
def test_a_step_without_a_token_is_an_error(tiny_model: str, value: int) -> None:
    decoder = minidecode.load(tiny_model)
    decoder.prepare(32)
    decoder.start(0, 0)
    runner = decoder.runner()
    runner.step(8)
    timing.check_tokens(decoder, runner, 0, 8)
    decoder.state.out[5] = value
    with pytest.raises(MinidecodeError, match="position 5"):
        timing.check_tokens(decoder, runner, 0, 8)


@pytest.mark.parametrize(
    "timed",
    [
        lambda *case: timing.timed_steps(*case, depth=3, n=4),
        lambda *case: throughput._text_ns(*case, 3, 4),
    ],
)
def test_steps_that_give_no_token_get_no_time(
    monkeypatch: pytest.MonkeyPatch, tiny_model: str, timed: Callable[..., float]
) -> None:
    decoder = minidecode.load(tiny_model)
    decoder.prepare(32)
    runner = decoder.runner()
    monkeypatch.setattr(runner, "step", lambda n: None)
    with pytest.raises(MinidecodeError, match="the step at position 3 gave no token"):
        timed(decoder, runner)


@pytest.mark.parametrize(
    ("parameters", "text"), [(134_515_008, "134.52M"), (10**9, "1.00B"), (8_030_000_000, "8.03B")]
)
def test_parameters_are_counted_as_llama_bench_does(parameters: int, text: str) -> None:
    assert throughput._count(parameters) == text


def test_the_environment_gives_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*options: str) -> tuple[str | None, str]:
        args = cli._parser(["bench"]).parse_args(["bench", *options])
        return args.kernel, args.device

    assert parsed() == (None, "auto")
    monkeypatch.setenv("MINIDECODE_KERNEL", "mine.cu")
    monkeypatch.setenv("MINIDECODE_DEVICE", "cuda:3")
    assert parsed() == ("mine.cu", "cuda:3")
    assert parsed("--kernel", "torch", "--device", "cpu") == ("torch", "cpu")


def test_markdown_has_llama_bench_s_columns(
    capsys: pytest.CaptureFixture[str], tiny_model: str
) -> None:
    assert cli.main(["bench", "-m", tiny_model, "-p", "8", "-n", "2", "-r", "2"]) == 0
    captured = capsys.readouterr()
    heads, _, prompt, text, *_ = (
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in captured.out.splitlines()
    )
    for column in ("model", "size", "params", "backend", "test", "t/s"):
        assert column in heads
    assert prompt[heads.index("test")] == "pp8"
    assert text[heads.index("test")] == "tg2"
    assert " ± " in text[heads.index("t/s")]
    assert "load" in captured.err


def test_other_formats(capsys: pytest.CaptureFixture[str], tiny_model: str) -> None:
    arguments = ["bench", "-m", tiny_model, "-p", "8", "-n", "2", "-r", "2", "-o"]
    assert cli.main([*arguments, "txt"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert cli.main([*arguments, "jsonl"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["n_prompt"] for line in lines] == [8, 0]
    assert cli.main([*arguments, "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["n_gen"] for row in rows] == ["0", "2"]


def test_a_synthetic_model(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from minidecode.models import synthetic

    little = {**synthetic.SHAPES["qwen3-0.6b"], "num_hidden_layers": 1, "vocab_size": 500}
    little |= {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    monkeypatch.setitem(synthetic.SHAPES, "little", little)
    (run,) = bench(capsys, "-m", "synthetic:little", "-p", "0", "-n", "2", "-r", "1")
    assert run["model"] == "synthetic:little"


def test_the_example(capsys: pytest.CaptureFixture[str], example_dir: Path) -> None:
    (run,) = bench(capsys, "-p", "0", "-n", "2", "-d", "16", "-r", "1")
    assert run["model_n_params"] == 134_515_008
    assert run["model"] == "example"
    assert run["bytes_per_token"] > 269_000_000
    assert run["avg_ts"] > 0


@pytest.mark.parametrize("kernel", ["zeros", "nan", "skips_last_row"])
def test_a_wrong_kernel_gets_no_numbers(
    capsys: pytest.CaptureFixture[str], tiny_model: str, kernel: str
) -> None:
    kernels = f"torch,{HOSTILE}:{kernel}"
    assert cli.main(["bench", "-m", tiny_model, "-p", "8", "-n", "2", "--kernel", kernels]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{kernel} is wrong" in captured.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["-p", "0", "-n", "0"], 2, "nothing to measure"),
        (["--kernel", "torch,torhc"], 2, "did you mean torch"),
        (["--kernel", ","], 2, "--kernel"),
        (["-n", "4", "-d", "0,5000"], 1, "context limit of 256"),
        (["-p", "257"], 1, "context limit of 256"),
        (["-m", "/no/such/model"], 1, "/no/such/model"),
    ],
)
def test_what_is_refused(
    capsys: pytest.CaptureFixture[str], tiny_model: str, arguments: list[str], code: int, said: str
) -> None:
    assert cli.main(["bench", "-m", tiny_model, *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["-p", "x"], ["-d", "-1"], ["-r", "0"], ["-o", "xml"]])
def test_a_command_line_that_cannot_be_parsed(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *arguments])
    assert end.value.code == 2


def test_above_the_ceiling_is_not_shown_without_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_model: str
) -> None:
    """As where a cache serves the weights: here memory is said to be slow."""
    monkeypatch.setattr(device, "read_bandwidth", lambda _: 1e-6)
    commands = {
        "bench": ["-p", "0", "-n", "2", "-r", "1"],
        "report": [],
        "ab": ["torch", "torch", "-n", "1", "--rounds", "12"],
    }
    for name, arguments in commands.items():
        assert cli.main([name, *arguments, "-m", tiny_model]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert re.search(r"\d{3,}\.\d\\?\*", out), name
        assert "a cache served part of it" in out, name
