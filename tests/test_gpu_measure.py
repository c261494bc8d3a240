"""bench, report and ab on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import minidecode
from minidecode import cli
from minidecode.bench import ab, gate
from minidecode.cli import measure
from minidecode.cli.progress import Progress
from minidecode.decode import STEPS_PER_GRAPH
from minidecode.records import NO_DIFFERENCE, SLOWER, ABResult, LayerReport, Run

pytestmark = pytest.mark.gpu

FIXTURES = Path(__file__).parent / "fixtures"
SMALL = "synthetic:smollm2-135m"
MEDIUM = "synthetic:llama-3.2-1b"


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> LayerReport:
    assert cli.main(["report", "-q", *arguments, "--json", "-"]) == 0
    return LayerReport.from_dict(json.loads(capsys.readouterr().out))


def test_ten_runs_of_a_kernel_against_itself() -> None:
    decoder = minidecode.load(SMALL, device="cuda")
    environment = measure.environment(decoder, Progress(quiet=True))
    for kernels in [decoder.kernel_set] * 10:
        result = ab.run(
            decoder,
            (kernels.name, kernels),
            (kernels.name, kernels),
            gate.random_ids(decoder.config.vocab_size),
            n=32,
            depth=128,
            rounds=20,
            model=SMALL,
            command="",
            environment=environment,
        )
        assert result.verdict == NO_DIFFERENCE, result.sentence
        assert result.ratio_low <= 1.0 <= result.ratio_high
        assert 0.99 < result.ratio < 1.01


@pytest.mark.parametrize("kernel", ["fused", "cublas", "half2_block"])
@pytest.mark.parametrize(("model", "most_pct"), [(SMALL, 8.0), (MEDIUM, 4.0)])
def test_the_ops_add_up_to_the_step(
    capsys: pytest.CaptureFixture[str], model: str, most_pct: float, kernel: str
) -> None:
    found = report(capsys, "-m", model, "--kernel", kernel)
    recorded = found.recorded_step_us
    assert recorded is not None
    launched = sum(len(row.kernels) for row in found.rows)
    # The ops add up to the step that they were recorded in. That is longer than the step itself:
    # on an H200 by 0.3 us a kernel for half2_block, beyond the limit at 1B.
    assert abs(recorded - found.sum_us) < most_pct / 100 * found.step_us
    assert recorded - found.step_us < 0.4 * launched
    assert found.unexplained_us < 0.1 * launched
    if (model, kernel) != (MEDIUM, "half2_block"):
        assert abs(found.unexplained_pct) < most_pct
    assert found.samples > 5 * STEPS_PER_GRAPH
    assert found.method == "kernel records of graph replays"
    for row in found.rows:
        assert row.kernels, row.name
        assert row.duration_us is not None
        assert row.alone_us is not None
        assert 0 < row.alone_us < 1e4
    linears = [row for row in found.rows if row.kind in ("qkv", "o", "gate_up", "down", "head")]
    assert len(linears) == 4 * (30 if model == SMALL else 16) + 1
    # Alone and cold nothing is faster than memory, but for what little an eviction leaves behind.
    ceiling = found.read_bw_gb_s or 0.0
    for row in linears:
        assert row.bytes / ((row.alone_us or 0.0) * 1e3) < 1.1 * ceiling, row.name


@pytest.mark.parametrize("depth", [0, 3, 509, 4096])
def test_a_report_at_any_depth(capsys: pytest.CaptureFixture[str], depth: int) -> None:
    found = report(capsys, "-m", SMALL, "-d", str(depth))
    assert abs(found.unexplained_pct) < 10
    attention = [row.bytes for row in found.rows if row.kind == "attention"]
    assert attention == [(depth + 1) * 2 * 2 * 3 * 64] * 30


def test_a_slow_kernel_in_down_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    right = f"{FIXTURES / 'hostile' / 'hostile.py'}:right"
    slow = f"{FIXTURES / 'user_kernels.py'}:half_as_fast"
    arguments = ["-m", MEDIUM, "--only", "down_proj"]
    found = report(capsys, *arguments, "--kernel", right, "--vs", slow)
    kinds = {total.name: total for total in found.by_kind}
    delta = {name: total.delta_us or 0.0 for name, total in kinds.items()}
    assert max(delta, key=lambda name: delta[name]) == "down"
    # The second time the weights may come from the L2 cache.
    assert 1.3 < (kinds["down"].vs_us or 0.0) / kinds["down"].us < 2.2
    assert found.vs_step_us is not None
    assert delta["down"] == pytest.approx(found.vs_step_us - found.step_us, rel=0.1)

    assert cli.main(["ab", right, slow, *arguments, "-q", "--json", "-"]) == 0
    result = ABResult.from_dict(json.loads(capsys.readouterr().out))
    assert result.verdict == SLOWER
    assert result.ratio == pytest.approx(found.step_us / found.vs_step_us, rel=0.02)


def test_against_another_engine_all_of_its_step_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = report(capsys, "-m", SMALL, "--kernel", "fused", "--vs", "cublas")
    assert found.vs_step_us is not None
    assert all(row.vs_us for row in found.rows)
    total = sum(row.vs_us or 0.0 for row in found.rows)
    assert total == pytest.approx(found.vs_step_us, rel=0.08)


@pytest.mark.parametrize("kernel", ["zeros", "nan", "skips_last_row", "wrong_after_ten"])
@pytest.mark.parametrize("command", ["ab", "bench", "generate", "report"])
def test_a_wrong_kernel_gets_no_numbers(
    capsys: pytest.CaptureFixture[str], small_weights: str, command: str, kernel: str
) -> None:
    file = str(FIXTURES / "hostile" / f"{kernel}.cu")
    arguments = ["fused", file, "--only", "down"] if command == "ab" else ["--kernel", file]
    if command == "bench":
        arguments += ["-p", "16", "-n", "16"]
    model = ["--prompt", "hi", small_weights] if command == "generate" else ["-m", small_weights]
    assert cli.main([command, *arguments, *model, "-q"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "is wrong" in captured.err


def test_bench_tells_device_time_and_wall_clock(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["-p", "64", "-n", "64", "-d", "0,128", "-r", "3", "--kernel", "fused,half2_block"]
    assert cli.main(["bench", "-m", SMALL, "-q", *arguments, "-o", "json"]) == 0
    runs = [Run.from_dict(run) for run in json.loads(capsys.readouterr().out)]
    assert [(run.test, run.kernel) for run in runs] == [
        (test + depth, kernel)
        for depth in ("", " @ d128")
        for test, kernel in (("pp64", "torch"), ("tg64", "fused"), ("tg64", "half2_block"))
    ]
    for run in runs:
        assert run.backend == "CUDA"
        assert run.gpu_info
        assert (run.peak_memory_bytes or 0) > run.model_size
        if run.n_gen:
            assert run.step_us is not None
            # Device time and wall clock of the same loop, but for the ends of the latter.
            assert 0.9 < run.step_us * run.n_gen * 1e3 / run.avg_ns < 1.05
            assert 0 < (run.pct_read_bw or 0.0) <= 100


def test_generate_loses_little_beside_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    """The first replay of a graph not yet on the GPU cost a text of 128 tokens 7 to 9 %."""
    asked = ["--prompt", "a", "--max-new-tokens", "128", "--ignore-eos", "--json", "-q"]
    assert cli.main(["generate", SMALL, *asked]) == 0
    generated = json.loads(capsys.readouterr().out)
    assert cli.main(["bench", "-m", SMALL, "-q", "-p", "0", "-n", "128", "-o", "json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert generated["step_us"] < 1.03 * run["step_us"]
