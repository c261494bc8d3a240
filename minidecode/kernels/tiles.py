"""How the fused kernels divide their work: the choices there are, and sensible ones by rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# Shared memory that a block may use for weights on sm_90 (227 KB less what the kernel has itself).
STAGED_BYTES = 224 * 1024

# The tensor-core attention: query heads of a block, and blocks of a cluster, at most.
HEADS_PER_BLOCK = 8
MAX_CLUSTER = 16


@dataclass(frozen=True)
class Tile:
    """How a block of a fused linear kernel works; the fields are those of `fused_linear.cuh`.

    threads of a block; rows held in registers, each with `unroll` 16-byte loads a thread in
    flight; rows `staged` in shared memory by bulk copies (sm_90 only); blocks that must be able to
    be `resident` on a multiprocessor.
    """

    threads: int
    rows: int
    unroll: int = 1
    staged: int = 0
    resident: int = 1

    @property
    def spelled(self) -> str:
        """The C++ type."""
        fields = (self.threads, self.rows, self.unroll, self.staged, self.resident)
        return f"Tile<{','.join(map(str, fields))}>"

    def fits(self, k: int, sm90: bool) -> bool:
        """Whether the tile runs for rows of k elements; bulk copies need sm_90 or later."""
        return not self.staged or (sm90 and self.resident * self.staged * k * 2 <= STAGED_BYTES)


@dataclass(frozen=True)
class Split:
    """How one KV head's context is shared: `splits` blocks of `warps` warps, as one `cluster`."""

    splits: int
    warps: int
    cluster: bool


@dataclass(frozen=True)
class Device:
    """What the rules need to know of a GPU: SM count, and whether it is sm_90 or later."""

    sms: int
    sm90: bool


@dataclass(frozen=True)
class Choices:
    """Tiles and splits that were measured, by key; what has none gets the rule's."""

    device: Device
    tiles: Mapping[str, Tile] = field(default_factory=dict)
    splits: Mapping[str, Split] = field(default_factory=dict)

    def tile(self, kind: str, n: int, k: int) -> Tile:
        """The tile of a linear layer of `kind` ("qkv", "o", …) with an [n, k] weight."""
        chosen = self.tiles.get(tile_key(kind, n, k))
        if chosen is None or not chosen.fits(k, self.device.sm90):
            return default_tile(n, k)
        return chosen

    def split(self, heads: int, kv_heads: int, head_dim: int, context: int) -> Split:
        """The split of the attention for contexts of up to `context` positions."""
        chosen = self.splits.get(split_key(heads, kv_heads, head_dim, context))
        if chosen is None or (chosen.cluster and not self.device.sm90):
            return default_split(heads, kv_heads, head_dim, context, self.device)
        return chosen

    def but(
        self, tiles: Mapping[str, Tile] | None = None, splits: Mapping[str, Split] | None = None
    ) -> Choices:
        """These choices with some replaced."""
        return replace(
            self, tiles={**self.tiles, **(tiles or {})}, splits={**self.splits, **(splits or {})}
        )


def tile_key(kind: str, n: int, k: int) -> str:
    """The name under which a layer's tile is kept."""
    return f"{kind} {n}x{k}"


def split_key(heads: int, kv_heads: int, head_dim: int, context: int) -> str:
    """The name under which an attention's split is kept."""
    return f"{heads}/{kv_heads} heads of {head_dim}, context {context}"


def default_tile(n: int, k: int) -> Tile:
    """A sensible tile where nothing was measured: 4 rows for small layers, 8 for large ones."""
    pieces = k // 8
    threads = 128 if pieces <= 256 else 256 if pieces <= 1024 else 512
    return Tile(threads, 8 if n * k >= 2**23 else 4)


def default_split(heads: int, kv_heads: int, head_dim: int, context: int, device: Device) -> Split:
    """Enough blocks that a context of this length is in flight at once, as the GPU has room."""
    groups = kv_heads * -(-(heads // kv_heads) // HEADS_PER_BLOCK)
    warps = 8
    in_flight = warps * (16 if head_dim > 64 else 32)
    room = max(1, device.sms // groups)
    most = min(room, MAX_CLUSTER) if device.sm90 else room
    splits = 1
    while splits * 2 <= most and splits * in_flight < context:
        splits *= 2
    return Split(splits, warps, device.sm90 and splits > 1)


def tile_candidates(k: int, sm90: bool) -> list[Tile]:
    """Tiles worth measuring for rows of k elements."""
    in_registers = [
        Tile(threads, rows, unroll)
        for threads, rows, unroll in (
            (64, 4, 1),
            (64, 4, 2),
            (96, 4, 1),
            (128, 2, 2),
            (128, 4, 1),
            (128, 4, 2),
            (128, 8, 1),
            (192, 4, 1),
            (192, 8, 1),
            (256, 2, 2),
            (256, 4, 1),
            (256, 4, 2),
            (256, 8, 1),
            (384, 8, 1),
            (512, 2, 2),
            (512, 4, 1),
            (512, 8, 1),
        )
    ]
    in_shared = [
        Tile(threads, 0, 1, staged)
        for threads, staged in (
            (64, 2),
            (64, 4),
            (96, 4),
            (128, 2),
            (128, 4),
            (128, 6),
            (128, 8),
            (128, 16),
            (128, 32),
            (256, 2),
            (256, 4),
            (256, 8),
            (256, 16),
            (256, 32),
            (512, 4),
            (512, 8),
        )
    ]
    # Both memories of the multiprocessor at once: more of the layer waits on the chip.
    mixed = [
        Tile(256, 2, 2, 6, 4),
        Tile(256, 2, 1, 6, 4),
        Tile(256, 4, 1, 4, 4),
        Tile(256, 4, 2, 4, 3),
        Tile(256, 4, 2, 12, 2),
        Tile(256, 2, 2, 14, 2),
        Tile(512, 4, 1, 12, 2),
        Tile(512, 4, 1, 4, 2),
        Tile(512, 2, 1, 2, 2),
    ]
    return [t for t in in_registers + in_shared + mixed if t.fits(k, sm90)]


def split_candidates(heads: int, kv_heads: int, head_dim: int, device: Device) -> list[Split]:
    """Splits of the attention worth measuring."""
    groups = kv_heads * -(-(heads // kv_heads) // HEADS_PER_BLOCK)
    widths = (4, 8) if head_dim > 64 else (4, 8, 16)
    return [
        Split(splits, warps, device.sm90 and splits > 1)
        for warps in widths
        for splits in (1, 2, 4, 8, 16)
        if splits == 1 or splits * groups <= 2 * device.sms
    ]
