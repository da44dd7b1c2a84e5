"""Prefill attention against float64 on every backend usable here, within the one error budget of `dualmla.testing`.

Rows that no request owns, `out`, and everything allocated on the way are NaN: each test is also one of contracts 3 and 4.
Structure (lengths, masks, strides, sizes) is tested in fp32, where the budget is a few units of 1e-6.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DEVICE

import dualmla
from dualmla.testing import Exact, assert_bits_equal, compare
from dualmla.testing.prefill import PrefillCase, PrefillInputs, exact_prefill, make_prefill_inputs, run_prefill
from dualmla_kernels import prefill
from dualmla_kernels.target import CHIPS, launches_on, target_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@functools.lru_cache(maxsize=2)
def truth(case: PrefillCase, device: torch.device) -> Exact:
    """Worked out once for all backends."""
    return exact_prefill(make_prefill_inputs(case, device))


def check(inputs: PrefillInputs, backend: str, exact: Exact | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = run_prefill(inputs, backend)
    assert out.data_ptr() == inputs.out.data_ptr(), "a given out is returned"
    comparison = compare(out, lse, exact or exact_prefill(inputs), flashmla_gate=inputs.case.dtype == BF16)
    assert comparison.agrees, f"{inputs.case}: {comparison.failures}"
    return out, lse


CASES = (
    *(PrefillCase(query_lens=(8, 5), dtype=dtype) for dtype in (BF16, FP16, FP32)),
    # around the tiles of 64 keys and the blocks of 32 and 64 queries
    *(PrefillCase(num_heads=1, query_lens=(n,), dtype=FP32) for n in (1, 31, 32, 33, 63, 64, 65, 130)),
    *(PrefillCase(num_heads=1, query_lens=(70,), key_lens=(m,), dtype=FP32) for m in (71, 127, 128, 129, 200)),
    # more requests than one, empty ones, fewer keys than queries, none
    PrefillCase(query_lens=(5, 0, 70, 3, 1), key_lens=(9, 4, 130, 0, 1), padding_tokens=3, dtype=FP32),
    PrefillCase(query_lens=(70, 9, 3), key_lens=(5, 4, 3), dtype=FP32),
    PrefillCase(query_lens=(0, 0), key_lens=(3, 0), padding_tokens=5, dtype=FP32),
    PrefillCase(query_lens=(), padding_tokens=2, dtype=FP32),
    # heads: fewer than a group of 8, not a multiple of it, many
    *(PrefillCase(num_heads=heads, query_lens=(9, 2), key_lens=(9, 80), dtype=FP32) for heads in (1, 8, 12, 20)),
    # sizes of a head: powers of two, not, smallest
    *(
        PrefillCase(query_lens=(7, 66), padding_tokens=1, qk_head_dim=qk, v_head_dim=v, dtype=FP32)
        for qk, v in ((128, 128), (16, 16), (80, 48), (256, 64), (144, 112), (224, 192))
    ),
    PrefillCase(query_lens=(40, 9), key_lens=(45, 80), padding_tokens=2, strided=True, dtype=FP32),
    PrefillCase(num_heads=16, query_lens=(33,), key_lens=(65,), strided=True),
)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: PrefillCase, causal: bool, device: torch.device, backend: str) -> None:
    case = dataclasses.replace(case, causal=causal)
    check(make_prefill_inputs(case, device), backend, truth(case, device))


hopper = pytest.mark.skipif(
    DEVICE.type != "cuda" or torch.cuda.get_device_capability(DEVICE) != (9, 0), reason="prefill_hopper is a kernel of sm_90"
)
HOPPER_CASES = (
    # dtypes; around the blocks of 128 queries of two warpgroups and the tiles of 128 keys
    *(PrefillCase(query_lens=(130, 5), dtype=dtype) for dtype in (BF16, FP16)),
    *(PrefillCase(num_heads=1, query_lens=(n,)) for n in (65, 127, 128, 129, 192, 193, 255, 256, 257, 700)),
    *(PrefillCase(num_heads=1, query_lens=(150,), key_lens=(m,)) for m in (1, 64, 149, 151, 255, 256, 257, 383, 384, 385, 1000)),
    # more requests than one, empty ones, fewer keys than queries, none; keys of a request end where those of the next begin
    PrefillCase(query_lens=(5, 0, 300, 3, 1, 129), key_lens=(9, 4, 530, 0, 1, 200), padding_tokens=3),
    PrefillCase(query_lens=(300, 9, 3, 200), key_lens=(105, 4, 3, 0)),
    PrefillCase(query_lens=(129, 0), key_lens=(0, 3), padding_tokens=5),
    PrefillCase(num_heads=2, query_lens=tuple(range(1, 280, 7)), key_lens=tuple(range(280, 0, -7))),
    # heads: fewer than a group, not a multiple of it, more blocks than there are programs
    *(PrefillCase(num_heads=heads, query_lens=(140, 2), key_lens=(140, 80)) for heads in (1, 8, 12, 20)),
    PrefillCase(num_heads=7, query_lens=(4000, 900), key_lens=(4300, 900)),
    PrefillCase(num_heads=2, query_lens=(9000,)),
    PrefillCase(query_lens=(140, 9), key_lens=(145, 80), padding_tokens=2, strided=True),
    PrefillCase(num_heads=16, query_lens=(133,), key_lens=(265,), strided=True, dtype=FP16),
)


@pytest.fixture(params=["hopper", "plain"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kernels that can do these cases on sm_90."""
    if request.param == "plain":
        monkeypatch.setattr(prefill, "runs_on_hopper", lambda *_: False)
        monkeypatch.setattr(prefill, "_prepare", prefill._prepare.__wrapped__)
    return str(request.param)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
