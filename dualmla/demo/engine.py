"""Greedy decoding: the library's own way, and the way a serving engine drives dualmla."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from dualmla.config import MLAConfig
from dualmla.demo.pages import PagePool
from dualmla.metadata import MLAMetadataBuilder

# Fills the unused entries of a block table: no cache has such a page, so reading one cannot go unseen.
UNUSED_PAGE = 2147480000


@dataclass
class Request:
    """A prompt, the number of tokens wanted after it, and those that have been decoded.

    `logits[i]` [vocab], float32 on the CPU, are those that `generated[i]` is the maximum of. With `forced` the model is fed
    these tokens in place of its own, and `generated` is what it would have said. `num_cached` tokens are in the cache; dualmla
    keeps their latent rows in the `pages`, in order.
    """

    prompt: Sequence[int]
    new_tokens: int
    forced: Sequence[int] | None = None
    generated: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0

    @property
    def done(self) -> bool:
        return len(self.generated) >= self.new_tokens

    @property
    def known(self) -> list[int]:
        """The prompt, and what the model is fed after it."""
        answer = self.generated if self.forced is None else self.forced[: len(self.generated)]
        return [*self.prompt, *answer]

    @property
    def pending(self) -> list[int]:
        """The tokens that are not in the cache yet: the prompt at first, then the last one."""
        return self.known[self.num_cached :]

    def advance(self, num_tokens: int, logits: Tensor) -> None:
        """So many pending tokens are cached now, and these logits [vocab] follow: take the most likely token if none is pending."""
        self.num_cached += num_tokens
        if self.pending:  # the rest of a prompt
            return
        self.logits.append(logits.float().cpu())
        self.generated.append(int(self.logits[-1].argmax()))


@dataclass(frozen=True)
class Step:
    """What a step was fed: tokens of prompts, and the last token of each request that decodes."""

    prompt_tokens: int
    decodes: int

    @property
    def mixed(self) -> bool:
        return self.prompt_tokens > 0 and self.decodes > 0


def _step_of(fed: Sequence[tuple[Request, list[int]]]) -> Step:
    """The step that feeds these requests these tokens."""
    return Step(
        prompt_tokens=sum(len(tokens) for request, tokens in fed if not request.generated),
        decodes=sum(1 for request, _ in fed if request.generated),
    )


class Engine(Protocol):
    """Decodes requests until all are done."""

    requests: list[Request]

    def step(self) -> Step:
        """Cache pending tokens, and decode one more of each request that has none left; the device is idle afterwards."""

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
    def step(self) -> Step:
        fed = [(request, request.pending) for request in self.requests]
        step = _step_of(fed)
        for (request, tokens), cache in zip(fed, self._caches, strict=True):
            # by position, because the keyword of the cache was renamed between the releases that the extra allows
            logits = self.model(torch.tensor([tokens], device=self.model.device), None, None, cache).logits
            request.advance(len(tokens), logits[0, -1])
        return step

    def cache_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in (cache.layers[0] for cache in self._caches))


class PagedEngine:
    """dualmla's attention: requests of different lengths in one flat batch over a paged latent cache.

    Prompts are fed whole, in the first step, unless `chunk_tokens` is given. Then one prompt at a time is, so many tokens a step
    beside the decodes of the requests before it; it begins with what the pool's pages hold of it, and only the rest is computed.

    Arguments:
        model: from `with_dualmla`.
        config: that of the model's attention.
        builder: of the model's backend and `config`.
        pool: the pages of the model's caches.
        chunk_tokens: most tokens of a prompt a step.
    """

    def __init__(
        self,
        model: Any,
        config: MLAConfig,
        builder: MLAMetadataBuilder,
        pool: PagePool,
        requests: list[Request],
        *,
        chunk_tokens: int | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.builder = builder
        self.pool = pool
        self.requests = requests
        self.chunk_tokens = chunk_tokens

    @torch.inference_mode()
    def step(self) -> Step:
        device = self.model.device
        fed = self._schedule()
        step = _step_of(fed)
        requests, tokens = [request for request, _ in fed], [tokens for _, tokens in fed]
        query_lens = [len(new) for new in tokens]
        starts = [request.num_cached for request in requests]
        seq_lens = [start + new for start, new in zip(starts, query_lens, strict=True)]
        positions = [range(start, end) for start, end in zip(starts, seq_lens, strict=True)]
        for request, seq_len in zip(requests, seq_lens, strict=True):
            self.pool.extend(request.pages, seq_len)

        block_table = self._block_table(requests)
        logits = self.model(
            torch.tensor([[*chain.from_iterable(tokens)]], device=device),
            position_ids=torch.tensor([[*chain.from_iterable(positions)]], device=device),
            use_cache=False,
            mla_metadata=self.builder.build(block_table, torch.tensor(seq_lens, dtype=torch.int32, device=device), query_lens),
        ).logits[0]
        last_rows = torch.tensor(query_lens).cumsum(0) - 1
        for request, new, row in zip(requests, query_lens, last_rows.tolist(), strict=True):
            request.advance(new, logits[row])
            self.pool.publish(request.known[: request.num_cached], request.pages)
        return step

    def cache_bytes(self) -> int:
        pages = {page for request in self.requests for page in request.pages}
        return len(pages) * self.config.page_size * self.config.latent_dim * self.config.cache_dtype.itemsize

    def _schedule(self) -> list[tuple[Request, list[int]]]:
        """Whom to feed what in the next step: decodes first, as the metadata wants them."""
        decoding = [request for request in self.requests if request.generated and not request.done]
        prompts = [request for request in self.requests if not request.generated]
        if self.chunk_tokens is not None:
            prompts = prompts[:1]
            for request in prompts:
                if not request.pages:  # its first step; the last token is fed in any case, for its logits
                    request.pages = self.pool.find(request.prompt[:-1])
                    request.num_cached = len(request.pages) * self.pool.page_size
        return [(request, request.pending[: self.chunk_tokens]) for request in decoding + prompts]

    def _block_table(self, requests: list[Request]) -> Tensor:
        """int32 [num_reqs, max_pages]"""
        width = max(len(request.pages) for request in requests)
        rows = [[*request.pages, *[UNUSED_PAGE] * (width - len(request.pages))] for request in requests]
        return torch.tensor(rows, dtype=torch.int32, device=self.model.device)
