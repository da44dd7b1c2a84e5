"""Absorbed MLA decode for Hopper in Gluon: 64 rows a program, two math warpgroups half a step apart and one warp that copies.

The mathematics, the plan and the shapes are those of decode_kernel.py, for D = kv_lora_rank 512, R = rope 64, two-byte numbers and
pages of whole tiles. A tile is 64 keys, and a pair of tiles is in shared memory. Each warpgroup scores one tile of the pair
and then adds both tiles into its half of the output's columns:

    warpgroup 0   scores the even tile, m0 = max(m, its maximum); p0, m0 ->; acc += p0 V0; -> p1, m1; acc += p1 V1
    warpgroup 1   scores the odd tile;  -> p0, m0; m1 = max(m0, its maximum); p1, m1 ->; acc += p1 V1; acc += p0 2^(m0 - m1) V0

The running maximum passes from 0 to 1 and back, each keeps the sum of its own tiles, and the sums meet at the end of a piece.
V0 and V1 are the latent rows of the tiles, which are their keys too: they come by TMA, once, in blocks of 128 columns. A block
has barriers of its own: it is scored when it has come, and fetched anew when its half of an accumulator has it, while the other
half is still rescaled and multiplied.

Slots past a request's end may hold anything. As keys they are hidden; as values, multiplied by 0, a NaN would stay one, so
their rows are set to 0 in shared memory before they are multiplied.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from dualmla_kernels.boxes import Box
from dualmla_kernels.gluon_compat import async_load, barrier, reinterpret
from dualmla_kernels.launch import Prepared
from dualmla_kernels.numerics import LN2, LOG2E

RANK, ROPE = 512, 64
TILE = 64
"""Keys a tile, and rows a program."""

_D, _C, _R, _T = gl.constexpr(RANK), gl.constexpr(RANK // 4), gl.constexpr(ROPE), gl.constexpr(TILE)
_SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
_OUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=_OUT.value, k_width=2))
_SCORE_ROW = gl.constexpr(gl.SliceLayout(1, _SCORES.value))
_SCORE_COLUMN = gl.constexpr(gl.SliceLayout(0, _SCORES.value))
_OUT_ROW = gl.constexpr(gl.SliceLayout(1, _OUT.value))
_OUT_COLUMN = gl.constexpr(gl.SliceLayout(0, _OUT.value))
_WEIGHT_ROW = gl.constexpr(gl.SliceLayout(1, _WEIGHTS.value))
_DENSE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))  # of one warp, 16 bytes a lane
_IN_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))

# The blocks of a pair of tiles, 64 rows of 128 columns, in the order in which their buffers fall free and are filled again:
# even 0, odd 2, even 1, odd 3, odd 0, even 2, odd 1, even 3. Each has a barrier; after them come those of the tiles' rope columns.
_EVEN_0, _ODD_2, _EVEN_1, _ODD_3 = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
_ODD_0, _EVEN_2, _ODD_1, _EVEN_3 = gl.constexpr(4), gl.constexpr(5), gl.constexpr(6), gl.constexpr(7)
_BLOCKS, _EVEN_ROPE, _ODD_ROPE = gl.constexpr(8), gl.constexpr(8), gl.constexpr(9)


@gluon.jit
def _piece(w, group, pieces_ptr, seq_lens_ptr, qo_indptr_ptr, H: gl.constexpr, CAUSAL: gl.constexpr):
    """Piece w of the plan for rows `64 group` on: first token, query length, keys, first and end tile, request, slot."""
    request = gl.load(pieces_ptr + 4 * w)
    first_tile = gl.load(pieces_ptr + 4 * w + 1) * 2
    end_tile = gl.load(pieces_ptr + 4 * w + 2) * 2
    slot = gl.load(pieces_ptr + 4 * w + 3)
    seq_len = gl.load(seq_lens_ptr + request)
    first_token = gl.load(qo_indptr_ptr + request)
    query_len = gl.load(qo_indptr_ptr + request + 1) - first_token
    most = seq_len  # keys that the last row sees
    if CAUSAL:
        most = seq_len - query_len + gl.minimum((group * _T + _T - 1) // H + 1, query_len)
    end_tile = gl.minimum(end_tile, (gl.maximum(most, 0) + _T - 1) // _T)
    if group * _T >= query_len * H:  # the request has no row in this group
        end_tile = first_tile
    return first_token, query_len, seq_len, first_tile, end_tile, request, slot


@gluon.jit
def _signal(bar):
    """Every warp of the group is done with what the barrier guards."""
    barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _zero_rows(blocks, index, live):
    """Set rows `live` on of block `index` of `blocks` [8, 64, 128] to 0, by 8 rows and 64 columns, which are dense."""
    dense = reinterpret(blocks, [8 * 16, 8, 64], _IN_SHARED)
    for rows in range(live // 8, 8):
        row = gl.expand_dims(rows * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, _DENSE)), 1)
        for columns in range(2):
            x = dense.index(index * 16 + columns * 8 + rows)
            x.store(gl.where(row < live, x.load(_DENSE), 0.0))


@gluon.jit
def _fetch(rows, row, column, to, width: gl.constexpr, full, empty, guard, phase):
    """64 rows and `width` columns, once `to` is empty, from `row` and `column` on."""
    mbarrier.wait(empty.index(guard), phase)
    mbarrier.expect(full.index(guard), _T * width * 2)
    async_load(rows, [row, column], full.index(guard), to)


@gluon.jit
def _fetch_values(rows, row, column, blocks, index, live, full, empty, phase, dead, dead_blocks):
    """Block `index` as `_fetch`, but rows `live` on are 0; returns the count of blocks in which there were some."""
    if live < _T:
        mbarrier.wait(empty.index(index), phase)
        mbarrier.expect(dead, _T * _C * 2)
        async_load(rows, [row, column], dead, blocks.index(index))
        mbarrier.wait(dead, dead_blocks & 1)
        _zero_rows(blocks, index, live)
        fence_async_shared()
        _signal(full.index(index))
        dead_blocks += 1
    else:
        _fetch(rows, row, column, blocks.index(index), _C, full, empty, index, phase)
    return dead_blocks


@gluon.jit
def _copy_warp(work, group, H: gl.constexpr, CAUSAL: gl.constexpr, PAGE: gl.constexpr, shared, bars, inputs):
    pieces_of_part, part, pieces_ptr, seq_lens_ptr, qo_indptr_ptr = work
    q_blocks, q_rope, k_blocks, k_rope, _p_shared, _rows_shared = shared
    full, empty, queries, _hand = bars
    q_wide, q_narrow, kv_wide, kv_narrow, block_table_ptr, table_stride, page_rows, dead = inputs
    pair = 0
    pieces = 0
    dead_blocks = 0
    for w in range(gl.load(pieces_of_part + part), gl.load(pieces_of_part + part + 1)):
        first_token, _query_len, seq_len, first, end, request, _slot = _piece(w, group, pieces_ptr, seq_lens_ptr, qo_indptr_ptr, H, CAUSAL)
        mbarrier.wait(queries.index(1), (pieces & 1) ^ 1)
        mbarrier.expect(queries.index(0), _T * (_D + _R) * 2)
        row = first_token * H + group * _T  # rows past the request's are others' or, past the end, 0: nobody looks at their results
        async_load(q_narrow, [row, _D], queries.index(0), q_rope)
        for i in gl.static_range(4):
            async_load(q_wide, [row, i * _C], queries.index(0), q_blocks.index(i))
        pieces += 1  # noqa: SIM113 - Gluon has no enumerate
        pages = block_table_ptr + request.to(gl.int64) * table_stride
        last = gl.maximum(seq_len - 1, 0) // _T  # past it there is no page
        page0 = gl.load(pages + first * _T // PAGE)
        page1 = gl.load(pages + gl.minimum(first + 1, last) * _T // PAGE)
        whole = first + gl.maximum(gl.minimum(end, seq_len // _T) - first, 0) // 2 * 2  # pairs without a dead slot are done before
        for t in range(first, whole, 2):
            phase = (pair & 1) ^ 1
            even_row = page0 * page_rows + (t * _T) % PAGE
            odd_row = page1 * page_rows + (t * _T + _T) % PAGE
            page0 = gl.load(pages + gl.minimum(t + 2, last) * _T // PAGE)
            page1 = gl.load(pages + gl.minimum(t + 3, last) * _T // PAGE)
            _fetch(kv_narrow, even_row, _D, k_rope.index(0), _R, full, empty, _EVEN_ROPE, phase)
            _fetch(kv_narrow, odd_row, _D, k_rope.index(1), _R, full, empty, _ODD_ROPE, phase)
            for i in gl.static_range(_BLOCKS):
                row = odd_row if (i + i // 4) % 2 else even_row
                _fetch(kv_wide, row, (i % 2 * 2 + i // 2 % 2) * _C, k_blocks.index(i), _C, full, empty, i, phase)
            pair += 1
        for t in range(whole, end, 2):
            phase = (pair & 1) ^ 1
            odd = gl.minimum(t + 1, last)  # an odd tile past the last is hidden: it again
            even_row = page0 * page_rows + (t * _T) % PAGE
            odd_row = page1 * page_rows + (odd * _T) % PAGE
            page0 = gl.load(pages + gl.minimum(t + 2, last) * _T // PAGE)
            page1 = gl.load(pages + gl.minimum(t + 3, last) * _T // PAGE)
            _fetch(kv_narrow, even_row, _D, k_rope.index(0), _R, full, empty, _EVEN_ROPE, phase)
            _fetch(kv_narrow, odd_row, _D, k_rope.index(1), _R, full, empty, _ODD_ROPE, phase)
            for block in range(_BLOCKS):
                in_odd = (block + block // 4) % 2 == 1
                row, live = gl.where(in_odd, odd_row, even_row), seq_len - gl.where(in_odd, odd, t) * _T
                column = (block % 2 * 2 + block // 2 % 2) * _C
                dead_blocks = _fetch_values(kv_wide, row, column, k_blocks, block, live, full, empty, phase, dead, dead_blocks)
            pair += 1


@gluon.jit
def _hide(s, first_key, group, seq_len, query_len, H: gl.constexpr, CAUSAL: gl.constexpr):
    """Scores of the keys from `first_key` on; -inf where a row does not see the key."""
    key = gl.expand_dims(first_key + gl.arange(0, _T, layout=_SCORE_COLUMN), 0)
    if CAUSAL:
        token = (group * _T + gl.arange(0, _T, layout=_SCORE_ROW)) // H
        return gl.where(key < gl.expand_dims(seq_len - query_len + token + 1, 1), s, float("-inf"))
    return gl.where(key < seq_len, s, float("-inf"))


@gluon.jit
def _finite(m):
    """`m`, and 0 for a row that has seen no key yet: -inf - -inf would be NaN."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def _score(s, q_blocks, q_index: gl.constexpr, k_blocks, k_index: gl.constexpr, full, phase, start):
    """Add the products of 128 columns to scores, once they are there."""
    mbarrier.wait(full.index(k_index), phase)
    return warpgroup_mma(q_blocks.index(start + q_index), k_blocks.index(start + k_index).permute((1, 0)), s, is_async=True)


