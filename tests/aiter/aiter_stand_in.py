"""A stand-in for AITER's `mla_decode_fwd`, one a generation: the real parameters in the real order, the real behaviour, float64 numbers.

It keeps what AITER does and does not do: the first stage of one token of 16 heads puts request b into row b whatever `qo_indptr` says, rows
without keys become NaN, rows of padding are left alone, the tail multiplies cache row 0 by zero, an empty batch divides by zero,
memory that is not written is NaN, and the scale has its own default. What AITER takes on trust is asserted here.
"""

from __future__ import annotations

import itertools
import math
import types
from typing import Any

import torch

S0 = "q, kv_buffer, o, kv_indptr, kv_indices, kv_last_page_lens, sm_scale=None, logit_cap=0.0, num_kv_splits=None"
S1 = "q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, sm_scale=None, logit_cap=0.0, num_kv_splits=None"
S2 = S1 + (
    ", num_kv_splits_indptr=None, work_meta_data=None, work_indptr=None, work_info_set=None, reduce_indptr=None, "
    "reduce_final_map=None, reduce_partial_map=None, q_scale=None, kv_scale=None"
)
S3 = S2 + ", intra_batch_mode=False"
S4 = S3 + ", return_logits=False, return_lse=False"
S5 = S4.replace("max_seqlen_q, ", "max_seqlen_q, page_size=1, nhead_kv=1, ")
S7 = S5 + ", g_kv_indptr=None, cp_world_size=1, cp_rank=0"
PARAMETERS = {"S0": S0, "S1": S1, "S2": S2, "S3": S3, "S4": S4, "S5": S5, "S6": S5, "S7": S7, "S8": S7 + ", causal=True"}
GENERATIONS = tuple(PARAMETERS)
PACKAGE = types.ModuleType("aiter")
"""One that plans nothing: before S2."""

_TABLES = "work_metadata_ptrs, {}, reduce_indptr, reduce_final_map, reduce_partial_map"
_OPTIONS = "kv_granularity=16, max_seqlen_qo=-1, uni_seqlen_qo=-1, fast_mode=True, topk=-1"
M16 = f"seqlens_qo_indptr, seqlens_kv_indptr, num_heads_per_head_k, num_heads_k, is_causal, {_TABLES}, {_OPTIONS}"
M17 = M16 + ", max_split_per_batch=-1"
M19 = M17 + ", dtype_q=None, dtype_kv=None"
M20 = M17 + ", intra_batch_mode=False, dtype_q=None, dtype_kv=None"
M22 = M20.replace("seqlens_kv_indptr, ", "seqlens_kv_indptr, kv_last_page_lens, ").replace("kv_granularity", "page_size=1, kv_granularity")
M23 = M22.replace("intra_batch_mode=False", "intra_batch_mode=False, is_cp_round_robin=False")
_HALVES = ", dtype_q_nope=None, dtype_q_rope=None, dtype_kv_nope=None, dtype_kv_rope=None"
M26 = M23.replace(", dtype_q=None, dtype_kv=None", ", mla_version=32" + _HALVES)
M28 = M26 + ", dtype_q=None, dtype_kv=None"
EXCHANGED, STRAIGHT = "work_indptr, work_info", "work_info_set, work_indptr"
PLANNERS = {
    name: (text.format(EXCHANGED if number < 22 else STRAIGHT), 7 if number < 19 else 9 if number < 26 else 10)
    for number, name, text in (
        (16, "M16", M16), (17, "M17", M17), (19, "M19", M19), (20, "M20", M20), (22, "M22", M22), (23, "M23", M23), (26, "M26", M26),
        (28, "M28", M28),
    )
}  # fmt: skip
"""Parameters of `get_mla_metadata_v1`, by their number, and how many `get_mla_metadata_info_v1` has. The two tables of work are
called by each other's names until the argument for the last page came in: the C++ behind takes them as in the later forms."""
INFO = "batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode=True, num_kv_splits=32, intra_batch_mode=False, \
max_split_per_batch=-1"
UNITS = 5
""" "Compute units" of the stand-in."""


def _restated() -> types.ModuleType:
    """AITER's planner and reduction. Imported when they are called: the emulator wants tinygrad, which a machine with a GPU may lack."""
    from dualmla.emulator import aiter_plan

    return aiter_plan


