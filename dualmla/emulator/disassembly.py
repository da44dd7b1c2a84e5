"""Instructions as LLVM's assembler writes them, for error messages, listings and the test against `llvm-objdump`.

Covers what AITER's and Triton's kernels use. The widths of register operands come from the same tables that drive the
execution (`registry`, `matrix.SHAPES`), so that agreement with LLVM speaks for them too.
"""

from __future__ import annotations

from collections.abc import Callable

from dualmla.emulator import interpreter, matrix
from dualmla.emulator.decoder import Instruction, short_forms
from dualmla.emulator.operands import INLINE_FLOATS, NULL, signed
from dualmla.emulator.registry import SCALAR, VECTOR, WIDTH

assert interpreter.SEMANTICS  # importing it filled the registry

_SPECIAL = {106: "vcc", 124: "m0", 126: "exec", 251: "src_vccz", 252: "src_execz", 253: "src_scc"}
_HALVES = {106: "vcc_lo", 107: "vcc_hi", 126: "exec_lo", 127: "exec_hi"}
_SELECTS = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")
_UNUSED = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")
_NAMES = {"V_ACCVGPR_READ": "v_accvgpr_read_b32", "V_ACCVGPR_WRITE": "v_accvgpr_write_b32"}
_NAMES |= {"V_MAD_MIXLO_F16": "v_fma_mixlo_f16", "V_MAD_MIXHI_F16": "v_fma_mixhi_f16"}
_DWORDS = {"DWORD": 1, "DWORDX2": 2, "DWORDX3": 3, "DWORDX4": 4, "DWORDX8": 8, "DWORDX16": 16}
_LDS = {"B64": 2, "B96": 3, "B128": 4}
_DPP = {0x100: "row_shl", 0x110: "row_shr", 0x120: "row_ror", 0x150: "row_newbcast"}
_DPP_ALONE = {0x138: "wave_shr:1", 0x140: "row_mirror", 0x141: "row_half_mirror", 0x142: "row_bcast:15", 0x143: "row_bcast:31"}


def register(kind: str, first: int, width: int) -> str:
    return f"{kind}{first}" if width == 1 else f"{kind}[{first}:{first + width - 1}]"


def operand(code: int, width: int = 1, *, literal: int = 0, accumulator: bool = False) -> str:  # noqa: PLR0911 - one a range of codes
    """An operand code as text; `width` in 32-bit registers."""
    if code >= 256:
        return register("a" if accumulator else "v", code - 256, width)
    if code in _SPECIAL:
        return _HALVES.get(code, _SPECIAL[code]) if width == 1 else _SPECIAL[code]
    if code in _HALVES:
        return _HALVES[code]
    if code < 106:
        return register("s", code, width)
    if code == 255:
        return f"{literal:#x}"
    if code in INLINE_FLOATS:
        return "0.15915494" if code == 248 else str(INLINE_FLOATS[code])
    return str(code - 128 if code <= 192 else 192 - code)


def text(instruction: Instruction) -> str:
    """The instruction in LLVM's syntax. Raises `KeyError` for an opcode this module does not know."""
    for prefix, write in _FORMATS.items():
        if instruction.encoding.startswith(prefix):
            return write(instruction)
    raise KeyError(instruction.encoding)


def _scalar_load(instruction: Instruction) -> str:
    count = _DWORDS[instruction.name.rpartition("_")[2]]
    base, offset = operand(instruction["sbase"], 2), signed(instruction["offset"], 21)
    where = f"{offset:#x}" if instruction["imm"] else operand(instruction["offset"] & 127)
    return f"{instruction.name.lower()} {operand(instruction['sdata'], count)}, {base}, {where}"


def _sopp(instruction: Instruction) -> str:
    name, immediate = instruction.name.lower(), instruction["simm16"]
    if "branch" in name:
        return f"{name} {instruction.address + 4 + 4 * signed(immediate, 16):#x}"
    if name == "s_nop":
        return f"{name} {immediate}"
    if name == "s_waitcnt":
        counters = {
            "vmcnt": (immediate & 15 | immediate >> 10 & 0x30, 63),
            "expcnt": (immediate >> 4 & 7, 7),
            "lgkmcnt": (immediate >> 8 & 15, 15),
        }
        return " ".join([name, *(f"{counter}({value})" for counter, (value, full) in counters.items() if value != full)])
    return name


