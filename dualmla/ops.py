"""The public functions: validate, pick the backend, call.

Where `torch.compile` traces them, they become one operator each (`dualmla.library`), which calls them again at run time.
"""

from __future__ import annotations

import torch

from dualmla.backends.base import DecodeCall, PrefillCall
from dualmla.config import COMPUTE_DTYPES, check_latent_dims, check_scale
from dualmla.metadata import MLAMetadata
from dualmla.selection import backend_for_decode, backend_for_device, backend_for_prefill
from dualmla.validation import (
    cache_dtypes,
    check_cache,
    check_contents,
    check_count,
    check_head_dim,
    check_index_tensor,
    check_k_scale,
    check_meta,
    check_packed,
    check_packed_values,
    check_slots,
    check_spans,
    check_tensor,
    check_written,
    look,
    reads_allowed,
    scale_arguments,
    split_latent,
)

BackendName = str | None

MAX_KV_SPLITS = 1024
"""More splits than any device has programs for; bounds the scratch that a caller can ask for."""

MOST_ACCEPTED = 1024
"""Kinds of arguments that are remembered as accepted: more than come up, and a bound of the memory they take."""

_accepted_prefills: set[object] = set()


def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: MLAMetadata,
    softmax_scale: float,
    *,
    causal: bool = True,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    k_scale: float | torch.Tensor | None = None,
    num_kv_splits: int | None = None,
    backend: BackendName = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Absorbed attention of a batch of decodes over the latent cache.

    Arguments:
        q: [T, H, kv_lora_rank + qk_rope_head_dim], W_UK already absorbed; bfloat16, float16 or float32.
        kv_cache: [num_pages, page_size, kv_lora_rank + qk_rope_head_dim], of q's dtype or float8.
        meta: `MLAMetadata.decode_metadata`, or what `decode_metadata()` returned; may describe fewer tokens than T.
        softmax_scale: factor of the scores; never derived from a head dimension.
        causal: query i of n sees the first seq_len - n + i + 1 tokens; else all of them.
        out: [T, H, kv_lora_rank], written and returned when given. Where the metadata carries no config and a row could
            be split in two ways (80 to 192 numbers), it says which.
        return_lse: also return fp32 [H, T], natural log, of the scaled scores.
        k_scale: what a float8 cache was divided by.
        num_kv_splits: splits of every row, so that a row has the same bits alone and in a batch; None: balanced.
        backend: None or "auto" for the selection policy, or a registered name.

    Returns:
        out, or (out, lse). Every row is written; rows without keys, padding included, are 0 and -inf.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed; nothing is launched then.
        RuntimeError: the metadata is stale.
        BackendUnavailable: a forced backend can't do this call.
    """
    if torch.compiler.is_compiling():
        rank = split_latent(q.shape[2], meta, out)
        arguments = (meta.handle, rank, softmax_scale, causal, return_lse, *scale_arguments(k_scale), num_kv_splits, out, backend)
        return _given(out, torch.ops.dualmla.mla_decode(q, kv_cache, *arguments))
    looks = look(q), look(kv_cache), look(out)
    if not isinstance(meta, MLAMetadata) or not (rank := meta.accepted.get(looks, 0)):
        rank = _check_decode(q, kv_cache, meta, out)
        if len(meta.accepted) >= MOST_ACCEPTED:
            meta.accepted.clear()
        meta.accepted[looks] = rank
    meta.check_current()
    (tokens, heads, _), device = q.shape, q.device
    check_contents(meta, tokens, kv_cache.shape[0])
    scale = check_scale("softmax_scale", softmax_scale)
    k_scale = check_k_scale(k_scale, device)
    if num_kv_splits is not None and (type(num_kv_splits) is not int or not 1 <= num_kv_splits <= MAX_KV_SPLITS):
        raise ValueError(f"num_kv_splits must be None or an int from 1 to {MAX_KV_SPLITS}, got {num_kv_splits!r}")
    if out is None:
        out = torch.empty(tokens, heads, rank, dtype=q.dtype, device=device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=device) if return_lse else None
    chosen = backend_for_decode(
        device,
        backend,
        lambda: DecodeCall.of(q, kv_cache, meta, kv_lora_rank=rank, causal=causal, return_lse=return_lse, num_kv_splits=num_kv_splits),
    )
    chosen.mla_decode(q, kv_cache, meta, scale, causal=causal, out=out, lse=lse, k_scale=k_scale, num_kv_splits=num_kv_splits)
    return out if lse is None else (out, lse)


def _check_decode(q: torch.Tensor, kv_cache: torch.Tensor, meta: MLAMetadata, out: torch.Tensor | None) -> int:
    """What `look` tells of these arguments is right for a decode of `meta`; returns kv_lora_rank."""
    check_tensor("q", q, rank=3, dtypes=COMPUTE_DTYPES, device=None)
    tokens, heads, latent_dim = q.shape
    if heads < 1:
        raise ValueError("q must have at least one head, got shape " + str(list(q.shape)))
    check_cache(kv_cache, cache_dtypes(q.dtype), q.device, latent_dim)
    if not isinstance(meta, MLAMetadata):
        raise TypeError(f"meta must be MLAMetadata, got {type(meta).__name__}")
    check_meta(meta, num_tokens=tokens, num_heads=heads, dtype=q.dtype, kv_cache=kv_cache)
    if meta.num_prefills:
        raise ValueError(
            f"meta holds {meta.num_prefills} prefills beside {meta.num_decodes} decodes; "
            "mla_decode wants meta.decode_metadata and the tokens of the decodes"
        )
    rank = split_latent(latent_dim, meta, out)
    if out is not None:
        check_tensor("out", out, rank=3, dtypes=(q.dtype,), device=q.device, shape=(tokens, heads, rank))
        check_written("out", out)
    return rank


def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    *,
    causal: bool = True,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: BackendName = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed requests over keys and values of their own a head.

    Arguments:
        q: [T, H, qk_head_dim]; bfloat16, float16 or float32; any strides but for a dense last dimension, as k, v and out.
        k: [S, H, qk_head_dim].
        v: [S, H, v_head_dim].
        cu_seqlens_q, cu_seqlens_k: int32 [num_reqs + 1], first query and first key of each request, and the end; may end
            before T and S.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
        softmax_scale: factor of the scores; never derived from a head dimension.
        causal: query i of n sees the first keys - n + i + 1 keys (bottom-right); else all of its request.
        out: [T, H, v_head_dim], written and returned when given.
        return_lse: also return fp32 [H, T], natural log, of the scaled scores.
        backend: None or "auto" for the selection policy, or a registered name.

    Returns:
        out, or (out, lse). Every row is written; rows without keys, tokens past `cu_seqlens_q[-1]` included, are 0 and -inf.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed; nothing is launched then.
        BackendUnavailable: a forced backend can't do this call.
    """
    if torch.compiler.is_compiling():
        arguments = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, return_lse, out, backend)
        return _given(out, torch.ops.dualmla.mla_prefill(q, k, v, *arguments))
    looks = look(q), look(k), look(v), look(cu_seqlens_q), look(cu_seqlens_k), look(out)
    if looks not in _accepted_prefills:
        _check_prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, out)
        if len(_accepted_prefills) >= MOST_ACCEPTED:
            _accepted_prefills.clear()
        _accepted_prefills.add(looks)
    max_seqlen_q, max_seqlen_k = check_count("max_seqlen_q", max_seqlen_q), check_count("max_seqlen_k", max_seqlen_k)
    (tokens, heads, _), device = q.shape, q.device
    if reads_allowed(cu_seqlens_q):
        check_packed_values("cu_seqlens_q", cu_seqlens_q, tokens, max_seqlen_q)
        check_packed_values("cu_seqlens_k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    scale = check_scale("softmax_scale", softmax_scale)
    if out is None:
        out = torch.empty(tokens, heads, v.shape[2], dtype=q.dtype, device=device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=device) if return_lse else None
    backend_for_prefill(device, backend, lambda: PrefillCall.of(q, v)).mla_prefill(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal=causal, out=out, lse=lse
    )
    return out if lse is None else (out, lse)


def _check_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    """What `look` tells of these arguments is right for a prefill."""
    check_tensor("q", q, rank=3, dtypes=COMPUTE_DTYPES, device=None)
    tokens, heads, head_dim = q.shape
    device, dtypes = q.device, (q.dtype,)
    if heads < 1:
        raise ValueError("q must have at least one head, got shape " + str(list(q.shape)))
    check_tensor("k", k, rank=3, dtypes=dtypes, device=device, shape=(None, heads, head_dim))
    check_tensor("v", v, rank=3, dtypes=dtypes, device=device, shape=(k.shape[0], heads, None))
    check_head_dim("q", head_dim)
    check_head_dim("v", v.shape[2])
    check_packed("cu_seqlens_q", cu_seqlens_q, device)
    check_packed("cu_seqlens_k", cu_seqlens_k, device)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(f"cu_seqlens_k has {cu_seqlens_k.shape[0] - 1} requests, cu_seqlens_q has {cu_seqlens_q.shape[0] - 1}")
    if out is not None:
        check_tensor("out", out, rank=3, dtypes=dtypes, device=device, shape=(tokens, heads, v.shape[2]))
        check_written("out", out)


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float | torch.Tensor | None = None,
    backend: BackendName = None,
) -> None:
    """Write latent rows `[kv_c | k_pe]` into their slots of the paged cache, in place.

    Arguments:
        kv_c: [T, kv_lora_rank].
        k_pe: [T, qk_rope_head_dim], of kv_c's dtype.
        kv_cache: [num_pages, page_size, kv_lora_rank + qk_rope_head_dim], of kv_c's dtype or float8.
        slot_mapping: int64 [<= T], `page * page_size + offset`; -1 is skipped.
        k_scale: a float8 cache holds the row divided by it, saturated.
        backend: None or "auto" for the selection policy, or a registered name.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed; nothing is written then.
        BackendUnavailable: a forced backend can't be used on this device.
    """
    if torch.compiler.is_compiling():
        torch.ops.dualmla.concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, *scale_arguments(k_scale), backend)
        return
    check_tensor("kv_c", kv_c, rank=2, dtypes=COMPUTE_DTYPES, device=None)
    device = kv_c.device
    check_tensor("k_pe", k_pe, rank=2, dtypes=(kv_c.dtype,), device=device, shape=(kv_c.shape[0], None))
    check_latent_dims(kv_c.shape[1], k_pe.shape[1])
    check_cache(kv_cache, cache_dtypes(kv_c.dtype), device, kv_c.shape[1] + k_pe.shape[1])
    check_written("kv_cache", kv_cache)
    check_slots(slot_mapping, kv_c.shape[0], kv_cache)
    k_scale = check_k_scale(k_scale, device)
    backend_for_device(device, backend).concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, k_scale=k_scale)


