"""Running a few instructions on one wave, without a code object: what the instruction tests stand on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from dualmla.emulator import launch as launching
from dualmla.emulator import state
from dualmla.emulator.decoder import Instruction
from dualmla.emulator.elf import CodeObject, KernelDescriptor
from dualmla.emulator.interpreter import compile_interpreter
from dualmla.emulator.launch import Device, Mode, Report
from dualmla.emulator.translate import Program, encode_listing

V = 256
"""Operand code of vector register 0."""

DEFAULTS = {"neg": 0, "abs": 0, "omod": 0, "clmp": 0, "opsel": 0}
END = Instruction(0, 4, "S_ENDPGM", "SOPP", {"simm16": 0})


@lru_cache(maxsize=2)
def memoryless(arch: str) -> Device:
    """A device for programs that touch no memory."""
    return Device(arch)


def vop3(name: str, dst: int, *sources: int, encoding: str = "VOP3", **fields: int) -> Instruction:
    """A vector instruction on operand codes (`V + n` for vector register n)."""
    operands = {f"src{k}": code for k, code in enumerate((*sources, *(128,) * (3 - len(sources))))}
    return Instruction(0, 8, name, encoding, {**DEFAULTS, "vdst": dst, **operands, **fields})


def code_object(
    listing: Sequence[Instruction], arch: str = "gfx942", lds_bytes: int = 4096, **descriptor: Any
) -> tuple[CodeObject, Program]:
    """The instructions, an `s_endpgm` after them, as if they had been loaded; addresses are 8 apart."""
    empty = KernelDescriptor(0, lds_bytes, 0, 0, 2, (True, False, False), 0)
    code = CodeObject("test", "test", arch, b"", (0, 0), replace(empty, **descriptor))
    placed = [replace(instruction, address=8 * i, size=8) for i, instruction in enumerate([*listing, END])]
    return code, encode_listing(code, placed)


def run(
    listing: Sequence[Instruction],
    *,
    v: Mapping[int, Any] | None = None,
    s: Mapping[int, int] | None = None,
    execute: int = (1 << 64) - 1,
    scc: int = 0,
    arch: str = "gfx942",
    device: Device | None = None,
    mode: Mode | None = None,
    lds_bytes: int = 4096,
) -> Any:
    """Run on one wave of 64 lanes from the given registers (vector ones: 64 values or one); returns the wave afterwards.

    Raises what a launch would raise.
    """
    _, program = code_object(listing, arch, lds_bytes)
    device, mode = device or memoryless(arch), mode or Mode()
    group, waves, records = launching.new_group(arch, mode, lds_bytes), np.zeros(1, state.WAVE), program.records.copy()
    launching.reset(waves, group, program, 64, (0, 0, 0), 0)
    wave = waves[0]
    for register, value in (v or {}).items():
        wave["v"][register] = np.broadcast_to(np.asarray(value), (64,)).astype(np.asarray(value).dtype).view(np.uint32)
    for register, number in (s or {}).items():
        wave["s"][register] = number & 0xFFFFFFFF
    wave["s"][state.EXEC], wave["s"][state.EXEC + 1], wave["scc"] = execute & 0xFFFFFFFF, execute >> 32, scc
    compiled, arithmetic = compile_interpreter()
    stopped = compiled(waves, group, records, device.memory.arena(), arithmetic, np.zeros(1, np.int64), np.int64(mode.turn or 1 << 62))
    if stopped >= 0:
        raise launching.error_of(program, wave, (0, 0, 0))
    return Finished(wave, group[0], Report(program, records["executed"].copy(), launching.findings_of(program, group[0]), 0.0))


def launch(listing: Sequence[Instruction], *, block: int, mode: Mode, arch: str = "gfx942", device: Device | None = None) -> Report:
    """Launch the instructions as one workgroup of `block` threads; v0 holds the thread's number."""
    code, program = code_object(listing, arch)
    return (device or Device(arch)).launch(code, grid=(1, 1, 1), block=block, kernarg=bytes(8), mode=mode, program=program)


class Finished:
    """A wave after its program, with readable registers."""

    def __init__(self, wave: Any, group: Any, report: Report) -> None:
        self.wave, self.group, self.report = wave, group, report

    def v(self, register: int) -> Any:
        return self.wave["v"][register]

    def f(self, register: int) -> Any:
        return self.wave["v_f"][register]

    def q(self, register: int) -> Any:
        """A register pair as 64-bit patterns."""
        return self.wave["v"][register].astype(np.uint64) | self.wave["v"][register + 1].astype(np.uint64) << np.uint64(32)

    def s(self, register: int) -> int:
        return int(self.wave["s"][register])

    def s64(self, register: int) -> int:
        return self.s(register) | self.s(register + 1) << 32

    @property
    def scc(self) -> int:
        return int(self.wave["scc"])
