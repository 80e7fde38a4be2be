"""tcgen05.cp: a matrix from shared memory into the lanes of tensor memory (PTX ISA, "tcgen05.cp").

The source is a matrix of rows of 16 or 32 bytes whose place a shared-memory descriptor gives; a row
goes to one lane, four bytes a column. Matrices of less than 128 rows are repeated:

    4x256b     row r at lane 32 r
    64x128b    .warpx2::01_23: rows 0-31 at lanes 0-31 and 32-63, the others at 64-95 and 96-127;
               .warpx2::02_13: rows 0-31 at lanes 0-31 and 64-95, the others at 32-63 and 96-127
    32x128b    all rows at lanes 0-31, 32-63, 64-95 and 96-127
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlakern.emulator import descriptors, operands
from mlakern.emulator.errors import Fault
from mlakern.emulator.observer import Cells, SharedRegion
from mlakern.emulator.operands import Operand
from mlakern.emulator.tensor import pair_of

if TYPE_CHECKING:
    from mlakern.emulator.descriptors import SharedDescriptor
    from mlakern.emulator.group import Group
    from mlakern.emulator.program import Instruction
    from mlakern.emulator.tensorcore import MmaCta

Lanes: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shape:
    """A matrix of ``rows`` rows of ``row_bytes`` bytes."""

    rows: int
    row_bytes: int

    @property
    def columns(self) -> int:
        return self.row_bytes // 4

    @property
    def operand(self) -> Operand:
        return Operand(self.rows, self.row_bytes, 1, False)


def copy(
    g: Group,
    shape: Shape,
    alternating: bool,
    ctas: int,
    address: int,
    word: int,
    instruction: Instruction,
) -> None:
    """tcgen05.cp by one thread, in each CTA of its group. alternating: .warpx2::02_13."""
    if address >> 16:
        raise Fault(f"tcgen05.cp to lane {address >> 16} of tensor memory, need 0")
    source = descriptors.tcgen05_shared(word, 15 if g.cta.launch.machine.sm_107 else 14)
    lanes = _lanes(shape, alternating)
    cluster, ranks = g.cta.cluster, pair_of(g, ctas)
    participants = [cluster.cta(rank).operands for rank in ranks]
    observer = g.cta.launch.observer
    if observer is not None:
        granules = operands.granules(shape.operand, source)
        every = lanes.reshape(-1)
        observer.mma(
            instruction,
            g.cluster_warps()[0],
            [SharedRegion(rank, granules) for rank in ranks],
            [],
            [Cells(rank, every, address, shape.columns) for rank in ranks],
        )

    def action() -> None:
        for cta in participants:
            _copy(cta, shape, source, lanes, address)

    cluster.asynchronous.tensor(g, instruction, ranks, action)


def _lanes(shape: Shape, alternating: bool) -> Lanes:
    """The lanes of the rows: [copies, rows]."""
    rows = np.arange(shape.rows)
    if shape.rows == 4:
        return 32 * rows[None]
    if shape.rows == 64:
        first, second = ((0, 64), (32, 96)) if alternating else ((0, 32), (64, 96))
        halves = [
            np.where(rows < 32, rows + a, rows - 32 + b) for a, b in zip(first, second, strict=True)
        ]
        return np.stack(halves)
    return np.stack([rows + start for start in range(0, 128, shape.rows)])


def _copy(cta: MmaCta, shape: Shape, source: SharedDescriptor, lanes: Lanes, column: int) -> None:
    operands.check_readable(shape.operand, source, cta.written)
    rows = operands.gather(shape.operand, source, cta.units).view(np.uint32)
    cta.tensor.check_allocated(column, shape.columns)
    for each in lanes:
        cta.tensor.words[column : column + shape.columns, each] = rows.T
        cta.tensor.written[column : column + shape.columns, each] = True
