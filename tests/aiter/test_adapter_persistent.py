"""Persistent decode over a float8 cache: plans in every form that releases had, the cases that break AITER's kernels, and graphs."""

from __future__ import annotations

import copy
import itertools
import pickle

import aiter_stand_in as stand_in
import pytest
import torch
from aiter_case import SCALE, UNUSED_PAGE, Case

from dualmla import MLAConfig, MLAGraphState, advance_step
from dualmla.backends.aiter import launch
from dualmla.backends.aiter.planner import find_planner
from dualmla.backends.aiter.signatures import describe
from dualmla.backends.aiter.support import LaunchShape
from dualmla.emulator import aiter_plan
from dualmla.metadata import MLAMetadataBuilder

FNUZ = "float8_e4m3fnuz"
PERSISTENT_GENERATIONS = stand_in.GENERATIONS[2:]


def agree(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Both are float64 sums; one was rounded to fp32 in parts, and both once to bf16: one bf16 step."""
    torch.testing.assert_close(got.float(), expected.float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("form", stand_in.PLANNERS)
def test_every_form_of_the_plan_is_asked_for_in_the_right_order(form: str) -> None:
    case = Case([70, 300, 5], [1, 1, 1], cache=FNUZ, k_scale=0.375)
    package, mla = stand_in.package(form), stand_in.module("S2")
    agree(case.decoded(mla, package)[0], case.reference()[0])
    (planned,) = package.planned
    if form in ("M19", "M20", "M22", "M23", "M28"):
        assert (planned["dtype_q"], planned["dtype_kv"]) == (torch.bfloat16, torch.float8_e4m3fnuz)
    if form == "M26":
        assert [planned[f"dtype_{x}"] for x in ("q_nope", "q_rope", "kv_nope", "kv_rope")] == [torch.bfloat16] * 2 + [
            case.kv_cache.dtype
        ] * 2


@pytest.mark.parametrize("generation", PERSISTENT_GENERATIONS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("cache", [FNUZ, "float8_e4m3fn"])
def test_every_generation_gives_the_reference(generation: str, page_size: int, cache: str) -> None:
    case = Case([70, 64, 300, 33], [1, 2, 4, 1], page_size=page_size, cache=cache, k_scale=1.5, padding=2)
    agree(case.decoded(stand_in.module(generation), stand_in.package())[0], case.reference()[0])


@pytest.mark.parametrize("heads", [1, 8, 16, 17, 40, 128])
def test_heads_go_sixteen_at_a_time_by_one_plan(heads: int) -> None:
    case = Case([70, 200], [1, 1], heads=heads, cache=FNUZ)
    package, mla = stand_in.package(), stand_in.module("S2")
    agree(case.decoded(mla, package)[0], case.reference()[0])
    assert len(mla.calls) == -(-heads // 16)
    assert len(package.planned) == 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "padding"),
    [
        ([70, 0, 33, 40], [1, 1, 1, 1], 0),  # finding 11: the empty item would end the workgroup
        ([0, 20, 20, 20, 20, 20, 20, 20], [1] * 8, 0),
        ([0, 0], [1, 1], 1),
        ([9, 7, 66], [1, 0, 1], 2),
        ([65], [2], 0),  # finding 9: row 0 would see the last key
        ([17, 33, 49, 113], [2, 2, 2, 2], 0),
        ([66, 9, 300], [4, 1, 3], 1),
        ([2, 3], [4, 4], 0),  # fewer keys than queries
    ],
)
def test_what_the_kernels_break_on(seq_lens: list[int], query_lens: list[int], padding: int, causal: bool) -> None:
    for page_size in (1, 3):
        case = Case(seq_lens, query_lens, page_size=page_size, padding=padding, cache=FNUZ)
        if page_size == 1:
            case.kv_cache[0] = 1.0  # what rows without keys are given must not show; NaN, as it was, becomes 0
        out = case.decoded(stand_in.module("S2"), stand_in.package(), causal=causal)[0]
        agree(out, case.reference(causal=causal)[0])


@pytest.mark.parametrize(("cache", "nans"), [(FNUZ, [0x80]), ("float8_e4m3fn", [0x7F, 0xFF])])
def test_float8_row_0_is_made_finite_and_nothing_else_is_touched(cache: str, nans: list[int]) -> None:
    case = Case([5], [1], cache=cache)
    bits = case.kv_cache.view(torch.uint8)
    bits[0] = torch.arange(576, dtype=torch.uint8).repeat(1, 1)  # every bit pattern
    before = bits.clone()
    case.decoded(stand_in.module("S2"), stand_in.package())
    changed = (bits != before).nonzero().tolist()
    assert {int(before[tuple(place)]) for place in changed} == set(nans)
    assert bool(case.kv_cache[0].float().isfinite().all())
    assert {place[0] for place in changed} == {0}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scale_on_the_device_is_not_read(shape: tuple[int, ...]) -> None:
    for cache in (FNUZ, "bfloat16"):
        case = Case([70, 5], [1, 1], cache=cache, k_scale=0.5)
        out = case.decoded(stand_in.module("S2"), stand_in.package(), k_scale=torch.full(shape, 0.5))[0]
        agree(out, case.reference()[0])


def test_a_bf16_cache_may_be_scaled_too() -> None:
    """AITER knows no scale of one: it goes into the scores and the result."""
    case = Case([70, 5], [1, 1], k_scale=0.3)
    out, lse = case.decoded(stand_in.module("S6"), with_lse=True)
    expected, expected_lse = case.reference()
    torch.testing.assert_close(out.float(), expected.float(), rtol=2**-6, atol=1e-6)  # rounded to bf16 before it is scaled, and after
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        ("is_causal", "is_causal, workspace"),  # demands what we do not know
        ("seqlens_kv_indptr, ", ""),
        ("num_heads_per_head_k, num_heads_k", "num_heads_k, num_heads_per_head_k"),
        ("reduce_indptr, reduce_final_map", "reduce_final_map, reduce_indptr"),
    ],
)
def test_a_plan_of_an_unknown_form_is_none(change: tuple[str, str]) -> None:
    package = stand_in.package()
    assert find_planner(package) is not None
    exec(f"def get_mla_metadata_v1({stand_in.PLANNERS['M17'][0].replace(*change)}): ...", package.__dict__)
    assert find_planner(package) is None
    assert not describe(package, stand_in.module("S2"), "any").signature.persistent


def test_a_release_without_a_plan_has_no_persistent_mode() -> None:
    assert describe(stand_in.package(), stand_in.module("S2"), "any").signature.persistent
    assert not describe(stand_in.package(), stand_in.module("S1"), "any").signature.persistent  # decode takes no plan
    assert not describe(stand_in.PACKAGE, stand_in.module("S2"), "any").signature.persistent
    package = stand_in.package()
    exec(
        "def get_mla_metadata_v1(seqlens_qo_indptr, seqlens_kv_indptr, num_heads_per_head_k, num_heads_k, is_causal): ...", package.__dict__
    )
    assert not describe(package, stand_in.module("S2"), "any").signature.persistent  # the first form, of 2025, returned its tables


def test_layers_of_a_step_share_a_plan_and_steps_share_its_memory() -> None:
    case = Case([70, 33, 5], [1, 1, 1], cache=FNUZ, page_size=4)
    builder = MLAMetadataBuilder(MLAConfig(num_heads=16, softmax_scale=SCALE, page_size=4), "cpu", max_num_seqs=5, max_num_pages_per_seq=90)
    package, mla = stand_in.package(), stand_in.module("S2")
    tables = set()
    for step, lens in enumerate(([70, 33, 5], [71, 34, 6], [9, 5])):
        case.meta = builder.build(case.meta.block_table[: len(lens)], torch.tensor(lens, dtype=torch.int32), [1] * len(lens))
        case.q = case.q[: len(lens)]
        case.kv_cache = case.kv_cache.float().nan_to_num().to(torch.float8_e4m3fnuz)  # the next token's row is free, and NaN
        for _ in range(3):
            agree(case.decoded(mla, package)[0], case.reference()[0])
        assert len(package.planned) == step + 1
        tables.add(package.planned[-1]["work_indptr"].data_ptr())
    assert len(tables) == 1
    # a batch of both kinds: the decodes are a view of it
    meta = builder.build(case.meta.block_table, torch.tensor([9, 5], dtype=torch.int32), [1, 3])
    case.meta, case.q = meta.decode_metadata, case.q[:1]
    agree(case.decoded(mla, package)[0], case.reference()[0])
    assert len(package.planned) == 4
    assert {planned["work_indptr"].data_ptr() for planned in package.planned} == tables


def test_a_step_on_is_planned_anew() -> None:
    case = Case([70, 33], [1, 1], cache=FNUZ)
    case.kv_cache = case.kv_cache.float().nan_to_num().to(torch.float8_e4m3fnuz)
    case.meta.block_table[case.meta.block_table == UNUSED_PAGE] = 0  # pages to step into
    package, mla = stand_in.package(), stand_in.module("S2")
    for _ in range(2):
        agree(case.decoded(mla, package)[0], case.reference()[0])
        tokens = torch.zeros(2, dtype=torch.int64)
        advance_step(case.meta, tokens, tokens.clone(), tokens.clone())
    assert len(package.planned) == 2


def test_a_graph_that_no_state_knows_plans_within_itself() -> None:
    case = Case([70, 33], [1, 1], cache=FNUZ)
    package = stand_in.package()
    for _ in range(2):
        case.decoded(stand_in.module("S2"), package, captured=True)
    assert len(package.planned) == 2


def test_a_copy_of_metadata_has_no_plan_of_the_original() -> None:
    case = Case([70, 33], [1, 1], cache=FNUZ)
    package = stand_in.package()
    case.decoded(stand_in.module("S2"), package)
    for other in (copy.deepcopy(case.meta), pickle.loads(pickle.dumps(case.meta))):
        case.meta = other
        agree(case.decoded(stand_in.module("S2"), package)[0], case.reference()[0])
    assert len(package.planned) == 3


LIVE = [
    ([9, 70, 33, 5], [1, 1, 1, 1]),
    ([300], [1]),
    ([5, 0, 66], [1, 1, 1]),
    ([9, 7, 70], [3, 1, 2]),
]


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_plan_joins_the_graph_state(page_size: int) -> None:
    """Two batch sizes captured, replayed in turn: each replay's plan is there before it, and no layer of a graph plans."""
    longest, sizes = 3, (4, 2)
    cfg = MLAConfig(num_heads=16, softmax_scale=SCALE, page_size=page_size, kv_cache_dtype=torch.float8_e4m3fnuz)
    state = MLAGraphState(cfg, "cpu", max_batch_size=4, max_num_pages_per_seq=310, max_query_len=longest)
    package = stand_in.package("M22")
    aiter = describe(package, stand_in.module("S6"), "stand-in")
    q = torch.zeros(4 * longest, 16, 576, dtype=torch.bfloat16)
    captured = {}

    def replay(size: int, kv_cache: torch.Tensor) -> torch.Tensor:
        out = torch.full((size * longest, 16, 512), float("nan"), dtype=torch.bfloat16)
        launch.decode(
            aiter, LaunchShape(16, 1, persistent=True), q[: size * longest], kv_cache, captured[size], SCALE,
            causal=True, out=out, lse=None, k_scale=1.0, compute_units=304, captured=True,
        )  # fmt: skip
        return out

    any_cache = torch.zeros(3, page_size, 576, dtype=torch.bfloat16).to(torch.float8_e4m3fnuz)
    with torch.inference_mode(), state.graph_capture(4):  # prepared outside of it
        for size in sizes:
            captured[size] = state.graph_capture_get_metadata_for_batch(size)
            for _ in range(2):  # all padding, as while capturing
                assert torch.equal(replay(size, any_cache), torch.zeros(size * longest, 16, 512, dtype=torch.bfloat16))
    for seq_lens, query_lens in LIVE:
        case = Case(seq_lens, query_lens, page_size=page_size, cache=FNUZ)
        size = min(size for size in sizes if size >= len(seq_lens))
        state.prepare_graph_input_buffers(state.get_graph_input_buffers(captured[size]), case.meta)
        before, live = len(package.planned), sum(query_lens)
        q.fill_(7.0)
        q[:live] = case.q
        for _ in range(2):
            out = replay(size, case.kv_cache)
            agree(out[:live], case.reference()[0])
            assert torch.equal(out[live:], torch.zeros_like(out[live:]))
        assert len(package.planned) == before, "a replay runs no Python"
    assert len({planned["reduce_indptr"].data_ptr() for planned in package.planned}) == 1
    assert len({planned["seqlens_kv_indptr"].data_ptr() for planned in package.planned}) == 1


def test_the_plan_of_a_captured_batch_moves_on_with_it() -> None:
    cfg = MLAConfig(num_heads=16, softmax_scale=SCALE, kv_cache_dtype=torch.float8_e4m3fnuz)
    state = MLAGraphState(cfg, "cpu", max_batch_size=2, max_num_pages_per_seq=80)
    case, package = Case([70, 33], [1, 1], cache=FNUZ), stand_in.package()
    case.kv_cache = case.kv_cache.float().nan_to_num().to(torch.float8_e4m3fnuz)
    case.meta.block_table[case.meta.block_table == UNUSED_PAGE] = 0  # pages to step into
    with state.graph_capture(2):
        captured = state.graph_capture_get_metadata_for_batch(2)
    live, case.meta = case.meta, captured
    case.decoded(stand_in.module("S2"), package, captured=True)
    state.prepare_graph_input_buffers(state.get_graph_input_buffers(captured), live)
    for _ in range(2):
        agree(case.decoded(stand_in.module("S2"), package, captured=True)[0], case.reference()[0])
        tokens = torch.zeros(2, dtype=torch.int64)
        advance_step(captured, tokens, tokens.clone(), tokens.clone())
    assert len(package.planned) == 4  # at the first decode, when prepared, and at each step on


@pytest.mark.parametrize("kv_lens", [[64], [65], [200, 77], [1, 1, 1], [1000, 1, 30], [300] * 7])
@pytest.mark.parametrize("units", [1, 3, 304])
def test_the_restated_plan_covers_every_key_once(kv_lens: list[int], units: int) -> None:
    """The stand-in for AITER's planner is held to what any plan must be."""
    indptr = [0, *itertools.accumulate(kv_lens)]
    works, parts = aiter_plan.plan(range(len(indptr)), indptr, units, 16)
    keys = sorted((item[0], item[4], item[5]) for work in works for item in work)
    for request, (begin, end) in enumerate(itertools.pairwise(indptr)):
        mine = [key[1:] for key in keys if key[0] == request]
        assert [stop for _, stop in mine] == [*[start for start, _ in mine[1:]], end]
        assert mine[0][0] == begin
        assert len(parts[request]) == (len(mine) if len(mine) > 1 else 0)
    slots = [slot for mine in parts for slot in mine]
    assert sorted(slots) == list(range(len(slots)))
    assert len(slots) <= min(len(kv_lens) + units - 1, 2 * (units - 1))  # what AITER makes room for
