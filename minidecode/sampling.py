"""From logits to a token: the plain torch path.

The order is that of transformers: repetition penalty, temperature, top-k, top-p, min-p, then one
draw from what is left. (llama.cpp applies the temperature last; the two differ once a temperature
other than 1 meets top-p or min-p.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minidecode.errors import UsageError

if TYPE_CHECKING:
    import torch

# FP32 has no reciprocal of much less. A temperature below it gives what this one gives.
_SMALLEST = 1e-30


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. The defaults are greedy decoding.

    temperature: 0 takes the most probable token, whatever top_k, top_p, min_p and seed are.
    top_k: only the k most probable tokens; 0 is all. On a GPU those as probable as the last of
        them stay, too.
    top_p: only the most probable tokens whose probabilities reach p together; 1 is all.
    min_p: only tokens at least p times as probable as the most probable one; 0 is all.
    repetition_penalty: divides positive and multiplies negative logits of tokens seen before; 1
        is off. Applies to greedy decoding too.
    seed: of the random numbers; the same seed gives the same tokens on the same device.

    Raises UsageError for a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        def need(ok: bool, flag: str, value: float, what: str) -> None:
            if not ok:
                raise UsageError(f"{flag} must be {what}, not {value}")

        finite = math.isfinite
        need(
            finite(self.temperature) and self.temperature >= 0,
            "--temperature",
            self.temperature,
            "finite and at least 0",
        )
        need(self.top_k >= 0, "--top-k", self.top_k, "at least 0")
        need(_SMALLEST <= self.top_p <= 1, "--top-p", self.top_p, f"from {_SMALLEST} to 1")
        need(0 <= self.min_p <= 1, "--min-p", self.min_p, "from 0 to 1")
        need(
            _SMALLEST <= self.repetition_penalty <= 1 / _SMALLEST,
            "--repetition-penalty",
            self.repetition_penalty,
            f"from {_SMALLEST} to {1 / _SMALLEST}",
        )
        need(0 <= self.seed < 2**63, "--seed", self.seed, "from 0 to 2^63 - 1")

    @property
    def greedy(self) -> bool:
        """Whether no random number is needed."""
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """Whether the tokens seen before matter."""
        return self.repetition_penalty != 1.0

    def generator(self, device: torch.device) -> torch.Generator:
        """A source of random numbers on `device` that starts from the seed."""
        import torch

        return torch.Generator(device).manual_seed(self.seed)


def penalised(logits: torch.Tensor, penalty: float, seen: torch.Tensor) -> torch.Tensor:
    """FP32 logits [vocab] with those of `seen` (bool [vocab]) made less probable by `penalty`."""
    import torch

    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def probabilities(
    logits: torch.Tensor, sampling: Sampling, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """FP32 [vocab]: the distribution that `sample` draws from, for a temperature above 0.

    logits: FP32 [vocab], finite. seen: bool [vocab], the tokens that the repetition penalty
    applies to. Nothing here waits for the device.
    """
    import torch

    if sampling.penalises and seen is not None:
        logits = penalised(logits, sampling.repetition_penalty, seen)
    # The largest becomes 0, so that a tiny temperature cannot overflow.
    scores = (logits - logits.max()) / max(sampling.temperature, _SMALLEST)
    # Relative to the most probable token, whose score is 0 and which nothing removes.
    floor = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    vocab = scores.numel()
    if sampling.top_k in (0, vocab) and sampling.top_p == 1.0:
        return scores.masked_fill(scores < floor, -math.inf).softmax(dim=-1)
    kept = min(sampling.top_k, vocab) if sampling.top_k else vocab
    best, ids = torch.topk(scores, kept)  # sorted, so that a nucleus is a beginning of it
    if sampling.top_p < 1.0:
        mass = best.softmax(dim=-1)
        best = best.masked_fill(mass.cumsum(dim=-1) - mass >= sampling.top_p, -math.inf)
    best = best.masked_fill(best < floor, -math.inf)
    return torch.zeros_like(scores).scatter(0, ids, best.softmax(dim=-1))


def sample(
    logits: torch.Tensor,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """The chosen token, INT64 [1] on the logits' device; shapes as in `probabilities`.

    `generator` (of the same device) is not used by greedy decoding.
    """
    import torch

    if sampling.greedy:
        if sampling.penalises and seen is not None:
            logits = penalised(logits, sampling.repetition_penalty, seen)
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial(probabilities(logits, sampling, seen), 1, generator=generator)
