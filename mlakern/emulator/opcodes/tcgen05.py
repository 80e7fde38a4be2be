"""Tensor memory and tensor cores (PTX ISA, "TensorCore 5th Generation Family Instructions")."""

from __future__ import annotations

from mlakern.emulator import fences, tensor
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.observer import Fence
from mlakern.emulator.opcodes.bits import truth
from mlakern.emulator.opcodes.memory import address, argument, items_of
from mlakern.emulator.opcodes.table import Control, opcode
from mlakern.emulator.program import Instruction, Memory
from mlakern.emulator.tmem import Shape
from mlakern.emulator.values import Value

_GROUPS = "cta_group::1 cta_group::2"
_KINDS = {"kind::f16": "f16", "kind::tf32": "tf32", "kind::f8f6f4": "f8f6f4"}
_SHAPES = "32x32b 16x64b 16x128b 16x256b"
_COUNTS = "x1 x2 x4 x8 x16 x32 x64 x128"
_COLLECTORS = " ".join(
    f"collector::{operand}::{use}"
    for operand in ("a", "b0", "b1", "b2", "b3")
    for use in ("discard", "lastuse", "fill", "use")
)


@opcode(
    "tcgen05.alloc",
    "m s",
    "b32",
    f"{_GROUPS} sync aligned shared::cta shared exclusive",
    Control.BLOCKING,
)
def alloc(e: Emitter, i: Instruction) -> None:
    e.converge()
    where = e.get(address(e, i.operands[0], "shared"), "i")
    columns = e.get(e.read(i.operands[1], 32), "i")
    function = e.constant(tensor.allocate)
    args = f"g, {where}, {columns}, {i.has('exclusive')}, {e.site}"
    e.line(f"if not {function}({args}): return BLOCKED")


@opcode("tcgen05.dealloc", "s s", "b32", f"{_GROUPS} sync aligned exclusive", Control.CONVERGED)
def dealloc(e: Emitter, i: Instruction) -> None:
    e.converge()
    where, columns = (e.get(e.read(operand, 32), "i") for operand in i.operands)
    e.line(f"{e.constant(tensor.deallocate)}(g, {where}, {columns}, {e.site})")


@opcode("tcgen05.relinquish_alloc_permit", "", "", f"{_GROUPS} sync aligned", Control.CONVERGED)
def relinquish(e: Emitter, _: Instruction) -> None:
    e.converge()
    e.line(f"{e.constant(tensor.relinquish)}(g)")


def _multiply(e: Emitter, i: Instruction) -> None:
    """Operands: [d], a, b, instruction descriptor, whether D is an input."""
    if e.part():
        return
    d, a, b, word, accumulate = i.operands
    in_tensor = isinstance(a, Memory)
    kind = next(_KINDS[m] for m in i.modifiers if m in _KINDS)
    ctas = 2 if i.has("cta_group::2") else 1
    first = _tensor_address(e, a) if isinstance(a, Memory) else e.get(e.read(a, 64), "i")
    flag = e.get(truth(e.read(accumulate, 1)), "b")
    function = e.constant(tensor.multiply)
    e.line(
        f"{function}(g, {kind!r}, {ctas}, {i.row.name.endswith('.ws')}, {in_tensor}, "
        f"{_tensor_address(e, d)}, {first}, {e.get(e.read(b, 64), 'i')}, "
        f"{e.get(e.read(word, 32), 'i')}, {flag}, {e.site})"
    )


def _tensor_address(e: Emitter, operand: object) -> str:
    """A tensor-memory address, the same in all lanes."""
    assert isinstance(operand, Memory)
    return e.get(address(e, operand, "shared"), "i")


for _name in ("tcgen05.mma", "tcgen05.mma.ws"):
    opcode(
        _name,
        "m s s s s",
        "",
        f"{_GROUPS} {' '.join(_KINDS)} {_COLLECTORS}",
        Control.ALONE,
    )(_multiply)


@opcode(
    "tcgen05.commit",
    "m s?",
    "b64",
    f"{_GROUPS} mbarrier::arrive::one shared::cluster multicast::cluster",
    Control.ALONE,
)
def commit(e: Emitter, i: Instruction) -> None:
    if e.part():
        return
    where = e.get(address(e, i.operands[0], "shared"), "i")
    mask = "None"
    if i.has("multicast::cluster"):
        mask = e.get(e.read(i.operands[1], 16), "i")
    e.line(f"{e.constant(tensor.commit)}(g, {where}, {mask}, {e.site})")


def _shape(e: Emitter, i: Instruction) -> str:
    name = next(m for m in i.modifiers if m in _SHAPES.split())
    count = next(int(m[1:]) for m in i.modifiers if m in _COUNTS.split())
    return e.constant(Shape(name, count))


_ACCESS = f"sync aligned {_SHAPES} {_COUNTS}"


@opcode("tcgen05.ld", "d m", "b32", _ACCESS, Control.CONVERGED)
def ld(e: Emitter, i: Instruction) -> None:
    e.converge()
    where = argument(e, address(e, i.operands[1], "shared"))
    block = e.temporary(f"{e.constant(tensor.load)}(g, {_shape(e, i)}, {where}, {e.site})")
    _bind_rows(e, i, block)


def _bind_rows(e: Emitter, i: Instruction, block: str) -> None:
    outs = items_of(i.operands[0])
    names = [e.name("u") for _ in outs]
    e.line(f"{', '.join(names)}, = {block}")
    for out, name in zip(outs, names, strict=True):
        e.bind(out, Value(32, "u", {"u": name}))


@opcode("tcgen05.ld.red", "d d m", "f32 u32 s32", f"{_ACCESS} min max abs NaN", Control.CONVERGED)
def ld_red(e: Emitter, i: Instruction) -> None:
    e.converge()
    where = argument(e, address(e, i.operands[2], "shared"))
    operation = "max" if i.has("max") else "min"
    block, reduced = e.name(), e.name("u")
    function = e.constant(tensor.load_reduced)
    args = f"{operation!r}, {i.types[0]!r}, {i.has('abs')}, {i.has('NaN')}, {e.site}"
    e.line(f"{block}, {reduced} = {function}(g, {_shape(e, i)}, {where}, {args})")
    _bind_rows(e, i, block)
    e.bind(i.operands[1], Value(32, "u", {"u": reduced}))


@opcode("tcgen05.st", "m s", "b32", _ACCESS, Control.CONVERGED)
def st(e: Emitter, i: Instruction) -> None:
    e.converge()
    where = argument(e, address(e, i.operands[0], "shared"))
    values = ", ".join(e.get(e.read(item, 32), "U") for item in items_of(i.operands[1]))
    function = e.constant(tensor.store)
    e.line(f"{function}(g, {_shape(e, i)}, {where}, [{values}], {e.site})")


def _wait(e: Emitter, i: Instruction) -> None:
    e.converge()
    e.line(f"{e.constant(tensor.wait)}(g, {i.row.name.endswith('ld')})")


for _name in ("tcgen05.wait::ld", "tcgen05.wait::st"):
    opcode(_name, "", "", "sync aligned", Control.CONVERGED)(_wait)


def _fence(e: Emitter, i: Instruction) -> None:
    before = i.row.name.endswith("before_thread_sync")
    kind = Fence.BEFORE_THREAD_SYNC if before else Fence.AFTER_THREAD_SYNC
    e.line(f"{e.constant(fences.fence)}(g, {e.constant(kind)})")


for _name in ("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync"):
    opcode(_name)(_fence)
