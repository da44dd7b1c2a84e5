"""AITER's decode behind the shared interface."""

from __future__ import annotations

import functools
import logging

import torch

from dualmla.attention import MLAImpl
from dualmla.backends.aiter import certificate, launch, prefill, probe, support
from dualmla.backends.base import BackendUnavailable, DecodeCall, PrefillCall
from dualmla.backends.kernels import KernelMLABackend
from dualmla.config import MLAConfig
from dualmla.metadata import MLAMetadata

logger = logging.getLogger("dualmla")


class AiterMLABackend(KernelMLABackend):
    """AITER's `mla_decode_fwd` on gfx942 and gfx950, for the shapes its release does right."""

    name = "aiter"
    may_raise = True

    @staticmethod
    def get_name() -> str:
        return "ROCM_AITER_MLA"

    @classmethod
    def get_impl_cls(cls) -> type[MLAImpl]:
        return AiterMLAImpl

    @classmethod
    def not_supported_reasons(cls, cfg: MLAConfig | None, device: torch.device) -> list[str]:
        """As `MLABackend.not_supported_reasons`. The device is asked first: elsewhere AITER is not even looked for."""
        found = probe.usable(device)
        if isinstance(found, str):
            return [found]
        return [] if cfg is None else support.config_refusals(cfg, found.aiter.signature, found.arch)

    @classmethod
    def expected_on(cls, device: torch.device) -> bool:
        """True where the device is AITER's and AITER is installed."""
        return probe.device_refusal(device) is None and isinstance(probe.find_aiter(), probe.Installed)

    @classmethod
    def decode_refusals(cls, call: DecodeCall) -> list[str]:
        """As `MLABackend.decode_refusals`, from the support table of the release that is installed."""
        found = probe.usable(call.device)
        if isinstance(found, str):
            return [found]
        shape = support.decode_shape(call, found.aiter.signature, found.arch)
        return shape if isinstance(shape, list) else []

    @classmethod
    def prefill_refusals(cls, call: PrefillCall) -> list[str]:
        """As `MLABackend.prefill_refusals`."""
        found = probe.usable(call.device)
        return [found] if isinstance(found, str) else support.prefill_refusals(call, found.aiter)

    @classmethod
    def doubts(cls, call: DecodeCall | PrefillCall) -> list[str]:
        """As `MLABackend.doubts`: what the certificate of this machine says, if there is one."""
        found = _usable(call.device)
        standing = certificate.in_force(certificate.Machine.here(found.aiter, found.arch))
        doubts = certificate.doubts(call, standing)
        if isinstance(standing, str) and not doubts:
            _say_uncertified(standing)
        return doubts

    @classmethod
    def check_forward(cls, cfg: MLAConfig, kv_cache: torch.Tensor, meta: MLAMetadata) -> None:
        """As `MLABackend.check_forward`."""
        decodes, reasons = meta.decode_metadata, []
        if decodes is not None:
            reasons += cls.decode_refusals(DecodeCall.of_layer(cfg, kv_cache, decodes))
        if meta.num_prefills:
            reasons += cls.prefill_refusals(PrefillCall(kv_cache.device, cfg.dtype, cfg.num_heads, cfg.qk_head_dim, cfg.v_head_dim))
        if reasons:
            raise BackendUnavailable(cls.name, reasons)

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
        """As `MLABackend.mla_decode`. Values of cache row 0 that are not finite become finite.

        Raises:
            BackendUnavailable: AITER must not be asked for this call; nothing was launched.
        """
        call = DecodeCall.of(
            q, kv_cache, meta, kv_lora_rank=out.shape[2], causal=causal, return_lse=lse is not None, num_kv_splits=num_kv_splits
        )
        found = _usable(q.device)
        shape = support.decode_shape(call, found.aiter.signature, found.arch)
        if isinstance(shape, list):
            raise BackendUnavailable(cls.name, shape)
        units = torch.cuda.get_device_properties(q.device).multi_processor_count
        launch.decode(
            found.aiter, shape, q, kv_cache, meta, softmax_scale,
            causal=causal, out=out, lse=lse, k_scale=k_scale, compute_units=units, captured=torch.cuda.is_current_stream_capturing(),
        )  # fmt: skip

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
        """As `MLABackend.mla_prefill`, by AITER's `flash_attn_varlen_func`.

        Raises:
            BackendUnavailable: AITER must not be asked for this call; nothing was launched.
        """
        found = _usable(q.device)
        reasons = support.prefill_refusals(PrefillCall.of(q, v), found.aiter)
        if reasons or found.aiter.attention is None:
            raise BackendUnavailable(cls.name, reasons)
        prefill.prefill(
            found.aiter.attention, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
            causal=causal, out=out, lse=lse,
        )  # fmt: skip


class AiterMLAImpl(MLAImpl):
    """The shared forward over AITER's decode."""

    ops = AiterMLABackend


def _usable(device: torch.device) -> probe.Usable:
    found = probe.usable(device)
    if isinstance(found, str):
        raise BackendUnavailable(AiterMLABackend.name, [found])
    return found


@functools.cache
def _say_uncertified(why: str) -> None:
    logger.warning("AITER is used as far as the support table goes, uncertified: %s", why)
