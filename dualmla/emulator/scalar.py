"""Scalar instructions: `(a, b, scc) -> (result, scc)`, where the destination's old value is `a` in the SOPK forms and `b`
in S_BITSET.

32-bit operands arrive as 0 .. 2**32-1 (u) or two's complement (i), 64-bit ones (q) as signed bit patterns. A comparison's
result is not stored. Branches, waits and barriers live in `interpreter`. Written from AMD's "CDNA3" Instruction Set
Architecture reference guide, chapter "Scalar ALU".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dualmla.emulator.registry import scalar

M32 = 0xFFFFFFFF


@scalar("u -> u", "S_MOV_B32", "S_MOVK_I32")
@scalar("q -> q", "S_MOV_B64")
def s_move(a: Any, scc: Any) -> Any:
    return a, scc


@scalar("u u -> u", "S_CSELECT_B32")
@scalar("q q -> q", "S_CSELECT_B64")
def s_select(a: Any, b: Any, scc: Any) -> Any:
    return (a if scc else b), scc


@scalar("u u -> u", "S_ADD_U32")
def s_add(a: Any, b: Any, scc: Any) -> Any:
    return a + b, (a + b) >> 32


@scalar("u u -> u", "S_ADDC_U32")
def s_add_carry(a: Any, b: Any, scc: Any) -> Any:
    return a + b + scc, (a + b + scc) >> 32


@scalar("u u -> u", "S_SUB_U32")
def s_subtract(a: Any, b: Any, scc: Any) -> Any:
    return a - b, np.int64(a < b)


@scalar("u u -> u", "S_SUBB_U32")
def s_subtract_borrow(a: Any, b: Any, scc: Any) -> Any:
    return a - b - scc, np.int64(a < b + scc)


@scalar("i i -> u", "S_ADD_I32", "S_ADDK_I32")
def s_add_signed(a: Any, b: Any, scc: Any) -> Any:
    return a + b, np.int64(not -0x80000000 <= a + b <= 0x7FFFFFFF)


@scalar("i i -> u", "S_SUB_I32")
def s_subtract_signed(a: Any, b: Any, scc: Any) -> Any:
    return a - b, np.int64(not -0x80000000 <= a - b <= 0x7FFFFFFF)


@scalar("i i -> u", "S_MUL_I32", "S_MULK_I32")
def s_multiply(a: Any, b: Any, scc: Any) -> Any:
    return a * b, scc


@scalar("u u -> u", "S_MUL_HI_U32")
def s_multiply_high_unsigned(a: Any, b: Any, scc: Any) -> Any:
    low, middle, cross = (a & 0xFFFF) * b, (a >> 16) * (b & 0xFFFF), (a >> 16) * (b >> 16)
    return cross + ((middle + (low >> 16)) >> 16), scc


@scalar("i i -> u", "S_MUL_HI_I32")
def s_multiply_high_signed(a: Any, b: Any, scc: Any) -> Any:
    return (a * b) >> 32, scc


@scalar("u u -> u", "S_MIN_U32")
@scalar("i i -> u", "S_MIN_I32")
def s_minimum(a: Any, b: Any, scc: Any) -> Any:
    return min(a, b), np.int64(a < b)


@scalar("u u -> u", "S_MAX_U32")
@scalar("i i -> u", "S_MAX_I32")
def s_maximum(a: Any, b: Any, scc: Any) -> Any:
    return max(a, b), np.int64(a > b)


@scalar("i -> u", "S_ABS_I32")
def s_absolute(a: Any, scc: Any) -> Any:
    return abs(a), np.int64(a != 0)


@scalar("u u -> u", "S_AND_B32")
@scalar("q q -> q", "S_AND_B64")
def s_and(a: Any, b: Any, scc: Any) -> Any:
    return a & b, np.int64(a & b != 0)


@scalar("u u -> u", "S_OR_B32")
@scalar("q q -> q", "S_OR_B64")
def s_or(a: Any, b: Any, scc: Any) -> Any:
    return a | b, np.int64(a | b != 0)


@scalar("u u -> u", "S_XOR_B32")
@scalar("q q -> q", "S_XOR_B64")
def s_xor(a: Any, b: Any, scc: Any) -> Any:
    return a ^ b, np.int64(a ^ b != 0)


@scalar("u u -> u", "S_ANDN2_B32")
@scalar("q q -> q", "S_ANDN2_B64")
def s_and_not(a: Any, b: Any, scc: Any) -> Any:
    return a & ~b, np.int64(a & ~b != 0)


@scalar("i i -> u", "S_ORN2_B32")
@scalar("q q -> q", "S_ORN2_B64")
def s_or_not(a: Any, b: Any, scc: Any) -> Any:
    return a | ~b, np.int64(a | ~b != 0)


@scalar("i i -> u", "S_NAND_B32")
@scalar("q q -> q", "S_NAND_B64")
def s_nand(a: Any, b: Any, scc: Any) -> Any:
    return ~(a & b), np.int64(~(a & b) != 0)


@scalar("i i -> u", "S_NOR_B32")
@scalar("q q -> q", "S_NOR_B64")
def s_nor(a: Any, b: Any, scc: Any) -> Any:
    return ~(a | b), np.int64(~(a | b) != 0)


@scalar("i -> u", "S_NOT_B32")
@scalar("q -> q", "S_NOT_B64")
def s_not(a: Any, scc: Any) -> Any:
    return ~a, np.int64(~a != 0)


@scalar("u u -> u", "S_LSHL_B32")
def s_shift_left(a: Any, b: Any, scc: Any) -> Any:
    result = (a << (b & 31)) & M32
    return result, np.int64(result != 0)


@scalar("q u -> q", "S_LSHL_B64")
def s_shift_left_64(a: Any, b: Any, scc: Any) -> Any:
    result = a << (b & 63)
    return result, np.int64(result != 0)


@scalar("u u -> u", "S_LSHR_B32")
def s_shift_right(a: Any, b: Any, scc: Any) -> Any:
    result = a >> (b & 31)
    return result, np.int64(result != 0)


@scalar("q u -> q", "S_LSHR_B64")
def s_shift_right_64(a: Any, b: Any, scc: Any) -> Any:
    shift = b & 63
    result = (a >> shift) & ((1 << (64 - shift)) - 1) if shift else a
    return result, np.int64(result != 0)


@scalar("i u -> u", "S_ASHR_I32")
def s_shift_right_arithmetic(a: Any, b: Any, scc: Any) -> Any:
    return a >> (b & 31), np.int64(a >> (b & 31) != 0)


@scalar("q u -> q", "S_ASHR_I64")
def s_shift_right_arithmetic_64(a: Any, b: Any, scc: Any) -> Any:
    return a >> (b & 63), np.int64(a >> (b & 63) != 0)


@scalar("u u -> u", "S_LSHL1_ADD_U32")
def s_shift1_add(a: Any, b: Any, scc: Any) -> Any:
    return (a << 1) + b, np.int64((a << 1) + b > M32)


@scalar("u u -> u", "S_LSHL2_ADD_U32")
def s_shift2_add(a: Any, b: Any, scc: Any) -> Any:
    return (a << 2) + b, np.int64((a << 2) + b > M32)


@scalar("u u -> u", "S_LSHL3_ADD_U32")
def s_shift3_add(a: Any, b: Any, scc: Any) -> Any:
    return (a << 3) + b, np.int64((a << 3) + b > M32)


@scalar("u u -> u", "S_LSHL4_ADD_U32")
def s_shift4_add(a: Any, b: Any, scc: Any) -> Any:
    return (a << 4) + b, np.int64((a << 4) + b > M32)


@scalar("u u -> u", "S_BFE_U32")
def s_field_unsigned(a: Any, b: Any, scc: Any) -> Any:
    result = (a >> (b & 31)) & ((1 << (b >> 16 & 127)) - 1)
    return result, np.int64(result != 0)


@scalar("i u -> u", "S_BFE_I32")
def s_field_signed(a: Any, b: Any, scc: Any) -> Any:
    width = min(b >> 16 & 127, 32)
    field = (a >> (b & 31)) & ((1 << width) - 1)
    result = field - (1 << width) if width and field >> (width - 1) else field
    return result, np.int64(result != 0)


@scalar("u u -> u", "S_BFM_B32")
def s_field_mask(a: Any, b: Any, scc: Any) -> Any:
    return ((1 << (a & 31)) - 1) << (b & 31), scc


@scalar("u -> u", "S_BREV_B32")
def s_reverse(a: Any, scc: Any) -> Any:
    result = 0
    for bit in range(32):
        result |= (a >> bit & 1) << (31 - bit)
    return result, scc


@scalar("u -> u", "S_BCNT1_I32_B32")
@scalar("q -> u", "S_BCNT1_I32_B64")
def s_count_ones(a: Any, scc: Any) -> Any:
    count = 0
    for bit in range(64):
        count += a >> bit & 1
    return count, np.int64(count != 0)


@scalar("u -> u", "S_FF1_I32_B32")
@scalar("q -> u", "S_FF1_I32_B64")
def s_first_one(a: Any, scc: Any) -> Any:
    for bit in range(64):
        if a >> bit & 1:
            return bit, scc
    return -1, scc


@scalar("u -> u", "S_FLBIT_I32_B32")
def s_first_one_from_top(a: Any, scc: Any) -> Any:
    for bit in range(32):
        if a >> (31 - bit) & 1:
            return bit, scc
    return -1, scc


@scalar("u -> u", "S_SEXT_I32_I8")
def s_extend_byte(a: Any, scc: Any) -> Any:
    return ((a & 0xFF) ^ 0x80) - 0x80, scc


@scalar("u -> u", "S_SEXT_I32_I16")
def s_extend_short(a: Any, scc: Any) -> Any:
    return ((a & 0xFFFF) ^ 0x8000) - 0x8000, scc


@scalar("u u -> u", "S_PACK_LL_B32_B16")
def s_pack_low_low(a: Any, b: Any, scc: Any) -> Any:
    return (a & 0xFFFF) | (b & 0xFFFF) << 16, scc


@scalar("u u -> u", "S_PACK_LH_B32_B16")
def s_pack_low_high(a: Any, b: Any, scc: Any) -> Any:
    return (a & 0xFFFF) | (b & 0xFFFF0000), scc


@scalar("u u -> u", "S_PACK_HH_B32_B16")
def s_pack_high_high(a: Any, b: Any, scc: Any) -> Any:
    return (a >> 16) | (b & 0xFFFF0000), scc


@scalar("i i ->", "S_CMP_EQ_I32", "S_CMPK_EQ_I32")
@scalar("u u ->", "S_CMP_EQ_U32", "S_CMPK_EQ_U32")
@scalar("q q ->", "S_CMP_EQ_U64")
def s_equal(a: Any, b: Any, scc: Any) -> Any:
    return a, np.int64(a == b)


@scalar("i i ->", "S_CMP_LG_I32", "S_CMPK_LG_I32")
@scalar("u u ->", "S_CMP_LG_U32", "S_CMPK_LG_U32")
@scalar("q q ->", "S_CMP_LG_U64")
def s_not_equal(a: Any, b: Any, scc: Any) -> Any:
    return a, np.int64(a != b)


@scalar("i i ->", "S_CMP_GT_I32", "S_CMPK_GT_I32")
@scalar("u u ->", "S_CMP_GT_U32", "S_CMPK_GT_U32")
def s_greater(a: Any, b: Any, scc: Any) -> Any:
    return a, np.int64(a > b)


@scalar("i i ->", "S_CMP_GE_I32", "S_CMPK_GE_I32")
@scalar("u u ->", "S_CMP_GE_U32", "S_CMPK_GE_U32")
def s_greater_equal(a: Any, b: Any, scc: Any) -> Any:
    return a, np.int64(a >= b)


@scalar("i i ->", "S_CMP_LT_I32", "S_CMPK_LT_I32")
@scalar("u u ->", "S_CMP_LT_U32", "S_CMPK_LT_U32")
def s_less(a: Any, b: Any, scc: Any) -> Any:
    return a, np.int64(a < b)


@scalar("i i ->", "S_CMP_LE_I32", "S_CMPK_LE_I32")
@scalar("u u ->", "S_CMP_LE_U32", "S_CMPK_LE_U32")
def s_less_equal(a: Any, b: Any, scc: Any) -> Any:
    return a, np.int64(a <= b)


@scalar("u u -> u", "S_BITSET0_B32")
def s_clear_bit(a: Any, b: Any, scc: Any) -> Any:
    return b & ~(1 << (a & 31)), scc


@scalar("u u -> u", "S_BITSET1_B32")
def s_set_bit(a: Any, b: Any, scc: Any) -> Any:
    return b | 1 << (a & 31), scc


@scalar("u u ->", "S_BITCMP0_B32")
def s_bit_clear(a: Any, b: Any, scc: Any) -> Any:
    return a, 1 - (a >> (b & 31) & 1)


@scalar("u u ->", "S_BITCMP1_B32")
def s_bit_set(a: Any, b: Any, scc: Any) -> Any:
    return a, a >> (b & 31) & 1
