"""Which problems a check runs: named grids, and random ones with a liking for edges."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
from dualmla.testing import LAYER_GRID, PREFILL_GRID, QUICK_GRID, DecodeCase, LayerCase, PrefillCase
from dualmla.testing.timed import timed_grid
from dualmla.validation import device_float8

Draw = Callable[[], Problem]
"""Problems are drawn when their turn comes: a grid's numbers would not fit in memory together."""

BUILDS = 64
"""Kernels of a decode that the random problems of a seed draw from, before Triton's own specialisation on sizes."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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


def random_problems(seed: int, *, most_work: int = 40_000) -> Iterator[Draw]:
    """Endless random problems; the i-th depends on `seed` and i alone.

    What a kernel is compiled for (`_Build`) comes from a table of `BUILDS` that the seed draws, so that thousands of problems
    compile hundreds of kernels and not thousands; batches, lengths and numbers are drawn anew for each.

    Arguments:
        most_work: heads * (query tokens * keys) of a problem; the default suits Triton's interpreter.
    """
    for i in range(1 << 62):
        yield lambda i=i: _random_problem(random.Random(f"{seed}/{i}"), _builds(seed), most_work)  # type: ignore[misc]


@dataclass(frozen=True)
class _Build:
    """What decides which kernel is compiled; fields as of `DecodeCase`, `float8` for its cache."""

    num_heads: int
    page_size: int
    dtype: torch.dtype
    float8: bool
    causal: bool
    strided: bool


@functools.cache
def _builds(seed: int) -> tuple[_Build, ...]:
    """The table of a seed."""
    rng = random.Random(f"{seed}/builds")
    return tuple(
        _Build(
            num_heads=rng.choice((1, 2, 3, 4, 8, 16, 16, 16, 17, 32, 64, 128)),
            page_size=rng.choice((1, 1, 3, 16, 64)),
            dtype=rng.choice((torch.bfloat16, *DTYPES)),
            float8=rng.random() < 0.15,
            causal=rng.random() < 0.95,
            strided=rng.random() < 0.15,
        )
        for _ in range(BUILDS)
    )


def _random_build(rng: random.Random, builds: Sequence[_Build], most_heads: int) -> _Build:
    """One of at most so many heads; where none is, one of the fewest."""
    fewest = min(build.num_heads for build in builds)
    return rng.choice([build for build in builds if build.num_heads <= max(most_heads, fewest)])


def _random_problem(rng: random.Random, builds: Sequence[_Build], most_work: int) -> Problem:
    kind = rng.choices(("decode", "prefill", "forward", "replay", "cache", "merge"), (68, 10, 9, 3, 5, 5))[0]
    match kind:
        case "decode":
            return DecodeProblem.draw(_random_decode(rng, builds, most_work))
        case "prefill":
            lens = [_length(rng, 70) for _ in range(rng.randint(1, 3))]
            keys = [rng.choice((n, n, max(n - 1, 0), n + _length(rng, 130))) for n in lens]
            work = sum(n * m for n, m in zip(lens, keys, strict=True))
            build = _random_build(rng, builds, most_work // max(work, 1))
            return PrefillProblem.draw(
                PrefillCase(
                    num_heads=build.num_heads,
                    query_lens=tuple(lens),
                    key_lens=tuple(keys),
                    padding_tokens=rng.choice((0, 0, 3)),
                    dtype=build.dtype,
                    causal=build.causal,
                    strided=build.strided,
                    seed=rng.randrange(1 << 32),
                )
            )
        case "forward":
            new = [rng.choice((1, 1, 1, 2, 5, 9)) for _ in range(rng.randint(1, 4))]
            seq = [max(n, 1) + _length(rng, 130) for n in new]
            return LayerProblem(
                LayerCase(
                    num_heads=rng.choice((1, 2, 3)),
                    seq_lens=tuple(seq),
                    query_lens=tuple(new),
                    decode_threshold=rng.choice((1, 1, 2, 4)),
                    padding_tokens=rng.choice((0, 0, 2)),
                    page_size=rng.choice((1, 3, 16)),
                    dtype=rng.choice(DTYPES),
                    strided=rng.random() < 0.3,
                    seed=rng.randrange(1 << 32),
                )
            )
        case "replay":
            new = [rng.choice((1, 1, 2, 3)) for _ in range(rng.randint(2, 5))]
            case = LayerCase(
                num_heads=rng.choice((1, 2, 3)),
                seq_lens=tuple(n + _length(rng, 130) for n in new),
                query_lens=tuple(new),
                page_size=rng.choice((1, 3, 16)),
                dtype=rng.choice(DTYPES),
                seed=rng.randrange(1 << 32),
            )
            return ReplayProblem.of(case, len(new) + rng.randint(0, 3))
        case "cache":
            tokens = rng.randint(1, 40)
            fp8 = rng.random() < 0.4
            return CacheProblem.draw(
                CacheCase(
                    num_tokens=tokens,
                    skipped=tuple(i for i in range(tokens) if rng.random() < 0.1),
                    padding_tokens=rng.choice((0, 2)),
                    page_size=rng.choice((1, 3, 16, 64)),
                    dtype=rng.choice(DTYPES),
                    kv_cache_dtype=_device_fp8() if fp8 else None,
                    k_scale=rng.choice((None, 0.5, 0.03)) if fp8 else None,
                    spread=rng.choice((1.0, 1.0, 300.0)),
                    strided=rng.random() < 0.3,
                    seed=rng.randrange(1 << 32),
                )
            )
        case _:
            tokens = rng.randint(1, 12)
            return MergeProblem.draw(
                MergeCase(
                    num_heads=rng.choice((1, 3, 16)),
                    num_tokens=tokens,
                    v_head_dim=rng.choice((128, 512)),
                    dtype=rng.choice(DTYPES),
                    empty_a=tuple(i for i in range(tokens) if rng.random() < 0.2),
                    empty_b=tuple(i for i in range(tokens) if rng.random() < 0.2),
                    spread=rng.choice((1.0, 10.0, 100.0)),
                    strided=rng.random() < 0.5,
                    seed=rng.randrange(1 << 32),
                )
            )


def _random_decode(rng: random.Random, builds: Sequence[_Build], most_work: int) -> DecodeCase:
    lens = [_length(rng, 400) for _ in range(rng.choice((1, 1, 2, 3, 5)))]
    longest = rng.choice((1, 1, 1, 2, 4, 9))
    new = [longest if rng.random() < 0.6 else rng.randint(1, longest) for _ in lens]
    work = sum(n * (m + 64) for n, m in zip(new, lens, strict=True))
    build = _random_build(rng, builds, most_work // max(work, 1))
    return DecodeCase(
        num_heads=build.num_heads,
        seq_lens=tuple(lens),
        query_lens=tuple(new),
        padding_tokens=rng.choice((0, 0, 0, 1, 4)),
        page_size=build.page_size,
        dtype=build.dtype,
        kv_cache_dtype=_device_fp8() if build.float8 else None,
        k_scale=rng.choice((None, 0.25, 3.0)) if build.float8 else None,
        softmax_scale=rng.choice((0.1352337788608801, 0.1352337788608801, 192**-0.5, 0.5)),
        causal=build.causal,
        num_kv_splits=rng.choice((1, 2, 3, 16)) if rng.random() < 0.2 else None,
        data=rng.choice(("normal", "normal", "normal", "flashmla", "flat", "peaked", "huge", "denormal")),
        first_page=2**31 // (576 * build.page_size) + 1 if rng.random() < 0.03 else 0,
        shared_pages=rng.choice((0, 0, 1, 2)),
        strided=build.strided,
        seed=rng.randrange(1 << 32),
    )


def _length(rng: random.Random, most: int) -> int:
    """Edges of pages and of key tiles with one more and one less, the very short, the empty, and anything."""
    edge = rng.choice((16, 32, 64, 64, 128, 192, 256)) + rng.choice((-1, 0, 1))
    return min(rng.choice((0, 1, 2, 3, edge, edge, rng.randint(1, most), rng.randint(1, most))), most)


def _device_fp8() -> torch.dtype:
    """The flavour of this machine's GPU, or of a CPU."""
    return device_float8(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
