"""Tables of cases, one for tests, benchmarks and the command line alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from dualmla.testing.cases import DecodeCase
from dualmla.testing.layer import LayerCase
from dualmla.testing.prefill import PrefillCase

MAX_COST = 80_000
"""Most heads * query tokens * keys of a case in the quick grid: what Triton's interpreter does in about two seconds."""

RAGGED = (130, 0, 5, 64, 1)
"""Lengths of the requests of a ragged batch: two splits, empty, short, a whole tile, one token."""

_Pair = tuple[tuple[str, Any], tuple[str, Any]]


def _quick_case(heads: int, query_len: int, page_size: int, kv: int | str, dtype: torch.dtype) -> DecodeCase:
    lens = RAGGED if kv == "ragged" else (int(kv),)
    new = tuple(query_len if i % 2 == 0 else 1 for i in range(len(lens)))
    return DecodeCase(num_heads=heads, query_lens=new, page_size=page_size, seq_lens=lens, dtype=dtype)


def _quick_cost(heads: int = 1, query_len: int = 1, kv: int | str = 0, **_: Any) -> int:
    """Work of a combination, also of an unfinished one."""
    return heads * query_len * (sum(RAGGED) if kv == "ragged" else int(kv))


def pairwise(factors: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few combinations of factors in which every pair of values occurs that `MAX_COST` lets occur; greedy, deterministic."""
    names = list(factors)
    values = [[(name, value) for value in factors[name]] for name in names]
    left: dict[_Pair, None] = {
        pair: None
        for a, b in itertools.combinations(values, 2)
        for pair in itertools.product(a, b)
        if _quick_cost(**dict(pair)) <= MAX_COST
    }
    combinations: list[dict[str, Any]] = []
    while left:
        chosen = dict(next(iter(left)))
        for name in names:
            if name not in chosen:
                allowed = [value for value in factors[name] if _quick_cost(**chosen, **{name: value}) <= MAX_COST]
                turn = len(combinations) % len(allowed)  # among values that gain as much, each gets its turn
                allowed = allowed[turn:] + allowed[:turn]
                gains = [sum(pair in left for pair in _pairs({**chosen, name: value}, names)) for value in allowed]
                chosen[name] = allowed[gains.index(max(gains))]
        for pair in _pairs(chosen, names):
            left.pop(pair, None)
        combinations.append(chosen)
    return combinations


def _pairs(combination: dict[str, Any], names: Sequence[str]) -> list[_Pair]:
    present = [(name, combination[name]) for name in names if name in combination]
    return list(itertools.combinations(present, 2))


_CORNERS = (
    DecodeCase(num_heads=3, seq_lens=(5, 9, 3, 0), padding_tokens=3, page_size=16),
    DecodeCase(num_heads=3, seq_lens=(3,), query_lens=(3,), page_size=64),
    DecodeCase(num_heads=16, seq_lens=(1,), num_kv_splits=16),
    DecodeCase(num_heads=8, seq_lens=(1000, 70), query_lens=(2, 1), num_kv_splits=5, page_size=16),
    DecodeCase(num_heads=16, seq_lens=(31, 17, 16, 15), page_size=16, dtype=torch.float16),
    DecodeCase(num_heads=8, seq_lens=(65, 7), query_lens=(4, 2), causal=False, page_size=3),
    DecodeCase(num_heads=3, seq_lens=(100, 80), page_size=16, shared_pages=3),
    DecodeCase(num_heads=3, seq_lens=(100, 80), page_size=16, strided=True),
    DecodeCase(num_heads=3, seq_lens=(100,), kv_lora_rank=128, qk_rope_head_dim=32, dtype=torch.float32),
    DecodeCase(num_heads=3, seq_lens=(100, 3), page_size=16, data="flashmla"),
    DecodeCase(num_heads=3, seq_lens=(100, 3), page_size=16, data="flat"),
    DecodeCase(num_heads=3, seq_lens=(100, 3), page_size=16, data="peaked"),
    DecodeCase(num_heads=3, seq_lens=(100, 3), page_size=16, data="huge", dtype=torch.float16),
    DecodeCase(num_heads=3, seq_lens=(100, 3), page_size=16, data="huge", dtype=torch.float32),
    DecodeCase(num_heads=3, seq_lens=(100, 3), page_size=16, data="denormal"),
    DecodeCase(num_heads=3, seq_lens=(100, 3), page_size=16, data="denormal", dtype=torch.float16),
)

QUICK_GRID = (
    *(
        _quick_case(**combination)
        for combination in pairwise(
            {
                "query_len": range(1, 10),
                "kv": (0, 1, 63, 64, 65, 1000, "ragged"),
                "heads": (1, 3, 8, 16, 63, 128),
                "page_size": (1, 3, 16, 64),
                "dtype": (torch.bfloat16, torch.float16, torch.float32),
            }
        )
    ),
    *_CORNERS,
)
"""Every pair of (query length, kv length, heads, page size, dtype) and the corners, with the interpreter in mind."""

PREFILL_GRID = (
    PrefillCase(query_lens=(8,)),
    PrefillCase(num_heads=1, query_lens=(3, 0, 5), key_lens=(70, 4, 5), padding_tokens=2),
    PrefillCase(num_heads=2, query_lens=(65, 1), key_lens=(64, 130), dtype=torch.float16, strided=True),
    PrefillCase(num_heads=2, query_lens=(4, 7), key_lens=(9, 3), dtype=torch.float32, causal=False),
)
"""The corners of a prefill: empty requests, contexts, fewer keys than queries, padding, strides."""

LAYER_GRID = (
    LayerCase(seq_lens=(9, 5), query_lens=(1, 5)),
    LayerCase(seq_lens=(5, 9), query_lens=(5, 1), page_size=1),
    LayerCase(seq_lens=(40, 20, 33, 2), query_lens=(2, 1, 9, 2), decode_threshold=2, padding_tokens=3, page_size=3),
    LayerCase(seq_lens=(70, 35), query_lens=(1, 3), shared_pages=2, dtype=torch.float32, strided=True),
)
"""Mixed batches in both orders, several tokens a decode, a shared prefix, strides."""
