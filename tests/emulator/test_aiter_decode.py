"""AITER's own decode and prefill machine code against float64, on gfx942 and gfx950.

The whole grid of the mqa16 kernel (every kv_len 1..200, batches to 4, splits to 4) is `python tests/emulator/test_aiter_decode.py`,
two numbers after it restricting the lengths; here are its corners and a pairwise walk through it. Every output element is held to
an error budget (`Reference.budget`): what rounding P to bf16 (or fp8) and the result to bf16 can do to it; the lse to 1e-5.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
from emulator_problems import latent

from dualmla.emulator import Device, Mode
from dualmla.emulator.aiter_kernels import Work, absorbed_prefill, decode, from_bf16, merge_partials, persistent_decode
from dualmla.emulator.aiter_objects import ABSORBED_PREFILL, DECODE, KERNELS, PERSISTENT, find_code_objects, load_kernel

MQA16 = "mla_dec_stage1_bf16_a16w16_subQ16_mqa16"
LSE = 1e-5

ONE_SPLIT_ONLY = ("gfx950", "mla_a8w8_qh16_qseqlen4_gqaratio16")
"""Its partials are misplaced with more: docs/aiter-findings.md, number 15."""

INTERLEAVED = Mode(turn=4)
"""Near lockstep. The fp8 kernels of 16 heads need it: see docs/aiter-findings.md, number 7."""


def run_decode(hsa, arch, name, p, *, query_len=1, splits=1, mode=None, **options):
    return decode(
        Device(arch),
        load_kernel(hsa, arch, name),
        KERNELS[name],
        q=p.q,
        kv=p.kv,
        kv_indptr=p.kv_indptr,
        kv_indices=p.kv_indices,
        softmax_scale=p.softmax_scale,
        query_len=query_len,
        splits=splits,
        mode=mode,
        **options,
    )


def worst(got, expected, budget=1.0):
    """The largest error in units of the budget; a NaN counts as infinite."""
    return float((np.nan_to_num(np.abs(got - expected), nan=np.inf) / budget).max())


def check_mqa16(hsa, arch, kv_lens, splits, mode=None, seed=0):
    p = latent(kv_lens, seed=seed)
    got = run_decode(hsa, arch, MQA16, p, splits=splits, mode=mode)
    for sequence, kv_len in enumerate(kv_lens):
        assert got.partial_written[sequence].all(1).tolist() == [s < -(-kv_len // 64) for s in range(splits)], (
            "splits without tokens write nothing"
        )
    out, lse = merge_partials(got)
    expected = p.reference()
    assert worst(out, expected.out, expected.budget(7, bf16_result=False)) < 1, (kv_lens, splits)
    assert worst(lse, expected.lse) < LSE, (kv_lens, splits)
    assert got.report.findings == [], (kv_lens, splits)


@pytest.mark.parametrize("kv_len", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 200])
def test_mqa16_corners(hsa, kv_len):
    for splits in (1, 4):
        check_mqa16(hsa, "gfx942", [kv_len], splits, seed=kv_len)


def test_mqa16_pairwise(hsa):
    """Every (batch, splits) pair; kv_lens walk with a stride coprime to 200, so that the sequences differ."""
    for step, (batch, splits) in enumerate(itertools.product(range(1, 5), range(1, 5))):
        check_mqa16(hsa, "gfx942", [1 + (37 * (step + 5 * b)) % 200 for b in range(batch)], splits, seed=step)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_mqa16_many_blocks(hsa, arch):
    check_mqa16(hsa, arch, [1024, 333], 3)


@pytest.mark.parametrize(
    "mode",
    [
        Mode(turn=1),
        Mode(turn=8, order=(3, 1, 0, 2)),
        Mode(delayed=True),
        Mode(delayed=True, turn=8, watch_lds=True),
        Mode(watch_lds=True, order=(3, 2, 1, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_mqa16_under_every_schedule(hsa, arch, mode):
    """The kernel needs no luck: other interleavings, loads as late as its waits allow, and no race is seen."""
    check_mqa16(hsa, arch, [130, 200], 2, mode=mode)


def test_an_instruction_count_is_exact(hsa):
    """What 64 tokens cost; a change of either number is a change of the code object or of the interpreter."""
    report = run_decode(hsa, "gfx942", MQA16, latent([64])).report
    assert report.executed == 5236
    assert report.by_opcode()["V_MFMA_F32_16X16X16_BF16"] == 4 * (576 // 16 + 512 // 16)


def cases(family):
    found = [(arch, name) for name, kernel in KERNELS.items() if kernel.family == family for arch in kernel.archs if name != MQA16]
    return [pytest.param(arch, name, id=f"{arch}-{name}") for arch, name in found]


def check_results(got, p, kernel):
    """Partials merged, or the bf16 rows that one split leaves."""
    expected = p.reference()
    p_bits = 3 if kernel.q_bytes == 1 else 7
    if got.partial_written.any():
        out, lse = merge_partials(got)
        assert worst(lse, expected.lse) < LSE
        assert worst(out, expected.out, expected.budget(p_bits, bf16_result=False)) < 1
    else:
        assert worst(got.out, expected.out, expected.budget(p_bits, bf16_result=True)) < 1


@pytest.mark.parametrize(("arch", "name"), cases(DECODE))
def test_decode_kernel(hsa, arch, name):
    kernel = KERNELS[name]
    kv_lens = {1: [1, 64, 132], 2: [200, 333]}
    for query_len, splits in itertools.product(kernel.query_lens, (1,) if (arch, name) == ONE_SPLIT_ONLY else (1, 2)):
        lengths = [max(n, query_len) for n in kv_lens[splits]]
        p = latent(
            lengths, heads=kernel.heads, query_lens=query_len, q_bytes=kernel.q_bytes, kv_bytes=kernel.kv_bytes, arch=arch, seed=splits
        )
        got = run_decode(hsa, arch, name, p, query_len=query_len, splits=splits, mode=INTERLEAVED)
        check_results(got, p, kernel)


@pytest.mark.parametrize(("arch", "name"), cases(PERSISTENT))
def test_persistent_kernel(hsa, arch, name):
    """One workgroup with two whole sequences and another that shares a third in two partial pieces."""
    kernel = KERNELS[name]
    for query_len in kernel.query_lens:
        p = latent([70, 64, 400], heads=kernel.heads, query_lens=query_len, q_bytes=kernel.q_bytes, kv_bytes=kernel.kv_bytes, arch=arch)
        works = [[Work(0, 0, 70), Work(1, 0, 64)], [Work(2, 0, 256, 0)], [Work(2, 256, 400, query_len)]]
        got = persistent_decode(
            Device(arch),
            load_kernel(hsa, arch, name),
            kernel,
            q=p.q,
            kv=p.kv,
            qo_indptr=p.qo_indptr,
            kv_indptr=p.kv_indptr,
            kv_indices=p.kv_indices,
            works=works,
            softmax_scale=p.softmax_scale,
            mode=INTERLEAVED,
        )
        expected = p.reference()
        final, shared = slice(0, 2 * query_len), slice(2 * query_len, 3 * query_len)
        p_bits = 3 if kernel.q_bytes == 1 else 7
        assert worst(got.out[final], expected.out[final], expected.budget(p_bits, bf16_result=True)[final]) < 1
        assert np.isnan(got.out[shared]).all(), "rows with partials are left to the reduction"
        parts = got.partial_out.reshape(2, query_len, kernel.heads, 512).astype(np.float64)
        lse = got.partial_lse.reshape(2, query_len, kernel.heads).astype(np.float64)
        weights = np.exp(lse - np.logaddexp(*lse))
        budget = expected.budget(p_bits, bf16_result=False)[shared]
        assert worst((weights[..., None] * parts).sum(0), expected.out[shared], budget) < 1
        assert worst(np.logaddexp(*lse), expected.lse[shared]) < LSE


@pytest.mark.parametrize(("arch", "name"), cases(ABSORBED_PREFILL))
def test_absorbed_prefill_kernel(hsa, arch, name):
    kernel = KERNELS[name]
    for query_lens, kv_lens in (([8], [64]), ([3, 17, 1], [70, 17, 130])):
        p = latent(kv_lens, heads=kernel.heads, query_lens=query_lens)
        got = absorbed_prefill(
            Device(arch),
            load_kernel(hsa, arch, name),
            q=p.q,
            kv=p.kv,
            qo_indptr=p.qo_indptr,
            kv_indptr=p.kv_indptr,
            kv_indices=p.kv_indices,
            softmax_scale=p.softmax_scale,
            mode=INTERLEAVED,
        )
        check_results(got, p, kernel)


def test_bf16_of_the_references_inputs_is_exact():
    p = latent([5])
    assert (from_bf16(p.kv) == p.kv64).all()


def whole_grid(first: int = 1, last: int = 200) -> None:
    """Every kv_len first..last x batch 1..4 x splits 1..4 of the mqa16 kernel on gfx942."""
    hsa = find_code_objects()
    for kv_len in range(first, last + 1):
        for batch, splits in itertools.product(range(1, 5), range(1, 5)):
            check_mqa16(hsa, "gfx942", [1 + (kv_len - 1 + 61 * b) % 200 for b in range(batch)], splits, seed=kv_len)
        print(f"\rkv_len {kv_len}/200: 16 cases agree", end="", file=sys.stderr)
    print(f"\n{16 * (last - first + 1)} cases agree with float64", file=sys.stderr)


if __name__ == "__main__":
    whole_grid(*map(int, sys.argv[1:]))
