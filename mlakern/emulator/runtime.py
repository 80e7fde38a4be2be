"""Small run-time functions of generated code: undefined registers and convergence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlakern.emulator.errors import Fault
from mlakern.emulator.values import UNSIGNED

if TYPE_CHECKING:
    from mlakern.emulator.group import Group

WARP = 32
FULL_WARP = (1 << WARP) - 1


def defined(registers: Any, number: int, name: str, width: int, single: bool, g: Group) -> Any:
    """A register that not every path has written: its value, or a Fault if lanes lack it.

    With ``Options(poison=True)`` all bits of what was never written are ones.
    """
    poison = g.cta.launch.options.poison
    try:
        value = registers[number]
    except KeyError:
        if not poison:
            raise Fault(f"register {name} is read but was never written") from None
        dtype: Any = np.bool_ if width == 1 else UNSIGNED[max(width, 8)]
        values = np.full(g.width, True if width == 1 else (1 << width) - 1, dtype)
    else:
        values = value.values
        missing = np.flatnonzero(~value.defined)
        if len(missing):
            if not poison:
                raise Fault(f"register {name} is read but was never written", int(missing[0]))
            ones = True if width == 1 else (1 << width) - 1
            values = np.where(value.defined, values, values.dtype.type(ones))
    if not single:
        return values
    return bool(values[0]) if values.dtype == np.bool_ else int(values[0])


def uniform(values: Any) -> Any:
    """The value that all lanes have, as a Python scalar; a Fault if they differ."""
    different = np.flatnonzero(values != values[0])
    if len(different):
        raise Fault(
            "an operand that must be the same in all lanes differs between them", int(different[0])
        )
    return values[0].item()


@dataclass(frozen=True, slots=True)
class ConvergenceWait:
    """Lanes at a warp-wide instruction whose other lanes are elsewhere."""

    missing: int

    def describe(self) -> str:
        return f"waits for {self.missing} other lanes of its warps to reach this instruction"


def converged(g: Group, membermask: Any) -> bool:
    """Whether every live lane that ``membermask`` names is in the group; otherwise it sleeps.

    A full mask (an aligned instruction) names the whole warp.
    """
    mask = int(membermask if type(membermask) is int else membermask[0])
    bundle = g.bundle
    missing = 0
    for warp in g.warps:
        shift = WARP * (warp - bundle.first_warp)
        named = mask & bundle.alive >> shift & FULL_WARP
        missing += bin(named & ~(g.mask >> shift)).count("1")
    if not missing:
        return True
    g.waiting = ConvergenceWait(missing)
    return False
