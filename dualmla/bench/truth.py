"""What a backend is held against before it is timed: float64, within the one error budget."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate

import torch

from dualmla.bench.inputs import Inputs
from dualmla.testing import Comparison, DecodeInputs, Exact, PrefillInputs, compare, exact_attention, exact_decode

Judge = Callable[[torch.Tensor, torch.Tensor | None], Comparison]
"""Holds out [T, H, D_v] and lse fp32 [H, T], or None, against the truth."""

SAMPLED_REQUESTS, SAMPLED_ROWS = 12, 8
"""Of a prefill: at most so many requests, and rows of each, have their truth computed, with all heads."""


def judge_of(inputs: Inputs) -> Judge:
    """The truth is computed here, once for all backends: of every row of a decode, and of a sample of rows of a prefill.

    A prefill's other rows must at least be finite: `out` is full of NaN before a backend writes it.
    """
    if isinstance(inputs, DecodeInputs):
        exact = exact_decode(inputs)
        return lambda out, lse: compare(out, lse, exact)
    rows, exact = _sample(inputs)

    def judge(out: torch.Tensor, lse: torch.Tensor | None) -> Comparison:
        if out.shape != inputs.out.shape:
            return compare(out, lse, replace(exact, out=inputs.out))
        comparison = compare(out[rows], None if lse is None else lse[:, rows], exact)
        wild = ~out.isfinite().all(-1)
        if bool(wild.any()):
            at = tuple(wild.nonzero()[0].tolist())
            comparison.failures.append(f"out has inf or nan in {int(wild.sum())} rows, first at {at} [token, head]")
        return comparison

    return judge


def _sample(inputs: PrefillInputs) -> tuple[torch.Tensor, Exact]:
    """Tokens, int64 [n], and their truth. Each sees a known number of keys and is computed as a query without a mask."""
    case = inputs.case
    tokens, parts = [], []
    firsts, first_keys = accumulate(case.query_lens, initial=0), accumulate(case.keys, initial=0)  # one more each than requests
    spans = list(zip(firsts, first_keys, case.query_lens, case.keys, strict=False))
    step = -(-len(spans) // SAMPLED_REQUESTS)
    for first, first_key, new, keys in spans[::step]:
        for row in _rows(new):
            seen = min(max(keys - new + row + 1, 0), keys) if case.causal else keys
            token, visible = slice(first + row, first + row + 1), slice(first_key, first_key + seen)
            tokens.append(first + row)
            parts.append(
                exact_attention(inputs.q[token], inputs.k[visible], inputs.v[visible], case.softmax_scale, causal=False, dtype=case.dtype)
            )
    exact = Exact(
        out=torch.cat([part.out for part in parts]),
        lse=torch.cat([part.lse for part in parts], 1),
        out_allowed=torch.cat([part.out_allowed for part in parts]),
        lse_allowed=torch.cat([part.lse_allowed for part in parts], 1),
        value_rms=max(part.value_rms for part in parts),
    )
    return torch.tensor(tokens, device=inputs.q.device), exact


def _rows(new: int) -> Iterator[int]:
    """The first and the last row, those beside the edges of a tile, and random ones."""
    edges = dict.fromkeys(row for row in (0, new - 1, 63, 64, 127, 128) if 0 <= row < new)
    yield from edges
    yield from random.Random(new).sample([row for row in range(new) if row not in edges], min(SAMPLED_ROWS, new) - len(edges))
