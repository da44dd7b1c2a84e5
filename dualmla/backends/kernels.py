"""What the backends on a GPU have in common: the cache, the gather and the merge are kernels of ours, whoever does the attention."""

from __future__ import annotations

import functools
import logging

import torch

from dualmla.backends.base import MLABackend

logger = logging.getLogger("dualmla")


class KernelMLABackend(MLABackend):
    """The functions around the attention, by the package `dualmla_kernels`."""

    @classmethod
    def concat_and_cache_mla(
        cls, kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *, k_scale: float | torch.Tensor
    ) -> None:
        """As `MLABackend.concat_and_cache_mla`."""
        from dualmla_kernels.kv_cache import concat_and_cache_mla

        if kv_c.is_cpu:
            say_interpreted()
        concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, k_scale=k_scale)

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
        from dualmla_kernels.kv_cache import gather_kv_cache

        if kv_cache.is_cpu:
            say_interpreted()
        gather_kv_cache(kv_cache, block_table, cu_seqlens, seq_starts, out, k_scale=k_scale)

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
        from dualmla_kernels.merge_states import merge_attn_states

        if out.is_cpu:
            say_interpreted()
        merge_attn_states(out_a, lse_a, out_b, lse_b, out=out, lse=lse)


@functools.cache
def say_interpreted() -> None:
    """Once, that kernels on a CPU are slow."""
    logger.warning("the triton backend runs in Triton's interpreter on a CPU: right, but thousands of times slower than on a GPU")
