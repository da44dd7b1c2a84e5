"""The split-KV plan: which program attends to which key tiles of which request, so that all programs do equal work.

In closed form, without a walk over the requests. Lay the requests on a line, request r taking `overhead + tiles_r`
units from `start_r` on, and cut the line every `payload` units: program p does what lies between cuts p and p+1. A cut
that would leave a piece of fewer than MIN_PIECE tiles moves to the end of the request nearby, so that request r is cut
at those multiples of `payload` that fall into

    [start_r + overhead + MIN_PIECE,  start_r + overhead + tiles_r - MIN_PIECE]

Where whole requests dealt out in order finish about as early, none is cut and nothing needs to be combined.
Everything is index arithmetic on the device: a replayed graph follows new lengths, and nothing waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

OVERHEAD = 2  # cost of starting a piece (queries loaded, output written), in tiles
MIN_PIECE = 2  # tiles worth a piece of their own
SPLIT_COST = 4  # tiles that the combine of split requests is worth


@dataclass(frozen=True)
class SplitPlan:
    """Work of a decode, all int32 on the device.

    Attributes:
        pieces_of_part: [parts + 1]; program p does pieces `pieces_of_part[p]` to `pieces_of_part[p + 1]`.
        pieces: [pieces, 4]: request, first tile, end tile, slot of the partial result; slot -1: the whole request,
            written directly. Slack past `pieces_of_part[parts]`.
        splits: [most split requests, 3]: request, first slot, end slot; request -1 in the slack.
        slots: most partial results.
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


def balanced_plan(seq_lens: torch.Tensor, *, parts: int, tile: int) -> SplitPlan:
    """Equal shares of all requests for `parts` programs; at most `2 * (parts - 1)` partial results.

    Arguments:
        seq_lens: int32 [num_reqs], keys of each request.
        parts: programs.
        tile: keys a tile.
    """
    num_reqs = seq_lens.shape[0]
    device = seq_lens.device
    tiles = ((seq_lens.long() + tile - 1) // tile).clamp(min=1)  # an empty request is a piece too: its rows are written
    end = torch.cumsum(tiles + OVERHEAD, 0)
    start = end - tiles
    payload = ((end[-1] + parts - 1) // parts).clamp(min=2 * MIN_PIECE)

    # first and last cut, as multiples of the payload, that fall well inside the request
    first_cut = (start + MIN_PIECE + payload - 1) // payload
    last_cut = (start + tiles - MIN_PIECE) // payload
    cuts = (last_cut - first_cut + 1).clamp(min=0)
    owner = (first_cut - 1).clamp(max=parts - 1)

    requests = torch.arange(num_reqs, device=device)
    each = -(-num_reqs // parts)
    dealt = torch.zeros(parts, dtype=torch.long, device=device).scatter_add_(0, requests // each, tiles + OVERHEAD).max()
    whole = dealt <= payload + SPLIT_COST
    cuts = torch.where(whole, 0, cuts)
    owner = torch.where(whole, requests // each, owner)

    # expand requests into pieces: piece i belongs to the last request that begins at or before it
    begin = torch.cumsum(cuts + 1, 0) - (cuts + 1)
    capacity = num_reqs + parts
    index = torch.arange(capacity, device=device)
    request = torch.searchsorted(begin, index, right=True) - 1
    nth = index - begin[request]
    live = nth <= cuts[request]
    cut = (first_cut[request] + nth) * payload - start[request]
    low = torch.where(nth == 0, 0, cut - payload)
    high = torch.where(nth == cuts[request], tiles[request], cut)
    split = cuts > 0
    slot_begin = torch.cumsum(torch.where(split, cuts + 1, 0), 0) - torch.where(split, cuts + 1, 0)
    slot = torch.where(split[request], slot_begin[request] + nth, -1)
    part = torch.where(live, owner[request] + nth, parts)
    pieces_of_part = torch.searchsorted(part, torch.arange(parts + 1, device=device))

    # split requests first, the rest is slack
    most = min(num_reqs, max(parts - 1, 1))
    order = torch.argsort(split.logical_not().to(torch.int8), stable=True)[:most]
    splits = torch.stack([torch.where(split[order], order, -1), slot_begin[order], slot_begin[order] + cuts[order] + 1], 1)
    return SplitPlan(
        pieces_of_part.int(), torch.stack([request, low, high, slot], 1).int(), splits.int(), slots=max(2 * (parts - 1), 1), tile=tile
    )


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
