"""Our own kernels: compiled on a GPU, interpreted on a CPU. The correctness oracle and the fallback."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable

import torch

from dualmla.attention import MLAImpl
from dualmla.backends.kernels import KernelMLABackend, say_interpreted
from dualmla.config import MLAConfig
from dualmla.metadata import MLAMetadata
from dualmla.validation import float8_refusal


class TritonMLABackend(KernelMLABackend):
    """Triton kernels of the package `dualmla_kernels`."""

    name = "triton"
    absorbs_prefill = True

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
        if cfg is not None and (refusal := float8_refusal(cfg.cache_dtype, device)):
            reasons.append(f"kv_cache_dtype is {refusal}")
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
        if q.is_cpu:
            say_interpreted()
        _kernel("decode", "mla_decode")(
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
            plan=meta.plan if num_kv_splits is None else None,
        )

    @classmethod
    def decode_scratch_bytes(cls, cfg: MLAConfig, device: torch.device, *, max_query_len: int, num_reqs: int) -> int:
        """The most that a decode takes beside its arguments, whatever its lengths."""
        from dualmla_kernels.decode import scratch_bytes

        float8 = cfg.cache_dtype.itemsize == 1
        return scratch_bytes(cfg.num_heads, max_query_len, num_reqs, cfg.kv_lora_rank, cfg.dtype, device, float8)

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
        """As `MLABackend.mla_prefill`; the kernel needs no bound of the key lengths."""
        if q.is_cpu:
            say_interpreted()
        _kernel("prefill", "mla_prefill")(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale, causal=causal, out=out, lse=lse)


class TritonMLAImpl(MLAImpl):
    """The shared forward over the Triton kernels."""

    ops = TritonMLABackend


@functools.cache
def _kernel(module: str, name: str) -> Callable[..., None]:
    """A function of the kernels' package, imported when first used: an import statement costs a call a microsecond each time."""
    function: Callable[..., None] = getattr(importlib.import_module(f"dualmla_kernels.{module}"), name)
    return function


@functools.cache
def _missing_packages(device_type: str) -> str | None:
    """What the kernels need and is not installed, as a sentence; None when nothing is missing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; torch for CUDA and ROCm brings it, on a CPU install `dualmla[cpu]`"
    if device_type == "cpu" and importlib.util.find_spec("numpy") is None:
        return "numpy is not installed, which Triton's interpreter needs; install `dualmla[cpu]`"
    return None
