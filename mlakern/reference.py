"""What a decode must compute, in numpy: `exact` in float64 and `modelled` as the kernels round.

Both take an :class:`Attention`: dequantised values, keys already gathered from their pages, and
the visible range of each query token. Results are float arrays; outputs of `modelled` are rounded
to the output type and both LSEs are to base 2 unless `lse_base` says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mlakern.config import KEY_TILE, LATENT_DIM
from mlakern.division import Division, ceil_div
from mlakern.numerics import DEFAULT_RESCALE_THRESHOLD, E4M3_MAX, LSE_FACTORS

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

_NUMPY_DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


@dataclass(frozen=True)
class Attention:
    """The mathematics of one decode call.

    query: [B, Sq, H, 576] float32. keys: for each request [K, 576] float32; the first 512
    columns are the values. visible: [B, Sq, 2] integers, the range [lower, upper) of keys that
    each query token sees, within [0, K].
    """

    query: Float32
    keys: Sequence[Float32]
    visible: NDArray[np.int64]
    softmax_scale: float
    output_scale: float = 1.0
    lse_base: str = "2"


@dataclass(frozen=True)
class Result:
    """out [B, Sq, H, 512] and lse [B, Sq, H], as float64 or float32 numbers."""

    out: NDArray[Any]
    lse: NDArray[Any]


@dataclass(frozen=True)
class Numerics:
    """How a kernel rounds: the run-time numbers and types that `modelled` follows.

    rescale_threshold, p_prescale_log2: log2 units.
    """

    rescale_threshold: float = DEFAULT_RESCALE_THRESHOLD
    p_prescale_log2: float = 0.0
    partial_dtype: str = "float32"
    out_dtype: str = "bfloat16"


def round_to(values: NDArray[Any], dtype: str) -> Float32:
    """The values rounded to nearest even in `dtype`; e4m3 saturates."""
    if dtype == "float8_e4m3fn":
        values = np.clip(values, -E4M3_MAX, E4M3_MAX)
    rounded: Float32 = values.astype(_NUMPY_DTYPES[dtype]).astype(np.float32)
    return rounded


def exact(attention: Attention) -> Result:
    """Float64 on the given values: no tiles, no rounding. A row without keys: 0 and -inf."""
    batch, tokens, heads, _ = attention.query.shape
    out = np.zeros((batch, tokens, heads, LATENT_DIM))
    lse = np.full((batch, tokens, heads), -np.inf)
    for b, keys in enumerate(attention.keys):
        for t in range(tokens):
            lower, upper = attention.visible[b, t]
            if lower >= upper:
                continue
            seen = keys[lower:upper].astype(np.float64)
            scores = attention.query[b, t].astype(np.float64) @ seen.T
            scores *= attention.softmax_scale * math.log2(math.e)
            top = scores.max(axis=1, keepdims=True)
            weights = np.exp2(scores - top)
            total = weights.sum(axis=1, keepdims=True)
            out[b, t] = weights @ seen[:, :LATENT_DIM] / total * attention.output_scale
            lse[b, t] = (np.log2(total) + top)[:, 0]
    return Result(out, lse * LSE_FACTORS[attention.lse_base])


def modelled(attention: Attention, numerics: Numerics, division: Division | None = None) -> Result:
    """Float32 in the kernels' order: key tiles, lagging maximum, P in e4m3, rounded partials.

    division: the runs of each request; None: one run over all keys.
    """
    batch, tokens, heads, _ = attention.query.shape
    if division is None:
        division = _undivided(attention)
    out = np.empty((batch, tokens * heads, LATENT_DIM), np.float32)
    lse = np.empty((batch, tokens * heads), np.float32)
    for b, keys in enumerate(attention.keys):
        rows = _Rows.of_request(attention, b)
        for query_tile, runs in enumerate(division.runs[b]):
            first = query_tile * division.tile_rows
            at = slice(first, first + division.tile_rows)
            merged = _merged_runs(rows.part(at), keys, runs, numerics)
            out[b, at], lse[b, at] = merged.out, merged.lse
    scaled = round_to(out * np.float32(attention.output_scale), numerics.out_dtype)
    return Result(
        scaled.reshape(batch, tokens, heads, LATENT_DIM),
        lse.reshape(batch, tokens, heads) * np.float32(LSE_FACTORS[attention.lse_base]),
    )


def merge(outs: Sequence[NDArray[Any]], lses: Sequence[NDArray[Any]]) -> Result:
    """One result from normalised partial results over disjoint keys.

    outs: [..., 512] each; lses: [...] each, to base 2, -inf where a partial saw no key: its out
    is then ignored, whatever it holds.
    """
    stacked = np.stack(lses)
    top = stacked.max(axis=0)
    weights = np.exp2(stacked - _finite(top))
    total = weights.sum(axis=0)
    lse = _log2(total) + _finite(top)
    weights = weights / np.where(total > 0, total, 1)
    seen = [np.where(w[..., None] > 0, out, 0) for out, w in zip(outs, weights, strict=True)]
    out = sum(w[..., None] * o for o, w in zip(seen, weights, strict=True))
    return Result(np.asarray(out), lse)


@dataclass(frozen=True)
class _Rows:
    """The rows of one request: row = token * H + head."""

    query: Float32  # [rows, 576]
    lower: NDArray[np.int64]  # [rows, 1]
    upper: NDArray[np.int64]  # [rows, 1]
    scale_log2: np.float32

    @classmethod
    def of_request(cls, attention: Attention, request: int) -> _Rows:
        _, tokens, heads, columns = attention.query.shape
        bounds = np.repeat(attention.visible[request], heads, axis=0)
        return cls(
            attention.query[request].reshape(tokens * heads, columns),
            bounds[:, :1],
            bounds[:, 1:],
            np.float32(attention.softmax_scale * math.log2(math.e)),
        )

    def part(self, rows: slice) -> _Rows:
        return _Rows(self.query[rows], self.lower[rows], self.upper[rows], self.scale_log2)


def _undivided(attention: Attention) -> Division:
    _, tokens, heads, _ = attention.query.shape
    tiles = [range(ceil_div(len(keys), KEY_TILE)) for keys in attention.keys]
    return Division.even(tiles, [1] * len(tiles), query_tiles=1, tile_rows=tokens * heads)


def _merged_runs(rows: _Rows, keys: Float32, runs: Sequence[range], numerics: Numerics) -> Result:
    """One run is the result as it is; several are rounded as partials and merged."""
    if len(runs) <= 1:
        return _run(rows, keys, runs[0] if runs else range(0), numerics)
    partials = [_run(rows, keys, tiles, numerics) for tiles in runs]
    rounded = [round_to(p.out, numerics.partial_dtype) for p in partials]
    return merge(rounded, [p.lse for p in partials])


def _run(rows: _Rows, keys: Float32, tiles: range, numerics: Numerics) -> Result:
    """The normalised result of one KV run, before output_scale; 0 and -inf without keys."""
    count = len(rows.query)
    prescale = np.float32(numerics.p_prescale_log2)
    threshold = np.float32(numerics.rescale_threshold)
    acc = np.zeros((count, LATENT_DIM), np.float32)
    total = np.zeros((count, 1), np.float32)
    top = np.full((count, 1), -np.inf, np.float32)
    for tile in tiles:
        part = keys[tile * KEY_TILE : (tile + 1) * KEY_TILE]
        positions = np.arange(tile * KEY_TILE, tile * KEY_TILE + len(part))
        seen = (positions >= rows.lower) & (positions < rows.upper)
        scores = np.where(seen, rows.query @ part.T, -np.inf).astype(np.float32)
        tile_top = scores.max(axis=1, keepdims=True)
        # A row that has seen nothing has top = -inf: its first visible maximum is always taken.
        raised = (tile_top - _finite(top)) * rows.scale_log2 > threshold
        new_top = np.where((top == -np.inf) | raised, tile_top, top)
        factor = np.exp2((_finite(top) - _finite(new_top)) * rows.scale_log2)
        factor = np.where(top == -np.inf, np.float32(0), factor)
        weights = np.exp2((scores - _finite(new_top)) * rows.scale_log2 + prescale)
        total = total * factor + weights.sum(axis=1, keepdims=True, dtype=np.float32)
        acc = acc * factor + round_to(weights, "float8_e4m3fn") @ part[:, :LATENT_DIM]
        top = new_top
    out = acc / np.where(total > 0, total, np.float32(1))
    lse = _log2(total) - prescale + _finite(top) * rows.scale_log2
    return Result(out, lse[:, 0])


def _finite(values: NDArray[Any]) -> NDArray[Any]:
    """The values, with 0 in the place of -inf (nothing seen yet)."""
    return np.where(values == -np.inf, values.dtype.type(0), values)


def _log2(values: NDArray[Any]) -> NDArray[Any]:
    """log2, -inf at 0 without a warning."""
    logs = np.full_like(values, -np.inf)
    np.log2(values, out=logs, where=values > 0)
    return logs
