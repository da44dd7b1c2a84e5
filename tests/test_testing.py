"""The judge itself: what it must let pass, and what it must not."""

import itertools
import math

import pytest
import torch

from dualmla.backends.reference import latent_rows
from dualmla.testing import (
    QUICK_GRID,
    UNUSED_PAGE,
    DecodeCase,
    assert_bits_equal,
    assert_decode_agrees,
    compare,
    compare_decode,
    cosine_difference,
    exact_attention,
    exact_decode,
    make_decode_inputs,
    poisoned_allocations,
    run_decode,
)
from dualmla.testing.grids import MAX_COST, _quick_cost, pairwise

CASE = DecodeCase(num_heads=4, seq_lens=(70, 5, 0), query_lens=(2, 1, 1), page_size=16, padding_tokens=1)
NUMBERS = ("normal", "flashmla", "flat", "peaked", "huge", "denormal")


def low_precision(case, *, round_p=lambda p: p, scale=None, hide=0):
    """A plain kernel in `case.dtype` with fp32 sums: all an honest backend does, so that each fault is one argument."""
    inputs = make_decode_inputs(case)
    out = torch.zeros_like(inputs.out)
    lse = torch.full((case.num_heads, len(out)), -math.inf)
    first = 0
    for request, (new, length) in enumerate(zip(case.new_tokens, case.seq_lens, strict=True)):
        rows = latent_rows(inputs.kv_cache, inputs.meta.block_table[request], length).float() * (case.k_scale or 1.0)
        for i in range(new):
            seen = rows[: max(length - new + i + 1 - hide, 0)]
            if len(seen):
                s = (scale or case.softmax_scale) * (inputs.q[first + i].float() @ seen.T)
                p = torch.exp(s - s.amax(1, keepdim=True))
                o = round_p(p.to(case.dtype).float()) @ seen[:, : case.kv_lora_rank] / p.sum(1, keepdim=True)
                out[first + i], lse[:, first + i] = o.to(case.dtype), s.logsumexp(1)
        first += new
    return out, lse, inputs


@pytest.mark.parametrize("data", NUMBERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("lens", [(1, 2, 3), (64, 65, 1000)], ids=str)
def test_honest_arithmetic_is_within_budget(data, dtype, lens):
    for seed in range(5):
        assert_decode_agrees(*low_precision(DecodeCase(num_heads=4, seq_lens=lens, dtype=dtype, data=data, seed=seed)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_budget_is_not_generous(dtype):
    """The honest run uses a tenth of its allowance somewhere, or the budget proves little (fp32: of the LSE's, of large scores)."""
    result = compare_decode(*low_precision(DecodeCase(num_heads=4, seq_lens=(70,), dtype=dtype, data="normal")))
    assert result.budget_used > (0.1 if dtype != torch.float32 else 0.003)
    assert result.max_error < {torch.bfloat16: 1.3e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]


@pytest.mark.parametrize(
    ("fault", "at"),
    [({"scale": 576**-0.5}, "lse"), ({"hide": 1}, "lse"), ({"round_p": lambda p: p.to(torch.float8_e4m3fn).float()}, "out")],
    ids=["scale", "mask", "fp8-p"],
)
def test_faulty_arithmetic_is_found(fault, at):
    failures = compare_decode(*low_precision(CASE, **fault)).failures
    assert any(failure.startswith(at) for failure in failures)


def spoil_base(out, lse):
    return out, lse / math.log(2)


def spoil_layout(out, lse):
    return out, lse.T


def spoil_empty(out, lse):
    out[3, 1, 7] = math.nan
    return out, lse


def spoil_padding(out, lse):
    out[4, 0, 0] = 2.0**-100
    return out, lse


def spoil_empty_lse(out, lse):
    lse[2, 3] = math.inf
    return out, lse


def spoil_heads(out, lse):
    return out[:, [1, 0, 2, 3]], lse


def spoil_element(out, lse):
    out[2, 3, 500] += 0.05
    return out, lse


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_base, "lse is"),
        (spoil_layout, r"lse has shape \[5, 4\], it must be \[4, 5\]"),
        (spoil_empty, r"out is nan at \(3, 1, 7\) \[token, head, column\], it must be 0; 1 of"),
        (spoil_padding, r"out is 7.88860905e-31 at \(4, 0, 0\)"),
        (spoil_empty_lse, r"lse is inf at \(2, 3\) \[head, token\], it must be -inf"),
        (spoil_heads, "out is"),
        (spoil_element, r"out is .* at \(2, 3, 500\).* 1 of 10240 elements"),
    ],
)
def test_each_wrong_result_is_named_with_its_coordinate(spoil, words):
    out, lse, inputs = low_precision(CASE)
    assert_decode_agrees(out, lse, inputs)
    out, lse = spoil(out, lse)
    with pytest.raises(AssertionError, match=words):
        assert_decode_agrees(out, lse, inputs)


def test_flashmlas_gate_stands_on_top():
    out, lse, inputs = low_precision(DecodeCase(num_heads=1, seq_lens=(64,), data="flashmla"))
    exact = exact_decode(inputs)
    tilted = (exact.out * 1.004).to(out.dtype)  # within bf16's own rounding of each element, but all to one side
    assert any("cosine" in failure for failure in compare(tilted, lse, exact).failures)
    loose = type(exact)(exact.out, exact.lse, torch.full_like(exact.out, math.inf), exact.lse_allowed, exact.value_rms)
    out[0, 0, 5] += 0.02
    assert any("FlashMLA's absolute and relative" in failure and "(0, 0, 5)" in failure for failure in compare(out, lse, loose).failures)


