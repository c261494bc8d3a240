"""The environment record and the measured read ceiling."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

import minidecode
from minidecode.bench import device, timer
from minidecode.errors import MinidecodeError
from minidecode.records import Environment, GpuState


def test_environment_describes_this_machine() -> None:
    env = device.environment("cpu")
    assert env.minidecode == minidecode.__version__
    assert env.torch == torch.__version__
    assert env.device == "cpu"
    assert env.gpu is None
    assert env.state == GpuState()
    assert env.cpu
    assert env.cpu_cores
    assert env.cpu_cores >= 1
    assert env.memory_bytes
    assert env.memory_bytes > 1 << 28
    assert env.safetensors
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", env.time)
    assert Environment.from_dict(json.loads(json.dumps(env.to_dict()))) == env


def test_environment_names_the_commit_of_a_checkout() -> None:
    root = Path(minidecode.__file__).resolve().parent.parent
    commit = device.environment("cpu").commit
    if not (root / ".git").exists():
        assert commit is None
        return
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert commit is not None
    assert commit.removesuffix("-dirty") == head[:12]


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of 16 MB whatever the machine has, so that the ceiling takes little to measure."""
    monkeypatch.setattr(timer, "_cpu_cache_bytes", lambda: 16 << 20)
    monkeypatch.setattr(device, "_ceilings", {})
    monkeypatch.setattr(device, "_reads", {})


@pytest.mark.usefixtures("small_buffers")
def test_read_bandwidth_of_the_cpu_is_plausible_and_measured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speed = device.read_bandwidth("cpu")
    assert 0.5 < speed < 5_000
    monkeypatch.setattr(timer, "time_callable", None)
    assert device.read_bandwidth("cpu") == speed
    assert device.environment("cpu").read_bw_gb_s == speed


@pytest.mark.usefixtures("small_buffers")
def test_read_time_grows_with_the_bytes() -> None:
    small, large = device.read_us("cpu", 1 << 20), device.read_us("cpu", (16 << 20) + 3)
    assert 2 * small < large < 200 * small
    assert device.read_us("cpu", 1 << 20) == small


def test_a_buffer_that_caches_could_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_memory", lambda device: 64 << 20)
    monkeypatch.setattr(timer, "_cpu_cache_bytes", lambda: 16 << 20)
    with pytest.raises(MinidecodeError, match=r"only 16 MB of memory .* bandwidth of cpu"):
        device._room(torch.device("cpu"), 8 << 30)


def test_readers_really_read_every_byte() -> None:
    class Spy(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.Tensor.sum:
                self.seen = args[0].numel() * args[0].element_size()
            return func(*args, **(kwargs or {}))

    buffer = device._filled_buffer(1 << 20, torch.device("cpu"))
    assert torch.isfinite(buffer.view(torch.float32)).all()
    assert len(buffer.unique()) > buffer.numel() * 0.99
    for read in device._readers(buffer, 4096):
        with Spy() as spy:
            read()
        assert spy.seen == 4096


def test_throttling_in_words() -> None:
    assert device._throttle_words(0x1) == ""
    assert device._throttle_words(0x24) == "power cap, software thermal"


@pytest.mark.gpu
def test_gpu_environment_and_ceiling() -> None:
    env = device.environment("cuda")
    assert env.device.startswith("cuda:")
    assert env.gpu == torch.cuda.get_device_name()
    assert env.sm_count
    assert env.l2_bytes
    speed = device.read_bandwidth("cuda")
    assert 50 < speed < 20_000
    # A read of as many bytes as the ceiling's own takes as long, a small one is slower by the byte.
    n_bytes = 1 << 20
    assert device.read_us("cuda", n_bytes) > n_bytes / speed / 1e3
    assert device.environment("cuda").read_bw_gb_s == speed
