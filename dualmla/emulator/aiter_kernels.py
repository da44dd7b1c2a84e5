"""Running AITER's MLA kernels on an emulated device: arrays in, arrays out.

Each function restates one launcher of AITER (grid, arguments) for one family of code objects. Arrays are NumPy; bf16
travels as its uint16 bit pattern (`to_bf16`, `from_bf16`), fp8 as uint8. T query tokens, B sequences, H heads, S splits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualmla.emulator import kernargs
from dualmla.emulator.aiter_objects import AiterKernel
from dualmla.emulator.elf import CodeObject
from dualmla.emulator.launch import Buffer, Device, Mode, Report

V_DIM = 512
"""Width of a latent row's value part (kv_lora_rank)."""
BLOCK = 256
"""Threads of every AITER MLA workgroup."""


def to_bf16(x: NDArray[Any]) -> NDArray[np.uint16]:
    """Round to bfloat16, nearest even; the bit patterns."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Decoded:
    """Results of a decode launch; what was not written keeps NaN (`partial_written` tells)."""

    partial_out: NDArray[np.float32]
    """[T, S, H, 512]"""
    partial_lse: NDArray[np.float32]
    """[T, S, H]"""
    partial_written: NDArray[np.bool_]
    """[T, S, H] whether the LSE was written."""
    out: NDArray[np.float32]
    """[T, H, 512] the bf16 results: of a persistent kernel, or those one split leaves in the partial buffer."""
    report: Report
    out_written: NDArray[np.bool_] | None = None
    """[T, H, 512] of a persistent kernel: what of `out` it wrote."""


def decode(
    device: Device,
    code: CodeObject,
    kernel: AiterKernel,
    *,
    q: NDArray[Any],
    kv: NDArray[Any],
    kv_indptr: Sequence[int],
    kv_indices: NDArray[Any],
    softmax_scale: float,
    query_len: int = 1,
    splits: int = 1,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
    fields: Mapping[str, int | float] | None = None,
    mode: Mode | None = None,
) -> Decoded:
    """AITER's non-persistent stage 1. q [T, H, 576], kv [rows, 576] in the kernel's types; `fields` overrides arguments."""
    tokens, heads, width = q.shape
    batch = len(kv_indptr) - 1
    partial_out = device.empty((tokens, splits, heads, V_DIM), np.float32)
    partial_lse = device.empty((tokens, splits, heads), np.float32)
    out = device.empty((tokens, heads, V_DIM), np.uint16)
    values: dict[str, int | float] = {
        "partial_out": partial_out.address,
        "partial_lse": partial_lse.address,
        "q": device.put(q).address,
        "kv": device.put(kv).address,
        "kv_indptr": device.put(np.asarray(kv_indptr, np.int32)).address,
        "kv_indices": device.put(np.asarray(kv_indices, np.int32)).address,
        "kv_last_page_lens": device.put(np.ones(batch, np.int32)).address,
        "softmax_scale": softmax_scale,
        "heads_x_query_len": heads * query_len,
        "splits": splits,
        "q_stride_x_query_len": heads * width * kernel.q_bytes * query_len,
        "kv_row_stride": width * kernel.kv_bytes,
        "log2_page_size": 0,
        "qo_indptr": device.put(np.arange(batch + 1, dtype=np.int32) * query_len).address,
        "num_kv_splits_indptr": device.put(np.arange(batch + 1, dtype=np.int32) * splits).address,
        "out": out.address,
        "q_scale": device.put(np.array([q_scale], np.float32)).address,
        "kv_scale": device.put(np.array([kv_scale], np.float32)).address,
        "splits_again": splits,
    }
    values |= fields or {}
    grid = (-(-query_len * heads // kernel.tile_rows), batch, splits)
    report = device.launch(code, grid=grid, block=BLOCK, kernarg=kernargs.pack_slots(kernargs.DECODE, values), mode=mode)
    raw = partial_out.numpy()
    return Decoded(
        partial_out=raw,
        partial_lse=partial_lse.numpy(),
        partial_written=partial_lse.written(),
        out=from_bf16(raw.reshape(-1).view(np.uint16)[: tokens * heads * V_DIM].reshape(tokens, heads, V_DIM)),
        report=report,
    )


def merge_partials(decoded: Decoded) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Combine the written splits in float64: out [T, H, 512], lse [T, H] (what AITER's stage 2 does)."""
    lse = np.where(decoded.partial_written, decoded.partial_lse.astype(np.float64), -np.inf)
    top = lse.max(1, keepdims=True)
    weights = np.exp(lse - top)
    total = weights.sum(1)
    parts = np.where(decoded.partial_written[..., None], decoded.partial_out.astype(np.float64), 0.0)
    return (weights[..., None] * parts).sum(1) / total[..., None], top[:, 0] + np.log(total)


