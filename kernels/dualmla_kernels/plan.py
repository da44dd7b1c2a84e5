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
others of `step_r` (the last: what is left). The closed forms here serve a CPU, and judge the kernels of plan_kernel.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from dualmla_kernels.launch import cdiv, launch, next_power_of_2
from dualmla_kernels.plan_kernel import BLOCK, MIN_PIECE, OVERHEAD, SPLIT_COST, balanced_kernel, fixed_kernel

MOST_PARTS = 65535
"""Programs that a grid may have along its second axis, where the decode has its parts: no more on CUDA."""


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

    @cached_property
    def counts(self) -> tuple[int, int, int, int]:
        """What launches are sized by: parts, rows of splits, slots, keys a tile."""
        return self.parts, self.splits.shape[0], self.slots, self.tile

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
    if seq_lens.is_cpu:
        for buffer, values in zip((out.pieces_of_part, out.pieces, out.splits), _closed_form(seq_lens, shape), strict=True):
            buffer.copy_(values)
    else:
        launch_plan(seq_lens, shape, out)
    return out


def launch_plan(seq_lens: torch.Tensor, shape: PlanShape, out: SplitPlan) -> None:
    """The kernel's balanced plan, on any device: `balanced_plan` prefers the closed form on a CPU."""
    num_reqs = seq_lens.shape[0]
    launch(
        balanced_kernel, (plan_blocks(num_reqs, shape.parts),), seq_lens.device,
        seq_lens, num_reqs, num_reqs, shape.parts, out.pieces_of_part, out.pieces, out.splits,
        TILE=shape.tile, PARTS=next_power_of_2(shape.parts), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def plan_blocks(num_reqs: int, parts: int) -> int:
    """Programs that work out a balanced plan."""
    return cdiv(num_reqs + parts, BLOCK)


def fixed_plan(seq_lens: torch.Tensor, *, splits: int, tile: int) -> SplitPlan:
    """Every request in `splits` pieces cut by its own length alone, so that a row has the same bits alone and in a batch.

    A program of the decode for each piece, or for several where there are more than `MOST_PARTS`; pieces past a short request's
    last tile are empty.
    """
    num_reqs, device = seq_lens.shape[0], seq_lens.device
    pieces = torch.empty(num_reqs * splits, 4, dtype=torch.int32, device=device)
    parts = cdiv(num_reqs * splits, _pieces_each(num_reqs * splits))
    pieces_of_part = torch.empty(parts + 1, dtype=torch.int32, device=device)
    split_rows = torch.empty(num_reqs if splits > 1 else 1, 3, dtype=torch.int32, device=device)
    plan = SplitPlan(pieces_of_part, pieces, split_rows, slots=num_reqs * splits if splits > 1 else 0, tile=tile)
    if device.type == "cpu":
        _fixed_closed_form(seq_lens, splits, plan)
    else:
        launch_fixed_plan(seq_lens, splits, plan)
    return plan


def launch_fixed_plan(seq_lens: torch.Tensor, splits: int, out: SplitPlan) -> None:
    """The kernel's fixed plan, on any device: `fixed_plan` prefers the closed form on a CPU."""
    count = seq_lens.shape[0] * splits
    launch(
        fixed_kernel, (count // 256 + 1,), seq_lens.device,
        seq_lens, count, _pieces_each(count), splits, out.pieces_of_part, out.pieces, out.splits, TILE=out.tile, BLOCK=256, num_warps=4,
    )  # fmt: skip


def _pieces_each(count: int) -> int:
    """Pieces a part of a fixed plan of `count` pieces."""
    return max(cdiv(count, MOST_PARTS), 1)


def _fixed_closed_form(seq_lens: torch.Tensor, splits: int, out: SplitPlan) -> None:
    device = seq_lens.device
    request = torch.arange(seq_lens.shape[0], device=device)[:, None].expand(-1, splits)
    nth = torch.arange(splits, device=device)
    tiles = ((seq_lens.long() + out.tile - 1) // out.tile)[:, None]
    each = (tiles + splits - 1) // splits
    slot = request * splits + nth if splits > 1 else torch.full_like(request, -1)
    cuts = torch.minimum(nth * each, tiles), torch.minimum((nth + 1) * each, tiles)
    out.pieces.copy_(torch.stack([request, *cuts, slot], -1).view(-1, 4))
    count = out.pieces.shape[0]
    out.pieces_of_part.copy_((torch.arange(out.parts + 1, device=device) * _pieces_each(count)).clamp(max=count))
    out.splits.fill_(-1)
    if splits > 1:
        first = request[:, 0] * splits
        out.splits.copy_(torch.stack([request[:, 0], first, first + splits], 1))


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
