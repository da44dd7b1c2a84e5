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


def without_wait_before(code: CodeObject, opcode: str) -> CodeObject:
    """The first `opcode` no longer waits for what it reads."""
    listing = translate(code).listing
    first = next(i for i in listing if i.name == opcode)
    return without(code, [i.address for i in listing if i.name == "S_WAITCNT" and i.address < first.address][-1])


def without_barriers(code: CodeObject) -> CodeObject:
    return without(code, *(i.address for i in translate(code).listing if i.name == "S_BARRIER"))
