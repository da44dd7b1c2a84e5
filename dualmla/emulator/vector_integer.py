"""Integer vector instructions: what each lane computes. See `registry` for the signature letters.

Written from AMD's "CDNA3" and "CDNA4" Instruction Set Architecture reference guides, chapter "Vector ALU".
"""

from __future__ import annotations

from typing import Any

from dualmla.emulator import state
from dualmla.emulator.jit import njit
from dualmla.emulator.registry import vector

UPPER_POISON = state.POISON_REGISTER & 0xFFFF0000


@vector("u -> u", "V_MOV_B32", "V_ACCVGPR_READ", "V_ACCVGPR_WRITE", "V_ACCVGPR_MOV_B32")
@vector("q -> q", "V_MOV_B64")
def move(a: Any) -> Any:
    return a


@vector("u u -> q", "V_PK_MOV_B32")
def move_pair(a: Any, b: Any) -> Any:
    return a | b << 32


@vector("u u -> u", "V_ADD_U32", "V_ADD_I32")
def add(a: Any, b: Any) -> Any:
    return a + b


@vector("u u -> u", "V_SUB_U32", "V_SUB_I32")
def subtract(a: Any, b: Any) -> Any:
    return a - b


@vector("u u -> u", "V_ADD_U32.clamp")
def add_saturating(a: Any, b: Any) -> Any:
    return min(a + b, 0xFFFFFFFF)


@vector("u u -> u", "V_SUB_U32.clamp")
def subtract_saturating(a: Any, b: Any) -> Any:
    return max(a - b, 0)


@vector("u u -> u", "V_SUBREV_U32")
def subtract_reversed(a: Any, b: Any) -> Any:
    return b - a


@vector("u u -> u m", "V_ADD_CO_U32")
def add_carry_out(a: Any, b: Any) -> Any:
    return a + b, (a + b) >> 32


@vector("u u m -> u m", "V_ADDC_CO_U32")
def add_with_carry(a: Any, b: Any, carry: Any) -> Any:
    return a + b + carry, (a + b + carry) >> 32


@vector("u u -> u m", "V_SUB_CO_U32")
def subtract_borrow_out(a: Any, b: Any) -> Any:
    return a - b, a < b


@vector("u u -> u m", "V_SUBREV_CO_U32")
def subtract_reversed_borrow_out(a: Any, b: Any) -> Any:
    return b - a, b < a


@vector("u u m -> u m", "V_SUBB_CO_U32")
def subtract_with_borrow(a: Any, b: Any, borrow: Any) -> Any:
    return a - b - borrow, a < b + borrow


@vector("u u m -> u m", "V_SUBBREV_CO_U32")
def subtract_reversed_with_borrow(a: Any, b: Any, borrow: Any) -> Any:
    return b - a - borrow, b < a + borrow


@vector("u u -> u", "V_AND_B32")
def bit_and(a: Any, b: Any) -> Any:
    return a & b


@vector("u u -> u", "V_OR_B32")
def bit_or(a: Any, b: Any) -> Any:
    return a | b


@vector("u u -> u", "V_XOR_B32")
def bit_xor(a: Any, b: Any) -> Any:
    return a ^ b


@vector("u u -> u", "V_XNOR_B32")
def bit_xnor(a: Any, b: Any) -> Any:
    return ~(a ^ b)


@vector("u -> u", "V_NOT_B32")
def bit_not(a: Any) -> Any:
    return ~a


@vector("u u u -> u", "V_OR3_B32")
def bit_or3(a: Any, b: Any, c: Any) -> Any:
    return a | b | c


@vector("u u u -> u", "V_AND_OR_B32")
def and_or(a: Any, b: Any, c: Any) -> Any:
    return (a & b) | c


@vector("u u u -> u", "V_BFI_B32")
def bit_field_insert(a: Any, b: Any, c: Any) -> Any:
    return (a & b) | (~a & c)


@njit
def truth_table(a: Any, b: Any, c: Any, table: Any) -> Any:
    """Any boolean function of three bits: bit `4a + 2b + c` of the table."""
    result = 0
    for row in range(8):
        if table >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


@vector("u u u u -> u", "V_BITOP3_B32")
def bit_operation3(a: Any, b: Any, c: Any, table: Any) -> Any:
    return truth_table(a, b, c, table)


@vector("u u u u -> u", "V_BITOP3_B16")
def bit_operation3_16(a: Any, b: Any, c: Any, table: Any) -> Any:
    """The low halves alone. What becomes of the upper half is not documented: it is poisoned, so that nothing can rely on it."""
    return truth_table(a, b, c, table) & 0xFFFF | UPPER_POISON


@vector("u u -> u", "V_LSHLREV_B32")
def shift_left(a: Any, b: Any) -> Any:
    return b << (a & 31)


