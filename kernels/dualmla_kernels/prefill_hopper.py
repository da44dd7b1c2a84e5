"""Prefill of DeepSeek's head dims, 192 and 128, on Hopper: the plain kernel's mathematics (prefill.py) by warps with roles of their own.

A program has two warpgroups that multiply, 64 queries each, and one warp that copies keys and values of 128 tokens into a ring
of STAGES buffers by the TMA unit. A warpgroup queues the scores of the next tile before the value product of this one, so that
softmax is done while the tensor cores are busy, and the first scores of its next block before it writes out this one:

    s(0);  for tiles j = 1, 2, ...:  queue s(j), queue acc += p(j-1) v(j-1);  wait for s(j): m, l, p(j);  wait for acc: acc *= a

Tiles go from the last to the first: those on the diagonal need a mask and come first. As many programs as multiprocessors take
(block of queries, head) one after the other in the order of prefill_order.py, whoever is free the next one. Heads go by
groups, so that the keys and values in use stay in the L2 cache.

Rows past a block's last key may hold anything. Their scores are masked; their values would be multiplied by p = 0, and 0 * NaN is
NaN, so they are not read at all: values are described to the TMA unit as rows of 2^30, the last of which are made to be the
block's, and what lies beyond is filled with 0. (With an outer dimension of stride 2^34 - S and index 2^30, addresses wrap around
2^64, and 2^30 rows of stride S are subtracted again.)

Shapes: T queries and S keys of all requests, H heads; a block has BM = 128 queries, a tile BN = 128 keys.
    q_desc [T, .] boxes of [64, 64], k_desc [S, .] of [BN, 64], v_desc [., ., 2^30, .] of [1, 1, BN, 128]: all heads of a token in a row
    order int32 [1 + blocks, 8] of prefill_order.py, out [T, H, 128], lse fp32 [H, T]
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dualmla_kernels.boxes import Box
from dualmla_kernels.gluon_compat import async_load, barrier
from dualmla_kernels.launch import Prepared, cdiv, stream_of
from dualmla_kernels.numerics import LN2, LOG2E
from dualmla_kernels.prefill_order import prepare_order, rows_of_order
from dualmla_kernels.ready import Settled

BN, STAGES = 128, 2
REGISTERS = 240
"""Of a lane that multiplies; the copying warp has 24, which with 240 twice are all there are."""

GROUP_TOKENS, LAST_TOKENS = 16384, 65536
"""Heads of a group, and of the last one at least, times queries: few, so that their keys and values stay in the L2 cache (10 MB of
50); more at the end, so that there are enough blocks of all lengths for the multiprocessors to end together."""

AHEAD = gl.constexpr(2)
"""Tiles before the end of a block that the next one is asked for."""

ROWS = gl.constexpr(1 << 30)
"""Rows that values are said to have."""

SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=SCORES.value, k_width=2))
ROW, COLUMN = gl.constexpr(gl.SliceLayout(1, SCORES.value)), gl.constexpr(gl.SliceLayout(0, SCORES.value))
# as SCORES a quad of lanes has a row, but a lane 8 neighbouring columns: 16-byte stores after shuffles within the quad
OUT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
# made once: a layout takes longer to make than a description of a tensor
BOX, RAGGED_BOX = (gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank) for rank in (2, 4))
FIRST_QUERY, HEAD, LIVE, END, SEEN = (gl.constexpr(i) for i in range(5))
OUT_ROW, OUT_COLUMN = gl.constexpr(gl.SliceLayout(1, OUT.value)), gl.constexpr(gl.SliceLayout(0, OUT.value))
ONE, ONE_OF_FOUR = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0])), gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _say(item, turn, field: gl.constexpr, value):
    """Writes a fact of the block of this turn; two turns have room."""
    item.index((turn & 1) * 5 + field).store(gl.full([1], 0, gl.int32, ONE) + value)


@gluon.jit
def _told(item, turn, field: gl.constexpr):
    """A fact of the block of this turn, in a warpgroup."""
    return gl.max(item.index((turn & 1) * 5 + field).load(ONE_OF_FOUR), 0)


@gluon.jit
def _block(number, order_ptr, blocks, heads, group, grouped):
    """Head and block of an item, the first `grouped` heads by groups of `group`; of the last one where there are not so many."""
    number = gl.minimum(number, blocks * heads - 1)
    first_head = gl.minimum(number // gl.maximum(blocks * group, 1) * group, grouped)
    rest = number - first_head * blocks
    size = group
    if first_head == grouped:
        size = heads - grouped
    entry = order_ptr + (1 + rest // size) * 8
    head = first_head + rest % size
    return head, gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3), gl.load(entry + 4)


@gluon.jit
def _copy(
    q_desc, k_desc, v_desc, order_ptr, heads, group, grouped, q_head_stride, k_head_stride, v_head_stride,
    q, k, v, item, q_full, q_free, k_full, k_free, v_full, v_free, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that takes blocks, says which, and copies what they need."""
    blocks = gl.load(order_ptr + 1)
    number = gl.program_id(0)
    head, first_query, live, first_key, end, seen = _block(number, order_ptr, blocks, heads, group, grouped)
    tile = 0
    turn = 0
    while number < blocks * heads:
        mbarrier.wait(q_free, (turn & 1) ^ 1)
        _say(item, turn, FIRST_QUERY, first_query)
        _say(item, turn, HEAD, head)
        _say(item, turn, LIVE, live)
        _say(item, turn, END, end)
        _say(item, turn, SEEN, seen)
        barrier()
        mbarrier.expect(q_full, 128 * 192 * 2)
        for g in gl.static_range(2):
            for d in gl.static_range(3):
                async_load(q_desc, [first_query + g * 64, head * q_head_stride + d * 64], q_full, q.index(g * 3 + d))
        tiles = gl.maximum((end + BN - 1) // BN, 1)
        last_key, k_column, v_column = first_key + end, head * k_head_stride, head * v_head_stride
        next_end = end
        for j in range(tiles):
            key = (tiles - 1 - j) * BN
            stage = tile % STAGES
            phase = ((tile // STAGES) & 1) ^ 1
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_full.index(stage), BN * 192 * 2)
            for d in gl.static_range(3):
                async_load(k_desc, [last_key - end + key, k_column + d * 64], k_full.index(stage), k.index(stage * 3 + d))
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_full.index(stage), BN * 128 * 2)
            async_load(v_desc, [ROWS, last_key, ROWS - end + key, v_column], v_full.index(stage), v.index(stage))
            tile += 1
            if j == gl.maximum(tiles - AHEAD, 0):  # late, so that whoever is free has it, and early enough to have it in time
                number = gl.atomic_add(order_ptr, 1)
                head, first_query, live, first_key, next_end, seen = _block(number, order_ptr, blocks, heads, group, grouped)
        turn += 1
        end = next_end
    # no block is left; the other warps score a first tile before they know
    mbarrier.wait(q_free, (turn & 1) ^ 1)
    _say(item, turn, END, -1)
    barrier()
    mbarrier.arrive(q_full, count=1)
    mbarrier.wait(k_free.index(tile % STAGES), ((tile // STAGES) & 1) ^ 1)
    mbarrier.arrive(k_full.index(tile % STAGES), count=1)


@gluon.jit
def _scores(q, k, stage, WARPGROUP: gl.constexpr, BN: gl.constexpr):
    """q k^T [64, BN] of a warpgroup's queries and the keys in a buffer, queued."""
    s = warpgroup_mma(
        q.index(WARPGROUP * 3), k.index(stage * 3).permute((1, 0)), gl.zeros([64, BN], gl.float32, SCORES), use_acc=False, is_async=True
    )
    for d in gl.static_range(1, 3):
        s = warpgroup_mma(q.index(WARPGROUP * 3 + d), k.index(stage * 3 + d).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _softmax(s, m, c, key, seen, CAUSAL: gl.constexpr):
    """The recurrence for scores `s` of the keys from `key` on: the new m, what the old sums are worth, p and its sums."""
    if key + s.shape[1] > seen:
        limit = gl.full([64], 0, gl.int32, ROW) + (seen - key)
        if CAUSAL:
            limit += gl.arange(0, 64, layout=ROW)
        s = gl.where(gl.expand_dims(gl.arange(0, s.shape[1], layout=COLUMN), 0) < gl.expand_dims(limit, 1), s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * c)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)  # no key yet: -inf - -inf would be NaN
    p = gl.exp2(s * c - gl.expand_dims(shift, 1))
    return m_new, gl.exp2(m - shift), p, gl.sum(p, 1)


@gluon.jit
def _step(
    m, l, acc, p, tile, key, seen, c, q, k, v, q_free, k_full, k_free, v_full, v_free,
    WARPGROUP: gl.constexpr, CAUSAL: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of the tile after `tile`, the value product of `tile`, whose weights are `p`."""
    stage, next_stage = tile % STAGES, (tile + 1) % STAGES
    mbarrier.wait(k_full.index(next_stage), ((tile + 1) // STAGES) & 1)
    s = _scores(q, k, next_stage, WARPGROUP, BN)
    mbarrier.wait(v_full.index(stage), (tile // STAGES) & 1)
    acc = warpgroup_mma(p, v.index(stage).reshape([BN, 128]), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])  # all but the value product
    barrier()
    mbarrier.arrive(k_free.index(next_stage), count=1)
    mbarrier.arrive(q_free, count=1, pred=key == 0)
    m, a, p_next, sums = _softmax(s, m, c, key, seen, CAUSAL)
    l = l * a + sums
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()
    mbarrier.arrive(v_free.index(stage), count=1)
    return m, l, acc * gl.expand_dims(a, 1), gl.convert_layout(p_next.to(p.dtype), WEIGHTS)


@gluon.jit
def _attend(
    WARPGROUP: gl.constexpr, out_ptr, lse_ptr, c, out_token_stride, out_head_stride, lse_head_stride, lse_token_stride,
    q, k, v, item, q_full, q_free, k_full, k_free, v_full, v_free,
    CAUSAL: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies."""
    tile = 0
    turn = 0
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    s = _scores(q, k, 0, WARPGROUP, BN)
    end = _told(item, 0, END)
    row = gl.arange(0, 64, layout=ROW)
    while end >= 0:
        tiles = gl.maximum((end + BN - 1) // BN, 1)
        seen = _told(item, turn, SEEN)
        if CAUSAL:
            seen += WARPGROUP * 64
        s = warpgroup_mma_wait(0, deps=[s])
        barrier()
        mbarrier.arrive(k_free.index(tile % STAGES), count=1)
        mbarrier.arrive(q_free, count=1, pred=tiles == 1)
        m = gl.full([64], float("-inf"), gl.float32, ROW)
        m, _none, p, l = _softmax(s, m, c, (tiles - 1) * BN, seen, CAUSAL)
        p = gl.convert_layout(p.to(q.dtype), WEIGHTS)
        acc = gl.zeros([64, 128], gl.float32, SCORES)
        for j in range(1, tiles):
            m, l, acc, p = _step(
                m, l, acc, p, tile, (tiles - 1 - j) * BN, seen, c, q, k, v, q_free, k_full, k_free, v_full, v_free,
                WARPGROUP, CAUSAL, BN, STAGES,
            )  # fmt: skip
            tile += 1
        stage = tile % STAGES
        mbarrier.wait(v_full.index(stage), (tile // STAGES) & 1)
        acc = warpgroup_mma(p, v.index(stage).reshape([BN, 128]), acc, is_async=True)
        tile += 1
        mbarrier.wait(q_full, (turn + 1) & 1)
        mbarrier.wait(k_full.index(tile % STAGES), (tile // STAGES) & 1)
        s = _scores(q, k, tile % STAGES, WARPGROUP, BN)
        acc = warpgroup_mma_wait(3, deps=[acc])  # all but the three products that `_scores` queues
        barrier()
        mbarrier.arrive(v_free.index(stage), count=1)

        saw = l != 0.0  # a NaN among the live numbers is seen
        total = gl.where(saw, l, 1.0)
        live = _told(item, turn, LIVE) - WARPGROUP * 64
        far_token, far_head = _told(item, turn, FIRST_QUERY).to(gl.int64) + WARPGROUP * 64, _told(item, turn, HEAD).to(gl.int64)
        if lse_ptr is not None:
            row_lse = gl.where(saw, (m + gl.log2(total)) * LN2, float("-inf"))
            at = (far_token + row) * lse_token_stride + far_head * lse_head_stride
            gl.store(lse_ptr + at, row_lse, mask=row < live)
        result = gl.convert_layout((acc * gl.expand_dims(1.0 / total, 1)).to(out_ptr.dtype.element_ty), OUT)
        out_row, column = gl.arange(0, 64, layout=OUT_ROW), gl.arange(0, 128, layout=OUT_COLUMN)
        out_at = (far_token + out_row) * out_token_stride + far_head * out_head_stride
        gl.store(
            out_ptr + gl.expand_dims(out_at, 1) + gl.expand_dims(column, 0),
            result,
            mask=gl.expand_dims(out_row < live, 1) & gl.expand_dims(column >= 0, 0),  # of the whole tile's shape
        )
        turn += 1
        end = _told(item, turn, END)
    warpgroup_mma_wait(0, deps=[s])


@gluon.jit(do_not_specialize=["heads", "group", "grouped", "lse_head_stride", "lse_token_stride"])
def _prefill_hopper(
    q_desc, k_desc, v_desc, order_ptr, out_ptr, lse_ptr, softmax_scale, heads, group, grouped,
    q_head_stride, k_head_stride, v_head_stride, out_token_stride, out_head_stride, lse_head_stride, lse_token_stride,
    CAUSAL: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program a multiprocessor: its buffers, its barriers, and who does what."""
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [6, 64, 64], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES * 3, BN, 64], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, 128], v_desc.layout)
    item = gl.allocate_shared_memory(gl.int32, [10, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    one: gl.constexpr = mbarrier.MBarrierLayout()
    q_full, q_free = gl.allocate_shared_memory(gl.int64, [1], one), gl.allocate_shared_memory(gl.int64, [1], one)
    k_full, k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one), gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_full, v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one), gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    c = softmax_scale * LOG2E
    gl.warp_specialize(
        [
            (_attend, (
                0, out_ptr, lse_ptr, c, out_token_stride, out_head_stride, lse_head_stride, lse_token_stride,
                q, k, v, item, q_full, q_free, k_full, k_free, v_full, v_free, CAUSAL, BN, STAGES,
            )),
            (_attend, (
                1, out_ptr, lse_ptr, c, out_token_stride, out_head_stride, lse_head_stride, lse_token_stride,
                q, k, v, item, q_full, q_free, k_full, k_free, v_full, v_free, CAUSAL, BN, STAGES,
            )),
            (_copy, (
                q_desc, k_desc, v_desc, order_ptr, heads, group, grouped, q_head_stride, k_head_stride, v_head_stride,
                q, k, v, item, q_full, q_free, k_full, k_free, v_full, v_free, BN, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def _box(x: torch.Tensor, box: list[int]) -> Box:
    """`x` [rows, H, D] by boxes of rows and of columns, heads one after the other; a box of rank 4 for rows that end anywhere."""
    columns, stride = (x.shape[1] - 1) * x.stride(1) + x.shape[2], x.stride(0)
    if len(box) == 2:
        return Box(TensorDescriptor(x, [x.shape[0], columns], [stride, 1], box, BOX))
    most = 0x7FFF0000
    return Box(TensorDescriptor(x, [most, most, ROWS.value, columns], [(1 << 34) - stride, stride, stride, 1], box, RAGGED_BOX))


class HopperPrefill:
    """As `prefill.mla_prefill` where `prefill.runs_on_hopper`, for tensors that are, but for their memory, as those on "meta".

    Arguments:
        programs: multiprocessors of the device.
        lse_strides: None where there is to be no LSE.
        num_reqs: at least one, with at least one key.
    """

    def __init__(
        self,
        device: torch.device,
        programs: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse_strides: tuple[int, ...] | None,
        num_reqs: int,
        *,
        causal: bool,
    ) -> None:
        num_tokens, heads, _ = out.shape
        group, last = min(cdiv(GROUP_TOKENS, num_tokens), heads), min(cdiv(LAST_TOKENS, num_tokens), heads)
        strides = (q.stride(1), k.stride(1), v.stride(1), out.stride(0), out.stride(1), *(lse_strides or (0, 0)))
        self._device, self._rows = device, rows_of_order(num_tokens, num_reqs)
        self._order = prepare_order(device, out, lse_strides or (0, 0), num_reqs, programs, causal=causal)
        self._attend = Prepared(
            _prefill_hopper, (programs,), device, (heads, group, (heads - last) // group * group, *strides),
            [_box(q, [64, 64]), _box(k, [BN, 64]), _box(v, [1, 1, BN, 128])],
            CAUSAL=causal, BN=BN, STAGES=STAGES, REGISTERS=REGISTERS, num_warps=4,
        )  # fmt: skip
        self._settled: tuple[Settled, Settled] | None = None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        softmax_scale: float,
    ) -> None:
        """Launch both kernels."""
        items = torch.empty(self._rows, 8, dtype=torch.int32, device=q.device)
        if self._settled is not None and (stream := stream_of(self._device)) is not None:
            order, attend = self._settled
            queries_at, keys_at, items_at = cu_seqlens_q.data_ptr(), cu_seqlens_k.data_ptr(), items.data_ptr()
            out_at, lse_at = out.data_ptr(), None if lse is None else lse.data_ptr()
            if not (queries_at | keys_at | items_at | out_at | (lse_at or 0)) & 15 and not order.heard and not attend.heard:
                order(stream, queries_at, keys_at, items_at, out_at, lse_at)
                attend(stream, *attend.encoded(q, k, v), items_at, out_at, lse_at, softmax_scale)
                return
        to_order, to_attend = (cu_seqlens_q, cu_seqlens_k, items, out, lse), (q, k, v, items, out, lse, softmax_scale)
        self._order(*to_order)
        self._attend(*to_attend)
        if (order := self._order.settled(*to_order)) and (attend := self._attend.settled(*to_attend)):
            self._settled = order, attend
