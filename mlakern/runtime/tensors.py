"""The arrays of one decode call, and whether a plan can run on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlakern.config import LATENT_DIM, ROPE_DIM
from mlakern.division import ceil_div
from mlakern.manifest import Manifest
from mlakern.planning import Plan
from mlakern.runtime import checks
from mlakern.runtime.arrays import ArrayView


@dataclass(frozen=True)
class Tensors:
    """The arrays of one call, in the kernels' terms; shapes in :mod:`mlakern.signature`.

    block_tables: [B, >= pages in use] int32, row stride free. lse: None if it is not wanted.
    workspace: one dimension of bytes; None if the plan needs none.
    causal_seqs [B], local_visible_lens [B, Sq] int32: of the masks dcp and visible.
    block_split_kvs [B] int32: splits of each request, at most the plan's; None: the plan's.
    work_list: plan.work_list_words int32 (Plan.work_list); None: planned on the device.
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
    causal_seqs: ArrayView | None = None
    local_visible_lens: ArrayView | None = None
    block_split_kvs: ArrayView | None = None
    work_list: ArrayView | None = None


@dataclass(frozen=True)
class _Use:
    """The values of a configuration's axis that take an optional array, or even need it."""

    axis: str
    values: tuple[str, ...]
    needed: bool


_OPTIONAL: Mapping[str, _Use] = {
    "causal_seqs": _Use("mask", ("dcp",), needed=True),
    "local_visible_lens": _Use("mask", ("visible",), needed=True),
    "block_split_kvs": _Use("schedule", ("grid", "persistent"), needed=False),
    "work_list": _Use("schedule", ("work_list",), needed=False),
}


def check_tensors(manifest: Manifest, plan: Plan, tensors: Tensors, device: str) -> None:
    """Types, shapes, strides, alignment and sizes of every array of a call.

    Raises ValueError that names the argument, what it got and what it needs.
    """
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
    _check_dense("seq_lens", tensors.seq_lens, "int32", (plan.batch,), device)
    checks.check_array(
        "out", tensors.out, dtype=config.out_dtype, shape=(*rows, LATENT_DIM), device=device
    )
    checks.check_rows("out", tensors.out)
    if tensors.lse is not None:
        _check_dense("lse", tensors.lse, "float32", rows, device)
    _check_optional(tensors, plan, device)
    _check_workspace(tensors.workspace, plan, manifest.workspace.alignment, device)


def _check_optional(tensors: Tensors, plan: Plan, device: str) -> None:
    shapes = {
        "causal_seqs": (plan.batch,),
        "local_visible_lens": (plan.batch, plan.seq_len_q),
        "block_split_kvs": (plan.batch,),
        "work_list": (plan.work_list_words,),
    }
    for name, use in _OPTIONAL.items():
        view: ArrayView | None = getattr(tensors, name)
        kind = getattr(plan.config, use.axis)
        if view is None:
            if use.needed and kind in use.values:
                raise ValueError(
                    f"{name}: got none, need {list(shapes[name])} int32 for {use.axis} {kind}"
                )
        elif kind not in use.values:
            raise ValueError(
                f"{name}: got an array with a kernel of {use.axis} {kind}, "
                f"need {' or '.join(use.values)}"
            )
        else:
            _check_dense(name, view, "int32", shapes[name], device)


def _check_dense(
    name: str, view: ArrayView, dtype: str, shape: tuple[int, ...], device: str
) -> None:
    checks.check_array(name, view, dtype=dtype, shape=shape, device=device)
    checks.check_dense(name, view)


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
            f"workspace: got none, need {plan.workspace_size} bytes: {plan.slots} partial results "
            f"and {plan.work_list_words} words of a work list"
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