def test_hopper_against_float64(case: PrefillCase, causal: bool, device: torch.device, kernel: str) -> None:
    """Right, and the same bits each time, whichever program does which block."""
    case = dataclasses.replace(case, causal=causal)
    inputs = make_prefill_inputs(case, device)
    assert prefill.runs_on_hopper(target_of(device), inputs.q, inputs.k, inputs.v) == (kernel == "hopper")
    first = [x.clone() for x in check(inputs, "triton", truth(case, device))]
    for _ in range(2):
        inputs.out.fill_(math.nan)
        for name, got, want in zip(("out", "lse"), run_prefill(inputs, "triton"), first, strict=True):
            assert_bits_equal(got, want, name)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_hopper_reads_no_other_requests_rows(causal: bool, device: torch.device) -> None:
    """The rows of the request in the middle are NaN: its own results are, and the others' keep their bits."""
    inputs = make_prefill_inputs(PrefillCase(query_lens=(200, 140, 70), key_lens=(270, 140, 99), causal=causal), device)
    want = [x.clone() for x in check(inputs, "triton")]
    for x, rows in ((inputs.q, slice(200, 340)), (inputs.k, slice(270, 410)), (inputs.v, slice(270, 410))):
        x[rows] = math.nan
    out, lse = run_prefill(inputs, "triton")
    assert bool(out[200:340].isnan().all())
    assert bool(lse[:, 200:340].isnan().all())
    for rows in (slice(200), slice(340, None)):
        assert_bits_equal(out[rows], want[0][rows], "out")
        assert_bits_equal(lse[:, rows], want[1][:, rows], "lse")


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_hopper_offsets_past_int32(name: str, device: torch.device) -> None:
    """As `test_offsets_past_int32`, and through the TMA unit."""
    inputs = make_prefill_inputs(PrefillCase(num_heads=1, query_lens=(66,)), device)
    near, stride = getattr(inputs, name), 2**25 + 2**20
    far = torch.empty(65 * stride + 192, dtype=BF16, device=device).as_strided(near.shape, (stride, 192, 1))
    far.copy_(near)
    want = [x.clone() for x in check(inputs, "triton")]
    moved = dataclasses.replace(inputs, **{name: far})
    assert prefill.runs_on_hopper(target_of(device), moved.q, moved.k, moved.v)
    for title, got, expected in zip(("out", "lse"), run_prefill(moved, "triton"), want, strict=True):
        assert_bits_equal(got, expected, title)


@hopper
@pytest.mark.gpu
def test_hopper_leaves_odd_strides_to_the_plain_kernel(device: torch.device) -> None:
    """Rows of 2 * 193 numbers are no multiple of the 16 bytes that the TMA unit steps by."""
    inputs = make_prefill_inputs(PrefillCase(num_heads=2, query_lens=(130,)), device)
    odd = torch.empty(130, 2, 193, dtype=BF16, device=device)[..., :192]
    odd.copy_(inputs.k)
    assert not prefill.runs_on_hopper(target_of(device), inputs.q, odd, inputs.v)
    check(dataclasses.replace(inputs, k=odd), "triton")


