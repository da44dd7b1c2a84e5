"""What a backend is: five hooks, the attention functions, and the reasons it can't be used.

A backend is a class that is never instantiated: a name for a set of class methods, as engines pass them around.
Everything a backend is handed has been validated; outputs are allocated by the caller.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch

from dualmla.attention import MLAImpl
from dualmla.config import MLAConfig
from dualmla.graph import MLAGraphState
from dualmla.metadata import MLAMetadata, MLAMetadataBuilder


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Within, a GPU is the current one, as code of others takes for granted."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class BackendUnavailable(RuntimeError):  # noqa: N818 - a state, not a mistake
    """A backend that was asked for can't be used.

    Attributes:
        name: of the backend, or "auto".
        reasons: one sentence each.
    """

    def __init__(self, name: str, reasons: list[str]) -> None:
        super().__init__(f"backend {name!r} can't be used: " + "; ".join(reasons))
        self.name = name
        self.reasons = reasons

    def __reduce__(self) -> tuple[type[BackendUnavailable], tuple[str, list[str]]]:
        """Workers hand their exceptions to another process."""
        return type(self), (self.name, self.reasons)


@dataclass(frozen=True)
class BackendReport:
    """Whether a backend can be used for a config on a device.

    Attributes:
        name: as in `DUALMLA_BACKEND`.
        usable: no reason against it.
        reasons: one sentence each, with the value met and what would work.
    """

    name: str
    usable: bool
    reasons: list[str]


@dataclass(frozen=True)
class DecodeCall:
    """What a backend needs to know of one decode to refuse it before anything is launched.

    Attributes:
        device: of every tensor.
        dtype, kv_cache_dtype: of the queries and of the cache.
        num_heads, kv_lora_rank, qk_rope_head_dim: sizes.
        page_size: tokens a page.
        num_tokens: rows of the queries, padding included.
        batch_size: requests.
        max_query_len: most new tokens a request.
        cache_bytes: of the whole latent cache.
        cache_is_dense: no gaps between its rows.
        causal: bottom-right causal mask.
        return_lse: the caller wants the LSE.
        fixed_splits: the caller fixed the number of KV splits.
    """

    device: torch.device
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    page_size: int
    num_tokens: int
    batch_size: int
    max_query_len: int
    cache_bytes: int
    cache_is_dense: bool
    causal: bool
    return_lse: bool
    fixed_splits: bool

    @property
    def shape(self) -> DecodeCall:
        """What calls have in common that run the same kernels: without the sizes of the batch and of the cache."""
        return dataclasses.replace(self, num_tokens=0, batch_size=0, cache_bytes=0)

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: MLAMetadata,
        *,
        kv_lora_rank: int,
        causal: bool,
        return_lse: bool,
        num_kv_splits: int | None,
    ) -> DecodeCall:
        """Described from the arguments of `MLABackend.mla_decode`."""
        return cls(
            device=q.device,
            dtype=q.dtype,
            kv_cache_dtype=kv_cache.dtype,
            num_heads=q.shape[1],
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=q.shape[2] - kv_lora_rank,
            page_size=kv_cache.shape[1],
            num_tokens=q.shape[0],
            batch_size=meta.num_reqs,
            max_query_len=meta.max_query_len,
            cache_bytes=kv_cache.numel() * kv_cache.element_size(),
            cache_is_dense=kv_cache.is_contiguous(),
            causal=causal,
            return_lse=return_lse,
            fixed_splits=num_kv_splits is not None,
        )

    @classmethod
    def of_layer(cls, cfg: MLAConfig, kv_cache: torch.Tensor, decodes: MLAMetadata) -> DecodeCall:
        """The decode that a layer's forward will make, described before its queries are there."""
        return cls(
            device=kv_cache.device,
            dtype=cfg.dtype,
            kv_cache_dtype=kv_cache.dtype,
            num_heads=cfg.num_heads,
            kv_lora_rank=cfg.kv_lora_rank,
            qk_rope_head_dim=cfg.qk_rope_head_dim,
            page_size=kv_cache.shape[1],
            num_tokens=decodes.num_tokens,
            batch_size=decodes.num_reqs,
            max_query_len=decodes.max_query_len,
            cache_bytes=kv_cache.numel() * kv_cache.element_size(),
            cache_is_dense=kv_cache.is_contiguous(),
            causal=True,
            return_lse=False,
            fixed_splits=False,
        )


