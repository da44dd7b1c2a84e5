"""Stand-ins for the compiled extensions that the real AITER builds, as Python modules for its `AITER_JIT_DIR`.

With them, and with fake ROCm tools, the release on PyPI imports and decodes on a CPU: its own Python, argument checks, operator
registration and second stage, with only the assembly replaced.
"""

from __future__ import annotations

from pathlib import Path

from dualmla.emulator import aiter_release
from dualmla.emulator.aiter_release import EMULATED, SIGNATURE

MLA = '''
"""The first stage: what the assembly does, as found by running it in an emulator, in float64.

Splits are interleaved blocks of 64 keys (one token, 16 heads) or 16; empty ones write nothing. With one split all but the kernel
for one token of 16 heads write bf16 into the partial buffer and no LSE. That kernel puts request b into row b, the others follow
qo_indptr.
"""
import torch

def mla_decode_stage1_asm_fwd(
    Q, KV, qo_indptr, kv_indptr, kv_page_indices, kv_last_page_lens, num_kv_splits_indptr, work_metadata, work_indptr, work_info_set,
    max_seqlen_q, softmax_scale, splitData, splitLse, output, q_scale=None, kv_scale=None,
):
    heads, splits = Q.shape[1], splitData.shape[1]
    first_kind = max_seqlen_q == 1 and heads == 16
    block = 64 if first_kind else 16
    splitData.fill_(float("nan")), splitLse.fill_(float("nan"))
    in_bf16 = splitData.view(-1).view(torch.bfloat16)[: Q.shape[0] * heads * 512].view(-1, heads, 512)
    for b in range(qo_indptr.shape[0] - 1):
        ids = kv_page_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        keys = KV[ids, 0, 0].double()
        first, last = (b, b + 1) if first_kind else qo_indptr[b : b + 2].tolist()
        for row in range(first, last):
            limit = len(ids) - (last - row - 1)
            for split in range(splits):
                mine = (torch.arange(len(ids)) // block) % splits == split
                seen = mine & (torch.arange(len(ids)) < limit)
                if not mine.any():
                    continue
                scores = softmax_scale * Q[row].double() @ keys[seen].T
                value = torch.softmax(scores, -1) @ keys[seen, :512] + 0.0 * KV[0, 0, 0, :512].double()
                if splits == 1 and not first_kind:
                    in_bf16[row] = value.bfloat16()
                else:
                    splitData[row, split] = value.float()
                    splitLse[row, split, :, 0] = torch.logsumexp(scores, -1).float()
'''

PERSISTENT = (
    EMULATED
    + '''
import torch
from dualmla.emulator import Device, Mode
from dualmla.emulator.aiter_kernels import Work, persistent_decode
from dualmla.emulator.aiter_objects import KERNELS, find_code_objects, load_kernel
from dualmla.emulator.aiter_release import bits

by_splits = mla_decode_stage1_asm_fwd

def mla_decode_stage1_asm_fwd(
    Q, KV, qo_indptr, kv_indptr, kv_page_indices, kv_last_page_lens, num_kv_splits_indptr, work_metadata, work_indptr, work_info_set,
    max_seqlen_q, softmax_scale, splitData, splitLse, output, q_scale=None, kv_scale=None,
):
    """The launcher: persistent where there is no split indptr, for bf16 queries over a float8 cache, by the plan's work list."""
    if num_kv_splits_indptr is not None:
        return by_splits(
            Q, KV, qo_indptr, kv_indptr, kv_page_indices, kv_last_page_lens, num_kv_splits_indptr, work_metadata, work_indptr,
            work_info_set, max_seqlen_q, softmax_scale, splitData, splitLse, output, q_scale, kv_scale,
        )
    assert (Q.dtype, KV.element_size(), Q.shape[1], max_seqlen_q) == (torch.bfloat16, 1, 16, 1)
    assert work_metadata.tolist() == [work_indptr.data_ptr(), work_info_set.data_ptr()]
    arch = {torch.float8_e4m3fnuz: "gfx942", torch.float8_e4m3fn: "gfx950"}[KV.dtype]
    starts, ends = kv_indptr.tolist(), work_indptr.tolist()
    items = work_info_set[: ends[-1]].tolist()
    works = [Work(b, first - starts[b], last - starts[b], slot) for b, slot, _, _, first, last, _, _ in items]
    # what persistent_decode makes of them is what the plan says
    assert items == [
        [work.batch, work.slot, work.batch, work.batch + 1, starts[work.batch] + work.start, starts[work.batch] + work.stop,
         starts[work.batch + 1] - starts[work.batch] - work.stop, 0]
        for work in works
    ]
    name = "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps"
    got = persistent_decode(
        Device(arch), load_kernel(find_code_objects(), arch, name), KERNELS[name], q=bits(Q), kv=KV[:, 0, 0].view(torch.uint8).numpy(),
        qo_indptr=qo_indptr.tolist(), kv_indptr=starts, kv_indices=kv_page_indices.numpy(),
        works=[works[first:last] for first, last in zip(ends, ends[1:])], softmax_scale=softmax_scale, kv_scale=float(kv_scale),
        mode=Mode(turn=4),
    )
    rows = got.partial_out.shape[0]
    splitData[:rows], splitLse[:rows, ..., 0] = torch.from_numpy(got.partial_out), torch.from_numpy(got.partial_lse)
    written = torch.from_numpy(got.out).isfinite()
    output[written] = torch.from_numpy(got.out).bfloat16()[written]
'''
)

METADATA = '''
"""The planner, which is HIP, restated. Arguments in the order of its C++."""
import aiter_metadata

def get_mla_metadata_v1(
    seqlens_qo_indptr, seqlens_kv_indptr, num_heads_per_head_k, num_heads_k, is_causal, work_metadata_ptrs, work_info_set, work_indptr,
    reduce_indptr, reduce_final_map, reduce_partial_map, kv_granularity=16, max_seqlen_qo=-1, uni_seqlen_qo=-1, fast_mode=True, topk=-1,
    max_split_per_batch=-1,
):
    assert (num_heads_per_head_k, num_heads_k, max_seqlen_qo, uni_seqlen_qo, fast_mode, topk) == (16, 1, 1, 1, True, -1)
    aiter_metadata.write_plan(
        seqlens_qo_indptr, seqlens_kv_indptr, work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr, reduce_final_map,
        reduce_partial_map, kv_granularity,
    )

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
"""What puts the parts of a persistent decode together, which is HIP, restated."""
from aiter_metadata import reduce as mla_reduce_v1

mla_reduce_v1.__doc__ = "mla_reduce_v1(" + ", ".join(
    [f"{name}: torch.Tensor" for name in "partial_output partial_lse reduce_indptr".split()]
    + ["reduce_final_map: Optional[torch.Tensor]", "reduce_partial_map: torch.Tensor", "final_output: torch.Tensor"]
    + ["final_lse: Optional[torch.Tensor] = None"]
) + ") -> None"
'''


def lay_out(folder: Path, first_stage: str) -> dict[str, str]:
    """Write the extensions and ROCm's tools; the environment that makes AITER use them, with its Triton interpreted.

    Arguments:
        first_stage: `MLA`, `EMULATED` or `PERSISTENT`.
    """
    own = {"module_mla_asm": first_stage + SIGNATURE, "module_mla_metadata": METADATA, "module_mla_reduce": REDUCE}
    return aiter_release.lay_out(folder, "gfx942", aiter_release.EXTENSIONS | own) | {"TRITON_INTERPRET": "1"}
