"""Merging attention states: against float64, against one attention over all keys, every tensor's strides."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import dualmla
from dualmla.testing import assert_bits_equal, compare, poisoned_allocations
from dualmla.testing.prefill import PrefillCase, exact_prefill, make_prefill_inputs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF = math.inf


def parts(tokens: int, heads: int, dim: int, device: torch.device, dtype: torch.dtype = FP32, seed: int = 0) -> list[torch.Tensor]:
    """out_a, lse_a, out_b, lse_b."""
    generator = torch.Generator().manual_seed(seed)
    out = [torch.randn(tokens, heads, dim, generator=generator).to(dtype).to(device) for _ in range(2)]
    lse = [(torch.randn(heads, tokens, generator=generator) * 3).to(device) for _ in range(2)]
    return [out[0], lse[0], out[1], lse[1]]


def exact(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sums as they are written, in float64, with nothing taken out of the exponent."""
    w_a, w_b = lse_a.double().exp(), lse_b.double().exp()
    a, b = (torch.nan_to_num(out.double()) for out in (out_a, out_b))
    total = w_a + w_b
    share_a, share_b = ((w / torch.where(total == 0, 1.0, total)).t()[..., None] for w in (w_a, w_b))
    return share_a * a + share_b * b, total.log()


def check(out: torch.Tensor, lse: torch.Tensor, out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    """Within a dozen fp32 roundings of |out_a| + |out_b| and the LSE, and one of the output's dtype."""
    want, want_lse = exact(out_a, lse_a, out_b, lse_b)
    u, u32 = torch.finfo(out.dtype).eps / 2, 2.0**-24
    size = torch.nan_to_num(out_a.double()).abs() + torch.nan_to_num(out_b.double()).abs()
    spread = 1 + torch.nan_to_num((lse_a - lse_b).double(), nan=0.0, posinf=0.0, neginf=0.0).abs().t()[..., None]
    assert bool(((out.double() - want).abs() <= 12 * u32 * size * spread + u * want.abs()).all())
    assert lse.dtype == FP32
    assert_bits_equal(lse.isneginf(), want_lse.isneginf(), "empty rows")
    live = ~want_lse.isneginf()
    assert bool(((lse.double() - want_lse).abs() <= 8 * u32 * (1 + want_lse.abs()))[live].all())


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("dim", [128, 16, 48, 512])
def test_against_float64(dtype: torch.dtype, dim: int, device: torch.device, backend: str) -> None:
    given_parts = parts(37, 3, dim, device, dtype)
    with poisoned_allocations():
        out, lse = dualmla.merge_attn_states(*given_parts, backend=backend)
    assert out.dtype == dtype
    check(out, lse, *given_parts)


@pytest.mark.parametrize("which", ["a", "b", "both"])
def test_empty_parts_are_never_looked_at(which: str, device: torch.device, backend: str) -> None:
    """lse -inf: the output of that part may be anything. Both: 0 and -inf."""
    out_a, lse_a, out_b, lse_b = parts(9, 2, 32, device)
    if which in ("a", "both"):
        lse_a[:, ::2], out_a[::2] = -INF, math.nan
    if which in ("b", "both"):
        lse_b[:, ::2], out_b[::2] = -INF, math.nan
    out, lse = dualmla.merge_attn_states(out_a, lse_a, out_b, lse_b, backend=backend)
    check(out, lse, out_a, lse_a, out_b, lse_b)
    assert bool(out.isfinite().all())
    if which == "both":
        assert bool((out[::2] == 0).all())
        assert bool(lse[:, ::2].isneginf().all())


def test_plus_infinity_marks_an_empty_row_too(device: torch.device, backend: str) -> None:
    out_a, lse_a, out_b, lse_b = parts(9, 2, 32, device)
    lse_b[0] = INF
    out, lse = dualmla.merge_attn_states(out_a, lse_a, out_b, lse_b, backend=backend)
    check(out, lse, out_a, lse_a, out_b, torch.where(lse_b.isposinf(), -INF, lse_b))


def test_large_scores_do_not_overflow(device: torch.device, backend: str) -> None:
    out_a, lse_a, out_b, lse_b = parts(5, 2, 32, device)
    out, lse = dualmla.merge_attn_states(out_a, lse_a + 3000, out_b, lse_b + 3000, backend=backend)
    want, want_lse = dualmla.merge_attn_states(out_a, (lse_a + 3000) - 3000, out_b, (lse_b + 3000) - 3000, backend=backend)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, want_lse + 3000, rtol=1e-6, atol=0)


STRIDED = {
    "out_a a slice of wider heads": lambda p: [p[0].repeat(1, 1, 2)[..., :32], *p[1:]],
    "out_b every other head": lambda p: [*p[:2], p[2].repeat_interleave(2, 1)[:, ::2], p[3]],
    "out_b head-major": lambda p: [*p[:2], p[2].transpose(0, 1).contiguous().transpose(0, 1), p[3]],
    "lse_a token-major": lambda p: [p[0], p[1].t().contiguous().t(), *p[2:]],
    "lse_b a slice": lambda p: [*p[:3], p[3].repeat(1, 2)[:, :9]],
    "lse_b with gaps": lambda p: [*p[:3], p[3].repeat_interleave(3, 1)[:, ::3]],
}


