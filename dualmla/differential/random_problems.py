"""Random problems with a liking for edges: page edges, key-tile edges, the empty, the very short, odd numbers and layouts."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

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
from dualmla.testing import DecodeCase, LayerCase, PrefillCase
from dualmla.validation import device_float8

BUILDS, LAYER_BUILDS = 40, 6
"""Kernels of a decode, and sets of kernels of a layer, that the random problems of a seed draw from, before Triton's own
specialisation on sizes."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

DTYPES_OF_BUILDS = (*6 * [torch.bfloat16], *3 * [torch.float16], torch.float32)
"""In turn: a kernel of fp32 takes a GPU's compiler four times as long, a quarter of a minute."""

DTYPES_OF_LAYERS = (*3 * [torch.bfloat16], *2 * [torch.float16], torch.float32)


def random_problems(seed: int, *, most_work: int = 40_000) -> Iterator[Draw]:
    """Endless random problems; the i-th depends on `seed` and i alone.

    What a kernel is compiled for (`_Build`) comes from tables of `BUILDS` and `LAYER_BUILDS` that the seed draws, so that thousands
    of problems compile hundreds of kernels and not thousands; batches, lengths and numbers are drawn anew for each.

    Arguments:
        most_work: heads * (query tokens * keys) of a problem; the default suits Triton's interpreter.
    """
    for i in range(1 << 62):
        yield lambda i=i: _random_problem(random.Random(f"{seed}/{i}"), _tables(seed), most_work)  # type: ignore[misc]


@dataclass(frozen=True)
class _Build:
    """What decides which kernel is compiled; fields as of `DecodeCase`, `float8` for its cache."""

    num_heads: int
    page_size: int
    dtype: torch.dtype
    float8: bool
    causal: bool
    strided: bool


@dataclass(frozen=True)
class _Tables:
    """What a seed's problems are built from: calls of an attention, and layers, whose every operation is compiled for each."""

    attention: tuple[_Build, ...]
    layers: tuple[_Build, ...]


@functools.cache
def _tables(seed: int) -> _Tables:
    """Those of a seed."""
    rng = random.Random(f"{seed}/builds")
    attention = tuple(
        _Build(
            num_heads=rng.choice((1, 2, 3, 4, 8, 16, 16, 16, 17, 32, 64, 128)),
            page_size=rng.choice((1, 1, 3, 16, 64)),
            dtype=DTYPES_OF_BUILDS[i % len(DTYPES_OF_BUILDS)],
            float8=rng.random() < 0.15,
            causal=rng.random() < 0.95,
            strided=rng.random() < 0.15,
        )
        for i in range(BUILDS)
    )
    layers = tuple(
        _Build(
            num_heads=rng.choice((1, 2, 3)),
            page_size=rng.choice((1, 3, 16)),
            dtype=DTYPES_OF_LAYERS[i % len(DTYPES_OF_LAYERS)],
            float8=False,
            causal=True,
            strided=rng.random() < 0.3,
        )
        for i in range(LAYER_BUILDS)
    )
    return _Tables(attention, layers)


def _random_build(rng: random.Random, builds: Sequence[_Build], most_heads: int) -> _Build:
    """One of at most so many heads; where none is, one of the fewest."""
    fewest = min(build.num_heads for build in builds)
    return rng.choice([build for build in builds if build.num_heads <= max(most_heads, fewest)])


def _random_problem(rng: random.Random, tables: _Tables, most_work: int) -> Problem:
    kind = rng.choices(("decode", "prefill", "forward", "replay", "cache", "merge"), (68, 10, 9, 3, 5, 5))[0]
    match kind:
        case "decode":
            return DecodeProblem.draw(_random_decode(rng, tables.attention, most_work))
        case "prefill":
            lens = [_length(rng, 70) for _ in range(rng.randint(1, 3))]
            keys = [rng.choice((n, n, max(n - 1, 0), n + _length(rng, 130))) for n in lens]
            work = sum(n * m for n, m in zip(lens, keys, strict=True))
            build = _random_build(rng, tables.attention, most_work // max(work, 1))
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
            build = rng.choice(tables.layers)
            return LayerProblem(
                LayerCase(
                    num_heads=build.num_heads,
                    seq_lens=tuple(seq),
                    query_lens=tuple(new),
                    decode_threshold=rng.choice((1, 1, 2, 4)),
                    padding_tokens=rng.choice((0, 0, 2)),
                    page_size=build.page_size,
                    dtype=build.dtype,
                    strided=build.strided,
                    seed=rng.randrange(1 << 32),
                )
            )
        case "replay":
            new = [rng.choice((1, 1, 2, 3)) for _ in range(rng.randint(2, 5))]
            build = rng.choice(tables.layers)
            case = LayerCase(
                num_heads=build.num_heads,
                seq_lens=tuple(n + _length(rng, 130) for n in new),
                query_lens=tuple(new),
                page_size=build.page_size,
                dtype=build.dtype,
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
