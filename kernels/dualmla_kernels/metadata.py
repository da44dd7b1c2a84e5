"""Metadata of a batch in one launch: index arrays, packed page ids, slots, the split plan, and a copy of the table for a graph.

No program waits for another: each works out the running sums that it needs from the lengths, which fit in a few lines of
cache. The launch is sized by what the host knows (requests, tokens, width of the table), its work by what is live. Programs:

    1                           index arrays: lengths, last page lengths, indptr of the batch and of its prefills
    plan_blocks                 the split plan of the decodes (plan.py)
    ceil(num_tokens / 32)       slots: token t belongs to request `#{r: end_r <= t}`, end_r the running sum of query lengths
    live x page_blocks          page ids: `PAGE_BLOCK` entries of one row of the table

Requests from `live` on are padding: no tokens, no keys. `advance` moves the lengths of a batch of decodes one token on;
a build over the batch's own lengths does the rest.

Shapes: block_table int32 [live, max_pages], seq_lens and query_lens int32 [live], fields int32 [7, >= num_reqs + 1] with the
rows seq_lens, query_lens, last page lengths, qo_indptr, paged_kv_indptr and both indptr of the prefills alone, indices int32,
slots int64 [num_tokens]. A page has PAGE tokens.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from dualmla_kernels.launch import Prepared, cdiv, launch, next_power_of_2
from dualmla_kernels.plan import SplitPlan, plan_blocks
from dualmla_kernels.plan_kernel import BLOCK, plan_block

PAGE_BLOCK = 4096
TOKEN_BLOCK = 32


@triton.jit
def _lengths(seq_lens_ptr, query_lens_ptr, query_len, request, live, max_pages, PAGE: tl.constexpr):
    """Keys, new tokens and pages of each request; 0 from `live` on."""
    seq_len = tl.load(seq_lens_ptr + request, mask=request < live, other=0)
    if query_lens_ptr is None:
        new = tl.where(request < live, query_len, 0)
    else:
        new = tl.load(query_lens_ptr + request, mask=request < live, other=0)
    return seq_len, new, tl.minimum((seq_len + PAGE - 1) // PAGE, max_pages)


@triton.jit
def _write_fields(
    seq_lens_ptr, query_lens_ptr, query_len, fields_ptr, stride, live, num_reqs, num_decodes, max_pages,
    PAGE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    on = tl.arange(0, CHUNK)
    qo_indptr, kv_indptr = fields_ptr + 3 * stride, fields_ptr + 4 * stride
    prefill_qo_indptr, prefill_kv_indptr = fields_ptr + 5 * stride, fields_ptr + 6 * stride
    for row in tl.static_range(3, 7):
        tl.store(fields_ptr + row * stride, 0)
    tokens, decode_tokens, pages, decode_pages = 0, 0, 0, 0
    for c in range(0, num_reqs, CHUNK):
        r = c + on
        seq_len, new, held = _lengths(seq_lens_ptr, query_lens_ptr, query_len, r, live, max_pages, PAGE)
        token_end, page_end = tokens + tl.cumsum(new, 0), pages + tl.cumsum(held, 0)
        tokens += tl.sum(new, 0)
        pages += tl.sum(held, 0)
        decode_tokens += tl.sum(tl.where(r < num_decodes, new, 0), 0)
        decode_pages += tl.sum(tl.where(r < num_decodes, held, 0), 0)
        tl.store(fields_ptr + r, seq_len, mask=r < num_reqs)
        tl.store(fields_ptr + stride + r, new, mask=r < num_reqs)
        last = tl.where(held > 0, (seq_len + PAGE - 1) % PAGE + 1, 0)
        tl.store(fields_ptr + 2 * stride + r, last, mask=r < num_reqs)
        tl.store(qo_indptr + r + 1, token_end, mask=r < num_reqs)
        tl.store(kv_indptr + r + 1, page_end, mask=r < num_reqs)
        is_prefill = (r >= num_decodes) & (r < num_reqs)
        tl.store(prefill_qo_indptr + r - num_decodes + 1, token_end - decode_tokens, mask=is_prefill)
        tl.store(prefill_kv_indptr + r - num_decodes + 1, page_end - decode_pages, mask=is_prefill)


@triton.jit
def _write_slots(
    block, table_ptr, table_stride, seq_lens_ptr, query_lens_ptr, query_len, slots_ptr, live, num_tokens, max_pages,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    token = block * TOKENS + tl.arange(0, TOKENS)
    if query_lens_ptr is None:
        request = token // tl.maximum(query_len, 1)
        start = request * query_len
        owned = token < live * query_len
    else:
        request, start = tl.zeros([TOKENS], tl.int32), tl.zeros([TOKENS], tl.int32)
        total = 0
        for c in range(0, live, CHUNK):
            r = c + tl.arange(0, CHUNK)
            new = tl.load(query_lens_ptr + r, mask=r < live, other=0)
            end = total + tl.cumsum(new, 0)
            total += tl.sum(new, 0)
            before = end[None, :] <= token[:, None]
            request += tl.sum(before.to(tl.int32), 1)
            start = tl.maximum(start, tl.max(tl.where(before, end[None, :], 0), 1))
        owned = token < total
    seq_len = tl.load(seq_lens_ptr + request, mask=owned, other=0)
    new = query_len
    if query_lens_ptr is not None:
        new = tl.load(query_lens_ptr + request, mask=owned, other=0)
    position = seq_len - new + token - start
    column = position // PAGE
    written = owned & (position >= 0) & (column < max_pages)
    page = tl.load(table_ptr + request.to(tl.int64) * table_stride + column, mask=written, other=0).to(tl.int64)
    tl.store(slots_ptr + token, tl.where(written, page * PAGE + position % PAGE, -1), mask=token < num_tokens)


@triton.jit
def _write_pages(
    request, block, table_ptr, table_stride, seq_lens_ptr, indices_ptr, prefill_indices_ptr, own_table_ptr, own_stride,
    num_decodes, max_pages, PAGE: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    pages = tl.minimum((tl.load(seq_lens_ptr + request) + PAGE - 1) // PAGE, max_pages)
    reach = pages
    if own_table_ptr is not None:
        reach = tl.minimum(pages + AHEAD, max_pages)
    if block * COLUMNS < reach:
        first, decode_pages = 0, 0
        for c in range(0, request, CHUNK):
            r = c + tl.arange(0, CHUNK)
            seq_len = tl.load(seq_lens_ptr + r, mask=r < request, other=0)
            held = tl.minimum((seq_len + PAGE - 1) // PAGE, max_pages)
            first += tl.sum(held, 0)
            decode_pages += tl.sum(tl.where(r < num_decodes, held, 0), 0)
        ids = tl.load(table_ptr + request.to(tl.int64) * table_stride + column, mask=column < reach, other=0)
        tl.store(indices_ptr + first + column, ids, mask=column < pages)
        if prefill_indices_ptr is not None:  # noqa: SIM102 - the outer question is answered when the kernel is compiled
            if request >= num_decodes:
                tl.store(prefill_indices_ptr + first - decode_pages + column, ids, mask=column < pages)
        if own_table_ptr is not None:
            tl.store(own_table_ptr + request.to(tl.int64) * own_stride + column, ids, mask=column < reach)


_POINTERS = ["table_ptr", "seq_lens_ptr", "query_lens_ptr"]
_NUMBERS = [
    "query_len", "live", "num_reqs", "num_decodes", "num_tokens", "max_pages", "table_stride", "own_stride", "fields_stride",
    "parts", "plan_programs", "token_programs", "page_blocks",
]  # fmt: skip


# what changes from batch to batch must not ask for another compilation
@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _build(
    table_ptr, seq_lens_ptr, query_lens_ptr, fields_ptr, indices_ptr, prefill_indices_ptr, slots_ptr, own_table_ptr,
    pieces_of_part_ptr, pieces_ptr, splits_ptr,
    query_len, live, num_reqs, num_decodes, num_tokens, max_pages, table_stride, own_stride, fields_stride, parts,
    plan_programs, token_programs, page_blocks,
    PAGE: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, AHEAD: tl.constexpr, CHUNK: tl.constexpr = 128,
):  # fmt: skip
    """Programs in the order of the module's docstring; pointers are None where there is nothing to write."""
    program = tl.program_id(0)
    if program == 0:
        _write_fields(
            seq_lens_ptr, query_lens_ptr, query_len, fields_ptr, fields_stride, live, num_reqs, num_decodes, max_pages, PAGE, CHUNK
        )
    elif program < 1 + plan_programs:
        if pieces_ptr is not None:
            plan_block(
                program - 1, seq_lens_ptr, live, num_decodes, parts,
                pieces_of_part_ptr, pieces_ptr, splits_ptr, TILE, PARTS, BLOCK,
            )  # fmt: skip
    elif program < 1 + plan_programs + token_programs:
        _write_slots(
            program - 1 - plan_programs, table_ptr, table_stride, seq_lens_ptr, query_lens_ptr, query_len, slots_ptr,
            live, num_tokens, max_pages, PAGE, TOKENS, CHUNK,
        )  # fmt: skip
    else:
        index = program - 1 - plan_programs - token_programs
        _write_pages(
            index // page_blocks, index % page_blocks, table_ptr, table_stride, seq_lens_ptr,
            indices_ptr, prefill_indices_ptr, own_table_ptr, own_stride, num_decodes, max_pages, PAGE, COLUMNS, CHUNK, AHEAD,
        )  # fmt: skip


