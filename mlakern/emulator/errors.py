"""What the emulator raises.

Hardware functions raise `HardwareError` with the bare fact ("got X, need Y"); the machine catches
it where the instruction is known and turns it into an `EmulatorError` that names instruction, PTX
line, CTA, warp and lane.
"""

from __future__ import annotations

from mlakern.emulator.hardware_error import HardwareError


class EmulatorError(Exception):
    """The kernel did something that the hardware leaves undefined, or that the emulator refuses."""


class PtxError(EmulatorError):
    """PTX text that the emulator does not understand; the message names the line."""


class DeadlockError(EmulatorError):
    """No warp can run; the message says what each of them waits for."""


class Fault(HardwareError):  # noqa: N818 - the place is still missing
    """A broken rule that one lane of the executing group can be blamed for.

    lane: index into the executing group of lanes; None where the whole group is to blame.
    """

    def __init__(self, message: str, lane: int | None = None) -> None:
        super().__init__(message)
        self.lane = lane