@hopper
@pytest.mark.gpu
def test_hopper_in_a_graph(device: torch.device) -> None:
    """Captured once, replayed on batches of other lengths within the bounds."""
    batches = [((300, 20, 130), (300, 60, 200)), ((1, 0, 430), (9, 3, 440)), ((150, 150, 150), (150, 0, 150)), ((0, 0, 0), (9, 3, 0))]
    cases = [PrefillCase(query_lens=new, key_lens=keys, padding_tokens=500 - sum(new)) for new, keys in batches]
    static = make_prefill_inputs(dataclasses.replace(cases[0], key_lens=(300, 60, 240)), device)
    arguments = (static.q, static.k, static.v, static.cu_seqlens_q, static.cu_seqlens_k, 450, 450, cases[0].softmax_scale)
    lse = dualmla.mla_prefill(*arguments, out=static.out, return_lse=True, backend="triton")[1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = dualmla.mla_prefill(*arguments, out=static.out, return_lse=True, backend="triton")
    for case in cases:
        inputs = make_prefill_inputs(case, device)
        for name in ("q", "k", "v"):
            whole, part = getattr(static, name), getattr(inputs, name)
            whole.fill_(math.nan)[: len(part)].copy_(part[: len(whole)])
        static.cu_seqlens_q.copy_(inputs.cu_seqlens_q)
        static.cu_seqlens_k.copy_(inputs.cu_seqlens_k)
        static.out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        want = check(inputs, "triton")
        assert_bits_equal(static.out, want[0], "out")
        assert_bits_equal(lse, want[1], "lse")


lengths = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 140)), min_size=1, max_size=4)


@settings(max_examples=12)
@given(lengths=lengths, heads=st.integers(1, 9), causal=st.booleans(), padding=st.integers(0, 2), strided=st.booleans())
def test_any_lengths(
    lengths: list[tuple[int, int]], heads: int, causal: bool, padding: int, strided: bool, device: torch.device, backend: str
) -> None:
    case = PrefillCase(
        num_heads=heads,
        query_lens=tuple(n for n, _ in lengths),
        key_lens=tuple(m for _, m in lengths),
        qk_head_dim=48,
        v_head_dim=32,
        dtype=FP32,
        causal=causal,
        padding_tokens=padding,
        strided=strided,
    )
    check(make_prefill_inputs(case, device), backend)


def test_scale_reaches_the_kernel(device: torch.device, backend: str) -> None:
    """S1: 8 tokens, a scale other than 192^-0.5."""
    for scale in (192**-0.5, 0.1352337788608801, 1.0):
        check(make_prefill_inputs(PrefillCase(softmax_scale=scale, dtype=FP32), device), backend)


def test_two_tokens_give_out_and_lse(device: torch.device, backend: str) -> None:
    """S2: with exactly 2 tokens the output itself unpacks into a pair."""
    inputs = make_prefill_inputs(PrefillCase(query_lens=(2,), key_lens=(6,), dtype=FP32), device)
    out, lse = check(inputs, backend)
    assert out.shape == (2, 3, 128)
    assert (lse.shape, lse.dtype) == ((3, 2), torch.float32)
    alone = dualmla.mla_prefill(
        inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, 2, 6, inputs.case.softmax_scale, backend=backend
    )
    assert isinstance(alone, torch.Tensor)
    assert_bits_equal(alone, out, "out without LSE")


def test_bounds_may_be_loose(device: torch.device, backend: str) -> None:
    inputs = make_prefill_inputs(PrefillCase(query_lens=(70, 3), key_lens=(75, 9), padding_tokens=2, dtype=FP32), device)
    want, _ = check(inputs, backend)
    got = dualmla.mla_prefill(
        inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, 300, 500, inputs.case.softmax_scale, backend=backend
    )
    assert_bits_equal(got, want, "out with loose bounds")


@pytest.mark.parametrize("arch", CHIPS)
@pytest.mark.parametrize("bound", [100, 2**40])
@pytest.mark.parametrize("tokens", [0, 3])
def test_no_bound_is_too_loose_for_a_grid(arch: str, bound: int, tokens: int) -> None:
    """As launched on each chip: nothing for no tokens, and no more programs than a grid may have."""
    q, k, v = (torch.empty(rows, 2, width, dtype=BF16, device="meta") for rows, width in ((tokens, 192), (5, 192), (5, 128)))
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    with launches_on(CHIPS[arch]) as launches:
        prefill.mla_prefill(q, k, v, bounds, bounds, bound, 0.1, causal=True, out=torch.empty_like(q[..., :128]), lse=None)
    assert len(launches) == (tokens > 0)
    assert all(launch.grid == (2 * 2 * 1,) for launch in launches)


