"""mlakern: ahead-of-time compiled FP8 MLA decode kernels with a cubin cache.

Importing the package loads none of it: each name below is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlakern.config import KernelConfig
    from mlakern.planning import plan
    from mlakern.runtime.api import mla_decode, preload
    from mlakern.runtime.decode import load
    from mlakern.store import open_store

__version__ = "0.1.0"

__all__ = ["KernelConfig", "load", "mla_decode", "open_store", "plan", "preload"]

_HOMES = {
    "KernelConfig": "mlakern.config",
    "load": "mlakern.runtime.decode",
    "mla_decode": "mlakern.runtime.api",
    "open_store": "mlakern.store",
    "plan": "mlakern.planning",
    "preload": "mlakern.runtime.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
