"""The opcode table. Importing the modules below fills it."""

from __future__ import annotations

import mlakern.emulator.opcodes.arithmetic
import mlakern.emulator.opcodes.atomic
import mlakern.emulator.opcodes.barrier
import mlakern.emulator.opcodes.bits
import mlakern.emulator.opcodes.bulk
import mlakern.emulator.opcodes.carry
import mlakern.emulator.opcodes.comparison
import mlakern.emulator.opcodes.control
import mlakern.emulator.opcodes.conversion
import mlakern.emulator.opcodes.cvt
import mlakern.emulator.opcodes.floating
import mlakern.emulator.opcodes.launch_control
import mlakern.emulator.opcodes.memory
import mlakern.emulator.opcodes.mma
import mlakern.emulator.opcodes.packed
import mlakern.emulator.opcodes.tcgen05
import mlakern.emulator.opcodes.warp
import mlakern.emulator.opcodes.wgmma  # noqa: F401
from mlakern.emulator.opcodes.table import Control, Row, lookup, rows

__all__ = ["Control", "Row", "lookup", "rows"]
