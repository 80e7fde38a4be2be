"""Tensor memory of one CTA: allocation, and the loads and stores of warps.

Tensor memory is 128 lanes of 512 (sm_107: 576) columns of 32 bits. Here a column is one row of a
numpy array, so that what a warpgroup holds in one register (128 lanes) is contiguous.

An address has the lane in bits [16:32) and the column in bits [0:16). A warp reaches the 32 lanes
of its quadrant, warp index modulo 4.

    shape      lanes of a quadrant   register r of thread t is at lane, column
    32x32b     32                    t,                     r
    16x64b     16                    t/4 + 8 (t%2),         2 r + (t/2)%2
    16x128b    16                    t/4 + 8 (r%2),         4 (r/2) + t%4
    16x256b    16                    t/4 + 8 ((r/2)%2),     8 (r/4) + 2 (t%4) + r%2

Sources: PTX ISA, "Tensor Memory" (addressing, allocation, access restrictions), "tcgen05.ld",
"tcgen05.alloc"; the layouts of the 16-lane shapes also from CUTLASS, copy_traits_sm100.hpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlakern.emulator.hardware_error import HardwareError

LANES = 128
QUADRANT = 32
COLUMNS = 512
EXCLUSIVE_COLUMNS = 576

Words: TypeAlias = NDArray[np.uint32]
Indices: TypeAlias = NDArray[np.intp]

_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}
_COLUMNS = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8}
_MAX_REGISTERS = 128


@dataclass(frozen=True)
class Shape:
    """A load or store shape with its repetition: ``.16x128b.x4`` is Shape("16x128b", 4).

    packed: .pack::16b or .unpack::16b: the halves of a register are two neighbouring columns.
    """

    name: str
    repeat: int
    packed: bool = False

    def __post_init__(self) -> None:
        if self.name not in _REGISTERS:
            raise HardwareError(
                f"tensor memory shape .{self.name} is not modelled, need one of {list(_REGISTERS)}"
            )
        if self.repeat not in (1, 2, 4, 8, 16, 32, 64, 128) or self.registers > _MAX_REGISTERS:
            raise HardwareError(
                f"tensor memory shape .{self.name}.x{self.repeat}: need a power of two "
                f"up to x{_MAX_REGISTERS // _REGISTERS[self.name]}"
            )

    @property
    def registers(self) -> int:
        return self.repeat * _REGISTERS[self.name]

    @property
    def columns(self) -> int:
        return self.repeat * _COLUMNS[self.name] * (2 if self.packed else 1)

    @property
    def lanes(self) -> int:
        return 32 if self.name == "32x32b" else 16


class TensorMemory:
    """The tensor memory of a CTA.

    words: uint32[columns, 128 lanes]. written: bool of the same shape. poison: cells never written
    may be read; all their bits are ones.
    """

    def __init__(self, columns: int = COLUMNS, poison: bool = False) -> None:
        self._poison = poison
        self.words: Words = np.full((columns, LANES), 0xFFFFFFFF if poison else 0, np.uint32)
        self.written: NDArray[np.bool_] = np.zeros((columns, LANES), np.bool_)
        self.allocations: dict[int, int] = {}  # first column -> number of columns
        self._may_allocate = True
        self._everything: range | None = None  # one allocation spans all: the usual, quick check

    # Allocation

    def allocate(self, columns: int, exclusive: bool = False) -> int | None:
        """Address of newly allocated columns; None while too few are free (the warp waits)."""
        total = len(self.words)
        if not self._may_allocate:
            raise HardwareError("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        if exclusive:
            if columns % 32 or not 32 <= columns <= EXCLUSIVE_COLUMNS:
                raise HardwareError(
                    f"tcgen05.alloc.exclusive: got {columns} columns, need a multiple of 32 "
                    f"up to {EXCLUSIVE_COLUMNS}"
                )
        elif columns not in (32, 64, 128, 256, 512):
            raise HardwareError(
                f"tcgen05.alloc: got {columns} columns, need a power of two from 32 to 512"
            )
        if columns > total:
            raise HardwareError(f"tcgen05.alloc: got {columns} columns, this CTA has {total}")
        first = 0
        for start, size in sorted(self.allocations.items()):
            if start - first >= columns:
                break
            first = start + size
        if first + columns > total:
            return None
        self.allocations[first] = columns
        self._everything = range(first, first + columns) if len(self.allocations) == 1 else None
        self.written[first : first + columns] = self._poison
        return first

    def deallocate(self, address: int, columns: int) -> None:
        """Give columns back; they must be one whole allocation."""
        if self.allocations.get(address) != columns:
            held = ", ".join(f"{size} at {start:#x}" for start, size in self.allocations.items())
            raise HardwareError(
                f"tcgen05.dealloc: {columns} columns at {address:#x}, allocated: {held or 'none'}"
            )
        del self.allocations[address]
        self._everything = None
        if len(self.allocations) == 1:
            ((first, size),) = self.allocations.items()
            self._everything = range(first, first + size)
        self.written[address : address + columns] = False

    def relinquish(self) -> None:
        """No further allocation by this CTA."""
        self._may_allocate = False

    def check_allocated(self, first: int, columns: int) -> None:
        """HardwareError unless all of the columns are in one allocation."""
        last = first + columns
        if self._everything and first >= self._everything.start and last <= self._everything.stop:
            return
        for start, size in self.allocations.items():
            if start <= first and last <= start + size:
                return
        held = ", ".join(f"[{start}, {start + size})" for start, size in self.allocations.items())
        raise HardwareError(
            f"tensor memory columns [{first}, {last}) are not allocated, only {held or 'none'}"
        )

    # Warps

    def load(self, shape: Shape, address: int, quadrants: Sequence[int]) -> Words:
        """tcgen05.ld by the warps of ``quadrants`` (warp index modulo 4, ascending).

        Returns uint32[registers, 32 · len(quadrants)], perhaps a view: copy it at once.
        """
        found = []
        for half in range(1 + shape.packed):
            index = self._index(shape, address, quadrants, half)
            if not self.written[index].all():
                raise HardwareError(self._never_written(shape, address, quadrants, half))
            found.append(self.words[index])
        if not shape.packed:
            return found[0]
        packed: Words = found[0] & np.uint32(0xFFFF) | found[1] << np.uint32(16)
        return packed

    def store(self, shape: Shape, address: int, quadrants: Sequence[int], values: Words) -> None:
        """tcgen05.st; ``values`` as :meth:`load` returns them."""
        parts = (values & np.uint32(0xFFFF), values >> np.uint32(16)) if shape.packed else (values,)
        for half, part in enumerate(parts):
            index = self._index(shape, address, quadrants, half)
            self.words[index] = part
            self.written[index] = True

    def lanes(self, shape: Shape, address: int, quadrants: Sequence[int]) -> slice | Indices:
        """The lanes that :meth:`load` or :meth:`store` touches, for a race detector."""
        if shape.lanes == QUADRANT and _contiguous(quadrants):
            return slice(quadrants[0] * QUADRANT, (quadrants[-1] + 1) * QUADRANT)
        base = address >> 16 & 16
        return np.array([q * 32 + base + lane for q in quadrants for lane in range(shape.lanes)])

    def _index(
        self, shape: Shape, address: int, quadrants: Sequence[int], half: int
    ) -> tuple[slice | Indices, slice | Indices]:
        """Index into ``words`` whose result is [registers, threads].

        half: of packed registers, 0 or 1.
        """
        column, lane = address & 0xFFFF, address >> 16
        self.check_allocated(column, shape.columns)
        # Every warp of a bundle passes its own quadrant's lane or none at all.
        if lane >> 5 not in (0, quadrants[0]) or lane >= LANES:
            raise HardwareError(
                f"tensor memory address {address:#010x}: lane {lane} is not in the quadrant of "
                f"warp {quadrants[0]} modulo 4 (lanes {quadrants[0] * 32} to "
                f"{quadrants[0] * 32 + 31})"
            )
        within = lane & 31
        if within not in ((0,) if shape.lanes == QUADRANT else (0, 16)):
            raise HardwareError(
                f"tensor memory address {address:#010x}: lane {lane} of a .{shape.name} access, "
                f"need a multiple of {shape.lanes}"
            )
        if shape.packed:
            columns, lanes = _layout(shape, tuple(quadrants))
            return 2 * columns + column + half, lanes + within
        if shape.lanes == QUADRANT and _contiguous(quadrants):
            first = quadrants[0] * QUADRANT
            last = (quadrants[-1] + 1) * QUADRANT
            return slice(column, column + shape.repeat), slice(first, last)
        columns, lanes = _layout(shape, tuple(quadrants))
        return columns + column, lanes + within

    def _never_written(
        self, shape: Shape, address: int, quadrants: Sequence[int], half: int
    ) -> str:
        missing = np.argwhere(~self.written[self._index(shape, address, quadrants, half)])
        register, thread = (int(value) for value in missing[0])
        return (
            f"tensor memory never written: register {register} of thread {thread % 32}, "
            f"quadrant {quadrants[thread // 32]}, of a load at column {address & 0xFFFF}"
        )


def reduce_columns(words: Words, operation: str, type_: str, absolute: bool, nan: bool) -> Words:
    """The extra result of tcgen05.ld.red: min or max over each thread's own registers.

    words: uint32[registers, threads] as loaded. type_: "f32", "u32" or "s32". nan: .NaN, a NaN
    among the values is the (canonical) result; without it NaN values are passed over.
    """
    if operation not in ("min", "max"):
        raise HardwareError(f"tcgen05.ld.red: got .{operation}, need .min or .max")
    if type_ != "f32":
        if absolute or nan:
            raise HardwareError(f"tcgen05.ld.red: .abs and .NaN need .f32, got .{type_}")
        values = words if type_ == "u32" else words.view(np.int32)
        reduced = values.max(axis=0) if operation == "max" else values.min(axis=0)
        integers: Words = reduced.view(np.uint32)
        return integers
    floats = np.abs(words.view(np.float32)) if absolute else words.view(np.float32)
    if nan:
        result = floats.max(axis=0) if operation == "max" else floats.min(axis=0)
    else:
        reduce = np.fmax if operation == "max" else np.fmin
        result = reduce.reduce(floats, axis=0)
    bits: Words = np.where(np.isnan(result), np.uint32(0x7FFFFFFF), result.view(np.uint32))
    return bits


def _contiguous(quadrants: Sequence[int]) -> bool:
    return quadrants[-1] - quadrants[0] + 1 == len(quadrants)


@lru_cache(maxsize=512)
def _layout(shape: Shape, quadrants: tuple[int, ...]) -> tuple[Indices, Indices]:
    """(columns, lanes), each [registers, threads], for address 0 (the table above)."""
    register = np.arange(shape.registers)[:, None]
    thread = np.arange(QUADRANT)[None, :]
    if shape.name == "32x32b":
        column, lane = register + 0 * thread, thread + 0 * register
    elif shape.name == "16x64b":
        column, lane = 2 * register + thread // 2 % 2, thread // 4 + 8 * (thread % 2) + 0 * register
    elif shape.name == "16x128b":
        column, lane = 4 * (register // 2) + thread % 4, thread // 4 + 8 * (register % 2)
    else:
        column = 8 * (register // 4) + 2 * (thread % 4) + register % 2
        lane = thread // 4 + 8 * (register // 2 % 2)
    columns = np.concatenate([column for _ in quadrants], axis=1)
    lanes = np.concatenate([lane + QUADRANT * quadrant for quadrant in quadrants], axis=1)
    return columns, lanes
