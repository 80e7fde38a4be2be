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

Data types are the CUDA driver API's CUtensorMapDataType. Other bits carry no meaning known here.
"""

from __future__ import annotations

import struct

from mlakern.emulator.hardware_error import HardwareError
from mlakern.tensormap import Swizzle, TensorMap, TensorMapError

IMAGE_BYTES = 128

# UINT8, UINT16, UINT32, INT32, UINT64, INT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT32_FTZ,
# TFLOAT32, TFLOAT32_FTZ
_TYPE_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)
_TYPE_OF_BYTES = {1: 0, 2: 6, 4: 7, 8: 8}
_SWIZZLES = (Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128)
_BOX_OFFSET = 55


def decode(image: bytes) -> TensorMap:
    """The tensor map of an image; HardwareError if it is not one that tiled copies could use."""
    if len(image) != IMAGE_BYTES:
        raise HardwareError(f"tensor map image: got {len(image)} bytes, need {IMAGE_BYTES}")
    words = struct.unpack("<32I", image)
    rank = (words[2] >> 4 & 7) + 1
    if rank > 5:
        raise HardwareError(f"tensor map image: rank {rank}, need 1 to 5")
    data_type = words[2] >> 7 & 15
    if data_type >= len(_TYPE_BYTES):
        raise HardwareError(
            f"tensor map image: data type {data_type}, need 0 to {len(_TYPE_BYTES) - 1}"
        )
    if words[2] >> 19 & 3:
        raise HardwareError(
            f"tensor map image: swizzle atomicity {words[2] >> 19 & 3} is not modelled"
        )
    strides = [(words[3 + i] | (words[7] >> 4 * i & 15) << 32) << 4 for i in range(rank - 1)]
    try:
        return TensorMap(
            address=words[0] | words[1] << 32,
            element_bytes=_TYPE_BYTES[data_type],
            extents=tuple(word + 1 for word in words[8 : 8 + rank]),
            strides=tuple(strides),
            box=tuple(byte + 1 for byte in image[_BOX_OFFSET : _BOX_OFFSET + rank]),
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
