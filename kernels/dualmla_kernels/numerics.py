"""The few arithmetic steps that Triton's interpreter gets wrong, written so that compiled and interpreted code agree.

On the interpreter a bf16 `tl.dot` multiplies bit patterns as integers, and fp32 -> bf16 truncates (seen on Triton 3.6
and 3.9). So there, marked by `EXACT`, operands are widened to fp32 before a dot, and bf16 is rounded by hand to
nearest even before it is converted. Compiled code takes the plain path.
"""

import triton
import triton.language as tl


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