def absorbed_prefill(
    device: Device,
    code: CodeObject,
    *,
    q: NDArray[np.uint16],
    kv: NDArray[np.uint16],
    qo_indptr: Sequence[int],
    kv_indptr: Sequence[int],
    kv_indices: NDArray[Any],
    softmax_scale: float,
    mode: Mode | None = None,
) -> Decoded:
    """AITER's `mla_pfl_*`: causal prefill over the paged latent cache, bf16 results in the partial buffer, one split."""
    tokens, heads, width = q.shape
    batch = len(kv_indptr) - 1
    longest = max(b - a for a, b in pairwise(qo_indptr))
    partial_out = device.empty((tokens, 1, heads, V_DIM), np.float32)
    partial_lse = device.empty((tokens, 1, heads), np.float32)
    values: dict[str, int | float] = {name: 0 for name, _ in kernargs.DECODE}
    values |= {
        "partial_out": partial_out.address,
        "partial_lse": partial_lse.address,
        "q": device.put(q).address,
        "kv": device.put(kv).address,
        "kv_indptr": device.put(np.asarray(kv_indptr, np.int32)).address,
        "kv_indices": device.put(np.asarray(kv_indices, np.int32)).address,
        "kv_last_page_lens": device.put(np.ones(batch, np.int32)).address,
        "softmax_scale": softmax_scale,
        "heads_x_query_len": heads,
        "splits": 1,
        "q_stride_x_query_len": heads * width * 2,
        "kv_row_stride": width * 2,
        "qo_indptr": device.put(np.asarray(qo_indptr, np.int32)).address,
    }
    grid = (-(-longest * heads // 128), batch, 1)
    report = device.launch(code, grid=grid, block=BLOCK, kernarg=kernargs.pack_slots(kernargs.DECODE, values), mode=mode)
    raw = partial_out.numpy()
    out = from_bf16(raw.reshape(-1).view(np.uint16)[: tokens * heads * V_DIM].reshape(tokens, heads, V_DIM))
    return Decoded(raw, partial_lse.numpy(), partial_lse.written(), out, report)


@dataclass(frozen=True)
class Work:
    """One item of a persistent kernel's list: keys `start` .. `stop` of sequence `batch`; `partial` rows are left as
    float32 partials from row `slot` on, else the final bf16 rows are written (`slot` -1)."""

    batch: int
    start: int
    stop: int
    slot: int = -1


def work_items(works: Sequence[Work], qo_indptr: Sequence[int], kv_indptr: Sequence[int]) -> list[list[int]]:
    """Rows of AITER's `work_info_set`: sequence, slot, query from, to, key from, to, keys behind, 0."""
    items = []
    for work in works:
        (first, last), query = kv_indptr[work.batch : work.batch + 2], qo_indptr[work.batch : work.batch + 2]
        items.append([work.batch, work.slot, *query, first + work.start, first + work.stop, last - first - work.stop, 0])
    return items


def persistent_decode(
    device: Device,
    code: CodeObject,
    kernel: AiterKernel,
    *,
    q: NDArray[Any],
    kv: NDArray[Any],
    qo_indptr: Sequence[int],
    kv_indptr: Sequence[int],
    kv_indices: NDArray[Any],
    works: Sequence[Sequence[Work]],
    softmax_scale: float,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
    mode: Mode | None = None,
) -> Decoded:
    """AITER's persistent stage 1: `works[i]` is the list of workgroup i. Partials come as [rows, 1, H, 512]."""
    tokens, heads, width = q.shape
    query_len = max(b - a for a, b in pairwise(qo_indptr))
    items = [work for group in works for work in group]
    rows = max([work.slot + qo_indptr[work.batch + 1] - qo_indptr[work.batch] for work in items if work.slot >= 0], default=1)
    info = work_items(items, qo_indptr, kv_indptr)
    indptr = np.cumsum([0] + [len(group) for group in works]).astype(np.int32)
    tables = [device.put(indptr).address, device.put(np.asarray(info or [[0] * 8], np.int32)).address] + [0] * 8
    partial_out = device.empty((rows, 1, heads, V_DIM), np.float32)
    partial_lse = device.empty((rows, 1, heads), np.float32)
    out = device.empty((tokens, heads, V_DIM), np.uint16)
    values: dict[str, int | float] = {name: 0 for name, _ in kernargs.DECODE}
    values |= {
        "partial_out": partial_out.address,
        "partial_lse": partial_lse.address,
        "q": device.put(q).address,
        "kv": device.put(kv).address,
        "kv_indptr": device.put(np.asarray(kv_indptr, np.int32)).address,
        "kv_indices": device.put(np.asarray(kv_indices, np.int32)).address,
        "kv_last_page_lens": device.put(np.ones(len(kv_indptr) - 1, np.int32)).address,
        "softmax_scale": softmax_scale,
        "heads_x_query_len": heads * query_len,
        "splits": 1,
        "q_stride_x_query_len": heads * width * kernel.q_bytes * query_len,
        "kv_row_stride": width * kernel.kv_bytes,
        "qo_indptr": device.put(np.asarray(qo_indptr, np.int32)).address,
        "num_kv_splits_indptr": device.put(np.asarray(tables, np.uint64)).address,
        "out": out.address,
        "q_scale": device.put(np.array([q_scale], np.float32)).address,
        "kv_scale": device.put(np.array([kv_scale], np.float32)).address,
        "splits_again": 1,
    }
    kernarg = kernargs.pack_slots(kernargs.DECODE, values)
    report = device.launch(code, grid=(len(works), 1, 1), block=BLOCK, kernarg=kernarg, mode=mode)
    result = np.where(out.written(), from_bf16(out.numpy()), np.float32(np.nan))
    return Decoded(partial_out.numpy(), partial_lse.numpy(), partial_lse.written(), result, report, out.written())


@dataclass(frozen=True)
class Prefilled:
    """Results of a varlen prefill launch; what was not written keeps NaN."""

    out: NDArray[np.float32]
    """[T, H, 128], bf16 values."""
    lse: NDArray[np.float32]
    """[H, T]"""
    report: Report


def varlen_prefill(
    device: Device,
    code: CodeObject,
    *,
    q: NDArray[np.uint16],
    k: NDArray[np.uint16],
    v: NDArray[np.uint16],
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    softmax_scale: float,
    causal: bool,
    fields: Mapping[str, int | float] | None = None,
    grid: tuple[int, int, int] | None = None,
    mode: Mode | None = None,
) -> Prefilled:
    """AITER's `fmha_v3_fwd` group kernels (gfx950): q [T, H, 192], k [Tk, Hk, 192], v [Tk, Hk, 128], bf16, dense.

    `fields` and `grid` override single arguments and the launch grid.
    """
    tokens, heads, _ = q.shape
    out = device.empty((tokens, heads, v.shape[2]), np.uint16)
    lse = device.empty((heads, tokens), np.float32)
    starts_q = device.put(np.asarray(cu_seqlens_q, np.int32)).address
    starts_k = device.put(np.asarray(cu_seqlens_k, np.int32)).address
    values = _dense_rows(device, q, k, v, out, lse) | {
        "softmax_scale": softmax_scale,
        "cu_seqlens_q": starts_q,
        "cu_seqlens_k": starts_k,
        "lse_head_stride": tokens * 4,
        "q_starts": starts_q,
        "k_starts": starts_k,
    }
    values |= fields or {}
    tiles = -(-max(b - a for a, b in pairwise(cu_seqlens_q)) // 128)
    grid = grid or (heads, len(cu_seqlens_q) - 1, -(-tiles // 2) if causal else tiles)
    report = device.launch(code, grid=grid, block=BLOCK, kernarg=kernargs.pack_slots(kernargs.PREFILL, values), mode=mode)
    return Prefilled(np.where(out.written(), from_bf16(out.numpy()), np.float32(np.nan)), lse.numpy(), report)


def batch_prefill(
    device: Device,
    code: CodeObject,
    *,
    q: NDArray[np.uint16],
    k: NDArray[np.uint16],
    v: NDArray[np.uint16],
    batch: int,
    softmax_scale: float,
    causal: bool,
    mode: Mode | None = None,
) -> Prefilled:
    """AITER's `fmha_v3_fwd` kernels for `batch` sequences of one length: the arrays of `varlen_prefill`, sequence after
    sequence. `lse` comes as [H, T] too (the kernel writes [B, H, T / B])."""
    tokens, heads, _ = q.shape
    q_len, kv_len = tokens // batch, len(k) // batch
    out = device.empty((tokens, heads, v.shape[2]), np.uint16)
    lse = device.empty((batch, heads, q_len), np.float32)
    values = _dense_rows(device, q, k, v, out, lse)
    values |= {"softmax_scale": softmax_scale, "seq_len": q_len, "kv_len": kv_len, "q_heads": heads, "lse_head_stride": q_len * 4}
    values |= {f"{name}_batch_stride": int(values[f"{name}_row_stride"]) * q_len for name in ("q", "out")}
    values |= {f"{name}_batch_stride": int(values[f"{name}_row_stride"]) * kv_len for name in ("k", "v")}
    tiles = -(-q_len // 128)
    grid = (-(-tiles // 2) if causal else tiles, heads, batch)
    report = device.launch(code, grid=grid, block=BLOCK, kernarg=kernargs.pack_slots(kernargs.PREFILL, values), mode=mode)
    result = np.where(out.written(), from_bf16(out.numpy()), np.float32(np.nan))
    return Prefilled(result, lse.numpy().transpose(1, 0, 2).reshape(heads, tokens), report)


def _dense_rows(
    device: Device, q: NDArray[np.uint16], k: NDArray[np.uint16], v: NDArray[np.uint16], out: Buffer, lse: Buffer
) -> dict[str, int | float]:
    """The prefill arguments that dense [rows, heads, width] bf16 arrays decide, every other one 0."""
    values: dict[str, int | float] = {name: 0 for name, _ in kernargs.PREFILL}
    for name, (_, heads, width) in (("q", q.shape), ("k", k.shape), ("v", v.shape), ("out", out.shape)):
        values |= {f"{name}_row_stride": heads * width * 2, f"{name}_head_stride": width * 2}
    values |= {name: device.put(array).address for name, array in (("q", q), ("k", k), ("v", v))}
    values |= {"out": out.address, "lse": lse.address, "store_lse": 1}
    values |= {"q_tile_stride": 128 * int(values["q_row_stride"]), "gqa_ratio": q.shape[1] // k.shape[1]}
    return values