def _scalar(instruction: Instruction) -> str:
    name, literal = instruction.name, instruction.get("literal")
    if name == "S_SET_GPR_IDX_ON":
        return f"s_set_gpr_idx_on {operand(instruction['ssrc0'])}, gpr_idx(SRC0)"
    semantics = SCALAR[name.replace("_SAVEEXEC", "")]
    if name.endswith("_SAVEEXEC_B64"):
        return f"{name.lower()} {operand(instruction['sdst'], 2)}, {operand(instruction['ssrc0'], 2)}"
    if instruction.encoding.startswith("SOPK"):
        return f"{name.lower()} {operand(instruction['sdst'])}, {instruction['simm16']:#x}"
    letters = semantics.arguments[:1] if name.startswith("S_BITSET") else semantics.arguments  # the other is the destination
    sources = [operand(instruction[f"ssrc{k}"], WIDTH[letter], literal=literal) for k, letter in enumerate(letters)]
    destination = [operand(instruction["sdst"], WIDTH[semantics.results])] if semantics.results else []
    return f"{name.lower()} {', '.join(destination + sources)}"


def _buffer(instruction: Instruction) -> str:
    count = _DWORDS.get(instruction.name.rpartition("_")[2], 1)
    data = [] if instruction["lds"] else [operand(instruction["vdata"], count, accumulator=bool(instruction["acc"]))]
    address = operand(instruction["vaddr"]) if instruction["offen"] else "off"
    parts = [*data, address, operand(instruction["srsrc"], 4), operand(instruction["soffset"])]
    flags = " offen" * instruction["offen"] + (f" offset:{instruction['offset']}" if instruction["offset"] else "")
    return f"{instruction.name.lower()} {', '.join(parts)}{flags}{_caching(instruction)}" + " lds" * instruction["lds"]


def _caching(instruction: Instruction) -> str:
    return " sc0" * instruction["sc0"] + " nt" * instruction["nt"] + " sc1" * instruction["sc1"]


def _global(instruction: Instruction) -> str:
    """Without a scalar base address, the vector one has 64 bits."""
    count, scalar = _DWORDS.get(instruction.name.rpartition("_")[2], 1), instruction["saddr"] != NULL
    store, to_lds = "_STORE_" in instruction.name, "_LDS_" in instruction.name
    data = operand(instruction["data" if store else "vdst"], count, accumulator=bool(instruction["acc"]))
    address, base = operand(instruction["addr"], 2 - scalar), operand(instruction["saddr"], 2) if scalar else "off"
    parts = [address, data, base] if store else [address, base] if to_lds else [data, address, base]
    offset = signed(instruction["offset"], 13)
    return f"{instruction.name.lower()} {', '.join(parts)}" + (f" offset:{offset}" if offset else "") + _caching(instruction)


def _lds(instruction: Instruction) -> str:
    name, accumulator = instruction.name, bool(instruction["acc"])
    count = _LDS.get(name.split("_")[2], 1)
    twice = name.startswith(("DS_READ2", "DS_WRITE2"))
    offset = instruction["offset0"] | instruction["offset1"] << 8
    offsets: dict[str, int | str] = {"offset": offset}
    if twice:
        offsets = {f"offset{k}": instruction[f"offset{k}"] for k in range(2)}
    operands = [operand(instruction["addr"])]
    if not name.startswith("DS_WRITE"):
        operands.insert(0, operand(instruction["vdst"], count * (1 + twice), accumulator=accumulator))
    if name == "DS_SWIZZLE_B32" and offset & 0x83FF == 0x1F and (offset >> 10).bit_count() == 1:
        offsets["offset"] = f"swizzle(SWAP,{offset >> 10})"
    elif not name.startswith("DS_READ"):
        operands += [operand(instruction[f"data{k}"], count, accumulator=accumulator) for k in range(1 + twice)]
    return " ".join([f"{name.lower()} {', '.join(operands)}", *(f"{key}:{value}" for key, value in offsets.items() if value)])


