"""tcgen05.mma: D (+)= A · B with operands in shared memory or tensor memory.

With .cta_group::2 the same descriptors hold in both CTAs of the pair; each gives M/2 rows of A and
N/2 of B, and keeps its rows of D. Where a CTA's D lies in its tensor memory:

    rows of D in a CTA                                   row r, column n of D: lane, column
    128   M 128; M 256 of a pair; M 128 .ws              r, n
    64    M 128 of a pair; M 64 .ws                      r + 64 (n / (N/2)), n mod N/2
    64    M 64                                           32 (r/16) + r%16, n
    32    M 32 .ws                                       r + 32 (n / (N/4)), n mod N/4

A in tensor memory lies one row a lane, four bytes of K a column, for 128 rows a CTA. An f16 D has
one element a column, in its lower half.

Products are exact in float32; sums are float32 in the order of the BLAS, s32 ones exact. The
hardware's order and its handling of subnormals are not modelled.

Sources: PTX ISA, "tcgen05.mma", "Data path layout organization" (layouts A, B, D to G).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlakern.emulator import blockscale, descriptors, formats, operands
from mlakern.emulator.descriptors import (
    BlockScale,
    InstructionDescriptor,
    Kind,
    SharedDescriptor,
)
from mlakern.emulator.hardware_error import HardwareError
from mlakern.emulator.observer import Cells, SharedRegion
from mlakern.emulator.operands import F32, Bytes, Operand
from mlakern.emulator.tmem import TensorMemory

Block: TypeAlias = NDArray[Any]


class MmaCta:
    """What an MMA reaches of one CTA: shared memory by offset, which bytes were written, TMEM."""

    def __init__(self, data: Bytes, written: Bytes, tensor: TensorMemory) -> None:
        self.units = data.view(np.complex128)
        self.written = written
        self.tensor = tensor
        # Operands seen wholly written; bytes never become unwritten while a CTA runs.
        self.verified: set[tuple[Operand, SharedDescriptor]] = set()


@dataclass(frozen=True)
class Mma:
    """One tcgen05.mma.

    a: a shared-memory descriptor, or a tensor-memory address. d: a tensor-memory address.
    accumulate: D is an input, times 2^-shift. ctas: 1 or 2 (.cta_group). scale_a, scale_b: tensor-
    memory addresses of scale factors. masked: lanes of D that stay as they are, a bit for each lane
    of the CTAs.
    """

    instruction: InstructionDescriptor
    a: SharedDescriptor | int
    b: SharedDescriptor
    d: int
    accumulate: bool
    ctas: int = 1
    weight_stationary: bool = False
    scale_a: int = 0
    scale_b: int = 0
    shift: int = 0
    masked: int = 0

    @cached_property
    def rows(self) -> int:
        """Rows of A and D in one CTA."""
        return self.instruction.m // self.ctas

    @cached_property
    def column_groups(self) -> int:
        """Parts of N that lie beside each other on the lanes of D."""
        folded = self.weight_stationary or self.ctas == 2
        return 128 // self.rows if folded else 1

    @cached_property
    def d_columns(self) -> int:
        return self.instruction.n // self.column_groups

    @cached_property
    def half_lanes(self) -> bool:
        """D occupies 16 lanes of each quadrant (layout F)."""
        return self.rows == 64 and self.column_groups == 1

    @cached_property
    def a_operand(self) -> Operand:
        return self._operand(self.rows, self.instruction.a_mn_major)

    @cached_property
    def b_operand(self) -> Operand:
        return self._operand(self.instruction.n // self.ctas, self.instruction.b_mn_major)

    def _operand(self, rows: int, mn_major: bool) -> Operand:
        bits = self.instruction.element_bits
        if mn_major and bits == 4:
            raise HardwareError("operands of 4-bit elements must be K-major")
        return Operand(rows, self.instruction.k * bits // 8, max(bits // 8, 1), mn_major)


@lru_cache(maxsize=4096)
def decode(
    kind: Kind,
    instruction_word: int,
    a: int,
    b: int,
    d: int,
    accumulate: bool,
    ctas: int = 1,
    weight_stationary: bool = False,
    a_in_tensor_memory: bool = False,
    sm_107: bool = False,
    scales: int = 0,
    scale_a: int = 0,
    scale_b: int = 0,
    shift: int = 0,
    masked: int = 0,
) -> Mma:
    """The MMA of raw operands: descriptors as 64-bit values, ``a`` perhaps an address (cached).

    scales: factors a row of a block-scaled kind, else 0.
    """
    bits = 15 if sm_107 else 14
    if scales:
        described = descriptors.block_scaled(instruction_word, kind, ctas, scales)
    else:
        described = descriptors.instruction(instruction_word, kind, ctas, weight_stationary, sm_107)
    return Mma(
        described,
        a if a_in_tensor_memory else descriptors.tcgen05_shared(a, bits),
        descriptors.tcgen05_shared(b, bits),
        d,
        accumulate,
        ctas,
        weight_stationary,
        scale_a,
        scale_b,
        shift,
        masked,
    )


def execute(mma: Mma, ctas: Sequence[MmaCta]) -> None:
    """Run the MMA on its CTAs (the even one of a pair first).

    HardwareError for operands outside memory or never written, D or A in columns not allocated.
    """
    instruction = mma.instruction
    b = _matrix(mma.b_operand, mma.b, ctas, instruction.b_format)
    if instruction.negative:
        b = -b
    if isinstance(mma.a, SharedDescriptor):
        a = _matrix(mma.a_operand, mma.a, ctas, instruction.a_format)
    else:
        a = np.concatenate([_tensor_a(mma, mma.a, cta.tensor) for cta in ctas], axis=0)
    for index, cta in enumerate(ctas):
        rows = a[index * mma.rows : (index + 1) * mma.rows]
        if instruction.scale is None:
            _multiply(mma, cta.tensor, rows, b, index)
        else:
            _multiply(mma, cta.tensor, *_scaled(mma, instruction.scale, cta.tensor, rows, b), index)


def _scaled(mma: Mma, scale: BlockScale, tensor: TensorMemory, a: F32, b: F32) -> tuple[F32, F32]:
    """One CTA's rows of A, and B, times the factors in that CTA's tensor memory."""
    count = mma.instruction.k // scale.block
    results = []
    for matrix, address, first in (
        (a, mma.scale_a, scale.a_first),
        (b, mma.scale_b, scale.b_first),
    ):
        each = blockscale.factors(tensor, address, len(matrix), count, first, scale.format)
        results.append(blockscale.scaled(np.ascontiguousarray(matrix), each, scale.block))
    return results[0], results[1]


def footprint(
    mma: Mma, ranks: Sequence[int]
) -> tuple[list[SharedRegion], list[Cells], list[Cells]]:
    """Shared memory read, tensor memory read and written by the MMA in CTAs ``ranks``."""
    shared, reads, writes = [], [], []
    column = mma.d & 0xFFFF
    for rank in ranks:
        for operand, descriptor in ((mma.a_operand, mma.a), (mma.b_operand, mma.b)):
            if isinstance(descriptor, SharedDescriptor):
                shared.append(SharedRegion(rank, operands.granules(operand, descriptor)))
            else:
                words = operand.row_bytes // 4
                reads.append(Cells(rank, slice(0, 128), descriptor & 0xFFFF, words))
        if mma.instruction.scale is not None:
            for address, rows in ((mma.scale_a, mma.rows), (mma.scale_b, mma.instruction.n)):
                width = -(-rows // 32)
                reads.append(Cells(rank, slice(0, 128), address & 0xFFFF, width))
        writes.append(Cells(rank, _lanes(mma), column, mma.d_columns))
        if mma.accumulate:
            reads.append(writes[-1])
    return shared, reads, writes


def _matrix(
    operand: Operand, descriptor: SharedDescriptor, ctas: Sequence[MmaCta], format_: str
) -> F32:
    """float32 [rows of all CTAs, k]."""
    for cta in ctas:
        if (operand, descriptor) not in cta.verified:
            operands.check_readable(operand, descriptor, cta.written)
            cta.verified.add((operand, descriptor))
    parts = [operands.gather(operand, descriptor, cta.units) for cta in ctas]
    if len(parts) == 1:
        elements = parts[0]
    else:
        elements = np.concatenate(parts, axis=1 if operand.mn_major else 0)
    values = operands.widen(elements, format_)
    return values.T if operand.mn_major else values


def _tensor_a(mma: Mma, address: int, tensor: TensorMemory) -> F32:
    """A of one CTA from tensor memory, float32 [128, k]."""
    if mma.rows != 128:
        raise HardwareError(
            f"A in tensor memory with {mma.rows} rows a CTA is not modelled, need 128"
        )
    if mma.instruction.a_mn_major:
        raise HardwareError("A in tensor memory must be K-major (bit 15 of the descriptor is set)")
    column, words = address & 0xFFFF, mma.a_operand.row_bytes // 4
    if address >> 16:
        raise HardwareError(f"A in tensor memory: lane {address >> 16}, need 0")
    tensor.check_allocated(column, words)
    if not tensor.written[column : column + words].all():
        raise HardwareError(f"A reads tensor memory never written at column {column}")
    lanes = np.ascontiguousarray(tensor.words[column : column + words].T)
    return operands.widen(lanes.view(np.uint8), mma.instruction.a_format)


def _multiply(mma: Mma, tensor: TensorMemory, a: F32, b: F32, index: int) -> None:
    """D of CTA ``index`` of the group: ``a`` is [rows, k], ``b`` is [n, k]."""
    column, lane = mma.d & 0xFFFF, mma.d >> 16
    if lane not in ((0, 16) if mma.half_lanes else (0,)):
        raise HardwareError(f"D at lane {lane}, need {'0 or 16' if mma.half_lanes else '0'}")
    tensor.check_allocated(column, mma.d_columns)
    words: Block = tensor.words[column : column + mma.d_columns]
    written: Block = tensor.written[column : column + mma.d_columns]
    # D is kept transposed: a column of D is a row of tensor memory.
    b = b.reshape(mma.column_groups, mma.d_columns, mma.instruction.k)
    if mma.half_lanes:
        product: F32 = (b[0] @ a.T).reshape(mma.d_columns, 4, 16)
        words = words.reshape(mma.d_columns, 4, 32)[:, :, lane : lane + 16]
        written = written.reshape(mma.d_columns, 4, 32)[:, :, lane : lane + 16]
    else:
        # [columns, group, row] in memory is [group, columns, row] for the product.
        product = np.empty(words.shape, np.float32)
        by_group = product.reshape(mma.d_columns, mma.column_groups, mma.rows).transpose(1, 0, 2)
        np.matmul(b, a.T, out=by_group)
    masked = mma.masked >> 128 * index & (1 << 128) - 1
    if masked:
        if mma.half_lanes:
            raise HardwareError("masked lanes of a D of 64 rows are not modelled")
        enabled = np.array([not masked >> n & 1 for n in range(128)])
        part, part_written = words[:, enabled], written[:, enabled]
        _accumulate(mma, part, part_written, product[:, enabled])
        words[:, enabled], written[:, enabled] = part, part_written
    else:
        _accumulate(mma, words, written, product)


def _accumulate(mma: Mma, words: Block, written: Block, product: F32) -> None:
    """Add a product to D, or make it D; ``words`` are D's 32-bit cells."""
    if not mma.accumulate:
        words[...] = _stored(mma.instruction, product)
        written[...] = True
        return
    if not written.all():
        column = mma.d & 0xFFFF
        raise HardwareError(f"D at column {column} is an input, part of it was never written")
    if mma.instruction.d_format == "f32" and not mma.shift:
        block = words.view(np.float32)
        np.add(block, product, out=block)
        return
    old: Block
    match mma.instruction.d_format:
        case "s32":
            total = words.view(np.int32).astype(np.int64) + product.astype(np.int64)
            words[...] = _stored(mma.instruction, total)
            return
        case "f16":
            old = formats.f16_to_f32(words.astype(np.uint16))
        case _:
            old = words.view(np.float32)
    words[...] = _stored(mma.instruction, old * np.float32(2.0**-mma.shift) + product)


def _stored(instruction: InstructionDescriptor, values: Block) -> Block:
    """Values of D as its 32-bit cells."""
    if instruction.d_format == "f16":
        return formats.f32_to_f16(values).astype(np.uint32)
    if instruction.d_format == "f32":
        return values.view(np.uint32)
    whole = values.astype(np.int64)
    if instruction.saturate:
        whole = whole.clip(-(1 << 31), (1 << 31) - 1)
    return whole.astype(np.uint32)


def _lanes(mma: Mma) -> slice | NDArray[np.int64]:
    if mma.half_lanes:
        row = np.arange(64, dtype=np.int64)
        return row // 16 * 32 + row % 16 + (mma.d >> 16)
    return slice(0, 128)
