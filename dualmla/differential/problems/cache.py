"""The cache write as a problem: `concat_and_cache_mla`. Its result is the whole cache: what must be written, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from dualmla.differential.problems.base import ASKED, Problem, Question, Result
from dualmla.differential.problems.fields import check_shapes, from_fields, to_fields
from dualmla.ops import concat_and_cache_mla
from dualmla.testing import SAFETY, Exact, poisoned_allocations
from dualmla.testing.prefill import describe


@dataclass(frozen=True, kw_only=True)
class CacheCase:
    """One cache write.

    Attributes:
        num_tokens: rows written, -1 slots included.
        skipped: of them, the tokens whose slot is -1.
        padding_tokens: rows past the slot mapping.
        page_size, dtype, kv_cache_dtype, k_scale, kv_lora_rank, qk_rope_head_dim: as elsewhere.
        spread: the numbers are N(0, spread^2); a large one saturates an fp8 cache.
        strided: kv_c, k_pe and the cache are slices of wider tensors.
        seed: of the numbers and the slots.
    """

    num_tokens: int = 5
    skipped: tuple[int, ...] = ()
    padding_tokens: int = 0
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_cache_dtype: torch.dtype | None = None
    k_scale: float | None = None
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    spread: float = 1.0
    strided: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return describe(self)


@dataclass(frozen=True)
class CacheProblem(Problem):
    """The numbers of one cache write: rows [num_tokens, latent_dim]."""

    case: CacheCase
    rows: torch.Tensor
    operation = "cache write"
    order_one = False

    @classmethod
    def draw(cls, case: CacheCase) -> CacheProblem:
        """The problem of a case; its numbers follow from the case's seed."""
        generator = torch.Generator().manual_seed(case.seed)
        rows = torch.randn(case.num_tokens, case.kv_lora_rank + case.qk_rope_head_dim, generator=generator) * case.spread
        return cls(case, rows.to(case.dtype))

    @property
    def title(self) -> str:
        return str(self.case)

    @property
    def tokens(self) -> int:
        return 1 << 62  # no row of the cache is padding

    def lay_out(self, device: torch.device | str, *, poison: bool) -> CacheCall:
        case = self.case
        generator = torch.Generator().manual_seed(case.seed)
        pages = -(-case.num_tokens // case.page_size) + 2
        slots = torch.randperm(pages * case.page_size, generator=generator)[: case.num_tokens]
        slots[list(case.skipped)] = -1
        rows = torch.full((case.num_tokens + case.padding_tokens, self.rows.shape[1] + 8 * case.strided), math.nan if poison else 0.0)
        rows = rows.to(case.dtype)
        rows[: case.num_tokens, : self.rows.shape[1]] = self.rows
        rows = rows.to(device)
        rank, width = case.kv_lora_rank, self.rows.shape[1]
        kv_c, k_pe = rows[:, :rank], rows[:, rank:width]
        if not case.strided:
            kv_c, k_pe = kv_c.contiguous(), k_pe.contiguous()
        before = torch.randn(pages, case.page_size, width + 8 * case.strided, generator=generator)
        cache = before.to(case.kv_cache_dtype or case.dtype).to(device)[..., :width]
        return CacheCall(case, kv_c, k_pe, cache, slots.to(device))

    def pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return to_fields(self.case), {"rows": self.rows}

    @classmethod
    def unpack(cls, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> CacheProblem:
        case = from_fields(CacheCase, fields)
        check_shapes(tensors, {"rows": (case.num_tokens, case.kv_lora_rank + case.qk_rope_head_dim)})
        return cls(case, tensors["rows"])

    def smaller(self) -> Iterator[CacheProblem]:
        case = self.case
        for n in (case.num_tokens // 2, case.num_tokens - 1):
            if 0 < n < case.num_tokens:
                for part in (slice(0, n), slice(case.num_tokens - n, case.num_tokens)):
                    skipped = tuple(i - part.start for i in case.skipped if part.start <= i < part.stop)
                    yield CacheProblem(replace(case, num_tokens=n, skipped=skipped), self.rows[part])
        changes: tuple[dict[str, Any], ...] = (
            {"padding_tokens": 0},
            {"strided": False},
            {"page_size": 1},
            {"k_scale": None},
            {"skipped": ()},
        )
        for change in changes:
            if any(getattr(case, name) != value for name, value in change.items()):
                yield replace(self, case=replace(case, **change))


@dataclass(frozen=True)
class CacheCall:
    """A cache write laid out in memory; the truth must be asked for before it runs, or after: both know the slots."""

    case: CacheCase
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    kv_cache: torch.Tensor
    slots: torch.Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "_before", self.kv_cache.double())

    def run(self, backend: str | None) -> Result:
        with poisoned_allocations():
            concat_and_cache_mla(self.kv_c, self.k_pe, self.kv_cache, self.slots, k_scale=self.case.k_scale, backend=backend)
        return Result(self.kv_cache.flatten(0, 1)[:, None].float(), None)

    def exact(self, question: Question = ASKED) -> Exact:
        """Rows as the cache's dtype can hold them; one rounding is allowed where it is not the rows' own, none elsewhere."""
        cache_dtype = self.kv_cache.dtype
        want: torch.Tensor = self._before.flatten(0, 1).clone()  # type: ignore[attr-defined]
        allowed = torch.zeros_like(want)
        written = self.slots >= 0
        rows = torch.cat([self.kv_c, self.k_pe], -1)[: len(self.slots)][written].double() / (self.case.k_scale or 1.0)
        limits = torch.finfo(cache_dtype)
        want[self.slots[written]] = rows.clamp(-limits.max, limits.max)
        if cache_dtype != self.case.dtype:
            one = rows.abs() * limits.eps / 2 + limits.smallest_normal * limits.eps / 2
            allowed[self.slots[written]] = SAFETY * one
        lse = torch.zeros(1, len(want), dtype=torch.float64, device=want.device)
        return Exact(want[:, None], lse, allowed[:, None], torch.zeros_like(lse), 1.0)