def _matrix(instruction: Instruction) -> str:
    shape = matrix.SHAPES[instruction.name]
    accumulate = bool(instruction["acc_cd"])
    sources = [operand(instruction[f"src{k}"], shape.registers[k], accumulator=bool(instruction["acc"] >> k & 1)) for k in range(2)]
    ends = [operand(instruction[field], shape.results, accumulator=accumulate) for field in ("vdst", "src2")]
    return f"{instruction.name.lower()} {', '.join([ends[0], *sources, ends[1]])}"


def _bits(value: int, count: int) -> str:
    return "[" + ",".join(str(value >> k & 1) for k in range(count)) + "]"


def _packed(instruction: Instruction) -> str:
    name = instruction.name
    if name.startswith("V_ACCVGPR"):
        target = operand(instruction["vdst"], accumulator=name.endswith("WRITE"))
        return f"{_NAMES[name]} {target}, {operand(instruction['src0'], accumulator=name.endswith('READ'))}"
    if name in _NAMES:
        return _mixed(instruction)
    count = len(VECTOR[name].arguments)
    operands = [operand(instruction["vdst"], 2), *(operand(instruction[f"src{k}"], 2) for k in range(count))]
    upper = instruction["opsel_hi"] | instruction["opsel_hi2"] << 2
    flags = f" op_sel:{_bits(instruction['opsel'], count)}" if instruction["opsel"] else ""
    flags += f" op_sel_hi:{_bits(upper, count)}" if upper & ((1 << count) - 1) != (1 << count) - 1 else ""
    flags += f" neg_lo:{_bits(instruction['neg'], count)}" if instruction["neg"] else ""
    flags += f" neg_hi:{_bits(instruction['neg_hi'], count)}" if instruction["neg_hi"] else ""
    return f"{name.lower()} {', '.join(operands)}{flags}"


def _mixed(instruction: Instruction) -> str:
    """A mixed-precision FMA; its float32 operands are those without a bit of op_sel_hi."""
    operands = [_signed(instruction, k, operand(instruction[f"src{k}"]), absolute="neg_hi") for k in range(3)]
    upper = instruction["opsel_hi"] | instruction["opsel_hi2"] << 2
    flags = f" op_sel:{_bits(instruction['opsel'], 3)}" if instruction["opsel"] else ""
    flags += f" op_sel_hi:{_bits(upper, 3)}" if upper else ""
    return f"{_NAMES[instruction.name]} {', '.join([operand(instruction['vdst']), *operands])}{flags}"


def _vector(instruction: Instruction) -> str:
    name, encoding = instruction.name, instruction.encoding
    if name == "V_NOP":
        return "v_nop"
    if name in ("V_READLANE_B32", "V_WRITELANE_B32"):
        code = instruction["vdst"] & 255 if name == "V_READLANE_B32" else instruction["vdst"]
        return f"{name.lower()} {', '.join(map(operand, (code, instruction['src0'], instruction['src1'])))}"
    if name in ("V_READFIRSTLANE_B32", "V_PERMLANE16_SWAP_B32", "V_PERMLANE32_SWAP_B32", "V_SWAP_B32"):
        suffix = "_e32" if name.startswith("V_PERMLANE") else ""
        code = instruction["vdst"] & 255 if name == "V_READFIRSTLANE_B32" else instruction["vdst"]
        return f"{name.lower()}{suffix} {operand(code)}, {operand(instruction['src0'])}"
    if name == "V_ACCVGPR_MOV_B32":
        return f"v_accvgpr_mov_b32 {', '.join(operand(instruction[field], accumulator=True) for field in ('vdst', 'src0'))}"
    if name in ("V_FMAMK_F32", "V_FMAAK_F32"):
        sources = [operand(instruction["src0"], literal=instruction["literal"]), operand(instruction["vsrc1"] | 256)]
        sources.insert(1 if name == "V_FMAMK_F32" else 2, f"{instruction['literal']:#x}")
        return f"{name.lower()} {', '.join([operand(instruction['vdst']), *sources])}"
    semantics = VECTOR[name] if name in VECTOR else VECTOR[f"{name}.gfx942"]
    results = semantics.results
    target = operand(instruction.get("vdst", 106), 2) if results == "m" else operand(instruction["vdst"], WIDTH[results[0]])
    carry = [operand(instruction.get("sdst", 106), 2)] if len(results) > 1 else []
    suffix = {"VOP3": "_e64" * (name in short_forms()), "SDWA": "_sdwa", "DPP1": "_dpp"}.get(encoding.rpartition("_")[2][:4], "_e32")
    if encoding.startswith("VOP3"):
        suffix = "_e64" * (name in short_forms())
    return f"{name.lower()}{suffix} {', '.join([target, *carry, *_sources(instruction, semantics.arguments)])}{_modifiers(instruction)}"


