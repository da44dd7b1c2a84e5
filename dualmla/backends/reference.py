"""The judge: MLA in float64 with plain torch, one request at a time, as the formulas are written.

Imports torch alone. Slow on purpose: nothing here is clever enough to be wrong in the same way as a kernel.
"""

from __future__ import annotations

import itertools

import torch

from dualmla.attention import MLAImpl
from dualmla.backends.base import MLABackend
from dualmla.config import FLOAT8_DTYPES, MLAConfig
from dualmla.metadata import MLAMetadata


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T) v of one request, in float64.

    Arguments:
        q: [n, H, D], k: [m, H or 1, D], v: [m, H or 1, D_v].
        causal: bottom-right: query i of n sees keys below m - n + i + 1.

    Returns:
        out float64 [n, H, D_v] and lse float64 [H, n], natural log of the sum of exp of the scaled scores; a query that
        sees no key gives 0 and -inf, one with a score of +inf NaN and NaN.
    """
    n, m = q.shape[0], k.shape[0]
    heads = q.shape[1]
    k, v = (x.double().expand(-1, heads, -1) for x in (k, v))
    scores = softmax_scale * torch.einsum("nhd,mhd->hnm", q.double(), k)
    if causal:
        seen = torch.arange(m, device=q.device) < (m - n + 1 + torch.arange(n, device=q.device))[:, None]
        scores = scores.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse)[..., None])
    lse = lse.masked_fill(lse.isposinf(), float("nan"))  # out is NaN there, and +inf would be taken for a part without keys
    return torch.einsum("hnm,mhd->nhd", weights, v), lse


def latent_rows(kv_cache: torch.Tensor, page_ids: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` latent rows [length, latent_dim] of a request whose pages are `page_ids`."""
    page_size = kv_cache.shape[1]
    pages = page_ids[: -(-length // page_size)].long()
    return kv_cache[pages].flatten(0, 1)[:length]


class ReferenceMLABackend(MLABackend):
    """float64 torch; runs anywhere, for truth and never for speed."""

    name = "reference"

    @staticmethod
    def get_name() -> str:
        return "REFERENCE_MLA"

    @classmethod
    def get_impl_cls(cls) -> type[MLAImpl]:
        return ReferenceMLAImpl

    @classmethod
    def not_supported_reasons(cls, cfg: MLAConfig | None, device: torch.device) -> list[str]:
        return []

    @classmethod
    def mla_decode(
        cls,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: MLAMetadata,
        softmax_scale: float,
        *,
        causal: bool,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        k_scale: float | torch.Tensor,
        num_kv_splits: int | None,
    ) -> None:
        """As `MLABackend.mla_decode`; `num_kv_splits` changes nothing, since nothing is split."""
        rank = out.shape[-1]
        k_scale = float(k_scale)
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        first = meta.qo_indptr.tolist()
        for request, length in enumerate(meta.seq_lens.tolist()):
            tokens = slice(first[request], first[request + 1])
            rows = latent_rows(kv_cache, meta.block_table[request], length)[:, None].double() * k_scale
            o, row_lse = attend(q[tokens], rows, rows[..., :rank], softmax_scale, causal=causal)
            out[tokens] = o.to(out.dtype)
            if lse is not None:
                lse[:, tokens] = row_lse.float()

    @classmethod
    def concat_and_cache_mla(
        cls, kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *, k_scale: float | torch.Tensor
    ) -> None:
        """As `MLABackend.concat_and_cache_mla`."""
        page_size = kv_cache.shape[1]
        rows = torch.cat([kv_c.double(), k_pe.double()], -1) / float(k_scale)
        if kv_cache.dtype in FLOAT8_DTYPES:
            largest = torch.finfo(kv_cache.dtype).max
            rows = rows.clamp(-largest, largest)
        for row, slot in zip(rows, slot_mapping.tolist(), strict=False):
            if slot >= 0:
                kv_cache[slot // page_size, slot % page_size] = row.to(kv_cache.dtype)

    @classmethod
    def mla_prefill(
        cls,
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
        """As `MLABackend.mla_prefill`."""
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        for queries, keys in zip(_spans(cu_seqlens_q), _spans(cu_seqlens_k), strict=True):
            o, row_lse = attend(q[queries], k[keys], v[keys], softmax_scale, causal=causal)
            out[queries] = o.to(out.dtype)
            if lse is not None:
                lse[:, queries] = row_lse.float()

    @classmethod
    def gather_kv_cache(
        cls,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens: torch.Tensor,
        seq_starts: torch.Tensor,
        out: torch.Tensor,
        *,
        k_scale: float | torch.Tensor,
    ) -> None:
        """As `MLABackend.gather_kv_cache`."""
        out.zero_()
        page_size = kv_cache.shape[1]
        for request, (rows, start) in enumerate(zip(_spans(cu_seqlens), seq_starts.tolist(), strict=True)):
            position = torch.arange(start, start + rows.stop - rows.start, device=out.device)
            pages = block_table[request, position // page_size].long()
            out[rows] = (kv_cache[pages, position % page_size].double() * float(k_scale)).to(out.dtype)

    @classmethod
    def merge_attn_states(
        cls,
        out_a: torch.Tensor,
        lse_a: torch.Tensor,
        out_b: torch.Tensor,
        lse_b: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """As `MLABackend.merge_attn_states`."""
        lse_a, lse_b = (torch.where(part.isposinf(), float("-inf"), part.double()) for part in (lse_a, lse_b))
        merged_lse = torch.logaddexp(lse_a, lse_b)
        shift = torch.where(merged_lse.isneginf(), 0.0, merged_lse)
        merged = torch.zeros_like(out, dtype=torch.float64)
        for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
            weight = torch.exp(part_lse - shift).t()[..., None]
            merged += torch.where(weight != 0, weight * part.double(), 0.0)
        out.copy_(merged)
        lse.copy_(merged_lse)


def _spans(cu_seqlens: torch.Tensor) -> list[slice]:
    """The rows of each request."""
    bounds = cu_seqlens.tolist()
    return [slice(first, end) for first, end in itertools.pairwise(bounds)]


class ReferenceMLAImpl(MLAImpl):
    """The shared forward over the reference functions."""

    ops = ReferenceMLABackend
