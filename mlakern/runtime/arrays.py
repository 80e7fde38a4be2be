"""Arrays of other libraries, seen without a copy: an address, a shape, byte strides and a type.

Sources: DLPack ("Python Specification for DLPack", dlpack.h 1.1) and Numba's "CUDA Array
Interface", version 3. FP8 has no type string in the latter: pass a uint8 or int8 view there.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

ITEM_SIZES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
HOST = "cpu"


@dataclass(frozen=True)
class ArrayView:
    """Memory that someone else owns and keeps alive.

    address: of element 0, in bytes. strides: bytes between neighbours in each dimension.
    dtype: a key of ITEM_SIZES, or another name that nothing accepts. device: "cuda:N" or "cpu".
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str

    @classmethod
    def dense(cls, address: int, shape: Sequence[int], dtype: str, device: str) -> ArrayView:
        """A row-major array without gaps."""
        return cls(address, tuple(shape), dense_strides(shape, ITEM_SIZES[dtype]), dtype, device)

    @property
    def item_size(self) -> int:
        return ITEM_SIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, gaps not counted."""
        total = self.item_size
        for extent in self.shape:
            total *= extent
        return total

    @property
    def is_dense(self) -> bool:
        """Row-major without gaps; the stride of a dimension of one element does not matter."""
        wanted = dense_strides(self.shape, self.item_size)
        return all(
            extent == 1 or stride == want
            for extent, stride, want in zip(self.shape, self.strides, wanted, strict=True)
        )

    def columns(self, start: int, stop: int) -> ArrayView:
        """The slice [..., start:stop]."""
        return replace(
            self,
            address=self.address + start * self.strides[-1],
            shape=(*self.shape[:-1], stop - start),
        )

    def without_axis(self, axis: int) -> ArrayView:
        """The same elements without a dimension of one element."""
        return replace(
            self,
            shape=self.shape[:axis] + self.shape[axis + 1 :],
            strides=self.strides[:axis] + self.strides[axis + 1 :],
        )


def dense_strides(shape: Sequence[int], item_size: int) -> tuple[int, ...]:
    """Row-major byte strides."""
    strides: list[int] = []
    step = item_size
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def as_view(name: str, array: Any) -> ArrayView:
    """`array` (an ArrayView, or anything with DLPack or the CUDA array interface) as a view.

    Tensors of torch, if the caller has loaded it, are read by their own methods: these know FP8 and
    cost less than an export. No copy, no synchronisation.

    Raises ValueError that names the argument.
    """
    if isinstance(array, ArrayView):
        return array
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _from_torch(array)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _from_dlpack(name, array)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _from_cuda_array_interface(name, interface)
    raise ValueError(
        f"{name}: got {type(array).__name__}, need an array with __dlpack__ or "
        "__cuda_array_interface__, or a mlakern ArrayView"
    )


def _from_torch(tensor: Any) -> ArrayView:
    item_size = tensor.element_size()
    return ArrayView(
        tensor.data_ptr(),
        tuple(tensor.shape),
        tuple(stride * item_size for stride in tensor.stride()),
        str(tensor.dtype).removeprefix("torch."),
        str(tensor.device),
    )


class _DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    """The head of DLManagedTensor, which is all that an unversioned capsule needs read."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_DL_CPU, _DL_CUDA, _DL_CUDA_MANAGED = 1, 2, 13
# (DLDataTypeCode, bits) -> name
_DL_DTYPES = {
    (0, 8): "int8",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
}

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _from_dlpack(name: str, array: Any) -> ArrayView:
    device_type, device_index = array.__dlpack_device__()
    on_gpu = int(device_type) in (_DL_CUDA, _DL_CUDA_MANAGED)
    try:
        # -1: the producer adds no synchronisation; order is the caller's stream's business.
        capsule = array.__dlpack__(stream=-1 if on_gpu else None)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: {type(array).__name__} has no DLPack view: {error}; try a uint8 view of FP8"
        ) from error
    # The capsule stays unconsumed, so its destructor gives the tensor structure back; the array
    # itself is kept alive by the caller.
    tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    shape = tuple(tensor.shape[: tensor.ndim])
    dtype = _dlpack_dtype(name, tensor.dtype)
    item_size = ITEM_SIZES[dtype]
    strides = (
        tuple(stride * item_size for stride in tensor.strides[: tensor.ndim])
        if tensor.strides
        else dense_strides(shape, item_size)
    )
    if int(device_type) == _DL_CPU:
        device = HOST
    else:
        device = f"cuda:{device_index}" if on_gpu else f"dlpack device type {int(device_type)}"
    return ArrayView((tensor.data or 0) + tensor.byte_offset, shape, strides, dtype, device)


def _dlpack_dtype(name: str, dtype: _DLDataType) -> str:
    known = _DL_DTYPES.get((dtype.code, dtype.bits)) if dtype.lanes == 1 else None
    if known is None:
        raise ValueError(
            f"{name}: got DLPack type code {dtype.code} with {dtype.bits} bits and "
            f"{dtype.lanes} lanes, need one of {', '.join(ITEM_SIZES)}"
        )
    return known


_TYPE_STRINGS = {
    "|b1": "bool",
    "|i1": "int8",
    "|u1": "uint8",
    "<f2": "float16",
    "<V2": "bfloat16",
    "<i4": "int32",
    "<f4": "float32",
    "<i8": "int64",
    "<f8": "float64",
}


def _from_cuda_array_interface(name: str, interface: dict[str, Any]) -> ArrayView:
    dtype = _TYPE_STRINGS.get(interface["typestr"])
    if dtype is None:
        raise ValueError(
            f"{name}: got type string {interface['typestr']!r}, need one of "
            f"{', '.join(_TYPE_STRINGS)}"
        )
    shape = tuple(interface["shape"])
    strides = interface.get("strides") or dense_strides(shape, ITEM_SIZES[dtype])
    address = interface["data"][0] or 0
    # The interface does not say which device: the current one, by its specification.
    return ArrayView(address, shape, tuple(strides), dtype, "cuda")
