"""Cases of `mla_prefill`, their tensors in adversarial memory, and their truth."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch

from dualmla.ops import mla_prefill
from dualmla.testing.cases import YARN_SCALE, poisoned_allocations
from dualmla.testing.exact import Exact, exact_attention


@dataclass(frozen=True, kw_only=True)
class PrefillCase:
    """One `mla_prefill` call.

    Attributes:
        num_heads: query heads.
        query_lens: queries of each request.
        key_lens: keys of each request; empty: as many as queries.
        padding_tokens: rows past the last request, of queries and of keys.
        qk_head_dim, v_head_dim: sizes of a head.
        dtype, softmax_scale, causal: as in `mla_prefill`.
        strided: q has its heads outermost, v is the second half of a tensor that begins with k, out is a slice.
        seed: of the numbers.
    """

    num_heads: int = 3
    query_lens: tuple[int, ...] = (8,)
    key_lens: tuple[int, ...] = ()
    padding_tokens: int = 0
    qk_head_dim: int = 192
    v_head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    softmax_scale: float = YARN_SCALE
    causal: bool = True
    strided: bool = False
    seed: int = 0

    @property
    def keys(self) -> tuple[int, ...]:
        """`key_lens` with the default filled in."""
        return self.key_lens or self.query_lens

    def __str__(self) -> str:
        return describe(self)


@dataclass(frozen=True)
class PrefillInputs:
    """The tensors of a case. Rows that no request owns, and `out`, are NaN."""

    case: PrefillCase
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    out: torch.Tensor


def make_prefill_inputs(case: PrefillCase, device: torch.device | str = "cpu") -> PrefillInputs:
    """Tensors of a case; numbers are drawn on the CPU: the same for every device."""
    generator = torch.Generator().manual_seed(case.seed)
    heads, qk, v_dim = case.num_heads, case.qk_head_dim, case.v_head_dim
    queries, keys = sum(case.query_lens), sum(case.keys)

    def rows(live: int, dim: int) -> torch.Tensor:
        values = torch.full((live + case.padding_tokens, heads, dim), math.nan)
        values[:live] = torch.randn(live, heads, dim, generator=generator)
        return values.to(case.dtype).to(device)

    q, k, v = rows(queries, qk), rows(keys, qk), rows(keys, v_dim)
    out = torch.full((len(q), heads, v_dim), math.nan, dtype=case.dtype, device=device)
    if case.strided:
        q = q.transpose(0, 1).contiguous().transpose(0, 1)
        both = torch.cat([k, v], -1)
        k, v = both[..., :qk], both[..., qk:]
        out = torch.full((len(q), heads + 1, v_dim + 16), math.nan, dtype=case.dtype, device=device)[:, :heads, :v_dim]
    return PrefillInputs(case, q, k, v, bounds(case.query_lens, device), bounds(case.keys, device), out)


def run_prefill(inputs: PrefillInputs, backend: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_prefill` on a case with everything the backend allocates full of NaN; returns (out, lse)."""
    case = inputs.case
    with poisoned_allocations():
        out, lse = mla_prefill(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.cu_seqlens_q,
            inputs.cu_seqlens_k,
            max(case.query_lens, default=0),
            max(case.keys, default=0),
            case.softmax_scale,
            causal=case.causal,
            out=inputs.out,
            return_lse=True,
            backend=backend,
        )
    return out, lse


def exact_prefill(inputs: PrefillInputs, *, shift: int = 0) -> Exact:
    """The truth of a case; rows of padding are 0 and -inf, and must be so exactly. `shift` is that of `exact_attention`."""
    case, (tokens, heads, v_dim), device = inputs.case, inputs.out.shape, inputs.q.device
    out = torch.zeros(tokens, heads, v_dim, dtype=torch.float64, device=device)
    lse = torch.full((heads, tokens), -math.inf, dtype=torch.float64, device=device)
    out_allowed, lse_allowed, rms = torch.zeros_like(out), torch.zeros_like(lse), 0.0
    first, first_key = 0, 0
    for new, keys in zip(case.query_lens, case.keys, strict=True):
        part, seen = slice(first, first + new), slice(first_key, first_key + keys)
        exact = exact_attention(
            inputs.q[part], inputs.k[seen], inputs.v[seen], case.softmax_scale, causal=case.causal, dtype=case.dtype, shift=shift
        )
        out[part], lse[:, part] = exact.out, exact.lse
        out_allowed[part], lse_allowed[:, part] = exact.out_allowed, exact.lse_allowed
        rms = max(rms, exact.value_rms)
        first, first_key = first + new, first_key + keys
    return Exact(out, lse, out_allowed, lse_allowed, rms)


def bounds(lengths: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    """int32 [n + 1]: 0 and the running sums."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def describe(case: Any) -> str:
    """What of a case is not the default: a test's id."""
    told = {f.name: getattr(case, f.name) for f in fields(case) if getattr(case, f.name) != f.default}
    return "-".join(f"{name}={value}".replace("torch.", "").replace(" ", "") for name, value in told.items()) or "default"
