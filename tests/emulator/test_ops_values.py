"""Results of the less common instructions, against exact arithmetic written down independently.

The cases have the form of those in test_core_values.py and run in the same three modes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_programs import run
from test_core_values import MODES, byte, f32, flush, inputs_of, program, s32, width

Reference = Callable[..., int]
M32 = (1 << 32) - 1


def clamp(value: int, low: int, high: int) -> int:
    return min(max(value, low), high)


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def halves(function: Callable[..., int], *words: int) -> int:
    """A function of 16-bit fields applied to both halves of words."""
    parts = [function(*(w >> shift & 0xFFFF for w in words)) & 0xFFFF for shift in (0, 16)]
    return parts[0] | parts[1] << 16


def selected(a: int, b: int, picks: list[int]) -> int:
    wide = a | b << 32
    return sum((wide >> 8 * pick & 0xFF) << 8 * n for n, pick in enumerate(picks))


def leading(value: int) -> int:
    return value.bit_length() - 1


def shift_amount(value: int) -> int:
    return 31 - leading(value) if value else M32


def masked(start: int, length: int) -> int:
    return ((1 << min(length, 32)) - 1) << min(start, 32)


def extended(value: int, bits: int) -> int:
    return signed(value, bits) if bits else 0


def dot4(a: int, b: int, sign_a: bool, sign_b: bool) -> int:
    def part(word: int, n: int, sign: bool) -> int:
        return signed(byte(word, n), 8) if sign else byte(word, n)

    return sum(part(a, n, sign_a) * part(b, n, sign_b) for n in range(4))


INTEGER: dict[str, tuple[str, Reference]] = {
    "add.sat": (
        "add.sat.s32 %r3, %r1, %r2;",
        lambda r1, r2: clamp(s32(r1) + s32(r2), -(1 << 31), (1 << 31) - 1),
    ),
    "sub.sat": (
        "sub.sat.s32 %r3, %r1, %r2;",
        lambda r1, r2: clamp(s32(r1) - s32(r2), -(1 << 31), (1 << 31) - 1),
    ),
    "mul24.lo.s32": (
        "mul24.lo.s32 %r3, %r1, %r2;",
        lambda r1, r2: signed(r1, 24) * signed(r2, 24),
    ),
    "mul24.hi.u32": (
        "mul24.hi.u32 %r3, %r1, %r2;",
        lambda r1, r2: (r1 & 0xFFFFFF) * (r2 & 0xFFFFFF) >> 16,
    ),
    "128-bit add": (
        """add.cc.u64 %rd24, %rd21, %rd22; addc.cc.u64 %rd25, %rd21, 0xFFFFFFFFFFFFFFFF;
        addc.u64 %rd26, 5, 0; xor.b64 %rd27, %rd24, %rd25; xor.b64 %rd23, %rd27, %rd26;""",
        lambda rd21, rd22: _wide_sum(rd21, rd22),
    ),
    "64-bit subtract in words": (
        """mov.b64 {%r4, %r5}, %rd21; mov.b64 {%r6, %r7}, %rd22; sub.cc.u32 %r8, %r4, %r6;
        subc.u32 %r9, %r5, %r7; mov.b64 %rd23, {%r8, %r9};""",
        lambda rd21, rd22: rd21 - rd22,
    ),
    "64-bit multiply in words": (
        """mad.lo.cc.u32 %r4, %r1, %r2, %r1; madc.hi.u32 %r5, %r1, %r2, 0;
        mov.b64 %rd23, {%r4, %r5};""",
        lambda r1, r2: r1 * r2 + r1,
    ),
    "prmt.f4e": (
        "prmt.b32.f4e %r3, %r1, %r2, %r4;",
        lambda r1, r2, r4: selected(r1, r2, [(r4 & 3) + n for n in range(4)]),
    ),
    "prmt.b4e": (
        "prmt.b32.b4e %r3, %r1, %r2, %r4;",
        lambda r1, r2, r4: selected(r1, r2, [(r4 & 3) - n & 7 for n in range(4)]),
    ),
    "prmt.rc8": (
        "prmt.b32.rc8 %r3, %r1, %r2, %r4;",
        lambda r1, r2, r4: selected(r1, r2, [r4 & 3] * 4),
    ),
    "prmt.rc16": (
        "prmt.b32.rc16 %r3, %r1, %r2, %r4;",
        lambda r1, r2, r4: selected(r1, r2, [2 * (r4 & 1), 2 * (r4 & 1) + 1] * 2),
    ),
    "prmt.ecl": (
        "prmt.b32.ecl %r3, %r1, %r2, %r4;",
        lambda r1, r2, r4: selected(r1, r2, [max(r4 & 3, n) for n in range(4)]),
    ),
    "prmt.ecr": (
        "prmt.b32.ecr %r3, %r1, %r2, %r4;",
        lambda r1, r2, r4: selected(r1, r2, [min(r4 & 3, n) for n in range(4)]),
    ),
    "bfind.shiftamt": ("bfind.shiftamt.u32 %r3, %r1;", lambda r1: shift_amount(r1)),
    "bmsk.clamp": ("bmsk.clamp.b32 %r3, %r1, %r2;", lambda r1, r2: masked(r1, r2)),
    "bmsk.wrap": ("bmsk.wrap.b32 %r3, %r1, %r2;", lambda r1, r2: masked(r1 & 31, r2 & 31)),
    "szext.clamp": ("szext.clamp.s32 %r3, %r1, %r2;", lambda r1, r2: extended(r1, min(r2, 32))),
    "szext.wrap": (
        "szext.wrap.u32 %r3, %r1, %r2;",
        lambda r1, r2: r1 & ((1 << (r2 & 31)) - 1),
    ),
    "dp4a.u32.s32": (
        "dp4a.u32.s32 %r3, %r1, %r2, 1000;",
        lambda r1, r2: dot4(r1, r2, False, True) + 1000,
    ),
    "dp4a.s32.s32": (
        "dp4a.s32.s32 %r3, %r1, %r2, %r1;",
        lambda r1, r2: dot4(r1, r2, True, True) + r1,
    ),
    "dp2a.hi": (
        "dp2a.hi.s32.u32 %r3, %r1, %r2, 7;",
        lambda r1, r2: signed(r1, 16) * byte(r2, 2) + signed(r1 >> 16, 16) * byte(r2, 3) + 7,
    ),
    "dp2a.lo": (
        "dp2a.lo.u32.s32 %r3, %r1, %r2, 7;",
        lambda r1, r2: (
            (r1 & 0xFFFF) * signed(byte(r2, 0), 8) + (r1 >> 16) * signed(byte(r2, 1), 8) + 7
        ),
    ),
    "add.u16x2": (
        "add.u16x2 %r3, %r1, %r2;",
        lambda r1, r2: halves(lambda a, b: a + b, r1, r2),
    ),
    "max.s16x2.relu": (
        "max.relu.s16x2 %r3, %r1, %r2;",
        lambda r1, r2: halves(lambda a, b: max(signed(a, 16), signed(b, 16), 0), r1, r2),
    ),
    "min.u16x2": ("min.u16x2 %r3, %r1, %r2;", lambda r1, r2: halves(min, r1, r2)),
    "cvt.sat.s8.s32": (
        "cvt.sat.s8.s32 %r3, %r1;",
        lambda r1: clamp(s32(r1), -128, 127),
    ),
    "cvt.sat.u8.s32": ("cvt.sat.u8.s32 %r3, %r1;", lambda r1: clamp(s32(r1), 0, 255)),
    "cvt.sat.s32.u64": (
        "cvt.sat.s32.u64 %r3, %rd21;",
        lambda rd21: clamp(rd21, 0, (1 << 31) - 1),
    ),
    "b128": (
        "{ .reg .b128 %q; mov.b128 %q, {%rd21, %rd22}; mov.b128 {%rd24, %rd25}, %q; "
        "sub.u64 %rd23, %rd25, %rd24; }",
        lambda rd21, rd22: rd22 - rd21,
    ),
    "cvt.rz.f32.u64": (
        "cvt.rz.f32.u64 %r3, %rd21;",
        lambda rd21: rounded(Fraction(rd21), "rz"),
    ),
    "cvt.rn.f32.s64": (
        "cvt.rn.f32.s64 %r3, %rd21;",
        lambda rd21: rounded(Fraction(signed(rd21, 64)), "rn"),
    ),
    "cvt.rm.f32.s32": ("cvt.rm.f32.s32 %r3, %r1;", lambda r1: rounded(Fraction(s32(r1)), "rm")),
    "cvt.rn.f16.u32": (
        "cvt.rn.f16.u32 %rs3, %r1; cvt.u32.u16 %r3, %rs3;",
        lambda r1: half_bits(np.float64(r1), np.float16),
    ),
}


def _wide_sum(a: int, b: int) -> int:
    mask = (1 << 64) - 1
    low = a + b
    middle = a + mask + (low >> 64)
    high = 5 + (middle >> 64)
    return (low & mask) ^ (middle & mask) ^ high


def half_bits(value: Any, dtype: Any) -> int:
    with np.errstate(all="ignore"):
        rounded_value = np.asarray(value).astype(dtype)
    return 0x7FFF if np.isnan(rounded_value) else int(rounded_value.view(np.uint16))


def rounded(exact: Fraction, mode: str, negative_zero: bool = False) -> int:
    """float32 bits of an exact value, rounded in a direction."""
    if exact == 0:
        return 1 << 31 if negative_zero else 0
    largest = Fraction(float(np.finfo(np.float32).max))
    with np.errstate(all="ignore"):
        start = float(exact) if abs(exact) < largest * 2 else math.copysign(math.inf, exact)
        near = np.float32(start)

    def value(x: Any) -> Fraction | float:
        return float(x) if np.isinf(x) else Fraction(float(x))

    infinity = np.float32(np.inf)
    below, above = near, near
    while value(below) > exact:
        below = np.nextafter(below, -infinity)
    while value(above) < exact:
        above = np.nextafter(above, infinity)
    towards_zero = below if exact > 0 else above
    if mode == "rn":
        return int(near.view(np.uint32))
    picked = {"rm": below, "rp": above, "rz": towards_zero}[mode]
    return int(np.float32(picked).view(np.uint32))


def directed(function: Callable[..., Fraction], mode: str) -> Callable[..., int | None]:
    """A reference in exact arithmetic; None where an operand is not finite or the result is not."""

    def reference(*bits: int) -> int | None:
        values = [f32(b) for b in bits]
        if not all(np.isfinite(v) for v in values):
            return None
        try:
            exact = function(*(Fraction(float(v)) for v in values))
        except (ZeroDivisionError, ValueError):
            return None
        return None if exact == 0 else rounded(exact, mode)

    return reference


def square_root(x: Fraction, mode: str) -> int | None:
    if x < 0:
        return None
    if x == 0:
        return None
    # The root to far more bits than float32 has, and whether it is exact.
    scale = 1 << 400
    root = math.isqrt(x.numerator * scale * scale // x.denominator)
    exact = Fraction(root, scale)
    if exact * exact != x:
        exact += Fraction(1, 2 * scale)
    return rounded(exact, mode)


DIRECTED = {
    "add": (2, lambda a, b: a + b),
    "sub": (2, lambda a, b: a - b),
    "mul": (2, lambda a, b: a * b),
    "div": (2, lambda a, b: a / b),
    "rcp": (1, lambda a: 1 / a),
    "fma": (3, lambda a, b, c: a * b + c),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", INTEGER)
def test_instruction(name: str, mode: str) -> None:
    code, reference = INTEGER[name]
    index, block, grid = MODES[mode]
    registers = list(inspect.signature(reference).parameters)
    columns = inputs_of(registers, floats=False)
    output = "rd23" if "%rd23" in code else "r3"
    out = np.zeros(128, f"u{width(output) // 8}")
    arrays = dict(zip(registers, columns, strict=True)) | {"out": out}
    run(program(code, registers, output, index), arrays, block=block, grid=grid)
    for n, got in enumerate(out.tolist()):
        values = [int(column[n]) for column in columns]
        want = reference(*values) & ((1 << width(output)) - 1)
        assert got == want, f"{name} of {[hex(v) for v in values]}: {got:#x}, expected {want:#x}"


@pytest.mark.parametrize("rounding", ["rz", "rm", "rp"])
@pytest.mark.parametrize("name", [*DIRECTED, "sqrt"])
@pytest.mark.parametrize("mode", MODES)
def test_directed_rounding(name: str, rounding: str, mode: str) -> None:
    arity, function = DIRECTED.get(name, (1, None))
    registers = [f"r{n}" for n in (1, 2, 4)[:arity]]
    columns = inputs_of(registers, floats=True)
    out = np.zeros(128, np.uint32)
    sources = ", ".join(f"%{register}" for register in registers)
    code = f"{name}.{rounding}.f32 %r3, {sources};"
    arrays = dict(zip(registers, columns, strict=True)) | {"out": out}
    index, block, grid = MODES[mode]
    run(program(code, registers, "r3", index), arrays, block=block, grid=grid)
    compared = 0
    for n, got in enumerate(out.tolist()):
        bits = [int(column[n]) for column in columns]
        if name == "sqrt":
            finite = np.isfinite(f32(bits[0]))
            want = square_root(Fraction(float(f32(bits[0]))), rounding) if finite else None
        else:
            want = directed(function, rounding)(*bits)
        if want is None:
            continue
        compared += 1
        assert got == want, f"{code} of {[hex(b) for b in bits]}: {got:#x}, expected {want:#x}"
    assert compared > 40


@pytest.mark.parametrize("code", ["sub.{}.f32 %r3, %r1, %r1;", "fma.{}.f32 %r3, %r1, %f2, %r4;"])
def test_exact_cancellation_is_negative_zero_only_when_rounding_down(code: str) -> None:
    """As on an H200."""
    x = np.array([1.5, -3.0, 0.0, 1e-40], np.float32)
    for mode, zero in (("rm", 1 << 31), ("rp", 0), ("rz", 0)):
        out = np.zeros(4, np.uint32)
        prepare = "mov.f32 %f2, 0f3F800000; neg.f32 %r4, %r1;"
        body = program(prepare + code.format(mode), ["r1"], "r3", "%tid.x")
        run(body, {"x": x.view(np.uint32), "out": out}, block=4)
        assert out.tolist() == [zero] * 4


# Functions of float32 values, to be compared with numpy


def sixteen(dtype: Any) -> np.ndarray[Any, Any]:
    """Codes of a 16-bit format: edges and random ones, 128 of them."""
    rng = np.random.default_rng(5)
    edges = np.array([0, 0x8000, 1, 0x8001, 0x3C00, 0xBC00, 0x3F80, 0x7BFF, 0x03FF, 0x0400])
    random = rng.integers(0, 1 << 16, 118)
    codes = np.concatenate([edges, random]).astype(np.uint16)
    values = codes.view(dtype).astype(np.float64)
    codes[~np.isfinite(values)] = 0x3A00
    return codes


HALF_TYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


def exact_half(kind: str, exact: Fraction) -> int:
    """The 16-bit float nearest to an exact value, ties to even."""
    dtype = HALF_TYPES[kind]
    codes = np.arange(0, 0x7C00 if kind == "f16" else 0x7F80, dtype=np.uint16)
    table = codes.view(dtype).astype(np.float64)
    magnitude = abs(exact)
    sign = 0x8000 if exact < 0 else 0
    at = int(np.searchsorted(table, float(magnitude)))
    best = None
    for code in range(max(at - 2, 0), min(at + 2, len(table))):
        distance = abs(Fraction(float(table[code])) - magnitude)
        key = (distance, code & 1)
        if best is None or key < best[0]:
            best = key, code
    assert best is not None
    step = Fraction(float(table[-1])) - Fraction(float(table[-2]))
    if magnitude >= Fraction(float(table[-1])) + step / 2:
        return sign | (0x7C00 if kind == "f16" else 0x7F80)
    return sign | best[1]


@pytest.mark.parametrize("kind", HALF_TYPES)
@pytest.mark.parametrize("packed", [False, True])
def test_half_fma_rounds_once(kind: str, packed: bool) -> None:
    dtype = HALF_TYPES[kind]
    rng = np.random.default_rng(2)
    a, b, c = (rng.permutation(sixteen(dtype)) for _ in range(3))
    if packed:
        columns = [x.view(np.uint32) for x in (a, b, c)]
        registers, output = ["r1", "r2", "r4"], "r3"
        code = f"fma.rn.{kind}x2 %r3, %r1, %r2, %r4;"
    else:
        columns = [a, b, c]
        registers, output = ["rs1", "rs2", "rs4"], "r3"
        code = f"fma.rn.{kind} %rs3, %rs1, %rs2, %rs4; cvt.u32.u16 %r3, %rs3;"
    count = len(columns[0])
    out = np.zeros(count, np.uint32)
    arrays = dict(zip(registers, columns, strict=True)) | {"out": out}
    run(program(code, registers, output, "%tid.x"), arrays, block=count)
    got = out.view(np.uint16) if packed else out.astype(np.uint16)
    values = [x.view(dtype).astype(np.float64) for x in (a, b, c)]
    for n in range(len(got)):
        x, y, z = (Fraction(float(v[n])) for v in values)
        exact = x * y + z
        if exact != 0:
            assert got[n] == exact_half(kind, exact), (n, [float(v[n]) for v in values])


@pytest.mark.parametrize(
    ("code", "function"),
    [
        (
            "min.xorsign.abs.f32 %r3, %r1, %r2;",
            lambda a, b: np.copysign(1, a * b) * min(abs(a), abs(b)),
        ),
        (
            "max.xorsign.abs.f32 %r3, %r1, %r2;",
            lambda a, b: np.copysign(1, a * b) * max(abs(a), abs(b)),
        ),
        ("max.abs.f32 %r3, %r1, %r2;", lambda a, b: max(abs(a), abs(b))),
        ("min.f32 %r3, %r1, %r2, 0f3F800000;", lambda a, b: min(a, b, 1.0)),
        ("fma.rn.f32.bf16 %r3, %rs1, %rs1, %r2;", None),
    ],
)
def test_float_forms(code: str, function: Callable[[Any, Any], Any] | None) -> None:
    rng = np.random.default_rng(7)
    a, b = (rng.standard_normal(128).astype(np.float32) * 3 for _ in range(2))
    out = np.zeros(128, np.uint32)
    narrow = a.astype(ml_dtypes.bfloat16)
    arrays = {"a": a.view(np.uint32), "b": b.view(np.uint32), "out": out}
    code = f"shr.u32 %r9, %r1, 16; cvt.u16.u32 %rs1, %r9; {code}"
    if function is None:
        arrays["a"] = narrow.view(np.uint16).astype(np.uint32) << np.uint32(16)
    run(program(code, ["r1", "r2"], "r3", "%tid.x"), arrays, block=128)
    if function is None:
        wide = narrow.astype(np.float64)
        want = (wide * wide + b).astype(np.float32)
    else:
        want = np.array([function(x, y) for x, y in zip(a, b, strict=True)], np.float32)
    np.testing.assert_array_equal(out.view(np.float32), want)


@pytest.mark.parametrize(
    ("operation", "function"),
    [("add", np.add), ("sub", np.subtract), ("mul", np.multiply)],
)
@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_packed_halves_with_flushing(operation: str, function: Any, ftz: str) -> None:
    codes = np.random.default_rng(3).integers(0, 0x7C00, (2, 256)).astype(np.uint16)
    codes[:, :40] &= 0x83FF  # subnormal operands
    a, b = codes
    out = np.zeros(128, np.uint32)
    arrays = {"a": a.view(np.uint32), "b": b.view(np.uint32), "out": out}
    body = program(f"{operation}{ftz}.f16x2 %r3, %r1, %r2;", ["r1", "r2"], "r3", "%tid.x")
    run(body, arrays, block=128)

    def flushed(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        bits = x.view(np.uint16)
        return np.where(bits & 0x7C00, bits, bits & 0x8000).astype(np.uint16).view(np.float16)

    x, y = a.view(np.float16), b.view(np.float16)
    with np.errstate(all="ignore"):
        want = flushed(function(flushed(x), flushed(y))) if ftz else function(x, y)
    np.testing.assert_array_equal(out.view(np.uint16), want.view(np.uint16))


def test_comparisons_of_packed_halves() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.integers(-3, 4, (2, 256)).astype(np.float16)
    a[5] = np.nan
    out = np.zeros(128, np.uint32)
    arrays = {"a": a.view(np.uint32), "b": b.view(np.uint32), "out": out}
    code = """setp.lt.f16x2 %p1|%p2, %r1, %r2; selp.b32 %r4, 1, 0, %p1; selp.b32 %r5, 2, 0, %p2;
    set.geu.f16x2.f16x2 %r6, %r1, %r2; add.s32 %r7, %r4, %r5; shl.b32 %r7, %r7, 2;
    and.b32 %r6, %r6, 0x3C003C00; xor.b32 %r3, %r6, %r7;"""
    run(program(code, ["r1", "r2"], "r3", "%tid.x"), arrays, block=128)
    less, not_less = a < b, ~(a < b)
    want = less[::2] * 4 + less[1::2] * 8 + not_less[::2] * 0x3C00 + not_less[1::2] * 0x3C000000
    assert out.tolist() == want.astype(np.int64).tolist()


SMALL = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448, 16),
    "e5m2": (ml_dtypes.float8_e5m2, 57344, 16),
    "e2m3": (ml_dtypes.float6_e2m3fn, 7.5, 16),
    "e3m2": (ml_dtypes.float6_e3m2fn, 28, 16),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6, 8),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_conversions_to_and_from_small_floats(name: str, relu: str) -> None:
    dtype, largest, bits = SMALL[name]
    rng = np.random.default_rng(6)
    x, y = (rng.standard_normal((2, 128)) * [[largest / 2], [1]]).astype(np.float32)
    out, back = np.zeros(128, np.uint32), np.zeros(128, np.uint32)
    arrays = {"x": x.view(np.uint32), "y": y.view(np.uint32), "out": out, "back": back}
    register = "%b1" if bits == 8 else "%rs9"
    widen = f"cvt.u32.u{bits} %r3, {register};"
    if bits == 8:
        widen = f"mov.b32 %r3, {{{register}, %b2, %b2, %b2}};"
    code = f"""{{ .reg .b8 %b<4>; .reg .b16 %h; mov.b16 %h, 0; mov.b16 {{%b2, %b3}}, %h;
    cvt.rn.satfinite{relu}.{name}x2.f32 {register}, %r1, %r2; {widen}
    cvt.rn.f16x2.{name}x2 %r8, {register};
    mad.wide.u32 %rd42, %r193, 4, %rd4; st.global.b32 [%rd42], %r8; }}"""
    run(program(code, ["r1", "r2"], "r3", "%tid.x"), arrays, block=128)
    wanted = [np.clip(v, -largest, largest) for v in (x, y)]
    if relu:
        wanted = [np.maximum(v, 0) for v in wanted]
    high, low = (v.astype(dtype) for v in wanted)
    shift = 4 if name == "e2m1" else 8
    packed = high.view(np.uint8).astype(np.uint32) << shift | low.view(np.uint8)
    assert out.tolist() == packed.tolist()
    halves_ = back.view(np.float16)
    np.testing.assert_array_equal(halves_[::2], low.astype(np.float16))
    np.testing.assert_array_equal(halves_[1::2], high.astype(np.float16))


@pytest.mark.parametrize(("mode", "up"), [("rz", False), ("rp", True)])
def test_conversion_to_scale_factors(mode: str, up: bool) -> None:
    x = np.array([1, 1.5, 2, 3, 0.3, 2.0**-127, 2.0**-126 * 0.75, 3e38, np.inf, np.nan], np.float32)
    out = np.zeros(10, np.uint32)
    code = f"cvt.{mode}.satfinite.ue8m0x2.f32 %rs9, %r1, 0f3F800000; cvt.u32.u16 %r3, %rs9;"
    run(program(code, ["r1"], "r3", "%tid.x"), {"x": x.view(np.uint32), "out": out}, block=10)
    with np.errstate(all="ignore"):
        powers = np.log2(x.astype(np.float64))
        exponent = np.ceil(powers) if up else np.floor(powers)
    want = [0xFF if np.isnan(v) else int(min(v + 127, 254)) for v in exponent]
    assert (out >> 8).tolist() == want
    assert (out & 0xFF).tolist() == [127] * 10


@pytest.mark.parametrize(
    ("target", "source", "value", "expected"),
    [
        ("s32", "f32", "0f7FC00000", 0),
        ("u32", "f64", "0d7FF8000000000000", 1 << 31),
        ("s64", "f32", "0f7FC00000", 1 << 63),
        ("s32", "f64", "0dC202A05F20000000", 1 << 31),  # -1e10
        ("u64", "f32", "0f7F800000", (1 << 64) - 1),
    ],
)
def test_floats_without_an_integer(target: str, source: str, value: str, expected: int) -> None:
    out = np.zeros(1, np.uint64)
    wide = target[1:] == "64"
    register = "%rd9" if wide else "%r9"
    source_register = "%fd1" if source == "f64" else "%f1"
    widen = "" if wide else "cvt.u64.u32 %rd9, %r9;"
    run(
        f"""mov.{source} {source_register}, {value};
        cvt.rzi.{target}.{source} {register}, {source_register}; {widen}
        st.global.b64 [%rd1], %rd9; ret;""",
        {"out": out},
        block=1,
    )
    assert out[0] == expected


def test_flushing_is_what_ftz_does_to_comparisons() -> None:
    assert flush(0x00000001) == 0
    out = np.zeros(2, np.uint32)
    run(
        """mov.b32 %r1, 1; mov.b32 %f1, %r1;
        setp.gt.f32 %p1, %f1, 0f00000000; setp.gt.ftz.f32 %p2, %f1, 0f00000000;
        selp.b32 %r2, 1, 0, %p1; selp.b32 %r3, 1, 0, %p2;
        st.global.v2.b32 [%rd1], {%r2, %r3}; ret;""",
        {"out": out},
        block=1,
    )
    assert out.tolist() == [1, 0]
