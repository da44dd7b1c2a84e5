"""The demo from start to end: build a model, decode with both attentions, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dualmla.demo import report
from dualmla.demo.attention import with_dualmla
from dualmla.demo.engine import Engine, PagePool, Request, Timing, decode_eagerly
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
        dtype: of weights, activations and caches. In float32 both must decode the same tokens. In bfloat16 they round
            differently, and may part where two tokens are nearly as likely.
        num_heads, num_layers: of the model.
        page_sizes: tokens a page; dualmla decodes once for each.
        new_tokens: decoded after each prompt.
        prompts: one request each; a byte is a token.
        seed: of the weights and of the order of the pages.
        console: None is standard output.

    Returns:
        Whether dualmla decoded the eager attention's tokens each time.

    Raises:
        ImportError: transformers is missing or too old.
        dualmla.BackendUnavailable: the backend asked for cannot be used; carries the reasons.
    """
    console = console or Console()
    version = require_transformers()
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with console.status("building the model"):
        model = build_model(num_heads=num_heads, num_layers=num_layers, dtype=dtype, device=place, seed=seed)
    config = mla_config(model, page_size=page_sizes[0])
    report.print_model(console, model, config, version)
    report.print_backends(console, explain(config, device=place), select_backend(config, device=place, backend=backend).get_name())

    total = len(prompts) * new_tokens
    eager_requests = _requests(prompts)
    with _progress(console, "eager", total) as advance:
        eager = _run_eager(model, eager_requests, new_tokens, advance)
    runs = []
    for page_size in page_sizes:
        with _progress(console, f"dualmla, page size {page_size}", total) as advance:
            runs.append(_run_dualmla(model, _requests(prompts), new_tokens, advance, backend=backend, page_size=page_size, seed=seed))
    return report.print_comparison(console, eager, runs, config)


def _run_eager(model: Any, requests: list[Request], new_tokens: int, advance: Callable[[int], None]) -> Run:
    """One request after the other: the library's cache of a batch would need padding."""
    timing = Timing()
    cache_bytes = sum(decode_eagerly(model, request, new_tokens, timing, advance) for request in requests)
    return Run("transformers, eager", requests, timing, _per_token(cache_bytes, model, requests))


def _run_dualmla(
    model: Any,
    requests: list[Request],
    new_tokens: int,
    advance: Callable[[int], None],
    *,
    backend: str | None,
    page_size: int,
    seed: int,
) -> Run:
    """All requests in one batch, on a cache with as many pages as they need and a few to spare."""
    config = mla_config(model, page_size=page_size)
    chosen = select_backend(config, device=model.device, backend=backend)
    pages_each = [-(-(len(request.prompt) + new_tokens) // page_size) for request in requests]
    num_pages = sum(pages_each) + 8
    engine = Engine(
        with_dualmla(model, config, chosen, num_pages=num_pages),
        chosen.get_builder_cls()(config, model.device, max_num_seqs=len(requests), max_num_pages_per_seq=max(pages_each)),
        PagePool(num_pages, page_size, seed=seed),
    )
    for _ in range(new_tokens):
        engine.step(requests)
        advance(len(requests))
    pages = sum(len(request.pages) for request in requests)
    cache_bytes = pages * page_size * config.latent_dim * config.cache_dtype.itemsize * model.config.num_hidden_layers
    return Run(f"{chosen.get_name()}, page size {page_size}", requests, engine.timing, _per_token(cache_bytes, model, requests))


def _requests(prompts: Sequence[str]) -> list[Request]:
    return [Request(list(prompt.encode())) for prompt in prompts]


def _per_token(cache_bytes: int, model: Any, requests: list[Request]) -> float:
    return cache_bytes / sum(request.num_cached for request in requests) / model.config.num_hidden_layers


@contextmanager
def _progress(console: Console, name: str, total: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=total)
        yield lambda tokens: progress.advance(task, tokens)
