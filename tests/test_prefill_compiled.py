"""The kernels of prefill, cache and merge compiled for real GPUs, which no interpreter checks; no GPU is needed.

In a fresh interpreter: compiling where kernels were interpreted fails.
"""

from __future__ import annotations

import json

import pytest
from support import RunPython

COMPILE = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dualmla_kernels import kv_cache, merge_states, prefill
from dualmla_kernels.target import CHIPS

arch = sys.argv[1]
target = GPUTarget("cuda", 90, 32) if arch == "sm_90" else GPUTarget("hip", arch, 64)

def compiled(kernel, types, constants, warps):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if name not in constants and (signature[name][0] == "*" or name.endswith("_stride"))]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attrs)
    return triton.compile(source, target=target, options={"num_warps": warps})

found = {}
for max_seqlen_q, dims in ((64, (128, 64, 128)), (4096, (128, 64, 128)), (4096, (256, 64, 256))):
    c = prefill.prefill_config(max_seqlen_q, sum(dims), torch.bfloat16, CHIPS[arch])
    sizes = dict(H=16, D0=dims[0], D1=dims[1], D1_PADDED=64, V=dims[2], V_PADDED=dims[2], EXACT=False)
    tiles = dict(BM=c.block_m, BN=c.block_n, GROUP=c.group, STAGES=c.stages)
    types = {name + "_ptr": "*bf16" for name in ("q", "k", "v", "out")} | {"lse_ptr": "*fp32", "softmax_scale": "fp32"}
    types |= {"cu_seqlens_q_ptr": "*i32", "cu_seqlens_k_ptr": "*i32"}
    for causal in (True, False):
        kernel = compiled(prefill._prefill, types, sizes | tiles | {"CAUSAL": causal}, c.warps)
        found[f"prefill {max_seqlen_q} {dims} {causal}"] = kernel.metadata.shared, kernel.asm.get("amdgcn", "")
scales = {"k_scale_ptr": "*fp32", "k_scale": "fp32"}
for format_, element in ((0, "*bf16"), (1, "*u8"), (2, "*u8")):
    types = scales | {"kv_c_ptr": "*bf16", "k_pe_ptr": "*bf16", "kv_ptr": element, "slot_mapping_ptr": "*i64"}
    kernel = compiled(kv_cache._concat_and_cache, types, dict(D=512, R=64, R_PADDED=64, PAGE=16, FORMAT=format_, EXACT=False), 4)
    found[f"write {format_}"] = kernel.metadata.shared, kernel.asm.get("amdgcn", "")
fp8 = "*fp8e4b8" if arch == "gfx942" else "*fp8e4nv"
for element in ("*bf16", fp8):
    types = scales | {"kv_ptr": element, "out_ptr": "*bf16", "block_table_ptr": "*i32", "cu_seqlens_ptr": "*i32", "seq_starts_ptr": "*i32"}
    kernel = compiled(kv_cache._gather, types, dict(W0=512, W1=64, W1_PADDED=64, PAGE=1, STEPS=5, BR=4, EXACT=False), 4)
    found[f"gather {element}"] = kernel.metadata.shared, kernel.asm.get("amdgcn", "")
for b in ("*bf16", "*fp32"):
    types = {"out_a_ptr": "*fp32", "out_b_ptr": b, "out_ptr": "*bf16", "lse_a_ptr": "*fp32", "lse_b_ptr": "*fp32", "lse_ptr": "*fp32"}
    kernel = compiled(merge_states._merge, types, dict(H=16, D=128, D_PADDED=128, BR=16, EXACT=False), 4)
    found[f"merge {b}"] = kernel.metadata.shared, kernel.asm.get("amdgcn", "")
spilled = lambda assembly: [int(line.split(":")[1]) for line in assembly.splitlines() if ".vgpr_spill_count:" in line]
print(json.dumps({name: (shared, spilled(assembly)) for name, (shared, assembly) in found.items()}))
"""

LOCAL_MEMORY = {"sm_90": 227 * 1024, "gfx942": 64 * 1024, "gfx950": 160 * 1024}


@pytest.mark.parametrize("arch", LOCAL_MEMORY)
def test_kernels_compile(arch: str, run_python: RunPython) -> None:
    """Within the chip's shared memory; on AMD without spilled registers."""
    found = json.loads(run_python(COMPILE, arch, TRITON_DEFAULT_FP_FUSION="1").splitlines()[-1])
    assert len(found) == 6 + 3 + 2 + 2
    for name, (shared, spilled) in found.items():
        assert shared <= LOCAL_MEMORY[arch], name
        assert spilled == ([] if arch == "sm_90" else [0]), name
