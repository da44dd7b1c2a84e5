"""Cases of a whole layer's forward, their tensors in adversarial memory, and their truth."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from dualmla.attention import MLAImpl
from dualmla.config import MLAConfig
from dualmla.metadata import MLAMetadata
from dualmla.selection import select_backend
from dualmla.testing.cases import SPARE_PAGES, UNUSED_PAGE, YARN_SCALE, nobodys_number, poisoned_allocations
from dualmla.testing.exact import SAFETY, U32, Exact
from dualmla.testing.prefill import describe

SPREAD = 2.0
"""A sum of n independent roundings of x_i strays less than this times u sqrt(sum x_i^2): each has a standard deviation of at
most u |x_i| / sqrt(3), so this is three and a half of the sum's, and `SAFETY` makes it seven."""


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """One `forward` of a mixed batch. Every request's context is already in the cache.

    Attributes:
        num_heads: query heads.
        seq_lens: tokens of each request, new ones included; may be less than the new ones.
        query_lens: new tokens of each request.
        decode_threshold: of the builder.
        padding_tokens: rows past the last request.
        page_size: tokens a page.
        dtype, kv_cache_dtype, k_scale, softmax_scale: as in `MLAConfig` and `forward`.
        kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: sizes.
        shared_pages: the leading pages that all requests have in common: a shared prefix, within every context.
        strided: every tensor is a slice of a wider one.
        seed: of the numbers and of the page order.
    """

    num_heads: int = 2
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    decode_threshold: int = 1
    padding_tokens: int = 0
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_cache_dtype: torch.dtype | None = None
    k_scale: float | None = None
    softmax_scale: float = YARN_SCALE
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    shared_pages: int = 0
    strided: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return describe(self)

    @property
    def config(self) -> MLAConfig:
        names = {f.name for f in dataclasses.fields(MLAConfig)}
        return MLAConfig(**{name: value for name, value in vars(self).items() if name in names})


@dataclass(frozen=True)
class LayerInputs:
    """The tensors of a case. Cache slots without a token of a context, rows of padding and `output` are NaN.

    `contexts` are the latent rows [context, latent_dim] of each request as the cache gives them back, float64.
    """

    case: LayerCase
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    q: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    kv_cache: torch.Tensor
    meta: MLAMetadata
    output: torch.Tensor
    contexts: list[torch.Tensor] = field(default_factory=list)


