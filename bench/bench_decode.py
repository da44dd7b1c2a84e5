"""Decode: every case of the grids, and the limits that it has to keep.

    pytest bench/bench_decode.py --benchmark-columns=min,median,rounds [--peers DIR]

Every output is held against float64 before it is timed; device times are in the extra info of `--benchmark-json`. What is compared is
measured in turns in one run. `--peers`: kernels of others, as in `dualmla bench`.
"""

from __future__ import annotations

from typing import Any

import pytest
from conftest import DEVICE
from timing import BACKENDS, against_peers, in_turns, needs_gpu, time_case

from dualmla.bench.clock import Ceilings, Clock
from dualmla.bench.peers import Peer
from dualmla.bench.report import geometric_mean
from dualmla.testing.timed import LARGE_BATCHES, TIMED_GRIDS, TimedCase, decode, timed_grid

pytestmark = needs_gpu

CASES = list(dict.fromkeys(timed for grid in TIMED_GRIDS for timed in timed_grid(grid, DEVICE) if timed.operation == "decode"))
RATIO = 1.3
"""Of the tuned shapes' time per byte or flop, the most that other shapes may take."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("timed", CASES, ids=str)
def test_time(benchmark: Any, timed: TimedCase, backend: str, clock: Clock, ceilings: Ceilings) -> None:
    time_case(benchmark, timed, backend, clock, ceilings)


@pytest.mark.parametrize(("heads", "mean", "least"), [(16, 1.10, 1.0), (128, 0.95, 0.88)])
def test_against_peers(heads: int, mean: float, least: float, peers: list[Peer], clock: Clock, ceilings: Ceilings) -> None:
    cases = [timed for timed in timed_grid("peers", DEVICE) if timed.operation == "decode" and timed.case.num_heads == heads]
    ratios = against_peers(cases, peers, clock, ceilings)
    assert min(ratios.values()) >= least
    assert geometric_mean(ratios.values()) >= mean


@pytest.mark.parametrize("title", LARGE_BATCHES)
def test_a_float8_cache_pays(title: str, clock: Clock, ceilings: Ceilings) -> None:
    """Half the bytes of a cache take at most two thirds of the time."""
    plain, float8 = in_turns([timed for timed in timed_grid("fp8", DEVICE) if timed.title == title], clock, ceilings)
    print(f"{title}: bf16 {1e3 * plain.seconds:.4f} ms, float8 {1e3 * float8.seconds:.4f} ms, ratio {plain.seconds / float8.seconds:.2f}")
    assert plain.seconds / float8.seconds >= 1.5


@pytest.mark.parametrize("heads", [8, 32, 64])
@pytest.mark.parametrize("title", ["128 x 4096", "64 x 1..8192"])
def test_other_heads(title: str, heads: int, clock: Clock, ceilings: Ceilings) -> None:
    """16 heads are tuned for bytes, 128 for flops: others are held to the time a byte of the one and a flop of the other."""
    few, many, other = in_turns([decode(title, num_heads=number) for number in (16, 128, heads)], clock, ceilings)
    tuned = max(few.seconds / few.least_bytes * other.least_bytes, many.seconds / many.flops * other.flops)
    print(f"{title}, {heads} heads: {1e3 * other.seconds:.4f} ms, {other.seconds / tuned:.2f} of the tuned shapes' time per byte or flop")
    assert other.seconds <= RATIO * tuned


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("title", ["128 x 4096", "64 x 1..8192"])
def test_other_page_sizes(title: str, page_size: int, clock: Clock, ceilings: Ceilings) -> None:
    """The bytes are the same as with pages of 64 tokens."""
    tuned, other = in_turns([decode(title), decode(title, page_size=page_size)], clock, ceilings)
    print(f"{title}, page size {page_size}: {1e3 * other.seconds:.4f} ms, {other.seconds / tuned.seconds:.2f} of page size 64")
    assert other.seconds <= RATIO * tuned.seconds


@pytest.mark.parametrize("title", ["1 x 8192", "128 x 4096"])
def test_host_cost(title: str, clock: Clock, ceilings: Ceilings) -> None:
    """An eager call returns within 40 us, its metadata built before."""
    (row,) = in_turns([decode(title)], clock, ceilings)
    assert row.host is not None
    print(f"decode, {title}: {1e6 * row.host.median:.1f} us of host time")
    assert row.host.median <= 40e-6
