"""The order of a prefill's blocks of queries, as the device makes it, beside one that is sorted on the host."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from dualmla_kernels.prefill_order import BM, LEVEL, prepare_order, rows_of_order

LENGTHS = st.one_of(st.sampled_from([0, 1, BM - 1, BM, BM + 1, LEVEL, LEVEL + 1]), st.integers(0, 3000))
REQUESTS = st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=8)


def sorted_blocks(requests: list[tuple[int, int]], *, causal: bool) -> list[list[int]]:
    """(first query, queries, first key, keys the last query sees, keys the first query sees) of each block, in order."""
    blocks = []
    first_query, first_key = 0, 0
    for number, (queries, keys) in enumerate(requests):
        for start in range(0, queries, BM):
            rows = min(BM, queries - start)
            longest = max(keys - queries + start + BM, 0) if causal else keys
            seen = keys - queries + start + 1 if causal else keys
            end = max(seen + rows - 1, 0) if causal else keys
            blocks.append((-(longest // LEVEL), number, -start, [first_query + start, rows, first_key, end, seen]))
        first_query, first_key = first_query + queries, first_key + keys
    return [block for *_, block in sorted(blocks)]


@settings(max_examples=25)
@given(requests=REQUESTS, causal=st.booleans(), padding=st.integers(0, 2))
@example(requests=[(130 + 7 * i, 900 - 9 * i) for i in range(70)], causal=True, padding=0)  # more than are looked at together
@example(requests=[(9000, 9500), (1, 0)], causal=True, padding=1)  # more blocks than are placed together
def test_blocks_go_longest_first_in_levels(requests: list[tuple[int, int]], causal: bool, padding: int, device: torch.device) -> None:
    """Every block once, and the rows of padding written, those of requests not touched."""
    ends = [[0, *accumulate(lengths)] for lengths in zip(*requests, strict=True)]
    cu_seqlens_q, cu_seqlens_k = (torch.tensor(bounds, dtype=torch.int32, device=device) for bounds in ends)
    live = ends[0][-1]
    out = torch.full((live + padding, 2, 16), math.nan, device=device)
    lse = torch.full((2, live + padding), math.nan, device=device)
    order = torch.empty(rows_of_order(len(out), len(requests)), 8, dtype=torch.int32, device=device)
    prepare_order(device, out, lse.stride(), len(requests), 7, causal=causal)(cu_seqlens_q, cu_seqlens_k, order, out, lse)
    expected = sorted_blocks(requests, causal=causal)
    assert order[0, :2].tolist() == [7, len(expected)]
    assert order[1 : 1 + len(expected), :5].tolist() == expected
    assert bool(out[:live].isnan().all())
    assert bool(lse[:, :live].isnan().all())
    assert bool((out[live:] == 0).all())
    assert bool((lse[:, live:] == -math.inf).all())
