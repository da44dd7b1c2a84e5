"""Greedy decoding, twice: the library's own way, and the way a serving engine drives dualmla."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Marks the unused entries of a block table: no cache has such a page, so reading one cannot go unseen.
UNUSED_PAGE = 2147480000


@dataclass
class Request:
    """A prompt and what has been decoded after it.

    `logits[i]` [vocab], float32 on the CPU, are those that `generated[i]` is the maximum of. `num_cached` tokens have their
    latent rows in the `pages`, in order.
    """

    prompt: Sequence[int]
    generated: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0

    @property
    def pending(self) -> list[int]:
        """The tokens that have no latent row yet: the prompt at first, then the token decoded last."""
        return [*self.prompt, *self.generated][self.num_cached :]

    def accept(self, logits: Tensor) -> None:
        """Take the most likely token."""
        self.logits.append(logits.float().cpu())
        self.generated.append(int(self.logits[-1].argmax()))


@dataclass
class Timing:
    """Seconds spent in prefill and decode steps, and the tokens that the latter brought."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    decoded: int = 0

    @contextmanager
    def step(self, *, prefill: bool, num_requests: int, device: torch.device) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        if prefill:
            self.prefill_s += seconds
        else:
            self.decode_s += seconds
            self.decoded += num_requests


class PagePool:
    """The free pages of a cache, handed out in a random order, as a pool that has served for a while would."""

    def __init__(self, num_pages: int, page_size: int, *, seed: int) -> None:
        self.page_size = page_size
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)

    def extend(self, pages: list[int], num_tokens: int) -> None:
        """Add pages until `pages` hold `num_tokens` tokens.

        Raises:
            RuntimeError: the pool is empty.
        """
        while len(pages) * self.page_size < num_tokens:
            if not self._free:
                raise RuntimeError(f"no free page is left; {num_tokens} tokens need {-(-num_tokens // self.page_size)} pages")
            pages.append(self._free.pop())


class Engine:
    """Runs requests of different lengths in one flat batch over a paged latent cache.

    Arguments:
        model: from `with_dualmla`.
        builder: of the model's backend and config.
        pool: the pages of the model's caches.
    """

    def __init__(self, model: Any, builder: Any, pool: PagePool) -> None:
        self.model = model
        self.builder = builder
        self.pool = pool
        self.timing = Timing()

    @torch.inference_mode()
    def step(self, requests: Sequence[Request]) -> None:
        """Cache all pending tokens of each request and decode one more."""
        device = self.model.device
        pending = [request.pending for request in requests]
        query_lens = [len(tokens) for tokens in pending]
        seq_lens = [request.num_cached + new for request, new in zip(requests, query_lens, strict=True)]
        positions = [p for request, end in zip(requests, seq_lens, strict=True) for p in range(request.num_cached, end)]
        for request, seq_len in zip(requests, seq_lens, strict=True):
            self.pool.extend(request.pages, seq_len)

        with self.timing.step(prefill=max(query_lens) > 1, num_requests=len(requests), device=device):
            metadata = self.builder.build(
                self._block_table(requests), torch.tensor(seq_lens, dtype=torch.int32, device=device), query_lens
            )
            logits = self.model(
                torch.tensor([sum(pending, [])], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
                mla_metadata=metadata,
            ).logits[0]

        last_rows = torch.tensor(query_lens).cumsum(0) - 1
        for request, seq_len, row in zip(requests, seq_lens, last_rows.tolist(), strict=True):
            request.num_cached = seq_len
            request.accept(logits[row])

    def _block_table(self, requests: Sequence[Request]) -> Tensor:
        """int32 [num_reqs, max_pages]"""
        width = max(len(request.pages) for request in requests)
        rows = [[*request.pages, *[UNUSED_PAGE] * (width - len(request.pages))] for request in requests]
        return torch.tensor(rows, dtype=torch.int32, device=self.model.device)


@torch.inference_mode()
def decode_eagerly(model: Any, request: Request, new_tokens: int, timing: Timing, advance: Callable[[int], None]) -> int:
    """Decode one request with the library's attention and cache.

    Returns:
        The bytes that the library's cache takes for the request, all layers together.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for _ in range(new_tokens):
        tokens = request.pending
        with timing.step(prefill=len(tokens) > 1, num_requests=1, device=model.device):
            # by position, because the cache's keyword was renamed between the releases that the extra allows
            logits = model(torch.tensor([tokens], device=model.device), None, None, cache).logits[0, -1]
        request.num_cached += len(tokens)
        request.accept(logits)
        advance(1)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
