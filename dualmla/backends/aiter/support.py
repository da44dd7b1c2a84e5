"""What each AITER can be asked to decode, as data, and the sentences that refuse the rest.

An unsupported combination must be refused here, before the call: releases from v0.1.12 on abort the process, and some
shapes are silently wrong. Sources: AITER's releases and tests up to August 2026, the launcher of the release on PyPI, and
its kernels run in an emulator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dualmla.backends.aiter.signatures import Aiter, Signature
from dualmla.backends.base import DecodeCall, PrefillCall
from dualmla.config import FLOAT8_DTYPES, MLAConfig

ARCHS = ("gfx942", "gfx950")
MAX_QUERY_LEN = 4
"""Longer queries are wrong on binaries in use (8 tokens of 16 heads), or would read the cache once a token."""

CACHE_LIMIT = {"gfx942": 4 << 30, "gfx950": 2 << 30}
"""Bytes from which KV offsets, 32 bits in the kernels, are wrong."""

PARTIAL_LIMIT = 2 << 30
"""Bytes of partial results that 32-bit offsets surely reach."""


@dataclass(frozen=True)
class Kernels:
    """Decode kernels for bf16 queries.

    Attributes:
        generations, archs: where they are.
        cache: "bfloat16" or "float8".
        persistent: they follow a work plan (`plan`); else splits of every request.
        heads: the head counts, each with the most query tokens a request that one launch takes.
    """

    generations: tuple[str, ...]
    archs: tuple[str, ...]
    cache: str
    persistent: bool
    heads: dict[int, int]


# Left out on purpose. Not persistent: 8 heads (16 with the heads repeated does the same work), 64 heads on gfx942 (faults), and 128
# heads with several query tokens, where a launch costs what one row a token costs and is proven for fewer releases. Persistent: a
# bf16 cache, which needs none of it; several query tokens, where causality breaks; more than 16 heads, whose folding differs by
# release, while launches of 16 heads each with one plan are the same in all. Queries in float8 would be rounded to 3 bits: those
# kernels are never asked for, and what is wrong with them (gfx950, 3 or 4 tokens) does not concern us.
TABLE = (
    Kernels(("S0", "S1"), ARCHS, "bfloat16", False, {16: 1, 128: 1}),
    Kernels(("S2", "S3", "S4", "S5", "S6", "S7"), ARCHS, "bfloat16", False, {16: 4, 128: 1}),
    Kernels(("S8",), ("gfx942",), "bfloat16", False, {16: 4, 32: 1, 128: 1}),
    Kernels(("S8",), ("gfx950",), "bfloat16", False, {16: 4, 32: 1, 64: 1, 128: 1}),
    Kernels(("S2", "S3", "S4", "S5", "S6", "S7", "S8"), ARCHS, "float8", True, {16: 1}),
)

MAX_HEADS = 128
FLOAT8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
"""The flavour that each arch computes with; the other one has the same bits for other numbers."""


@dataclass(frozen=True)
class LaunchShape:
    """How a decode is put to AITER.

    Attributes:
        heads: heads are repeated to so many; a persistent decode takes them 16 at a time.
        query_len: most tokens a request in one launch.
        persistent: by a work plan.
    """

    heads: int
    query_len: int
    persistent: bool = False


def launch_shape(signature: Signature, arch: str, num_heads: int, kv_cache_dtype: torch.dtype = torch.bfloat16) -> LaunchShape | None:
    """The smallest kernel that holds `num_heads`, None where there is none."""
    cache = "float8" if kv_cache_dtype in FLOAT8_DTYPES else "bfloat16"
    for kernels in TABLE:
        if (signature.generation in kernels.generations, arch in kernels.archs, kernels.cache) != (True, True, cache):
            continue
        if kernels.persistent and signature.persistent and num_heads <= MAX_HEADS:
            (heads,) = kernels.heads
            return LaunchShape(-(-num_heads // heads) * heads, kernels.heads[heads], persistent=True)
        fitting = [heads for heads in kernels.heads if heads >= num_heads]
        if fitting and not kernels.persistent:
            return LaunchShape(min(fitting), kernels.heads[min(fitting)])
    return None


def config_refusals(cfg: MLAConfig, signature: Signature, arch: str) -> list[str]:
    """Why no decode of this layer can be done; empty where some can."""
    sizes = (cfg.kv_lora_rank, cfg.qk_rope_head_dim, cfg.qk_head_dim, cfg.v_head_dim)
    reasons = []
    if sizes != (512, 64, 192, 128):
        reasons.append(
            f"kv_lora_rank, qk_rope_head_dim, qk_head_dim, v_head_dim are {', '.join(map(str, sizes))}; AITER has 512, 64, 192, 128 alone"
        )
    return reasons + _dtype_refusals(cfg.dtype, cfg.cache_dtype, signature, arch) + _head_refusals(cfg.num_heads)


def decode_shape(call: DecodeCall, signature: Signature, arch: str) -> LaunchShape | list[str]:
    """How this decode is put to AITER, or every reason why it can't be."""
    reasons = []
    if (call.kv_lora_rank, call.qk_rope_head_dim) != (512, 64):
        reasons.append(f"kv_lora_rank and qk_rope_head_dim are {call.kv_lora_rank} and {call.qk_rope_head_dim}; AITER has 512 and 64 alone")
    reasons += _dtype_refusals(call.dtype, call.kv_cache_dtype, signature, arch) + _head_refusals(call.num_heads)
    if call.max_query_len > MAX_QUERY_LEN:
        reasons.append(f"a request has up to {call.max_query_len} query tokens; AITER's decode takes at most {MAX_QUERY_LEN}")
    if call.cache_bytes >= CACHE_LIMIT[arch]:
        reasons.append(
            f"the cache has {call.cache_bytes / (1 << 30):.1f} GiB; AITER's offsets are 32 bits: less than "
            f"{CACHE_LIMIT[arch] >> 30} GiB a layer is right on {arch}"
        )
    if not call.cache_is_dense:
        reasons.append("the cache is not contiguous; AITER takes dense rows alone")
    float8 = call.kv_cache_dtype in FLOAT8_DTYPES
    if call.return_lse and float8:
        reasons.append(
            "the LSE is asked for; AITER's persistent decode, which a float8 cache takes, writes none for most requests: "
            "use a bfloat16 cache, or the triton backend"
        )
    elif call.return_lse and not signature.writes_lse:
        reasons.append(
            f"the LSE is asked for; AITER of generation {signature.generation} returns memory that it never wrote (S6 and later write it)"
        )
    if call.fixed_splits:
        reasons.append("num_kv_splits is fixed; AITER does not promise a row the same bits alone and in a batch, the triton backend does")
    shape = launch_shape(signature, arch, call.num_heads, call.kv_cache_dtype)
    if shape is not None and not shape.persistent:
        rows, splits = max(call.num_tokens, call.batch_size), 2 if call.return_lse else 1
        if partial_bytes(rows, shape.heads, splits=splits) > PARTIAL_LIMIT:
            reasons.append(
                f"{call.num_tokens} query tokens of {shape.heads} heads need more than {PARTIAL_LIMIT >> 30} GiB of partial results: "
                "decode fewer at a time"
            )
    return reasons if reasons or shape is None else shape


