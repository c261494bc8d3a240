"""What all tests share: the `gpu` marker, hypothesis' settings, the example model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    import tiny

# What a developer has set must not decide what is tested.
for _name in ("MINIDECODE_KERNEL", "MINIDECODE_DEVICE", "MINIDECODE_DEBUG"):
    os.environ.pop(_name, None)

# A busy machine is no failure, and CI must not depend on chance.
settings.register_profile("minidecode", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("minidecode")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def example_dir() -> Path:
    """The example model's directory; fetched once into the normal cache."""
    from minidecode import example
    from minidecode.errors import MinidecodeError

    try:
        return example.ensure()
    except MinidecodeError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no example model: {error}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tiny random Llama whose tokenizer has a token a character."""
    import tiny

    directory = tmp_path_factory.mktemp("models") / "little"
    tiny.build(directory, tokenizer=True)
    return str(directory)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tiny.Tiny]:
    """tiny.build in a folder of its own, once for equal arguments."""
    import tiny

    kept: dict[str, tiny.Tiny] = {}

    def make(**arguments: Any) -> tiny.Tiny:
        key = repr(sorted(arguments.items()))
        if key not in kept:
            kept[key] = tiny.build(tmp_path_factory.mktemp("tiny") / "model", **arguments)
        return kept[key]

    return make


@pytest.fixture(scope="session")
def small_weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose projections are about 1e-4: little of what they compute reaches the logits."""
    import tiny
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("models") / "small"
    tiny.build(directory, tokenizer=True)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "_proj" in name:
            tensors[name] = (tensor.float() / tensor.float().std() * 1e-4).half()
    save_file(tensors, file, metadata={"format": "pt"})
    return str(directory)


@pytest.fixture
def quick_measuring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A read ceiling of 20 GB/s that takes no second to measure, and one thread for torch.

    On a busy machine two threads spend their time waiting for each other.
    """
    import torch

    from minidecode.bench import device

    monkeypatch.setattr(device, "read_bandwidth", lambda _: 20.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
