"""Loading AMDGPU code objects: ELF segments, the kernel descriptor, and which chip they are for.

Sources: ELF-64; LLVM's "User Guide for AMDGPU Backend" (code object V3 and later: e_flags, kernel descriptor layout,
initial register state).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from dualmla.emulator.errors import CodeObjectError

MACHINES = {0x4C: "gfx942", 0x4F: "gfx950"}
"""EF_AMDGPU_MACH values (low byte of e_flags) of the chips emulated here."""

PT_LOAD, SHT_SYMTAB, SHT_DYNSYM = 1, 2, 11

_USER_SGPRS: tuple[tuple[str, int], ...] = (
    ("private segment buffer", 4),
    ("dispatch pointer", 2),
    ("queue pointer", 2),
    ("kernarg pointer", 2),
    ("dispatch id", 2),
)
_USER_SGPRS += (("flat scratch init", 2), ("private segment size", 1))
"""User scalar registers a descriptor can ask for, in the order the hardware hands them out, and their widths."""


@dataclass(frozen=True)
class KernelDescriptor:
    """What the hardware is told at launch. Sizes in bytes; `entry` is an address inside the image.

    Preloading of arguments into scalar registers, where a kernel asks for it, is not honoured, as on old firmware: such
    kernels begin with code that loads them, which preloading hardware would skip.
    """

    entry: int
    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    user_sgprs: int
    workgroup_id: tuple[bool, bool, bool]
    kernarg_sgpr: int
    """Scalar register pair holding the address of the kernel arguments. The other pointers a kernel can ask for (dispatch
    packet, queue, scratch) are not provided: their registers keep the poison pattern, and following it stops the run."""


@dataclass(frozen=True)
class CodeObject:
    """A loaded code object: its memory image, where its code lies, and the one kernel it holds."""

    name: str
    kernel: str
    arch: str
    image: bytes
    code: tuple[int, int]
    """First byte of the section with the code, and the byte after its last."""
    descriptor: KernelDescriptor


def load_code_object(source: str | PathLike[str] | bytes, *, name: str | None = None) -> CodeObject:
    """Load an AMDGPU code object from a file, or from its bytes (`name` then labels it in messages).

    Raises `CodeObjectError` if it is no ELF file, is for another chip, or holds no kernel or more than one.
    """
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    label = name or ("<bytes>" if isinstance(source, bytes) else Path(fspath(source)).name)
    if data[:6] != b"\x7fELF\x02\x01":
        raise CodeObjectError(f"{label} is not a little-endian ELF-64 file")
    flags = struct.unpack_from("<I", data, 48)[0]
    arch = MACHINES.get(flags & 0xFF)
    if arch is None:
        raise CodeObjectError(f"{label} is for machine {flags & 0xFF:#x}; the emulator knows {', '.join(MACHINES.values())}")
    image = _image(data)
    sections = _sections(data)
    if ".text" not in sections:
        raise CodeObjectError(f"{label} has no .text section")
    symbols = _symbols(data)
    kernels = [symbol for symbol in symbols if symbol.endswith(".kd")]
    if len(kernels) != 1:
        raise CodeObjectError(f"{label} holds {len(kernels)} kernels; one is expected")
    start, size = sections[".text"]
    return CodeObject(label, kernels[0].removesuffix(".kd"), arch, image, (start, start + size), _descriptor(image, symbols[kernels[0]]))


def _image(data: bytes) -> bytes:
    table, (entry_size, count) = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<HH", data, 54)
    segments = [struct.unpack_from("<IIQQQQQQ", data, table + i * entry_size) for i in range(count)]
    segments = [segment for segment in segments if segment[0] == PT_LOAD]
    image = bytearray(max((address + memory for _, _, _, address, _, _, memory, _ in segments), default=0))
    for _, _, offset, address, _, size, _, _ in segments:
        image[address : address + size] = data[offset : offset + size]
    return bytes(image)


def _section_headers(data: bytes) -> list[tuple[int, ...]]:
    table, (entry_size, count) = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<HH", data, 58)
    return [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry_size) for i in range(count)]


def _text(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()


def _sections(data: bytes) -> dict[str, tuple[int, int]]:
    """Section name -> (address, size)."""
    headers = _section_headers(data)
    names = headers[struct.unpack_from("<H", data, 62)[0]][4]
    return {_text(data, names + header[0]): (header[3], header[5]) for header in headers}


def _symbols(data: bytes) -> dict[str, int]:
    headers = _section_headers(data)
    symbols = {}
    for header in headers:
        if header[1] in (SHT_SYMTAB, SHT_DYNSYM):
            strings = headers[header[6]][4]
            for entry in range(header[4], header[4] + header[5], 24):
                name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", data, entry)
                symbols[_text(data, strings + name)] = value
    return symbols


def _descriptor(image: bytes, address: int) -> KernelDescriptor:
    lds, scratch, kernarg, _, entry = struct.unpack_from("<IIIIq", image, address)
    _, _, resources2, properties = struct.unpack_from("<IIIH", image, address + 44)
    register, kernarg_sgpr = 0, -1
    for bit, (what, width) in enumerate(_USER_SGPRS):
        if properties >> bit & 1:
            if what == "kernarg pointer":
                kernarg_sgpr = register
            register += width
    return KernelDescriptor(
        entry=address + entry,
        lds_bytes=lds,
        scratch_bytes=scratch,
        kernarg_bytes=kernarg,
        user_sgprs=resources2 >> 1 & 31,
        workgroup_id=(bool(resources2 >> 7 & 1), bool(resources2 >> 8 & 1), bool(resources2 >> 9 & 1)),
        kernarg_sgpr=kernarg_sgpr,
    )
