"""Matrix operands of the tensor cores: from descriptors to float32 matrices.

Where element (row r, byte k of its K) of an operand lies in shared memory, before the swizzle, with
S the start, L the leading and T the stride offset, and w the swizzle's span:

    K-major, swizzled      S + (r%8) w + (r/8) T + k
    K-major, unswizzled    S + (r%8) 16 + (r/8) T + (k/16) L + k%16

and of element (k, byte x of its row along M or N):

    MN-major, swizzled     S + x%w + (x/w) L + (k%8) w + (k/8) T
    MN-major, unswizzled   S + x%16 + (x/16) T + (k%8) 16 + (k/8) L

The swizzle then works on the whole address. Everything moves in units of 16 bytes. An index array
depends on the start only through its place in the swizzle's pattern: a few arrays serve a kernel.

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
from mlakern.emulator.swizzle import SharedSwizzle

Bytes: TypeAlias = NDArray[np.uint8]
Indices: TypeAlias = NDArray[np.int64]
F32: TypeAlias = NDArray[np.float32]

_UNIT = 16
_ALL_WRITTEN = np.uint64(0xFFFFFFFFFFFFFFFF)


@dataclass(frozen=True)
class Operand:
    """One CTA's part of A or B.

    rows: along M or N. row_bytes: of one row's K. element_bytes: of one element.
    """

    rows: int
    row_bytes: int
    element_bytes: int
    mn_major: bool


@dataclass(frozen=True, eq=False)
class Plan:
    """Where an operand lies relative to its pattern's start.

    units: index of each 16-byte unit, [rows, K bytes / 16] or MN-major [k, row bytes / 16].
    first, last: bounds of the units.
    """

    units: Indices
    first: int
    last: int

    def granules(self, base: int) -> Indices:
        """4-byte granules of the operand when the pattern starts at byte ``base``."""
        granules: Indices = (self.units.reshape(-1, 1) * 4 + np.arange(4)).reshape(-1) + (base >> 2)
        return granules


def pattern_start(descriptor: SharedDescriptor) -> int:
    """The byte address to which the indices of :func:`plan` are relative."""
    return descriptor.start - descriptor.start % descriptor.swizzle.period


def plan(operand: Operand, descriptor: SharedDescriptor) -> Plan:
    """The (cached) places of an operand's units."""
    return _plan(
        operand,
        descriptor.start % descriptor.swizzle.period,
        descriptor.leading,
        descriptor.stride,
        descriptor.swizzle,
    )


def gather(operand: Operand, descriptor: SharedDescriptor, data: Bytes, written: Bytes) -> Bytes:
    """The operand's bytes, [rows, row_bytes] or MN-major [k, rows · element_bytes].

    data, written: the CTA's shared memory by offset. HardwareError for bytes outside it or never
    written.
    """
    where = plan(operand, descriptor)
    base = pattern_start(descriptor)
    first, last = base + where.first * _UNIT, base + where.last * _UNIT
    if last > len(data):
        raise HardwareError(
            f"matrix operand at {descriptor.start:#x} reaches {last:#x}, shared memory ends at "
            f"{len(data):#x}"
        )
    if written[first:last].view(np.uint64).min() != _ALL_WRITTEN:
        _check_written(where, descriptor, written)
    units = data[base:last].view(np.complex128).take(where.units)
    gathered: Bytes = units.view(np.uint8)
    return gathered


def widen(elements: Bytes, format_: str) -> F32:
    """float32 values of raw elements; the last axis shrinks by the element size."""
    values: F32
    if format_ in ("e4m3", "e5m2"):
        # Two elements at once: half the look-ups.
        values = _pair_table(format_).take(elements.view(np.uint16)).view(np.float32)
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


@lru_cache(maxsize=1024)
def _plan(operand: Operand, phase: int, leading: int, stride: int, swizzle: SharedSwizzle) -> Plan:
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
        if phase % span + reach > span:
            raise HardwareError(
                f"matrix operand: {reach} bytes from byte {phase % span} of a row pass the end of "
                f"the {span}-byte row of swizzle {swizzle.name}"
            )
        address = row % 8 * span + row // 8 * stride
        address = address + (along % span + along // span * leading if operand.mn_major else along)
    elif operand.mn_major:
        address = row % 8 * _UNIT + row // 8 * leading + along // _UNIT * stride
    else:
        address = row % 8 * _UNIT + row // 8 * stride + along // _UNIT * leading
    units = swizzle.apply(address + phase) // _UNIT
    units.setflags(write=False)
    return Plan(units, int(units.min()), int(units.max()) + 1)


def _check_written(where: Plan, descriptor: SharedDescriptor, written: Bytes) -> None:
    base = pattern_start(descriptor)
    state = written[base : base + where.last * _UNIT].view(np.complex128).take(where.units)
    missing = state.view(np.uint8) == 0
    if missing.any():
        row, byte = (int(value) for value in np.argwhere(missing)[0])
        address = base + int(where.units[row, byte // _UNIT]) * _UNIT + byte % _UNIT
        raise HardwareError(
            f"matrix operand reads shared memory never written: byte {address:#x} "
            f"(row {row}, byte {byte} of the operand at {descriptor.start:#x})"
        )
