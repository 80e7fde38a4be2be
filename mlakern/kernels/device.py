"""Small device-side helpers that both kernels' roles share."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.experimental import primitives as prims

FULL_MASK = 0xFFFFFFFF
NEG_INF = float("-inf")


@cute.jit
def wait(barrier: cutlass.Array, parity: Any) -> None:
    """Blocks until the barrier's phase of this parity has completed."""
    while not prims.mbarrier_wait_parity(barrier, parity, "try"):
        pass


def arrive(barrier: cutlass.Array) -> None:
    """One arrival at an mbarrier of this CTA."""
    prims.mbarrier_arrive(barrier)


def arrive_remote(barrier: cutlass.Array, rank: int) -> None:
    """One arrival at the same mbarrier of CTA `rank` of the cluster.

    Written out because `.release.cluster`, which the wrapper emits, costs a device-wide memory
    barrier; the plain form releases as the CTA-pair protocol of tcgen05 needs.
    """
    remote = prims.mapa(barrier, rank)
    address = remote.data_ptr().toint(Int32)
    prims.inline_ptx(
        "mbarrier.arrive.shared::cluster.b64 _, [{$r0}];",
        read_only_args=[address],
    )


def exp2(x: Float32) -> Float32:
    """2^x by the multi-function unit; 2^-inf is 0."""
    return cute.math.exp2(x, fastmath=True)


def log2(x: Float32) -> Float32:
    """log2(x) by the multi-function unit; log2(0) is -inf."""
    return cute.math.log2(x, fastmath=True)


def shuffle(value: Any, lane: Any) -> Any:
    """The value that lane `lane` of the warp holds."""
    return prims.shfl_sync(FULL_MASK, value, lane, 31, "idx")


def divmod_positive(a: Int32, b: Int32) -> tuple[Int32, Int32]:
    """(a // b, a % b) of non-negative integers, without the sign fix-up of floor division."""
    quotient = Int32(cutlass.Uint32(a) // cutlass.Uint32(b))
    return quotient, a - quotient * b


def ceil_div(a: Int32, b: Any) -> Int32:
    """ceil(a / b) of non-negative integers."""
    quotient, _ = divmod_positive(a + b - 1, Int32(b))
    return quotient


def e4m3_pairs(values: list[Float32]) -> list[cutlass.Int16]:
    """Pairs of neighbours as packed e4m3, the first of a pair in the low byte; saturating."""
    return [
        prims.cvt_f32x2_to_f8x2(high, low, cutlass.Float8E4M3FN, rnd="rn", sat="satfinite")
        for low, high in zip(values[0::2], values[1::2], strict=True)
    ]


def store_row(pointer: cutlass.Pointer, values: list[Float32], alignment: int) -> None:
    """Stores consecutive values, converted to the pointer's element type, as wide as it can.

    pointer: to float32, float16, bfloat16 or e4m3 elements; alignment: of its address, in bytes.
    """
    element = pointer.dtype
    if element is cutlass.Float8E4M3FN:
        words = e4m3_pairs(values)
        target = cutlass.Pointer(pointer.ir_value(), dtype=cutlass.Int16)
        store_vectors(target, words, cutlass.Int16, alignment)
    elif element is Float32:
        store_vectors(pointer, values, Float32, alignment)
    else:
        width = alignment // 2
        for at in range(0, len(values), width):
            vector = cutlass.Vector.from_elements(tuple(values[at : at + width]), Float32)
            (pointer + at).store(vector.to(element), alignment=alignment)


def store_vectors(
    pointer: cutlass.Pointer, values: list[Any], element: Any, alignment: int
) -> None:
    """Stores consecutive values of the pointer's type in vectors of `alignment` bytes."""
    width = alignment * 8 // element.width
    for at in range(0, len(values), width):
        vector = cutlass.Vector.from_elements(tuple(values[at : at + width]), element)
        (pointer + at).store(vector, alignment=alignment)
