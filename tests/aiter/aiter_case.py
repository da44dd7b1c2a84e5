"""A decode in all its nastiness, and what the reference says of it."""

from __future__ import annotations

from typing import Any

import aiter_stand_in as stand_in
import torch

from dualmla.backends.aiter import launch
from dualmla.backends.aiter.signatures import describe
from dualmla.backends.aiter.support import launch_shape
from dualmla.backends.reference import ReferenceMLABackend
from dualmla.metadata import MLAMetadata, decode_metadata

SCALE = 0.1352  # DeepSeek's, with YaRN; AITER's default would be 576 ** -0.5
UNUSED_PAGE = 2147480000


class Case:
    """A decode with shuffled pages, free slots full of NaN and unused page ids that lie outside every cache."""

    def __init__(
        self,
        seq_lens: list[int],
        query_lens: list[int],
        *,
        heads: int = 16,
        page_size: int = 1,
        padding: int = 0,
        cache: str = "bfloat16",
        k_scale: float = 1.0,
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        pages = [-(-n // page_size) for n in seq_lens]
        ids = (torch.randperm(sum(pages), generator=generator) + 1).int().split(pages)  # page 0 is free: NaN
        table = torch.full((len(seq_lens), max(pages, default=0) + 2), UNUSED_PAGE, dtype=torch.int32)
        self.kv_cache = torch.full((sum(pages) + 2, page_size, 576), float("nan"), dtype=torch.bfloat16)
        for row, own, length in zip(table, ids, seq_lens, strict=True):
            row[: len(own)] = own
            latents = torch.randn(length, 576, generator=generator).bfloat16()
            for i in range(length):
                self.kv_cache[own[i // page_size], i % page_size] = latents[i]
        self.kv_cache, self.k_scale = self.kv_cache.to(getattr(torch, cache)), k_scale
        self.q = torch.randn(sum(query_lens) + padding, heads, 576, generator=generator).bfloat16()
        self.meta: MLAMetadata = decode_metadata(table, seq_lens, query_lens, page_size=page_size, device="cpu")

    def reference(self, *, causal: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.buffers()
        ReferenceMLABackend.mla_decode(
            self.q, self.kv_cache, self.meta, SCALE, causal=causal, out=out, lse=lse, k_scale=self.k_scale, num_kv_splits=None
        )
        return out, lse

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, heads, _ = self.q.shape
        return torch.full((tokens, heads, 512), float("nan"), dtype=torch.bfloat16), torch.full((heads, tokens), float("nan"))

    def decoded(
        self,
        mla: Any,
        package: Any = stand_in.PACKAGE,
        *,
        causal: bool = True,
        with_lse: bool = False,
        k_scale: float | torch.Tensor | None = None,
        compute_units: int = 304,
        captured: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out [T, H, 512] and lse [H, T] of our adapter over the stand-ins, as on a gfx942; `k_scale` None: the case's, as a float."""
        aiter = describe(package, mla, "stand-in")
        shape = launch_shape(aiter.signature, "gfx942", self.q.shape[1], self.kv_cache.dtype)
        assert shape is not None
        out, lse = self.buffers()
        launch.decode(
            aiter, shape, self.q, self.kv_cache, self.meta, SCALE,
            causal=causal, out=out, lse=lse if with_lse else None, k_scale=self.k_scale if k_scale is None else k_scale,
            compute_units=compute_units, captured=captured,
        )  # fmt: skip
        return out, lse
