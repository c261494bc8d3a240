"""Everything a decode step reads and writes besides the weights: static buffers and the KV cache.

All kernel sets of a decoder work on one State, so swapping kernels moves no data. Addresses never
change while a State lives: CUDA graphs are captured over them.
"""

from __future__ import annotations

import ctypes

import torch

from minidecode.config import ModelConfig
from minidecode.kernels.step import SamplingParameters
from minidecode.sampling import Sampling

# Values of `State.out` that are no token.
PENDING = -1
NON_FINITE = -2

MAX_EOS = 16


class State:
    """Buffers of one sequence that may grow to `capacity` tokens.

    The step at position p reads `x`, the embedding of token p, appends to the cache at p, writes
    `logits`, picks token p + 1, stores it in `out[p]` and leaves its embedding in `x` and p + 1 in
    `position`. Shapes: keys, values FP16 [layers, kv_heads, capacity, head_dim]; rope FP32
    [capacity, head_dim / 2, 2] (cos, sin); logits FP32 [vocab]; the rest as named in __init__.
    `out` lives in pinned host memory on CUDA, so that the host reads tokens without a copy.
    """

    def __init__(self, config: ModelConfig, device: torch.device, capacity: int) -> None:
        def half(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float16, device=device)

        def ints(n: int) -> torch.Tensor:
            return torch.zeros(n, dtype=torch.int32, device=device)

        c = config
        self.config, self.device, self.capacity = config, device, capacity
        cache = (c.num_layers, c.num_kv_heads, capacity, c.head_dim)
        self.keys, self.values = half(*cache), half(*cache)
        self.rope = rope_table(config, device, capacity)
        self.x = half(c.hidden_size)
        self.normed = half(c.hidden_size)
        self.qkv = half(c.q_size + 2 * c.kv_size)
        self.attention = half(c.q_size)
        self.delta = half(c.hidden_size)
        self.gate_up = half(2 * c.intermediate_size)
        self.activation = half(c.intermediate_size)
        self.head_out = half(c.vocab_size)
        self.logits = torch.zeros(c.vocab_size, dtype=torch.float32, device=device)
        # Greatest (logit, token) so far as one sortable integer; see minidecode/best.cuh.
        self.best = torch.zeros(1, dtype=torch.int64, device=device)
        self.position, self.token, self.stopped = ints(1), ints(1), ints(1)
        self.eos = torch.full((MAX_EOS,), PENDING, dtype=torch.int32, device=device)
        self._eos_ids: tuple[int, ...] = ()  # the same for the host
        # Tokens that the repetition penalty applies to.
        self.seen = torch.zeros(c.vocab_size, dtype=torch.bool, device=device)
        # SamplingParameters for the kernel: a captured graph serves every request.
        self.sampling_parameters = torch.zeros(
            ctypes.sizeof(SamplingParameters), dtype=torch.uint8, device=device
        )
        self.set_sampling(Sampling())
        self.out = torch.full(
            (capacity,), PENDING, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        # The host's own count of enqueued steps: it never asks the device for the position.
        self.enqueued = 0

    def seek(self, position: int) -> None:
        """Make `position` the next to be processed; forget the tokens picked from there on."""
        if self.device.type == "cuda":
            # Steps that still run would write into `out` after it was cleared.
            torch.cuda.synchronize(self.device)
        self.position.fill_(position)
        self.stopped.zero_()
        self.best.zero_()
        self.out[position:] = PENDING
        self.enqueued = position

    def take(self, token: int, embedding: torch.Tensor, position: int) -> None:
        """Make `token`, with its embedding FP16 [hidden], the input of the step at `position`."""
        self.token.fill_(token)
        self.x.copy_(embedding)
        self.seen[token] = True
        self.position.fill_(position)
        if token in self._eos_ids:
            self.stopped.fill_(1)

    def snapshot(self) -> tuple[torch.Tensor, ...]:
        """What one step changes besides its scratch buffers; for `restore`."""
        return tuple(t.clone() for t in self._advancing())

    def restore(self, saved: tuple[torch.Tensor, ...]) -> None:
        """Back to a `snapshot`; the tokens picked since are forgotten."""
        for tensor, value in zip(self._advancing(), saved, strict=True):
            tensor.copy_(value)
        self.out[self.enqueued :] = PENDING

    def _advancing(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.position, self.token, self.stopped, self.best, self.seen

    def set_eos(self, ids: tuple[int, ...]) -> None:
        """Tokens after which the device stops advancing; the first MAX_EOS of them."""
        kept = self._eos_ids = tuple(ids)[:MAX_EOS]
        padded = kept + (PENDING,) * (MAX_EOS - len(kept))
        self.eos.copy_(torch.tensor(padded, dtype=torch.int32))

    def set_sampling(self, sampling: Sampling) -> None:
        """How `next_token` picks; starts its random numbers from the seed."""
        self.sampling = sampling
        self.generator = sampling.generator(self.device)
        self.sampling_parameters.copy_(sampling_bytes(sampling))


def sampling_bytes(sampling: Sampling) -> torch.Tensor:
    """The kernel's SamplingParameters, UINT8 on the CPU."""
    packed = SamplingParameters(
        sampling.seed,
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        min(sampling.top_k, 2**31 - 1),
    )
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def rope_table(config: ModelConfig, device: torch.device, capacity: int) -> torch.Tensor:
    """cos and sin of position * inv_freq, FP32 [capacity, head_dim / 2, 2].

    The angle is taken in FP64: in FP32 it is off by 1e-4 radians from position 2048 on.
    """
    inv_freq = torch.from_numpy(config.rope.inv_freq(config.head_dim)).to(device, torch.float64)
    angle = torch.arange(capacity, device=device, dtype=torch.float64)[:, None] * inv_freq
    return torch.stack([angle.cos(), angle.sin()], dim=-1).float().contiguous()
