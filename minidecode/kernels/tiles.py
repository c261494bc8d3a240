"""How the fused kernels divide their work: the choices there are, and sensible ones by rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# Shared memory of a fused linear kernel besides the weights, rounded up.
OWN_SHARED_BYTES = 3 * 1024

# The tensor-core attention: query heads of a block, and head_dim, at most.
HEADS_PER_BLOCK = 8
TENSOR_CORE_HEAD_DIM = 256
# The attention for any other head_dim: warps of a block, and head_dim, at most.
ANY_WARPS = 4
MOST_HEAD_DIM = 512
# Blocks that share a context, at most: a warp joins their parts.
MAX_SPLITS = 32


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

    def __post_init__(self) -> None:
        """ValueError for what is no tile: choices come from files, and go into source code."""
        fields = (self.threads, self.rows, self.unroll, self.staged, self.resident)
        if not all(type(value) is int and 0 <= value <= 1024 for value in fields):
            raise ValueError(f"no tile: {fields}")
        some = self.threads and self.unroll and self.resident and self.rows + self.staged
        if self.threads % 32 or not some:
            raise ValueError(f"no tile: {fields}")

    @property
    def spelled(self) -> str:
        """The C++ type."""
        fields = (self.threads, self.rows, self.unroll, self.staged, self.resident)
        return f"Tile<{','.join(map(str, fields))}>"

    def fits(self, k: int, device: Device) -> bool:
        """Whether the tile runs for rows of k elements; bulk copies need sm_90 or later."""
        weights = self.resident * self.staged * k * 2
        return not weights or (device.sm90 and weights <= device.shared_bytes - OWN_SHARED_BYTES)


@dataclass(frozen=True)
class Split:
    """How a context is shared: `splits` blocks of `warps` warps."""

    splits: int
    warps: int

    def __post_init__(self) -> None:
        """ValueError for what is no split: choices come from files."""
        if not (type(self.splits) is type(self.warps) is int):
            raise ValueError(f"no split: {self.splits}, {self.warps}")
        if not (1 <= self.splits <= MAX_SPLITS and 1 <= self.warps <= 32):
            raise ValueError(f"no split: {self.splits}, {self.warps}")


@dataclass(frozen=True)
class Device:
    """What the rules need to know of a GPU.

    sms: multiprocessors. sm90: whether it is sm_90 or later. shared_bytes: the most shared memory
    of a block.
    """

    sms: int
    sm90: bool
    shared_bytes: int = 227 * 1024


@dataclass(frozen=True)
class Heads:
    """The sizes that an attention's split depends on."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def on_tensor_cores(self) -> bool:
        """Whether the tensor-core attention takes heads of this size."""
        return self.head_dim % 8 == 0 and self.head_dim <= TENSOR_CORE_HEAD_DIM

    @property
    def blocks(self) -> int:
        """Blocks of one split: on tensor cores eight query heads of a KV head share one."""
        if not self.on_tensor_cores:
            return self.heads
        return self.kv_heads * -(-(self.heads // self.kv_heads) // HEADS_PER_BLOCK)


@dataclass(frozen=True)
class Choices:
    """Tiles and splits that were measured, by key; what has none gets the rule's."""

    device: Device
    tiles: Mapping[str, Tile] = field(default_factory=dict)
    splits: Mapping[str, Split] = field(default_factory=dict)

    def tile(self, kind: str, n: int, k: int) -> Tile:
        """The tile of a linear layer of `kind` ("qkv", "o", …) with an [n, k] weight."""
        chosen = self.tiles.get(tile_key(kind, n, k))
        if chosen is None or not chosen.fits(k, self.device):
            return default_tile(n, k, self.device)
        return chosen

    def split(self, heads: Heads, context: int) -> Split:
        """The split of the attention for contexts of up to `context` positions."""
        chosen = self.splits.get(split_key(heads, context))
        return default_split(heads, context, self.device) if chosen is None else chosen

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


def split_key(heads: Heads, context: int) -> str:
    """The name under which an attention's split is kept."""
    h = heads
    return f"{h.heads}/{h.kv_heads} heads of {h.head_dim}, context {context}"


def default_tile(n: int, k: int, device: Device) -> Tile:
    """A sensible tile where nothing was measured, after searches on an H200 with seven models.

    Few blocks of many rows were the quickest; perhaps since they leave room for the blocks of the
    kernels to come, which load their weights while they wait. Shared memory takes four of the rows
    where rows are long, and another four where there are more rows than for one block a
    multiprocessor.
    """
    share = -(-n // device.sms)
    wide = share > 16
    if wide:
        threads = 128 if k <= 2048 else 256 if k <= 4096 else 512
    else:
        threads = min(512, max(64, -(-k // 256) * 32))  # one piece of a row for each
    rows = 8 if share <= 8 else 16
    staged = 4 if wide or k >= 2048 else 0
    resident = 512 // threads if wide else 1
    tile = Tile(threads, rows if wide else rows - staged, 1, staged, resident)
    return tile if tile.fits(k, device) else Tile(threads, rows, resident=resident)


def default_split(heads: Heads, context: int, device: Device) -> Split:
    """As many blocks as the GPU has room for and their joining is worth.

    On an H200 with whole steps: two blocks instead of one, and more than eight, pay when a warp has
    more than two tiles of 16 positions without them, what lies between with more than one.
    """
    if not heads.on_tensor_cores:
        # That attention alone, on an H200, 64 to 16,384 positions: within 14 % of the best.
        most = min(MAX_SPLITS, max(1, 8 * device.sms // heads.blocks))
        return Split(min(most, max(1, context // (16 * ANY_WARPS))), ANY_WARPS)
    # A ring of positions for each warp: before sm_90 there is less shared memory for them.
    warps = 16 if heads.head_dim <= 64 else 8 if heads.head_dim <= 128 else 4
    if not device.sm90:
        warps = min(4, warps // 2)
    most = min(MAX_SPLITS, max(1, device.sms // heads.blocks))
    splits = 1
    while splits * 2 <= most and context > splits * warps * (16 if 1 < splits < 8 else 32):
        splits *= 2
    return Split(splits, warps)


def tile_candidates(k: int, device: Device) -> list[Tile]:
    """Tiles worth measuring for rows of k elements.

    A limit on registers (`resident`) often pays: more blocks wait on the chip with their weights.
    """
    in_registers = [
        Tile(threads, rows, unroll, 0, resident)
        for threads, rows, unroll, resident in (
            (64, 4, 1, 14),
            (64, 6, 1, 12),
            (64, 8, 1, 10),
            (96, 4, 1, 9),
            (96, 8, 1, 8),
            (96, 20, 1, 1),
            (128, 4, 1, 7),
            (128, 4, 2, 5),
            (128, 8, 1, 6),
            (128, 8, 2, 4),
            (128, 8, 2, 1),
            (128, 12, 1, 5),
            (128, 14, 1, 1),
            (128, 16, 1, 4),
            (128, 16, 1, 1),
            (192, 4, 1, 4),
            (192, 4, 2, 3),
            (192, 8, 1, 4),
            (192, 12, 1, 3),
            (192, 16, 1, 1),
            (192, 20, 1, 2),
            (192, 24, 1, 2),
            (256, 4, 1, 3),
            (256, 8, 1, 3),
            (256, 12, 1, 2),
            (256, 16, 1, 2),
            (384, 8, 1, 2),
            (384, 16, 1, 1),
            (384, 24, 1, 1),
            (512, 4, 1, 1),
            (512, 8, 1, 1),
            (512, 16, 1, 1),
        )
    ]
    in_shared = [
        Tile(threads, 0, 1, staged, resident)
        for threads, staged, resident in (
            (64, 4, 8),
            (128, 4, 8),
            (128, 8, 7),
            (128, 16, 4),
            (192, 8, 3),
            (256, 4, 5),
            (256, 8, 2),
            (256, 8, 4),
            (256, 16, 3),
            (256, 16, 2),
            (512, 4, 2),
            (512, 8, 1),
        )
    ]
    # Both memories of the multiprocessor at once: more of the layer waits on the chip.
    mixed = [
        Tile(96, 2, 1, 2, 10),
        Tile(96, 2, 1, 8, 10),
        Tile(96, 2, 2, 2, 9),
        Tile(96, 4, 1, 8, 9),
        Tile(128, 2, 1, 2, 8),
        Tile(128, 4, 1, 2, 8),
        Tile(128, 8, 1, 4, 5),
        Tile(128, 8, 2, 2, 4),
        Tile(128, 12, 1, 4, 1),
        Tile(192, 20, 1, 4, 2),
        Tile(192, 2, 2, 6, 4),
        Tile(256, 2, 1, 2, 4),
        Tile(256, 2, 2, 2, 3),
        Tile(256, 4, 1, 4, 3),
        Tile(256, 8, 1, 4, 2),
        Tile(256, 12, 1, 2, 2),
        Tile(256, 12, 1, 12, 2),
        Tile(256, 16, 1, 4, 2),
        Tile(384, 8, 1, 4, 1),
        Tile(384, 2, 2, 6, 2),
        Tile(512, 4, 1, 4, 1),
        Tile(512, 8, 1, 8, 1),
        Tile(512, 10, 1, 6, 1),
        Tile(512, 16, 1, 4, 1),
    ]
    return [t for t in in_registers + in_shared + mixed if t.fits(k, device)]


def split_candidates(heads: Heads, device: Device) -> list[Split]:
    """Splits of the attention worth measuring."""
    if not heads.on_tensor_cores:
        return [Split(splits, ANY_WARPS) for splits in (1, 2, 4, 8, 16, 32)]
    most_warps = default_split(heads, 1, device).warps
    least_warps = 2 if heads.head_dim > 128 else 4
    return [
        Split(splits, warps)
        for warps in (most_warps // 4, most_warps // 2, most_warps)
        for splits in (1, 2, 4, 8, 16, 32)
        if warps >= least_warps and (splits == 1 or splits * heads.blocks <= 2 * device.sms)
    ]
