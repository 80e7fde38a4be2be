"""A whole FP8 matrix product: TMA → mbarrier → tcgen05.mma → commit → tcgen05.ld.

D[128, 128] = A[128, K] · B[128, K]ᵀ by one CTA or by a pair, which share the rows of A and of B.
Warps 0-3 store D, warp 4 issues MMAs, warp 5 loads, through two stages of shared memory.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from ptx_programs import run

from mlakern.emulator import GlobalMemory, Options
from mlakern.tensormap import Swizzle, TensorMap

K = 512
FP8 = ml_dtypes.float8_e4m3fn


def gemm(ctas: int) -> str:
    """The kernel's body for cta_group::``ctas``; %rd1 is D, m0 and m1 map A and B."""
    rows = 128 // ctas
    stage = rows * 128
    full, empty, done, slot = (2 * 2 * stage + 16 * n for n in range(4))
    word = 1 << 4 | (128 >> 3) << 17 | (128 >> 4) << 24
    high = (1024 >> 4) | 1 << 14 | 2 << 29  # stride offset, version, swizzle of 128 bytes
    multicast = ".multicast::cluster" if ctas == 2 else ""
    mask = ", %rs1" if ctas == 2 else ""
    commit = (
        f"tcgen05.commit.cta_group::{ctas}.mbarrier::arrive::one.shared::cluster{multicast}.b64"
    )
    mma = "".join(
        f"""
        add.s64 %rd12, %rd10, {2 * step};
        add.s64 %rd13, %rd11, {2 * step};
        tcgen05.mma.cta_group::{ctas}.kind::f8f6f4 [%r6], %rd12, %rd13, {word}, %p10;
        setp.eq.s32 %p10, 0, 0;"""
        for step in range(4)
    ).replace("setp.eq.s32 %p10, 0, 0;", "mov.pred %p10, -1;")
    load = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile"
        f".mbarrier::complete_tx::bytes.cta_group::{ctas}"
    )
    columns = 4 if ctas == 2 else 8  # tcgen05.ld of 16 columns that a warp makes
    return f"""
    mov.u32 %r1, %tid.x;
    shr.u32 %r2, %r1, 5;
    shfl.sync.idx.b32 %r2, %r2, 0, 31, -1;
    mov.u32 %r3, %cluster_ctarank;
    mov.u32 %r4, dynamic;
    mov.b16 %rs1, 3;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r4+{full}], 1;
    mbarrier.init.shared.b64 [%r4+{full + 8}], 1;
    mbarrier.init.shared.b64 [%r4+{empty}], 1;
    mbarrier.init.shared.b64 [%r4+{empty + 8}], 1;
    mbarrier.init.shared.b64 [%r4+{done}], 1;
    fence.mbarrier_init.release.cluster;
READY:
    setp.ne.u32 %p2, %r2, 0;
    @%p2 bra ALLOCATED;
    tcgen05.alloc.cta_group::{ctas}.sync.aligned.shared::cta.b32 [%r4+{slot}], 128;
    tcgen05.relinquish_alloc_permit.cta_group::{ctas}.sync.aligned;
ALLOCATED:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    ld.shared.u32 %r6, [%r4+{slot}];
    mov.u32 %r5, 0;
    setp.eq.u32 %p3, %r2, 4;
    @%p3 bra MULTIPLY;
    setp.ne.u32 %p3, %r2, 5;
    @%p3 bra STORE;

LOAD:
    and.b32 %r10, %r5, 1;
    shl.b32 %r11, %r10, 3;
    add.u32 %r12, %r4, %r11;
    shr.u32 %r13, %r5, 1;
    and.b32 %r13, %r13, 1;
    xor.b32 %r13, %r13, 1;
WAIT_EMPTY:
    mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r12+{empty}], %r13;
    @!%p4 bra WAIT_EMPTY;
    elect.sync _|%p5, -1;
    @!%p5 bra LOADED;
    setp.ne.u32 %p6, %r3, 0;
    @%p6 mov.u32 %r14, 0;
    @!%p6 mbarrier.arrive.expect_tx.shared.b64 _, [%r12+{full}], {2 * ctas * stage};
    add.u32 %r15, %r12, {full};
    and.b32 %r15, %r15, 0xFEFFFFFF;
    mul.lo.u32 %r16, %r10, {stage};
    add.u32 %r17, %r4, %r16;
    shl.b32 %r18, %r5, 7;
    mul.lo.u32 %r19, %r3, {rows};
    {load} [%r17], [m0, {{%r18, %r19}}], [%r15];
    {load} [%r17+{2 * stage}], [m1, {{%r18, %r19}}], [%r15];
LOADED:
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p7, %r5, {K // 128};
    @%p7 bra LOAD;
    bra.uni STORE;

MULTIPLY:
    setp.ne.u32 %p6, %r3, 0;
    @%p6 bra STORE;
NEXT:
    and.b32 %r10, %r5, 1;
    shl.b32 %r11, %r10, 3;
    add.u32 %r12, %r4, %r11;
    shr.u32 %r13, %r5, 1;
    and.b32 %r13, %r13, 1;
WAIT_FULL:
    mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r12+{full}], %r13;
    @!%p4 bra WAIT_FULL;
    tcgen05.fence::after_thread_sync;
    elect.sync _|%p5, -1;
    @!%p5 bra ISSUED;
    mul.lo.u32 %r16, %r10, {stage};
    add.u32 %r17, %r4, %r16;
    shr.u32 %r20, %r17, 4;
    add.u32 %r21, %r20, {2 * stage >> 4};
    mov.b64 %rd10, {{%r20, {high}}};
    mov.b64 %rd11, {{%r21, {high}}};
    setp.ne.u32 %p10, %r5, 0;
    {mma}
    {commit} [%r12+{empty}]{mask};
ISSUED:
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p7, %r5, {K // 128};
    @%p7 bra NEXT;
    @!%p5 bra STORE;
    {commit} [%r4+{done}]{mask};

STORE:
    setp.gt.u32 %p8, %r2, 3;
    @%p8 bra FREE;
WAIT_DONE:
    mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r4+{done}], 0;
    @!%p9 bra WAIT_DONE;
    tcgen05.fence::after_thread_sync;
    mov.u32 %r30, %laneid;
    mov.u32 %r31, %r2;
    mov.u32 %r32, 0;
    setp.eq.u32 %p11, {ctas}, 1;
    @%p11 bra ROWS;
    and.b32 %r31, %r2, 1;
    shr.u32 %r32, %r2, 1;
    shl.b32 %r32, %r32, 8;
ROWS:
    mad.lo.u32 %r33, %r31, 32, %r30;
    mad.lo.u32 %r33, %r3, 64, %r33;
    mad.wide.u32 %rd20, %r33, 512, %rd1;
    cvt.u64.u32 %rd21, %r32;
    add.s64 %rd20, %rd20, %rd21;
    shl.b32 %r34, %r2, 21;
    add.u32 %r35, %r6, %r34;
    mov.u32 %r36, 0;
COLUMNS:
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{", ".join(f"%r{n}" for n in range(40, 56))}}}, [%r35];
    tcgen05.wait::ld.sync.aligned;
    st.global.v4.b32 [%rd20], {{%r40, %r41, %r42, %r43}};
    st.global.v4.b32 [%rd20+16], {{%r44, %r45, %r46, %r47}};
    st.global.v4.b32 [%rd20+32], {{%r48, %r49, %r50, %r51}};
    st.global.v4.b32 [%rd20+48], {{%r52, %r53, %r54, %r55}};
    add.s64 %rd20, %rd20, 64;
    add.u32 %r35, %r35, 16;
    add.u32 %r36, %r36, 1;
    setp.lt.u32 %p12, %r36, {columns};
    @%p12 bra COLUMNS;
FREE:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @%p2 bra END;
    tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 %r6, 128;
END:
    ret;
    """.replace("[m0,", "[%rd30,").replace("[m1,", "[%rd31,")