@dataclass(frozen=True)
class PrefillCall:
    """What a backend needs to know of one prefill to refuse it before anything is launched.

    Attributes:
        device, dtype: of every tensor.
        num_heads, qk_head_dim, v_head_dim: sizes.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    qk_head_dim: int
    v_head_dim: int

    @property
    def shape(self) -> PrefillCall:
        """What calls have in common that run the same kernels."""
        return self

    @classmethod
    def of(cls, q: torch.Tensor, v: torch.Tensor) -> PrefillCall:
        """Described from the arguments of `MLABackend.mla_prefill`."""
        return cls(q.device, q.dtype, q.shape[1], q.shape[2], v.shape[2])


class MLABackend:
    """Base of the backends: hooks with the shared answers, and the signatures to implement."""

    name: ClassVar[str]
    """Short name, as in `DUALMLA_BACKEND` and `select_backend(backend=...)`."""

    may_raise: ClassVar[bool] = False
    """Whether auto survives an exception of the backend: it runs on somebody else's code, and the next backend can take the call."""

    absorbs_prefill: ClassVar[bool] = False
    """Whether `mla_decode` takes queries of any length, so that a short prefill may go through it where that is cheaper."""

    @staticmethod
    def get_name() -> str:
        """The engine-facing name, such as `TRITON_MLA`."""
        raise NotImplementedError

    @classmethod
    def get_impl_cls(cls) -> type[MLAImpl]:
        """The layer: `get_impl_cls()(cfg, w_uk, w_uv).forward(...)`."""
        raise NotImplementedError

    @classmethod
    def get_metadata_cls(cls) -> type[MLAMetadata]:
        """What `build` returns and `forward` takes: one class for all backends."""
        return MLAMetadata

    @classmethod
    def get_builder_cls(cls) -> type[MLAMetadataBuilder]:
        """`get_builder_cls()(cfg, device, ...).build(block_table, seq_lens, query_lens)`, once a step."""
        return MLAMetadataBuilder

    @classmethod
    def get_state_cls(cls) -> type[MLAGraphState]:
        """What owns the metadata of captured decodes: `get_state_cls()(cfg, device, max_batch_size=..., ...)`."""
        return MLAGraphState

    @classmethod
    def not_supported_reasons(cls, cfg: MLAConfig | None, device: torch.device) -> list[str]:
        """Why the backend can't serve `cfg` on `device`; empty when it can. With cfg None: why it can't run there at all."""
        raise NotImplementedError

    @classmethod
    def expected_on(cls, device: torch.device) -> bool:
        """Whether a user of `device` would count on this backend, so that auto passing it over is worth a warning."""
        return False

    @classmethod
    def decode_refusals(cls, call: DecodeCall) -> list[str]:
        """Why this very decode can't be run on a device that `not_supported_reasons` accepts; empty when it can."""
        return []

    @classmethod
    def prefill_refusals(cls, call: PrefillCall) -> list[str]:
        """As `decode_refusals`, for a prefill."""
        return []

    @classmethod
    def doubts(cls, call: DecodeCall | PrefillCall) -> list[str]:
        """Why auto should not hand the backend a call that it does not refuse. A backend that is forced is not asked."""
        return []

    @classmethod
    def check_forward(cls, cfg: MLAConfig, kv_cache: torch.Tensor, meta: MLAMetadata) -> None:
        """Raise BackendUnavailable where a part of a layer's forward must be refused; asked before the cache is written.

        A backend that refuses nothing, or hands on what it refuses, has nothing to say.
        """

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
        """Absorbed attention over the latent cache; writes every row of `out` [T, H, kv_lora_rank] and `lse` fp32 [H, T].

        q [T, H, latent_dim], kv_cache [num_pages, page_size, latent_dim]; rows without keys are 0 and -inf.
        """
        raise NotImplementedError

    @classmethod
    def concat_and_cache_mla(
        cls, kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *, k_scale: float | torch.Tensor
    ) -> None:
        """Write `[kv_c | k_pe] / k_scale` [T, latent_dim] to the slots of `slot_mapping` int64 [<= T]; -1 is skipped."""
        raise NotImplementedError

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
        """Attention over keys of their own a head; writes every row of `out` [T, H, v_head_dim] and `lse` fp32 [H, T].

        q [T, H, qk_head_dim], k [S, H, qk_head_dim], v [S, H, v_head_dim]; rows without keys and tokens past
        `cu_seqlens_q[-1]` are 0 and -inf.
        """
        raise NotImplementedError

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
        """Row `cu_seqlens[r] + i` of `out` [tokens, latent_dim] becomes token `seq_starts[r] + i` of request r, times k_scale.

        Rows past `cu_seqlens[-1]` become 0.
        """
        raise NotImplementedError

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
        """One attention out of two over different keys; `out` and `lse` may be a part itself, updated in place.

        out_a, out_b, out [T, H, D], lse_a, lse_b, lse fp32 [H, T]; a part of lse -inf (or +inf) saw no key.
        """
        raise NotImplementedError
