"""Matrix instructions (MFMA): D[i, j] = C[i, j] + sum over k of A[i, k] B[j, k], over the whole wave.

Operand layout: lane l of A and B holds row `l % dim` and `per` consecutive k's from `per * (l // dim)` on, packed in
its registers. Result register r of lane l is column `l % dim` of row `4 (l // 16) + r` for 16x16, and of row
`8 (r // 4) + 4 (l // 32) + r % 4` for 32x32. EXEC is ignored. Products are summed in float64 and rounded once: the
hardware's own order is not documented, so agreement is up to float32 rounding.
Source: AMD "CDNA3" and "CDNA4" Instruction Set Architecture reference guides, chapter "Matrix Arithmetic".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualmla.emulator import minifloat, state
from dualmla.emulator.jit import inlined, njit

FORMATS = ("bf16", "f16", "f32", "e4m3fnuz", "e5m2fnuz", "e4m3fn", "e5m2")
"""What one element of A or B can be."""
_BITS = {"bf16": 16, "f16": 16, "f32": 32}
BYTE_FORMATS = FORMATS.index("e4m3fnuz")


@dataclass(frozen=True)
class Shape:
    """One opcode's dimensions: `dim` x `dim` results, `depth` products each; element kinds of A and B."""

    dim: int
    depth: int
    left: str
    right: str

    @property
    def per(self) -> int:
        """Elements of A (and of B) a lane holds."""
        return self.depth * self.dim // state.LANES

    @property
    def registers(self) -> tuple[int, int]:
        """32-bit registers of A and B."""
        return self.per * _BITS.get(self.left, 8) // 32, self.per * _BITS.get(self.right, 8) // 32

    @property
    def results(self) -> int:
        return self.dim * self.dim // state.LANES


SHAPES = {
    "V_MFMA_F32_16X16X16_BF16": Shape(16, 16, "bf16", "bf16"),
    "V_MFMA_F32_32X32X8_BF16": Shape(32, 8, "bf16", "bf16"),
    "V_MFMA_F32_16X16X32_BF16": Shape(16, 32, "bf16", "bf16"),
    "V_MFMA_F32_32X32X16_BF16": Shape(32, 16, "bf16", "bf16"),
    "V_MFMA_F32_16X16X16_F16": Shape(16, 16, "f16", "f16"),
    "V_MFMA_F32_32X32X8_F16": Shape(32, 8, "f16", "f16"),
    "V_MFMA_F32_16X16X32_F16": Shape(16, 32, "f16", "f16"),
    "V_MFMA_F32_32X32X16_F16": Shape(32, 16, "f16", "f16"),
    "V_MFMA_F32_16X16X4_F32": Shape(16, 4, "f32", "f32"),
    "V_MFMA_F32_32X32X2_F32": Shape(32, 2, "f32", "f32"),
    "V_MFMA_F32_16X16X32_FP8_FP8": Shape(16, 32, "fp8", "fp8"),
    "V_MFMA_F32_16X16X32_FP8_BF8": Shape(16, 32, "fp8", "bf8"),
    "V_MFMA_F32_16X16X32_BF8_FP8": Shape(16, 32, "bf8", "fp8"),
    "V_MFMA_F32_16X16X32_BF8_BF8": Shape(16, 32, "bf8", "bf8"),
    "V_MFMA_F32_32X32X16_FP8_FP8": Shape(32, 16, "fp8", "fp8"),
    "V_MFMA_F32_32X32X16_FP8_BF8": Shape(32, 16, "fp8", "bf8"),
    "V_MFMA_F32_32X32X16_BF8_FP8": Shape(32, 16, "bf8", "fp8"),
    "V_MFMA_F32_32X32X16_BF8_BF8": Shape(32, 16, "bf8", "bf8"),
    "V_MFMA_F32_16X16X128_F8F6F4": Shape(16, 128, "fp8", "fp8"),
    "V_MFMA_F32_32X32X64_F8F6F4": Shape(32, 64, "fp8", "fp8"),
    "V_MFMA_SCALE_F32_16X16X128_F8F6F4": Shape(16, 128, "fp8", "fp8"),
    "V_MFMA_SCALE_F32_32X32X64_F8F6F4": Shape(32, 64, "fp8", "fp8"),
}
"""Opcode -> shape. `fp8` and `bf8` are the chip's own flavours: FNUZ on gfx942, OCP on gfx950."""

_FLAVOURS = {("fp8", "gfx942"): "e4m3fnuz", ("bf8", "gfx942"): "e5m2fnuz", ("fp8", "gfx950"): "e4m3fn", ("bf8", "gfx950"): "e5m2"}


def element(kind: str, arch: str) -> int:
    """Number of an element kind in `FORMATS`."""
    return FORMATS.index(_FLAVOURS.get((kind, arch), kind))


