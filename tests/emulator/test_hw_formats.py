"""Formats against ml_dtypes and numpy, exhaustively where the domain is small."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlakern.emulator import formats

REFERENCE = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}


def halfway_and_edges(name: formats.Small) -> np.ndarray:
    """Every representable value, every midpoint and their float32 neighbours, both signs."""
    table = formats.widening_table(name)
    finite = np.unique(np.abs(table[np.isfinite(table)])).astype(np.float64)
    points = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2]).astype(np.float32)
    up, down = np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))
    values = np.concatenate([points, up, down, np.float32([1e-30, 1e-45, 3e38])])
    return np.concatenate([values, -values]).astype(np.float32)


def random_words(count: int, seed: int) -> np.ndarray:
    words = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    values = words.view(np.float32)
    return values[~np.isnan(values)]


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_every_code_widens_to_the_reference_value(name: formats.Small) -> None:
    codes = np.arange(16 if name == "e2m1" else 256, dtype=np.uint8)
    np.testing.assert_array_equal(
        formats.widen(codes, name), codes.view(REFERENCE[name]).astype(np.float32)
    )


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_narrowing_equals_ml_dtypes_after_clamping(name: formats.Small) -> None:
    random = np.random.default_rng(1).normal(0, LARGEST[name] / 4, 200_000).astype(np.float32)
    values = np.concatenate([halfway_and_edges(name), random_words(200_000, 2), random])
    clamped = np.clip(values, -LARGEST[name], LARGEST[name])
    expected = clamped.astype(REFERENCE[name]).view(np.uint8)
    np.testing.assert_array_equal(formats.narrow(values, name), expected)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_infinity_saturates(name: formats.Small) -> None:
    codes = formats.narrow(np.float32([np.inf, -np.inf, 1e38]), name)
    largest = LARGEST[name]
    assert formats.widen(codes, name).tolist() == [largest, -largest, largest]


def test_nan_becomes_the_canonical_one() -> None:
    nans = np.uint32([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001]).view(np.float32)
    assert formats.narrow(nans, "e4m3").tolist() == [0x7F] * 4
    assert formats.narrow(nans, "e5m2").tolist() == [0x7F] * 4
    assert formats.narrow(nans, "e2m1").tolist() == [0x7] * 4
    assert formats.f32_to_f16(nans).tolist() == [0x7FFF] * 4
    assert formats.f32_to_bf16(nans, "rz").tolist() == [0x7FFF] * 4
    assert formats.f32_to_tf32(nans).tolist() == [0x7FFFFFFF] * 4


def test_relu_zeroes_negatives_only() -> None:
    values = np.float32([-1.0, -0.0, 1.0, np.nan, -np.inf])
    assert formats.narrow(values, "e4m3", relu=True).tolist() == [0, 0, 0x38, 0x7F, 0]
    assert formats.f32_to_f16(values, relu=True).tolist() == [0, 0, 0x3C00, 0x7FFF, 0]
    assert formats.f32_to_bf16(values, relu=True).tolist() == [0, 0, 0x3F80, 0x7FFF, 0]


def test_sixteen_bit_round_to_nearest() -> None:
    values = np.concatenate(
        [random_words(300_000, 3), np.float32([65504, 65519.99, 65520, 1e-8, 2**-25])]
    )
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(formats.f32_to_f16(values), halves)
    np.testing.assert_array_equal(
        formats.f32_to_bf16(values), values.astype(ml_dtypes.bfloat16).view(np.uint16)
    )


@pytest.mark.parametrize(
    ("narrow", "widen"),
    [
        (formats.f32_to_f16, formats.f16_to_f32),
        (formats.f32_to_bf16, formats.bf16_to_f32),
    ],
)
def test_sixteen_bit_round_to_zero_is_the_nearest_below(narrow, widen) -> None:
    values = random_words(200_000, 4)
    values = np.concatenate([values[np.isfinite(values)], np.float32([65520, 1e-8, -70000])])
    codes = narrow(values, "rz")
    result = widen(codes).astype(np.float64)
    following = widen(codes + np.uint16(1)).astype(np.float64)  # next in magnitude, maybe infinite
    magnitude = np.abs(values.astype(np.float64))
    assert (np.abs(result) <= magnitude).all()
    assert (magnitude < np.abs(following)).all()
    assert (np.signbit(result) == np.signbit(values)).all()


def test_satfinite_of_sixteen_bit_formats() -> None:
    values = np.float32([1e6, -np.inf, 1.5])
    assert formats.f32_to_f16(values, satfinite=True).tolist() == [0x7BFF, 0xFBFF, 0x3E00]
    values = np.float32([3.4e38, -np.inf, 1.5])
    assert formats.f32_to_bf16(values, satfinite=True).tolist() == [0x7F7F, 0xFF7F, 0x3FC0]


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_tf32_rounds_at_ten_mantissa_bits(value: float) -> None:
    words = {
        mode: int(formats.f32_to_tf32(np.float32([value]), mode)[0]) for mode in ("rn", "rz", "rna")
    }
    assert all(word & 0x1FFF == 0 for word in words.values())
    bits = int(np.float32(value).view(np.uint32))
    below, rest = bits & ~0x1FFF, bits & 0x1FFF
    above = below + 0x2000
    assert words["rz"] == below
    assert words["rna"] == (above if rest >= 0x1000 else below)
    even = below if (below >> 13) % 2 == 0 else above
    assert words["rn"] == (even if rest == 0x1000 else above if rest > 0x1000 else below)


def test_tf32_operand_drops_the_low_bits() -> None:
    word = np.uint32([0x3F801FFF])
    assert formats.tf32_operand(word).view(np.uint32).tolist() == [0x3F800000]


def test_pairs_hold_the_first_source_above() -> None:
    assert formats.pack_bytes(np.uint8([0x12]), np.uint8([0x34])).tolist() == [0x1234]
    assert formats.pack_halves(np.uint16([0x1234]), np.uint16([0x5678])).tolist() == [0x12345678]
    high, low = formats.unpack_bytes(np.uint16([0x1234]))
    assert (high.tolist(), low.tolist()) == ([0x12], [0x34])
    upper, lower = formats.unpack_halves(np.uint32([0x12345678]))
    assert (upper.tolist(), lower.tolist()) == ([0x1234], [0x5678])
