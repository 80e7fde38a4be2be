"""What generated code knows about a value: in which forms it exists, under which names.

A register is held either once for all lanes of a group (a scalar) or as a numpy array with one
element for each lane. Its *kind*, one letter, says which:

    i  scalar bits, a Python int (unsigned)      u  array of unsigned integers
    g  scalar float32, a numpy scalar            s  array of signed integers
    b  scalar predicate, a Python bool           f  array of floats, as wide as the register
                                                 p  array of bools
    w  a 64-bit register as two 32-bit arrays    P  written in some lanes only (`fragment.Partial`)
    -  never written

Arrays are never changed in place: registers may share them, and views reinterpret them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

SCALAR_KINDS = frozenset("ijghb")

_KIND_OF_TYPE: dict[type, str] = {int: "i", bool: "b", np.float32: "g", tuple: "w"}
_KIND_OF_DTYPE = {"?": "p", "u": "u", "i": "s", "f": "f", "b": "p"}


def kind_of(value: Any) -> str:
    """The kind letter of a register's stored value."""
    kind = _KIND_OF_TYPE.get(type(value))
    if kind is None:
        kind = _KIND_OF_DTYPE[value.dtype.kind] if isinstance(value, np.ndarray) else "P"
    return kind


@dataclass(slots=True, eq=False)
class Value:
    """A value inside generated code.

    width: bits. kind: the form it was computed in. names: form → Python expression. The forms are
    the kinds above, j (scalar signed int) and h (scalar float64). An array form of a scalar value
    is a 0-d array, which broadcasts; `full` forms (written ``U`` for u …) have one element for
    each lane.
    """

    width: int
    kind: str
    names: dict[str, str] = field(default_factory=dict)
    halves: tuple[Value, Value] | None = None

    @property
    def scalar(self) -> bool:
        return self.kind in SCALAR_KINDS


UNSIGNED: dict[int, type[Any]] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED: dict[int, type[Any]] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT: dict[int, type[Any]] = {16: np.float16, 32: np.float32, 64: np.float64}


def dtype_of(form: str, width: int) -> type[Any]:
    """The numpy type of array form u, s, f or p at a width."""
    if form == "p":
        return np.bool_
    return {"u": UNSIGNED, "s": SIGNED, "f": FLOAT}[form][width]


def float_bits(value: float, width: int) -> int:
    """The bit pattern of a float at a width."""
    with np.errstate(all="ignore"):
        return int(np.array(value, FLOAT[width]).view(UNSIGNED[width]))


def to_float32(bits: int) -> np.float32:
    """The float32 with these bits."""
    value: np.float32 = np.array([bits], np.uint32).view(np.float32)[0]
    return value


def from_float32(value: np.float32) -> int:
    """The bits of a float32."""
    return int(value.view(np.uint32))


def join(low: Any, high: Any) -> Any:
    """One 64-bit array from two 32-bit arrays."""
    out = np.empty((max(low.size, high.size), 2), np.uint32)
    out[:, 0] = low
    out[:, 1] = high
    return out.view(np.uint64).reshape(-1)


def low_half(value: Any) -> Any:
    return value.view(np.uint32)[0::2].copy()


def high_half(value: Any) -> Any:
    return value.view(np.uint32)[1::2].copy()


def to_float64(bits: int) -> float:
    """The float64 with these bits."""
    return float(np.array(bits, np.uint64).view(np.float64))


def from_float64(value: float) -> int:
    """The bits of a float64."""
    return int(np.array(value, np.float64).view(np.uint64))
