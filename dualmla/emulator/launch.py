"""Devices and launches: the public way to run a code object.

device = Device("gfx942")
q, out = device.put(q_array), device.empty(shape, np.float32)
report = device.launch(load_code_object(path), grid=(1, 1, 1), block=256, kernarg=pack(...))
out.numpy(), report.by_kind(), report.findings
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dualmla.emulator import findings, matrix, state
from dualmla.emulator.elf import CodeObject
from dualmla.emulator.errors import EmulatorError, MemoryFaultError, UnsupportedInstructionError
from dualmla.emulator.findings import Finding
from dualmla.emulator.interpreter import compile_interpreter
from dualmla.emulator.memory import Memory
from dualmla.emulator.translate import Program, translate

LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}
_LDS_ADDRESS_BITS = {"gfx942": 0xFFFF, "gfx950": 0x3FFFF}
"""Bits of M0 that address the LDS in a load into it."""


@dataclass(frozen=True)
class Mode:
    """How a launch is scheduled and watched.

    `turn`: waves take turns of this many instructions (None: each runs alone up to its next barrier). `order`: the order
    in which waves take their turns. `delayed`: results of loads arrive only when an `s_waitcnt` asks for them, so that a
    missing wait shows as wrong data and as a finding. `watch_lds`: the race detector and reads of unwritten LDS.
    """

    turn: int | None = None
    order: Sequence[int] | None = None
    delayed: bool = False
    watch_lds: bool = False


@dataclass(frozen=True)
class Buffer:
    """Device memory with a shape. `address` is what goes into kernel arguments."""

    device: Device
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def numpy(self) -> NDArray[Any]:
        """A copy of the contents."""
        return self.device.memory.read(self.address, self.shape, self.dtype)

    def written(self) -> NDArray[np.bool_]:
        """Per element, whether all of its bytes have been written."""
        size = self.dtype.itemsize
        flags = self.device.memory.written(self.address, int(np.prod(self.shape, dtype=int)) * size)
        return np.asarray(flags.reshape(-1, size).all(1).reshape(self.shape))


@dataclass(frozen=True)
class Report:
    """What a launch did."""

    program: Program
    counts: NDArray[np.int64]
    """Wave-instructions executed, one number an instruction of `program.listing`."""
    findings: list[Finding]
    seconds: float
    """Wall time of the execution, translation and compilation left out."""

    @property
    def executed(self) -> int:
        """Wave-instructions executed in all."""
        return int(self.counts.sum())

    def by_opcode(self) -> Counter[str]:
        """Wave-instructions executed, by opcode name."""
        total: Counter[str] = Counter()
        for instruction, count in zip(self.program.listing, self.counts, strict=True):
            if count:
                total[instruction.name] += int(count)
        return total

    def by_kind(self) -> Counter[str]:
        """Wave-instructions executed, by kind: VECTOR, MATRIX, SCALAR, LDS_READ, GLOBAL, WAIT ... (`state.KINDS`)."""
        total: Counter[str] = Counter()
        for kind, count in zip(self.program.records["kind"], self.counts, strict=True):
            if count:
                total[state.KINDS[kind]] += int(count)
        return total


@dataclass
class Device:
    """An emulated chip, `gfx942` or `gfx950`, with its memory."""

    arch: str
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        if self.arch not in LDS_BYTES:
            raise EmulatorError(f"arch {self.arch!r} is not emulated; known are {', '.join(LDS_BYTES)}")

    def put(self, array: ArrayLike, *, address: int | None = None) -> Buffer:
        """Copy a host array to the device."""
        host = np.asarray(array)
        return Buffer(self, self.memory.put(host, address=address), host.shape, host.dtype)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Buffer:
        """Device memory nobody has written: NaN patterns, and a read of it is a finding."""
        form = np.dtype(dtype)
        return Buffer(self, self.memory.allocate(int(np.prod(shape, dtype=int)) * form.itemsize), shape, form)

    def launch(
        self,
        code: CodeObject,
        *,
        grid: tuple[int, int, int],
        block: int,
        kernarg: bytes,
        mode: Mode | None = None,
        lds_bytes: int | None = None,
        program: Program | None = None,
    ) -> Report:
        """Run every workgroup of `grid` with `block` threads, one after the other.

        `kernarg` are the kernel's argument bytes. `lds_bytes`: LDS to allocate where the kernel descriptor leaves it to
        the launch (Triton). `program`: a translation other than the code object's own. Raises `UnsupportedInstructionError`
        or `MemoryFaultError`, naming the instruction and its address.
        """
        mode = mode or Mode()
        if code.arch != self.arch:
            raise EmulatorError(f"{code.name} is for {code.arch}, the device is a {self.arch}")
        if code.descriptor.scratch_bytes:
            raise EmulatorError(
                f"{code.name} spills to scratch memory ({code.descriptor.scratch_bytes} bytes a thread), which is not emulated"
            )
        size = lds_bytes if lds_bytes is not None else code.descriptor.lds_bytes
        if size > LDS_BYTES[self.arch]:
            raise EmulatorError(f"{code.name} wants {size} bytes of LDS, {self.arch} has {LDS_BYTES[self.arch]}")
        program = program or translate(code)
        arguments = self.memory.put(np.frombuffer(kernarg, np.uint8))
        group, records = new_group(self.arch, mode, size), program.records.copy()
        waves = np.zeros(-(-block // state.LANES), state.WAVE)
        order = np.asarray(range(len(waves)) if mode.order is None else mode.order, np.int64)
        (run, arithmetic), arena = compile_interpreter(), self.memory.arena()
        turn = np.int64(mode.turn or 1 << 62)
        start = time.perf_counter()
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    reset(waves, group, program, block, (x, y, z), arguments)
                    stopped = run(waves, group, records, arena, arithmetic, order, turn)
                    if stopped >= 0:
                        error = error_of(program, waves[stopped], (x, y, z))
                        error.findings = findings_of(program, group[0])
                        raise error
        seconds = time.perf_counter() - start
        return Report(program, records["executed"].copy(), findings_of(program, group[0]), seconds)


def new_group(arch: str, mode: Mode, lds_bytes: int) -> NDArray[np.void]:
    """What a workgroup's waves share, before its first launch."""
    group = np.zeros(1, state.GROUP)
    group["lds_bytes"], group["lds_mask"] = lds_bytes, _LDS_ADDRESS_BITS[arch]
    group["delayed"], group["watch"] = mode.delayed, mode.watch_lds
    group["byte_values"] = matrix.byte_values()
    return group


