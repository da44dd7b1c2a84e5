"""Floating-point vector instructions and conversions: what each lane computes. See `registry` for the signature letters.

Results are correctly rounded where the hardware is allowed an error of one unit in the last place (exp, log, rcp, rsq,
sqrt), and denormals are kept (the MODE register's default for kernels compiled by LLVM). Written from AMD's "CDNA3" and
"CDNA4" Instruction Set Architecture reference guides, chapter "Vector ALU".
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.core import types
from numba.extending import intrinsic

from dualmla.emulator.jit import njit
from dualmla.emulator.minifloat import BF16, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, F16, decode, encode
from dualmla.emulator.registry import vector

f32 = np.float32


@intrinsic  # type: ignore[untyped-decorator]
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c rounded once, as LLVM's `fma` (float32 or float64, all three alike)."""
    if not (a == b == c and a in (types.float32, types.float64)):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return a(a, b, c), generate


@njit
def bits(x: Any) -> Any:
    """The 32-bit pattern of a float32."""
    return np.int64(f32(x).view(np.uint32))


@njit
def exponent(x: Any) -> Any:
    """The biased exponent field of a float32."""
    return bits(x) >> 23 & 255


@njit
def is_denormal(x: Any) -> Any:
    return x != 0 and abs(x) < 2.0**-126


@njit
def quiet_max(a: Any, b: Any) -> Any:
    """IEEE maxNum: the number beats the NaN, +0 beats -0."""
    if math.isnan(a):
        return b
    if math.isnan(b):
        return a
    return a + b if a == 0 and b == 0 else max(a, b)


@njit
def quiet_min(a: Any, b: Any) -> Any:
    """IEEE minNum: the number beats the NaN, -0 beats +0."""
    if math.isnan(a):
        return b
    if math.isnan(b):
        return a
    return -(-a - b) if a == 0 and b == 0 else min(a, b)


@vector("f f -> f", "V_ADD_F32", "V_PK_ADD_F32")
@vector("d d -> d", "V_ADD_F64")
def float_add(a: Any, b: Any) -> Any:
    return a + b


@vector("f f -> f", "V_SUB_F32")
def float_subtract(a: Any, b: Any) -> Any:
    return a - b


@vector("f f -> f", "V_SUBREV_F32")
def float_subtract_reversed(a: Any, b: Any) -> Any:
    return b - a


@vector("f f -> f", "V_MUL_F32", "V_PK_MUL_F32")
@vector("d d -> d", "V_MUL_F64")
def float_multiply(a: Any, b: Any) -> Any:
    return a * b


@vector("f f -> f", "V_MUL_LEGACY_F32")
def float_multiply_legacy(a: Any, b: Any) -> Any:
    return f32(0) if a == 0 or b == 0 else a * b


@vector("f f f -> f", "V_FMA_F32", "V_FMAC_F32", "V_FMAAK_F32", "V_FMAMK_F32", "V_PK_FMA_F32")
@vector("d d d -> d", "V_FMA_F64", "V_FMAC_F64")
def float_fma(a: Any, b: Any, c: Any) -> Any:
    return fma(a, b, c)


@vector("f f -> f", "V_MAX_F32")
@vector("d d -> d", "V_MAX_F64")
def float_max(a: Any, b: Any) -> Any:
    return quiet_max(a, b)


@vector("f f -> f", "V_MIN_F32")
@vector("d d -> d", "V_MIN_F64")
def float_min(a: Any, b: Any) -> Any:
    return quiet_min(a, b)


@vector("f f f -> f", "V_MAX3_F32")
def float_max3(a: Any, b: Any, c: Any) -> Any:
    return quiet_max(quiet_max(a, b), c)


@vector("f f f -> f", "V_MIN3_F32")
def float_min3(a: Any, b: Any, c: Any) -> Any:
    return quiet_min(quiet_min(a, b), c)


@vector("f f f -> f", "V_MED3_F32")
def float_median3(a: Any, b: Any, c: Any) -> Any:
    if math.isnan(a) or math.isnan(b) or math.isnan(c):
        return quiet_min(quiet_min(a, b), c)
    largest = quiet_max(quiet_max(a, b), c)
    if largest == a:
        return quiet_max(b, c)
    return quiet_max(a, c) if largest == b else quiet_max(a, b)


