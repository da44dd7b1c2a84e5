"""A batch with its work plan, as AITER's persistent decode reads it: made once a step, shared by the layers.

Every query token is a request of its own with the keys that it sees: with several tokens a request the persistent kernels let a
token see keys behind it. A token without keys is given one, row 0 of the cache, and its result is thrown away: an empty work item
ends its workgroup, and what lies behind it is never written.

The memory belongs to the metadata's buffers and is sized once. Under a graph state it is refilled whenever a batch is prepared or
moved on, outside of the graphs that read it; elsewhere by the first layer of a step.
"""

from __future__ import annotations

import torch

from dualmla.backends.aiter.batch import rows_of, step_of
from dualmla.backends.aiter.planner import Planner
from dualmla.backends.base import current
from dualmla.metadata import MLAMetadata

LEAST_KEYS = 1
"""Of a request: none, and its work item would be empty."""


class WorkPlan:
    """Memory for up to `rows` query tokens.

    Arguments:
        planner: AITER's functions.
        rows: most query tokens.
        dtype, kv_cache_dtype: that the plan is for.
        device: of every tensor.
        causal: as in `mla_decode`.
        num_slots: keys that `kv_indices` has room for; None: it is made anew at each filling, as large as the batch wants it.
    """

    def __init__(
        self,
        planner: Planner,
        rows: int,
        *,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
        device: torch.device,
        causal: bool,
        num_slots: int | None,
    ) -> None:
        self._planner, self._dtypes, self._causal, self._fixed = planner, (dtype, kv_cache_dtype), causal, num_slots is not None
        with torch.inference_mode(False), current(device):  # refilled inside and outside of it
            self.tables = planner.tables(rows, dtype, kv_cache_dtype, device)
            self._qo_indptr, self._kv_indptr, self._last_page_lens, self._seen = (
                torch.empty(rows + 1, dtype=torch.int32, device=device) for _ in range(4)
            )
            self.kv_indices = torch.empty(num_slots or 0, dtype=torch.int32, device=device)
        self._rows = 0
        self._step: tuple[int, ...] = ()

    @property
    def qo_indptr(self) -> torch.Tensor:
        """int32 [n + 1], a row each."""
        return self._qo_indptr[: self._rows + 1]

    @property
    def kv_indptr(self) -> torch.Tensor:
        """int32 [n + 1], keys of each row, one at least."""
        return self._kv_indptr[: self._rows + 1]

    @property
    def last_page_lens(self) -> torch.Tensor:
        """int32 [n], ones."""
        return self._last_page_lens[: self._rows]

    @property
    def seen(self) -> torch.Tensor:
        """int32 [n], keys that each row of the caller sees; 0: its result counts for nothing."""
        return self._seen[: self._rows]

    def hold(self, meta: MLAMetadata, num_tokens: int) -> None:
        """See to it that this is the plan of `meta` as it now is, for `num_tokens` rows, and stays so where a graph reads it."""
        if meta.kept.replayed:
            meta.kept.follow((self, num_tokens), meta.num_reqs, lambda: self.fill(meta, num_tokens))
        if self._step != step_of(meta, num_tokens):
            self.fill(meta, num_tokens)

    def fill(self, meta: MLAMetadata, num_tokens: int) -> None:
        """Plan `meta`, without a wait for the device. Constants are written too: a graph may have been captured around the rest."""
        from dualmla_kernels.token_slots import token_slots

        self._rows, self._step = num_tokens, step_of(meta, num_tokens)
        torch.arange(num_tokens + 1, dtype=torch.int32, device=meta.device, out=self.qo_indptr)
        self.last_page_lens.fill_(1)
        request, seen = rows_of(meta, num_tokens, causal=self._causal)
        self.seen.copy_(seen)
        self._kv_indptr[:1].zero_()
        keys = seen.clamp(min=LEAST_KEYS, max=meta.block_table.shape[1] * meta.page_size)
        torch.cumsum(keys, 0, dtype=torch.int32, out=self.kv_indptr[1:])
        slots = token_slots(meta.block_table, request, self.kv_indptr, meta.page_size, out=self.kv_indices if self._fixed else None)
        first = self.kv_indptr[:-1].long()
        slots[first] = torch.where(seen > 0, slots[first], 0)
        self.kv_indices = slots
        with current(meta.device):
            self._planner.plan(self.tables, self.qo_indptr, self.kv_indptr, self.last_page_lens, *self._dtypes)


def work_plan(
    planner: Planner, meta: MLAMetadata, num_tokens: int, dtype: torch.dtype, kv_cache_dtype: torch.dtype, *, causal: bool, captured: bool
) -> WorkPlan:
    """The plan of `num_tokens` query rows of `meta`.

    Arguments:
        captured: into a graph; one that does not come from a graph state plans within itself, since its replays meet other lengths.
    """
    from dualmla_kernels.token_slots import num_slots

    kept = meta.kept
    rows = max(num_tokens, kept.max_num_reqs * meta.max_query_len)
    plan = kept.get(
        ("aiter plan", rows, dtype, kv_cache_dtype, causal),
        lambda: WorkPlan(
            planner,
            rows,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            device=meta.device,
            causal=causal,
            num_slots=num_slots(rows, meta.block_table.shape[1], meta.page_size) if kept.replayed else None,
        ),
    )
    if captured and not kept.replayed:
        plan.fill(meta, num_tokens)
    else:
        plan.hold(meta, num_tokens)
    return plan
