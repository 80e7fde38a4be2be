"""The opcode table, filled by the modules of this package."""

from __future__ import annotations

from mlakern.emulator.opcodes import (  # noqa: F401 - importing a module adds its rows
    arithmetic,
    barrier,
    bits,
    bulk,
    control,
    conversion,
    floating,
    memory,
    tcgen05,
    warp,
)
from mlakern.emulator.opcodes.table import Control, Row, lookup, rows

__all__ = ["Control", "Row", "lookup", "rows"]
