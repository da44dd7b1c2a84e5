"""The one description of an MLA layer that backends, builders and graph states are made for."""

from __future__ import annotations

import ctypes
import math
import sys
from dataclasses import dataclass

import torch

FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

MOST_HEAD_DIM = 512
"""Numbers a query, key or value head: the tiles of the prefill kernel are made for no more."""

MOST_PAGE_SIZE = 2**24
"""Tokens a page: kernels round lengths up to pages in int32."""


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Sizes, scale and dtypes of one MLA layer on one rank.

    Arguments:
        num_heads: query heads on this rank.
        softmax_scale: factor of the scores q.k before the softmax. Never derived from a head dimension: models with
            YaRN multiply `(qk_nope_head_dim + qk_rope_head_dim) ** -0.5` by their squared mscale.
        page_size: tokens in a page of the latent cache, up to 2^24.
        kv_lora_rank: numbers of the compressed latent `kv_c`; a power of two, 32..512.
        qk_nope_head_dim: query/key numbers a head without position; a multiple of 16.
        qk_rope_head_dim: query/key numbers a head with rotary position; a multiple of 16, 16..128.
        v_head_dim: value numbers a head; a multiple of 16, up to 512, as is qk_nope_head_dim + qk_rope_head_dim.
        dtype: of activations and weights: bfloat16, float16 or float32.
        kv_cache_dtype: of the latent cache: `dtype`, float8_e4m3fn or float8_e4m3fnuz. None becomes `dtype`.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.
    """

    num_heads: int
    softmax_scale: float
    page_size: int = 1
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    kv_cache_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "page_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        check_page_size("page_size", self.page_size)
        check_scale("softmax_scale", self.softmax_scale)
        check_latent_dims(self.kv_lora_rank, self.qk_rope_head_dim)
        for name in ("qk_nope_head_dim", "v_head_dim"):
            if getattr(self, name) % 16:
                raise ValueError(f"{name} must be a multiple of 16, got {getattr(self, name)}")
        for name in ("qk_head_dim", "v_head_dim"):
            if getattr(self, name) > MOST_HEAD_DIM:
                raise ValueError(f"{name} must be at most {MOST_HEAD_DIM}, got {getattr(self, name)}")
        if self.dtype not in COMPUTE_DTYPES:
            raise ValueError(f"dtype must be one of {_names(COMPUTE_DTYPES)}, got {self.dtype}")
        if self.kv_cache_dtype is None:
            object.__setattr__(self, "kv_cache_dtype", self.dtype)
        if self.kv_cache_dtype not in (self.dtype, *FLOAT8_DTYPES):
            raise ValueError(f"kv_cache_dtype must be None or one of {_names((self.dtype, *FLOAT8_DTYPES))}, got {self.kv_cache_dtype}")

    @property
    def latent_dim(self) -> int:
        """Numbers of a latent row `[kv_c | k_pe]`."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Numbers of a query or key head `[nope | rope]`."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_dtype(self) -> torch.dtype:
        """`kv_cache_dtype`, typed as what it is once a config is made: never None."""
        return self.kv_cache_dtype or self.dtype


def check_scale(name: str, scale: object) -> float:
    """A Python number that is finite and positive, and still is when a kernel takes it in fp32."""
    if type(scale) is float and 1e-30 < scale < 1e30:  # what nearly every call brings: fp32 holds it, and nothing else is asked
        return scale
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"{name} must be a float, got {type(scale).__name__}: {scale!r}")
    if not 0 < scale <= sys.float_info.max:
        raise ValueError(f"{name} must be finite and positive, got {scale}")
    rounded = ctypes.c_float(scale).value
    if rounded == 0 or math.isinf(rounded):
        raise ValueError(f"{name} must be finite and positive in fp32, got {scale}")
    return float(scale)


def check_page_size(name: str, page_size: int) -> None:
    """Raise ValueError unless the kernels can count in pages of so many tokens."""
    if not 1 <= page_size <= MOST_PAGE_SIZE:
        raise ValueError(f"{name} must be 1 to {MOST_PAGE_SIZE} tokens, got {page_size}")


def check_latent_dims(kv_lora_rank: int, qk_rope_head_dim: int) -> None:
    """Raise ValueError unless the two parts of a latent row are of a size the kernels take."""
    if kv_lora_rank & (kv_lora_rank - 1) or not 32 <= kv_lora_rank <= 512:
        raise ValueError(f"kv_lora_rank must be a power of two from 32 to 512, got {kv_lora_rank}")
    if qk_rope_head_dim % 16 or not 16 <= qk_rope_head_dim <= 128:
        raise ValueError(f"qk_rope_head_dim must be a multiple of 16 from 16 to 128, got {qk_rope_head_dim}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
