"""How AITER plans a persistent decode, and what it does with the parts: both are HIP, which no CPU runs, restated here in Python.

`plan` is `get_mla_metadata_v1` of the release on PyPI in its fast mode, for queries that one workgroup takes whole; `reduce` is
`mla_reduce_v1`. What a GPU was seen to do with them nobody here knows: what runs on them shows that AITER's own code objects, fed
with such plans by our adapter, give the right numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from dualmla.emulator.errors import NotEmulatedError

OVERHEAD = 16
"""Blocks of keys that a work item counts for beside its own."""


def plan(qo_indptr: Sequence[int], kv_indptr: Sequence[int], units: int, block: int) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Work items of each compute unit and, for each request, where its parts lie; none where it is one whole.

    All units have the same budget of blocks and take requests in order, as much of one as fits. An item is [request, first row of its
    part or -1, query from, to, key from, to, keys behind, 0].
    """
    spans = list(itertools.pairwise(kv_indptr))
    blocks = [-(-(end - begin) // block) for begin, end in spans]
    budget = -(-(sum(blocks) + OVERHEAD * len(spans)) // units) + OVERHEAD
    works: list[list[list[int]]] = [[] for _ in range(units)]
    parts: list[list[int]] = [[] for _ in spans]
    request = done = rows = 0
    for work in works:
        left = budget - OVERHEAD
        while request < len(spans) and left >= 0:
            (begin, end), (first, last) = spans[request], qo_indptr[request : request + 2]
            rest = blocks[request] - done
            taken = min(left, rest)
            whole = taken == rest and done == 0
            if taken or rest == 0:
                key = begin + done * block
                stop = min(key + taken * block, end)
                work.append([request, -1 if whole else rows, first, last, key, stop, end - stop, 0])
                if not whole:
                    parts[request].append(rows)
                    rows += last - first
            if taken < rest:
                done += taken
                break
            left -= rest + OVERHEAD
            request, done = request + 1, 0
    assert request == len(spans), "the budgets cover all"
    return works, parts


def write_plan(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    work_metadata_ptrs: torch.Tensor,
    work_info_set: torch.Tensor,
    work_indptr: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor,
    reduce_partial_map: torch.Tensor,
    block: int,
) -> None:
    """`plan` in the tables that AITER reads, in the order in which the C++ takes them; what a plan does not reach stays as it was."""
    works, parts = plan(qo_indptr.tolist(), kv_indptr.tolist(), work_indptr.shape[0] - 1, block)
    work_metadata_ptrs.copy_(torch.tensor([work_indptr.data_ptr(), work_info_set.data_ptr()], dtype=torch.int64).view(torch.uint64))
    work_indptr[:] = torch.tensor([0, *itertools.accumulate(map(len, works))])
    items = [item for work in works for item in work]
    work_info_set[: len(items)] = torch.tensor(items, dtype=torch.int32).view(-1, 8)
    ends = [0, *itertools.accumulate(map(len, parts))]
    reduce_indptr[: len(ends)] = torch.tensor(ends)
    reduce_indptr[len(ends) :] = ends[-1]
    for request, mine in enumerate(parts):
        if mine:
            reduce_final_map[request] = qo_indptr[request : request + 2]
    reduce_partial_map[: ends[-1]] = torch.tensor([slot for mine in parts for slot in mine], dtype=torch.int32)


def get_mla_metadata_v1(
    seqlens_qo_indptr: torch.Tensor,
    seqlens_kv_indptr: torch.Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    is_causal: bool,
    work_metadata_ptrs: torch.Tensor,
    work_info_set: torch.Tensor,
    work_indptr: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor,
    reduce_partial_map: torch.Tensor,
    kv_granularity: int = 16,
    max_seqlen_qo: int = -1,
    uni_seqlen_qo: int = -1,
    fast_mode: bool = True,
    topk: int = -1,
    max_split_per_batch: int = -1,
) -> None:
    """The release's planner, arguments in the order of its C++; our adapter asks for one token of 16 heads a request.

    Raises:
        NotEmulatedError: the plan would be another one than `plan` restates.
    """
    asked = (num_heads_per_head_k, num_heads_k, max_seqlen_qo, fast_mode, topk, max_split_per_batch)
    if asked != (16, 1, 1, True, -1, -1):
        raise NotEmulatedError(
            f"heads, key heads, tokens, fast_mode, topk, max_split_per_batch of a plan are {asked}; (16, 1, 1, True, -1, -1) is emulated"
        )
    write_plan(
        seqlens_qo_indptr, seqlens_kv_indptr, work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr, reduce_final_map,
        reduce_partial_map, kv_granularity,
    )  # fmt: skip


def reduce(
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor,
    reduce_partial_map: torch.Tensor,
    final_output: torch.Tensor,
    final_lse: torch.Tensor | None = None,
) -> None:
    """Merge the parts of each request that has some, in float64; of the others neither output nor LSE is touched."""
    for group, (begin, end) in enumerate(itertools.pairwise(reduce_indptr.tolist())):
        if end - begin < 2:
            continue
        first, last = reduce_final_map[group].tolist()
        for row in range(first, last):
            places = [slot + row - first for slot in reduce_partial_map[begin:end].tolist()]
            lse = torch.stack([partial_lse[place, 0, :, 0].double() for place in places])
            out = torch.stack([partial_output[place, 0].double() for place in places])
            total = torch.logsumexp(lse, 0)
            final_output[row] = (torch.exp(lse - total)[..., None] * out).sum(0).to(final_output.dtype)
            if final_lse is not None:
                final_lse[row] = total.float()
