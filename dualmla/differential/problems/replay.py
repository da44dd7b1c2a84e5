"""Replayed graphs as a problem: a layer's decode, captured once, replayed for a batch and then for a smaller one.

The captured batch has room for more requests than are live, and the second batch lacks the last request of the first: what is
judged are the second replay's rows, with everything past its tokens padding that must be 0. On a CPU a replay runs the step
again on the same buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from dualmla.differential.problems.base import ASKED, DEEPSEEK_SCALES, Problem, Question, Result, fewer_heads
from dualmla.differential.problems.fields import from_fields, to_fields
from dualmla.graph import DecodeGraphs, MLAGraphState
from dualmla.metadata import MLAMetadata, MLAMetadataBuilder
from dualmla.testing import Exact, poisoned_allocations
from dualmla.testing.layer import LayerCase, LayerInputs, exact_layer, make_layer, make_layer_inputs


@dataclass(frozen=True)
class ReplayProblem(Problem):
    """Two replays of a graph.

    Arguments:
        case: the first batch, of at least two requests, all decodes: `decode_threshold` is the most new tokens of one. Its
            padding is that of the captured batch: `capacity * decode_threshold` tokens in all.
    """

    case: LayerCase
    operation = "replay"
    order_one = False

    @classmethod
    def of(cls, case: LayerCase, capacity: int) -> ReplayProblem:
        """The problem of a case captured for `capacity` requests."""
        longest = max(case.query_lens)
        padding = capacity * longest - sum(case.query_lens)
        return cls(replace(case, decode_threshold=longest, padding_tokens=padding, strided=False))

    @property
    def capacity(self) -> int:
        """Requests of the captured batch."""
        return (sum(self.case.query_lens) + self.case.padding_tokens) // self.case.decode_threshold

    @property
    def title(self) -> str:
        return f"{self.case}-capacity={self.capacity}"

    @property
    def tokens(self) -> int:
        return sum(self.case.query_lens[:-1])

    @property
    def softmax_scale(self) -> float:
        return self.case.softmax_scale

    @property
    def wrong_scales(self) -> dict[str, float]:
        return DEEPSEEK_SCALES

    def lay_out(self, device: torch.device | str, *, poison: bool) -> ReplayCall:
        inputs = make_layer_inputs(self.case, device)
        if not poison:
            for tensor in (inputs.q, inputs.kv_c, inputs.k_pe):
                tensor[sum(self.case.query_lens) :] = 0.0
            cache = inputs.kv_cache
            cache.copy_(torch.where(cache.isnan(), 0.0, cache.float()).to(cache.dtype))
            inputs.output.fill_(7.0)
        return ReplayCall(inputs, self.capacity, self.tokens)

    def pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return to_fields(self.case), {}

    @classmethod
    def unpack(cls, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> ReplayProblem:
        return cls(from_fields(LayerCase, fields))

    def smaller(self) -> Iterator[ReplayProblem]:
        case = self.case
        if len(case.seq_lens) > 2:
            for request in range(len(case.seq_lens)):
                seq, new = (lens[:request] + lens[request + 1 :] for lens in (case.seq_lens, case.query_lens))
                yield ReplayProblem.of(replace(case, seq_lens=seq, query_lens=new), self.capacity - 1)
        if self.capacity > len(case.seq_lens):
            yield ReplayProblem.of(case, len(case.seq_lens))
        changes: tuple[dict[str, Any], ...] = (
            *({"num_heads": heads} for heads in fewer_heads(case.num_heads)),
            {"page_size": 1},
            {"seq_lens": tuple((n + new) // 2 for n, new in zip(case.seq_lens, case.query_lens, strict=True))},
        )
        for change in changes:
            if any(getattr(case, name) != value for name, value in change.items()):
                yield ReplayProblem(replace(case, **change))


@dataclass(frozen=True)
class ReplayCall:
    """The tensors that the graph is captured with, at fixed addresses."""

    inputs: LayerInputs
    capacity: int
    tokens: int

    def run(self, backend: str | None) -> Result:
        inputs, case, meta = self.inputs, self.inputs.case, self.inputs.meta
        cfg, requests = case.config, len(case.seq_lens)
        layer = make_layer(inputs, backend)
        pages = meta.block_table.shape[1]
        state = MLAGraphState(
            cfg, inputs.q.device, max_batch_size=self.capacity, max_num_pages_per_seq=pages, max_query_len=case.decode_threshold
        )

        def step(captured: MLAMetadata) -> torch.Tensor:
            return layer.forward(inputs.q, inputs.kv_c, inputs.k_pe, inputs.kv_cache, captured, k_scale=case.k_scale, output=inputs.output)

        builder = MLAMetadataBuilder(
            cfg, inputs.q.device, max_num_seqs=requests, max_num_pages_per_seq=pages, decode_threshold=case.decode_threshold
        )
        with poisoned_allocations():
            graphs = DecodeGraphs(state, [self.capacity], step)
            graphs.replay(meta)
            fewer = slice(0, requests - 1)
            out = graphs.replay(builder.build(meta.block_table[fewer], meta.seq_lens[fewer], list(case.query_lens[fewer])))
        return Result(out.view(len(out), case.num_heads, -1), None)

    def exact(self, question: Question = ASKED) -> Exact:
        exact = exact_layer(self.inputs, softmax_scale=question.softmax_scale, shift=question.shift)
        for tensor in (exact.out, exact.out_allowed):
            tensor[self.tokens :] = 0.0
        exact.lse[:, self.tokens :] = -torch.inf
        exact.lse_allowed[:, self.tokens :] = 0.0
        return exact
