"""Seeded decode problems whose memory is poisoned wherever a kernel must not look.

Every byte of the cache outside the live keys is an e4m3 NaN, unused entries of the page table are
-1 or 2147480000, pages are shuffled, and out, lse and workspace start as NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mlakern.config import HEAD_DIM, LATENT_DIM, ROPE_DIM, KernelConfig
from mlakern.division import Division, ceil_div
from mlakern.masks import Mask
from mlakern.planning import Plan
from mlakern.reference import Attention
from mlakern.runtime.arrays import ITEM_SIZES, dense_strides
from mlakern.validation.buffers import Buffer, Field
from mlakern.validation.spec import VALUES, ProblemSpec

Bytes = NDArray[np.uint8]

NAN_BYTES = np.array([0x7F, 0xFF], np.uint8)  # both NaNs of e4m3
DEAD_PAGES = np.array([-1, 2147480000], np.int32)
SPARE_PAGES = 3


@dataclass(frozen=True)
class Problem:
    """Buffers, the tensors in them, and the mathematics they stand for.

    fields: by the names of mlakern.runtime.tensors.Tensors. division: the runs of the keys.
    """

    spec: ProblemSpec
    plan: Plan
    mask: Mask
    fields: dict[str, Field]
    attention: Attention
    division: Division

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return tuple({id(f.buffer): f.buffer for f in self.fields.values()}.values())


def make_problem(spec: ProblemSpec, config: KernelConfig, plan: Plan) -> Problem:
    """The problem of `spec` in the page size, types and workspace of `config` and `plan`.

    Raises ValueError for unknown values or layouts that the configuration does not take.
    """
    if spec.values not in VALUES:
        raise ValueError(f"values: got {spec.values!r}, need one of {', '.join(VALUES)}")
    rng = np.random.default_rng(spec.seed)
    mask = spec.mask(config.mask)
    query = _query_values(spec, rng)
    keys = [_held(mask, _key_values(spec, length, rng)) for length in spec.seq_lens]
    lengths = [len(k) for k in keys]
    pages = _assign_pages(lengths, config.page_size, rng)
    fields = {
        **_query_fields(spec, query, rng),
        **_cache_fields(spec, config.page_size, keys, pages, rng),
        "block_tables": _block_tables(spec, pages),
        "seq_lens": _integers("seq_lens", lengths),
        **_mask_fields(spec, mask),
        **_division_fields(spec, plan, lengths),
        **_output_fields(spec, config, plan),
    }
    attention = Attention(
        query=_dequantise(query),
        keys=[_dequantise(k) for k in keys],
        visible=visible_ranges(spec, mask, lengths),
        softmax_scale=spec.scalars.softmax_scale,
        output_scale=spec.scalars.output_scale,
        lse_base=spec.scalars.lse_base,
    )
    division = plan.division(lengths, spec.block_split_kvs)
    return Problem(spec, plan, mask, fields, attention, division)


def visible_ranges(spec: ProblemSpec, mask: Mask, lengths: Sequence[int]) -> NDArray[np.int64]:
    """[B, Sq, 2]: the range of keys that each query token sees; lengths: seq_lens of the call."""
    visible = spec.visible() if mask.kind == "visible" else None
    ranges = [
        [
            mask.bounds(
                length,
                spec.seq_len_q,
                t,
                global_length=spec.seq_lens[b],
                visible_len=visible[b][t] if visible else None,
            )
            for t in range(spec.seq_len_q)
        ]
        for b, length in enumerate(lengths)
    ]
    return np.array(ranges, np.int64)


def _held(mask: Mask, keys: Bytes) -> Bytes:
    """The keys that lie on this rank."""
    if mask.kind != "dcp":
        return keys
    positions = np.arange(len(keys))
    held: Bytes = keys[positions // mask.cp_interleave % mask.cp_world == mask.cp_rank]
    return held


def _integers(name: str, values: Any) -> Field:
    return Field.of_array(name, np.array(values, np.int32), "int32")


def _mask_fields(spec: ProblemSpec, mask: Mask) -> dict[str, Field]:
    if mask.kind == "dcp":
        return {"causal_seqs": _integers("causal_seqs", spec.seq_lens)}
    if mask.kind == "visible":
        return {"local_visible_lens": _integers("local_visible_lens", spec.visible())}
    return {}


def _division_fields(spec: ProblemSpec, plan: Plan, lengths: Sequence[int]) -> dict[str, Field]:
    fields = {}
    if spec.host_work_list and plan.config.schedule != "work_list":
        raise ValueError(
            f"host_work_list: got a kernel of schedule {plan.config.schedule}, need work_list"
        )
    if spec.block_split_kvs is not None:
        if len(spec.block_split_kvs) != plan.batch:
            raise ValueError(
                f"block_split_kvs: got {len(spec.block_split_kvs)} numbers, need {plan.batch}"
            )
        fields["block_split_kvs"] = _integers("block_split_kvs", spec.block_split_kvs)
    if spec.host_work_list:
        fields["work_list"] = _integers("work_list", plan.work_list(lengths))
    return fields


def _quantise(values: NDArray[Any]) -> Bytes:
    return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _dequantise(codes: Bytes) -> NDArray[np.float32]:
    values: NDArray[np.float32] = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values


def _query_values(spec: ProblemSpec, rng: np.random.Generator) -> Bytes:
    shape = (len(spec.seq_lens), spec.seq_len_q, spec.num_heads, HEAD_DIM)
    values = rng.standard_normal(shape)
    if spec.values == "flat":
        values[:] = 0
    if spec.values == "ramp":
        values[..., -1] = 4
    return _quantise(values)


def _key_values(spec: ProblemSpec, length: int, rng: np.random.Generator) -> Bytes:
    values = rng.standard_normal((length, HEAD_DIM))
    if spec.values == "flat":
        values[:, :LATENT_DIM] += 1
    if spec.values == "ramp":
        # With a query of 4 and the model's scale: three log2 units for each key tile.
        values[:, -1] = np.minimum(7 * (np.arange(length) // 128), 240)
    return _quantise(values)


def _assign_pages(
    lengths: Sequence[int], page_size: int, rng: np.random.Generator
) -> list[NDArray[np.int32]]:
    """For each request the pages of its keys, shuffled over a pool with unused pages."""
    counts = [ceil_div(length, page_size) for length in lengths]
    shuffled = rng.permutation(sum(counts) + SPARE_PAGES).astype(np.int32)
    ends = np.cumsum(counts)
    return [shuffled[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _poison(size: int, rng: np.random.Generator) -> Bytes:
    return NAN_BYTES[rng.integers(0, 2, size)]


def _query_fields(spec: ProblemSpec, query: Bytes, rng: np.random.Generator) -> dict[str, Field]:
    if spec.layout.joined:
        joined = _padded_query("query", query, spec.layout.token_padding, rng)
        return {
            "q_latent": joined.columns(0, LATENT_DIM),
            "q_rope": joined.columns(LATENT_DIM, HEAD_DIM),
        }
    padding = spec.layout.token_padding
    return {
        "q_latent": _padded_query("q_latent", query[..., :LATENT_DIM], padding, rng),
        "q_rope": _padded_query("q_rope", query[..., LATENT_DIM:], padding, rng),
    }


def _padded_query(name: str, values: Bytes, padding: int, rng: np.random.Generator) -> Field:
    batch, tokens, heads, columns = values.shape
    token_stride = heads * columns + padding
    strides = (tokens * token_stride, token_stride, columns, 1)
    image = _poison(batch * tokens * token_stride, rng)
    field = Field(Buffer(name, image), 0, values.shape, strides, "float8_e4m3fn")
    field.array()[...] = values
    return field


def _cache_fields(
    spec: ProblemSpec,
    page_size: int,
    keys: list[Bytes],
    pages: list[NDArray[np.int32]],
    rng: np.random.Generator,
) -> dict[str, Field]:
    count = sum(len(p) for p in pages) + SPARE_PAGES
    padding = spec.layout.page_padding
    if spec.layout.joined:
        pool = _empty_pool("kv_cache", count, page_size, HEAD_DIM, padding, rng)
        _fill_pool(pool.array(), page_size, keys, pages)
        return {
            "c_latent": pool.columns(0, LATENT_DIM),
            "c_rope": pool.columns(LATENT_DIM, HEAD_DIM),
        }
    latent = _empty_pool("c_latent", count, page_size, LATENT_DIM, padding, rng)
    rope = _empty_pool("c_rope", count, page_size, ROPE_DIM, padding, rng)
    _fill_pool(latent.array(), page_size, [k[:, :LATENT_DIM] for k in keys], pages)
    _fill_pool(rope.array(), page_size, [k[:, LATENT_DIM:] for k in keys], pages)
    return {"c_latent": latent, "c_rope": rope}


def _empty_pool(
    name: str, pages: int, page_size: int, columns: int, padding: int, rng: np.random.Generator
) -> Field:
    page_bytes = page_size * columns
    page_stride = page_bytes + padding
    # Zeroed memory is committed only where it is written: a pool above 4 GiB costs its pages.
    image = np.zeros(pages * page_stride, np.uint8)
    pieces = tuple(slice(p * page_stride, p * page_stride + page_bytes) for p in range(pages))
    poisoned = page_bytes + min(padding, 4096)
    for piece in pieces:
        image[piece.start : piece.start + poisoned] = _poison(poisoned, rng)
    shape = (pages, page_size, columns)
    return Field(
        Buffer(name, image, pieces=pieces), 0, shape, (page_stride, columns, 1), "float8_e4m3fn"
    )


def _fill_pool(
    pool: Bytes, page_size: int, keys: list[Bytes], pages: list[NDArray[np.int32]]
) -> None:
    for request_keys, request_pages in zip(keys, pages, strict=True):
        for index, page in enumerate(request_pages):
            part = request_keys[index * page_size : (index + 1) * page_size]
            pool[page, : len(part)] = part


def _block_tables(spec: ProblemSpec, pages: list[NDArray[np.int32]]) -> Field:
    """Rows that end at the last page in use: what follows exists only where memory is dense."""
    width = max(1, *(len(p) for p in pages)) + spec.layout.table_padding
    table = np.resize(DEAD_PAGES, (len(pages), width))
    for row, used in zip(table, pages, strict=True):
        row[: len(used)] = used
    pieces = tuple(
        slice(b * width * 4, (b * width + len(used)) * 4)
        for b, used in enumerate(pages)
        if len(used)
    )
    return Field.of_array("block_tables", table, "int32", pieces=pieces)


def _output_fields(spec: ProblemSpec, config: KernelConfig, plan: Plan) -> dict[str, Field]:
    rows = (plan.batch, plan.seq_len_q, plan.num_heads)
    item = ITEM_SIZES[config.out_dtype]
    row_bytes = LATENT_DIM * item + spec.layout.out_padding
    strides = (*(s * row_bytes for s in dense_strides(rows, 1)), item)
    image = np.full(math.prod(rows) * row_bytes, 0xFF, np.uint8)
    out = Field(
        Buffer("out", image, writable=True), 0, (*rows, LATENT_DIM), strides, config.out_dtype
    )
    fields = {"out": out}
    if spec.want_lse:
        lse = np.full(rows, np.nan, np.float32)
        fields["lse"] = Field.of_array("lse", lse, "float32", writable=True)
    if plan.workspace_size:
        workspace = np.full(plan.workspace_size, 0xFF, np.uint8)
        fields["workspace"] = Field.of_array("workspace", workspace, "uint8", writable=True)
    return fields
