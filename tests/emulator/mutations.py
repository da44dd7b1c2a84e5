"""Faults planted into machine code."""

from __future__ import annotations

from dataclasses import replace

from dualmla.emulator import CodeObject
from dualmla.emulator.translate import translate

S_NOP = 0xBF800000


def without(code: CodeObject, *addresses: int) -> CodeObject:
    """The 4-byte instructions at these addresses do nothing."""
    image = bytearray(code.image)
    for address in addresses:
        image[address : address + 4] = S_NOP.to_bytes(4, "little")
    return replace(code, image=bytes(image))


def without_waits_before(code: CodeObject, opcode: str) -> CodeObject:
    """No `opcode` waits for what it reads: the last wait before each is gone."""
    waits, dropped = [], set()
    for instruction in translate(code).listing:
        if instruction.name == "S_WAITCNT":
            waits.append(instruction.address)
        elif instruction.name == opcode and waits:
            dropped.add(waits[-1])
    return without(code, *dropped)


def without_barriers(code: CodeObject) -> CodeObject:
    return without(code, *(i.address for i in translate(code).listing if i.name == "S_BARRIER"))
