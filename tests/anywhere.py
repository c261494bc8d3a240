"""That a kernel gives the same result wherever it is launched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch


def same_anywhere(
    launch: Callable[[], object],
    x: torch.Tensor,
    y: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    same: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal,
) -> None:
    """`launch` makes y of x: for each of `inputs` on a side stream and in a graph as without."""
    expected = []
    for one in inputs:
        x.copy_(one)
        launch()
        expected.append(y.clone())
    assert not same(expected[0], expected[1])

    def check(run: Callable[[], object]) -> None:
        for one, wanted in zip(inputs, expected, strict=True):
            x.copy_(one)
            y.fill_(math.nan)
            run()
            assert same(y, wanted)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # so that a launch on another stream would be early
        check(launch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    check(graph.replay)
