"""What describing a batch costs a step: the builder beside list-building, a replayed decode beside an eager one.

    pytest bench/bench_metadata.py --benchmark-columns=min,median,rounds

List-building is what engines did at page size 1: Python lists grown token by token, then copied to the device. Ours writes
the same and the split plan in one launch. Each batch is checked before it is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dualmla
from dualmla import DecodeGraphs, MLAGraphState, MLAMetadata, MLAMetadataBuilder

BATCHES = [(16, 4096), (64, 4096), (128, 8192), (256, 8192)]
batches = pytest.mark.parametrize(("requests", "length"), BATCHES, ids=[f"{requests}x{length}" for requests, length in BATCHES])
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: there are no graphs, and no device to wait for, on a CPU"
)

CONFIG = dualmla.MLAConfig(num_heads=16, softmax_scale=0.1, page_size=1)


class Batch:
    """Decodes of one length over pages of one token, in no order."""

    def __init__(self, requests: int, length: int, device: torch.device) -> None:
        self.device = device
        self.seq_lens_list = [length] * requests
        self.query_lens = [1] * requests
        table = torch.randperm(requests * length, generator=torch.Generator().manual_seed(0)).view(requests, length).int()
        self.table_rows = table.tolist()
        self.table = table.to(device)
        self.seq_lens = torch.tensor(self.seq_lens_list, dtype=torch.int32, device=device)
        self.builder = MLAMetadataBuilder(CONFIG, device, max_num_seqs=requests, max_num_pages_per_seq=length)

    def build(self) -> MLAMetadata:
        return self.builder.build(self.table, self.seq_lens, self.query_lens)

    def build_lists(self) -> dict[str, torch.Tensor]:
        """The same without the plan, token by token."""
        indices: list[int] = []
        slots: list[int] = []
        kv_indptr, qo_indptr, last_page_lens = [0], [0], []
        for row, length, new in zip(self.table_rows, self.seq_lens_list, self.query_lens, strict=True):
            for token in range(length):
                indices.append(row[token])
            for token in range(length - new, length):
                slots.append(row[token])
            kv_indptr.append(kv_indptr[-1] + length)
            qo_indptr.append(qo_indptr[-1] + new)
            last_page_lens.append(1)
        return {
            "paged_kv_indices": torch.tensor(indices, dtype=torch.int32, device=self.device),
            "slot_mapping": torch.tensor(slots, dtype=torch.int64, device=self.device),
            "paged_kv_indptr": torch.tensor(kv_indptr, dtype=torch.int32, device=self.device),
            "qo_indptr": torch.tensor(qo_indptr, dtype=torch.int32, device=self.device),
            "paged_kv_last_page_lens": torch.tensor(last_page_lens, dtype=torch.int32, device=self.device),
        }

    def check(self) -> None:
        meta = self.build()
        for name, expected in self.build_lists().items():
            assert torch.equal(getattr(meta, name)[: len(expected)], expected), name


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def waiting(function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """`function` and its end on the device."""

    def timed() -> None:
        function()
        wait(device)

    return timed


@batches
@pytest.mark.benchmark(group="describe a batch, until the device has it")
def test_list_building(benchmark: Any, device: torch.device, requests: int, length: int) -> None:
    batch = Batch(requests, length, device)
    benchmark.pedantic(waiting(batch.build_lists, device), rounds=5, warmup_rounds=1)


@batches
@pytest.mark.benchmark(group="describe a batch, until the device has it")
def test_builder(benchmark: Any, device: torch.device, requests: int, length: int) -> None:
    batch = Batch(requests, length, device)
    batch.check()
    benchmark.pedantic(waiting(batch.build, device), rounds=200, warmup_rounds=10)


@needs_gpu
@batches
@pytest.mark.benchmark(group="describe a batch, host time")
def test_builder_host_time(benchmark: Any, device: torch.device, requests: int, length: int) -> None:
    """Until the call returns, with the device idle: at most 60 us."""
    batch = Batch(requests, length, device)
    benchmark.pedantic(batch.build, setup=lambda: wait(device), rounds=200, warmup_rounds=10)
    assert benchmark.stats.stats.median <= 60e-6


def device_time(function: Callable[[], Any], device: torch.device, calls: int = 20) -> float:
    """Seconds a call on the device: many calls captured in one graph, so that the host plays no part."""
    function()
    wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    times = []
    for _ in range(30):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        wait(device)
        times.append(start.elapsed_time(end) / calls / 1e3)
    return statistics.median(times)


@needs_gpu
@batches
def test_builder_device_time(device: torch.device, requests: int, length: int, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = device_time(Batch(requests, length, device).build, device)
    with capsys.disabled():
        print(f"\nbuilder, {requests} x {length}: {1e6 * seconds:.1f} us on the device")
    assert seconds <= 20e-6


def median_time(function: Callable[[], Any], rounds: int) -> float:
    function()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@pytest.mark.parametrize(("requests", "length"), BATCHES[2:], ids=["128x8192", "256x8192"])
def test_ratio(
    request: pytest.FixtureRequest, device: torch.device, requests: int, length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """List-building over the builder, alternating in one run: at least 30 on a CPU, 1000 on a GPU.

    On one thread, as lists are: where others keep the machine busy, threads wait for one another.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    batch = Batch(requests, length, device)
    batch.check()
    lists, ours = waiting(batch.build_lists, device), waiting(batch.build, device)
    pairs = [(median_time(lists, 1), median_time(ours, 10)) for _ in range(3)]
    slow, fast = (statistics.median(times) for times in zip(*pairs, strict=True))
    with capsys.disabled():
        print(f"\n{requests} x {length} on {device}: lists {1e3 * slow:.1f} ms, builder {1e3 * fast:.3f} ms, ratio {slow / fast:.0f}")
    assert slow / fast >= (1000 if device.type == "cuda" else 30)


