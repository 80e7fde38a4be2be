"""One synchronisation of a correct kernel removed at a time: who finds it?

The kernel multiplies like a decode kernel does. Warp 0 loads B by TMA, warps 4 to 7 write A with
generic stores, warp 1 issues the MMAs, warps 4 to 7 read D and store it. Two-stage rings for A and
B, one D for two tiles of three K blocks:

    out[tile] = sum over blocks of A[tile, block] (128 x 128 e4m3) · B[tile, block]^T (64 x 128)

Three means look for a fault: the plain run (a wrong result, an error, a deadlock), delayed and
shuffled runs, and the race detector. The table below says which of them find which removal.
"""

from __future__ import annotations

import re
from string import Template

import ml_dtypes
import numpy as np
import pytest

from mlakern.emulator import DeadlockError, EmulatorError, GlobalMemory, Module, Options
from mlakern.emulator.races import RaceDetector, RaceError
from mlakern.tensormap import Swizzle, TensorMap

TILES, BLOCKS, STEPS = 2, 3, 6

# Shared memory: barriers of 8 bytes from 0 (pairs are the stages of a ring), then the stages.
B_FULL, B_EMPTY, A_FULL, A_EMPTY, D_FULL, D_EMPTY, SLOT = 0, 16, 32, 48, 64, 72, 80
A_STAGE, B_STAGE, SHARED = 1024, 1024 + 2 * 16384, 1024 + 2 * 16384 + 2 * 8192

TMA_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"

WAIT = """
$label:
    mbarrier.try_wait.parity.shared::cta.b64 %p9, [$bar], $parity; //! $name
    @!%p9 bra $label; //! $name
"""

