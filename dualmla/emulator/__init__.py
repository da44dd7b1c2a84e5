"""A CDNA3/CDNA4 (gfx942, gfx950) machine-code emulator: runs AITER's and Triton's code objects on a CPU.

Needs the extra `dualmla[emulator]` (tinygrad for the instruction encodings, NumPy, numba). See docs/emulator.md.
"""

from dualmla.emulator.elf import CodeObject, load_code_object
from dualmla.emulator.errors import CodeObjectError, EmulatorError, MemoryFaultError, NotEmulatedError, UnsupportedInstructionError
from dualmla.emulator.findings import Finding
from dualmla.emulator.launch import Buffer, Device, Mode, Report

__all__ = [
    "Buffer",
    "CodeObject",
    "CodeObjectError",
    "Device",
    "EmulatorError",
    "Finding",
    "MemoryFaultError",
    "Mode",
    "NotEmulatedError",
    "Report",
    "UnsupportedInstructionError",
    "load_code_object",
]
