"""The attention layer shared by all backends: cache write, projections, attention, up-projection.

The new latent rows are written to the cache first. Decodes then absorb W_UK into the query and W_UV into the output, so
that attention runs over the latent rows themselves:

    q_latent[t, h] = q_nope[t, h] W_UK[h]            [kv_lora_rank]
    o_latent       = attention([q_latent | q_rope], latent rows)
    out[t, h]      = o_latent[t, h] W_UV[h]          [v_head_dim]

Prefills have many queries for each key, and attend over smaller keys and values made from the latent rows:

    k[s, h] = [W_UK[h] kv_c[s] | k_pe[s]]            [qk_head_dim]
    v[s, h] = kv_c[s] W_UV[h]                        [v_head_dim]

to their new tokens causally, to their context (a prefix hit, or earlier chunks of the prompt) in pieces of a bounded
workspace, and the parts are merged by their LSE (`dualmla.context`).
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch

from dualmla.config import FLOAT8_DTYPES, MLAConfig
from dualmla.context import PrefillPlan, prefill_plan
from dualmla.metadata import MLAMetadata
from dualmla.protocol import AttentionOps
from dualmla.validation import check_cache, check_contents, check_k_scale, check_meta, check_tensor, check_written, scale_arguments

WORKSPACE_BYTES = 512 * 2**20
"""What the up-projected context of all heads takes at most where `context_workspace_tokens` is left to us."""

_numbers = itertools.count()
_numbered: WeakValueDictionary[int, MLAImpl] = WeakValueDictionary()


class MLAImpl:
    """One MLA layer.

    Arguments:
        cfg: sizes, scale, dtypes.
        w_uk: [num_heads, qk_nope_head_dim, kv_lora_rank], in `cfg.dtype`.
        w_uv: [num_heads, kv_lora_rank, v_head_dim], in `cfg.dtype`.
        context_workspace_tokens: most context tokens up-projected at a time; None: as many as `WORKSPACE_BYTES` hold.
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
        if context_workspace_tokens is None:
            context_workspace_tokens = default_workspace_tokens(cfg)
        if type(context_workspace_tokens) is not int or context_workspace_tokens < 1:
            raise ValueError(f"context_workspace_tokens must be None or an int of at least 1, got {context_workspace_tokens!r}")
        self.cfg = cfg
        self.w_uk = w_uk
        self.w_uv = w_uv
        self.context_workspace_tokens = context_workspace_tokens
        self._number()

    def _number(self) -> None:
        self.handle = next(_numbers)
        """This layer for an operator of a compiled graph."""
        _numbered[self.handle] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, or one from another process, is a layer of its own: its compiled graph must not run the first one's weights."""
        self.__dict__.update(state)
        self._number()

    @staticmethod
    def of_handle(handle: int) -> MLAImpl:
        """The layer whose `handle` it is; KeyError when it is gone."""
        return _numbered[handle]

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
            output: [T, num_heads * v_head_dim], written in place and returned when given.

        Returns:
            [T, num_heads * v_head_dim], every row written; rows of padding are 0.

        Raises:
            ValueError, TypeError: naming the argument, its value and what is allowed.
            RuntimeError: the metadata is stale.
            BackendUnavailable: a forced backend can't do this batch.

            Whatever is raised of these, nothing has been written.
        """
        if torch.compiler.is_compiling():
            if output is None:
                output = q.new_empty(q.shape[0], self.cfg.num_heads * self.cfg.v_head_dim)
            torch.ops.dualmla.mla_forward(q, kv_c, k_pe, kv_cache, output, self.handle, meta.handle, *scale_arguments(k_scale))
            return output
        cfg, device = self.cfg, self.w_uk.device
        check_tensor("q", q, rank=3, dtypes=(cfg.dtype,), device=device, shape=(None, cfg.num_heads, cfg.qk_head_dim))
        tokens = q.shape[0]
        check_tensor("kv_c", kv_c, rank=2, dtypes=(cfg.dtype,), device=device, shape=(tokens, cfg.kv_lora_rank))
        check_tensor("k_pe", k_pe, rank=2, dtypes=(cfg.dtype,), device=device, shape=(tokens, cfg.qk_rope_head_dim))
        check_cache(kv_cache, (cfg.cache_dtype,), device, cfg.latent_dim)
        check_written("kv_cache", kv_cache)
        if not isinstance(meta, MLAMetadata):
            raise TypeError(f"meta must be MLAMetadata, got {type(meta).__name__}")
        check_meta(meta, num_tokens=tokens, num_heads=cfg.num_heads, dtype=cfg.dtype, kv_cache=kv_cache)
        check_contents(meta, tokens, kv_cache.shape[0])
        rank = cfg.kv_lora_rank if meta.config is None else meta.config.kv_lora_rank
        if rank != cfg.kv_lora_rank:  # the rows may be as long and cut elsewhere
            raise ValueError(f"kv_lora_rank is {cfg.kv_lora_rank}, the metadata was built for a config of kv_lora_rank={rank}")
        width = cfg.num_heads * cfg.v_head_dim
        if output is None:
            output = torch.empty(tokens, width, dtype=cfg.dtype, device=device)
        else:
            check_tensor("output", output, rank=2, dtypes=(cfg.dtype,), device=device, shape=(tokens, width))
            check_written("output", output)
            if output.is_inference() and not torch.is_inference_mode_enabled():  # torch would refuse it after the cache is written
                raise ValueError("output was made under torch.inference_mode() and can't be written outside of it")
        scale = check_k_scale(k_scale, device)
        self.ops.check_forward(cfg, kv_cache, meta)

        self.ops.concat_and_cache_mla(kv_c, k_pe, kv_cache, meta.slot_mapping, k_scale=scale)
        decodes, prefills = meta.decode_metadata, meta.prefill_metadata
        cut = tokens if prefills is None else meta.num_decode_tokens  # rows of padding go with the last part
        if decodes is not None:
            self._absorbed(q[:cut], kv_cache, decodes, scale, output[:cut])
        if prefills is not None:
            self._prefill(q[cut:], kv_c[cut:], k_pe[cut:], kv_cache, prefills, scale, output[cut:])
        if decodes is None and prefills is None:
            output.zero_()
        return output

    def _absorbed(
        self, q: torch.Tensor, kv_cache: torch.Tensor, meta: MLAMetadata, k_scale: float | torch.Tensor, output: torch.Tensor
    ) -> None:
        """Attend over the latent rows themselves."""
        cfg = self.cfg
        if meta.block_table.shape[1] == 0:  # a profile run: there are no pages yet
            output.zero_()
            return
        nope, rope = q[..., : cfg.qk_nope_head_dim], q[..., cfg.qk_nope_head_dim :]
        absorbed = torch.empty(*q.shape[:2], cfg.latent_dim, dtype=cfg.dtype, device=q.device)
        torch.bmm(nope.transpose(0, 1), self.w_uk, out=absorbed[..., : cfg.kv_lora_rank].transpose(0, 1))  # by `out`: autocast keeps off
        absorbed[..., cfg.kv_lora_rank :] = rope
        latent = torch.empty(q.shape[0], cfg.num_heads, cfg.kv_lora_rank, dtype=cfg.dtype, device=q.device)
        self.ops.mla_decode(
            absorbed, kv_cache, meta, cfg.softmax_scale, causal=True, out=latent, lse=None, k_scale=k_scale, num_kv_splits=None
        )
        heads = output.view(-1, cfg.num_heads, cfg.v_head_dim).transpose(0, 1)
        torch.bmm(latent.transpose(0, 1), self.w_uv, out=heads)

    def _prefill(
        self,
        q: torch.Tensor,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: MLAMetadata,
        k_scale: float | torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Attend over keys and values made from the latent rows: the new tokens' as they are, the context's from the cache."""
        cfg = self.cfg
        plan = prefill_plan(meta, self.context_workspace_tokens)
        if meta.block_table.shape[1] and self._absorbs(plan):
            self._absorbed(q, kv_cache, meta, k_scale, output)
            return
        # the metadata may know no more than upper bounds, the plan has read the lengths
        keys = slice(sum(plan.query_lens)) if plan.key_rows is None else plan.key_rows
        k, v = self._up_project(kv_c[keys], k_pe[keys])
        out = output.view(-1, cfg.num_heads, cfg.v_head_dim)
        lse = torch.empty(cfg.num_heads, q.shape[0], dtype=torch.float32, device=q.device) if plan.chunks else None
        longest = max(plan.query_lens)
        self.ops.mla_prefill(q, k, v, meta.qo_indptr, plan.cu_seqlens_k, longest, longest, cfg.softmax_scale, causal=True, out=out, lse=lse)
        if lse is None:
            return
        # a token may meet many pieces of its context: rounded once, at the end
        merged = out if len(plan.chunks) == 1 else out.float()
        for chunk in plan.chunks:
            latent = torch.empty(chunk.num_keys, cfg.latent_dim, dtype=cfg.dtype, device=q.device)
            table = meta.block_table[chunk.requests]
            self.ops.gather_kv_cache(kv_cache, table, chunk.cu_seqlens_k, chunk.seq_starts, latent, k_scale=k_scale)
            k, v = self._up_project(latent[:, : cfg.kv_lora_rank], latent[:, cfg.kv_lora_rank :])
            part_q, part_lse = q[chunk.tokens], torch.empty_like(lse[:, chunk.tokens])
            part = torch.empty(*part_q.shape[:2], cfg.v_head_dim, dtype=cfg.dtype, device=q.device)
            self.ops.mla_prefill(
                part_q, k, v, chunk.cu_seqlens_q, chunk.cu_seqlens_k, chunk.max_seqlen_q, chunk.max_seqlen_k, cfg.softmax_scale,
                causal=False, out=part, lse=part_lse,
            )  # fmt: skip
            state, state_lse = merged[chunk.tokens], lse[:, chunk.tokens]
            self.ops.merge_attn_states(state, state_lse, part, part_lse, out=state, lse=state_lse)
        if merged is not out:
            out.copy_(merged)

    def _absorbs(self, plan: PrefillPlan) -> bool:
        """Whether the prefills take the absorbed path. In an fp8 cache the new tokens' keys are less exact than as given: never."""
        return (
            self.ops.absorbs_prefill
            and self.cfg.cache_dtype not in FLOAT8_DTYPES
            and absorbed_is_cheaper(self.cfg, plan.query_lens, plan.context_lens)
        )

    def _up_project(self, kv_c: torch.Tensor, k_pe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [S, H, qk_head_dim] and values [S, H, v_head_dim] of latent rows `kv_c` [S, kv_lora_rank], `k_pe` [S, qk_rope_head_dim]."""
        cfg, tokens = self.cfg, kv_c.shape[0]
        k = torch.empty(tokens, cfg.num_heads, cfg.qk_head_dim, dtype=cfg.dtype, device=kv_c.device)
        v = torch.empty(tokens, cfg.num_heads, cfg.v_head_dim, dtype=cfg.dtype, device=kv_c.device)
        rows = kv_c.expand(cfg.num_heads, -1, -1)
        torch.bmm(rows, self.w_uk.transpose(1, 2), out=k[..., : cfg.qk_nope_head_dim].transpose(0, 1))
        torch.bmm(rows, self.w_uv, out=v.transpose(0, 1))
        k[..., cfg.qk_nope_head_dim :] = k_pe[:, None]
        return k, v


def default_workspace_tokens(cfg: MLAConfig) -> int:
    """Context tokens that are up-projected at a time: as many as `WORKSPACE_BYTES` hold."""
    numbers = cfg.latent_dim + cfg.num_heads * (cfg.qk_head_dim + cfg.v_head_dim)
    return max(WORKSPACE_BYTES // (numbers * cfg.dtype.itemsize), 1)


LATENT_COST = 1.25
"""What a multiply-add of the attention over latent rows costs, one of the up-projection or of a prefill being 1."""

LATENT_START = 512
"""Tokens of context that attention over latent rows takes longer for, whatever the context."""


def absorbed_is_cheaper(cfg: MLAConfig, query_lens: list[int], context_lens: list[int]) -> bool:
    """Whether prefills take less time over the latent rows than over up-projected keys and values.

    With n queries over c tokens of context, L = kv_lora_rank, N, R = qk_nope_head_dim, qk_rope_head_dim, V = v_head_dim and
    p = n c + n^2 / 2 pairs of query and key, multiply-adds a head are

        up-projected    (n + c) L (N + V)  +  p (N + R + V)        every key is projected
        absorbed         n      L (N + V)  +  p (2 L + R)          every query is, in and out

    so that absorbing saves c L (N + V). Its pairs count `LATENT_COST` times and are n `LATENT_START` more, as measured on an H200
    (docs/performance.md): with DeepSeek's sizes it is cheaper for fewer than about 125 queries over a long context, 80 over
    1024 tokens, and never without one.
    """
    saved = sum(max(c, 0) for c in context_lens) * cfg.kv_lora_rank * (cfg.qk_nope_head_dim + cfg.v_head_dim)
    pairs = sum(n * (max(c, 0) + LATENT_START) + n * n / 2 for n, c in zip(query_lens, context_lens, strict=True))
    return pairs * (LATENT_COST * (2 * cfg.kv_lora_rank + cfg.qk_rope_head_dim) - cfg.qk_head_dim - cfg.v_head_dim) < saved
