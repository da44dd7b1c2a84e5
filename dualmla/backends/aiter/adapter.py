"""AITER's decode behind the shared interface."""

from __future__ import annotations

import torch

from dualmla.attention import MLAImpl
from dualmla.backends.base import MLABackend
from dualmla.config import MLAConfig


class AiterMLABackend(MLABackend):
    """AITER's `mla_decode_fwd` on gfx942 and gfx950."""

    name = "aiter"

    @staticmethod
    def get_name() -> str:
        return "ROCM_AITER_MLA"

    @classmethod
    def get_impl_cls(cls) -> type[MLAImpl]:
        return AiterMLAImpl

    @classmethod
    def not_supported_reasons(cls, cfg: MLAConfig | None, device: torch.device) -> list[str]:
        return ["the adapter is not written yet"]


class AiterMLAImpl(MLAImpl):
    """The shared forward over AITER's decode."""

    ops = AiterMLABackend
