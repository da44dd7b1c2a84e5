"""The memory behind metadata: allocated once, written by one launch of a kernel, on a CPU by the same in torch.

Nothing here knows what a lease or a graph is; sizes are trusted.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dualmla.config import MLAConfig

if TYPE_CHECKING:
    from dualmla_kernels.plan import SplitPlan as SplitPlan  # noqa: PLC0414 - for other modules' annotations too

T = TypeVar("T")

PAGES_AHEAD = 256
"""Table entries past a request's live pages that a copied table holds: as many pages as `advance_step` can step into."""

SEQ_LENS, QUERY_LENS, LAST_PAGE_LENS, QO_INDPTR, KV_INDPTR, PREFILL_QO_INDPTR, PREFILL_KV_INDPTR = range(7)
"""Rows of the one tensor that holds what has an entry a request; in this order in the kernel too."""


class KeptPlans:
    """What backends derive from a batch and keep with its buffers: sized once, and shared by all layers of a step.

    A copy of metadata, or one in another process, starts with none.

    Arguments:
        max_num_reqs: most requests of the batches to come.
        replayed: graphs read what is kept without asking for it, so it must follow each write.

    Attributes:
        writes: batches written so far.
    """

    def __init__(self, max_num_reqs: int = 0, *, replayed: bool = False) -> None:
        self.max_num_reqs, self.replayed, self.writes = max_num_reqs, replayed, 0
        self._kept: dict[Hashable, Any] = {}
        self._followers: dict[Hashable, tuple[int, Callable[[], None]]] = {}

    def __reduce__(self) -> tuple[Callable[..., KeptPlans], tuple[int]]:
        return type(self), (self.max_num_reqs,)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What is kept under `key`, made when it is first asked for."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: T = self._kept[key]
        return kept

    def follow(self, key: Hashable, num_reqs: int, refill: Callable[[], None]) -> None:
        """Call `refill` after each write of a batch of `num_reqs` requests; one a key."""
        self._followers[key] = num_reqs, refill

    def written(self, num_reqs: int) -> None:
        """A batch of `num_reqs` requests was written."""
        self.writes += 1
        for wanted, refill in self._followers.values():
            if wanted == num_reqs:
                refill()


