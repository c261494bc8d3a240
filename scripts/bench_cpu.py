"""CPU decoding against transformers' own greedy generate() in FP16, measured in turn in one run.

    PYTHONPATH=. python scripts/bench_cpu.py [--threads 2] [--tokens 48] [--rounds 14]

Both continue the same prompt from the same weights, end tokens ignored; a rate is that of the
tokens after the first, by wall clock. The rounds alternate which of the two goes first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import minidecode
from minidecode import checkpoint, cli
from minidecode.bench import stats
from minidecode.cli import options
from minidecode.errors import UsageError

PROMPT = "The capital of France is"

# New tokens to seconds from the first to the last of them.
Arm = Callable[[int], float]


class _Clock:
    """A streamer: when each piece of generate()'s output came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing: the last token has been put."""


def ours(directory: Path, ids: list[int], kernel: str | None) -> Arm:
    decoder = minidecode.load(directory, device="cpu", kernel=kernel)

    def run(n: int) -> float:
        times = [time.perf_counter() for _ in decoder.generate(ids, n)]
        return times[-1] - times[0]

    return run


def theirs(directory: Path, ids: list[int]) -> Arm:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float16).eval()
    prompt = torch.tensor([ids])

    def run(n: int) -> float:
        clock = _Clock()
        with torch.inference_mode():
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=n,
                min_new_tokens=n,
                do_sample=False,
                pad_token_id=0,
                streamer=clock,
            )
        # The first is the prompt.
        return clock.times[-1] - clock.times[1]

    return run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default="example")
    parser.add_argument("--kernel", default=None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=14)
    args = parser.parse_args(arguments)
    if args.rounds < stats.MIN_PAIRS:
        parser.error(f"--rounds {args.rounds}: an interval takes at least {stats.MIN_PAIRS}")
    if args.tokens < 2:
        parser.error(f"--tokens {args.tokens}: the first has no time of its own")
    return cli.guarded("bench_cpu.py", lambda: compare(args))


def compare(args: argparse.Namespace) -> int:
    """Measures and prints; UsageError for a model without files, which transformers needs."""
    from minidecode.text import Text

    if args.model.startswith(options.SYNTHETIC):
        raise UsageError(f"{args.model} has no files that transformers could read")
    torch.set_num_threads(args.threads)

    directory = checkpoint.resolve_model(args.model)
    ids = Text(directory).encode(PROMPT)
    arms = {
        "transformers": theirs(directory, ids),
        "minidecode": ours(directory, ids, args.kernel),
    }
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for run in arms.values():
        run(4)  # warm
    for i in range(args.rounds):
        for name in names if i % 2 == 0 else names[::-1]:
            seconds[name].append(arms[name](args.tokens))
    steps = args.tokens - 1
    print(f"{args.model}, {args.threads} threads, {args.tokens} tokens, {args.rounds} rounds")
    for name in names:
        each = sorted(steps / s for s in seconds[name])
        print(
            f"{name:13} {stats.median(each):7.2f} tok/s   ({each[0]:.2f} to {each[-1]:.2f}), "
            f"{1e3 * stats.median(seconds[name]) / steps:.2f} ms a token"
        )
    ratio = stats.paired_ratio(seconds["transformers"], seconds["minidecode"])
    print(f"ratio         {ratio.value:7.2f}x        ({ratio.low:.2f} to {ratio.high:.2f}, 95 %)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
