"""A mixed batch as a problem: one `forward` of a layer, with cache write, prefills, decodes and projections."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dualmla.differential.problems.base import ASKED, DEEPSEEK_SCALES, Problem, Question, Result, fewer_heads
from dualmla.differential.problems.fields import from_fields, to_fields
from dualmla.testing import Exact
from dualmla.testing.layer import LayerCase, LayerInputs, exact_layer, make_layer_inputs, run_layer


@dataclass(frozen=True)
class LayerProblem(Problem):
    """The forward of a case; its numbers follow from the case's seed, also when the case shrinks."""

    case: LayerCase
    operation = "forward"
    order_one = False  # values are projected: FlashMLA's absolute tolerance is for values of an attention alone

    @property
    def title(self) -> str:
        return str(self.case)

    @property
    def tokens(self) -> int:
        return sum(self.case.query_lens)

    @property
    def paths(self) -> Sequence[slice]:
        """The decodes and the prefills."""
        first = sum(itertools.takewhile(lambda new: new <= self.case.decode_threshold, self.case.query_lens))
        return (slice(0, first), slice(first, self.tokens))

    @property
    def softmax_scale(self) -> float:
        return self.case.softmax_scale

    @property
    def wrong_scales(self) -> dict[str, float]:
        return DEEPSEEK_SCALES

    def lay_out(self, device: torch.device | str, *, poison: bool) -> LayerCall:
        inputs = make_layer_inputs(self.case, device)
        if not poison:
            for tensor in (inputs.q, inputs.kv_c, inputs.k_pe):
                tensor[self.tokens :] = 0.0
            cache = inputs.kv_cache
            cache.copy_(torch.where(cache.isnan(), 0.0, cache.float()).to(cache.dtype))
            inputs.output.fill_(7.0)
        return LayerCall(inputs)

    def pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return to_fields(self.case), {}

    @classmethod
    def unpack(cls, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> LayerProblem:
        return cls(from_fields(LayerCase, fields))

    def smaller(self) -> Iterator[LayerProblem]:
        case = self.case
        if len(case.seq_lens) > 1:
            for request in range(len(case.seq_lens)):
                keep = slice(request, request + 1)
                yield LayerProblem(replace(case, seq_lens=case.seq_lens[keep], query_lens=case.query_lens[keep], shared_pages=0))
            for request in range(len(case.seq_lens)):
                without = [lens[:request] + lens[request + 1 :] for lens in (case.seq_lens, case.query_lens)]
                yield LayerProblem(replace(case, seq_lens=without[0], query_lens=without[1]))
        changes: list[dict[str, Any]] = [{"num_heads": heads} for heads in fewer_heads(case.num_heads)]
        changes += [{"padding_tokens": 0}, {"strided": False}, {"shared_pages": 0}, {"page_size": 1}]
        if not case.shared_pages:
            halved = [max(n // 2, 1) for n in case.query_lens]
            contexts = [max(length - n, 0) for length, n in zip(case.seq_lens, case.query_lens, strict=True)]
            changes += [
                {"query_lens": tuple(halved), "seq_lens": tuple(c + n for c, n in zip(contexts, halved, strict=True))},
                {"seq_lens": tuple(c // 2 + n for c, n in zip(contexts, case.query_lens, strict=True))},
            ]
        for change in changes:
            if any(getattr(case, name) != value for name, value in change.items()):
                yield LayerProblem(replace(case, **change))


@dataclass(frozen=True)
class LayerCall:
    """A forward laid out in memory."""

    inputs: LayerInputs

    def run(self, backend: str | None) -> Result:
        out = run_layer(self.inputs, backend)
        return Result(out.view(len(out), self.inputs.case.num_heads, -1), None)

    def exact(self, question: Question = ASKED) -> Exact:
        return exact_layer(self.inputs, softmax_scale=question.softmax_scale, shift=question.shift)
