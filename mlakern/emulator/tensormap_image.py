"""The 128 bytes of an encoded tensor map (CUtensorMap) and back.

Host code that encodes its own tensor maps hands a kernel this image. The layout is not documented;
these fields are known, as little-endian 32-bit words:

    w0-w1    global address
    w2       [4:7) rank - 1   [7:11) data type   [13:15) swizzle 0, 32, 64, 128 bytes
             [19:21) swizzle atomicity (0: 16 bytes)
    w3-w6    strides of dimensions 1 to 4, >> 4, lower 32 bits
    w7       their upper 4 bits, dimension 1 lowest
    w8-w12   extents - 1
    byte 55  box extent 0 - 1, bytes 56 to 59 the others

Data types have numbers of their own (seen in images of the DSL's host code): 0 u8, 1 16-bit,
2 and 3 32-bit, 4 and 5 64-bit integers, 6 f16, 7 f32 (tf32 too), 8 flushed f32 (inferred), 9 f64,
10 bf16, 11 4-bit elements. Other bits carry no meaning known here.
"""

from __future__ import annotations

import struct

from mlakern.emulator.hardware_error import HardwareError
from mlakern.tensormap import Swizzle, TensorMap, TensorMapError

IMAGE_BYTES = 128

_TYPE_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2)
_TYPE_NAMES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32", "f64", "bf16")
_NIBBLES = 11
_TYPE_OF_BYTES = {1: 0, 2: 6, 4: 7, 8: 9}
_SWIZZLES = (Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128)
_BOX_OFFSET = 55


def element_type(image: bytes) -> str:
    """The type of a tensor's elements, such as f32; s8 and the like are u8 to a tensor map."""
    return _TYPE_NAMES[_data_type(image)]


def holds_nibbles(image: bytes) -> bool:
    """Whether elements have 4 bits; :func:`decode` counts pairs of them, coordinates do not."""
    return int.from_bytes(image[8:12], "little") >> 7 & 15 == _NIBBLES


def _data_type(image: bytes) -> int:
    found = int.from_bytes(image[8:12], "little") >> 7 & 15
    if found == _NIBBLES:
        return 0
    if found >= len(_TYPE_BYTES):
        raise HardwareError(f"tensor map image: data type {found}, need 0 to {_NIBBLES}")
    return found


def decode(image: bytes) -> TensorMap:
    """The tensor map of an image; HardwareError if it is not one that tiled copies could use."""
    if len(image) != IMAGE_BYTES:
        raise HardwareError(f"tensor map image: got {len(image)} bytes, need {IMAGE_BYTES}")
    words = struct.unpack("<32I", image)
    rank = (words[2] >> 4 & 7) + 1
    if rank > 5:
        raise HardwareError(f"tensor map image: rank {rank}, need 1 to 5")
    element_bytes = _TYPE_BYTES[_data_type(image)]
    if words[2] >> 19 & 3:
        raise HardwareError(
            f"tensor map image: swizzle atomicity {words[2] >> 19 & 3} is not modelled"
        )
    extents = [word + 1 for word in words[8 : 8 + rank]]
    box = [byte + 1 for byte in image[_BOX_OFFSET : _BOX_OFFSET + rank]]
    if holds_nibbles(image):
        extents[0], box[0] = -(-extents[0] // 2), -(-box[0] // 2)
    strides = [(words[3 + i] | (words[7] >> 4 * i & 15) << 32) << 4 for i in range(rank - 1)]
    try:
        return TensorMap(
            address=words[0] | words[1] << 32,
            element_bytes=element_bytes,
            extents=tuple(extents),
            strides=tuple(strides),
            box=tuple(box),
            swizzle=_SWIZZLES[words[2] >> 13 & 3],
        )
    except TensorMapError as error:
        raise HardwareError(f"tensor map image: {error}") from error


def encode(tensor_map: TensorMap) -> bytes:
    """An image with the known fields of ``tensor_map`` and zeros elsewhere."""
    words = [0] * 32
    words[0] = tensor_map.address & 0xFFFFFFFF
    words[1] = tensor_map.address >> 32
    words[2] = (
        (tensor_map.rank - 1) << 4
        | _TYPE_OF_BYTES[tensor_map.element_bytes] << 7
        | _SWIZZLES.index(tensor_map.swizzle) << 13
    )
    for i, stride in enumerate(tensor_map.strides):
        words[3 + i] = stride >> 4 & 0xFFFFFFFF
        words[7] |= stride >> 36 << 4 * i
    for i, extent in enumerate(tensor_map.extents):
        words[8 + i] = extent - 1
    image = bytearray(struct.pack("<32I", *words))
    for i, extent in enumerate(tensor_map.box):
        image[_BOX_OFFSET + i] = extent - 1
    return bytes(image)
