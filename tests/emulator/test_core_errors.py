"""What hardware leaves undefined is an error that names instruction, line, lane and address."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_programs import kernel, run

from mlakern.emulator import DeadlockError, EmulatorError, GlobalMemory, Module, Options
from mlakern.tensormap import Swizzle, TensorMap

TID = "mov.u32 %r1, %tid.x;\n mov.u32 %r10, dynamic;\n"
ONE_THREAD = TID + "setp.ne.u32 %p1, %r1, 0;\n @%p1 bra END;\n"


def fails(body: str, *parts: str, error: type[Exception] = EmulatorError, **options: object) -> str:
    """Run a kernel that must fail with a message that contains every part; returns the message."""
    with pytest.raises(error) as caught:
        run(body, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
    return message


# Registers


def test_register_never_written() -> None:
    fails(TID + "add.u32 %r2, %r1, %r3;\n ret;", "add.u32 %r2, %r1, %r3", "%r3", "never written")


def test_register_written_by_some_lanes_only() -> None:
    """The register is fine in lanes 0 to 7 and undefined in lane 8, which is named."""
    body = (
        TID
        + """
        setp.gt.u32 %p1, %r1, 7;
        @%p1 bra SKIP;
        mov.u32 %r3, 1;
    SKIP:
        add.u32 %r2, %r1, %r3;
        ret;
    """
    )
    fails(body, "%r3", "never written", "warp 0 lane 8", "add.u32 %r2, %r1, %r3")


def test_partly_written_register_may_be_read_by_the_lanes_that_wrote_it() -> None:
    out = np.zeros(32, np.uint32)
    run(
        TID
        + """
        setp.gt.u32 %p1, %r1, 7;
        @%p1 bra SKIP;
        mov.u32 %r3, 5;
    SKIP:
        mov.u32 %r2, 1;
        @%p1 bra STORE;
        add.u32 %r2, %r1, %r3;
    STORE:
        mad.wide.u32 %rd40, %r1, 4, %rd1;
        st.global.u32 [%rd40], %r2;
        ret;
    """,
        {"out": out},
    )
    lanes = np.arange(32)
    np.testing.assert_array_equal(out, np.where(lanes < 8, lanes + 5, 1))


# Memory


def test_global_access_outside_every_buffer_names_the_nearest() -> None:
    out = np.zeros(16, np.uint32)
    body = TID + "mad.wide.u32 %rd40, %r1, 4, %rd1;\n st.global.u32 [%rd40], %r1;\n ret;"
    fails(
        body,
        "st.global.u32 [%rd40], %r1",
        "PTX line 21",
        "warp 0 lane 16",
        "write of 4 bytes at global address 0x100000040",
        "nearest is out [0x100000000, 0x100000040)",
        arrays={"out": out},
    )


def test_global_access_before_a_buffer() -> None:
    out = np.zeros(16, np.uint32)
    fails(
        "ld.global.u32 %r2, [%rd1+-8];\n ret;",
        "read of 4 bytes at global address 0xfffffff8",
        "begins 8 bytes after it",
        arrays={"out": out},
    )


def test_write_to_a_read_only_buffer() -> None:
    memory = GlobalMemory()
    at = memory.add("weights", np.zeros(8, np.uint32))
    fails(f"mov.u64 %rd5, {at};\n st.global.u32 [%rd5+4], 1;\n ret;", "weights is read-only",
          memory=memory)  # fmt: skip


def test_misaligned_global_access() -> None:
    out = np.zeros(64, np.uint32)
    body = TID + "mad.wide.u32 %rd40, %r1, 4, %rd1;\n ld.global.v2.u32 {%r2, %r3}, [%rd40];\n ret;"
    fails(body, "8-byte alignment", "0x100000004", "lane 1", arrays={"out": out})


def test_shared_memory_never_written() -> None:
    body = (
        TID
        + """
        shl.b32 %r2, %r1, 2;
        add.u32 %r3, %r10, %r2;
        setp.ge.u32 %p1, %r1, 30;
        @%p1 bra SKIP;
        st.shared.u32 [%r3], %r1;
    SKIP:
        ld.shared.u32 %r4, [%r3];
        ret;
    """
    )
    fails(body, "ld.shared.u32 %r4, [%r3]", "lane 30", "address 0x478", "never written")


def test_shared_memory_out_of_bounds() -> None:
    fails(
        TID + "st.shared.u32 [%r10+4096], %r1;\n ret;",
        "write of 4 bytes at shared address 0x1400",
        "it ends at 0x1400",
        shared=4096,
    )


def test_shared_memory_of_a_cta_that_does_not_exist() -> None:
    body = (
        TID + "mapa.shared::cluster.u32 %r2, %r10, 2;\n st.shared::cluster.u32 [%r2], %r1;\n ret;"
    )
    fails(body, "CTA rank 2 in a cluster of 2", grid=2, cluster=2)


def test_remote_access_after_the_peer_has_exited() -> None:
    body = (
        TID
        + """
        mov.u32 %r2, %cluster_ctarank;
        setp.eq.u32 %p1, %r2, 1;
        @%p1 bra END;
        mov.u32 %r3, 0;
    SPIN:
        add.u32 %r3, %r3, 1;
        setp.lt.u32 %p2, %r3, 2000;
        @%p2 bra SPIN;
        mapa.shared::cluster.u32 %r4, %r10, 1;
        st.shared::cluster.u32 [%r4], %r1;
    END:
        ret;
    """
    )
    fails(body, "shared memory of CTA rank 1, which has exited", "st.shared::cluster.u32",
          grid=2, cluster=2)  # fmt: skip


def test_division_by_zero() -> None:
    fails(TID + "mov.u32 %r2, 3;\n rem.u32 %r3, %r2, %r1;\n ret;", "division by zero", "lane 0")


# mbarriers


INIT = ONE_THREAD + "mbarrier.init.shared.b64 [%r10], 2;\n"


def test_barrier_used_before_init() -> None:
    body = ONE_THREAD + "mbarrier.arrive.shared.b64 _, [%r10+8];\n END: ret;"
    fails(body, "no mbarrier was initialised at shared address 0x408", "lane 0")


def test_barrier_misaligned() -> None:
    fails(ONE_THREAD + "mbarrier.init.shared.b64 [%r10+4], 1;\n END: ret;", "8-byte alignment")


def test_barrier_count_out_of_range() -> None:
    fails(ONE_THREAD + "mbarrier.init.shared.b64 [%r10], 0;\n END: ret;", "got count 0")


def test_too_many_arrivals() -> None:
    fails(
        INIT + "mbarrier.arrive.shared.b64 _, [%r10], 3;\n END: ret;",
        "3 arrivals, more than are pending",
        "pending 2 of 2 arrivals",
    )


def test_missed_phase() -> None:
    """Lane 0 completes two phases in one go while warp 1 waits for the first of them."""
    body = (
        TID
        + """
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra READY;
        mbarrier.init.shared.b64 [%r10], 1;
    READY:
        bar.sync 0;
        setp.lt.u32 %p2, %r1, 32;
        @%p2 bra ARRIVE;
    WAIT:
        mbarrier.try_wait.parity.shared.b64 %p3, [%r10], 0;
        @!%p3 bra WAIT;
        ret;
    ARRIVE:
        @%p1 bra END;
        mov.u32 %r3, 0;
    SPIN:
        add.u32 %r3, %r3, 1;
        setp.lt.u32 %p2, %r3, 2000;
        @%p2 bra SPIN;
        mbarrier.arrive.shared.b64 _, [%r10];
        mbarrier.arrive.shared.b64 _, [%r10];
    END:
        ret;
    """
    )
    fails(body, "missed phase", "waited for phase 0", "try_wait.parity", "warp 1", block=64)


# Deadlocks


def test_deadlock_names_what_every_warp_waits_for() -> None:
    body = (
        TID
        + """
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra READY;
        mbarrier.init.shared.b64 [%r10], 5;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r10], 256;
    READY:
        bar.sync 0;
        setp.ge.u32 %p2, %r1, 64;
        @%p2 bra NAMED;
        setp.ge.u32 %p2, %r1, 32;
        @%p2 bra CLUSTER;
    WAIT:
        mbarrier.try_wait.parity.shared.b64 %p3, [%r10], 0;
        @!%p3 bra WAIT;
        ret;
    CLUSTER:
        barrier.cluster.arrive.aligned;
        barrier.cluster.wait.aligned;
        ret;
    NAMED:
        bar.sync 4, 64;
        ret;
    """
    )
    message = fails(
        body,
        "deadlock",
        "parity 0; mbarrier at shared offset 0x400",
        "phase 0 (parity 0), pending 4 of 5 arrivals, 256 transaction bytes",
        "barrier 4 of CTA rank 0: 32 of 64 threads have arrived",
        "cluster barrier: 32 of 96 threads have arrived",
        error=DeadlockError,
        block=96,
    )
    lines = message.splitlines()[1:]
    assert [line.split("warp ")[1][0] for line in lines] == ["0", "1", "2"]
    assert "PTX line" in lines[0]
    assert "try_wait" in lines[0]


def test_deadlock_of_lanes_that_cannot_meet() -> None:
    """One lane waits inside a branch for a shuffle that names the whole warp."""
    body = (
        TID
        + """
        setp.ne.u32 %p1, %r1, 3;
        @%p1 bra END;
        shfl.sync.idx.b32 %r2, %r1, 0, 31, -1;
    END:
        bar.warp.sync -1;
        ret;
    """
    )
    fails(body, "deadlock", "other lanes of its warps", "lane 3", "shfl.sync", error=DeadlockError)


def test_a_spin_that_ends_is_not_a_deadlock() -> None:
    """Warp 1 polls memory that warp 0 writes later: both must get turns."""
    flag = np.zeros(1, np.uint32)
    run(
        TID
        + """
        setp.ge.u32 %p1, %r1, 32;
        @%p1 bra POLL;
        mov.u32 %r3, 0;
    SPIN:
        add.u32 %r3, %r3, 1;
        setp.lt.u32 %p2, %r3, 3000;
        @%p2 bra SPIN;
        st.release.gpu.global.u32 [%rd1], 1;
        ret;
    POLL:
        ld.acquire.gpu.global.u32 %r4, [%rd1];
        setp.eq.u32 %p3, %r4, 0;
        @%p3 bra POLL;
        ret;
    """,
        {"flag": flag},
        block=64,
    )
    assert flag[0] == 1


# Other barriers


def test_named_barrier_misuse() -> None:
    fails(TID + "bar.sync 1, 40;\n ret;", "got 40, need a multiple of 32")
    fails(TID + "bar.sync 17, 32;\n ret;", "barrier number: got 17")
    body = (
        TID
        + """
        setp.ge.u32 %p1, %r1, 32;
        @%p1 bra OTHER;
        bar.arrive 2, 128;
        ret;
    OTHER:
        bar.sync 2, 96;
        ret;
    """
    )
    fails(body, "barrier count 96 differs", block=64)


def test_cluster_barrier_misuse() -> None:
    fails("barrier.cluster.wait.aligned;\n ret;", "without barrier.cluster.arrive")
    twice = "barrier.cluster.arrive.aligned;\n" * 2
    fails(twice + "ret;", "twice without a wait", grid=2, cluster=2)


# TMA


def tensor(address: int, rows: int = 64) -> TensorMap:
    return TensorMap(address, 1, (128, rows), (128,), (128, 16), Swizzle.B128)


LOAD = (
    ONE_THREAD
    + """
    mbarrier.init.shared.b64 [%r10], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r10], 2048;
    mov.b64 %rd30, m0;
    cvta.param.u64 %rd31, %rd30;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r10+{at}], [%rd31, {{0, 0}}], [%r10];
