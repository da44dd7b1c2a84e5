"""Absorbed MLA decode over a paged latent cache: split-KV flash attention where the key row is also the value row.

A query token has H heads, all attending to the same latent rows, so the (token, head) pairs of a request are the rows
of one matrix product. For BM such rows and the keys t of a tile of BN:

    s  = c * (q_latent k_latent^T + q_rope k_rope^T)      c = softmax_scale * k_scale * log2(e): exp2 is the native one
    m' = max(m, max_t s);  p = 2^(s - m');  a = 2^(m - m')
    l  = a l + sum_t p;    acc = a acc + p k_latent;      m = m'

and at the end out = acc / l * k_scale, lse = (m + log2 l) ln 2. A row that has seen no key keeps m = -inf, l = 0: 0 and -inf.

Programs walk the pieces of a split plan (plan.py). A request in one piece is written directly; the pieces of a split one
are left in fp32 as out and base-2 lse, and `combine` weighs them by 2^(lse - max lse). It also writes the padding.

Shapes: T tokens, H heads, D = kv_lora_rank, R = qk_rope_head_dim.
    q [T, H, D + R], kv_cache [num_pages, PAGE, D + R], block_table int32 [num_reqs, max_pages], seq_lens int32 [num_reqs],
    qo_indptr int32 [num_reqs + 1], out [T, H, D], lse fp32 [H, T]; partial_out fp32 [slots, G * BM, D], partial_lse [slots, G * BM]
    where G = cdiv(H * max_query_len, BM) groups of rows.
The last dimension is dense everywhere, other strides are arguments; offsets are int64.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dualmla_kernels.launch import HAS_GLUON, Layout, Prepared, cdiv, layout_of, next_power_of_2, stream_of, without_memory
from dualmla_kernels.numerics import LN2, LOG2E, cast, dot
from dualmla_kernels.plan import PlanShape, SplitPlan, balanced_plan, fixed_plan
from dualmla_kernels.ready import Settled
from dualmla_kernels.target import TRITON_VERSION, Target, target_of

FAR = tl.constexpr(2.0**64)  # sum of weights, relative to a maximum, above which that maximum is no good


@triton.jit
def _page_ids(pages, t, on, seq_len, PAGE: tl.constexpr, BN: tl.constexpr):
    """Page ids of tile t: one where a tile lies in one page, else one a key. What lies past the last live page is never read."""
    last = tl.maximum(seq_len - 1, 0)
    key = t * BN if PAGE % BN == 0 else t * BN + on
    return tl.load(pages + tl.minimum(key, last) // PAGE)


@triton.jit
def _scores(
    t, ids, q, q_rope, kv_ptr, page_stride, limit, seq_len,
    D: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SLICES: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Products [BM, BN] of the rows with the keys of tile t, and the keys' latent slices. MASKED: some row does not see all."""
    DS: tl.constexpr = D // SLICES
    dtype: tl.constexpr = q_rope.dtype
    on, od, orope = tl.arange(0, BN), tl.arange(0, DS), tl.arange(0, R_PADDED)
    page = ids.to(tl.int64)
    row = on
    if MASKED:
        # Slots past the end may hold anything, and as values they are multiplied by 0 where 0 * NaN is NaN: read the last live row
        row = tl.minimum(on, seq_len - 1 - t * BN)
    if PAGE * SLOT >= 2**31:
        row = row.to(tl.int64)
    if PAGE % BN == 0:
        k_tile = kv_ptr + page * page_stride + tl.cast((t * BN) % PAGE, tl.int64) * SLOT
        k_row = (row * SLOT)[:, None]
    else:
        k_tile = (kv_ptr + page * page_stride + (t * BN + row) % PAGE * SLOT)[:, None]
        k_row = 0
    s = tl.zeros([BM, BN], tl.float32)
    k = ()
    for i in tl.static_range(SLICES):
        k += (tl.load(k_tile + (k_row + (i * DS + od)[None, :])).to(dtype),)
        s = dot(q[i], tl.trans(k[i]), s, EXACT)
    k_rope = tl.load(k_tile + (k_row + (D + orope)[None, :]), mask=(orope < R)[None, :], other=0.0).to(dtype)
    s = dot(q_rope, tl.trans(k_rope), s, EXACT)
    if MASKED:
        s = tl.where((t * BN + on)[None, :] < limit[:, None], s, float("-inf"))
    return s, k