# "//! name" marks the lines of one synchronisation.
KERNEL = """\
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry pipeline(
    .param .align 64 .b8 pipeline_param_0[128],
    .param .u64 pipeline_param_1,
    .param .u64 pipeline_param_2
)
.reqntid 256, 1, 1
{
    .reg .pred %p<10>;
    .reg .b32 %r<64>;
    .reg .b32 %v<64>;
    .reg .b64 %rd<16>;
    .reg .f32 %f<64>;
    mov.u32 %r0, smem;
    mov.u32 %r1, %tid.x;
    shr.u32 %r2, %r1, 5;
    and.b32 %r3, %r1, 31;
    mov.b64 %rd0, pipeline_param_0;
    cvta.param.u64 %rd1, %rd0;
    ld.param.u64 %rd2, [pipeline_param_1];
    ld.param.u64 %rd3, [pipeline_param_2];

    setp.ne.u32 %p0, %r1, 0;
    @%p0 bra INITIALISED;
    mbarrier.init.shared::cta.b64 [%r0+0], 1;
    mbarrier.init.shared::cta.b64 [%r0+8], 1;
    mbarrier.init.shared::cta.b64 [%r0+16], 1;
    mbarrier.init.shared::cta.b64 [%r0+24], 1;
    mbarrier.init.shared::cta.b64 [%r0+32], 128;
    mbarrier.init.shared::cta.b64 [%r0+40], 128;
    mbarrier.init.shared::cta.b64 [%r0+48], 1;
    mbarrier.init.shared::cta.b64 [%r0+56], 1;
    mbarrier.init.shared::cta.b64 [%r0+64], 1;
    mbarrier.init.shared::cta.b64 [%r0+72], 128;
    fence.mbarrier_init.release.cluster; //! init fence
INITIALISED:
    bar.warp.sync 0xffffffff;
    setp.ne.u32 %p0, %r2, 1;
    @%p0 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0+80], 64;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
    tcgen05.fence::before_thread_sync; //! setup fence before
    bar.sync 0; //! setup barrier
    tcgen05.fence::after_thread_sync; //! setup fence after
    ld.shared.b32 %r4, [%r0+80];

    mov.u32 %r5, 0; // step: tile * 3 + block
    setp.eq.u32 %p0, %r2, 0;
    @%p0 bra LOAD;
    setp.eq.u32 %p0, %r2, 1;
    @%p0 bra MULTIPLY;
    setp.ge.u32 %p0, %r2, 4;
    @%p0 bra WRITE_A;
    bra.uni END;

LOAD:
    setp.ne.u32 %p0, %r3, 0;
    @%p0 bra END;
NEXT_LOAD:
    and.b32 %r6, %r5, 1;
    shr.u32 %r7, %r5, 1;
    and.b32 %r7, %r7, 1;
    xor.b32 %r7, %r7, 1;
    shl.b32 %r8, %r6, 3;
    add.u32 %r8, %r8, %r0;
    add.u32 %r9, %r8, 16;
$wait_b_empty
    mbarrier.arrive.expect_tx.shared::cta.b64 %rd4, [%r8], 8192; //! expect B
    shl.b32 %r10, %r6, 13;
    add.u32 %r10, %r10, %r0;
    add.u32 %r10, %r10, $B_STAGE;
    shl.b32 %r11, %r5, 6;
    mov.u32 %r12, 0;
    $TMA_LOAD [%r10], [%rd1, {%r12, %r11}], [%r8];
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p1, %r5, $STEPS;
    @%p1 bra NEXT_LOAD;
    bra.uni END;

MULTIPLY:
    setp.ne.u32 %p0, %r3, 0;
    @%p0 bra END;
    mov.u32 %r20, 0; // block
    mov.u32 %r21, 0; // tile
NEXT_PRODUCT:
    and.b32 %r6, %r5, 1;
    shr.u32 %r7, %r5, 1;
    and.b32 %r7, %r7, 1;
    shl.b32 %r8, %r6, 3;
    add.u32 %r8, %r8, %r0;
    add.u32 %r9, %r8, 32;
    setp.ne.u32 %p2, %r20, 0;
    @%p2 bra OPERANDS;
    and.b32 %r22, %r21, 1;
    xor.b32 %r22, %r22, 1;
    add.u32 %r23, %r0, 72;
$wait_d_empty
OPERANDS:
$wait_b_full
$wait_a_full
    tcgen05.fence::after_thread_sync; //! MMA fence after
    shl.b32 %r10, %r6, 14;
    add.u32 %r10, %r10, %r0;
    add.u32 %r10, %r10, $A_STAGE;
    shl.b32 %r11, %r6, 13;
    add.u32 %r11, %r11, %r0;
    add.u32 %r11, %r11, $B_STAGE;
    shr.u32 %r10, %r10, 4;
    shr.u32 %r11, %r11, 4;
    cvt.u64.u32 %rd5, %r10;
    cvt.u64.u32 %rd6, %r11;
    or.b64 %rd5, %rd5, $DESCRIPTOR;
    or.b64 %rd6, %rd6, $DESCRIPTOR;
    mov.u32 %r24, $INSTRUCTION;
$products
    add.u32 %r25, %r8, 16;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r25]; //! commit B
    add.u32 %r25, %r8, 48;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r25]; //! commit A
    add.u32 %r5, %r5, 1;
    add.u32 %r20, %r20, 1;
    setp.lt.u32 %p1, %r20, $BLOCKS;
    @%p1 bra NEXT_PRODUCT;
    add.u32 %r25, %r0, 64;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r25]; //! commit D
    mov.u32 %r20, 0;
    add.u32 %r21, %r21, 1;
    setp.lt.u32 %p1, %r5, $STEPS;
    @%p1 bra NEXT_PRODUCT;
    bra.uni END;

WRITE_A:
    sub.u32 %r30, %r1, 128; // row
    and.b32 %r31, %r30, 7;
    mov.u32 %r20, 0;
    mov.u32 %r21, 0;
NEXT_A:
    and.b32 %r6, %r5, 1;
    shr.u32 %r7, %r5, 1;
    and.b32 %r7, %r7, 1;
    xor.b32 %r7, %r7, 1;
    shl.b32 %r8, %r6, 3;
    add.u32 %r8, %r8, %r0;
    add.u32 %r9, %r8, 48;
$wait_a_empty
    shl.b32 %r32, %r5, 7;
    add.u32 %r32, %r32, %r30;
    mul.wide.u32 %rd7, %r32, 128;
    add.u64 %rd7, %rd7, %rd2;
    shl.b32 %r33, %r6, 14;
    add.u32 %r33, %r33, %r0;
    add.u32 %r33, %r33, $A_STAGE;
    shl.b32 %r34, %r30, 7;
    add.u32 %r33, %r33, %r34;
$stores
    fence.proxy.async.shared::cta; //! proxy fence
    add.u32 %r8, %r8, 32;
    mbarrier.arrive.shared::cta.b64 %rd4, [%r8]; //! arrive A
    add.u32 %r5, %r5, 1;
    add.u32 %r20, %r20, 1;
    setp.lt.u32 %p1, %r20, $BLOCKS;
    @%p1 bra NEXT_A;

    add.u32 %r8, %r0, 64;
    and.b32 %r7, %r21, 1;
$wait_d_full
    tcgen05.fence::after_thread_sync; //! load fence after
    and.b32 %r35, %r2, 3;
    shl.b32 %r35, %r35, 21;
    add.u32 %r35, %r35, %r4;
    tcgen05.ld.sync.aligned.32x32b.x64.b32 {$values}, [%r35];
    tcgen05.wait::ld.sync.aligned; //! wait::ld
    tcgen05.fence::before_thread_sync; //! load fence before
    add.u32 %r8, %r0, 72;
    mbarrier.arrive.shared::cta.b64 %rd4, [%r8]; //! arrive D
    shl.b32 %r36, %r21, 7;
    add.u32 %r36, %r36, %r30;
    mul.wide.u32 %rd8, %r36, 256;
    add.u64 %rd8, %rd8, %rd3;
$results
    mov.u32 %r20, 0;
    add.u32 %r21, %r21, 1;
    setp.lt.u32 %p1, %r5, $STEPS;
    @%p1 bra NEXT_A;

END:
    bar.warp.sync 0xffffffff;
    tcgen05.fence::before_thread_sync; //! teardown fence before
    bar.sync 0; //! teardown barrier
    tcgen05.fence::after_thread_sync; //! teardown fence after
    setp.ne.u32 %p0, %r2, 1;
    @%p0 bra DONE;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 64;
DONE:
    ret;
}
"""