@pytest.mark.parametrize("name", STRIDED)
def test_every_tensor_has_its_own_strides(name: str, device: torch.device, backend: str) -> None:
    dense = parts(9, 4, 32, device)
    given_parts = STRIDED[name](dense)
    assert [p.stride() for p in given_parts] != [p.stride() for p in dense]
    wide = torch.full((9, 5, 48), math.nan, device=device)
    out, lse = dualmla.merge_attn_states(*given_parts, out=wide[:, :4, :32], backend=backend)
    assert out.data_ptr() == wide.data_ptr()
    assert bool(wide[:, 4].isnan().all())
    assert bool(wide[:, :, 32:].isnan().all())
    check(out, lse, *dense)


@pytest.mark.parametrize("part", [0, 2], ids=["into out_a", "into out_b"])
def test_in_place(part: int, device: torch.device, backend: str) -> None:
    """A running fp32 state takes in a bf16 part."""
    given_parts = parts(9, 4, 32, device)
    given_parts[2 - part] = given_parts[2 - part].to(BF16)
    before = [p.clone() for p in given_parts]
    out, lse = dualmla.merge_attn_states(*given_parts, out=given_parts[part], backend=backend)
    assert out is given_parts[part]
    check(out, lse, *before)


@pytest.mark.parametrize("cut", [0, 1, 17, 50])
def test_two_halves_make_the_whole(cut: int, device: torch.device, backend: str) -> None:
    """Attention over all keys is that over the first `cut` merged with that over the rest, empty halves included."""
    inputs = make_prefill_inputs(PrefillCase(query_lens=(6,), key_lens=(50,), dtype=FP32, causal=False), device)
    halves = []
    for keys in (slice(None, cut), slice(cut, None)):
        k, v = inputs.k[keys], inputs.v[keys]
        cu_k = torch.tensor([0, len(k)], dtype=torch.int32, device=device)
        halves += dualmla.mla_prefill(
            inputs.q, k, v, inputs.cu_seqlens_q, cu_k, 6, len(k), inputs.case.softmax_scale, causal=False, return_lse=True, backend=backend
        )
    comparison = compare(*dualmla.merge_attn_states(*halves, backend=backend), exact_prefill(inputs), flashmla_gate=False)
    assert comparison.agrees, comparison.failures


@pytest.mark.parametrize("part", [1, 3])
def test_a_part_that_went_wrong_is_kept(part: int, device: torch.device, backend: str) -> None:
    """An LSE of NaN is no part without keys: dropping it would hide what happened."""
    arguments = parts(9, 3, 32, device)
    arguments[part][1, 4] = math.nan
    out, lse = dualmla.merge_attn_states(*arguments, backend=backend)
    wrong = torch.zeros(3, 9, dtype=torch.bool, device=device)
    wrong[1, 4] = True
    assert torch.equal(lse.isnan(), wrong)
    assert torch.equal(out.isnan(), wrong.t()[..., None].expand_as(out))


def test_no_tokens(device: torch.device, backend: str) -> None:
    out, lse = dualmla.merge_attn_states(*parts(0, 3, 32, device), backend=backend)
    assert (out.shape, lse.shape) == ((0, 3, 32), (3, 0))


BAD = {
    "out_b of other shape": (2, lambda x: x[:4], ValueError, r"out_b must have shape \[9, 3, 32\], got \[4, 3, 32\]"),
    "out_a of ints": (0, lambda x: x.int(), TypeError, "out_a must be bfloat16 or float16 or float32, got int32"),
    "out_a not dense": (0, lambda x: x.repeat(1, 1, 2)[..., ::2], ValueError, "out_a must be contiguous in its last dimension"),
    "lse_a as [T, H]": (1, lambda x: x.t(), ValueError, r"lse_a must have shape \[3, 9\], got \[9, 3\]"),
    "lse_b in bf16": (3, lambda x: x.to(BF16), TypeError, "lse_b must be float32, got bfloat16"),
    "lse_b elsewhere": (3, lambda x: x.to("meta"), ValueError, "lse_b is on meta"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str, device: torch.device, backend: str) -> None:
    index, change, error, message = BAD[name]
    arguments: list[Any] = parts(9, 3, 32, device)
    arguments[index] = change(arguments[index])
    out = torch.full((9, 3, 32), math.nan, device=device)
    with pytest.raises(error, match=message):
        dualmla.merge_attn_states(*arguments, out=out, backend=backend)
    assert bool(out.isnan().all())


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (lambda empty: empty[:4], r"out must have shape \[9, 3, 32\], got \[4, 3, 32\]"),
        (lambda empty: empty[:1].expand(empty.shape), "out is written, but its elements share memory"),
    ],
)
def test_bad_out_is_refused(out: Any, message: str, device: torch.device, backend: str) -> None:
    with pytest.raises(ValueError, match=message):
        dualmla.merge_attn_states(*parts(9, 3, 32, device), out=out(torch.empty(9, 3, 32, device=device)), backend=backend)
