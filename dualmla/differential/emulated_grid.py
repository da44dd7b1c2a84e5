"""The problems that `dualmla check --emulate` runs: small, each corner once, with the compiler's time for every new shape in mind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from dualmla.backends.aiter.support import FLOAT8
from dualmla.config import FLOAT8_DTYPES
from dualmla.differential.grids import Draw
from dualmla.differential.problems import (
    CacheCase,
    CacheProblem,
    DecodeProblem,
    LayerProblem,
    MergeCase,
    MergeProblem,
    PrefillProblem,
    Problem,
    ReplayProblem,
)
from dualmla.testing import DecodeCase
from dualmla.testing.layer import LayerCase
from dualmla.testing.prefill import PrefillCase

EDGES = (1, 15, 16, 17, 0, 63, 64, 65, 200)
"""Keys: around tiles of 16 and of 64, none, and several tiles with a tail."""

DECODES = (
    DecodeCase(seq_lens=EDGES),
    DecodeCase(seq_lens=EDGES, page_size=64, padding_tokens=1),
    DecodeCase(seq_lens=(3, 1000), page_size=16),
    DecodeCase(seq_lens=(4, 33, 70, 0, 130, 1), query_lens=(4, 1, 3, 1, 2, 0), page_size=16, padding_tokens=2),
    DecodeCase(seq_lens=(66, 3), query_lens=(2, 2), causal=False),
    DecodeCase(seq_lens=(1, 17, 0, 33, 200), num_kv_splits=3),
    DecodeCase(seq_lens=(70, 129), page_size=64, kv_cache_dtype=torch.float8_e4m3fn, k_scale=0.5),
    DecodeCase(seq_lens=(130, 200), data="peaked", shared_pages=1, page_size=64),
    DecodeCase(num_heads=8, seq_lens=(70, 5), page_size=16),
    DecodeCase(num_heads=128, seq_lens=(1, 31, 0, 32, 33, 65, 200), page_size=64),
    DecodeCase(num_heads=128, seq_lens=(1, 40, 130)),
    DecodeCase(num_heads=128, seq_lens=(40, 3), query_lens=(2, 1), page_size=16),
)
PREFILLS = (
    PrefillCase(query_lens=(8,)),
    PrefillCase(num_heads=2, query_lens=(65, 1, 0), key_lens=(64, 130, 3), padding_tokens=2),
    PrefillCase(num_heads=1, query_lens=(130, 20), key_lens=(200, 20)),
    PrefillCase(num_heads=2, query_lens=(4, 7), key_lens=(9, 3), causal=False),
)
WRITES = (
    CacheCase(num_tokens=20, skipped=(0, 7)),
    CacheCase(num_tokens=5, kv_cache_dtype=torch.float8_e4m3fn, k_scale=0.5, spread=400.0),
)
MERGES = (MergeCase(num_tokens=5, empty_a=(0, 2), empty_b=(2, 3), strided=True),)
LAYERS = (LayerCase(seq_lens=(9, 5), query_lens=(1, 5)), LayerCase(seq_lens=(40, 70), query_lens=(9, 1), page_size=1, padding_tokens=1))
REPLAYS = (ReplayProblem.of(LayerCase(seq_lens=(9, 5, 20), query_lens=(1, 1, 1)), 4),)


def emulated_grid() -> list[Draw]:
    """Decodes above all; the least work is not first, the most telling is."""
    return [
        *(lambda case=case: DecodeProblem.draw(case) for case in DECODES),
        *(lambda case=case: PrefillProblem.draw(case) for case in PREFILLS),
        *(lambda case=case: CacheProblem.draw(case) for case in WRITES),
        *(lambda case=case: MergeProblem.draw(case) for case in MERGES),
        *(lambda case=case: LayerProblem(case) for case in LAYERS),
        *(lambda problem=problem: problem for problem in REPLAYS),
    ]


def for_chip(draws: Iterable[Draw], arch: str) -> Iterator[Draw]:
    """The same problems with float8 caches of the flavour that `arch` computes with."""
    for draw in draws:
        yield lambda draw=draw: _for_chip(draw(), FLOAT8[arch])  # type: ignore[misc]


def _for_chip(problem: Problem, float8: torch.dtype) -> Problem:
    match problem:
        case DecodeProblem() if problem.case.kv_cache_dtype in FLOAT8_DTYPES:
            return DecodeProblem.draw(replace(problem.case, kv_cache_dtype=float8))
        case CacheProblem() if problem.case.kv_cache_dtype in FLOAT8_DTYPES:
            return CacheProblem.draw(replace(problem.case, kv_cache_dtype=float8))
        case _:
            return problem
