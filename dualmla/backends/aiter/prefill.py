"""AITER's `flash_attn_varlen_func` as our `mla_prefill`.

Works on tensors of any device, to be tested with a stand-in. Parameters were inserted in the middle of its signature four times: all
go by keyword. What is not left to it, each seen by running its kernels in an emulator:

- Offsets are 32 bits: with rows of 49,152 bytes (128 heads of 192) token 87,382 is silently wrong. Heads are cut into groups.
- Rows without keys: NaN in out and lse without a mask; with one, zeros, but an lse of log n in some tiles. They are written here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dualmla.backends.base import current

PASSED = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal", "return_lse")
OFFSET_LIMIT = 4 << 30
"""Bytes that an offset of 32 bits reaches."""


def prefill(
    attention: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    *,
    causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """As `MLABackend.mla_prefill`, without a wait for the device; `attention` is AITER's `flash_attn_varlen_func`."""
    num_tokens, heads, _ = q.shape
    if not min(num_tokens, k.shape[0], cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k):
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    blind = rows_without_keys(num_tokens, cu_seqlens_q, cu_seqlens_k, causal=causal)
    groups = head_groups(q, k, v)
    for group in groups or [slice(0, heads)]:
        cut = [x[:, group].contiguous() if groups else x for x in (q, k, v)]
        given = (
            *cut,
            cu_seqlens_q.contiguous(),
            cu_seqlens_k.contiguous(),
            max_seqlen_q,
            max_seqlen_k,
            softmax_scale,
            causal,
            lse is not None,
        )
        with current(q.device):
            returned = attention(**dict(zip(PASSED, given, strict=True)))
        part, part_lse = returned[:2] if isinstance(returned, tuple | list) else (returned, None)
        out[:, group] = part.masked_fill(blind[:, None, None], 0.0)
        if lse is not None:
            if part_lse is None:
                raise RuntimeError("AITER's flash_attn_varlen_func returned no LSE, although return_lse was set")
            lse[group] = part_lse.masked_fill(blind, float("-inf"))


def rows_without_keys(num_tokens: int, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """bool [T]: rows that see no key, and rows of padding past `cu_seqlens_q[-1]`."""
    row = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens_q.device)
    past = torch.searchsorted(cu_seqlens_q[1:], row, right=True, out_int32=True)
    request = past.clamp(max=cu_seqlens_q.shape[0] - 2)
    seen = cu_seqlens_k[request + 1] - cu_seqlens_k[request]
    if causal:
        seen = seen - (cu_seqlens_q[request + 1] - row - 1)
    return (seen <= 0) | (past > request)


def head_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[slice]:
    """Empty where no offset into the tensors as they lie passes `OFFSET_LIMIT`; else groups of heads whose dense copies stay below it."""
    if max(x.shape[0] * x.stride(0) * x.element_size() for x in (q, k, v)) <= OFFSET_LIMIT:
        return []
    heads = q.shape[1]
    a_head = max(x.shape[0] * x.shape[2] * x.element_size() for x in (q, k, v))
    size = min(max(OFFSET_LIMIT // a_head, 1), heads)
    return [slice(first, min(first + size, heads)) for first in range(0, heads, size)]