def kernel_text() -> str:
    def wait(label: str, bar: str, parity: str, name: str) -> str:
        return Template(WAIT).substitute(label=label, bar=bar, parity=parity, name=name)

    products = "\n".join(
        f"""    setp.ne.u32 %p3, {"%r20" if step == 0 else "%r24"}, 0;
    tcgen05.mma.cta_group::1.kind::f8f6f4 [%r4], %rd5, %rd6, %r24, %p3;
    add.u64 %rd5, %rd5, 2;
    add.u64 %rd6, %rd6, 2;"""
        for step in range(4)
    )
    stores = "\n".join(
        f"""    ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%rd7+{16 * chunk}];
    xor.b32 %r37, %r31, {chunk};
    shl.b32 %r37, %r37, 4;
    add.u32 %r37, %r37, %r33;
    st.shared.v4.b32 [%r37], {{%v0, %v1, %v2, %v3}};"""
        for chunk in range(8)
    )
    results = "\n".join(
        f"    st.global.v4.b32 [%rd8+{16 * chunk}], "
        f"{{%v{4 * chunk}, %v{4 * chunk + 1}, %v{4 * chunk + 2}, %v{4 * chunk + 3}}};"
        for chunk in range(16)
    )
    return Template(KERNEL).substitute(
        TMA_LOAD=TMA_LOAD,
        A_STAGE=A_STAGE,
        B_STAGE=B_STAGE,
        STEPS=STEPS,
        BLOCKS=BLOCKS,
        DESCRIPTOR=1 << 16 | 1024 >> 4 << 32 | 1 << 46 | 2 << 61,
        INSTRUCTION=1 << 4 | 64 // 8 << 17 | 128 // 16 << 24,
        products=products,
        stores=stores,
        results=results,
        values=", ".join(f"%v{index}" for index in range(64)),
        wait_b_empty=wait("W_BE", "%r9", "%r7", "wait B empty"),
        wait_b_full=wait("W_BF", "%r8", "%r7", "wait B full"),
        wait_a_full=wait("W_AF", "%r9", "%r7", "wait A full"),
        wait_a_empty=wait("W_AE", "%r9", "%r7", "wait A empty"),
        wait_d_empty=wait("W_DE", "%r23", "%r22", "wait D empty"),
        wait_d_full=wait("W_DF", "%r8", "%r7", "wait D full"),
    )


TEXT = kernel_text()
NAMES = sorted(set(re.findall(r"//! (.*)", TEXT)))
B_BASE = 0x10_0000_0000


def without(name: str) -> str:
    """The kernel without the lines of one synchronisation."""
    kept = [line for line in TEXT.splitlines() if not line.endswith(f"//! {name}")]
    assert len(kept) < len(TEXT.splitlines())
    return "\n".join(kept)


def run(text: str, options: Options, detector: RaceDetector | None = None) -> np.ndarray:
    """Relative error of each tile's result."""
    rng = np.random.default_rng(7)
    a = rng.normal(size=(TILES, BLOCKS, 128, 128)).astype(ml_dtypes.float8_e4m3fn)
    b = rng.normal(size=(TILES, BLOCKS, 64, 128)).astype(ml_dtypes.float8_e4m3fn)
    out = np.full((TILES, 128, 64), np.nan, np.float32)
    memory = GlobalMemory()
    a_address = memory.add("a", a.view(np.uint8))
    memory.add("b", b.view(np.uint8), address=B_BASE)
    out_address = memory.add("out", out, writable=True)
    b_map = TensorMap(B_BASE, 1, (128, STEPS * 64), (128,), (128, 64), Swizzle.B128)
    Module.from_ptx(text).launch(
        "pipeline",
        (1, 1, 1),
        (256, 1, 1),
        memory=memory,
        parameters=[b_map, a_address.to_bytes(8, "little"), out_address.to_bytes(8, "little")],
        dynamic_shared=SHARED,
        options=options,
        observer=detector,
    )
    exact = np.einsum("tbmk,tbnk->tmn", a.astype(np.float64), b.astype(np.float64))
    return np.linalg.norm(out - exact, axis=(1, 2)) / np.linalg.norm(exact, axis=(1, 2))


