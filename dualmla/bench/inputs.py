"""Tensors to time a case on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch

from dualmla.config import MLAConfig
from dualmla.metadata import MLAMetadataBuilder
from dualmla.testing import DecodeCase, DecodeInputs, PrefillCase, PrefillInputs
from dualmla.testing.prefill import bounds

Inputs = DecodeInputs | PrefillInputs
CaseT = TypeVar("CaseT", DecodeCase, PrefillCase)

CHUNK = 1 << 26
"""Numbers drawn at a time: in fp32 before they are rounded, a large cache would need three times its size."""


def draw(case: DecodeCase | PrefillCase, device: torch.device) -> Inputs:
    """N(0, 1) in harmless memory, drawn on the device, where gigabytes take milliseconds; metadata as an engine's builder makes it.

    What is hostile about memory is for `dualmla check`: a kernel of others may read the entries that no request owns.

    Raises:
        ValueError: the case asks for more than sizes, dtypes and a scale.
    """
    return _draw_decode(case, device) if isinstance(case, DecodeCase) else _draw_prefill(case, device)


def _draw_decode(case: DecodeCase, device: torch.device) -> DecodeInputs:
    sizes = ("num_heads", "seq_lens", "query_lens", "page_size", "dtype", "kv_cache_dtype", "softmax_scale", "return_lse", "seed")
    _check_plain(case, (*sizes, "kv_lora_rank", "qk_rope_head_dim"))
    generator = torch.Generator(device).manual_seed(case.seed)
    pages = torch.tensor([-(-length // case.page_size) for length in case.seq_lens])
    owned = (torch.arange(int(pages.max())) < pages[:, None]).to(device)
    table = torch.zeros(owned.shape, dtype=torch.int32, device=device)
    table[owned] = torch.randperm(int(pages.sum()), generator=generator, device=device).int()
    kv_cache = _normal((int(pages.sum()), case.page_size, case.latent_dim), case.cache_dtype, generator)
    q = _normal((sum(case.new_tokens), case.num_heads, case.latent_dim), case.dtype, generator)
    out = torch.empty(len(q), case.num_heads, case.kv_lora_rank, dtype=case.dtype, device=device)
    config = MLAConfig(
        num_heads=case.num_heads,
        softmax_scale=case.softmax_scale,
        page_size=case.page_size,
        kv_lora_rank=case.kv_lora_rank,
        qk_rope_head_dim=case.qk_rope_head_dim,
        dtype=case.dtype,
        kv_cache_dtype=case.cache_dtype,
    )
    builder = MLAMetadataBuilder(
        config, device, max_num_seqs=len(table), max_num_pages_per_seq=table.shape[1], decode_threshold=max(case.new_tokens)
    )
    meta = builder.build(table, torch.tensor(case.seq_lens, dtype=torch.int32, device=device), list(case.new_tokens))
    return DecodeInputs(case, q, kv_cache, meta, out)


def _draw_prefill(case: PrefillCase, device: torch.device) -> PrefillInputs:
    _check_plain(case, ("num_heads", "query_lens", "key_lens", "qk_head_dim", "v_head_dim", "dtype", "softmax_scale", "seed"))
    generator = torch.Generator(device).manual_seed(case.seed)
    tokens, keys, heads = sum(case.query_lens), sum(case.keys), case.num_heads
    q = _normal((tokens, heads, case.qk_head_dim), case.dtype, generator)
    k = _normal((keys, heads, case.qk_head_dim), case.dtype, generator)
    v = _normal((keys, heads, case.v_head_dim), case.dtype, generator)
    out = torch.empty(tokens, heads, case.v_head_dim, dtype=case.dtype, device=device)
    return PrefillInputs(case, q, k, v, bounds(case.query_lens, device), bounds(case.keys, device), out)


def _check_plain(case: CaseT, drawn: tuple[str, ...]) -> None:
    honoured: dict[str, Any] = {name: getattr(case, name) for name in drawn}
    if replace(type(case)(), **honoured) != case:
        raise ValueError(f"only {', '.join(drawn)} of a case can be timed, got {case}")


def _normal(shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    numbers = torch.empty(shape, dtype=dtype, device=generator.device)
    flat = numbers.view(-1)
    for first in range(0, len(flat), CHUNK):
        part = flat[first : first + CHUNK]
        part.copy_(torch.randn(part.shape, generator=generator, device=part.device))
    return numbers