def gather_kv_cache(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor,
    out: torch.Tensor,
    *,
    k_scale: float | torch.Tensor | None = None,
    backend: BackendName = None,
) -> torch.Tensor:
    """Copy a span of latent rows of each request out of the paged cache, side by side.

    Arguments:
        kv_cache: [num_pages, page_size, latent_dim], of out's dtype or float8.
        block_table: int32 [num_reqs, max_pages].
        cu_seqlens: int32 [num_reqs + 1], first row of each request in `out`, and the end.
        seq_starts: int32 [num_reqs], the request's token that goes there first.
        out: [tokens, latent_dim], written; bfloat16, float16 or float32.
        k_scale: what a float8 cache was divided by.
        backend: None or "auto" for the selection policy, or a registered name.

    Returns:
        out; rows past `cu_seqlens[-1]` are 0.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed; nothing is written then.
        BackendUnavailable: a forced backend can't be used on this device.
    """
    if torch.compiler.is_compiling():
        torch.ops.dualmla.gather_kv_cache(kv_cache, block_table, cu_seqlens, seq_starts, out, *scale_arguments(k_scale), backend)
        return out
    check_tensor("out", out, rank=2, dtypes=COMPUTE_DTYPES, device=None)
    check_written("out", out)
    device = out.device
    check_cache(kv_cache, cache_dtypes(out.dtype), device, out.shape[1])
    check_index_tensor("block_table", block_table, rank=2, device=device)
    check_index_tensor("seq_starts", seq_starts, rank=1, device=device)
    check_packed("cu_seqlens", cu_seqlens, device)
    if reads_allowed(cu_seqlens):
        check_packed_values("cu_seqlens", cu_seqlens, out.shape[0], None)
    check_spans(block_table, cu_seqlens, seq_starts, kv_cache)
    k_scale = check_k_scale(k_scale, device)
    backend_for_device(device, backend).gather_kv_cache(kv_cache, block_table, cu_seqlens, seq_starts, out, k_scale=k_scale)
    return out


