"""Every registered vector instruction against a plain-Python statement of its meaning, on edge cases of its operand types."""

from __future__ import annotations

import itertools
import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from one_wave import V, run, vop3

from dualmla.emulator.registry import VECTOR

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
INTS = [0, 1, 2, 5, 31, 32, 33, 63, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFF, 0x800000, 0xFFFFFF, 0x12345678]
INTS += [0x3C003C00, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xABCDEF01, 0xDEADBEEF, 0xFFFF0000, 0xFFFFFFFE, 0xFFFFFFFF]
FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    2.5,
    -2.5,
    3.1415927,
    1e-3,
    65504.0,
    65520.0,
    447.9,
    464.0,
    240.0,
    248.1,
    1e-8,
    1e-40,
    1e30,
    -1e38,
]
FLOATS += [
    math.inf,
    -math.inf,
    math.nan,
    4294967040.0,
    4294967296.0,
    2147483648.0,
    -2147483648.0,
    0.001953125,
    0.0009765625,
    1.0009765625,
    7.0,
]
LONGS = [0, 1, M32, 1 << 32, (1 << 63) - 1, 1 << 63, M64, 0x123456789ABCDEF0, 0xFEDCBA9876543210, 1 << 31]
DOUBLES = [0.0, 1.0, -2.5, 1e300, -1e-300, math.inf, math.nan, 3.25]
MASK = 0x5555_AAAA_F0F0_3C3C


def i32(x: int) -> int:
    return (x & M32) - (1 << 32) if x & 0x80000000 else x & M32


def i64(x: int) -> int:
    return (x & M64) - (1 << 64) if x >> 63 & 1 else x & M64