MAPS = """
    mov.b64 %rd30, m0;
    mov.b64 %rd31, m1;
    cvta.param.u64 %rd30, %rd30;
    cvta.param.u64 %rd31, %rd31;
"""


def run_gemm(ctas: int, options: Options, body: str | None = None) -> tuple[float, int]:
    """The largest relative error against float64, and the number of warp instructions."""
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal((128, K)).astype(FP8) for _ in "ab")
    memory = GlobalMemory()
    rows = 128 // ctas
    maps = [
        TensorMap(
            memory.add(name, array.view(np.uint8)), 1, (K, 128), (K,), (128, rows), Swizzle.B128
        )
        for name, array in (("a", a), ("b", b))
    ]
    d = np.full((128, 128), np.nan, np.float32)
    report = run(
        MAPS + (body or gemm(ctas)),
        {"d": d},
        block=192,
        grid=ctas,
        cluster=ctas,
        shared=2 * 2 * rows * 128 + 64,
        maps=maps,
        memory=memory,
        options=options,
    )
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    return float(np.abs(d - expected).max() / np.abs(expected).max()), report.warp_instructions


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("races", [False, True])
def test_product(ctas: int, races: bool) -> None:
    error, instructions = run_gemm(ctas, Options(races=races))
    assert error < 1e-6
    assert instructions > 500


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_product_with_delayed_work_and_a_shuffled_schedule(ctas: int, seed: int) -> None:
    error, _ = run_gemm(ctas, Options(delay=True, seed=seed))
    assert error < 1e-6


