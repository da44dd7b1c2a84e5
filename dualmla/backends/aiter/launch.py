"""One call of AITER's `mla_decode_fwd`, wrapped in what it needs and what it leaves out.

It works on tensors of any device, so that it can be tested against stand-ins for AITER where there is no GPU. What AITER
needs to be spared, each seen in its source or by running its kernels in an emulator (what concerns the batch: `batch`, `plan`):

- It divides by zero on an empty batch, gives NaN for a request without keys, and leaves rows of padding as they were.
- Its tails read cache row 0 and multiply it by a weight of 0: a NaN there would spread to everything.
- It takes indices as int32, contiguous, without a look, and rounds the strides of `o` away: its own dense bf16 output.
- Its split heuristic looks at the size of `kv_indices`, and before S3 it caches the split indptr it made: under graph
  capture that memory is never written, or freed while the graph still reads it.
- It knows no scale of a bf16 cache, and takes the scales of a float8 cache as fp32 on the device.
"""

from __future__ import annotations

from typing import Any

import torch

from dualmla.backends.aiter.batch import Batch, told
from dualmla.backends.aiter.plan import work_plan
from dualmla.backends.aiter.planner import HEADS
from dualmla.backends.aiter.signatures import Aiter
from dualmla.backends.aiter.support import PARTIAL_LIMIT, LaunchShape, partial_bytes
from dualmla.backends.base import current
from dualmla.config import FLOAT8_DTYPES
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
    k_scale: float | torch.Tensor,
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
    if not min(q.shape[0], meta.num_reqs, kv_cache.shape[0], meta.block_table.shape[1]):
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    rows = kv_cache.view(-1, 1, 1, kv_cache.shape[2])
    _make_finite(rows[0])
    if shape.persistent:
        _decode_persistent(aiter, shape, q, rows, meta, softmax_scale, causal=causal, out=out, k_scale=k_scale, captured=captured)
    else:
        _decode_by_splits(
            aiter, shape, q, rows, meta, softmax_scale,
            causal=causal, out=out, lse=lse, k_scale=k_scale, compute_units=compute_units, captured=captured,
        )  # fmt: skip


def _decode_by_splits(
    aiter: Aiter,
    shape: LaunchShape,
    q: torch.Tensor,
    rows: torch.Tensor,
    meta: MLAMetadata,
    softmax_scale: float,
    *,
    causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    k_scale: float | torch.Tensor,
    compute_units: int,
    captured: bool,
) -> None:
    """Not persistent: each request is cut into as many splits, whose results a second kernel puts together."""
    heads = q.shape[1]
    batch = told(meta, shape, q.shape[0], causal=causal, captured=captured)
    asked = _repeat_heads(q if batch.row_of is None else q[batch.row_of], shape.heads)
    if isinstance(k_scale, torch.Tensor):  # the scale of the scores goes by value, and to read this one would be to wait
        asked = (asked.float() * k_scale).to(asked.dtype)
    else:
        softmax_scale *= k_scale
    o = torch.zeros(*asked.shape[:2], out.shape[2], dtype=torch.bfloat16, device=q.device)
    splits = num_splits(batch.size, asked.shape[0], shape.heads, compute_units, at_least=1 if lse is None else 2)
    given = _common(asked, rows, o, batch.qo_indptr, batch.kv_indptr, batch.kv_indices, softmax_scale) | {
        "kv_last_page_lens": torch.ones(batch.size, dtype=torch.int32, device=q.device),
        "max_seqlen_q": batch.max_query_len,
        "num_kv_splits": splits,
        "return_lse": lse is not None,
    }
    returned = _call(aiter, given, _split_indptr(aiter, batch, splits))

    blind = batch.seen == 0
    result = batch.by_row(o[:, :heads]).masked_fill(blind[:, None, None], 0.0)
    out.copy_(result.float() * k_scale)
    if lse is not None:
        if returned[1] is None:
            raise RuntimeError(f"AITER {aiter.version} returned no LSE, although its mla_decode_fwd has return_lse and writes Final_lse")
        # [T, heads] there; rows without keys are -inf, +inf or NaN, by release
        lse.copy_(batch.by_row(returned[1][:, :heads]).masked_fill(blind[:, None], float("-inf")).transpose(0, 1))


def _decode_persistent(
    aiter: Aiter,
    shape: LaunchShape,
    q: torch.Tensor,
    rows: torch.Tensor,
    meta: MLAMetadata,
    softmax_scale: float,
    *,
    causal: bool,
    out: torch.Tensor,
    k_scale: float | torch.Tensor,
    captured: bool,
) -> None:
    """Persistent: a workgroup a compute unit, each with its list of the plan. One launch for each `HEADS` heads."""
    assert aiter.planner is not None
    tokens, heads, latent = q.shape
    plan = work_plan(aiter.planner, meta, tokens, q.dtype, rows.dtype, causal=causal, captured=captured)
    asked = _repeat_heads(q, shape.heads).view(tokens, -1, HEADS, latent).transpose(0, 1).contiguous()
    o = torch.zeros(*asked.shape[:3], out.shape[2], dtype=torch.bfloat16, device=q.device)
    one = torch.ones(1, dtype=torch.float32, device=q.device)
    scales = {"q_scale": one, "kv_scale": k_scale.reshape(1) if isinstance(k_scale, torch.Tensor) else one * k_scale}
    for part, result in zip(asked, o, strict=True):
        given = _common(part, rows, result, plan.qo_indptr, plan.kv_indptr, plan.kv_indices, softmax_scale)
        given |= {"kv_last_page_lens": plan.last_page_lens, "max_seqlen_q": 1, "return_lse": False}
        _call(aiter, given | scales, vars(plan.tables))
    out.copy_(o.transpose(0, 1).flatten(1, 2)[:, :heads].masked_fill((plan.seen == 0)[:, None, None], 0.0))


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


def _make_finite(row: torch.Tensor) -> None:
    """Numbers of a cache row that are not finite become finite, in place; torch can't do that to float8, but NaN has few bit patterns."""
    if row.dtype not in FLOAT8_DTYPES:
        row.nan_to_num_()
        return
    bits = row.view(torch.uint8)
    bits.masked_fill_(bits == 0x80 if row.dtype == torch.float8_e4m3fnuz else (bits & 0x7F) == 0x7F, 0)


def _common(
    q: torch.Tensor,
    rows: torch.Tensor,
    o: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    softmax_scale: float,
) -> dict[str, Any]:
    """What every decode is given."""
    return {
        "q": q,
        "kv_buffer": rows,
        "o": o,
        "qo_indptr": qo_indptr,
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "sm_scale": softmax_scale,
        "page_size": 1,
        "causal": True,  # the keys that a row may see are those of its request, or the kernel's bottom-right mask
    }


def _split_indptr(aiter: Aiter, batch: Batch, splits: int) -> dict[str, torch.Tensor]:
    """Our own where AITER honours it; else the one that it cached goes: it may be of another device, stream, or graph that has not run."""
    if aiter.signature.honours_split_indptr:
        device = batch.kv_indptr.device
        return {"num_kv_splits_indptr": torch.arange(0, (batch.size + 1) * splits, splits, dtype=torch.int32, device=device)}
    if aiter.forget_splits is not None:
        aiter.forget_splits()
    return {}


def _call(aiter: Aiter, given: dict[str, Any], more: dict[str, torch.Tensor]) -> Any:
    """What AITER returns, which of both it takes; it has filled `o`."""
    device, takes = given["q"].device, aiter.signature.parameters
    with current(device):
        return aiter.decode(**{name: value for name, value in (given | more).items() if name in takes})
