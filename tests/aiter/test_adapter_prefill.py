"""AITER's prefill through our adapter, with a stand-in for `flash_attn_varlen_func`, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dualmla.backends.aiter import prefill
from dualmla.backends.reference import ReferenceMLABackend, attend

SCALE = 0.1352


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q=0, dropout_p=0.0, softmax_scale=None,
    logits_soft_cap=0.0, causal=False, window_size=(-1, -1), bias=None, alibi_slopes=None, deterministic=False, return_lse=False,
    return_attn_probs=False,
):  # fmt: skip
    """As AITER's of 2025-11: rows without keys are NaN without a mask, and of lse log n with one; padding is what was there."""
    assert (min_seqlen_q, dropout_p, logits_soft_cap) == (0, 0.0, 0.0)
    out = torch.full((q.shape[0], q.shape[1], v.shape[2]), float("nan"), dtype=q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"))
    for request in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(*cu[request : request + 2].tolist()) for cu in (cu_seqlens_q, cu_seqlens_k))
        o, s = attend(q[rows], k[keys], v[keys], softmax_scale, causal=causal)
        blind = s.isneginf()
        out[rows] = o.to(q.dtype).masked_fill(blind.T[..., None], 0.0 if causal else float("nan"))
        lse[:, rows] = s.float().masked_fill(blind, 3.0 if causal else float("nan"))
    return (out, lse) if return_lse else out


class Prefill:
    """Packed requests with rows of padding at the end of q, and NaN after the last key."""

    def __init__(self, query_lens: list[int], key_lens: list[int], heads: int = 2) -> None:
        generator = torch.Generator().manual_seed(3)
        tokens, keys = sum(query_lens) + 2, sum(key_lens) + 2
        self.q, self.k = (torch.randn(n, heads, 192, generator=generator).bfloat16() for n in (tokens, keys))
        self.v = torch.randn(keys, heads, 128, generator=generator).bfloat16()
        self.k[-2:], self.v[-2:] = float("nan"), float("nan")
        cu = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (query_lens, key_lens)]
        self.rest = (cu[0], cu[1], max(query_lens, default=0), max(key_lens, default=0), SCALE)

    def by(self, function: Any, *, causal: bool, with_lse: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, heads, _ = self.q.shape
        out = torch.full((128, heads, tokens), float("nan"), dtype=torch.bfloat16).permute(2, 1, 0)
        lse = torch.full((heads, tokens), float("nan"))
        function(self.q, self.k, self.v, *self.rest, causal=causal, out=out, lse=lse if with_lse else None)
        return out, lse


def ours(*args: Any, **kwargs: Any) -> None:
    prefill.prefill(flash_attn_varlen_func, *args, **kwargs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("query_lens", "key_lens"),
    [([5, 3], [5, 3]), ([2, 4], [9, 6]), ([3, 0, 2], [0, 4, 2]), ([6], [2]), ([0, 0], [3, 3]), ([3, 2], [0, 0]), ([], [])],
)
def test_the_reference(query_lens: list[int], key_lens: list[int], causal: bool) -> None:
    case = Prefill(query_lens, key_lens)
    for got, expected in zip(case.by(ours, causal=causal), case.by(ReferenceMLABackend.mla_prefill, causal=causal), strict=True):
        torch.testing.assert_close(got.float(), expected.float(), rtol=2**-7, atol=1e-6)  # the same sum, one bf16 step


def test_without_an_lse_none_is_asked_for() -> None:
    case = Prefill([5], [5])
    out, _ = case.by(ours, causal=True, with_lse=False)
    assert torch.equal(out, case.by(ours, causal=True)[0])


def test_heads_are_cut_where_offsets_would_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Prefill([5, 3], [7, 3], heads=5)
    whole = case.by(ours, causal=True)
    heads: list[int] = []

    def counted(**given: Any) -> Any:
        heads.append(given["q"].shape[1])
        return flash_attn_varlen_func(**given)

    # 12 keys of 192 numbers: two heads fit
    monkeypatch.setattr(prefill, "OFFSET_LIMIT", 2 * 12 * 192 * 2)
    cut = case.by(lambda *args, **kwargs: prefill.prefill(counted, *args, **kwargs), causal=True)
    assert heads == [2, 2, 1]
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_the_first_token_that_wraps() -> None:
    def groups(tokens: int) -> int:
        q = torch.empty(tokens, 128, 192, dtype=torch.bfloat16, device="meta")
        return len(prefill.head_groups(q, q[:1], q[:1, :, :128]))

    assert groups(87_381) == 0
    assert groups(87_382) > 1


def test_what_lies_too_far_apart_is_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Prefill([5, 3], [7, 3])
    whole = case.by(ours, causal=True)
    case.k = torch.cat([case.k, case.k], -1)[..., :192]
    dense: list[bool] = []

    def looked_at(**given: Any) -> Any:
        dense.append(given["k"].is_contiguous())
        return flash_attn_varlen_func(**given)

    for limit in (2 * 12 * 192 * 2 * 2, 2 * 12 * 192 * 2):  # 12 keys of 2 heads as they lie, and dense
        monkeypatch.setattr(prefill, "OFFSET_LIMIT", limit)
        got = case.by(lambda *args, **kwargs: prefill.prefill(looked_at, *args, **kwargs), causal=True)
        assert all(torch.equal(a, b) for a, b in zip(whole, got, strict=True))
    assert dense == [False, True]


def test_an_lse_that_is_not_there() -> None:
    case = Prefill([5], [5])
    with pytest.raises(RuntimeError, match="returned no LSE"):
        case.by(lambda *args, **kwargs: prefill.prefill(lambda **given: flash_attn_varlen_func(**given)[0], *args, **kwargs), causal=True)
