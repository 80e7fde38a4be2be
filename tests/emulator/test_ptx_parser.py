"""The parser: what it makes of PTX text, and that it names what it does not know."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_programs import kernel

from mlakern.emulator import GlobalMemory, Module, PtxError, opcodes
from mlakern.emulator.flow import Flow
from mlakern.emulator.program import Both, FloatImm, Imm, Memory, Not, Reg, Sink, Special, Vector
from mlakern.emulator.ptx import parse


def entry(body: str, *parameters: str):  # type: ignore[no-untyped-def]
    return parse(kernel(body, parameters)).entries["k"]


def test_header_and_entry_attributes() -> None:
    text = """
    .version 9.4 // the newest
    .target sm_100a, debug
    .address_size 64
    /* two
       lines */
    .visible .entry k(
        .param .align 64 .b8 map[128],
        .param .u32 .ptr .global .align 16 a,
        .param .u64 b,
        .param .f32 c
    )
    .reqntid 192, 1, 1
    .reqnctapercluster 2
    { ret; }
    .entry bare { exit; }
    """
    program = parse(text)
    assert (program.version, program.target) == ("9.4", "sm_100a")
    k = program.entries["k"]
    assert [(p.offset, p.size, p.align) for p in k.parameters] == [
        (0, 128, 64),
        (128, 4, 4),
        (136, 8, 8),
        (144, 4, 4),
    ]
    assert k.parameter_bytes == 148
    assert k.reqntid == (192, 1, 1)
    assert k.reqnctapercluster == (2, 1, 1)
    assert program.entries["bare"].parameters == ()


def test_operands() -> None:
    instructions = entry("""
        mov.b64 %rd1, {%r1, %r2};
        @!%p1 bra DONE;
        setp.eq.and.s32 %p2|%p3, %r1, -5, !%p4;
        ld.global.v2.f32 {%f1, %f2}, [%rd1+-16];
        mov.f32 %f3, 0fBF800000;
        mov.f64 %fd1, 0d3FF8000000000000;
        mov.u32 %r3, %ctaid.y;
        mbarrier.arrive.shared::cluster.b64 _, [%r4];
    DONE:
        ret;
    """).instructions
    move, branch, compare, load, single, double, special, arrive, _ = instructions
    assert [r.name for r in move.operands[1].items] == ["%r1", "%r2"]
    assert move.operands[0].width == 64
    assert (branch.guard[0].name, branch.guard[1]) == ("%p1", False)
    assert isinstance(compare.operands[0], Both)
    assert compare.operands[2] == Imm(-5)
    assert isinstance(compare.operands[3], Not)
    assert compare.modifiers == ("eq", "and")
    assert compare.types == ("s32",)
    assert isinstance(load.operands[0], Vector)
    assert isinstance(load.operands[1], Memory)
    assert load.operands[1].offset == -16
    assert single.operands[1] == FloatImm(-1.0, 32)
    assert double.operands[1] == FloatImm(1.5, 64)
    assert special.operands[1] == Special("ctaid.y")
    assert isinstance(arrive.operands[0], Sink)


def test_instructions_keep_their_line_and_text() -> None:
    text = "\n\n.version 8.8\n.target sm_100a\n.entry k()\n{\n.reg .b32 %r<3>;\n"
    text += "mov.u32 %r1,\n   7; add.u32 %r2,%r1,  1;\nret;\n}\n"
    instructions = parse(text).entries["k"].instructions
    assert [(i.line, i.text) for i in instructions] == [
        (8, "mov.u32 %r1, 7"),
        (9, "add.u32 %r2,%r1, 1"),
        (10, "ret"),
    ]


def test_guarded_instructions_become_branches_around_them() -> None:
    k = entry("@%p1 mov.u32 %r1, 1;\n @!%p1 ret;\n ret;")
    assert [i.row.name for i in k.instructions] == ["bra", "mov", "bra", "ret", "ret"]
    assert (k.instructions[0].guard[0].name, k.instructions[0].guard[1]) == ("%p1", False)
    assert (k.instructions[2].guard[0].name, k.instructions[2].guard[1]) == ("%p1", True)
    flow = Flow(k)
    assert flow.targets(k.instructions[0]) == [1, 2]
    assert flow.targets(k.instructions[2]) == [3, 4]


def test_scopes_have_their_own_registers_and_labels() -> None:
    k = entry("""
        { .reg .b32 t; mov.u32 t, 1; bra L; L: mov.u32 %r1, t; }
        { .reg .b64 t; mov.u64 t, 2; bra L; L: mov.u64 %rd1, t;
          { .reg .b16 t; mov.u16 t, 3; bra OUT; } }
    OUT:
        ret;
    """)
    named = [r for r in k.registers if r.name == "t"]
    assert [r.width for r in named] == [32, 64, 16]
    flow = Flow(k)
    branches = [i for i in k.instructions if i.row.name == "bra"]
    assert [flow.targets(b) for b in branches] == [[2], [5], [8]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("frobnicate.u32 %r1, %r2;", r"line \d+: unknown opcode frobnicate.u32"),
        ("add.wide.u32 %r1, %r2, %r3;", r"opcode add: got modifier .wide .* need one of: .*ftz"),
        ("mul.u128 %r1, %r2, %r3;", r"got modifier .u128"),
        ("add.u32 %r1, %r2;", r"got 2 operands, need d s s"),
        ("mov.u32 %r1, nowhere;\n ret;", r"label nowhere is used but not defined"),
        ("@%q bra L;\n L: ret;", r"guard not understood"),
        ("mov.u32 %r1, 12x;", r"literal not understood: '12x'"),
        ("ld.global.u32 %r1, [%f1*4];", r"address not understood"),
    ],
)
def test_what_is_not_understood_is_named(body: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        parse(kernel(body))


def test_every_modifier_outside_the_table_is_refused() -> None:
    """No row swallows a modifier that it does not list, whatever the opcode."""
    for name in opcodes.rows():
        with pytest.raises(PtxError, match=r"got modifier \.nonsense"):
            opcodes.lookup(f"{name}.nonsense", 3)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("cvt.rp.f64.s64 %fd1, %rd1;", r"cvt.rp.f64.s64 %fd1, %rd1: .* not supported"),
        ("setmaxnreg.inc.sync.aligned.u32 100;", r"need a multiple of 8 from 24 to 256"),
        ("mov.u32 %r1, %mystery;", r"special register %mystery is unknown; known: .*laneid"),
    ],
)
def test_what_cannot_be_run_is_refused_when_code_is_made(code: str, message: str) -> None:
    module = Module.from_ptx(kernel(f"{code}\n ret;"))
    with pytest.raises(PtxError, match=rf"line \d+: .*{message}"):
        module.launch("k", (1, 1, 1), (32, 1, 1), memory=GlobalMemory())


def test_liveness_follows_both_ways_of_a_loop() -> None:
    k = entry("""
        mov.u32 %r1, 0;
        mov.u32 %r2, 10;
    LOOP:
        add.u32 %r1, %r1, %r3;
        setp.lt.u32 %p1, %r1, %r2;
        @%p1 bra LOOP;
        mov.u32 %r4, %r1;
        ret;
    """)
    flow = Flow(k)

    def live(pc: int) -> set[str]:
        return {k.registers[n].name for n in flow.live_in(pc)}

    assert live(0) == {"%r3"}
    assert live(1) == {"%r1", "%r3"}
    assert live(2) == {"%r1", "%r2", "%r3"}
    assert live(4) == {"%p1", "%r1", "%r2", "%r3"}
    assert live(5) == {"%r1"}
    assert live(6) == set()


def test_variables() -> None:
    program = parse("""
    .version 8.8
    .target sm_100a
    .const .align 8 .f32 scales[2] = {0f3F800000, 2.5};
    .extern .shared .align 1024 .b8 dynamic[];
    .shared .align 16 .b8 fixed[40];
    .entry k() {
        .reg .b32 %r<9>;
        .shared .u64 inner;
        .local .align 4 .b8 depot[12];
        mov.u32 %r1, fixed; mov.u32 %r2, dynamic; mov.u32 %r3, inner; mov.u32 %r4, depot;
        ret;
    }
    """)
    data = np.frombuffer(program.variables["scales"].data, np.float32)
    assert data.tolist() == [1.0, 2.5]
    variables = program.entries["k"].variables
    assert {name: (v.space, v.size, v.align) for name, v in variables.items()} == {
        "inner": ("shared", 8, 8),
        "depot": ("local", 12, 4),
        "fixed": ("shared", 40, 16),
        "dynamic": ("shared", 0, 1024),
    }


def test_registers_are_numbered_once() -> None:
    k = entry("mov.u32 %r1, %r2; mov.u32 %r2, %r1; ret;")
    assert [r.name for r in k.registers] == ["%r1", "%r2"]
    assert isinstance(k.instructions[0].operands[0], Reg)
    assert k.instructions[0].operands[0] is k.instructions[1].operands[1]
