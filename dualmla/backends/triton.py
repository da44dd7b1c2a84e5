"""Our own kernels: compiled on a GPU, interpreted on a CPU. The correctness oracle and the fallback."""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch

from dualmla.attention import MLAImpl
from dualmla.backends.base import MLABackend
from dualmla.config import FLOAT8_DTYPES, MLAConfig
from dualmla.metadata import MLAMetadata

logger = logging.getLogger("dualmla")


class TritonMLABackend(MLABackend):
    """Triton kernels of the package `dualmla_kernels`."""

    name = "triton"

    @staticmethod
    def get_name() -> str:
        return "TRITON_MLA"

    @classmethod
    def get_impl_cls(cls) -> type[MLAImpl]:
        return TritonMLAImpl

    @classmethod
    def not_supported_reasons(cls, cfg: MLAConfig | None, device: torch.device) -> list[str]:
        reasons = []
        if missing := _missing_packages(device.type):
            reasons.append(missing)
        if device.type == "cpu" and torch.cuda.is_available():
            reasons.append("the tensors are on a CPU and this machine has a GPU: move them there, or use the reference")
        elif device.type not in ("cpu", "cuda"):
            reasons.append(f"the device is {device.type}; the kernels run on cuda (NVIDIA or ROCm), and interpreted on a CPU")
        if cfg is not None and device.type == "cuda" and cfg.cache_dtype in FLOAT8_DTYPES:
            wanted = device_float8(device)
            if cfg.cache_dtype != wanted:
                reasons.append(f"kv_cache_dtype is {cfg.cache_dtype}; this device takes {wanted}")
        return reasons

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
        """As `MLABackend.mla_decode`."""
        from dualmla_kernels.decode import mla_decode

        _say_interpreted(q.device.type)
        mla_decode(
            q,
            kv_cache,
            meta.block_table,
            meta.seq_lens,
            meta.qo_indptr,
            meta.max_query_len,
            softmax_scale,
            causal=causal,
            out=out,
            lse=lse,
            k_scale=k_scale,
            num_kv_splits=num_kv_splits,
        )

    @classmethod
    def concat_and_cache_mla(
        cls, kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *, k_scale: float | torch.Tensor
    ) -> None:
        """As `MLABackend.concat_and_cache_mla`."""
        from dualmla_kernels.kv_cache import concat_and_cache_mla

        _say_interpreted(kv_c.device.type)
        concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping)


class TritonMLAImpl(MLAImpl):
    """The shared forward over the Triton kernels."""

    ops = TritonMLABackend


def device_float8(device: torch.device) -> torch.dtype:
    """The float8 e4m3 flavour that a GPU computes with: e4m3fnuz on gfx942, e4m3fn on gfx950 and CUDA."""
    if torch.version.hip and torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx94"):
        return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


@functools.cache
def _missing_packages(device_type: str) -> str | None:
    """What the kernels need and is not installed, as a sentence; None when nothing is missing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; torch for CUDA and ROCm brings it, on a CPU install `dualmla[cpu]`"
    if device_type == "cpu" and importlib.util.find_spec("numpy") is None:
        return "numpy is not installed, which Triton's interpreter needs; install `dualmla[cpu]`"
    return None


@functools.cache
def _say_interpreted(device_type: str) -> None:
    if device_type == "cpu":
        logger.warning("the triton backend runs in Triton's interpreter on a CPU: right, but thousands of times slower than on a GPU")
