"""How a prefill attends: over its own new tokens, then over what is already in the cache, a bounded piece at a time.

Lay the contexts of all requests on one line and cut it every `workspace_tokens`: a piece needs no more workspace than that,
is full but for the last one, and touches requests that are neighbours. The plan of a metadata is made once and serves
every layer of the step; making it reads the lengths on the host, the one wait for the device that a prefill step has.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch

from dualmla.metadata import MLAMetadata


@dataclass(frozen=True)
class ContextChunk:
    """A piece of the line of contexts; requests in it without a token of theirs count as empty.

    Attributes:
        requests: the requests it touches, and those between them.
        tokens: their query tokens.
        cu_seqlens_q, cu_seqlens_k: int32 [requests + 1], queries and context tokens of each; both start at 0.
        seq_starts: int32 [requests], first context token of each.
        num_keys: context tokens in the piece.
        max_seqlen_q, max_seqlen_k: longest request.
    """

    requests: slice
    tokens: slice
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seq_starts: torch.Tensor
    num_keys: int
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True)
class PrefillPlan:
    """What the prefills of a batch attend to.

    Attributes:
        query_lens, context_lens: of each request, on the host; a context is negative where the query is longer than the
            sequence: tokens before its first position are no keys.
        key_rows: int64, the new tokens that are keys; None: all of them.
        cu_seqlens_k: int32 [num_reqs + 1], over those tokens.
        chunks: of the contexts; empty when there is none.
    """

    query_lens: list[int]
    context_lens: list[int]
    key_rows: torch.Tensor | None
    cu_seqlens_k: torch.Tensor
    chunks: list[ContextChunk]


_plans: WeakKeyDictionary[MLAMetadata, dict[int, PrefillPlan]] = WeakKeyDictionary()


def prefill_plan(meta: MLAMetadata, workspace_tokens: int) -> PrefillPlan:
    """The plan of the prefills `meta`; the same object for the same metadata, so that only the first layer of a step waits."""
    plans = _plans.setdefault(meta, {})
    if workspace_tokens not in plans:
        plans[workspace_tokens] = _plan(meta, workspace_tokens)
    return plans[workspace_tokens]


def _plan(meta: MLAMetadata, workspace_tokens: int) -> PrefillPlan:
    device = meta.device
    seq_lens, query_lens = torch.stack([meta.seq_lens, meta.query_lens]).tolist()
    context_lens = [length - new for length, new in zip(seq_lens, query_lens, strict=True)]
    if meta.block_table.shape[1] == 0:  # a profile run: no pages, so no context either
        context_lens = [min(length, 0) for length in context_lens]
    key_rows, cu_seqlens_k = None, meta.qo_indptr
    if min(context_lens, default=0) < 0:
        firsts = [0, *accumulate(query_lens)]
        missing = [min(max(-context, 0), new) for context, new in zip(context_lens, query_lens, strict=True)]
        spans = [range(first + none, first + new) for first, none, new in zip(firsts, missing, query_lens, strict=False)]
        key_rows = torch.tensor([row for span in spans for row in span], dtype=torch.int64, device=device)
        cu_seqlens_k = torch.tensor([0, *accumulate(len(span) for span in spans)], dtype=torch.int32, device=device)
    return PrefillPlan(query_lens, context_lens, key_rows, cu_seqlens_k, _cut(query_lens, context_lens, workspace_tokens, device))


def _cut(query_lens: list[int], context_lens: list[int], workspace_tokens: int, device: torch.device) -> list[ContextChunk]:
    """The line of contexts in pieces of `workspace_tokens`."""
    lengths = [max(length, 0) for length in context_lens]
    ends = [*accumulate(lengths)]
    total = ends[-1] if ends else 0
    chunks = []
    for low in range(0, total, workspace_tokens):
        high = min(low + workspace_tokens, total)
        starts = [min(max(low - (end - length), 0), length) for end, length in zip(ends, lengths, strict=True)]
        stops = [min(max(high - (end - length), 0), length) for end, length in zip(ends, lengths, strict=True)]
        touched = [r for r, (start, stop) in enumerate(zip(starts, stops, strict=True)) if stop > start]
        requests = slice(touched[0], touched[-1] + 1)
        queries, keys = query_lens[requests], [stop - start for start, stop in zip(starts[requests], stops[requests], strict=True)]
        first_token = sum(query_lens[: requests.start])
        cu_q, cu_k = [0, *accumulate(queries)], [0, *accumulate(keys)]
        on_device = torch.tensor([cu_q, cu_k, [*starts[requests], 0]], dtype=torch.int32, device=device)  # one copy
        chunks.append(
            ContextChunk(
                requests=requests,
                tokens=slice(first_token, first_token + cu_q[-1]),
                cu_seqlens_q=on_device[0],
                cu_seqlens_k=on_device[1],
                seq_starts=on_device[2, :-1],
                num_keys=high - low,
                max_seqlen_q=max(queries),
                max_seqlen_k=max(keys),
            )
        )
    return chunks