class MetadataBuffers:
    """Index tensors for a batch of up to `max_num_reqs` requests.

    Arguments:
        device: of every tensor.
        page_size: tokens a page.
        max_num_reqs: most requests.
        max_num_pages: most pages a request.
        num_tokens: new tokens that slots are there for; `reserve_tokens` makes room for more.
        prefills: the batch may hold prefills, whose page ids are packed once more for their own view.
        own_table: the block table is copied: `table` int32 [max_num_reqs, max_num_pages].
        replayed: graphs read the buffers, and what backends keep with them.

    Attributes:
        on_replay: called with the batch size after each replay of a graph that reads these buffers; what shadow mode hangs on.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        page_size: int,
        max_num_reqs: int,
        max_num_pages: int,
        num_tokens: int,
        prefills: bool = False,
        own_table: bool = False,
        replayed: bool = False,
    ) -> None:
        self.device = device
        self.kept = KeptPlans(max_num_reqs, replayed=replayed)
        self.page_size = page_size
        self.on_replay: list[Callable[[int], None]] = []
        # each row begins at a multiple of 16 bytes: kernels are compiled for that, whatever the number of requests
        self._fields = torch.zeros(7, (max_num_reqs + 4) // 4 * 4, dtype=torch.int32, device=device)
        self._rows = self._fields.unbind()
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        first = self._fields.data_ptr()
        self._addresses = range(first, first + self._fields.nbytes)
        self._slots = self._slots_view = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        pages = max_num_reqs * max_num_pages
        self.indices = torch.zeros(pages, dtype=torch.int32, device=device)
        self.prefill_indices = torch.zeros(pages, dtype=torch.int32, device=device) if prefills else None
        self.table = torch.zeros(max_num_reqs, max_num_pages, dtype=torch.int32, device=device) if own_table else None

    def row(self, field: int, length: int) -> torch.Tensor:
        """int32 [length], one of the index tensors named above; the same object for the same length."""
        view = self._views.get((field, length))
        if view is None:
            view = self._views[field, length] = self._rows[field][:length]
        return view

    def slots(self, num_tokens: int) -> torch.Tensor:
        """int64 [num_tokens], the slots of the first tokens; shorter where `reserve_tokens` made no room."""
        if self._slots_view.shape[0] != num_tokens:
            self._slots_view = self._slots[:num_tokens]
        return self._slots_view

    def reserve_tokens(self, num_tokens: int) -> None:
        """Make room for the slots of so many tokens: a power of two, so that growth comes to an end."""
        if num_tokens > self._slots.shape[0]:
            with torch.inference_mode(False):  # written again inside and outside of it
                self._slots = self._slots_view = torch.full(
                    (1 << (num_tokens - 1).bit_length(),), -1, dtype=torch.int64, device=self.device
                )

    def stage(self, query_lens: torch.Tensor) -> torch.Tensor:
        """Host lengths on the device, without a wait: through pinned memory that its allocator keeps until the copy is done."""
        return self.row(QUERY_LENS, query_lens.shape[0]).copy_(query_lens.pin_memory(), non_blocking=True)

    def own(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in the memory that a launch writes first and reads last."""
        return tensor.data_ptr() in self._addresses

    def write(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_lens: torch.Tensor | int,
        *,
        num_reqs: int,
        num_decodes: int,
        num_tokens: int,
        plan: SplitPlan | None,
    ) -> None:
        """Describe a batch.

        Arguments:
            block_table: int32 [live, max_pages].
            seq_lens: int32 [live].
            query_lens: int32 [live], or an int where every request has as many new tokens.
            num_reqs: requests described; those from `live` on are padding, without tokens and keys.
            num_decodes: the leading requests that `plan` is for; the others are prefills.
            num_tokens: slots written; -1 past the tokens of the batch.
            plan: written too where given.
        """
        write = self._write_with_torch if self._fields.is_cpu or not _triton_found() else self._write_with_kernel
        write(block_table, seq_lens, query_lens, num_reqs=num_reqs, num_decodes=num_decodes, num_tokens=num_tokens, plan=plan)
        self.kept.written(num_reqs)

    def _write_with_kernel(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_lens: torch.Tensor | int,
        *,
        num_reqs: int,
        num_decodes: int,
        num_tokens: int,
        plan: SplitPlan | None,
    ) -> None:
        from dualmla_kernels.metadata import build

        build(
            block_table,
            seq_lens,
            query_lens,
            num_reqs=num_reqs,
            num_decodes=num_decodes,
            num_tokens=num_tokens,
            page_size=self.page_size,
            fields=self._fields,
            indices=self.indices,
            prefill_indices=self.prefill_indices if num_decodes < num_reqs else None,
            slots=self._slots,
            own_table=self.table,
            pages_ahead=PAGES_AHEAD,
            plan=plan,
        )

    def _write_with_torch(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_lens: torch.Tensor | int,
        *,
        num_reqs: int,
        num_decodes: int,
        num_tokens: int,
        plan: SplitPlan | None,
    ) -> None:
        live, max_pages = block_table.shape
        page_size, num_prefills = self.page_size, num_reqs - num_decodes
        lengths, new = self.row(SEQ_LENS, num_reqs), self.row(QUERY_LENS, num_reqs)
        for buffer, values in ((lengths, seq_lens), (new, query_lens)):
            buffer[:live] = values
            buffer[live:] = 0
        pages = ((lengths + (page_size - 1)) // page_size).clamp(max=max_pages)
        self.row(LAST_PAGE_LENS, num_reqs).copy_(torch.where(pages > 0, (lengths - 1) % page_size + 1, 0))
        qo_indptr, kv_indptr = self.row(QO_INDPTR, num_reqs + 1), self.row(KV_INDPTR, num_reqs + 1)
        qo_indptr[0] = kv_indptr[0] = 0
        torch.cumsum(new, 0, dtype=torch.int32, out=qo_indptr[1:])
        torch.cumsum(pages, 0, dtype=torch.int32, out=kv_indptr[1:])
        torch.sub(qo_indptr[num_decodes:], qo_indptr[num_decodes], out=self.row(PREFILL_QO_INDPTR, num_prefills + 1))
        torch.sub(kv_indptr[num_decodes:], kv_indptr[num_decodes], out=self.row(PREFILL_KV_INDPTR, num_prefills + 1))

        tokens = int(qo_indptr[-1])
        request = torch.repeat_interleave(torch.arange(num_reqs, device=self.device), new.long(), output_size=tokens)
        position = (lengths - new - qo_indptr[:-1])[request] + torch.arange(tokens, device=self.device)
        slots = self.slots(num_tokens)
        slots[:tokens] = _slots(block_table, request, position, page_size)
        slots[tokens:] = -1

        rows = _live_entries(block_table, pages[:live].tolist())
        if rows:
            torch.cat(rows, out=self.indices[: int(kv_indptr[-1])])
        if self.prefill_indices is not None and rows[num_decodes:]:  # a table without pages has no rows
            torch.cat(rows[num_decodes:], out=self.prefill_indices[: int(kv_indptr[-1] - kv_indptr[num_decodes])])
        if self.table is not None and live:
            reach = (pages[:live, None] + PAGES_AHEAD) > torch.arange(max_pages, device=self.device)
            table = self.table[:live, :max_pages]
            torch.where(reach, block_table, table, out=table)

        if plan is not None:
            from dualmla_kernels.plan import PlanShape, balanced_plan

            balanced_plan(lengths[:num_decodes], PlanShape(plan.parts, plan.tile), out=plan)


def advance(
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    sampled: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Every request with a new token gets one more key; its token t becomes `sampled[t]` at position `seq_lens`."""
    if not seq_lens.is_cpu and _triton_found():
        from dualmla_kernels.metadata import advance as kernel

        kernel(seq_lens, query_lens, qo_indptr, sampled, tokens, positions)
    else:
        _advance_with_torch(seq_lens, query_lens, qo_indptr, sampled, tokens, positions)


class PlanBuffers:
    """Split plans for the decodes of up to `max_num_reqs` requests, a set of buffers for each query length met.

    Without Triton there is no kernel that would want one: the plan is None.
    """

    def __init__(self, cfg: MLAConfig, device: torch.device, max_num_reqs: int) -> None:
        self._cfg, self._device, self._max_num_reqs = cfg, device, max_num_reqs
        self._plans: dict[int, SplitPlan] = {}
        self._views: dict[tuple[int, int], SplitPlan] = {}

    def of(self, num_decodes: int, max_query_len: int) -> SplitPlan | None:
        """Buffers for `num_decodes` requests of up to `max_query_len` new tokens; what they hold is up to the caller."""
        if num_decodes == 0 or max_query_len == 0 or not _triton_found():
            return None
        view = self._views.get((num_decodes, max_query_len))
        if view is None:
            if max_query_len not in self._plans:
                from dualmla_kernels.decode import plan_shape
                from dualmla_kernels.plan import allocate_plan

                float8 = self._cfg.cache_dtype.itemsize == 1
                shape = plan_shape(self._cfg.num_heads, max_query_len, self._cfg.dtype, self._device, float8)
                with torch.inference_mode(False):  # written again inside and outside of it
                    self._plans[max_query_len] = allocate_plan(self._max_num_reqs, shape, self._device)
            view = self._views[num_decodes, max_query_len] = self._plans[max_query_len].of(num_decodes)
        return view


def _advance_with_torch(
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    sampled: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    moves = query_lens > 0
    token = qo_indptr[:-1][moves].long()
    positions[token] = seq_lens[moves].to(positions.dtype)
    tokens[token] = sampled[token].to(tokens.dtype)
    seq_lens += moves


def _live_entries(block_table: torch.Tensor, pages: list[int]) -> list[torch.Tensor]:
    """The first `pages[r]` entries of each row of the table, as views: one split of its memory into live and dead runs."""
    num_reqs, max_pages = block_table.shape
    if num_reqs == 0 or max_pages == 0:
        return []
    if block_table.stride(0) < max_pages:  # an expanded table: its rows overlap
        block_table = block_table.contiguous()
    stride = block_table.stride(0) if num_reqs > 1 else max_pages
    flat = block_table.as_strided(((num_reqs - 1) * stride + max_pages,), (1,))
    runs = [run for count in pages for run in (count, stride - count)]
    runs[-1] -= stride - max_pages
    return list(flat.split_with_sizes(runs))[::2]


def _slots(block_table: torch.Tensor, request: torch.Tensor, position: torch.Tensor, page_size: int) -> torch.Tensor:
    """int64 slots of tokens at `position` of `request`; -1 before the first token and past the table."""
    max_pages = block_table.shape[1]
    if max_pages == 0:
        return torch.full_like(position, -1, dtype=torch.int64)
    written = (position >= 0) & (position < max_pages * page_size)
    page = block_table[request, position.clamp(0, max_pages * page_size - 1) // page_size].long()
    return torch.where(written, page * page_size + position % page_size, -1)


@functools.cache
def _triton_found() -> bool:
    return importlib.util.find_spec("triton") is not None
