"""Metadata of one attention step, and the one builder of it, shared by every backend.

`MLAMetadata` says which tokens of a flattened batch belong to which request and where each request's latent rows lie.
All index tensors are int32 on the device; `slot_mapping` is int64. Requests come decodes first; the two halves are
views (`decode_metadata`, `prefill_metadata`) whose indptr start at 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from dualmla.buffers import (
    KV_INDPTR,
    LAST_PAGE_LENS,
    PREFILL_KV_INDPTR,
    PREFILL_QO_INDPTR,
    QO_INDPTR,
    QUERY_LENS,
    SEQ_LENS,
    KeptPlans,
    MetadataBuffers,
    PlanBuffers,
)
from dualmla.config import MLAConfig, check_page_size
from dualmla.lengths import BatchCounts, Lengths, as_tensor, bound_batch, count_batch, counts_of_decodes, host_lengths
from dualmla.validation import check_count, check_index_tensor, check_seq_lens, checked_device, reads_allowed

if TYPE_CHECKING:
    from dualmla.buffers import SplitPlan


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


_numbers = itertools.count()
_numbered: WeakValueDictionary[int, MLAMetadata] = WeakValueDictionary()


@dataclass(kw_only=True, eq=False)
class MLAMetadata(BatchCounts):
    """Where the tokens and the latent rows of each request are, beside the numbers of the batch.

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
        config: what the metadata was built for; None when `decode_metadata` built it from lengths alone.
        plan: how the decodes are shared out among the programs of a kernel; None: the kernel makes it.
        buffers: the memory of the tensors; None for a view of a batch of both kinds.
        kept: what backends derive from the batch and keep with the buffers.
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
    config: MLAConfig | None = None
    plan: SplitPlan | None = None
    buffers: MetadataBuffers | None = field(default=None, repr=False)
    kept: KeptPlans = field(default_factory=KeptPlans, repr=False)
    _lease: _Lease = field(default_factory=_Lease, repr=False)

    @property
    def num_prefills(self) -> int:
        """Requests behind the decodes, which take the prefill path."""
        return self.num_reqs - self.num_decodes

    @property
    def device(self) -> torch.device:
        """Where every tensor of it lies."""
        return self.seq_lens.device

    def __post_init__(self) -> None:
        self._number()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, or one from another process, is a batch of its own."""
        self.__dict__.update(state)
        self._number()

    def _number(self) -> None:
        number = next(_numbers)
        _numbered[number] = self
        self.handle = torch.scalar_tensor(number, dtype=torch.int64, device="cpu")
        """This metadata for an operator of a compiled graph, int64 []: in a tensor, so that a new batch is no new graph."""
        self.accepted: dict[object, int] = {}
        """kv_lora_rank by arguments that were found right for a decode of this batch (`validation.look`): a step has many layers."""

    @staticmethod
    def of_handle(handle: torch.Tensor) -> MLAMetadata:
        """The metadata whose `handle` it is; KeyError when it is gone."""
        return _numbered[int(handle)]

    def check_current(self) -> None:
        """Raise RuntimeError when the builder that owns these buffers has built again."""
        self._lease.check()

    @property
    def decode_metadata(self) -> MLAMetadata | None:
        """The decodes alone, None when there are none; the same object on each access."""
        self.check_current()
        if self.num_decodes == 0:
            return None
        return self._decode_view if self.num_prefills else self

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
            **vars(counts_of_decodes(n, tokens, self.max_decode_query_len, exact=self.exact)),
            block_table=self.block_table[:n],
            seq_lens=self.seq_lens[:n],
            query_lens=self.query_lens[:n],
            qo_indptr=self.qo_indptr[: n + 1],
            paged_kv_indptr=self.paged_kv_indptr[: n + 1],
            paged_kv_indices=self.paged_kv_indices,
            paged_kv_last_page_lens=self.paged_kv_last_page_lens[:n],
            slot_mapping=self.slot_mapping[:tokens],
            page_size=self.page_size,
            config=self.config,
            plan=self.plan,
            kept=self.kept,
            _lease=self._lease,
        )

    @cached_property
    def _prefill_view(self) -> MLAMetadata:
        assert self.buffers is not None
        assert self.buffers.prefill_indices is not None
        n, tokens = self.num_decodes, self.num_decode_tokens
        return MLAMetadata(
            num_reqs=self.num_prefills,
            num_tokens=self.num_tokens - tokens,
            max_query_len=self.max_query_len,
            num_decodes=0,
            num_decode_tokens=0,
            max_decode_query_len=0,
            exact=self.exact,
            block_table=self.block_table[n:],
            seq_lens=self.seq_lens[n:],
            query_lens=self.query_lens[n:],
            qo_indptr=self.buffers.row(PREFILL_QO_INDPTR, self.num_prefills + 1),
            paged_kv_indptr=self.buffers.row(PREFILL_KV_INDPTR, self.num_prefills + 1),
            paged_kv_indices=self.buffers.prefill_indices,
            paged_kv_last_page_lens=self.paged_kv_last_page_lens[n:],
            slot_mapping=self.slot_mapping[tokens:],
            page_size=self.page_size,
            config=self.config,
            _lease=self._lease,
        )


class MLAMetadataBuilder:
    """Builds `MLAMetadata` into buffers allocated once, in one launch, for one stream at a time.

    Arguments:
        cfg: the layer.
        device: of every tensor given and built.
        max_num_seqs: most requests a batch.
        max_num_pages_per_seq: most pages a request.
        max_num_tokens: most new tokens a batch; None: no limit, the slots grow with the largest batch met.
        decode_threshold: the leading requests of at most this many new tokens take the decode path.

    Raises:
        ValueError: a number that is no int of at least 1.
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
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_pages_per_seq", max_num_pages_per_seq),
            ("max_num_tokens", 1 if max_num_tokens is None else max_num_tokens),
            ("decode_threshold", decode_threshold),
        ):
            check_count(name, value, least=1)
        self.cfg = cfg
        self.device = checked_device(device)
        self.max_num_seqs = max_num_seqs
        self.max_num_pages_per_seq = max_num_pages_per_seq
        self.max_num_tokens = max_num_tokens
        self.decode_threshold = decode_threshold
        self._lease = _Lease()
        self._buffers = MetadataBuffers(
            self.device,
            page_size=cfg.page_size,
            max_num_reqs=max_num_seqs,
            max_num_pages=max_num_pages_per_seq,
            num_tokens=max_num_tokens or max_num_seqs * decode_threshold,
            prefills=True,
        )
        self._plans = PlanBuffers(cfg, self.device, max_num_seqs)

    def build(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_lens: Lengths,
        *,
        num_decodes: int | None = None,
    ) -> MLAMetadata:
        """Describe a batch; valid until the next call.

        The host waits for a GPU in one case alone: `query_lens` lies there and `num_decodes` is missing, or can't stand in
        for the lengths (a batch of both kinds with a `decode_threshold` above 1, or a table without pages). Else, where
        they lie there, `num_tokens` and `max_query_len` are upper bounds, and each decode of a batch of both kinds is taken
        to have exactly one new token.

        Arguments:
            block_table: int32 [num_reqs, max_pages]; referred to, not copied.
            seq_lens: int32 [num_reqs], new tokens included.
            query_lens: int32 [num_reqs] on the device, or a list or CPU tensor.
            num_decodes: leading requests that take the decode path; None: counted from `query_lens`.

        Raises:
            ValueError, TypeError: naming the argument, its value and what is allowed.
        """
        num_reqs, max_pages = _check_batch(block_table, seq_lens, self.cfg.page_size, self.device)
        if num_reqs > self.max_num_seqs:
            raise ValueError(f"block_table has {num_reqs} requests, the builder was made for max_num_seqs={self.max_num_seqs}")
        if max_pages > self.max_num_pages_per_seq:
            raise ValueError(
                f"block_table has {max_pages} pages a request, the builder was made for max_num_pages_per_seq={self.max_num_pages_per_seq}"
            )
        counts = None
        if isinstance(query_lens, torch.Tensor):
            check_index_tensor("query_lens", query_lens, rank=1, device=None if query_lens.is_cpu else self.device)
            _check_number("query_lens", query_lens.shape[0], num_reqs)
            if num_decodes is not None and not reads_allowed(query_lens):
                counts = bound_batch(
                    num_reqs,
                    num_decodes,
                    self.decode_threshold,
                    max_seq_len=max_pages * self.cfg.page_size,
                    max_num_tokens=self.max_num_tokens,
                )
        if counts is None:
            lengths = host_lengths("query_lens", query_lens)
            _check_number("query_lens", len(lengths), num_reqs)
            counts = count_batch(lengths, self.decode_threshold, num_decodes)
            if self.max_num_tokens is not None and counts.num_tokens > self.max_num_tokens:
                raise ValueError(f"query_lens sum to {counts.num_tokens}, the builder was made for max_num_tokens={self.max_num_tokens}")
        self._lease = self._lease.renew()
        self._buffers.reserve_tokens(counts.num_tokens)
        plan = self._plans.of(counts.num_decodes, counts.max_decode_query_len)
        new = query_lens if isinstance(query_lens, torch.Tensor) else lengths
        return describe(self._buffers, block_table, seq_lens, new, counts, config=self.cfg, plan=plan, lease=self._lease)


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

    Returns:
        Metadata in memory of its own, which stays valid; its `plan` is None.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.
    """
    check_page_size("page_size", check_count("page_size", page_size, least=1))
    device = checked_device(device)
    if not isinstance(block_table, torch.Tensor):
        raise TypeError(f"block_table must be an int32 tensor, got {type(block_table).__name__}")
    block_table = block_table.to(device)
    if not isinstance(seq_lens, torch.Tensor):
        seq_lens = as_tensor(host_lengths("seq_lens", seq_lens))
    seq_lens = seq_lens.to(device)
    num_reqs, max_pages = _check_batch(block_table, seq_lens, page_size, device)
    if isinstance(query_lens, torch.Tensor):
        check_index_tensor("query_lens", query_lens, rank=1, device=None)
    lengths = host_lengths("query_lens", [1] * num_reqs if query_lens is None else query_lens)
    _check_number("query_lens", len(lengths), num_reqs)
    counts = count_batch(lengths, threshold=max(lengths, default=0), num_decodes=num_reqs)
    buffers = MetadataBuffers(device, page_size=page_size, max_num_reqs=num_reqs, max_num_pages=max_pages, num_tokens=counts.num_tokens)
    return describe(buffers, block_table, seq_lens, lengths, counts)


def describe(
    buffers: MetadataBuffers,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor | Sequence[int],
    counts: BatchCounts,
    *,
    config: MLAConfig | None = None,
    plan: SplitPlan | None = None,
    lease: _Lease | None = None,
) -> MLAMetadata:
    """Write a batch into `buffers`, and the metadata that looks at them; arguments trusted.

    Arguments:
        query_lens: int32 [num_reqs] on the device or the CPU, or what `host_lengths` returned.
    """
    if buffers.own(seq_lens):
        seq_lens = seq_lens.clone()
    new: torch.Tensor | int
    if counts.each is not None:
        new = counts.each
    else:
        new = query_lens if isinstance(query_lens, torch.Tensor) else as_tensor(query_lens)
        if buffers.own(new):
            new = new.clone()
        elif new.device != buffers.device:
            new = buffers.stage(new)
    buffers.write(
        block_table, seq_lens, new, num_reqs=counts.num_reqs, num_decodes=counts.num_decodes, num_tokens=counts.num_tokens, plan=plan
    )
    return metadata_of(buffers, block_table, counts, config=config, plan=plan, lease=lease)


def metadata_of(
    buffers: MetadataBuffers,
    block_table: torch.Tensor,
    counts: BatchCounts,
    *,
    config: MLAConfig | None = None,
    plan: SplitPlan | None = None,
    lease: _Lease | None = None,
) -> MLAMetadata:
    """What looks at `buffers` as a batch of these counts."""
    n = counts.num_reqs
    return MLAMetadata(
        **vars(counts),
        block_table=block_table,
        seq_lens=buffers.row(SEQ_LENS, n),
        query_lens=buffers.row(QUERY_LENS, n),
        qo_indptr=buffers.row(QO_INDPTR, n + 1),
        paged_kv_indptr=buffers.row(KV_INDPTR, n + 1),
        paged_kv_indices=buffers.indices,
        paged_kv_last_page_lens=buffers.row(LAST_PAGE_LENS, n),
        slot_mapping=buffers.slots(counts.num_tokens),
        page_size=buffers.page_size,
        config=config,
        plan=plan,
        buffers=buffers,
        kept=buffers.kept,
        _lease=lease or _Lease(),
    )


def _check_number(name: str, got: int, num_reqs: int) -> None:
    if got != num_reqs:
        raise ValueError(f"{name} has {got} requests, block_table has {num_reqs}")


def _check_batch(block_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int, device: torch.device) -> tuple[int, int]:
    """num_reqs and the pages of a request."""
    check_index_tensor("block_table", block_table, rank=2, device=device)
    check_index_tensor("seq_lens", seq_lens, rank=1, device=device)
    num_reqs, max_pages = block_table.shape
    _check_number("seq_lens", seq_lens.shape[0], num_reqs)
    if reads_allowed(seq_lens):
        check_seq_lens(seq_lens, max_pages, page_size)
    return num_reqs, max_pages
