"""What shadow mode costs: a call that is not sampled, one that is, and a decode step at the shares of production.

    pytest -s bench/bench_shadow.py

A step is the attention of 61 layers alone, as in DeepSeek V3, so what it says of a whole step's time is an upper bound. The rate
limit is off: every sample that a share asks for is taken. Steps with and without a shadow alternate in one run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import machine

import dualmla
from dualmla import DecodeGraphs, MLAGraphState, MLAMetadata, MLAMetadataBuilder
from dualmla.backends.base import MLABackend
from dualmla.backends.reference import ReferenceMLABackend
from dualmla.backends.triton import TritonMLABackend
from dualmla.differential.shadow import Shadow

CUDA = torch.cuda.is_available()
LAYERS, REQUESTS, LENGTH = (61, 64, 4096) if CUDA else (3, 4, 64)
CONFIG = dualmla.MLAConfig(num_heads=16, softmax_scale=0.1352, page_size=64)


class Nothing(ReferenceMLABackend):
    """Decodes nothing, so that a call costs what watching it costs."""

    name = "nothing"

    @classmethod
    def mla_decode(cls, *args: Any, **rest: Any) -> None:
        pass


class Step:
    """The decodes of all layers for one batch, eager and captured. `shadow` None: not watched."""

    def __init__(self, device: torch.device, caches: torch.Tensor, backend: type[MLABackend], shadow: Shadow | None) -> None:
        self.backend = shadow.watch(backend) if shadow else backend
        self.caches = caches
        self.q = torch.randn(REQUESTS, 16, 576, device=device).to(torch.bfloat16)
        pages = LENGTH // CONFIG.page_size
        table = torch.randperm(REQUESTS * pages).view(REQUESTS, pages).int().to(device)
        builder = MLAMetadataBuilder(CONFIG, device, max_num_seqs=REQUESTS, max_num_pages_per_seq=pages)
        self.meta = builder.build(table, torch.full((REQUESTS,), LENGTH, dtype=torch.int32, device=device), [1] * REQUESTS)
        state = MLAGraphState(CONFIG, device, max_batch_size=REQUESTS, max_num_pages_per_seq=pages)
        self.graphs = DecodeGraphs(state, [REQUESTS], self.eager)

    def eager(self, meta: MLAMetadata | None = None) -> None:
        meta = meta or self.meta
        for cache in self.caches:
            out = torch.empty(REQUESTS, 16, 512, dtype=torch.bfloat16, device=self.q.device)
            self.backend.mla_decode(
                self.q, cache, meta, CONFIG.softmax_scale, causal=True, out=out, lse=None, k_scale=1.0, num_kv_splits=None
            )

    def replay(self) -> None:
        self.graphs.replay(self.meta)


@pytest.fixture(scope="module")
def caches(device: torch.device) -> torch.Tensor:
    """[LAYERS, pages, page_size, 576]."""
    pages = REQUESTS * LENGTH // CONFIG.page_size
    return torch.empty(LAYERS, pages, CONFIG.page_size, 576, dtype=torch.bfloat16, device=device).normal_()


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def seconds_of(function: Callable[[], None], calls: int) -> float:
    """A call, when `calls` follow each other; the device done at the end."""
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    wait()
    return (time.perf_counter() - start) / calls


def times_of(function: Callable[[], None], between: Callable[[], Any]) -> tuple[float, float]:
    """(seconds on the host, seconds until the device is done) of a call on an idle device, medians; `between` calls is not timed."""
    host, done = [], []
    for _ in range(30):
        wait()
        start = time.perf_counter()
        function()
        host.append(time.perf_counter() - start)
        wait()
        done.append(time.perf_counter() - start)
        between()
    return statistics.median(host[5:]), statistics.median(done[5:])


def test_calls(device: torch.device, caches: torch.Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    """Host time of a call that is not sampled, host and device time that a sample adds to a decode."""
    bare, watched = Step(device, caches[:1], Nothing, None), Step(device, caches[:1], Nothing, Shadow("triton", share=1e-9))
    pairs = [(seconds_of(bare.eager, 2000), seconds_of(watched.eager, 2000)) for _ in range(5)]
    call = statistics.median(more - less for less, more in pairs)
    shadow = Shadow("triton", share=1.0, per_second=1e9)
    alone, sampled = Step(device, caches[:1], TritonMLABackend, None), Step(device, caches[:1], TritonMLABackend, shadow)
    host, done = times_of(alone.eager, lambda: None)
    host_sampled, done_sampled = times_of(sampled.eager, shadow.drain)
    with capsys.disabled():
        print(f"\n{machine()}\nnot sampled: {1e6 * call:.2f} us a call more on the host")
        print(f"a decode: {1e6 * host:.0f} us on the host, {1e6 * done:.0f} us until done")
        print(f"sampled: {1e6 * (host_sampled - host):.0f} us more on the host, {1e6 * (done_sampled - done):.0f} us more until done")
    assert shadow.counts.sampled >= 25
    assert shadow.counts.diverged == 0


@pytest.mark.parametrize("way", ["replay", "eager"])
def test_a_step(device: torch.device, caches: torch.Tensor, way: str, capsys: pytest.CaptureFixture[str]) -> None:
    shadows = {share: Shadow("triton", share=share, per_second=1e9) for share in (0.001, 0.01)}
    steps = {share: Step(device, caches, TritonMLABackend, shadow) for share, shadow in {None: None, **shadows}.items()}
    calls = (1000 if way == "replay" else 100) if CUDA else 1
    for step in steps.values():
        getattr(step, way)()
    times: dict[float | None, list[float]] = {share: [] for share in steps}
    for _ in range(3):
        for share, step in steps.items():
            times[share].append(seconds_of(getattr(step, way), calls))
    bare = statistics.median(times[None])
    with capsys.disabled():
        print(f"\n{way}, {LAYERS} layers x {REQUESTS} requests of {LENGTH} tokens: {1e3 * bare:.3f} ms a step")
        for share, shadow in shadows.items():
            counts = shadow.drain()
            more = statistics.median(watched / alone - 1 for watched, alone in zip(times[share], times[None], strict=True))
            print(f"  share {share}: {more:+.2%}; {counts.calls} calls, {counts.sampled} sampled, {dict(counts.skipped)} skipped")
            assert counts.diverged == 0
