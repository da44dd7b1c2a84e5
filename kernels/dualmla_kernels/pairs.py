"""Float8 numbers of a cache in pairs, as NVIDIA's tensor cores can be fed with them from shared memory.

Shared memory is read in matrices of two-byte elements, by instructions that transpose them too; one-byte ones would be read one by one.
So two e4m3fn numbers of a row are read as an int16, and the columns of even and of odd number are multiplied apart.

As keys they are converted to fp16, which holds every one of them: a NaN among them stays one. As values they are not converted: with
their bits moved to where a wider type has its exponent and mantissa they are that type's numbers, less a power of two. (NaN is not. But
values are keys too.) Weights keep the type of the queries so, and the queries, as fp16, are brought into its range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dualmla_kernels.numerics import widen

# Two pairs of e4m3fn numbers in a register: the first of each, then the second, as two fp16 numbers
_NUMBERS = tl.constexpr("""{
.reg .b32 sorted;
.reg .b16 first, second;
prmt.b32 sorted, $2, 0, 0x3120;
mov.b32 {first, second}, sorted;
cvt.rn.f16x2.e4m3x2 $0, first;
cvt.rn.f16x2.e4m3x2 $1, second;
}""")


def _shrunk(bits: int) -> tl.constexpr:
    """The same, by signs and the other seven bits alone, put `bits` to the left, where the wider type has its exponent and mantissa."""
    kept = f"0x{(0x7F << bits) * 0x10001:08x}"
    return tl.constexpr(f"""{{
.reg .b32 first, second, signs;
shl.b32 first, $2, {bits};
and.b32 first, first, {kept};
shl.b32 signs, $2, 8;
lop3.b32 $0, signs, 0x80008000, first, 0xea;
shr.u32 second, $2, {8 - bits};
and.b32 second, second, {kept};
lop3.b32 $1, $2, 0x80008000, second, 0xea;
}}""")


_SHRUNK_BF16, _SHRUNK_FP16 = _shrunk(4), _shrunk(7)
SHRINKAGE_BF16, SHRINKAGE_FP16 = tl.constexpr(2.0**120), tl.constexpr(2.0**8)  # what the wider exponent bias divides by
# What weights of shrunk values, which are 1 at most, are multiplied by. bf16: all of it, so that a product is what it would be of the
# values themselves, and no smaller. fp16: as much as 1 bears; the smallest number is 2^-24.
GROWTH_BF16, GROWTH_FP16 = tl.constexpr(2.0**120), tl.constexpr(2.0**15)


@triton.jit
def numbers(pairs, EXACT: tl.constexpr):
    """The first and the second e4m3fn number of int16 `pairs` in fp16, which holds every one of them."""
    if EXACT:
        even = widen((pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True), tl.float16, EXACT)
        odd = widen(((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True), tl.float16, EXACT)
    else:
        even, odd = tl.inline_asm_elementwise(_NUMBERS, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    return even, odd


@triton.jit
def shrunk_numbers(pairs, dtype: tl.constexpr, EXACT: tl.constexpr):
    """As `numbers`, in `dtype` and divided by SHRINKAGE, which takes no conversion; of NaN a number."""
    if EXACT:
        BITS: tl.constexpr = 4 if dtype == tl.bfloat16 else 7
        wide = pairs.to(tl.int32)
        even = ((wide & 0x80) << 8) | ((wide & 0x7F) << BITS)
        odd = (wide & 0x8000) | (((wide >> 8) & 0x7F) << BITS)
        if dtype == tl.bfloat16:  # the interpreter takes small bf16 numbers for 0
            even, odd = (even << 16).to(tl.float32, bitcast=True), (odd << 16).to(tl.float32, bitcast=True)
        else:
            even, odd = even.to(tl.int16).to(dtype, bitcast=True), odd.to(tl.int16).to(dtype, bitcast=True)
    elif dtype == tl.bfloat16:
        even, odd = tl.inline_asm_elementwise(_SHRUNK_BF16, "=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    else:
        even, odd = tl.inline_asm_elementwise(_SHRUNK_FP16, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    return even, odd


@triton.jit
def paired_queries(q, q_rope):
    """Rows of queries in fp16, columns of even and of odd number apart, and the power of two [BM] that each row is counted in.

    The largest number of a row becomes 2^13 at least and less than 2^14. What is exact in bf16 stays so down to 2^-30 of it.
    """
    largest = tl.max(tl.abs(q_rope.to(tl.float32)), 1)
    for i in tl.static_range(len(q)):
        largest = tl.maximum(largest, tl.max(tl.abs(q[i].to(tl.float32)), 1))
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 64)  # plus 127; of inf, whose row keeps it, 255
    up = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    unit = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    paired = ()
    for i in tl.static_range(len(q)):
        paired += _even_and_odd((q[i].to(tl.float32) * up[:, None]).to(tl.float16))
    return paired, _even_and_odd((q_rope.to(tl.float32) * up[:, None]).to(tl.float16)), unit


@triton.jit
def _even_and_odd(x):
    """Columns of even and of odd number of `x`."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
