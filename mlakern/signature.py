"""The launch signature: what each kernel takes, declared once.

The device functions take exactly these parameters in this order, the manifest writes them down
with offsets and sizes, the runtime packs them and the emulator receives the same bytes. The build
compares the PTX of every cubin with this list. A configuration has the parameters that its mask
and its schedule need.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlakern.config import KernelConfig


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


_LENGTHS = (Parameter("seq_lens", Kind.POINTER, "keys held for each request [B] int32"),)
_OUTPUT = (
    Parameter("out", Kind.POINTER, "out [B, Sq, H, 512], bf16 or e4m3"),
    Parameter("lse", Kind.POINTER, "lse [B, Sq, H] float32, contiguous; null: not wanted"),
    Parameter("partial_out", Kind.POINTER, "workspace: partials [slots, tile_rows, 512]"),
    Parameter("partial_lse", Kind.POINTER, "workspace: base-2 LSEs [slots, tile_rows] float32"),
)
_SHAPE = (
    Parameter("batch", Kind.INT32, "B"),
    Parameter("num_heads", Kind.INT32, "H, 1 to 128"),
    Parameter("seq_len_q", Kind.INT32, "Sq"),
    Parameter("query_tiles", Kind.INT32, "query tiles of each request"),
    Parameter("tile_rows", Kind.INT32, "rows of a query tile that exist: fold * H, or packed"),
)
_OUTPUT_SCALARS = (
    Parameter("out_stride_batch", Kind.INT64, "elements of out between requests"),
    Parameter("out_stride_token", Kind.INT64, "elements of out between query tokens"),
    Parameter("out_stride_head", Kind.INT64, "elements of out between heads"),
    Parameter("output_scale", Kind.FLOAT32, "factor on the normalised output"),
    Parameter("lse_factor", Kind.FLOAT32, "1: LSE to base 2; ln 2: to base e"),
)

_SPLITS = (
    Parameter("splits", Kind.INT32, "KV runs of each request, or the most of any request"),
    Parameter("block_split_kvs", Kind.POINTER, "runs of each request [B] int32; null: splits"),
)
_WORK_LIST = (
    Parameter("work_list", Kind.POINTER, "int32 words; see mlakern.work_list"),
    Parameter("clusters", Kind.INT32, "clusters of the attention grid"),
)
# What the division of work rests on, by schedule.
_DIVISION = {"grid": _SPLITS, "persistent": _SPLITS, "work_list": _WORK_LIST}

_WINDOW = (
    Parameter("window_left", Kind.INT32, "keys of history that a token sees"),
    Parameter("window_causal", Kind.INT32, "1: the upper bound is causal; 0: it is seq_lens"),
)
# What a mask's bounds take besides seq_lens and seq_len_q.
_MASKS = {
    "plain": (),
    "causal": (),
    "window": _WINDOW,
    "dcp": (
        Parameter("causal_seqs", Kind.POINTER, "global length of each request [B] int32"),
        Parameter("cp_world", Kind.INT32, "ranks that share a request's keys"),
        Parameter("cp_rank", Kind.INT32, "this one"),
        Parameter("cp_interleave", Kind.INT32, "consecutive keys of one rank"),
    ),
    "visible": (
        Parameter("local_visible_lens", Kind.POINTER, "exclusive visible prefix [B, Sq] int32"),
    ),
}
# The window moves the first key tile, so that every kernel that counts tiles needs it.
_FIRST_TILE = {"window": _WINDOW}


def attention_signature(config: KernelConfig) -> tuple[Parameter, ...]:
    """Parameters of the attention kernel."""
    return (
        Parameter("q_latent", Kind.TENSOR_MAP, "queries, latent columns; see tensor_maps"),
        Parameter("q_rope", Kind.TENSOR_MAP, "queries, rope columns; see tensor_maps"),
        Parameter("c_latent", Kind.TENSOR_MAP, "cache, latent columns (keys and values)"),
        Parameter("c_rope", Kind.TENSOR_MAP, "cache, rope columns"),
        Parameter("block_tables", Kind.POINTER, "page numbers [B, >= pages in use] int32"),
        *_LENGTHS,
        *_OUTPUT,
        *_SHAPE,
        *_DIVISION[config.schedule],
        *_MASKS[config.mask],
        Parameter("q_row_extent", Kind.INT32, "rows in dimension 1 of the query tensor maps"),
        Parameter("q_box_rows", Kind.INT32, "rows of one query box, a divisor of 64"),
        Parameter("block_table_stride", Kind.INT64, "elements between rows of block_tables"),
        *_OUTPUT_SCALARS,
        Parameter("softmax_scale_log2", Kind.FLOAT32, "softmax_scale * log2(e)"),
        Parameter("rescale_threshold", Kind.FLOAT32, "log2 units the maximum may lag; 0: never"),
        Parameter("p_prescale_log2", Kind.FLOAT32, "log2 of a factor on P before it is e4m3"),
    )


def combine_signature(config: KernelConfig) -> tuple[Parameter, ...]:
    """Parameters of the combine kernel."""
    return (
        *_LENGTHS,
        *_OUTPUT,
        *_SHAPE,
        *_DIVISION[config.schedule],
        *_FIRST_TILE.get(config.mask, ()),
        *_OUTPUT_SCALARS,
    )


def planner_signature(config: KernelConfig) -> tuple[Parameter, ...]:
    """Parameters of the kernel that writes the work list."""
    return (
        *_LENGTHS,
        *_WORK_LIST,
        *_SHAPE,
        *_FIRST_TILE.get(config.mask, ()),
    )


def signatures(config: KernelConfig) -> dict[str, tuple[Parameter, ...]]:
    """Every kernel of the configuration's cubin by role, in launch order.

    combine and combine_bands2 do the same, the latter with two CTAs for each output row.
    """
    combine = combine_signature(config)
    roles = {
        "attention": attention_signature(config),
        "combine": combine,
        "combine_bands2": combine,
    }
    if config.schedule == "work_list":
        return {"planner": planner_signature(config), **roles}
    return roles


def offsets(parameters: tuple[Parameter, ...]) -> tuple[int, ...]:
    """Byte offset of each parameter in the kernel's parameter buffer (natural alignment)."""
    result = []
    at = 0
    for parameter in parameters:
        at = -(-at // parameter.kind.align) * parameter.kind.align
        result.append(at)
        at += parameter.kind.size
    return tuple(result)
