"""Checks at the door: one place that says no, before any launch, naming the argument, its value and what is allowed.

Functions and impls call these once; everything behind them trusts its arguments.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from typing import TYPE_CHECKING

import torch

from dualmla.config import FLOAT8_DTYPES, MOST_HEAD_DIM, MOST_PAGE_SIZE, check_latent_dims, check_scale

if TYPE_CHECKING:
    from dualmla.metadata import MLAMetadata

Shape = tuple[int | None, ...]


def variable(name: str) -> str:
    """The environment variable, "" where it is not set. `os.environ` raises and catches for that, a microsecond each; calls ask often."""
    data = getattr(os.environ, "_data", None)
    return "" if data is not None and _encoded(name) not in data else os.environ.get(name, "")


@functools.cache
def _encoded(name: str) -> object:
    """A name as the data of `os.environ` have it."""
    return os.environ.encodekey(name)


def reads_allowed(tensor: torch.Tensor) -> bool:
    """Whether the values of `tensor` may be looked at: always on a CPU, on a GPU (a sync) under DUALMLA_DEBUG=1 alone."""
    return tensor.is_cpu or variable("DUALMLA_DEBUG") not in ("", "0")


def checked_device(device: torch.device | str) -> torch.device:
    """`device` with its index made explicit, so that it compares equal to a tensor's."""
    device = torch.device(device)
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def look(tensor: object) -> object:
    """All that the checks here ask of a tensor but its values, so that what was accepted once need not be checked again."""
    if not isinstance(tensor, torch.Tensor):
        return type(tensor)
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.requires_grad


def check_k_scale(k_scale: float | torch.Tensor | None, device: torch.device) -> float | torch.Tensor:
    """None becomes 1; a tensor is fp32 of one element on `device`, and a float is rounded to fp32: both write the same bits."""
    if k_scale is None:
        return 1.0
    if not isinstance(k_scale, torch.Tensor):
        return ctypes.c_float(check_scale("k_scale", k_scale)).value
    if k_scale.dtype != torch.float32 or k_scale.numel() != 1 or k_scale.device != device:
        raise ValueError(
            f"k_scale must be a float or an fp32 tensor of one element on {device}, got {_short(k_scale.dtype)} "
            f"{list(k_scale.shape)} on {k_scale.device}"
        )
    if k_scale.requires_grad:
        raise ValueError("k_scale requires grad; dualmla computes no gradients")
    if reads_allowed(k_scale):
        check_scale("k_scale", float(k_scale))
    return k_scale


def scale_arguments(k_scale: float | torch.Tensor | None) -> tuple[torch.Tensor | None, float | None]:
    """`k_scale` as an operator takes it: a tensor or a float."""
    return (k_scale, None) if isinstance(k_scale, torch.Tensor) else (None, k_scale)


def check_index_tensor(
    name: str, tensor: torch.Tensor, *, rank: int, device: torch.device | None, dtype: torch.dtype = torch.int32
) -> None:
    """`tensor` is an index tensor of `rank` dimensions with a dense last one, on `device` (None: anywhere)."""
    check_tensor(name, tensor, rank=rank, dtypes=(dtype,), device=device)


def check_tensor(
    name: str,
    tensor: object,
    *,
    rank: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None,
    shape: Shape | None = None,
    dense: bool = True,
) -> None:
    """`tensor` has the rank, one of the dtypes, the device, the shape where one is given, and a dense last dimension.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another rank, shape, device or stride, or a gradient asked for.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(_short(d) for d in dtypes)}, got {_short(tensor.dtype)}")
    if tensor.dim() != rank:
        raise ValueError(f"{name} must have {rank} dimensions, got shape {list(tensor.shape)}")
    if shape is not None and tensor.shape != shape and any([want not in (None, n) for n, want in zip(tensor.shape, shape, strict=True)]):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, it must be on {device} like the other tensors")
    if dense and tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel():
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")
    if tensor.requires_grad:
        raise ValueError(f"{name} requires grad; dualmla computes no gradients: detach it, or compute it under torch.inference_mode()")


def check_written(name: str, tensor: torch.Tensor) -> None:
    """`tensor` can be written: none of its elements share memory, as those of an expanded or unfolded tensor do.

    Each stride must step over all that smaller strides reach; so it is in every view of a tensor that has memory of its own.
    """
    if tensor.is_contiguous():
        return
    reached = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reached:
                raise ValueError(f"{name} is written, but its elements share memory: shape {list(tensor.shape)}, strides {tensor.stride()}")
            reached += (size - 1) * stride


def device_float8(device: torch.device) -> torch.dtype:
    """The float8 e4m3 flavour that a device computes with: e4m3fnuz on gfx942, e4m3fn on gfx950, CUDA and a CPU, which takes both."""
    if device.type == "cuda" and torch.version.hip and torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx94"):
        return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


def float8_refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a cache of `dtype` can't be on `device`, None when it can: the other flavour has the same bits for other numbers."""
    if dtype not in FLOAT8_DTYPES or device.type != "cuda" or dtype == (wanted := device_float8(device)):
        return None
    return f"{_short(dtype)}; {device} computes with {_short(wanted)}"


