"""Instructions -> the records the interpreter runs (`state.INSTRUCTION`), one to one.

Whatever an instruction carries that its executor does not honour (a modifier, an operand, an addressing mode) is refused
here. A refused instruction becomes an UNSUPPORTED record; reaching it raises `UnsupportedInstructionError` with the reason, and
`Program.unsupported` lists them all without running anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualmla.emulator import matrix, state
from dualmla.emulator.decoder import Instruction, instructions
from dualmla.emulator.elf import CodeObject
from dualmla.emulator.operands import Encoder, RefusedError
from dualmla.emulator.registry import SCALAR, VECTOR
from dualmla.emulator.translate_memory import encode_flat, encode_lds, encode_mubuf, encode_smem

_NOTHING: tuple[str, ...] = (
    "S_NOP",
    "S_SETPRIO",
    "S_SLEEP",
    "S_ICACHE_INV",
    "S_DCACHE_INV",
    "S_DCACHE_WB",
    "V_NOP",
    "S_TTRACEDATA",
    "S_INCPERFLEVEL",
)
_NOTHING += ("S_DECPERFLEVEL", "BUFFER_WBL2", "BUFFER_INV", "BUFFER_GL0_INV")
_CONDITIONS = {"SCC0": 0, "SCC1": 1, "VCCZ": 2, "VCCNZ": 3, "EXECZ": 4, "EXECNZ": 5}
BRANCH_ALWAYS = 6
SWAPS = {"V_PERMLANE16_SWAP_B32": 16, "V_PERMLANE32_SWAP_B32": 32, "V_SWAP_B32": 0}
ONE = 242
"""Operand code of 1.0."""
READ_FIRST_LANE, READ_LANE, WRITE_LANE = range(3)
_HALF_RESULTS = ("V_CVT_PK_FP8_F32",)
_MIXED = ("V_MAD_MIXLO_F16", "V_MAD_MIXHI_F16")
_SCALED = ("V_CVT_SCALEF32_PK_BF16_FP8", "V_CVT_SCALEF32_PK_F32_FP8")
_PACKED = ("V_PK_MOV_B32", "V_PK_ADD_F32", "V_PK_MUL_F32", "V_PK_FMA_F32")
_SATURATING = ("V_ADD_U32", "V_SUB_U32")
"""Integer instructions whose clamp has semantics of its own, under the name with `.clamp`."""
_CHIP_SPECIFIC = ("V_CVT_PK_FP8_F32", "V_CVT_F32_FP8", "V_CVT_F32_BF8", "V_CVT_PK_F32_FP8")


@dataclass(frozen=True)
class Program:
    """A translated code object: `records[i]` is `listing[i]` encoded; execution starts at 0."""

    code: CodeObject
    listing: list[Instruction]
    records: NDArray[np.void]
    unsupported: dict[int, str] = field(default_factory=dict)
    """Record number -> why that instruction cannot be run."""


@lru_cache(maxsize=64)
def translate(code: CodeObject) -> Program:
    """Encode every instruction of `code` for the interpreter. Raises nothing for instructions it must refuse."""
    return encode_listing(code, list(instructions(code)))


def encode_listing(code: CodeObject, listing: list[Instruction]) -> Program:
    """Encode a given list of instructions, the first one being the entry."""
    records = np.zeros(len(listing), state.INSTRUCTION)
    numbers = {instruction.address: number for number, instruction in enumerate(listing)}
    unsupported = {}
    for number, instruction in enumerate(listing):
        encoder = Encoder(records[number], instruction, code.arch)
        try:
            encode(encoder, numbers)
        except RefusedError as refusal:
            records[number]["kind"] = state.UNSUPPORTED
            unsupported[number] = f"{instruction.address:#x}: {instruction.name} ({instruction.encoding}): {refusal}"
    return Program(code, listing, records, unsupported)


def encode(encoder: Encoder, numbers: dict[int, int]) -> None:
    """Fill in one record. `numbers` maps addresses to record numbers, for branches. Raises `RefusedError`."""
    name, encoding = encoder.instruction.name, encoder.instruction.encoding
    if name in _NOTHING:
        encoder.kind(state.NOTHING)
        return
    for prefix, encode_format in _FORMATS.items():
        if encoding.startswith(prefix):
            if prefix == "SOPP":
                _encode_sopp(encoder, numbers)
            else:
                encode_format(encoder)
            return
    raise RefusedError("this encoding is not supported")


def _encode_sopp(encoder: Encoder, numbers: dict[int, int]) -> None:
    instruction = encoder.instruction
    name, immediate = instruction.name, instruction["simm16"]
    if name == "S_WAITCNT":
        encoder.kind(state.WAIT)
        encoder.set(offset=(immediate & 15 | immediate >> 10 & 0x30, immediate >> 8 & 15))
    elif name == "S_BARRIER":
        encoder.kind(state.BARRIER)
    elif name == "S_ENDPGM":
        encoder.kind(state.END)
    elif name == "S_SET_GPR_IDX_OFF":
        encoder.kind(state.GPR_INDEX, op=0)
    elif name == "S_BRANCH" or name.removeprefix("S_CBRANCH_") in _CONDITIONS:
        target = instruction.address + instruction.size + 4 * (immediate - 0x10000 if immediate & 0x8000 else immediate)
        if target not in numbers:
            raise RefusedError(f"branches to {target:#x}, where no instruction starts")
        encoder.kind(state.BRANCH, op=_CONDITIONS.get(name.removeprefix("S_CBRANCH_"), BRANCH_ALWAYS))
        encoder.set(target=numbers[target])
    else:
        raise RefusedError("not supported")


def _encode_scalar(encoder: Encoder) -> None:
    instruction = encoder.instruction
    name = instruction.name
    if name == "S_SET_GPR_IDX_ON":
        if instruction["ssrc1"] != 1:
            raise RefusedError(f"index mode {instruction['ssrc1']}: only source 0 can be indexed")
        encoder.kind(state.GPR_INDEX, op=1)
        encoder.source(0, instruction["ssrc0"])
        return
    if name.endswith("_SAVEEXEC_B64"):
        operation = SCALAR.get(name.replace("_SAVEEXEC", ""))
        if operation is None:
            raise RefusedError("not supported")
        encoder.kind(state.SAVE_EXEC, op=operation.number)
        encoder.source(0, instruction["ssrc0"], wide=True)
        encoder.set(dst=instruction["sdst"])
        return
    semantics = SCALAR.get(name)
    if semantics is None:
        raise RefusedError("not supported")
    encoder.kind(state.SCALAR, op=semantics.number)
    if instruction.encoding.startswith("SOPK"):
        immediate = instruction["simm16"]
        signed = semantics.arguments.startswith("i") or name == "S_MOVK_I32"
        value = immediate - 0x10000 if signed and immediate & 0x8000 else immediate
        if len(semantics.arguments) == 2:
            encoder.source(0, instruction["sdst"])
        encoder.constant(len(semantics.arguments) - 1, value)
    else:
        for k, letter in enumerate(semantics.arguments):
            old = k == 1 and name.startswith("S_BITSET")
            encoder.source(k, instruction["sdst" if old else f"ssrc{k}"], wide=letter == "q")
    if semantics.results:
        encoder.set(dst=instruction["sdst"], dst_width=2 if semantics.results == "q" else 1)


def _encode_matrix(encoder: Encoder) -> None:
    instruction = encoder.instruction
    shape = matrix.SHAPES.get(instruction.name)
    if shape is None:
        raise RefusedError("this matrix instruction is not supported")
    if instruction.encoding == "VOP3PX2":
        raise RefusedError("scaled matrix instructions are not supported")
    if instruction["abid"]:
        raise RefusedError("broadcast of matrix blocks (abid) is not supported")
    kinds = [shape.left, shape.right]
    if instruction.name.endswith("F8F6F4"):
        for k, code in enumerate((instruction["cbsz"], instruction["blgp"])):
            if code > 1:
                raise RefusedError("6-bit and 4-bit matrix elements are not supported")
            kinds[k] = ("fp8", "bf8")[code]
    elif instruction["cbsz"] or instruction["blgp"]:
        raise RefusedError("matrix operand modifiers (cbsz, blgp) are not supported")
    accumulate = bool(instruction["acc_cd"])
    encoder.kind(state.MATRIX)
    for k in range(2):
        encoder.source(k, instruction[f"src{k}"], registers=shape.registers[k], accumulator=bool(instruction["acc"] >> k & 1))
    encoder.source(2, instruction["src2"], registers=shape.results, accumulator=accumulate)
    if any(state.SGPR <= encoder.record["src"][k] < state.LITERAL for k in range(3)):
        raise RefusedError("scalar registers as matrix operands are not supported")
    encoder.set(dst=instruction["vdst"] - 256 + 256 * accumulate, offset=(shape.dim, shape.per))
    encoder.set(select=tuple(matrix.element(kind, encoder.arch) for kind in kinds))
    if encoder.record["dst"] + shape.results > state.VGPRS:
        raise RefusedError("the result runs past the last vector register")


def _encode_vector(encoder: Encoder) -> None:
    instruction = encoder.instruction
    name, encoding = instruction.name, instruction.encoding
    if name in ("V_READFIRSTLANE_B32", "V_READLANE_B32", "V_WRITELANE_B32"):
        _encode_lane_access(encoder)
        return
    if name in SWAPS:
        encoder.kind(state.LANE_SWAP, op=SWAPS[name])
        encoder.source(0, instruction["src0"])
        encoder.source(1, instruction["vdst"])  # read as well
        encoder.set(dst=instruction["vdst"] - 256)
        return
    saturates = name in _SATURATING and bool(instruction.get("clmp"))
    variant = f".{encoder.arch}" if name in _CHIP_SPECIFIC else ".clamp" if saturates else ""
    semantics = VECTOR.get(name + variant)
    if semantics is None:
        raise RefusedError("not supported")
    encoder.kind(state.VECTOR, op=semantics.number)
    operands = _vector_operands(instruction)
    letters = semantics.arguments.replace("l", "")
    if name.startswith("V_BITOP3"):
        encoder.constant(3, instruction["omod"] << 6 | instruction["abs"] << 3 | instruction["neg"])
        letters = letters[:3]
    for k, letter in enumerate(letters):
        if letter == "m":
            encoder.mask(k, instruction["src2"] if encoding.startswith("VOP3") and name != "V_DIV_FMAS_F32" else state.VCC)
        elif name in ("V_FMAC_F32", "V_FMAC_F64") and k == 2:
            encoder.source(k, instruction["vdst"], wide=letter == "d")
        elif operands[k] is None:
            encoder.constant(k, instruction["literal"])
        else:
            encoder.source(k, operands[k], wide=letter in "qd", double=letter == "d", accumulator=name == "V_ACCVGPR_MOV_B32")
    if name == "V_FMAMK_F32":  # a * K + b
        encoder.swap(1, 2)
    encoder.vector_modifiers(
        is_float=letters[0] in "fd", half_result=name in _HALF_RESULTS, half_source=name in _SCALED, saturates=saturates
    )
    if name in _SCALED and operands[1] != ONE:
        raise RefusedError("a scale other than the constant 1.0 is not supported")
    _vector_results(encoder, semantics.results)


def _vector_operands(instruction: Instruction) -> list[Any]:
    """Operand codes in order; None stands for the instruction's literal."""
    encoding, name = instruction.encoding, instruction.name
    if encoding.endswith(("_SDWA", "_DPP16", "_SDWA_SDST")):
        scalar0 = encoding.endswith(("_SDWA", "_SDST")) and instruction.get("s0")
        scalar1 = encoding.endswith(("_SDWA", "_SDST")) and instruction.get("s1")
        first = instruction["vsrc0"] & 255 if scalar0 else instruction["vsrc0"] | 256
        second = None
        if "vsrc1" in instruction.fields:
            second = instruction["vsrc1"] & 255 if scalar1 else instruction["vsrc1"] | 256
        return [first, second]
    if encoding.startswith("VOP3"):
        return [instruction.get(f"src{k}") for k in range(3)]
    second = instruction["vsrc1"] | 256 if "vsrc1" in instruction.fields else None
    if name in ("V_FMAMK_F32", "V_FMAAK_F32", "V_MADAK_F32", "V_MADMK_F32"):
        return [instruction["src0"], second, None]
    return [instruction["src0"], second]


