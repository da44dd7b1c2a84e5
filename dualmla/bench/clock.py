"""Time on a device: repetitions of several calls take turns, so that a clock that drifts or a neighbour's burst meets all alike."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Call = Callable[[], Any]
Key = TypeVar("Key")

WARM_UP, LEAST_ROUNDS = 3, 5
BURST = 8
"""Calls whose host time is taken together; far fewer than a device's queue holds."""


@dataclass(frozen=True)
class Timing:
    """Repetitions of a call, in seconds.

    Attributes:
        median, low, high: the middle, and the first and third quartile.
        rounds: how many.
    """

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high, len(samples))

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, as a share of the median."""
        return (self.high - self.low) / 2 / self.median


@dataclass(frozen=True)
class Captured:
    """A graph of a call: what replays it, and what the call returned, into whose memory each replay writes."""

    replay: Call
    returned: Any


class Clock:
    """Times calls on one device.

    Arguments:
        device: where they run.
        rounds: repetitions of each call.
        seconds: from then on no new round is begun, but for the first few.
    """

    def __init__(self, device: torch.device, *, rounds: int = 100, seconds: float = 2.0) -> None:
        self.device, self.rounds, self.seconds = device, rounds, seconds
        self._flush = None
        if device.type == "cuda":
            cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
            self._flush = torch.empty(max(4 * cache, 1 << 28), dtype=torch.int8, device=device)

    def flush(self) -> None:
        """Nothing that a call reads is in the L2 cache afterwards; nothing on a CPU."""
        if self._flush is not None:
            self._flush.zero_()

    def times(self, calls: Mapping[Key, Call]) -> dict[Key, Timing]:
        """Of each call, from its begin to its end on the device, the L2 cache full of something else before each."""
        samples: dict[Key, list[float]] = {key: [] for key in calls}
        order = list(calls)
        with _no_collection():
            start = time.perf_counter()
            for turn in range(-WARM_UP, self.rounds):
                if turn >= LEAST_ROUNDS and time.perf_counter() - start > self.seconds:
                    break
                first = turn % max(len(order), 1)
                taken = self._round([(key, calls[key]) for key in order[first:] + order[:first]])
                if turn >= 0:
                    for key, seconds in taken:
                        samples[key].append(seconds)
        return {key: Timing.of(values) for key, values in samples.items()}

    def host_time(self, call: Call) -> Timing | None:
        """Until the call returns, of some after one another as layers call them, the device idle before the first; None on a CPU, where
        that is the whole call.
        """
        if self.device.type != "cuda":
            return None
        samples = []
        with _no_collection():
            for turn in range(-WARM_UP, self.rounds):
                torch.cuda.synchronize(self.device)
                start = time.perf_counter()
                for _ in range(BURST):
                    call()
                if turn >= 0:
                    samples.append((time.perf_counter() - start) / BURST)
        torch.cuda.synchronize(self.device)
        return Timing.of(samples)

    def captured(self, call: Call) -> Captured | None:
        """A graph of the call; None on a CPU.

        Raises:
            RuntimeError: the call can't be captured.
        """
        if self.device.type != "cuda":
            return None
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            returned = call()
        return Captured(graph.replay, returned)

    def _round(self, calls: list[tuple[Key, Call]]) -> list[tuple[Key, float]]:
        """Each call once."""
        if self._flush is None:
            taken = []
            for key, call in calls:
                start = time.perf_counter()
                call()
                taken.append((key, time.perf_counter() - start))
            return taken
        marks = []
        for key, call in calls:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self.flush()
            begin.record()
            call()
            end.record()
            marks.append((key, begin, end))
        torch.cuda.synchronize(self.device)
        return [(key, begin.elapsed_time(end) / 1e3) for key, begin, end in marks]


@dataclass(frozen=True)
class Ceilings:
    """What the machine itself does, measured in the run that they are held against.

    Attributes:
        bandwidth: bytes/s, read and written, of a copy much larger than any cache.
        rates: flop/s of a square matrix product, by dtype's name.
    """

    bandwidth: float
    rates: dict[str, float]

    def roof(self, least_bytes: int, flops: int, dtype: str) -> float:
        """Seconds that the work takes at the ceilings: the slower of moving and computing."""
        return max(least_bytes / self.bandwidth, flops / self.rates[dtype])


def measure_ceilings(clock: Clock, dtypes: set[torch.dtype]) -> Ceilings:
    """The best of a few sizes and layouts: large products draw so much power that a GPU slows down."""
    device = clock.device
    on_gpu = device.type == "cuda"
    count = (1 << 31 if on_gpu else 1 << 27) // 4
    copy = _copy_time(clock, count)
    rates = {}
    for dtype in sorted(dtypes, key=str):
        best = 0.0
        for size in (4096, 8192) if on_gpu else (512, 1024):
            a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            products: dict[str, Call] = {"a b": lambda a=a, b=b: a @ b, "a bT": lambda a=a, b=b: a @ b.T}  # type: ignore[misc]
            best = max(best, *(2 * size**3 / taken.median for taken in clock.times(products).values()))
        rates[str(dtype).removeprefix("torch.")] = best
    return Ceilings(2 * 4 * count / copy.median, rates)


def _copy_time(clock: Clock, count: int) -> Timing:
    """Of `count` numbers of four bytes, which are gone afterwards."""
    source = torch.ones(count, dtype=torch.int32, device=clock.device)
    target = torch.empty_like(source)
    return clock.times({"copy": lambda: target.copy_(source)})["copy"]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Within: no pause for garbage."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
