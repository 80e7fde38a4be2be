"""Descriptors of the tensor cores: where operands lie in shared memory and what an MMA computes.

Sources: PTX ISA, "tcgen05 shared memory descriptor", "tcgen05 instruction descriptor", "Matrix
Shape" (the table of kinds and shapes), and for Hopper "wgmma matrix descriptor".

    shared-memory descriptor, 64 bits      tcgen05             wgmma
    start address >> 4                     [0:14)              [0:14)
    leading dimension byte offset >> 4     [16:30)             [16:30)
    stride dimension byte offset >> 4      [32:46)             [32:46)
    constant 0b001                         [46:49)
    base offset                            [49:52)             [49:52)
    leading dimension mode                 [52]
    swizzle                                [61:64)             [62:64)

    instruction descriptor, 32 bits
    [2] sparse  [3] saturate  [4:6) D  [7:10) A  [10:13) B  [13] negate A  [14] negate B
    [15] A is M-major  [16] B is N-major  [17:23) N / 8  [24:29) M / 16  [29] K of 64 (sm_107)
    [30:32) .ws shift of B

On sm_107 the start address has 15 bits and bit 29 of the instruction descriptor doubles the K of
8-bit kinds (both inferred from compiled kernels).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from mlakern.emulator import swizzle as swizzles
from mlakern.emulator.hardware_error import HardwareError
from mlakern.emulator.swizzle import SharedSwizzle

Kind: TypeAlias = Literal["f16", "tf32", "f8f6f4"]

_TCGEN05_SWIZZLES = {
    0: swizzles.NONE,
    1: swizzles.B128_ATOM32,
    2: swizzles.B128,
    4: swizzles.B64,
    6: swizzles.B32,
}
_WGMMA_SWIZZLES = {0: swizzles.NONE, 1: swizzles.B128, 2: swizzles.B64, 3: swizzles.B32}

_FORMATS: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2"},
}
_ELEMENT_BYTES = {"f16": 2, "tf32": 4, "f8f6f4": 1}
_K_BYTES = 32  # bytes of one row of A or B that one dense instruction consumes
_F32 = 1


@dataclass(frozen=True)
class SharedDescriptor:
    """Where a matrix operand lies. Offsets and the start address are bytes."""

    start: int
    leading: int
    stride: int
    swizzle: SharedSwizzle


@dataclass(frozen=True)
class InstructionDescriptor:
    """What one MMA computes: D[m, n] (+)= A[m, k] · B[k, n] with fp32 accumulation.

    m: rows of D over all CTAs of the group. n: columns. k: elements of the inner dimension.
    a_mn_major, b_mn_major: the operand's rows of memory run along M or N instead of K.
    negative: the product is negated (exactly one of A and B is).
    """

    kind: Kind
    m: int
    n: int
    k: int
    a_format: str
    b_format: str
    a_mn_major: bool
    b_mn_major: bool
    negative: bool

    @property
    def element_bytes(self) -> int:
        return _ELEMENT_BYTES[self.kind]


@lru_cache(maxsize=4096)
def tcgen05_shared(descriptor: int, address_bits: int = 14) -> SharedDescriptor:
    """Decode and check a tcgen05 shared-memory descriptor (address_bits: 15 on sm_107)."""
    swizzle = _swizzle(descriptor >> 61, _TCGEN05_SWIZZLES)
    if descriptor >> 46 & 7 != 1:
        raise HardwareError(
            f"shared-memory descriptor: bits [46:49) are {descriptor >> 46 & 7:#05b}, need 0b001"
        )
    if descriptor >> 52 & 1:
        raise HardwareError(
            "shared-memory descriptor: leading dimension mode 1 (absolute address) is not modelled"
        )
    if descriptor >> 53 & 0xFF:
        raise HardwareError(
            f"shared-memory descriptor: bits [53:61) are {descriptor >> 53 & 0xFF:#x}, need 0"
        )
    return _shared(descriptor, swizzle, address_bits)


@lru_cache(maxsize=4096)
def wgmma_shared(descriptor: int) -> SharedDescriptor:
    """Decode and check a wgmma shared-memory descriptor."""
    return _shared(descriptor, _swizzle(descriptor >> 62, _WGMMA_SWIZZLES), 14)


@lru_cache(maxsize=256)
def instruction(
    word: int, kind: Kind, cta_group: int, weight_stationary: bool, wide_k: bool = False
) -> InstructionDescriptor:
    """Decode and check a tcgen05 instruction descriptor.

    cta_group: 1 or 2. weight_stationary: tcgen05.mma.ws. wide_k: bit 29 may be set (sm_107).
    """
    formats = _FORMATS[kind]
    for name, bit in (("sparsity", 2), ("saturation", 3)):
        if word >> bit & 1:
            raise HardwareError(f"instruction descriptor: {name} (bit {bit}) is not modelled")
    if word >> 4 & 3 != _F32:
        raise HardwareError(
            f"instruction descriptor: D format {word >> 4 & 3} (bits [4:6)), need 1 (f32)"
        )
    a_code, b_code = word >> 7 & 7, word >> 10 & 7
    for name, code in (("A", a_code), ("B", b_code)):
        if code not in formats:
            allowed = ", ".join(f"{number} ({format_})" for number, format_ in formats.items())
            raise HardwareError(
                f"instruction descriptor: {name} format {code}, kind::{kind} needs one of {allowed}"
            )
    if word >> 30 & 3:
        raise HardwareError("instruction descriptor: .ws shift (bits [30:32)) is not modelled")
    wide = word >> 29 & 1
    if wide and not (wide_k and kind == "f8f6f4"):
        raise HardwareError("instruction descriptor: bit 29 is set, need 0 (K of 64 is sm_107's)")
    if word >> 23 & 1 or word >> 6 & 1:
        raise HardwareError("instruction descriptor: a reserved bit (6 or 23) is set")
    m, n = (word >> 24 & 31) << 4, (word >> 17 & 63) << 3
    _check_shape(m, n, cta_group, weight_stationary)
    return InstructionDescriptor(
        kind=kind,
        m=m,
        n=n,
        k=(_K_BYTES << wide) // _ELEMENT_BYTES[kind],
        a_format=formats[a_code],
        b_format=formats[b_code],
        a_mn_major=bool(word >> 15 & 1),
        b_mn_major=bool(word >> 16 & 1),
        negative=bool((word >> 13 ^ word >> 14) & 1),
    )


def _check_shape(m: int, n: int, cta_group: int, weight_stationary: bool) -> None:
    """Table of shapes of dense kinds f16, tf32 and f8f6f4."""
    if weight_stationary and cta_group != 1:
        raise HardwareError("tcgen05.mma.ws: got .cta_group::2, need .cta_group::1")
    rows: tuple[int, ...]
    if weight_stationary:
        rows, legal_n, need = (32, 64, 128), n in (64, 128, 256), "one of 64, 128, 256"
    else:
        rows, step = ((64, 128), 8) if cta_group == 1 else ((128, 256), 16)
        legal_n, need = n % step == 0 and step <= n <= 256, f"{step} to 256 in steps of {step}"
    if m not in rows:
        raise HardwareError(f"instruction descriptor: M is {m}, need one of {rows}")
    if not legal_n:
        raise HardwareError(f"instruction descriptor: N is {n}, need {need}")


def _swizzle(code: int, table: dict[int, SharedSwizzle]) -> SharedSwizzle:
    if code not in table:
        raise HardwareError(
            f"shared-memory descriptor: swizzle {code}, need one of {sorted(table)}"
        )
    return table[code]


def _shared(descriptor: int, swizzle: SharedSwizzle, address_bits: int) -> SharedDescriptor:
    for low, high in ((address_bits, 16), (16 + address_bits, 32)):
        if descriptor >> low & (1 << high - low) - 1:
            raise HardwareError(
                f"shared-memory descriptor: bits [{low}:{high}) are set, need 0 "
                "(the address or an offset does not fit its field)"
            )
    start = (descriptor & (1 << address_bits) - 1) << 4
    base_offset = descriptor >> 49 & 7
    if swizzle.span:
        # Steps along a row of the pattern move the start, but never into another row.
        if base_offset:
            raise HardwareError(
                f"shared-memory descriptor: base offset {base_offset}, need 0 "
                f"(patterns that start off their {swizzle.period}-byte boundary are not modelled)"
            )
        if start % swizzle.period >= swizzle.span:
            raise HardwareError(
                f"shared-memory descriptor: start {start:#x} lies past the first row of the "
                f"{swizzle.name} pattern, need it less than {swizzle.span} bytes after a multiple "
                f"of {swizzle.period}"
            )
    return SharedDescriptor(
        start=start,
        leading=(descriptor >> 16 & (1 << address_bits) - 1) << 4,
        stride=(descriptor >> 32 & 0x3FFF) << 4,
        swizzle=swizzle,
    )