# Removals that stop the kernel: nobody can miss them.
DEADLOCKS = ("arrive A", "arrive D", "commit A", "commit B", "commit D", "expect B", "wait A empty")

# Removals that the detector reports, and the ordering that it says is missing.
RACES = {
    "init fence": "missing: fence.mbarrier_init",
    "setup barrier": "missing: a barrier from it to warp 0",
    "teardown barrier": "missing: tcgen05.commit after it",
    "proxy fence": "missing: fence.proxy.async between",
    "wait A full": "missing: a barrier from it to warp 1",
    "wait B empty": "missing: a wait for mbarrier 0x400",
    "wait B full": "missing: a wait for mbarrier 0x400",
    "wait D full": "missing: tcgen05.commit after it",
    "wait::ld": "missing: tcgen05.wait::ld by warp 4",
    "MMA fence after": "missing: tcgen05.fence::after_thread_sync before",
    "load fence after": "missing: tcgen05.fence::after_thread_sync before",
}

# Not demanded of kernels that take an acquiring wait for enough.
FENCES = ("MMA fence after", "load fence after")

# The results stay right although the hardware promises nothing: only the detector can tell.
INVISIBLE = ("init fence", "setup barrier", "proxy fence", "wait::ld", *FENCES)

REDUNDANT = {
    "wait D empty": "A of the next tile is written by the warps that have just read D",
    "load fence before": "the arrival releases, after wait::ld",
    "setup fence before": "nothing asynchronous precedes it",
    "setup fence after": "the first accesses to tensor memory come after later waits",
    "teardown fence before": "nothing asynchronous is open any more",
    "teardown fence after": "deallocation is synchronous",
}


def test_every_synchronisation_is_classified() -> None:
    assert sorted([*DEADLOCKS, *RACES, *REDUNDANT]) == NAMES


@pytest.mark.parametrize("delayed", [None, 0, 1, 2, 3])
def test_the_complete_kernel_is_right_and_free_of_races(delayed: int | None) -> None:
    options = Options(races=True, seed=delayed, delay=delayed is not None)
    assert (run(TEXT, options) < 1e-6).all()


@pytest.mark.parametrize("name", DEADLOCKS)
def test_missing_arrivals_stop_the_kernel(name: str) -> None:
    with pytest.raises(DeadlockError, match="mbarrier"):
        run(without(name), Options())


@pytest.mark.parametrize("name", RACES)
def test_missing_order_is_reported(name: str) -> None:
    with pytest.raises(RaceError) as caught:
        run(without(name), Options(races=True))
    assert RACES[name] in str(caught.value)
    lines = without(name).splitlines()
    for described, number in zip(
        (caught.value.race.earlier, caught.value.race.later), caught.value.race.lines, strict=True
    ):
        opcode = lines[number - 1].split()[0]  # the report quotes the line that it names
        assert described.startswith(opcode)
        assert f"(line {number})" in described


@pytest.mark.parametrize("name", INVISIBLE)
def test_what_only_the_detector_sees(name: str) -> None:
    assert (run(without(name), Options()) < 1e-6).all()


@pytest.mark.parametrize("name", [name for name in RACES if name not in INVISIBLE])
def test_what_a_plain_or_a_delayed_run_sees_too(name: str) -> None:
    def fails(options: Options) -> bool:
        try:
            return not (run(without(name), options) < 1e-6).all()
        except EmulatorError:
            return True

    assert any(fails(options) for options in (Options(), Options(delay=True, seed=1)))


@pytest.mark.parametrize("name", FENCES)
def test_acquiring_waits_may_be_enough(name: str) -> None:
    detector = RaceDetector(tcgen05_fences=False)
    assert (run(without(name), Options(), detector) < 1e-6).all()


@pytest.mark.parametrize("name", REDUNDANT)
def test_redundant_order_is_not_missed(name: str) -> None:
    assert (run(without(name), Options(races=True)) < 1e-6).all()
