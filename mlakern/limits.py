"""The ranges of run-time values, for checks and for the manifest."""

from __future__ import annotations

from collections.abc import Mapping

from mlakern.config import KEY_TILE, MAX_HEADS, MAX_SEQ_LEN_Q, MAX_SPLITS
from mlakern.numerics import MAX_P_LOG2

MAX_BATCH = 65535  # gridDim.z
MAX_MULTIPROCESSORS = 2**16  # far above any device; catches swapped arguments
MAX_SEQ_LEN = 2**31 - KEY_TILE  # key positions are int32, rounded up to tiles
# Tiles of all query tiles of a work list are counted in int32, up to one share past the end.
MAX_LISTED_TILES = 2**31 - 2**10

# Inclusive ranges of the bounded run-time values.
LIMITS: Mapping[str, tuple[float, float]] = {
    "batch": (1, MAX_BATCH),
    "num_heads": (1, MAX_HEADS),
    "seq_len_q": (1, MAX_SEQ_LEN_Q),
    "seq_lens": (0, MAX_SEQ_LEN),
    "splits": (1, MAX_SPLITS),
    "window_left": (0, MAX_SEQ_LEN),
    "causal_seqs": (0, MAX_SEQ_LEN),
    "cp_world * cp_interleave": (1, MAX_SEQ_LEN),
    "rescale_threshold + p_prescale_log2": (0, MAX_P_LOG2),
}


def check_range(name: str, value: int, low: int, high: int) -> None:
    """ValueError unless `value` is an integer from low to high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: got {value!r}, need an integer from {low} to {high}")
