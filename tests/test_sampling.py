"""Sampling against transformers' own processors, and draws against exact probabilities."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minidecode.errors import UsageError
from minidecode.sampling import Sampling, probabilities, sample

VOCAB = 97


def random_logits(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def mask(ids: list[int], vocab: int = VOCAB) -> torch.Tensor:
    seen = torch.zeros(vocab, dtype=torch.bool)
    seen[ids] = True
    return seen


def reference(logits: torch.Tensor, sampling: Sampling, seen_ids: list[int]) -> torch.Tensor:
    steps: list[Any] = []
    if sampling.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        steps.append(MinPLogitsWarper(sampling.min_p))
    scores = LogitsProcessorList(steps)(torch.tensor([seen_ids]), logits.clone()[None])
    return scores.softmax(dim=-1)[0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "penalty"),
    list(
        itertools.product(
            (0.5, 1.0, 1.5), (0, 1, 7, VOCAB, 1000), (1.0, 0.9, 0.3), (0.0, 0.1, 1.0), (1.0, 1.3)
        )
    ),
)
def test_the_distribution_is_that_of_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    sampling = Sampling(temperature, top_k, top_p, min_p, penalty)
    for seed in range(3):
        logits = random_logits(seed)
        seen_ids = [int(logits.argmax()), int(logits.argmin()), 3, 3]
        found = probabilities(logits, sampling, mask(seen_ids))
        torch.testing.assert_close(
            found, reference(logits, sampling, seen_ids), rtol=1e-5, atol=1e-7
        )


def test_draws_follow_the_probabilities() -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]))
    sampling = Sampling(temperature=1.0, top_p=0.8, seed=1)
    expected = torch.tensor([0.4, 0.3, 0.15]) / 0.85
    torch.testing.assert_close(probabilities(logits, sampling)[:3], expected)
    generator, n = sampling.generator(torch.device("cpu")), 10_000
    draws = torch.cat([sample(logits, sampling, generator) for _ in range(n)])
    counts = torch.bincount(draws, minlength=5).float()
    assert counts[3:].sum() == 0
    chi_squared = float(((counts[:3] - n * expected) ** 2 / (n * expected)).sum())
    assert chi_squared < 13.8  # p = 0.001 with 2 degrees of freedom


def test_the_same_seed_draws_the_same_and_others_differ() -> None:
    def tokens(seed: int) -> list[int]:
        sampling = Sampling(temperature=1.5, seed=seed)
        generator = sampling.generator(torch.device("cpu"))
        return [int(sample(random_logits(i), sampling, generator)) for i in range(64)]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_temperature_zero_is_argmax_for_every_seed() -> None:
    for seed in range(5):
        sampling = Sampling(top_k=5, top_p=0.5, min_p=0.1, seed=seed)
        assert sampling.greedy
        logits = random_logits(seed)
        token = sample(logits, sampling, sampling.generator(torch.device("cpu")))
        assert token.shape == (1,)
        assert token.dtype == torch.int64
        assert int(token) == int(logits.argmax())


def test_the_penalty_moves_a_seen_token_down_whatever_its_sign() -> None:
    sampling = Sampling(repetition_penalty=2.0)
    assert sampling.penalises
    assert int(sample(torch.tensor([4.0, 3.0, 1.0]), sampling, None, mask([0], 3))) == 1
    assert int(sample(torch.tensor([-1.0, -1.5, -4.0]), sampling, None, mask([0], 3))) == 1
    assert int(sample(torch.tensor([4.0, 3.0, 1.0]), sampling)) == 0  # nothing seen yet


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-6])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    logits = torch.tensor([1.0, 60000.0, -60000.0, 59990.0])
    found = probabilities(logits, Sampling(temperature=temperature, top_p=0.9))
    torch.testing.assert_close(found, torch.tensor([0.0, 1.0, 0.0, 0.0]))


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"temperature": -0.1}, "--temperature"),
        ({"temperature": math.nan}, "--temperature"),
        ({"temperature": math.inf}, "--temperature"),
        ({"top_k": -1}, "--top-k"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_p": 1e-46}, "--top-p"),  # 0 in FP32
        ({"top_p": 1.1}, "--top-p"),
        ({"top_p": math.nan}, "--top-p"),
        ({"min_p": -0.1}, "--min-p"),
        ({"min_p": math.nan}, "--min-p"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty"),
        ({"repetition_penalty": 1e-40}, "--repetition-penalty"),  # an infinite logit
        ({"repetition_penalty": math.inf}, "--repetition-penalty"),
        ({"seed": -1}, "--seed"),
        ({"seed": 2**63}, "--seed"),
    ],
)
def test_a_value_out_of_range_is_a_usage_error(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        Sampling(**values)
