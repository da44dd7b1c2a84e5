"""One call of AITER's `mla_decode_fwd`, wrapped in what it needs and what it leaves out.

It works on tensors of any device, so that it can be tested against stand-ins for AITER where there is no GPU. What AITER
needs to be spared, each seen in its source or by running its kernels in an emulator:

- It reads page ids as token slots (its kernels hard-code page size 1): block tables are expanded.
- Its kernels for one query token place row b of the batch, whatever `qo_indptr` says: a batch in which some request has no
  query token is told as one request a token. The kernels for 2 to 4 tokens do follow `qo_indptr`.
- It divides by zero on an empty batch, gives NaN for a request without keys, and leaves rows of padding as they were.
- Its tails read cache row 0 and multiply it by a weight of 0: a NaN there would spread to everything.
- It takes indices as int32, contiguous, without a look, and rounds the strides of `o` away: its own dense bf16 output.
- Its split heuristic looks at the size of `kv_indices`, and before S3 it caches the split indptr it made: under graph
  capture that memory is never written, or freed while the graph still reads it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from dualmla.backends.aiter.signatures import Aiter
from dualmla.backends.aiter.support import PARTIAL_LIMIT, LaunchShape, partial_bytes
from dualmla.metadata import MLAMetadata

MAX_SPLITS = 16  # the most that AITER's own heuristic takes, so the most its users have run
SPLIT_COST = 0.02  # share of a decode that one more split costs: partial results written and read; a guess, not measured


@dataclass(frozen=True)
class Batch:
    """The requests as AITER is told them: pages of one token, int32, contiguous, on the device.

    Attributes:
        qo_indptr: [n + 1] rows of each request.
        kv_indptr: [n + 1] keys of each request.
        kv_indices: cache rows of the keys of all requests; slack past `kv_indptr[-1]`.
        max_query_len: most rows a request.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    max_query_len: int

    @property
    def size(self) -> int:
        return self.qo_indptr.shape[0] - 1


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
) -> None:
    """Decode a call that `support.call_refusals` accepts; arguments as `MLABackend.mla_decode`, without a wait for the device.

    Arguments:
        aiter: the imported AITER.
        shape: from `support.launch_shape`, for q's heads.
        compute_units: of the device.

    Raises:
        RuntimeError: AITER returned no LSE where its signature promises one.
    """
    num_tokens, heads, _ = q.shape
    if num_tokens == 0 or meta.num_reqs == 0 or kv_cache.shape[0] == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    batch, seen = tell(meta, shape, num_tokens, causal=causal)
    rows = kv_cache.view(-1, 1, 1, kv_cache.shape[2])
    rows[0].nan_to_num_()
    o = torch.zeros(num_tokens, shape.heads, out.shape[2], dtype=torch.bfloat16, device=q.device)
    splits = num_splits(batch.size, num_tokens, shape.heads, compute_units, at_least=1 if lse is None else 2)
    returned = _call(aiter, _repeat_heads(q, shape.heads), rows, o, batch, softmax_scale, splits, with_lse=lse is not None)

    blind = seen == 0
    out.copy_(o[:, :heads].masked_fill_(blind[:, None, None], 0.0))
    if lse is not None:
        if returned is None:
            raise RuntimeError(f"AITER {aiter.version} returned no LSE, although its mla_decode_fwd has return_lse and writes Final_lse")
        # [T, heads] there; rows without keys are -inf, +inf or NaN, by release
        lse.copy_(returned[:, :heads].masked_fill(blind[:, None], float("-inf")).transpose(0, 1))


def tell(meta: MLAMetadata, shape: LaunchShape, num_tokens: int, *, causal: bool) -> tuple[Batch, torch.Tensor]:
    """The batch in AITER's words, and how many keys each row sees.

    Where AITER's kernels do the batch right as it is, it stays as it is. Else each row becomes a request of one query token
    whose keys are those that the row sees: exact, and reads the cache once a row.

    Returns:
        the batch; seen int32 [T], 0 for rows of padding.
    """
    one_row_each = meta.max_query_len == 1 and meta.num_tokens == meta.num_reqs
    if one_row_each and num_tokens == meta.num_reqs:
        # a replayed graph may end in requests without a row: qo_indptr is flat there
        return _by_request(meta), torch.where(meta.qo_indptr.diff() > 0, meta.seq_lens, 0)
    row = torch.arange(num_tokens, dtype=torch.int32, device=meta.device)
    past = torch.searchsorted(meta.qo_indptr[1:], row, right=True, out_int32=True)
    request = past.clamp(max=meta.num_reqs - 1)
    seen = meta.seq_lens[request]
    if causal:
        seen = seen - (meta.qo_indptr[request + 1] - row - 1)
    seen = torch.where(past < meta.num_reqs, seen, 0).clamp(min=0)
    if one_row_each or (causal and 1 < meta.max_query_len <= shape.query_len):
        return _by_request(meta), seen
    kv_indptr = _indptr(seen, meta)
    qo_indptr = torch.arange(num_tokens + 1, dtype=torch.int32, device=meta.device)
    return Batch(qo_indptr, kv_indptr, _slots(meta, request, kv_indptr), 1), seen


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


def _by_request(meta: MLAMetadata) -> Batch:
    """The batch as it is, its pages cut into tokens."""
    if meta.page_size == 1:
        kv_indptr, kv_indices = meta.paged_kv_indptr.contiguous(), meta.paged_kv_indices.contiguous()
    else:
        kv_indptr = _indptr(meta.seq_lens, meta)
        kv_indices = _slots(meta, None, kv_indptr)
    return Batch(meta.qo_indptr.contiguous(), kv_indptr, kv_indices, meta.max_query_len)


def _indptr(kv_lens: torch.Tensor, meta: MLAMetadata) -> torch.Tensor:
    """int32 [n + 1] of the keys [n] of each request; no more than its row of the block table holds."""
    kv_indptr = torch.zeros(kv_lens.shape[0] + 1, dtype=torch.int32, device=kv_lens.device)
    torch.cumsum(kv_lens.clamp(max=meta.block_table.shape[1] * meta.page_size), 0, dtype=torch.int32, out=kv_indptr[1:])
    return kv_indptr


def _slots(meta: MLAMetadata, owner: torch.Tensor | None, kv_indptr: torch.Tensor) -> torch.Tensor:
    from dualmla_kernels.token_slots import token_slots

    return token_slots(meta.block_table, owner, kv_indptr, meta.page_size)


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
