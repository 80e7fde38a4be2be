"""The launch signature: what each kernel takes, declared once.

The device functions take exactly these parameters in this order, the manifest writes them down
with offsets and sizes, the runtime packs them and the emulator receives the same bytes. The build
compares the PTX of every cubin with this list.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """How a parameter is passed: (name in the manifest, size in bytes, alignment in bytes)."""

    TENSOR_MAP = ("tensor_map", 128, 64)
    POINTER = ("pointer", 8, 8)
    INT32 = ("int32", 4, 4)
    INT64 = ("int64", 8, 8)
    FLOAT32 = ("float32", 4, 4)

    @property
    def label(self) -> str:
        return self.value[0]

    @property
    def size(self) -> int:
        return self.value[1]

    @property
    def align(self) -> int:
        return self.value[2]


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter; `meaning` is what another language needs to fill it."""

    name: str
    kind: Kind
    meaning: str


_OUTPUT = (
    Parameter("out", Kind.POINTER, "out [B, Sq, H, 512], bf16 or e4m3"),
    Parameter("lse", Kind.POINTER, "lse [B, Sq, H] float32, contiguous; null: not wanted"),
    Parameter("partial_out", Kind.POINTER, "workspace: partials [B, Sq, H, splits, 512]"),
    Parameter("partial_lse", Kind.POINTER, "workspace: base-2 LSEs [B, Sq, H, splits] float32"),
)
_SHAPE = (
    Parameter("num_heads", Kind.INT32, "H, 1 to 128"),
    Parameter("seq_len_q", Kind.INT32, "Sq"),
    Parameter("splits", Kind.INT32, "KV splits of each request; 1: no partials, no combine"),
)
_OUTPUT_SCALARS = (
    Parameter("out_stride_batch", Kind.INT64, "elements of out between requests"),
    Parameter("out_stride_token", Kind.INT64, "elements of out between query tokens"),
    Parameter("out_stride_head", Kind.INT64, "elements of out between heads"),
    Parameter("output_scale", Kind.FLOAT32, "factor on the normalised output"),
    Parameter("lse_factor", Kind.FLOAT32, "1: LSE to base 2; ln 2: to base e"),
)

ATTENTION = (
    Parameter("q_latent", Kind.TENSOR_MAP, "queries, latent columns; see tensor_maps"),
    Parameter("q_rope", Kind.TENSOR_MAP, "queries, rope columns; see tensor_maps"),
    Parameter("c_latent", Kind.TENSOR_MAP, "cache, latent columns (keys and values)"),
    Parameter("c_rope", Kind.TENSOR_MAP, "cache, rope columns"),
    Parameter("block_tables", Kind.POINTER, "page numbers [B, >= pages in use] int32"),
    Parameter("seq_lens", Kind.POINTER, "keys held for each request [B] int32"),
    *_OUTPUT,
    *_SHAPE,
    Parameter("fold", Kind.INT32, "query tokens in one folded tile; packed rows: ignored"),
    Parameter("q_row_extent", Kind.INT32, "rows in dimension 1 of the query tensor maps"),
    Parameter("q_box_rows", Kind.INT32, "rows of one query box, a divisor of 64"),
    Parameter("block_table_stride", Kind.INT64, "elements between rows of block_tables"),
    *_OUTPUT_SCALARS,
    Parameter("softmax_scale_log2", Kind.FLOAT32, "softmax_scale * log2(e)"),
    Parameter("rescale_threshold", Kind.FLOAT32, "log2 units the maximum may lag; 0: never lags"),
    Parameter("p_prescale_log2", Kind.FLOAT32, "log2 of the factor on probabilities before e4m3"),
)

COMBINE = (
    Parameter("seq_lens", Kind.POINTER, "keys held for each request [B] int32"),
    *_OUTPUT,
    *_SHAPE,
    *_OUTPUT_SCALARS,
)

SIGNATURES = {"attention": ATTENTION, "combine": COMBINE}


def offsets(parameters: tuple[Parameter, ...]) -> tuple[int, ...]:
    """Byte offset of each parameter in the kernel's parameter buffer (natural alignment)."""
    result = []
    at = 0
    for parameter in parameters:
        at = -(-at // parameter.kind.align) * parameter.kind.align
        result.append(at)
        at += parameter.kind.size
    return tuple(result)
