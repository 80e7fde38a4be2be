"""Warps, divergence, memory spaces and barriers: small kernels whose results follow by hand."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_programs import run

from mlakern.emulator import GlobalMemory, Options

TID = "mov.u32 %r1, %tid.x;\n"
STORE = """
    mad.wide.u32 %rd40, %r1, 4, %rd1;
    st.global.b32 [%rd40], %r100;
    ret;
"""


def per_thread(body: str, threads: int = 128, **options: object) -> np.ndarray:
    """Run a body that leaves its result in %r100 in each thread (its index in %r1)."""
    out = np.zeros(threads, np.uint32)
    run(TID + body + STORE, {"out": out}, block=threads, **options)  # type: ignore[arg-type]
    return out


TIDS = np.arange(128)


def test_divergent_branches_meet_again() -> None:
    got = per_thread("""
        and.b32 %r2, %r1, 3;
        mov.u32 %r100, 1000;
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra ZERO;
        setp.eq.u32 %p2, %r2, 1;
        @%p2 bra ONE;
        add.u32 %r100, %r100, %r2;
        bra.uni JOIN;
    ONE:
        shl.b32 %r100, %r1, 8;
        bra.uni JOIN;
    ZERO:
        mov.u32 %r100, 7;
    JOIN:
        bar.warp.sync -1;
        shfl.sync.bfly.b32 %r3, %r100, 1, 31, -1;
        add.u32 %r100, %r100, %r3;
    """)
    own = np.select([TIDS % 4 == 0, TIDS % 4 == 1], [7, TIDS << 8], 1000 + TIDS % 4)
    np.testing.assert_array_equal(got, own + own[TIDS ^ 1])


def test_loop_with_a_trip_count_for_each_lane() -> None:
    got = per_thread("""
        rem.u32 %r2, %r1, 7;
        mov.u32 %r100, 0;
        mov.u32 %r3, 0;
    LOOP:
        add.u32 %r100, %r100, %r3;
        add.u32 %r3, %r3, 1;
        setp.le.u32 %p1, %r3, %r2;
        @%p1 bra LOOP;
    """)
    n = TIDS % 7
    np.testing.assert_array_equal(got, n * (n + 1) // 2)


def test_guarded_instructions_run_only_where_the_guard_holds() -> None:
    got = per_thread("""
        mov.u32 %r100, 5;
        setp.lt.u32 %p1, %r1, 40;
        @%p1 mov.u32 %r100, %r1;
        @!%p1 add.u32 %r100, %r100, 100;
    """)
    np.testing.assert_array_equal(got, np.where(TIDS < 40, TIDS, 105))


def test_one_elected_lane_works_alone_and_its_writes_survive() -> None:
    got = per_thread("""
        mov.u32 %r100, 1;
        elect.sync %r2|%p1, -1;
        @!%p1 bra DONE;
        mad.lo.u32 %r100, %r1, 3, 50;
    DONE:
        add.u32 %r100, %r100, %r2;
    """)
    np.testing.assert_array_equal(got, np.where(TIDS % 32 == 0, TIDS * 3 + 50, 1))


def test_asm_blocks_have_registers_and_labels_of_their_own() -> None:
    got = per_thread("""
        mov.u32 %r100, 0;
        {
          .reg .u32 t; .reg .pred p;
          mov.u32 t, %r1;
        AGAIN:
          add.u32 %r100, %r100, 2;
          sub.u32 t, t, 1;
          setp.gt.s32 p, t, 0;
          @p bra AGAIN;
        }
        {
          .reg .u32 t; .reg .pred p;
          mov.u32 t, 3;
        AGAIN:
          add.u32 %r100, %r100, 100;
          sub.u32 t, t, 1;
          setp.gt.s32 p, t, 0;
          @p bra AGAIN;
        }
    """)
    np.testing.assert_array_equal(got, 2 * np.maximum(TIDS, 1) + 300)


def test_indirect_branch() -> None:
    got = per_thread("""
        and.b32 %r2, %r1, 1;
        setp.gt.u32 %p1, %r1, 63;
        selp.b32 %r2, 2, %r2, %p1;
    ts: .branchtargets L0, L1, L2;
        brx.idx %r2, ts;
    L0: mov.u32 %r100, 10; bra.uni END;
    L1: mov.u32 %r100, 11; bra.uni END;
    L2: mov.u32 %r100, 12;
    END:
    """)
    np.testing.assert_array_equal(got, np.where(TIDS > 63, 12, 10 + TIDS % 2))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("shfl.sync.idx.b32 %r100, %r1, 5, 31, -1;", TIDS // 32 * 32 + 5),
        ("shfl.sync.down.b32 %r100, %r1, 3, 31, -1;", np.where(TIDS % 32 < 29, TIDS + 3, TIDS)),
        ("shfl.sync.up.b32 %r100, %r1, 4, 0, -1;", np.where(TIDS % 32 >= 4, TIDS - 4, TIDS)),
        ("shfl.sync.bfly.b32 %r100, %r1, 16, 31, -1;", TIDS ^ 16),
        # Segments of 8 lanes: the clamp operand's upper half masks the segment.
        ("shfl.sync.idx.b32 %r100, %r1, 2, 0x1807, -1;", TIDS // 8 * 8 + 2),
        (
            "shfl.sync.down.b32 %r100|%p1, %r1, 1, 0x1807, -1; selp.b32 %r100, %r100, 999, %p1;",
            np.where(TIDS % 8 < 7, TIDS + 1, 999),
        ),
        (
            "setp.lt.u32 %p1, %r1, 40; vote.sync.any.pred %p2, %p1, -1; selp.b32 %r100, 1, 0, %p2;",
            (TIDS < 64).astype(int),
        ),
        (
            "setp.lt.u32 %p1, %r1, 40; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r100, 1, 0, %p2;",
            (TIDS < 32).astype(int),
        ),
        (
            "setp.lt.u32 %p1, %r1, 40; vote.sync.ballot.b32 %r100, %p1, -1;",
            np.select([TIDS < 32, TIDS < 64], [0xFFFFFFFF, 0xFF], 0),
        ),
        ("redux.sync.add.s32 %r100, %r1, -1;", (TIDS // 32) * 1024 + 496),
        ("redux.sync.max.u32 %r100, %r1, -1;", TIDS // 32 * 32 + 31),
        (
            "and.b32 %r2, %r1, 1; match.any.sync.b32 %r100, %r2, -1;",
            np.where(TIDS % 2, 0xAAAAAAAA, 0x55555555),
        ),
        ("shr.u32 %r2, %r1, 5; match.all.sync.b32 %r100|%p1, %r2, -1;", np.full(128, 0xFFFFFFFF)),
        ("mov.u32 %r100, %lanemask_lt;", (1 << TIDS % 32) - 1),
    ],
)
@pytest.mark.parametrize("threads", [128, 32])
def test_warp_exchange(code: str, expected: np.ndarray, threads: int) -> None:
    got = per_thread(code, threads)
    np.testing.assert_array_equal(got, expected[:threads].astype(np.uint32))


def test_exchange_inside_a_branch_of_some_lanes() -> None:
    """A shuffle whose mask names just the lanes that took the branch."""
    got = per_thread("""
        mov.u32 %r100, 0;
        and.b32 %r2, %r1, 31;
        setp.ge.u32 %p1, %r2, 16;
        @%p1 bra DONE;
        shfl.sync.bfly.b32 %r100, %r1, 1, 31, 0xFFFF;
        activemask.b32 %r3;
        add.u32 %r100, %r100, %r3;
    DONE:
    """)
    np.testing.assert_array_equal(got, np.where(TIDS % 32 < 16, (TIDS ^ 1) + 0xFFFF, 0))


def test_shared_memory_exchange_across_warps() -> None:
    got = per_thread("""
        mov.u32 %r10, dynamic;
        shl.b32 %r11, %r1, 2;
        add.u32 %r12, %r10, %r11;
        mul.lo.u32 %r13, %r1, %r1;
        st.shared.u32 [%r12], %r13;
        bar.sync 0;
        xor.b32 %r14, %r11, 508;
        add.u32 %r15, %r10, %r14;
        ld.shared.u32 %r100, [%r15];
    """)
    np.testing.assert_array_equal(got, (127 - TIDS) ** 2)


def test_vector_accesses_and_narrow_ones() -> None:
    got = per_thread("""
        mov.u32 %r10, dynamic;
        shl.b32 %r11, %r1, 4;
        add.u32 %r12, %r10, %r11;
        add.u32 %r13, %r1, 1;
        st.shared.v4.b32 [%r12], {%r1, %r13, -2, %r1};
        ld.shared.v2.b64 {%rd20, %rd21}, [%r12];
        cvt.u32.u64 %r14, %rd21;
        ld.shared.s8 %r15, [%r12+8];
        ld.shared.u8 %r16, [%r12+9];
        ld.shared.u16 %rs1, [%r12+4];
        cvt.u32.u16 %r17, %rs1;
        sub.u32 %r18, %r14, %r15;
        add.u32 %r19, %r17, %r16;
        add.u32 %r100, %r18, %r19;
    """)
    np.testing.assert_array_equal(got, TIDS + 1 + 0xFF)


def test_local_memory_is_private_to_a_thread() -> None:
    got = per_thread("""
        .local .align 8 .b8 depot[64];
        mov.u64 %rd20, depot;
        cvta.local.u64 %rd21, %rd20;
        and.b32 %r2, %r1, 7;
        mad.wide.u32 %rd22, %r2, 8, %rd21;
        st.u32 [%rd22], %r1;
        st.local.u32 [%rd20+4], 77;
        ld.u32 %r100, [%rd22];
    """)
    np.testing.assert_array_equal(got, TIDS)


def test_atomics_return_old_values_in_lane_order() -> None:
    out = np.zeros(64, np.uint32)
    counter = np.zeros(4, np.uint32)
    run(
        TID
        + """
        atom.global.add.u32 %r100, [%rd2], 3;
        red.global.max.u32 [%rd2+4], %r1;
        mov.f32 %f1, 0f3F000000;
        red.relaxed.gpu.global.add.f32 [%rd2+8], %f1;
        atom.global.cas.b32 %r5, [%rd2+12], 0, 9;
    """
        + STORE,
        {"out": out, "counter": counter},
        block=64,
    )
    np.testing.assert_array_equal(out, np.arange(64) * 3)
    assert counter.tolist()[:2] == [192, 63]
    assert counter.view(np.float32)[2] == 32.0
    assert counter[3] == 9


def test_named_barriers_of_pairs_of_warps() -> None:
    """Warps w and w + 2 share barrier 1 + w: pairs do not wait for each other."""
    got = per_thread("""
        shr.u32 %r2, %r1, 5;
        and.b32 %r3, %r2, 1;
        add.u32 %r4, %r3, 1;
        mov.u32 %r10, dynamic;
        shl.b32 %r11, %r1, 2;
        add.u32 %r12, %r10, %r11;
        st.shared.u32 [%r12], %r1;
        bar.sync %r4, 64;
        xor.b32 %r13, %r11, 256;
        add.u32 %r13, %r13, %r10;
        ld.shared.u32 %r100, [%r13];
    """)
    np.testing.assert_array_equal(got, TIDS ^ 64)


def test_barrier_arrive_and_reduction() -> None:
    got = per_thread("""
        mov.u32 %r100, 0;
        setp.lt.u32 %p1, %r1, 64;
        @%p1 bra PRODUCER;
        bar.sync 3, 128;
        bra.uni NEXT;
    PRODUCER:
        bar.arrive 3, 128;
    NEXT:
        setp.lt.u32 %p2, %r1, 10;
        barrier.cta.red.popc.aligned.u32 %r100, 2, %p2;
    """)
    np.testing.assert_array_equal(got, np.full(128, 10))


def test_mbarrier_phases_order_a_ring_between_warps() -> None:
    """Warp 0 writes 10 rounds into two slots, warp 1 adds them up; full and empty barriers."""
    total = np.zeros(32, np.uint32)
    for options in (None, Options(seed=1), Options(seed=7)):
        total[:] = 0
        run(
            TID
            + """
            mov.u32 %r10, dynamic;
            setp.ne.u32 %p1, %r1, 0;
            @%p1 bra READY;
            mbarrier.init.shared.b64 [%r10], 32;
            mbarrier.init.shared.b64 [%r10+8], 32;
            mbarrier.init.shared.b64 [%r10+16], 32;
            mbarrier.init.shared.b64 [%r10+24], 32;
        READY:
            bar.sync 0;
            mov.u32 %r20, 0;
            and.b32 %r5, %r1, 31;
            shl.b32 %r6, %r5, 2;
            add.u32 %r6, %r6, %r10;
            setp.ge.u32 %p2, %r1, 32;
            @%p2 bra CONSUMER;
        PRODUCE:
            and.b32 %r21, %r20, 1;
            shr.u32 %r22, %r20, 1;
            xor.b32 %r23, %r22, 1;
            and.b32 %r23, %r23, 1;
            shl.b32 %r24, %r21, 3;
            add.u32 %r24, %r24, %r10;
        WAIT_EMPTY:
            mbarrier.try_wait.parity.shared.b64 %p3, [%r24+16], %r23;
            @!%p3 bra WAIT_EMPTY;
            shl.b32 %r25, %r21, 7;
            add.u32 %r26, %r6, %r25;
            mad.lo.u32 %r27, %r20, 100, %r1;
            st.shared.u32 [%r26+64], %r27;
            mbarrier.arrive.shared.b64 %rd30, [%r24];
            add.u32 %r20, %r20, 1;
            setp.lt.u32 %p4, %r20, 10;
            @%p4 bra PRODUCE;
            ret;
        CONSUMER:
            mov.u32 %r30, 0;
        CONSUME:
            and.b32 %r21, %r20, 1;
            shr.u32 %r23, %r20, 1;
            and.b32 %r23, %r23, 1;
            shl.b32 %r24, %r21, 3;
            add.u32 %r24, %r24, %r10;
        WAIT_FULL:
            mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p3, [%r24], %r23, 1000;
            @!%p3 bra WAIT_FULL;
            shl.b32 %r25, %r21, 7;
            add.u32 %r26, %r6, %r25;
            ld.shared.u32 %r27, [%r26+64];
            add.u32 %r30, %r30, %r27;
            mbarrier.arrive.shared.b64 _, [%r24+16];
            add.u32 %r20, %r20, 1;
            setp.lt.u32 %p4, %r20, 10;
            @%p4 bra CONSUME;
            mad.wide.u32 %rd40, %r5, 4, %rd1;
            st.global.u32 [%rd40], %r30;
            ret;
        """,
            {"total": total},
            block=64,
            options=options,
        )
        np.testing.assert_array_equal(total, 4500 + 10 * np.arange(32))


def test_a_peeked_barrier_may_stay_incomplete() -> None:
    """A try_wait outside a loop returns false after its time limit; the warp goes on."""
    got = per_thread(
        """
        mov.u32 %r10, dynamic;
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra READY;
        mbarrier.init.shared.b64 [%r10], 1;
    READY:
        bar.sync 0;
        mbarrier.try_wait.parity.shared.b64 %p2, [%r10], 0;
        selp.b32 %r100, 1, 2, %p2;
        mbarrier.try_wait.parity.shared.b64 %p3, [%r10], 1;
        selp.b32 %r2, 10, 20, %p3;
        add.u32 %r100, %r100, %r2;
    """,
        32,
    )
    np.testing.assert_array_equal(got, np.full(32, 12))


CLUSTER_RING = (
    TID
    + """
    mov.u32 %r2, %cluster_ctarank;
    mov.u32 %r10, dynamic;
    shl.b32 %r11, %r1, 2;
    add.u32 %r12, %r10, %r11;
    mad.lo.u32 %r13, %r2, 1000, %r1;
    st.shared.u32 [%r12], %r13;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    add.u32 %r3, %r2, 1;
    mov.u32 %r4, %cluster_nctarank;
    rem.u32 %r3, %r3, %r4;
    mapa.shared::cluster.u32 %r14, %r12, %r3;
    ld.shared::cluster.u32 %r100, [%r14];
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    mov.u32 %r20, %ctaid.x;
    mad.lo.u32 %r1, %r20, 64, %r1;
