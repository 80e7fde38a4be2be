"""A loaded decode kernel: plan once, call for every step.

    decode = load(open_store(), config)
    plan = decode.plan(seq_lens, num_heads=16)
    decode(query, kv_cache, block_tables, seq_lens, plan=plan, out=out, workspace=workspace,
           softmax_scale=scale)

A call checks its arguments, packs parameters and launches. It allocates nothing, waits for nothing
and copies nothing between host and device, so a CUDA graph can capture it; a replay reads lengths
and page tables as they are then, up to the plan's max_seq_len.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from mlakern.config import KernelConfig
from mlakern.manifest import Manifest
from mlakern.masks import Mask
from mlakern.numerics import DEFAULT_RESCALE_THRESHOLD
from mlakern.planning import Plan
from mlakern.planning import plan as make_plan
from mlakern.runtime import driver
from mlakern.runtime.arguments import Scalars, build_launches
from mlakern.runtime.arrays import ArrayView, as_view
from mlakern.runtime.layouts import cache_pair, query_pair
from mlakern.runtime.streams import stream_handle
from mlakern.runtime.tensors import Tensors

_PREPARED_CALLS = 1024


class Entry(Protocol):
    """One stored kernel; see mlakern.store."""

    @property
    def manifest(self) -> Manifest: ...
    def load_cubin(self, driver_version: int | None = None) -> bytes: ...


class Store(Protocol):
    """Where kernels come from; see mlakern.store.open_store."""

    def find(self, config: KernelConfig) -> Entry: ...


class Decode:
    """The kernels of one configuration, loaded on one device. Made by :func:`load`."""

    def __init__(
        self, manifest: Manifest, kernels: dict[str, driver.LoadedKernel], device: int
    ) -> None:
        self.manifest = manifest
        self.device = device
        self._kernels = kernels  # by entry name
        # Engines repeat addresses and shapes from step to step: checked and packed once.
        self._prepared = lru_cache(maxsize=_PREPARED_CALLS)(self._prepare)

    @property
    def config(self) -> KernelConfig:
        return self.manifest.config

    def plan(
        self,
        seq_lens: Sequence[int] | None = None,
        *,
        num_heads: int,
        seq_len_q: int = 1,
        batch: int | None = None,
        max_seq_len: int | None = None,
        window_left: int = -1,
        splits: int | None = None,
        min_split_kv: int | None = None,
        fold: int | None = None,
    ) -> Plan:
        """mlakern.planning.plan for this device; seq_lens are host integers."""
        return make_plan(
            self.config,
            seq_lens,
            num_heads=num_heads,
            multiprocessors=driver.multiprocessors(self.device),
            seq_len_q=seq_len_q,
            batch=batch,
            max_seq_len=max_seq_len,
            window_left=window_left,
            splits=splits,
            min_split_kv=min_split_kv,
            fold=fold,
        )

    def __call__(
        self,
        query: Any = None,
        kv_cache: Any = None,
        block_tables: Any = None,
        seq_lens: Any = None,
        *,
        plan: Plan,
        out: Any,
        softmax_scale: float,
        q_latent: Any = None,
        q_rope: Any = None,
        c_latent: Any = None,
        c_rope: Any = None,
        lse: Any = None,
        workspace: Any = None,
        output_scale: float = 1.0,
        lse_base: str = "2",
        rescale_threshold: float = DEFAULT_RESCALE_THRESHOLD,
        p_prescale_log2: float = 0.0,
        causal_mask: bool | None = None,
        window_left: int = -1,
        local_visible_lens: Any = None,
        cp_world: int = 1,
        cp_rank: int = 0,
        cp_interleave_size: int = 1,
        causal_seqs: Any = None,
        block_split_kvs: Any = None,
        work_list: Any = None,
        enable_pdl: bool = False,
        stream: Any = None,
    ) -> None:
        """Launch one decode; results arrive in `out` and `lse` in stream order.

        query [B, Sq, H, 576] or q_latent and q_rope; kv_cache [pages, page_size, 576] (or with a
        dimension of 1 before or after page_size) or c_latent and c_rope; block_tables
        [B, >= pages in use] int32; seq_lens [B] int32; out [B, Sq, H, 512]; lse [B, Sq, H] float32
        or None; workspace: plan.workspace_size bytes, None if that is 0. All on the device of the
        kernel, in any library's arrays.

        The kernel's mask asks for: window_left and causal_mask (window; causal unless False),
        cp_world, cp_rank, cp_interleave_size and causal_seqs [B] int32, global lengths (dcp),
        local_visible_lens [B, Sq] int32 (visible). Its schedule takes: block_split_kvs [B] int32,
        splits of each request, or work_list, int32 words of plan.work_list; without it the list
        is made on the device.

        Raises ValueError that names the argument, what it got and what it needs; nothing has been
        launched then.
        """
        cache = cache_pair(kv_cache, c_latent, c_rope, page_size=self.config.page_size)
        tensors = Tensors(
            *query_pair(query, q_latent, q_rope),
            *cache,
            block_tables=as_view("block_tables", block_tables),
            seq_lens=as_view("seq_lens", seq_lens),
            out=as_view("out", out),
            lse=_optional("lse", lse),
            workspace=_optional("workspace", workspace),
            causal_seqs=_optional("causal_seqs", causal_seqs),
            local_visible_lens=_optional("local_visible_lens", local_visible_lens),
            block_split_kvs=_optional("block_split_kvs", block_split_kvs),
            work_list=_optional("work_list", work_list),
        )
        scalars = Scalars(softmax_scale, output_scale, lse_base, rescale_threshold, p_prescale_log2)
        mask = Mask(
            self.config.mask,
            window_left=window_left,
            causal=_causal(self.config.mask, causal_mask),
            cp_world=cp_world,
            cp_rank=cp_rank,
            cp_interleave=cp_interleave_size,
        )
        handle = stream_handle(stream, self.device)
        for launch in self._prepared(plan, tensors, scalars, mask, enable_pdl, handle):
            launch.enqueue()

    def _prepare(
        self, plan: Plan, tensors: Tensors, scalars: Scalars, mask: Mask, pdl: bool, stream: int
    ) -> tuple[driver.PreparedLaunch, ...]:
        launches = build_launches(
            self.manifest, plan, tensors, scalars, mask, device=f"cuda:{self.device}", pdl=pdl
        )
        return tuple(self._kernels[launch.entry].prepare(launch, stream) for launch in launches)


def _optional(name: str, array: Any) -> ArrayView | None:
    return None if array is None else as_view(name, array)


def _causal(kind: str, causal_mask: bool | None) -> bool:
    """Whether a window's upper bound is causal; for other masks the kernel has decided it."""
    compiled = {"plain": False, "causal": True, "dcp": True}.get(kind, causal_mask)
    if causal_mask is not None and causal_mask != compiled:
        raise ValueError(
            f"causal_mask: got {causal_mask}, need {compiled} for a kernel of mask {kind}"
        )
    return causal_mask is None or causal_mask


def load(store: Store, config: KernelConfig, device: int | None = None) -> Decode:
    """Load the kernels of `config` onto a device (default: the current one), at once.

    Calls run in the context that is current then; a thread without one gets the device's primary
    context for loading, and must make it current to launch (torch and CuPy do).

    Raises ValueError if the configuration is for another architecture, the store's errors if it
    has no intact kernel, driver.DriverUnavailableError without a driver.
    """
    device = driver.current_device() if device is None else device
    with driver.device_context(device):
        arch = driver.architecture(device)
        if config.arch != arch:
            raise ValueError(
                f"config: got a kernel for {config.arch}, need one for {arch}, device {device}; "
                f"try config.with_axes(arch={arch!r})"
            )
        entry = store.find(config)
        library = driver.Library(entry.load_cubin(driver.driver_version()))
        kernels = {}
        for facts in entry.manifest.kernels:
            kernels[facts.entry] = library.kernel(facts.entry)
            kernels[facts.entry].reserve_shared(facts.dynamic_shared)
    return Decode(entry.manifest, kernels, device)
