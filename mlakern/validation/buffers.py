"""Memory of a problem before it is anywhere: buffers, and the tensors that lie in them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mlakern.runtime.arrays import ArrayView, dense_strides

_NUMPY_DTYPES: dict[str, Any] = {
    "uint8": np.uint8,
    "int32": np.int32,
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": np.uint8,  # codes: assignments must not convert
}


@dataclass(frozen=True, eq=False)
class Buffer:
    """One allocation. image: its bytes.

    pieces: the parts that a kernel may touch. The emulator gives only these an address; a GPU gets
    the whole image. None: all of it.
    """

    name: str
    image: NDArray[np.uint8]
    writable: bool = False
    pieces: tuple[slice, ...] = field(default=(slice(None),))


@dataclass(frozen=True, eq=False)
class Field:
    """A tensor in a buffer; offset and strides in bytes."""

    buffer: Buffer
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def of_array(
        cls,
        name: str,
        values: NDArray[Any],
        dtype: str,
        *,
        writable: bool = False,
        pieces: tuple[slice, ...] = (slice(None),),
    ) -> Field:
        """A dense tensor alone in its buffer, a copy of `values`."""
        image = np.frombuffer(bytearray(values.tobytes()), np.uint8)
        strides = dense_strides(values.shape, values.itemsize)
        return cls(Buffer(name, image, writable, pieces), 0, values.shape, strides, dtype)

    def columns(self, start: int, stop: int) -> Field:
        """The slice [..., start:stop] of a tensor of bytes."""
        return replace(self, offset=self.offset + start, shape=(*self.shape[:-1], stop - start))

    def array(self, image: NDArray[np.uint8] | None = None) -> NDArray[Any]:
        """The elements in the buffer's image, or in another one of the same size; no copy."""
        dtype = _NUMPY_DTYPES[self.dtype]
        memory = (self.buffer.image if image is None else image)[self.offset :]
        elements: NDArray[Any] = np.ndarray(self.shape, dtype, memory.data, 0, self.strides)
        return elements

    def view(self, base: int, device: str) -> ArrayView:
        """The tensor when its buffer lies at address `base`."""
        return ArrayView(base + self.offset, self.shape, self.strides, self.dtype, device)