def test_out_may_be_a_part_of_q(backend: str) -> None:
    """In memory that nobody needs any more. On a CPU: the kernels of a GPU have their own ways of reading ahead."""
    case = PrefillCase(query_lens=(70, 3), key_lens=(75, 9), dtype=FP32)
    want, _ = run_prefill(make_prefill_inputs(case, "cpu"), backend)
    inputs = make_prefill_inputs(case, "cpu")
    got, _ = run_prefill(dataclasses.replace(inputs, out=inputs.q[..., :128]), backend)
    assert_bits_equal(got, want, "out in place of q")


def test_one_key_head_for_all_by_a_stride_of_zero(device: torch.device, backend: str) -> None:
    inputs = make_prefill_inputs(PrefillCase(num_heads=4, query_lens=(40,), dtype=FP32), device)
    k, v = (x[:, :1].expand(-1, 4, -1) for x in (inputs.k, inputs.v))
    check(dataclasses.replace(inputs, k=k, v=v), backend)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_offsets_past_int32(name: str, device: torch.device, backend: str) -> None:
    """Rows so far apart that the 64th begins past 2^31 elements give the same bits; what lies between takes no memory."""
    inputs = make_prefill_inputs(PrefillCase(num_heads=1, query_lens=(66,), qk_head_dim=32, v_head_dim=32, dtype=BF16), device)
    near = getattr(inputs, name)
    stride = 2**25 + 2**20
    assert 63 * stride > 2**31
    far = torch.empty(65 * stride + 32, dtype=BF16, device=device).as_strided(near.shape, (stride, 32, 1))
    far.copy_(near)
    want = [x.clone() for x in check(inputs, backend)]
    got = run_prefill(dataclasses.replace(inputs, **{name: far}), backend)
    assert_bits_equal(got[0], want[0], "out")
    assert_bits_equal(got[1], want[1], "lse")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_live_number_that_is_not_finite_is_seen(value: float, device: torch.device, backend: str) -> None:
    """The LSE does not call its rows ones without keys: a merge would drop them."""
    torch.manual_seed(0)
    q, k, v = (torch.rand(rows, 2, width, device=device) + 0.1 for rows, width in ((4, 32), (9, 32), (9, 16)))
    k[1, 0, 0] = value
    cu_q, cu_k = (torch.tensor(bounds, dtype=torch.int32, device=device) for bounds in ((0, 3, 4), (0, 5, 9)))
    out, lse = dualmla.mla_prefill(q, k, v, cu_q, cu_k, 3, 5, 0.2, return_lse=True, backend=backend)
    wrong = torch.zeros(2, 4, dtype=torch.bool, device=device)
    wrong[0, :3] = True
    assert torch.equal(lse.isnan(), wrong)
    assert torch.equal(out.isnan(), wrong.t()[..., None].expand_as(out))


def test_same_bits_each_time(device: torch.device, backend: str) -> None:
    inputs = make_prefill_inputs(PrefillCase(query_lens=(70, 3, 9), key_lens=(75, 3, 130), padding_tokens=1), device)
    first = [x.clone() for x in run_prefill(inputs, backend)]
    for _ in range(3):
        inputs.out.fill_(math.nan)
        for name, got, want in zip(("out", "lse"), run_prefill(inputs, backend), first, strict=True):
            assert_bits_equal(got, want, name)


def test_backends_are_asked_by_name(device: torch.device) -> None:
    inputs = make_prefill_inputs(PrefillCase(dtype=FP32), device)
    args = (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, 8, 8, 0.1)
    with pytest.raises(ValueError, match=r"backend is 'tritn'; it must be one of auto, aiter, triton, reference"):
        dualmla.mla_prefill(*args, backend="tritn")
    with pytest.raises(dualmla.BackendUnavailable, match="aiter"):
        dualmla.mla_prefill(*args, backend="aiter")