def _vector_results(encoder: Encoder, results: str) -> None:
    instruction = encoder.instruction
    fields = instruction.fields
    if results == "m":
        if instruction.encoding == "VOPC_SDWA_SDST":
            encoder.set(sdst=instruction["sdst"] if instruction["sd"] else state.VCC, dst=-1)
        else:
            encoder.set(sdst=fields.get("vdst", state.VCC), dst=-1)
        return
    accumulator = 256 if instruction.name in ("V_ACCVGPR_WRITE", "V_ACCVGPR_MOV_B32") else 0
    encoder.set(dst=instruction["vdst"] - 256 + accumulator, dst_width=2 if results[0] in "qd" else 1)
    encoder.set(sdst=fields.get("sdst", state.VCC) if results.endswith("m") else -1)


def _encode_lane_access(encoder: Encoder) -> None:
    instruction = encoder.instruction
    name = instruction.name
    encoder.source(0, instruction["src0"])
    if name == "V_READFIRSTLANE_B32":
        encoder.kind(state.LANE_ACCESS, op=READ_FIRST_LANE)
    else:
        encoder.kind(state.LANE_ACCESS, op=READ_LANE if name == "V_READLANE_B32" else WRITE_LANE)
        encoder.source(1, instruction["src1"])
    destination = instruction["vdst"]
    encoder.set(dst=destination - 256 if name == "V_WRITELANE_B32" else destination & 255)