def test_a_delayed_run_repeats_itself() -> None:
    assert run_gemm(2, Options(delay=True, seed=4)) == run_gemm(2, Options(delay=True, seed=4))


def test_delay_shows_a_missing_wait_that_eager_work_hides() -> None:
    """Without the wait for full stages the MMA reads what has not arrived yet."""
    body = gemm(1).replace("@!%p4 bra WAIT_FULL;", "", 1)
    body = body.replace("mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r12+65536], %r13;", "", 2)
    assert body != gemm(1)
    seen = 0
    for seed in range(4):
        try:
            error, _ = run_gemm(1, Options(delay=True, seed=seed), body)
        except Exception as problem:
            assert "never written" in str(problem) or "exits" in str(problem)
            seen += 1
        else:
            seen += error > 1e-3
    assert seen == 4


FILL = """
    mov.u32 %r1, %tid.x;
    mov.u32 %r4, dynamic;
    shr.u32 %r2, %r1, 5;
    shfl.sync.idx.b32 %r2, %r2, 0, 31, -1;
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 64;
ALLOCATED:
    bar.sync 0;
    ld.shared.u32 %r6, [%r4];
    shl.b32 %r7, %r2, 21;
    add.u32 %r7, %r7, %r6;
    mul.lo.u32 %r10, %r1, 1000;
    add.u32 %r11, %r10, 1; add.u32 %r12, %r10, 2; add.u32 %r13, %r10, 3;
    add.u32 %r14, %r10, 4; add.u32 %r15, %r10, 5; add.u32 %r16, %r10, 6; add.u32 %r17, %r10, 7;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r7],
        {%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17};
    tcgen05.wait::st.sync.aligned;
"""
FREE = """
    bar.sync 0;
    @%p1 bra END;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 64;
END:
    ret;
"""


def read_back(load: str, registers: int, target: str = "sm_100a") -> np.ndarray:
    """Tensor memory holds 1000 · lane + column; what each thread's registers hold after a load."""
    out = np.zeros((128, registers), np.uint32)
    stores = "".join(f"st.global.u32 [%rd40+{4 * n}], %r{20 + n};\n" for n in range(registers))
    body = FILL + load + f"mad.wide.u32 %rd40, %r1, {4 * registers}, %rd1;\n" + stores + FREE
    run(body, {"out": out}, block=128, target=target)
    return out


@pytest.mark.parametrize("upper", [0, 16])
def test_loads_of_sixteen_lanes(upper: int) -> None:
    """16x256b: register 2h + e of thread t is lane t / 4 + 8 h, column 2 (t % 4) + e."""
    load = f"""
        add.u32 %r8, %r7, {upper << 16};
        tcgen05.ld.sync.aligned.16x256b.x1.b32 {{%r20, %r21, %r22, %r23}}, [%r8];
        tcgen05.wait::ld.sync.aligned;
    """
    got = read_back(load, 4)
    warp, t = np.divmod(np.arange(128), 32)
    for h in (0, 1):
        for e in (0, 1):
            lane = 32 * warp + upper + t // 4 + 8 * h
            np.testing.assert_array_equal(got[:, 2 * h + e], 1000 * lane + 2 * (t % 4) + e)


