"""MLA problems with shuffled pages, and their float64 references, shared by the emulator's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
        return [b - a for a, b in pairwise(self.qo_indptr)]

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


@dataclass
class Ragged:
    """Varlen prefill: q [T, H, 192], k [Tk, Hk, 192], v [Tk, Hk, 128] as bf16 bits."""

    q: NDArray[np.uint16]
    k: NDArray[np.uint16]
    v: NDArray[np.uint16]
    cu_q: list[int]
    cu_k: list[int]
    softmax_scale: float

    def reference(self, causal: bool) -> Reference:
        """Causal is bottom-right. out [T, H, 128], lse [T, H]; a row without keys gives 0, -inf and 0."""
        q, k, v = (from_bf16(x).astype(np.float64) for x in (self.q, self.k, self.v))
        shape = (*q.shape[:2], 128)
        result = Reference(np.zeros(shape), np.full(shape[:2], -np.inf), np.zeros(shape))
        group = q.shape[1] // k.shape[1]
        for (q0, q1), (k0, k1) in zip(pairwise(self.cu_q), pairwise(self.cu_k), strict=True):
            for row in range(q0, q1):
                seen = k1 - k0 - (q1 - 1 - row) if causal else k1 - k0
                if seen <= 0:
                    continue
                for head in range(q.shape[1]):
                    scores = k[k0 : k0 + seen, head // group] @ q[row, head] * self.softmax_scale
                    top = scores.max()
                    weights = np.exp(scores - top)
                    values, total = v[k0 : k0 + seen, head // group], weights.sum()
                    result.out[row, head], result.magnitude[row, head] = weights @ values / total, weights @ np.abs(values) / total
                    result.lse[row, head] = top + np.log(total)
        return result


def ragged(q_lens: Sequence[int], k_lens: Sequence[int], heads: int, *, kv_heads: int | None = None, seed: int = 0) -> Ragged:
    rng = np.random.default_rng(seed)

    def bits(rows: int, groups: int, width: int) -> NDArray[np.uint16]:
        return to_bf16(rng.standard_normal((rows, groups, width), np.float32))

    cu_q, cu_k = [0, *np.cumsum(q_lens).tolist()], [0, *np.cumsum(k_lens).tolist()]
    q, k = bits(cu_q[-1], heads, 192), bits(cu_k[-1], kv_heads or heads, 192)
    return Ragged(q, k, bits(cu_k[-1], kv_heads or heads, 128), cu_q, cu_k, 192**-0.5)
