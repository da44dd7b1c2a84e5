"""MLA problems with shuffled pages, and their float64 references, shared by the emulator's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dualmla.emulator.aiter_kernels import from_bf16, to_bf16

FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


def quantised(x: NDArray[np.float32], nbytes: int, arch: str) -> tuple[NDArray, NDArray[np.float64]]:
    """(what the kernel gets, what that stands for): bf16 patterns for 2 bytes, the chip's fp8 for 1."""
    if nbytes == 2:
        bits = to_bf16(x)
        return bits, from_bf16(bits).astype(np.float64)
    t = torch.from_numpy(np.ascontiguousarray(x)).to(FP8[arch])
    return t.view(torch.uint8).numpy(), t.to(torch.float64).numpy()


@dataclass
class Latent:
    """Decode or absorbed prefill over a paged latent cache at page size 1. `q` and `kv` are bits, `q64` and `kv64` their values."""

    q: NDArray
    q64: NDArray[np.float64]
    kv: NDArray
    kv64: NDArray[np.float64]
    qo_indptr: list[int]
    kv_indptr: list[int]
    kv_indices: NDArray[np.int32]
    softmax_scale: float

    @property
    def query_lens(self) -> list[int]:
        return [b - a for a, b in zip(self.qo_indptr, self.qo_indptr[1:], strict=False)]

    def keys(self, sequence: int) -> NDArray[np.float64]:
        return self.kv64[self.kv_indices[self.kv_indptr[sequence] : self.kv_indptr[sequence + 1]]]

    def reference(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """out [T, H, 512] and lse [T, H] in float64; a row without keys gives 0 and -inf."""
        out = np.zeros((*self.q64.shape[:2], 512))
        lse = np.full(self.q64.shape[:2], -np.inf)
        for sequence, length in enumerate(self.query_lens):
            keys = self.keys(sequence)
            for j in range(length):
                row = self.qo_indptr[sequence] + j
                seen = len(keys) - length + 1 + j
                if seen > 0:
                    out[row], lse[row] = attend(self.q64[row], keys[:seen], self.softmax_scale)
        return out, lse


def attend(q: NDArray[np.float64], keys: NDArray[np.float64], scale: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """q [H, 576] over keys [n, 576]: out [H, 512], lse [H]."""
    scores = q @ keys.T * scale
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return weights @ keys[:, :512] / total, (top + np.log(total))[:, 0]


def latent(
    kv_lens: Sequence[int],
    *,
    heads: int = 16,
    query_lens: Sequence[int] | int = 1,
    seed: int = 0,
    q_bytes: int = 2,
    kv_bytes: int = 2,
    arch: str = "gfx942",
) -> Latent:
    """A problem of `len(kv_lens)` sequences. Row 0 of the cache belongs to nobody; its contents are ordinary numbers."""
    rng = np.random.default_rng(seed)
    lengths = [query_lens] * len(kv_lens) if isinstance(query_lens, int) else list(query_lens)
    total = sum(kv_lens)
    q, q64 = quantised(rng.standard_normal((sum(lengths), heads, 576), np.float32), q_bytes, arch)
    kv, kv64 = quantised(rng.standard_normal((total + 8, 576), np.float32), kv_bytes, arch)
    pages = (rng.permutation(total + 7)[:total] + 1).astype(np.int32)
    return Latent(q, q64, kv, kv64, [0, *np.cumsum(lengths).tolist()], [0, *np.cumsum(kv_lens).tolist()], pages, 576**-0.5)