def test_load_with_a_reduction() -> None:
    load = """
        tcgen05.ld.red.sync.aligned.32x32b.x4.max.f32 {%r20, %r21, %r22, %r23}, %r24, [%r7+2];
        tcgen05.wait::ld.sync.aligned;
    """
    got = read_back(load, 5, "sm_103a")
    lanes = np.arange(128) * 1000
    np.testing.assert_array_equal(got, lanes[:, None] + np.array([2, 3, 4, 5, 5]))


def test_product_of_an_operand_in_tensor_memory() -> None:
    """D[128, 16] = A[128, 32] · B[16, 32]ᵀ, A from tensor memory, B unswizzled, both e4m3."""
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((rows, 32)).astype(FP8) for rows in (128, 16))
    d = np.zeros((128, 16), np.float32)
    word = 1 << 4 | (16 >> 3) << 17 | (128 >> 4) << 24
    # Rows of 16 bytes; eight rows together; the second half of K 256 bytes on.
    high = (128 >> 4) | 1 << 14
    body = f"""
    mov.u32 %r1, %tid.x;
    mov.u32 %r4, dynamic;
    shr.u32 %r2, %r1, 5;
    shfl.sync.idx.b32 %r2, %r2, 0, 31, -1;
    setp.ne.u32 %p2, %r1, 0;
    @%p2 bra READY;
    mbarrier.init.shared.b64 [%r4+2048], 1;
READY:
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4+2056], 64;
ALLOCATED:
    setp.gt.u32 %p3, %r1, 31;
    @%p3 bra COPIED;
    and.b32 %r8, %r1, 15;
    shr.u32 %r9, %r1, 4;
    shl.b32 %r10, %r8, 5;
    mad.lo.u32 %r10, %r9, 16, %r10;
    cvt.u64.u32 %rd20, %r10;
    add.s64 %rd20, %rd20, %rd2;
    ld.global.v4.b32 {{%r11, %r12, %r13, %r14}}, [%rd20];
    mad.lo.u32 %r15, %r8, 16, %r4;
    mad.lo.u32 %r15, %r9, 256, %r15;
    st.shared.v4.b32 [%r15], {{%r11, %r12, %r13, %r14}};
    fence.proxy.async.shared::cta;
COPIED:
    bar.sync 0;
    ld.shared.u32 %r6, [%r4+2056];
    shl.b32 %r7, %r2, 21;
    add.u32 %r7, %r7, %r6;
    mad.wide.u32 %rd21, %r1, 32, %rd1;
    ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%rd21];
    ld.global.v4.b32 {{%r24, %r25, %r26, %r27}}, [%rd21+16];
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r7+32],
        {{%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    @%p2 bra WAIT;
    tcgen05.fence::after_thread_sync;
    shr.u32 %r30, %r4, 4;
    or.b32 %r30, %r30, {(256 >> 4) << 16};
    mov.b64 %rd22, {{%r30, {high}}};
    add.u32 %r31, %r6, 32;
    setp.ne.u32 %p4, %r1, %r1;
    tcgen05.mma.cta_group::1.kind::f8f6f4 [%r6], [%r31], %rd22, {word}, %p4;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4+2048];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r4+2048], 0;
    @!%p5 bra WAIT;
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{", ".join(f"%r{n}" for n in range(40, 56))}}}, [%r7];
    tcgen05.wait::ld.sync.aligned;
    mad.wide.u32 %rd23, %r1, 64, %rd3;
    st.global.v4.b32 [%rd23], {{%r40, %r41, %r42, %r43}};
    st.global.v4.b32 [%rd23+16], {{%r44, %r45, %r46, %r47}};
    st.global.v4.b32 [%rd23+32], {{%r48, %r49, %r50, %r51}};
    st.global.v4.b32 [%rd23+48], {{%r52, %r53, %r54, %r55}};
    {FREE}
    """
    run(
        body,
        {"a": a.view(np.uint8), "b": b.view(np.uint8), "d": d},
        block=128,
        options=Options(races=True),
    )
    np.testing.assert_allclose(
        d, a.astype(np.float64) @ b.astype(np.float64).T, rtol=1e-5, atol=1e-5
    )
