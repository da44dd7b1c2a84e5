"""Operands and results of vector instructions: registers to 64-lane rows and back, with the modifiers between.

`fetch` brings one operand into its row (scalar broadcast, DPP, SDWA, sign), `write` puts the result row into the
destination under the execution mask. Also the instructions that move values across lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dualmla.emulator import state
from dualmla.emulator.jit import inlined, njit

SIGN_32, SIGN_64 = 0x80000000, -(2**63)


@inlined
def pair(wave: Any, register: Any) -> Any:
    """A 64-bit scalar register pair as a signed bit pattern."""
    return np.int64(wave.s[register]) | np.int64(wave.s[register + 1]) << 32


@inlined
def set_pair(wave: Any, register: Any, value: Any) -> Any:
    wave.s[register] = value & 0xFFFFFFFF
    wave.s[register + 1] = value >> 32 & 0xFFFFFFFF


@inlined
def scalar_operand(wave: Any, ins: Any, k: Any) -> Any:
    """Scalar operand `k` of `ins` as int64: 32 bits unsigned, or the 64-bit pattern of a wide one."""
    code = ins.src[k]
    if code == state.LITERAL:
        return ins.literal[k]
    if code >= state.VCCZ:
        if code == state.SCC:
            return wave.scc
        return np.int64(pair(wave, state.VCC if code == state.VCCZ else state.EXEC) == 0)
    if ins.form[k] == 1:
        return np.int64(wave.s[code - state.SGPR])
    return pair(wave, code - state.SGPR)


@inlined
def dpp_source(control: Any, lane: Any) -> Any:  # noqa: PLR0911 - a table of patterns
    """The lane a DPP operand is read from, or -1 where the pattern has none."""
    row, place, amount = lane & ~15, lane & 15, control & 15
    if control < 0x100:  # quad_perm
        return (lane & ~3) + (control >> (2 * (lane & 3)) & 3)
    if control < 0x110:  # row_shl
        return row + place + amount if place + amount < 16 else -1
    if control < 0x120:  # row_shr
        return row + place - amount if place >= amount else -1
    if control < 0x130:  # row_ror
        return row + ((place - amount) & 15)
    if control == 0x138:  # wave_shr:1
        return lane - 1
    if control == 0x140:  # row_mirror
        return row + 15 - place
    if control == 0x141:  # row_half_mirror
        return (lane & ~7) + 7 - (lane & 7)
    if control == 0x142:  # row_bcast:15
        return row - 1 if lane >= 16 else -1
    if control == 0x143:  # row_bcast:31
        return 31 if lane >= 32 else -1
    return row + amount  # row_newbcast


@inlined
def _from_registers(wave: Any, ins: Any, k: Any, upper: Any, row: Any, row_q: Any) -> Any:
    register = ins.src[k] + upper
    if k == 0:
        register += wave.gpr_index
        if register >= state.VGPRS:
            wave.error, wave.error_address, register = state.E_REGISTER, register, 0
    if ins.form[k] == 1:
        for lane in range(64):
            row[lane] = wave.v[register, lane]
    else:
        for lane in range(64):
            row_q[lane] = np.int64(wave.v[register, lane]) | np.int64(wave.v[register + 1, lane]) << 32


@inlined
def _from_scalar(wave: Any, ins: Any, k: Any, upper: Any, row: Any, row_q: Any) -> Any:
    """A scalar register or constant in every lane, or the bits of a mask, one a lane."""
    form = ins.form[k]
    plain = ins.src[k] < state.VCCZ and form == 1
    value = np.int64(wave.s[ins.src[k] - state.SGPR + upper]) if plain else scalar_operand(wave, ins, k)
    if form == 1:
        for lane in range(64):
            row[lane] = value
    elif form == 2:
        for lane in range(64):
            row_q[lane] = value
    else:
        for lane in range(64):
            row[lane] = value >> lane & 1


@inlined
def _shuffle(wave: Any, ins: Any, row: Any) -> Any:
    """DPP: each lane takes the value of the lane the control names."""
    for lane in range(64):
        wave.out[lane] = row[lane]
    for lane in range(64):
        source = dpp_source(ins.dpp, lane)
        row[lane] = wave.out[source] if source >= 0 else np.uint32(0)


@njit
def fetch(wave: Any, ins: Any, k: Any, second: Any, row: Any, row_q: Any) -> Any:
    """Operand `k` into `row` (32-bit and masks) or `row_q` (64-bit, the same memory). `second`: pass 1 of a packed one."""
    upper = ins.high >> (4 * second + k) & 1
    if ins.src[k] < state.SGPR:
        _from_registers(wave, ins, k, upper, row, row_q)
    else:
        _from_scalar(wave, ins, k, upper, row, row_q)
    if k == 0 and ins.dpp >= 0:
        _shuffle(wave, ins, row)
    if k < 2 and ins.select[k] != 6:
        for lane in range(64):
            row[lane] = part(np.int64(row[lane]), ins.select[k], ins.extend[k])
    absolute, negate = ins.absolute >> k & 1, (ins.negate_high if second else ins.negate) >> k & 1
    if absolute or negate:
        _sign(row, row_q, ins.form[k], absolute, negate)


@njit
def _sign(row: Any, row_q: Any, form: Any, absolute: Any, negate: Any) -> Any:
    for lane in range(64):
        if form == 2:
            value = row_q[lane] & ~np.int64(SIGN_64) if absolute else row_q[lane]
            row_q[lane] = value ^ np.int64(SIGN_64) if negate else value
        else:
            bits = np.int64(row[lane]) & 0x7FFFFFFF if absolute else np.int64(row[lane])
            row[lane] = bits ^ SIGN_32 if negate else bits


@inlined
def part(value: Any, select: Any, extend: Any) -> Any:
    """SDWA: byte 0..3 (select 0..3), word 0 or 1 (4, 5) or all (6) of a 32-bit pattern."""
    if select < 4:
        byte = value >> (8 * select) & 0xFF
        return (byte ^ 0x80) - 0x80 if extend else byte
    if select < 6:
        word = value >> (16 * (select - 4)) & 0xFFFF
        return (word ^ 0x8000) - 0x8000 if extend else word
    return value


@inlined
def enabled(ins: Any, lane: Any) -> Any:
    """Whether DPP lets this lane be written."""
    if not (ins.dpp_rows >> (lane >> 4) & 1 and ins.dpp_banks >> (lane >> 2 & 3) & 1):
        return False
    return ins.dpp_zero != 0 or dpp_source(ins.dpp, lane) >= 0


@njit
def write(wave: Any, ins: Any, register: Any, row: Any) -> Any:
    """`row` into a vector register, in the lanes EXEC names."""
    active = pair(wave, state.EXEC)
    if active == -1 and ins.dst_select == 6 and ins.dpp < 0:
        for lane in range(64):
            wave.v[register, lane] = row[lane]
        return
    for lane in range(64):
        if active >> lane & 1 and (ins.dpp < 0 or enabled(ins, lane)):
            value = np.int64(row[lane])
            if ins.dst_select != 6:
                width = 0xFF if ins.dst_select < 4 else 0xFFFF
                shift = 8 * ins.dst_select if ins.dst_select < 4 else 16 * (ins.dst_select - 4)
                kept = np.int64(wave.v[register, lane]) & ~(width << shift) if ins.dst_keep else 0
                value = (value & width) << shift | kept
            wave.v[register, lane] = value


@njit
def write_wide(wave: Any, register: Any) -> Any:
    """`wave.out_q` into a register pair, in the lanes EXEC names."""
    active = pair(wave, state.EXEC)
    for lane in range(64):
        if active >> lane & 1:
            wave.v[register, lane] = wave.out_q[lane] & 0xFFFFFFFF
            wave.v[register + 1, lane] = wave.out_q[lane] >> 32 & 0xFFFFFFFF


@njit
def write_mask(wave: Any, register: Any) -> Any:
    """`wave.out_mask` into a scalar register pair; lanes EXEC leaves out become 0."""
    mask = np.int64(0)
    for lane in range(64):
        mask |= np.int64(wave.out_mask[lane] != 0) << lane
    set_pair(wave, register, mask & pair(wave, state.EXEC))


@njit
def clamp(wave: Any, double: Any) -> Any:
    """Float results into 0 .. 1; NaN becomes 0."""
    for lane in range(64):
        if double:
            wave.out_d[lane] = min(max(wave.out_d[lane], 0.0), 1.0) if wave.out_d[lane] == wave.out_d[lane] else 0.0
        else:
            x = wave.out_f[lane]
            wave.out_f[lane] = min(max(x, np.float32(0)), np.float32(1)) if x == x else np.float32(0)


@njit
def first_lane(wave: Any) -> Any:
    """The lowest active lane, or 0 if none is."""
    active = pair(wave, state.EXEC)
    for lane in range(64):
        if active >> lane & 1:
            return lane
    return 0


@njit
def lane_access(wave: Any, ins: Any) -> Any:
    """V_READFIRSTLANE_B32 (op 0), V_READLANE_B32 (1), V_WRITELANE_B32 (2)."""
    if ins.op == 2:
        wave.v[ins.dst, scalar_operand(wave, ins, 1) & 63] = scalar_operand(wave, ins, 0)
        return
    if ins.src[0] >= state.SGPR:
        wave.s[ins.dst] = scalar_operand(wave, ins, 0)
        return
    lane = first_lane(wave) if ins.op == 0 else scalar_operand(wave, ins, 1) & 63
    wave.s[ins.dst] = wave.v[ins.src[0], lane]


@njit
def lane_swap(wave: Any, ins: Any) -> Any:
    """V_PERMLANE16_SWAP_B32, V_PERMLANE32_SWAP_B32: odd groups of `dst` change places with even groups of `src0`.

    V_SWAP_B32 (op 0): `dst` and `src0` change places, in the lanes EXEC names.
    """
    width, other = ins.op, ins.src[0]
    active = pair(wave, state.EXEC)
    for lane in range(64):
        if width == 0:
            if active >> lane & 1:
                moved = wave.v[ins.dst, lane]
                wave.v[ins.dst, lane] = wave.v[other, lane]
                wave.v[other, lane] = moved
        elif lane & width == 0:
            upper = wave.v[ins.dst, lane + width]
            wave.v[ins.dst, lane + width] = wave.v[other, lane]
            wave.v[other, lane] = upper
