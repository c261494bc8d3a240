"""Running a decoder in tests: token by token, and how far its logits are from a reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minidecode.decode import Decoder, Runner

IDS = (1, 40, 7, 93, 12, 12, 60, 3, 88, 25, 71, 9)


def relative_error(out: Any, expected: Any) -> float:
    """||out - expected|| / ||expected||; infinite when `out` is not finite."""
    out, expected = torch.as_tensor(out).double().cpu(), torch.as_tensor(expected).double().cpu()
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    return float((out - expected).norm() / expected.norm())


def token_by_token(
    decoder: Decoder, ids: Sequence[int], kernels: Any = None, first: int = 0
) -> torch.Tensor:
    """FP32 [len(ids), vocab] on the CPU: one decode step a token, from position `first`.

    What the cache holds below `first` stays.
    """
    decoder.prepare(first + len(ids))
    runner = decoder.runner(kernels)
    rows = []
    for position, token in enumerate(ids, first):
        rows.append(step(decoder, runner, token, position))
    return torch.stack(rows)


def step(decoder: Decoder, runner: Runner, token: int, position: int) -> torch.Tensor:
    """FP32 [vocab] on the CPU: the logits of one op-by-op step."""
    decoder.start(token, position)
    decoder.state.logits.fill_(float("nan"))
    runner.eager()
    return decoder.state.logits.cpu().clone()


def check_closing(decoder: Decoder, kept: int, n: int) -> None:
    """Closing generate() after `kept` of n tokens leaves right statistics and a usable decoder."""
    expected = list(decoder.generate(IDS, n))
    tokens = decoder.generate(IDS, n)
    assert [next(tokens) for _ in range(kept)] == expected[:kept]
    tokens.close()
    assert decoder.last is not None
    assert (decoder.last.stop_reason, decoder.last.n_gen) == ("stop", kept)
    hash_then = decoder.last.logits_hash
    assert list(decoder.generate(IDS, kept)) == expected[:kept]
    assert decoder.last.logits_hash == hash_then
    assert list(decoder.generate(IDS, n)) == expected
