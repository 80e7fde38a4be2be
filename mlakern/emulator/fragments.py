"""Matrices that lie in the registers of a warp (PTX ISA, "Matrix Fragments for mma", "Register
Fragments and Shared Memory Matrix Layouts" of wgmma).

Thread t of a warp is g = t / 4, q = t % 4; a register holds c elements along K side by side. With
h = 0, 1 for the upper and the lower eight rows, e the element in its register or its pair:

    A [rows, k]     register h + H·b of H = rows / 8    row 8 h + g, k = (4 b + q) c + e
    B [k, 8]        register b                          column g, k = (4 b + q) c + e
    D [rows, n]     register 2 (h + H·j) + e            row 8 h + g, column 8 j + 2 q + e

An f16 D has the pairs (e = 0, 1) in one register. Elements of 64 bits have registers of 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from mlakern.emulator import formats, operands

Matrix: TypeAlias = Any  # a numpy array

ELEMENT_BITS = {
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "e4m3": 8,
    "e5m2": 8,
    "s8": 8,
    "u8": 8,
    "s4": 4,
    "u4": 4,
    "f64": 64,
}


def elements(registers: Sequence[Matrix], format_: str) -> Matrix:
    """The values in registers of whole warps: [registers, warps, g, q, elements]."""
    words = np.stack(registers)
    shape = (len(registers), -1, 8, 4)
    if format_ == "f64":
        return words.view(np.float64).reshape(*shape, 1)
    raw = np.ascontiguousarray(words.view(np.uint32)).view(np.uint8)
    if format_ in ("s4", "u4"):
        nibbles = np.stack((raw & np.uint8(15), raw >> np.uint8(4)), axis=-1).astype(np.float32)
        if format_ == "s4":
            nibbles -= 16 * (nibbles > 7)
        return nibbles.reshape(*shape, 8)
    return operands.widen(raw, format_).reshape(*shape, 32 // ELEMENT_BITS[format_])


def a_matrix(registers: Sequence[Matrix], rows: int, format_: str) -> Matrix:
    """[warps, rows, k]."""
    values = elements(registers, format_)
    _, warps, g, q, c = values.shape
    parts = values.reshape(-1, rows // 8, warps, g, q, c)  # b h w g q e
    return parts.transpose(2, 1, 3, 0, 4, 5).reshape(warps, rows, -1)


def b_matrix(registers: Sequence[Matrix], format_: str) -> Matrix:
    """[warps, 8 columns, k]."""
    values = elements(registers, format_)  # b w g q e
    warps = values.shape[1]
    return values.transpose(1, 2, 0, 3, 4).reshape(warps, 8, -1)


def accumulators(registers: Sequence[Matrix], rows: int, format_: str) -> Matrix:
    """C or D as [warps, rows, n], of float32, float64 or, for s32, int64."""
    words = np.stack(registers)
    halves = rows // 8
    if format_ == "f16":
        pairs = formats.f16_to_f32(np.ascontiguousarray(words.view(np.uint32)).view(np.uint16))
        parts = pairs.reshape(-1, halves, words.shape[1] // 32, 8, 4, 2)  # j h w g q e
        ordered = parts.transpose(2, 1, 3, 0, 4, 5)
    else:
        kind: Any = {"s32": np.int32, "f64": np.float64}.get(format_, np.float32)
        parts = words.view(kind).reshape(-1, halves, 2, words.shape[1] // 32, 8, 4)  # j h e w g q
        ordered = parts.transpose(3, 1, 4, 0, 5, 2)
    warps = ordered.shape[0]
    values = ordered.reshape(warps, rows, -1)
    return values.astype(np.int64) if format_ == "s32" else values


def registers_of(values: Matrix, format_: str, saturate: bool = False) -> Matrix:
    """The inverse of `accumulators`: [registers, lanes], of unsigned words or float32."""
    warps, rows, n = values.shape
    parts = values.reshape(warps, rows // 8, 8, n // 8, 4, 2)  # w h g j q e
    if format_ == "f16":
        codes = formats.f32_to_f16(values).reshape(parts.shape)
        packed = np.ascontiguousarray(codes.transpose(3, 1, 0, 2, 4, 5)).view(np.uint32)
        return packed.reshape(-1, 32 * warps)
    ordered = parts.transpose(3, 1, 5, 0, 2, 4).reshape(-1, 32 * warps)  # j h e, w g q
    if format_ == "s32":
        clamped = ordered.clip(-(1 << 31), (1 << 31) - 1) if saturate else ordered
        return clamped.astype(np.uint32)
    if format_ == "f64":
        return np.ascontiguousarray(ordered).view(np.uint64)
    return np.ascontiguousarray(ordered, np.float32)
