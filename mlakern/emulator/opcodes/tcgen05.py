"""Tensor memory and tensor cores (PTX ISA, "TensorCore 5th Generation Family Instructions")."""

from __future__ import annotations

from typing import cast

from mlakern.emulator import fences, tensor, tensor_copy
from mlakern.emulator.descriptors import Kind
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.observer import Fence
from mlakern.emulator.opcodes.bits import truth
from mlakern.emulator.opcodes.memory import address, argument
from mlakern.emulator.opcodes.table import Control, opcode
from mlakern.emulator.program import Imm, Instruction, Memory, Vector, items_of
from mlakern.emulator.tmem import Shape
from mlakern.emulator.values import Value

_GROUPS = "cta_group::1 cta_group::2"
_PLAIN_KINDS = "kind::f16 kind::tf32 kind::f8f6f4 kind::i8"
_SCALED_KINDS = "kind::mxf8f6f4 kind::mxf4 kind::mxf4nvf4"
_SCALES = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4}
_DEFAULT_SCALES = {"mxf8f6f4": 1, "mxf4": 2}
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
    "cta_group::2 exclusive",
    Control.BLOCKING,
    ignored="cta_group::1 sync aligned shared::cta shared",
)
def alloc(e: Emitter, i: Instruction) -> None:
    e.converge()
    where = e.get(address(e, i.operands[0], "shared"), "i")
    columns = e.get(e.read(i.operands[1], 32), "i")
    function = e.constant(tensor.allocate)
    ctas = 2 if i.has("cta_group::2") else 1
    args = f"g, {where}, {columns}, {ctas}, {i.has('exclusive')}, {e.site}"
    e.line(f"if not {function}({args}): return BLOCKED")


@opcode(
    "tcgen05.dealloc",
    "s s",
    "b32",
    "",
    Control.CONVERGED,
    ignored=f"{_GROUPS} sync aligned exclusive",
)
def dealloc(e: Emitter, i: Instruction) -> None:
    e.converge()
    where, columns = (e.get(e.read(operand, 32), "i") for operand in i.operands)
    e.line(f"{e.constant(tensor.deallocate)}(g, {where}, {columns}, {e.site})")


@opcode(
    "tcgen05.relinquish_alloc_permit",
    "",
    "",
    "",
    Control.CONVERGED,
    ignored=f"{_GROUPS} sync aligned",
)
def relinquish(e: Emitter, _: Instruction) -> None:
    e.converge()
    e.line(f"{e.constant(tensor.relinquish)}(g)")


def _multiply(e: Emitter, i: Instruction) -> None:
    """Operands: [d], a, b, instruction descriptor, whether D is an input; before the last perhaps
    masked lanes or [scales of A], [scales of B]; after it perhaps an exponent of D.
    """
    if e.part():
        return
    d, a, b, word, *rest = i.operands
    stationary = i.row.name.endswith(".ws")
    kind = i.choice(f"{_PLAIN_KINDS} {_SCALED_KINDS}".split()).removeprefix("kind::")
    scales = _scales(e, i, kind)
    masked, scale_a, scale_b = "0", "0", "0"
    if scales:
        scale_a, scale_b = (_tensor_address(e, operand) for operand in rest[:2])
        rest = rest[2:]
    elif isinstance(rest[0], Vector):
        words = [e.get(e.read(item, 32), "i") for item in rest[0].items]
        masked = " | ".join(f"{lanes} << {32 * n}" for n, lanes in enumerate(words))
        rest = rest[1:]
    shift = rest[1] if len(rest) > 1 else Imm(0)
    if len(rest) > 2 or not isinstance(shift, Imm) or (stationary and len(rest) > 1):
        raise e.error("operands after the accumulation flag: need at most one literal exponent")
    in_tensor = isinstance(a, Memory)
    ctas = 2 if i.has("cta_group::2") else 1
    form = tensor.MmaForm(cast(Kind, kind), ctas, stationary, in_tensor, scales, shift.value, i)
    arguments = [
        e.constant(form, "mma", i.pc),
        _tensor_address(e, d),
        _tensor_address(e, a) if in_tensor else e.get(e.read(a, 64), "i"),
        e.get(e.read(b, 64), "i"),
        e.get(e.read(word, 32), "i"),
        e.get(truth(e.read(rest[0], 1)), "b"),
    ]
    if scales or masked != "0":
        arguments += [scale_a, scale_b, masked]
    e.line(f"{e.constant(tensor.multiply)}(g, {', '.join(arguments)})")


