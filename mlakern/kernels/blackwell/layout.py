"""Compile-time facts of the attention kernels: shared memory, tensor memory, barriers, warps.

Tile 128 is a pair of CTAs with 64 query rows each: a CTA loads half of a tile's keys for the first
product and, for the second, all of its keys in half of the columns. Tile 64 is one CTA that loads
all keys in all columns once: the same bytes are K to the first product and V to the second.

Shared memory of one CTA in bytes (227 KB = 232448 can be had on sm_100 and sm_103):

                                 tile 128   (stages)     tile 64   (stages)
    Q    64 rows x 576              36864                   36864
    K    64 / 128 keys x 576       110592   3              147456   2
    V   128 keys x 256              65536   2                   -
    P    64 rows x 128              16384   2               16384   2
    row statistics                   2304                    2304
    barriers, TMEM address            384                     384
                                   ------                  ------
                                   232064                  203392

sm_107 has room for four stages of K and of V (333824).

Operand tiles are stored as the 128-byte-swizzled (rope: 64-byte) blocks that TMA writes and that
the matrix descriptors read; each block starts at a multiple of 1024.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mlakern.config import KEY_TILE, LATENT_DIM, ROPE_DIM, KernelConfig

WARP = 32
REGISTER_FILE = 65536  # of a multiprocessor
CTA_ROWS = 64  # query rows of one CTA
BLOCK_COLUMNS = 128  # columns of one swizzled block: the 128-byte span
LATENT_BLOCKS = LATENT_DIM // BLOCK_COLUMNS
MMA_K = 32  # bytes of the K dimension in one 8-bit tcgen05.mma

# The second product in steps of 256 output columns; a pair's CTAs supply half of a step each.
O_STEP = 256
O_STEPS = LATENT_DIM // O_STEP

Q_BLOCK_BYTES = CTA_ROWS * BLOCK_COLUMNS
Q_TILE_BYTES = CTA_ROWS * (LATENT_DIM + ROPE_DIM)
V_BLOCK_BYTES = KEY_TILE * BLOCK_COLUMNS
P_TILE_BYTES = CTA_ROWS * KEY_TILE

# Distance between groups of 8 rows, the "stride byte offset" of a matrix descriptor.
GROUP_128B = 8 * 128
GROUP_64B = 8 * 64


@dataclass(frozen=True)
class WarpSchedule:
    """Which warps play which role, and the registers of each warpgroup's threads."""

    softmax: range = range(0, 4)
    correction: range = range(4, 8)
    mma: int = 8
    load_k: int = 9
    load_qv: int = 10
    tail: int = 11
    threads: int = 12 * WARP
    softmax_registers: int = 208
    correction_registers: int = 232
    other_registers: int = 64

    def __post_init__(self) -> None:
        group = self.softmax_registers + self.correction_registers + self.other_registers
        if 128 * group > REGISTER_FILE:
            raise ValueError(f"registers: got {128 * group}, need <= {REGISTER_FILE}")


@dataclass(frozen=True)
class TensorMemory:
    """Column map of tensor memory; both CTAs of a pair use the same one.

    A product over a CTA's 64 rows leaves a row's first half of columns in lanes 0-63 and its second
    half in lanes 64-127 (cta_group::2 with M 128, and .ws with M 64): half as many columns as N.
    """

    columns: int = 512
    s_stages: int = 2
    s_columns: int = KEY_TILE // 2
    o_step_columns: int = O_STEP // 2

    def s(self, stage: int) -> int:
        return stage * self.s_columns

    def o(self, step: int) -> int:
        return self.s_stages * self.s_columns + step * self.o_step_columns


@dataclass(frozen=True)
class Barrier:
    """A ring of mbarriers: `arrivals` complete one phase."""

    name: str
    stages: int
    arrivals: int


@dataclass(frozen=True)
class KeyGroup:
    """A part of a K tile that is loaded and freed as one: some latent blocks, perhaps the rope.

    Its barriers are `name`_full and `name`_empty.
    """

    name: str
    blocks: tuple[int, ...]
    rope: bool


# A pair's K tile is freed by the first product. A single CTA's serves both products: each step of
# the second frees its two latent blocks, the first product the rope, so that loads run ahead.
PAIR_GROUPS = (KeyGroup("k", (0, 1, 2, 3), True),)
SINGLE_GROUPS = (
    KeyGroup("kv0", (0, 1), False),
    KeyGroup("kv1", (2, 3), False),
    KeyGroup("rope", (), True),
)


@dataclass(frozen=True)
class Operands:
    """How many CTAs share a tile, and the stages and parts of the K and V tiles in each."""

    ctas: int
    k_stages: int
    v_stages: int  # 0: the values are the keys' latent blocks

    @property
    def key_groups(self) -> tuple[KeyGroup, ...]:
        return SINGLE_GROUPS if self.shares_values else PAIR_GROUPS

    @property
    def shares_values(self) -> bool:
        return self.v_stages == 0

    @property
    def keys(self) -> int:
        """Keys of a K tile in one CTA."""
        return KEY_TILE // self.ctas

    @property
    def k_block_bytes(self) -> int:
        return self.keys * BLOCK_COLUMNS

    @property
    def k_rope_bytes(self) -> int:
        return self.keys * ROPE_DIM

    @property
    def k_tile_bytes(self) -> int:
        return LATENT_BLOCKS * self.k_block_bytes + self.k_rope_bytes

    @property
    def value_blocks(self) -> int:
        """Blocks of 128 keys x 128 columns that hold a tile's values in one CTA."""
        return LATENT_BLOCKS // self.ctas

    @property
    def value_stages(self) -> int:
        return self.v_stages or self.k_stages

    def group_bytes(self, group: KeyGroup) -> int:
        return len(group.blocks) * self.k_block_bytes + group.rope * self.k_rope_bytes


