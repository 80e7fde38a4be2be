"""Matrix instructions through PTX: operands and results are placed by loops over elements that
follow the tables of the PTX ISA, products are exact.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_programs import run

from mlakern.emulator import EmulatorError
from mlakern.emulator.races import RaceDetector

DTYPES: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
    "f64": np.float64,
}
SWIZZLES = {0: (0, 0), 32: (1, 3), 64: (3, 2), 128: (7, 1)}  # span: mask of rows, wgmma's code


def matrix(rows: int, columns: int, kind: str, seed: int) -> np.ndarray[Any, Any]:
    low = 0 if kind == "u8" else -3
    return np.random.default_rng(seed).integers(low, 4, (rows, columns)).astype(DTYPES[kind])


def codes(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(values).view(np.uint8)


def place(image: np.ndarray[Any, Any], values: Any, start: int, span: int, mn_major: bool) -> int:
    """Put [rows, k] into an image of shared memory; returns a wgmma descriptor of it."""
    rows, k = values.shape
    size = values.itemsize
    if mn_major:
        leading, stride = (k // 8) * 8 * span, 8 * span
    elif span:
        leading, stride = 16, 8 * span
    else:
        leading, stride = 128, (k * size // 16) * 128
    mask, code = SWIZZLES[span]
    raw = codes(values).reshape(rows, k, size)
    for row in range(rows):
        for column in range(k):
            if mn_major:
                x = row * size
                at = x % span + x // span * leading + column % 8 * span + column // 8 * stride
            elif span:
                at = row % 8 * span + row // 8 * stride + column * size
            else:
                b = column * size
                at = row % 8 * 16 + row // 8 * stride + b // 16 * leading + b % 16
            at += start
            at ^= (at >> 7 & mask) << 4
            image[at : at + size] = raw[row, column]
    return start >> 4 & 0x3FFF | (leading >> 4) << 16 | (stride >> 4) << 32 | code << 62


def a_registers(values: Any) -> np.ndarray[Any, Any]:
    """[warps · 16, k] as registers [warps · 32, registers] of 32 (or 64) bits."""
    rows, k = values.shape
    word = 8 if values.dtype == np.float64 else 4
    per = word // values.itemsize
    registers = k // (4 * per) * 2
    out = np.zeros((rows * 2, registers), np.uint64 if word == 8 else np.uint32)
    for thread in range(rows * 2):
        warp, g, q = thread // 32, thread % 32 // 4, thread % 4
        for r in range(registers):
            row, first = 16 * warp + g + 8 * (r % 2), (r // 2 * 4 + q) * per
            out[thread, r] = np.ascontiguousarray(values[row, first : first + per]).view(out.dtype)[
                0
            ]
    return out


def d_matrix(registers: Any, n: int) -> np.ndarray[Any, Any]:
    """Registers [threads, n / 2] of an accumulator as [threads / 2, n]."""
    threads = len(registers)
    out = np.zeros((threads // 2, n), registers.dtype)
    for thread in range(threads):
        warp, g, q = thread // 32, thread % 32 // 4, thread % 4
        for r in range(n // 2):
            out[16 * warp + g + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * q + r % 2] = registers[
                thread, r
            ]
    return out


def names(first: int, count: int, letter: str = "r") -> str:
    return "{" + ", ".join(f"%{letter}{first + n}" for n in range(count)) + "}"


SIZE = 48 * 1024
FILL = f"""
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %r1;
    mov.u32 %r3, dynamic;
