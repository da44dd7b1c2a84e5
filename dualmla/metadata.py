"""Metadata of one attention step, and the one builder of it, shared by every backend.

`MLAMetadata` says which tokens of a flattened batch belong to which request and where each request's latent rows lie.
All index tensors are int32 on the device; `slot_mapping` is int64. Requests come decodes first; the two halves are
views (`decode_metadata`, `prefill_metadata`) whose indptr start at 0.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, SupportsIndex

import torch

from dualmla.config import MLAConfig
from dualmla.validation import check_index_tensor, check_seq_lens, checked_device, reads_allowed

Lengths = torch.Tensor | Sequence[int]


class _Lease:
    """Whether the buffers behind a metadata still hold what it describes."""

    def __init__(self) -> None:
        self.expired = False

    def renew(self) -> _Lease:
        self.expired = True
        return _Lease()

    def check(self) -> None:
        if self.expired:
            raise RuntimeError("this metadata is stale: its builder has built another batch into the same buffers since")


@dataclass(eq=False)
class MLAMetadata:
    """Where the tokens and the latent rows of each request are.

    Attributes:
        block_table: int32 [num_reqs, max_pages], page ids; entries past a request's last page are never read.
        seq_lens: int32 [num_reqs], tokens in the cache, the new ones included.
        query_lens: int32 [num_reqs], new tokens.
        qo_indptr: int32 [num_reqs + 1], first token of each request in the flattened batch.
        paged_kv_indptr: int32 [num_reqs + 1], counts pages.
        paged_kv_indices: int32, page ids of all requests one after another; slack past `paged_kv_indptr[-1]`.
        paged_kv_last_page_lens: int32 [num_reqs], tokens in the last page: 1..page_size, 0 for an empty request.
        slot_mapping: int64 [num_tokens], `page * page_size + offset` of each new token; -1 where nothing is written.
        page_size: tokens a page.
        num_tokens: new tokens of all requests.
        max_query_len: an upper bound of `query_lens`, known on the host.
        num_decodes, num_decode_tokens: the leading requests (tokens) that take the decode path.
        config: what the metadata was built for; None when `decode_metadata` built it from lengths alone.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_lens: torch.Tensor
    qo_indptr: torch.Tensor
    paged_kv_indptr: torch.Tensor
    paged_kv_indices: torch.Tensor
    paged_kv_last_page_lens: torch.Tensor
    slot_mapping: torch.Tensor
    page_size: int
    num_tokens: int
    max_query_len: int
    num_decodes: int
    num_decode_tokens: int
    max_decode_query_len: int
    config: MLAConfig | None = None
    _lease: _Lease = field(default_factory=_Lease, repr=False)

    @property
    def num_reqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_prefills(self) -> int:
        return self.num_reqs - self.num_decodes

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    def check_current(self) -> None:
        """Raise RuntimeError when the builder that owns these buffers has built again."""
        self._lease.check()

    @property
    def decode_metadata(self) -> MLAMetadata | None:
        """The decodes alone, None when there are none; the same object on each access."""
        self.check_current()
        if self.num_decodes == 0:
            return None
        return self._decode_view if self.num_prefills else self  # cached in itself, only the collector would free it

    @property
    def prefill_metadata(self) -> MLAMetadata | None:
        """The prefills alone, None when there are none; the same object on each access."""
        self.check_current()
        if self.num_prefills == 0:
            return None
        return self._prefill_view if self.num_decodes else self

    @cached_property
    def _decode_view(self) -> MLAMetadata:
        n, tokens = self.num_decodes, self.num_decode_tokens
        return MLAMetadata(
            block_table=self.block_table[:n],
            seq_lens=self.seq_lens[:n],
            query_lens=self.query_lens[:n],
            qo_indptr=self.qo_indptr[: n + 1],
            paged_kv_indptr=self.paged_kv_indptr[: n + 1],
            paged_kv_indices=self.paged_kv_indices,
            paged_kv_last_page_lens=self.paged_kv_last_page_lens[:n],
            slot_mapping=self.slot_mapping[:tokens],
            page_size=self.page_size,
            num_tokens=tokens,
            max_query_len=self.max_decode_query_len,
            num_decodes=n,
            num_decode_tokens=tokens,
            max_decode_query_len=self.max_decode_query_len,
            config=self.config,
            _lease=self._lease,
        )

    @cached_property
    def _prefill_view(self) -> MLAMetadata:
        n, tokens = self.num_decodes, self.num_decode_tokens
        paged_kv_indptr = self.paged_kv_indptr[n:] - self.paged_kv_indptr[n]
        return MLAMetadata(
            block_table=self.block_table[n:],
            seq_lens=self.seq_lens[n:],
            query_lens=self.query_lens[n:],
            qo_indptr=self.qo_indptr[n:] - self.qo_indptr[n],
            paged_kv_indptr=paged_kv_indptr,
            paged_kv_indices=pack_page_ids(self.block_table[n:], paged_kv_indptr),
            paged_kv_last_page_lens=self.paged_kv_last_page_lens[n:],
            slot_mapping=self.slot_mapping[tokens:],
            page_size=self.page_size,
            num_tokens=self.num_tokens - tokens,
            max_query_len=self.max_query_len,
            num_decodes=0,
            num_decode_tokens=0,
            max_decode_query_len=0,
            config=self.config,
            _lease=self._lease,
        )


