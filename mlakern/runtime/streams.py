"""Stream handles of other libraries."""

from __future__ import annotations

import sys
from typing import Any

LEGACY_DEFAULT_STREAM = 0


def stream_handle(stream: Any, device: int) -> int:
    """The CUstream of `stream` as an integer.

    stream: an integer handle, or an object with __cuda_stream__ (cuda.core), cuda_stream (torch) or
    ptr (CuPy); None is the caller's current stream: torch's if the process has loaded torch, else
    the legacy default stream. Raises ValueError for anything else.
    """
    if stream is None:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return LEGACY_DEFAULT_STREAM
        return int(torch.cuda.current_stream(device).cuda_stream)
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        _version, handle = stream.__cuda_stream__()
        return int(handle)
    for attribute in ("cuda_stream", "ptr"):
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    raise ValueError(
        f"stream: got {type(stream).__name__}, need an integer handle or a stream of torch, CuPy "
        "or cuda.core"
    )
