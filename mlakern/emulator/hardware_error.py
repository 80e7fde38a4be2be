"""The error of everything that models a piece of hardware without knowing the program."""

from __future__ import annotations


class HardwareError(ValueError):
    """Something that the hardware refuses or leaves undefined.

    The message says what was wrong and what would be right; whoever executes the instruction adds
    its text, its PTX line, the warp and the CTA.
    """
