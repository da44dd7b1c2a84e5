"""What the shared forward asks of a backend."""

from __future__ import annotations

from typing import Protocol

import torch

from dualmla.config import MLAConfig
from dualmla.metadata import MLAMetadata


class AttentionOps(Protocol):
    """The functions that a backend hands to the shared forward; shapes as in `dualmla.backends.base`."""

    @property
    def absorbs_prefill(self) -> bool: ...

    def check_forward(self, cfg: MLAConfig, kv_cache: torch.Tensor, meta: MLAMetadata) -> None: ...

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

    def mla_prefill(
        self,
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
    ) -> None: ...

    def gather_kv_cache(
        self,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens: torch.Tensor,
        seq_starts: torch.Tensor,
        out: torch.Tensor,
        *,
        k_scale: float | torch.Tensor,
    ) -> None: ...

    def merge_attn_states(
        self,
        out_a: torch.Tensor,
        lse_a: torch.Tensor,
        out_b: torch.Tensor,
        lse_b: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None: ...
