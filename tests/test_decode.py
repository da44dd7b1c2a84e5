"""Decode against float64 on every backend usable here, within the one error budget of `dualmla.testing`.

`make_decode_inputs` puts every case into adversarial memory (free cache slots and `out` are NaN, unused page ids huge)
and `run_decode` fills everything allocated on the way with NaN too: each test below is also one of contracts 3 and 4.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualmla
from dualmla.testing import (
    QUICK_GRID,
    DecodeCase,
    DecodeInputs,
    Exact,
    compare,
    exact_attention,
    exact_decode,
    make_decode_inputs,
    run_decode,
)
from dualmla_kernels import decode, decode_kernel
from dualmla_kernels.target import CHIPS, launches_on

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@functools.lru_cache(maxsize=2)
def truth(case: DecodeCase, device: torch.device) -> Exact:
    """Worked out once for all backends."""
    return exact_decode(make_decode_inputs(case, device))


def check(case: DecodeCase, device: torch.device, backend: str, **changes: Any) -> None:
    """The decode of a case is within budget; `changes` replaces tensors of the inputs before the call."""
    inputs = make_decode_inputs(case, device)
    inputs = dataclasses.replace(inputs, **{name: change(getattr(inputs, name)) for name, change in changes.items()})
    out, lse = run_decode(inputs, backend)
    assert out.data_ptr() == inputs.out.data_ptr(), "a given out is returned"
    comparison = compare(out, lse, truth(case, device), flashmla_gate=case.data in ("normal", "flashmla"))
    assert comparison.agrees, f"{case}: {comparison.failures}"


@pytest.mark.parametrize("case", QUICK_GRID, ids=str)
def test_quick_grid(case: DecodeCase, device: torch.device, backend: str) -> None:
    """Pairwise over heads, query lengths, page sizes, kv lengths and dtypes; and the corners."""
    check(case, device, backend)


LARGER = (
    DecodeCase(num_heads=128, seq_lens=(1000,), page_size=64),
    DecodeCase(num_heads=128, seq_lens=(130,), query_lens=(9,), page_size=1, seed=1),
    DecodeCase(num_heads=1, seq_lens=(5000, 3), page_size=64, dtype=FP32),
    DecodeCase(num_heads=8, seq_lens=(1, 9, 0, 65, 130, 2), query_lens=(9, 1, 4, 0, 7, 3), page_size=3, padding_tokens=2),
)


@pytest.mark.parametrize("case", LARGER, ids=str)
def test_larger_than_the_grid_allows(case: DecodeCase, device: torch.device, backend: str) -> None:
    check(case, device, backend)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_len", range(1, 10))
def test_context_shorter_than_the_query(kv_len: int, causal: bool, device: torch.device, backend: str) -> None:
    """Rows that see nothing are 0 and -inf; rows that see all are not."""
    check(DecodeCase(num_heads=3, seq_lens=(kv_len, 70), query_lens=(9, 2), page_size=3, causal=causal), device, backend)


@pytest.mark.parametrize(("dtype", "splits"), [(BF16, None), (BF16, 2), (FP16, None)], ids=str)
def test_scores_far_above_those_of_the_last_keys(dtype: torch.dtype, splits: int | None, device: torch.device, backend: str) -> None:
    """By more than 2^64, which a maximum taken from the last tile alone does not bear."""
    case = DecodeCase(
        num_heads=24, seq_lens=(300, 64, 129), page_size=64, dtype=dtype, num_kv_splits=splits, data="peaked", softmax_scale=1.0
    )
    check(case, device, backend)


@pytest.mark.parametrize("splits", [None, 1, 2])
def test_scores_far_above_those_of_the_first_keys(splits: int | None, device: torch.device, backend: str) -> None:
    """By more than 2^64, over a float8 cache: what was added up before them has to become nothing."""
    float8 = next(dtype for dtype in FP8 if takes_float8(device, dtype))
    case = DecodeCase(num_heads=3, seq_lens=(300, 64, 129), page_size=64, kv_cache_dtype=float8, num_kv_splits=splits, softmax_scale=1.0)
    inputs = make_decode_inputs(case, device)
    for request, length in enumerate(case.seq_lens):
        row = inputs.kv_cache[inputs.meta.block_table[request, (length - 1) // 64], (length - 1) % 64]
        row.copy_((inputs.q[request, 1].float() * 4).to(float8))
    out, lse = run_decode(inputs, backend)
    exact = exact_decode(inputs)
    assert float(exact.lse[1].min()) > 64, "the last key's score is far above all others"
    comparison = compare(out, lse, exact, flashmla_gate=False)
    assert comparison.agrees, comparison.failures


SIZES = [(rank, rope) for rank, rope in itertools.product((32, 64, 128, 256, 512), (16, 48, 64, 80, 128))]


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_empty_requests_beside_live_ones(causal: bool, splits: int | None, device: torch.device, backend: str) -> None:
    """Their page ids are garbage and there is no last live row to read in place of a dead one."""
    check(DecodeCase(num_heads=3, seq_lens=(0, 5, 0, 70), page_size=4, causal=causal, num_kv_splits=splits), device, backend)


@pytest.mark.parametrize(("rank", "rope"), SIZES)
def test_sizes_of_the_latent_row(rank: int, rope: int, device: torch.device, backend: str) -> None:
    """Also ropes that are no power of two, and rows that could be split in two ways: `out` says which."""
    case = DecodeCase(num_heads=3, seq_lens=(70, 3), query_lens=(2, 1), page_size=16, kv_lora_rank=rank, qk_rope_head_dim=rope)
    check(case, device, backend)


def test_config_says_how_a_row_is_split(device: torch.device, backend: str) -> None:
    """A row of 160 as 32 + 128, though 128 + 32 is possible too; without `out`."""
    case = DecodeCase(num_heads=2, seq_lens=(9, 4), kv_lora_rank=32, qk_rope_head_dim=128)
    inputs = make_decode_inputs(case, device)
    cfg = dualmla.MLAConfig(num_heads=2, softmax_scale=0.1, kv_lora_rank=32, qk_rope_head_dim=128)
    builder = dualmla.MLAMetadataBuilder(cfg, device, max_num_seqs=2, max_num_pages_per_seq=16)
    meta = builder.build(inputs.meta.block_table, inputs.meta.seq_lens, [1, 1])
    out, lse = dualmla.mla_decode(inputs.q, inputs.kv_cache, meta, case.softmax_scale, return_lse=True, backend=backend)
    comparison = compare(out, lse, truth(case, device))
    assert comparison.agrees, comparison.failures


def takes_float8(device: torch.device, dtype: torch.dtype) -> bool:
    cfg = dualmla.MLAConfig(num_heads=1, softmax_scale=1.0, kv_cache_dtype=dtype)
    return all(report.usable for report in dualmla.explain(cfg, device) if report.name in ("triton", "reference"))


@pytest.mark.parametrize("k_scale", [None, 0.25, 3.0])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("cache_dtype", FP8, ids=str)
def test_float8_cache(cache_dtype: torch.dtype, dtype: torch.dtype, k_scale: float | None, device: torch.device, backend: str) -> None:
    """Short prompts, where P would underflow in fp8, and longer ones; both flavours where the device has them."""
    if not takes_float8(device, cache_dtype):
        pytest.skip(f"this device does not compute with {cache_dtype}")
    case = DecodeCase(num_heads=3, seq_lens=(1, 7, 100), page_size=16, dtype=dtype, kv_cache_dtype=cache_dtype, k_scale=k_scale)
    check(case, device, backend)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_k_scale_on_the_device(shape: tuple[int, ...], device: torch.device, backend: str) -> None:
    """A tensor of one element means what the float means."""
    dtype = next(dtype for dtype in FP8 if takes_float8(device, dtype))
    case = DecodeCase(num_heads=3, seq_lens=(100, 3), page_size=16, kv_cache_dtype=dtype, k_scale=0.375)
    inputs = make_decode_inputs(case, device)
    k_scale = torch.full(shape, 0.375, device=device)
    out, lse = dualmla.mla_decode(
        inputs.q, inputs.kv_cache, inputs.meta, case.softmax_scale, return_lse=True, k_scale=k_scale, backend=backend
    )
    comparison = compare(out, lse, truth(case, device))
    assert comparison.agrees, comparison.failures


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 16, 64])
def test_fixed_splits(splits: int, device: torch.device, backend: str) -> None:
    """Fewer than the tiles of a row and more, on empty, short, long and multi-token rows."""
    case = DecodeCase(num_heads=3, seq_lens=(0, 1, 64, 400, 65), query_lens=(1, 3, 2, 2, 1), page_size=16, num_kv_splits=splits)
    check(case, device, backend)


# --- memory layouts


def relaid(tensor: torch.Tensor, order: tuple[int, ...], pad: tuple[int, ...]) -> torch.Tensor:
    """The same values and shape in other memory: dimensions laid out in `order`, each `pad` longer."""
    shape = [tensor.shape[d] + pad[d] for d in order]
    memory = torch.full(shape, 1, dtype=torch.uint8, device=tensor.device) if tensor.element_size() == 1 else None
    memory = torch.full(shape, float("nan"), dtype=tensor.dtype, device=tensor.device) if memory is None else memory.view(tensor.dtype)
    view = memory.permute([order.index(d) for d in range(len(order))])[tuple(slice(0, n) for n in tensor.shape)]
    return view.copy_(tensor)


LAYOUTS = {
    "q by heads": {"q": lambda q: relaid(q, (1, 0, 2), (0, 0, 0))},
    "q of wider tokens": {"q": lambda q: relaid(q, (0, 1, 2), (0, 2, 48))},
    "out by heads": {"out": lambda out: relaid(out, (1, 0, 2), (0, 0, 0))},
    "out of wider tokens": {"out": lambda out: relaid(out, (0, 1, 2), (1, 3, 16))},
    "cache of wider pages": {"kv_cache": lambda cache: relaid(cache, (0, 1, 2), (0, 5, 0))},
    "cache of wider rows": {"kv_cache": lambda cache: relaid(cache, (0, 1, 2), (0, 0, 64))},
    "cache by slots": {"kv_cache": lambda cache: relaid(cache, (1, 0, 2), (0, 0, 0))},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("splits", [1, 3])
def test_strides(layout: str, splits: int, device: torch.device, backend: str) -> None:
    """Only the last dimension must be dense. Direct and combined rows are written by different kernels."""
    case = DecodeCase(num_heads=3, seq_lens=(200, 5, 0), query_lens=(2, 1, 1), page_size=16, padding_tokens=1, num_kv_splits=splits)
    check(case, device, backend, **LAYOUTS[layout])


@pytest.mark.parametrize("splits", [1, 3])
def test_lse_of_any_strides(splits: int, device: torch.device, backend: str) -> None:
    """As backends are called by `merge`-minded callers: the LSE is a slice of a [T, H] tensor."""
    case = DecodeCase(num_heads=3, seq_lens=(200, 5, 0), query_lens=(2, 1, 1), page_size=16, padding_tokens=1)
    inputs = make_decode_inputs(case, device)
    lse = torch.full((5, 7), 99.0, device=device)
    dualmla.select_backend(dualmla.MLAConfig(num_heads=3, softmax_scale=0.1), device, backend).mla_decode(
        inputs.q,
        inputs.kv_cache,
        inputs.meta,
        case.softmax_scale,
        causal=True,
        out=inputs.out,
        lse=lse.t()[2:5],
        k_scale=1.0,
        num_kv_splits=splits,
    )
    comparison = compare(inputs.out, lse.t()[2:5], truth(case, device))
    assert comparison.agrees, comparison.failures
    assert (lse[:, :2] == 99.0).all()
    assert (lse[:, 5:] == 99.0).all()


# --- any shape


@st.composite
def cases(draw: st.DrawFn) -> DecodeCase:
    """Whatever `mla_decode` promises, kept to what an interpreter does in a moment."""
    heads = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 17, 24, 33]))
    requests = draw(st.lists(st.tuples(st.integers(0, 140), st.integers(0, 9)), min_size=0, max_size=4))
    dtype = draw(st.sampled_from([BF16, FP16, FP32]))
    float8 = draw(st.sampled_from([None, None, *FP8]))
    return DecodeCase(
        num_heads=heads,
        seq_lens=tuple(kv for kv, _ in requests),
        query_lens=tuple(q for _, q in requests),
        page_size=draw(st.integers(1, 70)),
        dtype=dtype,
        kv_cache_dtype=float8,
        softmax_scale=draw(st.floats(0.01, 0.5)),
        causal=draw(st.booleans()),
        num_kv_splits=draw(st.sampled_from([None, None, 1, 2, 5])),
        k_scale=draw(st.floats(0.1, 4.0)) if float8 else None,
        kv_lora_rank=draw(st.sampled_from([32, 64, 128])),
        qk_rope_head_dim=draw(st.sampled_from([16, 32, 48, 112])),
        padding_tokens=draw(st.integers(0, 3)),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )


@settings(max_examples=60)
@given(case=cases())
def test_any_shape(case: DecodeCase, device: torch.device) -> None:
    if case.kv_cache_dtype is not None and not takes_float8(device, case.kv_cache_dtype):
        case = dataclasses.replace(case, kv_cache_dtype=None, k_scale=None)
    inputs = make_decode_inputs(case, device)
    exact = exact_decode(inputs)
    for backend in ("triton", "reference"):
        out, lse = run_decode(inputs, backend)
        comparison = compare(out, lse, exact, flashmla_gate=False)
        assert comparison.agrees, f"{backend}: {comparison.failures}"
        inputs.out.fill_(float("nan"))


def test_meta_of_fewer_tokens_than_q(device: torch.device, backend: str) -> None:
    """A batch of nothing but padding, and no tokens at all."""
    for tokens in (0, 1, 5):
        check(DecodeCase(num_heads=3, seq_lens=(), padding_tokens=tokens), device, backend)
        check(DecodeCase(num_heads=3, seq_lens=(4, 4), query_lens=(0, 0), padding_tokens=tokens), device, backend)


def test_out_and_lse_made_for_the_caller(device: torch.device, backend: str) -> None:
    """Without `out`: a new contiguous tensor; the LSE only when asked for."""
    case = DecodeCase(num_heads=3, seq_lens=(5, 9), page_size=4)
    inputs: DecodeInputs = make_decode_inputs(case, device)
    alone = dualmla.mla_decode(inputs.q, inputs.kv_cache, inputs.meta, case.softmax_scale, backend=backend)
    assert isinstance(alone, torch.Tensor)
    assert alone.is_contiguous()
    assert (alone.shape, alone.dtype, alone.device) == ((2, 3, 512), BF16, device)
    out, lse = dualmla.mla_decode(inputs.q, inputs.kv_cache, inputs.meta, case.softmax_scale, return_lse=True, backend=backend)
    assert torch.equal(out, alone), "asking for the LSE changes no bit of out"
    assert (lse.shape, lse.dtype, lse.device) == ((3, 2), FP32, device)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("splits", [None, 1, 4])
def test_a_live_number_that_is_not_finite_is_seen(value: float, splits: int | None, device: torch.device, backend: str) -> None:
    """No split hides it, and the LSE does not call its row one without keys; the neighbour's numbers stay what they were."""
    torch.manual_seed(0)
    table = torch.arange(26, dtype=torch.int32, device=device).view(2, 13)
    meta = dualmla.decode_metadata(table, [200, 150], page_size=16, device=device)
    q = torch.rand(2, 3, 48, device=device) + 0.1
    cache = torch.rand(26, 16, 48, device=device)
    good, good_lse = dualmla.mla_decode(q, cache, meta, 0.2, return_lse=True, num_kv_splits=splits, backend=backend)
    cache[5, 7, 3] = value
    out, lse = dualmla.mla_decode(q, cache, meta, 0.2, return_lse=True, num_kv_splits=splits, backend=backend)
    assert bool(out[0].isnan().all())
    assert bool(lse[:, 0].isnan().all())
    assert torch.equal(out[1], good[1])
    assert torch.equal(lse[:, 1], good_lse[:, 1])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("hidden", [range(128), range(70, 200), range(20, 199), range(200)], ids=str)