@gluon.jit
def _write(o, l, m, k_scale, group, first_token, query_len, slot, results, COLUMN: gl.constexpr, H: gl.constexpr):
    """Columns `COLUMN` to `COLUMN + 128` of a piece: the result itself, or a partial one in fp32; and the LSE with column 0."""
    out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, out_strides, lse_strides = results
    out_token_stride, out_head_stride = out_strides
    lse_head_stride, lse_token_stride = lse_strides
    seen = l != 0.0  # a NaN among the live numbers is seen
    total = gl.where(seen, l, 1.0)
    o = o * gl.expand_dims(gl.convert_layout(k_scale / total, _OUT_ROW), 1)
    row = group * _T + gl.arange(0, _T, layout=_OUT_ROW)
    token, head = row // H, row % H
    column = gl.expand_dims(COLUMN + gl.arange(0, _C, layout=_OUT_COLUMN), 0)
    live = gl.expand_dims(token < query_len, 1)
    lse_row = group * _T + gl.arange(0, _T, layout=_SCORE_ROW)
    row_lse = gl.where(seen, m + gl.log2(total), float("-inf"))
    if slot < 0:
        at = (first_token + token).to(gl.int64) * out_token_stride + head.to(gl.int64) * out_head_stride
        gl.store(out_ptr + gl.expand_dims(at, 1) + column, o.to(out_ptr.dtype.element_ty), mask=live & (column >= 0))
        if lse_ptr is not None and COLUMN == 0:
            lse_token, lse_head = lse_row // H, lse_row % H
            lse_at = lse_head.to(gl.int64) * lse_head_stride + (first_token + lse_token).to(gl.int64) * lse_token_stride
            gl.store(lse_ptr + lse_at, row_lse * LN2, mask=lse_token < query_len)
    else:
        first_row = slot.to(gl.int64) * (gl.num_programs(0) * _T)
        gl.store(partial_out_ptr + gl.expand_dims((first_row + row) * _D, 1) + column, o, mask=live & (column >= 0))
        if COLUMN == 0:
            gl.store(partial_lse_ptr + first_row + lse_row, row_lse, mask=lse_row // H < query_len)


@gluon.jit
def _math_even(work, group, H: gl.constexpr, CAUSAL: gl.constexpr, shared, bars, scales, results):
    """Warpgroup 0."""
    pieces_of_part, part, pieces_ptr, seq_lens_ptr, qo_indptr_ptr = work
    q_blocks, q_rope, k_blocks, k_rope, p_shared, rows_shared = shared
    full, empty, queries, hand = bars
    c, k_scale = scales
    dtype: gl.constexpr = q_blocks.dtype
    zero = gl.zeros([_T, _T], gl.float32, _SCORES)
    pair = 0
    pieces = 0
    for w in range(gl.load(pieces_of_part + part), gl.load(pieces_of_part + part + 1)):
        first_token, query_len, seq_len, first, end, _request, slot = _piece(w, group, pieces_ptr, seq_lens_ptr, qo_indptr_ptr, H, CAUSAL)
        least = seq_len
        if CAUSAL:
            least = seq_len - query_len + group * _T // H + 1
        m = gl.full([_T], float("-inf"), gl.float32, _SCORE_ROW)
        l = gl.zeros([_T], gl.float32, _SCORE_ROW)
        oa = gl.zeros([_T, _C], gl.float32, _OUT)
        ob = gl.zeros([_T, _C], gl.float32, _OUT)
        mbarrier.wait(queries.index(0), pieces & 1)
        for t in range(first, end, 2):
            phase = pair & 1
            start = t >> 30  # 0; were it known, the compiler would work the blocks' addresses out before the loop, and spill them
            mbarrier.wait(full.index(_EVEN_ROPE), phase)
            s = warpgroup_mma(q_rope, k_rope.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = _score(s, q_blocks, 0, k_blocks, _EVEN_0, full, phase, start)
            s = _score(s, q_blocks, 1, k_blocks, _EVEN_1, full, phase, start)
            s = _score(s, q_blocks, 2, k_blocks, _EVEN_2, full, phase, start)
            s = _score(s, q_blocks, 3, k_blocks, _EVEN_3, full, phase, start)
            s = warpgroup_mma_wait(0, deps=[s])
            if t + 2 >= end:
                _signal(queries.index(1))  # the piece's last scores: the next one's queries may come
            if t * _T + _T > least:
                s = _hide(s, t * _T, group, seq_len, query_len, H, CAUSAL)
            m0 = gl.maximum(m, gl.max(s, 1) * c)
            shift = _finite(m0)
            a = gl.exp2(m - shift)
            p = gl.exp2(s * c - gl.expand_dims(shift, 1))
            l = l * a + gl.sum(p, 1)
            p0 = p.to(dtype)
            p_shared.store(p0)
            rows_shared.index(0).store(m0)
            barrier()
            mbarrier.arrive(hand.index(0), count=1)
            mbarrier.arrive(empty.index(_EVEN_ROPE), count=1)
            a = gl.expand_dims(gl.convert_layout(a, _OUT_ROW), 1)
            p0 = gl.convert_layout(p0, _WEIGHTS)
            oa = warpgroup_mma(p0, k_blocks.index(_EVEN_0), oa * a, is_async=True)
            ob = warpgroup_mma(p0, k_blocks.index(_EVEN_1), ob * a, is_async=True)
            mbarrier.wait(hand.index(1), phase)
            p1 = p_shared.load(_WEIGHTS)
            m = rows_shared.index(1).load(_SCORE_ROW)
            b = gl.exp2(m0 - _finite(m))
            l = l * b
            b = gl.expand_dims(gl.convert_layout(b, _OUT_ROW), 1)
            mbarrier.wait(full.index(_ODD_0), phase)
            oa = warpgroup_mma_wait(1, deps=[oa])
            _signal(empty.index(_EVEN_0))
            oa = warpgroup_mma(p1, k_blocks.index(_ODD_0), oa * b, is_async=True)
            mbarrier.wait(full.index(_ODD_1), phase)
            ob = warpgroup_mma_wait(1, deps=[ob])
            _signal(empty.index(_EVEN_1))
            ob = warpgroup_mma(p1, k_blocks.index(_ODD_1), ob * b, is_async=True)
            oa = warpgroup_mma_wait(1, deps=[oa])
            _signal(empty.index(_ODD_0))
            ob = warpgroup_mma_wait(0, deps=[ob])
            _signal(empty.index(_ODD_1))
            pair += 1
        turn = pieces & 1
        rows_shared.index(2 * turn + 2).store(l)
        _signal(hand.index(2))
        mbarrier.wait(hand.index(3), turn)
        l = l + rows_shared.index(2 * turn + 3).load(_SCORE_ROW)
        if first >= end:
            _signal(queries.index(1))
        pieces += 1  # noqa: SIM113 - Gluon has no enumerate
        _write(oa, l, m, k_scale, group, first_token, query_len, slot, results, 0, H)
        _write(ob, l, m, k_scale, group, first_token, query_len, slot, results, _C, H)


@gluon.jit
def _math_odd(work, group, H: gl.constexpr, CAUSAL: gl.constexpr, shared, bars, scales, results):
    """Warpgroup 1."""
    pieces_of_part, part, pieces_ptr, seq_lens_ptr, qo_indptr_ptr = work
    q_blocks, q_rope, k_blocks, k_rope, p_shared, rows_shared = shared
    full, empty, queries, hand = bars
    c, k_scale = scales
    dtype: gl.constexpr = q_blocks.dtype
    zero = gl.zeros([_T, _T], gl.float32, _SCORES)
    pair = 0
    pieces = 0
    for w in range(gl.load(pieces_of_part + part), gl.load(pieces_of_part + part + 1)):
        first_token, query_len, seq_len, first, end, _request, slot = _piece(w, group, pieces_ptr, seq_lens_ptr, qo_indptr_ptr, H, CAUSAL)
        least = seq_len
        if CAUSAL:
            least = seq_len - query_len + group * _T // H + 1
        m = gl.full([_T], float("-inf"), gl.float32, _SCORE_ROW)
        l = gl.zeros([_T], gl.float32, _SCORE_ROW)
        oa = gl.zeros([_T, _C], gl.float32, _OUT)
        ob = gl.zeros([_T, _C], gl.float32, _OUT)
        mbarrier.wait(queries.index(0), pieces & 1)
        for t in range(first, end, 2):
            phase = pair & 1
            start = t >> 30  # 0; were it known, the compiler would work the blocks' addresses out before the loop, and spill them
            mbarrier.wait(full.index(_ODD_ROPE), phase)
            s = warpgroup_mma(q_rope, k_rope.index(1).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = _score(s, q_blocks, 2, k_blocks, _ODD_2, full, phase, start)
            s = _score(s, q_blocks, 3, k_blocks, _ODD_3, full, phase, start)
            s = _score(s, q_blocks, 0, k_blocks, _ODD_0, full, phase, start)
            s = _score(s, q_blocks, 1, k_blocks, _ODD_1, full, phase, start)
            s = warpgroup_mma_wait(0, deps=[s])
            if t + 2 >= end:
                _signal(queries.index(1))  # the piece's last scores: the next one's queries may come
            if t * _T + 2 * _T > least:
                s = _hide(s, t * _T + _T, group, seq_len, query_len, H, CAUSAL)
            top = gl.max(s, 1) * c
            mbarrier.wait(hand.index(0), phase)
            p0 = p_shared.load(_WEIGHTS)
            m0 = rows_shared.index(0).load(_SCORE_ROW)
            m1 = gl.maximum(m0, top)
            shift = _finite(m1)
            a = gl.exp2(m - shift)
            b = gl.exp2(m0 - shift)
            m = m1
            p = gl.exp2(s * c - gl.expand_dims(shift, 1))
            l = l * a + gl.sum(p, 1)
            p1 = p.to(dtype)
            barrier()  # every warp has read p0 before p1 takes its place
            p_shared.store(p1)
            rows_shared.index(1).store(m1)
            barrier()
            mbarrier.arrive(hand.index(1), count=1)
            mbarrier.arrive(empty.index(_ODD_ROPE), count=1)
            a = gl.expand_dims(gl.convert_layout(a, _OUT_ROW), 1)
            p1 = gl.convert_layout(p1, _WEIGHTS)
            oa = warpgroup_mma(p1, k_blocks.index(_ODD_2), oa * a, is_async=True)
            ob = warpgroup_mma(p1, k_blocks.index(_ODD_3), ob * a, is_async=True)
            p0 = (p0.to(gl.float32) * gl.expand_dims(gl.convert_layout(b, _WEIGHT_ROW), 1)).to(dtype)
            oa = warpgroup_mma_wait(1, deps=[oa])
            _signal(empty.index(_ODD_2))
            oa = warpgroup_mma(p0, k_blocks.index(_EVEN_2), oa, is_async=True)
            ob = warpgroup_mma_wait(1, deps=[ob])
            _signal(empty.index(_ODD_3))
            ob = warpgroup_mma(p0, k_blocks.index(_EVEN_3), ob, is_async=True)
            oa = warpgroup_mma_wait(1, deps=[oa])
            _signal(empty.index(_EVEN_2))
            ob = warpgroup_mma_wait(0, deps=[ob])
            _signal(empty.index(_EVEN_3))
            pair += 1
        turn = pieces & 1
        rows_shared.index(2 * turn + 3).store(l)
        _signal(hand.index(3))
        mbarrier.wait(hand.index(2), turn)
        l = l + rows_shared.index(2 * turn + 2).load(_SCORE_ROW)
        if first >= end:
            _signal(queries.index(1))
        pieces += 1  # noqa: SIM113 - Gluon has no enumerate
        _write(oa, l, m, k_scale, group, first_token, query_len, slot, results, 2 * _C, H)
        _write(ob, l, m, k_scale, group, first_token, query_len, slot, results, 3 * _C, H)


# what changes from batch to batch is no reason to compile again
@gluon.jit(do_not_specialize=["table_stride", "page_rows"])
def _decode_pairs(
    q_wide, q_narrow, kv_wide, kv_narrow, block_table_ptr, seq_lens_ptr, qo_indptr_ptr, pieces_of_part_ptr, pieces_ptr,
    out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, k_scale_ptr,
    softmax_scale, k_scale, table_stride, page_rows,
    out_token_stride, out_head_stride, lse_head_stride, lse_token_stride,
    H: gl.constexpr, PAGE: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Program (group, part), as `_decode`: the pieces of `part`, each of pairs of tiles, for rows `64 group` on of a request.

    q_wide, q_narrow: q as [T * H, 576] by 128 and by 64 columns; kv_wide, kv_narrow: the cache as rows, `page_rows` from a page
    to the next, likewise.
    """
    gdc_launch_dependents()  # the combine may be made ready from now on: it waits for the end of this kernel by itself
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_blocks = gl.allocate_shared_memory(dtype, [4, _T, _C], _IN_SHARED)
    q_rope = gl.allocate_shared_memory(dtype, [_T, _R], _IN_SHARED)
    k_blocks = gl.allocate_shared_memory(dtype, [_BLOCKS, _T, _C], _IN_SHARED)
    k_rope = gl.allocate_shared_memory(dtype, [2, _T, _R], _IN_SHARED)
    p_shared = gl.allocate_shared_memory(dtype, [_T, _T], _IN_SHARED)
    rows_shared = gl.allocate_shared_memory(gl.float32, [6, _T], flat)  # m0, m1; sums of both warpgroups, of two pieces in turn
    full = gl.allocate_shared_memory(gl.int64, [_BLOCKS + 2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_BLOCKS + 2, 1], mbarrier.MBarrierLayout())
    queries = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())  # full, empty
    hand = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())  # of rows_shared
    dead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(dead, count=1)
    for i in gl.static_range(_BLOCKS + 2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(hand.index(i), count=1)
    mbarrier.init(queries.index(0), count=1)
    mbarrier.init(queries.index(1), count=2)
    group, part = gl.program_id(0), gl.program_id(1)
    if k_scale_ptr is not None:
        k_scale *= gl.load(k_scale_ptr)
    out_strides = (out_token_stride, out_head_stride)
    lse_strides = (lse_head_stride, lse_token_stride)
    work = (pieces_of_part_ptr, part, pieces_ptr, seq_lens_ptr, qo_indptr_ptr)
    shared = (q_blocks, q_rope, k_blocks, k_rope, p_shared, rows_shared)
    bars = (full, empty, queries, hand)
    scales = (softmax_scale * k_scale * LOG2E, k_scale)
    results = (out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, out_strides, lse_strides)
    inputs = (q_wide, q_narrow, kv_wide, kv_narrow, block_table_ptr, table_stride, page_rows, dead)
    gl.warp_specialize(
        [
            (_math_odd, (work, group, H, CAUSAL, shared, bars, scales, results)),
            (_math_even, (work, group, H, CAUSAL, shared, bars, scales, results)),
            (_copy_warp, (work, group, H, CAUSAL, PAGE, shared, bars, inputs)),
        ],
        [4, 1],
        [224, 40],
    )


def fits(q: torch.Tensor, kv_cache: torch.Tensor, rank: int) -> bool:
    """Whether `_decode_pairs` can do a decode; what it can't do `_decode` does.

    The tiles are of 512 + 64 two-byte numbers, cache and queries alike (a float8 cache would have to be converted on its way
    into the products, past shared memory). TMA copies boxes out of what is not empty: a tile has to lie in one page, the (token,
    head) pairs at equal distances, the pages at whole numbers of rows, rows apart, and everything at multiples of 16 bytes.
    """
    tokens, heads, _ = q.shape
    row, page = kv_cache.stride(1), kv_cache.stride(0)
    return (
        rank == RANK
        and q.shape[2] == RANK + ROPE
        and q.dtype.itemsize == 2
        and kv_cache.dtype == q.dtype
        and kv_cache.shape[1] % TILE == 0
        and tokens > 0
        and kv_cache.shape[0] > 0
        and q.stride(1) > 0
        and row > 0
        and (tokens == 1 or q.stride(0) == heads * q.stride(1))
        and page % row == 0
        and q.stride(1) % 8 == 0
        and row % 8 == 0
        and q.data_ptr() % 16 == 0
        and kv_cache.data_ptr() % 16 == 0
    )


def prepare_pairs(
    grid: tuple[int, int],
    device: torch.device,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    table_stride: int,
    strides: tuple[int, ...],
    *,
    causal: bool,
) -> Prepared:
    """The launch of the kernel for tensors that are, but for their memory, as `q` and `kv_cache` on "meta".

    Arguments:
        strides: the kernel's own, of out and LSE.

    Returns:
        what takes q, q, kv_cache, kv_cache and the kernel's arguments from `block_table_ptr` to `k_scale`.
    """
    tokens, heads, dim = q.shape
    num_pages, page_size, _ = kv_cache.shape
    page_rows = kv_cache.stride(0) // kv_cache.stride(1)
    q_rows, kv_rows = [tokens * heads, dim], [(num_pages - 1) * page_rows + page_size, dim]
    boxes = [_box(tensor, rows, columns) for tensor, rows in ((q, q_rows), (kv_cache, kv_rows)) for columns in (RANK // 4, ROPE)]
    return Prepared(
        _decode_pairs, grid, device, (table_stride, page_rows, *strides), boxes,
        H=heads, PAGE=page_size, CAUSAL=causal, num_warps=4,
    )  # fmt: skip


def _box(tensor: torch.Tensor, shape: list[int], columns: int) -> Box:
    return Box(TensorDescriptor(tensor, shape, [tensor.stride(1), 1], [TILE, columns], _IN_SHARED.value))