"""
    + STORE
)


@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_distributed_shared_memory(cluster: int) -> None:
    out = np.zeros(64 * 4, np.uint32)
    report = run(CLUSTER_RING, {"out": out}, block=64, grid=4, cluster=cluster)
    ranks = np.arange(4) % cluster
    expected = ((ranks + 1) % cluster)[:, None] * 1000 + np.arange(64)
    np.testing.assert_array_equal(out.reshape(4, 64), expected)
    assert report.clusters == 4 // cluster
    assert report.opcodes["barrier.cluster.wait"] == 2 * 4 * 2  # twice, 4 CTAs of 2 warps


def test_global_addresses_on_both_sides_of_4_gib() -> None:
    memory = GlobalMemory()
    data = np.arange(64, dtype=np.uint32)
    out = np.zeros(64, np.uint32)
    memory.add("data", data, address=(1 << 32) - 128)
    memory.add("out", out, writable=True, address=(1 << 41) + (1 << 31) - 64)
    run(
        TID
        + f"""
        mov.u64 %rd20, {(1 << 32) - 128};
        mad.wide.u32 %rd21, %r1, 4, %rd20;
        ld.global.u32 %r2, [%rd21];
        mov.u64 %rd20, {(1 << 41) + (1 << 31) - 64};
        mad.wide.u32 %rd21, %r1, 4, %rd20;
        st.global.u32 [%rd21], %r2;
        ret;
    """,
        memory=memory,
        block=64,
    )
    np.testing.assert_array_equal(out, data)


def test_lanes_may_reach_different_buffers() -> None:
    memory = GlobalMemory()
    first, second = np.array([7, 8], np.uint32), np.array([9, 10], np.uint32)
    at = memory.add("first", first), memory.add("second", second)
    out = np.zeros(32, np.uint32)
    run(
        TID
        + f"""
        and.b32 %r2, %r1, 1;
        setp.eq.u32 %p1, %r2, 0;
        selp.b64 %rd20, {at[0]}, {at[1]}, %p1;
        ld.global.u32 %r100, [%rd20+4];
    """
        + STORE,
        {"out": out},
        memory=memory,
    )
    np.testing.assert_array_equal(out, np.where(np.arange(32) % 2, 10, 8))


def test_ldmatrix_fragments_and_their_inverse() -> None:
    """Thread t of matrix m holds elements (t / 4, 2 (t % 4)) and the next, or of the transpose."""
    out = np.zeros((32, 8), np.uint32)
    run(
        TID
        + """
        mov.u32 %r10, dynamic;
        shl.b32 %r11, %r1, 4;
        add.u32 %r12, %r10, %r11;
        mad.lo.u32 %r2, %r1, 0x00080008, 0x00010000;
        add.u32 %r3, %r2, 0x00020002;
        add.u32 %r4, %r3, 0x00020002;
        add.u32 %r5, %r4, 0x00020002;
        st.shared.v4.b32 [%r12], {%r2, %r3, %r4, %r5};
        bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r12];
        ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r30, %r31, %r32, %r33}, [%r12];
        stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%r12+1024], {%r30, %r31, %r32, %r33};
        ld.shared.v4.b32 {%r40, %r41, %r42, %r43}, [%r12+1024];
        mad.wide.u32 %rd40, %r1, 32, %rd1;
        st.global.v4.b32 [%rd40], {%r20, %r21, %r32, %r33};
        st.global.v4.b32 [%rd40+16], {%r40, %r41, %r42, %r43};
        ret;
    """,
        {"out": out},
    )
    elements = np.arange(4 * 64).reshape(4, 8, 8)  # matrix, row, column; row r of m is lane 8m + r
    t = np.arange(32)
    row, column = t // 4, 2 * (t % 4)
    plain = elements[:, row, column] | elements[:, row, column + 1] << 16
    turned = elements[:, column, row] | elements[:, column + 1, row] << 16
    np.testing.assert_array_equal(out[:, 0], plain[0])
    np.testing.assert_array_equal(out[:, 1], plain[1])
    np.testing.assert_array_equal(out[:, 2], turned[2])
    np.testing.assert_array_equal(out[:, 3], turned[3])
    rows = elements.reshape(32, 8)
    np.testing.assert_array_equal(out[:, 4:], rows[:, 0::2] | rows[:, 1::2] << 16)


def test_constant_and_global_variables() -> None:
    from mlakern.emulator import Module

    text = """.version 8.8
    .target sm_100a
    .address_size 64
    .const .align 4 .u32 table[4] = {10, 20, 30, 40};
    .global .align 4 .u32 counter;
    .visible .entry k(.param .u64 out) {
        .reg .b32 %r<9>; .reg .b64 %rd<9>;
        ld.param.u64 %rd1, [out];
        mov.u32 %r1, %tid.x;
        mov.u64 %rd2, table;
        mad.wide.u32 %rd3, %r1, 4, %rd2;
        ld.const.u32 %r2, [%rd3];
        ld.const.u32 %r3, [table+8];
        mov.u64 %rd4, counter;
        red.global.add.u32 [%rd4], 1;
        ld.global.u32 %r4, [counter];
        add.u32 %r2, %r2, %r3;
        add.u32 %r2, %r2, %r4;
        mad.wide.u32 %rd5, %r1, 4, %rd1;
        st.global.u32 [%rd5], %r2;
        ret;
    }"""
    out = np.zeros(4, np.uint32)
    memory = GlobalMemory()
    address = memory.add("out", out, writable=True)
    Module.from_ptx(text).launch(
        "k", (1, 1, 1), (4, 1, 1), memory=memory, parameters=[address.to_bytes(8, "little")]
    )
    np.testing.assert_array_equal(out, np.array([10, 20, 30, 40]) + 30 + 4)


def test_state_space_of_a_generic_address() -> None:
    got = per_thread("""
        mov.u32 %r10, dynamic;
        cvt.u64.u32 %rd20, %r10;
        cvta.shared.u64 %rd20, %rd20;
        isspacep.shared %p1, %rd20;
        isspacep.global %p2, %rd20;
        isspacep.global %p3, %rd1;
        isspacep.local %p4, %rd1;
        selp.b32 %r100, 1, 0, %p1;
        selp.b32 %r3, 2, 0, %p2;
        selp.b32 %r4, 4, 0, %p3;
        selp.b32 %r5, 8, 0, %p4;
        add.u32 %r100, %r100, %r3;
        add.u32 %r100, %r100, %r4;
        add.u32 %r100, %r100, %r5;
    """)
    np.testing.assert_array_equal(got, np.full(128, 1 + 4))
