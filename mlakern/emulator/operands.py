"""Matrix operands of the tensor cores: from descriptors to float32 matrices.

Where element (row r, byte k of its K) of an operand lies in shared memory, before the swizzle, with
S the start, L the leading and T the stride offset, and w the swizzle's span:

    K-major, swizzled      S + (r%8) w + (r/8) T + k
    K-major, unswizzled    S + (r%8) 16 + (r/8) T + (k/16) L + k%16

and of element (k, byte x of its row along M or N):

    MN-major, swizzled     S + x%w + (x/w) L + (k%8) w + (k/8) T
    MN-major, unswizzled   S + x%16 + (x/16) T + (k%8) 16 + (k/8) L

The swizzle then works on the whole address. Everything moves in units of 16 bytes. A kernel uses
few descriptors, again and again, so their index arrays are cached.

Sources: PTX ISA, "Shared memory layout and swizzling", "Canonical layouts"; CUTLASS,
mma_sm100_desc.hpp (canonical layouts).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlakern.emulator import formats
from mlakern.emulator import swizzle as swizzles
from mlakern.emulator.descriptors import SharedDescriptor
from mlakern.emulator.hardware_error import HardwareError

Bytes: TypeAlias = NDArray[np.uint8]
Indices: TypeAlias = NDArray[np.int64]
F32: TypeAlias = NDArray[np.float32]

_UNIT = 16


@dataclass(frozen=True)
class Operand:
    """One CTA's part of A or B.

    rows: along M or N. row_bytes: of one row's K. element_bytes: of one element.
    """

    rows: int
    row_bytes: int
    element_bytes: int
    mn_major: bool


def gather(operand: Operand, descriptor: SharedDescriptor, units: NDArray[np.complex128]) -> Bytes:
    """The operand's bytes, [rows, row_bytes] or MN-major [k, rows · element_bytes].

    units: a CTA's shared memory as 16-byte items; the operand must be inside it.
    """
    gathered: Bytes = units.take(places(operand, descriptor)).view(np.uint8)
    return gathered


def check_readable(operand: Operand, descriptor: SharedDescriptor, written: Bytes) -> None:
    """HardwareError unless the operand is inside shared memory and every byte was written."""
    where = places(operand, descriptor)
    end = (int(where.max()) + 1) * _UNIT
    if end > len(written):
        raise HardwareError(
            f"matrix operand at {descriptor.start:#x} reaches {end:#x}, shared memory ends at "
            f"{len(written):#x}"
        )
    missing = written.view(np.complex128).take(where).view(np.uint8) == 0
    if missing.any():
        row, byte = (int(value) for value in np.argwhere(missing)[0])
        address = int(where[row, byte // _UNIT]) * _UNIT + byte % _UNIT
        raise HardwareError(
            f"matrix operand reads shared memory never written: byte {address:#x} "
            f"(row {row}, byte {byte} of the operand at {descriptor.start:#x})"
        )


def widen(elements: Bytes, format_: str) -> F32:
    """float32 values of raw elements; the last axis shrinks by the element size."""
    values: F32
    if format_ in ("e4m3", "e5m2"):
        # Two elements at once: half the look-ups.
        values = _pair_table(format_).take(elements.view(np.uint16)).view(np.float32)
    elif format_ == "e2m1":
        nibbles = np.stack((elements & np.uint8(15), elements >> np.uint8(4)), axis=-1)
        values = formats.widen(nibbles.reshape(*elements.shape[:-1], -1), "e2m1")
    elif format_ in ("u8", "s8"):
        values = elements.view(np.uint8 if format_ == "u8" else np.int8).astype(np.float32)
    elif format_ == "f16":
        values = elements.view(np.float16).astype(np.float32)
    elif format_ == "bf16":
        values = formats.bf16_to_f32(elements.view(np.uint16))
    else:
        values = formats.tf32_operand(elements.view(np.uint32))
    return values


@cache
def _pair_table(format_: str) -> NDArray[np.complex64]:
    """Both values of every pair of 8-bit codes, the lower byte first, as one 8-byte item."""
    single = formats.widening_table("e4m3" if format_ == "e4m3" else "e5m2")
    pairs = np.empty((256, 256, 2), np.float32)  # [upper byte, lower byte]
    pairs[..., 0] = single[None, :]
    pairs[..., 1] = single[:, None]
    table: NDArray[np.complex64] = pairs.view(np.complex64).reshape(-1)
    return table


@lru_cache(maxsize=4096)
def granules(operand: Operand, descriptor: SharedDescriptor) -> Indices:
    """The operand's 4-byte granules; cached."""
    units = places(operand, descriptor).reshape(-1, 1)
    every: Indices = (units * 4 + np.arange(4)).reshape(-1)
    every.setflags(write=False)
    return every


@lru_cache(maxsize=4096)
def places(operand: Operand, descriptor: SharedDescriptor) -> Indices:
    """Index of each 16-byte unit in shared memory, [rows, K bytes / 16] or MN-major
    [k, row bytes / 16]; cached. HardwareError for a layout that no MMA has."""
    swizzle, start = descriptor.swizzle, descriptor.start
    if swizzle is swizzles.B128_ATOM32:
        raise HardwareError(f"matrix operand: swizzle {swizzle.name} is not modelled")
    contiguous = operand.rows * operand.element_bytes if operand.mn_major else operand.row_bytes
    if contiguous % _UNIT:
        raise HardwareError(
            f"matrix operand: rows of {contiguous} bytes, need multiples of {_UNIT}"
        )
    along = np.arange(0, contiguous, _UNIT, dtype=np.int64)[None, :]  # bytes within a memory row
    row = np.arange(
        operand.row_bytes // operand.element_bytes if operand.mn_major else operand.rows,
        dtype=np.int64,
    )[:, None]
    span = swizzle.span
    if span:
        reach = min(contiguous, span) if operand.mn_major else contiguous
        if start % span + reach > span:
            raise HardwareError(
                f"matrix operand: {reach} bytes from byte {start % span} of a row pass the end of "
                f"the {span}-byte row of swizzle {swizzle.name}"
            )
        address = row % 8 * span + row // 8 * descriptor.stride
        if operand.mn_major:
            address = address + along % span + along // span * descriptor.leading
        else:
            address = address + along
    elif operand.mn_major:
        address = row % 8 * _UNIT + row // 8 * descriptor.leading
        address = address + along // _UNIT * descriptor.stride
    else:
        address = row % 8 * _UNIT + row // 8 * descriptor.stride
        address = address + along // _UNIT * descriptor.leading
    units = swizzle.apply(start + address) // _UNIT
    units.setflags(write=False)
    return units