def check_cache(kv_cache: torch.Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device, latent_dim: int | None = None) -> None:
    """`kv_cache` is [num_pages, page_size, latent_dim] of one of the dtypes."""
    check_tensor("kv_cache", kv_cache, rank=3, dtypes=dtypes, device=device, shape=(None, None, latent_dim))
    if not 1 <= kv_cache.shape[1] <= MOST_PAGE_SIZE:
        raise ValueError(
            f"kv_cache must be [num_pages, page_size, latent_dim] with pages of 1 to {MOST_PAGE_SIZE} tokens, got {list(kv_cache.shape)}"
        )
    if refusal := float8_refusal(kv_cache.dtype, device):
        raise ValueError(f"kv_cache is {refusal}")


def check_slots(slot_mapping: torch.Tensor, num_tokens: int, kv_cache: torch.Tensor) -> None:
    """`slot_mapping` is int64 [<= num_tokens] of slots of the cache or -1; the values are looked at where that costs no sync."""
    check_index_tensor("slot_mapping", slot_mapping, rank=1, device=kv_cache.device, dtype=torch.int64)
    if slot_mapping.shape[0] > num_tokens:
        raise ValueError(f"slot_mapping has {slot_mapping.shape[0]} slots, there are {num_tokens} tokens")
    slots = kv_cache.shape[0] * kv_cache.shape[1]
    if slot_mapping.numel() and reads_allowed(slot_mapping):
        least, most = int(slot_mapping.min()), int(slot_mapping.max())
        if least < -1 or most >= slots:
            raise ValueError(f"slot_mapping must be -1 or 0..{slots - 1}, got values from {least} to {most}")


def check_packed(name: str, cu_seqlens: torch.Tensor, device: torch.device) -> None:
    """`cu_seqlens` is int32 [num_reqs + 1]; its values are `check_packed_values`'."""
    check_index_tensor(name, cu_seqlens, rank=1, device=device)
    if cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name} must have num_reqs + 1 entries, got none")


def check_packed_values(name: str, cu_seqlens: torch.Tensor, num_tokens: int, max_seqlen: int | None) -> None:
    """`cu_seqlens` goes from 0 on, never decreases, and stays inside `num_tokens` rows and `max_seqlen` a request. Waits for a device."""
    bounds = cu_seqlens.tolist()
    lengths = [end - first for first, end in itertools.pairwise(bounds)]
    if bounds[0] != 0 or min(lengths, default=0) < 0:
        raise ValueError(f"{name} must start at 0 and not decrease, got {bounds}")
    if bounds[-1] > num_tokens:
        raise ValueError(f"{name} ends at {bounds[-1]}, there are {num_tokens} tokens")
    if max_seqlen is not None and max(lengths, default=0) > max_seqlen:
        raise ValueError(f"{name} has a request of {max(lengths)} tokens, longer than its max_seqlen={max_seqlen}")