def build(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor | int,
    *,
    num_reqs: int,
    num_decodes: int,
    num_tokens: int,
    page_size: int,
    fields: torch.Tensor,
    indices: torch.Tensor,
    prefill_indices: torch.Tensor | None,
    slots: torch.Tensor,
    own_table: torch.Tensor | None,
    pages_ahead: int,
    plan: SplitPlan | None,
) -> None:
    """Write everything in one launch; arguments trusted, shapes as in the module's docstring.

    Arguments:
        query_lens: an int where every request has as many new tokens.
        num_reqs: requests described, padding included; at least those of `seq_lens`.
        num_decodes: the leading requests that the plan is for.
        num_tokens: slots written; -1 past the tokens of the batch.
        prefill_indices: where the page ids of the other requests are packed once more.
        own_table: where the live part of the table is copied, and `pages_ahead` entries more of each row.
    """
    uniform = isinstance(query_lens, int)
    prepared = _prepare(
        fields.device, block_table.shape, block_table.stride(0), query_lens if uniform else 0, num_reqs, num_decodes, num_tokens, page_size,
        fields.stride(0), 0 if own_table is None else own_table.stride(0), pages_ahead, (0, 0, 0, 1) if plan is None else plan.counts,
    )  # fmt: skip
    planned = (None, None, None) if plan is None else (plan.pieces_of_part, plan.pieces, plan.splits)
    prepared(block_table, seq_lens, None if uniform else query_lens, fields, indices, prefill_indices, slots, own_table, *planned)


