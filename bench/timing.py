"""What the suites of decode and prefill share: a case of the table of `dualmla.testing.timed`, checked, timed and reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import DEVICE

import dualmla
from dualmla.bench.clock import Ceilings, Clock
from dualmla.bench.inputs import draw
from dualmla.bench.peers import Peer
from dualmla.bench.report import geometric_mean
from dualmla.bench.results import Row
from dualmla.bench.run import measure
from dualmla.bench.subjects import Registered
from dualmla.testing import YARN_SCALE
from dualmla.testing.timed import TimedCase

needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: on a CPU our kernels are interpreted, and a time says nothing")

REPORTS = dualmla.explain(dualmla.MLAConfig(num_heads=16, softmax_scale=YARN_SCALE), DEVICE)
BACKENDS = [report.name for report in REPORTS if report.usable and report.name != "reference"]
"""What is worth timing here: the reference is truth, not speed."""


def time_case(benchmark: Any, timed: TimedCase, backend: str, clock: Clock, ceilings: Ceilings) -> Row:
    """A checked case. What is benchmarked is a call until the device is done; its time on the device is in the extra info."""
    subject = Registered(backend, clock.device)
    (row,) = measure([(timed, subject)], clock, ceilings)
    if row.status == "refused":
        pytest.skip(row.why)
    assert row.status == "timed", row.why
    call = subject.prepare(draw(timed.case, clock.device)).call

    def call_and_wait() -> None:
        call()
        torch.cuda.synchronize(clock.device)

    def clear() -> None:
        clock.flush()
        torch.cuda.synchronize(clock.device)

    benchmark.group = timed.group
    benchmark.extra_info |= {
        "eager_us": 1e6 * row.eager.median if row.eager else None,
        "graph_us": 1e6 * row.graph.median if row.graph else None,
        "host_us": 1e6 * row.host.median if row.host else None,
        "gb_s": row.bandwidth / 1e9,
        "tflop_s": row.rate / 1e12,
        "of_ceiling": row.of_roof,
        "error_used": row.budget_used,
    }
    benchmark.pedantic(call_and_wait, setup=clear, rounds=30, warmup_rounds=3)
    return row


def in_turns(cases: Sequence[TimedCase], clock: Clock, ceilings: Ceilings, backend: str = "triton") -> list[Row]:
    """Cases of one backend beside one another, each checked."""
    rows = measure([(timed, Registered(backend, clock.device)) for timed in cases], clock, ceilings)
    for row in rows:
        assert row.status == "timed", f"{row.group}, {row.title}: {row.why}"
    return rows


def against_peers(cases: Sequence[TimedCase], peers: Sequence[Peer], clock: Clock, ceilings: Ceilings) -> dict[str, float]:
    """By case, the time of the fastest peer over ours: above 1, ours is faster. Printed as a table's row each."""
    ratios = {}
    for timed in cases:
        ours, *others = measure([(timed, Registered("triton", clock.device)), *((timed, peer) for peer in peers)], clock, ceilings)
        assert ours.status == "timed", ours.why
        right = [row for row in others if row.status == "timed"]
        assert right, [f"{row.backend} {row.status}: {row.why}" for row in others]
        best = min(right, key=lambda row: row.seconds)
        ratios[timed.title] = best.seconds / ours.seconds
        times = f"{1e3 * ours.seconds:.4f} ms, {best.backend} {1e3 * best.seconds:.4f} ms"
        print(f"{timed.group}, {timed.title}: {times}, {ratios[timed.title]:.3f}")
    print(f"{cases[0].group}: geometric mean {geometric_mean(ratios.values()):.3f}")
    return ratios
