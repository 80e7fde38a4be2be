"""Narrow floating-point formats on numpy arrays: exact widening, and rounding as ``cvt`` does it.

Sources: PTX ISA, "Alternate Floating-Point Data Formats" and "cvt" (rounding, .satfinite, .relu,
canonical NaN). Codes are unsigned integers; float32 is the wide side of every conversion.

    format  sign exponent mantissa  bias  largest  infinity  canonical NaN
    e4m3       1        4        3     7      448  none      0x7f
    e5m2       1        5        2    15    57344  yes       0x7f
    e2m3       1        2        3     1      7.5  none      none
    e3m2       1        3        2     3       28  none      none
    e2m1       1        2        1     1        6  none      none
    f16        1        5       10    15    65504  yes       0x7fff
    bf16       1        8        7   127  3.39e38  yes       0x7fff
    tf32       1        8       10   127  3.40e38  yes       0x7fffffff (a 32-bit word)

Narrowing to 8 bits goes through one table: the upper half of the float32 word, its last bit ORed
with "anything below is set", decides the rounding, because every halfway point of these formats
has zeros there.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
U8: TypeAlias = NDArray[np.uint8]
U16: TypeAlias = NDArray[np.uint16]
U32: TypeAlias = NDArray[np.uint32]
Codes: TypeAlias = NDArray[np.unsignedinteger[Any]]
Small: TypeAlias = Literal["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"]
Rounding: TypeAlias = Literal["rn", "rz"]

CANONICAL_NAN_8 = 0x7F
CANONICAL_NAN_16 = 0x7FFF
CANONICAL_NAN_TF32 = 0x7FFFFFFF

_FIELDS: dict[str, tuple[int, int, int]] = {  # exponent bits, mantissa bits, bias
    "e4m3": (4, 3, 7),
    "e5m2": (5, 2, 15),
    "e2m3": (2, 3, 1),
    "e3m2": (3, 2, 3),
    "e2m1": (2, 1, 1),
}


@cache
def widening_table(name: Small) -> F32:
    """float32 value of every code of a small format, indexed by the code."""
    exponent_bits, mantissa_bits, bias = _FIELDS[name]
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    normal = exponent > 0
    significand = (mantissa + (normal << mantissa_bits)).astype(np.float64)
    values = np.ldexp(significand, np.maximum(exponent, 1) - bias - mantissa_bits)
    if name == "e5m2":
        top = exponent == 31
        values[top & (mantissa == 0)] = np.inf
        values[top & (mantissa != 0)] = np.nan
    elif name == "e4m3":
        values[(codes & 0x7F) == 0x7F] = np.nan
    negative = codes >> (exponent_bits + mantissa_bits) == 1
    table: F32 = np.where(negative, -values, values).astype(np.float32)
    table.setflags(write=False)
    return table


@cache
def _narrowing_table(name: Small) -> U8:
    """Code for each 16-bit rounding key (see the module's docstring), saturating."""
    exponent_bits, mantissa_bits, _ = _FIELDS[name]
    positive = widening_table(name)[: 1 << (exponent_bits + mantissa_bits)].astype(np.float64)
    finite = positive[np.isfinite(positive)]
    keys = np.arange(1 << 16, dtype=np.uint32)
    with np.errstate(invalid="ignore"):  # signalling NaN keys
        value = (keys << np.uint32(16)).view(np.float32).astype(np.float64)
    # Past a midpoint the upper code, on it the even one; past the last one it saturates.
    midpoints = (finite[1:] + finite[:-1]) / 2
    magnitude = np.abs(value)
    below = np.searchsorted(midpoints, magnitude, side="left")  # midpoints < magnitude
    upto = np.searchsorted(midpoints, magnitude, side="right")  # midpoints <= magnitude
    code = np.where((below != upto) & (below % 2 == 0), below, upto)
    code |= (keys >> 31 - 16).astype(code.dtype) << (exponent_bits + mantissa_bits)
    # Formats of 4 and 6 bits have no NaN: PTX converts a NaN to their positive maximum.
    code[np.isnan(value)] = CANONICAL_NAN_8 if name in ("e4m3", "e5m2") else len(finite) - 1
    table: U8 = code.astype(np.uint8)
    table.setflags(write=False)
    return table


def widen(codes: Codes, name: Small) -> F32:
    """Exact float32 values of 8-, 6- or 4-bit codes (one code an element)."""
    values: F32 = widening_table(name).take(codes)
    return values


def narrow(values: F32, name: Small, relu: bool = False) -> U8:
    """``cvt.rn.satfinite``: to nearest even; infinity and whatever is too large saturate."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    keys = bits >> np.uint32(16)
    keys |= (bits & np.uint32(0xFFFF)) != 0
    codes = _narrowing_table(name).take(keys)
    return _relu(codes, values) if relu else codes


def widen_scale(codes: U8, name: Literal["ue8m0", "ue4m3"]) -> F32:
    """Values of scale factors: ue8m0 is 2^(code - 127), 0xff NaN; ue4m3 is e4m3 without a sign."""
    if name == "ue4m3":
        return widen(codes & np.uint8(0x7F), "e4m3")
    powers = np.ldexp(1.0, codes.astype(np.int64) - 127)
    values: F32 = np.where(codes == 0xFF, np.nan, powers).astype(np.float32)
    return values


def narrow_scale(values: F32, up: bool) -> U8:
    """ue8m0 codes of the powers of two next to magnitudes, ``up`` or below; infinity is the largest
    power, NaN 0xff."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
    exponent, rest = bits >> np.uint32(23), bits & np.uint32(0x7FFFFF)
    # Code 0 is 2^-127, which is a subnormal float32 with half of the mantissa's range.
    above = np.where(exponent == 0, rest > 1 << 22, rest > 0)
    codes = np.minimum(exponent + (above & up), 0xFE)
    scales: U8 = np.where(np.isnan(values), np.uint32(0xFF), codes).astype(np.uint8)
    return scales


def f16_to_f32(codes: U16) -> F32:
    """Exact."""
    return np.ascontiguousarray(codes, dtype=np.uint16).view(np.float16).astype(np.float32)


def bf16_to_f32(codes: U16) -> F32:
    """Exact."""
    values: F32 = (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values


def f32_to_f16(
    values: F32, rounding: Rounding = "rn", satfinite: bool = False, relu: bool = False
) -> U16:
    """``cvt.{rn,rz}{.relu}{.satfinite}.f16.f32``."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        halves = values.astype(np.float16)
    codes = halves.view(np.uint16)
    if rounding == "rz":
        # One code down whatever was rounded away from zero; a finite value never becomes infinite.
        codes = codes - (np.abs(halves.astype(np.float32)) > np.abs(values)).astype(np.uint16)
    if satfinite:
        infinite = (codes & np.uint16(0x7FFF)) == 0x7C00
        codes = np.where(infinite, (codes & np.uint16(0x8000)) | np.uint16(0x7BFF), codes)
    codes = np.where(np.isnan(values), np.uint16(CANONICAL_NAN_16), codes)
    return _relu(codes, values) if relu else codes


def f32_to_bf16(
    values: F32, rounding: Rounding = "rn", satfinite: bool = False, relu: bool = False
) -> U16:
    """``cvt.{rn,rz}{.relu}{.satfinite}.bf16.f32``."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    codes = (_round_bits(bits, 16, rounding) >> np.uint32(16)).astype(np.uint16)
    if satfinite:
        infinite = (codes & np.uint16(0x7FFF)) == 0x7F80
        codes = np.where(infinite, (codes & np.uint16(0x8000)) | np.uint16(0x7F7F), codes)
    codes = np.where(np.isnan(values), np.uint16(CANONICAL_NAN_16), codes)
    return _relu(codes, values) if relu else codes


def f32_to_tf32(
    values: F32,
    rounding: Literal["rn", "rz", "rna"] = "rn",
    satfinite: bool = False,
    relu: bool = False,
) -> U32:
    """``cvt.{rn,rz,rna}{.relu}{.satfinite}.tf32.f32``: 32-bit words whose low 13 bits are 0."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    words = _round_bits(bits, 13, rounding)
    if satfinite:
        infinite = (words & np.uint32(0x7FFFFFFF)) == 0x7F800000
        words = np.where(infinite, (words & np.uint32(0x80000000)) | np.uint32(0x7F7FE000), words)
    words = np.where(np.isnan(values), np.uint32(CANONICAL_NAN_TF32), words)
    return _relu(words, values) if relu else words


def tf32_operand(words: U32) -> F32:
    """What a kind::tf32 MMA reads of a 32-bit element: the low 13 bits are ignored."""
    values: F32 = (words & np.uint32(0xFFFFE000)).view(np.float32)
    return values


def pack_bytes(high: U8, low: U8) -> U16:
    """An x2 pair of 8-bit codes: ``cvt...x2.f32 d, a, b`` has a in the upper half, b below."""
    pairs: U16 = (high.astype(np.uint16) << np.uint16(8)) | low
    return pairs


def pack_halves(high: U16, low: U16) -> U32:
    """An x2 pair of 16-bit codes, the first source in the upper half."""
    pairs: U32 = (high.astype(np.uint32) << np.uint32(16)) | low
    return pairs


def unpack_bytes(pairs: U16) -> tuple[U8, U8]:
    """(high, low) of an 8-bit x2 pair."""
    return (pairs >> np.uint16(8)).astype(np.uint8), pairs.astype(np.uint8)


def unpack_halves(pairs: U32) -> tuple[U16, U16]:
    """(high, low) of a 16-bit x2 pair."""
    return (pairs >> np.uint32(16)).astype(np.uint16), pairs.astype(np.uint16)


def _round_bits(bits: U32, dropped: int, rounding: Literal["rn", "rz", "rna"]) -> U32:
    """Round a float32 word to its upper bits; the mantissa's carry runs into the exponent."""
    half = np.uint32(1 << (dropped - 1))
    if rounding == "rn":
        odd = (bits >> np.uint32(dropped)) & np.uint32(1)
        bits = bits + (half - np.uint32(1)) + odd
    elif rounding == "rna":
        bits = bits + half
    kept: U32 = bits & np.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF)
    return kept


def _relu(codes: NDArray[Any], values: F32) -> NDArray[Any]:
    """.relu: negative values, -0 included, become +0; NaN stays the canonical NaN."""
    return np.where(np.signbit(values) & ~np.isnan(values), codes.dtype.type(0), codes)