@functools.lru_cache(maxsize=1024)
def _prepare(
    device: torch.device,
    table_shape: torch.Size,
    table_stride: int,
    query_len: int,
    num_reqs: int,
    num_decodes: int,
    num_tokens: int,
    page_size: int,
    fields_stride: int,
    own_stride: int,
    pages_ahead: int,
    plan_counts: tuple[int, int, int, int],
) -> Prepared:
    """The launch for a batch of these numbers, which takes the kernel's pointers; `plan_counts`: `SplitPlan.counts`, or no parts."""
    (live, max_pages), (parts, _, _, tile) = table_shape, plan_counts
    plan_programs = plan_blocks(num_decodes, parts) if parts else 0
    token_programs, page_blocks = cdiv(num_tokens, TOKEN_BLOCK), cdiv(max_pages, PAGE_BLOCK)
    return Prepared(
        _build, (1 + plan_programs + token_programs + live * page_blocks,), device,
        (query_len, live, num_reqs, num_decodes, num_tokens, max_pages, table_stride, own_stride, fields_stride, parts,
         plan_programs, token_programs, page_blocks),
        PAGE=page_size, TILE=tile, PARTS=next_power_of_2(parts),
        BLOCK=BLOCK, TOKENS=TOKEN_BLOCK, COLUMNS=PAGE_BLOCK, AHEAD=pages_ahead, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_reqs"])
def _advance(
    seq_lens_ptr, query_lens_ptr, qo_indptr_ptr, sampled_ptr, tokens_ptr, positions_ptr, num_reqs, sampled_stride, CHUNK: tl.constexpr
):
    """Program b moves requests `b * CHUNK` on."""
    r = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    moves = (r < num_reqs) & (tl.load(query_lens_ptr + r, mask=r < num_reqs, other=0) > 0)
    seq_len = tl.load(seq_lens_ptr + r, mask=moves, other=0)
    token = tl.load(qo_indptr_ptr + r, mask=moves, other=0)
    tl.store(seq_lens_ptr + r, seq_len + 1, mask=moves)
    tl.store(positions_ptr + token, seq_len, mask=moves)
    sampled = tl.load(sampled_ptr + token.to(tl.int64) * sampled_stride, mask=moves, other=0)
    tl.store(tokens_ptr + token, sampled, mask=moves)


def advance(
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    sampled: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """One token on for every request of `query_lens` 1; token t of the batch becomes `sampled[t]` at position `seq_len`."""
    num_reqs = seq_lens.shape[0]
    launch(
        _advance, (cdiv(num_reqs, 256),), seq_lens.device,
        seq_lens, query_lens, qo_indptr, sampled, tokens, positions, num_reqs, sampled.stride(0), CHUNK=256, num_warps=4,
    )  # fmt: skip
