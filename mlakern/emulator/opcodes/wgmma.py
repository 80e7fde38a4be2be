"""Matrix products of a warpgroup (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions")."""

from __future__ import annotations

import re

from mlakern.emulator import wgmma
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.opcodes.bits import truth
from mlakern.emulator.opcodes.table import Control, opcode
from mlakern.emulator.program import Imm, Instruction, Operand, Reg, Vector
from mlakern.emulator.values import Value

_K = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}
_SHAPES = " ".join(f"m64n{n}k{k}" for n in range(8, 257, 8) for k in (8, 16, 32))
_PRODUCTS = {  # formats of D for a format of A
    "f16": ("f32", "f16"),
    "bf16": ("f32",),
    "tf32": ("f32",),
    "e4m3": ("f32", "f16"),
    "e5m2": ("f32", "f16"),
    "s8": ("s32",),
    "u8": ("s32",),
}


def _gather(e: Emitter) -> None:
    e.line(f"if not {e.constant(wgmma.gathered)}(g): return BLOCKED")


@opcode(
    "wgmma.mma_async",
    "b s s s s? s? s? s?",
    " ".join(["f32", "s32", *_K]),
    f"{_SHAPES} satfinite",
    Control.BLOCKING,
    ignored="sync aligned",
    typed=3,
)
def mma_async(e: Emitter, i: Instruction) -> None:
    """Operands: D, A, B, whether D is an input; then factors (1 or -1) of A and B, and whether A
    (in shared memory) and B are MN-major.
    """
    form = _form(e, i)
    _gather(e)
    d, a, b, accumulate = i.operands[:4]
    outs = d.items if isinstance(d, Vector) else (d,)
    flag = e.get(truth(e.read(accumulate, 1)), "b")
    letter = "F" if form.d_format == "f32" else "U"
    old = "None"
    if flag != "False":
        old = f"[{', '.join(_old(e, item, letter) for item in outs)}] if {flag} else None"
    if isinstance(a, Vector):
        left = f"[{', '.join(e.get(e.read(item, 32), 'U') for item in a.items)}]"
    else:
        left = e.get(e.read(a, 64), "i")
    form_name = e.constant(form, "wgmma", i.pc)
    args = f"g, {form_name}, {old}, {left}, {e.get(e.read(b, 64), 'i')}"
    names = [e.name() for _ in outs]
    e.line(f"{', '.join(names)}, = {e.constant(wgmma.multiply)}({args})")
    for out, name in zip(outs, names, strict=True):
        e.bind(out, Value(32, letter.lower(), {letter.lower(): name}))


def _old(e: Emitter, item: Operand, form: str) -> str:
    """A register of D; one never written, which matters only if D is an input, is None."""
    known = not isinstance(item, Reg) or item.number in e.registers
    if isinstance(item, Reg) and not known and e.kinds.get(item.number, "-") in "-P":
        return "None"
    return e.get(e.read(item, 32), form)


def _form(e: Emitter, i: Instruction) -> wgmma.Form:
    d_format, a_format, b_format = i.types if len(i.types) == 3 else ("", "", "")
    shape = i.choice(_SHAPES.split())
    n, k = (int(size) for size in re.findall(r"\d+", shape)[1:])
    mixed = {a_format, b_format} in ({"e4m3", "e5m2"}, {"s8", "u8"})
    if d_format not in _PRODUCTS.get(a_format, ()) or not (a_format == b_format or mixed):
        raise e.error(f"no product of types {' '.join(i.types)}")
    if k != _K[a_format]:
        raise e.error(f"K of {a_format} is {_K[a_format]}, got {k}")
    if d_format == "s32" and n % 16 and n != 8 and n != 24:
        raise e.error(f"N of integers is 8, 24 or a multiple of 16, got {n}")
    literals = [operand.value if isinstance(operand, Imm) else None for operand in i.operands[4:]]
    if None in literals:
        raise e.error("factors and transpositions must be literals")
    factors = literals[:2] or [1, 1]
    trans = literals[2:]
    if isinstance(i.operands[1], Vector):
        trans = [0, *trans]
    trans = [*trans, 0, 0][:2]
    if any(factor not in (1, -1) for factor in factors) or any(t not in (0, 1) for t in trans):
        raise e.error("factors are 1 or -1, transpositions 0 or 1")
    if any(trans) and a_format not in ("f16", "bf16"):
        raise e.error(f"operands of {a_format} must be K-major")
    return wgmma.Form(
        n,
        k,
        a_format,
        b_format,
        d_format,
        trans[0] == 1,
        trans[1] == 1,
        factors[0] != factors[1],
        i.has("satfinite"),
        i,
    )


@opcode("wgmma.fence", "", "", "", Control.BLOCKING, ignored="sync aligned")
def fence(e: Emitter, _: Instruction) -> None:
    """Orders accesses to registers, which are in order here anyway."""
    _gather(e)


@opcode("wgmma.commit_group", "", "", "", Control.BLOCKING, ignored="sync aligned")
def commit_group(e: Emitter, _: Instruction) -> None:
    _gather(e)
    e.line(f"{e.constant(wgmma.commit_group)}(g)")


@opcode("wgmma.wait_group", "s", "", "", Control.BLOCKING, ignored="sync aligned")
def wait_group(e: Emitter, i: Instruction) -> None:
    _gather(e)
    pending = i.operands[0]
    if not isinstance(pending, Imm):
        raise e.error("the number of pending groups must be a literal")
    e.line(f"{e.constant(wgmma.wait_group)}(g, {pending.value})")
