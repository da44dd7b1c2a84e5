"""Stand-ins for the compiled extensions that the real AITER builds, as Python modules for its `AITER_JIT_DIR`.

With them, and with fake ROCm tools, the release on PyPI imports and decodes on a CPU: its own Python, argument checks, operator
registration and second stage, with only what is compiled replaced: the assembly, and the HIP that plans and reduces.
"""

from __future__ import annotations

from pathlib import Path

from dualmla.emulator import aiter_stand_ins

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


def lay_out(folder: Path, first_stage: str) -> dict[str, str]:
    """Write the extensions and ROCm's tools; the environment that makes AITER use them, with its Triton interpreted.

    Arguments:
        first_stage: `MLA` or `aiter_stand_ins.EMULATED`.
    """
    own = {"module_mla_asm": first_stage + aiter_stand_ins.SIGNATURE}
    return aiter_stand_ins.lay_out(folder, "gfx942", aiter_stand_ins.EXTENSIONS | own) | {"TRITON_INTERPRET": "1"}