def make_layer_inputs(case: LayerCase, device: torch.device | str = "cpu") -> LayerInputs:
    """Tensors of a case; numbers are drawn on the CPU: the same for every device."""
    generator = torch.Generator().manual_seed(case.seed)
    cfg, page_size = case.config, case.page_size
    heads, rank = cfg.num_heads, cfg.kv_lora_rank

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def placed(values: torch.Tensor, padding: int = 0, fill: float = math.nan) -> torch.Tensor:
        """`values` with rows of padding; a slice of a wider tensor where the case asks for strides."""
        rows, *rest = values.shape
        wide = [rows + padding, *(n + 8 * case.strided for n in rest)]
        buffer = torch.full(wide, math.nan).to(values.dtype).to(device)
        view = buffer
        for axis, size in enumerate(rest, start=1):
            view = view.narrow(axis, 0, size)
        view[rows:] = fill
        view[:rows] = values.to(device)
        return view

    w_uk = normal(heads, cfg.qk_nope_head_dim, rank) / math.sqrt(rank)
    w_uv = normal(heads, rank, cfg.v_head_dim) / math.sqrt(rank)
    tokens = sum(case.query_lens)
    q, kv_c, k_pe = normal(tokens, heads, cfg.qk_head_dim), normal(tokens, rank), normal(tokens, cfg.qk_rope_head_dim)

    pages = [-(-length // page_size) for length in case.seq_lens]
    owned = case.shared_pages + sum(count - case.shared_pages for count in pages)
    ids = torch.randperm(owned + SPARE_PAGES, generator=generator).int()
    table = torch.full((len(pages), max(pages, default=0) + 2), UNUSED_PAGE, dtype=torch.int32)
    kv_cache = torch.full((owned + SPARE_PAGES, page_size, cfg.latent_dim), nobodys_number(cfg.cache_dtype)).to(cfg.cache_dtype)
    k_scale = 1.0 if case.k_scale is None else case.k_scale
    taken = case.shared_pages
    contexts = []
    prefix = normal(case.shared_pages * page_size, cfg.latent_dim)
    for request, (count, length, new) in enumerate(zip(pages, case.seq_lens, case.query_lens, strict=True)):
        own = count - case.shared_pages
        table[request, :count] = torch.cat([ids[: case.shared_pages], ids[taken : taken + own]])
        taken += own
        context = max(length - new, 0)
        rows = torch.cat([prefix, normal(context - len(prefix), cfg.latent_dim)]).to(cfg.dtype)
        position = torch.arange(context)
        at = table[request, position // page_size].long(), position % page_size
        kv_cache[at] = (rows.float() / k_scale).to(cfg.cache_dtype)
        contexts.append((kv_cache[at].double() * k_scale).to(device))

    builder = select_backend(cfg, device, "reference").get_builder_cls()(
        cfg,
        device,
        max_num_seqs=max(len(pages), 1),
        max_num_pages_per_seq=max(table.shape[1], 1),
        decode_threshold=case.decode_threshold,
    )
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=device)
    pad = case.padding_tokens
    return LayerInputs(
        case=case,
        w_uk=placed(w_uk.to(cfg.dtype)),
        w_uv=placed(w_uv.to(cfg.dtype)),
        q=placed(q.to(cfg.dtype), pad),
        kv_c=placed(kv_c.to(cfg.dtype), pad),
        k_pe=placed(k_pe.to(cfg.dtype), pad),
        kv_cache=placed(kv_cache),
        meta=builder.build(table.to(device), seq_lens, list(case.query_lens)),
        output=placed(torch.full((tokens + pad, heads * cfg.v_head_dim), math.nan).to(cfg.dtype)),
        contexts=contexts,
    )


def make_layer(inputs: LayerInputs, backend: str | None = None, **keywords: Any) -> MLAImpl:
    """The layer of a case on a backend; `keywords` as of `MLAImpl`."""
    cfg = inputs.case.config
    return select_backend(cfg, inputs.q.device, backend).get_impl_cls()(cfg, inputs.w_uk, inputs.w_uv, **keywords)


def run_layer(inputs: LayerInputs, backend: str | None = None, **keywords: Any) -> torch.Tensor:
    """`forward` of a case with everything allocated on the way full of NaN; returns the output."""
    layer = make_layer(inputs, backend, **keywords)
    with poisoned_allocations():
        return layer.forward(
            inputs.q, inputs.kv_c, inputs.k_pe, inputs.kv_cache, inputs.meta, k_scale=inputs.case.k_scale, output=inputs.output
        )


def exact_layer(inputs: LayerInputs, *, softmax_scale: float | None = None, shift: int = 0) -> Exact:
    """The truth of a case as [T, H, v_head_dim], LSE included, and how far a backend may be from it.

    New tokens are keys as they were given, but for decodes over an fp8 cache, which see them as the cache gives them back.

    To the errors of attention itself (`exact_attention`) come those of the projections, whose results are rounded to `dtype`.
    Which depends on the path, and a token may take either, so the larger is allowed. With u the unit roundoff, c a latent
    row, w the softmax weights, all sums of independent roundings (`SPREAD`):

    - up-projected: a key errs by u |k|, so a score by u scale sqrt(sum (q_d k_d)^2); a value by u |v|; and each part that is
      merged by another u of it;
    - absorbed: a score by u scale sqrt(sum (q_latent_l c_l)^2); the latent output, sum w c, by u of itself, and P by u:
      through W_UV that is u sqrt(sum_l (o_latent_l W_UV_l)^2) and u sqrt(sum_t (w_t v_t)^2) more.

    Either way the projections sum L = kv_lora_rank products in fp32: (sqrt(L) + 4) u32 of the sum of their magnitudes.

    Arguments:
        inputs: a case.
        softmax_scale: another than the case's, to tell what a backend with a wrong scale computes.
        shift: as in `exact_attention`.
    """
    case, cfg, (tokens, _), device = inputs.case, inputs.case.config, inputs.output.shape, inputs.q.device
    w_uk, w_uv = inputs.w_uk.double(), inputs.w_uv.double()
    out = torch.zeros(tokens, cfg.num_heads, cfg.v_head_dim, dtype=torch.float64, device=device)
    lse = torch.full((cfg.num_heads, tokens), -math.inf, dtype=torch.float64, device=device)
    out_allowed, lse_allowed = torch.zeros_like(out), torch.zeros_like(lse)
    first, scale = 0, cfg.softmax_scale if softmax_scale is None else softmax_scale
    u = torch.finfo(cfg.dtype).eps / 2
    for request, (length, new) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
        part = slice(first, first + new)
        first += new
        if min(length, new) == 0:
            continue
        fresh = torch.cat([inputs.kv_c[part], inputs.k_pe[part]], -1)[-length:]
        if request < inputs.meta.num_decodes:
            fresh = (fresh.float() / (case.k_scale or 1.0)).to(cfg.cache_dtype).double() * (case.k_scale or 1.0)
        rows = torch.cat([inputs.contexts[request], fresh.double()])
        c, rope = rows[:, : cfg.kv_lora_rank], rows[:, cfg.kv_lora_rank :]
        k = torch.cat([torch.einsum("ml,hnl->hmn", c, w_uk), rope.expand(cfg.num_heads, -1, -1)], -1)
        v = torch.einsum("ml,hlv->hmv", c, w_uv)
        q = inputs.q[part].double().transpose(0, 1)
        nope = cfg.qk_nope_head_dim
        q_latent = torch.cat([q[..., :nope] @ w_uk, q[..., nope:]], -1)

        seen = torch.arange(length, device=device) < (length - new + 1 + shift + torch.arange(new, device=device))[:, None]
        scores = (scale * q @ k.transpose(1, 2)).masked_fill(~seen, -math.inf)
        row_lse = torch.logsumexp(scores, -1)
        w = torch.exp(scores - torch.where(row_lse.isneginf(), 0.0, row_lse)[..., None])
        o = w @ v
        per_head_rows = rows.expand(cfg.num_heads, -1, -1)
        summed = scale * torch.maximum(q.abs() @ k.abs().transpose(1, 2), q_latent.abs() @ per_head_rows.abs().transpose(1, 2))
        rounded = SPREAD * u * scale * torch.maximum(q.square() @ k.square().mT, q_latent.square() @ per_head_rows.square().mT).sqrt()
        projecting = (math.sqrt(cfg.kv_lora_rank) + 4) * U32
        summed = (math.sqrt(cfg.latent_dim) + 4) * U32 * summed + projecting * scale * ((q[..., :nope].abs() @ w_uk.abs()) @ c.abs().mT)
        wrong = torch.expm1(summed + rounded) + (math.sqrt(length) + 8) * U32
        denominator = (w * wrong).sum(-1)
        o_latent = w @ c
        values = w @ v.abs()
        through = torch.maximum(
            3 * u * values, SPREAD * u * ((o_latent.square() @ w_uv.square()).sqrt() + (w.square() @ v.square()).sqrt())
        )
        moved = torch.einsum("hnm,hnmv->hnv", w * wrong, (v[:, None] - o[:, :, None]).abs())  # a weight too large pulls towards its value
        through += projecting * (w @ c.abs()) @ w_uv.abs()
        allowed = moved + through + o.abs() * u + torch.finfo(cfg.dtype).smallest_normal
        out[part], lse[:, part] = o.transpose(0, 1), row_lse
        out_allowed[part] = SAFETY * torch.where(seen.any(-1)[:, None], allowed, 0.0).transpose(0, 1)
        lse_allowed[:, part] = SAFETY * (denominator + 4 * U32 * torch.where(row_lse.isneginf(), 0.0, row_lse).abs())
    rms = float(inputs.w_uv.double().square().sum(1).mean().sqrt())
    return Exact(out, lse, out_allowed, lse_allowed, rms)
