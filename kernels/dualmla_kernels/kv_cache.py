"""The paged latent cache: rows written to their slots, and rows of a span of each request gathered side by side.

Write: `[kv_c | k_pe]` [T, D + R] goes to `slot_mapping` int64 [T], `page * page_size + offset`; -1 is padding and skipped.
Gather: row `cu_seqlens[r] + i` of the workspace is token `seq_starts[r] + i` of request r, found through its block table.

The cache holds the row divided by k_scale, in float8 saturated and rounded to nearest even (`numerics.float8_bits`);
what is gathered is multiplied by it again.

Shapes: T tokens, W = D + R numbers a latent row.
    kv_c [T, D], k_pe [T, R], kv_cache [num_pages, PAGE, W], block_table int32 [num_reqs, max_pages],
    cu_seqlens int32 [num_reqs + 1], seq_starts int32 [num_reqs], out [tokens, W]
The last dimension is dense everywhere, other strides are arguments; offsets are int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dualmla_kernels.launch import cdiv, launch, next_power_of_2
from dualmla_kernels.numerics import cast, float8_bits, widen

# How the cache's numbers are written: as they are, or as one of the float8 flavours
PLAIN, E4M3FN, E4M3FNUZ = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _encode(x, dtype: tl.constexpr, FORMAT: tl.constexpr, EXACT: tl.constexpr):
    """fp32 `x` as the cache stores it; float8 as its bits."""
    if FORMAT == PLAIN:
        return cast(x, dtype, EXACT)
    else:  # without it the compiler would type both returns
        return float8_bits(x, FORMAT == E4M3FNUZ)


@triton.jit(do_not_specialize=["slot_mapping_ptr"])
def _concat_and_cache(
    kv_c_ptr, k_pe_ptr, kv_ptr, slot_mapping_ptr, k_scale_ptr, k_scale, kv_c_stride, k_pe_stride, page_stride, slot_stride,
    D: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Program t writes token t."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + t)
    if slot >= 0:
        if k_scale_ptr is not None:
            k_scale *= tl.load(k_scale_ptr)
        od, orope = tl.arange(0, D), tl.arange(0, R_PADDED)
        row = kv_ptr + (slot // PAGE) * page_stride + (slot % PAGE) * slot_stride
        kv_c = tl.load(kv_c_ptr + t * kv_c_stride + od).to(tl.float32)
        k_pe = tl.load(k_pe_ptr + t * k_pe_stride + orope, mask=orope < R, other=0.0).to(tl.float32)
        # the plain division of a GPU is off by an ulp or two, which decides ties differently
        scale_d, scale_r = tl.zeros([D], tl.float32) + k_scale, tl.zeros([R_PADDED], tl.float32) + k_scale
        element: tl.constexpr = kv_ptr.dtype.element_ty
        tl.store(row + od, _encode(tl.div_rn(kv_c, scale_d), element, FORMAT, EXACT))
        tl.store(row + D + orope, _encode(tl.div_rn(k_pe, scale_r), element, FORMAT, EXACT), mask=orope < R)


# what changes from batch to batch is no reason to compile again
@triton.jit(do_not_specialize=["block_table_ptr", "cu_seqlens_ptr", "seq_starts_ptr", "num_reqs", "num_rows", "table_stride"])
def _gather(
    kv_ptr, block_table_ptr, cu_seqlens_ptr, seq_starts_ptr, out_ptr, k_scale_ptr, k_scale, num_reqs, num_rows,
    table_stride, page_stride, slot_stride, out_stride,
    W0: tl.constexpr, W1: tl.constexpr, W1_PADDED: tl.constexpr, PAGE: tl.constexpr, STEPS: tl.constexpr, BR: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Program i fills rows `i * BR` on of the workspace, with 0 past the last request's."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    exists = row < num_rows
    # the last request that begins at or before the row: empty ones begin there too, and come before it
    request = tl.zeros([BR], tl.int32)
    for step in tl.static_range(STEPS):
        probe = request + (1 << (STEPS - 1 - step))
        begins = tl.load(cu_seqlens_ptr + probe, mask=probe < num_reqs, other=2147483647)
        request = tl.where(begins <= row, probe, request)
    live = row < tl.load(cu_seqlens_ptr + num_reqs)
    position = tl.load(seq_starts_ptr + request) + row - tl.load(cu_seqlens_ptr + request)
    page = tl.load(block_table_ptr + request.to(tl.int64) * table_stride + position // PAGE, mask=live & exists, other=0).to(tl.int64)
    if k_scale_ptr is not None:
        k_scale *= tl.load(k_scale_ptr)
    o0, o1 = tl.arange(0, W0), tl.arange(0, W1_PADDED)
    source = kv_ptr + page * page_stride + (position % PAGE).to(tl.int64) * slot_stride
    target = out_ptr + row.to(tl.int64) * out_stride
    x0 = widen(tl.load(source[:, None] + o0[None, :], mask=(live & exists)[:, None], other=0.0), tl.float32, EXACT) * k_scale
    tl.store(target[:, None] + o0[None, :], cast(x0, out_ptr.dtype.element_ty, EXACT), mask=exists[:, None])
    if W1 > 0:
        in_row = (o1 < W1)[None, :]
        x1 = tl.load(source[:, None] + (W0 + o1)[None, :], mask=(live & exists)[:, None] & in_row, other=0.0)
        x1 = widen(x1, tl.float32, EXACT) * k_scale
        tl.store(target[:, None] + (W0 + o1)[None, :], cast(x1, out_ptr.dtype.element_ty, EXACT), mask=exists[:, None] & in_row)


def concat_and_cache_mla(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *, k_scale: float | torch.Tensor
) -> None:
    """Write the rows of `slot_mapping`; arguments trusted, shapes as in the module's docstring."""
    num_tokens = slot_mapping.shape[0]
    rank, rope = kv_c.shape[1], k_pe.shape[1]
    if num_tokens == 0:
        return
    formats = {torch.float8_e4m3fn: E4M3FN, torch.float8_e4m3fnuz: E4M3FNUZ}
    format_ = formats.get(kv_cache.dtype, PLAIN)
    on_device = isinstance(k_scale, torch.Tensor)
    launch(
        _concat_and_cache, (num_tokens,), kv_c.device,
        kv_c, k_pe, kv_cache if format_ is PLAIN else kv_cache.view(torch.uint8), slot_mapping,
        k_scale if on_device else None, 1.0 if on_device else k_scale,
        kv_c.stride(0), k_pe.stride(0), kv_cache.stride(0), kv_cache.stride(1),
        D=rank, R=rope, R_PADDED=next_power_of_2(rope), PAGE=kv_cache.shape[1], FORMAT=format_.value,
        EXACT=kv_c.is_cpu, num_warps=4,
    )  # fmt: skip


def gather_kv_cache(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor,
    out: torch.Tensor,
    *,
    k_scale: float | torch.Tensor,
) -> None:
    """Write every row of `out`; arguments trusted, shapes as in the module's docstring."""
    num_rows, width = out.shape
    num_reqs = seq_starts.shape[0]
    if num_rows == 0:
        return
    if num_reqs == 0 or block_table.shape[1] == 0:
        out.zero_()
        return
    first = 1 << (width.bit_length() - 1)
    on_device = isinstance(k_scale, torch.Tensor)
    block_rows = 64 if out.is_cpu else 4
    launch(
        _gather, (cdiv(num_rows, block_rows),), out.device,
        kv_cache, block_table, cu_seqlens, seq_starts, out, k_scale if on_device else None, 1.0 if on_device else k_scale,
        num_reqs, num_rows, block_table.stride(0), kv_cache.stride(0), kv_cache.stride(1), out.stride(0),
        W0=first, W1=width - first, W1_PADDED=next_power_of_2(max(width - first, 1)), PAGE=kv_cache.shape[1],
        STEPS=(num_reqs - 1).bit_length(), BR=block_rows, EXACT=out.is_cpu, num_warps=4,
    )  # fmt: skip
