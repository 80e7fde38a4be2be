"""Asynchronous copies, atomics, remote stores and launch control through PTX."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_programs import kernel, pointer, run

from mlakern.emulator import EmulatorError, GlobalMemory, Module, Options
from mlakern.emulator.races import RaceDetector
from mlakern.tensormap import TensorMap

OPTIONS = [Options(), *(Options(delay=True, seed=seed) for seed in range(3))]


# Atomics


@pytest.mark.parametrize(
    ("operation", "kind", "start", "value", "expected"),
    [
        ("add", "f32", 0.5, 0.25, 0.5 + 32 * 0.25),
        ("add", "f64", 1.0, 0.5, 17.0),
        ("add", "f16", 1.0, 0.5, 17.0),
        ("add", "bf16", 1.0, 0.5, 17.0),
        ("min", "s32", 5, -3, -3),
        ("max", "u32", 5, 0xFFFFFFF0, 0xFFFFFFF0),
        ("max", "s64", -5, -2, -2),
        ("and", "b32", 0xFF, 0x3C, 0x3C),
        ("or", "b64", 1, 1 << 40, 1 | 1 << 40),
        ("xor", "b32", 3, 5, 3),
        ("inc", "u32", 0, 9, 32 % 10),
        ("dec", "u32", 4, 9, (4 - 32) % 10),
        ("exch", "b32", 1, 77, 77),
    ],
)
def test_atomics_of_every_type(
    operation: str, kind: str, start: Any, value: Any, expected: Any
) -> None:
    dtype = (
        ml_dtypes.bfloat16
        if kind == "bf16"
        else np.dtype({"f": "f", "s": "i", "u": "u", "b": "u"}[kind[0]] + str(int(kind[1:]) // 8))
    )
    word = np.array([value], dtype)
    bits = 8 * word.itemsize
    cell = np.array([start] * (16 // word.itemsize), dtype)
    other = cell.copy()
    register = {16: "%rs1", 32: "%r5", 64: "%rd9"}[bits]
    old = {16: "%rs2", 32: "%r6", 64: "%rd10"}[bits]
    noftz = ".noftz" if kind in ("f16", "bf16") else ""
    code = int(word.view(f"u{word.itemsize}")[0])
    run(
        f"""mov.b{bits} {register}, {code};
        red.relaxed.gpu.global.{operation}{noftz}.{kind} [%rd1], {register};
        atom.global.{operation}{noftz}.{kind} {old}, [%rd2], {register}; ret;"""
        if operation != "exch"
        else f"""mov.b32 {register}, {code}; atom.global.exch.b32 {old}, [%rd1], {register};
        atom.global.exch.b32 {old}, [%rd2], {register}; ret;""",
        {"cell": cell, "other": other},
    )
    assert cell[0] == other[0] == np.array(expected, dtype)
    assert (cell[1:] == np.array(start, dtype)).all()


def test_packed_and_vector_atomics_and_wide_ones() -> None:
    halves = np.array([1, 2, 3, 4], np.float16)
    brain = np.array([1, 2, 3, 4, 5, 6, 7, 8], ml_dtypes.bfloat16)
    floats = np.arange(4, dtype=np.float32)
    wide = np.array([7, 8, 7, 8], np.uint64)
    old = np.zeros(2, np.uint64)
    run(
        """mov.b32 %r1, 0x3C003800; mov.b32 %r2, 0x3F803F00; mov.f32 %f1, 0f3F800000;
        red.global.add.noftz.f16x2 [%rd1], %r1;
        red.global.add.noftz.v4.bf16x2 [%rd2], {%r2, %r2, %r2, %r2};
        red.global.add.v4.f32 [%rd3], {%f1, %f1, %f1, %f1};
        mov.b64 %rd10, 7; mov.b64 %rd11, 8; mov.b64 %rd12, 9;
        mov.b64 %rd20, 1;
        { .reg .b128 %q<4>; mov.b128 %q0, {%rd10, %rd11}; mov.b128 %q1, {%rd12, %rd20};
        atom.global.cas.b128 %q2, [%rd4], %q0, %q1; mov.b128 {%rd13, %rd14}, %q2;
        atom.global.exch.b128 %q3, [%rd4+16], %q1; }
        st.global.v2.b64 [%rd5], {%rd13, %rd14}; ret;""",
        {"halves": halves, "brain": brain, "floats": floats, "wide": wide, "old": old},
        block=1,
    )
    assert halves.tolist() == [1.5, 3, 3, 4]
    assert brain.astype(float).tolist() == [1.5, 3, 3.5, 5, 5.5, 7, 7.5, 9]
    assert floats.tolist() == [1, 2, 3, 4]
    assert wide.tolist() == [9, 1, 9, 1]
    assert old.tolist() == [7, 8]


# The cluster's shared memory


def test_lanes_store_to_and_load_from_several_ctas() -> None:
    out = np.zeros((4, 32), np.uint32)
    run(
        """mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, dynamic;
        shl.b32 %r4, %r2, 5; add.u32 %r5, %r4, %r1;
        and.b32 %r6, %r1, 3; mapa.shared::cluster.u32 %r7, %r3, %r6;
        shr.u32 %r8, %r1, 2; shl.b32 %r9, %r2, 3; add.u32 %r8, %r8, %r9; shl.b32 %r8, %r8, 2;
        add.u32 %r7, %r7, %r8;
        st.shared::cluster.b32 [%r7], %r5;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        ld.shared::cluster.b32 %r10, [%r7];
        shl.b32 %r11, %r5, 2; cvt.u64.u32 %rd10, %r11; add.u64 %rd10, %rd1, %rd10;
        st.global.b32 [%rd10], %r10;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ret;""",
        {"out": out},
        grid=4,
        cluster=4,
        observer=RaceDetector(),
    )
    np.testing.assert_array_equal(out, np.arange(128).reshape(4, 32))


@pytest.mark.parametrize("options", OPTIONS)
def test_remote_stores_and_reductions_complete_on_an_mbarrier(options: Options) -> None:
    out = np.zeros((2, 40), np.uint32)
    run(
        """mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, dynamic;
        xor.b32 %r4, %r2, 1; setp.ne.u32 %p1, %r1, 0; shl.b32 %r8, %r1, 3;
        add.u32 %r9, %r3, 512; add.u32 %r9, %r9, %r8;
        @%p1 bra READY;
        mbarrier.init.shared.b64 [%r3], 1;
        st.shared.b32 [%r3+64], 100;
        fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 384;
    READY:
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        mapa.shared::cluster.u32 %r5, %r3, %r4; mapa.shared::cluster.u32 %r6, %r9, %r4;
        add.u32 %r7, %r5, 64; add.u32 %r10, %r1, 1000;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32
            [%r6], {%r1, %r10}, [%r5];
        red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32
            [%r7], %r1, [%r5];
    WAIT:
        mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
        @!%p2 bra WAIT;
        ld.shared.v2.b32 {%r11, %r12}, [%r9]; ld.shared.b32 %r13, [%r3+64];
        add.u32 %r11, %r11, %r12; add.u32 %r11, %r11, %r13;
        mad.lo.u32 %r14, %r2, 40, %r1; mad.wide.u32 %rd10, %r14, 4, %rd1;
        st.global.b32 [%rd10], %r11;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ret;""",
        {"out": out},
        grid=2,
        cluster=2,
        options=options,
        observer=RaceDetector(),
    )
    total = 100 + sum(range(32))
    np.testing.assert_array_equal(out[:, :32], np.tile(2 * np.arange(32) + 1000 + total, (2, 1)))


# cp.async


@pytest.mark.parametrize("options", OPTIONS)
def test_small_copies_in_groups(options: Options) -> None:
    source = np.arange(1, 33 * 4, dtype=np.uint32)[: 32 * 4].reshape(32, 4)
    out = np.zeros((32, 8), np.uint32)
    run(
        """mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; shl.b32 %r3, %r1, 4; add.u32 %r4, %r2, %r3;
        mad.wide.u32 %rd10, %r1, 16, %rd1; and.b32 %r5, %r1, 15; setp.gt.u32 %p1, %r1, 20;
        cp.async.cg.shared.global.L2::128B [%r4], [%rd10], 16, %r5;
        cp.async.commit_group;
        cp.async.ca.shared.global [%r4+1024], [%rd10], 8;
        cp.async.ca.shared.global [%r4+1032], [%rd10+8], 8, %p1;
        cp.async.commit_group;
        cp.async.wait_group 1;
        ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r4];
        cp.async.wait_all;
        ld.shared.v4.b32 {%r14, %r15, %r16, %r17}, [%r4+1024];
        mad.wide.u32 %rd11, %r1, 32, %rd2;
        st.global.v4.b32 [%rd11], {%r10, %r11, %r12, %r13};
        st.global.v4.b32 [%rd11+16], {%r14, %r15, %r16, %r17}; ret;""",
        {"source": source, "out": out},
        options=options,
    )
    partial = source.view(np.uint8).copy()
    for lane in range(32):
        partial[lane, lane & 15 :] = 0
    np.testing.assert_array_equal(out[:, :4].view(np.uint8), partial)
    second = source.copy()
    second[21:, 2:] = 0
    np.testing.assert_array_equal(out[:, 4:], second)


@pytest.mark.parametrize("options", OPTIONS)
def test_small_copies_arrive_on_an_mbarrier(options: Options) -> None:
    source = np.arange(64, dtype=np.uint32)
    out = np.zeros(64, np.uint32)
    run(
        """mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; shl.b32 %r3, %r1, 2; add.u32 %r4, %r2, %r3;
        setp.ne.u32 %p1, %r1, 0; mad.wide.u32 %rd10, %r1, 4, %rd1;
        @%p1 bra READY;
        mbarrier.init.shared.b64 [%r2+512], 64;
    READY:
        bar.sync 0;
        cp.async.ca.shared.global [%r4], [%rd10], 4;
        cp.async.mbarrier.arrive.noinc.shared.b64 [%r2+512];
    WAIT:
        mbarrier.try_wait.parity.shared.b64 %p2, [%r2+512], 0;
        @!%p2 bra WAIT;
        sub.u32 %r5, 252, %r3; add.u32 %r5, %r5, %r2; ld.shared.b32 %r6, [%r5];
        mad.wide.u32 %rd11, %r1, 4, %rd2; st.global.b32 [%rd11], %r6; ret;""",
        {"source": source, "out": out},
        block=64,
        options=options,
    )
    assert out.tolist() == source[::-1].tolist()


# Bulk copies that reduce


@pytest.mark.parametrize(
    ("operation", "kind", "dtype", "combine"),
    [
        ("add", "f32", np.float32, np.add),
        ("add.noftz", "bf16", ml_dtypes.bfloat16, np.add),
        ("max", "s32", np.int32, np.maximum),
        ("min", "f16", np.float16, np.minimum),
        ("xor", "b64", np.uint64, np.bitwise_xor),
        ("inc", "u32", np.uint32, lambda a, b: np.where(a >= b, 0, a + 1)),
    ],
)
def test_bulk_reduction(operation: str, kind: str, dtype: Any, combine: Any) -> None:
    rng = np.random.default_rng(1)
    low = -50 if kind[0] != "b" and kind != "u32" else 0
    size = 256 // np.dtype(dtype).itemsize
    new, old = (rng.integers(low, 50, size).astype(dtype) for _ in range(2))
    out = old.copy()
    run(
        f"""mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; shl.b32 %r3, %r1, 3; add.u32 %r4, %r2, %r3;
        mad.wide.u32 %rd10, %r1, 8, %rd1; ld.global.b64 %rd11, [%rd10]; st.shared.b64 [%r4], %rd11;
        fence.proxy.async; bar.warp.sync -1; setp.ne.u32 %p1, %r1, 0; @%p1 bra END;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{kind} [%rd2], [%r2], 256;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    END: ret;""",
        {"new": new, "out": out},
    )
    np.testing.assert_array_equal(out, combine(old, new).astype(dtype))


def test_a_tensor_reduction_needs_the_type_of_its_elements() -> None:
    array = np.zeros((4, 8), np.float32)
    memory = GlobalMemory()
    address = memory.add("array", array, writable=True)
    described = TensorMap(address, 4, (8, 4), (32,), (4, 2))
    body = """mov.u32 %r1, dynamic; mov.b64 %rd2, 0; st.shared.v2.b64 [%r1], {%rd2, %rd2};
        st.shared.v2.b64 [%r1+16], {%rd2, %rd2}; mov.u64 %rd1, m0; mov.u32 %r2, 0;
        cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group
            [%rd1, {%r2, %r2}], [%r1];
        ret;"""
    with pytest.raises(EmulatorError, match="needs an encoded tensor map"):
        run(body, maps=[described], memory=memory, block=1)


def test_tensor_reduction_with_an_encoded_map() -> None:
    array = np.arange(32, dtype=np.float32).reshape(4, 8)
    before = array.copy()
    memory = GlobalMemory()
    address = memory.add("array", array, writable=True)
    words = np.zeros(32, np.uint32)
    words[0], words[1] = address & 0xFFFFFFFF, address >> 32
    words[2] = 1 << 4 | 7 << 7  # rank 2, f32
    words[3] = 32 >> 4
    words[8], words[9] = 7, 3
    image = words.tobytes()[:55] + bytes([3, 1]) + words.tobytes()[57:]
    text = kernel(
        """mov.u32 %r1, dynamic; mov.b32 %r3, 0x42C80000;
        st.shared.v4.b32 [%r1], {%r3, %r3, %r3, %r3};
        st.shared.v4.b32 [%r1+16], {%r3, %r3, %r3, %r3};
        mov.u64 %rd1, map; mov.u32 %r2, 6; fence.proxy.async;
        cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group
            [%rd1, {%r2, %r4}], [%r1];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; ret;""".replace("%r4", "1"),
        [".align 64 .b8 map[128]"],
    )
    Module.from_ptx(text).launch(
        "k", (1, 1, 1), (1, 1, 1), memory=memory, parameters=[image], dynamic_shared=1024
    )
    before[1:3, 6:8] += 100
    np.testing.assert_array_equal(array, before)


# Launch control


@pytest.mark.parametrize(("clusters", "cluster"), [(7, 1), (5, 2)])
def test_a_cluster_takes_over_the_others(clusters: int, cluster: int) -> None:
    out = np.zeros(clusters * cluster, np.uint32)
    everywhere = ".multicast::cluster::all" if cluster > 1 else ""
    report = run(
        f"""mov.u32 %r1, %ctaid.x; mov.u32 %r2, dynamic; mov.u32 %r3, 0;
        mov.u32 %r20, %cluster_ctarank; sub.u32 %r4, %r1, %r20;
        setp.ne.u32 %p4, %r20, 0;
        mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive; barrier.cluster.wait;
    LOOP:
        add.u32 %r6, %r4, %r20; mad.wide.u32 %rd10, %r6, 4, %rd1; add.u32 %r7, %r6, 100;
        ld.global.b32 %r9, [%rd10]; add.u32 %r7, %r7, %r9; st.global.b32 [%rd10], %r7;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16;
        barrier.cluster.arrive; barrier.cluster.wait;
        @%p4 bra WAIT;
        clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{everywhere}.b128
            [%r2+16], [%r2];
    WAIT:
        mbarrier.try_wait.parity.shared.b64 %p1, [%r2], %r3; @!%p1 bra WAIT;
        xor.b32 %r3, %r3, 1;
        {{ .reg .b128 %q; ld.shared.b128 %q, [%r2+16];
        clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q;
        @%p2 clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128
            {{%r4, %r10, %r11, _}}, %q;
        }}
        barrier.cluster.arrive; barrier.cluster.wait;
        @%p2 bra LOOP;
        ret;""",
        {"out": out},
        grid=clusters * cluster,
        cluster=cluster,
        block=1,
    )
    assert out.tolist() == [100 + n for n in range(clusters * cluster)]
    assert report.clusters == 1


# Values never written


def test_poison_stands_for_what_was_never_written() -> None:
    body = """mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; setp.lt.u32 %p1, %r1, 4;
    @%p1 mov.u32 %r5, 7;
    ld.shared.b32 %r6, [%r2+8]; mad.wide.u32 %rd10, %r1, 8, %rd1;
    st.global.v2.b32 [%rd10], {%r5, %r6}; ret;"""
    out = np.zeros((8, 2), np.uint32)
    with pytest.raises(EmulatorError, match="never written"):
        run(body, {"out": out}, block=8)
    run(body, {"out": out}, block=8, options=Options(poison=True))
    assert out[:, 0].tolist() == [7] * 4 + [0xFFFFFFFF] * 4
    assert out[:, 1].tolist() == [0xFFFFFFFF] * 8


def test_operands_that_must_agree_are_checked_when_they_are_used() -> None:
    with pytest.raises(EmulatorError, match="must be the same in all lanes differs") as raised:
        run("mov.u32 %r1, %tid.x; cp.async.bulk.wait_group %r1; ret;", block=32)
    assert "lane 1" in str(raised.value)
    assert pointer(1) == b"\1" + bytes(7)
