"""What one key tile costs each resource of a multiprocessor, and which one limits.

Clocks are counted for each resource alone, as if everything overlapped: the largest is a bound from
below, not a time. Latencies, the start and end of a request, splits and the combine kernel are left
out. Rates are public ones:

    tensor cores     NVIDIA Blackwell datasheet, HGX B200: 4.5 PFLOP/s dense FP8 for each GPU, hence
                     16384 FLOP a clock and multiprocessor. FlashAttention-4 counts 8192 for BF16.
    M of 64 rows     an MMA whose CTA has 64 rows in a single CTA (.ws) is taken to run at half
                     rate; a pair's M 128 fills all 128 lanes of tensor memory and is taken to run
                     at the full one. Both are assumptions until measured.
    shared memory    128 bytes a clock (CUDA Programming Guide; FlashAttention-4). Counted are what
                     TMA writes, what the products read, and P. tcgen05.mma reads A and B again for
                     each instruction, but not an A that the last one left in the collector.
    MUFU             16 a clock; FMA 128; comparisons, selections, logic, additions of integers 64;
                     conversions 64 (CUDA Programming Guide, "Arithmetic Instructions", 10.0). A
                     packed instruction counts as two.
    issue            one instruction a clock for each of four schedulers.
    memory           8 TB/s (datasheet), shared evenly by the multiprocessors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlakern.config import HEAD_DIM, KEY_TILE, LATENT_DIM, KernelConfig
from mlakern.division import ceil_div
from mlakern.kernels.blackwell.layout import (
    CTA_ROWS,
    MMA_K,
    O_STEP,
    O_STEPS,
    P_TILE_BYTES,
    AttentionLayout,
    Operands,
)
from mlakern.performance.profile import MainLoop

ROLE_THREADS = 128  # of the softmax and of the correction warps


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU: those without a unit of time are for a clock and multiprocessor.

    lanes: operations of each pipe (mlakern.performance.pipes).
    """

    name: str
    multiprocessors: int
    fp8_flops_per_second: float
    memory_bytes_per_second: float
    fp8_flops: int
    shared_bytes: int
    lanes: Mapping[str, int]

    @property
    def clock(self) -> float:
        """Clocks a second at which the tensor cores reach the published rate."""
        return self.fp8_flops_per_second / (self.multiprocessors * self.fp8_flops)

    @property
    def memory_bytes(self) -> float:
        """One multiprocessor's part of the memory bandwidth in a clock."""
        return self.memory_bytes_per_second / self.multiprocessors / self.clock


B200 = Machine(
    "B200",
    multiprocessors=148,
    fp8_flops_per_second=4.5e15,
    memory_bytes_per_second=8e12,
    fp8_flops=16384,
    shared_bytes=128,
    lanes={"mufu": 16, "fma": 128, "alu": 64, "convert": 64},
)


@dataclass(frozen=True)
class TileWork:
    """One key tile in one CTA, in FLOPs and bytes.

    memory_bytes: what must come from memory, this CTA's part; copied_bytes: what TMA writes into
    shared memory, from memory or from the L2 cache; operand_bytes: what the products read there.
    """

    ctas: int
    flops: int
    memory_bytes: int
    copied_bytes: int
    operand_bytes: int
    p_bytes: int

    @property
    def shared_bytes(self) -> int:
        return self.copied_bytes + self.operand_bytes + self.p_bytes


def tile_work(operands: Operands, mma: MainLoop) -> TileWork:
    """The work that the layout of the operands and the products make of one key tile."""
    reused = sum(".A_REUSE" in product.operands for product in mma.way)
    query = CTA_ROWS * MMA_K
    first = HEAD_DIM // MMA_K * (query + operands.keys * MMA_K)
    second = O_STEPS * KEY_TILE // MMA_K * (query + O_STEP // operands.ctas * MMA_K)
    values = 0 if operands.shares_values else operands.value_blocks * KEY_TILE * 128
    return TileWork(
        ctas=operands.ctas,
        flops=2 * CTA_ROWS * KEY_TILE * (HEAD_DIM + LATENT_DIM),
        memory_bytes=KEY_TILE * HEAD_DIM // operands.ctas,
        copied_bytes=operands.k_tile_bytes + values,
        operand_bytes=first + second - reused * query,
        p_bytes=P_TILE_BYTES,
    )


def clocks(work: TileWork, loops: Mapping[str, MainLoop], machine: Machine) -> dict[str, float]:
    """Clocks of each resource of one multiprocessor for one key tile."""
    softmax, correction = loops["softmax"], loops["correction"]
    rate = machine.fp8_flops * (1.0 if work.ctas == 2 else 0.5)
    result = {
        "tensor": work.flops / rate,
        "shared": work.shared_bytes / machine.shared_bytes,
        "memory": work.memory_bytes / machine.memory_bytes,
    }
    for pipe, lanes in machine.lanes.items():
        operations = sum(role.operations.get(pipe, 0) for role in (softmax, correction))
        result[pipe] = operations * ROLE_THREADS / lanes
    # A scheduler has one softmax warp, one correction warp, and one of the last four warps.
    single = max(loops[role].instructions for role in ("mma", "load_k", "load_v") if role in loops)
    result["issue"] = float(softmax.instructions + correction.instructions + single)
    return result


@dataclass(frozen=True)
class Prediction:
    """One key tile of a request with one query token.

    clocks: of one multiprocessor, for all query tiles of the request; memory is read once for all.
    """

    num_heads: int
    query_tiles: int
    clocks: Mapping[str, float]
    machine: Machine

    @property
    def limit(self) -> str:
        return max(self.clocks, key=lambda resource: self.clocks[resource])

    @property
    def bound(self) -> float:
        """Clocks of one multiprocessor that the limiting resource needs."""
        return self.clocks[self.limit]

    def shares(self) -> dict[str, float]:
        """How busy each resource is while the limiting one is busy all the time."""
        return {resource: clocks / self.bound for resource, clocks in self.clocks.items()}

    def seconds(self, batch: int, seq_len: int) -> float:
        """The bound for a batch of equal lengths on the whole GPU."""
        tiles = batch * ceil_div(seq_len, KEY_TILE)
        return tiles * self.bound / self.machine.multiprocessors / self.machine.clock


def predict(
    config: KernelConfig, loops: Mapping[str, MainLoop], num_heads: int, machine: Machine = B200
) -> Prediction:
    """What limits decoding one token with this many heads."""
    work = tile_work(AttentionLayout(config).operands, loops["mma"])
    query_tiles = ceil_div(num_heads, config.tile_m)
    once = clocks(work, loops, machine)
    scaled = {
        resource: value * work.ctas * (1 if resource == "memory" else query_tiles)
        for resource, value in once.items()
    }
    return Prediction(num_heads, query_tiles, scaled, machine)
