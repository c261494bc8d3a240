"""`gemv` and half2_stream on a GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from minidecode import cli
from minidecode.bench import gemv as bench
from minidecode.bench import occupancy
from minidecode.cli.gemv import _model_shapes
from minidecode.kernels import registry
from minidecode.kernels.check import check
from minidecode.records import GemvReport

pytestmark = pytest.mark.gpu

MODELS = ("smollm2-135m", "llama-3.2-1b", "llama-3.2-3b", "qwen2.5-7b", "llama-3.1-8b")


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> GemvReport:
    assert cli.main(["gemv", "--device", "cuda", "-q", "-o", "json", *arguments]) == 0
    return GemvReport.from_dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("model", MODELS)
def test_half2_stream_is_right_at_the_shapes_of_models(model: str) -> None:
    gemv = registry.gemvs()["half2_stream"]
    found = check(gemv, "cuda", shapes=sorted(_model_shapes(f"synthetic:{model}"), key=math.prod))
    assert found.passed, found.summary()


def test_every_column_is_filled(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "--n", "1024,4096", "--kernel", "half2_stream,cublas,half2_block")
    assert len(found.rows) == 6
    assert found.read_bw_gb_s is not None
    for row in found.rows:
        assert row.reason is None
        assert row.median_us is not None
        assert row.read_us is not None
        assert row.pct_of_read is not None
        assert row.rel_err is not None
        assert row.rel_err < 1e-3
        assert row.vs_cublas is not None
        assert row.occupancy is not None
        assert 0 < row.occupancy <= 1
        assert row.gb_s is not None
        if row.kernel == "cublas":
            assert row.vs_cublas == 1.0


def test_what_a_cache_served_is_marked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy of a weight that stays in L2, timed as if it were many."""
    monkeypatch.setattr(bench, "_copies", lambda problem, device: (1, True))
    asked = ["gemv", "--device", "cuda", "-q", "--n", "4096", "--kernel", "half2_stream"]
    assert cli.main([*asked, "-o", "json"]) == 0
    (row,) = GemvReport.from_dict(json.loads(capsys.readouterr().out)).rows
    assert row.served_from_cache
    assert cli.main([*asked, "-o", "md"]) == 0
    assert "cache: faster than memory can be read" in capsys.readouterr().out


def test_cublas_is_timed_for_the_ratio_though_it_is_not_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = report(capsys, "--n", "1024", "--kernel", "warp_row", "--dtype", "both")
    assert [(row.kernel, row.dtype) for row in found.rows] == [
        ("warp_row", "fp32"),
        ("warp_row", "fp16"),
    ]
    assert all(row.vs_cublas is not None for row in found.rows)


def test_all_kernels_at_one_size(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "--n", "1024", "--dtype", "fp32")
    names = {row.kernel for row in found.rows}
    assert {"naive", "column_atomic", "shared_tree", "warp_row", "cublas", "torch"} <= names
    times = {row.kernel: row.median_us for row in found.rows}
    assert times["column_atomic"] is not None
    assert times["warp_row"] is not None
    assert times["column_atomic"] > times["warp_row"]


def test_occupancy_is_what_cuda_computes() -> None:
    """half2_block: 256 threads and few registers fill a multiprocessor."""
    gemv = registry.gemvs()["half2_block"]
    device = torch.device("cuda", torch.cuda.current_device())
    w = torch.randn(2048, 2048, device=device).half()
    call = gemv.bind(w.new_empty(2048), w, w[0].clone())
    sm = occupancy.multiprocessor(device)
    properties = torch.cuda.get_device_properties(device)
    assert sm is not None
    assert sm.threads == properties.max_threads_per_multi_processor
    assert sm.registers == properties.regs_per_multiprocessor
    (launch,) = occupancy._profiled(call, device) or occupancy._profiled(call, device)
    assert "half2_block" in launch.name
    assert launch.threads == 256
    assert 16 <= launch.registers <= 64
    found = occupancy.of_call(call, device)
    assert found == occupancy.theoretical(launch, sm)
    assert found >= 0.5


def test_a_wrong_kernel_has_no_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    zeros = Path(__file__).parent / "fixtures" / "hostile" / "zeros.cu"
    code = cli.main(["gemv", "--device", "cuda", "--n", "1024", "--kernel", str(zeros)])
    captured = capsys.readouterr()
    assert code == 3
    assert captured.out == ""
    assert "zeros.cu is wrong" in captured.err