class Step:
    """One decode of a layer of DeepSeek's sizes, described anew each time."""

    def __init__(self, requests: int, length: int, device: torch.device) -> None:
        self.batch = Batch(requests, length, device)
        self.q = torch.randn(requests, 16, 576, device=device).to(torch.bfloat16)
        self.cache = torch.randn(requests * length, 1, 576, device=device).to(torch.bfloat16)
        self.out = torch.empty(requests, 16, 512, dtype=torch.bfloat16, device=device)
        self.state = MLAGraphState(CONFIG, device, max_batch_size=requests, max_num_pages_per_seq=length)
        self.graphs = DecodeGraphs(self.state, [requests], self.decode)

    def decode(self, meta: MLAMetadata) -> torch.Tensor:
        n = meta.num_tokens
        result = dualmla.mla_decode(self.q[:n], self.cache, meta, 0.1, out=self.out[:n], backend="triton")
        assert isinstance(result, torch.Tensor)
        return result

    def eager(self) -> None:
        self.decode(self.batch.build())

    def replayed(self) -> None:
        self.graphs.replay(self.batch.build())


@needs_gpu
@batches
@pytest.mark.parametrize("way", ["eager", "replayed"])
@pytest.mark.benchmark(group="describe and decode, until the device is done")
def test_step(benchmark: Any, device: torch.device, requests: int, length: int, way: str) -> None:
    step = Step(requests, length, device)
    step.eager()
    expected = step.out.clone()
    step.out.fill_(float("nan"))
    step.replayed()
    assert torch.equal(step.out, expected)
    benchmark.pedantic(waiting(getattr(step, way), device), rounds=100, warmup_rounds=10)


@needs_gpu
@batches
@pytest.mark.parametrize("what", ["prepared", "prepared and replayed"])
@pytest.mark.benchmark(group="a captured step, host time")
def test_replay_host_time(benchmark: Any, device: torch.device, requests: int, length: int, what: str) -> None:
    """Until the call returns, with the device idle."""
    step = Step(requests, length, device)
    meta = step.batch.build()
    with step.state.graph_capture(requests):
        captured = step.state.get_graph_input_buffers(step.state.graph_capture_get_metadata_for_batch(requests))
    call = {
        "prepared": lambda: step.state.prepare_graph_input_buffers(captured, meta),
        "prepared and replayed": lambda: step.graphs.replay(meta),
    }[what]
    benchmark.pedantic(call, setup=lambda: wait(device), rounds=200, warmup_rounds=10)


def kernels_of_steps(step: Callable[[], Any], device: torch.device, steps: int = 20) -> list[list[tuple[int, int]]]:
    """Begin and end of what ran on the device for each step, in ns: first what kept it busy until the step was launched whole."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            torch.cuda._sleep(600_000)  # cycles: a third of a millisecond
            step()
            wait(device)
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.device_type() == DeviceType.CUDA]
    found: list[list[tuple[int, int]]] = []
    for event in sorted(events, key=lambda event: event.start_ns()):
        if "spin_kernel" in event.name():
            found.append([])
        if found:
            found[-1].append((event.start_ns(), event.end_ns()))
    return found


def idle_time(ran: list[tuple[int, int]]) -> int:
    """From the end of the first interval to that of the last, what none of the others covers.

    Intervals, and not their sum: a kernel that is made ready while the one before it runs, and waits for it, would count twice.
    """
    reached, idle = ran[0][1], 0
    for begin, end in ran[1:]:
        idle += max(begin - reached, 0)
        reached = max(reached, end)
    return idle


@needs_gpu
@pytest.mark.parametrize(("requests", "length"), [(1, 1024), *BATCHES])
def test_a_replay_costs_little_over_its_kernels(
    device: torch.device, requests: int, length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of a captured decode, from what ran before it to its end, less the time in which its kernels run: at most 6 us.

    The metadata that the graph reads is rewritten and the graph replayed, as at each step. The device is kept busy until the
    host has launched both, so that it waits for nothing else; what the host takes is `test_replay_host_time`'s.
    """
    step = Step(requests, length, device)
    meta = step.batch.build()
    steps = kernels_of_steps(lambda: step.graphs.replay(meta), device)
    idle = statistics.median(idle_time(ran) for ran in steps)
    whole = statistics.median(max(end for _, end in ran) - ran[0][1] for ran in steps)
    with capsys.disabled():
        print(f"\n{requests} x {length}: {len(steps[0]) - 1} kernels, {whole / 1e3:.1f} us, {idle / 1e3:.1f} us of it none runs")
    assert {len(ran) for ran in steps} == {len(steps[0])}
    assert len(steps[0]) >= 3, "what kept the device busy, the metadata, the decode"
    assert all(ran[1][0] >= ran[0][1] for ran in steps), "the step waits for what ran before it"
    assert 0 < idle <= 6000
