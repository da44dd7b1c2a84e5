"""Writing latent rows into the paged cache.

`[kv_c | k_pe]` [T, D + R] goes to `slot_mapping` int64 [T], `page * page_size + offset`; -1 is padding and skipped.
An fp8 cache holds the row divided by k_scale, saturated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dualmla_kernels.launch import launch
from dualmla_kernels.numerics import cast


@triton.jit
def _concat_and_cache(
    kv_c_ptr, k_pe_ptr, kv_ptr, slot_mapping_ptr, kv_c_stride, k_pe_stride, page_stride, slot_stride,
    D: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, PAGE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Program t copies token t."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + t)
    if slot >= 0:
        od, orope = tl.arange(0, D), tl.arange(0, R_PADDED)
        row = kv_ptr + (slot // PAGE) * page_stride + (slot % PAGE) * slot_stride
        kv_c = tl.load(kv_c_ptr + t * kv_c_stride + od).to(tl.float32)
        k_pe = tl.load(k_pe_ptr + t * k_pe_stride + orope, mask=orope < R, other=0.0).to(tl.float32)
        tl.store(row + od, cast(kv_c, kv_ptr.dtype.element_ty, EXACT))
        tl.store(row + D + orope, cast(k_pe, kv_ptr.dtype.element_ty, EXACT), mask=orope < R)


def concat_and_cache_mla(kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write the rows; arguments trusted, last dimensions dense, other strides honoured."""
    num_tokens, rank = kv_c.shape
    rope = k_pe.shape[1]
    if num_tokens == 0:
        return
    launch(
        _concat_and_cache, (num_tokens,), kv_c.device,
        kv_c, k_pe, kv_cache, slot_mapping, kv_c.stride(0), k_pe.stride(0), kv_cache.stride(0), kv_cache.stride(1),
        D=rank, R=rope, R_PADDED=triton.next_power_of_2(rope), PAGE=kv_cache.shape[1], EXACT=kv_c.device.type == "cpu", num_warps=4,
    )  # fmt: skip
