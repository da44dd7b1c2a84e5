"""What AITER's kernels really do: each entry of docs/aiter-findings.md as a run of its code object.

A test here that fails after a change of AITER is news, not a defect of ours: the entry no longer holds.
"""

from __future__ import annotations

import numpy as np
import pytest
from emulator_problems import attend, latent, ragged
from test_aiter_decode import INTERLEAVED, MQA16, run_decode, worst
from test_aiter_prefill import KERNEL, run_prefill

from dualmla.emulator import Device, Mode
from dualmla.emulator.aiter_kernels import (
    Work,
    absorbed_prefill,
    decode,
    from_bf16,
    merge_partials,
    persistent_decode,
    to_bf16,
    varlen_prefill,
)
from dualmla.emulator.aiter_objects import KERNELS, load_kernel
from dualmla.emulator.memory import PAGE
from dualmla.emulator.translate import translate

MASK1 = "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1"
MQA128 = "mla_dec_stage1_bf16_a16w16_subQ128_mqa128"
MASK1_PS = "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_ps"
FP8_Q1, FP8_Q4 = "mla_a8w8_qh16_qseqlen1_gqaratio16", "mla_a8w8_qh16_qseqlen4_gqaratio16"
PFL = "mla_pfl_bf16_a16w16_causal_subQ16_mqa16"
MISSING_WAIT = "register used before its load was waited for"
BOTH = pytest.mark.parametrize("arch", ["gfx942", "gfx950"])


def persistent(hsa, arch, p, works, name=MASK1_PS, mode=INTERLEAVED):
    return persistent_decode(
        Device(arch),
        load_kernel(hsa, arch, name),
        KERNELS[name],
        q=p.q,
        kv=p.kv,
        qo_indptr=p.qo_indptr,
        kv_indptr=p.kv_indptr,
        kv_indices=p.kv_indices,
        works=works,
        softmax_scale=p.softmax_scale,
        mode=mode,
    )


@BOTH
def test_1_lse_is_natural_and_partials_are_normalised(hsa, arch):
    p = latent([100])
    got, expected = run_decode(hsa, arch, MQA16, p), p.reference()
    assert worst(got.partial_lse[:, 0], expected.lse) < 1e-5
    assert worst(got.partial_out[:, 0], expected.out, expected.budget(7, bf16_result=False)) < 1


@pytest.mark.parametrize(("name", "block"), [(MQA16, 64), (MASK1, 16)])
def test_2_splits_take_turns_of_a_block_and_empty_ones_write_nothing(hsa, name, block):
    splits, kv_len = 4, 3 * block - 5
    p = latent([kv_len])
    got = run_decode(hsa, "gfx942", name, p, splits=splits)
    assert got.partial_written[0].all(1).tolist() == [True, True, True, False]
    for split in range(3):
        keys = p.keys(0)[split * block : (split + 1) * block]
        out, lse, magnitude = attend(p.q64[0], keys, p.softmax_scale)
        assert worst(got.partial_out[0, split], out, magnitude * 2.0**-8 + 1e-6) < 1
        assert worst(got.partial_lse[0, split], lse) < 1e-5


@pytest.mark.parametrize("name", [MASK1, MQA128, FP8_Q1])
def test_3_one_split_leaves_bf16_in_the_partial_buffer_and_no_lse(hsa, name):
    kernel = KERNELS[name]
    p = latent([90], heads=kernel.heads, q_bytes=kernel.q_bytes, kv_bytes=kernel.kv_bytes)
    got, expected = run_decode(hsa, "gfx942", name, p, mode=INTERLEAVED), p.reference()
    assert not got.partial_written.any()
    assert worst(got.out, expected.out, expected.budget(3 if kernel.q_bytes == 1 else 7, bf16_result=True)) < 1


@BOTH
@pytest.mark.parametrize(("kv_len", "poisoned"), [(64, False), (128, False), (130, True), (200, True)])
def test_4_the_tail_reads_row_0_of_the_cache(hsa, arch, kv_len, poisoned):
    """Row 0 belongs to nobody here; NaN in it reaches every output of an unfinished block of 64. A finite row 0 does not."""
    p = latent([kv_len])
    assert 0 not in p.kv_indices
    p.kv[0] = 0x7FC0
    assert np.isnan(run_decode(hsa, arch, MQA16, p).partial_out).any() == poisoned
    p.kv[0] = to_bf16(np.float32(3e38))
    expected = p.reference()
    assert worst(run_decode(hsa, arch, MQA16, p).partial_out[:, 0], expected.out, expected.budget(7, bf16_result=False)) < 1


