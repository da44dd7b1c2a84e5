"""What AITER's Python meets instead of ROCm: tools that name the chip, and extensions in place of those it would build.

Each extension is a module in AITER's `AITER_JIT_DIR` that hands its calls to `aiter_release` or `aiter_plan`. AITER checks the
arguments of an extension's function by its docstring, written as pybind11 writes them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dualmla_kernels.target import CHIPS

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

METADATA = '''
"""In place of the extension with the planner of persistent decodes."""
from dualmla.emulator import aiter_plan

def get_mla_metadata_v1(*args, **kwargs):
    aiter_plan.get_mla_metadata_v1(*args, **kwargs)

get_mla_metadata_v1.__doc__ = "get_mla_metadata_v1(" + ", ".join(
    [f"{name}: torch.Tensor" for name in ("seqlens_qo_indptr", "seqlens_kv_indptr")]
    + ["num_heads_per_head_k: int", "num_heads_k: int", "is_causal: bool"]
    + [f"{name}: torch.Tensor" for name in "work_metadata_ptrs work_info_set work_indptr".split()]
    + [f"{name}: torch.Tensor" for name in "reduce_indptr reduce_final_map reduce_partial_map".split()]
    + ["kv_granularity: int = 16", "max_seqlen_qo: int = -1", "uni_seqlen_qo: int = -1", "fast_mode: bool = True", "topk: int = -1"]
    + ["max_split_per_batch: int = -1"]
) + ") -> None"
'''

REDUCE = '''
"""In place of the extension that puts the parts of a persistent decode together."""
from dualmla.emulator import aiter_plan

def mla_reduce_v1(*args, **kwargs):
    aiter_plan.reduce(*args, **kwargs)

mla_reduce_v1.__doc__ = "mla_reduce_v1(" + ", ".join(
    [f"{name}: torch.Tensor" for name in "partial_output partial_lse reduce_indptr".split()]
    + ["reduce_final_map: Optional[torch.Tensor]", "reduce_partial_map: torch.Tensor", "final_output: torch.Tensor"]
    + ["final_lse: Optional[torch.Tensor] = None"]
) + ") -> None"
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


EXTENSIONS = {
    "module_aiter_enum": ENUM,
    "module_mla_asm": EMULATED + SIGNATURE,
    "module_mla_metadata": METADATA,
    "module_mla_reduce": REDUCE,
    "module_fmha_v3_varlen_fwd": PREFILL,
}
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
