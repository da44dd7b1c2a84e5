"""Absorbed MLA decode: plans, and what is launched for a call. The mathematics and the shapes are in decode_kernel.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from dualmla_kernels.decode_config import DecodeConfig, decode_config
from dualmla_kernels.decode_kernel import _combine, _decode
from dualmla_kernels.launch import HAS_GLUON, Layout, Prepared, cdiv, layout_of, next_power_of_2, stream_of, without_memory
from dualmla_kernels.plan import MOST_PARTS, PlanShape, SplitPlan, balanced_plan, fixed_plan
from dualmla_kernels.ready import Settled
from dualmla_kernels.target import Target, target_of


def plan_decode(
    seq_lens: torch.Tensor,
    *,
    num_heads: int,
    max_query_len: int,
    dtype: torch.dtype,
    float8: bool = False,
    num_kv_splits: int | None = None,
) -> SplitPlan:
    """The split plan of a decode over int32 `seq_lens` [num_reqs], on their device; made once a step, used by every layer.

    Arguments:
        max_query_len: an upper bound of the query lengths.
        dtype: of the queries.
        float8: whether the cache is.
        num_kv_splits: pieces of every request; None: equal shares of the device.
    """
    if num_kv_splits is not None:
        config = decode_config(_config_rows(num_heads, max_query_len, fixed=True), dtype, seq_lens.device)
        return fixed_plan(seq_lens, splits=num_kv_splits, tile=config.tile)
    return balanced_plan(seq_lens, plan_shape(num_heads, max_query_len, dtype, seq_lens.device, float8))


def plan_shape(num_heads: int, max_query_len: int, dtype: torch.dtype, device: torch.device, float8: bool = False) -> PlanShape:
    """What a balanced plan for these decodes is made for: host numbers alone, so that a captured launch stays right."""
    rows = _config_rows(num_heads, max_query_len, fixed=False)
    config = decode_config(rows, dtype, device, float8)
    tile = decode_config(rows, dtype, device).tile  # float8 or not, so that one plan does for both
    return PlanShape(parts=max(config.programs // _groups(num_heads, max_query_len, config), 1), tile=tile)


def scratch_bytes(
    num_heads: int, max_query_len: int, num_reqs: int, kv_lora_rank: int, dtype: torch.dtype, device: torch.device, float8: bool
) -> int:
    """The most that a decode with a balanced plan takes beside its arguments, whatever its lengths: partial results and plan.

    A program splits at most two requests, the first and the last of its share: two partial results of `block_m` rows.
    """
    config = decode_config(_config_rows(num_heads, max_query_len, fixed=False), dtype, device, float8)
    partial = 2 * config.programs * config.block_m * (kv_lora_rank + 1) * 4
    return partial + (num_reqs + config.programs) * (4 + 3 + 1) * 4


def _groups(num_heads: int, max_query_len: int, config: DecodeConfig) -> int:
    """Groups of `block_m` rows that the longest request has."""
    return cdiv(num_heads * max_query_len, config.block_m)


def _config_rows(num_heads: int, max_query_len: int, *, fixed: bool) -> int:
    """Rows that the configuration is chosen by. A fixed split promises a row the same bits whatever else is in the batch."""
    return num_heads * (1 if fixed else max_query_len)


def _combine_shape(parts: int, num_reqs: int, rank: int) -> tuple[int, int]:
    """Pieces at a time, and columns a program, of the combine. Evidence: docs/performance.md."""
    if parts // num_reqs > 8:  # few requests in many pieces: the columns are shared out to more programs
        return 32, min(rank, 64)
    return 8, rank


def _dependent_launch(target: Target) -> bool:
    """Whether the chip can make a kernel ready while the one before it runs (Hopper's programmatic dependent launch)."""
    return target.platform == "cuda" and int(target.arch[3:]) >= 90


def _in_pairs(kv_cache: torch.Tensor, alignment: int) -> bool:
    """Whether every two numbers of a row, e4m3fn ones, lie in an int16; the cache begins at a multiple of `alignment` bytes."""
    return kv_cache.dtype == torch.float8_e4m3fn and kv_cache.stride(0) % 2 == 0 and kv_cache.stride(1) % 2 == 0 and alignment % 2 == 0


class _Launches:
    """A decode but for its tensors and scales.

    Arguments:
        decode: takes q and the cache `times` each, and from `block_table_ptr` to `k_scale` what the kernel does.
        times: in how many ways the kernel copies from them.
        combines: each for so many split requests as a grid may have; take what the kernel does up to `lse_ptr`.
        partial: numbers of all partial results, without and with their LSEs.
    """

    def __init__(self, device: torch.device, decode: Prepared, times: int, combines: Sequence[Prepared], partial: tuple[int, int]) -> None:
        self.decode, self._device, self._times, self._combines = decode, device, times, combines
        self._without_lse, self._with_lse = partial
        self._settled: tuple[Settled, Settled] | None = None

    def __call__(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        qo_indptr: torch.Tensor,
        plan: SplitPlan,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        softmax_scale: float,
        k_scale: float | torch.Tensor,
    ) -> None:
        """Launch both kernels."""
        partial = torch.empty(self._with_lse, dtype=torch.float32, device=q.device)  # outputs and LSEs: an allocation takes its time
        on_device = isinstance(k_scale, torch.Tensor)
        if self._settled is not None and not on_device and (stream := stream_of(self._device)) is not None:
            decode, combine = self._settled
            q_at, cache_at, out_at, partial_at = q.data_ptr(), kv_cache.data_ptr(), out.data_ptr(), partial.data_ptr()
            table_at, lens_at, indptr_at = block_table.data_ptr(), seq_lens.data_ptr(), qo_indptr.data_ptr()
            parts_at, pieces_at, splits_at = plan.pieces_of_part.data_ptr(), plan.pieces.data_ptr(), plan.splits.data_ptr()
            lse_at, partial_lse_at = None if lse is None else lse.data_ptr(), partial_at + 4 * self._without_lse
            bits = (
                q_at | cache_at | out_at | table_at | lens_at | indptr_at | parts_at | pieces_at | splits_at | partial_at | partial_lse_at
            )
            if not (bits | (lse_at or 0)) & 15 and not decode.heard and not combine.heard:
                first = (q_at, cache_at) if self._times == 1 else decode.encoded(q, q, kv_cache, kv_cache)
                decode(
                    stream, *first, table_at, lens_at, indptr_at, parts_at, pieces_at, out_at, lse_at, partial_at, partial_lse_at,
                    None, softmax_scale, k_scale,
                )  # fmt: skip
                combine(stream, partial_at, partial_lse_at, splits_at, indptr_at, out_at, lse_at)
                return
        partial_lse = partial[self._without_lse :]
        first = (*(q,) * self._times, *(kv_cache,) * self._times)
        scales = (k_scale, softmax_scale, 1.0) if on_device else (None, softmax_scale, k_scale)
        to_decode = (
            *first, block_table, seq_lens, qo_indptr, plan.pieces_of_part, plan.pieces, out, lse, partial, partial_lse, *scales
        )  # fmt: skip
        self.decode(*to_decode)
        for launch_combine, splits in zip(self._combines, plan.splits.split(MOST_PARTS), strict=True):
            to_combine = (partial, partial_lse, splits, qo_indptr, out, lse)
            launch_combine(*to_combine)
        if on_device or len(self._combines) > 1:
            return
        if (settled := self.decode.settled(*to_decode)) and (settled_combine := launch_combine.settled(*to_combine)):
            self._settled = settled, settled_combine


@functools.lru_cache(maxsize=1024)
def _launches(
    device: torch.device,
    target: Target,
    of_q: Layout,
    of_cache: Layout,
    of_out: Layout,
    lse_strides: tuple[int, ...] | None,
    table_stride: int,
    num_reqs: int,
    max_query_len: int,
    plan_counts: tuple[int, int, int, int],
    causal: bool,
    fixed: bool,
    alignment: int,
) -> _Launches:
    """What a decode launches: a function of numbers that the host knows, and so worked out once for calls that are alike.

    Arguments:
        plan_counts: `SplitPlan.counts`.
        fixed: whether the caller fixed the splits.
        alignment: bytes that the addresses of q and of the cache are multiples of, at most 16.
    """
    q, kv_cache, out = without_memory(of_q), without_memory(of_cache), without_memory(of_out)
    (parts, most_splits, slots, tile), (num_tokens, heads, rank) = plan_counts, out.shape
    rope = q.shape[2] - rank
    config = decode_config(_config_rows(heads, max_query_len, fixed=fixed), q.dtype, device, kv_cache.dtype.itemsize == 1)
    groups = _groups(heads, max_query_len, config)
    grid, partial_rows = (groups, parts), groups * config.block_m
    exact, pdl = target.platform == "cpu", _dependent_launch(target)
    launched_early = {"launch_pdl": True} if pdl else {}
    strides = (out.stride(0), out.stride(1), *(lse_strides or (0, 0)))
    pairs = config.pairs and HAS_GLUON and alignment == 16
    if pairs:
        from dualmla_kernels import decode_hopper

        pairs = decode_hopper.fits(q, kv_cache, rank)
    if pairs:
        decode = decode_hopper.prepare_pairs(grid, device, q, kv_cache, table_stride, strides, causal=causal)
    else:
        slices = max(min(config.slices, rank // 64), 1)  # a product needs 16 columns and is better off with 64
        paired = config.paired and _in_pairs(kv_cache, alignment)
        decode = Prepared(
            _decode, grid, device, (table_stride, q.stride(0), q.stride(1), kv_cache.stride(0), *strides),
            H=heads, D=rank, R=rope, R_PADDED=max(next_power_of_2(rope), 32 if paired else 16),
            PAGE=kv_cache.shape[1], SLOT=kv_cache.stride(1), CAUSAL=causal,
            TILE=tile, BM=config.block_m, BN=config.block_n, SLICES=slices, CHAINS=config.chains, STAGES=config.stages,
            LAZY=config.lazy, PAIRED=paired, PDL=pdl, EXACT=exact, num_warps=config.warps, **config.options,
        )  # fmt: skip
    block_s, block_d = _combine_shape(parts, num_reqs, rank)
    combines = [
        Prepared(
            _combine, (heads * max_query_len, min(most_splits - first, MOST_PARTS), rank // block_d), device,
            (partial_rows, num_reqs, num_tokens, *strides),
            H=heads, D=rank, BS=block_s, BD=block_d, PDL=pdl, EXACT=exact, num_warps=4, **launched_early,
        )
        for first in range(0, most_splits, MOST_PARTS)
    ]  # fmt: skip
    rows = slots * partial_rows
    return _Launches(device, decode, 2 if pairs else 1, combines, (rows * rank, rows * (rank + 1)))


def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    max_query_len: int,
    softmax_scale: float,
    *,
    causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    k_scale: float | torch.Tensor = 1.0,
    num_kv_splits: int | None = None,
    plan: SplitPlan | None = None,
) -> None:
    """Write `out` and `lse`; shapes as in decode_kernel.py, arguments trusted.

    Arguments:
        max_query_len: an upper bound of the query lengths, known on the host.
        k_scale: what an fp8 cache was divided by; a float or fp32 tensor of one element on the device.
        num_kv_splits: pieces of every request; None: a balanced plan.
        plan: what `plan_decode` made for these lengths; None: made here.
    """
    heads, num_reqs = out.shape[1], seq_lens.shape[0]
    if num_reqs == 0 or max_query_len == 0 or block_table.shape[1] == 0:  # a table without pages: an engine's profile run
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    if plan is None:
        float8 = kv_cache.dtype.itemsize == 1
        plan = plan_decode(
            seq_lens, num_heads=heads, max_query_len=max_query_len, dtype=q.dtype, float8=float8, num_kv_splits=num_kv_splits
        )
    device = q.device
    start = q.data_ptr() | kv_cache.data_ptr() | 16
    launches = _launches(
        device, target_of(device), layout_of(q), layout_of(kv_cache), layout_of(out), None if lse is None else lse.stride(),
        block_table.stride(0), num_reqs, max_query_len, plan.counts,
        causal, num_kv_splits is not None, start & -start,
    )  # fmt: skip
    launches(q, kv_cache, block_table, seq_lens, qo_indptr, plan, out, lse, float(softmax_scale), k_scale)
