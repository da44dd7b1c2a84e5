"""Cases of a call and their tensors in adversarial memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, get_args

import torch

from dualmla.metadata import MLAMetadata, decode_metadata
from dualmla.ops import mla_decode

UNUSED_PAGE = 2147480000
"""Page id of the entries of a block table that no request owns: read as an address, it faults or is far away."""

SPARE_PAGES = 3
"""Pages of a laid-out cache that no request owns."""

YARN_SCALE = 0.1352337788608801
"""DeepSeek V3's softmax_scale: 192^-0.5 times the square of YaRN's mscale, 0.1 ln 40 + 1. A scale derived from a head dim is wrong."""

Data = Literal["normal", "flashmla", "flat", "peaked", "huge", "denormal"]
"""What the numbers are: N(0, 1) · N(0, 1) / 10 cut at 1, as in FlashMLA's tests · equal scores · one key takes nearly all
weight · scores of thousands · cache values around the smallest normal number of its dtype."""


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """One `mla_decode` call, small enough to print.

    Attributes:
        num_heads: query heads.
        seq_lens: tokens in the cache of each request, new ones included; may be 0 and less than the query.
        query_lens: new tokens of each request; empty: one each.
        padding_tokens: rows of q past the last request.
        page_size: tokens a page.
        dtype, kv_cache_dtype: of q and of the cache; None: the same.
        softmax_scale, causal, num_kv_splits, k_scale: as in `mla_decode`.
        return_lse: the LSE is asked for and judged; AITER has releases that can't give it.
        kv_lora_rank, qk_rope_head_dim: the two parts of a latent row.
        data: what the numbers are.
        first_page: pages below it are never touched; a large one puts the live pages past 2^31 elements.
        shared_pages: leading pages that all requests have in common, as with a cached prefix; as many as all of them fill.
        strided: q, cache and out are slices of wider tensors.
        seed: of the numbers and of the page order.
    """

    num_heads: int = 16
    seq_lens: tuple[int, ...] = (64,)
    query_lens: tuple[int, ...] = ()
    padding_tokens: int = 0
    page_size: int = 1
    dtype: torch.dtype = torch.bfloat16
    kv_cache_dtype: torch.dtype | None = None
    softmax_scale: float = YARN_SCALE
    causal: bool = True
    num_kv_splits: int | None = None
    k_scale: float | None = None
    return_lse: bool = True
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    data: Data = "normal"
    first_page: int = 0
    shared_pages: int = 0
    strided: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.query_lens and len(self.query_lens) != len(self.seq_lens):
            raise ValueError(f"query_lens has {len(self.query_lens)} requests, seq_lens has {len(self.seq_lens)}")
        if self.data not in get_args(Data):
            raise ValueError(f"data must be one of {', '.join(get_args(Data))}, got {self.data!r}")

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """`query_lens` with the default filled in."""
        return self.query_lens or (1,) * len(self.seq_lens)

    @property
    def cache_dtype(self) -> torch.dtype:
        """`kv_cache_dtype` with None resolved."""
        return self.kv_cache_dtype or self.dtype

    @property
    def full_shared_pages(self) -> int:
        """`shared_pages`, as far as all requests fill them."""
        return min(self.shared_pages, *(length // self.page_size for length in self.seq_lens)) if self.seq_lens else 0

    @property
    def latent_dim(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    def __str__(self) -> str:
        """Short and telling: a test's id and a table's first column."""
        parts = [f"h{self.num_heads}", f"q{_runs(self.new_tokens)}", f"kv{_runs(self.seq_lens)}", f"p{self.page_size}"]
        parts.append(short_dtype(self.dtype))
        if self.cache_dtype != self.dtype:
            parts.append(f"cache-{short_dtype(self.cache_dtype)}")
        if self.data != "normal":
            parts.append(self.data)
        defaults = DecodeCase()
        for name in (
            "padding_tokens",
            "causal",
            "num_kv_splits",
            "k_scale",
            "return_lse",
            "kv_lora_rank",
            "first_page",
            "shared_pages",
            "strided",
        ):
            if getattr(self, name) != getattr(defaults, name):
                parts.append(f"{name}={getattr(self, name)}")
        return "-".join(parts)


@dataclass(frozen=True)
class DecodeInputs:
    """The tensors of a case; `out` is full of NaN until a backend writes it."""

    case: DecodeCase
    q: torch.Tensor
    kv_cache: torch.Tensor
    meta: MLAMetadata
    out: torch.Tensor


@dataclass(frozen=True)
class DecodeValues:
    """The numbers of a case, not yet laid out in memory.

    Attributes:
        case: the sizes; its seed still orders the pages.
        q: [T, H, kv_lora_rank + qk_rope_head_dim].
        rows: the latent rows [seq_len, kv_lora_rank + qk_rope_head_dim] of each request, in the cache's dtype; the rows in
            shared pages are those of the first request.
    """

    case: DecodeCase
    q: torch.Tensor
    rows: tuple[torch.Tensor, ...]


def draw_decode_values(case: DecodeCase) -> DecodeValues:
    """The numbers of a case, drawn on the CPU: the same for every device."""
    generator = torch.Generator().manual_seed(case.seed)
    q = _query_values(case, sum(case.new_tokens) + case.padding_tokens, generator).to(case.dtype)
    rows = tuple(_cache_values(case, length, generator) for length in case.seq_lens)
    return DecodeValues(case, q, rows)


def make_decode_inputs(case: DecodeCase, device: torch.device | str = "cpu") -> DecodeInputs:
    """Tensors of a case in adversarial memory: `lay_out_decode` of `draw_decode_values`."""
    return lay_out_decode(draw_decode_values(case), device)


def lay_out_decode(values: DecodeValues, device: torch.device | str = "cpu", *, poison: bool = True) -> DecodeInputs:
    """Put the numbers into pages, in shuffled order, a few pages belonging to nobody.

    Arguments:
        values: what to lay out.
        device: where.
        poison: what no request owns is `nobodys_number` in the cache and `UNUSED_PAGE` in the block table, and `out` is NaN.
            Otherwise all of it is harmless: 0, page 0, and 7 in `out`. A right result has the same bits either way.
    """
    case = values.case
    generator = torch.Generator().manual_seed(case.seed)
    pages = [-(-length // case.page_size) for length in case.seq_lens]
    shared = case.full_shared_pages
    owned = sum(pages) - shared * max(len(pages) - 1, 0)
    order = torch.randperm(owned + SPARE_PAGES, generator=generator).int() + case.first_page
    table = torch.full((len(pages), max(pages, default=0) + 2), UNUSED_PAGE if poison else case.first_page, dtype=torch.int32)
    taken = shared
    for request, count in enumerate(pages):
        table[request, :shared] = order[:shared]
        table[request, shared:count] = order[taken : taken + count - shared]
        taken += count - shared

    nobodys = nobodys_number(case.cache_dtype) if poison else 0.0
    num_pages = case.first_page + owned + SPARE_PAGES
    kv_cache = _buffer(case, (num_pages, case.page_size, case.latent_dim), case.cache_dtype, nobodys, untouched=case.first_page)
    for request in reversed(range(len(pages))):  # the first request last: it has the say in shared pages
        for page in range(pages[request]):
            part = values.rows[request][page * case.page_size : (page + 1) * case.page_size]
            kv_cache[table[request, page], : len(part)] = part

    q = _buffer(case, tuple(values.q.shape), case.dtype, math.nan)
    q.copy_(values.q)
    out = _buffer(case, (len(q), case.num_heads, case.kv_lora_rank), case.dtype, math.nan if poison else 7.0)
    meta = decode_metadata(table, list(case.seq_lens), list(case.new_tokens), page_size=case.page_size, device=device)
    return DecodeInputs(case, _moved(q, device), _moved(kv_cache, device, untouched=case.first_page), meta, _moved(out, device))


def nobodys_number(dtype: torch.dtype) -> float:
    """What a hostile cache holds where no request does: NaN; in fp8, whose NaN some devices read as a number, the largest finite one."""
    return math.nan if dtype.itemsize > 1 else torch.finfo(dtype).max


def run_decode(inputs: DecodeInputs, backend: str | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`mla_decode` on a case with everything the backend allocates full of NaN; returns out and lse, None where it is not asked for."""
    case = inputs.case
    with poisoned_allocations():
        result = mla_decode(
            inputs.q,
            inputs.kv_cache,
            inputs.meta,
            case.softmax_scale,
            causal=case.causal,
            out=inputs.out,
            return_lse=case.return_lse,
            k_scale=case.k_scale,
            num_kv_splits=case.num_kv_splits,
            backend=backend,
        )
    return result if isinstance(result, tuple) else (result, None)


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Within: `torch.empty` and its kin are full of NaN (the largest number for integers), so that reading before writing shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _query_values(case: DecodeCase, tokens: int, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(tokens, case.num_heads, case.latent_dim, generator=generator)
    match case.data:
        case "flashmla":
            return (values / 10).clamp(-1, 1)
        case "flat":
            return torch.zeros_like(values)
        case "peaked":
            return values * 8
        case "huge":
            return values * 64
        case _:
            return values


def _cache_values(case: DecodeCase, length: int, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(length, case.latent_dim, generator=generator)
    match case.data:
        case "flashmla":
            values = (values / 10).clamp(-1, 1)
        case "huge":
            values = values * 8
        case "denormal":
            values = values * torch.finfo(case.cache_dtype).smallest_normal
    return values.to(case.cache_dtype)


def _buffer(case: DecodeCase, shape: tuple[int, ...], dtype: torch.dtype, fill: float, untouched: int = 0) -> torch.Tensor:
    """A tensor full of `fill` from row `untouched` on; a slice of a wider one where the case asks for strides."""
    wide = (shape[0], shape[1] + 1, shape[2] + 16) if case.strided else shape
    buffer = torch.empty(wide, dtype=dtype)  # what is never touched takes no memory
    buffer[untouched:] = fill
    return buffer[:, : shape[1], : shape[2]]


def _moved(tensor: torch.Tensor, device: torch.device | str, untouched: int = 0) -> torch.Tensor:
    """On `device` with the same strides; rows below `untouched` are left as memory is."""
    if torch.device(device).type == "cpu":
        return tensor
    base = tensor._base if tensor._base is not None else tensor
    moved = torch.empty_like(base, device=device)
    moved[untouched:] = base[untouched:].to(device)
    return moved.as_strided(tensor.shape, tensor.stride())


def _runs(lengths: tuple[int, ...]) -> str:
    """(1, 1, 1, 5) as `1x3,5`."""
    runs = ((value, len(list(group))) for value, group in groupby(lengths))
    return ",".join(f"{value}x{count}" if count > 1 else str(value) for value, count in runs) or "none"


def short_dtype(dtype: torch.dtype) -> str:
    """As tables and ids name it: `bf16`, `e4m3fn`."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    return names.get(dtype, str(dtype).removeprefix("torch.float8_"))