PAIR = Operands(ctas=2, k_stages=3, v_stages=2)
PAIR_SM_107 = Operands(ctas=2, k_stages=4, v_stages=4)
SINGLE = Operands(ctas=1, k_stages=2, v_stages=0)


@dataclass(frozen=True)
class SharedMemory:
    """Byte offsets in the dynamic shared memory, and the barriers in it."""

    operands: Operands = PAIR
    p_stages: int = 2

    @property
    def q(self) -> int:
        return 0

    @property
    def k(self) -> int:
        return self.q + Q_TILE_BYTES

    @property
    def v(self) -> int:
        """The first value tile; where values are keys, the first key tile."""
        return self.k + self._separate_v * self.operands.k_stages * self.operands.k_tile_bytes

    @property
    def value_tile_bytes(self) -> int:
        """Distance between the value tiles of two stages."""
        if self.operands.shares_values:
            return self.operands.k_tile_bytes
        return self.operands.value_blocks * V_BLOCK_BYTES

    @property
    def p(self) -> int:
        return self.v + self.operands.value_stages * self.value_tile_bytes

    @property
    def row_max(self) -> int:
        """float32[2][128]: a half row's maximum for its partner, by tile parity."""
        return self.p + self.p_stages * P_TILE_BYTES

    @property
    def factor(self) -> int:
        """float32[2][64]: what a row's accumulator is multiplied by before a tile's product."""
        return self.row_max + 2 * 128 * 4

    @property
    def row_sum(self) -> int:
        """float32[128]: a half row's sum of probabilities."""
        return self.factor + 2 * CTA_ROWS * 4

    @property
    def final_max(self) -> int:
        """float32[64]: a row's maximum at the end of an item."""
        return self.row_sum + 128 * 4

    @property
    def barriers(self) -> int:
        return self.final_max + CTA_ROWS * 4

    @property
    def tmem_address(self) -> int:
        return self.barriers + 8 * sum(b.stages for b in self.barrier_list)

    @property
    def size(self) -> int:
        return -(-(self.tmem_address + 4) // 128) * 128

    @property
    def barrier_list(self) -> tuple[Barrier, ...]:
        """Every mbarrier. "all" in a comment: in the leader CTA, for both CTAs of a pair."""
        ctas, warps, tails = self.operands.ctas, 4, self.operands.value_stages
        values = self.operands.v_stages
        rings = [(group.name, self.operands.k_stages) for group in self.operands.key_groups]
        if values:
            rings.append(("v", values))
        return (
            Barrier("q_full", 1, 1),  # all: bytes
            Barrier("q_empty", 1, 1),  # commit
            *(Barrier(f"{name}_full", stages, 1) for name, stages in rings),  # all: bytes
            *(Barrier(f"{name}_empty", stages, 1) for name, stages in rings),  # commit
            # A tail for each value stage may be on its way: short requests follow each other.
            Barrier("tail_full", tails, 1),  # bytes of this CTA's values of a partly filled tile
            Barrier("tail_zeroed", tails, ctas),  # all: tail warps
            Barrier("s_full", 2, 1),  # commit
            Barrier("s_empty", 2, ctas * warps),  # all: softmax warps
            Barrier("p_full", self.p_stages, ctas * warps),  # all: softmax warps
            Barrier("p_empty", self.p_stages, 1),  # commit
            Barrier("factor_full", 2, 2),  # softmax warps 0 and 1, for each row once
            Barrier("factor_empty", 2, warps),  # correction warps
            Barrier("sum_full", 1, warps),  # softmax warps: an item's statistics
            Barrier("sum_empty", 1, warps),  # correction warps
            Barrier("o_ready", 2, ctas * warps),  # all: corrected for a tile's product
            Barrier("o_full", 2, 1),  # commit
        )

    def barrier(self, name: str) -> int:
        """Offset of the first mbarrier of this ring."""
        at = self.barriers
        for barrier in self.barrier_list:
            if barrier.name == name:
                return at
            at += 8 * barrier.stages
        raise KeyError(name)

    @property
    def _separate_v(self) -> bool:
        return not self.operands.shares_values


# Named barriers of bar.sync; 0 is __syncthreads.
PAIR_BARRIER = 1  # 1 and 2: softmax warps (0, 2) and (1, 3), which share rows


@dataclass(frozen=True)
class AttentionLayout:
    """All compile-time facts of one configuration's attention kernel."""

    config: KernelConfig
    warps: WarpSchedule = field(default_factory=WarpSchedule)

    @property
    def operands(self) -> Operands:
        if self.config.tile_m == CTA_ROWS:
            return SINGLE
        return PAIR_SM_107 if self.config.arch == "sm_107a" else PAIR

    @property
    def shared(self) -> SharedMemory:
        return SharedMemory(self.operands)

    @property
    def tmem(self) -> TensorMemory:
        return TensorMemory(columns=576 if self.config.arch == "sm_107a" else 512)

    @property
    def lead(self) -> int:
        """Tiles by which the first product runs ahead of the second.

        One where values are keys: the tile after next needs the stage of the tile being read.
        """
        return 1 if self.operands.shares_values else 2

    @property
    def max_in_load(self) -> bool:
        """Whether the load from tensor memory returns the row maximum (tcgen05.ld.red)."""
        return self.config.arch in ("sm_103a", "sm_107a")

    @property
    def box_rows(self) -> int:
        """Keys of one TMA box; a page of 128 is copied in two."""
        return min(self.config.page_size, 64)

    @property
    def block(self) -> tuple[int, int, int]:
        return (self.warps.threads, 1, 1)

    @property
    def cluster(self) -> tuple[int, int, int]:
        return (self.operands.ctas, 1, 1)