@lru_cache(maxsize=1)
def byte_values() -> NDArray[np.float64]:
    """[4, 256] the value of every 8-bit pattern in each of the 8-bit formats, in the order of `FORMATS`."""
    forms = (minifloat.E4M3FNUZ, minifloat.E5M2FNUZ, minifloat.E4M3FN, minifloat.E5M2)
    return np.array([[minifloat.decode(code, form) for code in range(256)] for form in forms])


@inlined
def element_value(wave: Any, register: Any, lane: Any, position: Any, form: Any, byte_table: Any) -> Any:
    """Element `position` of the packed operand that starts at `register`, as float64."""
    if form == 0:  # bf16 is the upper half of a float32
        word = np.int64(wave.v[register + (position >> 1), lane])
        return np.float64(np.uint32((word & 0xFFFF0000) if position & 1 else (word << 16) & 0xFFFFFFFF).view(np.float32))
    if form == 1:
        word = np.int64(wave.v[register + (position >> 1), lane])
        return minifloat.decode(word >> (16 * (position & 1)) & 0xFFFF, minifloat.F16)
    if form == 2:
        return np.float64(wave.v_f[register + position, lane])
    return byte_table[form - BYTE_FORMATS, np.int64(wave.v[register + (position >> 2), lane]) >> (8 * (position & 3)) & 255]


@inlined
def unpack(wave: Any, left: Any, right: Any, left_form: Any, right_form: Any, dim: Any, per: Any, byte_table: Any) -> Any:
    """Fill `wave.left` [dim, depth] and `wave.right` [depth, dim]."""
    shift = 4 if dim == 16 else 5
    depth = per * (64 >> shift)
    for lane in range(64):
        row, first = lane & (dim - 1), per * (lane >> shift)
        for position in range(per):
            wave.left[row * depth + first + position] = element_value(wave, left, lane, position, left_form, byte_table)
            wave.right[(first + position) * dim + row] = element_value(wave, right, lane, position, right_form, byte_table)


def _multiplier(dim: int) -> Any:
    """`wave.product` = `wave.left` @ `wave.right`, compiled for one `dim`: four columns at a time stay in registers."""

    @njit
    def multiply(wave: Any, depth: Any) -> Any:
        for i in range(dim):
            for j in range(0, dim, 4):
                s0 = s1 = s2 = s3 = 0.0
                for k in range(depth):
                    factor = wave.left[i * depth + k]
                    place = k * dim + j
                    s0 += factor * wave.right[place]
                    s1 += factor * wave.right[place + 1]
                    s2 += factor * wave.right[place + 2]
                    s3 += factor * wave.right[place + 3]
                place = i * dim + j
                wave.product[place], wave.product[place + 1], wave.product[place + 2], wave.product[place + 3] = s0, s1, s2, s3

    return multiply


multiply_16 = _multiplier(16)
multiply_32 = _multiplier(32)


def _adder(dim: int) -> Any:
    """D = product + C, compiled for one `dim`."""
    groups = state.LANES // dim

    @njit
    def add(wave: Any, ins: Any) -> Any:
        # all of C is read before any of D is written: LLVM lets C and a D of four registers overlap in part
        for register in range(dim * dim // 64):
            for lane in range(64):
                if ins.src[2] < state.SGPR:
                    wave.out_f[lane] = wave.v_f[ins.src[2] + register, lane]
                else:
                    wave.out[lane] = ins.literal[2]
            for group in range(groups):
                row = 4 * groups * (register >> 2) + 4 * group + (register & 3)
                line, added = wave.product[row * dim : (row + 1) * dim], wave.out_f[group * dim : (group + 1) * dim]
                for column in range(dim):
                    line[column] += np.float64(added[column])
        for register in range(dim * dim // 64):
            for group in range(groups):
                row = 4 * groups * (register >> 2) + 4 * group + (register & 3)
                line = wave.product[row * dim : (row + 1) * dim]
                result = wave.v_f[ins.dst + register, group * dim : (group + 1) * dim]
                for column in range(dim):
                    result[column] = np.float32(line[column])

    return add


add_16 = _adder(16)
add_32 = _adder(32)


def execute(wave: Any, ins: Any, group: Any) -> Any:
    """Run one matrix instruction; `ins.offset` = (dim, per), `ins.select` = element kinds of A and B."""
    dim, per = ins.offset[0], ins.offset[1]
    if ins.select[0] == 0 and ins.select[1] == 0:  # bf16, the common kind, compiled for itself
        unpack(wave, ins.src[0], ins.src[1], 0, 0, dim, per, group.byte_values)
    else:
        unpack(wave, ins.src[0], ins.src[1], ins.select[0], ins.select[1], dim, per, group.byte_values)
    if dim == 16:
        multiply_16(wave, per * 4)
        add_16(wave, ins)
    else:
        multiply_32(wave, per * 2)
        add_32(wave, ins)
