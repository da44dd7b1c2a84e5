"""AITER's decode behind the shared interface."""

from __future__ import annotations

import torch

from dualmla.attention import MLAImpl
from dualmla.backends.aiter import launch, probe, support
from dualmla.backends.base import BackendUnavailable, DecodeCall, MLABackend
from dualmla.config import MLAConfig
from dualmla.metadata import MLAMetadata


class AiterMLABackend(MLABackend):
    """AITER's `mla_decode_fwd` on gfx942 and gfx950, for the shapes its release does right."""

    name = "aiter"

    @staticmethod
    def get_name() -> str:
        return "ROCM_AITER_MLA"

    @classmethod
    def get_impl_cls(cls) -> type[MLAImpl]:
        return AiterMLAImpl

    @classmethod
    def not_supported_reasons(cls, cfg: MLAConfig | None, device: torch.device) -> list[str]:
        """As `MLABackend.not_supported_reasons`. The device is asked first: elsewhere AITER is not even looked for."""
        if refusal := probe.device_refusal(device):
            return [refusal]
        verdict = probe.verdict(device)
        if verdict.aiter is None:
            return [verdict.reason]
        return [] if cfg is None else support.config_refusals(cfg, verdict.aiter.signature, probe.device_arch(device))

    @classmethod
    def expected_on(cls, device: torch.device) -> bool:
        """True where the device is AITER's and AITER is installed."""
        return probe.device_refusal(device) is None and isinstance(probe.find_aiter(), probe.Installed)

    @classmethod
    def decode_refusals(cls, call: DecodeCall) -> list[str]:
        """As `MLABackend.decode_refusals`, from the support table of the release that is installed."""
        if refusal := probe.device_refusal(call.device):
            return [refusal]
        verdict = probe.verdict(call.device)
        if verdict.aiter is None:
            return [verdict.reason]
        return support.call_refusals(call, verdict.aiter.signature, probe.device_arch(call.device))

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
        if reasons := cls.decode_refusals(call):
            raise BackendUnavailable(cls.name, reasons)
        aiter = probe.verdict(q.device).aiter
        assert aiter is not None  # a reason above
        shape = support.launch_shape(aiter.signature, probe.device_arch(q.device), call.num_heads)
        assert shape is not None  # likewise
        units = torch.cuda.get_device_properties(q.device).multi_processor_count
        launch.decode(aiter, shape, q, kv_cache, meta, softmax_scale, causal=causal, out=out, lse=lse, compute_units=units)

    @classmethod
    def concat_and_cache_mla(
        cls, kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *, k_scale: float | torch.Tensor
    ) -> None:
        """As `MLABackend.concat_and_cache_mla`, with the kernel that all GPU backends share."""
        from dualmla_kernels.kv_cache import concat_and_cache_mla

        concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, k_scale=k_scale)


class AiterMLAImpl(MLAImpl):
    """The shared forward over AITER's decode."""

    ops = AiterMLABackend
