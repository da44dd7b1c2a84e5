"""Two attentions over different keys of the same queries, made one.

With m = max(lse_a, lse_b), w_a = e^(lse_a - m), w_b = e^(lse_b - m):

    out = (w_a out_a + w_b out_b) / (w_a + w_b)        lse = m + ln(w_a + w_b)

A part of lse -inf saw no key: its output is never looked at. Two such parts make 0 and -inf. Kernels that mark an empty
row by +inf (FlashAttention 2) are understood: a true sum of exponentials is never infinite.

Shapes: T tokens, H heads, D numbers a head: out_a, out_b, out [T, H, D], last dimension dense; lse_a, lse_b, lse fp32
[H, T] of any strides. `out` and `lse` may be a part itself, which is then updated in place. Offsets are int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dualmla_kernels.launch import cdiv, launch, next_power_of_2
from dualmla_kernels.numerics import cast


# what changes from batch to batch is no reason to compile again
@triton.jit(
    do_not_specialize=[
        "lse_a_ptr", "lse_b_ptr", "lse_ptr", "rows", "lse_a_head_stride", "lse_a_token_stride",
        "lse_b_head_stride", "lse_b_token_stride", "lse_head_stride", "lse_token_stride",
    ]
)  # fmt: skip
def _merge(
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr, rows,
    a_token_stride, a_head_stride, lse_a_head_stride, lse_a_token_stride,
    b_token_stride, b_head_stride, lse_b_head_stride, lse_b_token_stride,
    out_token_stride, out_head_stride, lse_head_stride, lse_token_stride,
    H: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BR: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Program i merges (token, head) pairs `i * BR` on."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    od = tl.arange(0, D_PADDED)
    live = row < rows
    in_row = (od < D)[None, :]
    token, head = row // H, row % H
    lse_a = tl.load(lse_a_ptr + head * lse_a_head_stride + token * lse_a_token_stride, mask=live, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + head * lse_b_head_stride + token * lse_b_token_stride, mask=live, other=float("-inf"))
    lse_a = tl.where(lse_a == float("inf"), float("-inf"), lse_a)
    lse_b = tl.where(lse_b == float("inf"), float("-inf"), lse_b)
    m = tl.maximum(lse_a, lse_b)
    shift = tl.where(m == float("-inf"), 0.0, m)  # both empty: -inf - -inf would be NaN
    w_a, w_b = tl.exp(lse_a - shift), tl.exp(lse_b - shift)
    total = w_a + w_b
    some = total != 0.0  # a NaN is kept: a part that went wrong is no part without keys
    divisor = tl.where(some, total, 1.0)
    a_row = out_a_ptr + token * a_token_stride + head * a_head_stride
    b_row = out_b_ptr + token * b_token_stride + head * b_head_stride
    a = tl.load(a_row[:, None] + od[None, :], mask=(w_a != 0.0)[:, None] & in_row, other=0.0).to(tl.float32)
    b = tl.load(b_row[:, None] + od[None, :], mask=(w_b != 0.0)[:, None] & in_row, other=0.0).to(tl.float32)
    merged = a * (w_a / divisor)[:, None] + b * (w_b / divisor)[:, None]
    out_row = out_ptr + token * out_token_stride + head * out_head_stride
    tl.store(out_row[:, None] + od[None, :], cast(merged, out_ptr.dtype.element_ty, EXACT), mask=live[:, None] & in_row)
    lse = tl.where(some, m + tl.log(divisor), float("-inf"))
    tl.store(lse_ptr + head * lse_head_stride + token * lse_token_stride, lse, mask=live)


def merge_attn_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write `out` and `lse`; arguments trusted, shapes as in the module's docstring, dtypes of the outputs may differ."""
    tokens, heads, dim = out.shape
    rows = tokens * heads
    if rows == 0:
        return
    on_cpu = out.is_cpu
    block_rows = 256 if on_cpu else 16
    launch(
        _merge, (cdiv(rows, block_rows),), out.device,
        out_a, lse_a, out_b, lse_b, out, lse, rows,
        out_a.stride(0), out_a.stride(1), *lse_a.stride(), out_b.stride(0), out_b.stride(1), *lse_b.stride(),
        out.stride(0), out.stride(1), *lse.stride(),
        H=heads, D=dim, D_PADDED=next_power_of_2(dim), BR=block_rows, EXACT=on_cpu, num_warps=4,
    )  # fmt: skip