@pytest.mark.parametrize("splits", [None, 1, 3])
def test_keys_with_a_score_of_minus_infinity(
    splits: int | None, hidden: range, dtype: torch.dtype, device: torch.device, backend: str
) -> None:
    """They weigh nothing, whole tiles of them too; rows that see nothing else are like those without keys."""
    generator = torch.Generator().manual_seed(0)
    q = (torch.rand(2, 3, 48, generator=generator) + 0.1).to(dtype)
    rows = torch.randn(400, 48, generator=generator).to(dtype)
    rows[list(hidden), 40] = -math.inf  # in the rope: their values are finite
    table = torch.arange(26, dtype=torch.int32, device=device).view(2, 13)
    cache = torch.zeros(26, 16, 48, dtype=dtype)
    cache[:13].view(-1, 48)[:200], cache[13:].view(-1, 48)[:200] = rows[:200], rows[200:]
    meta = dualmla.decode_metadata(table, [200, 200], page_size=16, device=device)
    out, lse = dualmla.mla_decode(
        q.to(device), cache.to(device), meta, 0.2, out=torch.empty(2, 3, 32, dtype=dtype, device=device), return_lse=True,
        num_kv_splits=splits, backend=backend,
    )  # fmt: skip
    for request in range(2):
        seen = [token for token in range(200) if request or token not in hidden]
        keys = rows[200 * request :][seen][:, None]
        exact = exact_attention(q[request : request + 1], keys, keys[..., :32], 0.2, causal=False, dtype=dtype)
        comparison = compare(out[request : request + 1].cpu(), lse[:, request : request + 1].cpu(), exact, flashmla_gate=False)
        assert comparison.agrees, comparison.failures


def test_more_split_requests_than_a_grid_may_have() -> None:
    """Every one is combined, by launches whose axes but the first are within CUDA's 65535."""
    requests, meta = 70_000, torch.device("meta")
    lengths = torch.empty(requests, dtype=torch.int32, device=meta)
    with launches_on(CHIPS["sm_90"]) as launches:
        decode.mla_decode(
            torch.empty(requests, 2, 576, dtype=BF16, device=meta),
            torch.empty(64, 64, 576, dtype=BF16, device=meta),
            torch.empty(requests, 4, dtype=torch.int32, device=meta),
            lengths,
            torch.empty(requests + 1, dtype=torch.int32, device=meta),
            1,
            0.1,
            causal=True,
            out=torch.empty(requests, 2, 512, dtype=BF16, device=meta),
            lse=None,
            num_kv_splits=2,
        )
    combined = [launch for launch in launches if launch.kernel is decode_kernel._combine]
    assert all(size <= 65535 for launch in launches for size in launch.grid[1:])
    assert sum(launch.grid[1] for launch in combined) == requests
    assert sum(len(launch.args[2]) for launch in combined) == requests
