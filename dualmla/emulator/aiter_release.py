"""The release of AITER on PyPI, its own Python included, on a machine without its GPU.

AITER's Python checks arguments, plans splits, calls the first stage, which is assembly behind a C++ launcher, and launches a
second one, which is Triton. With stand-ins for the ROCm tools it asks and for the extensions it would build (`aiter_stand_ins`), it
imports anywhere; here the first stage is the release's own code object, launched as its launcher does, and the second is compiled
by Triton, both for the emulated chip. So is prefill where it is a code object (gfx950). A persistent decode is planned, and its parts
are put together, by HIP code that no CPU runs: that is restated (`aiter_plan`). Importing `aiter` is left to the caller.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dualmla.emulator.aiter_kernels import Work, decode, persistent_decode, varlen_prefill, work_items
from dualmla.emulator.aiter_objects import KERNELS, find_code_objects, load_kernel
from dualmla.emulator.errors import NotEmulatedError
from dualmla.emulator.launch import Device, Mode, Report
from dualmla.emulator.tensors import Tensors, run_triton
from dualmla_kernels.target import CHIPS, Launch


@dataclass
class Run:
    """How AITER's launches are run, and what they did."""

    arch: str
    mode: Mode
    reports: list[Report]


_runs: list[Run] = []


@contextlib.contextmanager
def running(arch: str, mode: Mode, reports: list[Report]) -> Iterator[None]:
    """Within, AITER's launches go to an emulated `arch` in this mode; what they did is added to `reports`."""
    _runs.append(Run(arch, mode, reports))
    try:
        yield
    finally:
        _runs.pop()


def _run() -> Run:
    """The current one; outside of `running`, as in a process that AITER itself starts, one for the chip it was told of."""
    return _runs[-1] if _runs else Run(os.environ["GPU_ARCHS"], Mode(), [])


def first_stage(
    Q: torch.Tensor,
    KV: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_page_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    num_kv_splits_indptr: torch.Tensor | None,
    work_metadata: torch.Tensor | None,
    work_indptr: torch.Tensor | None,
    work_info_set: torch.Tensor | None,
    max_seqlen_q: int,
    softmax_scale: float,
    splitData: torch.Tensor,
    splitLse: torch.Tensor,
    output: torch.Tensor,
    q_scale: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None,
) -> None:
    """`mla_decode_stage1_asm_fwd`: AITER's code object, chosen as its launcher does, which is persistent where there is no split indptr.

    Raises:
        NotEmulatedError: a persistent decode of other than one token of 16 heads in bf16 a request, over a float8 cache.
    """
    if num_kv_splits_indptr is None:
        assert work_metadata is not None, "AITER gives one or the other"
        assert work_indptr is not None
        assert work_info_set is not None
        tables = (work_metadata, work_indptr, work_info_set)
        _persistent_stage(
            Q, KV, qo_indptr, kv_indptr, kv_page_indices, tables, max_seqlen_q, softmax_scale, splitData, splitLse, output, kv_scale
        )
        return
    run, heads = _run(), Q.shape[1]
    if heads == 128:
        name = "mla_dec_stage1_bf16_a16w16_subQ128_mqa128"
    elif max_seqlen_q == 1:
        name = "mla_dec_stage1_bf16_a16w16_subQ16_mqa16"
    else:
        name = "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1"
    device = Device(run.arch)
    got = decode(
        device,
        load_kernel(find_code_objects(), run.arch, name),
        KERNELS[name],
        q=bits(Q),
        kv=bits(KV[:, 0, 0]),
        kv_indptr=kv_indptr.tolist(),
        kv_indices=kv_page_indices.numpy(),
        softmax_scale=softmax_scale,
        query_len=max_seqlen_q,
        splits=splitData.shape[1],
        fields={"qo_indptr": device.put(qo_indptr.numpy()).address},
        mode=run.mode,
    )
    run.reports.append(got.report)
    if splitData.dtype == torch.bfloat16:  # AITER handed its output over as the partial buffer
        splitData[:, 0] = torch.from_numpy(got.out).bfloat16()
    else:
        splitData.copy_(torch.from_numpy(got.partial_out))
    splitLse[..., 0] = torch.from_numpy(got.partial_lse)


