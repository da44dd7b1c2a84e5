"""Certification: AITER over the shapes that an engine will use, against float64, on the machine where it will run.

Each shape is judged in a worker of its own, so that a hang, an abort or a fault of the GPU costs that shape and no other. Cases
come with several seeds, and the judge runs each at least twice: some hazards of AITER's kernels show now and then only.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dualmla.backends.aiter import probe
from dualmla.backends.aiter.certificate import Certificate, Entry, Machine, Shape
from dualmla.backends.base import BackendUnavailable
from dualmla.config import FLOAT8_DTYPES
from dualmla.differential.grids import Draw
from dualmla.differential.problems import DecodeProblem, PrefillProblem
from dualmla.differential.worker import Worker, WorkerFailed
from dualmla.testing import DecodeCase
from dualmla.testing.prefill import PrefillCase

PAGE_SIZES = (1, 16)
SEEDS = 3


@dataclass(frozen=True)
class Group:
    """A shape and the problems that it must get right."""

    shape: Shape
    draws: tuple[Draw, ...]


def machine_of(device: torch.device) -> Machine:
    """What a certificate made on `device` is bound to.

    Raises:
        BackendUnavailable: AITER can't be used there.
    """
    found = probe.usable(device)
    if isinstance(found, str):
        raise BackendUnavailable("aiter", [found])
    return Machine.here(found.aiter, found.arch)


def groups(
    num_heads: Sequence[int],
    *,
    max_query_len: int = 1,
    return_lse: bool = False,
    kv_cache_dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    seeds: int = SEEDS,
) -> list[Group]:
    """The decodes and prefills of an engine.

    Arguments:
        num_heads: query heads a rank, one for each way that the model is split.
        max_query_len: most query tokens a request of a decode; above 1 with speculative decoding.
        return_lse: decodes are also wanted with the LSE, as for context parallelism; over a float8 cache AITER has none.
        kv_cache_dtypes: of the caches that decodes read.
        seeds: how often each case is drawn anew.
    """
    decodes = [
        Shape("decode", heads, n, lse, str(dtype).removeprefix("torch."))
        for dtype in kv_cache_dtypes
        for heads in num_heads
        for n in range(1, max_query_len + 1)
        for lse in ((False, True) if return_lse and dtype not in FLOAT8_DTYPES else (False,))
    ]
    prefills = [Shape("prefill", heads, 0, True) for heads in num_heads]
    return [
        *(Group(shape, tuple(_decodes(shape, seeds))) for shape in decodes),
        *(Group(shape, tuple(_prefills(shape, seeds))) for shape in prefills),
    ]


def certify(
    groups: Iterable[Group],
    machine: Machine,
    *,
    device: str,
    backend: str = "aiter",
    load: tuple[Path, ...] = (),
    limit: float = 120.0,
    on_entry: Callable[[Entry], None] = lambda entry: None,
) -> Certificate:
    """Judge each group; a shape passes when all its problems do.

    Arguments:
        groups: what to run, in order.
        machine: from `machine_of`.
        device: where it runs.
        backend: that is judged.
        load: files that register it.
        limit: seconds a problem may take; the first one of a group waits for AITER's import, and perhaps for a build.
        on_entry: called after each group.
    """
    entries = []
    for group in groups:
        entries.append(_entry(group, device, backend, load, limit))
        on_entry(entries[-1])
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Certificate(machine, date, tuple(entries))


def _entry(group: Group, device: str, backend: str, load: tuple[Path, ...], limit: float) -> Entry:
    begin, cases, used, why = time.perf_counter(), 0, 0.0, ""
    try:
        with Worker(backend, device, load, limit) as worker:
            for draw in group.draws:
                verdict = worker.judge(draw())
                cases += 1
                if verdict.comparison is not None:
                    used = max(used, verdict.comparison.budget_used, verdict.comparison.lse_budget_used)
                if verdict.status != "pass":
                    facts = [finding.sentence for finding in verdict.findings] or [f"refused: {reason}" for reason in verdict.refusals]
                    why = f"{verdict.title}: {'; '.join(facts)}"
                    break
    except WorkerFailed as error:
        why = str(error)
    return Entry(group.shape, not why, cases, used, time.perf_counter() - begin, why)


def _decodes(shape: Shape, seeds: int) -> Iterator[Draw]:
    n = shape.query_len
    batches: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [  # keys and queries of each request, rows of padding
        ((n,), (n,), 0),
        ((63, 64, 65, 66, 130, 200), (n,) * 6, 0),  # tails read row 0 of the cache
        ((17, 33, 49, 0, 113), (n,) * 5, 3),  # lengths that broke causality in persistent mode; no keys
        ((9, 7, 66), (n, 0, n), 0),  # a request without a query
        ((70, 40, 1, 33), (n, 1, n, max(n - 1, 1)), 2),  # ragged, and fewer keys than queries
        ((4096, 1000), (n,) * 2, 0),
        (tuple(range(n, 2000, 61)), (n,) * len(range(n, 2000, 61)), 0),
    ]
    dtype = getattr(torch, shape.kv_cache_dtype)
    float8 = {"kv_cache_dtype": dtype, "k_scale": 0.375} if dtype in FLOAT8_DTYPES else {}
    for seed in range(seeds):
        for page_size in PAGE_SIZES:
            for keys, queries, padding in batches:
                case = DecodeCase(
                    num_heads=shape.num_heads,
                    seq_lens=keys,
                    query_lens=queries,
                    padding_tokens=padding,
                    page_size=page_size,
                    return_lse=shape.return_lse,
                    seed=seed,
                    **float8,
                )
                yield lambda case=case: DecodeProblem.draw(case)  # type: ignore[misc]


def _prefills(shape: Shape, seeds: int) -> Iterator[Draw]:
    batches: list[tuple[tuple[int, ...], tuple[int, ...], bool]] = [  # queries and keys of each request, causal
        ((1,), (1,), True),
        ((65, 1, 129), (65, 1, 129), True),
        ((64, 7, 0), (200, 7, 5), True),
        ((9, 140), (3, 20), True),  # rows without keys
        ((5, 70, 3), (130, 64, 0), False),  # a context
        ((1024, 300), (1024, 2000), True),
    ]
    for seed in range(seeds):
        for queries, keys, causal in batches:
            case = PrefillCase(
                num_heads=shape.num_heads, query_lens=queries, key_lens=keys, padding_tokens=2, causal=causal, strided=True, seed=seed
            )
            yield lambda case=case: PrefillProblem.draw(case)  # type: ignore[misc]
