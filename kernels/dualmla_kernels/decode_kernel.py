"""Absorbed MLA decode over a paged latent cache: split-KV flash attention where the key row is also the value row.

A query token has H heads, all attending to the same latent rows, so the (token, head) pairs of a request are the rows
of one matrix product. For BM such rows and the keys t of a tile of BN:

    s  = c * (q_latent k_latent^T + q_rope k_rope^T)      c = softmax_scale * k_scale * log2(e): exp2 is the native one
    m' = max(m, max_t s);  p = 2^(s - m');  a = 2^(m - m')
    l  = a l + sum_t p;    acc = a acc + p k_latent;      m = m'

and at the end out = acc / l * k_scale, lse = (m + log2 l) ln 2. A row that has seen no key, or none with a score above -inf, keeps
l = 0: 0 and -inf.

Programs walk the pieces of a split plan (plan.py). A request in one piece is written directly; the pieces of a split one
are left in fp32 as out and base-2 lse, and `_combine` weighs them by 2^(lse - max lse). It also writes the padding.

Shapes: T tokens, H heads, D = kv_lora_rank, R = qk_rope_head_dim.
    q [T, H, D + R], kv_cache [num_pages, PAGE, D + R], block_table int32 [num_reqs, max_pages], seq_lens int32 [num_reqs],
    qo_indptr int32 [num_reqs + 1], out [T, H, D], lse fp32 [H, T]; partial_out fp32 [slots, G * BM, D], partial_lse [slots, G * BM]
    where G = cdiv(H * max_query_len, BM) groups of rows.
The last dimension is dense everywhere, other strides are arguments; offsets are int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dualmla_kernels.numerics import LN2, LOG2E, cast, dot, widen
from dualmla_kernels.pairs import (
    GROWTH_BF16,
    GROWTH_FP16,
    SHRINKAGE_BF16,
    SHRINKAGE_FP16,
    numbers,
    paired_queries,
    shrunk_numbers,
)

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)  # a maximum of nothing: -inf - -inf, of a score that is -inf, would be NaN
FAR = tl.constexpr(2.0**64)  # sum of weights, relative to a maximum, above which that maximum is no good


@triton.jit
def _page_ids(pages, t, on, seq_len, PAGE: tl.constexpr, BN: tl.constexpr):
    """Page ids of tile t: one where a tile lies in one page, else one a key. What lies past the last live page is never read."""
    last = tl.maximum(seq_len - 1, 0)
    key = t * BN if PAGE % BN == 0 else t * BN + on
    return tl.load(pages + tl.minimum(key, last) // PAGE)


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr):
    """COUNT times zeros [ROWS, COLUMNS]."""
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros += (tl.zeros([ROWS, COLUMNS], tl.float32),)
    return zeros


@triton.jit
def _longer(chains, q, k, EXACT: tl.constexpr):
    """`q` times `k` added to the chain whose turn it is, the first, which is the last then."""
    rest = chains[1:]
    rest += (dot(q, k, chains[0], EXACT),)
    return rest


@triton.jit
def _scores(
    t, ids, q, q_rope, kv_ptr, page_stride, limit, seq_len,
    D: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SLICES: tl.constexpr, CHAINS: tl.constexpr, PAIRED: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Products [BM, BN] of the rows with the keys of tile t, and the keys' latent slices. MASKED: some row does not see all.

    PAIRED: the cache is read in pairs of e4m3fn numbers, which D, R, `page_stride` and SLOT count, and the queries are those of
    `paired_queries`; the type in which values will be weighted. None: number by number.
    """
    DS: tl.constexpr = D // SLICES
    dtype: tl.constexpr = q[0].dtype
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
    chains = _zeros(BM, BN, CHAINS)
    k = ()
    for i in tl.static_range(SLICES):
        columns = tl.load(k_tile + (k_row + (i * DS + od)[None, :]))
        if PAIRED is not None:
            k += (columns,)
            even, odd = numbers(tl.trans(columns), EXACT)
            chains = _longer(_longer(chains, q[2 * i], even, EXACT), q[2 * i + 1], odd, EXACT)
        else:
            k += (widen(columns, dtype, EXACT),)
            chains = _longer(chains, q[i], tl.trans(k[i]), EXACT)
    if PAIRED is not None:
        k_rope = tl.load(k_tile + (k_row + (D + orope)[None, :]), mask=(orope < R)[None, :], other=0)
        even, odd = numbers(tl.trans(k_rope), EXACT)
        chains = _longer(_longer(chains, q_rope[0], even, EXACT), q_rope[1], odd, EXACT)
    else:
        k_rope = widen(tl.load(k_tile + (k_row + (D + orope)[None, :]), mask=(orope < R)[None, :], other=0.0), dtype, EXACT)
        chains = _longer(chains, q_rope, tl.trans(k_rope), EXACT)
    s = chains[0]
    for i in tl.static_range(1, CHAINS):
        s += chains[i]
    if MASKED:
        s = tl.where((t * BN + on)[None, :] < limit[:, None], s, float("-inf"))
    return s, k


