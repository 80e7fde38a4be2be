"""From checked arguments to launches: the bytes of every kernel parameter.

The GPU and the emulator take the same :class:`Launch` objects, so a wrong offset, stride or tensor
map shows on either. Nothing here touches a device.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from mlakern.config import LATENT_DIM, ROPE_DIM
from mlakern.manifest import Dim3, Kernel, Manifest
from mlakern.numerics import DEFAULT_RESCALE_THRESHOLD
from mlakern.planning import Plan, ceil_div
from mlakern.runtime import checks
from mlakern.runtime.arrays import ArrayView
from mlakern.runtime.tensor_maps import QueryRows, cache_map, query_map, query_rows
from mlakern.signature import Kind
from mlakern.tensormap import TensorMap

Value: TypeAlias = "int | float | TensorMap"

_FORMATS = {
    Kind.POINTER.label: "<Q",
    Kind.INT32.label: "<i",
    Kind.INT64.label: "<q",
    Kind.FLOAT32.label: "<f",
}


@dataclass(frozen=True)
class Tensors:
    """The arrays of one call, in the kernels' terms; shapes in :mod:`mlakern.signature`.

    block_tables: [B, >= pages in use] int32, row stride free. lse: None if it is not wanted.
    workspace: one dimension of bytes; None if the plan needs none.
    """

    q_latent: ArrayView
    q_rope: ArrayView
    c_latent: ArrayView
    c_rope: ArrayView
    block_tables: ArrayView
    seq_lens: ArrayView
    out: ArrayView
    lse: ArrayView | None = None
    workspace: ArrayView | None = None


@dataclass(frozen=True)
class Scalars:
    """The run-time numbers of one call.

    softmax_scale: with the scales of Q and K in it. output_scale: the scale of V. Both finite, > 0.
    rescale_threshold, p_prescale_log2: log2 units, >= 0, with a sum <= log2(448).
    """

    softmax_scale: float
    output_scale: float = 1.0
    lse_base: str = "2"
    rescale_threshold: float = DEFAULT_RESCALE_THRESHOLD
    p_prescale_log2: float = 0.0


@dataclass(frozen=True)
class Launch:
    """One kernel launch. parameters: little-endian bytes or a tensor map, in the kernel's order.

    dynamic_shared: bytes. pdl: may start before the launch in front of it has finished.
    """

    kernel: Kernel
    grid: Dim3
    parameters: tuple[bytes | TensorMap, ...]
    pdl: bool = False

    @property
    def entry(self) -> str:
        return self.kernel.entry

    @property
    def block(self) -> Dim3:
        return self.kernel.block

    @property
    def cluster(self) -> Dim3:
        return self.kernel.cluster

    @property
    def dynamic_shared(self) -> int:
        return self.kernel.dynamic_shared


def build_launches(
    manifest: Manifest,
    plan: Plan,
    tensors: Tensors,
    scalars: Scalars,
    *,
    device: str,
    pdl: bool = False,
) -> tuple[Launch, ...]:
    """The launches of one decode call, in order: attention, and combine if the plan splits.

    device: where every array must be. Raises ValueError that names the argument, what it got and
    what it needs.
    """
    check_tensors(manifest, plan, tensors, device)
    rows = query_rows(plan, {"q_latent": tensors.q_latent, "q_rope": tensors.q_rope})
    values = _values(plan, tensors, scalars, rows)
    launches = []
    for kernel in manifest.kernels:
        grid = plan.grid(kernel.role)
        if grid is not None:
            launches.append(Launch(kernel, grid, pack(kernel, values), pdl))
    return tuple(launches)


def check_tensors(manifest: Manifest, plan: Plan, tensors: Tensors, device: str) -> None:
    """Types, shapes, strides, alignment and sizes of every array of a call."""
    config = manifest.config
    if plan.config != config:
        raise ValueError(f"plan: got one for {plan.config.name}, need one for {config.name}")
    rows = (plan.batch, plan.seq_len_q, plan.num_heads)
    _check_pair("q", tensors.q_latent, tensors.q_rope, rows, device)
    pages = tensors.c_latent.shape[0] if tensors.c_latent.shape else 0
    if pages < 1:
        raise ValueError(f"c_latent: got shape {list(tensors.c_latent.shape)}, need >= 1 page")
    cache_rows = (pages, config.page_size)
    _check_pair("c", tensors.c_latent, tensors.c_rope, cache_rows, device)
    _check_block_tables(tensors.block_tables, plan, device)
    checks.check_array(
        "seq_lens", tensors.seq_lens, dtype="int32", shape=(plan.batch,), device=device
    )
    checks.check_dense("seq_lens", tensors.seq_lens)
    checks.check_array(
        "out", tensors.out, dtype=config.out_dtype, shape=(*rows, LATENT_DIM), device=device
    )
    checks.check_rows("out", tensors.out)
    if tensors.lse is not None:
        checks.check_array("lse", tensors.lse, dtype="float32", shape=rows, device=device)
        checks.check_dense("lse", tensors.lse)
    _check_workspace(tensors.workspace, plan, manifest.workspace.alignment, device)


def _check_pair(
    prefix: str, latent: ArrayView, rope: ArrayView, rows: tuple[int, ...], device: str
) -> None:
    for name, view, columns in (
        (f"{prefix}_latent", latent, LATENT_DIM),
        (f"{prefix}_rope", rope, ROPE_DIM),
    ):
        checks.check_array(name, view, dtype="float8_e4m3fn", shape=(*rows, columns), device=device)
        checks.check_rows(name, view)


def _check_block_tables(view: ArrayView, plan: Plan, device: str) -> None:
    page_size = plan.config.page_size
    checks.check_dtype("block_tables", view, "int32")
    width = ceil_div(plan.max_seq_len, page_size)
    if len(view.shape) != 2 or view.shape[0] != plan.batch or view.shape[1] < width:
        raise ValueError(
            f"block_tables: got shape {list(view.shape)}, need [{plan.batch}, >= {width}]: one row "
            f"for each request (not for each token), {width} pages of {page_size} keys for "
            f"max_seq_len {plan.max_seq_len}"
        )
    row_stride, entry_stride = view.strides
    if entry_stride != 4 and view.shape[1] > 1:
        raise ValueError(
            f"block_tables: got {entry_stride} bytes between entries, need contiguous rows (4)"
        )
    if row_stride % 4 and plan.batch > 1:
        raise ValueError(
            f"block_tables: got a row stride of {row_stride} bytes, need a multiple of 4"
        )
    checks.check_alignment("block_tables", view, 4)
    checks.check_device("block_tables", view, device)


def _check_workspace(view: ArrayView | None, plan: Plan, alignment: int, device: str) -> None:
    if plan.workspace_size == 0:
        return
    if view is None:
        raise ValueError(
            f"workspace: got none, need {plan.workspace_size} bytes for {plan.splits} splits"
        )
    if view.dtype not in ("uint8", "int8") or len(view.shape) != 1:
        raise ValueError(
            f"workspace: got {view.dtype} of shape {list(view.shape)}, need one dimension of "
            "uint8 or int8"
        )
    checks.check_dense("workspace", view)
    checks.check_alignment("workspace", view, alignment)
    if view.nbytes < plan.workspace_size:
        raise ValueError(
            f"workspace: got {view.nbytes} bytes, need {plan.workspace_size}; plan.workspace_size "
            "or planning.workspace_bound says how many"
        )
    checks.check_device("workspace", view, device)


def _values(plan: Plan, tensors: Tensors, scalars: Scalars, rows: QueryRows) -> Mapping[str, Value]:
    """Every parameter of every kernel by its name in the signature."""
    softmax_scale = checks.check_scale("softmax_scale", scalars.softmax_scale)
    checks.check_lag(scalars.rescale_threshold, scalars.p_prescale_log2)
    partial_out = partial_lse = 0
    if plan.workspace_size and tensors.workspace is not None:
        partial_out = tensors.workspace.address + plan.workspace.partial_out_offset
        partial_lse = tensors.workspace.address + plan.workspace.partial_lse_offset
    out_batch, out_token, out_head = (s // tensors.out.item_size for s in tensors.out.strides[:3])
    return {
        "q_latent": query_map("q_latent", tensors.q_latent, rows),
        "q_rope": query_map("q_rope", tensors.q_rope, rows),
        "c_latent": cache_map("c_latent", tensors.c_latent),
        "c_rope": cache_map("c_rope", tensors.c_rope),
        "block_tables": tensors.block_tables.address,
        "seq_lens": tensors.seq_lens.address,
        "out": tensors.out.address,
        "lse": tensors.lse.address if tensors.lse is not None else 0,
        "partial_out": partial_out,
        "partial_lse": partial_lse,
        "num_heads": plan.num_heads,
        "seq_len_q": plan.seq_len_q,
        "splits": plan.splits,
        "fold": plan.fold,
        "q_row_extent": rows.row_extent,
        "q_box_rows": rows.box_rows,
        "block_table_stride": tensors.block_tables.strides[0] // 4,
        "out_stride_batch": out_batch,
        "out_stride_token": out_token,
        "out_stride_head": out_head,
        "output_scale": checks.check_scale("output_scale", scalars.output_scale),
        "lse_factor": checks.lse_factor(scalars.lse_base),
        "softmax_scale_log2": softmax_scale * math.log2(math.e),
        "rescale_threshold": scalars.rescale_threshold,
        "p_prescale_log2": scalars.p_prescale_log2,
    }


def pack(kernel: Kernel, values: Mapping[str, Value]) -> tuple[bytes | TensorMap, ...]:
    """The kernel's parameters, in order, in the form its manifest gives each.

    Raises ValueError for a parameter without a value: the cubin is newer than this runtime.
    """
    packed: list[bytes | TensorMap] = []
    for parameter in kernel.parameters:
        value = values.get(parameter.name)
        if isinstance(value, TensorMap) and parameter.kind == Kind.TENSOR_MAP.label:
            packed.append(value)
        elif isinstance(value, (int, float)) and parameter.kind in _FORMATS:
            packed.append(struct.pack(_FORMATS[parameter.kind], value))
        else:
            raise ValueError(
                f"kernel {kernel.entry}: parameter {parameter.name} of kind {parameter.kind} is "
                f"unknown to this runtime; need one of {', '.join(values)}; try to rebuild the "
                "kernel"
            )
    return tuple(packed)
