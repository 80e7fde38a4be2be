"""Checks of launch arguments: each names the argument, what it got and what it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlakern.numerics import LSE_FACTORS, MAX_P_LOG2
from mlakern.runtime.arrays import ArrayView

ROW_ALIGNMENT = 16  # bytes: the unit of tensor maps and of the kernels' stores
# Views that stand for FP8 where an array library has no name for it.
_SAME_BYTES = {"float8_e4m3fn": ("float8_e4m3fn", "uint8", "int8")}


def check_array(
    name: str, view: ArrayView, *, dtype: str, shape: Sequence[int], device: str
) -> None:
    """Type, shape and device of an array that has at least one element."""
    check_dtype(name, view, dtype)
    if view.shape != tuple(shape):
        raise ValueError(f"{name}: got shape {list(view.shape)}, need {list(shape)}")
    check_device(name, view, device)


def check_dtype(name: str, view: ArrayView, dtype: str) -> None:
    accepted = _SAME_BYTES.get(dtype, (dtype,))
    if view.dtype not in accepted:
        raise ValueError(f"{name}: got dtype {view.dtype}, need {' or '.join(accepted)}")


def check_device(name: str, view: ArrayView, device: str) -> None:
    # The CUDA array interface does not say which device: "cuda" is any.
    if view.device != device and not (view.device == "cuda" and device.startswith("cuda:")):
        raise ValueError(f"{name}: got device {view.device}, need {device}, the kernel's device")


def check_rows(name: str, view: ArrayView) -> None:
    """Contiguous rows, each of which starts at a multiple of 16 bytes."""
    if view.strides[-1] != view.item_size:
        raise ValueError(
            f"{name}: got {view.strides[-1]} bytes between columns, need contiguous rows "
            f"({view.item_size})"
        )
    check_alignment(name, view, ROW_ALIGNMENT)
    for dim, (extent, stride) in enumerate(zip(view.shape[:-1], view.strides[:-1], strict=True)):
        if extent > 1 and (stride % ROW_ALIGNMENT or stride < 0):
            raise ValueError(
                f"{name}: got a stride of {stride} bytes in dimension {dim}, need a positive "
                f"multiple of {ROW_ALIGNMENT}"
            )


def check_dense(name: str, view: ArrayView) -> None:
    if not view.is_dense:
        raise ValueError(
            f"{name}: got strides of {list(view.strides)} bytes for shape {list(view.shape)}, "
            "need a contiguous array"
        )
    check_alignment(name, view, view.item_size)


def check_alignment(name: str, view: ArrayView, alignment: int) -> None:
    if view.address % alignment:
        raise ValueError(
            f"{name}: got address {view.address:#x}, need a multiple of {alignment} bytes"
        )


def check_scale(name: str, value: float) -> float:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise ValueError(f"{name}: got {value!r}, need a finite number > 0")
    return float(value)


def check_lag(rescale_threshold: float, p_prescale_log2: float) -> None:
    """Both in log2 units; a probability may reach 2 to their sum, which e4m3 must hold."""
    lag = {"rescale_threshold": rescale_threshold, "p_prescale_log2": p_prescale_log2}
    for name, value in lag.items():
        if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}: got {value!r}, need a finite number >= 0")
    if rescale_threshold + p_prescale_log2 > MAX_P_LOG2:
        raise ValueError(
            f"rescale_threshold: got {rescale_threshold} + p_prescale_log2 {p_prescale_log2}, "
            f"need a sum <= log2(448) = {MAX_P_LOG2:.4f}, or probabilities saturate"
        )


def lse_factor(lse_base: str) -> float:
    """What a base-2 LSE is multiplied by; ValueError for a base other than "2" and "e"."""
    if lse_base not in LSE_FACTORS:
        raise ValueError(f'lse_base: got {lse_base!r}, need "2" or "e"')
    return LSE_FACTORS[lse_base]
