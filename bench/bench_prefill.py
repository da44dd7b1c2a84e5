"""Prefill: every case of the grids, and the limits that it has to keep; as bench_decode.py.

pytest bench/bench_prefill.py --benchmark-columns=min,median,rounds [--peers DIR]
"""

from __future__ import annotations

from typing import Any

import pytest
from conftest import DEVICE
from timing import BACKENDS, against_peers, in_turns, needs_gpu, time_case

from dualmla.bench.clock import Ceilings, Clock
from dualmla.bench.peers import Peer
from dualmla.bench.report import geometric_mean
from dualmla.testing.timed import TimedCase, timed_grid

pytestmark = needs_gpu

CASES = [timed for timed in timed_grid("peers", DEVICE) if timed.operation == "prefill"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("timed", CASES, ids=str)
def test_time(benchmark: Any, timed: TimedCase, backend: str, clock: Clock, ceilings: Ceilings) -> None:
    time_case(benchmark, timed, backend, clock, ceilings)


def test_against_peers(peers: list[Peer], clock: Clock, ceilings: Ceilings) -> None:
    by_heads = [against_peers([timed for timed in CASES if timed.case.num_heads == heads], peers, clock, ceilings) for heads in (16, 128)]
    ratios = [ratio for some in by_heads for ratio in some.values()]
    assert min(ratios) >= 0.95
    assert geometric_mean(ratios) >= 1.0


def test_host_cost(clock: Clock, ceilings: Ceilings) -> None:
    """An eager call returns within 40 us."""
    (row,) = in_turns([timed for timed in CASES if timed.title == "8 x 2048"][:1], clock, ceilings)
    assert row.host is not None
    print(f"prefill, {row.title}: {1e6 * row.host.median:.1f} us of host time")
    assert row.host.median <= 40e-6
