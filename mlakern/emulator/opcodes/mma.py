"""Matrix products of a warp with all operands in registers (PTX ISA, "mma", "movmatrix")."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlakern.emulator import fragments, matrix
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.opcodes.table import Control, opcode
from mlakern.emulator.program import Instruction, Operand, items_of
from mlakern.emulator.values import Value

_INTEGER = ("s8", "u8", "s4", "u4")
_KS = {  # K of m16n8 products by the format of A
    "f16": (8, 16),
    "bf16": (8, 16),
    "tf32": (4, 8),
    "e4m3": (16, 32),
    "e5m2": (16, 32),
    "s8": (16, 32),
    "u8": (16, 32),
    "s4": (32, 64),
    "u4": (32, 64),
    "f64": (4, 8, 16),
}
_KS_OF_8_ROWS = {"s8": (16,), "u8": (16,), "s4": (32,), "u4": (32,), "f64": (4,)}
_SHAPES = " ".join([f"m16n8k{k}" for k in (4, 8, 16, 32, 64)] + [f"m8n8k{k}" for k in (4, 16, 32)])


def multiply(
    a: Sequence[Any],
    b: Sequence[Any],
    c: Sequence[Any],
    rows: int,
    formats: tuple[str, str, str, str],
    saturate: bool,
) -> Any:
    """Registers of D = A · B + C, for each warp of the lanes. formats: of D, A, B, C."""
    d_format, a_format, b_format, c_format = formats
    left = fragments.a_matrix(a, rows, a_format)
    right = fragments.b_matrix(b, b_format)
    product = left @ right.swapaxes(1, 2)
    total = fragments.accumulators(c, rows, c_format) + product
    if d_format == "s32":
        total = total.astype(np.int64)
    elif d_format != "f64":
        total = total.astype(np.float32)
    return fragments.registers_of(total, d_format, saturate)


@opcode(
    "mma.sync",
    "d s s s",
    " ".join(["f32", "s32", *_KS]),
    f"{_SHAPES} satfinite",
    Control.CONVERGED,
    ignored="aligned row col kind::f8f6f4",
    typed=4,
)
def mma(e: Emitter, i: Instruction) -> None:
    e.converge()
    formats = _formats(e, i)
    d_format = formats[0]
    rows, _, _ = (int(size) for size in re.findall(r"\d+", i.choice(_SHAPES.split())))
    width = 64 if d_format == "f64" else 32
    outs = items_of(i.operands[0])
    a, b, c = (_listed(e, operand, width) for operand in i.operands[1:])
    saturate = i.has("satfinite")
    args = f"{a}, {b}, {c}, {rows}, {formats}, {saturate}"
    names = [e.name() for _ in outs]
    e.line(f"{', '.join(names)}, = {e.constant(multiply)}({args})")
    form = "f" if d_format == "f32" else "u"
    for out, name in zip(outs, names, strict=True):
        e.bind(out, Value(width, form, {form: name}))


def _listed(e: Emitter, operand: Operand, width: int) -> str:
    return f"[{', '.join(e.get(e.read(item, width), 'U') for item in items_of(operand))}]"


def _formats(e: Emitter, i: Instruction) -> tuple[str, str, str, str]:
    if len(i.types) != 4:
        raise e.error("need the types of D, A, B and C")
    d, a, b, c = i.types
    rows, k = re.findall(r"m(\d+)n8k(\d+)", i.choice(_SHAPES.split()))[0]
    if int(k) not in (_KS if rows == "16" else _KS_OF_8_ROWS).get(a, ()):
        raise e.error(f"no product of shape m{rows}n8k{k} of type {a}")
    floats = ("f32", "f16") if a in ("f16", "e4m3", "e5m2") else ("f32",)
    legal = ("s32",) if a in _INTEGER else ("f64",) if a == "f64" else floats
    same = fragments.ELEMENT_BITS[a] == fragments.ELEMENT_BITS[b]
    mixed = a == b or (same and (a in _INTEGER or a in ("e4m3", "e5m2")))
    if d not in legal or c not in legal or not mixed:
        raise e.error(f"no product of types {' '.join(i.types)}")
    if i.has("satfinite") and a not in _INTEGER:
        raise e.error(".satfinite is for integers")
    return d, a, b, c


@opcode("movmatrix", "d s", "b16", "", Control.CONVERGED, ignored="sync aligned m8n8 trans")
def movmatrix(e: Emitter, i: Instruction) -> None:
    e.converge()
    source = e.get(e.read(i.operands[1], 32), "U")
    e.set(i.operands[0], "u", f"{e.constant(matrix.transpose)}({source})", 32)
