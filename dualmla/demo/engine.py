"""Greedy decoding, twice: the library's own way, and the way a serving engine drives dualmla."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from dualmla.config import MLAConfig
from dualmla.metadata import MLAMetadataBuilder

# Fills the unused entries of a block table: no cache has such a page, so reading one cannot go unseen.
UNUSED_PAGE = 2147480000


@dataclass
class Request:
    """A prompt and what has been decoded after it.

    `logits[i]` [vocab], float32 on the CPU, are those that `generated[i]` is the maximum of. With `forced` the model is fed
    these tokens in place of its own, and `generated` is what it would have said. `num_cached` tokens are in the cache; dualmla
    keeps their latent rows in the `pages`, in order.
    """

    prompt: Sequence[int]
    forced: Sequence[int] | None = None
    generated: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0

    @property
    def pending(self) -> list[int]:
        """The tokens that are not in the cache yet: the prompt at first, then the last one."""
        answer = self.generated if self.forced is None else self.forced[: len(self.generated)]
        return [*self.prompt, *answer][self.num_cached :]

    def advance(self, logits: Tensor) -> None:
        """All pending tokens are cached now, and these logits [vocab] follow: take the most likely token."""
        self.num_cached += len(self.pending)
        self.logits.append(logits.float().cpu())
        self.generated.append(int(self.logits[-1].argmax()))


class Engine(Protocol):
    """Decodes requests, one token of each a step."""

    requests: list[Request]

    def step(self) -> None:
        """Cache the pending tokens of every request and decode one more; the device is idle afterwards."""

    def cache_bytes(self) -> int:
        """What the requests take in the cache of one layer."""


class EagerEngine:
    """The library's attention and cache, one request after the other: a batch would need padding.

    Arguments:
        model: a `DeepseekV3ForCausalLM`.
    """

    def __init__(self, model: Any, requests: list[Request]) -> None:
        from transformers import DynamicCache

        self.model = model
        self.requests = requests
        self._caches = [DynamicCache(config=model.config) for _ in requests]

    @torch.inference_mode()
    def step(self) -> None:
        for request, cache in zip(self.requests, self._caches, strict=True):
            tokens = torch.tensor([request.pending], device=self.model.device)
            # by position, because the keyword of the cache was renamed between the releases that the extra allows
            request.advance(self.model(tokens, None, None, cache).logits[0, -1])

    def cache_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in (cache.layers[0] for cache in self._caches))


class PagePool:
    """The free pages of a cache, handed out in a random order, as by a pool that has served for a while."""

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


class PagedEngine:
    """dualmla's attention: requests of different lengths in one flat batch over a paged latent cache.

    Arguments:
        model: from `with_dualmla`.
        config: that of the model's attention.
        builder: of the model's backend and `config`.
        pool: the pages of the model's caches.
    """

    def __init__(self, model: Any, config: MLAConfig, builder: MLAMetadataBuilder, pool: PagePool, requests: list[Request]) -> None:
        self.model = model
        self.config = config
        self.builder = builder
        self.pool = pool
        self.requests = requests

    @torch.inference_mode()
    def step(self) -> None:
        device = self.model.device
        pending = [request.pending for request in self.requests]
        query_lens = [len(tokens) for tokens in pending]
        starts = [request.num_cached for request in self.requests]
        seq_lens = [start + new for start, new in zip(starts, query_lens, strict=True)]
        positions = [range(start, end) for start, end in zip(starts, seq_lens, strict=True)]
        for request, seq_len in zip(self.requests, seq_lens, strict=True):
            self.pool.extend(request.pages, seq_len)

        logits = self.model(
            torch.tensor([[*chain.from_iterable(pending)]], device=device),
            position_ids=torch.tensor([[*chain.from_iterable(positions)]], device=device),
            use_cache=False,
            mla_metadata=self.builder.build(self._block_table(), torch.tensor(seq_lens, dtype=torch.int32, device=device), query_lens),
        ).logits[0]
        last_rows = torch.tensor(query_lens).cumsum(0) - 1
        for request, row in zip(self.requests, last_rows.tolist(), strict=True):
            request.advance(logits[row])

    def cache_bytes(self) -> int:
        pages = sum(len(request.pages) for request in self.requests)
        return pages * self.config.page_size * self.config.latent_dim * self.config.cache_dtype.itemsize

    def _block_table(self) -> Tensor:
        """int32 [num_reqs, max_pages]"""
        width = max(len(request.pages) for request in self.requests)
        rows = [[*request.pages, *[UNUSED_PAGE] * (width - len(request.pages))] for request in self.requests]
        return torch.tensor(rows, dtype=torch.int32, device=self.model.device)