def package(form: str = "M17") -> types.ModuleType:
    """What stands for `aiter` with plans of this form; its `planned` lists the arguments of each plan."""
    parameters, sizes = PLANNERS[form]
    made = types.ModuleType("aiter")
    made.planned = []

    def write(given: dict[str, Any]) -> None:
        made.planned.append(given)
        ordered = list(given.values())
        if "kv_last_page_lens" in given:
            assert ordered.pop(2).tolist() == [1] * (len(given["seqlens_qo_indptr"]) - 1)
        qo_indptr, kv_indptr, heads, heads_k, causal = ordered[:5]
        assert (heads, heads_k, causal) == (16, 1, True)
        for indptr in (qo_indptr, kv_indptr):
            assert indptr.dtype == torch.int32
            assert indptr.is_contiguous()
        assert qo_indptr.tolist() == list(range(len(qo_indptr)))
        assert (given["max_seqlen_qo"], given["uni_seqlen_qo"], given["topk"], given.get("page_size", 1)) == (1, 1, -1, 1)
        _restated().write_plan(qo_indptr, kv_indptr, *ordered[5:11], given["kv_granularity"])

    def info(given: dict[str, Any]) -> Any:
        batch, cut = given["batch_size"], UNITS - 1
        assert (given["max_seqlen_qo"], given["num_head_qo"], given["is_sparse"], given["fast_mode"]) == (1, 16, False, True)
        assert (given["q_dtype"], given["kv_dtype"].itemsize) == (torch.bfloat16, 1)
        most = min(batch + cut, 2 * cut)
        shapes: tuple[Any, ...] = (2, UNITS + 1, (batch + cut, 8), batch + 1, (batch, 2), most)
        return tuple(zip(shapes, (torch.uint64, *[torch.int32] * 5), strict=True))

    namespace = {"write": write, "info": info}
    exec(f"def get_mla_metadata_v1({parameters}):\n    return write(locals())", namespace)
    exec(f"def get_mla_metadata_info_v1({', '.join(INFO.split(', ')[:sizes])}):\n    return info(locals())", namespace)
    made.get_mla_metadata_v1, made.get_mla_metadata_info_v1 = namespace["get_mla_metadata_v1"], namespace["get_mla_metadata_info_v1"]
    return made


def module(generation: str) -> types.ModuleType:
    """What stands for `aiter.mla`; its `calls` lists the arguments of each call, its `forgotten` the calls made at each clearing."""
    mla = types.ModuleType("aiter.mla")
    mla.calls, mla.forgotten = [], []

    def run(given: dict[str, Any]) -> tuple[None, torch.Tensor | None]:
        mla.calls.append(given)
        return None, _decode(generation, **given)

    namespace = {"run": run}
    exec(f"def mla_decode_fwd({PARAMETERS[generation]}):\n    return run(locals())", namespace)
    mla.mla_decode_fwd = namespace["mla_decode_fwd"]
    names = ["Mid_O", "Mid_lse", "O"] + (["Final_lse"] if generation >= "S6" else [])
    mla._fwd_kernel_stage2_asm = types.SimpleNamespace(arg_names=names)
    mla.get_meta_param = types.SimpleNamespace(cache_clear=lambda: mla.forgotten.append(len(mla.calls)))
    return mla


PLAN = ("work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map", "q_scale", "kv_scale")


def persistent(
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    o: torch.Tensor,
    kv_indices: torch.Tensor,
    scale: float,
    *,
    work_indptr: torch.Tensor,
    work_info_set: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor,
    reduce_partial_map: torch.Tensor,
    q_scale: torch.Tensor,
    kv_scale: torch.Tensor,
) -> None:
    """The kernel for bf16 queries over a float8 cache: an empty item ends its workgroup, and the scale of queries is not looked at."""
    assert kv_buffer.dtype in (torch.float8_e4m3fnuz, torch.float8_e4m3fn), "float8, not a view as uint8"
    for one in (q_scale, kv_scale):
        assert (one.dtype, one.shape) == (torch.float32, (1,))
    rows = reduce_partial_map.shape[0]
    partial_out, partial_lse = torch.full((rows, 1, 16, 512), float("nan")), torch.full((rows, 1, 16, 1), float("nan"))
    zero = 0.0 * kv_buffer[0, 0, 0, :512].double()
    for begin, end in itertools.pairwise(work_indptr.tolist()):
        for _, slot, row, last, first_key, last_key, _, _ in work_info_set[begin:end].tolist():
            assert last == row + 1, "causality breaks"
            if first_key == last_key:
                break
            keys = kv_buffer[kv_indices[first_key:last_key].long(), 0, 0].double() * kv_scale.double()
            scores = scale * q[row].double() @ keys.T
            value = torch.softmax(scores, -1) @ keys[:, :512] + zero
            if slot < 0:
                o[row] = value.bfloat16()
            else:
                partial_out[slot, 0], partial_lse[slot, 0, :, 0] = value.float(), torch.logsumexp(scores, -1).float()
    _restated().reduce(partial_out, partial_lse, reduce_indptr, reduce_final_map, reduce_partial_map, o)


