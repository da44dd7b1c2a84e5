"""The call of AITER against the reference, with a stand-in for AITER of each generation, on the CPU."""

from __future__ import annotations

import dataclasses

import aiter_stand_in as stand_in
import pytest
import torch
from aiter_case import SCALE, UNUSED_PAGE, Case

from dualmla import advance_step
from dualmla.backends.aiter import launch
from dualmla.backends.aiter.batch import tell
from dualmla.backends.aiter.signatures import Aiter, describe
from dualmla.backends.aiter.support import LaunchShape
from dualmla_kernels.token_slots import token_slots


def agree(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Both are float64 sums rounded once to bf16; another order of summing can change the rounding, so one bf16 step."""
    torch.testing.assert_close(got.float(), expected.float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("generation", stand_in.GENERATIONS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("query_len", [1, 2, 3, 4])
def test_every_generation_gives_the_reference(generation: str, page_size: int, query_len: int) -> None:
    case = Case([70, 64, 5, 33], [query_len] * 4, page_size=page_size)
    agree(case.decoded(stand_in.module(generation))[0], case.reference()[0])


@pytest.mark.parametrize("heads", [1, 3, 4, 8, 16, 17, 63, 128])
@pytest.mark.parametrize("query_len", [1, 3])
def test_head_counts_are_repeated_to_one_that_has_a_kernel(heads: int, query_len: int) -> None:
    case = Case([20, 7], [query_len] * 2, heads=heads)
    for generation in ("S2", "S8"):
        mla = stand_in.module(generation)
        agree(case.decoded(mla)[0], case.reference()[0])
        expected = 16 if heads <= 16 else 32 if heads <= 32 and generation == "S8" else 128
        assert mla.calls[0]["q"].shape[1] == expected


@pytest.mark.parametrize("generation", ["S0", "S2", "S8"])
@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "padding"),
    [
        ([9, 0, 5], [1, 1, 1], 0),  # no keys
        ([0, 0], [1, 1], 0),
        ([9, 7, 5], [1, 0, 1], 0),  # no query: a kernel for one token would misplace the rows after it
        ([9, 7, 5], [0, 0, 1], 2),
        ([9, 7], [1, 0], 0),  # fewer rows than requests
        ([9, 7], [1, 1], 3),  # rows of padding
        ([9, 70, 66], [4, 1, 2], 0),  # ragged
        ([9, 70, 66], [3, 0, 2], 2),
        ([2, 3, 70], [4, 4, 4], 1),  # fewer keys than queries
        ([12, 40], [9, 2], 0),  # longer than any kernel takes: one request a token
    ],
)
def test_rows_without_keys_or_queries(generation: str, seq_lens: list[int], query_lens: list[int], padding: int) -> None:
    for page_size in (1, 3):
        case = Case(seq_lens, query_lens, page_size=page_size, padding=padding)
        out = case.decoded(stand_in.module(generation))[0]
        agree(out, case.reference()[0])


@pytest.mark.parametrize(("query_lens", "padding"), [([1, 1, 1], 0), ([1, 1, 0], 1), ([1, 0, 1], 1), ([0, 0, 0], 3)])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_replayed_graph_meets_other_batches_than_it_was_captured_with(query_lens: list[int], padding: int, page_size: int) -> None:
    case = Case([9, 70, 33], query_lens, page_size=page_size, padding=padding)
    expected = case.reference()[0]
    # the host knows what was captured: three requests of one token
    case.meta = dataclasses.replace(case.meta, num_tokens=3, max_query_len=1)
    agree(case.decoded(stand_in.module("S2"), captured=True)[0], expected)
    # and the same of lengths that lie on the GPU and were not read
    case.meta = dataclasses.replace(case.meta, exact=False)
    agree(case.decoded(stand_in.module("S2"))[0], expected)


def test_a_plain_batch_is_told_as_it_is() -> None:
    case = Case([9, 70], [1, 1])
    batch = tell(case.meta, LaunchShape(16, 4), 2, causal=True, captured=False)
    assert batch.seen is case.meta.seq_lens
    assert batch.row_of is None
    assert batch.kv_indices.data_ptr() == case.meta.paged_kv_indices.data_ptr()


@pytest.mark.parametrize("query_lens", [[1, 1], [3, 2], [1, 0]])
def test_layers_of_a_step_share_what_is_told(query_lens: list[int]) -> None:
    case = Case([9, 33], query_lens, page_size=4)
    case.kv_cache = case.kv_cache.nan_to_num()  # the rows stepped into
    case.meta.block_table[case.meta.block_table == UNUSED_PAGE] = 0
    mla = stand_in.module("S2")
    for steps in (1, 2):
        for _ in range(3):
            agree(case.decoded(mla)[0], case.reference()[0])
        assert len({call["kv_indices"].data_ptr() for call in mla.calls[-3:]}) == 1
        if steps == 1 and max(query_lens) == 1:  # and a step on is another one
            tokens = torch.zeros(2, dtype=torch.int64)
            advance_step(case.meta, tokens, tokens.clone(), tokens.clone())
    case.decoded(mla, captured=True)  # into a graph that no state knows: within itself
    assert mla.calls[-1]["kv_indices"].data_ptr() != mla.calls[-2]["kv_indices"].data_ptr()


@pytest.mark.parametrize("query_lens", [[1, 1], [3, 2]])
def test_without_a_mask_every_row_sees_every_key(query_lens: list[int]) -> None:
    case = Case([9, 70], query_lens)
    agree(case.decoded(stand_in.module("S2"), causal=False)[0], case.reference(causal=False)[0])


@pytest.mark.parametrize("generation", ["S6", "S7", "S8"])
def test_the_lse_that_is_written_comes_back_in_our_layout(generation: str) -> None:
    case = Case([70, 0, 5], [1, 1, 1], heads=8, padding=1)
    mla = stand_in.module(generation)
    _, lse = case.decoded(mla, with_lse=True, compute_units=3)  # as many as requests: one split would do, and writes no LSE
    torch.testing.assert_close(lse, case.reference()[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("seq_lens", "padding"), [([], 0), ([], 3)])
def test_an_empty_batch_launches_nothing(seq_lens: list[int], padding: int) -> None:
    case = Case(seq_lens, [], padding=padding)
    mla = stand_in.module("S6")
    out, lse = case.decoded(mla, with_lse=True)
    assert not mla.calls
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, float("-inf")))


def test_outputs_and_queries_of_any_stride() -> None:
    case = Case([70, 5], [1, 1], heads=4)
    wide = torch.full((2, 8, 2 * 576), float("nan"), dtype=torch.bfloat16)
    wide[:, ::2, :576] = case.q
    case.q = wide[:, ::2, :576]
    expected = case.reference()[0]
    aiter = describe(stand_in.PACKAGE, stand_in.module("S2"), "stand-in")
    out = torch.full((512, 4, 2), float("nan"), dtype=torch.bfloat16).permute(2, 1, 0)
    launch.decode(
        aiter,
        LaunchShape(16, 4),
        case.q,
        case.kv_cache,
        case.meta,
        SCALE,
        causal=True,
        out=out,
        lse=None,
        k_scale=1.0,
        compute_units=304,
        captured=False,
    )
    agree(out, expected)


def test_cache_row_0_is_made_finite_and_nothing_else_is_touched() -> None:
    case = Case([5], [1])
    before = case.kv_cache.clone()
    case.decoded(stand_in.module("S2"))
    assert bool(case.kv_cache[0].isfinite().all())
    assert torch.equal(case.kv_cache[1:].view(torch.int16), before[1:].view(torch.int16))


def test_the_split_indptr_that_aiter_cached_is_never_used_again() -> None:
    """Before S3 it belongs to the last call of that shape: perhaps to another device, or to a graph that has not run yet."""
    case = Case([5, 9], [1, 1])
    for generation in ("S1", "S2"):
        mla = stand_in.module(generation)
        for _ in range(2):
            case.decoded(mla)
        assert mla.forgotten == [0, 1]
    mla = stand_in.module("S3")
    case.decoded(mla)
    assert mla.calls[0]["num_kv_splits_indptr"] is not None
    assert not mla.forgotten


def test_an_lse_that_was_promised_and_is_not_there() -> None:
    case = Case([5], [1])
    mla = stand_in.module("S6")
    run = mla.mla_decode_fwd
    described = describe(stand_in.PACKAGE, mla, "1.2.3")
    lossy = Aiter(lambda **given: (run(**given)[0], None), described.signature, "1.2.3", None, None, None)
    out, lse = case.buffers()
    with pytest.raises(RuntimeError, match=r"1\.2\.3 returned no LSE"):
        launch.decode(
            lossy,
            LaunchShape(16, 4),
            case.q,
            case.kv_cache,
            case.meta,
            SCALE,
            causal=True,
            out=out,
            lse=lse,
            k_scale=1.0,
            compute_units=304,
            captured=False,
        )


def test_splits_fill_the_device_within_32_bit_offsets() -> None:
    assert launch.num_splits(1, 1, 16, 304, at_least=1) == 16
    assert launch.num_splits(304, 304, 16, 304, at_least=1) == 1
    assert launch.num_splits(152, 152, 16, 304, at_least=1) == 2
    assert launch.num_splits(304, 304, 16, 304, at_least=2) >= 2
    # 4096 rows of 128 heads are 1 GiB of partial results a split
    assert launch.num_splits(4096, 4096, 128, 100_000, at_least=1) == 2


def test_token_slots_end_in_rows_that_are_there() -> None:
    table = torch.tensor([[7, 3, UNUSED_PAGE], [5, UNUSED_PAGE, UNUSED_PAGE]], dtype=torch.int32)
    kv_indptr = torch.tensor([0, 5, 5, 8], dtype=torch.int32)
    slots = token_slots(table, torch.tensor([0, 1, 1], dtype=torch.int32), kv_indptr, 3)
    assert slots[: 8 + 256].tolist() == [21, 22, 23, 9, 10, 15, 16, 17] + [0] * 256
