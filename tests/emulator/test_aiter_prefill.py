"""AITER's varlen prefill machine code (gfx950, q and k 192 wide, v 128) against float64."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_problems import Ragged, ragged

from dualmla.emulator import Device, Mode
from dualmla.emulator.aiter_kernels import batch_prefill, varlen_prefill
from dualmla.emulator.aiter_objects import load_kernel

KERNEL = {True: "fwd_hd192_hd128_bf16_causal_group", False: "fwd_hd192_hd128_bf16_group"}
INTERLEAVED = Mode(turn=8)


def run_prefill(hsa, p: Ragged, causal: bool, mode=INTERLEAVED, **options):
    return varlen_prefill(
        Device("gfx950"),
        load_kernel(hsa, "gfx950", KERNEL[causal]),
        q=p.q,
        k=p.k,
        v=p.v,
        cu_seqlens_q=p.cu_q,
        cu_seqlens_k=p.cu_k,
        softmax_scale=p.softmax_scale,
        causal=causal,
        mode=mode,
        **options,
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("q_lens", "k_lens", "heads"),
    [([1], [1], 1), ([5, 130, 1], [5, 130, 1], 2), ([5, 130, 33], [77, 257, 129], 2), ([257], [300], 1), ([64, 3], [512, 1], 1)],
    ids=str,
)
def test_varlen_prefill(hsa, causal, q_lens, k_lens, heads):
    """Rows that see a key agree with float64; those that see none (more queries than keys) are AITER's own business."""
    p = ragged(q_lens, k_lens, heads)
    got = run_prefill(hsa, p, causal)
    expected = p.reference(causal)
    sees = np.isfinite(expected.lse)
    error = np.abs(got.out - expected.out)[sees] / expected.budget(7, bf16_result=True)[sees]
    assert np.nan_to_num(error, nan=np.inf).max() < 1
    assert np.abs(got.lse.T[sees] - expected.lse[sees]).max() < 1e-5


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_len", "kv_len"), [(64, 64), (130, 257)])
def test_batch_prefill(hsa, causal, q_len, kv_len):
    """The kernels for sequences of one length."""
    p = ragged([q_len] * 2, [kv_len] * 2, 2)
    name = f"fwd_hd192_hd128_bf16{'_causal' if causal else ''}"
    code = load_kernel(hsa, "gfx950", name)
    options = {"q": p.q, "k": p.k, "v": p.v, "batch": 2, "softmax_scale": p.softmax_scale, "causal": causal, "mode": INTERLEAVED}
    got, expected = batch_prefill(Device("gfx950"), code, **options), p.reference(causal)
    assert (np.abs(got.out - expected.out) / expected.budget(7, bf16_result=True)).max() < 1
    assert np.abs(got.lse.T - expected.lse).max() < 1e-5


def test_grouped_heads(hsa):
    p = ragged([40], [140], 3, kv_heads=1)
    got, expected = run_prefill(hsa, p, True), p.reference(True)
    assert (np.abs(got.out - expected.out) / expected.budget(7, bf16_result=True)).max() < 1


def test_what_follows_the_last_row_is_not_read_into_a_result(hsa):
    """NaN in every row after the last: nothing changes."""
    p = ragged([100], [100], 1)
    clean = run_prefill(hsa, p, True)
    tail = np.full((60, 1, 192), 0x7FC0, np.uint16)
    p.q, p.k, p.v = np.concatenate([p.q, tail]), np.concatenate([p.k, tail]), np.concatenate([p.v, tail[..., :128]])
    assert (run_prefill(hsa, p, True).out[:100] == clean.out).all()
