"""scripts/peers.py: what it compares with computes the same, and llama-bench's JSON is read."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import minidecode
from minidecode.errors import MinidecodeError
from minidecode.records import Run

pytestmark = pytest.mark.usefixtures("quick_measuring")
SCRIPT = Path(__file__).parent.parent / "scripts" / "peers.py"

# One row as llama-bench (build 7c7d6ce5) writes it, with a prompt test before it.
ROW = {
    "build_commit": "7c7d6ce5",
    "build_number": 6500,
    "cpu_info": "AMD EPYC 9654",
    "gpu_info": "NVIDIA H200",
    "backends": "CUDA",
    "model_filename": "/models/llama-3.2-1b-f16.gguf",
    "model_type": "llama 1B F16",
    "model_size": 2471645632,
    "model_n_params": 1235814432,
    "n_batch": 2048,
    "n_threads": 48,
    "flash_attn": True,
    "n_prompt": 0,
    "n_gen": 128,
    "n_depth": 128,
    "test_time": "2026-11-30T04:00:00Z",
    "avg_ns": 164948453,
    "stddev_ns": 412345,
    "avg_ts": 776.0,
    "stddev_ts": 1.9,
    "samples_ns": [164948453, 164948453],
    "samples_ts": [776.0, 776.0],
}
PROMPT = {**ROW, "n_prompt": 512, "n_gen": 0}


@pytest.fixture(scope="module")
def peers() -> Any:
    spec = importlib.util.spec_from_file_location("peers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model_type", tiny.MODEL_TYPES)
def test_the_torch_step_computes_the_model(peers: Any, tmp_path: Path, model_type: str) -> None:
    windows = {"mistral": {"sliding_window": 6}}
    tiny.build(tmp_path / "m", model_type, **windows.get(model_type, {}))
    decoder = minidecode.load(tmp_path / "m")
    ids = list(range(3, 15))
    expected = decoder.prefill(ids, every=True)
    step = peers.TorchStep(decoder, 32)
    found = torch.cat(
        [step(torch.tensor([token]), torch.tensor([i])).float() for i, token in enumerate(ids)]
    )
    assert float((found - expected).norm() / expected.norm()) < 5e-3


def test_a_cuda_graph_of_the_torch_step_copies_only_token_and_position(
    peers: Any, tiny_model: str
) -> None:
    from torch._dynamo.backends.common import aot_autograd

    seen: dict[str, Any] = {}

    def look(module: Any, inputs: list[Any]) -> Any:
        # What torch.compile itself goes by to make a CUDA graph, or to go without.
        traced = torch._guards.TracingContext.get().fw_metadata
        seen["static"] = set(traced.static_input_indices)
        seen["written"] = {i for i, x in enumerate(traced.input_info) if x.mutates_data}
        seen["copied"] = [
            tensor.dtype for i, tensor in enumerate(inputs) if i not in seen["static"]
        ]
        return module.forward

    step = peers.TorchStep(minidecode.load(tiny_model), 32)
    compiled = torch.compile(step.__call__, backend=aot_autograd(fw_compiler=look), fullgraph=True)
    with torch.inference_mode():
        compiled(torch.zeros(1, dtype=torch.int64), torch.full((1,), 3))
    assert seen["copied"] == [torch.int64, torch.int64]
    assert len(seen["written"]) == 2
    assert seen["written"] <= seen["static"]


def test_transformers_beside_minidecode_and_llama_bench(
    peers: Any, capsys: pytest.CaptureFixture[str], tiny_model: str, tmp_path: Path
) -> None:
    file = tmp_path / "llama-bench.json"
    file.write_text(json.dumps([PROMPT, ROW]))
    arguments = ["-m", tiny_model, "-n", "3", "-d", "5", "-r", "2", "--peers", "transformers"]
    assert peers.main([*arguments, "--llama-bench", str(file), "-o", "json"]) == 0
    runs = [Run.from_dict(run) for run in json.loads(capsys.readouterr().out)]
    assert [run.kernel for run in runs] == ["torch", "transformers", "llama.cpp"]
    assert [run.test for run in runs] == ["tg3 @ d5", "tg3 @ d5", "tg128 @ d128"]
    ours, theirs, other = runs
    assert len(theirs.samples_ns) == 2
    assert theirs.bytes_per_token == ours.bytes_per_token
    assert ours.load_s is not None
    assert (theirs.load_s, theirs.build_s, theirs.peak_memory_bytes) == (None, None, None)
    assert theirs.avg_ts > 0
    assert (other.avg_ts, other.environment.gpu) == (776.0, "NVIDIA H200")
    assert other.model == "llama-3.2-1b-f16.gguf"


def test_a_peer_that_fails_leaves_the_others_their_lines(
    peers: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: str,
) -> None:
    def broken(*_: object) -> list[int]:
        raise RuntimeError("no such backend\nand much more")

    monkeypatch.setitem(peers.PEERS, "compile", broken)
    monkeypatch.setitem(peers.PEERS, "transformers", lambda *_: [1_000_000, 3_000_000])
    arguments = ["-m", tiny_model, "-n", "2", "-d", "4", "-r", "1"]
    assert peers.main([*arguments, "--peers", "compile,transformers"]) == 1
    captured = capsys.readouterr()
    assert "1333.33 ± 942.81" in captured.out
    assert captured.err == "peers.py: compile did not run: no such backend\n"


@pytest.mark.parametrize("lines", [False, True])
def test_llama_bench_writes_a_list_or_lines(peers: Any, tmp_path: Path, lines: bool) -> None:
    file = tmp_path / "bench"
    both = {**ROW, "n_prompt": 512}  # llama-bench -pg 512,128
    rows = [PROMPT, ROW, both, ROW]
    file.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
    found = peers.read_llama_bench(file)
    assert len(found) == 2
    assert (found[0].backend, found[0].model_size) == ("CUDA", 2471645632)


@pytest.mark.parametrize("text", ["", "x", "[1]", '[{"n_gen": 5}]', "{}"])
def test_what_is_no_llama_bench(peers: Any, tmp_path: Path, text: str) -> None:
    file = tmp_path / "bench.json"
    file.write_text(text)
    if not text:
        assert peers.read_llama_bench(file) == []
        return
    with pytest.raises(MinidecodeError, match=r"bench\.json: no JSON of llama-bench"):
        peers.read_llama_bench(file)


def test_what_is_refused(peers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["--peers", "nonsense"]) == 2
    assert "no peer 'nonsense'" in capsys.readouterr().err
    assert peers.main(["--llama-bench", "/no/such/file"]) == 1
    assert "/no/such/file" in capsys.readouterr().err