def check_count(name: str, value: object, *, least: int = 0) -> int:
    """An int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
    return value


def check_head_dim(name: str, value: int) -> None:
    """A head dimension that the kernels take: a multiple of 16, up to `MOST_HEAD_DIM`."""
    if value % 16 or not 16 <= value <= MOST_HEAD_DIM:
        raise ValueError(f"{name} must have heads of a multiple of 16 numbers, 16 to {MOST_HEAD_DIM}, got {value}")


def check_spans(block_table: torch.Tensor, cu_seqlens: torch.Tensor, seq_starts: torch.Tensor, kv_cache: torch.Tensor) -> None:
    """Every span of tokens of a request lies in its block table, on pages of the cache; looked at where that costs no sync."""
    num_reqs = seq_starts.shape[0]
    if cu_seqlens.shape[0] != num_reqs + 1 or block_table.shape[0] != num_reqs:
        raise ValueError(
            f"seq_starts has {num_reqs} requests, cu_seqlens has {cu_seqlens.shape[0] - 1} and block_table {block_table.shape[0]}"
        )
    if not reads_allowed(block_table):
        return
    num_pages, page_size = kv_cache.shape[:2]
    lengths = cu_seqlens.diff()
    column = torch.arange(block_table.shape[1], device=block_table.device)
    for request, (start, length) in enumerate(zip(seq_starts.tolist(), lengths.tolist(), strict=True)):
        if length and not 0 <= start <= block_table.shape[1] * page_size - length:
            raise ValueError(
                f"seq_starts[{request}] is {start}: {length} tokens from there are not within the "
                f"{block_table.shape[1]} pages of {page_size} tokens of a request"
            )
        read = (column >= start // page_size) & (column * page_size < start + length) & (length > 0)
        pages = block_table[request][read]
        if bool(((pages < 0) | (pages >= num_pages)).any()):
            raise ValueError(f"block_table[{request}] has pages {pages.tolist()} for these tokens; kv_cache has pages 0..{num_pages - 1}")


def cache_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """What a latent cache may hold beside activations of `dtype`."""
    return (dtype, *FLOAT8_DTYPES)


def split_latent(latent_dim: int, meta: MLAMetadata, out: torch.Tensor | None) -> int:
    """kv_lora_rank of rows of `latent_dim`: the config's, else that of `out` [T, H, kv_lora_rank], else the only one possible."""
    if meta.config is not None:
        if meta.config.latent_dim != latent_dim:
            raise ValueError(
                f"kv_cache has rows of {latent_dim}, the metadata was built for kv_lora_rank + qk_rope_head_dim = {meta.config.latent_dim}"
            )
        return meta.config.kv_lora_rank
    if isinstance(out, torch.Tensor) and out.dim() == 3:
        check_latent_dims(out.shape[-1], latent_dim - out.shape[-1])
        return out.shape[-1]
    ranks = [rank for rank in (512, 256, 128, 64, 32) if 16 <= latent_dim - rank <= 128]
    if latent_dim % 16 or not ranks:
        raise ValueError(
            f"kv_cache has rows of {latent_dim}; they must be kv_lora_rank (a power of two, 32 to 512) and "
            "qk_rope_head_dim (a multiple of 16, 16 to 128) together"
        )
    if len(ranks) > 1:
        splits = ", ".join(f"{rank} + {latent_dim - rank}" for rank in ranks)
        raise ValueError(
            f"kv_cache has rows of {latent_dim}, whose kv_lora_rank + qk_rope_head_dim may be {splits}; "
            "out [T, H, kv_lora_rank] or the metadata of an MLAMetadataBuilder says which"
        )
    return ranks[0]


def check_meta(meta: MLAMetadata, *, num_tokens: int, num_heads: int, dtype: torch.dtype, kv_cache: torch.Tensor) -> None:
    """`meta` is current and was made for these tensors."""
    meta.check_current()
    if meta.device != kv_cache.device:
        raise ValueError(f"the metadata is on {meta.device}, kv_cache on {kv_cache.device}")
    if meta.page_size != kv_cache.shape[1]:
        raise ValueError(f"kv_cache has pages of {kv_cache.shape[1]} tokens, the metadata was built for page_size={meta.page_size}")
    if meta.exact and meta.num_tokens > num_tokens:
        raise ValueError(f"q has {num_tokens} tokens, the metadata describes {meta.num_tokens}")
    config = meta.config
    if config is not None:
        for name, got, want in (
            ("num_heads", num_heads, config.num_heads),
            ("dtype", dtype, config.dtype),
            ("kv_cache_dtype", kv_cache.dtype, config.cache_dtype),
        ):
            if got != want:
                raise ValueError(f"{name} is {got}, the metadata was built for a config of {name}={want}")


def check_contents(meta: MLAMetadata, num_tokens: int, num_pages: int) -> None:
    """The tokens of `meta` are q's, lengths lie within the table, live page ids within the cache; looked at where that costs no sync."""
    if not reads_allowed(meta.block_table):
        return
    first = meta.qo_indptr.tolist()
    if first[0] != 0 or any(after < before for before, after in itertools.pairwise(first)):
        raise ValueError(f"qo_indptr must begin at 0 and not decrease, got {first}")
    if first[-1] > num_tokens:
        raise ValueError(f"qo_indptr ends at {first[-1]}, q has {num_tokens} tokens")
    max_pages, page_size = meta.block_table.shape[1], meta.page_size
    check_seq_lens(meta.seq_lens, max_pages, page_size)
    live = torch.arange(max_pages, device=meta.device) < ((meta.seq_lens + page_size - 1) // page_size)[:, None]
    wrong = live & ((meta.block_table < 0) | (meta.block_table >= num_pages))
    if bool(wrong.any()):
        request, page = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_table[{request}, {page}] is {int(meta.block_table[request, page])}, inside the live length of request {request}; "
            f"kv_cache has {num_pages} pages"
        )


def check_seq_lens(seq_lens: torch.Tensor, max_pages: int, page_size: int) -> None:
    """Lengths are neither negative nor longer than the block table; a table without pages is a profile run's. Waits for the device."""
    if seq_lens.numel() == 0:
        return
    least, most = int(seq_lens.min()), int(seq_lens.max())
    if least < 0:
        raise ValueError(f"seq_lens must not be negative, got {least}")
    if max_pages and most > max_pages * page_size:
        raise ValueError(f"seq_lens reach {most} tokens, block_table has {max_pages} pages of {page_size} a request")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
