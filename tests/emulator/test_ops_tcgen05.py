"""Kinds of tcgen05.mma beyond the dense float ones with an f32 result, and tcgen05.cp."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from ptx_programs import run
from test_hw_tensorcore import instruction_word, new_cta, place, shared_descriptor

from mlakern.emulator import DeadlockError, EmulatorError, Options, descriptors, tensorcore
from mlakern.emulator.hardware_error import HardwareError
from mlakern.emulator.tmem import Shape, TensorMemory

WORD = instruction_word(128, 32, "f16", "f16")


def integers(rows: int, columns: int, low: int, high: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, (rows, columns))


def multiply(a: np.ndarray, b: np.ndarray, word: int, kind: str, **options: int) -> TensorMemory:
    """D = A · B at column 0, then D += A · B; operands are K-major."""
    cta = new_cta()
    a_word = place(cta, a, 1024, 32, False)
    b_word = place(cta, b, 16384, 32, False)
    for accumulate in (False, True):
        mma = tensorcore.decode(kind, word, a_word, b_word, 0, accumulate, **options)
        tensorcore.execute(mma, [cta])
    return cta.tensor


def test_integers_accumulate_exactly_and_saturate_when_asked() -> None:
    a = integers(128, 32, -128, 128, 1).astype(np.int8)
    b = integers(32, 32, 0, 256, 2).astype(np.uint8)
    word = 2 << 4 | 1 << 7 | 0 << 10 | 32 // 8 << 17 | 128 // 16 << 24
    want = a.astype(np.int64) @ b.astype(np.int64).T
    got = multiply(a, b, word, "i8").words[:32].view(np.int32).T
    np.testing.assert_array_equal(got, 2 * want)
    for saturate in (0, 1):
        cta = new_cta()
        places = place(cta, a, 1024, 32, False), place(cta, b, 16384, 32, False)
        cta.tensor.words[:32] = np.uint32(0x7FFFFFF0)
        cta.tensor.written[:32] = True
        tensorcore.execute(tensorcore.decode("i8", word | saturate << 3, *places, 0, True), [cta])
        total = want + 0x7FFFFFF0
        wrapped = total.astype(np.uint32).view(np.int32)
        clamped = total.clip(-(1 << 31), (1 << 31) - 1)
        got = cta.tensor.words[:32].view(np.int32).T
        np.testing.assert_array_equal(got, clamped if saturate else wrapped)


def test_f16_results_lie_in_the_lower_halves_of_columns() -> None:
    a, b = (integers(n, 16, -3, 4, n).astype(np.float16) for n in (128, 32))
    tensor = multiply(a, b, WORD ^ 1 << 4, "f16")
    got = tensor.words[:32].astype(np.uint16).view(np.float16).T
    np.testing.assert_array_equal(got, 2 * (a @ b.T))
    packed = tensor.load(Shape("32x32b", 16, True), 0, (0, 1, 2, 3))
    np.testing.assert_array_equal(packed & 0xFFFF, tensor.words[0:32:2])
    np.testing.assert_array_equal(packed >> 16, tensor.words[1:32:2])
    other = TensorMemory()
    other.allocate(32)
    other.store(Shape("32x32b", 16, True), 0, (0, 1, 2, 3), packed)
    np.testing.assert_array_equal(other.words[:32], tensor.words[:32])


def test_an_input_may_be_scaled_and_lanes_masked() -> None:
    a, b = (integers(n, 16, -3, 4, n).astype(np.float16) for n in (128, 32))
    product = a.astype(np.float32) @ b.astype(np.float32).T
    tensor = multiply(a, b, WORD, "f16", shift=3)
    np.testing.assert_array_equal(tensor.words[:32].view(np.float32).T, product * (1 + 2.0**-3))
    masked = sum(1 << lane for lane in range(0, 128, 3))
    tensor = multiply(a, b, WORD, "f16", masked=masked)
    enabled = np.array([bool(lane % 3) for lane in range(128)])
    got = tensor.words[:32].view(np.float32).T
    np.testing.assert_array_equal(got[enabled], 2 * product[enabled])
    assert not tensor.written[:32, ~enabled].any()


SCALED = [
    # kind, factors a row, elements, factor format, code of the elements
    ("mxf8f6f4", 1, "e4m3", "ue8m0", 0),
    ("mxf8f6f4", 1, "e5m2", "ue8m0", 1),
    ("mxf4", 2, "e2m1", "ue8m0", 1),
    ("mxf4nvf4", 2, "e2m1", "ue8m0", 1),
    ("mxf4nvf4", 4, "e2m1", "ue4m3", 1),
]
TYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize(("kind", "count", "name", "factor", "code"), SCALED)
@pytest.mark.parametrize("step", [0, 1])
def test_block_scaled_products(
    kind: str, count: int, name: str, factor: str, code: int, step: int
) -> None:
    n = 64
    k = 64 if name == "e2m1" else 32
    first = count * step % 4
    rng = np.random.default_rng(9)
    cta = new_cta()
    sides = []
    for rows, start, column in ((128, 1024, 256), (n, 16384, 300)):
        values = rng.integers(-3, 4, (rows, k)).astype(TYPES[name])
        raw = values.view(np.uint8)
        if name == "e2m1":
            raw = raw[:, ::2] | raw[:, 1::2] << 4
        if factor == "ue8m0":
            codes = rng.integers(125, 130, (rows, 4)).astype(np.uint8)
            scales = 2.0 ** (codes.astype(float) - 127)
        else:
            scales = rng.integers(1, 16, (rows, 4)) / 4
            codes = scales.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        # Row r's factors: lane r % 32 of column r / 32.
        for row in range(rows):
            word = int.from_bytes(codes[row].tobytes(), "little")
            cta.tensor.words[column + row // 32, row % 32] = word
            cta.tensor.written[column + row // 32, row % 32] = True
        used = scales[:, first : first + count].repeat(k // count, axis=1)
        sides.append((place(cta, raw, start, 32, False), values.astype(float) * used, column))
    (a_word, a, a_at), (b_word, b, b_at) = sides
    word = (
        first << 4
        | code << 7
        | code << 10
        | n // 8 << 17
        | (factor == "ue8m0") << 23
        | 1 << 27
        | first << 29
    )
    mma = tensorcore.decode(
        kind,
        word,
        a_word,
        b_word,
        0,
        False,
        scales=count,
        scale_a=a_at | first << 30,
        scale_b=b_at,
    )
    tensorcore.execute(mma, [cta])
    np.testing.assert_array_equal(cta.tensor.words[:n].view(np.float32).T, a @ b.T)
    reads = tensorcore.footprint(mma, [0])[1]
    assert [(cells.column, cells.width) for cells in reads] == [(a_at, 4), (b_at, 2)]


@pytest.mark.parametrize(
    ("word", "kind", "count", "message"),
    [
        (1 << 27 | 8 << 17 | 1 << 23, "mxf8f6f4", 2, "kind::mxf8f6f4 with 2 scales a row"),
        (2 << 27 | 8 << 17 | 1 << 23, "mxf8f6f4", 1, "M is 256 in 1 CTAs"),
        (1 << 27 | 8 << 17, "mxf8f6f4", 1, "ue4m3 scales"),
        (1 << 27 | 8 << 17 | 1 << 23 | 1 << 31, "mxf8f6f4", 1, "K of 96"),
        (1 << 27 | 8 << 17 | 1 << 23 | 1 << 25, "mxf8f6f4", 1, "reserved bit"),
        (1 << 27 | 8 << 17 | 1 << 23 | 5 << 7, "mxf8f6f4", 1, "A format 5"),
        (1 << 27 | 8 << 17 | 1 << 4 | 9 << 7, "mxf4nvf4", 4, "scale id of B is 1"),
    ],
)
def test_bad_block_scaled_descriptors(word: int, kind: str, count: int, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        descriptors.block_scaled(word, kind, 1, count)


def test_unwritten_scale_factors_are_named() -> None:
    cta = new_cta()
    values = integers(128, 32, 0, 3, 1).astype(np.uint8)
    a_word, b_word = place(cta, values, 1024, 32, False), place(cta, values, 16384, 32, False)
    word = 128 // 8 << 17 | 1 << 23 | 1 << 27
    mma = tensorcore.decode(
        "mxf8f6f4", word, a_word, b_word, 0, False, scales=1, scale_a=256, scale_b=300
    )
    with pytest.raises(HardwareError, match="scale factors at column 256 were never written"):
        tensorcore.execute(mma, [cta])


def lanes_of(shape: str, row: int) -> list[int]:
    """The lanes that a row of the source goes to (PTX ISA, "tcgen05.cp")."""
    name, _, multicast = shape.partition(".")
    if name.startswith("128"):
        return [row]
    if name.startswith("4x"):
        return [32 * row]
    if name.startswith("32x"):
        return [row + 32 * warp for warp in range(4)]
    half, within = divmod(row, 32)
    warps = ((0, 2), (1, 3)) if multicast.endswith("02_13") else ((0, 1), (2, 3))
    return [within + 32 * warp for warp in warps[half]]


@pytest.mark.parametrize(
    "shape",
    [
        "128x256b",
        "128x128b",
        "4x256b",
        "64x128b.warpx2::02_13",
        "64x128b.warpx2::01_23",
        "32x128b.warpx4",
    ],
)
def test_copies_to_tensor_memory(shape: str) -> None:
    size = shape.split(".")[0]
    rows, bits = (int(part) for part in size.removesuffix("b").split("x"))
    row_bytes = bits // 8
    source = np.arange(rows * row_bytes // 4, dtype=np.uint32).reshape(rows, row_bytes // 4)
    # No swizzle: cores of 8 rows of 16 bytes; the next 8 rows follow, then the next 16 bytes.
    image = np.zeros(4096, np.uint8)
    groups = -(-rows // 8)
    for row in range(rows):
        for chunk in range(row_bytes // 16):
            at = row % 8 * 16 + row // 8 * 128 + chunk * groups * 128
            image[at : at + 16] = source[row, 4 * chunk : 4 * chunk + 4].view(np.uint8)
    word = shared_descriptor(1024 + 1024, groups * 128, 128, 0)
    out = np.zeros((128, 8), np.uint32)
    columns = row_bytes // 4
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; shl.b32 %r3, %r1, 5;
    add.u32 %r4, %r2, %r3; mad.wide.u32 %rd10, %r1, 32, %rd1;
    ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd10];
    ld.global.v4.b32 {{%r14, %r15, %r16, %r17}}, [%rd10+16];
    st.shared.v4.b32 [%r4+1024], {{%r10, %r11, %r12, %r13}};
    st.shared.v4.b32 [%r4+1040], {{%r14, %r15, %r16, %r17}};
    fence.proxy.async; setp.gt.u32 %p1, %r1, 31; @%p1 bra FIRST;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
FIRST: bar.sync 0;
    ld.shared.b32 %r5, [%r2]; mov.b32 %r20, 0;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r5],
        {{%r20, %r20, %r20, %r20, %r20, %r20, %r20, %r20}};
    tcgen05.wait::st.sync.aligned; setp.ne.u32 %p2, %r1, 0;
    @!%p2 mbarrier.init.shared.b64 [%r2+8], 1;
    fence.mbarrier_init.release.cluster;
    tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
    @%p2 bra WAIT;
    mov.b64 %rd20, {word};
    tcgen05.cp.cta_group::1.{shape} [%r5], %rd20;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2+8];
WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r2+8], 0; @!%p3 bra WAIT;
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x8.b32
        {{%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27}}, [%r5];
    tcgen05.wait::ld.sync.aligned; mad.wide.u32 %rd11, %r1, 32, %rd2;
    st.global.v4.b32 [%rd11], {{%r20, %r21, %r22, %r23}};
    st.global.v4.b32 [%rd11+16], {{%r24, %r25, %r26, %r27}};
    tcgen05.fence::before_thread_sync; bar.sync 0; @%p1 bra END;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;
END: ret;"""
    for options in (Options(races=True), Options(delay=True, seed=1)):
        arrays = {"image": image, "out": out}
        run(body, arrays, block=128, shared=8192, options=options)
        want = np.zeros((128, 8), np.uint32)
        for row in range(rows):
            for lane in lanes_of(shape, row):
                want[lane, :columns] = source[row]
        np.testing.assert_array_equal(out, want)


PAIR = """mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, dynamic; {delay}
    tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r2], {columns};
    ld.shared.b32 %r5, [%r2];
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r5, {columns}; ret;"""


def test_a_pair_allocates_together() -> None:
    run(PAIR.format(delay="", columns=64), grid=2, cluster=2)
    with pytest.raises(EmulatorError, match="64 columns for the pair, its other CTA asks for 32"):
        choose = "setp.eq.u32 %p1, %r1, 0; selp.b32 %r9, 32, 64, %p1;"
        body = PAIR.format(delay=choose, columns="%r9")
        run(body, grid=2, cluster=2)
    leave = "setp.eq.u32 %p1, %r1, 1; @%p1 bar.sync 1, 64;"
    with pytest.raises(DeadlockError, match="columns of tensor memory, and for the pair's other"):
        run(PAIR.format(delay=leave, columns=64), grid=2, cluster=2)