def prefill_refusals(call: PrefillCall, aiter: Aiter) -> list[str]:
    """Why this prefill can't be done; empty where it can."""
    reasons = []
    if aiter.attention is None:
        reasons.append(f"AITER {aiter.version} has no flash_attn_varlen_func that takes softmax_scale, causal and return_lse by name")
    if (call.qk_head_dim, call.v_head_dim) != (192, 128):
        reasons.append(f"qk_head_dim and v_head_dim are {call.qk_head_dim} and {call.v_head_dim}; AITER's prefill has 192 and 128 alone")
    if call.dtype != torch.bfloat16:
        reasons.append(f"queries are {_short(call.dtype)}; AITER computes in bfloat16 alone")
    return reasons


def partial_bytes(num_tokens: int, heads: int, *, splits: int) -> int:
    """Bytes of the fp32 [T, splits, heads, 512] that the first stage writes."""
    return num_tokens * splits * heads * 512 * 4


def _dtype_refusals(dtype: torch.dtype, kv_cache_dtype: torch.dtype, signature: Signature, arch: str) -> list[str]:
    if dtype != torch.bfloat16:
        return [f"queries are {_short(dtype)}; AITER computes in bfloat16 alone"]
    if kv_cache_dtype not in FLOAT8_DTYPES:
        return []
    if kv_cache_dtype != FLOAT8[arch]:
        return [f"the cache is {_short(kv_cache_dtype)}; {arch} computes with {_short(FLOAT8[arch])}"]
    if not signature.persistent:
        return [
            f"the cache is {_short(kv_cache_dtype)} and queries are bfloat16; AITER has that in persistent mode alone, which generation "
            f"{signature.generation} lacks, or plans in a way that is not known here: use a bfloat16 cache"
        ]
    return []


def _head_refusals(num_heads: int) -> list[str]:
    if num_heads > MAX_HEADS:
        return [f"num_heads is {num_heads}; AITER's decode takes at most {MAX_HEADS}"]
    return []


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