@vector("u u -> u", "V_LSHLREV_B16")
def shift_left_16(a: Any, b: Any) -> Any:
    """The upper half becomes 0, which LLVM relies on from GFX8 to GFX9 (`zeroesHigh16BitsOfDest`)."""
    return (b << (a & 15)) & 0xFFFF


@vector("u u -> u", "V_LSHRREV_B32")
def shift_right(a: Any, b: Any) -> Any:
    return b >> (a & 31)


@vector("u i -> u", "V_ASHRREV_I32")
def shift_right_arithmetic(a: Any, b: Any) -> Any:
    return b >> (a & 31)


@vector("u q -> q", "V_LSHLREV_B64")
def shift_left_64(a: Any, b: Any) -> Any:
    return b << (a & 63)


@vector("u q -> q", "V_LSHRREV_B64")
def shift_right_64(a: Any, b: Any) -> Any:
    shift = a & 63
    return (b >> shift) & ((1 << (64 - shift)) - 1) if shift else b


@vector("u q -> q", "V_ASHRREV_I64")
def shift_right_arithmetic_64(a: Any, b: Any) -> Any:
    return b >> (a & 63)


@vector("u u u -> u", "V_ADD3_U32")
def add3(a: Any, b: Any, c: Any) -> Any:
    return a + b + c


@vector("u u u -> u", "V_LSHL_ADD_U32")
def shift_left_add(a: Any, b: Any, c: Any) -> Any:
    return (a << (b & 31)) + c


@vector("q u q -> q", "V_LSHL_ADD_U64")
def shift_left_add_64(a: Any, b: Any, c: Any) -> Any:
    return (a << (b & 7)) + c


@vector("u u u -> u", "V_ADD_LSHL_U32")
def add_shift_left(a: Any, b: Any, c: Any) -> Any:
    return ((a + b) & 0xFFFFFFFF) << (c & 31)


@vector("u u u -> u", "V_LSHL_OR_B32")
def shift_left_or(a: Any, b: Any, c: Any) -> Any:
    return (a << (b & 31)) | c


@vector("u u u -> u", "V_XAD_U32")
def xor_add(a: Any, b: Any, c: Any) -> Any:
    return (a ^ b) + c


@vector("u u -> u", "V_MUL_LO_U32")
@vector("i i -> u", "V_MUL_LO_I32")
def multiply_low(a: Any, b: Any) -> Any:
    return ((a & 0xFFFF) * b) + (((a >> 16) * (b & 0xFFFF)) << 16)


@vector("u u -> u", "V_MUL_HI_U32")
def multiply_high_unsigned(a: Any, b: Any) -> Any:
    """Bits 63:32 of the product, by halves so that every intermediate fits a signed 64-bit integer."""
    low, middle, cross = (a & 0xFFFF) * b, (a >> 16) * (b & 0xFFFF), (a >> 16) * (b >> 16)
    return cross + ((middle + (low >> 16)) >> 16)


@vector("i i -> u", "V_MUL_HI_I32")
def multiply_high_signed(a: Any, b: Any) -> Any:
    return (a * b) >> 32


@vector("u u -> u", "V_MUL_U32_U24")
def multiply_u24(a: Any, b: Any) -> Any:
    return (a & 0xFFFFFF) * (b & 0xFFFFFF)


@vector("u u -> u", "V_MUL_I32_I24")
def multiply_i24(a: Any, b: Any) -> Any:
    return (((a & 0xFFFFFF) ^ 0x800000) - 0x800000) * (((b & 0xFFFFFF) ^ 0x800000) - 0x800000)


@vector("u u u -> u", "V_MAD_U32_U24")
def multiply_add_u24(a: Any, b: Any, c: Any) -> Any:
    return (a & 0xFFFFFF) * (b & 0xFFFFFF) + c


@vector("u u u -> u", "V_MAD_I32_I24")
def multiply_add_i24(a: Any, b: Any, c: Any) -> Any:
    return (((a & 0xFFFFFF) ^ 0x800000) - 0x800000) * (((b & 0xFFFFFF) ^ 0x800000) - 0x800000) + c


@vector("u u q -> q m", "V_MAD_U64_U32")
def multiply_add_unsigned_64(a: Any, b: Any, c: Any) -> Any:
    """The 64-bit sum and its carry, by 16-bit halves of `a` so that every intermediate fits a signed 64-bit integer."""
    low, middle = (a & 0xFFFF) * b, (a >> 16) * b
    bottom = (low & 0xFFFFFFFF) + ((middle & 0xFFFF) << 16) + (c & 0xFFFFFFFF)
    top = (low >> 32) + (middle >> 16) + (c >> 32 & 0xFFFFFFFF) + (bottom >> 32)
    return (top << 32) | (bottom & 0xFFFFFFFF), top >> 32


