"""Shared-memory swizzles of TMA and of the tensor cores.

A swizzle exchanges small units of an address: bits above 7 are XORed into bits above 4 (or 5).
It works on absolute shared-memory addresses, so a pattern repeats every 256 to 1024 bytes of the
window and never moves a byte out of its aligned 128 bytes.

Source: PTX ISA, "Tensors", swizzling modes; "tcgen05 shared memory descriptor", swizzling mode.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SharedSwizzle:
    """``address ^= ((address >> 7) & mask) << shift``.

    span: bytes of a row of the swizzled pattern; 0 without a swizzle.
    period: bytes after which the pattern repeats.
    """

    name: str
    span: int
    mask: int
    shift: int

    @property
    def period(self) -> int:
        return (self.mask + 1) << 7 if self.span else 16

    def apply(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where bytes at these (logical, absolute) addresses lie; its own inverse."""
        swizzled: NDArray[np.int64] = addresses ^ (((addresses >> 7) & self.mask) << self.shift)
        return swizzled


NONE = SharedSwizzle("none", 0, 0, 4)
B32 = SharedSwizzle("32B", 32, 1, 4)
B64 = SharedSwizzle("64B", 64, 3, 4)
B128 = SharedSwizzle("128B", 128, 7, 4)
B128_ATOM32 = SharedSwizzle("128B with 32-byte atoms", 128, 3, 5)