FILL:
    shl.b32 %r4, %r2, 2;
    cvt.u64.u32 %rd30, %r4;
    add.u64 %rd31, %rd1, %rd30;
    ld.global.b32 %r5, [%rd31];
    add.u32 %r6, %r3, %r4;
    st.shared.b32 [%r6], %r5;
    add.u32 %r2, %r2, 128;
    setp.lt.u32 %p1, %r2, {SIZE // 4};
    @%p1 bra FILL;
"""
PROXY = "fence.proxy.async.shared::cta; bar.sync 0;"


def wgmma(
    kind: str,
    n: int,
    *,
    result: str = "f32",
    spans: tuple[int, int] = (128, 128),
    majors: tuple[bool, bool] = (False, False),
    registers: bool = False,
    factors: tuple[int, int] = (1, 1),
    order: str = PROXY,
    wait: str = "wgmma.wait_group.sync.aligned 0;",
    observer: Any = None,
) -> tuple[Any, Any]:
    """Two products, the second added to the first; returns D as computed and as expected."""
    k = 32 // np.dtype(DTYPES[kind]).itemsize
    a, b = matrix(64, k, kind, 1), matrix(n, k, kind, 2)
    image = np.zeros(SIZE, np.uint8)
    offset = 1024  # of dynamic shared memory
    whole = np.zeros(SIZE + offset, np.uint8)
    a_word = place(whole, a, offset, spans[0], majors[0])
    b_word = place(whole, b, offset + 16384, spans[1], majors[1])
    image[:] = whole[offset:]
    fragments = a_registers(a)
    count = n // 4 if result == "f16" else n // 2
    out = np.zeros((128, count), np.uint32)
    left = names(20, 4) if registers else "%rd20"
    shape = f"m64n{n}k{k}.{result}.{kind}.{kind}"
    tail = ""
    if result != "s32":
        tail = f", {factors[0]}, {factors[1]}"
    if kind in ("f16", "bf16"):
        tail += f", {int(majors[1])}" if registers else f", {int(majors[0])}, {int(majors[1])}"
    mma = f"wgmma.mma_async.sync.aligned.{shape} {names(40, count)}, {left}, %rd21"
    stores = "".join(f"st.global.b32 [%rd33+{4 * r}], %r{40 + r};" for r in range(count))
    body = f"""{FILL}
    {order}
    mad.wide.u32 %rd32, %r1, 16, %rd2;
    ld.global.v4.b32 {names(20, 4)}, [%rd32];
    mad.wide.u32 %rd33, %r1, {4 * count}, %rd3;
    mov.b64 %rd20, {a_word};
    mov.b64 %rd21, {b_word};
    setp.eq.u32 %p2, 0, 1;
    setp.eq.u32 %p3, 0, 0;
    wgmma.fence.sync.aligned;
    {mma}, %p2{tail};
    {mma}, %p3{tail};
    wgmma.commit_group.sync.aligned;
    {wait}
    {stores}
    st.shared.b32 [%r3], %r1;
    ret;"""
    arrays = {"image": image.view(np.uint32), "fragments": fragments, "out": out}
    run(
        body,
        arrays,
        block=128,
        shared=SIZE,
        target="sm_90a",
        observer=observer,
    )
    sign = factors[0] * factors[1]
    want = 2 * sign * a.astype(np.float64) @ b.astype(np.float64).T
    if result == "f16":
        pairs = out.view(np.float16).reshape(128, n // 2)
        return d_matrix(pairs, n), want
    return d_matrix(out.view(np.int32 if result == "s32" else np.float32), n), want


@pytest.mark.parametrize(
    ("kind", "n", "options"),
    [
        ("f16", 64, {}),
        ("f16", 8, {"spans": (0, 0)}),
        ("f16", 256, {"spans": (64, 32)}),
        ("f16", 64, {"majors": (True, True)}),
        ("f16", 64, {"majors": (False, True), "registers": True}),
        ("bf16", 40, {"spans": (32, 64)}),
        ("bf16", 32, {"majors": (False, True), "spans": (128, 64), "factors": (-1, 1)}),
        ("f16", 24, {"result": "f16", "factors": (-1, -1)}),
        ("tf32", 72, {}),
        ("tf32", 16, {"registers": True}),
        ("e4m3", 64, {"registers": True}),
        ("e4m3", 248, {"result": "f16"}),
        ("e5m2", 16, {"spans": (64, 128)}),
        ("s8", 32, {"result": "s32"}),
        ("u8", 128, {"result": "s32", "registers": True}),
    ],
)
def test_wgmma(kind: str, n: int, options: dict[str, Any]) -> None:
    got, want = wgmma(kind, n, **options)
    np.testing.assert_array_equal(got.astype(np.float64), want)


def test_wgmma_reads_through_the_asynchronous_proxy() -> None:
    def missing(**options: Any) -> str:
        with pytest.raises(EmulatorError) as raised:
            wgmma("f16", 64, observer=RaceDetector(), **options)
        return str(raised.value)

    wgmma("f16", 64, observer=RaceDetector())
    assert "missing: fence.proxy.async" in missing(order="bar.sync 0;")
    assert "race, read after write" in missing(order="fence.proxy.async.shared::cta;")
    late = missing(wait="wgmma.wait_group.sync.aligned 1;")
    assert "race, write after read" in late
    assert "wgmma.mma_async" in late
    assert "st.shared.b32 [%r3], %r1" in late


def test_wgmma_of_part_of_a_warpgroup_is_refused() -> None:
    with pytest.raises(EmulatorError, match="needs four whole warps"):
        run("wgmma.fence.sync.aligned; ret;", block=64, target="sm_90a")


SHAPES = [
    ("f16", 16, 8, "f32"),
    ("f16", 16, 16, "f16"),
    ("bf16", 16, 8, "f32"),
    ("bf16", 16, 16, "f32"),
    ("tf32", 16, 4, "f32"),
    ("tf32", 16, 8, "f32"),
    ("e4m3", 16, 16, "f32"),
    ("e5m2", 16, 32, "f16"),
    ("s8", 16, 16, "s32"),
    ("u8", 16, 32, "s32"),
    ("f64", 16, 8, "f64"),
]


@pytest.mark.parametrize(("kind", "rows", "k", "result"), SHAPES)
def test_mma(kind: str, rows: int, k: int, result: str) -> None:
    a, b = matrix(2 * rows, k, kind, 3), matrix(8, k, kind, 4)
    c = np.random.default_rng(5).integers(-9, 9, (2 * rows, 8)).astype(np.float64)
    wide = kind == "f64"
    fragments = a_registers(a)
    # B of 8 columns lies as A of 8 rows does.
    doubled = a_registers(np.concatenate([b, b, b, b]))[:, ::2]
    c_type = {"f16": np.float16, "s32": np.int32, "f64": np.float64}.get(result, np.float32)
    words = 4 if result != "f16" else 2
    c_registers = np.zeros((64, 4), c_type)
    for thread in range(64):
        warp, g, q = thread // 32, thread % 32 // 4, thread % 4
        for r in range(4):
            c_registers[thread, r] = c[16 * warp + g + 8 * (r // 2), 2 * q + r % 2]
    out = np.zeros_like(c_registers)
    letter, size = ("rd", 8) if wide else ("r", 4)

    def load(pointer: int, first: int, count: int) -> str:
        lines = f"mad.wide.u32 %rd40, %r1, {size * count}, %rd{pointer};"
        return lines + "".join(
            f"ld.global.b{8 * size} %{letter}{first + n}, [%rd40+{size * n}];" for n in range(count)
        )

    counts = fragments.shape[1], doubled.shape[1]
    shape = f"m{rows}n8k{k}.row.col.{result}.{kind}.{kind}.{result}"
    loads = load(1, 30, counts[0]) + load(2, 50, counts[1]) + load(3, 20, words)
    operands = ", ".join(
        names(first, count, letter)
        for first, count in ((20, words), (30, counts[0]), (50, counts[1]), (20, words))
    )
    stores = f"mad.wide.u32 %rd40, %r1, {size * words}, %rd4;" + "".join(
        f"st.global.b{8 * size} [%rd40+{size * n}], %{letter}{20 + n};" for n in range(words)
    )
    arrays = {"a": fragments, "b": np.ascontiguousarray(doubled), "c": c_registers, "out": out}
    run(
        f"mov.u32 %r1, %tid.x; {loads} mma.sync.aligned.{shape} {operands}; {stores} ret;",
        arrays,
        block=64,
    )
    got = d_matrix(out, 8).astype(np.float64)
    np.testing.assert_array_equal(got, a.astype(np.float64) @ b.astype(np.float64).T + c)


@pytest.mark.parametrize("kind", ["s8", "f64"])
def test_mma_of_eight_rows(kind: str) -> None:
    k = 16 if kind == "s8" else 4
    a, b = matrix(8, k, kind, 6), matrix(8, k, kind, 7)
    fragments = [np.ascontiguousarray(a_registers(np.concatenate([x, x]))[:, ::2]) for x in (a, b)]
    wide = kind == "f64"
    out = np.zeros((32, 2), np.float64 if wide else np.int32)
    letter, size = ("rd", 8) if wide else ("r", 4)
    result = "f64" if wide else "s32"
    r = [f"%{letter}{n}" for n in range(20, 26)]
    run(
        f"""mov.u32 %r1, %tid.x;
        mad.wide.u32 %rd40, %r1, {size}, %rd1; ld.global.b{8 * size} {r[0]}, [%rd40];
        mad.wide.u32 %rd40, %r1, {size}, %rd2; ld.global.b{8 * size} {r[1]}, [%rd40];
        mov.b{8 * size} {r[2]}, 0;
        mma.sync.aligned.m8n8k{k}.row.col.{result}.{kind}.{kind}.{result}
            {{{r[3]}, {r[4]}}}, {{{r[0]}}}, {{{r[1]}}}, {{{r[2]}, {r[2]}}};
        mad.wide.u32 %rd40, %r1, {2 * size}, %rd3;
        st.global.v2.b{8 * size} [%rd40], {{{r[3]}, {r[4]}}}; ret;""",
        {"a": fragments[0], "b": fragments[1], "out": out},
    )
    got = np.zeros((8, 8))
    for thread in range(32):
        for e in range(2):
            got[thread // 4, 2 * (thread % 4) + e] = out[thread, e]
    np.testing.assert_array_equal(got, a.astype(np.float64) @ b.astype(np.float64).T)


def test_integer_products_saturate_only_when_asked() -> None:
    out = np.zeros(2, np.int32)
    run(
        """mov.b32 %r1, 0x7F7F7F7F; mov.b32 %r2, 0x7FFFFFFF;
        mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r3, %r4, %r5, %r6}, {%r1, %r1, %r1, %r1},
            {%r1, %r1}, {%r2, %r2, %r2, %r2};
        mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32 {%r7, %r8, %r9, %r10},
            {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%r2, %r2, %r2, %r2};
        st.global.v2.b32 [%rd1], {%r3, %r7}; ret;""",
        {"out": out},
    )
    total = 32 * 127 * 127 + (1 << 31) - 1
    assert out.tolist() == [total - (1 << 32), (1 << 31) - 1]


def test_four_bit_products() -> None:
    rng = np.random.default_rng(8)
    a, b = rng.integers(-8, 8, (16, 64)), rng.integers(-8, 8, (8, 64))

    def packed(values: Any) -> np.ndarray[Any, Any]:
        nibbles = (values & 15).astype(np.uint8)
        return nibbles[:, ::2] | nibbles[:, 1::2] << 4

    left = a_registers(packed(a))
    right = a_registers(packed(np.concatenate([b, b])))[:, ::2]
    out = np.zeros((32, 4), np.int32)
    run(
        """mov.u32 %r1, %tid.x;
        mad.wide.u32 %rd40, %r1, 16, %rd1; ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd40];
        mad.wide.u32 %rd40, %r1, 8, %rd2; ld.global.v2.b32 {%r6, %r7}, [%rd40];
        mov.b32 %r8, 0;
        mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%r9, %r10, %r11, %r12},
            {%r2, %r3, %r4, %r5}, {%r6, %r7}, {%r8, %r8, %r8, %r8};
        mad.wide.u32 %rd40, %r1, 16, %rd3;
        st.global.v4.b32 [%rd40], {%r9, %r10, %r11, %r12}; ret;""",
        {"a": left, "b": np.ascontiguousarray(right), "out": out},
    )
    np.testing.assert_array_equal(d_matrix(out, 8), a @ b.T)


def test_movmatrix_transposes() -> None:
    source = np.arange(64, dtype=np.uint16).reshape(8, 8)
    out = np.zeros((8, 8), np.uint16)
    run(
        """mov.u32 %r1, %tid.x; mad.wide.u32 %rd30, %r1, 4, %rd1; mad.wide.u32 %rd31, %r1, 4, %rd2;
        ld.global.b32 %r2, [%rd30]; movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r2;
        st.global.b32 [%rd31], %r3; ret;""",
        {"source": source, "out": out},
    )
    np.testing.assert_array_equal(out, source.T)
