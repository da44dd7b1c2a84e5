"""Which problems a check runs by the name of a grid; random ones: `random_problems`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

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
from dualmla.testing import LAYER_GRID, PREFILL_GRID, QUICK_GRID, DecodeCase, LayerCase
from dualmla.testing.timed import timed_grid

Draw = Callable[[], Problem]
"""Problems are drawn when their turn comes: a grid's numbers would not fit in memory together."""


def _decodes(cases: Sequence[DecodeCase]) -> list[Draw]:
    return [lambda case=case: DecodeProblem.draw(case) for case in cases]  # type: ignore[misc]


def _quick() -> list[Draw]:
    """The grids of `dualmla.testing`, and the corners of the other operations."""
    replays = (
        ReplayProblem.of(LayerCase(seq_lens=(9, 5, 20), query_lens=(1, 1, 1)), 8),
        ReplayProblem.of(LayerCase(seq_lens=(40, 2), query_lens=(2, 1), page_size=1), 3),
    )
    writes = (
        CacheCase(num_tokens=20, skipped=(0, 7)),
        CacheCase(num_tokens=5, padding_tokens=2, page_size=1, dtype=torch.float16, strided=True),
        CacheCase(num_tokens=5, kv_cache_dtype=torch.float8_e4m3fn, k_scale=0.5, spread=400.0),
    )
    merges = (
        MergeCase(num_tokens=5, empty_a=(0, 2), empty_b=(2, 3), strided=True),
        MergeCase(num_heads=3, dtype=torch.float32, spread=100.0),
    )
    return [
        *_decodes(QUICK_GRID),
        *(lambda case=case: PrefillProblem.draw(case) for case in PREFILL_GRID),
        *(lambda case=case: LayerProblem(case) for case in LAYER_GRID),
        *(lambda problem=problem: problem for problem in replays),
        *(lambda case=case: CacheProblem.draw(case) for case in writes),
        *(lambda case=case: MergeProblem.draw(case) for case in merges),
    ]


def _aiter() -> list[Draw]:
    """The sizes of AITER's own test of its decode, without the LSE as there, the least work first."""
    shapes = [
        (kv, batch, heads, query_len)
        for kv in (21, 64, 256, 512, 1200, 3200, 5200, 8192)
        for batch in (1, 3, 5, 16, 32, 64, 128, 256)
        for heads, query_len in ((16, 1), (16, 2), (16, 4), (128, 1), (128, 2))
    ]
    shapes.sort(key=lambda s: s[0] * s[1] * s[2] * s[3])
    return _decodes(
        [
            DecodeCase(num_heads=heads, seq_lens=(kv,) * batch, query_lens=(query_len,) * batch, return_lse=False)
            for kv, batch, heads, query_len in shapes
        ]
    )


def _flashmla() -> list[Draw]:
    """The sizes of FlashMLA's own test: odd head counts, zero lengths among others, pages of 64; the least work first."""
    shapes = [
        (kv, heads, query_len, empty)
        for kv in (20, 140, 4096)
        for heads in (1, 3, 9, 63, 64, 126, 128)
        for query_len in (1, 2, 4)
        for empty in (False, True)
    ]
    shapes.sort(key=lambda s: s[0] * s[1] * s[2])
    return _decodes(
        [
            DecodeCase(
                num_heads=heads,
                seq_lens=(kv, 0 if empty else kv // 2 + 1),
                query_lens=(query_len,) * 2,
                page_size=64,
                data="flashmla",
            )
            for kv, heads, query_len, empty in shapes
        ]
    )


def _vllm() -> list[Draw]:
    """The batches of vLLM's tests of its MLA backends: decodes, prefills and prefixes mixed."""
    batches = (((32, 40, 48, 56), (1, 1, 5, 5)), ((1568, 520, 8, 80, 96, 8), (32, 8, 8, 16, 16, 8)), ((32, 40), (1, 1)), ((32, 40), (8, 8)))
    cases = [
        LayerCase(num_heads=heads, seq_lens=seq, query_lens=new, page_size=16, decode_threshold=threshold)
        for heads in (2, 16, 128)
        for seq, new in sorted(batches, key=lambda batch: sum(batch[0]))
        for threshold in (1, 5)
    ]
    return [lambda case=case: LayerProblem(case) for case in cases]  # type: ignore[misc]


def _peers() -> list[Draw]:
    """The decodes that `dualmla bench --grid peers` times."""
    cases = [timed.case for timed in timed_grid("peers", torch.device("cpu"))]
    return _decodes([case for case in cases if isinstance(case, DecodeCase)])


GRIDS: dict[str, Callable[[], list[Draw]]] = {"quick": _quick, "aiter": _aiter, "flashmla": _flashmla, "vllm": _vllm, "peers": _peers}
