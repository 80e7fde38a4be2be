"""Float32 arithmetic rounded towards zero, down or up (PTX ISA, .rz, .rm, .rp), exactly.

A result is found to nearest first; where it lies on the wrong side of the exact value, which pairs
of float64 hold without error, its neighbour is the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

MODES = ("rz", "rm", "rp")
_F64 = np.float64


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """a + b as a float64 and its exact error."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def towards(nearest: Any, above: Any, below: Any, mode: str) -> Any:
    """The float32 neighbour in the direction of rounding.

    above, below: whether ``nearest`` is greater or less than the exact result.
    """
    infinity = np.float32(np.inf)
    lower = above & ((mode == "rm") | ((mode == "rz") & (nearest > 0)))
    upper = below & ((mode == "rp") | ((mode == "rz") & (nearest < 0)))
    down = np.where(lower, np.nextafter(nearest, -infinity), nearest)
    return np.where(upper, np.nextafter(nearest, infinity), down)


def round_pair(total: Any, error: Any, mode: str) -> Any:
    """The exact float64 sum total + error as a float32."""
    with np.errstate(all="ignore"):
        nearest = np.asarray(total, _F64).astype(np.float32)
        excess = nearest.astype(_F64) - total
        finite = np.isfinite(total)
    return towards(nearest, finite & (excess > error), finite & (excess < error), mode)


def _sum(mode: str, a: Any, b: Any) -> Any:
    """The float32 sum of float64 arrays."""
    total, error = _two_sum(a, b)
    result = round_pair(total, error, mode)
    if mode == "rm":  # x - x is -0 when rounding down, the sum of positive zeros is not
        positive = ~np.signbit(a) & ~np.signbit(b)
        result = np.where((total == 0) & ~positive, np.float32(-0.0), result)
    return result


def _add(mode: str, a: Any, b: Any) -> Any:
    return _sum(mode, np.asarray(a, _F64), np.asarray(b, _F64))


def _sub(mode: str, a: Any, b: Any) -> Any:
    return _add(mode, a, -b)


def _mul(mode: str, a: Any, b: Any) -> Any:
    return round_pair(np.multiply(a, b, dtype=_F64), _F64(0), mode)


def _fma(mode: str, a: Any, b: Any, c: Any) -> Any:
    return _sum(mode, np.multiply(a, b, dtype=_F64), np.asarray(c, _F64))


def _div(mode: str, a: Any, b: Any) -> Any:
    nearest = np.divide(a, b, dtype=np.float32)
    back = np.multiply(nearest, b, dtype=_F64)  # exact
    exact = np.isfinite(a) & (b != 0) & np.isfinite(b)
    positive = ~np.signbit(b)
    greater, less = back > a, back < a
    above = exact & np.where(positive, greater, less)
    below = exact & np.where(positive, less, greater)
    return towards(nearest, above, below, mode)


def _rcp(mode: str, a: Any) -> Any:
    return _div(mode, np.ones_like(a), a)


def _sqrt(mode: str, a: Any) -> Any:
    nearest = np.sqrt(a)
    square = np.multiply(nearest, nearest, dtype=_F64)  # exact
    finite = np.isfinite(a)
    return towards(nearest, finite & (square > a), finite & (square < a), mode)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "fma": _fma,
    "div": _div,
    "rcp": _rcp,
    "sqrt": _sqrt,
}


@cache
def directed(operation: str, mode: str) -> Callable[..., Any]:
    """The operation (an opcode's name) of float32 arrays, rounded by ``mode``."""
    return partial(_OPERATIONS[operation], mode)
