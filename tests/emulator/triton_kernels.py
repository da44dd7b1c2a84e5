"""A split decode and its merge, small and plain, to have Triton's AMD code generator exercised by the emulator.

Shapes: q [B, H, 576], kv [rows, 576], partial [B, S, H, 512], lse [B, S, H], out [B, H, 512].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_decode(q, kv, indices, indptr, partial, lse, scale, splits, H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    batch, split = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(indptr + batch), tl.load(indptr + batch + 1)
    chunk = tl.cdiv(stop - start, splits * N) * N
    first, last = start + split * chunk, tl.minimum(start + split * chunk + chunk, stop)
    heads, dims, rope, tokens = tl.arange(0, H), tl.arange(0, D), tl.arange(0, R), tl.arange(0, N)
    row = q + batch * H * (D + R) + heads[:, None] * (D + R)
    q_latent, q_rope = tl.load(row + dims[None, :]), tl.load(row + D + rope[None, :])
    top, total = tl.full([H], float("-inf"), tl.float32), tl.zeros([H], tl.float32)
    acc = tl.zeros([H, D], tl.float32)
    for token in range(first, last, N):
        live = token + tokens < last
        page = tl.load(indices + token + tokens, mask=live, other=0).to(tl.int64)
        keys = tl.load(kv + page[:, None] * (D + R) + dims[None, :], mask=live[:, None], other=0.0)
        keys_rope = tl.load(kv + page[:, None] * (D + R) + D + rope[None, :], mask=live[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(keys)) + tl.dot(q_rope, tl.trans(keys_rope))
        scores = tl.where(live[None, :], scores * (scale * 1.4426950408889634), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        decay, p = tl.exp2(top - new_top), tl.exp2(scores - new_top[:, None])
        total, top = total * decay + tl.sum(p, 1), new_top
        acc = acc * decay[:, None] + tl.dot(p.to(tl.bfloat16), keys)
    if last > first:
        place = (batch * splits + split) * H + heads
        tl.store(partial + place[:, None] * D + dims[None, :], acc / total[:, None])
        tl.store(lse + place, (top + tl.log2(total)) * 0.6931471805599453)


@triton.jit
def merge(partial, lse, out, indptr, splits, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr):
    batch, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(indptr + batch + 1) - tl.load(indptr + batch)
    written = tl.cdiv(length, tl.cdiv(length, splits * N) * N)
    dims = tl.arange(0, D)
    top, total, acc = -float("inf"), 0.0, tl.zeros([D], tl.float32)
    for split in range(0, written):
        place = (batch * splits + split) * H + head
        part = tl.load(lse + place)
        new_top = tl.maximum(top, part)
        decay, weight = tl.exp(top - new_top), tl.exp(part - new_top)
        acc, total, top = acc * decay + weight * tl.load(partial + place * D + dims), total * decay + weight, new_top
    tl.store(out + (batch * H + head) * D + dims, (acc / total).to(tl.bfloat16))


POINTERS = {"q": "*bf16", "kv": "*bf16", "indices": "*i32", "indptr": "*i32", "partial": "*fp32", "lse": "*fp32", "out": "*bf16"}
DECODE_SIGNATURE = {name: POINTERS[name] for name in ("q", "kv", "indices", "indptr", "partial", "lse")} | {
    "scale": "fp32",
    "splits": "i32",
}
DECODE_SIGNATURE |= {"H": "constexpr", "N": "constexpr", "D": "constexpr", "R": "constexpr"}
MERGE_SIGNATURE = {name: POINTERS[name] for name in ("partial", "lse", "out", "indptr")} | {"splits": "i32"}
MERGE_SIGNATURE |= {"N": "constexpr", "H": "constexpr", "D": "constexpr"}

KERNELS = {
    "split_decode": (split_decode, DECODE_SIGNATURE, {"H": 16, "N": 32, "D": 512, "R": 64}, frozenset(POINTERS)),
    "merge": (merge, MERGE_SIGNATURE, {"N": 32, "H": 16, "D": 512}, frozenset(POINTERS)),
}
"""Name -> (kernel, signature, constants, arguments whose addresses are multiples of 16)."""
