"""The split plan on a GPU: each program works out BLOCK of its entries by itself. The algorithm: plan.py.

A plan is for n requests, `live` of which have a length and the others none; `parts` programs; TILE keys a tile. It is written to
pieces_of_part int32 [parts + 1], pieces int32 [n + parts, 4] (fixed: [n * splits, 4]) and splits int32 [.., 3].
"""

import triton
import triton.language as tl

OVERHEAD = tl.constexpr(2)  # cost of starting a piece (queries loaded, output written), in tiles
MIN_PIECE = tl.constexpr(2)  # tiles worth a piece of their own
SPLIT_COST = tl.constexpr(4)  # tiles that the combine of split requests is worth

BLOCK = 16
"""Pieces, and programs of the decode, that one program of the plan works out."""


@triton.jit
def _tiles(seq_lens_ptr, request, live, num_reqs, TILE: tl.constexpr):
    """Tiles of each request, at least 1; requests from `live` on are empty, from `num_reqs` on there are none: 0."""
    length = tl.load(seq_lens_ptr + request, mask=request < live, other=0)
    return tl.where(request < num_reqs, (tl.maximum(length, 1) - 1) // TILE + 1, 0)


@triton.jit
def _even_size(tiles, spare, total):
    """Tiles of each of the equal pieces of a request."""
    pieces = (tiles.to(tl.int64) * spare // total).to(tl.int32) + 1
    pieces = tl.minimum(pieces, tl.maximum(tiles // MIN_PIECE, 1))
    return (tiles + pieces - 1) // pieces


@triton.jit
def plan_block(
    block, seq_lens_ptr, live, num_reqs, parts, pieces_of_part_ptr, pieces_ptr, splits_ptr,
    TILE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr = 256,
):  # fmt: skip
    """Pieces and programs `block * BLOCK` on of the plan; block 0 writes the splits too.

    The first `live` requests have a length at `seq_lens_ptr`; the plan is for the first `num_reqs`. Requests are walked CHUNK
    at a time with the running sums carried over. PARTS: `parts`, rounded up to a power of two.
    """
    on = tl.arange(0, CHUNK)
    total = 0
    for c in range(0, num_reqs, CHUNK):
        total += tl.sum(_tiles(seq_lens_ptr, c + on, live, num_reqs, TILE), 0)
    payload = tl.maximum((total + OVERHEAD * num_reqs + parts - 1) // parts, 2 * MIN_PIECE)

    spare = tl.maximum(parts - num_reqs, 0)
    largest = 0
    for c in range(0, num_reqs, CHUNK):
        tiles = _tiles(seq_lens_ptr, c + on, live, num_reqs, TILE)
        largest = tl.maximum(largest, tl.max(_even_size(tiles, spare, total), 0))
    even = (largest <= payload) & (num_reqs <= parts)

    each = (num_reqs + parts - 1) // parts
    load = tl.zeros([PARTS], tl.int32)
    DEAL: tl.constexpr = 2048 // PARTS  # requests of each program that are looked at together
    for d in range(0, each, DEAL):
        nth = d + tl.arange(0, DEAL)
        request = tl.arange(0, PARTS)[:, None] * each + nth[None, :]
        tiles = _tiles(seq_lens_ptr, request, live, num_reqs, TILE)
        load += tl.sum(tl.where((nth < each)[None, :] & (tiles > 0), tiles + OVERHEAD, 0), 1)
    best = tl.where(even, largest, payload)
    whole = tl.max(load, 0) <= best + OVERHEAD + SPLIT_COST

    mine = block * BLOCK + tl.arange(0, BLOCK)  # pieces, and programs of the decode
    request, low = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    high, slot = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    pieces_before = tl.zeros([BLOCK], tl.int32)
    units, all_pieces, all_slots, all_splits = 0, 0, 0, 0
    for c in range(0, num_reqs, CHUNK):
        r = c + on
        tiles = _tiles(seq_lens_ptr, r, live, num_reqs, TILE)
        exists = r < num_reqs
        unit = tl.where(exists, tiles + OVERHEAD, 0)
        start = units + tl.cumsum(unit, 0) - tiles
        units += tl.sum(unit, 0)
        first_cut = (start + MIN_PIECE + payload - 1) // payload
        count = tl.maximum((start + tiles - MIN_PIECE) // payload - first_cut + 1, 0) + 1
        first, step = first_cut * payload - start, tl.zeros([CHUNK], tl.int32) + payload
        # selected and not branched to: with tensors out of a branch Triton 3.6 does not compile this for AMD
        size = _even_size(tiles, spare, total)
        first, step = tl.where(even, size, first), tl.where(even, size, step)
        count = tl.where(whole, 1, tl.where(even, (tiles + size - 1) // tl.maximum(size, 1), count))
        count = tl.where(exists, count, 0)
        begin = all_pieces + tl.cumsum(count, 0) - count
        all_pieces += tl.sum(count, 0)
        owner = tl.where(whole, r // each, tl.where(even, begin, tl.minimum(first_cut - 1, parts - 1)))
        slots = tl.where(count > 1, count, 0)
        first_slot = all_slots + tl.cumsum(slots, 0) - slots
        all_slots += tl.sum(slots, 0)

        nth = mine[:, None] - begin[None, :]
        here = (nth >= 0) & (nth < count[None, :])
        request += tl.sum(tl.where(here, r[None, :], 0), 1)
        low += tl.sum(tl.where(here & (nth > 0), first[None, :] + (nth - 1) * step[None, :], 0), 1)
        last = nth == count[None, :] - 1
        high += tl.sum(tl.where(here, tl.where(last, tiles[None, :], first[None, :] + nth * step[None, :]), 0), 1)
        slot += tl.sum(tl.where(here, tl.where(count[None, :] > 1, first_slot[None, :] + nth, -1), 0), 1)
        before = tl.minimum(tl.maximum(mine[:, None] - owner[None, :], 0), count[None, :])
        pieces_before += tl.sum(before, 1)

        if block == 0:
            is_split = (count > 1).to(tl.int32)
            row = splits_ptr + 3 * (all_splits + tl.cumsum(is_split, 0) - is_split)
            all_splits += tl.sum(is_split, 0)
            tl.store(row, r, mask=count > 1)
            tl.store(row + 1, first_slot, mask=count > 1)
            tl.store(row + 2, first_slot + count, mask=count > 1)

    in_table = mine < num_reqs + parts
    is_piece = mine < all_pieces
    tl.store(pieces_ptr + 4 * mine, tl.where(is_piece, request, -1), mask=in_table)
    tl.store(pieces_ptr + 4 * mine + 1, tl.where(is_piece, low, -1), mask=in_table)
    tl.store(pieces_ptr + 4 * mine + 2, tl.where(is_piece, high, -1), mask=in_table)
    tl.store(pieces_ptr + 4 * mine + 3, tl.where(is_piece, slot, -1), mask=in_table)
    tl.store(pieces_of_part_ptr + mine, pieces_before, mask=mine <= parts)
    if block == 0:
        slack = 3 * tl.minimum(num_reqs, tl.maximum(parts - 1, 1))
        for s in range(3 * all_splits, slack, CHUNK):
            tl.store(splits_ptr + s + on, -1, mask=s + on < slack)


# what changes from batch to batch must not ask for another compilation
@triton.jit(
    do_not_specialize=["live", "num_reqs", "parts"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "pieces_of_part_ptr", "pieces_ptr", "splits_ptr"],
)
def balanced_kernel(
    seq_lens_ptr, live, num_reqs, parts, pieces_of_part_ptr, pieces_ptr, splits_ptr,
    TILE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b works out block b of the plan."""
    plan_block(tl.program_id(0), seq_lens_ptr, live, num_reqs, parts, pieces_of_part_ptr, pieces_ptr, splits_ptr, TILE, PARTS, BLOCK)


@triton.jit(do_not_specialize=["count", "pieces_each", "splits"])
def fixed_kernel(
    seq_lens_ptr, count, pieces_each, splits, pieces_of_part_ptr, pieces_ptr, splits_ptr, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program b writes pieces `b * BLOCK` on: piece i is number `i % splits` of request `i // splits`."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request, nth, exists = i // splits, i % splits, i < count
    tiles = (tl.load(seq_lens_ptr + request, mask=exists, other=0) + TILE - 1) // TILE
    each = (tiles + splits - 1) // splits
    parts = (count + pieces_each - 1) // pieces_each
    tl.store(pieces_of_part_ptr + i, tl.minimum(i * pieces_each, count), mask=i <= parts)
    tl.store(pieces_ptr + 4 * i, request, mask=exists)
    tl.store(pieces_ptr + 4 * i + 1, tl.minimum(nth * each, tiles), mask=exists)
    tl.store(pieces_ptr + 4 * i + 2, tl.minimum((nth + 1) * each, tiles), mask=exists)
    first = exists & (nth == 0)
    if splits > 1:
        tl.store(pieces_ptr + 4 * i + 3, i, mask=exists)
        tl.store(splits_ptr + 3 * request, request, mask=first)
        tl.store(splits_ptr + 3 * request + 1, i, mask=first)
        tl.store(splits_ptr + 3 * request + 2, i + splits, mask=first)
    else:
        tl.store(pieces_ptr + 4 * i + 3, -1, mask=exists)
        tl.store(splits_ptr + i, -1, mask=i < 3)
