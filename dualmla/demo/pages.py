"""The pages of a cache: who gets which, and which can be shared."""

from __future__ import annotations

import random
from collections.abc import Sequence


class PagePool:
    """Hands out free pages in a random order, as a pool that has served for a while, and knows what the full ones hold.

    A latent row depends on all tokens up to its own, so a page is found by all tokens up to its end. Only full pages are:
    nobody writes to them again, while the last page of a request takes that request's next tokens. Pages are never given back.
    """

    def __init__(self, num_pages: int, page_size: int, *, seed: int) -> None:
        self.page_size = page_size
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)
        self._full: dict[tuple[int, ...], int] = {}

    def extend(self, pages: list[int], num_tokens: int) -> None:
        """Add pages until `pages` hold `num_tokens` tokens.

        Raises:
            RuntimeError: the pool is empty.
        """
        while len(pages) * self.page_size < num_tokens:
            if not self._free:
                raise RuntimeError(f"no free page is left; {num_tokens} tokens need {-(-num_tokens // self.page_size)} pages")
            pages.append(self._free.pop())

    def publish(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Let the full ones of `pages` be found; their rows of these `tokens` are in the cache."""
        for end, page in zip(range(self.page_size, len(tokens) + 1, self.page_size), pages, strict=False):
            self._full.setdefault(tuple(tokens[:end]), page)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The full pages that hold the beginning of `tokens`, in order."""
        pages: list[int] = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page = self._full.get(tuple(tokens[:end]))
            if page is None:
                break
            pages.append(page)
        return pages
