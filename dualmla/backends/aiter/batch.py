"""A batch in AITER's words: pages of one token, and requests that its kernels place right.

Its decode kernels hard-code page size 1, so block tables are cut into tokens. And one of them, for one query token of 16 heads,
puts request b into row b whatever `qo_indptr` says, as running them in an emulator showed; those for 2 to 4 tokens and for 128
heads follow it, ragged batches included. A batch in which some request has no token is therefore gathered before and put back
after: which kernel a release picks is its own affair.

What is told is worked out once a step and shared by its layers (`told`).
"""

from __future__ import annotations

import dataclasses
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


class _Told:
    """A batch as it was told, and the step that it is of."""

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.step: tuple[int, ...] = ()


def told(meta: MLAMetadata, shape: LaunchShape, num_tokens: int, *, causal: bool, captured: bool) -> Batch:
    """As `tell`, once a step: kept with the metadata's buffers.

    Under a graph state it lies at fixed addresses, refilled when a batch is prepared or moved on, outside of the graphs that read it;
    captured sizes share the memory of the keys. A graph captured around other metadata tells within itself.
    """
    from dualmla_kernels.token_slots import num_slots

    kept = meta.kept
    if captured and not kept.replayed:
        return tell(meta, shape, num_tokens, causal=causal, captured=True)
    key = ("aiter batch", shape, causal)
    held = kept.get((*key, meta.num_reqs, num_tokens) if kept.replayed else key, _Told)

    @torch.inference_mode(False)  # refilled inside and outside of it
    def refill() -> None:
        slots = None
        if kept.replayed:
            rows = kept.max_num_reqs * (1 if _by_request(meta, shape, causal=causal) else meta.max_query_len)
            room = num_slots(rows, meta.block_table.shape[1], meta.page_size)
            slots = kept.get((*key, "slots"), lambda: torch.empty(room, dtype=torch.int32, device=meta.device))
        anew = tell(meta, shape, num_tokens, causal=causal, captured=kept.replayed, slots=slots)
        held.batch = anew if held.batch is None or not kept.replayed else _overwritten(held.batch, anew)
        held.step = step_of(meta, num_tokens)

    if kept.replayed:
        kept.follow(held, meta.num_reqs, refill)
    if held.step != step_of(meta, num_tokens):
        refill()
    assert held.batch is not None
    return held.batch


def step_of(meta: MLAMetadata, num_tokens: int) -> tuple[int, ...]:
    """What tells the step that something derived from `meta` is of: the batch last written, and the stream that fills it. Another
    stream does not wait for what this one fills; a graph state has but one."""
    one_stream = meta.kept.replayed or meta.device.type != "cuda"
    return meta.kept.writes, meta.num_reqs, num_tokens, 0 if one_stream else torch.cuda.current_stream(meta.device).cuda_stream


def tell(
    meta: MLAMetadata, shape: LaunchShape, num_tokens: int, *, causal: bool, captured: bool, slots: torch.Tensor | None = None
) -> Batch:
    """The batch of `meta` and `num_tokens` query rows, without a wait for the device.

    Arguments:
        shape: of the kernel that will run.
        causal: as in `mla_decode`.
        captured: into a graph: only what is on the device counts, replays bring other lengths.
        slots: where `kv_indices` goes, if it is not the pages as they are; None: memory of its own.
    """
    if meta.exact and meta.max_query_len == 1 and meta.num_tokens == meta.num_reqs == num_tokens and not captured:
        return Batch(meta.qo_indptr.contiguous(), *_keys(meta, slots), 1, meta.seq_lens)
    request, seen = rows_of(meta, num_tokens, causal=causal)
    if meta.max_query_len == 1:
        one_each = torch.arange(meta.num_reqs + 1, dtype=torch.int32, device=meta.device)
        # a request without a row asks for the next one's, and nobody looks at the answer
        return Batch(one_each, *_keys(meta, slots), 1, seen, meta.qo_indptr[:-1].clamp(max=num_tokens - 1), request)
    if _by_request(meta, shape, causal=causal):
        return Batch(meta.qo_indptr.contiguous(), *_keys(meta, slots), meta.max_query_len, seen)
    # each row a request of its own with the keys that it sees: exact, and reads the cache once a row
    kv_indptr = _indptr(seen, meta)
    one_each = torch.arange(num_tokens + 1, dtype=torch.int32, device=meta.device)
    return Batch(one_each, kv_indptr, _slots(meta, request, kv_indptr, slots), 1, seen)


def rows_of(meta: MLAMetadata, num_tokens: int, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [T] twice: the request of each of `num_tokens` query rows, and how many keys the row sees; 0 for rows of padding."""
    row = torch.arange(num_tokens, dtype=torch.int32, device=meta.device)
    past = torch.searchsorted(meta.qo_indptr[1:], row, right=True, out_int32=True)
    request = past.clamp(max=meta.num_reqs - 1)
    seen = meta.seq_lens[request]
    if causal:
        seen = seen - (meta.qo_indptr[request + 1] - row - 1)
    return request, torch.where(past < meta.num_reqs, seen, 0).clamp(min=0)


def _overwritten(batch: Batch, anew: Batch) -> Batch:
    """`batch` with the numbers of `anew` in its tensors, which are of the same shapes: both are of one captured size."""
    for field in dataclasses.fields(Batch):
        old, new = getattr(batch, field.name), getattr(anew, field.name)
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)
    return batch


def _by_request(meta: MLAMetadata, shape: LaunchShape, *, causal: bool) -> bool:
    """Whether requests are told as they are; else each row is one."""
    return meta.max_query_len == 1 or (causal and meta.max_query_len <= shape.query_len)


def _keys(meta: MLAMetadata, slots: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_indptr and kv_indices of the requests as they are."""
    if meta.page_size == 1:
        return meta.paged_kv_indptr.contiguous(), meta.paged_kv_indices.contiguous()
    kv_indptr = _indptr(meta.seq_lens, meta)
    return kv_indptr, _slots(meta, None, kv_indptr, slots)


def _indptr(kv_lens: torch.Tensor, meta: MLAMetadata) -> torch.Tensor:
    """int32 [n + 1] of the keys [n] of each request; no more than its row of the block table holds."""
    kv_indptr = torch.zeros(kv_lens.shape[0] + 1, dtype=torch.int32, device=kv_lens.device)
    torch.cumsum(kv_lens.clamp(max=meta.block_table.shape[1] * meta.page_size), 0, dtype=torch.int32, out=kv_indptr[1:])
    return kv_indptr


def _slots(meta: MLAMetadata, owner: torch.Tensor | None, kv_indptr: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
    from dualmla_kernels.token_slots import token_slots

    return token_slots(meta.block_table, owner, kv_indptr, meta.page_size, out=slots)
