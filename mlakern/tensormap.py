"""What a TMA tensor map describes, before anything encodes it.

The launch arguments carry these objects. The runtime hands them to ``cuTensorMapEncodeTiled``; the
emulator reads them as they are. Field meanings and limits are those of the CUDA driver API
("Tensor Map Object Management"); dimension 0 is the innermost one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MAX_RANK = 5
MAX_BOX_EXTENT = 256
MAX_EXTENT = 1 << 32
MAX_STRIDE = 1 << 40


class Swizzle(Enum):
    """Shared-memory swizzle of a box; the value is the span in bytes (0: none)."""

    NONE = 0
    B32 = 32
    B64 = 64
    B128 = 128


class TensorMapError(ValueError):
    """A tensor map that the hardware would refuse."""


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map: which bytes of global memory a box at given coordinates covers.

    address: global address in bytes, 16-byte aligned.
    element_bytes: 1, 2, 4 or 8.
    extents: elements in each dimension, innermost first.
    strides: bytes between neighbours in dimensions 1, 2, …; multiples of 16, one less than extents.
    box: elements copied in each dimension.
    swizzle: how the box lies in shared memory.
    """

    address: int
    element_bytes: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Swizzle = Swizzle.NONE

    def __post_init__(self) -> None:
        rank = len(self.extents)
        if not 1 <= rank <= MAX_RANK:
            raise TensorMapError(f"tensor map: got rank {rank}, need 1 to {MAX_RANK}")
        if len(self.strides) != rank - 1 or len(self.box) != rank:
            raise TensorMapError(
                f"tensor map of rank {rank}: got {len(self.strides)} strides and "
                f"{len(self.box)} box extents, need {rank - 1} and {rank}"
            )
        if self.element_bytes not in (1, 2, 4, 8):
            raise TensorMapError(
                f"tensor map: got element size {self.element_bytes}, need 1, 2, 4, 8"
            )
        if self.address % 16:
            raise TensorMapError(f"tensor map: address {self.address:#x} is not 16-byte aligned")
        for dim, extent in enumerate(self.extents):
            if not 1 <= extent <= MAX_EXTENT:
                raise TensorMapError(f"tensor map: extent {dim} is {extent}, need 1 to 2^32")
        for dim, stride in enumerate(self.strides, 1):
            if stride % 16 or not 0 <= stride < MAX_STRIDE:
                raise TensorMapError(
                    f"tensor map: stride {dim} is {stride} bytes, need a multiple of 16 below 2^40"
                )
        for dim, extent in enumerate(self.box):
            if not 1 <= extent <= MAX_BOX_EXTENT:
                raise TensorMapError(f"tensor map: box extent {dim} is {extent}, need 1 to 256")
        inner = self.box[0] * self.element_bytes
        if inner % 16:
            raise TensorMapError(
                f"tensor map: inner box row is {inner} bytes, need a multiple of 16"
            )
        if self.swizzle is not Swizzle.NONE and inner > self.swizzle.value:
            raise TensorMapError(
                f"tensor map: inner box row is {inner} bytes, swizzle {self.swizzle.name} allows "
                f"at most {self.swizzle.value}"
            )

    @property
    def rank(self) -> int:
        return len(self.extents)

    @property
    def box_bytes(self) -> int:
        """Bytes that one copy of this box adds to its mbarrier, out-of-bounds elements included."""
        total = self.element_bytes
        for extent in self.box:
            total *= extent
        return total
