"""One call of AITER's `mla_decode_fwd`, wrapped in what it needs and what it leaves out.

It works on tensors of any device, so that it can be tested against stand-ins for AITER where there is no GPU. What AITER
needs to be spared, each seen in its source or by running its kernels in an emulator (what concerns the batch: `batch`):

- It divides by zero on an empty batch, gives NaN for a request without keys, and leaves rows of padding as they were.
- Its tails read cache row 0 and multiply it by a weight of 0: a NaN there would spread to everything.
- It takes indices as int32, contiguous, without a look, and rounds the strides of `o` away: its own dense bf16 output.
- Its split heuristic looks at the size of `kv_indices`, and before S3 it caches the split indptr it made: under graph
  capture that memory is never written, or freed while the graph still reads it.
"""

from __future__ import annotations

import contextlib

import torch

from dualmla.backends.aiter.batch import Batch, tell
from dualmla.backends.aiter.signatures import Aiter
from dualmla.backends.aiter.support import PARTIAL_LIMIT, LaunchShape, partial_bytes
from dualmla.metadata import MLAMetadata

MAX_SPLITS = 16  # the most that AITER's own heuristic takes, so the most its users have run
SPLIT_COST = 0.02  # share of a decode that one more split costs: partial results written and read; a guess, not measured


def decode(
    aiter: Aiter,
    shape: LaunchShape,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: MLAMetadata,
    softmax_scale: float,
    *,
    causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    compute_units: int,
    captured: bool,
) -> None:
    """A decode as `MLABackend.mla_decode`, without a wait for the device.

    Arguments:
        aiter: the imported AITER.
        shape: from `support.decode_shape`, which has refused what can't be done.
        compute_units: of the device.
        captured: into a graph, whose replays may meet other lengths than the host knows now.

    Raises:
        RuntimeError: AITER returned no LSE where its signature promises one.
    """
    num_tokens, heads, _ = q.shape
    if num_tokens == 0 or meta.num_reqs == 0 or kv_cache.shape[0] == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    batch = tell(meta, shape, num_tokens, causal=causal, captured=captured)
    rows = kv_cache.view(-1, 1, 1, kv_cache.shape[2])
    rows[0].nan_to_num_()
    asked = _repeat_heads(q if batch.row_of is None else q[batch.row_of], shape.heads)
    o = torch.zeros(*asked.shape[:2], out.shape[2], dtype=torch.bfloat16, device=q.device)
    splits = num_splits(batch.size, asked.shape[0], shape.heads, compute_units, at_least=1 if lse is None else 2)
    returned = _call(aiter, asked, rows, o, batch, softmax_scale, splits, with_lse=lse is not None)

    blind = batch.seen == 0
    out.copy_(batch.by_row(o[:, :heads]).masked_fill(blind[:, None, None], 0.0))
    if lse is not None:
        if returned is None:
            raise RuntimeError(f"AITER {aiter.version} returned no LSE, although its mla_decode_fwd has return_lse and writes Final_lse")
        # [T, heads] there; rows without keys are -inf, +inf or NaN, by release
        lse.copy_(batch.by_row(returned[:, :heads]).masked_fill(blind[:, None], float("-inf")).transpose(0, 1))


def num_splits(batch_size: int, num_tokens: int, heads: int, compute_units: int, *, at_least: int) -> int:
    """Splits of every request, from what the host knows: a split of a request is one workgroup, a compute unit runs one.

    Key lengths are on the device and play no part; a split past a request's last block returns at once. Bounded so that the
    partial results stay within 32-bit offsets.
    """

    def worth(splits: int) -> float:
        workgroups = batch_size * splits
        rounds = -(-workgroups // compute_units)
        return workgroups / (rounds * compute_units) / (1 + SPLIT_COST * (splits - 1))

    fitting = PARTIAL_LIMIT // partial_bytes(num_tokens, heads, splits=1)
    return max(range(at_least, max(min(MAX_SPLITS, fitting), at_least) + 1), key=worth)


def _repeat_heads(q: torch.Tensor, heads: int) -> torch.Tensor:
    """q [T, heads, D], contiguous: its heads over and over. Exact, since all heads share one key and value head."""
    times = -(-heads // q.shape[1])
    return (q.repeat(1, times, 1)[:, :heads] if times > 1 else q).contiguous()


def _call(
    aiter: Aiter, q: torch.Tensor, rows: torch.Tensor, o: torch.Tensor, batch: Batch, softmax_scale: float, splits: int, *, with_lse: bool
) -> torch.Tensor | None:
    """AITER fills `o`; its LSE [T, heads] is returned where it has one to give."""
    device, takes = q.device, aiter.signature.parameters
    given = {
        "q": q,
        "kv_buffer": rows,
        "o": o,
        "qo_indptr": batch.qo_indptr,
        "kv_indptr": batch.kv_indptr,
        "kv_indices": batch.kv_indices,
        "kv_last_page_lens": torch.ones(batch.size, dtype=torch.int32, device=device),
        "max_seqlen_q": batch.max_query_len,
        "sm_scale": softmax_scale,
        "num_kv_splits": splits,
        "page_size": 1,
        "return_lse": with_lse,
        "causal": True,  # the keys that a row may see are those of its request, or the kernel's bottom-right mask
    }
    if aiter.signature.honours_split_indptr:
        given["num_kv_splits_indptr"] = torch.arange(0, (batch.size + 1) * splits, splits, dtype=torch.int32, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        if not aiter.signature.honours_split_indptr and aiter.forget_splits is not None:
            aiter.forget_splits()  # what it cached may belong to another device, to another stream, or to a graph that has not run
        returned = aiter.decode(**{name: value for name, value in given.items() if name in takes})
    return returned[1] if with_lse else None