@triton.jit
def _add_values(p, k, acc, SLICES: tl.constexpr, EXACT: tl.constexpr):
    """Values `k`, weighted by `p` [BM, BN], into the accumulator."""
    p = cast(p, k[0].dtype, EXACT)
    next_acc = ()
    for i in tl.static_range(SLICES):
        next_acc += (dot(p, k[i], acc[i], EXACT),)
    return next_acc


@triton.jit
def _attend_tile(
    t, ids, q, q_rope, m, l, acc, kv_ptr, page_stride, c, limit, seq_len,
    D: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SLICES: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Tile t into (m, l, acc)."""
    s, k = _scores(t, ids, q, q_rope, kv_ptr, page_stride, limit, seq_len,
                   D, R, R_PADDED, PAGE, SLOT, BM, BN, SLICES, MASKED, EXACT)  # fmt: skip
    m_new = tl.maximum(m, tl.max(s, 1) * c)
    shift = _finite(m_new, MASKED)
    p, a = tl.exp2(s * c - shift[:, None]), tl.exp2(m - shift)
    return m_new, l * a + tl.sum(p, 1), _add_values(p, k, _scaled(acc, a, SLICES), SLICES, EXACT)


@triton.jit
def _attend_piece(
    first, end, least, q, q_rope, m, l, acc, pages, kv_ptr, page_stride, c, limit, seq_len,
    D: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SLICES: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Tiles `first` to `end` of a piece into (m, l, acc), all with the maximum that the last ones have.

    Softmax is as exact with any m that lets nothing overflow, and none of the numbers here, bf16 weights included, does
    before 2^127. So no tile waits for a maximum over its lanes, and nothing but products touches the accumulator in the
    loop. A score far above m shows in the row's sum. Last result: 1 where one is above FAR, and the others are worth nothing.

    The last tiles come first. Every live row that sees a key sees key `least - 1` or, in a piece that ends earlier, all keys.
    """
    on = tl.arange(0, BN)
    whole = tl.maximum(tl.minimum(end - 1, tl.maximum(least - 1, 0) // BN), first)
    for t in tl.range(whole, end, num_stages=STAGES):
        ids = _page_ids(pages, t, on, seq_len, PAGE, BN)
        m, l, acc = _attend_tile(t, ids, q, q_rope, m, l, acc, kv_ptr, page_stride, c, limit, seq_len,
                                 D, R, R_PADDED, PAGE, SLOT, BM, BN, SLICES, True, EXACT)  # fmt: skip
    sums = tl.zeros([BM, BN], tl.float32)
    # page ids are read a tile early: a load that waits for another load can't be pipelined as deep
    ids = _page_ids(pages, first, on, seq_len, PAGE, BN)
    for t in tl.range(first, whole, num_stages=STAGES):
        next_ids = _page_ids(pages, t + 1, on, seq_len, PAGE, BN)
        s, k = _scores(t, ids, q, q_rope, kv_ptr, page_stride, limit, seq_len,
                       D, R, R_PADDED, PAGE, SLOT, BM, BN, SLICES, False, EXACT)  # fmt: skip
        p = tl.exp2(s * c - m[:, None])
        sums += p
        acc = _add_values(p, k, acc, SLICES, EXACT)
        ids = next_ids
    l += tl.sum(sums, 1)
    return m, l, acc, tl.max((l > FAR).to(tl.int32), 0)


@triton.jit
def _scaled(acc, a, SLICES: tl.constexpr):
    """Each slice of the accumulator, its rows times `a` [BM]."""
    scaled = ()
    for i in tl.static_range(SLICES):
        scaled += (acc[i] * a[:, None],)
    return scaled


@triton.jit
def _finite(m, MASKED: tl.constexpr):
    """`m`, and 0 for a row that has seen no key yet: -inf - -inf would be NaN. Without a mask every row has seen one."""
    return tl.where(m == float("-inf"), 0.0, m) if MASKED else m


@triton.jit
def _write_piece(
    m, l, acc, slot, row, token, head, rows, written, k_scale,
    out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, out_token_stride, out_head_stride, lse_head_stride, lse_token_stride,
    D: tl.constexpr, SLICES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The result of a piece, for the rows `written` [BM]: `token` and `head` of each in the batch, `row` of `rows` in a slot."""
    od = tl.arange(0, D // SLICES)
    seen = l != 0.0  # a NaN among the live numbers is seen
    weight = k_scale / tl.where(seen, l, 1.0)
    row_lse = tl.where(seen, m + tl.log2(tl.where(seen, l, 1.0)), float("-inf"))
    if slot < 0:
        out_row = out_ptr + token.to(tl.int64) * out_token_stride + head.to(tl.int64) * out_head_stride
        for i in tl.static_range(SLICES):
            result = cast(acc[i] * weight[:, None], out_ptr.dtype.element_ty, EXACT)
            tl.store(out_row[:, None] + (i * (D // SLICES) + od)[None, :], result, mask=written[:, None])
        if lse_ptr is not None:
            tl.store(lse_ptr + head.to(tl.int64) * lse_head_stride + token * lse_token_stride, row_lse * LN2, mask=written)
    else:
        partial = slot.to(tl.int64) * rows + row
        partial_row = partial_out_ptr + partial[:, None] * D
        for i in tl.static_range(SLICES):
            tl.store(partial_row + (i * (D // SLICES) + od)[None, :], acc[i] * weight[:, None], mask=written[:, None])
        tl.store(partial_lse_ptr + partial, row_lse, mask=written)


# what changes from batch to batch is no reason to compile again
@triton.jit(do_not_specialize=["table_stride"])
def _decode(
    q_ptr, kv_ptr, block_table_ptr, seq_lens_ptr, qo_indptr_ptr, pieces_of_part_ptr, pieces_ptr,
    out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, k_scale_ptr,
    softmax_scale, k_scale, table_stride,
    q_token_stride, q_head_stride, page_stride, out_token_stride, out_head_stride, lse_head_stride, lse_token_stride,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, CAUSAL: tl.constexpr,
    TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
    LAZY: tl.constexpr, PDL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Program (group, part): the pieces of `part` for rows `group * BM` on of each request.

    Groups come first, so that programs that read the same keys run at the same time.
    """
    if PDL:
        gdc_launch_dependents()  # the combine may be made ready from now on: it waits for the end of this kernel by itself
    group, part = tl.program_id(0), tl.program_id(1)
    groups = tl.num_programs(0)
    if k_scale_ptr is not None:
        k_scale *= tl.load(k_scale_ptr)
    c = softmax_scale * k_scale * LOG2E
    row = group * BM + tl.arange(0, BM)  # (token, head) pair within a request
    token, head = row // H, row % H
    od, orope, on = tl.arange(0, D // SLICES), tl.arange(0, R_PADDED), tl.arange(0, BN)

    for w in tl.range(tl.load(pieces_of_part_ptr + part), tl.load(pieces_of_part_ptr + part + 1), num_stages=1):
        request = tl.load(pieces_ptr + 4 * w)
        first_tile = tl.load(pieces_ptr + 4 * w + 1) * (TILE // BN)
        end_tile = tl.load(pieces_ptr + 4 * w + 2) * (TILE // BN)
        slot = tl.load(pieces_ptr + 4 * w + 3)
        seq_len = tl.load(seq_lens_ptr + request)
        first_token = tl.load(qo_indptr_ptr + request)
        query_len = tl.load(qo_indptr_ptr + request + 1) - first_token
        live = token < query_len
        # row i of the request sees the keys below limit[i]; least and most are those of this group
        if CAUSAL:
            limit = seq_len - query_len + token + 1
            least = seq_len - query_len + group * BM // H + 1
            most = seq_len - query_len + tl.minimum((group * BM + BM - 1) // H + 1, query_len)
        else:
            limit = tl.zeros([BM], tl.int32) + seq_len
            least = seq_len
            most = seq_len
        end_tile = tl.minimum(end_tile, tl.cdiv(tl.maximum(most, 0), BN))  # 0 for an empty request, a piece of one tile in the plan
        if group * BM >= query_len * H:  # the request has no row in this group
            end_tile = first_tile

        q_row = q_ptr + (first_token + token).to(tl.int64) * q_token_stride + head.to(tl.int64) * q_head_stride
        q = ()
        acc = ()
        for i in tl.static_range(SLICES):
            q += (tl.load(q_row[:, None] + (i * (D // SLICES) + od)[None, :], mask=live[:, None], other=0.0),)
            acc += (tl.zeros([BM, D // SLICES], tl.float32),)
        q_rope = tl.load(q_row[:, None] + (D + orope)[None, :], mask=live[:, None] & (orope < R)[None, :], other=0.0)
        m = tl.full([BM], float("-inf"), tl.float32)
        l = tl.zeros([BM], tl.float32)
        pages = block_table_ptr + request.to(tl.int64) * table_stride

        if LAZY:
            m, l, acc, far = _attend_piece(first_tile, end_tile, least, q, q_rope, m, l, acc, pages, kv_ptr, page_stride, c, limit, seq_len,
                                           D, R, R_PADDED, PAGE, SLOT, BM, BN, SLICES, STAGES, EXACT)  # fmt: skip
            _write_piece(m, l, acc, slot, row, first_token + token, head, groups * BM, tl.where(far > 0, 0, live) != 0, k_scale,
                         out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, out_token_stride, out_head_stride,
                         lse_head_stride, lse_token_stride, D, SLICES, EXACT)  # fmt: skip
            if far > 0:
                m = tl.full([BM], float("-inf"), tl.float32)
                l = tl.zeros([BM], tl.float32)
                acc = ()
                for _ in tl.static_range(SLICES):
                    acc += (tl.zeros([BM, D // SLICES], tl.float32),)
                for t in tl.range(first_tile, end_tile, num_stages=STAGES):
                    ids = _page_ids(pages, t, on, seq_len, PAGE, BN)
                    m, l, acc = _attend_tile(t, ids, q, q_rope, m, l, acc, kv_ptr, page_stride, c, limit, seq_len,
                                             D, R, R_PADDED, PAGE, SLOT, BM, BN, SLICES, True, EXACT)  # fmt: skip
                _write_piece(m, l, acc, slot, row, first_token + token, head, groups * BM, live, k_scale,
                             out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, out_token_stride, out_head_stride,
                             lse_head_stride, lse_token_stride, D, SLICES, EXACT)  # fmt: skip
        else:
            # page ids are read a tile early: a load that waits for another load can't be pipelined as deep
            # the first, where it is one, without waiting for the length: it is live wherever there is a tile
            ids = tl.load(pages + first_tile * BN // PAGE) if PAGE % BN == 0 else _page_ids(pages, first_tile, on, seq_len, PAGE, BN)
            whole = tl.minimum(end_tile, tl.maximum(least, 0) // BN)
            for t in tl.range(first_tile, whole, num_stages=STAGES):
                next_ids = _page_ids(pages, t + 1, on, seq_len, PAGE, BN)
                m, l, acc = _attend_tile(t, ids, q, q_rope, m, l, acc, kv_ptr, page_stride, c, limit, seq_len,
                                         D, R, R_PADDED, PAGE, SLOT, BM, BN, SLICES, False, EXACT)  # fmt: skip
                ids = next_ids
            first_masked = tl.maximum(first_tile, whole)
            if first_masked < end_tile:  # starting a pipeline takes its time even for no tile
                for t in tl.range(first_masked, end_tile, num_stages=STAGES):
                    ids = _page_ids(pages, t, on, seq_len, PAGE, BN)
                    m, l, acc = _attend_tile(t, ids, q, q_rope, m, l, acc, kv_ptr, page_stride, c, limit, seq_len,
                                             D, R, R_PADDED, PAGE, SLOT, BM, BN, SLICES, True, EXACT)  # fmt: skip
            _write_piece(m, l, acc, slot, row, first_token + token, head, groups * BM, live, k_scale,
                         out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, out_token_stride, out_head_stride,
                         lse_head_stride, lse_token_stride, D, SLICES, EXACT)  # fmt: skip


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def _combine(
    partial_out_ptr, partial_lse_ptr, splits_ptr, qo_indptr_ptr, out_ptr, lse_ptr, rows, num_reqs, num_tokens,
    out_token_stride, out_head_stride, lse_head_stride, lse_token_stride,
    H: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Program (row, split request, columns): the weighted sum of the request's pieces, BS at a time.

    And what no request owns: padding tokens, shared out to all programs, are 0 and -inf.
    """
    row, split, column = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    od, piece = column * BD + tl.arange(0, BD), tl.arange(0, BS)
    end_token = tl.load(qo_indptr_ptr + num_reqs)
    request = tl.load(splits_ptr + 3 * split)
    for pad in tl.range(split * tl.num_programs(0) + row, (num_tokens - end_token) * H, tl.num_programs(0) * tl.num_programs(1)):
        pad_token, pad_head = end_token.to(tl.int64) + pad // H, tl.cast(pad % H, tl.int64)
        tl.store(out_ptr + pad_token * out_token_stride + pad_head * out_head_stride + od, tl.zeros([BD], out_ptr.dtype.element_ty))
        if lse_ptr is not None and column == 0:
            tl.store(lse_ptr + pad_head * lse_head_stride + pad_token * lse_token_stride, float("-inf"))
    if PDL:  # noqa: SIM102 - known to the compiler
        # The plan is older than the decode and is read before it has ended. The first program waits even for nothing: if
        # none did, this kernel, and with it what the stream runs next, could be ahead of the decode.
        if (request >= 0) | (row + split + column == 0):
            gdc_wait()
    if request >= 0:
        first_token = tl.load(qo_indptr_ptr + request)
        token, head = first_token + row // H, row % H
        if token < tl.load(qo_indptr_ptr + request + 1):
            first, end = tl.load(splits_ptr + 3 * split + 1), tl.load(splits_ptr + 3 * split + 2)
            m = float("-inf")
            for s in tl.range(first, end, BS):
                slot = s + piece.to(tl.int64)
                m = tl.maximum(m, tl.max(tl.load(partial_lse_ptr + slot * rows + row, mask=slot < end, other=float("-inf")), 0))
            shift = tl.where(m == float("-inf"), 0.0, m)
            l = 0.0
            acc = tl.zeros([BD], tl.float32)
            for s in tl.range(first, end, BS):
                slot = s + piece.to(tl.int64)
                weight = tl.exp2(tl.load(partial_lse_ptr + slot * rows + row, mask=slot < end, other=float("-inf")) - shift)
                part = tl.load(partial_out_ptr + (slot * rows + row)[:, None] * D + od[None, :], mask=(slot < end)[:, None], other=0.0)
                acc += tl.sum(part * weight[:, None], 0)
                l += tl.sum(weight, 0)
            seen = l != 0.0  # a piece of NaN is one of the row's
            total = tl.where(seen, l, 1.0)
            out_row = out_ptr + token.to(tl.int64) * out_token_stride + head.to(tl.int64) * out_head_stride
            tl.store(out_row + od, cast(acc / total, out_ptr.dtype.element_ty, EXACT))
            if lse_ptr is not None and column == 0:
                row_lse = tl.where(seen, (m + tl.log2(total)) * LN2, float("-inf"))
                tl.store(lse_ptr + head.to(tl.int64) * lse_head_stride + token * lse_token_stride, row_lse)


@dataclass(frozen=True)
class DecodeConfig:
    """How the kernel is compiled, and for how many programs.

    Attributes:
        block_m: rows a tile.
        block_n: keys a tile.
        slices: the latent row is held in as many slices of columns.
        stages: tiles of keys under way.
        lazy: whether a piece is done with the maximum of its last tiles alone (`_attend_piece`); fp16 weights would overflow.
        programs: for the whole device.
        warps: of a program; waves of 64 lanes on AMD.
        pairs: whether `decode_hopper` does it, two tiles at a time, where it can.
        options: of the compiler for AMD.
    """

    block_m: int
    block_n: int
    slices: int
    stages: int
    lazy: bool
    programs: int
    warps: int
    pairs: bool = False
    options: Mapping[str, int] = field(default_factory=dict)

    @property
    def tile(self) -> int:
        """Keys that a plan never cuts."""
        return 2 * self.block_n if self.pairs else self.block_n


def decode_config(rows: int, dtype: torch.dtype, device: torch.device, float8: bool = False) -> DecodeConfig:
    """The configuration for `rows` (token, head) pairs a request. Evidence: docs/compiled.md, docs/performance.md.

    Arguments:
        dtype: of the queries.
        float8: whether the cache is. A plan doesn't ask: keys a tile divide those without float8, all else it goes by is the same.
    """
    return _config(rows > 16, dtype, target_of(device), float8)


@functools.cache
def _config(wide: bool, dtype: torch.dtype, target: Target, float8: bool) -> DecodeConfig:
    if target.platform == "cpu":
        # four programs, so that split rows are met in small tests too; the two sizes show both ways to rescale, float8 smaller tiles
        block_n = 32 if float8 else 64
        lazy = wide and dtype != torch.float16
        return DecodeConfig(64 if wide else 16, block_n, slices=2 if wide else 1, stages=1, lazy=lazy, programs=4, warps=1)
    if target.platform == "hip":
        return _amd_config(wide, dtype, target, float8)
    if dtype == torch.float32:
        return DecodeConfig(16, 32, slices=1, stages=2, lazy=False, programs=target.processors, warps=4)
    if wide:
        return DecodeConfig(64, 64, slices=1, stages=2, lazy=False, programs=target.processors, warps=8, pairs=target.arch == "sm_90")
    return DecodeConfig(16, 64, slices=8, stages=3, lazy=False, programs=target.processors, warps=4)


def _amd_config(wide: bool, dtype: torch.dtype, target: Target, float8: bool) -> DecodeConfig:
    """For CDNA. A lane has 512 registers, vector and accumulation ones together, and everything here is about fitting into them.

    Slices of 128 columns, one tile at a time and 16 x 16 products keep what is in flight small. Two tiles at a time would
    make gfx942, which can't read LDS transposed, fetch values by two bytes.
    """
    lazy, programs = dtype != torch.float16, target.processors
    # kpack: two steps of a product are read from LDS at once. Triton 3.6 has no registers for it beside 64 rows, and CDNA4 has
    # products of twice the depth instead. With one wave to a SIMD the compiler may use all registers, which it does not always know
    two_steps = target.arch != "gfx950" and dtype != torch.float32 and not (wide and TRITON_VERSION <= (3, 6))
    options = {"matrix_instr_nonkdim": 16, "kpack": 2 if two_steps else 1, "waves_per_eu": 1}
    if dtype == torch.float32:
        return DecodeConfig(16, 16, slices=8, stages=1, lazy=lazy, programs=programs, warps=4, options=options)
    if wide:
        slices = 8 if target.arch == "gfx90a" else 4  # its products are of half the depth, and their operands take more registers
        return DecodeConfig(64, 16 if float8 else 32, slices=slices, stages=1, lazy=lazy, programs=programs, warps=4, options=options)
    # A wave alone multiplies nothing twice and waits for nobody. Each has a SIMD to itself: four of them keep a compute unit's
    # memory busy while one waits, and each has its own share of the plan.
    return DecodeConfig(16, 16, slices=4, stages=1, lazy=lazy, programs=4 * programs, warps=1, options=options)


def plan_decode(
    seq_lens: torch.Tensor, *, num_heads: int, max_query_len: int, dtype: torch.dtype, num_kv_splits: int | None = None
) -> SplitPlan:
    """The split plan of a decode over int32 `seq_lens` [num_reqs], on their device; made once a step, used by every layer.

    Arguments:
        max_query_len: an upper bound of the query lengths.
        dtype: of the queries.
        num_kv_splits: pieces of every request; None: equal shares of the device.
    """
    if num_kv_splits is not None:
        config = decode_config(_config_rows(num_heads, max_query_len, num_kv_splits), dtype, seq_lens.device)
        return fixed_plan(seq_lens, splits=num_kv_splits, tile=config.tile)
    return balanced_plan(seq_lens, plan_shape(num_heads, max_query_len, dtype, seq_lens.device))


def plan_shape(num_heads: int, max_query_len: int, dtype: torch.dtype, device: torch.device) -> PlanShape:
    """What a balanced plan for these decodes is made for: host numbers alone, so that a captured launch stays right."""
    config = decode_config(_config_rows(num_heads, max_query_len, None), dtype, device)
    return PlanShape(parts=max(config.programs // _groups(num_heads, max_query_len, config), 1), tile=config.tile)


def scratch_bytes(num_heads: int, max_query_len: int, num_reqs: int, kv_lora_rank: int, dtype: torch.dtype, device: torch.device) -> int:
    """The most that a decode with a balanced plan takes beside its arguments, whatever its lengths: partial results and plan.

    A program splits at most two requests, the first and the last of its share: two partial results of `block_m` rows.
    """
    config = decode_config(_config_rows(num_heads, max_query_len, None), dtype, device)
    partial = 2 * config.programs * config.block_m * (kv_lora_rank + 1) * 4
    return partial + (num_reqs + config.programs) * (4 + 3 + 1) * 4


def _groups(num_heads: int, max_query_len: int, config: DecodeConfig) -> int:
    """Groups of `block_m` rows that the longest request has."""
    return cdiv(num_heads * max_query_len, config.block_m)


def _config_rows(num_heads: int, max_query_len: int, num_kv_splits: int | None) -> int:
    """Rows that the configuration is chosen by. A fixed split promises a row the same bits whatever else is in the batch."""
    return num_heads * (max_query_len if num_kv_splits is None else 1)


def _combine_shape(parts: int, num_reqs: int, rank: int) -> tuple[int, int]:
    """Pieces at a time, and columns a program, of the combine. Evidence: docs/performance.md."""
    if parts // num_reqs > 8:  # few requests in many pieces: the columns are shared out to more programs
        return 32, min(rank, 64)
    return 8, rank


def _dependent_launch(target: Target) -> bool:
    """Whether the chip can make a kernel ready while the one before it runs (Hopper's programmatic dependent launch)."""
    return target.platform == "cuda" and int(target.arch[3:]) >= 90


class _Launches:
    """A decode but for its tensors and scales.

    Arguments:
        decode: takes q and the cache `times` each, and from `block_table_ptr` to `k_scale` what the kernel does.
        times: in how many ways the kernel copies from them.
        combine: takes what the kernel does up to `lse_ptr`.
        partial: numbers of all partial results, without and with their LSEs.
    """

    def __init__(self, device: torch.device, decode: Prepared, times: int, combine: Prepared, partial: tuple[int, int]) -> None:
        self.decode, self._device, self._times, self._combine = decode, device, times, combine
        self._without_lse, self._with_lse = partial
        self._settled: tuple[Settled, Settled] | None = None

    def __call__(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        qo_indptr: torch.Tensor,
        plan: SplitPlan,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        softmax_scale: float,
        k_scale: float | torch.Tensor,
    ) -> None:
        """Launch both kernels."""
        partial = torch.empty(self._with_lse, dtype=torch.float32, device=q.device)  # outputs and LSEs: an allocation takes its time
        on_device = isinstance(k_scale, torch.Tensor)
        if self._settled is not None and not on_device and (stream := stream_of(self._device)) is not None:
            decode, combine = self._settled
            q_at, cache_at, out_at, partial_at = q.data_ptr(), kv_cache.data_ptr(), out.data_ptr(), partial.data_ptr()
            table_at, lens_at, indptr_at = block_table.data_ptr(), seq_lens.data_ptr(), qo_indptr.data_ptr()
            parts_at, pieces_at, splits_at = plan.pieces_of_part.data_ptr(), plan.pieces.data_ptr(), plan.splits.data_ptr()
            lse_at, partial_lse_at = None if lse is None else lse.data_ptr(), partial_at + 4 * self._without_lse
            bits = (
                q_at | cache_at | out_at | table_at | lens_at | indptr_at | parts_at | pieces_at | splits_at | partial_at | partial_lse_at
            )
            if not (bits | (lse_at or 0)) & 15 and not decode.heard and not combine.heard:
                first = (q_at, cache_at) if self._times == 1 else decode.encoded(q, q, kv_cache, kv_cache)
                decode(
                    stream, *first, table_at, lens_at, indptr_at, parts_at, pieces_at, out_at, lse_at, partial_at, partial_lse_at,
                    None, softmax_scale, k_scale,
                )  # fmt: skip
                combine(stream, partial_at, partial_lse_at, splits_at, indptr_at, out_at, lse_at)
                return
        partial_lse = partial[self._without_lse :]
        first = (*(q,) * self._times, *(kv_cache,) * self._times)
        scales = (k_scale, softmax_scale, 1.0) if on_device else (None, softmax_scale, k_scale)
        to_decode = (
            *first, block_table, seq_lens, qo_indptr, plan.pieces_of_part, plan.pieces, out, lse, partial, partial_lse, *scales
        )  # fmt: skip
        to_combine = (partial, partial_lse, plan.splits, qo_indptr, out, lse)
        self.decode(*to_decode)
        self._combine(*to_combine)
        if not on_device and (decode := self.decode.settled(*to_decode)) and (combine := self._combine.settled(*to_combine)):
            self._settled = decode, combine


@functools.lru_cache(maxsize=1024)
def _launches(
    device: torch.device,
    target: Target,
    of_q: Layout,
    of_cache: Layout,
    of_out: Layout,
    lse_strides: tuple[int, ...] | None,
    table_stride: int,
    num_reqs: int,
    max_query_len: int,
    plan_counts: tuple[int, int, int, int],
    causal: bool,
    fixed: bool,
    aligned: bool,
) -> _Launches:
    """What a decode launches: a function of numbers that the host knows, and so worked out once for calls that are alike.

    Arguments:
        plan_counts: `SplitPlan.counts`.
        fixed: whether the caller fixed the splits.
        aligned: whether q and the cache begin at multiples of 16 bytes.
    """
    q, kv_cache, out = without_memory(of_q), without_memory(of_cache), without_memory(of_out)
    (parts, most_splits, slots, tile), (num_tokens, heads, rank) = plan_counts, out.shape
    rope = q.shape[2] - rank
    config = decode_config(_config_rows(heads, max_query_len, 1 if fixed else None), q.dtype, device, kv_cache.dtype.itemsize == 1)
    grid, partial_rows = (_groups(heads, max_query_len, config), parts), _groups(heads, max_query_len, config) * config.block_m
    exact, pdl = target.platform == "cpu", _dependent_launch(target)
    options = {"launch_pdl": True} if pdl else {}
    strides = (out.stride(0), out.stride(1), *(lse_strides or (0, 0)))
    pairs = config.pairs and HAS_GLUON and aligned
    if pairs:
        from dualmla_kernels import decode_hopper

        pairs = decode_hopper.fits(q, kv_cache, rank)
    if pairs:
        decode = decode_hopper.prepare_pairs(grid, device, q, kv_cache, table_stride, strides, causal=causal)
    else:
        slices = max(min(config.slices, rank // 64), 1)  # a product needs 16 columns and is better off with 64
        decode = Prepared(
            _decode, grid, device, (table_stride, q.stride(0), q.stride(1), kv_cache.stride(0), *strides),
            H=heads, D=rank, R=rope, R_PADDED=next_power_of_2(rope), PAGE=kv_cache.shape[1], SLOT=kv_cache.stride(1), CAUSAL=causal,
            TILE=tile, BM=config.block_m, BN=config.block_n, SLICES=slices, STAGES=config.stages, LAZY=config.lazy,
            PDL=pdl, EXACT=exact, num_warps=config.warps, **config.options,
        )  # fmt: skip
    block_s, block_d = _combine_shape(parts, num_reqs, rank)
    combine = Prepared(
        _combine, (heads * max_query_len, most_splits, rank // block_d), device, (partial_rows, num_reqs, num_tokens, *strides),
        H=heads, D=rank, BS=block_s, BD=block_d, PDL=pdl, EXACT=exact, num_warps=4, **options,
    )  # fmt: skip
    rows = slots * partial_rows
    return _Launches(device, decode, 2 if pairs else 1, combine, (rows * rank, rows * (rank + 1)))


def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    max_query_len: int,
    softmax_scale: float,
    *,
    causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    k_scale: float | torch.Tensor = 1.0,
    num_kv_splits: int | None = None,
    plan: SplitPlan | None = None,
) -> None:
    """Write `out` and `lse`; shapes as in the module's docstring, arguments trusted.

    Arguments:
        max_query_len: an upper bound of the query lengths, known on the host.
        k_scale: what an fp8 cache was divided by; a float or fp32 tensor of one element on the device.
        num_kv_splits: pieces of every request; None: a balanced plan.
        plan: what `plan_decode` made for these lengths; None: made here.
    """
    heads, num_reqs = out.shape[1], seq_lens.shape[0]
    if num_reqs == 0 or max_query_len == 0 or block_table.shape[1] == 0:  # a table without pages: an engine's profile run
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    if plan is None:
        plan = plan_decode(seq_lens, num_heads=heads, max_query_len=max_query_len, dtype=q.dtype, num_kv_splits=num_kv_splits)
    device = q.device
    launches = _launches(
        device, target_of(device), layout_of(q), layout_of(kv_cache), layout_of(out), None if lse is None else lse.stride(),
        block_table.stride(0), num_reqs, max_query_len, plan.counts,
        causal, num_kv_splits is not None, (q.data_ptr() | kv_cache.data_ptr()) % 16 == 0,
    )  # fmt: skip
    launches(q, kv_cache, block_table, seq_lens, qo_indptr, plan, out, lse, float(softmax_scale), k_scale)
