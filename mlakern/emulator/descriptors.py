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
    of the block-scaled kinds
    [2] sparse  [4:6) scale id of B  [7:10) A  [10:13) B  [13] [14] [15] [16] [17:23) as above
    [23] scales are ue8m0, not ue4m3  [27:29) M / 128  [29:31) scale id of A  [31] K of 96

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

Kind: TypeAlias = Literal["f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4"]

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
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": {0: "e4m3", 1: "e5m2"},
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
_D_FORMATS: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "f32"},
    "tf32": {1: "f32"},
    "f8f6f4": {0: "f16", 1: "f32"},
    "i8": {2: "s32"},
}
_ELEMENT_BITS = {"f16": 16, "tf32": 32, "f8f6f4": 8, "i8": 8}
_ELEMENT_BITS |= {"mxf8f6f4": 8, "mxf4": 4, "mxf4nvf4": 4}
_K_BYTES = 32  # bytes of one row of A or B that one dense instruction consumes


@dataclass(frozen=True)
class SharedDescriptor:
    """Where a matrix operand lies. Offsets and the start address are bytes."""

    start: int
    leading: int
    stride: int
    swizzle: SharedSwizzle


@dataclass(frozen=True)
class BlockScale:
    """Scale factors of a block-scaled MMA.

    block: elements along K that share a factor. format: ue8m0 or ue4m3. a_first, b_first: which
    byte of a 32-bit column holds the first factor of a row of A or B.
    """

    block: int
    format: str
    a_first: int
    b_first: int


@dataclass(frozen=True)
class InstructionDescriptor:
    """What one MMA computes: D[m, n] (+)= A[m, k] · B[k, n].

    m: rows of D over all CTAs of the group. n: columns. k: elements of the inner dimension.
    a_mn_major, b_mn_major: the operand's rows of memory run along M or N instead of K.
    negative: the product is negated (exactly one of A and B is). d_format: f32, f16 or s32.
    saturate: an s32 sum is clamped. scale: of the block-scaled kinds.
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
    d_format: str = "f32"
    saturate: bool = False
    scale: BlockScale | None = None

    @property
    def element_bits(self) -> int:
        return _ELEMENT_BITS[self.kind]


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
    """Decode and check a tcgen05 instruction descriptor of an unscaled kind.

    cta_group: 1 or 2. weight_stationary: tcgen05.mma.ws. wide_k: bit 29 may be set (sm_107).
    """
    if word >> 3 & 1 and kind != "i8":
        raise HardwareError("instruction descriptor: saturation (bit 3) is for kind::i8")
    if word >> 30 & 3:
        raise HardwareError("instruction descriptor: .ws shift (bits [30:32)) is not modelled")
    wide = word >> 29 & 1
    if wide and not (wide_k and kind == "f8f6f4"):
        raise HardwareError("instruction descriptor: bit 29 is set, need 0 (K of 64 is sm_107's)")
    if word >> 23 & 1 or word >> 6 & 1:
        raise HardwareError("instruction descriptor: a reserved bit (6 or 23) is set")
    m, n = (word >> 24 & 31) << 4, (word >> 17 & 63) << 3
    _check_shape(m, n, cta_group, weight_stationary)
    d_format = _format("D", word >> 4 & 3, kind, _D_FORMATS[kind])
    return _described(word, kind, m, n, wide, d_format, saturate=bool(word >> 3 & 1))


_BLOCKS = {  # kind, scales of a row -> elements that share one
    ("mxf8f6f4", 1): 32,
    ("mxf4", 2): 32,
    ("mxf4nvf4", 2): 32,
    ("mxf4nvf4", 4): 16,
}


@lru_cache(maxsize=256)
def block_scaled(word: int, kind: Kind, cta_group: int, scales: int) -> InstructionDescriptor:
    """Decode and check the instruction descriptor of a block-scaled kind.

    scales: factors of one row of A or B (.scale_vec).
    """
    block = _BLOCKS.get((kind, scales))
    if block is None:
        legal = ", ".join(f"{n}X of {name}" for name, n in _BLOCKS)
        raise HardwareError(f"kind::{kind} with {scales} scales a row: need one of {legal}")
    if word & 0b1001 or word >> 6 & 1 or word >> 24 & 7:
        raise HardwareError("instruction descriptor: a reserved bit (0, 3, 6 or [24:27)) is set")
    if word >> 31:
        raise HardwareError("instruction descriptor: K of 96 (bit 31) is not modelled")
    m, n = (word >> 27 & 3) << 7, (word >> 17 & 63) << 3
    if m != 128 * cta_group:
        raise HardwareError(
            f"instruction descriptor: M is {m} in {cta_group} CTAs, need 128 in each of them"
        )
    _check_shape(m, n, cta_group, weight_stationary=False)
    format_ = "ue8m0" if word >> 23 & 1 else "ue4m3"
    if format_ == "ue4m3" and (kind != "mxf4nvf4" or block == 32):
        raise HardwareError(f"instruction descriptor: ue4m3 scales (bit 23 is 0) of kind::{kind}")
    first = {"A": word >> 29 & 3, "B": word >> 4 & 3}
    for name, value in first.items():
        if value % scales:
            raise HardwareError(
                f"instruction descriptor: scale id of {name} is {value}, need a multiple of "
                f"{scales}"
            )
    scale = BlockScale(block, format_, first["A"], first["B"])
    return _described(word, kind, m, n, 0, "f32", scale=scale)


def _described(
    word: int,
    kind: Kind,
    m: int,
    n: int,
    wide: int,
    d_format: str,
    saturate: bool = False,
    scale: BlockScale | None = None,
) -> InstructionDescriptor:
    """The descriptor from the fields that all kinds have in the same place."""
    if word >> 2 & 1:
        raise HardwareError("instruction descriptor: sparsity (bit 2) is not modelled")
    formats = _FORMATS[kind]
    return InstructionDescriptor(
        kind=kind,
        m=m,
        n=n,
        k=(_K_BYTES << wide) * 8 // _ELEMENT_BITS[kind],
        a_format=_format("A", word >> 7 & 7, kind, formats),
        b_format=_format("B", word >> 10 & 7, kind, formats),
        a_mn_major=bool(word >> 15 & 1),
        b_mn_major=bool(word >> 16 & 1),
        negative=bool((word >> 13 ^ word >> 14) & 1),
        d_format=d_format,
        saturate=saturate,
        scale=scale,
    )


def _format(name: str, code: int, kind: Kind, formats: dict[int, str]) -> str:
    if code not in formats:
        allowed = ", ".join(f"{number} ({format_})" for number, format_ in formats.items())
        raise HardwareError(
            f"instruction descriptor: {name} format {code}, kind::{kind} needs one of {allowed}"
        )
    return formats[code]


def _check_shape(m: int, n: int, cta_group: int, weight_stationary: bool) -> None:
    """Table of shapes of dense kinds."""
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
    # The swizzle works on absolute addresses, so a matrix may begin at any row of the pattern.
    if swizzle.span and base_offset:
        raise HardwareError(
            f"shared-memory descriptor: base offset {base_offset}, need 0 "
            f"(patterns that start off their {swizzle.period}-byte boundary are not modelled)"
        )
    return SharedDescriptor(
        start=start,
        leading=(descriptor >> 16 & (1 << address_bits) - 1) << 4,
        stride=(descriptor >> 32 & 0x3FFF) << 4,
        swizzle=swizzle,
    )
