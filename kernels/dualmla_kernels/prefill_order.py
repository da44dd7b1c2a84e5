"""In which order a prefill's blocks of queries are worked on, made on the device: only it knows the lengths.

Block b of a request with N queries over K keys sees `K - N + (b + 1) BM` keys, causally, or K. Blocks go longest first, so
that the multiprocessors end together, but only in levels of LEVEL keys: within one the blocks of a request follow one another,
and as they run at the same time each reads its keys out of the L2 cache where the others had them brought.

    position of block b of request r  =  blocks after b in r  +  sum over requests i < r of those in b's level or higher
                                                              +  sum over requests i > r of those in higher levels

Each count has a closed form, so every position is worked out by itself and nothing is sorted.

Shapes: T queries of all requests, H heads. Blocks number at most T // BM + num_reqs.
    cu_seqlens_q, cu_seqlens_k int32 [num_reqs + 1], out [T, H, V], lse fp32 [H, T]
    order int32 [1 + T // BM + num_reqs, 8]: first a row of (items taken so far, number of blocks), then for each block (first query,
    queries, first key of its request, keys that its last query sees, keys that its first query sees, nothing more)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dualmla_kernels.launch import Prepared, next_power_of_2
from dualmla_kernels.prefill import write_padding

BM = 128
"""Queries of a block."""

LEVEL = 512
"""Keys of a level: four tiles of 128 that a request's blocks share."""

BLOCKS = 64
"""Blocks that one program places at a time."""


@triton.jit
def _no_shorter(keys, queries, num_keys, CAUSAL: tl.constexpr, BM: tl.constexpr):
    """How many blocks of requests with `queries` queries over `num_keys` keys see at least `keys` of them."""
    blocks = (queries + BM - 1) // BM
    if CAUSAL:
        shorter = (keys - num_keys + queries + BM - 1) // BM - 1
        return tl.where(keys > 0, blocks - tl.minimum(tl.maximum(shorter, 0), blocks), blocks)
    return tl.where(num_keys >= keys, blocks, 0)


@triton.jit(
    do_not_specialize=["cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "num_reqs", "num_tokens", "taken", "lse_head_stride", "lse_token_stride"]
)
def _order(
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, order_ptr, out_ptr, lse_ptr, num_reqs, num_tokens, taken,
    out_token_stride, out_head_stride, lse_head_stride, lse_token_stride,
    H: tl.constexpr, V: tl.constexpr, V_PADDED: tl.constexpr, CAUSAL: tl.constexpr,
    BM: tl.constexpr, LEVEL: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr = 16,
):  # fmt: skip
    """Program r places the blocks of request r; all of them write the rows of padding."""
    request = tl.program_id(0)
    on = tl.arange(0, CHUNK)
    if request < num_reqs:
        first_query, first_key = tl.load(cu_seqlens_q_ptr + request), tl.load(cu_seqlens_k_ptr + request)
        queries = tl.load(cu_seqlens_q_ptr + request + 1) - first_query
        num_keys = tl.load(cu_seqlens_k_ptr + request + 1) - first_key
        blocks = (queries + BM - 1) // BM
        for first in range(0, blocks, BLOCKS):
            block = first + tl.arange(0, BLOCKS)
            sees = tl.maximum(num_keys - queries + (block + 1) * BM, 0) if CAUSAL else tl.zeros([BLOCKS], tl.int32) + num_keys
            low = sees // LEVEL * LEVEL
            position = blocks - 1 - block
            for c in range(0, num_reqs, CHUNK):
                i = c + on
                other = (i < num_reqs) & (i != request)
                start, start_k = tl.load(cu_seqlens_q_ptr + i, mask=other, other=0), tl.load(cu_seqlens_k_ptr + i, mask=other, other=0)
                n = tl.load(cu_seqlens_q_ptr + i + 1, mask=other, other=0) - start
                k = tl.load(cu_seqlens_k_ptr + i + 1, mask=other, other=0) - start_k
                before = low[:, None] + tl.where(i < request, 0, LEVEL)[None, :]
                position += tl.sum(_no_shorter(before, n[None, :], k[None, :], CAUSAL, BM), 1)
            entry = order_ptr + (1 + position) * 8
            exists = block < blocks
            rows = tl.minimum(queries - block * BM, BM)
            seen = num_keys - queries + block * BM + 1 if CAUSAL else num_keys + tl.zeros([BLOCKS], tl.int32)
            end = tl.maximum(seen + rows - 1, 0) if CAUSAL else seen
            tl.store(entry, first_query + block * BM, mask=exists)
            tl.store(entry + 1, rows, mask=exists)
            tl.store(entry + 2, first_key + tl.zeros([BLOCKS], tl.int32), mask=exists)
            tl.store(entry + 3, end, mask=exists)
            tl.store(entry + 4, seen, mask=exists)
    if request == 0:
        total = 0
        for c in range(0, num_reqs, CHUNK):
            i = c + on
            n = tl.load(cu_seqlens_q_ptr + i + 1, mask=i < num_reqs, other=0) - tl.load(cu_seqlens_q_ptr + i, mask=i < num_reqs, other=0)
            total += tl.sum((n + BM - 1) // BM, 0)
        tl.store(order_ptr, taken)
        tl.store(order_ptr + 1, total)
    write_padding(
        out_ptr, lse_ptr, tl.load(cu_seqlens_q_ptr + num_reqs), num_tokens,
        out_token_stride, out_head_stride, lse_head_stride, lse_token_stride, H, V, V_PADDED, 64,
    )  # fmt: skip


def rows_of_order(num_tokens: int, num_reqs: int) -> int:
    """Rows of the tensor `order`."""
    return 1 + num_tokens // BM + num_reqs


def prepare_order(
    device: torch.device, out: torch.Tensor, lse_strides: tuple[int, ...], num_reqs: int, taken: int, *, causal: bool
) -> Prepared:
    """What takes `cu_seqlens_q`, `cu_seqlens_k`, `order`, `out` and `lse`; rows of padding are written on the way.

    Arguments:
        out: of the shape and strides of those to come, on "meta".
        lse_strides: of the LSE to come; any where there is none.
        taken: items that are given away before any is asked for.
    """
    num_tokens, heads, v_dim = out.shape
    return Prepared(
        _order, (max(num_reqs, 32),), device, (num_reqs, num_tokens, taken, out.stride(0), out.stride(1), *lse_strides),
        H=heads, V=v_dim, V_PADDED=next_power_of_2(v_dim), CAUSAL=causal, BM=BM, LEVEL=LEVEL, BLOCKS=BLOCKS, num_warps=4,
    )  # fmt: skip
