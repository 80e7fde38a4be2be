"""Results of single instructions, against arithmetic written down independently.

Each case runs three times, because code is generated differently for them: 128 lanes with values
of their own, whole warps that agree on a value, and one lane alone.

A case is PTX and a function of register contents (bits, as ints) that gives the bits of the result.
The function's parameters name the registers that hold the inputs; the result is in %rd23 if the
PTX mentions it, else in %r3.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_programs import run

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
Reference = Callable[..., int]


def s32(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def s64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def f32(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def bits_of(value: Any) -> int:
    with np.errstate(all="ignore"):
        return int(np.float32(value).view(np.uint32))


def flush(bits: int) -> int:
    return bits if bits & 0x7F800000 else bits & 1 << 31


def byte(value: int, n: int) -> int:
    return value >> 8 * n & 0xFF


INTEGER: dict[str, tuple[str, Reference]] = {
    "add": ("add.s32 %r3, %r1, %r2;", lambda r1, r2: r1 + r2),
    "add immediate": ("add.s32 %r3, %r1, -7;", lambda r1: r1 - 7),
    "add 64": ("add.s64 %rd23, %rd21, %rd22;", lambda rd21, rd22: rd21 + rd22),
    "sub": ("sub.s32 %r3, %r1, %r2;", lambda r1, r2: r1 - r2),
    "mul.lo": ("mul.lo.s32 %r3, %r1, %r2;", lambda r1, r2: r1 * r2),
    "mul.hi.s32": ("mul.hi.s32 %r3, %r1, %r2;", lambda r1, r2: s32(r1) * s32(r2) >> 32),
    "mul.hi.u32": ("mul.hi.u32 %r3, %r1, %r2;", lambda r1, r2: r1 * r2 >> 32),
    "mul.hi.u64": ("mul.hi.u64 %rd23, %rd21, %rd22;", lambda rd21, rd22: rd21 * rd22 >> 64),
    "mul.hi.s64": (
        "mul.hi.s64 %rd23, %rd21, %rd22;",
        lambda rd21, rd22: s64(rd21) * s64(rd22) >> 64,
    ),
    "mul.wide.s32": ("mul.wide.s32 %rd23, %r1, %r2;", lambda r1, r2: s32(r1) * s32(r2)),
    "mul.wide.u32": ("mul.wide.u32 %rd23, %r1, %r2;", lambda r1, r2: r1 * r2),
    "mul.wide.u16": ("mul.wide.u16 %r3, %rs1, %rs2;", lambda rs1, rs2: rs1 * rs2),
    "mad.lo": ("mad.lo.s32 %r3, %r1, %r2, 11;", lambda r1, r2: r1 * r2 + 11),
    "mad.wide": (
        "mad.wide.s32 %rd23, %r1, %r2, %rd22;",
        lambda r1, r2, rd22: s32(r1) * s32(r2) + rd22,
    ),
    "mad.hi": ("mad.hi.u32 %r3, %r1, %r2, 5;", lambda r1, r2: (r1 * r2 >> 32) + 5),
    "div.s32": (
        "or.b32 %r4, %r2, 1; div.s32 %r3, %r1, %r4;",
        lambda r1, r2: math.trunc(s32(r1) / s32(r2 | 1)),
    ),
    "div.u32": ("or.b32 %r4, %r2, 1; div.u32 %r3, %r1, %r4;", lambda r1, r2: r1 // (r2 | 1)),
    "rem.s32": (
        "or.b32 %r4, %r2, 1; rem.s32 %r3, %r1, %r4;",
        lambda r1, r2: int(math.fmod(s32(r1), s32(r2 | 1))),
    ),
    "neg": ("neg.s32 %r3, %r1;", lambda r1: -r1),
    "abs": ("abs.s32 %r3, %r1;", lambda r1: abs(s32(r1))),
    "min.s32": ("min.s32 %r3, %r1, %r2;", lambda r1, r2: min(s32(r1), s32(r2))),
    "min.relu": ("min.relu.s32 %r3, %r1, %r2;", lambda r1, r2: max(0, min(s32(r1), s32(r2)))),
    "max.relu": ("max.relu.s32 %r3, %r1, %r2;", lambda r1, r2: max(0, s32(r1), s32(r2))),
    "max.u64": ("max.u64 %rd23, %rd21, %rd22;", lambda rd21, rd22: max(rd21, rd22)),
    "sad": ("sad.s32 %r3, %r1, %r2, 9;", lambda r1, r2: abs(s32(r1) - s32(r2)) + 9),
    "and": ("and.b32 %r3, %r1, -16777216;", lambda r1: r1 & 0xFF000000),
    "or 64": ("or.b64 %rd23, %rd21, 4611756662049538048;", lambda rd21: rd21 | 4611756662049538048),
    "xor not": ("not.b32 %r4, %r2; xor.b32 %r3, %r1, %r4;", lambda r1, r2: r1 ^ ~r2),
    "shl": ("shl.b32 %r3, %r1, %r2;", lambda r1, r2: r1 << r2 if r2 < 32 else 0),
    "shl immediate": ("shl.b32 %r3, %r1, 21;", lambda r1: r1 << 21),
    "shr.u32": ("shr.u32 %r3, %r1, %r2;", lambda r1, r2: r1 >> min(r2, 40)),
    "shr.s32": ("shr.s32 %r3, %r1, %r2;", lambda r1, r2: s32(r1) >> min(r2, 31)),
    "shr.u64": ("shr.u64 %rd23, %rd21, %r2;", lambda rd21, r2: rd21 >> min(r2, 64)),
    "shf.l.wrap": ("shf.l.wrap.b32 %r3, %r1, %r2, 12;", lambda r1, r2: (r2 << 32 | r1) << 12 >> 32),
    "shf.r.clamp": (
        "shf.r.clamp.b32 %r3, %r1, %r2, %r4;",
        lambda r1, r2, r4: (r2 << 32 | r1) >> min(r4, 32),
    ),
    "lop3": ("lop3.b32 %r3, %r1, %r2, %r4, 0xD8;", lambda r1, r2, r4: (r4 & r2) | (~r4 & r1)),
    "prmt": (
        "prmt.b32 %r3, %r1, %r2, 0x7351;",
        lambda r1, r2: byte(r1, 1) | byte(r2, 1) << 8 | byte(r1, 3) << 16 | byte(r2, 3) << 24,
    ),
    "prmt signs": (
        "prmt.b32 %r3, %r1, %r2, 0x8BF4;",
        lambda r1, r2: (
            byte(r2, 0) | (r2 >> 31) * 0xFF00 | (r1 >> 31) * 0xFF0000 | (r1 >> 7 & 1) * 0xFF000000
        ),
    ),
    "bfe.u32": ("bfe.u32 %r3, %r1, 5, 9;", lambda r1: r1 >> 5 & 0x1FF),
    "bfe past the top": ("bfe.s32 %r3, %r1, 28, 8;", lambda r1: s32(r1) >> 28),
    "bfi": ("bfi.b32 %r3, %r1, %r2, 4, 8;", lambda r1, r2: r2 & ~0xFF0 | (r1 & 0xFF) << 4),
    "popc": ("popc.b32 %r3, %r1;", lambda r1: bin(r1).count("1")),
    "clz": ("clz.b32 %r3, %r1;", lambda r1: 32 - r1.bit_length()),
    "brev": ("brev.b32 %r3, %r1;", lambda r1: int(f"{r1:032b}"[::-1], 2)),
    "bfind.u32": ("bfind.u32 %r3, %r1;", lambda r1: r1.bit_length() - 1),
    "bfind.s32": (
        "bfind.s32 %r3, %r1;",
        lambda r1: (r1 if r1 < 1 << 31 else ~r1 & M32).bit_length() - 1,
    ),
    "setp.lt.s32": (
        "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r3, 7, 9, %p1;",
        lambda r1, r2: 7 if s32(r1) < s32(r2) else 9,
    ),
    "setp.gt.u32": (
        "setp.gt.u32 %p1, %r1, %r2; selp.b32 %r3, %r1, %r2, %p1;",
        lambda r1, r2: max(r1, r2),
    ),
    "setp p|q": (
        """setp.eq.s32 %p1|%p2, %r1, %r2; selp.b32 %r4, 1, 0, %p1; selp.b32 %r5, 2, 0, %p2;
        add.s32 %r3, %r4, %r5;""",
        lambda r1, r2: 1 if r1 == r2 else 2,
    ),
    "setp.and": (
        "setp.ne.s32 %p1, %r1, 0; setp.lt.and.s32 %p2, %r1, %r2, %p1; selp.b32 %r3, 1, 0, %p2;",
        lambda r1, r2: int(r1 != 0 and s32(r1) < s32(r2)),
    ),
    "predicate logic": (
        """setp.lt.s32 %p1, %r1, 0; setp.lt.s32 %p2, %r2, 0; xor.pred %p3, %p1, %p2;
        not.pred %p4, %p3; and.pred %p5, %p4, %p1; or.pred %p6, %p5, %p3;
        selp.b32 %r3, 5, 6, %p6;""",
        lambda r1, r2: 5 if r1 >> 31 or r2 >> 31 else 6,
    ),
    "cvt.s64.s32": ("cvt.s64.s32 %rd23, %r1;", lambda r1: s32(r1)),
    "cvt.u64.u32": ("cvt.u64.u32 %rd23, %r1;", lambda r1: r1),
    "cvt.u32.u64": ("cvt.u32.u64 %r3, %rd21;", lambda rd21: rd21),
    "cvt.s32.s8": ("cvt.s32.s8 %r3, %r1;", lambda r1: (r1 & 0x7F) - (r1 & 0x80)),
    "cvt.u16.u32": ("cvt.u16.u32 %rs3, %r1; cvt.u32.u16 %r3, %rs3;", lambda r1: r1 & 0xFFFF),
    "mov pack, unpack": (
        "mov.b64 %rd24, {%r1, %r2}; mov.b64 {%r4, %r5}, %rd24; sub.s32 %r3, %r5, %r4;",
        lambda r1, r2: r2 - r1,
    ),
    "mov pack 64": ("mov.b64 %rd23, {%r1, %r2};", lambda r1, r2: r1 | r2 << 32),
    "mov halves": (
        "mov.b32 {%rs3, %rs4}, %r1; mov.b32 %r3, {%rs4, %rs3};",
        lambda r1: r1 >> 16 | (r1 & 0xFFFF) << 16,
    ),
    "mov quarters": (
        """mov.b64 {%rs3, %rs4, %rs5, %rs6}, %rd21;
        mov.b64 %rd23, {%rs6, %rs5, %rs4, %rs3};""",
        lambda rd21: sum((rd21 >> 16 * n & 0xFFFF) << 16 * (3 - n) for n in range(4)),
    ),
    "mapa": (
        "and.b32 %r4, %r1, 0xFFFFFF; mapa.shared::cluster.u32 %r3, %r4, 3;",
        lambda r1: r1 & 0xFFFFFF | 3 << 24,
    ),
    "cvt.rn.f32.s32": ("cvt.rn.f32.s32 %r3, %r1;", lambda r1: bits_of(np.float64(s32(r1)))),
    "cvt.rn.f32.u32": ("cvt.rn.f32.u32 %r3, %r1;", lambda r1: bits_of(np.float64(r1))),
}


def rounded(function: Callable[..., Any], bits: tuple[int, ...], ftz: bool = False) -> int:
    """A function of float32 values, computed in float64 and rounded once."""
    bits = tuple(map(flush, bits)) if ftz else bits
    with np.errstate(all="ignore"):
        result = bits_of(function(*(np.float64(f32(b)) for b in bits)))
    return flush(result) if ftz else result


def e4m3(bits: int) -> int:
    """Round to nearest even and saturate, by ml_dtypes; a NaN is 0x7f."""
    value = f32(bits)
    if np.isnan(value):
        return 0x7F
    return int(np.clip(value, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def half(bits: int, dtype: Any) -> int:
    value = np.asarray(f32(bits))
    with np.errstate(all="ignore"):
        return 0x7FFF if np.isnan(value) else int(value.astype(dtype).view(np.uint16))


def to_int(bits: int, low: int, high: int, rounding: Callable[[float], Any]) -> int:
    value = float(f32(bits))
    if math.isnan(value):
        return 0
    return int(min(max(value if math.isinf(value) else rounding(value), low), high))


def pick(code: str, test: Callable[[Any, Any], Any]) -> tuple[str, Reference]:
    """A comparison that selects 1 or 0."""
    return (
        f"{code} %p1, %r1, %r2; selp.b32 %r3, 1, 0, %p1;",
        lambda r1, r2: int(bool(test(f32(r1), f32(r2)))),
    )


FLOATING: dict[str, tuple[str, Reference]] = {
    "add": ("add.f32 %r3, %r1, %r2;", lambda r1, r2: rounded(np.add, (r1, r2))),
    "sub.ftz": (
        "sub.rn.ftz.f32 %r3, %r1, %r2;",
        lambda r1, r2: rounded(np.subtract, (r1, r2), ftz=True),
    ),
    "mul": ("mul.f32 %r3, %r1, %r2;", lambda r1, r2: rounded(np.multiply, (r1, r2))),
    "mul.ftz": (
        "mul.ftz.f32 %r3, %r1, 0f20000000;",
        lambda r1: rounded(lambda a: a * 2.0**-63, (r1,), ftz=True),
    ),
    "fma": (
        "fma.rn.f32 %r3, %r1, %r2, %r4;",
        lambda r1, r2, r4: rounded(lambda a, b, c: a * b + c, (r1, r2, r4)),
    ),
    "div": ("div.rn.f32 %r3, %r1, %r2;", lambda r1, r2: rounded(np.divide, (r1, r2))),
    "rcp.ftz": (
        "rcp.approx.ftz.f32 %r3, %r1;",
        lambda r1: rounded(np.reciprocal, (r1,), ftz=True),
    ),
    "rcp": ("rcp.rn.f32 %r3, %r1;", lambda r1: rounded(np.reciprocal, (r1,))),
    "neg": ("neg.f32 %r3, %r1;", lambda r1: r1 ^ 1 << 31),
    "neg.ftz": ("neg.ftz.f32 %r3, %r1;", lambda r1: flush(r1) ^ 1 << 31),
    "abs": ("abs.f32 %r3, %r1;", lambda r1: r1 & 0x7FFFFFFF),
    "max": ("max.f32 %r3, %r1, %r2;", lambda r1, r2: rounded(np.fmax, (r1, r2))),
    "max of three": (
        "max.f32 %r3, %r1, %r2, %r4;",
        lambda r1, r2, r4: rounded(lambda a, b, c: np.fmax(np.fmax(a, b), c), (r1, r2, r4)),
    ),
    "min.NaN": ("min.NaN.f32 %r3, %r1, %r2;", lambda r1, r2: rounded(np.minimum, (r1, r2))),
    "selp": (
        "setp.gt.f32 %p1, %r1, %r2; selp.f32 %r3, %r1, %r2, %p1;",
        lambda r1, r2: r1 if f32(r1) > f32(r2) else r2,
    ),
    "setp.neu": pick("setp.neu.f32", lambda a, b: a != b),
    "setp.ne": pick("setp.ne.f32", lambda a, b: a < b or a > b),
    "setp.nan": pick("setp.nan.f32", lambda a, b: np.isnan(a) or np.isnan(b)),
    "setp.leu": pick("setp.leu.f32", lambda a, b: not a > b),
    "setp.eq.ftz": (
        "setp.eq.ftz.f32 %p1, %r1, 0f00000000; selp.b32 %r3, 1, 0, %p1;",
        lambda r1: int(flush(r1) & M32 >> 1 == 0),
    ),
    "fma.f32x2, upper": (
        """mov.b64 %rd24, {%r1, %r2}; mov.b64 %rd25, {%r2, %r4};
        fma.rn.f32x2 %rd26, %rd24, %rd25, %rd24; mov.b64 {%r5, %r3}, %rd26;""",
        lambda r1, r2, r4: rounded(lambda _, b, c: b * c + b, (r1, r2, r4)),
    ),
    "mul.f32x2, lower": (
        """mov.b64 %rd24, {%r1, %r2}; mul.f32x2 %rd25, %rd24, %rd24;
        mov.b64 {%r3, %r6}, %rd25;""",
        lambda r1, r2: rounded(lambda a, _: a * a, (r1, r2)),
    ),
    "cvt e4m3x2": (
        "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r1, %r2; cvt.u32.u16 %r3, %rs1;",
        lambda r1, r2: e4m3(r1) << 8 | e4m3(r2),
    ),
    "cvt f16x2": (
        "cvt.rn.f16x2.f32 %r3, %r1, %r2;",
        lambda r1, r2: half(r1, np.float16) << 16 | half(r2, np.float16),
    ),
    "cvt bf16x2": (
        "cvt.rn.bf16x2.f32 %r3, %r1, %r2;",
        lambda r1, r2: half(r1, ml_dtypes.bfloat16) << 16 | half(r2, ml_dtypes.bfloat16),
    ),
    "cvt.rni.s32": (
        "cvt.rni.s32.f32 %r3, %r1;",
        lambda r1: to_int(r1, -(1 << 31), (1 << 31) - 1, np.rint),
    ),
    "cvt.rzi.u32": ("cvt.rzi.u32.f32 %r3, %r1;", lambda r1: to_int(r1, 0, M32, math.trunc)),
    "cvt.rmi": ("cvt.rmi.f32.f32 %r3, %r1;", lambda r1: rounded(np.floor, (r1,))),
    "cvt f16 and back": (
        "cvt.rn.f16.f32 %rs1, %r1; cvt.f32.f16 %r3, %rs1;",
        lambda r1: rounded(lambda a: np.float16(np.float32(a)), (r1,)),
    ),
}

EDGES_32 = [0, 1, 2, 31, 32, 33, (1 << 31) - 1, 1 << 31, M32, M32 - 1, 0xFFFF, 0x12345678]
EDGES_64 = [0, 1, 63, 64, M32, 1 << 32, (1 << 63) - 1, 1 << 63, M64, 0x123456789ABCDEF0]
FINITE = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 448.0, 464.0, 465.0, -1e-9, 3e38, 1e10]
EDGES_FLOAT = [*map(bits_of, FINITE), 0x7F800000, 0xFF800000, 0x7FC00000]
EDGES_FLOAT += [1, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800001]  # around subnormal, one ulp


def width(register: str) -> int:
    return 64 if register.startswith("rd") else 16 if register.startswith("rs") else 32


def inputs_of(registers: list[str], floats: bool) -> list[np.ndarray[Any, Any]]:
    """128 values for each register: edges against edges, then random ones."""
    rng = np.random.default_rng(1)
    columns = []
    for position, register in enumerate(registers):
        bits = width(register)
        edges = EDGES_FLOAT if floats and bits == 32 else EDGES_64 if bits == 64 else EDGES_32
        values = [*np.roll(np.array(edges, object), 3 * position), *edges]
        more = 128 - len(values)
        if floats and bits == 32:
            random = (rng.standard_normal(more) * 100).astype(np.float32).view(np.uint32)
        else:
            random = rng.integers(0, 1 << min(bits, 63), more, np.uint64)
        columns.append(
            np.array([int(v) & ((1 << bits) - 1) for v in [*values, *random]], f"u{bits // 8}")
        )
    return columns


def program(code: str, registers: list[str], output: str, index: str) -> str:
    """Load the inputs of element ``index``, run the case, store the element's result."""
    lines = [f"mov.u32 %r193, {index};"]
    for pointer, register in enumerate(registers, 1):
        size = width(register)
        lines.append(f"mad.wide.u32 %rd40, %r193, {size // 8}, %rd{pointer};")
        lines.append(f"ld.global.u{size} %{register}, [%rd40];")
    size = width(output)
    lines += [
        code,
        f"mad.wide.u32 %rd41, %r193, {size // 8}, %rd{len(registers) + 1};",
        f"st.global.u{size} [%rd41], %{output};",
        "ret;",
    ]
    return "\n".join(lines)


