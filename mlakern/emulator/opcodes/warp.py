"""Warp-wide instructions: shuffles, votes, elections, reductions (PTX ISA, "shfl.sync",
"vote.sync", "match.sync", "redux.sync", "elect.sync", "activemask", "bar.warp.sync").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlakern.emulator import lanes
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.opcodes.bits import truth
from mlakern.emulator.opcodes.packed import bind_lanes
from mlakern.emulator.opcodes.table import Control, opcode
from mlakern.emulator.program import Both, Imm, Instruction, Operand
from mlakern.emulator.values import Value


def _mask(e: Emitter, operand: Operand) -> Value:
    mask = e.read(operand, 32)
    e.converge(mask)
    return mask


@opcode("shfl.sync", "d s s s s", "b32", "idx up down bfly", Control.CONVERGED)
def shfl(e: Emitter, i: Instruction) -> None:
    _mask(e, i.operands[4])
    value, lane, clamp = (e.read(operand, 32) for operand in i.operands[1:4])
    out = i.operands[0]
    data, valid = (out.first, out.second) if isinstance(out, Both) else (out, None)
    mode = i.choice(("idx", "up", "down", "bfly"))
    fixed = isinstance(i.operands[2], Imm) and isinstance(i.operands[3], Imm)
    if value.scalar and valid is None:
        e.bind(data, value)  # the same in every lane of the group
        return
    if e.warp and mode == "idx" and fixed and valid is None and e.get(clamp, "i") == "31":
        name = f"int({e.get(value, 'u')}[{int(e.get(lane, 'i')) & 31}])"
        e.set(data, "i", name, 32)
        return
    function = e.constant(lanes.shuffle)
    args = f"g, {e.get(value, 'U')}, {mode!r}, {e.get(lane, 'u')}, {e.get(clamp, 'u')}"
    found, ok = e.name("u"), e.name("p")
    e.line(f"{found}, {ok} = {function}({args})")
    bind_lanes(e, data, "u", found, 32)
    if valid is not None:
        bind_lanes(e, valid, "p", ok, 1)


def _per_warp(
    e: Emitter, out: Operand, function: Callable[..., Any], form: str, width: int, *arguments: str
) -> None:
    """A result that is the same in every lane of a warp: ``function`` gives one for each warp."""
    name = e.constant(function)
    code = f"{name}(g, {', '.join(arguments)})" if arguments else f"{name}(g)"
    if e.warp or e.single:
        scalar = "b" if form == "p" else "i"
        convert = "bool" if form == "p" else "int"
        e.set(out, scalar, f"{convert}({code}[0])", width)
    else:
        spread = e.constant(lanes.spread)
        e.set(out, form, f"{spread}(g, {code})", width)


@opcode("vote.sync", "d s s", "b32 pred", "all any uni ballot", Control.CONVERGED)
def vote(e: Emitter, i: Instruction) -> None:
    _mask(e, i.operands[2])
    source = truth(e.read(i.operands[1], 1))
    mode = i.choice(("all", "any", "uni", "ballot"))
    if source.scalar and mode != "ballot":
        if mode == "uni":
            e.bind(i.operands[0], Value(1, "b", {"b": "True"}))
        else:
            e.bind(i.operands[0], source)
        return
    function = lanes.ballot if mode == "ballot" else lanes.VOTES[mode]
    form, width = ("u", 32) if mode == "ballot" else ("p", 1)
    _per_warp(e, i.operands[0], function, form, width, e.get(source, "P"))


@opcode(
    "redux.sync", "d s s", "b32 u32 s32 f32", "add min max and or xor abs NaN", Control.CONVERGED
)
def redux(e: Emitter, i: Instruction) -> None:
    _mask(e, i.operands[2])
    kind = i.types[0]
    form = {"s": "s", "f": "f"}.get(kind[0], "u")
    source = e.read(i.operands[1], 32)
    name = i.choice(lanes.REDUCTIONS)
    if kind == "f32" and name not in ("min", "max"):
        raise e.error("redux of .f32 is .min or .max")
    if kind != "f32" and (i.has("abs") or i.has("NaN")):
        raise e.error(".abs and .NaN need .f32")
    args = f"{e.get(source, form.upper())}, {name!r}, {i.has('abs')}, {i.has('NaN')}"
    _per_warp(e, i.operands[0], lanes.reduce, "u", 32, args)


@opcode("match.any.sync", "d s s", "b32 b64", "", Control.CONVERGED)
def match_any(e: Emitter, i: Instruction) -> None:
    _mask(e, i.operands[2])
    source = e.read(i.operands[1], int(i.types[0][1:]))
    name = e.temporary(f"{e.constant(lanes.match_any)}(g, {e.get(source, 'U')})")
    bind_lanes(e, i.operands[0], "u", name, 32)


@opcode("match.all.sync", "d s s", "b32 b64", "", Control.CONVERGED)
def match_all(e: Emitter, i: Instruction) -> None:
    _mask(e, i.operands[2])
    source = e.read(i.operands[1], int(i.types[0][1:]))
    name = e.temporary(f"{e.constant(lanes.match_all)}(g, {e.get(source, 'U')})")
    out = i.operands[0]
    data, valid = (out.first, out.second) if isinstance(out, Both) else (out, None)
    bind_lanes(e, data, "u", name, 32)
    if valid is not None:
        bind_lanes(e, valid, "p", e.temporary(f"{name} != 0"), 1)


@opcode("elect.sync", "d s", "", "", Control.CONVERGED)
def elect(e: Emitter, i: Instruction) -> None:
    """The lowest lane of each warp is elected."""
    _mask(e, i.operands[1])
    out = i.operands[0]
    if not isinstance(out, Both):
        raise e.error("expected a destination of the form d|p")
    name = e.temporary(f"{e.constant(lanes.elect)}(g)")
    bind_lanes(e, out.second, "p", name, 1)
    _per_warp(e, out.first, lanes.leaders, "u", 32)


@opcode("activemask", "d", "b32")
def activemask(e: Emitter, i: Instruction) -> None:
    _per_warp(e, i.operands[0], lanes.active, "u", 32)


@opcode("bar.warp.sync", "s", "", "", Control.CONVERGED)
def bar_warp_sync(e: Emitter, i: Instruction) -> None:
    """Convergence is all there is to it: lanes of a group run in step."""
    _mask(e, i.operands[0])
