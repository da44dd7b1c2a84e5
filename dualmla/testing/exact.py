"""The truth in float64, and the one error budget.

The judge reads the very bits that the backend read, so all that is left to budget is the backend's own arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dualmla.backends.reference import attend, latent_rows
from dualmla.testing.cases import DecodeInputs

SAFETY = 2.0
"""The allowed error is this many times the modelled one: the model is of first order and takes roundings as independent."""

U32 = 2.0**-24
"""Unit roundoff of fp32."""


@dataclass(frozen=True)
class Exact:
    """The truth of an attention call and how far a backend may be from it, all float64.

    Attributes:
        out: [T, H, D_v].
        lse: [H, T].
        out_allowed: [T, H, D_v], absolute error.
        lse_allowed: [H, T], absolute error.
        value_rms: root mean square of the values attended to; what FlashMLA's absolute tolerance is scaled by.
    """

    out: torch.Tensor
    lse: torch.Tensor
    out_allowed: torch.Tensor
    lse_allowed: torch.Tensor
    value_rms: float


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, *, causal: bool, dtype: torch.dtype, shift: int = 0
) -> Exact:
    """Attention of one request in float64, and the error a flash-attention kernel may make: the one error budget.

    With u the unit roundoff of `dtype` (2^-8 bf16, 2^-11 fp16, 2^-24 fp32), u32 = 2^-24, D numbers a key, N keys seen,
    w the softmax weights and o the output, a kernel that keeps scores, sums and LSE in fp32 and rounds only P and the
    output to `dtype` makes these errors:

    - a score: D products are summed in fp32 and scaled: (sqrt(D) + 4) u32 a, a = scale * sum |q_d k_d|. The square root
      is the probabilistic bound of a sum of independent roundings (Higham and Mary, 2019). As exp turns an absolute
      error into a relative one, a weight is off by the factor e = expm1 of that;
    - P V: each p is rounded, u, and N of them are summed, (sqrt(N) + 8) u32: together sum w |v| (u + e + ...); a p below
      dtype's normal numbers is off by half the smallest of all, which the largest p, 1, is weighed against;
    - the denominator, never rounded to `dtype`: |o| sum w (e + ...);
    - the output's own rounding: u |o|, and half the smallest number of `dtype`; fp32 arithmetic may flush what is below
      its normal numbers.

    The LSE errs by the denominator's relative error and by 4 u32 |lse|. All of it is multiplied by `SAFETY`.
    Nothing here was fitted to a kernel.

    Arguments:
        q: [n, H, D], k: [m, H or 1, D], v: [m, H or 1, D_v]; the very values the backend read.
        causal: bottom-right.
        dtype: of the output and of P.
        shift: keys that each query sees beyond its causal limit: 0 is right, others tell what a faulty mask computes.
    """
    n, heads, dim = q.shape
    m, one_key_head = k.shape[0], k.shape[1] == 1
    keys, values = ("md", "mv") if one_key_head else ("mhd", "mhv")
    q, k, v = q.double(), k.double(), v.double()
    u, least = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    flushed = torch.finfo(torch.float32).tiny
    out = torch.empty(n, heads, v.shape[2], dtype=torch.float64, device=q.device)
    lse = torch.empty(heads, n, dtype=torch.float64, device=q.device)
    out_allowed, lse_allowed = torch.empty_like(out), torch.empty_like(lse)
    for i in range(n):
        seen = min(max(m - n + i + 1 + shift, 0), m) if causal else m
        k_seen, v_seen = k[:seen], v[:seen]
        if one_key_head:  # heads as tokens: the rows are not repeated for each head
            o, row_lse = attend(q[i][:, None], k_seen, v_seen, softmax_scale, causal=False)
            o, row_lse, k_seen, v_seen = o[:, 0], row_lse[0], k_seen[:, 0], v_seen[:, 0]
        else:
            o, row_lse = attend(q[i : i + 1], k_seen, v_seen, softmax_scale, causal=False)
            o, row_lse = o[0], row_lse[:, 0]
        out[i], lse[:, i] = o, row_lse
        if seen == 0:
            out_allowed[i], lse_allowed[:, i] = 0.0, 0.0
            continue
        scores = softmax_scale * torch.einsum(f"hd,{keys}->hm", q[i], k_seen)
        size = softmax_scale * torch.einsum(f"hd,{keys}->hm", q[i].abs(), k_seen.abs())
        weights = torch.exp(scores - row_lse[:, None])
        wrong = torch.expm1((math.sqrt(dim) + 4) * U32 * size) + (math.sqrt(seen) + 8) * U32
        denominator = (weights * wrong).sum(1)
        numerator = torch.einsum(f"hm,{values}->hv", weights * (wrong + u), v_seen.abs())
        largest = torch.exp(scores.amax(1) - row_lse)
        numerator += (largest * least)[:, None] * v_seen.abs().sum(0)
        out_allowed[i] = SAFETY * (numerator + o.abs() * (denominator[:, None] + u) + least + seen * flushed)
        lse_allowed[:, i] = SAFETY * (denominator + 4 * U32 * row_lse.abs())
    return Exact(out, lse, out_allowed, lse_allowed, float(v.square().mean().sqrt()) if v.numel() else 0.0)


def exact_decode(inputs: DecodeInputs, *, softmax_scale: float | None = None, shift: int = 0, last_page: bool = True) -> Exact:
    """The truth of a case; rows of padding are 0 and -inf, and must be so exactly.

    Arguments:
        inputs: a laid-out case.
        softmax_scale: another than the case's, to tell what a backend with a wrong scale computes.
        shift: as in `exact_attention`.
        last_page: False: without the keys in each request's last page, to tell what a backend that skips it computes.
    """
    case, q = inputs.case, inputs.q
    scale = case.softmax_scale if softmax_scale is None else softmax_scale
    tokens, heads, rank = inputs.out.shape
    out = torch.zeros(tokens, heads, rank, dtype=torch.float64, device=q.device)
    lse = torch.full((heads, tokens), -math.inf, dtype=torch.float64, device=q.device)
    out_allowed, lse_allowed = torch.zeros_like(out), torch.zeros_like(lse)
    first, rms = 0, 0.0
    for request, (new, length) in enumerate(zip(case.new_tokens, case.seq_lens, strict=True)):
        rows = latent_rows(inputs.kv_cache, inputs.meta.block_table[request], length)[:, None].double() * (case.k_scale or 1.0)
        part = slice(first, first + new)
        skipped = 0 if last_page or not length else (length - 1) % case.page_size + 1
        rows = rows[: length - skipped]
        exact = exact_attention(q[part], rows, rows[..., :rank], scale, causal=case.causal, dtype=case.dtype, shift=shift + skipped)
        out[part], lse[:, part] = exact.out, exact.lse
        out_allowed[part], lse_allowed[:, part] = exact.out_allowed, exact.lse_allowed
        first += new
        rms = max(rms, exact.value_rms)
    return Exact(out, lse, out_allowed, lse_allowed, rms)
