"""The kernels of one configuration, ready to be compiled into one module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute

from mlakern.config import KernelConfig
from mlakern.kernels.arguments import placeholders
from mlakern.kernels.blackwell.attention import Attention
from mlakern.kernels.blackwell.layout import AttentionLayout
from mlakern.kernels.combine import Combine
from mlakern.kernels.planner import Planner
from mlakern.signature import signatures

DTYPES: dict[str, type] = {
    "float32": cutlass.Float32,
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
}

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Entry:
    """One kernel of the program and its launch shape. dynamic_shared: bytes."""

    kernel: Any
    block: Dim3
    cluster: Dim3
    dynamic_shared: int


def entry_names(config: KernelConfig) -> dict[str, str]:
    """The entries' names by role: the DSL numbers the kernels in the order of their launch."""
    names = {"planner": Planner.name, "attention": Attention.name}
    return {
        role: f"{names.get(role, Combine.name)}_{number}"
        for number, role in enumerate(signatures(config))
    }


def program(config: KernelConfig) -> dict[str, Entry]:
    """The configuration's kernels by role."""
    layout = AttentionLayout(config)
    entries = {
        "attention": Entry(
            Attention(layout).kernel, layout.block, layout.cluster, layout.shared.size
        ),
    }
    for role, bands in (("combine", 1), ("combine_bands2", 2)):
        kernel = Combine(config, bands).kernel
        entries[role] = Entry(kernel, Combine.block, (1, 1, 1), Combine.shared_bytes)
    if config.schedule == "work_list":
        entries["planner"] = Entry(
            Planner(config).kernel, Planner.block, (1, 1, 1), Planner.shared_bytes
        )
    return {role: entries[role] for role in signatures(config)}


def host_function(config: KernelConfig) -> Any:
    """A function that launches every kernel, to be traced and compiled, never called."""
    entries = program(config)
    types = _element_types(config)
    for owner in (Attention, Combine, Planner):
        owner.kernel.set_name_prefix(
            owner.name, remove_cutlass_symbol=True, keep_mangled_name=False
        )

    @cute.jit
    def launch(stream: Any) -> None:
        for role, signature in signatures(config).items():
            entry = entries[role]
            entry.kernel(placeholders(signature, types)).launch(
                grid=entry.cluster, block=entry.block, cluster=entry.cluster, stream=stream
            )

    return launch


def _element_types(config: KernelConfig) -> dict[str, type]:
    """What each pointer parameter points to."""
    types: dict[str, type] = {
        "out": DTYPES[config.out_dtype],
        "partial_out": DTYPES[config.partial_dtype],
        "lse": cutlass.Float32,
        "partial_lse": cutlass.Float32,
    }
    integers = ("block_tables", "seq_lens", "block_split_kvs", "work_list")
    return types | dict.fromkeys((*integers, "causal_seqs", "local_visible_lens"), cutlass.Int32)
