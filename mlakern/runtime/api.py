"""`mla_decode`: one call with the keyword names that engines already use."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from mlakern.config import HEAD_DIM, LATENT_DIM, ROPE_DIM, KernelConfig
from mlakern.division import choose_pack_q, choose_tile_m
from mlakern.masks import Mask
from mlakern.runtime import driver
from mlakern.runtime.arrays import ArrayView, as_view
from mlakern.runtime.decode import Decode, Store, load
from mlakern.runtime.streams import stream_handle
from mlakern.runtime.tensor_maps import rows_are_uniform

_loaded: dict[tuple[KernelConfig, int], Decode] = {}


def preload(
    configs: Iterable[KernelConfig], *, store: Store | None = None, device: int | None = None
) -> tuple[Decode, ...]:
    """Load these kernels now, so that no `mla_decode` loads one under a stream capture."""
    if store is None:
        from mlakern.store import open_store

        store = open_store()
    loaded = []
    for config in configs:
        decode = load(store, config, device)
        loaded.append(_loaded.setdefault((config, decode.device), decode))
    return tuple(loaded)


def mla_decode(
    query: Any = None,
    kv_cache: Any = None,
    workspace_buffer: Any = None,
    kv_lora_rank: int = LATENT_DIM,
    qk_rope_head_dim: int = ROPE_DIM,
    block_tables: Any = None,
    seq_lens: Any = None,
    max_seq_len: int | None = None,
    softmax_scale: float | None = None,
    output_scale: float = 1.0,
    *,
    q_latent: Any = None,
    q_rope: Any = None,
    c_latent: Any = None,
    c_rope: Any = None,
    out: Any = None,
    return_lse: bool = False,
    lse: Any = None,
    lse_base: str = "2",
    causal_mask: bool = True,
    window_left: int = -1,
    local_visible_lens: Any = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave_size: int = 1,
    causal_seqs: Any = None,
    min_split_kv: int | None = None,
    enable_pdl: bool = False,
    stream: Any = None,
) -> Any:
    """MLA decode of FP8 queries over a paged FP8 latent cache; returns out, or (out, lse).

    Shapes as in Decode.__call__; workspace_buffer is one dimension of bytes (int8 or uint8), see
    mlakern.planning.workspace_bound. max_seq_len: a host integer no seq_lens entry exceeds.
    softmax_scale: the model's scale times the FP8 scales of Q and K. lse is to base 2 unless
    lse_base is "e". Without `out` (or with return_lse without `lse`) a torch caller gets new
    tensors.

    Masks: causal_mask or none; window_left (-1: no window) with either; context parallelism
    (cp_world > 1 or causal_seqs: seq_lens and block_tables are this rank's, causal_seqs global);
    local_visible_lens [B, Sq], whatever causal_mask says. At most one of the last three.

    Kernels load on their first use; call :func:`preload` before a stream capture. Raises
    ValueError for arguments, LookupError for a kernel that is not in the store, RuntimeError for a
    first load under capture.
    """
    _check_dimensions(kv_lora_rank, qk_rope_head_dim)
    shards = (cp_world, cp_rank, cp_interleave_size)
    mask = _mask(causal_mask, window_left, local_visible_lens, shards, causal_seqs)
    if max_seq_len is None or softmax_scale is None:
        name = "max_seq_len" if max_seq_len is None else "softmax_scale"
        raise ValueError(f"{name}: got none, need a number")
    queries = as_view("query", query) if query is not None else as_view("q_latent", q_latent)
    if len(queries.shape) != 4:
        raise ValueError(f"query: got shape {list(queries.shape)}, need [B, Sq, H, {HEAD_DIM}]")
    device = _device_of(queries)
    batch, seq_len_q, num_heads, _ = queries.shape
    wants_lse = return_lse or lse is not None
    if out is None:
        out = _torch_empty("out", query, q_latent, (*queries.shape[:3], LATENT_DIM), "bfloat16")
    if wants_lse and lse is None:
        lse = _torch_empty("lse", query, q_latent, queries.shape[:3], "float32")
    # Packed rows need tokens that follow each other; folded ones serve any strides.
    uniform = rows_are_uniform(queries, seq_len_q)
    arch = driver.architecture(device)
    tile_m = choose_tile_m(arch, num_heads, seq_len_q)
    config = KernelConfig(
        arch=arch,
        tile_m=tile_m,
        page_size=_page_size(kv_cache, c_latent),
        mask=mask.kind,
        pack_q=choose_pack_q(num_heads, seq_len_q, tile_m) and uniform,
        out_dtype=_out_dtype(as_view("out", out)),
    )
    decode = _loaded_decode(config, device, stream)
    plan = decode.plan(
        num_heads=num_heads,
        seq_len_q=seq_len_q,
        batch=batch,
        max_seq_len=max_seq_len,
        window_left=window_left,
        min_split_kv=min_split_kv,
        fold=1 if num_heads % 2 and not uniform else None,
    )
    decode(
        query,
        kv_cache,
        block_tables,
        seq_lens,
        plan=plan,
        out=out,
        softmax_scale=softmax_scale,
        q_latent=q_latent,
        q_rope=q_rope,
        c_latent=c_latent,
        c_rope=c_rope,
        lse=lse,
        workspace=workspace_buffer,
        output_scale=output_scale,
        lse_base=lse_base,
        causal_mask=None if mask.kind == "visible" else causal_mask,
        window_left=window_left,
        local_visible_lens=local_visible_lens,
        cp_world=cp_world,
        cp_rank=cp_rank,
        cp_interleave_size=cp_interleave_size,
        causal_seqs=causal_seqs,
        enable_pdl=enable_pdl,
        stream=stream,
    )
    return (out, lse) if return_lse else out


def _loaded_decode(config: KernelConfig, device: int, stream: Any) -> Decode:
    decode = _loaded.get((config, device))
    if decode is not None:
        return decode
    if driver.is_capturing(stream_handle(stream, device)):
        raise RuntimeError(
            f"kernel {config.name}: not loaded yet, and a module cannot be loaded while the stream "
            "is captured; call mlakern.preload([config]) or decode once before the capture"
        )
    return preload([config], device=device)[0]


def _check_dimensions(kv_lora_rank: int, qk_rope_head_dim: int) -> None:
    for name, got, need in (
        ("kv_lora_rank", kv_lora_rank, LATENT_DIM),
        ("qk_rope_head_dim", qk_rope_head_dim, ROPE_DIM),
    ):
        if got != need:
            raise ValueError(f"{name}: got {got}, need {need}")


def _mask(
    causal_mask: bool,
    window_left: int,
    local_visible_lens: Any,
    shards: tuple[int, int, int],
    causal_seqs: Any,
) -> Mask:
    wanted = {
        "window": window_left != -1,
        "dcp": shards[0] != 1 or causal_seqs is not None,
        "visible": local_visible_lens is not None,
    }
    kinds = [kind for kind, want in wanted.items() if want]
    if len(kinds) > 1:
        raise ValueError(f"mask: got {' and '.join(kinds)} in one call, need at most one of them")
    kind = kinds[0] if kinds else "causal" if causal_mask else "plain"
    world, rank, interleave = shards
    return Mask(
        kind,
        window_left=window_left,
        causal=causal_mask,
        cp_world=world,
        cp_rank=rank,
        cp_interleave=interleave,
    )


def _device_of(queries: ArrayView) -> int:
    if queries.device == "cuda":
        return driver.current_device()
    platform, _, ordinal = queries.device.partition(":")
    if platform != "cuda":
        raise ValueError(f"query: got device {queries.device}, need a CUDA device")
    return int(ordinal)


def _page_size(kv_cache: Any, c_latent: Any) -> int:
    """From [pages, page_size, columns] with or without a dimension of 1 next to page_size."""
    name = "kv_cache" if kv_cache is not None else "c_latent"
    shape = as_view(name, kv_cache if kv_cache is not None else c_latent).shape
    if len(shape) not in (3, 4):
        raise ValueError(f"{name}: got shape {list(shape)}, need [pages, page_size, columns]")
    return max(shape[1:-1])


def _out_dtype(out: ArrayView) -> str:
    return "float8_e4m3fn" if out.dtype in ("uint8", "int8") else out.dtype


def _torch_empty(name: str, query: Any, q_latent: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """A new torch tensor beside a torch query; only torch callers get allocations."""
    like = query if query is not None else q_latent
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(like, torch.Tensor):
        raise ValueError(
            f"{name}: got none, need an array of shape {list(shape)} and type {dtype} (only torch "
            "tensors are allocated for you)"
        )
    return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
