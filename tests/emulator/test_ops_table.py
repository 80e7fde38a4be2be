"""Every modifier in the opcode table does something, or is listed as one without effect.

For each modifier that a row acts on there is a sample instruction; without the modifier the code
generated for it is another, or the instruction is refused. So no row accepts a modifier and forgets
it.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from ptx_programs import kernel

from mlakern.emulator import opcodes
from mlakern.emulator.addresses import layout
from mlakern.emulator.codegen import _BASE_NAMESPACE
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.errors import PtxError
from mlakern.emulator.hardware_error import HardwareError
from mlakern.emulator.program import Instruction
from mlakern.emulator.ptx import parse
from mlakern.emulator.writer import Mode


def registers(count: int, first: int = 40, letter: str = "r") -> str:
    return "{" + ", ".join(f"%{letter}{n}" for n in range(first, first + count)) + "}"


COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]
UNSIGNED_COMPARISONS = ["lo", "ls", "hi", "hs"]
FLOAT_COMPARISONS = ["num", "nan", "equ", "neu", "ltu", "leu", "gtu", "geu"]
ATOMICS = ["add", "min", "max", "and", "or", "xor", "exch", "inc", "dec"]
TMEM = {"32x32b": (1, 1), "16x64b": (1, 1), "16x128b": (2, 1), "16x256b": (4, 1)}


def samples() -> list[str]:
    """Instructions that between them have every modifier of every row."""
    found = []
    for name in ("add", "sub", "mul"):
        found += [f"{name}.{m}.f32 %r1, %r2, %r3;" for m in ("ftz", "rz", "rm", "rp", "sat")]
    found += [f"fma.{m}.f32 %r1, %r2, %r3, %r4;" for m in ("ftz", "rz", "rm", "rp", "sat")]
    found += ["fma.rn.relu.f16 %rs1, %rs2, %rs3, %rs4;"]
    found += ["mul.hi.u32 %r1, %r2, %r3;", "mul.wide.u32 %rd1, %r2, %r3;"]
    found += ["mul24.hi.u32 %r1, %r2, %r3;"]
    found += ["mad.hi.u32 %r1, %r2, %r3, %r4;", "mad.wide.u32 %rd1, %r2, %r3, %rd4;"]
    found += [f"{name}.ftz.f32 %r1, %r2;" for name in ("abs", "neg")]
    found += [
        f"{n}.approx.ftz.f32 %r1, %r2;"
        for n in ["ex2", "lg2", "rcp", "rsqrt", "sin", "cos", "sqrt"]
    ]
    for mode in ("rz", "rm", "rp"):
        found += [f"{name}.{mode}.f32 %r1, %r2;" for name in ("rcp", "sqrt")]
    found += [f"div.{m}.f32 %r1, %r2, %r3;" for m in ("ftz", "rz", "rm", "rp")]
    for name in ("min", "max"):
        found += [f"{name}.{m}.f32 %r1, %r2, %r3;" for m in ("NaN", "ftz", "xorsign.abs")]
        found += [f"{name}.abs.f32 %r1, %r2, %r3;", f"{name}.relu.s32 %r1, %r2, %r3;"]
    for name, out in (("setp", "%p1"), ("set.u32", "%r1")):
        head, _, rest = name.partition(".")
        middle = f".{rest}" if rest else ""
        found += [f"{head}.{c}{middle}.s32 {out}, %r2, %r3;" for c in COMPARISONS]
        found += [f"{head}.{c}{middle}.u32 {out}, %r2, %r3;" for c in UNSIGNED_COMPARISONS]
        found += [f"{head}.{c}{middle}.f32 {out}, %r2, %r3;" for c in FLOAT_COMPARISONS]
        found += [f"{head}.lt.{j}{middle}.s32 {out}, %r2, %r3, %p2;" for j in ("and", "or", "xor")]
        found += [f"{head}.lt.ftz{middle}.f32 {out}, %r2, %r3;"]
    found += ["slct.ftz.b32.f32 %r1, %r2, %r3, %r4;"]
    found += [
        f"prmt.b32.{m} %r1, %r2, %r3, %r4;" for m in ["f4e", "b4e", "rc8", "ecl", "ecr", "rc16"]
    ]
    found += ["shf.l.wrap.b32 %r1, %r2, %r3, %r4;", "shf.r.clamp.b32 %r1, %r2, %r3, %r4;"]
    found += ["bfind.shiftamt.u32 %r1, %r2;"]
    found += [f"{name} %r1, %r2, %r3;" for name in ("bmsk.clamp.b32", "bmsk.wrap.b32")]
    found += [f"szext.{m}.s32 %r1, %r2, %r3;" for m in ("clamp", "wrap")]
    found += ["dp2a.hi.u32.u32 %r1, %r2, %r3, %r4;"]
    found += [
        f"testp.{m}.f32 %p1, %r2;"
        for m in ["finite", "infinite", "normal", "notanumber", "number", "subnormal"]
    ]
    # Conversions
    found += [f"cvt.{m}.s32.f32 %r1, %r2;" for m in ("rni", "rmi", "rpi")]
    found += ["cvt.rzi.f32.f32 %r1, %r2;"]
    found += [f"cvt.{m}.f32.s32 %r1, %r2;" for m in ("rz", "rm", "rp")]
    found += ["cvt.rna.tf32.f32 %r1, %r2;", "cvt.ftz.f32.f32 %r1, %r2;", "cvt.sat.u8.u32 %r1, %r2;"]
    found += ["cvt.rn.relu.f16.f32 %rs1, %r2;", "cvt.rn.satfinite.f16.f32 %rs1, %r2;"]
    found += [f"cvta.{m}.u64 %rd1, %rd2;" for m in ("to.shared", "shared::cta", "shared::cluster")]
    spaces = [
        "const",
        "global",
        "local",
        "param",
        "param::entry",
        "shared",
        "shared::cluster",
        "shared::cta",
    ]
    found += [f"isspacep.{space} %p1, %rd2;" for space in spaces if space != "param::entry"]
    # Memory
    found += [f"ld.{space}.b32 %r1, [%rd2];" for space in spaces]
    found += [f"st.{s}.b32 [%rd2], %r1;" for s in spaces if "param" not in s and s != "const"]
    found += ["ldu.global.b32 %r1, [%rd2];"]
    for space in ("global", "shared", "shared::cta", "shared::cluster"):
        found += [f"atom.{space}.add.u32 %r1, [%rd2], %r3;", f"red.{space}.add.u32 [%rd2], %r3;"]
    for name in ATOMICS:
        kind = "b32" if name in ("and", "or", "xor", "exch") else "u32"
        found += [f"atom.global.{name}.{kind} %r1, [%rd2], %r3;"]
        found += [f"red.global.{name}.{kind} [%rd2], %r3;"]
        if name != "exch":
            found += [f"red.async.{name}.{kind} [%r1], %r2, [%r3];"]
    found += ["atom.global.cas.b32 %r1, [%rd2], %r3, %r4;", "red.global.cas.b32 [%rd2], %r3, %r4;"]
    found += ["atom.global.add.L2::cache_hint.u32 %r1, [%rd2], %r3, %rd4;"]
    found += ["red.global.add.L2::cache_hint.u32 [%rd2], %r3, %rd4;"]
    found += ["ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r1}, [%r2];"]
    found += ["stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%r2], {%r1};"]
    # Warps and barriers
    found += [f"shfl.sync.{m}.b32 %r1, %r2, %r3, %r4, -1;" for m in ["bfly", "down", "idx", "up"]]
    found += [f"vote.sync.{m}.pred %p1, %p2, -1;" for m in ("all", "any", "uni")]
    found += ["vote.sync.ballot.b32 %r1, %p2, -1;"]
    found += [f"redux.sync.{m}.b32 %r1, %r2, -1;" for m in ("and", "or", "xor")]
    found += [f"redux.sync.{m}.u32 %r1, %r2, -1;" for m in ("add", "min", "max")]
    found += [f"redux.sync.min.{m}.f32 %r1, %r2, -1;" for m in ("abs", "NaN")]
    for name in ("bar", "bar.cta", "barrier", "barrier.cta"):
        aligned = ".aligned" if name.startswith("barrier") else ""
        found += [f"{name}.sync{aligned} %r1;", f"{name}.arrive{aligned} %r1, %r2;"]
        found += [f"{name}.red{aligned}.popc.u32 %r1, 0, %p1;"]
        found += [f"{name}.red.{m}.pred %p1, 0, %p2;" for m in ("and", "or")]
    found += ["barrier.cluster.arrive.aligned;", "barrier.cluster.arrive.relaxed;"]
    found += ["barrier.cluster.wait.aligned;"]
    found += [f"mbarrier.{n}.relaxed.b64 %rd1, [%r2];" for n in ("arrive", "arrive_drop")]
    found += [
        f"mbarrier.{n}.expect_tx.relaxed.b64 %rd1, [%r2], %r3;" for n in ("arrive", "arrive_drop")
    ]
    for name in ("try_wait", "test_wait"):
        found += [f"mbarrier.{name}.{m}.b64 %p1, [%r2], %r3;" for m in ("parity", "parity.relaxed")]
    found += ["clusterlaunchcontrol.try_cancel.async.multicast::cluster::all.b128 [%r1], [%r2];"]
    # Copies
    found += ["cp.async.ca.shared.global.L2::cache_hint [%r1], [%rd2], 16, %rd3;"]
    found += ["cp.async.mbarrier.arrive.noinc.b64 [%r1];"]
    found += ["cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], %r3;"]
    found += ["cp.async.bulk.shared::cluster.shared::cta [%r1], [%r2], %r3, [%r4];"]
    found += ["cp.async.bulk.shared::cluster.multicast::cluster [%r1], [%rd2], %r3, [%r4], %rs1;"]
    for rank in range(1, 6):
        at = registers(rank)
        found += [f"cp.async.bulk.tensor.{rank}d.shared::cluster [%r1], [%rd2, {at}], [%r3];"]
        found += [f"cp.reduce.async.bulk.tensor.{rank}d.add [%rd2, {at}], [%r1];"]
    found += ["cp.async.bulk.tensor.1d.bulk_group [%rd2, {%r3}], [%r1];"]
    found += ["cp.async.bulk.tensor.1d.cta_group::2 [%r1], [%rd2, {%r4}], [%r3];"]
    found += ["cp.async.bulk.tensor.1d.multicast::cluster [%r1], [%rd2, {%r4}], [%r3], %rs1;"]
    for name in ["add", "min", "max", "inc", "dec", "and", "or", "xor"]:
        found += [f"cp.reduce.async.bulk.global.bulk_group.{name}.u32 [%rd1], [%r2], %r3;"]
        found += [f"cp.reduce.async.bulk.tensor.1d.{name} [%rd2, {{%r3}}], [%r1];"]
    # Tensor cores
    mma = {
        "m16n8k8": ("f16", 2, 1, 4),
        "m16n8k16": ("f16", 4, 2, 4),
        "m16n8k4": ("tf32", 2, 1, 4),
        "m16n8k32": ("e4m3", 4, 2, 4),
    }
    for shape, (kind, a, b, d) in mma.items():
        fragments = ", ".join([registers(d), registers(a), registers(b), registers(d)])
        found += [f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {fragments};"]
    integers = {"m16n8k64": (4, 2, 4, "s4"), "m8n8k32": (1, 1, 2, "s4"), "m8n8k16": (1, 1, 2, "s8")}
    for shape, (a, b, d, kind) in integers.items():
        fragments = ", ".join([registers(d), registers(a), registers(b), registers(d)])
        found += [f"mma.sync.{shape}.row.col.satfinite.s32.{kind}.{kind}.s32 {fragments};"]
    wide = ", ".join([registers(2, letter="fd"), "{%fd1}", "{%fd2}", registers(2, letter="fd")])
    found += [f"mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {wide};".replace("%fd", "%rd")]
    for n in range(8, 257, 8):
        for k, kind in ((16, "f16"), (8, "tf32"), (32, "e4m3")):
            d = registers(n // 2)
            found += [f"wgmma.mma_async.m64n{n}k{k}.f32.{kind}.{kind} {d}, %rd1, %rd2, %p1, 1, 1;"]
    d = registers(4)
    found += [f"wgmma.mma_async.m64n8k32.satfinite.s32.s8.s8 {d}, %rd1, %rd2, %p1;"]
    found += ["tcgen05.alloc.cta_group::2.b32 [%r1], 32;", "tcgen05.alloc.exclusive.b32 [%r1], 32;"]
    found += ["tcgen05.commit.multicast::cluster.b64 [%r1], %rs1;"]
    found += [f"tcgen05.cp.{m} [%r1], %rd2;" for m in ["128x128b", "128x256b", "32x128b", "4x256b"]]
    found += [f"tcgen05.cp.64x128b.warpx2::{m} [%r1], %rd2;" for m in ("01_23", "02_13")]
    found += ["tcgen05.cp.cta_group::2.4x256b [%r1], %rd2;"]
    for shape, (count, _) in TMEM.items():
        for repeat in (1, 2, 4, 8, 16, 32, 64, 128):
            if count * repeat <= 128:
                data = registers(count * repeat)
                found += [f"tcgen05.ld.{shape}.x{repeat}.b32 {data}, [%r1];"]
                found += [f"tcgen05.st.{shape}.x{repeat}.b32 [%r1], {data};"]
                found += [f"tcgen05.ld.red.{shape}.x{repeat}.min.f32 {data}, %r2, [%r1];"]
    found += ["tcgen05.ld.32x32b.x1.pack::16b.b32 {%r2}, [%r1];"]
    found += ["tcgen05.st.32x32b.x1.unpack::16b.b32 [%r1], {%r2};"]
    found += [f"tcgen05.ld.red.32x32b.x1.{m}.f32 {{%r2}}, %r3, [%r1];" for m in ("max", "min.abs")]
    found += ["tcgen05.ld.red.32x32b.x1.min.NaN.f32 {%r2}, %r3, [%r1];"]
    for kind in ["f16", "tf32", "f8f6f4", "i8"]:
        found += [f"tcgen05.mma.kind::{kind} [%r1], %rd2, %rd3, %r4, %p1;"]
        found += [f"tcgen05.mma.ws.kind::{kind} [%r1], %rd2, %rd3, %r4, %p1;"]
    found += ["tcgen05.mma.cta_group::2.kind::f16 [%r1], %rd2, %rd3, %r4, %p1;"]
    scaled = "[%r1], %rd2, %rd3, %r4, [%r5], [%r6], %p1"
    for kind, scale in (
        ("mxf8f6f4", "scale_vec::1X"),
        ("mxf4", "scale_vec::2X"),
        ("mxf4nvf4", "scale_vec::4X"),
        ("mxf4nvf4", "scale_vec::2X"),
        ("mxf4nvf4", "block16"),
        ("mxf4nvf4", "block32"),
    ):
        found += [f"tcgen05.mma.kind::{kind}.block_scale.{scale} {scaled};"]
    return found


# A scale vector that is the default of its kind may be left out without changing anything.
DEFAULTS = {("tcgen05.mma", "scale_vec::1X")}


def describe(value: Any) -> str:
    """What an object of generated code is, whatever its identity."""
    if isinstance(value, Instruction):
        return "site"
    if isinstance(value, functools.partial):
        return f"{describe(value.func)}{[describe(a) for a in value.args]}{value.keywords}"
    closure = getattr(value, "__closure__", None) or ()
    inside = [describe(cell.cell_contents) for cell in closure]
    if hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}{inside}"
    if hasattr(value, "instruction"):
        fields = (n for n in value.__dataclass_fields__ if n != "instruction")
        return str({name: getattr(value, name) for name in fields})
    return repr(value)


def generated(code: str) -> list[str]:
    """The code for one instruction, run by a warp and by a lane, with constants spelled out."""
    entry = parse(kernel(code + "\nret;")).entries["k"]
    instruction = entry.instructions[0]
    found = []
    for mode in (Mode.WARP, Mode.LANE, Mode.PARTIAL):
        single = mode is Mode.LANE
        kinds = {
            r.number: ("b" if single else "p") if r.width == 1 else ("i" if single else "u")
            for r in entry.registers
        }
        emitter = Emitter(entry, layout(entry), mode, kinds, dict(_BASE_NAMESPACE))
        emitter.instruction = instruction
        instruction.row.generate(emitter, instruction)
        text = "\n".join(emitter.lines)
        for operand in entry.registers:
            value = emitter.registers.get(operand.number)
            if value is not None:
                text += f"\n{operand.name}: {value.width} {value.kind} {value.names}"
        names = emitter.namespace
        found.append(re.sub(r"\bK\d+\b", lambda m: describe(names[m[0]]), text))  # noqa: B023
    return found


def test_samples_generate_code() -> None:
    for code in samples():
        assert generated(code), code


@functools.cache
def by_modifier() -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for code in samples():
        row, modifiers, _ = opcodes.lookup(code.split(" ")[0].rstrip(";"), 1)
        for modifier in modifiers:
            found.setdefault((row.name, modifier), []).append(code)
    return found


MATTER = [(name, m) for name, row in opcodes.rows().items() for m in sorted(row.modifiers)]


@pytest.mark.parametrize("name", sorted({name for name, _ in MATTER}))
def test_every_modifier_changes_the_code_or_is_required(name: str) -> None:
    for modifier in sorted(opcodes.rows()[name].modifiers):
        codes = by_modifier().get((name, modifier), [])
        assert codes, f"no sample of {name} has .{modifier}"
        if (name, modifier) in DEFAULTS:
            continue
        assert any(_differs(code, modifier) for code in codes), f"{name}: .{modifier} does nothing"


def _differs(code: str, modifier: str) -> bool:
    opcode, _, rest = code.partition(" ")
    without = re.sub(rf"\.{re.escape(modifier)}(?![\w:])", "", opcode, count=1)
    assert without != opcode
    try:
        other = generated(f"{without} {rest}")
    except (PtxError, HardwareError):
        return True
    return other != generated(code)


def test_modifiers_matter_or_are_ignored_never_both() -> None:
    for name, row in opcodes.rows().items():
        assert not row.modifiers & row.ignored, name
        assert not row.types & (row.modifiers | row.ignored), name


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("add.rn.f32.f32 %r1, %r2, %r3;", "no operation of types f32 f32"),
        ("mul.f32.f16 %r1, %r2, %r3;", "opcode mul: got 2 types in mul.f32.f16, need at most 1"),
        ("add.sat.u32 %r1, %r2, %r3;", r"integer .sat is for .s32 alone"),
        ("add.rz.f64 %rd1, %rd2, %rd3;", r".rz of type .f64 is not supported"),
        ("setp.num.s32 %p1, %r1, %r2;", r"no such comparison of type .s32"),
        ("atom.global.and.u32 %r1, [%rd1], %r2;", r"no .and of type .u32"),
        ("atom.global.add.b32 %r1, [%rd1], %r2;", r"no .add of type .b32"),
        ("atom.multimem.add.u32 %r1, [%rd1], %r2;", "got modifier .multimem"),
        ("multimem.red.add.u32 [%rd1], %r2;", "unknown opcode multimem.red.add.u32"),
        ("cvt.rs.satfinite.e4m3x4.f32 %r1, %r2;", "got modifier .rs"),
        ("cp.async.bulk.tensor.4d.im2col [%r1], [%rd1, {%r2}], [%r3];", "got modifier .im2col"),
        ("tcgen05.shift.cta_group::1.down [%r1];", "unknown opcode tcgen05.shift"),
        ("tcgen05.mma.sp.kind::f16 [%r1], %rd1, %rd2, [%r2], %r3, %p1;", "got modifier .sp"),
        ("tcgen05.cp.128x256b.b8x16.b4x16_p64 [%r1], %rd1;", "got modifier .b8x16"),
        ("tcgen05.ld.16x32bx2.x1.b32 {%r1}, [%r2], 2;", "got modifier .16x32bx2"),
        ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1, %r2}, [%r3];", "modifier .m16n16"),
        ("mma.sp.sync.aligned.m16n8k16.f32 %r1, %r2, %r3, %r4;", "unknown opcode mma.sp"),
        ("wgmma.mma_async.sp.m64n8k32.f32.f16.f16 %r1, %rd1, %rd2, %p1;", "got modifier .sp"),
        ("wgmma.mma_async.m64n8k16.f32.e4m3.e4m3 {%r1}, %rd1, %rd2, %p1;", "K of e4m3 is 32"),
        (
            "wgmma.mma_async.m64n8k32.f32.e4m3.e4m3 {%r1}, %rd1, %rd2, %p1, 1, 1, 0, 1;",
            "operands of e4m3 must be K-major",
        ),
        ("mma.sync.m16n8k16.row.col.f32.f16.bf16.f32 %r1, %r2, %r3, %r4;", "no product of types"),
        ("st.param.b32 [%rd1], %r1;", "got modifier .param"),
        ("discard.global.L2 [%rd1], 128;", "discard is not supported"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(code: str, message: str) -> None:
    with pytest.raises(PtxError, match=message) as raised:
        generated(code)
    assert re.search(r"line \d+", str(raised.value))
