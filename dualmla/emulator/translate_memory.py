"""Encoding of memory instructions: scalar loads, buffers, global and flat accesses, and the LDS."""

from __future__ import annotations

from dualmla.emulator import state
from dualmla.emulator.operands import NULL, Encoder, RefusedError, signed

_DWORDS = {"DWORD": 1, "DWORDX2": 2, "DWORDX3": 3, "DWORDX4": 4, "DWORDX8": 8, "DWORDX16": 16}
_PARTS = {"UBYTE": (1, 0), "SBYTE": (1, 1), "USHORT": (2, 0), "SSHORT": (2, 1), "BYTE": (1, 0), "SHORT": (2, 0)}
"""Width in bytes and signedness of loads and stores narrower than a dword."""

_LDS_SIZES = {"B8": (1, 1, 0), "U8": (1, 1, 0), "I8": (1, 1, 1), "B16": (1, 2, 0), "U16": (1, 2, 0), "I16": (1, 2, 1)}
_LDS_SIZES |= {"B32": (1, 4, 0), "B64": (2, 4, 0), "B96": (3, 4, 0), "B128": (4, 4, 0)}
"""Element count, bytes an element, signedness."""

SWIZZLE = 2
TRANSPOSE_16, TRANSPOSE_8 = 4, 8
"""Elements of a 64-bit lane chunk in a transposing LDS read."""


def encode_smem(encoder: Encoder) -> None:
    instruction = encoder.instruction
    operation, _, width = instruction.name.rpartition("_")
    if operation not in ("S_LOAD", "S_BUFFER_LOAD") or width not in _DWORDS:
        raise RefusedError("not supported")
    encoder.kind(state.SCALAR_LOAD)
    encoder.set(dst=instruction["sdata"], count=_DWORDS[width], flags=state.F_BUFFER if operation == "S_BUFFER_LOAD" else 0)
    encoder.source(0, instruction["sbase"], wide=True)
    offset = signed(instruction["offset"], 21)
    if instruction["soffset_en"]:
        encoder.source(1, instruction["soffset"])
    elif not instruction["imm"]:  # the offset field then names the scalar register that holds the offset
        encoder.source(1, instruction["offset"] & 127)
    else:
        encoder.constant(1, 0)
    encoder.set(offset=(offset if instruction["imm"] else 0, 0))


def _memory_width(encoder: Encoder, width: str) -> None:
    half = width.endswith("_D16_HI")
    keep = half or width.endswith("_D16")
    stem = width.removesuffix("_D16_HI").removesuffix("_D16")
    if stem in _DWORDS and not keep:
        encoder.set(count=_DWORDS[stem], size=4)
    elif stem in _PARTS:
        encoder.set(count=1, size=_PARTS[stem][0], signed=_PARTS[stem][1])
    else:
        raise RefusedError("this access width is not supported")
    encoder.record["flags"] |= (state.F_HIGH_HALF if half else 0) | (state.F_KEEP_HALF if keep else 0)


def encode_mubuf(encoder: Encoder) -> None:
    instruction = encoder.instruction
    name = instruction.name
    operation = next((o for o in ("BUFFER_LOAD_", "BUFFER_STORE_") if name.startswith(o)), None)
    if operation is None or "FORMAT" in name:
        raise RefusedError("not supported")
    if instruction["idxen"]:
        raise RefusedError("indexed buffer addressing (idxen) is not supported")
    store = operation == "BUFFER_STORE_"
    encoder.kind(state.GLOBAL)
    encoder.set(flags=state.F_BUFFER | state.F_STORE * store | state.F_OFFEN * instruction["offen"] | state.F_TO_LDS * instruction["lds"])
    _memory_width(encoder, name.removeprefix(operation))
    _vector_data(encoder, instruction["vdata"], store)
    if instruction["offen"]:
        encoder.source(0, instruction["vaddr"])
    encoder.source(1, instruction["srsrc"], registers=4)
    encoder.source(2, instruction["soffset"])
    encoder.set(offset=(instruction["offset"], 0))


