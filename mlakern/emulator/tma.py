"""Tiled copies of the tensor memory accelerator between global and shared memory.

A copy has two halves, so that one box can reach several CTAs (multicast) and can arrive late:

    box = read_box(tensor_map, coordinates, memory)            global -> dense bytes, zeros outside
    write_shared(box, tensor_map.swizzle, data, written, at)   dense -> swizzled shared memory

    box = read_shared(tensor_map, data, written, at)           and back
    write_box(tensor_map, coordinates, box, memory)            elements outside are not written

A dense box is uint8, dimension 0 fastest. In-bounds elements of a box form a box themselves, so a
copy is one strided numpy assignment; shared memory is permuted in units of 16 bytes.

Sources: PTX ISA, "Tensors" (tiled mode, bounding box, out-of-boundary access, swizzling modes) and
"cp.async.bulk.tensor"; its alignment table asks for 128-byte aligned shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlakern.emulator import swizzle as swizzles
from mlakern.emulator.hardware_error import HardwareError
from mlakern.tensormap import Swizzle, TensorMap

Bytes: TypeAlias = NDArray[np.uint8]

SHARED_ALIGNMENT = 128
_UNIT = 16  # bytes that every swizzle keeps together; numpy moves them as complex128

_SWIZZLES = {
    Swizzle.NONE: swizzles.NONE,
    Swizzle.B32: swizzles.B32,
    Swizzle.B64: swizzles.B64,
    Swizzle.B128: swizzles.B128,
}


class GlobalBytes(Protocol):
    """What a copy needs of global memory."""

    def span(self, address: int, size: int, write: bool) -> tuple[Bytes, int]:
        """The buffer (flat uint8) that holds [address, address + size), and the index of address.

        Raises HardwareError when no single buffer holds all of it, or when it may not be written.
        """


def read_box(tensor_map: TensorMap, coordinates: Sequence[int], memory: GlobalBytes) -> Bytes:
    """The bytes of the box at ``coordinates`` (elements, innermost first), zeros outside.

    Raises HardwareError for a wrong number of coordinates or memory that does not exist.
    """
    inside = _Inside(tensor_map, coordinates)
    if inside.whole:
        box = np.empty(inside.box_shape, np.uint8)
    else:
        box = np.zeros(inside.box_shape, np.uint8)
    _exchange(inside.address, inside.shape, inside.strides, box[inside.place], memory, write=False)
    return box.reshape(-1)


def write_box(
    tensor_map: TensorMap, coordinates: Sequence[int], box: Bytes, memory: GlobalBytes
) -> None:
    """Store a dense box; elements outside the tensor are dropped."""
    inside = _Inside(tensor_map, coordinates)
    source = box.reshape(inside.box_shape)[inside.place]
    _exchange(inside.address, inside.shape, inside.strides, source, memory, write=True)


def write_shared(
    box: Bytes, tensor_map: TensorMap, data: Bytes, written: Bytes, address: int
) -> None:
    """Lay a dense box out in shared memory.

    data, written: all of one CTA's shared memory, indexed by offset; ``written`` becomes 0xFF.
    """
    order, first = _shared_order(tensor_map, address, len(data))
    units = data[first : first + box.size].view(np.complex128)
    units[:] = box.view(np.complex128).take(order)
    written[first : first + box.size] = 0xFF


def read_shared(tensor_map: TensorMap, data: Bytes, written: Bytes, address: int) -> Bytes:
    """The dense box that lies at ``address``; HardwareError if a byte of it was never written."""
    order, first = _shared_order(tensor_map, address, len(data))
    last = first + tensor_map.box_bytes
    if not written[first:last].all():
        missing = first + int(np.argmin(written[first:last] != 0))
        raise HardwareError(f"read of shared memory never written: byte {missing:#x} of the box")
    box: Bytes = data[first:last].view(np.complex128).take(order).view(np.uint8)
    return box


def shared_granules(tensor_map: TensorMap, address: int) -> slice:
    """The 4-byte granules that a box at ``address`` covers (a swizzle stays inside the box)."""
    return slice(address >> 2, (address + tensor_map.box_bytes) >> 2)


class _Inside:
    """The in-bounds part of a box: where it begins in memory and where in the dense box.

    Shapes and strides are numpy's: outermost dimension first, the last one in bytes.
    """

    def __init__(self, tensor_map: TensorMap, coordinates: Sequence[int]) -> None:
        if len(coordinates) != tensor_map.rank:
            raise HardwareError(
                f"tensor copy: got {len(coordinates)} coordinates, "
                f"need {tensor_map.rank} for this tensor map"
            )
        width = tensor_map.element_bytes
        steps = (width, *tensor_map.strides)
        self.address = tensor_map.address
        shape, place = [], []
        for at, box, extent, step in zip(
            coordinates, tensor_map.box, tensor_map.extents, steps, strict=True
        ):
            first, last = max(at, 0), min(at + box, extent)
            self.address += first * step
            shape.append(max(last - first, 0))
            place.append(slice(first - at, max(last, first) - at))
        self.whole = tuple(shape) == tensor_map.box
        shape[0] *= width
        place[0] = slice(place[0].start * width, place[0].stop * width)
        self.shape = tuple(reversed(shape))
        self.place = tuple(reversed(place))
        self.strides = (*reversed(tensor_map.strides), 1)
        self.box_shape = (*reversed(tensor_map.box[1:]), tensor_map.box[0] * width)


def _exchange(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    block: Bytes,
    memory: GlobalBytes,
    write: bool,
) -> None:
    """Copy between a strided block of global memory and ``block`` of the same shape."""
    if 0 in shape:
        return
    size = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    try:
        buffer, at = memory.span(address, size, write)
    except HardwareError:
        # Perhaps several buffers hold it, each a part of the outermost dimension.
        if len(shape) == 1:
            raise
        for index in range(shape[0]):
            start = address + index * strides[0]
            _exchange(start, shape[1:], strides[1:], block[index], memory, write)
        return
    view = np.ndarray(shape, np.uint8, buffer, at, strides)
    if write:
        view[...] = block
    else:
        block[...] = view


def _shared_order(
    tensor_map: TensorMap, address: int, shared_bytes: int
) -> tuple[NDArray[np.int64], int]:
    """Unit permutation of a box at ``address``, and ``address`` itself once it is legal."""
    if address % SHARED_ALIGNMENT:
        raise HardwareError(
            f"tensor copy: shared address {address:#x}, need a multiple of {SHARED_ALIGNMENT}"
        )
    size = tensor_map.box_bytes
    if address + size > shared_bytes:
        raise HardwareError(
            f"tensor copy: box of {size} bytes at shared address {address:#x} passes the end of "
            f"shared memory ({shared_bytes:#x})"
        )
    mode = _SWIZZLES[tensor_map.swizzle]
    row = tensor_map.box[0] * tensor_map.element_bytes
    if mode.span and row != mode.span:
        raise HardwareError(
            f"tensor copy: inner box row of {row} bytes with swizzle {mode.name}, "
            f"need {mode.span} (shorter rows are not modelled)"
        )
    return _unit_order(mode, address % mode.period, size // _UNIT), address


@lru_cache(maxsize=256)
def _unit_order(mode: swizzles.SharedSwizzle, phase: int, units: int) -> NDArray[np.int64]:
    """Index of the other side's unit for each unit of a box that starts at ``phase``."""
    addresses = phase + _UNIT * np.arange(units, dtype=np.int64)
    order = (mode.apply(addresses) - phase) // _UNIT
    order.setflags(write=False)
    return order
