"""Compile-time facts of the tile-128 kernel: shared memory, tensor memory, barriers, warps.

Shared memory of one CTA in bytes (227 KB = 232448 can be had):

    Q    64 rows x 576                    36864
    K    64 keys x 576        x 3 stages 110592
    V   128 keys x 256        x 2 stages  65536
    P    64 rows x 128        x 2 stages  16384
    row statistics                         2304
    barriers, TMEM address                  256
                                         ------
                                         231936

Operand tiles are stored as the 128-byte-swizzled (rope: 64-byte) blocks that TMA writes and that
the matrix descriptors read; each block starts at a multiple of 1024.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlakern.config import KEY_TILE, LATENT_DIM, ROPE_DIM, KernelConfig

CTA_PAIR = 2
WARP = 32
REGISTER_FILE = 65536  # of a multiprocessor
CTA_ROWS = 64  # query rows of one CTA
CTA_KEYS = KEY_TILE // CTA_PAIR  # keys of one CTA's half of the K tile
BLOCK_COLUMNS = 128  # columns of one swizzled block: the 128-byte span
LATENT_BLOCKS = LATENT_DIM // BLOCK_COLUMNS
MMA_K = 32  # bytes of the K dimension in one 8-bit tcgen05.mma

# The second product in steps of 256 output columns; each CTA supplies half of a step's columns.
O_STEP = 256
O_STEPS = LATENT_DIM // O_STEP
V_BLOCK_COLUMNS = O_STEP // CTA_PAIR

BLOCK_BYTES = CTA_ROWS * BLOCK_COLUMNS  # 64 rows of a latent block, of Q or of K
ROPE_BLOCK_BYTES = CTA_ROWS * ROPE_DIM
QK_TILE_BYTES = LATENT_BLOCKS * BLOCK_BYTES + ROPE_BLOCK_BYTES
V_BLOCK_BYTES = KEY_TILE * V_BLOCK_COLUMNS
V_TILE_BYTES = O_STEPS * V_BLOCK_BYTES
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
    """Column map of the 512 columns; both CTAs use the same one.

    A product of 128 rows over a CTA pair leaves 64 rows in each, a row's first half of columns
    in lanes 0-63 and its second half in lanes 64-127: half as many columns as N.
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
class SharedMemory:
    """Byte offsets in the dynamic shared memory, and the barriers in it."""

    k_stages: int = 3
    v_stages: int = 2
    p_stages: int = 2

    @property
    def q(self) -> int:
        return 0

    @property
    def k(self) -> int:
        return self.q + QK_TILE_BYTES

    @property
    def v(self) -> int:
        return self.k + self.k_stages * QK_TILE_BYTES

    @property
    def p(self) -> int:
        return self.v + self.v_stages * V_TILE_BYTES

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
        """Every mbarrier. "pair" in a comment: it lives in the leader CTA and both CTAs arrive."""
        warps = 4
        return (
            Barrier("q_full", 1, 1),  # pair: bytes of both CTAs
            Barrier("q_empty", 1, 1),  # commit, to both CTAs
            Barrier("k_full", self.k_stages, 1),  # pair: bytes of both CTAs
            Barrier("k_empty", self.k_stages, 1),  # commit, to both CTAs
            Barrier("v_full", self.v_stages, 1),  # pair: bytes of both CTAs
            Barrier("v_empty", self.v_stages, 1),  # commit, to both CTAs
            Barrier("v_tail_full", 1, 1),  # bytes of the partly filled last tile, this CTA's
            Barrier("v_tail_zeroed", 1, CTA_PAIR),  # pair: one arrival from each tail warp
            Barrier("s_full", 2, 1),  # commit, to both CTAs
            Barrier("s_empty", 2, CTA_PAIR * warps),  # pair: softmax warps
            Barrier("p_full", self.p_stages, CTA_PAIR * warps),  # pair: softmax warps
            Barrier("p_empty", self.p_stages, 1),  # commit, to both CTAs
            Barrier("factor_full", 2, 2),  # softmax warps 0 and 1, for each row once
            Barrier("factor_empty", 2, warps),  # correction warps
            Barrier("sum_full", 1, warps),  # softmax warps: an item's statistics
            Barrier("sum_empty", 1, warps),  # correction warps
            Barrier("o_ready", 2, CTA_PAIR * warps),  # pair: corrected for a tile's product
            Barrier("o_full", 2, 1),  # commit, to both CTAs
        )

    def barrier(self, name: str) -> int:
        """Offset of the first mbarrier of this ring."""
        at = self.barriers
        for barrier in self.barrier_list:
            if barrier.name == name:
                return at
            at += 8 * barrier.stages
        raise KeyError(name)


# Named barriers of bar.sync; 0 is __syncthreads.
PAIR_BARRIER = 1  # 1 and 2: softmax warps (0, 2) and (1, 3), which share rows


@dataclass(frozen=True)
class AttentionLayout:
    """All compile-time facts of one configuration's attention kernel."""

    config: KernelConfig
    warps: WarpSchedule = WarpSchedule()
    tmem: TensorMemory = TensorMemory()
    shared: SharedMemory = SharedMemory()

    @property
    def k_box_rows(self) -> int:
        """Keys of one TMA box; a page of 128 is copied in two."""
        return min(self.config.page_size, CTA_KEYS)

    @property
    def block(self) -> tuple[int, int, int]:
        return (self.warps.threads, 1, 1)

    @property
    def cluster(self) -> tuple[int, int, int]:
        return (CTA_PAIR, 1, 1)
