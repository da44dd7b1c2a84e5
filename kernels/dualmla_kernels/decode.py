"""Absorbed MLA decode over a paged latent cache: split-KV flash attention where the key row is also the value row.

A query token has H heads, all attending to the same latent rows, so the (token, head) pairs of a request are the rows
of one matrix product. For BM such rows and the keys t of a tile of BN:

    s  = c * (q_latent k_latent^T + q_rope k_rope^T)      c = softmax_scale * k_scale * log2(e): exp2 is the native one
    m' = max(m, max_t s);  p = 2^(s - m');  a = 2^(m - m')
    l  = a l + sum_t p;    acc = a acc + p k_latent;      m = m'

and at the end out = acc / l * k_scale, lse = (m + log2 l) ln 2. A row that has seen no key, or none with a score above -inf, keeps
l = 0: 0 and -inf.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dualmla_kernels.launch import HAS_GLUON, Layout, Prepared, cdiv, layout_of, next_power_of_2, stream_of, without_memory
from dualmla_kernels.numerics import LN2, LOG2E, cast, dot, widen
from dualmla_kernels.plan import MOST_PARTS, PlanShape, SplitPlan, balanced_plan, fixed_plan
from dualmla_kernels.ready import Settled
from dualmla_kernels.target import TRITON_VERSION, Target, target_of

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
# What weights of shrunk values are multiplied by. bf16: so that with weights up to FAR nothing leaves the range of fp32. fp16: as much
# as 1, the largest weight, bears; the smallest number is 2^-24.
GROWTH_BF16, GROWTH_FP16 = tl.constexpr(2.0**60), tl.constexpr(2.0**15)

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)  # a maximum of nothing: -inf - -inf, of a score that is -inf, would be NaN
# what tiles are weighed against: the maximum so far; that of the first or of the last ones of a piece, as long as it will do
NO, FIRST_TILE, LAST_TILES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FAR = tl.constexpr(2.0**64)  # sum of weights, relative to a maximum, above which that maximum is no good


@triton.jit
def _page_ids(pages, t, on, seq_len, PAGE: tl.constexpr, BN: tl.constexpr):
    """Page ids of tile t: one where a tile lies in one page, else one a key. What lies past the last live page is never read."""
    last = tl.maximum(seq_len - 1, 0)
    key = t * BN if PAGE % BN == 0 else t * BN + on
    return tl.load(pages + tl.minimum(key, last) // PAGE)


@triton.jit
def _numbers(pairs, EXACT: tl.constexpr):
    """The first and the second e4m3fn number of int16 `pairs` in fp16, which holds every one of them."""
    if EXACT:
        even = widen((pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True), tl.float16, EXACT)
        odd = widen(((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True), tl.float16, EXACT)
    else:
        even, odd = tl.inline_asm_elementwise(_NUMBERS, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    return even, odd


@triton.jit
def _shrunk_numbers(pairs, dtype: tl.constexpr, EXACT: tl.constexpr):
    """As `_numbers`, in `dtype` and divided by SHRINKAGE, which takes no conversion; of NaN a number."""
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
def _paired_queries(q, q_rope):
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
    `_paired_queries`; the type in which values will be weighted. None: number by number.
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
            even, odd = _numbers(tl.trans(columns), EXACT)
            chains = _longer(_longer(chains, q[2 * i], even, EXACT), q[2 * i + 1], odd, EXACT)
        else:
            k += (widen(columns, dtype, EXACT),)
            chains = _longer(chains, q[i], tl.trans(k[i]), EXACT)
    if PAIRED is not None:
        k_rope = tl.load(k_tile + (k_row + (D + orope)[None, :]), mask=(orope < R)[None, :], other=0)
        even, odd = _numbers(tl.trans(k_rope), EXACT)
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
            even, odd = _shrunk_numbers(k[i], PAIRED, EXACT)
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
    SLICES: tl.constexpr, CHAINS: tl.constexpr, STAGES: tl.constexpr, PAIRED: tl.constexpr, FIRST: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Tiles `first` to `end`, which every row sees whole, into (m, l, acc), all with one maximum: m, or where FIRST the first tile's.

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
        if FIRST:  # noqa: SIM102 - known to the compiler
            if t == first:
                m = tl.maximum(m, tl.max(s, 1) * c)
        p = _weights(s, c, m, PAIRED)
        sums += p
        acc = _add_values(p, k, acc, SLICES, PAIRED, EXACT)
        ids = next_ids
    l += tl.sum(sums, 1)
    return m, l, acc, tl.max((l > FAR).to(tl.int32), 0)


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


@triton.jit
def _fetch_ahead(pointer, BYTES: tl.constexpr):
    """BYTES from `pointer` on into the L2 cache, which nobody waits for."""
    lines = pointer.to(tl.pointer_type(tl.int8))
    for i in tl.static_range((BYTES + 16383) // 16384):
        at = lines + tl.minimum(i * 16384 + tl.arange(0, 128) * 128, BYTES - 128)
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


# what changes from batch to batch is no reason to compile again
@triton.jit(do_not_specialize=["table_stride"])
def _decode(
    q_ptr, kv_ptr, block_table_ptr, seq_lens_ptr, qo_indptr_ptr, pieces_of_part_ptr, pieces_ptr,
    out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, k_scale_ptr,
    softmax_scale, k_scale, table_stride,
    q_token_stride, q_head_stride, page_stride, out_token_stride, out_head_stride, lse_head_stride, lse_token_stride,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, CAUSAL: tl.constexpr,
    TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SLICES: tl.constexpr, CHAINS: tl.constexpr, STAGES: tl.constexpr,
    LAZY: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr, EXACT: tl.constexpr, PREFETCH: tl.constexpr = 0,
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

        pages = block_table_ptr + request.to(tl.int64) * table_stride
        if PREFETCH and PAGE % BN == 0:  # they arrive while the queries are waited for
            for i in tl.static_range(PREFETCH):
                t = first_tile + i
                if t < end_tile:
                    page = tl.load(pages + t * BN // PAGE).to(tl.int64)
                    _fetch_ahead(
                        kv_ptr + page * page_stride + (t * BN) % PAGE * (SLOT // W),
                        BN * SLOT * kv_ptr.dtype.element_ty.primitive_bitwidth // 8 // W,
                    )
        q_row = q_ptr + (first_token + token).to(tl.int64) * q_token_stride + head.to(tl.int64) * q_head_stride
        q = ()
        for i in tl.static_range(SLICES):
            q += (tl.load(q_row[:, None] + (i * (D // SLICES) + od)[None, :], mask=live[:, None], other=0.0),)
        q_rope = tl.load(q_row[:, None] + (D + orope)[None, :], mask=live[:, None] & (orope < R)[None, :], other=0.0)
        if PAIRED:
            q, q_rope, unit = _paired_queries(q, q_rope)
            c = scale * unit
        else:
            c = scale
        m, l, acc = _nothing(BM, D, SLICES * W)

        if LAZY == LAST_TILES:
            # Every live row that sees a key sees key `least - 1` or, in a piece that ends earlier, all keys
            whole = tl.maximum(tl.minimum(end_tile - 1, tl.maximum(least - 1, 0) // BN), first_tile)
            m, l, acc = _attend_tiles(whole, end_tile, q, q_rope, m, l, acc, pages, kv_ptr, page_stride, c, limit, seq_len,
                                      DW, RW, RW_PADDED, PAGE, ROW, BM, BN, SLICES, CHAINS, STAGES, AS, EXACT)  # fmt: skip
            m, l, acc, far = _attend_fixed(first_tile, whole, q, q_rope, m, l, acc, pages, kv_ptr, page_stride, c, limit, seq_len,
                                           DW, RW, RW_PADDED, PAGE, ROW, BM, BN, SLICES, CHAINS, STAGES, AS, False, EXACT)  # fmt: skip
            if far > 0:
                m, l, acc = _nothing(BM, D, SLICES * W)
                m, l, acc = _attend_tiles(first_tile, end_tile, q, q_rope, m, l, acc, pages, kv_ptr, page_stride, c, limit, seq_len,
                                          DW, RW, RW_PADDED, PAGE, ROW, BM, BN, SLICES, CHAINS, STAGES, AS, EXACT)  # fmt: skip
        else:
            whole = tl.minimum(end_tile, tl.maximum(least, 0) // BN)
            masked = tl.maximum(first_tile, whole)
            if LAZY == FIRST_TILE:
                m, l, acc, far = _attend_fixed(first_tile, whole, q, q_rope, m, l, acc, pages, kv_ptr, page_stride, c, limit, seq_len,
                                               DW, RW, RW_PADDED, PAGE, ROW, BM, BN, SLICES, CHAINS, STAGES, AS, True, EXACT)  # fmt: skip
                if far > 0:
                    m, l, acc = _nothing(BM, D, SLICES * W)
                    masked = first_tile
            else:
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


@dataclass(frozen=True)
class DecodeConfig:
    """How the kernel is compiled, and for how many programs.

    Attributes:
        block_m: rows a tile.
        block_n: keys a tile.
        slices: the latent row is held in as many slices of columns.
        stages: tiles of keys under way.
        lazy: what tiles are weighed against; fp16 weights would overflow against anything but the maximum so far, NO.
        programs: for the whole device.
        warps: of a program; waves of 64 lanes on AMD.
        pairs: whether `decode_hopper` does it, two tiles at a time, where it can.
        chains: sums of products that a score is added up from: a product waits for the one before it in its chain alone.
        paired: whether float8 numbers are read two at a time and multiplied in fp16 (`_numbers`), where they can be.
        options: of the compiler for AMD.
    """

    block_m: int
    block_n: int
    slices: int
    stages: int
    lazy: int
    programs: int
    warps: int
    pairs: bool = False
    chains: int = 1
    paired: bool = False
    options: Mapping[str, int] = field(default_factory=dict)

    @property
    def tile(self) -> int:
        """Keys that a plan never cuts."""
        return 2 * self.block_n if self.pairs else self.block_n


def decode_config(rows: int, dtype: torch.dtype, device: torch.device, float8: bool = False) -> DecodeConfig:
    """The configuration for `rows` (token, head) pairs a request. Evidence: docs/compiled.md, docs/performance.md.

    Arguments:
        dtype: of the queries.
        float8: whether the cache is. A plan made without knowing is right too: keys a tile divide those without float8.
    """
    return _config(rows > 16, dtype, target_of(device), float8)


@functools.cache
def _config(wide: bool, dtype: torch.dtype, target: Target, float8: bool) -> DecodeConfig:
    if target.platform == "cpu":
        # four programs, so that split rows are met in small tests too; the two sizes show both ways to rescale, float8 smaller tiles
        block_n = 32 if float8 else 64
        if wide:
            lazy = NO if dtype == torch.float16 else LAST_TILES
            return DecodeConfig(64, block_n, slices=2, stages=1, lazy=lazy.value, programs=4, warps=1)
        lazy = FIRST_TILE if dtype == torch.bfloat16 else NO
        return DecodeConfig(
            16, block_n, slices=1, stages=1, lazy=lazy.value, programs=4, warps=1, chains=2, paired=float8 and dtype != torch.float32
        )
    if target.platform == "hip":
        return _amd_config(wide, dtype, target, float8)
    if dtype == torch.float32:
        return DecodeConfig(16, 32, slices=1, stages=2, lazy=NO.value, programs=target.processors, warps=4)
    if wide:
        return DecodeConfig(64, 64, slices=1, stages=2, lazy=NO.value, programs=target.processors, warps=8, pairs=target.arch == "sm_90")
    lazy = FIRST_TILE if dtype == torch.bfloat16 else NO
    return DecodeConfig(16, 64, slices=8, stages=3, lazy=lazy.value, programs=target.processors, warps=4, paired=float8)


def _amd_config(wide: bool, dtype: torch.dtype, target: Target, float8: bool) -> DecodeConfig:
    """For CDNA. A lane has 512 registers, vector and accumulation ones together, and everything here is about fitting into them.

    Slices of 128 columns, one tile at a time and 16 x 16 products keep what is in flight small. Two tiles at a time would
    make gfx942, which can't read LDS transposed, fetch values by two bytes. On gfx950 the next tile's loads are under way while
    this one is multiplied, where there are registers for it: not with Triton 3.6, nor for float8, which would come by four bytes.
    """
    lazy, programs = (NO if dtype == torch.float16 else LAST_TILES).value, target.processors
    # kpack: two steps of a product are read from LDS at once. Triton 3.6 has no registers for it beside 64 rows, and CDNA4 has
    # products of twice the depth instead. With one wave to a SIMD the compiler may use all registers, which it does not always know
    two_steps = target.arch != "gfx950" and dtype != torch.float32 and not (wide and TRITON_VERSION <= (3, 6))
    options = {"matrix_instr_nonkdim": 16, "kpack": 2 if two_steps else 1, "waves_per_eu": 1}
    if target.arch == "gfx950" and dtype == torch.float16:
        options["waves_per_eu"] = 0  # told, it keeps a register in another one
    stages = 2 if target.arch == "gfx950" and not float8 and TRITON_VERSION > (3, 6) else 1
    if dtype == torch.float32:
        return DecodeConfig(16, 16, slices=8, stages=1, lazy=lazy, programs=programs, warps=4, options=options)
    if wide:
        slices = 8 if target.arch == "gfx90a" else 4  # its products are of half the depth, and their operands take more registers
        return DecodeConfig(64, 16 if float8 else 32, slices=slices, stages=stages, lazy=lazy, programs=programs, warps=4, options=options)
    # A wave alone multiplies nothing twice and waits for nobody. Each has a SIMD to itself: four of them keep a compute unit's
    # memory busy while one waits, and each has its own share of the plan.
    return DecodeConfig(16, 16, slices=4, stages=stages, lazy=lazy, programs=4 * programs, warps=1, options=options)


def plan_decode(
    seq_lens: torch.Tensor,
    *,
    num_heads: int,
    max_query_len: int,
    dtype: torch.dtype,
    float8: bool = False,
    num_kv_splits: int | None = None,
) -> SplitPlan:
    """The split plan of a decode over int32 `seq_lens` [num_reqs], on their device; made once a step, used by every layer.

    Arguments:
        max_query_len: an upper bound of the query lengths.
        dtype: of the queries.
        float8: whether the cache is.
        num_kv_splits: pieces of every request; None: equal shares of the device.
    """
    if num_kv_splits is not None:
        config = decode_config(_config_rows(num_heads, max_query_len, num_kv_splits), dtype, seq_lens.device)
        return fixed_plan(seq_lens, splits=num_kv_splits, tile=config.tile)
    return balanced_plan(seq_lens, plan_shape(num_heads, max_query_len, dtype, seq_lens.device, float8))


def plan_shape(num_heads: int, max_query_len: int, dtype: torch.dtype, device: torch.device, float8: bool = False) -> PlanShape:
    """What a balanced plan for these decodes is made for: host numbers alone, so that a captured launch stays right."""
    rows = _config_rows(num_heads, max_query_len, None)
    config = decode_config(rows, dtype, device, float8)
    tile = decode_config(rows, dtype, device).tile  # float8 or not, so that one plan does for both
    return PlanShape(parts=max(config.programs // _groups(num_heads, max_query_len, config), 1), tile=tile)


def scratch_bytes(
    num_heads: int, max_query_len: int, num_reqs: int, kv_lora_rank: int, dtype: torch.dtype, device: torch.device, float8: bool
) -> int:
    """The most that a decode with a balanced plan takes beside its arguments, whatever its lengths: partial results and plan.

    A program splits at most two requests, the first and the last of its share: two partial results of `block_m` rows.
    """
    config = decode_config(_config_rows(num_heads, max_query_len, None), dtype, device, float8)
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


def _in_pairs(kv_cache: torch.Tensor, alignment: int) -> bool:
    """Whether every two numbers of a row, e4m3fn ones, lie in an int16; the cache begins at a multiple of `alignment` bytes."""
    return kv_cache.dtype == torch.float8_e4m3fn and kv_cache.stride(0) % 2 == 0 and kv_cache.stride(1) % 2 == 0 and alignment % 2 == 0


class _Launches:
    """A decode but for its tensors and scales.

    Arguments:
        decode: takes q and the cache `times` each, and from `block_table_ptr` to `k_scale` what the kernel does.
        times: in how many ways the kernel copies from them.
        combines: each for so many split requests as a grid may have; take what the kernel does up to `lse_ptr`.
        partial: numbers of all partial results, without and with their LSEs.
    """

    def __init__(self, device: torch.device, decode: Prepared, times: int, combines: Sequence[Prepared], partial: tuple[int, int]) -> None:
        self.decode, self._device, self._times, self._combines = decode, device, times, combines
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
        self.decode(*to_decode)
        for launch_combine, splits in zip(self._combines, plan.splits.split(MOST_PARTS), strict=True):
            to_combine = (partial, partial_lse, splits, qo_indptr, out, lse)
            launch_combine(*to_combine)
        if on_device or len(self._combines) > 1:
            return
        if (settled := self.decode.settled(*to_decode)) and (settled_combine := launch_combine.settled(*to_combine)):
            self._settled = settled, settled_combine


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
    alignment: int,
) -> _Launches:
    """What a decode launches: a function of numbers that the host knows, and so worked out once for calls that are alike.

    Arguments:
        plan_counts: `SplitPlan.counts`.
        fixed: whether the caller fixed the splits.
        alignment: bytes that the addresses of q and of the cache are multiples of, at most 16.
    """
    q, kv_cache, out = without_memory(of_q), without_memory(of_cache), without_memory(of_out)
    (parts, most_splits, slots, tile), (num_tokens, heads, rank) = plan_counts, out.shape
    rope = q.shape[2] - rank
    config = decode_config(_config_rows(heads, max_query_len, 1 if fixed else None), q.dtype, device, kv_cache.dtype.itemsize == 1)
    grid, partial_rows = (_groups(heads, max_query_len, config), parts), _groups(heads, max_query_len, config) * config.block_m
    exact, pdl = target.platform == "cpu", _dependent_launch(target)
    options = {"launch_pdl": True} if pdl else {}
    strides = (out.stride(0), out.stride(1), *(lse_strides or (0, 0)))
    pairs = config.pairs and HAS_GLUON and alignment == 16
    if pairs:
        from dualmla_kernels import decode_hopper

        pairs = decode_hopper.fits(q, kv_cache, rank)
    if pairs:
        decode = decode_hopper.prepare_pairs(grid, device, q, kv_cache, table_stride, strides, causal=causal)
    else:
        slices = max(min(config.slices, rank // 64), 1)  # a product needs 16 columns and is better off with 64
        paired = config.paired and q.dtype != torch.float32 and _in_pairs(kv_cache, alignment)
        decode = Prepared(
            _decode, grid, device, (table_stride, q.stride(0), q.stride(1), kv_cache.stride(0), *strides),
            H=heads, D=rank, R=rope, R_PADDED=max(next_power_of_2(rope), 32 if paired else 16),
            PAGE=kv_cache.shape[1], SLOT=kv_cache.stride(1), CAUSAL=causal,
            TILE=tile, BM=config.block_m, BN=config.block_n, SLICES=slices, CHAINS=config.chains, STAGES=config.stages,
            LAZY=config.lazy, PAIRED=paired, PDL=pdl, EXACT=exact, num_warps=config.warps, **config.options,
        )  # fmt: skip
    block_s, block_d = _combine_shape(parts, num_reqs, rank)
    combines = [
        Prepared(
            _combine, (heads * max_query_len, min(most_splits - first, MOST_PARTS), rank // block_d), device,
            (partial_rows, num_reqs, num_tokens, *strides),
            H=heads, D=rank, BS=block_s, BD=block_d, PDL=pdl, EXACT=exact, num_warps=4, **options,
        )
        for first in range(0, most_splits, MOST_PARTS)
    ]  # fmt: skip
    rows = slots * partial_rows
    return _Launches(device, decode, 2 if pairs else 1, combines, (rows * rank, rows * (rank + 1)))


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
        float8 = kv_cache.dtype.itemsize == 1
        plan = plan_decode(
            seq_lens, num_heads=heads, max_query_len=max_query_len, dtype=q.dtype, float8=float8, num_kv_splits=num_kv_splits
        )
    device = q.device
    start = q.data_ptr() | kv_cache.data_ptr() | 16
    launches = _launches(
        device, target_of(device), layout_of(q), layout_of(kv_cache), layout_of(out), None if lse is None else lse.stride(),
        block_table.stride(0), num_reqs, max_query_len, plan.counts,
        causal, num_kv_splits is not None, start & -start,
    )  # fmt: skip
    launches(q, kv_cache, block_table, seq_lens, qo_indptr, plan, out, lse, softmax_scale, k_scale)