def merge_attn_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    backend: BackendName = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One attention out of two attentions of the same queries over different keys.

    Arguments:
        out_a, out_b: [T, H, D], any strides but for a dense last dimension; bfloat16, float16 or float32, not necessarily
            the same: fp32 keeps what merging many parts would round away.
        lse_a, lse_b: fp32 [H, T], natural log, any strides; -inf marks a part without keys, whose output is never looked at.
        out: [T, H, D], written and returned when given, may be `out_a` or `out_b`; None: a new one of their wider dtype.
        backend: None or "auto" for the selection policy, or a registered name.

    Returns:
        out and lse fp32 [H, T]; 0 and -inf where both parts are without keys.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed; nothing is launched then.
        BackendUnavailable: a forced backend can't be used on this device.
    """
    if torch.compiler.is_compiling():
        merged, merged_lse = torch.ops.dualmla.merge_attn_states(out_a, lse_a, out_b, lse_b, out, backend)
        return (merged if out is None else out.copy_(merged)), merged_lse
    check_tensor("out_a", out_a, rank=3, dtypes=COMPUTE_DTYPES, device=None)
    shape, device = tuple(out_a.shape), out_a.device
    tokens, heads, dim = shape
    check_tensor("out_b", out_b, rank=3, dtypes=COMPUTE_DTYPES, device=device, shape=shape)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_tensor(name, lse, rank=2, dtypes=(torch.float32,), device=device, shape=(heads, tokens), dense=False)
    if not 1 <= dim <= 1024:
        raise ValueError(f"out_a must have heads of 1 to 1024 numbers, got {dim}")
    if out is None:
        out = torch.empty(shape, dtype=torch.promote_types(out_a.dtype, out_b.dtype), device=device)
    else:
        check_tensor("out", out, rank=3, dtypes=COMPUTE_DTYPES, device=device, shape=shape)
        check_written("out", out)
    merged_lse = torch.empty(heads, tokens, dtype=torch.float32, device=device)
    backend_for_device(device, backend).merge_attn_states(out_a, lse_a, out_b, lse_b, out=out, lse=merged_lse)
    return out, merged_lse


def _given(out: torch.Tensor | None, results: list[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The one or two results of an operator, the first of them in `out` where it is given."""
    first = results[0] if out is None else out.copy_(results[0])
    return (first, results[1]) if len(results) > 1 else first