def _scales(e: Emitter, i: Instruction, kind: str) -> int:
    """Factors of one row of A or B; 0 for a kind that has none."""
    if f"kind::{kind}" not in _SCALED_KINDS.split():
        return 0
    if not i.has("block_scale"):
        raise e.error(f"kind::{kind} needs .block_scale")
    if i.has("block16") or i.has("block32"):
        return 4 if i.has("block16") else _DEFAULT_SCALES.get(kind, 2)
    named = next((_SCALES[m] for m in i.modifiers if m in _SCALES), _DEFAULT_SCALES.get(kind))
    if named is None:
        raise e.error(f"kind::{kind} needs one of {' '.join(f'.{name}' for name in _SCALES)}")
    return named


def _tensor_address(e: Emitter, operand: object) -> str:
    """A tensor-memory address, the same in all lanes."""
    if not isinstance(operand, Memory):
        raise e.error("expected a tensor-memory address in brackets")
    return e.get(address(e, operand, "shared"), "i")


opcode(
    "tcgen05.mma",
    "m s s s s s? s? s?",
    "",
    f"cta_group::2 {_PLAIN_KINDS} {_SCALED_KINDS} block_scale block16 block32 {' '.join(_SCALES)}",
    Control.ALONE,
    ignored=f"cta_group::1 {_COLLECTORS}",
)(_multiply)
opcode(
    "tcgen05.mma.ws",
    "m s s s s s?",
    "",
    _PLAIN_KINDS,
    Control.ALONE,
    ignored=f"cta_group::1 {_COLLECTORS}",
)(_multiply)


_COPIES = {
    "128x256b": tensor_copy.Shape(128, 32),
    "4x256b": tensor_copy.Shape(4, 32),
    "128x128b": tensor_copy.Shape(128, 16),
    "64x128b": tensor_copy.Shape(64, 16),
    "32x128b": tensor_copy.Shape(32, 16),
}
_HALVES = ("warpx2::02_13", "warpx2::01_23")


@opcode(
    "tcgen05.cp",
    "m s",
    "",
    f"cta_group::2 {' '.join(_COPIES)} {' '.join(_HALVES)}",
    Control.ALONE,
    ignored="cta_group::1 warpx4",
)
def cp(e: Emitter, i: Instruction) -> None:
    if e.part():
        return
    name = i.choice(_COPIES)
    alternating = name == "64x128b" and i.choice(_HALVES) == _HALVES[0]
    ctas = 2 if i.has("cta_group::2") else 1
    where, source = _tensor_address(e, i.operands[0]), e.get(e.read(i.operands[1], 64), "i")
    args = f"{e.constant(_COPIES[name])}, {alternating}, {ctas}, {where}, {source}, {e.site}"
    e.line(f"{e.constant(tensor_copy.copy)}(g, {args})")


@opcode(
    "tcgen05.commit",
    "m s?",
    "b64",
    "multicast::cluster",
    Control.ALONE,
    ignored=f"{_GROUPS} mbarrier::arrive::one shared::cluster",
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
    name, count = i.choice(_SHAPES.split()), int(i.choice(_COUNTS.split())[1:])
    return e.constant(Shape(name, count, i.has("pack::16b") or i.has("unpack::16b")))


_ACCESS = f"{_SHAPES} {_COUNTS}"
_ALIGNED = "sync aligned"


@opcode("tcgen05.ld", "d m", "b32", f"{_ACCESS} pack::16b", Control.CONVERGED, ignored=_ALIGNED)
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


@opcode(
    "tcgen05.ld.red",
    "d d m",
    "f32 u32 s32",
    f"{_ACCESS} min max abs NaN",
    Control.CONVERGED,
    ignored=_ALIGNED,
)
def ld_red(e: Emitter, i: Instruction) -> None:
    e.converge()
    where = argument(e, address(e, i.operands[2], "shared"))
    operation = i.choice(("min", "max"))
    block, reduced = e.name(), e.name("u")
    function = e.constant(tensor.load_reduced)
    args = f"{operation!r}, {i.types[0]!r}, {i.has('abs')}, {i.has('NaN')}, {e.site}"
    e.line(f"{block}, {reduced} = {function}(g, {_shape(e, i)}, {where}, {args})")
    _bind_rows(e, i, block)
    e.bind(i.operands[1], Value(32, "u", {"u": reduced}))


@opcode("tcgen05.st", "m s", "b32", f"{_ACCESS} unpack::16b", Control.CONVERGED, ignored=_ALIGNED)
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
    opcode(_name, "", "", "", Control.CONVERGED, ignored=_ALIGNED)(_wait)


def _fence(e: Emitter, i: Instruction) -> None:
    before = i.row.name.endswith("before_thread_sync")
    kind = Fence.BEFORE_THREAD_SYNC if before else Fence.AFTER_THREAD_SYNC
    e.line(f"{e.constant(fences.fence)}(g, {e.constant(kind)})")


for _name in ("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync"):
    opcode(_name)(_fence)
