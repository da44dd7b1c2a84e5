"""What can go wrong in an emulated run. Each message names the instruction and its address in the code object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class EmulatorError(Exception):
    """Base of every error the emulator raises on purpose.

    `findings` is what the instruments had seen when an error stopped a launch (`findings.Finding`).
    """

    findings: Sequence[Any] = ()


class CodeObjectError(EmulatorError):
    """The file is no AMDGPU code object this emulator can load."""


class UnsupportedInstructionError(EmulatorError):
    """The program reached an instruction, modifier or operand nobody has written down the semantics of."""


class MemoryFaultError(EmulatorError):
    """An access outside every allocation, misaligned, or past the end of the LDS."""


class NotEmulatedError(EmulatorError):
    """The code can't be run here, for a reason that is known before it is run; nothing was."""
