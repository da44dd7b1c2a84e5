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
from dualmla.demo.engine import EagerEngine, Engine, PagedEngine, Request
from dualmla.demo.model import build_model, mla_config, require_transformers
from dualmla.demo.pages import PagePool
from dualmla.demo.report import Run
from dualmla.selection import explain, select_backend

# 45 bytes: two pages of 16 that all requests share, and the beginning of a third that each keeps for itself.
INSTRUCTIONS = "You answer questions about attention layers. "
PROMPTS = (
    INSTRUCTIONS + "Why can all heads share one latent row a token?",
    INSTRUCTIONS + "In which order do the pages of a cache come, and which of them can requests share?",
    INSTRUCTIONS + "Decode, greedily.",
)
# With shared pages the second prompt's first chunk is 80 tokens after 32: just long enough that it takes up-projected keys also
# where shorter ones are absorbed (`absorbed_is_cheaper`), so that the demo shows both. The workspace cuts the 32 in two.
CHUNK_TOKENS = 80
WORKSPACE_TOKENS = 24


def run(
    *,
    backend: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    num_heads: int = 16,
    num_layers: int = 2,
    page_sizes: Sequence[int] = (1, 16),
    chunk_tokens: int = CHUNK_TOKENS,
    new_tokens: int = 32,
    prompts: Sequence[str] = PROMPTS,
    seed: int = 0,
    console: Console | None = None,
) -> bool:
    """Decode with the library's eager attention and through dualmla; print both and compare.

    dualmla decodes once for each page size with all prompts whole in the first step, and once more, with the last page size, as a
    server does: requests share the pages of a common prefix, and prompts come in chunks beside the decodes of earlier requests.

    Arguments:
        backend: as in `dualmla.select_backend`: None for what the environment says.
        device: None is a GPU if there is one, else the CPU.
        dtype: of weights, activations and caches. In float32 both must decode the same tokens; in another, see
            `report.Comparison.agrees`.
        num_heads, num_layers: of the model.
        page_sizes: tokens a page.
        chunk_tokens: most prompt tokens a step of the last run.
        new_tokens: decoded after each prompt, the first of them by the prompt's own last step.
        prompts: one request each; a byte is a token.
        seed: of the weights and of the order of the pages.
        console: None is standard output.

    Returns:
        Whether dualmla agreed with the eager attention each time.

    Raises:
        ImportError: transformers is missing or too old.
        ValueError: nothing to decode: no page size, no prompt, an empty one, `new_tokens` below 2 or `chunk_tokens` below 1.
        dualmla.BackendUnavailable: the backend asked for cannot be used; carries the reasons.
    """
    if not page_sizes or not prompts or not all(prompts) or new_tokens < 2 or chunk_tokens < 1:
        raise ValueError(
            "page_sizes and prompts must not be empty, new_tokens must be at least 2 and chunk_tokens at least 1, "
            f"got {page_sizes!r}, {prompts!r}, {new_tokens} and {chunk_tokens}"
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
    requests = [Request(prompt, new_tokens) for prompt in tokens]
    if dtype is torch.float32:
        truth, rounding = _run_eager(model, deepcopy(requests), console), None
    else:
        in_float32 = build_model(num_heads=num_heads, num_layers=num_layers, dtype=torch.float32, device=place, seed=seed)
        in_float32.load_state_dict(model.state_dict())  # so that the weights are rounded in both
        truth = _run_eager(in_float32, requests, console)
        requests = [Request(request.prompt, new_tokens, forced=request.generated) for request in truth.requests]
        rounding = _run_eager(model, deepcopy(requests), console)
    runs = [
        _run_dualmla(model, deepcopy(requests), console, backend=backend, page_size=page_size, seed=seed, chunk_tokens=chunk)
        for page_size, chunk in [*((page_size, None) for page_size in page_sizes), (page_sizes[-1], chunk_tokens)]
    ]
    return report.print_comparison(console, truth, runs, config, rounding)


def _run_eager(model: Any, requests: list[Request], console: Console) -> Run:
    return _decode(EagerEngine(model, requests), console, f"eager {str(model.dtype).removeprefix('torch.')}", None)


def _run_dualmla(
    model: Any,
    requests: list[Request],
    console: Console,
    *,
    backend: str | None,
    page_size: int,
    seed: int,
    chunk_tokens: int | None,
) -> Run:
    """On a cache with as many pages as the requests need and a few to spare."""
    config = mla_config(model, page_size=page_size)
    chosen = select_backend(config, device=model.device, backend=backend)
    pages_each = [-(-(len(request.prompt) + request.new_tokens) // page_size) for request in requests]
    num_pages = sum(pages_each) + 8
    workspace = None if chunk_tokens is None else WORKSPACE_TOKENS
    engine = PagedEngine(
        with_dualmla(model, config, chosen, num_pages=num_pages, context_workspace_tokens=workspace),
        config,
        chosen.get_builder_cls()(config, model.device, max_num_seqs=len(requests), max_num_pages_per_seq=max(pages_each)),
        PagePool(num_pages, page_size, seed=seed),
        requests,
        chunk_tokens=chunk_tokens,
    )
    name = chosen.get_name() if chunk_tokens is None else f"{chosen.get_name()}, shared"
    return _decode(engine, console, name, page_size)


def _decode(engine: Engine, console: Console, name: str, page_size: int | None) -> Run:
    requests = engine.requests
    label = name if page_size is None else f"{name}, page size {page_size}"
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn())
    steps, speeds = [], []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(label, total=sum(request.new_tokens for request in requests))
        while not all(request.done for request in requests):
            start = time.perf_counter()
            step = engine.step()
            steps.append(step)
            if not step.prompt_tokens:
                speeds.append(step.decodes / (time.perf_counter() - start))
            progress.update(task, completed=sum(len(request.generated) for request in requests))
    return Run(
        name,
        page_size,
        requests,
        statistics.median(speeds),  # because on a GPU kernels are compiled in some of the steps
        engine.cache_bytes() / sum(request.num_cached for request in requests),
        sum(step.prompt_tokens for step in steps),
        sum(step.mixed for step in steps),
    )