# argument -> (what is wrong, the error, what it must say)
BAD = {
    "q of rank 2": ({"q": lambda q: q[:, 0]}, ValueError, r"q must have 3 dimensions, got shape \[13, 192\]"),
    "q not a tensor": ({"q": lambda q: None}, TypeError, "q must be a tensor, got NoneType"),
    "q of ints": ({"q": lambda q: q.int()}, TypeError, "q must be bfloat16 or float16 or float32, got int32"),
    "q not dense": ({"q": lambda q: q.repeat(1, 1, 2)[..., ::2]}, ValueError, "q must be contiguous in its last dimension"),
    "q requires grad": ({"q": lambda q: q.clone().requires_grad_()}, ValueError, "q requires grad"),
    "head dim not a multiple of 16": (
        {"q": lambda q: q[..., :40], "k": lambda k: k[..., :40]}, ValueError, "q must have heads of a multiple of 16 .* 16 to 512, got 40",
    ),
    "v head dim not a multiple of 16": ({"v": lambda v: v[..., :24]}, ValueError, "v must have heads of a multiple of 16 numbers.* got 24"),
    "k of other dtype": ({"k": lambda k: k.half()}, TypeError, "k must be float32, got float16"),
    "k of other heads": ({"k": lambda k: k[:, :2]}, ValueError, r"k must have shape \[any, 3, 192\], got \[13, 2, 192\]"),
    "v of fewer keys": ({"v": lambda v: v[:5]}, ValueError, r"v must have shape \[13, 3, any\], got \[5, 3, 128\]"),
    "v on another device": ({"v": lambda v: v.to("meta")}, ValueError, "v is on meta, it must be on"),
    "cu_seqlens_q of int64": ({"cu_seqlens_q": lambda c: c.long()}, TypeError, "cu_seqlens_q must be int32, got int64"),
    "cu_seqlens_q empty": ({"cu_seqlens_q": lambda c: c[:0]}, ValueError, r"cu_seqlens_q must have num_reqs \+ 1 entries, got none"),
    "cu_seqlens_q decreasing": ({"cu_seqlens_q": lambda c: c.flip(0)}, ValueError, r"must start at 0 and not decrease, got \[13, 8, 0\]"),
    "cu_seqlens_q too far": ({"cu_seqlens_q": lambda c: c * 2}, ValueError, "cu_seqlens_q ends at 26, there are 13 tokens"),
    "cu_seqlens_k of other requests": ({"cu_seqlens_k": lambda c: c[:2]}, ValueError, "cu_seqlens_k has 1 requests, cu_seqlens_q has 2"),
    "max_seqlen_q too small": ({"max_seqlen_q": lambda n: 7}, ValueError, "cu_seqlens_q has a request of 8 tokens, .* max_seqlen=7"),
    "max_seqlen_k negative": ({"max_seqlen_k": lambda n: -1}, ValueError, "max_seqlen_k must be an int of at least 0, got -1"),
    "max_seqlen_q a float": ({"max_seqlen_q": lambda n: 8.0}, ValueError, r"max_seqlen_q must be an int of at least 0, got 8\.0"),
    "scale a string": ({"softmax_scale": lambda s: "0.1"}, TypeError, "softmax_scale must be a float, got str"),
    "scale 0": ({"softmax_scale": lambda s: 0.0}, ValueError, r"softmax_scale must be finite and positive, got 0\.0"),
    "scale beyond fp32": ({"softmax_scale": lambda s: 1e39}, ValueError, "softmax_scale must be finite and positive in fp32"),
    "out of other shape": ({"out": lambda o: o[:5]}, ValueError, r"out must have shape \[13, 3, 128\], got \[5, 3, 128\]"),
    "out of other dtype": ({"out": lambda o: o.half()}, TypeError, "out must be float32, got float16"),
    "out expanded": ({"out": lambda o: o[:1].expand(13, -1, -1)}, ValueError, "out is written, but its elements share memory"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_anything_is_written(name: str, device: torch.device, backend: str, monkeypatch: Any) -> None:
    """Contract 9; on a GPU, where values cost a wait, under DUALMLA_DEBUG."""
    monkeypatch.setenv("DUALMLA_DEBUG", "1")
    changes, error, message = BAD[name]
    inputs = make_prefill_inputs(PrefillCase(query_lens=(8, 5), dtype=FP32), device)
    arguments = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs) if f.name != "case"}
    arguments |= {"max_seqlen_q": 8, "max_seqlen_k": 8, "softmax_scale": 0.1}
    arguments |= {argument: change(arguments[argument]) for argument, change in changes.items()}
    with pytest.raises(error, match=message):
        dualmla.mla_prefill(**arguments, backend=backend)
    assert bool(inputs.out.isnan().all())