@vector("i i q -> q m", "V_MAD_I64_I32")
def multiply_add_signed_64(a: Any, b: Any, c: Any) -> Any:
    """The 64-bit sum, and bit 64 of the sum in 65 bits: its true sign."""
    product = a * b
    total = product + c
    overflow = ((product ^ total) & (c ^ total)) < 0
    return total, (total < 0) != overflow


@vector("u u u -> u", "V_BFE_U32")
def bit_field_extract_unsigned(a: Any, b: Any, c: Any) -> Any:
    return (a >> (b & 31)) & ((1 << (c & 31)) - 1)


@vector("u u u -> u", "V_BFE_I32")
def bit_field_extract_signed(a: Any, b: Any, c: Any) -> Any:
    width = c & 31
    field = (a >> (b & 31)) & ((1 << width) - 1)
    return field - (1 << width) if width and field >> (width - 1) else field


@vector("u u -> u", "V_BFM_B32")
def bit_field_mask(a: Any, b: Any) -> Any:
    return ((1 << (a & 31)) - 1) << (b & 31)


@vector("u -> u", "V_BFREV_B32")
def bit_reverse(a: Any) -> Any:
    result = 0
    for bit in range(32):
        result |= (a >> bit & 1) << (31 - bit)
    return result


@vector("u -> u", "V_FFBH_U32")
def find_first_high(a: Any) -> Any:
    for bit in range(32):
        if a >> (31 - bit) & 1:
            return bit
    return -1


@vector("u -> u", "V_FFBL_B32")
def find_first_low(a: Any) -> Any:
    for bit in range(32):
        if a >> bit & 1:
            return bit
    return -1


@vector("u u -> u", "V_BCNT_U32_B32")
def count_bits_add(a: Any, b: Any) -> Any:
    for bit in range(32):
        b += a >> bit & 1
    return b


@vector("u u l -> u", "V_MBCNT_LO_U32_B32")
def masked_count_low(a: Any, b: Any, lane: Any) -> Any:
    for bit in range(min(lane, 32)):
        b += a >> bit & 1
    return b


@vector("u u l -> u", "V_MBCNT_HI_U32_B32")
def masked_count_high(a: Any, b: Any, lane: Any) -> Any:
    for bit in range(max(lane - 32, 0)):
        b += a >> bit & 1
    return b


@vector("i i -> u", "V_MIN_I32")
@vector("u u -> u", "V_MIN_U32")
def minimum(a: Any, b: Any) -> Any:
    return min(a, b)


@vector("i i -> u", "V_MAX_I32")
@vector("u u -> u", "V_MAX_U32")
def maximum(a: Any, b: Any) -> Any:
    return max(a, b)


@vector("i i i -> u", "V_MIN3_I32")
@vector("u u u -> u", "V_MIN3_U32")
def minimum3(a: Any, b: Any, c: Any) -> Any:
    return min(a, b, c)


@vector("i i i -> u", "V_MAX3_I32")
@vector("u u u -> u", "V_MAX3_U32")
def maximum3(a: Any, b: Any, c: Any) -> Any:
    return max(a, b, c)


@vector("i i i -> u", "V_MED3_I32")
@vector("u u u -> u", "V_MED3_U32")
def median3(a: Any, b: Any, c: Any) -> Any:
    return max(min(a, b), min(max(a, b), c))


@njit
def picked_byte(a: Any, b: Any, code: Any) -> Any:
    """Byte `code` of `a:b` (b holds bytes 0-3), a word's sign (8-11), 0 (12) or 0xFF (13 and up)."""
    byte = (a if code & 4 else b) >> (8 * (code & 3)) & 255
    sign = 255 * ((a if code & 2 else b) >> (31 if code & 1 else 15) & 1)
    fixed = 0 if code == 12 else 255
    return byte if code < 8 else (sign if code < 12 else fixed)


@vector("u u u -> u", "V_PERM_B32")
def permute_bytes(a: Any, b: Any, select: Any) -> Any:
    low = picked_byte(a, b, select & 255) | picked_byte(a, b, select >> 8 & 255) << 8
    return low | picked_byte(a, b, select >> 16 & 255) << 16 | picked_byte(a, b, select >> 24) << 24


@vector("u u -> u", "V_PACK_B32_F16")
def pack_words(a: Any, b: Any) -> Any:
    return a & 0xFFFF | (b & 0xFFFF) << 16


@vector("u u u -> u", "V_ALIGNBIT_B32")
def align_bits(a: Any, b: Any, c: Any) -> Any:
    shift = c & 31
    return (b >> shift) | (a << (32 - shift))


@vector("u u u -> u", "V_ALIGNBYTE_B32")
def align_bytes(a: Any, b: Any, c: Any) -> Any:
    shift = 8 * (c & 3)
    return (b >> shift) | (a << (32 - shift))


@vector("u u m -> u", "V_CNDMASK_B32")
def select_by_mask(a: Any, b: Any, mask: Any) -> Any:
    return b if mask else a
