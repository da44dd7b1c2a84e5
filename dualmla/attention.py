"""The attention layer shared by all backends: cache write, projections, attention, up-projection.

MLA absorbs W_UK into the query and W_UV into the output, so that attention runs over the latent rows themselves:

    q_latent[t, h] = q_nope[t, h] W_UK[h]            [512]
    o_latent       = attention([q_latent | q_rope], latent rows)
    out[t, h]      = o_latent[t, h] W_UV[h]          [v_head_dim]
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from dualmla.config import MLAConfig
from dualmla.metadata import MLAMetadata
from dualmla.validation import check_cache, check_k_scale, check_meta, check_tensor, check_written


class AttentionOps(Protocol):
    """The functions that a backend hands to the shared forward; shapes as in `dualmla.backends.base`."""

    def mla_decode(
        self,
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
    ) -> None: ...

    def concat_and_cache_mla(
        self, kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *, k_scale: float | torch.Tensor
    ) -> None: ...


class MLAImpl:
    """One MLA layer.

    Arguments:
        cfg: sizes, scale, dtypes.
        w_uk: [num_heads, qk_nope_head_dim, kv_lora_rank], in `cfg.dtype`.
        w_uv: [num_heads, kv_lora_rank, v_head_dim], in `cfg.dtype`.
        context_workspace_tokens: most context tokens up-projected at a time; None: chosen from the config.
        alibi_slopes, sliding_window, blocksparse_params, logits_soft_cap: accepted for engines' sake, refused when set.

    Raises:
        NotImplementedError: one of the last four is set.
        ValueError, TypeError: naming the argument, its value and what is allowed.
    """

    ops: ClassVar[AttentionOps]

    def __init__(
        self,
        cfg: MLAConfig,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        *,
        context_workspace_tokens: int | None = None,
        alibi_slopes: object = None,
        sliding_window: object = None,
        blocksparse_params: object = None,
        logits_soft_cap: object = None,
    ) -> None:
        unsupported = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "blocksparse_params": blocksparse_params,
            "logits_soft_cap": logits_soft_cap,
        }
        for name, value in unsupported.items():
            if value is not None:
                raise NotImplementedError(f"{name} must be None: MLA models do not use it, got {value!r}")
        shape_uk = (cfg.num_heads, cfg.qk_nope_head_dim, cfg.kv_lora_rank)
        shape_uv = (cfg.num_heads, cfg.kv_lora_rank, cfg.v_head_dim)
        check_tensor("w_uk", w_uk, rank=3, dtypes=(cfg.dtype,), device=None, shape=shape_uk, dense=False)
        check_tensor("w_uv", w_uv, rank=3, dtypes=(cfg.dtype,), device=w_uk.device, shape=shape_uv, dense=False)
        self.cfg = cfg
        self.w_uk = w_uk
        self.w_uv = w_uv

    def forward(
        self,
        q: torch.Tensor,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: MLAMetadata,
        *,
        k_scale: float | torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new latent rows to the cache, then attend.

        Arguments:
            q: [T, num_heads, qk_head_dim] as [nope | rope], already roped.
            kv_c: [T, kv_lora_rank], already normed.
            k_pe: [T, qk_rope_head_dim], already roped.
            kv_cache: [num_pages, page_size, latent_dim], written in place.
            meta: of this batch, decodes first.
            k_scale: what an fp8 cache is divided by.
            output: written in place and returned when given.

        Returns:
            [T, num_heads * v_head_dim].

        Raises:
            ValueError, TypeError: naming the argument; nothing is written then.
        """
        cfg, device = self.cfg, self.w_uk.device
        check_tensor("q", q, rank=3, dtypes=(cfg.dtype,), device=device, shape=(None, cfg.num_heads, cfg.qk_head_dim))
        tokens = q.shape[0]
        check_tensor("kv_c", kv_c, rank=2, dtypes=(cfg.dtype,), device=device, shape=(tokens, cfg.kv_lora_rank))
        check_tensor("k_pe", k_pe, rank=2, dtypes=(cfg.dtype,), device=device, shape=(tokens, cfg.qk_rope_head_dim))
        check_cache(kv_cache, (cfg.cache_dtype,), device, cfg.latent_dim)
        check_meta(meta, num_tokens=tokens, num_heads=cfg.num_heads, dtype=cfg.dtype, kv_cache=kv_cache)
        width = cfg.num_heads * cfg.v_head_dim
        if output is None:
            output = torch.empty(tokens, width, dtype=cfg.dtype, device=device)
        else:
            check_tensor("output", output, rank=2, dtypes=(cfg.dtype,), device=device, shape=(tokens, width))
            check_written("output", output)
        scale = check_k_scale(k_scale, device)

        self.ops.concat_and_cache_mla(kv_c, k_pe, kv_cache, meta.slot_mapping, k_scale=scale)
        decodes, prefills = meta.decode_metadata, meta.prefill_metadata
        cut = tokens if prefills is None else meta.num_decode_tokens  # rows of padding go with the last part
        if decodes is not None:
            self._absorbed(q[:cut], kv_cache, decodes, scale, output[:cut])
        if prefills is not None:
            self._absorbed(q[cut:], kv_cache, prefills, scale, output[cut:])
        if decodes is None and prefills is None:
            output.zero_()
        return output

    def _absorbed(
        self, q: torch.Tensor, kv_cache: torch.Tensor, meta: MLAMetadata, k_scale: float | torch.Tensor, output: torch.Tensor
    ) -> None:
        cfg = self.cfg
        nope, rope = q[..., : cfg.qk_nope_head_dim], q[..., cfg.qk_nope_head_dim :]
        absorbed = torch.cat([torch.bmm(nope.transpose(0, 1), self.w_uk).transpose(0, 1), rope], -1)
        latent = torch.empty(q.shape[0], cfg.num_heads, cfg.kv_lora_rank, dtype=cfg.dtype, device=q.device)
        self.ops.mla_decode(
            absorbed, kv_cache, meta, cfg.softmax_scale, causal=True, out=latent, lse=None, k_scale=k_scale, num_kv_splits=None
        )
        heads = output.view(-1, cfg.num_heads, cfg.v_head_dim).transpose(0, 1)
        heads.copy_(torch.bmm(latent.transpose(0, 1), self.w_uv))