def _decode(
    generation: str,
    *,
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    o: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    sm_scale: float | None,
    num_kv_splits: int | None,
    qo_indptr: torch.Tensor | None = None,
    max_seqlen_q: int = 1,
    num_kv_splits_indptr: torch.Tensor | None = None,
    page_size: int = 1,
    nhead_kv: int = 1,
    return_lse: bool = False,
    work_meta_data: torch.Tensor | None = None,
    **rest: Any,
) -> torch.Tensor | None:
    plan = {name: rest.pop(name) for name in PLAN if name in rest}
    batch = kv_indptr.shape[0] - 1
    assert batch > 0, "AITER's split heuristic divides by it"
    tokens, heads, dim = q.shape
    assert heads in (16, 32, 64, 128)
    assert q.dtype == torch.bfloat16
    assert max_seqlen_q == 1 or (heads == 16 and max_seqlen_q <= 4)
    assert kv_buffer.shape[1:] == (1, 1, dim)
    assert (page_size, nhead_kv) == (1, 1)
    assert o.is_contiguous()
    assert o.dtype == torch.bfloat16
    assert q.is_contiguous()
    for name, indices in (("qo", qo_indptr), ("kv", kv_indptr), ("ids", kv_indices), ("last", kv_last_page_lens)):
        assert indices is None or (indices.dtype == torch.int32 and indices.is_contiguous()), name
    assert kv_last_page_lens.tolist() == [1] * batch
    assert all(value in (None, False, True, 0.0, 0, 1) for value in rest.values())
    if num_kv_splits_indptr is not None:
        assert generation >= "S3", "overwritten there"
        assert num_kv_splits_indptr.tolist() == list(range(0, (batch + 1) * num_kv_splits, num_kv_splits))
    scale = 1 / math.sqrt(576) if sm_scale is None else sm_scale
    if work_meta_data is not None:
        assert (num_kv_splits, num_kv_splits_indptr, return_lse, heads, max_seqlen_q) == (None, None, False, 16, 1)
        assert work_meta_data.tolist() == [plan["work_indptr"].data_ptr(), plan["work_info_set"].data_ptr()]
        persistent(q, kv_buffer, o, kv_indices, scale, **plan)
        return None
    assert kv_buffer.dtype == torch.bfloat16, "std::abort"

    # first stage: one token of 16 heads goes to row b, all else to the rows of qo_indptr
    by_request = qo_indptr is None or (max_seqlen_q == 1 and heads == 16)
    places = [(b, b + 1) if by_request else tuple(qo_indptr[b : b + 2].tolist()) for b in range(batch)]
    partial: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for b, (first, last) in enumerate(places):
        ids = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        keys = kv_buffer[ids, 0, 0].double()
        for row in range(first, last):
            seen = len(ids) - (last - row - 1)
            assert row < tokens, f"row {row} of {tokens} is written: out of bounds"
            scores = scale * q[row].double() @ keys[: max(seen, 0)].T
            value = torch.softmax(scores, -1) @ keys[: max(seen, 0), :512]
            if len(ids) % 64:
                value = value + 0.0 * kv_buffer[0, 0, 0, :512].double()
            partial[row] = (value, torch.logsumexp(scores, -1)) if seen > 0 else (value * float("nan"), value[:, 0] + float("inf"))
    # second stage: by qo_indptr
    lse = torch.full((tokens, heads), float("nan"))
    for first, last in itertools.pairwise(range(batch + 1) if qo_indptr is None else qo_indptr.tolist()):
        for row in range(first, last):
            o[row], lse[row] = partial[row][0].bfloat16(), partial[row][1].float()
    if generation < "S6" or num_kv_splits == 1:
        lse = torch.full_like(lse, 12345.0)  # memory that nobody wrote
    return lse if return_lse or generation < "S4" else None