class MLAMetadataBuilder:
    """Builds `MLAMetadata` into buffers allocated once.

    Arguments:
        cfg: the layer.
        device: of every tensor given and built.
        max_num_seqs: most requests a batch.
        max_num_pages_per_seq: most pages a request.
        max_num_tokens: most new tokens a batch; None: as many as fit in the pages of all requests.
        decode_threshold: the leading requests of at most this many new tokens take the decode path.
    """

    def __init__(
        self,
        cfg: MLAConfig,
        device: torch.device | str,
        *,
        max_num_seqs: int = 256,
        max_num_pages_per_seq: int = 8192,
        max_num_tokens: int | None = None,
        decode_threshold: int = 1,
    ) -> None:
        for name, value, least in (
            ("max_num_seqs", max_num_seqs, 1),
            ("max_num_pages_per_seq", max_num_pages_per_seq, 1),
            ("max_num_tokens", 1 if max_num_tokens is None else max_num_tokens, 1),
            ("decode_threshold", decode_threshold, 1),
        ):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
        self.cfg = cfg
        self.device = checked_device(device)
        self.max_num_seqs = max_num_seqs
        self.max_num_pages_per_seq = max_num_pages_per_seq
        self.max_num_tokens = max_num_tokens
        self.decode_threshold = decode_threshold
        self._lease = _Lease()
        self._paged_kv_indices = torch.zeros(max_num_seqs * max_num_pages_per_seq + 1, dtype=torch.int32, device=self.device)

    def build(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_lens: Lengths,
        *,
        num_decodes: int | None = None,
    ) -> MLAMetadata:
        """Describe a batch; valid until the next call.

        Arguments:
            block_table: int32 [num_reqs, max_pages].
            seq_lens: int32 [num_reqs], new tokens included.
            query_lens: int32 [num_reqs] on the device, or a list or CPU tensor: then nothing waits for the device.
            num_decodes: leading requests that take the decode path; None: counted from `query_lens`.

        Raises:
            ValueError, TypeError: naming the argument, its value and what is allowed.
        """
        num_reqs = _check_batch(block_table, seq_lens, query_lens, self.cfg.page_size, self.device)
        if num_reqs > self.max_num_seqs:
            raise ValueError(f"block_table has {num_reqs} requests, the builder was made for max_num_seqs={self.max_num_seqs}")
        if block_table.shape[1] > self.max_num_pages_per_seq:
            raise ValueError(
                f"block_table has {block_table.shape[1]} pages a request, the builder was made for "
                f"max_num_pages_per_seq={self.max_num_pages_per_seq}"
            )
        host_lens = _host_lengths("query_lens", query_lens)
        if self.max_num_tokens is not None and sum(host_lens) > self.max_num_tokens:
            raise ValueError(f"query_lens sum to {sum(host_lens)}, the builder was made for max_num_tokens={self.max_num_tokens}")
        leading = next((i for i, n in enumerate(host_lens) if n > self.decode_threshold), num_reqs)
        if num_decodes is None:
            num_decodes = leading
        elif not 0 <= num_decodes <= leading:
            raise ValueError(
                f"num_decodes must be between 0 and {leading}, the leading requests of at most decode_threshold="
                f"{self.decode_threshold} new tokens, got {num_decodes}"
            )
        self._lease = self._lease.renew()
        return _assemble(
            block_table,
            seq_lens,
            host_lens,
            self.cfg.page_size,
            num_decodes,
            out_indices=self._paged_kv_indices,
            config=self.cfg,
            _lease=self._lease,
        )


def decode_metadata(
    block_table: torch.Tensor,
    seq_lens: Lengths,
    query_lens: Lengths | None = None,
    *,
    page_size: int,
    device: torch.device | str,
) -> MLAMetadata:
    """Metadata of a batch of decodes, without a builder.

    Arguments:
        block_table: int32 [num_reqs, max_pages]; moved to `device`.
        seq_lens: int32 [num_reqs], new tokens included; a tensor or a list.
        query_lens: new tokens of each request; None: one each.
        page_size: tokens a page.
        device: where attention will run.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.
    """
    if not isinstance(page_size, int) or page_size < 1:
        raise ValueError(f"page_size must be an int of at least 1, got {page_size!r}")
    device = checked_device(device)
    if not isinstance(block_table, torch.Tensor):
        raise TypeError(f"block_table must be an int32 tensor, got {type(block_table).__name__}")
    block_table = block_table.to(device)
    if isinstance(seq_lens, torch.Tensor):
        seq_lens = seq_lens.to(device)
    else:
        seq_lens = torch.tensor(_host_lengths("seq_lens", seq_lens), dtype=torch.int32, device=device)
    if query_lens is None:
        query_lens = [1] * seq_lens.shape[0]
    num_reqs = _check_batch(block_table, seq_lens, query_lens, page_size, device)
    return _assemble(block_table, seq_lens, _host_lengths("query_lens", query_lens), page_size, num_decodes=num_reqs)