def _sources(instruction: Instruction, arguments: str) -> list[str]:
    encoding, literal, name = instruction.encoding, instruction.get("literal"), instruction.name
    letters = arguments[:3] if name.startswith(("V_DIV_FMAS", "V_BITOP3")) else arguments.replace("l", "")
    if encoding.startswith("VOP3"):
        texts = [operand(instruction[f"src{k}"], 2 if letter == "m" else WIDTH[letter]) for k, letter in enumerate(letters)]
        return texts if name.startswith("V_BITOP3") else [_signed(instruction, k, written) for k, written in enumerate(texts)]
    variant = encoding.endswith(("_SDWA", "_DPP16", "_SDWA_SDST"))
    scalar = [instruction.get(f"s{k}") if variant else 0 for k in range(2)]
    first = instruction["vsrc0"] & 255 | 256 * (not scalar[0]) if variant else instruction["src0"]
    texts = [operand(first, WIDTH[letters[0]], literal=literal)]
    if "vsrc1" in instruction.fields:
        texts.append(operand(instruction["vsrc1"] & 255 | 256 * (not scalar[1]), WIDTH[letters[1]]))
    if variant:
        texts = [_sdwa_signed(instruction, k, written) for k, written in enumerate(texts)]
    return [*texts, "vcc"] if letters.endswith("m") else texts


def _signed(instruction: Instruction, k: int, written: str, *, absolute: str = "abs") -> str:
    inner = f"|{written}|" if instruction.get(absolute) >> k & 1 else written
    if not instruction.get("neg") >> k & 1:
        return inner
    return f"neg({inner})" if inner[0].isdigit() else f"-{inner}"


def _sdwa_signed(instruction: Instruction, k: int, written: str) -> str:
    inner = f"|{written}|" if instruction.get(f"src{k}_abs") else written
    inner = f"-{inner}" if instruction.get(f"src{k}_neg") else inner
    return f"sext({inner})" if instruction.get(f"src{k}_sext") else inner


def _modifiers(instruction: Instruction) -> str:
    name, get, flags = instruction.name, instruction.get, ""
    if name.startswith("V_BITOP3"):
        return f" bitop3:{get('omod') << 6 | get('abs') << 3 | get('neg'):#x}"
    if get("opsel"):  # conversions between float32 and float8 choose a half of what they write, or read
        flags += " op_sel:[1,0,0]" if name.startswith("V_CVT_SCALEF32") else " op_sel:[0,0,1]"
    flags += " clamp" * get("clmp")
    if instruction.encoding.endswith("_DPP16"):
        control = get("dpp")
        if control < 0x100:
            flags += f" quad_perm:[{','.join(str(control >> 2 * k & 3) for k in range(4))}]"
        else:
            flags += f" {_DPP_ALONE[control] if control in _DPP_ALONE else f'{_DPP[control & 0x1F0]}:{control & 15}'}"
        flags += f" row_mask:{get('row_mask'):#x} bank_mask:{get('bank_mask'):#x}" + " bound_ctrl:1" * get("bc")
    if "_SDWA" in instruction.encoding:
        if "dst_sel" in instruction.fields and not name.startswith("V_CVT_PK_F32"):
            flags += f" dst_sel:{_SELECTS[get('dst_sel')]} dst_unused:{_UNUSED[get('dst_unused')]}"
        flags += "".join(f" src{k}_sel:{_SELECTS[get(f'src{k}_sel')]}" for k in range(2) if f"vsrc{k}" in instruction.fields)
    return flags


_FORMATS: dict[str, Callable[[Instruction], str]] = {
    "SOPP": _sopp,
    "SOP": _scalar,
    "SMEM": _scalar_load,
    "MUBUF": _buffer,
    "GLOBAL": _global,
    "DS": _lds,
    "VOP3P_MFMA": _matrix,
    "VOP3P": _packed,
    "VOP": _vector,
}
"""Encoding prefix -> its writer; the first that fits is taken."""