@triton.jit
def _add_values(p, k, acc, SLICES: tl.constexpr, PAIRED: tl.constexpr, EXACT: tl.constexpr):
    """Values `k`, weighted by `p` [BM, BN], into the accumulator."""
    if PAIRED is not None:
        p *= GROWTH_BF16 if tl.bfloat16 == PAIRED else GROWTH_FP16
    p = cast(p, k[0].dtype if PAIRED is None else PAIRED, EXACT)
    next_acc = ()
    for i in tl.static_range(SLICES):
        if PAIRED is None:
            next_acc += (dot(p, k[i], acc[i], EXACT),)
        else:
            even, odd = shrunk_numbers(k[i], PAIRED, EXACT)
            next_acc += (dot(p, even, acc[2 * i], EXACT), dot(p, odd, acc[2 * i + 1], EXACT))
    return next_acc


@triton.jit
def _weights(s, c, m, PAIRED: tl.constexpr):
    """Of products `s` [BM, BN] against the maximum `m` [BM]."""
    return tl.exp2((s * c if PAIRED is None else s * c[:, None]) - m[:, None])


@triton.jit
def _attend_tile(
    t, ids, q, q_rope, m, l, acc, kv_ptr, page_stride, c, limit, seq_len,
    D: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SLICES: tl.constexpr, CHAINS: tl.constexpr, PAIRED: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Tile t into (m, l, acc)."""
    s, k = _scores(t, ids, q, q_rope, kv_ptr, page_stride, limit, seq_len,
                   D, R, R_PADDED, PAGE, SLOT, BM, BN, SLICES, CHAINS, PAIRED, MASKED, EXACT)  # fmt: skip
    m_new = tl.maximum(m, tl.max(s, 1) * c)
    p, a = _weights(s, c, m_new, PAIRED), tl.exp2(m - m_new)
    return m_new, l * a + tl.sum(p, 1), _add_values(p, k, _scaled(acc, a), SLICES, PAIRED, EXACT)


@triton.jit
def _attend_tiles(
    first, end, q, q_rope, m, l, acc, pages, kv_ptr, page_stride, c, limit, seq_len,
    D: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SLICES: tl.constexpr, CHAINS: tl.constexpr, STAGES: tl.constexpr, PAIRED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Tiles `first` to `end` into (m, l, acc), whatever of them a row sees."""
    on = tl.arange(0, BN)
    for t in tl.range(first, end, num_stages=STAGES):
        ids = _page_ids(pages, t, on, seq_len, PAGE, BN)
        m, l, acc = _attend_tile(t, ids, q, q_rope, m, l, acc, kv_ptr, page_stride, c, limit, seq_len,
                                 D, R, R_PADDED, PAGE, SLOT, BM, BN, SLICES, CHAINS, PAIRED, True, EXACT)  # fmt: skip
    return m, l, acc


@triton.jit
def _attend_fixed(
    first, end, q, q_rope, m, l, acc, pages, kv_ptr, page_stride, c, limit, seq_len,
    D: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SLICES: tl.constexpr, CHAINS: tl.constexpr, STAGES: tl.constexpr, PAIRED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Tiles `first` to `end`, which every row sees whole, into (m, l, acc), all with one maximum, m.

    Softmax is as exact with any m that lets nothing overflow, and none of the numbers here, bf16 weights included, does
    before 2^127. So no tile waits for a maximum over its lanes, and nothing but products touches the accumulator in the
    loop. A score far above m shows in the row's sum. Last result: 1 where one is above FAR, and the others are worth nothing.
    """
    on = tl.arange(0, BN)
    sums = tl.zeros([BM, BN], tl.float32)
    # page ids are read a tile early: a load that waits for another load can't be pipelined as deep
    ids = _page_ids(pages, first, on, seq_len, PAGE, BN)
    for t in tl.range(first, end, num_stages=STAGES):
        next_ids = _page_ids(pages, t + 1, on, seq_len, PAGE, BN)
        s, k = _scores(t, ids, q, q_rope, kv_ptr, page_stride, limit, seq_len,
                       D, R, R_PADDED, PAGE, SLOT, BM, BN, SLICES, CHAINS, PAIRED, False, EXACT)  # fmt: skip
        p = _weights(s, c, m, PAIRED)
        sums += p
        acc = _add_values(p, k, acc, SLICES, PAIRED, EXACT)
        ids = next_ids
    l += tl.sum(sums, 1)
    return l, acc, tl.max((l > FAR).to(tl.int32), 0)


@triton.jit
def _scaled(acc, a):
    """Each slice of the accumulator, its rows times `a` [BM]."""
    scaled = ()
    for i in tl.static_range(len(acc)):
        scaled += (acc[i] * a[:, None],)
    return scaled


@triton.jit
def _nothing(BM: tl.constexpr, D: tl.constexpr, SLICES: tl.constexpr):
    """(m, l, acc) before the first tile."""
    return tl.full([BM], LOWEST, tl.float32), tl.zeros([BM], tl.float32), _zeros(BM, D // SLICES, SLICES)


@triton.jit
def _write_piece(
    m, l, acc, slot, row, token, head, rows, written, k_scale,
    out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, out_token_stride, out_head_stride, lse_head_stride, lse_token_stride,
    D: tl.constexpr, SLICES: tl.constexpr, PAIRED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The result of a piece, for the rows `written` [BM]: `token` and `head` of each in the batch, `row` of `rows` in a slot."""
    od = tl.arange(0, D // SLICES)
    seen = l != 0.0  # a NaN among the live numbers is seen
    weight = k_scale / tl.where(seen, l, 1.0)
    if PAIRED is not None:
        weight *= SHRINKAGE_BF16 / GROWTH_BF16 if tl.bfloat16 == PAIRED else SHRINKAGE_FP16 / GROWTH_FP16
    row_lse = tl.where(seen, m + tl.log2(tl.where(seen, l, 1.0)), float("-inf"))
    if slot < 0:
        out_row = out_ptr + token.to(tl.int64) * out_token_stride + head.to(tl.int64) * out_head_stride
        for i in tl.static_range(SLICES):
            columns = acc[i] if PAIRED is None else tl.interleave(acc[2 * i], acc[2 * i + 1])
            result = cast(columns * weight[:, None], out_ptr.dtype.element_ty, EXACT)
            tl.store(out_row[:, None] + (i * (D // SLICES) + od)[None, :], result, mask=written[:, None])
        if lse_ptr is not None:
            tl.store(lse_ptr + head.to(tl.int64) * lse_head_stride + token * lse_token_stride, row_lse * LN2, mask=written)
    else:
        partial = slot.to(tl.int64) * rows + row
        partial_row = partial_out_ptr + partial[:, None] * D
        for i in tl.static_range(SLICES):
            columns = acc[i] if PAIRED is None else tl.interleave(acc[2 * i], acc[2 * i + 1])
            tl.store(partial_row + (i * (D // SLICES) + od)[None, :], columns * weight[:, None], mask=written[:, None])
        tl.store(partial_lse_ptr + partial, row_lse, mask=written)


# what changes from batch to batch is no reason to compile again
@triton.jit(do_not_specialize=["table_stride"])
def _decode(
    q_ptr, kv_ptr, block_table_ptr, seq_lens_ptr, qo_indptr_ptr, pieces_of_part_ptr, pieces_ptr,
    out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, k_scale_ptr,
    softmax_scale, k_scale, table_stride,
    q_token_stride, q_head_stride, page_stride, out_token_stride, out_head_stride, lse_head_stride, lse_token_stride,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, CAUSAL: tl.constexpr,
    TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SLICES: tl.constexpr, CHAINS: tl.constexpr, STAGES: tl.constexpr,
    LAZY: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr, EXACT: tl.constexpr,
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
    scale = softmax_scale * k_scale * LOG2E
    W: tl.constexpr = 2 if PAIRED else 1
    DW: tl.constexpr = D // W
    RW: tl.constexpr = R // W
    RW_PADDED: tl.constexpr = R_PADDED // W
    ROW: tl.constexpr = SLOT // W
    AS: tl.constexpr = q_ptr.dtype.element_ty if PAIRED else None
    if PAIRED:
        kv_ptr = kv_ptr.to(tl.pointer_type(tl.int16))
        page_stride //= 2
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
        for i in tl.static_range(SLICES):
            q += (tl.load(q_row[:, None] + (i * (D // SLICES) + od)[None, :], mask=live[:, None], other=0.0),)
        q_rope = tl.load(q_row[:, None] + (D + orope)[None, :], mask=live[:, None] & (orope < R)[None, :], other=0.0)
        if PAIRED:
            q, q_rope, unit = paired_queries(q, q_rope)
            c = scale * unit
        else:
            c = scale
        m, l, acc = _nothing(BM, D, SLICES * W)
        pages = block_table_ptr + request.to(tl.int64) * table_stride

        if LAZY:
            # Every live row that sees a key sees key `least - 1` or, in a piece that ends earlier, all keys
            whole = tl.maximum(tl.minimum(end_tile - 1, tl.maximum(least - 1, 0) // BN), first_tile)
            m, l, acc = _attend_tiles(whole, end_tile, q, q_rope, m, l, acc, pages, kv_ptr, page_stride, c, limit, seq_len,
                                      DW, RW, RW_PADDED, PAGE, ROW, BM, BN, SLICES, CHAINS, STAGES, AS, EXACT)  # fmt: skip
            l, acc, far = _attend_fixed(first_tile, whole, q, q_rope, m, l, acc, pages, kv_ptr, page_stride, c, limit, seq_len,
                                        DW, RW, RW_PADDED, PAGE, ROW, BM, BN, SLICES, CHAINS, STAGES, AS, EXACT)  # fmt: skip
            if far > 0:
                m, l, acc = _nothing(BM, D, SLICES * W)
                m, l, acc = _attend_tiles(first_tile, end_tile, q, q_rope, m, l, acc, pages, kv_ptr, page_stride, c, limit, seq_len,
                                          DW, RW, RW_PADDED, PAGE, ROW, BM, BN, SLICES, CHAINS, STAGES, AS, EXACT)  # fmt: skip
        else:
            whole = tl.minimum(end_tile, tl.maximum(least, 0) // BN)
            masked = tl.maximum(first_tile, whole)
            # the first page id, where it is one, without waiting for the length: it is live wherever there is a tile
            ids = tl.load(pages + first_tile * BN // PAGE) if PAGE % BN == 0 else _page_ids(pages, first_tile, on, seq_len, PAGE, BN)
            for t in tl.range(first_tile, whole, num_stages=STAGES):
                next_ids = _page_ids(pages, t + 1, on, seq_len, PAGE, BN)
                m, l, acc = _attend_tile(t, ids, q, q_rope, m, l, acc, kv_ptr, page_stride, c, limit, seq_len,
                                         DW, RW, RW_PADDED, PAGE, ROW, BM, BN, SLICES, CHAINS, AS, False, EXACT)  # fmt: skip
                ids = next_ids
            if masked < end_tile:  # starting a pipeline takes its time even for no tile
                m, l, acc = _attend_tiles(masked, end_tile, q, q_rope, m, l, acc, pages, kv_ptr, page_stride, c, limit, seq_len,
                                          DW, RW, RW_PADDED, PAGE, ROW, BM, BN, SLICES, CHAINS, STAGES, AS, EXACT)  # fmt: skip
        _write_piece(m, l, acc, slot, row, first_token + token, head, groups * BM, live, k_scale,
                     out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, out_token_stride, out_head_stride,
                     lse_head_stride, lse_token_stride, D, SLICES, AS, EXACT)  # fmt: skip


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