def pack_page_ids(block_table: torch.Tensor, paged_kv_indptr: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The live page ids of each request one after another, int32; the last entry of the result is a dump, never read.

    Without a wait for the device: every entry of the table is scattered, the dead ones into the dump.
    """
    num_reqs, max_pages = block_table.shape
    if out is None:
        out = torch.zeros(num_reqs * max_pages + 1, dtype=torch.int32, device=block_table.device)
    column = torch.arange(max_pages, device=block_table.device)
    first, last = paged_kv_indptr[:-1, None].long(), paged_kv_indptr[1:, None].long()
    target = torch.where(first + column < last, first + column, out.shape[0] - 1)
    return out.scatter_(0, target.flatten(), block_table.flatten())


def _assemble(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    host_lens: list[int],
    page_size: int,
    num_decodes: int,
    out_indices: torch.Tensor | None = None,
    **rest: Any,
) -> MLAMetadata:
    num_reqs, max_pages = block_table.shape
    device = block_table.device
    query_lens = torch.tensor(host_lens, dtype=torch.int32, device=device)
    pages = (seq_lens + (page_size - 1)).div(page_size, rounding_mode="floor").clamp(max=max_pages)
    paged_kv_indptr = _indptr(pages)
    num_tokens = sum(host_lens)
    qo_indptr = _indptr(query_lens)
    request = torch.repeat_interleave(torch.arange(num_reqs, device=device), query_lens.long(), output_size=num_tokens)
    token = torch.arange(num_tokens, device=device) - qo_indptr[request]
    position = (seq_lens - query_lens)[request].long() + token
    return MLAMetadata(
        block_table=block_table,
        seq_lens=seq_lens,
        query_lens=query_lens,
        qo_indptr=qo_indptr,
        paged_kv_indptr=paged_kv_indptr,
        paged_kv_indices=pack_page_ids(block_table, paged_kv_indptr, out_indices),
        paged_kv_last_page_lens=torch.where(seq_lens > 0, (seq_lens - 1) % page_size + 1, 0).to(torch.int32),
        slot_mapping=_slots(block_table, request, position, page_size),
        page_size=page_size,
        num_tokens=num_tokens,
        max_query_len=max(host_lens, default=0),
        num_decodes=num_decodes,
        num_decode_tokens=sum(host_lens[:num_decodes]),
        max_decode_query_len=max(host_lens[:num_decodes], default=0),
        **rest,
    )


def _slots(block_table: torch.Tensor, request: torch.Tensor, position: torch.Tensor, page_size: int) -> torch.Tensor:
    """int64 slots of tokens at `position` of `request`; -1 before the first token and past the table."""
    max_pages = block_table.shape[1]
    written = (position >= 0) & (position < max_pages * page_size)
    if max_pages == 0:
        return torch.full_like(position, -1)
    page = block_table[request, position.clamp(0, max_pages * page_size - 1) // page_size].long()
    return torch.where(written, page * page_size + position % page_size, -1)


def _indptr(lengths: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1]: 0 and the running sums of int32 [n]."""
    indptr = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=indptr[1:])
    return indptr


def _host_lengths(name: str, lengths: Lengths) -> list[int]:
    """As Python ints; a tensor on a GPU waits for it."""
    if isinstance(lengths, torch.Tensor):
        return lengths.tolist()
    if not isinstance(lengths, Collection):
        raise TypeError(f"{name} must be a tensor or a sequence of ints, got {type(lengths).__name__}")
    for length in lengths:
        if not isinstance(length, SupportsIndex):
            raise TypeError(f"{name} must be ints, got {length!r}")
    return [operator.index(length) for length in lengths]


def _check_batch(block_table: torch.Tensor, seq_lens: torch.Tensor, query_lens: Lengths, page_size: int, device: torch.device) -> int:
    check_index_tensor("block_table", block_table, rank=2, device=device)
    check_index_tensor("seq_lens", seq_lens, rank=1, device=device)
    num_reqs, max_pages = block_table.shape
    if seq_lens.shape[0] != num_reqs:
        raise ValueError(f"seq_lens has {seq_lens.shape[0]} requests, block_table has {num_reqs}")
    if isinstance(query_lens, torch.Tensor):
        check_index_tensor("query_lens", query_lens, rank=1, device=None)
    else:
        query_lens = _host_lengths("query_lens", query_lens)
    if len(query_lens) != num_reqs:
        raise ValueError(f"query_lens has {len(query_lens)} requests, block_table has {num_reqs}")
    if not isinstance(query_lens, torch.Tensor) or reads_allowed(query_lens):
        worst = min(_host_lengths("query_lens", query_lens), default=0)
        if worst < 0:
            raise ValueError(f"query_lens must not be negative, got {worst}")
    if reads_allowed(seq_lens):
        check_seq_lens(seq_lens, max_pages, page_size)
    return num_reqs