@vector("f -> f", "V_EXP_F32")
def exponential_base_2(a: Any) -> Any:
    return f32(np.exp2(a))


@vector("f -> f", "V_LOG_F32")
def logarithm_base_2(a: Any) -> Any:
    return f32(np.log2(a))


@vector("f -> f", "V_RCP_F32", "V_RCP_IFLAG_F32")
def reciprocal(a: Any) -> Any:
    return f32(np.divide(f32(1), a))


@vector("f -> f", "V_SQRT_F32")
def square_root(a: Any) -> Any:
    return f32(np.sqrt(a))


@vector("f -> f", "V_RSQ_F32")
def reciprocal_square_root(a: Any) -> Any:
    return f32(np.divide(1.0, np.sqrt(np.float64(a))))


@vector("f -> f", "V_RNDNE_F32")
def round_to_even(a: Any) -> Any:
    return f32(np.rint(a))


@vector("f -> f", "V_FLOOR_F32")
def round_down(a: Any) -> Any:
    return f32(np.floor(a))


@vector("f -> f", "V_CEIL_F32")
def round_up(a: Any) -> Any:
    return f32(np.ceil(a))


@vector("f -> f", "V_TRUNC_F32")
def round_to_zero(a: Any) -> Any:
    return f32(np.trunc(a))


@vector("f -> f", "V_FRACT_F32")
def fraction(a: Any) -> Any:
    return f32(a - f32(np.floor(a)))


@vector("f i -> f", "V_LDEXP_F32")
def scale_by_power_of_2(a: Any, power: Any) -> Any:
    return f32(math.ldexp(np.float64(a), min(max(power, -1000), 1000)))


@vector("f f f -> f m", "V_DIV_SCALE_F32")
def divide_scale(a: Any, denominator: Any, numerator: Any) -> Any:  # noqa: PLR0911 - the cases of AMD's pseudocode
    """Bring the operand `a` (numerator or denominator) into the range where Newton's steps of a division are exact;
    the mask bit tells `V_DIV_FMAS_F32` to undo it."""
    up, down = math.ldexp(np.float64(a), 64), math.ldexp(np.float64(a), -64)
    if numerator == 0 or denominator == 0:
        return f32(np.nan), 0
    tiny_reciprocal = abs(np.float64(denominator)) > 2.0**126
    tiny_quotient = is_denormal(np.float64(f32(np.float64(numerator) / np.float64(denominator))))
    if exponent(numerator) - exponent(denominator) >= 96:
        return f32(up) if a == denominator else a, 1
    if is_denormal(np.float64(denominator)):
        return f32(up), 0
    if tiny_reciprocal and tiny_quotient:
        return f32(up) if a == denominator else a, 1
    if tiny_reciprocal:
        return f32(down), 0
    if tiny_quotient:
        return f32(up) if a == numerator else a, 1
    if exponent(numerator) <= 23:
        return f32(up), 0
    return a, 0


@vector("f f f m -> f", "V_DIV_FMAS_F32")
def divide_fma(a: Any, b: Any, c: Any, scaled: Any) -> Any:
    result = fma(a, b, c)
    return result * f32(2.0**32) if scaled else result


@vector("f f f -> f", "V_DIV_FIXUP_F32")
def divide_fixup(quotient: Any, denominator: Any, numerator: Any) -> Any:
    """The quotient with every special case (0/0, x/0, inf, NaN, far under- and overflow) put right."""
    sign = f32(-1) if (bits(denominator) ^ bits(numerator)) >> 31 else f32(1)
    if math.isnan(numerator):
        return numerator
    if math.isnan(denominator):
        return denominator
    if (denominator == 0 and numerator == 0) or (math.isinf(denominator) and math.isinf(numerator)):
        return f32(np.nan)
    if denominator == 0 or math.isinf(numerator):
        return sign * f32(np.inf)
    if math.isinf(denominator) or numerator == 0 or exponent(numerator) - exponent(denominator) < -150:
        return sign * f32(0)
    return sign * abs(quotient)


@vector("u -> f", "V_CVT_F32_U32")
@vector("i -> f", "V_CVT_F32_I32")
def int_to_float(a: Any) -> Any:
    return f32(a)


@vector("u -> f", "V_CVT_F32_UBYTE0")
def byte0_to_float(a: Any) -> Any:
    return f32(a & 255)


