"""Encoding the operands of one instruction into its record: registers, constants, lane masks and modifiers."""

from __future__ import annotations

import struct
from typing import Any

from dualmla.emulator import state
from dualmla.emulator.decoder import Instruction

INLINE_FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0, 248: 0.15915494309189532}
"""Operand codes of the constants every encoding can name; the last is 1 / (2 pi)."""

_SPECIAL = {251: state.VCCZ, 252: state.EXECZ, 253: state.SCC}
NULL = 127
SDWA_WHOLE = 6


class RefusedError(Exception):
    """Why an instruction cannot be translated."""


def constant(code: int, literal: int, *, wide: bool = False) -> int | None:
    """The bit pattern (32 bits, or 64 as a signed number if `wide`) of a constant operand code; None if it is no constant."""
    if code == 255:
        return literal & 0xFFFFFFFF
    if 128 <= code <= 192:
        return code - 128
    if 193 <= code <= 208:
        return 192 - code if wide else (192 - code) & 0xFFFFFFFF
    if code in INLINE_FLOATS:
        form = "<d<q" if wide else "<f<I"
        return int(struct.unpack(form[2:], struct.pack(form[:2], INLINE_FLOATS[code]))[0])
    return None


class Encoder:
    """Fills in one record. Every method raises `RefusedError` for what the interpreter would not honour."""

    def __init__(self, record: Any, instruction: Instruction, arch: str) -> None:
        self.record, self.instruction, self.arch = record, instruction, arch
        record["dst"] = record["sdst"] = record["dpp"] = -1
        record["select"] = record["dst_select"] = SDWA_WHOLE
        record["passes"], record["size"], record["dst_width"] = 1, 4, 1

    def kind(self, kind: int, op: int = 0) -> None:
        self.record["kind"], self.record["op"] = kind, op

    def set(self, **fields: Any) -> None:
        for name, value in fields.items():
            self.record[name] = value

    def source(self, k: int, code: int, *, wide: bool = False, double: bool = False, registers: int = 1, accumulator: bool = False) -> None:
        """Operand `k`. `wide` operands are 64 bits (two registers); `registers` is how many in a row are read otherwise."""
        self.record["form"][k] = 2 if wide else 1
        self.record["registers"][k] = max(registers, 1 + wide)
        if code >= 256:
            first = code - 256 + (256 if accumulator else 0)
            if first + max(registers, 1 + wide) > state.VGPRS:
                raise RefusedError(f"source {k} runs past the last vector register")
            self.record["src"][k] = first
        elif code < 128 and code != NULL:
            self.record["src"][k] = state.SGPR + code
        elif code in _SPECIAL:
            self.record["src"][k] = _SPECIAL[code]
        else:
            if double and code == 255:
                raise RefusedError("a 32-bit literal for a float64 operand is not supported")
            value = constant(code, self.instruction.get("literal"), wide=wide)
            if value is None:
                raise RefusedError(f"operand code {code} is not supported")
            self.record["src"][k], self.record["literal"][k] = state.LITERAL, value

    def constant(self, k: int, value: int) -> None:
        self.record["src"][k], self.record["literal"][k], self.record["form"][k] = state.LITERAL, value, 1

    def mask(self, k: int, code: int) -> None:
        """Operand `k` is one bit a lane of the scalar register pair `code`."""
        if code >= 128:
            value = constant(code, 0, wide=True)
            if value is None:
                raise RefusedError(f"operand code {code} is not supported as a lane mask")
            self.record["src"][k], self.record["literal"][k] = state.LITERAL, value
        else:
            self.record["src"][k] = state.SGPR + code
        self.record["form"][k], self.record["registers"][k] = 3, 2

    def swap(self, j: int, k: int) -> None:
        for field in ("src", "literal", "form", "registers"):
            self.record[field][j], self.record[field][k] = self.record[field][k], self.record[field][j]

    def vector_modifiers(self, *, is_float: bool, half_result: bool = False, half_source: bool = False, saturates: bool = False) -> None:
        """Sign, clamp, SDWA and DPP modifiers of a VOP1, VOP2, VOPC or VOP3 instruction. `half_result` and `half_source`: operand
        selects choose the half that is written, or read of source 0. `saturates`: what is executed clamps."""
        get, name = self.instruction.get, self.instruction.name
        if name.startswith("V_BITOP3"):  # its truth table sits where the modifiers do
            if get("opsel"):
                raise RefusedError("operand selects are not supported")
            return
        if get("omod"):
            raise RefusedError("output modifiers (omod) are not supported")
        negate, absolute = get("neg"), get("abs")
        for k in range(2):
            negate |= get(f"src{k}_neg") << k
            absolute |= get(f"src{k}_abs") << k
        if (negate or absolute) and not is_float and name != "V_CNDMASK_B32":
            raise RefusedError("sign modifiers on an integer instruction")
        if get("clmp") and not is_float and not saturates:
            raise RefusedError("clamp on an integer instruction is not supported")
        if get("opsel") & ~(8 * half_result | half_source):
            raise RefusedError(f"operand selects {get('opsel'):#x} are not supported")
        self.set(negate=negate, absolute=absolute, clamp=get("clmp") and is_float)
        if half_result:
            self.set(dst_select=5 if get("opsel") & 8 else 4, dst_keep=1)
        if half_source:
            self.record["select"][0] = 5 if get("opsel") & 1 else 4
        encoding = self.instruction.encoding
        if encoding.endswith(("_SDWA", "_SDWA_SDST")):
            self._sdwa()
        elif encoding.endswith("_DPP16"):
            self.set(dpp=get("dpp"), dpp_zero=get("bc"), dpp_rows=get("row_mask"), dpp_banks=get("bank_mask"))
            if not supported_dpp(get("dpp")):
                raise RefusedError(f"DPP control {get('dpp'):#x} is not supported")

    def _sdwa(self) -> None:
        get = self.instruction.get
        self.set(select=(get("src0_sel"), get("src1_sel", SDWA_WHOLE)), extend=(get("src0_sext"), get("src1_sext")))
        if "vsrc1" not in self.instruction.fields:
            self.record["select"][1] = SDWA_WHOLE
        if "dst_sel" in self.instruction.fields:
            if get("dst_unused") == 1:
                raise RefusedError("SDWA sign extension of the destination is not supported")
            self.set(dst_select=get("dst_sel"), dst_keep=int(get("dst_unused") == 2))


def supported_dpp(control: int) -> bool:
    """Whether `lanes.dpp_source` knows this DPP control."""
    return control < 0x100 or control >> 4 in (0x10, 0x11, 0x12, 0x15) or control in (0x138, 0x140, 0x141, 0x142, 0x143)


def signed(value: int, bits: int) -> int:
    """A two's complement field of `bits` bits as a number."""
    return value - (1 << bits) if value >> (bits - 1) & 1 else value