def bits(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


def single(x: Fraction) -> np.float32:
    """The float32 nearest to an exact rational, ties to even."""
    if x == 0:
        return np.float32(0)
    near = np.float32(float(x))
    if not np.isfinite(near):
        return near
    around = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    return min((c for c in around if np.isfinite(c)), key=lambda c: (abs(Fraction(float(c)) - x), bits(c) & 1))


def fma(a: float, b: float, c: float) -> np.float32:
    if all(map(math.isfinite, (a, b, c))):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        return single(exact) if exact else np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


def number_over_nan(choose):
    return lambda a, b: b if math.isnan(a) else a if math.isnan(b) else choose(a, b)


fmax = number_over_nan(lambda a, b: max(a, b, key=lambda x: (x, math.copysign(1, x))))
fmin = number_over_nan(lambda a, b: min(a, b, key=lambda x: (x, math.copysign(1, x))))


def median(a, b, c):
    return fmin(fmin(a, b), c) if any(map(math.isnan, (a, b, c))) else sorted((a, b, c), key=lambda x: (x, math.copysign(1, x)))[1]


def bfe(a, b, c, signed):
    width = c & 31
    field = a >> (b & 31) & ((1 << width) - 1)
    return field - (1 << width) if signed and width and field >> (width - 1) else field


def perm(a, b, select):
    source = (a << 32 | b).to_bytes(8, "little")

    def one(code):
        if code >= 13:
            return 255
        return 0 if code == 12 else source[code] if code < 8 else 255 * (source[2 * (code - 8) + 1] >> 7)

    return int.from_bytes(bytes(one(x) for x in select.to_bytes(4, "little")), "little")


def saturating(low, high):
    def convert(x):
        if math.isnan(x):
            return 0
        return low if x <= low else high if x >= high else int(x)

    return convert


def small(e_bits, m_bits, bias, kind):
    """All (code, value) of a small float format, from its definition."""
    table = {}
    for code in range(1 << (1 + e_bits + m_bits)):
        sign = -1 if code >> (e_bits + m_bits) else 1
        e, m = code >> m_bits & ((1 << e_bits) - 1), code & ((1 << m_bits) - 1)
        value = sign * (m * 2.0 ** (1 - bias - m_bits) if e == 0 else (1 + m / (1 << m_bits)) * 2.0 ** (e - bias))
        top = e == (1 << e_bits) - 1
        if kind == "ieee" and top:
            value = math.nan if m else sign * math.inf
        if (kind == "fn" and top and m == (1 << m_bits) - 1) or (kind == "fnuz" and sign < 0 and e == 0 and m == 0):
            value = math.nan
        table[code] = value
    return table


E4M3FN, E4M3FNUZ = small(4, 3, 7, "fn"), small(4, 3, 8, "fnuz")
E5M2, E5M2FNUZ, F16 = small(5, 2, 15, "ieee"), small(5, 2, 16, "fnuz"), small(5, 10, 15, "ieee")


def to_fp8(table, nan):
    """Nearest code, ties to the even one; past the largest plus half a step there is only NaN."""
    finite = [(code, value) for code, value in table.items() if math.isfinite(value)]
    largest = max(value for _, value in finite)
    step = largest - max(value for _, value in finite if value < largest)

    def convert(x):
        if not math.isfinite(x) or abs(x) > largest + step / 2 or (abs(x) == largest + step / 2 and nan == 0x80):
            return nan
        code = min(finite, key=lambda item: (abs(item[1] - float(x)), item[0] & 1))[0]
        if table[code] == 0:
            return 0x80 if nan == 0x7F and math.copysign(1, x) < 0 else 0
        return code

    return convert


fn, fnuz = to_fp8(E4M3FN, 0x7F), to_fp8(E4M3FNUZ, 0x80)


def bf16(x):
    if math.isnan(x):
        return 0x7FC0
    word = bits(x)
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16


def half(x):
    return int.from_bytes(np.float16(np.float32(x)).tobytes(), "little") if not math.isnan(x) else 0x7E00


def divide(quotient, denominator, numerator):
    """The special cases of a division, else the quotient with the right sign."""
    with np.errstate(all="ignore"):
        exact = np.float64(numerator) / np.float64(denominator)
    special = denominator == 0 or numerator == 0 or not math.isfinite(denominator) or not math.isfinite(numerator)
    if special or (bits(numerator) >> 23 & 255) - (bits(denominator) >> 23 & 255) < -150:
        return exact if special else math.copysign(0, exact)
    return math.copysign(abs(quotient), exact)


def div_scale(a, denominator, numerator):  # noqa: PLR0911 - the cases of the pseudocode
    """AMD's pseudocode, with `frexp` for the exponent field."""

    def exponent(x):
        return bits(x) >> 23 & 255

    def denormal(x):
        return x != 0 and abs(x) < 2.0**-126

    up, down = np.float32(math.ldexp(float(a), 64)) if math.isfinite(a) and abs(a) < 1e19 else None, np.float32(float(a) * 2.0**-64)
    up = np.float32(np.float64(a) * 2.0**64) if up is None else up
    if numerator == 0 or denominator == 0:
        return math.nan, 0
    with np.errstate(all="ignore"):
        quotient = float(np.float32(np.float64(numerator) / np.float64(denominator)))
    reciprocal_denormal = not math.isnan(denominator) and abs(denominator) > 2.0**126
    if exponent(numerator) - exponent(denominator) >= 96:
        return (up if a == denominator else a), 1
    if denormal(denominator):
        return up, 0
    if reciprocal_denormal and denormal(quotient):
        return (up if a == denominator else a), 1
    if reciprocal_denormal:
        return down, 0
    if denormal(quotient):
        return (up if a == numerator else a), 1
    return (up if exponent(numerator) <= 23 else a), 0


def np32(function):
    def apply(*arguments):
        with np.errstate(all="ignore"):
            return function(*[np.float32(x) for x in arguments])

    return apply


def ldexp32(a, power):
    with np.errstate(all="ignore"):
        return np.float32(np.ldexp(np.float64(a), int(np.clip(power, -2000, 2000))))


COMPARE = {"LT": "<", "LE": "<=", "GT": ">", "GE": ">=", "EQ": "==", "NE": "!=", "NEQ": "!="}
compare = {name: eval(f"lambda a, b: int(a {sign} b)") for name, sign in COMPARE.items()}
unordered = lambda a, b: math.isnan(a) or math.isnan(b)  # noqa: E731

EXPECTED = {
    "V_MOV_B32": lambda a: a,
    "V_ACCVGPR_READ": lambda a: a,
    "V_ACCVGPR_WRITE": lambda a: a,
    "V_ACCVGPR_MOV_B32": lambda a: a,
    "V_MOV_B64": lambda a: a,
    "V_PK_MOV_B32": lambda a, b: a | b << 32,
    "V_ADD_U32": lambda a, b: a + b,
    "V_ADD_I32": lambda a, b: a + b,
    "V_SUB_U32": lambda a, b: a - b,
    "V_SUB_I32": lambda a, b: a - b,
    "V_ADD_U32.clamp": lambda a, b: min(a + b, M32),
    "V_SUB_U32.clamp": lambda a, b: max(a - b, 0),
    "V_SUBREV_U32": lambda a, b: b - a,
    "V_ADD_CO_U32": lambda a, b: (a + b, int(a + b > M32)),
    "V_ADDC_CO_U32": lambda a, b, c: (a + b + c, int(a + b + c > M32)),
    "V_SUB_CO_U32": lambda a, b: (a - b, int(a < b)),
    "V_SUBREV_CO_U32": lambda a, b: (b - a, int(b < a)),
    "V_SUBB_CO_U32": lambda a, b, c: (a - b - c, int(a < b + c)),
    "V_SUBBREV_CO_U32": lambda a, b, c: (b - a - c, int(b < a + c)),
    "V_AND_B32": lambda a, b: a & b,
    "V_OR_B32": lambda a, b: a | b,
    "V_XOR_B32": lambda a, b: a ^ b,
    "V_XNOR_B32": lambda a, b: ~(a ^ b),
    "V_NOT_B32": lambda a: ~a,
    "V_OR3_B32": lambda a, b, c: a | b | c,
    "V_AND_OR_B32": lambda a, b, c: a & b | c,
    "V_BFI_B32": lambda a, b, c: a & b | ~a & c,
    "V_LSHLREV_B32": lambda a, b: b << a % 32,
    "V_LSHLREV_B16": lambda a, b: (b << a % 16) % (1 << 16),
    "V_LSHRREV_B32": lambda a, b: b >> a % 32,
    "V_ASHRREV_I32": lambda a, b: i32(b) >> a % 32,
    "V_LSHLREV_B64": lambda a, b: b << a % 64,
    "V_LSHRREV_B64": lambda a, b: b >> a % 64,
    "V_ASHRREV_I64": lambda a, b: i64(b) >> a % 64,
    "V_ADD3_U32": lambda a, b, c: a + b + c,
    "V_LSHL_ADD_U32": lambda a, b, c: (a << b % 32) + c,
    "V_LSHL_ADD_U64": lambda a, b, c: (a << b % 8) + c,
    "V_ADD_LSHL_U32": lambda a, b, c: (a + b) << c % 32,
    "V_LSHL_OR_B32": lambda a, b, c: a << b % 32 | c,
    "V_XAD_U32": lambda a, b, c: (a ^ b) + c,
    "V_MUL_LO_U32": lambda a, b: a * b,
    "V_MUL_LO_I32": lambda a, b: a * b,
    "V_MUL_HI_U32": lambda a, b: a * b >> 32,
    "V_MUL_HI_I32": lambda a, b: i32(a) * i32(b) >> 32,
    "V_MUL_U32_U24": lambda a, b: a % (1 << 24) * (b % (1 << 24)),
    "V_MUL_I32_I24": lambda a, b: (i32(a << 8) >> 8) * (i32(b << 8) >> 8),
    "V_MAD_U32_U24": lambda a, b, c: a % (1 << 24) * (b % (1 << 24)) + c,
    "V_MAD_I32_I24": lambda a, b, c: (i32(a << 8) >> 8) * (i32(b << 8) >> 8) + c,
    "V_MAD_U64_U32": lambda a, b, c: (a * b + c, int(a * b + c > M64)),
    "V_MAD_I64_I32": lambda a, b, c: (i32(a) * i32(b) + i64(c), int(i32(a) * i32(b) + i64(c) < 0)),
    "V_BFE_U32": lambda a, b, c: bfe(a, b, c, False),
    "V_BFE_I32": lambda a, b, c: bfe(a, b, c, True),
    "V_BFM_B32": lambda a, b: ((1 << a % 32) - 1) << b % 32,
    "V_BFREV_B32": lambda a: int(f"{a:032b}"[::-1], 2),
    "V_FFBH_U32": lambda a: 32 - a.bit_length() if a else -1,
    "V_FFBL_B32": lambda a: (a & -a).bit_length() - 1,
    "V_BCNT_U32_B32": lambda a, b: bin(a).count("1") + b,
    "V_MIN_I32": lambda a, b: min(i32(a), i32(b)),
    "V_MAX_I32": lambda a, b: max(i32(a), i32(b)),
    "V_MIN_U32": min,
    "V_MAX_U32": max,
    "V_MIN3_I32": lambda a, b, c: min(i32(a), i32(b), i32(c)),
    "V_MAX3_I32": lambda a, b, c: max(i32(a), i32(b), i32(c)),
    "V_MED3_I32": lambda a, b, c: sorted((i32(a), i32(b), i32(c)))[1],
    "V_MIN3_U32": min,
    "V_MAX3_U32": max,
    "V_MED3_U32": lambda a, b, c: sorted((a, b, c))[1],
    "V_PERM_B32": perm,
    "V_PACK_B32_F16": lambda a, b: a % (1 << 16) | b % (1 << 16) << 16,
    "V_ALIGNBIT_B32": lambda a, b, c: (a << 32 | b) >> c % 32,
    "V_ALIGNBYTE_B32": lambda a, b, c: (a << 32 | b) >> 8 * (c % 4),
    "V_CNDMASK_B32": lambda a, b, c: b if c else a,
    "V_ADD_F32": np32(lambda a, b: a + b),
    "V_SUB_F32": np32(lambda a, b: a - b),
    "V_SUBREV_F32": np32(lambda a, b: b - a),
    "V_MUL_F32": np32(lambda a, b: a * b),
    "V_PK_ADD_F32": np32(lambda a, b: a + b),
    "V_PK_MUL_F32": np32(lambda a, b: a * b),
    "V_MUL_LEGACY_F32": np32(lambda a, b: np.float32(0) if a == 0 or b == 0 else a * b),
    "V_ADD_F64": lambda a, b: a + b,
    "V_MUL_F64": lambda a, b: a * b,
    "V_MAX_F64": fmax,
    "V_MIN_F64": fmin,
    "V_FMA_F64": lambda a, b, c: float(np.float64(np.longdouble(a) * np.longdouble(b) + np.longdouble(c))),
    "V_FMA_F32": fma,
    "V_PK_FMA_F32": fma,
    "V_MAX_F32": fmax,
    "V_MIN_F32": fmin,
    "V_MAX3_F32": lambda a, b, c: fmax(fmax(a, b), c),
    "V_MIN3_F32": lambda a, b, c: fmin(fmin(a, b), c),
    "V_MED3_F32": median,
    "V_EXP_F32": np32(np.exp2),
    "V_LOG_F32": np32(np.log2),
    "V_RCP_F32": np32(lambda a: 1 / a),
    "V_RCP_IFLAG_F32": np32(lambda a: 1 / a),
    "V_SQRT_F32": np32(np.sqrt),
    "V_RSQ_F32": np32(lambda a: np.float32(1 / np.sqrt(np.float64(a)))),
    "V_RNDNE_F32": np32(np.rint),
    "V_FLOOR_F32": np32(np.floor),
    "V_CEIL_F32": np32(np.ceil),
    "V_TRUNC_F32": np32(np.trunc),
    "V_FRACT_F32": np32(lambda a: a - np.floor(a)),
    "V_LDEXP_F32": lambda a, b: ldexp32(a, i32(b)),
    "V_DIV_SCALE_F32": div_scale,
    "V_DIV_FMAS_F32": lambda a, b, c, m: np.float32(np.float64(fma(a, b, c)) * (2.0**32 if m else 1)),
    "V_DIV_FIXUP_F32": divide,
    "V_CVT_F32_U32": np.float32,
    "V_CVT_F32_I32": lambda a: np.float32(i32(a)),
    "V_CVT_F32_UBYTE0": lambda a: np.float32(a & 255),
    "V_CVT_U32_F32": saturating(0, M32),
    "V_CVT_I32_F32": saturating(-(1 << 31), (1 << 31) - 1),
    "V_CVT_F32_F16": lambda a: F16[a & 0xFFFF],
    "V_CVT_F16_F32": half,
    "V_CVT_F32_BF16": lambda a: np.uint32((a & 0xFFFF) << 16).view(np.float32),
    "V_CVT_PK_BF16_F32": lambda a, b: bf16(a) | bf16(b) << 16,
    "V_CVT_PK_F16_F32": lambda a, b: half(a) | half(b) << 16,
    "V_MAD_MIXLO_F16": lambda a, b, c: 0xABCD0000 | half(fma(a, b, c)),
    "V_MAD_MIXHI_F16": lambda a, b, c: half(fma(a, b, c)) << 16 | 0x1234,
    "V_CVT_PK_FP8_F32.gfx942": lambda a, b: 0xABCD0000 | fnuz(a) | fnuz(b) << 8,
    "V_CVT_PK_FP8_F32.gfx950": lambda a, b: 0xABCD0000 | fn(a) | fn(b) << 8,
    "V_CVT_F32_FP8.gfx942": lambda a: E4M3FNUZ[a & 255],
    "V_CVT_F32_FP8.gfx950": lambda a: E4M3FN[a & 255],
    "V_CVT_F32_BF8.gfx942": lambda a: E5M2FNUZ[a & 255],
    "V_CVT_F32_BF8.gfx950": lambda a: E5M2[a & 255],
    "V_CVT_PK_F32_FP8.gfx942": lambda a: bits(E4M3FNUZ[a & 255]) | bits(E4M3FNUZ[a >> 8 & 255]) << 32,
    "V_CVT_PK_F32_FP8.gfx950": lambda a: bits(E4M3FN[a & 255]) | bits(E4M3FN[a >> 8 & 255]) << 32,
    "V_CMP_O_F32": lambda a, b: int(not unordered(a, b)),
    "V_CMP_U_F32": lambda a, b: int(unordered(a, b)),
    "V_CMP_LG_F32": lambda a, b: int(a < b or a > b),
    "V_CMP_NLT_F32": lambda a, b: int(not a < b),
    "V_CMP_NLE_F32": lambda a, b: int(not a <= b),
    "V_CMP_NGT_F32": lambda a, b: int(not a > b),
    "V_CMP_NGE_F32": lambda a, b: int(not a >= b),
    "V_CMP_NLG_F32": lambda a, b: int(not (a < b or a > b)),
}
EXPECTED |= {f"V_CMP_{op}_F32": f for op, f in compare.items() if op != "NE"}
EXPECTED |= {f"V_CMP_{op}_{t}": f for op, f in compare.items() if op != "NEQ" for t in ("U32", "U64")}
for op, f in compare.items():
    if op != "NEQ":
        EXPECTED[f"V_CMP_{op}_I32"] = lambda a, b, f=f: f(i32(a), i32(b))
        EXPECTED[f"V_CMP_{op}_I64"] = lambda a, b, f=f: f(i64(a), i64(b))

ELSEWHERE = {
    "V_BITOP3_B32": "test_modifiers",
    "V_BITOP3_B16": "test_modifiers",
    "V_MBCNT_LO_U32_B32": "test_modifiers",
    "V_MBCNT_HI_U32_B32": "test_modifiers",
    "V_FMAC_F32": "test_modifiers",
    "V_FMAC_F64": "test_modifiers",
    "V_FMAAK_F32": "test_modifiers",
    "V_FMAMK_F32": "test_modifiers",
    "V_CVT_SCALEF32_PK_BF16_FP8": "test_modifiers",
    "V_CVT_SCALEF32_PK_F32_FP8": "test_modifiers",
}
"""Registered opcodes whose operands are not all in the usual places."""


def test_every_registered_instruction_is_tested():
    assert set(EXPECTED) | set(ELSEWHERE) == set(VECTOR)


POOL = {"u": INTS, "i": INTS, "f": FLOATS, "q": LONGS, "d": DOUBLES}


def tuples(letters: str) -> list[tuple]:
    """Edge-case operand tuples, a multiple of 64 of them: all pairs of the first two operands, the third walking."""
    pools = [POOL[letter] for letter in letters if letter != "m"]
    if len(pools) == 1:
        rows = [(x,) for x in pools[0]]
    elif len(pools) == 2:
        rows = list(itertools.product(*pools))
    else:
        rows = [(a, b, pools[2][(i + 3 * j) % len(pools[2])]) for i, a in enumerate(pools[0]) for j, b in enumerate(pools[1])]
    return rows + rows[: -len(rows) % 64] if len(rows) >= 64 else (rows * 64)[:64]


def register_values(letter: str, values: list) -> list[np.ndarray]:
    """One or two rows of 32-bit patterns."""
    if letter == "f":
        return [np.array(values, np.float32).view(np.uint32)]
    if letter in "qd":
        wide = np.array(values, np.uint64 if letter == "q" else np.float64).view(np.uint64)
        return [(wide & np.uint64(M32)).astype(np.uint32), (wide >> np.uint64(32)).astype(np.uint32)]
    return [np.array(values, np.uint32)]


def instruction(name: str, letters: str, results: str):  # noqa: PLR0911 - one an encoding
    sources = [V + 2 * k for k in range(len(letters.replace("m", "")))]
    if name == "V_ACCVGPR_READ":
        return vop3(name, V + 20, V, encoding="VOP3P")
    if name == "V_ACCVGPR_WRITE":
        return vop3(name, V + 20, V, encoding="VOP3P")
    if name.startswith(("V_PK_", "V_MAD_MIX")):
        return vop3(name, V + 20, *sources, encoding="VOP3P", neg_hi=0, opsel_hi=0, opsel_hi2=0)
    if name == "V_DIV_FMAS_F32":
        return vop3(name, V + 20, *sources)
    if "m" in letters:
        sources.append(30)
    if results == "m":
        return vop3(name, 40, *sources, encoding="VOP3_SDST")
    if results.endswith("m"):
        return vop3(name, V + 20, *sources, encoding="VOP3SD", sdst=40)
    return vop3(name, V + 20, *sources)


def close(name: str, got: np.ndarray, expected: np.ndarray) -> bool:
    """Bit-equal, any NaN being one; exp2 and log2 may differ by the host libraries' last unit, and AMD leaves the sign of a
    zero median open."""
    same = (got == expected) & ((np.signbit(got) == np.signbit(expected)) | (name == "V_MED3_F32")) | np.isnan(got) & np.isnan(expected)
    if name in ("V_EXP_F32", "V_LOG_F32"):
        with np.errstate(all="ignore"):
            same |= np.abs(got - expected) <= np.spacing(np.abs(expected))
    return bool(same.all())


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_vector_instruction(name):
    semantics = VECTOR[name]
    opcode, _, variant = name.partition(".")
    clamp, arch = variant == "clamp", "" if variant == "clamp" else variant
    letters = semantics.arguments
    rows = tuples(letters)
    for start in range(0, len(rows), 64):
        lanes = rows[start : start + 64]
        v = {}
        for k, letter in enumerate(letters.replace("m", "")):
            for part, words in enumerate(register_values(letter, [row[k] for row in lanes])):
                v[2 * k + part + (256 if name in ("V_ACCVGPR_READ", "V_ACCVGPR_MOV_B32") else 0)] = words
        v[20] = np.full(64, 0xABCD1234, np.uint32)
        s = {30: MASK & M32, 31: MASK >> 32, 106: MASK & M32, 107: MASK >> 32}
        executed = instruction(opcode, letters, semantics.results)
        if clamp:
            executed.fields["clmp"] = 1
        end = run([executed], v=v, s=s, arch=arch or "gfx942")
        with np.errstate(all="ignore"):
            converted = [[np.float32(x) if t == "f" else x for t, x in zip(letters, row, strict=False)] for row in lanes]
            masks = [[MASK >> lane & 1] if "m" in letters else [] for lane in range(64)]
            expected = [EXPECTED[name](*row, *mask) for row, mask in zip(converted, masks, strict=True)]
        if semantics.results.endswith("m"):
            flags = expected if semantics.results == "m" else [flag for _, flag in expected]
            assert end.s64(40) == sum(int(flag) << lane for lane, flag in enumerate(flags))
            expected = [] if semantics.results == "m" else [value for value, _ in expected]
        destination = 20 + (256 if name in ("V_ACCVGPR_WRITE", "V_ACCVGPR_MOV_B32") else 0)
        letter = semantics.results[0]
        if letter in "ui":
            assert end.v(destination).tolist() == [int(x) & M32 for x in expected], name
        elif letter == "q":
            assert [hex(x) for x in end.q(destination).tolist()] == [hex(int(x) & M64) for x in expected], name
        elif letter == "f":
            assert close(name, end.f(destination), np.array(expected, np.float32)), (name, lanes)
        elif letter == "d":
            got = np.array([struct.unpack("<d", struct.pack("<Q", int(x)))[0] for x in end.q(destination)])
            assert close(name, got, np.array(expected)), name
