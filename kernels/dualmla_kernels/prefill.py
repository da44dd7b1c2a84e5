"""Prefill: causal or full flash attention over packed sequences of different lengths, with keys and values of their own a head.

For BM queries of one head and the keys t of a tile of BN, with the head dimension in two parts so that the usual
192 = 128 + 64 needs no padding to a power of two:

    s  = q0 k0^T + q1 k1^T
    m' = max(m, c max_t s);  p = 2^(c s - m');  a = 2^(m - m')      c = softmax_scale * log2(e): exp2 is the native one
    l  = a l + sum_t p;      acc = a acc + p v;     m = m'

and at the end out = acc / l, lse = (m + log2 l) ln 2. A row that has seen no key keeps m = -inf, l = 0: 0 and -inf.
Causal is bottom-right: query i of n sees the first `keys - n + i + 1` keys. Tiles that every row sees whole are done
without a mask, those on the diagonal and the last one with it, those above the diagonal not at all.

Shapes: T queries and S keys of all requests, H heads, D = qk_head_dim = D0 + D1, V = v_head_dim.
    q [T, H, D], k [S, H, D], v [S, H, V], cu_seqlens_q, cu_seqlens_k int32 [num_reqs + 1], out [T, H, V], lse fp32 [H, T]
The last dimension of q, k, v and out is dense, other strides are arguments; offsets are int64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dualmla_kernels.launch import HAS_GLUON, Layout, Prepared, cdiv, layout_of, next_power_of_2, without_memory
from dualmla_kernels.numerics import LN2, LOG2E, cast, dot
from dualmla_kernels.target import Target, target_of


@triton.jit
def _load(pointers, in_rows, in_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile, 0 where a mask that is asked for says so: rows past the end may hold anything, and 0 * NaN is NaN."""
    if ROWS and COLUMNS:
        return tl.load(pointers, mask=in_rows[:, None] & in_columns[None, :], other=0.0)
    if ROWS:
        return tl.load(pointers, mask=in_rows[:, None], other=0.0)
    if COLUMNS:
        return tl.load(pointers, mask=in_columns[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _tile(
    q0, q1, m, l, acc, k_ptr, v_ptr, key, num_keys, limit, c, k_token_stride, v_token_stride,
    D0: tl.constexpr, D1: tl.constexpr, D1_PADDED: tl.constexpr, V: tl.constexpr, V_PADDED: tl.constexpr,
    MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One step of the recurrence over the keys `key` [BN] of a request and head that begin at `k_ptr` and `v_ptr`."""
    k_rows, v_rows = k_ptr + key.to(tl.int64) * k_token_stride, v_ptr + key.to(tl.int64) * v_token_stride
    o0, o1, ov = tl.arange(0, D0), tl.arange(0, D1_PADDED), tl.arange(0, V_PADDED)
    exists = key < num_keys
    k0 = _load(k_rows[:, None] + o0[None, :], exists, o0 < D0, MASKED, False)
    s = dot(q0, tl.trans(k0), tl.zeros([q0.shape[0], k0.shape[0]], tl.float32), EXACT)
    if D1 > 0:
        k1 = _load(k_rows[:, None] + (D0 + o1)[None, :], exists, o1 < D1, MASKED, D1 != D1_PADDED)
        s = dot(q1, tl.trans(k1), s, EXACT)
    if MASKED:
        s = tl.where(key[None, :] < limit[:, None], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * c)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new  # no key yet: -inf - -inf would be NaN
    p = tl.exp2(s * c - shift[:, None])
    a = tl.exp2(m - shift)
    l = l * a + tl.sum(p, 1)
    v = _load(v_rows[:, None] + ov[None, :], exists, ov < V, MASKED, V != V_PADDED)
    acc = dot(cast(p, v.dtype, EXACT), v, acc * a[:, None], EXACT)
    return m_new, l, acc


@triton.jit
def write_padding(
    out_ptr, lse_ptr, end_token, num_tokens, out_token_stride, out_head_stride, lse_head_stride, lse_token_stride,
    H: tl.constexpr, V: tl.constexpr, V_PADDED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Tokens from `end_token` on are no request's: their rows are 0 and -inf. All programs of the launch do some."""
    ov = tl.arange(0, V_PADDED)
    rows = (num_tokens - end_token) * H
    for first in tl.range(tl.program_id(0) * BM, rows, tl.num_programs(0) * BM, num_stages=1):
        pad = first + tl.arange(0, BM)
        token, head = (end_token + pad // H).to(tl.int64), (pad % H).to(tl.int64)
        out_row = out_ptr + token * out_token_stride + head * out_head_stride
        nothing = tl.zeros([BM, V_PADDED], out_ptr.dtype.element_ty)
        tl.store(out_row[:, None] + ov[None, :], nothing, mask=(pad < rows)[:, None] & (ov < V)[None, :])
        if lse_ptr is not None:
            empty = tl.full([BM], float("-inf"), tl.float32)
            tl.store(lse_ptr + head * lse_head_stride + token * lse_token_stride, empty, mask=pad < rows)


# what changes from batch to batch is no reason to compile again
@triton.jit(
    do_not_specialize=["cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "num_reqs", "num_tokens", "blocks", "lse_head_stride", "lse_token_stride"]
)
def _prefill(
    q_ptr, k_ptr, v_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, out_ptr, lse_ptr,
    softmax_scale, num_reqs, num_tokens, blocks,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    out_token_stride, out_head_stride, lse_head_stride, lse_token_stride,
    H: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D1_PADDED: tl.constexpr, V: tl.constexpr, V_PADDED: tl.constexpr,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """One program a (head, request, block of BM queries); programs past a request's last block have nothing to attend to.

    Heads go by groups of GROUP, so that the keys and values in use stay in the L2 cache; within a group the last blocks,
    which see the most keys, start first.
    """
    program = tl.program_id(0)
    rest = program // GROUP
    request, rest = rest % num_reqs, rest // num_reqs
    block = blocks - 1 - rest % blocks
    head = (rest // blocks) * GROUP + program % GROUP
    first_query = tl.load(cu_seqlens_q_ptr + request)
    num_queries = tl.load(cu_seqlens_q_ptr + request + 1) - first_query
    ov = tl.arange(0, V_PADDED)

    if (block * BM < num_queries) & (head < H):
        first_key = tl.load(cu_seqlens_k_ptr + request)
        num_keys = tl.load(cu_seqlens_k_ptr + request + 1) - first_key
        query = block * BM + tl.arange(0, BM)
        live = query < num_queries
        if CAUSAL:
            limit = num_keys - num_queries + query + 1
            # the first row of the block sees the fewest keys, the last one the most
            whole = tl.maximum(num_keys - num_queries + block * BM + 1, 0) // BN * BN
            end = tl.maximum(num_keys - num_queries + tl.minimum(block * BM + BM, num_queries), 0)
        else:
            limit = tl.zeros([BM], tl.int32) + num_keys
            whole = num_keys // BN * BN
            end = num_keys

        token, far_head = (first_query + query).to(tl.int64), head.to(tl.int64)
        o0, o1, on = tl.arange(0, D0), tl.arange(0, D1_PADDED), tl.arange(0, BN)
        q_row = q_ptr + token * q_token_stride + far_head * q_head_stride
        q0 = _load(q_row[:, None] + o0[None, :], live, o0 < D0, True, False)
        q1 = q0
        if D1 > 0:
            q1 = _load(q_row[:, None] + (D0 + o1)[None, :], live, o1 < D1, True, D1 != D1_PADDED)
        k_head = k_ptr + first_key.to(tl.int64) * k_token_stride + far_head * k_head_stride
        v_head = v_ptr + first_key.to(tl.int64) * v_token_stride + far_head * v_head_stride
        c = softmax_scale * LOG2E
        m = tl.full([BM], float("-inf"), tl.float32)
        l = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, V_PADDED], tl.float32)
        for t in tl.range(0, whole, BN, num_stages=STAGES):
            m, l, acc = _tile(
                q0, q1, m, l, acc, k_head, v_head, t + on, num_keys, limit, c, k_token_stride, v_token_stride,
                D0, D1, D1_PADDED, V, V_PADDED, False, EXACT,
            )  # fmt: skip
        for t in tl.range(whole, end, BN, num_stages=1):
            m, l, acc = _tile(
                q0, q1, m, l, acc, k_head, v_head, t + on, num_keys, limit, c, k_token_stride, v_token_stride,
                D0, D1, D1_PADDED, V, V_PADDED, True, EXACT,
            )  # fmt: skip

        seen = l != 0.0  # a NaN among the live numbers is seen
        total = tl.where(seen, l, 1.0)
        out_row = out_ptr + token * out_token_stride + far_head * out_head_stride
        result = cast(acc / total[:, None], out_ptr.dtype.element_ty, EXACT)
        tl.store(out_row[:, None] + ov[None, :], result, mask=live[:, None] & (ov < V)[None, :])
        if lse_ptr is not None:
            row_lse = tl.where(seen, (m + tl.log2(total)) * LN2, float("-inf"))
            tl.store(lse_ptr + far_head * lse_head_stride + token * lse_token_stride, row_lse, mask=live)

    write_padding(
        out_ptr, lse_ptr, tl.load(cu_seqlens_q_ptr + num_reqs), num_tokens,
        out_token_stride, out_head_stride, lse_head_stride, lse_token_stride, H, V, V_PADDED, BM,
    )  # fmt: skip


SHORT = 64
"""Requests of at most so many queries are done in smaller blocks."""


@dataclass(frozen=True)
class PrefillConfig:
    """How the kernel is compiled: queries and keys a tile, pipeline stages, warps, heads that run together."""

    block_m: int
    block_n: int
    stages: int
    warps: int
    group: int


def prefill_config(max_seqlen_q: int, head_dims: int, dtype: torch.dtype, target: Target) -> PrefillConfig:
    """The configuration for requests of at most `max_seqlen_q` queries on a chip. Evidence: docs/performance.md.

    `head_dims`: numbers of a key and a value of a head together, 320 in DeepSeek's models; from 400 on tiles are small, so
    that 512 and 512 still fit into shared memory.
    """
    short, platform = max_seqlen_q <= SHORT, target.platform
    if platform == "cpu":
        return PrefillConfig(block_m=32 if short else 64, block_n=64, stages=1, warps=1, group=8)
    if head_dims > 384:
        half = 2 if dtype == torch.float32 else 1
        return PrefillConfig(block_m=64 // half, block_n=32 // half, stages=1, warps=4, group=8)
    if dtype == torch.float32:
        # without tensor cores a lane holds whole rows, and larger tiles are spilled: on sm_90 9 KB a lane at 64 x 32
        rows, warps = (64, 4) if platform == "hip" else (16, 8)
        return PrefillConfig(block_m=rows, block_n=32, stages=1, warps=warps, group=8)
    if platform == "hip":
        # as compiled for gfx942: 320 registers at most and none spilled; 64 keys spill, with four warps or eight
        return PrefillConfig(block_m=64 if short else 128, block_n=32, stages=1, warps=4, group=8)
    if short:
        return PrefillConfig(block_m=64, block_n=64, stages=2, warps=4, group=8)
    # 90 KB, so that chips with 99 KB of shared memory for a program can run it
    return PrefillConfig(block_m=128, block_n=128 if target.arch == "sm_90" else 64, stages=2, warps=8, group=8)


LEAST_V = {"cpu": 16, "hip": 16, "cuda": 64}
"""Columns of a value tile at least. As Triton 3.6 compiles it for sm_90, a wgmma over 16 of them reads past shared memory
(`_prefill` with v_head_dim 16 under compute-sanitizer on an H200)."""


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """`head_dim`, a multiple of 16, as its largest power of two and the rest: 192 -> (128, 64), 128 -> (128, 0)."""
    first = 1 << (head_dim.bit_length() - 1)
    return first, head_dim - first


def runs_on_hopper(target: Target, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `prefill_hopper` can do it: on sm_90, 16-bit numbers, DeepSeek's head dims, tensors that the TMA unit can describe.

    It reads [rows, H, D] as rows of all heads: steps of 16 bytes, columns within int32.
    """
    return (
        HAS_GLUON
        and target.arch == "sm_90"
        and q.dtype in (torch.bfloat16, torch.float16)
        and (q.shape[2], v.shape[2]) == (192, 128)
        and all(
            x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 and 0 < x.stride(0) < 1 << 34
            and (x.shape[1] - 1) * x.stride(1) + x.shape[2] < 1 << 31
            for x in (q, k, v)
        )
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _prepare(
    device: torch.device,
    target: Target,
    of_q: Layout,
    of_k: Layout,
    of_v: Layout,
    of_out: Layout,
    lse_strides: tuple[int, ...] | None,
    num_reqs: int,
    max_seqlen_q: int,
    causal: bool,
    aligned: bool,
) -> Callable[..., None]:
    """What takes a prefill's tensors and scale, in the order of the kernel: a function of numbers that the host knows.

    Arguments:
        aligned: whether q, k and v begin at multiples of 16 bytes.
    """
    q, k, v, out = (without_memory(layout) for layout in (of_q, of_k, of_v, of_out))
    num_tokens, heads, v_dim = out.shape
    if max_seqlen_q > SHORT and aligned and runs_on_hopper(target, q, k, v):
        from dualmla_kernels.prefill_hopper import HopperPrefill

        return HopperPrefill(device, target.processors, q, k, v, out, lse_strides, num_reqs, causal=causal)
    config = prefill_config(max_seqlen_q, q.shape[2] + v_dim, q.dtype, target)
    blocks = cdiv(max_seqlen_q, config.block_m)
    group = min(config.group, heads)
    first, rest = split_head_dim(q.shape[2])
    return Prepared(
        _prefill, (cdiv(heads, group) * group * num_reqs * blocks,), device,
        (num_reqs, num_tokens, blocks, *(stride for x in (q, k, v, out) for stride in x.stride()[:2]), *(lse_strides or (0, 0))),
        H=heads, D0=first, D1=rest, D1_PADDED=max(next_power_of_2(rest), 16),
        V=v_dim, V_PADDED=max(next_power_of_2(v_dim), LEAST_V[target.platform]),
        CAUSAL=causal, BM=config.block_m, BN=config.block_n, GROUP=group, STAGES=config.stages,
        EXACT=target.platform == "cpu", num_warps=config.warps,
    )  # fmt: skip


def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    *,
    causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Write `out` and `lse`; shapes as in the module's docstring, arguments trusted.

    Arguments:
        max_seqlen_q: an upper bound of the query lengths, known on the host.
        out: any float dtype, fp32 to keep what bf16 would round away.
    """
    num_reqs = cu_seqlens_q.shape[0] - 1
    max_seqlen_q = min(max_seqlen_q, out.shape[0])  # a bound may be loose: no program for blocks that can't be
    if num_reqs == 0 or max_seqlen_q == 0 or k.shape[0] == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    device = q.device
    prefill = _prepare(
        device, target_of(device), layout_of(q), layout_of(k), layout_of(v), layout_of(out), None if lse is None else lse.stride(),
        num_reqs, max_seqlen_q, causal, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0,
    )  # fmt: skip
    prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, float(softmax_scale))
