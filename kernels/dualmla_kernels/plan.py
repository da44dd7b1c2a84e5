"""The split-KV plan: which program attends to which key tiles of which request, so that all programs do equal work.

In closed form, without a walk over the requests: each program of a launch can work out its own share of the plan, and a
replayed graph follows new lengths. Three ways to share requests of `tiles_r` tiles out to P programs are weighed by the
tiles that the busiest program would do, OVERHEAD for each piece that it starts counted in:

    whole  `ceil(n / P)` requests after one another to each program: nothing to combine. Taken when it is no more than
           SPLIT_COST behind the better of the others.
    even   n <= P: every request into `1 + floor(tiles_r (P - n) / sum tiles)` equal pieces, a program each: at most P.
    line   requests laid on a line, `OVERHEAD + tiles_r` units each, and cut every `payload` units: program p does what
           lies between cuts p and p + 1. A cut that would leave a piece of fewer than MIN_PIECE tiles moves to the end
           of the request nearby: request r is cut at the multiples of `payload` that fall into
           [start_r + MIN_PIECE, start_r + tiles_r - MIN_PIECE], where start_r is the unit of its first tile.

In each of them request r has `count_r` pieces for the programs from `owner_r` on, the first of `first_r` tiles and the
others of `step_r` (the last: what is left). `_closed_form` is that in torch: it serves a CPU and judges the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dualmla_kernels.launch import launch

OVERHEAD = tl.constexpr(2)  # cost of starting a piece (queries loaded, output written), in tiles
MIN_PIECE = tl.constexpr(2)  # tiles worth a piece of their own
SPLIT_COST = tl.constexpr(4)  # tiles that the combine of split requests is worth

BLOCK = 16
"""Pieces, and programs of the decode, that one program of the plan works out."""


@dataclass(frozen=True)
class PlanShape:
    """What a balanced plan is made for, known on the host and constant under a captured graph.

    Attributes:
        parts: programs that share the work.
        tile: keys a tile.
    """

    parts: int
    tile: int


@dataclass(frozen=True)
class SplitPlan:
    """Work of a decode, all int32 on the device.

    Attributes:
        pieces_of_part: [parts + 1]; program p does pieces `pieces_of_part[p]` to `pieces_of_part[p + 1]`.
        pieces: [pieces, 4]: request, first tile, end tile, slot of the partial result; slot -1: the whole request,
            written directly. -1 past `pieces_of_part[parts]`.
        splits: [most split requests, 3]: request, first slot, end slot; -1 in the slack.
        slots: most partial results: `2 (parts - 1)` for a balanced plan whatever the lengths, which bounds the scratch.
        tile: keys a tile.
    """

    pieces_of_part: torch.Tensor
    pieces: torch.Tensor
    splits: torch.Tensor
    slots: int
    tile: int

    @property
    def parts(self) -> int:
        return self.pieces_of_part.shape[0] - 1

    def of(self, num_reqs: int) -> SplitPlan:
        """The part of this plan's buffers that a balanced plan for `num_reqs` requests takes."""
        return SplitPlan(
            self.pieces_of_part,
            self.pieces[: num_reqs + self.parts],
            self.splits[: _most_splits(num_reqs, self.parts)],
            self.slots,
            self.tile,
        )


def allocate_plan(num_reqs: int, shape: PlanShape, device: torch.device) -> SplitPlan:
    """Buffers of a balanced plan for up to `num_reqs` requests; unwritten."""
    pieces_of_part = torch.empty(shape.parts + 1, dtype=torch.int32, device=device)
    pieces = torch.empty(num_reqs + shape.parts, 4, dtype=torch.int32, device=device)
    splits = torch.empty(_most_splits(num_reqs, shape.parts), 3, dtype=torch.int32, device=device)
    return SplitPlan(pieces_of_part, pieces, splits, slots=2 * (shape.parts - 1), tile=shape.tile)


def balanced_plan(seq_lens: torch.Tensor, shape: PlanShape, out: SplitPlan | None = None) -> SplitPlan:
    """Equal shares of all requests, int32 `seq_lens` [num_reqs] keys each; written into `out` where given."""
    num_reqs = seq_lens.shape[0]
    if out is None:
        out = allocate_plan(num_reqs, shape, seq_lens.device)
    if seq_lens.device.type == "cpu":
        for buffer, values in zip((out.pieces_of_part, out.pieces, out.splits), _closed_form(seq_lens, shape), strict=True):
            buffer.copy_(values)
    else:
        launch_plan(seq_lens, shape, out)
    return out


