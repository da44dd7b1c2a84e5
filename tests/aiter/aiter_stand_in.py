"""A stand-in for AITER's `mla_decode_fwd`, one a generation: the real parameters in the real order, the real behaviour, float64 numbers.

It keeps what AITER does and does not do: the first stage of one token of 16 heads puts request b into row b whatever `qo_indptr` says, rows
without keys become NaN, rows of padding are left alone, the tail multiplies cache row 0 by zero, an empty batch divides by zero,
memory that is not written is NaN, and the scale has its own default. What AITER takes on trust is asserted here.
"""

from __future__ import annotations

import itertools
import math
import types
from typing import Any

import torch

S0 = "q, kv_buffer, o, kv_indptr, kv_indices, kv_last_page_lens, sm_scale=None, logit_cap=0.0, num_kv_splits=None"
S1 = "q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, sm_scale=None, logit_cap=0.0, num_kv_splits=None"
S2 = S1 + (
    ", num_kv_splits_indptr=None, work_meta_data=None, work_indptr=None, work_info_set=None, reduce_indptr=None, "
    "reduce_final_map=None, reduce_partial_map=None, q_scale=None, kv_scale=None"
)
S3 = S2 + ", intra_batch_mode=False"
S4 = S3 + ", return_logits=False, return_lse=False"
S5 = S4.replace("max_seqlen_q, ", "max_seqlen_q, page_size=1, nhead_kv=1, ")
S7 = S5 + ", g_kv_indptr=None, cp_world_size=1, cp_rank=0"
PARAMETERS = {"S0": S0, "S1": S1, "S2": S2, "S3": S3, "S4": S4, "S5": S5, "S6": S5, "S7": S7, "S8": S7 + ", causal=True"}
GENERATIONS = tuple(PARAMETERS)
PACKAGE = types.ModuleType("aiter")


def module(generation: str) -> types.ModuleType:
    """What stands for `aiter.mla`; its `calls` lists the arguments of each call, its `forgotten` the calls made at each clearing."""
    mla = types.ModuleType("aiter.mla")
    mla.calls, mla.forgotten = [], []

    def run(given: dict[str, Any]) -> tuple[None, torch.Tensor | None]:
        mla.calls.append(given)
        return None, _decode(generation, **given)

    namespace = {"run": run}
    exec(f"def mla_decode_fwd({PARAMETERS[generation]}):\n    return run(locals())", namespace)
    mla.mla_decode_fwd = namespace["mla_decode_fwd"]
    names = ["Mid_O", "Mid_lse", "O"] + (["Final_lse"] if generation >= "S6" else [])
    mla._fwd_kernel_stage2_asm = types.SimpleNamespace(arg_names=names)
    mla.get_meta_param = types.SimpleNamespace(cache_clear=lambda: mla.forgotten.append(len(mla.calls)))
    return mla


def _decode(
    generation: str,
    *,
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    o: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    sm_scale: float | None,
    num_kv_splits: int | None,
    qo_indptr: torch.Tensor | None = None,
    max_seqlen_q: int = 1,
    num_kv_splits_indptr: torch.Tensor | None = None,
    page_size: int = 1,
    nhead_kv: int = 1,
    return_lse: bool = False,
    **unused: Any,
) -> torch.Tensor | None:
    batch = kv_indptr.shape[0] - 1
    assert batch > 0, "AITER's split heuristic divides by it"
    tokens, heads, dim = q.shape
    assert heads in (16, 32, 64, 128)
    assert max_seqlen_q == 1 or (heads == 16 and max_seqlen_q <= 4)
    assert kv_buffer.shape[1:] == (1, 1, dim)
    assert (page_size, nhead_kv) == (1, 1)
    assert o.is_contiguous()
    assert o.dtype == torch.bfloat16
    assert q.is_contiguous()
    for name, indices in (("qo", qo_indptr), ("kv", kv_indptr), ("ids", kv_indices), ("last", kv_last_page_lens)):
        assert indices is None or (indices.dtype == torch.int32 and indices.is_contiguous()), name
    assert kv_last_page_lens.tolist() == [1] * batch
    assert all(value in (None, False, True, 0.0, 0, 1) for value in unused.values())
    if num_kv_splits_indptr is not None:
        assert generation >= "S3", "overwritten there"
        assert num_kv_splits_indptr.tolist() == list(range(0, (batch + 1) * num_kv_splits, num_kv_splits))
    scale = 1 / math.sqrt(576) if sm_scale is None else sm_scale

    # first stage: one token of 16 heads goes to row b, all else to the rows of qo_indptr
    by_request = qo_indptr is None or (max_seqlen_q == 1 and heads == 16)
    places = [(b, b + 1) if by_request else tuple(qo_indptr[b : b + 2].tolist()) for b in range(batch)]
    partial: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for b, (first, last) in enumerate(places):
        ids = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        keys = kv_buffer[ids, 0, 0].double()
        for row in range(first, last):
            seen = len(ids) - (last - row - 1)
            assert row < tokens, f"row {row} of {tokens} is written: out of bounds"
            scores = scale * q[row].double() @ keys[: max(seen, 0)].T
            value = torch.softmax(scores, -1) @ keys[: max(seen, 0), :512]
            if len(ids) % 64:
                value = value + 0.0 * kv_buffer[0, 0, 0, :512].double()
            partial[row] = (value, torch.logsumexp(scores, -1)) if seen > 0 else (value * float("nan"), value[:, 0] + float("inf"))
    # second stage: by qo_indptr
    lse = torch.full((tokens, heads), float("nan"))
    for first, last in itertools.pairwise(range(batch + 1) if qo_indptr is None else qo_indptr.tolist()):
        for row in range(first, last):
            o[row], lse[row] = partial[row][0].bfloat16(), partial[row][1].float()
    if generation < "S6" or num_kv_splits == 1:
        lse = torch.full_like(lse, 12345.0)  # memory that nobody wrote
    return lse if return_lse or generation < "S4" else None
