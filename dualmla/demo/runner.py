"""The demo from start to end: build a model, decode with both attentions, compare."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dualmla.demo import report
from dualmla.demo.attention import with_dualmla
from dualmla.demo.engine import EagerEngine, Engine, PagedEngine, PagePool, Request
from dualmla.demo.model import build_model, mla_config, require_transformers
from dualmla.demo.report import Run
from dualmla.selection import explain, select_backend

PROMPTS = (
    "One latent row a token, shared by all heads.",
    "Pages come in any order.",
    "Decode, greedily.",
)


def run(
    *,
    backend: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    num_heads: int = 16,
    num_layers: int = 2,
    page_sizes: Sequence[int] = (1, 16),
    new_tokens: int = 32,
    prompts: Sequence[str] = PROMPTS,
    seed: int = 0,
    console: Console | None = None,
) -> bool:
    """Decode with the library's eager attention and, for each page size, through dualmla; print both and compare.

    Arguments:
        backend: as in `dualmla.select_backend`: None for what the environment says.
        device: None is a GPU if there is one, else the CPU.
        dtype: of weights, activations and caches. In float32 both must decode the same tokens; in another, see
            `report.Comparison.agrees`.
        num_heads, num_layers: of the model.
        page_sizes: tokens a page; dualmla decodes once for each.
        new_tokens: decoded after each prompt, the first of them by the prompt's own step.
        prompts: one request each; a byte is a token.
        seed: of the weights and of the order of the pages.
        console: None is standard output.

    Returns:
        Whether dualmla agreed with the eager attention each time.

    Raises:
        ImportError: transformers is missing or too old.
        ValueError: nothing to decode: no page size, no prompt, an empty one, or `new_tokens` below 2.
        dualmla.BackendUnavailable: the backend asked for cannot be used; carries the reasons.
    """
    if not page_sizes or not prompts or not all(prompts) or new_tokens < 2:
        raise ValueError(
            f"page_sizes and prompts must not be empty and new_tokens must be at least 2, got {page_sizes!r}, {prompts!r}, {new_tokens}"
        )
    console = console or Console()
    version = require_transformers()
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with console.status("building the model"):
        model = build_model(num_heads=num_heads, num_layers=num_layers, dtype=dtype, device=place, seed=seed)
    config = mla_config(model, page_size=page_sizes[0])
    report.print_model(console, model, config, version)
    report.print_backends(console, explain(config, device=place), select_backend(config, device=place, backend=backend))

    tokens = [list(prompt.encode()) for prompt in prompts]
    requests = [Request(prompt) for prompt in tokens]
    if dtype is torch.float32:
        truth, rounding = _run_eager(model, deepcopy(requests), new_tokens, console), None
    else:
        in_float32 = build_model(num_heads=num_heads, num_layers=num_layers, dtype=torch.float32, device=place, seed=seed)
        in_float32.load_state_dict(model.state_dict())  # so that the weights are rounded in both
        truth = _run_eager(in_float32, requests, new_tokens, console)
        requests = [Request(prompt, forced=request.generated) for prompt, request in zip(tokens, truth.requests, strict=True)]
        rounding = _run_eager(model, deepcopy(requests), new_tokens, console)
    runs = [
        _run_dualmla(model, deepcopy(requests), new_tokens, console, backend=backend, page_size=page_size, seed=seed)
        for page_size in page_sizes
    ]
    return report.print_comparison(console, truth, runs, config, rounding)


def _run_eager(model: Any, requests: list[Request], new_tokens: int, console: Console) -> Run:
    return _decode(EagerEngine(model, requests), new_tokens, console, f"transformers {str(model.dtype).removeprefix('torch.')}", None)


def _run_dualmla(
    model: Any, requests: list[Request], new_tokens: int, console: Console, *, backend: str | None, page_size: int, seed: int
) -> Run:
    """On a cache with as many pages as the requests need and a few to spare."""
    config = mla_config(model, page_size=page_size)
    chosen = select_backend(config, device=model.device, backend=backend)
    pages_each = [-(-(len(request.prompt) + new_tokens) // page_size) for request in requests]
    num_pages = sum(pages_each) + 8
    engine = PagedEngine(
        with_dualmla(model, config, chosen, num_pages=num_pages),
        config,
        chosen.get_builder_cls()(config, model.device, max_num_seqs=len(requests), max_num_pages_per_seq=max(pages_each)),
        PagePool(num_pages, page_size, seed=seed),
        requests,
    )
    return _decode(engine, new_tokens, console, chosen.get_name(), page_size)


def _decode(engine: Engine, new_tokens: int, console: Console, name: str, page_size: int | None) -> Run:
    requests = engine.requests
    label = name if page_size is None else f"{name}, page size {page_size}"
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn())
    seconds = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(label, total=len(requests) * new_tokens)
        for _ in range(new_tokens):
            start = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - start)
            progress.advance(task, len(requests))
    # the first step took the prompts; the median, because on a GPU kernels are compiled in some of the others
    tokens_per_second = len(requests) / statistics.median(seconds[1:])
    return Run(name, page_size, requests, tokens_per_second, engine.cache_bytes() / sum(request.num_cached for request in requests))
