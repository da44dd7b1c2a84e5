"""The cases that are timed: one table for the benchmarks, `dualmla bench` and `dualmla check --grid peers`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dualmla.testing.cases import DecodeCase, short_dtype
from dualmla.testing.prefill import PrefillCase
from dualmla.validation import device_float8


@dataclass(frozen=True)
class TimedCase:
    """A case, its name in a table, and what it costs at least on any machine.

    Attributes:
        title: requests and their lengths, such as `64 x 1..8192`.
        case: what is called.
    """

    title: str
    case: DecodeCase | PrefillCase

    def __str__(self) -> str:
        """A test's id."""
        return f"{self.group}, {self.title}".replace(", ", "-").replace(" ", "_")

    @property
    def operation(self) -> str:
        return "decode" if isinstance(self.case, DecodeCase) else "prefill"

    @property
    def group(self) -> str:
        """What it has in common with the cases of the same table."""
        case = self.case
        told = [self.operation, f"{case.num_heads} heads"]
        if isinstance(case, DecodeCase):
            told.append(f"page size {case.page_size}")
            if max(case.new_tokens) > 1:
                told.append(f"{max(case.new_tokens)} new tokens")
        told.append(short_dtype(case.dtype))
        if isinstance(case, DecodeCase) and case.cache_dtype != case.dtype:
            told.append(f"cache {short_dtype(case.cache_dtype)}")
        return ", ".join(told)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(new tokens, keys) of each request."""
        case = self.case
        if isinstance(case, DecodeCase):
            return list(zip(case.new_tokens, case.seq_lens, strict=True))
        return list(zip(case.query_lens, case.keys, strict=True))

    @property
    def least_bytes(self) -> int:
        """Read and written by a perfect kernel: each live latent row (or key and value) once, queries and outputs once."""
        case = self.case
        tokens, keys = (sum(lengths) for lengths in zip(*self.lengths, strict=True))
        if isinstance(case, DecodeCase):
            queries = tokens * case.num_heads * (case.latent_dim + case.kv_lora_rank) * case.dtype.itemsize
            return int(keys * case.latent_dim * case.cache_dtype.itemsize + queries)
        return int((tokens + keys) * case.num_heads * (case.qk_head_dim + case.v_head_dim) * case.dtype.itemsize)

    @property
    def scores(self) -> int:
        """(head, query, key) triples that the mask lets through."""
        return self.case.num_heads * sum(_seen(new, keys) if self.case.causal else new * keys for new, keys in self.lengths)

    @property
    def flops(self) -> int:
        """Of both products; a multiplication and an addition are two."""
        case = self.case
        dims = case.latent_dim + case.kv_lora_rank if isinstance(case, DecodeCase) else case.qk_head_dim + case.v_head_dim
        return 2 * dims * self.scores


def _seen(new: int, keys: int) -> int:
    """(query, key) pairs under the bottom-right mask: query i of `new` sees keys - new + i + 1 of them, if any."""
    seeing = min(new, keys)
    return seeing * keys - seeing * (seeing - 1) // 2


def ragged(count: int, low: int, high: int, *, seed: int) -> tuple[int, ...]:
    """`count` lengths from `low` to `high`, each as likely."""
    return tuple(torch.randint(low, high + 1, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


DECODE_SEED, PREFILL_SEED = 7, 11
"""Of ragged lengths; with these, `64 x 1..8192` and `12 x 64..4096` are the batches that figures are published for."""

DECODE_LENGTHS: dict[str, tuple[int, ...]] = {
    **{
        f"{batch} x {kv}": (kv,) * batch
        for batch, kv in ((1, 8192), (1, 131072), (16, 4096), (64, 4096), (128, 4096), (128, 8192), (256, 1024))
    },
    "64 x 1..8192": ragged(64, 1, 8192, seed=DECODE_SEED),
}
"""Latency, long context, small and large batches, and a ragged one: `title` -> keys of each request."""

PREFILL_LENGTHS: dict[str, tuple[int, ...]] = {
    "1 x 8192": (8192,),
    "8 x 2048": (2048,) * 8,
    "12 x 64..4096": ragged(12, 64, 4096, seed=PREFILL_SEED),
}
"""One long prompt, some of a length, and a ragged batch."""

LARGE_BATCHES = ("64 x 4096", "128 x 4096", "128 x 8192", "256 x 1024")
"""Of `DECODE_LENGTHS`, where the machine is full whatever the kernel."""

TIMED_GRIDS = ("peers", "fp8", "heads", "pages")


def timed_grid(name: str, device: torch.device) -> tuple[TimedCase, ...]:
    """The cases of a grid, in the float8 flavour of `device`.

    peers: decodes of page size 64 and prefills, with 16 and with 128 heads, bf16: what other kernels can be timed on too.
    fp8: large batches over a bf16 and over a float8 cache. heads: 8 to 128 of them. pages: sizes 1 to 128.

    Raises:
        ValueError: the name is none of `TIMED_GRIDS`.
    """
    match name:
        case "peers":
            prefills = [
                TimedCase(title, PrefillCase(num_heads=heads, query_lens=lens))
                for heads in (16, 128)
                for title, lens in PREFILL_LENGTHS.items()
            ]
            return (*(decode(title, num_heads=heads) for heads in (16, 128) for title in DECODE_LENGTHS), *prefills)
        case "fp8":
            return tuple(decode(title, kv_cache_dtype=dtype) for title in LARGE_BATCHES for dtype in (None, device_float8(device)))
        case "heads":
            return tuple(decode(title, num_heads=heads) for title in ("128 x 4096", "64 x 1..8192") for heads in (8, 16, 32, 64, 128))
        case "pages":
            return tuple(decode(title, page_size=size) for title in ("128 x 4096", "64 x 1..8192") for size in (1, 16, 64, 128))
    raise ValueError(f"grid must be one of {', '.join(TIMED_GRIDS)}, got {name!r}")


def decode(title: str, *, num_heads: int = 16, page_size: int = 64, kv_cache_dtype: torch.dtype | None = None) -> TimedCase:
    """A decode of one token a request over lengths of `DECODE_LENGTHS`."""
    lens = DECODE_LENGTHS[title]
    return TimedCase(title, DecodeCase(num_heads=num_heads, seq_lens=lens, page_size=page_size, kv_cache_dtype=kv_cache_dtype))