def _persistent_stage(
    Q: torch.Tensor,
    KV: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_page_indices: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    max_seqlen_q: int,
    softmax_scale: float,
    splitData: torch.Tensor,
    splitLse: torch.Tensor,
    output: torch.Tensor,
    kv_scale: torch.Tensor | None,
) -> None:
    """A workgroup a compute unit, each with its list of work; `tables`: where the two others are, work_indptr, work_info_set."""
    run = _run()
    asked = (str(Q.dtype), KV.element_size(), Q.shape[1], max_seqlen_q)
    if asked != ("torch.bfloat16", 1, 16, 1):
        raise NotEmulatedError(
            f"queries, bytes of a key, heads, tokens of a persistent decode are {asked}; bfloat16, 1, 16, 1 are emulated"
        )
    pointers, indptr, info = tables
    if pointers.tolist() != [indptr.data_ptr(), info.data_ptr()]:
        raise NotEmulatedError("work_metadata does not hold the addresses of work_indptr and work_info_set")
    starts, ends = kv_indptr.tolist(), indptr.tolist()
    items = info[: ends[-1]].tolist()
    works = [Work(b, first - starts[b], last - starts[b], slot) for b, slot, _, _, first, last, _, _ in items]
    if work_items(works, qo_indptr.tolist(), starts) != items:
        raise NotEmulatedError("work_info_set does not belong to these query and key lengths")
    name = "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps"
    got = persistent_decode(
        Device(run.arch),
        load_kernel(find_code_objects(), run.arch, name),
        KERNELS[name],
        q=bits(Q),
        kv=KV[:, 0, 0].view(torch.uint8).numpy(),
        qo_indptr=qo_indptr.tolist(),
        kv_indptr=starts,
        kv_indices=kv_page_indices.numpy(),
        works=[works[first:last] for first, last in pairwise(ends)],
        softmax_scale=softmax_scale,
        kv_scale=1.0 if kv_scale is None else float(kv_scale),
        mode=run.mode,
    )
    run.reports.append(got.report)
    rows = got.partial_out.shape[0]
    splitData[:rows], splitLse[:rows, ..., 0] = torch.from_numpy(got.partial_out), torch.from_numpy(got.partial_lse)
    assert got.out_written is not None
    written = torch.from_numpy(got.out_written)
    output[written] = torch.from_numpy(got.out).bfloat16()[written]


def varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    min_seqlen_q: int,
    dropout_p: float,
    softmax_scale: float,
    logits_soft_cap: float,
    zero_tensors: bool,
    is_causal: bool,
    *options: Any,
) -> list[torch.Tensor]:
    """`fmha_v3_varlen_fwd` for heads of 192 and 128 numbers: AITER's code object, on dense copies of q, k and v.

    Returns:
        out [T, H, 128], lse fp32 [H, T], and two empty tensors for what dropout would give.
    """
    run, heads = _run(), q.shape[1]
    tiles = -(-max_seqlen_q // 128)
    got = varlen_prefill(
        Device(run.arch),
        load_kernel(find_code_objects(), run.arch, f"fwd_hd192_hd128_bf16{'_causal' if is_causal else ''}_group"),
        q=bits(q),
        k=bits(k),
        v=bits(v),
        cu_seqlens_q=cu_seqlens_q.tolist(),
        cu_seqlens_k=cu_seqlens_k.tolist(),
        softmax_scale=softmax_scale,
        causal=is_causal,
        grid=(heads, cu_seqlens_q.shape[0] - 1, -(-tiles // 2) if is_causal else tiles),
        mode=run.mode,
    )
    run.reports.append(got.report)
    return [torch.from_numpy(got.out).bfloat16(), torch.from_numpy(got.lse), torch.empty(0), torch.empty(2, dtype=torch.int64)]


def bits(x: torch.Tensor) -> NDArray[np.uint16]:
    """The bit patterns of a bf16 tensor, dense."""
    return x.contiguous().view(torch.int16).numpy().view(np.uint16)


class SecondStage:
    """In place of a `@triton.jit` kernel of AITER: `kernel[grid](...)` over tensors of the CPU runs on the emulated chip."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            run = _run()
            tensors = Tensors(Device(run.arch))
            twins = tuple(tensors.place(value) if isinstance(value, torch.Tensor) else value for value in args)
            run.reports.append(run_triton(tensors, Launch(self.kernel, grid, twins, kwargs), run.mode))
            tensors.fetch()

        return launch


def emulate_second_stage(mla: str = "aiter.mla") -> None:
    """Once AITER is imported: the second stage of its module `mla` is compiled and emulated too."""
    module = sys.modules[mla]
    module._fwd_kernel_stage2_asm = SecondStage(module._fwd_kernel_stage2_asm)  # type: ignore[attr-defined]


def on_chip(sizes: Any, arch: str) -> Any:
    """`get_mla_metadata_info_v1`, which asks `torch.cuda` for the compute units there are, as it is where there is an `arch`."""
    properties = types.SimpleNamespace(multi_processor_count=CHIPS[arch].processors)
    cuda = types.SimpleNamespace(current_device=lambda: 0, get_device_properties=lambda device: properties)
    known = sizes.__globals__ | {"torch": types.SimpleNamespace(cuda=cuda, int32=torch.int32, uint64=torch.uint64)}
    return types.FunctionType(sizes.__code__, known, sizes.__name__, sizes.__defaults__, sizes.__closure__)