@BOTH
def test_5_kv_offsets_wrap_at_4_gib(hsa, arch):
    """Cache row 3,728,271 starts 896 bytes past 4 GiB; the kernel reads 896 bytes past the cache's beginning instead."""
    p = latent([1])
    device, row = Device(arch), -(-(2**32) // 1152)
    low = to_bf16(np.random.default_rng(1).standard_normal(PAGE // 2, np.float32))
    high = to_bf16(np.random.default_rng(2).standard_normal(PAGE // 2, np.float32))
    base = device.memory.put(low)
    device.memory.put(high, address=base + 2**32)
    got = run_decode_on(device, hsa, arch, p, kv=base, row=row)
    place = (row * 1152 - 2**32) // 2
    wrapped, right = (from_bf16(x[place : place + 512]).astype(np.float64) for x in (low, high))
    assert worst(got, wrapped) < 1e-6
    assert worst(got, right) > 1


def run_decode_on(device, hsa, arch, p, *, kv, row):
    """One key: the output is its value row."""
    got = decode(
        device,
        load_kernel(hsa, arch, MQA16),
        KERNELS[MQA16],
        q=p.q,
        kv=p.kv,
        kv_indptr=[0, 1],
        kv_indices=np.array([row]),
        softmax_scale=p.softmax_scale,
        fields={"kv": kv},
    )
    return got.partial_out[0, 0]


def test_6_p_is_rounded_to_bf16_half_up(hsa):
    """The rounding adds 0x7FFF and 1, whatever the last kept bit: `v_add3_u32 x, 0x7FFF, 1` before the halves are packed."""
    listing = translate(load_kernel(hsa, "gfx942", MQA16)).listing
    adds = [instruction for instruction in listing if instruction.name == "V_ADD3_U32"]
    assert adds
    assert {instruction["src2"] for instruction in adds} == {129}
    (register,) = {instruction["src1"] for instruction in adds}
    constants = [i.get("literal") for i in listing if i.name == "V_MOV_B32" and i["vdst"] == register and i["src0"] == 255]
    assert constants == [0x7FFF]


@BOTH
@pytest.mark.parametrize("name", [FP8_Q1, FP8_Q4])
def test_7_fp8_kernels_of_16_heads_race_in_lds(hsa, arch, name):
    """Right while the waves run in near lockstep, wrong when one runs ahead to its next barrier."""
    query_len = KERNELS[name].query_lens[-1]
    p = latent([200], query_lens=query_len, q_bytes=1, kv_bytes=1, arch=arch)
    expected = p.reference()
    errors = []
    for mode in (Mode(turn=4, watch_lds=True), Mode(watch_lds=True)):
        got = run_decode(hsa, arch, name, p, query_len=query_len, mode=mode)
        errors.append(worst(got.out, expected.out, expected.budget(3, bf16_result=True)))
        assert any(finding.kind.startswith("LDS race") for finding in got.report.findings)
    assert errors[0] < 1
    assert errors[1] > 5


@BOTH
def test_8_last_page_lengths_and_page_size_are_ignored(hsa, arch):
    p = latent([150])
    plain = run_decode(hsa, arch, MQA16, p)
    junk = run_decode(hsa, arch, MQA16, p, fields={"kv_last_page_lens": 0xDEAD0000, "log2_page_size": 5})
    assert (plain.partial_out == junk.partial_out).all()


@BOTH
def test_9_persistent_decode_breaks_causality(hsa, arch):
    """Two query tokens, 65 keys, the last key in a work item of its own: row 0 may not see it, and does."""
    p = latent([65], query_lens=2)
    got = persistent(hsa, arch, p, [[Work(0, 0, 64, 0)], [Work(0, 64, 65, 2)]])
    _, lse, _ = attend(p.q64[0], p.keys(0)[64:], p.softmax_scale)
    assert worst(got.partial_lse[2, 0], lse) < 1e-5, "the LSE of a key that row 0 may not see"
    whole = run_decode(hsa, arch, MASK1, p, query_len=2)
    expected = p.reference()
    assert worst(whole.out, expected.out, expected.budget(7, bf16_result=True)) < 1, "the non-persistent kernel is right"


@BOTH
@pytest.mark.parametrize("name", [MASK1, MQA128])
def test_10_a_page_index_is_used_without_a_wait(hsa, arch, name):
    p = latent([400], heads=KERNELS[name].heads)
    got = run_decode(hsa, arch, name, p, mode=Mode(delayed=True, turn=8))
    missing = [finding for finding in got.report.findings if finding.kind == MISSING_WAIT]
    (load,) = {finding.instruction for finding in missing}
    assert load.startswith("BUFFER_LOAD_DWORD at ")
    assert {str(finding.other).split()[0] for finding in missing} == {"V_MUL_U32_U24"}
    expected = p.reference()
    assert worst(got.out, expected.out, expected.budget(7, bf16_result=True)) > 5
    clean = run_decode(hsa, arch, MQA16, latent([400]), mode=Mode(delayed=True, turn=8))
    assert clean.report.findings == []


@BOTH
def test_11_an_empty_work_item_ends_a_persistent_workgroup(hsa, arch):
    p = latent([70, 0, 33, 40])
    got = persistent(hsa, arch, p, [[Work(b, 0, n) for b, n in enumerate([70, 0, 33, 40])]])
    assert np.isfinite(got.out[0]).all()
    assert np.isnan(got.out[1:]).all()


@pytest.mark.parametrize(("token", "right"), [(87381, True), (87382, False)])
def test_12_prefill_offsets_are_32_bits(hsa, token, right):
    """128 heads make rows of 49,152 bytes: token 87,382 lies past 4 GiB and the query is read from near the beginning."""
    p = ragged([1], [64], 1)
    device, stride = Device("gfx950"), 128 * 192 * 2
    other = to_bf16(np.random.default_rng(5).standard_normal(PAGE // 2, np.float32))
    base = device.memory.put(other)
    here = token * stride
    page = np.full(PAGE // 2, 0, np.uint16)
    place = here % PAGE // 2
    page[place : place + 192] = p.q[0, 0]
    device.memory.put(page, address=base + here - here % PAGE)
    device.memory.put(page * 0, address=base + here - here % PAGE + PAGE)  # what a tile reads beyond the row
    starts = device.put(np.array([token, token + 1], np.int32)).address
    fields = {"q": base, "q_row_stride": stride, "q_tile_stride": stride * 128, "q_starts": starts}
    fields |= {"out_row_stride": 256, "lse_head_stride": 4}
    out = device.empty((token + 1, 128), np.uint16)
    lse = device.empty((token + 1,), np.float32)
    varlen_prefill(
        device,
        load_kernel(hsa, "gfx950", KERNEL[True]),
        q=p.q,
        k=p.k,
        v=p.v,
        cu_seqlens_q=[0, 1],
        cu_seqlens_k=[0, 64],
        softmax_scale=p.softmax_scale,
        causal=True,
        fields=fields | {"out": out.address, "lse": lse.address},
        mode=Mode(turn=8),
    )
    expected = p.reference(True)
    error = worst(from_bf16(out.numpy()[token]), expected.out[0, 0], expected.budget(7, bf16_result=True)[0, 0])
    assert (error < 1) == right


@BOTH
def test_13_absorbed_prefill_writes_no_lse(hsa, arch):
    p = latent([64], query_lens=8)
    got = absorbed_prefill(
        Device(arch),
        load_kernel(hsa, arch, PFL),
        q=p.q,
        kv=p.kv,
        qo_indptr=p.qo_indptr,
        kv_indptr=p.kv_indptr,
        kv_indices=p.kv_indices,
        softmax_scale=p.softmax_scale,
        mode=INTERLEAVED,
    )
    assert not got.partial_written.any()


@pytest.mark.parametrize("causal", [True, False])
def test_13_prefill_of_a_sequence_without_keys(hsa, causal):
    p = ragged([64, 64], [64, 0], 1)
    got = run_prefill(hsa, p, causal)
    empty_out, empty_lse = got.out[64:], got.lse[0, 64:]
    if causal:
        assert (empty_out == 0).all()
        assert (empty_lse == -np.inf).all()
    else:
        assert np.isnan(empty_out).all()
        assert np.isnan(empty_lse).all()


@pytest.mark.parametrize("causal", [True, False])
def test_14_prefill_races_in_lds(hsa, causal):
    got = run_prefill(hsa, ragged([130], [300], 1), causal, mode=Mode(turn=8, watch_lds=True))
    assert any(finding.kind.startswith("LDS race") for finding in got.report.findings)


def test_15_gfx950_fp8_partials_of_3_and_4_tokens_overwrite_each_other(hsa):
    """With two splits the rows of later tokens are never written: every split stores at the same place. gfx942 is right."""
    written = {}
    for arch in ("gfx942", "gfx950"):
        p = latent([200], query_lens=4, q_bytes=1, kv_bytes=1, arch=arch)
        got = run_decode(hsa, arch, FP8_Q4, p, query_len=4, splits=2, mode=INTERLEAVED)
        written[arch] = np.isfinite(got.partial_out).all((1, 2, 3)).tolist()
    assert written == {"gfx942": [True] * 4, "gfx950": [True, True, False, False]}


@pytest.mark.parametrize(("kv_len", "wrong_tokens"), [(64, []), (65, [3]), (66, [2, 3]), (67, []), (129, [3]), (130, [2, 3])])
def test_16_gfx950_fp8_mask_at_a_block_boundary(hsa, kv_len, wrong_tokens):
    """Four tokens: those that see one or two keys of a new block of 64, while the first sees none, are wrong. gfx942 is right."""
    for arch, wrong in (("gfx942", []), ("gfx950", wrong_tokens)):
        p = latent([kv_len], query_lens=4, q_bytes=1, kv_bytes=1, arch=arch)
        got = run_decode(hsa, arch, FP8_Q4, p, query_len=4, mode=INTERLEAVED)
        expected = p.reference()
        error = np.abs(got.out - expected.out) / expected.budget(3, bf16_result=True)
        assert np.flatnonzero(~(error.max((1, 2)) < 1)).tolist() == wrong


@BOTH
@pytest.mark.parametrize(
    ("name", "load", "use"),
    [
        ("mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps", "DS_READ_B128", "V_MFMA_F32_16X16X16_BF16"),
        ("mla_a8w8_qh16_qseqlen4_gqaratio16_ps", "S_LOAD_DWORD", "V_MUL_F32"),
    ],
)
def test_17_more_loads_are_used_without_a_wait(hsa, arch, name, load, use):
    """LDS reads feeding matrix instructions (a wait for 9 where at most 6 are outstanding), and the fp8 scales."""
    kernel = KERNELS[name]
    p = latent([400], query_lens=4, q_bytes=kernel.q_bytes, kv_bytes=1, arch=arch)
    got = persistent(hsa, arch, p, [[Work(0, 0, 400)]], name, Mode(delayed=True, turn=4))
    pairs = {(f.instruction.split()[0], str(f.other).split()[0]) for f in got.report.findings if f.kind == MISSING_WAIT}
    assert (load, use) in pairs


@BOTH
@pytest.mark.parametrize(("name", "follows"), [(MQA16, False), (MASK1, True), (MQA128, True)])
def test_18_mqa16_puts_request_b_into_row_b(hsa, arch, name, follows):
    """Requests of 1, 0 and 1 query tokens: row 1 is of request 2. mqa16 gives it the keys of request 1, the others look at qo_indptr."""
    p = latent([9, 7, 66], heads=KERNELS[name].heads)  # the third row is padding
    device = Device(arch)
    got = decode(
        device,
        load_kernel(hsa, arch, name),
        KERNELS[name],
        q=p.q,
        kv=p.kv,
        kv_indptr=p.kv_indptr,
        kv_indices=p.kv_indices,
        softmax_scale=p.softmax_scale,
        splits=2,
        fields={"qo_indptr": device.put(np.array([0, 1, 1, 2], np.int32)).address},
    )
    with np.errstate(invalid="ignore"):  # a row that nobody writes
        out, _ = merge_partials(got)
    right, wrong = (attend(p.q64[1], p.keys(request), p.softmax_scale)[0] for request in (2, 1))
    assert worst(out[1], right if follows else wrong) < 0.02
    assert worst(out[1], wrong if follows else right) > 0.1
    assert got.partial_written[2].any() != follows, "the row of padding is written"