def reset(
    waves: NDArray[np.void], group: NDArray[np.void], program: Program, block: int, place: tuple[int, int, int], arguments: int
) -> None:
    """A fresh workgroup: poisoned registers and LDS, then what the hardware initialises."""
    descriptor = program.code.descriptor
    words = -(-int(group["lds_bytes"][0]) // 4)
    group["lds"][0, :words], group["epoch"] = state.POISON_LDS, 0
    if group["watch"]:
        group["written"][0, :words], group["write_epoch"][0, :words], group["read_epoch"][0, :, :words] = 0, -16, -1
    if group["delayed"]:
        group["in_flight"][0, :words] = 0
    for name in ("pc", "scc", "gpr_index", "status", "error", "vm_head", "vm_count", "lg_head", "lg_count", "pending", "pending_scalar"):
        waves[name] = 0
    waves["v"], waves["s"] = state.POISON_REGISTER, state.POISON_REGISTER
    for number in range(len(waves)):
        wave = waves[number]
        wave["number"] = number
        threads = min(state.LANES, block - number * state.LANES)
        active = (1 << threads) - 1
        wave["s"][state.EXEC], wave["s"][state.EXEC + 1] = active & 0xFFFFFFFF, active >> 32
        wave["v"][0] = np.arange(number * state.LANES, (number + 1) * state.LANES)
        if descriptor.kernarg_sgpr >= 0:
            wave["s"][descriptor.kernarg_sgpr] = arguments & 0xFFFFFFFF
            wave["s"][descriptor.kernarg_sgpr + 1] = arguments >> 32
        register = descriptor.user_sgprs
        for wanted, value in zip(descriptor.workgroup_id, place, strict=True):
            if wanted:
                wave["s"][register] = value
                register += 1


def error_of(program: Program, wave: Any, group: tuple[int, int, int]) -> EmulatorError:
    """The error that stopped a wave."""
    record = int(wave["pc"])
    where = f"{program.code.name}, workgroup {group}, wave {int(wave['number'])}"
    if wave["error"] == state.E_UNSUPPORTED:
        return UnsupportedInstructionError(f"{where}: {program.unsupported[record]}")
    return MemoryFaultError(f"{where}: {_label(program, record)}: {state.ERRORS[wave['error']]} ({int(wave['error_address']):#x})")


def _label(program: Program, record: int) -> str:
    return f"{program.listing[record].name} at {program.listing[record].address:#x}"


def findings_of(program: Program, group: Any) -> list[Finding]:
    """What the instruments noted, with the instructions named."""
    return [
        Finding(
            findings.KINDS[group["note_kind"][row]],
            _label(program, int(group["note_first"][row])),
            _label(program, int(group["note_second"][row])) if group["note_second"][row] >= 0 else None,
            int(group["note_count"][row]),
            int(group["note_address"][row]),
        )
        for row in np.flatnonzero(group["note_count"])
    ]
