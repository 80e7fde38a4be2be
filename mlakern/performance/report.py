"""The static performance report of one kernel, as data that is ready for JSON."""

from __future__ import annotations

from typing import Any

from mlakern.kernels.blackwell.layout import AttentionLayout
from mlakern.performance.model import B200, Prediction, clocks, predict, tile_work
from mlakern.performance.profile import MainLoop, Profile

HEADS = (16, 64, 128)
# The case whose bound is stated in microseconds.
BATCH, SEQ_LEN = 64, 8192


def report(profile: Profile) -> dict[str, Any]:
    """Resources, main loops, clocks for one key tile, and what limits with 16, 64, 128 heads."""
    config = profile.manifest.config
    layout = AttentionLayout(config)
    work = tile_work(layout.operands, profile.loops["mma"])
    kernel = profile.manifest.kernel("attention")
    predictions = [predict(config, profile.loops, heads) for heads in HEADS]
    return {
        "name": config.name,
        "resources": {
            "registers": kernel.registers,
            "spill_bytes": kernel.spill_stores + kernel.spill_loads,
            "shared_bytes": kernel.dynamic_shared + kernel.static_shared,
            "k_stages": layout.operands.k_stages,
            "v_stages": layout.operands.v_stages,
            "cubin_bytes": profile.manifest.cubin.size,
            "instructions": dict(profile.sizes),
        },
        "loops": {role: _loop(loop) for role, loop in profile.loops.items()},
        "key_tile": {
            "memory_bytes": work.memory_bytes,
            "copied_bytes": work.copied_bytes,
            "operand_bytes": work.operand_bytes,
            "p_bytes": work.p_bytes,
            "flops": work.flops,
            "clocks": _rounded(clocks(work, profile.loops, B200)),
        },
        "machine": B200.name,
        "predictions": [_prediction(each) for each in predictions],
    }


def _loop(loop: MainLoop) -> dict[str, Any]:
    return {"instructions": loop.instructions, "longest": loop.longest, "pipes": loop.counts}


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return {
        "heads": prediction.num_heads,
        "query_tiles": prediction.query_tiles,
        "limit": prediction.limit,
        "bound_clocks": round(prediction.bound),
        "shares": {name: round(share, 3) for name, share in prediction.shares().items()},
        "bound_microseconds": round(prediction.seconds(BATCH, SEQ_LEN) * 1e6, 1),
    }


def _rounded(values: dict[str, float]) -> dict[str, int]:
    return {name: round(value) for name, value in values.items()}
