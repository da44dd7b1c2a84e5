"""Machine code -> instructions with named fields. The only file that knows tinygrad.

PyPI's `tinygrad` carries the encoding tables of AMD's ISA documents; nothing else of it is used. The test
`test_disassembly.py` holds its decoding (as `disassembly` prints it) against LLVM's over every MLA code object.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dualmla.emulator.elf import CodeObject
from dualmla.emulator.errors import UnsupportedInstructionError

UNDECODED = "UNDECODED"
_LEAVES = ("S_ENDPGM", "S_BRANCH")


@dataclass(frozen=True)
class Instruction:
    """One instruction. `name` is the opcode without its `_E32`/`_E64` suffix, `encoding` the format it is encoded in
    (`SOP2`, `VOP3P_MFMA`, `VOP2_DPP16`, ...). Register operands in `fields` are operand codes: 0..127 scalar, 128..255
    constants, 256.. vector registers."""

    address: int
    size: int
    name: str
    encoding: str
    fields: dict[str, int]

    def __getitem__(self, field: str) -> int:
        return self.fields[field]

    def get(self, field: str, default: int = 0) -> int:
        return self.fields.get(field, default)


@lru_cache(maxsize=65536)
def _decode(word: bytes) -> tuple[int, str, str, dict[str, int]]:
    from tinygrad.renderer.amd import decode_inst
    from tinygrad.renderer.amd.dsl import FixedBitField

    decoded: Any = decode_inst(word, "cdna")
    fields = {}
    for name, field in decoded._fields:
        if name != "op" and not isinstance(field, FixedBitField):
            value = getattr(decoded, name)
            fields[name] = int(getattr(value, "offset", value))
    opcode = decoded.op.name.removesuffix("_E64").removesuffix("_E32")
    return decoded.size(), opcode, type(decoded).__name__, fields


@lru_cache(maxsize=1)
def short_forms() -> frozenset[str]:
    """Opcodes that exist as VOP1, VOP2 or VOPC, beside the long form that all vector instructions have."""
    from tinygrad.runtime.autogen.amd.cdna.enum import VOP1Op, VOP2Op, VOPCOp

    return frozenset(op.name.removesuffix("_E32") for form in (VOP1Op, VOP2Op, VOPCOp) for op in form)


def decode(image: bytes, address: int) -> Instruction:
    """The instruction at `address` of a memory image. Raises `UnsupportedInstructionError` for an unknown encoding."""
    wide = image[address + 2 : address + 4] == b"\xac\xd3"  # the scale prefix of a 16-byte matrix instruction
    length = 16 if wide else 8
    word = image[address : address + length].ljust(length, b"\0")
    try:
        return Instruction(address, *_decode(word))
    except (ValueError, AssertionError, KeyError) as error:
        raise UnsupportedInstructionError(f"{address:#x}: no instruction is encoded as {word[:8].hex()} ({error})") from error


def instructions(code: CodeObject) -> Iterator[Instruction]:
    """Every instruction from the kernel's entry up to the last one in its code section that nothing runs past; what follows is
    padding. LLVM also lays blocks after the last `s_endpgm`, which then end in an `s_branch`.

    A word that is no instruction becomes one named `UNDECODED`, an error only if it is ever executed.
    """
    start, end = code.descriptor.entry, code.code[1]
    found = []
    while start < end:
        try:
            found.append(decode(code.image, start))
        except UnsupportedInstructionError:
            found.append(Instruction(start, 4, UNDECODED, "", {}))
        start += found[-1].size
    last = max((i for i, instruction in enumerate(found) if instruction.name in _LEAVES), default=-1)
    return iter(found[: last + 1])