def test_exact_attention_of_separate_heads_is_that_of_each_head_alone():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 24), torch.randn(5, 2, 24), torch.randn(5, 2, 16)
    both = exact_attention(q, k, v, 0.3, causal=True, dtype=torch.bfloat16)
    for head in range(2):
        one = exact_attention(q[:, head : head + 1], k[:, head : head + 1], v[:, head : head + 1], 0.3, causal=True, dtype=torch.bfloat16)
        torch.testing.assert_close(both.out[:, head], one.out[:, 0])
        torch.testing.assert_close(both.lse[head], one.lse[0])
        torch.testing.assert_close(both.out_allowed[:, head], one.out_allowed[:, 0])
        torch.testing.assert_close(both.lse_allowed[head], one.lse_allowed[0])


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_memory_that_nobody_owns_is_poison(cache_dtype, strided):
    case = DecodeCase(num_heads=2, seq_lens=(5, 0, 33), page_size=16, kv_cache_dtype=cache_dtype, strided=strided)
    inputs = make_decode_inputs(case)
    owned = torch.zeros(inputs.kv_cache.shape[:2], dtype=torch.bool)
    table = inputs.meta.block_table
    for request, length in enumerate(case.seq_lens):
        for t in range(length):
            owned[table[request, t // 16], t % 16] = True
        assert (table[request, -(-length // 16) :] == UNUSED_PAGE).all()
    values = inputs.kv_cache.float()
    poison = math.nan if cache_dtype == torch.bfloat16 else torch.finfo(cache_dtype).max
    assert int(owned.sum()) == 38
    assert values[owned].isfinite().all()
    assert values[owned].abs().max() < 10
    assert torch.equal(values[~owned], torch.full_like(values[~owned], poison)) or values[~owned].isnan().all()
    assert inputs.out.isnan().all()
    assert inputs.q.is_contiguous() != strided


def test_inputs_are_a_function_of_the_case():
    case = DecodeCase(num_heads=2, seq_lens=(40, 40), page_size=16, shared_pages=2)
    one, two, other = make_decode_inputs(case), make_decode_inputs(case), make_decode_inputs(DecodeCase(**{**vars(case), "seed": 1}))
    assert_bits_equal(one.q, two.q, "q")
    assert_bits_equal(one.kv_cache, two.kv_cache, "kv_cache")
    assert not torch.equal(one.q, other.q)
    table = one.meta.block_table
    assert table[0, :2].tolist() == table[1, :2].tolist()
    assert table[0, 2] != table[1, 2]


def test_bits_are_compared_as_bits():
    zeros = torch.zeros(2, 3)
    assert_bits_equal(torch.full((2,), math.nan), torch.full((2,), math.nan))
    wrong = zeros.clone()
    wrong[1, 2] = -0.0
    with pytest.raises(AssertionError, match=r"x\[1, 2\] is -0.0, not 0.0; 1 of 6 differ"):
        assert_bits_equal(wrong, zeros, "x")
    with pytest.raises(AssertionError, match=r"\[3\], not"):
        assert_bits_equal(torch.zeros(3), zeros)


def test_cosine_difference_of_tiny_and_empty_tensors():
    x = torch.tensor([3.0, 4.0]) * 2.0**-540
    assert cosine_difference(x.double() * 2.0**-500, x.double() * 2.0**-500) == pytest.approx(0.0, abs=1e-15)
    assert cosine_difference(x, torch.zeros(2)) == 0.0  # 2^-540 is 0 in fp32
    assert cosine_difference(torch.empty(0), torch.empty(0)) == 0.0
    assert cosine_difference(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == 1.0


def test_allocations_are_poisoned_and_the_setting_is_put_back():
    with poisoned_allocations():
        assert torch.empty(64).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_case_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="query_lens has 2 requests, seq_lens has 1"):
        DecodeCase(seq_lens=(3,), query_lens=(1, 1))
    with pytest.raises(ValueError, match="data must be one of normal, "):
        DecodeCase(data="funny")


def test_the_quick_grid_holds_every_pair_it_can_afford():
    factors = {"query_len": range(1, 10), "kv": (0, 1, 63, 64, 65, 1000, "ragged"), "heads": (1, 3, 8, 16, 63, 128), "dtype": ("a", "b")}
    combinations = pairwise(factors)
    for one, two in itertools.combinations(factors, 2):
        for x, y in itertools.product(factors[one], factors[two]):
            if _quick_cost(**{one: x, two: y}) <= MAX_COST:
                assert any(c[one] == x and c[two] == y for c in combinations), (one, x, two, y)
    assert all(_quick_cost(**c) <= MAX_COST for c in combinations)
    names = [str(case) for case in QUICK_GRID]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "case", [CASE, DecodeCase(num_heads=2, seq_lens=(9, 3), page_size=3, kv_cache_dtype=torch.float8_e4m3fn, k_scale=0.5)], ids=str
)
def test_the_reference_agrees_with_itself(case):
    inputs = make_decode_inputs(case)
    assert_decode_agrees(*run_decode(inputs, "reference"), inputs)
