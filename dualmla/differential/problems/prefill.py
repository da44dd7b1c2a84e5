"""Prefill as a problem: `mla_prefill` over keys and values of each head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from dualmla.differential.problems.base import ASKED, DEEPSEEK_SCALES, Problem, Question, Result, fewer_heads
from dualmla.differential.problems.fields import check_shapes, from_fields, to_fields
from dualmla.testing import Exact
from dualmla.testing.prefill import PrefillCase, PrefillInputs, exact_prefill, make_prefill_inputs, run_prefill


@dataclass(frozen=True)
class PrefillProblem(Problem):
    """The numbers of one `mla_prefill`: q [T, H, qk_head_dim], k [S, H, qk_head_dim], v [S, H, v_head_dim], without padding."""

    case: PrefillCase
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    operation = "prefill"

    @classmethod
    def draw(cls, case: PrefillCase) -> PrefillProblem:
        """The problem of a case; its numbers follow from the case's seed."""
        inputs = make_prefill_inputs(replace(case, strided=False))
        tokens, keys = sum(case.query_lens), sum(case.keys)
        return cls(case, inputs.q[:tokens], inputs.k[:keys], inputs.v[:keys])

    @property
    def title(self) -> str:
        return str(self.case)

    @property
    def tokens(self) -> int:
        return sum(self.case.query_lens)

    @property
    def softmax_scale(self) -> float:
        return self.case.softmax_scale

    @property
    def wrong_scales(self) -> dict[str, float]:
        dim = self.case.qk_head_dim
        return {f"{dim} ** -0.5, from the head": dim**-0.5, **DEEPSEEK_SCALES}

    def lay_out(self, device: torch.device | str, *, poison: bool) -> PrefillCall:
        inputs = make_prefill_inputs(self.case, device)
        for place, numbers in ((inputs.q, self.q), (inputs.k, self.k), (inputs.v, self.v)):
            place[: len(numbers)] = numbers.to(place.device)
            if not poison:
                place[len(numbers) :] = 0.0
        if not poison:
            inputs.out.fill_(7.0)
        return PrefillCall(inputs)

    def pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return to_fields(self.case), {"q": self.q, "k": self.k, "v": self.v}

    @classmethod
    def unpack(cls, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> PrefillProblem:
        case = from_fields(PrefillCase, fields)
        tokens, keys, heads = sum(case.query_lens), sum(case.keys), case.num_heads
        check_shapes(
            tensors, {"q": (tokens, heads, case.qk_head_dim), "k": (keys, heads, case.qk_head_dim), "v": (keys, heads, case.v_head_dim)}
        )
        return cls(case, **tensors)

    def smaller(self) -> Iterator[PrefillProblem]:
        case = self.case
        requests = len(case.query_lens)
        if requests > 1:
            for request in range(requests):
                yield self._kept([(n, m) if i == request else (0, 0) for i, (n, m) in enumerate(self._lengths())], drop_empty=True)
        for heads in fewer_heads(case.num_heads):
            yield PrefillProblem(replace(case, num_heads=heads), self.q[:, :heads], self.k[:, :heads], self.v[:, :heads])
        for cut in (2, 1):
            lengths = [(n // 2, m // 2) if cut == 2 else (max(n - 1, 0), max(m - 1, 0)) for n, m in self._lengths()]
            if lengths != self._lengths():
                yield self._kept(lengths)
        for simple in ({"padding_tokens": 0}, {"strided": False}):
            if any(getattr(case, name) != value for name, value in simple.items()):
                yield replace(self, case=replace(case, **simple))
        rounded = (self.q.float().round(), self.k.float().round(), self.v.float().round())
        if any(not torch.equal(new, old.float()) for new, old in zip(rounded, (self.q, self.k, self.v), strict=True)):
            yield PrefillProblem(case, *(new.to(case.dtype) for new in rounded))

    def _lengths(self) -> list[tuple[int, int]]:
        return list(zip(self.case.query_lens, self.case.keys, strict=True))

    def _kept(self, lengths: list[tuple[int, int]], drop_empty: bool = False) -> PrefillProblem:
        """With the first queries and keys of each request."""

        def rows(x: torch.Tensor, old: tuple[int, ...], new: list[int]) -> torch.Tensor:
            first = [0, *accumulate(old)]
            return torch.cat([x[first[i] : first[i] + n] for i, n in enumerate(new)])

        queries, keys = [n for n, _ in lengths], [m for _, m in lengths]
        left = [pair for pair in lengths if not drop_empty or any(pair)]
        case = replace(self.case, query_lens=tuple(n for n, _ in left), key_lens=tuple(m for _, m in left))
        return PrefillProblem(
            case, rows(self.q, self.case.query_lens, queries), rows(self.k, self.case.keys, keys), rows(self.v, self.case.keys, keys)
        )


@dataclass(frozen=True)
class PrefillCall:
    """A prefill laid out in memory."""

    inputs: PrefillInputs

    def run(self, backend: str | None) -> Result:
        return Result(*run_prefill(self.inputs, backend))

    def exact(self, question: Question = ASKED) -> Exact:
        case = self.inputs.case
        scale = case.softmax_scale if question.softmax_scale is None else question.softmax_scale
        return exact_prefill(replace(self.inputs, case=replace(case, softmax_scale=scale)), shift=question.shift)
