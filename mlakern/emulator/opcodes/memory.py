"""Loads, stores, prefetches, matrices (PTX ISA, "Data Movement and Conversion Instructions")."""

from __future__ import annotations

from mlakern.emulator import access, matrix
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.opcodes.conversion import resize
from mlakern.emulator.opcodes.table import BITS, FLOATS, INTEGERS, Control, opcode
from mlakern.emulator.program import FloatImm, Imm, Instruction, Memory, Operand, Reg, items_of
from mlakern.emulator.values import Value

SPACES = "global shared shared::cta shared::cluster local param param::entry const"
SCOPES = "cta cluster gpu sys"
ORDER = "weak volatile relaxed acquire release mmio acq_rel seq_cst"
_CACHE = (
    "ca cg cs lu cv wb wt nc L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last "
    "L1::no_allocate L2::evict_last L2::evict_normal L2::evict_first L2::cache_hint L2::64B "
    "L2::128B L2::256B unified"
)
_ANY = f"b8 u8 s8 {BITS} {INTEGERS} {FLOATS} b128"


def space_of(i: Instruction) -> str:
    """The state space an instruction names; "" is generic."""
    for modifier in i.modifiers:
        if modifier in SPACES.split():
            return modifier.split("::")[0]
    return ""


def address(e: Emitter, memory: Operand, space: str) -> Value:
    """The address of a memory operand: 32 bits for shared memory, else 64."""
    if not isinstance(memory, Memory):
        raise e.error("expected an address in brackets")
    base = memory.base
    width = 32 if space == "shared" else 64
    value = e.read(base, width)
    if value.width != width:
        value = resize(e, value, "u", value.width, width)
    if memory.offset:
        offset = memory.offset & ((1 << width) - 1)
        step = Value(width, "i", {"i": str(offset)})
        value = e.compute(e.scratch(width), "{0} + {1}", "u", value, step)
    return value


def argument(e: Emitter, value: Value) -> str:
    """A value as run-time functions take it: an int, or an unsigned array."""
    return e.get(value, "i" if value.scalar else "u")


def width_of(kind: str) -> int:
    return int(kind[1:])


def element_of(i: Instruction) -> tuple[str, int]:
    """The type of an access's elements and its width; .b128 ones are pairs of .b64."""
    kind = "b64" if i.types[0] == "b128" else i.types[0]
    return kind, width_of(kind)


@opcode("ld", "d m s?", _ANY, SPACES, ignored=f"{SCOPES} {ORDER} {_CACHE} v2 v4 v8")
def ld(e: Emitter, i: Instruction) -> None:
    space, (kind, bits) = space_of(i), element_of(i)
    where = address(e, i.operands[1], space)
    outs = items_of(i.operands[0])
    function = e.constant(access.LOADS[space])
    call = f"{function}(g, {argument(e, where)}, {bits // 8}, {len(outs)}, {e.site})"
    names = [e.name() for _ in outs]
    e.line(f"{', '.join(names)} = {call}")
    form = "i" if (where.scalar and space != "local") or e.single else "u"
    for out, name in zip(outs, names, strict=True):
        bind_loaded(e, out, Value(bits, form, {form: name}), kind)


def bind_loaded(e: Emitter, out: Operand, value: Value, kind: str) -> None:
    """A loaded element, widened to its register as its type says."""
    register = out.width if isinstance(out, Reg) else value.width
    if register > value.width:
        value = resize(e, value, "s" if kind[0] == "s" else "u", value.width, register)
    e.bind(out, value)


def stored(e: Emitter, operand: Operand, kind: str) -> Value:
    """A source of a store, cut to the width in memory."""
    bits = width_of(kind)
    if isinstance(operand, Imm | FloatImm):
        return e.read(operand, bits)
    value = e.read(operand, bits)
    return resize(e, value, "u", value.width, bits) if value.width > bits else value


@opcode(
    "st",
    "m s s?",
    _ANY,
    "global shared shared::cta shared::cluster local",
    ignored=f"{SCOPES} {ORDER} {_CACHE} v2 v4 v8",
)
def st(e: Emitter, i: Instruction) -> None:
    space, (kind, bits) = space_of(i), element_of(i)
    where = address(e, i.operands[0], space)
    sources = [stored(e, operand, kind) for operand in items_of(i.operands[1])]
    arguments = [argument(e, source) for source in sources]
    values = arguments[0] if len(sources) == 1 else f"[{', '.join(arguments)}]"
    function = e.constant(access.STORES[space])
    e.line(f"{function}(g, {argument(e, where)}, {bits // 8}, {values}, {e.site})")


@opcode("ldu", "d m", _ANY, "global", ignored="v2 v4")
def ldu(e: Emitter, i: Instruction) -> None:
    ld(e, i)


@opcode("prefetch", "m", ignored=f"{SPACES} L1 L2 tensormap L2::evict_last L2::evict_normal")
def prefetch(e: Emitter, i: Instruction) -> None:
    """No effect on values; the address need not exist."""


@opcode("prefetchu", "m", ignored="L1")
def prefetchu(e: Emitter, i: Instruction) -> None:
    """No effect on values."""


@opcode("applypriority", "m s", ignored="global L2::evict_normal")
def applypriority(e: Emitter, i: Instruction) -> None:
    """No effect on values."""


@opcode("discard", "m s", ignored="global L2")
def discard(e: Emitter, _: Instruction) -> None:
    raise e.error("discard is not supported")


@opcode(
    "createpolicy",
    "d s s?",
    "b64",
    ignored="fractional range L2::evict_last L2::evict_first L2::evict_normal L2::evict_unchanged "
    "global",
)
def createpolicy(e: Emitter, i: Instruction) -> None:
    """A cache policy is an opaque word without effect."""
    e.set(i.operands[0], "i", "0", 64)


_MATRIX = "sync aligned m8n8 x1 x2 x4 shared shared::cta"


@opcode("ldmatrix", "d m", "b16", "trans", Control.CONVERGED, ignored=_MATRIX)
def ldmatrix(e: Emitter, i: Instruction) -> None:
    e.converge()
    where = address(e, i.operands[1], "shared")
    outs = items_of(i.operands[0])
    function = e.constant(matrix.load_matrices)
    names = [e.name() for _ in outs]
    args = f"g, {e.get(where, 'U')}, {len(outs)}, {i.has('trans')}, {e.site}"
    e.line(f"{', '.join(names)}, = {function}({args})")
    for out, name in zip(outs, names, strict=True):
        e.bind(out, Value(32, "u", {"u": name}))


@opcode("stmatrix", "m s", "b16", "trans", Control.CONVERGED, ignored=_MATRIX)
def stmatrix(e: Emitter, i: Instruction) -> None:
    e.converge()
    where = address(e, i.operands[0], "shared")
    sources = [e.get(e.read(operand, 32), "U") for operand in items_of(i.operands[1])]
    function = e.constant(matrix.store_matrices)
    args = f"g, {e.get(where, 'U')}, [{', '.join(sources)}], {i.has('trans')}, {e.site}"
    e.line(f"{function}({args})")
