"""Byte-addressed memories: one shared memory, and global memory as a set of buffers.

Accesses come for one address (Python ints in and out) or for all lanes (arrays). Bounds are
checked by numpy's own indexing; only a failure looks for the lane to blame.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlakern.emulator.errors import Fault
from mlakern.emulator.values import UNSIGNED

GUARD = 1 << 20
ALIGNMENT = 256
_FIRST_ADDRESS = 1 << 32
_FULL = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF, 8: 0xFFFFFFFFFFFFFFFF}


class Store:
    """Flat bytes with typed views.

    what: its name in messages. base: the address of byte 0 in messages. Offsets are unsigned.
    """

    def __init__(self, data: NDArray[np.uint8], what: str, base: int = 0) -> None:
        self.data = data
        self.what = what
        self.base = base
        self.size = len(data)
        self._views: dict[tuple[int, int], Any] = {}

    def view(self, size: int, count: int) -> Any:
        """The bytes as elements of ``size`` bytes, or as rows of ``count`` of them."""
        found = self._views.get((size, count))
        if found is None:
            row = size * count
            whole = self.data[: self.size // row * row].view(UNSIGNED[8 * size])
            found = self._views[size, count] = whole.reshape(-1, count) if count > 1 else whole
        return found

    def load(self, offset: int, size: int, count: int) -> Any:
        """One element as an int, or ``count`` of them as a list."""
        self.check(offset, size * count, "read")
        found = self.view(size, 1)[offset // size : offset // size + count].tolist()
        return found[0] if count == 1 else found

    def store(self, offset: int, size: int, values: Any) -> None:
        """Write one int or a list of ints."""
        if type(values) is not list:
            self.check(offset, size, "write")
            self.view(size, 1)[offset // size] = values
        else:
            self.check(offset, size * len(values), "write")
            self.view(size, 1)[offset // size : offset // size + len(values)] = values

    def load_lanes(self, offsets: Any, size: int, count: int) -> Any:
        """One array of elements, or a list of ``count`` arrays."""
        row = size * count
        index = self.index(offsets, row, "read")
        try:
            found = self.view(size, count)[index]
        except IndexError:
            raise self.outside(offsets, row, "read") from None
        return found if count == 1 else list(np.ascontiguousarray(found.T))

    def store_lanes(self, offsets: Any, size: int, values: Any) -> None:
        """Write an array, or a list of arrays side by side; the last lane wins a conflict."""
        count = len(values) if type(values) is list else 1
        index = self.index(offsets, size * count, "write")
        if count > 1:
            rows = np.empty((len(index), count), UNSIGNED[8 * size])
            for number, column in enumerate(values):
                rows[:, number] = column
            values = rows
        try:
            self.view(size, count)[index] = values
        except IndexError:
            raise self.outside(offsets, size * count, "write") from None

    def index(self, offsets: Any, row: int, doing: str) -> Any:
        """Row numbers of naturally aligned rows of ``row`` bytes."""
        if row == 1:
            return offsets
        if np.bitwise_or.reduce(offsets) & (row - 1):
            lane = int(np.flatnonzero(offsets & (row - 1))[0])
            raise Fault(self.misaligned(int(offsets[lane]), row, doing), lane)
        return offsets >> offsets.dtype.type(row.bit_length() - 1)

    def check(self, offset: int, row: int, doing: str) -> None:
        if offset & (row - 1):
            raise Fault(self.misaligned(offset, row, doing))
        if offset + row > self.size:
            raise Fault(self.beyond(offset, row, doing))

    def misaligned(self, offset: int, row: int, doing: str) -> str:
        address = self.base + offset
        return (
            f"{doing} of {row} bytes at {self.what} address {address:#x}: need {row}-byte alignment"
        )

    def beyond(self, offset: int, row: int, doing: str) -> str:
        return (
            f"{doing} of {row} bytes at {self.what} address {self.base + offset:#x}: "
            f"it ends at {self.base + self.size:#x}"
        )

    def outside(self, offsets: Any, row: int, doing: str) -> Fault:
        lane = int(np.flatnonzero(offsets > self.size - row)[0])
        return Fault(self.beyond(int(offsets[lane]), row, doing), lane)


class SharedMemory(Store):
    """The shared memory of one CTA; reading a byte never written is a fault.

    written: 0xFF for each byte written.
    """

    def __init__(self, size: int, rank: int) -> None:
        rounded = -(-size // 16) * 16
        super().__init__(np.zeros(rounded, np.uint8), "shared", rank << 24)
        self.flags = Store(np.zeros(rounded, np.uint8), "shared", rank << 24)
        self.written = self.flags.data

    def poison(self) -> None:
        """Let bytes never written be read, as 0xFF."""
        self.data[:] = 0xFF
        self.written[:] = 0xFF

    def load(self, offset: int, size: int, count: int) -> Any:
        found = super().load(offset, size, count)
        if not self.written[offset : offset + size * count].all():
            raise Fault(self.unwritten(offset, size * count))
        return found

    def store(self, offset: int, size: int, values: Any) -> None:
        super().store(offset, size, values)
        count = len(values) if type(values) is list else 1
        self.written[offset : offset + size * count] = 0xFF

    def load_lanes(self, offsets: Any, size: int, count: int) -> Any:
        found = super().load_lanes(offsets, size, count)
        row = size * count
        width = min(row, 8)
        flags = self.flags.view(width, row // width)[self.index(offsets, row, "read")]
        if (flags != _FULL[width]).any():
            lane = int(np.argwhere(flags != _FULL[width])[0][0])
            raise Fault(self.unwritten(int(offsets[lane]), row), lane)
        return found

    def store_lanes(self, offsets: Any, size: int, values: Any) -> None:
        super().store_lanes(offsets, size, values)
        row = size * (len(values) if type(values) is list else 1)
        width = min(row, 8)
        index = self.index(offsets, row, "write")
        self.flags.view(width, row // width)[index] = _FULL[width]

    def unwritten(self, offset: int, row: int) -> str:
        return f"read of {row} bytes at shared address {self.base + offset:#x}: never written"


@dataclass(slots=True)
class Buffer:
    """One allocation of global memory."""

    name: str
    address: int
    store: Store
    writable: bool

    @property
    def end(self) -> int:
        return self.address + self.store.size


class GlobalMemory:
    """Named numpy arrays at virtual 64-bit addresses, with unmapped gaps between them.

    An array's own memory is used: what a kernel writes is seen in it.
    """

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._starts: list[int] = []
        self._last: Buffer | None = None

    def add(
        self,
        name: str,
        array: NDArray[Any],
        writable: bool = False,
        address: int | None = None,
        alignment: int = ALIGNMENT,
    ) -> int:
        """Place a C-contiguous array and return its address.

        address: where to place it (a multiple of 16); otherwise after the last buffer, with a gap
        of at least 1 MiB. Raises ValueError for an array that is not contiguous or an address in
        use.
        """
        if not array.flags.c_contiguous:
            raise ValueError(f"buffer {name}: the array is not C-contiguous; pass a copy")
        if writable and not array.flags.writeable:
            raise ValueError(f"buffer {name}: the array is read-only, but writable was asked for")
        data = array.reshape(-1).view(np.uint8)
        if address is None:
            last = max((b.end + GUARD for b in self._buffers), default=_FIRST_ADDRESS)
            address = -(-last // alignment) * alignment
        elif address % 16:
            raise ValueError(f"buffer {name}: address {address:#x} is not a multiple of 16")
        for other in self._buffers:
            if address < other.end and other.address < address + len(data):
                raise ValueError(
                    f"buffer {name}: [{address:#x}, {address + len(data):#x}) overlaps {other.name}"
                )
        buffer = Buffer(name, address, Store(data, "global", address), writable)
        at = bisect_right(self._starts, address)
        self._buffers.insert(at, buffer)
        self._starts.insert(at, address)
        return address

    def address(self, name: str) -> int:
        """Where a buffer was placed; KeyError if there is none of this name."""
        for buffer in self._buffers:
            if buffer.name == name:
                return buffer.address
        raise KeyError(name)

    def find(self, address: int, size: int, doing: str, lane: int | None = None) -> Buffer:
        """The buffer that holds ``size`` bytes at ``address``; a Fault names the nearest one."""
        buffer = self._last
        if buffer is None or not buffer.address <= address <= buffer.end - size:
            at = bisect_right(self._starts, address) - 1
            buffer = self._buffers[at] if at >= 0 else None
            if buffer is None or address + size > buffer.end:
                raise Fault(self._outside(address, size, doing), lane)
            self._last = buffer
        if doing != "read" and not buffer.writable:
            raise Fault(
                f"{doing} of {size} bytes at global address {address:#x}: "
                f"buffer {buffer.name} is read-only",
                lane,
            )
        return buffer

    def _outside(self, address: int, size: int, doing: str) -> str:
        text = f"{doing} of {size} bytes at global address {address:#x}: outside every buffer"
        if not self._buffers:
            return text + "; there are none"
        near = min(self._buffers, key=lambda b: max(b.address - address, address - b.end + 1))
        if address < near.address:
            where = f"begins {near.address - address} bytes after it"
        else:
            where = f"ends {address + size - near.end} bytes before the end of the access"
        return f"{text}; nearest is {near.name} [{near.address:#x}, {near.end:#x}), which {where}"

    def span(self, address: int, size: int, write: bool) -> tuple[NDArray[np.uint8], int]:
        """The bytes of the buffer that holds a range, and the index of the range in them."""
        buffer = self.find(address, size, "write" if write else "read")
        return buffer.store.data, address - buffer.address

    def load(self, address: int, size: int, count: int) -> Any:
        buffer = self.find(address, size * count, "read")
        return buffer.store.load(address - buffer.address, size, count)

    def store(self, address: int, size: int, values: Any) -> None:
        row = size * (len(values) if type(values) is list else 1)
        buffer = self.find(address, row, "write")
        buffer.store.store(address - buffer.address, size, values)

    def load_lanes(self, addresses: Any, size: int, count: int) -> Any:
        buffer = self.find(int(addresses[0]), size * count, "read", 0)
        try:
            return buffer.store.load_lanes(addresses - np.uint64(buffer.address), size, count)
        except Fault:
            return self._load_each(addresses, size, count)

    def store_lanes(self, addresses: Any, size: int, values: Any) -> None:
        row = size * (len(values) if type(values) is list else 1)
        buffer = self.find(int(addresses[0]), row, "write", 0)
        offsets = addresses - np.uint64(buffer.address)
        if not (offsets > buffer.store.size - row).any():
            buffer.store.store_lanes(offsets, size, values)
            return
        columns = values if type(values) is list else [values]
        dtype = UNSIGNED[8 * size]
        columns = [np.broadcast_to(np.array(c, dtype), addresses.shape) for c in columns]
        for lane, address in enumerate(addresses.tolist()):
            buffer = self.find(address, row, "write", lane)
            buffer.store.store(address - buffer.address, size, [int(c[lane]) for c in columns])

    def _load_each(self, addresses: Any, size: int, count: int) -> Any:
        """Lanes that lie in several buffers, or at fault."""
        out = np.empty((count, len(addresses)), UNSIGNED[8 * size])
        for lane, address in enumerate(addresses.tolist()):
            buffer = self.find(address, size * count, "read", lane)
            try:
                out[:, lane] = buffer.store.load(address - buffer.address, size, count)
            except Fault as fault:
                raise Fault(str(fault), lane) from None
        return out[0] if count == 1 else list(out)
