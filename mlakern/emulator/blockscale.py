"""Scale factors of block-scaled MMAs in tensor memory.

A row's factors lie side by side in one 32-bit column: row r of an operand is lane r % 32 of column
r / 32, in each of the four quadrants (tcgen05.cp .32x128b.warpx4 puts them there).

Sources: PTX ISA, "tcgen05.mma Block Scaling", "Scale factor A/B layout"; CUTLASS,
sm100_blockscaled_layout.hpp.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlakern.emulator import formats
from mlakern.emulator.hardware_error import HardwareError
from mlakern.emulator.tmem import QUADRANT, TensorMemory

F32: TypeAlias = NDArray[np.float32]


def factors(
    tensor: TensorMemory, address: int, rows: int, count: int, first: int, format_: str
) -> F32:
    """float32 [rows, count]: the factors of each row, from byte ``first`` of its column.

    Kernels that count bytes of tensor memory leave that byte in the upper two bits of the address.
    """
    column, lane, byte = address & 0xFFFF, address >> 16 & 0x3FFF, address >> 30
    if lane or byte not in (0, first):
        raise HardwareError(
            f"scale factors at {address:#010x}: need lane 0, and byte 0 or {first} (the scale id)"
        )
    columns = -(-rows // QUADRANT)
    tensor.check_allocated(column, columns)
    block = tensor.words[column : column + columns, :QUADRANT]
    if not tensor.written[column : column + columns, :QUADRANT].reshape(-1)[:rows].all():
        raise HardwareError(f"scale factors at column {column} were never written")
    codes = np.ascontiguousarray(block).reshape(-1)[:rows].view(np.uint8).reshape(rows, 4)
    name: Literal["ue8m0", "ue4m3"] = "ue8m0" if format_ == "ue8m0" else "ue4m3"
    return formats.widen_scale(codes[:, first : first + count], name)


def scaled(matrix: F32, scale: F32, block: int) -> F32:
    """A [rows, k] matrix with every ``block`` elements of a row times their factor."""
    parts = matrix.reshape(len(matrix), -1, block) * scale[:, :, None]
    return parts.reshape(matrix.shape)
