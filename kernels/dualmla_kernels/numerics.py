"""The few arithmetic steps that Triton's interpreter gets wrong, written so that compiled and interpreted code agree.

On the interpreter a bf16 `tl.dot` multiplies bit patterns as integers, and fp32 -> bf16 truncates (seen on Triton 3.6
and 3.9). So there, marked by `EXACT`, operands are widened to fp32 before a dot, and bf16 is rounded by hand to
nearest even before it is converted. Compiled code takes the plain path.

float8 is rounded by hand everywhere: the interpreter's stores are wrong (1.98 becomes 1.0), a GPU older than sm_89 has
none, and one path for all means that what a CPU has tested is what a GPU runs.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b, acc, EXACT: tl.constexpr):
    """a @ b + acc in fp32; fp32 operands are not cut to tf32."""
    if EXACT:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def cast(x, dtype: tl.constexpr, EXACT: tl.constexpr):
    """fp32 `x` rounded to nearest even in `dtype`."""
    if EXACT and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        # a NaN must stay one: adding to its bits could carry it to zero
        return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x).to(dtype)
    return x.to(dtype)


@triton.jit
def widen(x, dtype: tl.constexpr, EXACT: tl.constexpr):
    """Numbers of a cache in `dtype`; to the interpreter, NaN in float8 is one of them."""
    if EXACT and x.dtype.primitive_bitwidth == 8:
        bits = x.to(tl.uint8, bitcast=True)
        nan = bits == 0x80 if x.dtype == tl.float8e4b8 else (bits & 0x7F) == 0x7F
        return tl.where(nan, float("nan"), x.to(dtype))
    return x.to(dtype)


@triton.jit
def float8_bits(x, FNUZ: tl.constexpr):
    """fp32 `x` as the uint8 bits of float8 e4m3 (e4m3fnuz where `FNUZ`): to nearest even, saturated, NaN kept.

    e4m3fn: exponent bias 7, largest 448, steps of 2^-9 below 2^-6, NaN 0x7f. e4m3fnuz: bias 8, 240, 2^-10, 2^-7, NaN 0x80, no -0.
    """
    BIAS: tl.constexpr = 8 if FNUZ else 7
    LARGEST: tl.constexpr = 240.0 if FNUZ else 448.0
    NAN: tl.constexpr = 0x80 if FNUZ else 0x7F
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    # fp32 numbers of this size are one subnormal step apart: adding it rounds, and the sum's last bits count the steps
    STEPS: tl.constexpr = 2.0 ** (21 - BIAS)
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    bits = magnitude.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - BIAS) << 3)
    subnormal = (magnitude + STEPS).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    if FNUZ:
        sign = tl.where(code == 0, 0, sign)
    return tl.where(x == x, code | sign, NAN).to(tl.uint8)