@vector("f -> u", "V_CVT_U32_F32")
def float_to_unsigned(a: Any) -> Any:
    """Towards zero, saturating; NaN is 0."""
    if not a > 0:
        return 0
    return 0xFFFFFFFF if a >= 4294967296.0 else np.int64(a)


@vector("f -> u", "V_CVT_I32_F32")
def float_to_signed(a: Any) -> Any:
    """Towards zero, saturating; NaN is 0."""
    if math.isnan(a):
        return 0
    if a >= 2147483648.0:
        return 0x7FFFFFFF
    return -0x80000000 if a <= -2147483648.0 else np.int64(a)


@vector("u -> f", "V_CVT_F32_F16")
def half_to_float(a: Any) -> Any:
    return f32(decode(a & 0xFFFF, F16))


@vector("f -> u", "V_CVT_F16_F32")
def float_to_half(a: Any) -> Any:
    return encode(a, F16)


@vector("u -> f", "V_CVT_F32_BF16")
def bfloat_to_float(a: Any) -> Any:
    return f32(decode(a & 0xFFFF, BF16))


@vector("f f -> u", "V_CVT_PK_BF16_F32")
def pack_bfloat(a: Any, b: Any) -> Any:
    return encode(a, BF16) | encode(b, BF16) << 16


@vector("f f -> u", "V_CVT_PK_F16_F32")
def pack_half(a: Any, b: Any) -> Any:
    return encode(a, F16) | encode(b, F16) << 16


@vector("f f f -> u", "V_MAD_MIXLO_F16", "V_MAD_MIXHI_F16")
def fma_to_half(a: Any, b: Any, c: Any) -> Any:
    """LLVM's v_fma_mixlo_f16 and v_fma_mixhi_f16: the float32 result, rounded again for one half of the destination."""
    return encode(fma(a, b, c), F16)


@vector("f f -> u", "V_CVT_PK_FP8_F32.gfx942")
def pack_e4m3fnuz(a: Any, b: Any) -> Any:
    return encode(a, E4M3FNUZ) | encode(b, E4M3FNUZ) << 8


@vector("f f -> u", "V_CVT_PK_FP8_F32.gfx950")
def pack_e4m3fn(a: Any, b: Any) -> Any:
    return encode(a, E4M3FN) | encode(b, E4M3FN) << 8


@vector("u -> f", "V_CVT_F32_FP8.gfx942")
def e4m3fnuz_to_float(a: Any) -> Any:
    return f32(decode(a & 255, E4M3FNUZ))


@vector("u -> f", "V_CVT_F32_FP8.gfx950")
def e4m3fn_to_float(a: Any) -> Any:
    return f32(decode(a & 255, E4M3FN))


@vector("u -> f", "V_CVT_F32_BF8.gfx942")
def e5m2fnuz_to_float(a: Any) -> Any:
    return f32(decode(a & 255, E5M2FNUZ))


@vector("u -> f", "V_CVT_F32_BF8.gfx950")
def e5m2_to_float(a: Any) -> Any:
    return f32(decode(a & 255, E5M2))


@vector("u -> q", "V_CVT_PK_F32_FP8.gfx942")
def unpack_e4m3fnuz(a: Any) -> Any:
    return bits(decode(a & 255, E4M3FNUZ)) | bits(decode(a >> 8 & 255, E4M3FNUZ)) << 32


@vector("u -> q", "V_CVT_PK_F32_FP8.gfx950")
def unpack_e4m3fn(a: Any) -> Any:
    return bits(decode(a & 255, E4M3FN)) | bits(decode(a >> 8 & 255, E4M3FN)) << 32


@vector("u u -> u", "V_CVT_SCALEF32_PK_BF16_FP8")
def unpack_e4m3fn_to_bfloat(a: Any, _scale: Any) -> Any:
    return encode(decode(a & 255, E4M3FN), BF16) | encode(decode(a >> 8 & 255, E4M3FN), BF16) << 16


@vector("u u -> q", "V_CVT_SCALEF32_PK_F32_FP8")
def unpack_e4m3fn_scaled(a: Any, _scale: Any) -> Any:
    return bits(decode(a & 255, E4M3FN)) | bits(decode(a >> 8 & 255, E4M3FN)) << 32