def encode_flat(encoder: Encoder) -> None:
    instruction = encoder.instruction
    name = instruction.name
    stem = name.split("_", 1)[1]
    to_lds = stem.startswith("LOAD_LDS_")
    operation = "LOAD_LDS_" if to_lds else "LOAD_" if stem.startswith("LOAD_") else "STORE_"
    if not stem.startswith(operation):
        raise RefusedError("not supported")
    encoder.kind(state.GLOBAL)
    scalar = name.startswith("GLOBAL") and instruction["saddr"] != NULL
    encoder.set(flags=state.F_STORE * (operation == "STORE_") | state.F_TO_LDS * to_lds | state.F_SADDR * scalar)
    _memory_width(encoder, stem.removeprefix(operation))
    store = operation == "STORE_"
    _vector_data(encoder, instruction["data"] if store else instruction["vdst"], store)
    encoder.source(0, instruction["addr"], wide=not scalar)
    if scalar:
        encoder.source(1, instruction["saddr"], wide=True)
    offset = signed(instruction["offset"], 13) if name.startswith("GLOBAL") else instruction["offset"]
    encoder.set(offset=(offset, 0))


def _vector_data(encoder: Encoder, code: int, store: bool) -> None:
    """The registers loaded into are `dst`; those stored are source 3."""
    accumulator, count = bool(encoder.instruction["acc"]), int(encoder.record["count"])
    if store:
        encoder.source(3, code, registers=count, accumulator=accumulator)
    encoder.set(dst=code - 256 + 256 * accumulator)
    if encoder.record["dst"] + count > state.VGPRS:
        raise RefusedError("the data runs past the last vector register")


def encode_lds(encoder: Encoder) -> None:
    instruction = encoder.instruction
    name = instruction.name
    if instruction["gds"]:
        raise RefusedError("global data share is not supported")
    accumulator = bool(instruction["acc"])
    offset = instruction["offset0"] | instruction["offset1"] << 8
    encoder.source(0, instruction["addr"])
    encoder.set(dst=instruction["vdst"] - 256 + 256 * accumulator, count=1, offset=(offset, 0))
    if name in ("DS_BPERMUTE_B32", "DS_PERMUTE_B32"):
        encoder.kind(state.LDS_PERMUTE, op=int(name == "DS_PERMUTE_B32"))
        encoder.source(1, instruction["data0"], accumulator=accumulator)
        return
    if name == "DS_SWIZZLE_B32":
        if offset >> 15 and offset >> 8 != 0x80:
            raise RefusedError(f"swizzle {offset:#x} is not supported: neither a bit mask nor a permutation of four lanes")
        encoder.kind(state.LDS_PERMUTE, op=SWIZZLE)
        return
    if name in ("DS_READ_B64_TR_B16", "DS_READ_B64_TR_B8"):
        encoder.kind(state.LDS_TRANSPOSE, op=TRANSPOSE_16 if name.endswith("B16") else TRANSPOSE_8)
        encoder.set(count=2)
        return
    parts = name.split("_")
    high, keep = name.endswith("D16_HI"), "D16" in name
    width = parts[2] if len(parts) > 2 else ""
    operation = parts[1]
    if width not in _LDS_SIZES or operation not in ("READ", "READ2", "READ2ST64", "WRITE", "WRITE2", "WRITE2ST64"):
        raise RefusedError("not supported")
    count, size, sign = _LDS_SIZES[width]
    encoder.kind(state.LDS_READ if operation.startswith("READ") else state.LDS_WRITE)
    encoder.set(count=count, size=size, signed=sign, flags=state.F_HIGH_HALF * high | state.F_KEEP_HALF * keep)
    if operation.startswith("WRITE"):
        encoder.source(1, instruction["data0"], registers=count, accumulator=accumulator)
    if "2" in operation:
        stride = 4 * count * (64 if operation.endswith("ST64") else 1)
        encoder.set(passes=2, offset=(instruction["offset0"] * stride, instruction["offset1"] * stride))
        if operation.startswith("WRITE"):
            encoder.source(2, instruction["data1"], registers=count, accumulator=accumulator)
    if encoder.record["dst"] + count * encoder.record["passes"] > state.VGPRS:
        raise RefusedError("the result runs past the last vector register")