def launch_plan(seq_lens: torch.Tensor, shape: PlanShape, out: SplitPlan) -> None:
    """The kernel's balanced plan, on any device: `balanced_plan` prefers the closed form on a CPU."""
    num_reqs = seq_lens.shape[0]
    launch(
        _plan, (plan_blocks(num_reqs, shape.parts),), seq_lens.device,
        seq_lens, num_reqs, num_reqs, shape.parts, out.pieces_of_part, out.pieces, out.splits,
        TILE=shape.tile, PARTS=parts_padded(shape.parts), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def plan_blocks(num_reqs: int, parts: int) -> int:
    """Programs that work out a balanced plan."""
    return -(-(num_reqs + parts) // BLOCK)


def parts_padded(parts: int) -> int:
    """`parts` rounded up to a power of two."""
    return 1 << (parts - 1).bit_length()


def fixed_plan(seq_lens: torch.Tensor, *, splits: int, tile: int) -> SplitPlan:
    """Every request in `splits` pieces cut by its own length alone, so that a row has the same bits alone and in a batch."""
    num_reqs = seq_lens.shape[0]
    device = seq_lens.device
    tiles = ((seq_lens.long() + tile - 1) // tile)[:, None]
    each = (tiles + splits - 1) // splits
    nth = torch.arange(splits, device=device)[None, :]
    request = torch.arange(num_reqs, device=device)[:, None].expand(-1, splits)
    low, high = torch.minimum(nth * each, tiles), torch.minimum((nth + 1) * each, tiles)
    slot = request * splits + nth if splits > 1 else torch.full_like(request, -1)
    pieces = torch.stack([request, low, high, slot], -1).view(-1, 4)
    first = torch.arange(num_reqs, device=device) * splits
    split_rows = torch.stack([torch.arange(num_reqs, device=device), first, first + splits], 1)
    if splits == 1:
        split_rows = torch.full((1, 3), -1, device=device)
    pieces_of_part = torch.arange(num_reqs * splits + 1, device=device)
    return SplitPlan(pieces_of_part.int(), pieces.int(), split_rows.int(), slots=num_reqs * splits, tile=tile)


def _most_splits(num_reqs: int, parts: int) -> int:
    return min(num_reqs, max(parts - 1, 1))


def _closed_form(seq_lens: torch.Tensor, shape: PlanShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`pieces_of_part`, `pieces` and `splits` of a balanced plan."""
    overhead, min_piece, split_cost = OVERHEAD.value, MIN_PIECE.value, SPLIT_COST.value
    num_reqs, parts, device = seq_lens.shape[0], shape.parts, seq_lens.device
    tiles = ((seq_lens.long() + shape.tile - 1) // shape.tile).clamp(min=1)  # an empty request is a piece too: its rows are written
    total = tiles.sum()
    payload = ((total + overhead * num_reqs + parts - 1) // parts).clamp(min=2 * min_piece)

    start = torch.cumsum(tiles + overhead, 0) - tiles
    first_cut = (start + min_piece + payload - 1) // payload
    count = ((start + tiles - min_piece) // payload - first_cut + 1).clamp(min=0) + 1
    owner = (first_cut - 1).clamp(max=parts - 1)
    first, step = first_cut * payload - start, payload.expand(num_reqs)

    pieces = (tiles * max(parts - num_reqs, 0) // total + 1).minimum((tiles // min_piece).clamp(min=1))
    size = (tiles + pieces - 1) // pieces
    even = (size.max() <= payload) & (num_reqs <= parts)
    even_count = (tiles + size - 1) // size
    count = torch.where(even, even_count, count)
    owner = torch.where(even, torch.cumsum(even_count, 0) - even_count, owner)
    first, step = torch.where(even, size, first), torch.where(even, size, step)

    each = -(-num_reqs // parts)
    dealt = torch.arange(num_reqs, device=device) // each
    load = torch.zeros(parts, dtype=torch.long, device=device).scatter_add_(0, dealt, tiles + overhead).max()
    whole = load <= torch.where(even, size.max(), payload) + overhead + split_cost
    count, owner = torch.where(whole, 1, count), torch.where(whole, dealt, owner)

    # expand requests into pieces: piece i belongs to the last request that begins at or before it
    begin = torch.cumsum(count, 0) - count
    piece = torch.arange(num_reqs + parts, device=device)
    request = torch.searchsorted(begin, piece, right=True) - 1
    nth = piece - begin[request]
    live = nth < count[request]
    low = torch.where(nth == 0, 0, first[request] + (nth - 1) * step[request])
    high = torch.where(nth == count[request] - 1, tiles[request], first[request] + nth * step[request])
    slots = torch.where(count > 1, count, 0)
    first_slot = torch.cumsum(slots, 0) - slots
    slot = torch.where(count[request] > 1, first_slot[request] + nth, -1)
    table = torch.where(live[:, None], torch.stack([request, low, high, slot], 1), -1)
    part = torch.where(live, owner[request] + nth, parts)
    pieces_of_part = torch.searchsorted(part, torch.arange(parts + 1, device=device))

    # split requests first, the rest is slack
    order = torch.argsort((count == 1).to(torch.int8), stable=True)[: _most_splits(num_reqs, parts)]
    splits = torch.stack([order, first_slot[order], first_slot[order] + count[order]], 1)
    return pieces_of_part, table, torch.where(count[order, None] > 1, splits, -1)


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

    `live` of the `num_reqs` requests have a length at `seq_lens_ptr`. Requests are walked CHUNK at a time with the running
    sums carried over. PARTS: `parts`, rounded up to a power of two.
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
    best = payload
    if even:
        best = largest
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
        if even:
            first = _even_size(tiles, spare, total)
            step = first
            count = (tiles + first - 1) // tl.maximum(first, 1)
        if whole:
            count = tl.full([CHUNK], 1, tl.int32)
        count = tl.where(exists, count, 0)
        begin = all_pieces + tl.cumsum(count, 0) - count
        all_pieces += tl.sum(count, 0)
        owner = tl.minimum(first_cut - 1, parts - 1)
        if even:
            owner = begin
        if whole:
            owner = r // each
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
def _plan(
    seq_lens_ptr, live, num_reqs, parts, pieces_of_part_ptr, pieces_ptr, splits_ptr,
    TILE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b works out block b of the plan."""
    plan_block(tl.program_id(0), seq_lens_ptr, live, num_reqs, parts, pieces_of_part_ptr, pieces_ptr, splits_ptr, TILE, PARTS, BLOCK)
