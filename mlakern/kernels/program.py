"""The kernels of one configuration, ready to be compiled into one module."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute

from mlakern.config import KernelConfig
from mlakern.kernels.arguments import placeholders
from mlakern.kernels.blackwell.attention import Attention
from mlakern.kernels.blackwell.layout import AttentionLayout
from mlakern.kernels.combine import Combine
from mlakern.signature import ATTENTION, COMBINE

# The names that the entries begin with; the DSL appends a number.
ENTRY_PREFIX = {"attention": "mla_decode_attention", "combine": "mla_decode_combine"}

DTYPES: dict[str, type] = {
    "float32": cutlass.Float32,
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
}


def layout_of(config: KernelConfig) -> AttentionLayout:
    """The compile-time facts of the configuration's attention kernel."""
    return AttentionLayout(config)


def host_function(config: KernelConfig) -> Any:
    """A function that launches both kernels, to be traced and compiled, never called."""
    layout = layout_of(config)
    attention, combine = Attention(layout), Combine()
    types = _element_types(config)
    for name, kernel in (("attention", Attention.kernel), ("combine", Combine.kernel)):
        kernel.set_name_prefix(
            ENTRY_PREFIX[name], remove_cutlass_symbol=True, keep_mangled_name=False
        )

    @cute.jit
    def launch(stream: Any) -> None:
        attention.kernel(placeholders(ATTENTION, types)).launch(
            grid=(2, 1, 1), block=layout.block, cluster=layout.cluster, stream=stream
        )
        combine.kernel(placeholders(COMBINE, types)).launch(
            grid=(1, 1, 1), block=Combine.block, stream=stream
        )

    return launch


def _element_types(config: KernelConfig) -> dict[str, type]:
    """What each pointer parameter points to."""
    return {
        "block_tables": cutlass.Int32,
        "seq_lens": cutlass.Int32,
        "out": DTYPES[config.out_dtype],
        "lse": cutlass.Float32,
        "partial_out": DTYPES[config.partial_dtype],
        "partial_lse": cutlass.Float32,
    }