def _encode_packed(encoder: Encoder) -> None:
    instruction = encoder.instruction
    name = instruction.name
    if name in ("V_ACCVGPR_READ", "V_ACCVGPR_WRITE"):
        encoder.kind(state.VECTOR, op=VECTOR[name].number)
        encoder.source(0, instruction["src0"], accumulator=name == "V_ACCVGPR_READ")
        _vector_results(encoder, "u")
        return
    if name in _MIXED:
        _encode_mixed(encoder)
        return
    semantics = VECTOR.get(name) if name in _PACKED else None
    if semantics is None:
        raise RefusedError("not supported")
    encoder.kind(state.VECTOR, op=semantics.number)
    upper = instruction["opsel_hi"] | instruction["opsel_hi2"] << 2
    for k in range(len(semantics.arguments)):
        encoder.source(k, instruction[f"src{k}"], registers=2)
    if instruction["clmp"]:
        raise RefusedError("clamp is not supported on packed instructions")
    encoder.set(high=instruction["opsel"] | upper << 4, dst=instruction["vdst"] - 256, dst_width=2)
    if name != "V_PK_MOV_B32":
        encoder.set(passes=2, dst_width=1, negate=instruction["neg"], negate_high=instruction["neg_hi"])


def _encode_mixed(encoder: Encoder) -> None:
    """float32 in, one half of a register out; neg_hi says which operands are taken without their sign."""
    instruction = encoder.instruction
    if instruction["opsel"] or instruction["opsel_hi"] or instruction["opsel_hi2"]:
        raise RefusedError("operands of 16 bits are not supported")
    if instruction["clmp"]:
        raise RefusedError("clamp is not supported on mixed-precision instructions")
    encoder.kind(state.VECTOR, op=VECTOR[instruction.name].number)
    for k in range(3):
        encoder.source(k, instruction[f"src{k}"])
    encoder.set(negate=instruction["neg"], absolute=instruction["neg_hi"])
    encoder.set(dst=instruction["vdst"] - 256, dst_select=4 if "LO" in instruction.name else 5, dst_keep=1)


_FORMATS: dict[str, Callable[[Encoder], None]] = {
    "SOPP": _encode_scalar,
    "SOP": _encode_scalar,
    "SMEM": encode_smem,
    "VOP3PX2": _encode_matrix,
    "VOP3P_MFMA": _encode_matrix,
    "VOP3P": _encode_packed,
    "VOP": _encode_vector,
    "DS": encode_lds,
    "MUBUF": encode_mubuf,
    "GLOBAL": encode_flat,
    "FLAT": encode_flat,
}
"""Encoding prefix -> its encoder; the first that fits is taken."""
