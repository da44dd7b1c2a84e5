"""Every kernel that is launched, on calls that stand for all: what is compiled for each chip and checked.

A case is a call of a launcher on the device "meta" (target.py), so that kernel, constants, options and grid are what the
launcher chooses on the chip. A new kernel is registered by a case that launches it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from dualmla_kernels import decode, decode_kernel, kv_cache, merge_states, metadata, plan, prefill, token_slots
from dualmla_kernels.target import Launch, Target, launches_on

META = torch.device("meta")
BF16, FP16, FP32, INT32, INT64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
RANK, ROPE = 512, 64

MULTIPLY = (decode_kernel._decode, prefill._prefill)
"""Kernels whose work is products of matrices."""

MOVE_ROWS = (*MULTIPLY, decode_kernel._combine, merge_states._merge)
"""Kernels whose time goes with the bytes they read, which are to come 16 at a time."""

KNOWN_FAULTS = {
    ("gfx942", "decode", "decode, 128 heads, page size 64, cache over 2 GiB"): "one register is kept in another one, with Triton 3.9",
    ("sm_90", "decode", "decode, 128 heads, *"): "64 rows of accumulators fill the registers, and smaller tiles would do without wgmma",
    ("sm_90", "decode_pairs", "*"): "addresses of operands; in the loops over tiles one is read once a pair",
}
"""(chip, kernel, pattern of cases) whose code breaks a gate, and why."""


def known_fault(arch: str, kernel: str, case: str) -> str | None:
    """Why the code of a kernel for a chip may break a gate, None where it must not."""
    return next((why for (a, k, c), why in KNOWN_FAULTS.items() if (a, k) == (arch, kernel) and fnmatch.fnmatch(case, c)), None)


@dataclass(frozen=True)
class Registered:
    """One launch of a case.

    Attributes:
        case: what was called.
        matrix: the matrix instruction that must do its products, None where it has none.
        wide: whether it moves rows of numbers.
    """

    case: str
    launch: Launch
    matrix: str | None
    wide: bool

    @property
    def kernel(self) -> str:
        return str(self.launch.kernel.__name__).lstrip("_")


def registered(target: Target, *, quick: bool = False) -> Iterator[Registered]:
    """What the cases launch on `target`; `quick`: those that stand for the others in a test that runs often."""
    for case, call in _cases(target, quick):
        with launches_on(target) as launches:
            call()
        for launch in launches:
            yield Registered(case, launch, _matrix_instruction(launch, target), launch.kernel in MOVE_ROWS)


def _matrix_instruction(launch: Launch, target: Target) -> str | None:
    if launch.kernel.is_gluon():
        return "wgmma"
    if launch.kernel not in MULTIPLY:
        return None
    if target.platform == "hip":
        return "v_mfma"
    if launch.args[0].dtype == FP32:
        return None  # fp32 is multiplied as it is, which the tensor cores of NVIDIA can't
    return "wgmma" if launch.kwargs["BM"] >= 64 else "mma.sync"


def _cases(target: Target, quick: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    float8 = torch.float8_e4m3fnuz if target.arch == "gfx942" else torch.float8_e4m3fn
    for heads in (16, 128):
        yield f"decode, {heads} heads", partial(_decode, heads)
        yield f"decode, {heads} heads, page size 1", partial(_decode, heads, page_size=1)
    yield "decode, 16 heads, float8 cache", partial(_decode, 16, cache_dtype=float8)
    yield "decode, 16 heads, 4 splits", partial(_decode, 16, num_kv_splits=4)
    yield "prefill, 16 heads", partial(_prefill, 16)
    yield "cache write, gather, merge", partial(_cache, BF16, BF16)
    yield "metadata of a step", _metadata
    if quick:
        return
    for heads in (8, 32, 64):
        yield f"decode, {heads} heads", partial(_decode, heads)
    for heads in (16, 128):
        for page_size in (16, 128):
            yield f"decode, {heads} heads, page size {page_size}", partial(_decode, heads, page_size=page_size)
        for page_size in (1, 64):
            name = f"decode, {heads} heads, page size {page_size}, cache over 2 GiB"
            yield name, partial(_decode, heads, page_size=page_size, cache_bytes=3 << 30)
        yield f"decode, {heads} heads, 4 tokens", partial(_decode, heads, query_len=4)
        yield f"decode, {heads} heads, fp16", partial(_decode, heads, dtype=FP16)
        yield f"decode, {heads} heads, fp32", partial(_decode, heads, dtype=FP32)
        yield f"decode, {heads} heads, no LSE", partial(_decode, heads, with_lse=False)
    yield "decode, 128 heads, float8 cache", partial(_decode, 128, cache_dtype=float8)
    yield "decode, 16 heads, float8 cache, page size 1", partial(_decode, 16, cache_dtype=float8, page_size=1)
    yield "prefill, 128 heads", partial(_prefill, 128)
    yield "prefill, short", partial(_prefill, 16, max_seqlen=64)
    yield "prefill, fp16", partial(_prefill, 16, dtype=FP16)
    yield "prefill, no LSE, context", partial(_prefill, 16, with_lse=False, causal=False)
    yield "prefill, heads of 128 and 128", partial(_prefill, 16, qk=128)
    yield "prefill, fp32", partial(_prefill, 16, dtype=FP32)
    yield "cache write, gather, merge, float8 cache", partial(_cache, BF16, float8)
    yield "cache write, gather, merge, fp32", partial(_cache, FP32, FP32)


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def _kv_cache(page_size: int, dtype: torch.dtype, nbytes: int = 1 << 30) -> torch.Tensor:
    return _empty(nbytes // (page_size * (RANK + ROPE) * dtype.itemsize), page_size, RANK + ROPE, dtype=dtype)


def _decode(
    heads: int,
    *,
    page_size: int = 64,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    query_len: int = 1,
    cache_bytes: int = 1 << 30,
    with_lse: bool = True,
    num_kv_splits: int | None = None,
) -> None:
    """32 requests: the plan, the decode, the combine."""
    requests = 32
    tokens = requests * query_len
    decode.mla_decode(
        _empty(tokens, heads, RANK + ROPE, dtype=dtype),
        _kv_cache(page_size, cache_dtype or dtype, cache_bytes),
        _empty(requests, 4096, dtype=INT32),
        _empty(requests, dtype=INT32),
        _empty(requests + 1, dtype=INT32),
        query_len,
        0.1,
        causal=True,
        out=_empty(tokens, heads, RANK, dtype=dtype),
        lse=_empty(heads, tokens, dtype=FP32) if with_lse else None,
        num_kv_splits=num_kv_splits,
    )


def _prefill(
    heads: int, *, max_seqlen: int = 4096, dtype: torch.dtype = BF16, qk: int = 192, causal: bool = True, with_lse: bool = True
) -> None:
    tokens = 4 * max_seqlen
    q, k = (_empty(tokens, heads, qk, dtype=dtype) for _ in range(2))
    v, out = (_empty(tokens, heads, 128, dtype=dtype) for _ in range(2))
    lengths = _empty(5, dtype=INT32)
    lse = _empty(heads, tokens, dtype=FP32) if with_lse else None
    prefill.mla_prefill(q, k, v, lengths, lengths, max_seqlen, 0.1, causal=causal, out=out, lse=lse)


def _cache(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Rows written and read back, two attentions merged."""
    tokens, heads = 1024, 16
    cache = _kv_cache(64, cache_dtype)
    latent, rope = _empty(tokens, RANK, dtype=dtype), _empty(tokens, ROPE, dtype=dtype)
    kv_cache.concat_and_cache_mla(latent, rope, cache, _empty(tokens, dtype=INT64), k_scale=1.0)
    rows = _empty(tokens, RANK + ROPE, dtype=dtype)
    kv_cache.gather_kv_cache(cache, _empty(4, 64, dtype=INT32), _empty(5, dtype=INT32), _empty(4, dtype=INT32), rows, k_scale=1.0)
    a, b, out = (_empty(tokens, heads, 128, dtype=dtype) for _ in range(3))
    lse_a, lse_b, lse = (_empty(heads, tokens, dtype=FP32) for _ in range(3))
    merge_states.merge_attn_states(a, lse_a, b, lse_b, out=out, lse=lse)


def _metadata() -> None:
    """Index arrays, slots and the plan of 32 decodes in one launch, the step after it, and AITER's token slots."""
    requests, max_pages = 32, 128
    table, lengths = _empty(requests, max_pages, dtype=INT32), _empty(requests, dtype=INT32)
    indptr, tokens = _empty(requests + 1, dtype=INT32), _empty(requests, dtype=INT64)
    shape = decode.plan_shape(16, 1, BF16, META)
    metadata.build(
        table,
        lengths,
        1,
        num_reqs=requests,
        num_decodes=requests,
        num_tokens=requests,
        page_size=64,
        fields=_empty(7, requests + 1, dtype=INT32),
        indices=_empty(requests * max_pages, dtype=INT32),
        prefill_indices=None,
        slots=_empty(requests, dtype=INT64),
        own_table=None,
        pages_ahead=0,
        plan=plan.allocate_plan(requests, shape, META),
    )
    metadata.advance(lengths, lengths, indptr, tokens, tokens, tokens)
    token_slots.token_slots(table, None, indptr, 64)
