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

    def reference(self) -> Reference:
        """In float64; a row without keys gives 0, -inf and 0."""
        shape = (*self.q64.shape[:2], 512)
        result = Reference(np.zeros(shape), np.full(shape[:2], -np.inf), np.zeros(shape))
        for sequence, length in enumerate(self.query_lens):
            keys = self.keys(sequence)
            for j in range(length):
                row, seen = self.qo_indptr[sequence] + j, len(keys) - length + 1 + j
                if seen > 0:
                    result.out[row], result.lse[row], result.magnitude[row] = attend(self.q64[row], keys[:seen], self.softmax_scale)
        return result


@dataclass
class Reference:
    """`magnitude` is sum(P |v|): what an error of P by a factor 1 + e can move the output by, over e."""

    out: NDArray[np.float64]
    lse: NDArray[np.float64]
    magnitude: NDArray[np.float64]

    def budget(self, p_bits: int, *, bf16_result: bool) -> NDArray[np.float64]:
        """The error each output element may have when P is rounded to `p_bits` explicit mantissa bits (7 for bf16, 3 for
        fp8) while the denominator is not, the sums are float32, and the result is rounded to bf16 or not. fp8 also rounds
        what lies below 2**-6 of the row's maximum to a multiple of 2**-10, no more than a tenth of the budget here."""
        budget = self.magnitude * 2.0 ** -(p_bits + 1) * (1.1 if p_bits == 3 else 1.0) + 1e-6
        return budget + np.abs(self.out) * 2.0**-8 if bf16_result else budget


def attend(q: NDArray[np.float64], keys: NDArray[np.float64], scale: float) -> tuple[NDArray[np.float64], ...]:
    """q [H, 576] over keys [n, 576]: out [H, 512], lse [H], magnitude [H, 512]."""
    scores = q @ keys.T * scale
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    values = keys[:, :512]
    return weights @ values / total, (top + np.log(total))[:, 0], weights @ np.abs(values) / total


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
