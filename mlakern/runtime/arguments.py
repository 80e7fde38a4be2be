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

from mlakern.manifest import Dim3, Kernel, Manifest
from mlakern.masks import Mask
from mlakern.numerics import DEFAULT_RESCALE_THRESHOLD
from mlakern.planning import Plan
from mlakern.runtime import checks
from mlakern.runtime.arrays import ArrayView
from mlakern.runtime.tensor_maps import cache_map, query_map, query_rows
from mlakern.runtime.tensors import Tensors, check_tensors
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
    mask: Mask,
    *,
    device: str,
    pdl: bool = False,
) -> tuple[Launch, ...]:
    """The launches of one decode call, in stream order.

    The planner unless the caller has a work list or needs none, attention, and the combine kernel
    of the plan if it divides requests. device: where every array must be.

    Raises ValueError that names the argument, what it got and what it needs.
    """
    check_tensors(manifest, plan, tensors, device)
    _check_mask(plan, mask)
    values = _values(plan, tensors, scalars, mask)
    launches = []
    for kernel in manifest.kernels:
        grid = plan.grid(kernel.role)
        if grid is None or (kernel.role == "planner" and tensors.work_list is not None):
            continue
        launches.append(Launch(kernel, grid, pack(kernel, values), pdl))
    return tuple(launches)


def _check_mask(plan: Plan, mask: Mask) -> None:
    if mask.kind != plan.config.mask:
        raise ValueError(f"mask: got {mask.kind}, need {plan.config.mask}, the kernel's")
    if mask.window_left != plan.window_left:
        raise ValueError(
            f"window_left: got {mask.window_left}, need {plan.window_left}, the plan's; "
            f"try plan(window_left={mask.window_left})"
        )


def _values(plan: Plan, tensors: Tensors, scalars: Scalars, mask: Mask) -> Mapping[str, Value]:
    """Every parameter of every kernel by its name in the signature."""
    rows = query_rows(plan, {"q_latent": tensors.q_latent, "q_rope": tensors.q_rope})
    softmax_scale = checks.check_scale("softmax_scale", scalars.softmax_scale)
    checks.check_lag(scalars.rescale_threshold, scalars.p_prescale_log2)
    out_batch, out_token, out_head = (s // tensors.out.item_size for s in tensors.out.strides[:3])
    return {
        "q_latent": query_map("q_latent", tensors.q_latent, rows),
        "q_rope": query_map("q_rope", tensors.q_rope, rows),
        "c_latent": cache_map("c_latent", tensors.c_latent),
        "c_rope": cache_map("c_rope", tensors.c_rope),
        "block_tables": tensors.block_tables.address,
        "seq_lens": tensors.seq_lens.address,
        "out": tensors.out.address,
        "lse": _address(tensors.lse),
        "causal_seqs": _address(tensors.causal_seqs),
        "local_visible_lens": _address(tensors.local_visible_lens),
        "block_split_kvs": _address(tensors.block_split_kvs),
        **_workspace_values(plan, tensors),
        "batch": plan.batch,
        "num_heads": plan.num_heads,
        "seq_len_q": plan.seq_len_q,
        "query_tiles": plan.query_tiles,
        "tile_rows": plan.tile_rows,
        "splits": plan.splits,
        "clusters": plan.clusters,
        "window_left": mask.window_left,
        "window_causal": int(mask.causal),
        "cp_world": mask.cp_world,
        "cp_rank": mask.cp_rank,
        "cp_interleave": mask.cp_interleave,
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


def _workspace_values(plan: Plan, tensors: Tensors) -> dict[str, Value]:
    """Addresses of the arrays in the workspace; null where the plan has none of them."""
    workspace, start = plan.workspace, _address(tensors.workspace)
    partials = plan.slots > 0
    listed = start + workspace.work_list_offset if plan.work_list_words else 0
    return {
        "partial_out": start + workspace.partial_out_offset if partials else 0,
        "partial_lse": start + workspace.partial_lse_offset if partials else 0,
        "work_list": _address(tensors.work_list) or listed,
    }


def _address(view: ArrayView | None) -> int:
    """Null for an array that is not given."""
    return view.address if view is not None else 0


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