MODES = {
    "lanes": ("%tid.x", 128, 1),
    "uniform": ("%ctaid.x", 64, 128),
    "single": ("%ctaid.x", 1, 128),
}
CASES = {f"{name}": (*case, False) for name, case in INTEGER.items()}
CASES |= {f"{name} (float)": (*case, True) for name, case in FLOATING.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_instruction(name: str, mode: str) -> None:
    code, reference, floats = CASES[name]
    index, block, grid = MODES[mode]
    registers = list(inspect.signature(reference).parameters)
    columns = inputs_of(registers, floats)
    output = "rd23" if "%rd23" in code else "r3"
    out = np.zeros(128, f"u{width(output) // 8}")
    arrays = dict(zip(registers, columns, strict=True)) | {"out": out}
    run(program(code, registers, output, index), arrays, block=block, grid=grid)
    for n, got in enumerate(out.tolist()):
        values = [int(column[n]) for column in columns]
        want = reference(*values) & ((1 << width(output)) - 1)
        if floats and np.isnan(f32(want)) and np.isnan(f32(got)):
            continue  # which NaN an operation gives is not modelled
        assert got == want, f"{name} of {[hex(v) for v in values]}: {got:#x}, expected {want:#x}"


@pytest.mark.parametrize(
    ("code", "function"),
    [
        ("ex2.approx.ftz.f32 %r3, %r1;", np.exp2),
        ("lg2.approx.ftz.f32 %r3, %r1;", np.log2),
        ("sqrt.approx.f32 %r3, %r1;", np.sqrt),
        ("rsqrt.approx.ftz.f32 %r3, %r1;", lambda x: 1 / np.sqrt(x)),
        ("tanh.approx.f32 %r3, %r1;", np.tanh),
    ],
)
def test_approximate_functions(code: str, function: Callable[[Any], Any]) -> None:
    x = np.linspace(-20, 20, 128).astype(np.float32)
    x[:3] = 0, 1, 100
    out = np.zeros(128, np.uint32)
    run(
        program(code, ["r1"], "r3", "%tid.x"),
        {"x": x.view(np.uint32), "out": out},
        block=128,
    )
    with np.errstate(all="ignore"):
        expected = function(x.astype(np.float64))
    np.testing.assert_allclose(out.view(np.float32), expected, rtol=2e-7)


def test_ex2_flushes_a_subnormal_result_only_with_ftz() -> None:
    x = np.array([-125.0, -126.0, -126.5, -140.0], np.float32)
    for modifier, expected in (("", np.exp2(x)), (".ftz", np.where(x < -126, 0, np.exp2(x)))):
        out = np.zeros(4, np.uint32)
        body = program(f"ex2.approx{modifier}.f32 %r3, %r1;", ["r1"], "r3", "%tid.x")
        run(body, {"x": x.view(np.uint32), "out": out}, block=4)
        np.testing.assert_array_equal(out.view(np.float32), expected)
