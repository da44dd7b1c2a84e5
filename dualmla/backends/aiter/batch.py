"""A batch in AITER's words: pages of one token, and requests that its kernels place right.

Its decode kernels hard-code page size 1, so block tables are cut into tokens. And one of them, for one query token of 16 heads,
puts request b into row b whatever `qo_indptr` says, as running them in an emulator showed; those for 2 to 4 tokens and for 128
heads follow it, ragged batches included. A batch in which some request has no token is therefore gathered before and put back
after: which kernel a release picks is its own affair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dualmla.backends.aiter.support import LaunchShape
from dualmla.metadata import MLAMetadata


@dataclass(frozen=True)
class Batch:
    """The requests as AITER is told them; indices int32, contiguous, on the device.

    Attributes:
        qo_indptr: [n + 1] rows of each request.
        kv_indptr: [n + 1] keys of each request.
        kv_indices: cache rows of the keys of all requests; slack past `kv_indptr[-1]`.
        max_query_len: most rows a request.
        seen: [T], how many keys each row of the caller sees; 0 for rows of padding.
        row_of: [n], the caller's row that each request asks for; None: its rows are the caller's.
        request_of: [T], the request of each row of the caller, where `row_of` is given.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    max_query_len: int
    seen: torch.Tensor
    row_of: torch.Tensor | None = None
    request_of: torch.Tensor | None = None

    @property
    def size(self) -> int:
        return self.qo_indptr.shape[0] - 1

    def by_row(self, result: torch.Tensor) -> torch.Tensor:
        """AITER's rows [n, ...] as the caller's [T, ...]."""
        return result if self.request_of is None else result[self.request_of]


def tell(meta: MLAMetadata, shape: LaunchShape, num_tokens: int, *, causal: bool, captured: bool) -> Batch:
    """The batch of `meta` and `num_tokens` query rows, without a wait for the device.

    Arguments:
        shape: of the kernel that will run.
        causal: as in `mla_decode`.
        captured: into a graph: only what is on the device counts, replays bring other lengths.
    """
    if meta.exact and meta.max_query_len == 1 and meta.num_tokens == meta.num_reqs == num_tokens and not captured:
        return Batch(meta.qo_indptr.contiguous(), *_keys(meta), 1, meta.seq_lens)
    request, seen = rows_of(meta, num_tokens, causal=causal)
    if meta.max_query_len == 1:
        one_each = torch.arange(meta.num_reqs + 1, dtype=torch.int32, device=meta.device)
        # a request without a row asks for the next one's, and nobody looks at the answer
        return Batch(one_each, *_keys(meta), 1, seen, meta.qo_indptr[:-1].clamp(max=num_tokens - 1), request)
    if causal and meta.max_query_len <= shape.query_len:
        return Batch(meta.qo_indptr.contiguous(), *_keys(meta), meta.max_query_len, seen)
    # each row a request of its own with the keys that it sees: exact, and reads the cache once a row
    kv_indptr = _indptr(seen, meta)
    one_each = torch.arange(num_tokens + 1, dtype=torch.int32, device=meta.device)
    return Batch(one_each, kv_indptr, _slots(meta, request, kv_indptr), 1, seen)


def rows_of(meta: MLAMetadata, num_tokens: int, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [T] twice: the request of each of `num_tokens` query rows, and how many keys the row sees; 0 for rows of padding."""
    row = torch.arange(num_tokens, dtype=torch.int32, device=meta.device)
    past = torch.searchsorted(meta.qo_indptr[1:], row, right=True, out_int32=True)
    request = past.clamp(max=meta.num_reqs - 1)
    seen = meta.seq_lens[request]
    if causal:
        seen = seen - (meta.qo_indptr[request + 1] - row - 1)
    return request, torch.where(past < meta.num_reqs, seen, 0).clamp(min=0)


def _keys(meta: MLAMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_indptr and kv_indices of the requests as they are."""
    if meta.page_size == 1:
        return meta.paged_kv_indptr.contiguous(), meta.paged_kv_indices.contiguous()
    kv_indptr = _indptr(meta.seq_lens, meta)
    return kv_indptr, _slots(meta, None, kv_indptr)


def _indptr(kv_lens: torch.Tensor, meta: MLAMetadata) -> torch.Tensor:
    """int32 [n + 1] of the keys [n] of each request; no more than its row of the block table holds."""
    kv_indptr = torch.zeros(kv_lens.shape[0] + 1, dtype=torch.int32, device=kv_lens.device)
    torch.cumsum(kv_lens.clamp(max=meta.block_table.shape[1] * meta.page_size), 0, dtype=torch.int32, out=kv_indptr[1:])
    return kv_indptr


def _slots(meta: MLAMetadata, owner: torch.Tensor | None, kv_indptr: torch.Tensor) -> torch.Tensor:
    from dualmla_kernels.token_slots import token_slots

    return token_slots(meta.block_table, owner, kv_indptr, meta.page_size)
