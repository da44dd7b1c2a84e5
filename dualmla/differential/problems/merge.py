"""The merge of two partial attentions as a problem: `merge_attn_states`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from dualmla.differential.problems.base import ASKED, Problem, Question, Result, fewer_heads
from dualmla.differential.problems.fields import check_shapes, from_fields, to_fields
from dualmla.ops import merge_attn_states
from dualmla.testing import SAFETY, U32, Exact, poisoned_allocations
from dualmla.testing.prefill import describe


@dataclass(frozen=True, kw_only=True)
class MergeCase:
    """One merge.

    Attributes:
        num_heads, num_tokens, v_head_dim, dtype: of both parts.
        empty_a, empty_b: the tokens that have no keys in a part: lse -inf, and an out that must not be looked at.
        spread: of the LSEs, N(0, spread^2).
        strided: part b's out and lse are slices of wider tensors, a's are not.
        seed: of the numbers.
    """

    num_heads: int = 2
    num_tokens: int = 3
    v_head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    empty_a: tuple[int, ...] = ()
    empty_b: tuple[int, ...] = ()
    spread: float = 3.0
    strided: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return describe(self)


@dataclass(frozen=True)
class MergeProblem(Problem):
    """The numbers of one merge: outs [2, T, H, D], lses fp32 [2, H, T]."""

    case: MergeCase
    outs: torch.Tensor
    lses: torch.Tensor
    operation = "merge"
    order_one = False

    @classmethod
    def draw(cls, case: MergeCase) -> MergeProblem:
        """The problem of a case; its numbers follow from the case's seed."""
        generator = torch.Generator().manual_seed(case.seed)
        outs = torch.randn(2, case.num_tokens, case.num_heads, case.v_head_dim, generator=generator).to(case.dtype)
        return cls(case, outs, torch.randn(2, case.num_heads, case.num_tokens, generator=generator) * case.spread)

    @property
    def title(self) -> str:
        return str(self.case)

    @property
    def tokens(self) -> int:
        return self.case.num_tokens

    def lay_out(self, device: torch.device | str, *, poison: bool) -> MergeCall:
        case = self.case
        outs, lses = self.outs.to(device, copy=True), self.lses.to(device, copy=True)
        for part, empty in enumerate((case.empty_a, case.empty_b)):
            outs[part, list(empty)] = math.nan if poison else 0.0
            lses[part][:, list(empty)] = -math.inf
        out_b, lse_b = outs[1], lses[1]
        if case.strided:
            out_b = torch.cat([out_b, out_b], -1)[..., : case.v_head_dim]
            lse_b = lse_b.T.contiguous().T
        out = torch.full_like(outs[0], math.nan if poison else 7.0)
        return MergeCall(case, outs[0], lses[0], out_b, lse_b, out)

    def pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return to_fields(self.case), {"outs": self.outs, "lses": self.lses}

    @classmethod
    def unpack(cls, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> MergeProblem:
        case = from_fields(MergeCase, fields)
        shape = (case.num_tokens, case.num_heads, case.v_head_dim)
        check_shapes(tensors, {"outs": (2, *shape), "lses": (2, case.num_heads, case.num_tokens)})
        return cls(case, **tensors)

    def smaller(self) -> Iterator[MergeProblem]:
        case = self.case
        for token in range(case.num_tokens if 1 < case.num_tokens <= 16 else 0):
            empty_a, empty_b = ((0,) * (token in empty) for empty in (case.empty_a, case.empty_b))
            one = slice(token, token + 1)
            yield MergeProblem(replace(case, num_tokens=1, empty_a=empty_a, empty_b=empty_b), self.outs[:, one], self.lses[:, :, one])
        for head in range(case.num_heads if 1 < case.num_heads <= 16 else 0):
            one = slice(head, head + 1)
            yield MergeProblem(replace(case, num_heads=1), self.outs[:, :, one], self.lses[:, one])
        for heads in fewer_heads(case.num_heads):
            yield MergeProblem(replace(case, num_heads=heads), self.outs[:, :, :heads], self.lses[:, :heads])
        if case.strided:
            yield replace(self, case=replace(case, strided=False))


@dataclass(frozen=True)
class MergeCall:
    """A merge laid out in memory."""

    case: MergeCase
    out_a: torch.Tensor
    lse_a: torch.Tensor
    out_b: torch.Tensor
    lse_b: torch.Tensor
    out: torch.Tensor

    def run(self, backend: str | None) -> Result:
        with poisoned_allocations():
            return Result(*merge_attn_states(self.out_a, self.lse_a, self.out_b, self.lse_b, out=self.out, backend=backend))

    def exact(self, question: Question = ASKED) -> Exact:
        """With weights w = exp(lse_part - lse): fp32 errs in each exponent by u32 times its size, in all else by a few u32."""
        dtype = self.out.dtype
        lses = torch.stack([self.lse_a, self.lse_b]).double()
        lse = lses.logsumexp(0)
        live = ~lses.isneginf()
        weights = torch.where(live, torch.exp(lses - torch.where(lse.isneginf(), 0.0, lse)), 0.0)
        size = torch.where(live, lses.abs() + torch.where(lse.isneginf(), 0.0, lse.abs()), 0.0)
        outs = torch.stack([self.out_a, self.out_b]).double().permute(0, 2, 1, 3)
        outs = torch.where(live[..., None], outs, 0.0)  # [2, H, T, D]
        out = (weights[..., None] * outs).sum(0)
        wrong = weights * (8 + 2 * size) * U32
        least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        moved = (wrong[..., None] * outs.abs()).sum(0) + out.abs() * (wrong.sum(0)[..., None] + torch.finfo(dtype).eps / 2)
        some = live.any(0)
        out_allowed = SAFETY * torch.where(some[..., None], moved + least, 0.0)
        lse_allowed = SAFETY * torch.where(some, wrong.sum(0) + 4 * U32 * torch.where(some, lse.abs(), 0.0), 0.0)
        return Exact(out.transpose(0, 1), lse, out_allowed.transpose(0, 1), lse_allowed, 1.0)
