"""Kernel-argument layouts of AITER's code objects, as tables, and the packing of any kernel's arguments.

AITER's hand-written kernels take one field at the start of each 16-byte slot. The names in their own metadata are wrong;
these were established by running the kernels with junk in one field after another.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

SLOT = 16
POINTER, WORD, FLOAT = "Q", "I", "f"

DECODE: tuple[tuple[str, str], ...] = (
    ("partial_out", POINTER),  # float32 [T, splits, H, 512]
    ("partial_lse", POINTER),  # float32 [T, splits, H, 1]
    ("q", POINTER),
    ("kv", POINTER),
    ("kv_indptr", POINTER),  # int32 [B + 1]
    ("kv_indices", POINTER),  # int32, token rows of the cache (page size 1)
    ("kv_last_page_lens", POINTER),  # ignored by the kernels
    ("softmax_scale", FLOAT),
    ("heads_x_query_len", WORD),
    ("splits", WORD),
    ("q_stride_x_query_len", WORD),  # bytes
    ("kv_row_stride", WORD),  # bytes
    ("log2_page_size", WORD),  # ignored by the kernels
    ("qo_indptr", POINTER),  # int32 [B + 1]
    ("num_kv_splits_indptr", POINTER),  # int32 [B + 1]; persistent kernels: {work_indptr, work_info}
    ("out", POINTER),  # bf16 [T, H, 512]; written by the persistent kernels alone
    ("q_scale", POINTER),  # float32 [1], fp8 kernels
    ("kv_scale", POINTER),
    ("splits_again", WORD),
)
"""AITER stage-1 decode, absorbed prefill (`mla_pfl_*`) and persistent kernels: 304 bytes."""

PREFILL: tuple[tuple[str, str], ...] = (
    ("out", POINTER),
    ("q", POINTER),
    ("k", POINTER),
    ("v", POINTER),
    ("lse", POINTER),  # float32 [H, T], natural log
    ("softmax_scale", FLOAT),
    ("seq_len", WORD),  # batch mode
    ("q_row_stride", WORD),
    ("q_tile_stride", WORD),  # 128 rows
    ("q_head_stride", WORD),
    ("q_batch_stride", WORD),  # batch mode
    ("gqa_ratio", WORD),
    ("k_row_stride", WORD),
    ("k_head_stride", WORD),
    ("k_batch_stride", WORD),  # batch mode
    ("tuning", WORD),  # ignored
    ("store_lse", WORD),
    ("kv_len", WORD),  # batch mode
    ("qk_head_dim", WORD),  # ignored
    ("v_head_dim", WORD),  # ignored
    ("q_heads", WORD),  # batch mode
    ("v_row_stride", WORD),
    ("v_head_stride", WORD),
    ("v_batch_stride", WORD),  # batch mode
    ("out_row_stride", WORD),
    ("out_head_stride", WORD),
    ("out_batch_stride", WORD),  # batch mode
    ("cu_seqlens_q", POINTER),  # varlen mode
    ("cu_seqlens_k", POINTER),
    ("lse_head_stride", WORD),
    ("q_starts", POINTER),  # varlen mode: first row of each sequence
    ("k_starts", POINTER),
)
"""AITER varlen and batch prefill `fmha_v3_fwd/fwd_hd192_hd128_*` (gfx950): 512 bytes. Strides in bytes."""


def pack_slots(layout: Sequence[tuple[str, str]], values: Mapping[str, int | float]) -> bytes:
    """The argument bytes of an AITER kernel. Every field of the layout must be given; an unknown name raises `KeyError`."""
    unknown = set(values) - {name for name, _ in layout}
    if unknown:
        raise KeyError(f"no such fields: {sorted(unknown)}")
    out = b""
    for name, form in layout:
        value = values[name] if form == FLOAT else int(values[name]) & (2**64 - 1 if form == POINTER else 2**32 - 1)
        out += struct.pack(f"<{form}", value).ljust(SLOT, b"\0")
    return out


_TRITON_SIZES = {"fp32": ("f", 4), "fp64": ("d", 8), "i64": ("q", 8), "u64": ("Q", 8), "i8": ("b", 1), "u8": ("B", 1), "i1": ("B", 1)}
_TRITON_SIZES |= {"i16": ("h", 2), "u16": ("H", 2), "i32": ("i", 4), "u32": ("I", 4)}


def pack_triton(signature: Mapping[str, str], values: Mapping[str, int | float], grid: tuple[int, int, int]) -> bytes:
    """The argument bytes of a Triton kernel: `signature` as given to `ASTSource` (pointers `*...`), values by name.

    Fields are naturally aligned, constexprs left out. Two null scratch pointers follow, then what `tl.num_programs` reads:
    the workgroups of `grid`, where LLVM puts the hidden argument `block_count`.
    """
    out = b""
    for name, kind in signature.items():
        if kind == "constexpr":
            continue
        form, size = ("Q", 8) if kind.startswith("*") else _TRITON_SIZES[kind]
        out += b"\0" * (-len(out) % size) + struct.pack(f"<{form}", values[name])
    return out + b"\0" * (-len(out) % 8) + bytes(16) + struct.pack("<III", *grid)