"""
)
WAIT = """
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r10], 0;
    @!%p2 bra WAIT;
"""


def test_tma_to_a_misaligned_destination() -> None:
    memory = GlobalMemory()
    at = memory.add("a", np.zeros(8192, np.uint8))
    fails(LOAD.format(at=1032) + "END: ret;", "128-byte alignment", "cp.async.bulk.tensor.2d",
          memory=memory, maps=[tensor(at)])  # fmt: skip


def test_tma_outside_its_buffer() -> None:
    memory = GlobalMemory()
    at = memory.add("a", np.zeros(1024, np.uint8))
    fails(LOAD.format(at=1024) + "END: ret;", "outside every buffer", "nearest is a",
          memory=memory, maps=[tensor(at)])  # fmt: skip


def test_tma_with_a_wrong_number_of_coordinates() -> None:
    memory = GlobalMemory()
    at = memory.add("a", np.zeros(8192, np.uint8))
    body = LOAD.format(at=1024).replace("tensor.2d", "tensor.1d").replace("{0, 0}", "{0}")
    fails(body + "END: ret;", "got 1 coordinates, need 2", memory=memory, maps=[tensor(at)])


@pytest.mark.parametrize("options", [Options(), Options(delay=True, seed=3)])
def test_exit_with_a_copy_that_nobody_waited_for(options: Options) -> None:
    memory = GlobalMemory()
    at = memory.add("a", np.zeros(8192, np.uint8))
    fails(LOAD.format(at=1024) + "END: ret;", "the CTA exits", memory=memory, maps=[tensor(at)],
          options=options)  # fmt: skip
    memory = GlobalMemory()
    at = memory.add("a", np.zeros(8192, np.uint8))
    run(
        LOAD.format(at=1024) + WAIT + "END: ret;", memory=memory, maps=[tensor(at)], options=options
    )


# Tensor memory

ALLOC = TID + "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], 64;\n"
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64;\n ret;"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (ALLOC + "ret;", "tensor memory not deallocated: 64 columns at 0"),
        (TID + "mov.u32 %r2, 0; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64; ret;",
         "allocated: none"),
        (TID + "mov.u32 %r2, 0; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r2]; ret;",
         "columns [0, 1) are not allocated"),
        (ALLOC + "mov.u32 %r2, 0;"
         "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r3, %r4}, [%r2+3];" + FREE,
         "tensor memory never written"),
        (ALLOC + "mov.u32 %r2, 0; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2+64], {%r1};" + FREE,
         "columns [64, 65) are not allocated"),
        (ALLOC + "mov.u32 %r2, 0; mov.u32 %r3, 0x200000;"
         "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r1};" + FREE,
         "lane 32 is not in the quadrant of warp 0"),
        (TID + "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], 48; ret;",
         "got 48 columns, need a power of two"),
        (TID + "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
         "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], 64; ret;",
         "after tcgen05.relinquish_alloc_permit"),
        (ALLOC + "mov.u32 %r2, 0; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64;"
         "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r1}; ret;",
         "columns [0, 1) are not allocated"),
    ],
)  # fmt: skip
def test_tensor_memory_rules(body: str, message: str) -> None:
    fails(body, message, "warp 0")


MMA = (
    ALLOC
    + """
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra DONE;
    mov.u64 %rd2, {a}; mov.u64 %rd3, {b};
    setp.ne.u32 %p2, 0, 0;
    tcgen05.mma.cta_group::1.kind::f8f6f4 [0], %rd2, %rd3, {word}, %p2;
