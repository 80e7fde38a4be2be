"""A functional PTX machine: runs the kernels' PTX on the CPU and refuses what hardware leaves
undefined.

module = Module.from_ptx(text)
memory = GlobalMemory()
out = memory.add("out", array, writable=True)
module.launch("kernel", grid=(1, 1, 1), block=(128, 1, 1), parameters=[out.to_bytes(8, "little")],
              memory=memory)
"""

from __future__ import annotations

from mlakern.emulator.errors import DeadlockError, EmulatorError, PtxError
from mlakern.emulator.launch import LaunchReport, Options
from mlakern.emulator.memory import GlobalMemory
from mlakern.emulator.module import Module

__all__ = [
    "DeadlockError",
    "EmulatorError",
    "GlobalMemory",
    "LaunchReport",
    "Module",
    "Options",
    "PtxError",
]
