"""Decode as a problem: `mla_decode` over a paged latent cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dualmla.backends.base import BackendUnavailable
from dualmla.differential.problems.base import ASKED, DEEPSEEK_SCALES, Problem, Question, Result
from dualmla.differential.problems.fields import check_shapes, from_fields, to_fields
from dualmla.differential.verdict import Kind
from dualmla.testing import DecodeCase, DecodeInputs, DecodeValues, Exact, draw_decode_values, exact_decode, lay_out_decode, run_decode


@dataclass(frozen=True)
class DecodeProblem(Problem):
    """The numbers of one `mla_decode`."""

    values: DecodeValues
    operation = "decode"

    @classmethod
    def draw(cls, case: DecodeCase) -> DecodeProblem:
        """The problem of a case; its numbers follow from the case's seed."""
        return cls(draw_decode_values(case))

    @property
    def case(self) -> DecodeCase:
        return self.values.case

    @property
    def title(self) -> str:
        return str(self.case)

    @property
    def softmax_scale(self) -> float:
        return self.case.softmax_scale

    @property
    def wrong_scales(self) -> dict[str, float]:
        case = self.case
        return {
            f"{case.latent_dim} ** -0.5, from the latent row": case.latent_dim**-0.5,
            f"{case.kv_lora_rank} ** -0.5, from kv_lora_rank": case.kv_lora_rank**-0.5,
            **DEEPSEEK_SCALES,
        }

    @property
    def tokens(self) -> int:
        return sum(self.case.new_tokens)

    @property
    def order_one(self) -> bool:  # type: ignore[override]
        return self.case.data in ("normal", "flashmla")

    def pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        rows = {f"rows.{request}": rows for request, rows in enumerate(self.values.rows)}
        return to_fields(self.case), {"q": self.values.q, **rows}

    @classmethod
    def unpack(cls, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> DecodeProblem:
        case = from_fields(DecodeCase, fields)
        rows = {f"rows.{request}": (length, case.latent_dim) for request, length in enumerate(case.seq_lens)}
        check_shapes(tensors, {"q": (sum(case.new_tokens) + case.padding_tokens, case.num_heads, case.latent_dim), **rows})
        return cls(DecodeValues(case, tensors["q"], tuple(tensors[f"rows.{request}"] for request in range(len(case.seq_lens)))))

    def lay_out(self, device: torch.device | str, *, poison: bool) -> DecodeCall:
        return DecodeCall(lay_out_decode(self.values, device, poison=poison))

    def questions(self) -> Iterator[tuple[Kind, str, Question]]:
        yield from super().questions()
        yield "accuracy", "the last page of each request is not read", Question(last_page=False)

    def alternatives(self) -> Iterator[tuple[Kind, str, DecodeProblem]]:
        if self.case.first_page:
            yield "indices", "right with the same rows at the cache's start, wrong past 2^31 elements", self._with(first_page=0)
        if self.case.num_kv_splits not in (None, 1):
            yield "splits", f"right with num_kv_splits=1, wrong with {self.case.num_kv_splits}", self._with(num_kv_splits=1)
        if self.case.k_scale not in (None, 1.0):
            yield "accuracy", f"right with k_scale=1, wrong with {self.case.k_scale}", self._with(k_scale=None)
        if max(self.case.new_tokens, default=0) > 1:
            yield "accuracy", f"right with one new token a request, wrong with {list(self.case.new_tokens)}", self._last_tokens(1)

    def alone(self) -> Iterator[tuple[slice, DecodeProblem]]:
        """With fixed splits, each request by itself and its tokens in the batch: the same bits are promised."""
        if self.case.num_kv_splits is None or len(self.case.seq_lens) < 2:
            return
        for request, (first, new) in enumerate(self._spans()):
            if new:
                yield slice(first, first + new), self._requests([request], padding=0)

    def smaller(self) -> Iterator[DecodeProblem]:
        case = self.case
        requests = list(range(len(case.seq_lens)))
        for kept in _parts(requests):
            yield self._requests(kept, self.case.padding_tokens)
        for kept in _parts(list(range(case.num_heads))):
            yield replace(self, values=DecodeValues(replace(case, num_heads=len(kept)), self.values.q[:, kept], self.values.rows))
        for cut in (lambda n: n // 2, lambda n: n - 64, lambda n: n - 1):
            yield from self._shorter(cut)
        yield from self._fewer_tokens()
        for simple in (
            {"padding_tokens": 0},
            {"padding_tokens": min(case.padding_tokens, 1)},
            {"shared_pages": 0},
            {"strided": False},
            {"first_page": 0},
            {"num_kv_splits": None},
            {"num_kv_splits": min(case.num_kv_splits or 1, 2)},
            {"page_size": 1},
            {"page_size": max(case.page_size // 2, 1)},
            {"k_scale": None},
        ):
            if case.num_kv_splits is None and "num_kv_splits" in simple:
                continue
            if any(getattr(case, name) != value for name, value in simple.items()):
                yield self._with(**simple)
        yield from self._plainer_numbers()

    def _with(self, **changes: object) -> DecodeProblem:
        case = replace(self.case, **changes)  # type: ignore[arg-type]
        return DecodeProblem(DecodeValues(case, self.values.q[: self.tokens + case.padding_tokens], self.values.rows))

    def _spans(self) -> list[tuple[int, int]]:
        """(first token, tokens) of each request."""
        new = self.case.new_tokens
        return [(sum(new[:i]), n) for i, n in enumerate(new)]

    def _rows(self) -> list[torch.Tensor]:
        """The latent rows of each request as memory holds them: what is shared is the first request's."""
        shared = self.case.full_shared_pages * self.case.page_size
        return [torch.cat([self.values.rows[0][:shared], rows[shared:]]) if shared else rows for rows in self.values.rows]

    def _requests(self, kept: Sequence[int], padding: int) -> DecodeProblem:
        """Without the other requests."""
        spans, rows = self._spans(), self._rows()
        q = [self.values.q[spans[i][0] : sum(spans[i])] for i in kept]
        return self._rebuilt(q, [rows[i] for i in kept], padding)

    def _rebuilt(self, q: list[torch.Tensor], rows: list[torch.Tensor], padding: int) -> DecodeProblem:
        tail = self.values.q[len(self.values.q) - padding :] if padding else self.values.q[:0]
        case = replace(self.case, seq_lens=tuple(len(r) for r in rows), query_lens=tuple(len(part) for part in q), padding_tokens=padding)
        return DecodeProblem(DecodeValues(case, torch.cat([*q, tail]), tuple(rows)))

    def _shorter(self, cut: Callable[[int], int]) -> Iterator[DecodeProblem]:
        """All requests with fewer keys: the first ones kept, then the last ones."""
        rows = self._rows()
        lengths = [max(cut(len(r)), 0) for r in rows]
        if sum(lengths) == sum(self.case.seq_lens):
            return
        q = [self.values.q[first : first + new] for first, new in self._spans()]
        yield self._rebuilt(q, [r[:n] for r, n in zip(rows, lengths, strict=True)], self.case.padding_tokens)
        yield self._rebuilt(q, [r[len(r) - n :] for r, n in zip(rows, lengths, strict=True)], self.case.padding_tokens)

    def _fewer_tokens(self) -> Iterator[DecodeProblem]:
        """All requests with fewer new tokens, the last ones."""
        longest = max(self.case.new_tokens, default=0)
        for most in {1, longest // 2, longest - 1} - {0, longest}:
            if 0 < most < longest:
                yield self._last_tokens(most)

    def _last_tokens(self, most: int) -> DecodeProblem:
        """Each request with so many new tokens at most, its last ones."""
        q = [self.values.q[first + max(new - most, 0) : first + new] for first, new in self._spans()]
        return self._rebuilt(q, self._rows(), self.case.padding_tokens)

    def _plainer_numbers(self) -> Iterator[DecodeProblem]:
        """Integers, then zeros."""
        values = self.values
        for q in (values.q.float().round().to(values.q.dtype), torch.zeros_like(values.q)):
            if not torch.equal(q, values.q):
                yield DecodeProblem(replace(values, q=q))
        for make in (torch.round, torch.ones_like):
            rows = tuple(make(r.float()).to(r.dtype) for r in values.rows)
            if any(not torch.equal(new.float(), old.float()) for new, old in zip(rows, values.rows, strict=True)):
                yield DecodeProblem(replace(values, rows=rows))


@dataclass(frozen=True)
class DecodeCall:
    """A decode laid out in memory."""

    inputs: DecodeInputs

    def run(self, backend: str | None) -> Result:
        """With the LSE; without, where the backend can do the call but not that."""
        try:
            return Result(*run_decode(self.inputs, backend))
        except BackendUnavailable:
            return Result(*run_decode(replace(self.inputs, case=replace(self.inputs.case, return_lse=False)), backend))

    def exact(self, question: Question = ASKED) -> Exact:
        return exact_decode(self.inputs, softmax_scale=question.softmax_scale, shift=question.shift, last_page=question.last_page)


def _parts(items: list[int]) -> Iterator[list[int]]:
    """Halves, then (of few) all but one and each alone."""
    if len(items) < 2:
        return
    half = len(items) // 2
    yield items[:half]
    yield items[half:]
    if len(items) <= 8:
        for i in range(len(items)):
            yield items[:i] + items[i + 1 :]