DONE:
    mov.u32 %r2, 0;
"""
)
B128_DESCRIPTOR = (1024 >> 4) | 1 << 16 | 64 << 32 | 1 << 46 | 2 << 61
M64_N32 = 1 << 4 | (32 >> 3) << 17 | (64 >> 4) << 24


def test_mma_of_operands_never_written() -> None:
    body = MMA.format(a=B128_DESCRIPTOR, b=B128_DESCRIPTOR, word=M64_N32).replace("[0]", "[%r99]")
    body = body.replace("setp.ne.u32 %p2", "mov.u32 %r99, 0; setp.ne.u32 %p2").replace(
        "0, 0;", "%r99, 0;"
    )
    fails(body + FREE, "never written", "tcgen05.mma", "lane 0", shared=32768)


def test_mma_with_an_illegal_descriptor() -> None:
    wrong = B128_DESCRIPTOR & ~(7 << 61) | 3 << 61
    body = MMA.format(a=wrong, b=B128_DESCRIPTOR, word=M64_N32).replace("[0]", "[%r99]")
    body = body.replace("setp.ne.u32 %p2", "mov.u32 %r99, 0; setp.ne.u32 %p2").replace(
        "0, 0;", "%r99, 0;"
    )
    fails(body + FREE, "descriptor", "tcgen05.mma", shared=32768)


# Launches


def test_launch_arguments_are_checked() -> None:
    module = Module.from_ptx(kernel("ret;", [".u64 a", ".u32 b"]))
    memory = GlobalMemory()

    def launch(**options: object) -> None:
        arguments: dict[str, object] = {
            "entry_name": "k",
            "grid": (2, 1, 1),
            "block": (32, 1, 1),
            "memory": memory,
            "parameters": [bytes(8), bytes(4)],
        }
        module.launch(**(arguments | options))  # type: ignore[arg-type]

    launch()
    for options, message in (
        ({"entry_name": "other"}, "no kernel other; this module has: k"),
        ({"parameters": [bytes(8)]}, "got 1 parameters, need 2"),
        ({"parameters": [bytes(8), bytes(8)]}, "parameter 1 has 8 bytes, need 4"),
        ({"block": (2048, 1, 1)}, "2048 threads"),
        ({"cluster": (4, 1, 1)}, "not a multiple of cluster"),
        ({"dynamic_shared": 240000}, "bytes of shared memory"),
    ):
        with pytest.raises(EmulatorError, match=message):
            launch(**options)


def test_overlapping_buffers_are_refused() -> None:
    memory = GlobalMemory()
    memory.add("a", np.zeros(64, np.uint8), address=1 << 20)
    with pytest.raises(ValueError, match="overlaps a"):
        memory.add("b", np.zeros(64, np.uint8), address=(1 << 20) + 48)
    with pytest.raises(ValueError, match="not C-contiguous"):
        memory.add("c", np.zeros((4, 4), np.uint8).T[1:])
