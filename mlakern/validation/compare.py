"""Measured errors against both references, and the bounds they must keep."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mlakern.reference import Result

Floats = NDArray[np.float64]

# Bounds on what a kernel may differ by. Each measured error is at most its bound.
BOUNDS = {
    # Against the model of the same arithmetic: relative L2 over the whole output.
    "kernel_vs_modelled_out_bf16": 4e-3,
    # The share of values more than one e4m3 step away, and the largest distance in steps among
    # values above 2^-4 of their row's maximum.
    "kernel_vs_modelled_out_e4m3_beyond_one_step": 1e-3,
    "kernel_vs_modelled_out_e4m3_steps": 2,
    # Against the float64 definition: relative L2 over the whole output and in the worst row.
    "kernel_vs_exact_out_bf16": 4e-2,
    "kernel_vs_exact_out_bf16_row": 1e-1,
    "lse_vs_exact": 2e-3,
    # Elements that are NaN or infinite without reason, and bytes changed between rows of out.
    "poisoned_memory": 0,
    "written_outside_rows": 0,
}


@dataclass(frozen=True)
class Measured:
    """One error and its bound, under the name of the bound."""

    name: str
    error: float

    @property
    def bound(self) -> float:
        return BOUNDS[self.name]

    @property
    def passed(self) -> bool:
        # A NaN compares false and fails.
        return self.error <= self.bound


@dataclass(frozen=True)
class Output:
    """What a kernel left: out [B, Sq, H, 512] in its own type, lse [B, Sq, H] or None.

    stray_bytes: bytes between the rows of out that were changed. workspace: what is left in it.
    """

    out: NDArray[Any]
    out_dtype: str
    lse: NDArray[np.float32] | None
    stray_bytes: int = 0
    workspace: NDArray[np.uint8] | None = None


def compare(output: Output, exact: Result, modelled: Result) -> tuple[Measured, ...]:
    """Every error that has a bound for this output type."""
    if output.out_dtype == "float8_e4m3fn":
        codes = output.out.view(np.uint8)
        out = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        measured = _e4m3_errors(codes, modelled.out)
    else:
        out = output.out.astype(np.float64)
        measured = _bf16_errors(out, exact.out, modelled.out)
    bad = int(np.count_nonzero(~np.isfinite(out)))
    if output.lse is not None:
        lse = output.lse.astype(np.float64)
        bad += int(np.count_nonzero(~np.isfinite(lse) & ~((lse == -np.inf) & (exact.lse == lse))))
        measured.append(Measured("lse_vs_exact", _lse_error(lse, exact.lse)))
    measured.append(Measured("poisoned_memory", bad))
    measured.append(Measured("written_outside_rows", output.stray_bytes))
    return tuple(measured)


def relative_l2(got: Floats, want: Floats) -> float:
    """Norm of the difference over the norm of `want`; 0 / 0 is 0, anything else / 0 infinite."""
    difference, norm = float(np.linalg.norm(got - want)), float(np.linalg.norm(want))
    if norm == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / norm


def _bf16_errors(out: Floats, exact: Floats, modelled: NDArray[Any]) -> list[Measured]:
    rows = zip(out.reshape(-1, out.shape[-1]), exact.reshape(-1, out.shape[-1]), strict=True)
    # numpy's maximum keeps a NaN, Python's may drop it.
    worst = float(np.max([relative_l2(got, want) for got, want in rows]))
    model_error = relative_l2(out, modelled.astype(np.float64))
    return [
        Measured("kernel_vs_modelled_out_bf16", model_error),
        Measured("kernel_vs_exact_out_bf16", relative_l2(out, exact)),
        Measured("kernel_vs_exact_out_bf16_row", worst),
    ]


def _e4m3_errors(codes: NDArray[np.uint8], modelled: NDArray[Any]) -> list[Measured]:
    wanted = modelled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    steps = np.abs(_ladder(codes) - _ladder(wanted))
    magnitude = np.abs(modelled)
    large = magnitude > magnitude.max(axis=-1, keepdims=True) / 16
    return [
        Measured("kernel_vs_modelled_out_e4m3_beyond_one_step", float(np.mean(steps > 1))),
        Measured("kernel_vs_modelled_out_e4m3_steps", float(np.max(steps, where=large, initial=0))),
    ]


def _ladder(codes: NDArray[np.uint8]) -> NDArray[np.int16]:
    """e4m3 codes as integers in the order of their values, both zeros at 0."""
    magnitude = (codes & 0x7F).astype(np.int16)
    return np.where(codes & 0x80, -magnitude, magnitude)


def _lse_error(got: Floats, want: Floats) -> float:
    """Largest absolute difference; infinite where only one of the two is -inf."""
    both_empty = (got == -np.inf) & (want == -np.inf)
    with np.errstate(invalid="ignore"):
        difference = np.where(both_empty, 0.0, np.abs(got - want))
    return float(np.max(difference, initial=0.0))
