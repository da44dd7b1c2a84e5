"""The release of AITER on PyPI, its own Python included, on a machine without its GPU.

AITER's Python checks arguments, plans splits, calls the first stage, which is assembly behind a C++ launcher, and launches a
second one, which is Triton. With stand-ins for the ROCm tools it asks and for the extensions it would build, it imports
anywhere; here the first stage is the release's own code object, launched as its launcher does, and the second is compiled
by Triton, both for the emulated chip. So is prefill where it is a code object (gfx950). Importing `aiter` is left to the caller.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dualmla.emulator.aiter_kernels import decode, varlen_prefill
from dualmla.emulator.aiter_objects import KERNELS, find_code_objects, load_kernel
from dualmla.emulator.launch import Device, Mode, Report
from dualmla.emulator.tensors import Tensors, run_triton
from dualmla_kernels.target import CHIPS, Launch

ENUM = '''
"""In place of the extension with AITER's enumerations. AITER makes its split indptr on `cuda`, which is not here."""
import enum
import functools
import torch

ActivationType = enum.IntEnum("ActivationType", ["No", "Silu", "Gelu", "Swiglu"], start=0)
QuantType = enum.IntEnum("QuantType", ["No", "per_Tensor", "per_Token", "per_1x32", "per_1x128", "per_128x128"], start=0)
ActivationType.__doc__ = QuantType.__doc__ = "Members:"

arange = torch.arange
@functools.wraps(arange)
def on_cpu(*args, device=None, **kwargs):
    return arange(*args, device="cpu" if device == "cuda" else device, **kwargs)
torch.arange = on_cpu
'''

EMULATED = '''
"""In place of the extension with the launcher of the first stage."""
from dualmla.emulator.aiter_release import first_stage

def mla_decode_stage1_asm_fwd(*args, **kwargs):
    first_stage(*args, **kwargs)
'''

PREFILL = '''
"""In place of the extension with the launcher of the prefill. AITER checks no arguments where the docstring begins as this does."""
from dualmla.emulator.aiter_release import varlen_forward

def fmha_v3_varlen_fwd(*args, **kwargs):
    """Members:"""
    return varlen_forward(*args, **kwargs)
'''

SIGNATURE = """
TENSORS = "Q KV qo_indptr kv_indptr kv_page_indices kv_last_page_lens".split()
OPTIONAL = "num_kv_splits_indptr work_metadata work_indptr work_info_set".split()
mla_decode_stage1_asm_fwd.__doc__ = "mla_decode_stage1_asm_fwd(" + ", ".join(
    [f"{name}: torch.Tensor" for name in TENSORS]
    + [f"{name}: Optional[torch.Tensor]" for name in OPTIONAL]
    + ["max_seqlen_q: int", "softmax_scale: float", "splitData: torch.Tensor", "splitLse: torch.Tensor", "output: torch.Tensor"]
    + ["q_scale: Optional[torch.Tensor] = None", "kv_scale: Optional[torch.Tensor] = None"]
) + ") -> None"
"""
"""What AITER reads from an extension before it registers the operator."""


EXTENSIONS = {"module_aiter_enum": ENUM, "module_mla_asm": EMULATED + SIGNATURE, "module_fmha_v3_varlen_fwd": PREFILL}
"""Module -> source of what stands in its place."""


def lay_out(folder: Path, arch: str, extensions: Mapping[str, str] = EXTENSIONS) -> dict[str, str]:
    """Write the tools and the extensions into `folder`.

    Arguments:
        arch: of the GPU that AITER is to see.
        extensions: source by module.

    Returns:
        The environment variables that make AITER, imported afterwards, use them.
    """
    tools, modules = folder / "bin", folder / "jit"
    for directory in (tools, modules):
        directory.mkdir(parents=True)
    for name, says in (("hipconfig", "6.4.43482-0f2d60242"), ("rocminfo", f"  Name:                    {arch}")):
        (tools / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tools / name).chmod(0o755)
    for name, source in extensions.items():
        (modules / f"{name}.py").write_text(source)
    path = os.pathsep.join([str(tools), os.environ.get("PATH", os.defpath)])
    return {"AITER_JIT_DIR": str(modules), "GPU_ARCHS": arch, "CU_NUM": str(CHIPS[arch].processors), "PATH": path}


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
    num_kv_splits_indptr: torch.Tensor,
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
    """`mla_decode_stage1_asm_fwd` on bf16 tensors, without persistent mode: AITER's code object, chosen as its launcher does."""
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
