"""tcgen05.mma: D (+)= A · B with operands in shared memory or tensor memory.

With .cta_group::2 the same descriptors hold in both CTAs of the pair; each gives M/2 rows of A and
N/2 of B, and keeps its rows of D. Where a CTA's D lies in its tensor memory:

    rows of D in a CTA                                   row r, column n of D: lane, column
    128   M 128; M 256 of a pair; M 128 .ws              r, n
    64    M 128 of a pair; M 64 .ws                      r + 64 (n / (N/2)), n mod N/2
    64    M 64                                           32 (r/16) + r%16, n
    32    M 32 .ws                                       r + 32 (n / (N/4)), n mod N/4

A in tensor memory lies one row a lane, four bytes of K a column, for 128 rows a CTA.

Products are exact in float32; sums are float32 in the order of the BLAS. The hardware's order and
its handling of subnormals are not modelled.

Sources: PTX ISA, "tcgen05.mma", "Data path layout organization" (layouts A, B, D to G).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlakern.emulator import operands
from mlakern.emulator.descriptors import InstructionDescriptor, SharedDescriptor
from mlakern.emulator.hardware_error import HardwareError
from mlakern.emulator.observer import Cells, SharedRegion
from mlakern.emulator.operands import F32, Bytes, Operand
from mlakern.emulator.tmem import TensorMemory

Block: TypeAlias = NDArray[Any]


class MmaCta(NamedTuple):
    """What an MMA reaches of one CTA: shared memory by offset, which bytes were written, TMEM."""

    data: Bytes
    written: Bytes
    tensor: TensorMemory


@dataclass(frozen=True)
class Mma:
    """One tcgen05.mma.

    a: a shared-memory descriptor, or a tensor-memory address. d: a tensor-memory address.
    accumulate: D is an input. ctas: 1 or 2 (.cta_group).
    """

    instruction: InstructionDescriptor
    a: SharedDescriptor | int
    b: SharedDescriptor
    d: int
    accumulate: bool
    ctas: int = 1
    weight_stationary: bool = False

    @property
    def rows(self) -> int:
        """Rows of A and D in one CTA."""
        return self.instruction.m // self.ctas

    @property
    def column_groups(self) -> int:
        """Parts of N that lie beside each other on the lanes of D."""
        folded = self.weight_stationary or self.ctas == 2
        return 128 // self.rows if folded else 1

    @property
    def d_columns(self) -> int:
        return self.instruction.n // self.column_groups

    def operand(self, rows: int, mn_major: bool) -> Operand:
        width = self.instruction.element_bytes
        return Operand(rows, self.instruction.k * width, width, mn_major)

    @property
    def a_operand(self) -> Operand:
        return self.operand(self.rows, self.instruction.a_mn_major)

    @property
    def b_operand(self) -> Operand:
        return self.operand(self.instruction.n // self.ctas, self.instruction.b_mn_major)


def execute(mma: Mma, ctas: Sequence[MmaCta]) -> None:
    """Run the MMA on its CTAs (the even one of a pair first).

    HardwareError for operands outside memory or never written, D or A in columns not allocated.
    """
    instruction = mma.instruction
    b = _matrix(mma.b_operand, mma.b, ctas, instruction.b_format)
    if isinstance(mma.a, SharedDescriptor):
        a = _matrix(mma.a_operand, mma.a, ctas, instruction.a_format)
    else:
        a = np.concatenate([_tensor_a(mma, mma.a, cta.tensor) for cta in ctas], axis=0)
    product: F32 = b @ a.T  # D transposed: a column of D is a row of tensor memory
    if instruction.negative:
        np.negative(product, out=product)
    for index, cta in enumerate(ctas):
        mine = product[:, index * mma.rows : (index + 1) * mma.rows]
        _store(mma, cta.tensor, mine)


def footprint(
    mma: Mma, ranks: Sequence[int]
) -> tuple[list[SharedRegion], list[Cells], list[Cells]]:
    """Shared memory read, tensor memory read and written by the MMA in CTAs ``ranks``."""
    shared, reads, writes = [], [], []
    column, lanes = mma.d & 0xFFFF, _lanes(mma)
    for rank in ranks:
        for operand, descriptor in ((mma.a_operand, mma.a), (mma.b_operand, mma.b)):
            if isinstance(descriptor, SharedDescriptor):
                where = operands.plan(operand, descriptor)
                base = operands.pattern_start(descriptor)
                shared.append(SharedRegion(rank, where.granules(base)))
            else:
                words = operand.row_bytes // 4
                reads.append(Cells(rank, slice(0, 128), descriptor & 0xFFFF, words))
        writes.append(Cells(rank, lanes, column, mma.d_columns))
        if mma.accumulate:
            reads.append(writes[-1])
    return shared, reads, writes


def _matrix(
    operand: Operand, descriptor: SharedDescriptor, ctas: Sequence[MmaCta], format_: str
) -> F32:
    """float32 [rows of all CTAs, k]."""
    parts = [operands.gather(operand, descriptor, cta.data, cta.written) for cta in ctas]
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


def _store(mma: Mma, tensor: TensorMemory, product: F32) -> None:
    """Write, or add to, a CTA's part of D; ``product`` is [n, rows]."""
    tensor.check_allocated(mma.d & 0xFFFF, mma.d_columns)
    target = _block(mma, tensor.words.view(np.float32))
    product = product.reshape(target.shape)
    written = _block(mma, tensor.written)
    if not mma.accumulate:
        target[...] = product
        written[...] = True
        return
    if not written.all():
        raise HardwareError(
            f"D at column {mma.d & 0xFFFF} is an input but part of it was never written"
        )
    np.add(target, product, out=target)


def _block(mma: Mma, memory: Block) -> Block:
    """View of [columns, 128] memory at D, in the order of [n, rows] (see the table)."""
    column, lane = mma.d & 0xFFFF, mma.d >> 16
    half_lanes = mma.rows == 64 and mma.column_groups == 1
    if lane not in ((0, 16) if half_lanes else (0,)):
        raise HardwareError(f"D at lane {lane}, need {'0 or 16' if half_lanes else '0'}")
    columns: Block = memory[column : column + mma.d_columns]
    if half_lanes:
        half: Block = columns.reshape(mma.d_columns, 4, 32)[:, :, lane : lane + 16]
        return half
    groups = mma.column_groups
    return columns.reshape(mma.d_columns, groups, 128 // groups).transpose(1, 0, 2)


def _lanes(mma: Mma) -> slice | NDArray[np.int64]:
    if mma.rows == 64 and mma.column_groups == 1:
        row = np.arange(64, dtype=np.int64)
        return row // 16 * 32 + row % 16 + (mma.d >> 16)
    return slice(0, 128)
