"""warmup runs every kernel of a step; workspace_bytes bounds what a step takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import dualmla
from dualmla.testing.layer import LayerCase, LayerInputs, make_layer_inputs
from dualmla_kernels.launch import Prepared

SMALL: dict[str, Any] = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "page_size": 16}


@contextmanager
def recorded_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The names of the kernels launched within."""
    names: set[str] = set()

    def record(launch: Callable[..., None]) -> Callable[..., None]:
        def recording(kernel: Any, *args: Any, **kwargs: Any) -> None:
            names.add(kernel.fn.__qualname__)
            launch(kernel, *args, **kwargs)

        return recording

    call = Prepared.__call__

    def recording_call(prepared: Prepared, *inputs: Any) -> None:
        names.add(prepared.kernel.fn.__qualname__)
        call(prepared, *inputs)

    with monkeypatch.context() as patch:
        patch.setattr(Prepared, "__call__", recording_call)
        for name, module in list(sys.modules.items()):
            if name.startswith("dualmla_kernels.") and name != "dualmla_kernels.launch" and hasattr(module, "launch"):
                patch.setattr(module, "launch", record(module.launch))
        yield names


def run(case: LayerCase, device: torch.device) -> LayerInputs:
    given = make_layer_inputs(case, device)
    impl = dualmla.select_backend(case.config, device, "triton").get_impl_cls()(case.config, given.w_uk, given.w_uv)
    impl.forward(given.q, given.kv_c, given.k_pe, given.kv_cache, given.meta, output=given.output)
    return given


def test_warmup_runs_every_kernel_that_a_step_runs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = LayerCase(seq_lens=(200, 1, 60), query_lens=(1, 1, 40), **SMALL)
    run(case, device)  # so that every kernel's module is there to be watched
    with recorded_kernels(monkeypatch) as by_step:
        run(case, device)
    with recorded_kernels(monkeypatch) as by_warmup:
        dualmla.warmup(case.config, device, [1, 2], backend="triton")
    assert {"_decode", "_concat_and_cache"} <= by_step
    assert by_step <= by_warmup


@pytest.mark.parametrize("max_query_len", [1, 3])
def test_warmup_of_any_backend(device: torch.device, max_query_len: int) -> None:
    cfg = LayerCase(seq_lens=(), query_lens=(), **SMALL).config
    for backend in ("reference", "triton", None):
        dualmla.warmup(cfg, device, [2], max_query_len=max_query_len, backend=backend)


def test_warmup_refuses() -> None:
    cfg = LayerCase(seq_lens=(), query_lens=(), **SMALL).config
    with pytest.raises(ValueError, match=r"batch_sizes\[1\] must be an int of at least 1, got 0"):
        dualmla.warmup(cfg, "cpu", [4, 0])
    with pytest.raises(ValueError, match="max_query_len must be an int of at least 1, got 0"):
        dualmla.warmup(cfg, "cpu", [4], max_query_len=0)
    with pytest.raises(ValueError, match="max_num_tokens must be an int of at least 1, got 0"):
        dualmla.workspace_bytes(cfg, "cpu", max_num_tokens=0)


def peak_of(step: Callable[[], object], device: torch.device) -> int:
    """Bytes that the allocator of `device` held at most during `step`, beyond what it held before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


STEPS = {
    "decodes": (LayerCase(num_heads=16, seq_lens=(40,) * 40, query_lens=(1,) * 40, **SMALL), 64),
    "prefill": (LayerCase(num_heads=16, seq_lens=(100,), query_lens=(100,), **SMALL), 64),
    "context at once": (LayerCase(num_heads=16, seq_lens=(300,), query_lens=(20,), **SMALL), 300),
    "context in pieces": (LayerCase(num_heads=16, seq_lens=(300,), query_lens=(20,), **SMALL), 100),
    "mixed": (LayerCase(num_heads=16, seq_lens=(90, 90, 200), query_lens=(1, 1, 30), **SMALL), 64),
}


@pytest.mark.parametrize(("case", "context_workspace_tokens"), STEPS.values(), ids=STEPS.keys())
def test_a_step_takes_no_more_than_its_workspace(device: torch.device, case: LayerCase, context_workspace_tokens: int) -> None:
    """Counted by the allocator, interpreted or not."""
    cfg, given = case.config, make_layer_inputs(case, device)
    impl = dualmla.select_backend(cfg, device, "triton").get_impl_cls()(
        cfg, given.w_uk, given.w_uv, context_workspace_tokens=context_workspace_tokens
    )

    def step() -> torch.Tensor:
        return impl.forward(given.q, given.kv_c, given.k_pe, given.kv_cache, given.meta, output=given.output)

    step()
    bound = dualmla.workspace_bytes(
        cfg, device, max_num_tokens=sum(case.query_lens), max_num_seqs=len(case.seq_lens), context_workspace_tokens=context_workspace_tokens
    )
    peak = peak_of(step, device)
    assert peak <= bound
    assert peak > 0


def test_workspace_follows_what_it_is_told(device: torch.device) -> None:
    cfg = dualmla.MLAConfig(num_heads=16, softmax_scale=0.1)
    few, many = (dualmla.workspace_bytes(cfg, device, max_num_tokens=tokens) for tokens in (16, 65536))
    assert many > few
    narrow = dualmla.workspace_bytes(cfg, device, max_num_tokens=16, context_workspace_tokens=64)
    assert narrow < few
