"""The split plan: complete, balanced and bounded for any lengths; the kernel's equal to the closed form's."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmla_kernels.plan import (
    PlanShape,
    SplitPlan,
    allocate_plan,
    balanced_plan,
    fixed_plan,
    launch_fixed_plan,
    launch_plan,
)
from dualmla_kernels.plan_kernel import MIN_PIECE, OVERHEAD, SPLIT_COST

TENSORS = ("pieces_of_part", "pieces", "splits")
LENGTHS = st.lists(st.integers(0, 9000), min_size=1, max_size=70)
SHAPES = st.builds(PlanShape, parts=st.sampled_from([1, 2, 4, 16, 33, 132]), tile=st.sampled_from([16, 64]))


def plan_of(lengths: list[int], shape: PlanShape) -> SplitPlan:
    return balanced_plan(torch.tensor(lengths, dtype=torch.int32), shape)


def tiles_of(lengths: list[int], tile: int) -> list[int]:
    return [max(1, -(-length // tile)) for length in lengths]


def pieces_by_request(plan: SplitPlan) -> dict[int, list[tuple[int, int, int]]]:
    """(first tile, end tile, slot) of each request's pieces, in the order of the programs that do them."""
    end = int(plan.pieces_of_part[-1])
    found: dict[int, list[tuple[int, int, int]]] = {}
    for request, low, high, slot in plan.pieces[:end].tolist():
        found.setdefault(request, []).append((low, high, slot))
    return found


def work(plan: SplitPlan) -> list[int]:
    """What each program does, in tiles, OVERHEAD for each piece counted in."""
    ends, pieces = plan.pieces_of_part.tolist(), plan.pieces.tolist()
    return [sum(high - low + OVERHEAD.value for _, low, high, _ in pieces[begin:end]) for begin, end in pairwise(ends)]


@given(lengths=LENGTHS, shape=SHAPES)
def test_each_tile_of_each_request_is_done_once(lengths: list[int], shape: PlanShape) -> None:
    """By pieces that follow one another; a request in one piece is written directly, the others have slots of their own."""
    plan = plan_of(lengths, shape)
    ends = plan.pieces_of_part.tolist()
    assert (len(ends), ends[0]) == (shape.parts + 1, 0)
    assert ends == sorted(ends)
    assert plan.pieces[ends[-1] :].eq(-1).all()
    found = pieces_by_request(plan)
    assert sorted(found) == list(range(len(lengths)))
    used: list[int] = []
    for request, tiles in enumerate(tiles_of(lengths, shape.tile)):
        lows, highs, slots = zip(*found[request], strict=True)
        assert lows == (0, *highs[:-1])
        assert highs[-1] == tiles
        assert all(low < high for low, high in zip(lows, highs, strict=True))
        if len(slots) == 1:
            assert slots == (-1,)
        else:
            used += slots
            assert [request, slots[0], slots[-1] + 1] in plan.splits.tolist()
    assert used == list(range(len(used)))
    split = [row for row in plan.splits.tolist() if row != [-1, -1, -1]]
    assert len(split) == sum(len(pieces) > 1 for pieces in found.values())
    assert plan.splits[: len(split)].tolist() == split, "the slack comes last"


@given(lengths=LENGTHS, shape=SHAPES)
def test_scratch_is_bounded_by_the_programs(lengths: list[int], shape: PlanShape) -> None:
    """Whatever the lengths: that bound sizes a captured graph's scratch."""
    plan = plan_of(lengths, shape)
    assert plan.slots == 2 * (shape.parts - 1)
    assert int(plan.pieces[:, 3].max()) < max(plan.slots, 1), "-1 where nothing is split, as for a single program"
    assert plan.pieces.shape[0] == len(lengths) + shape.parts


@given(lengths=LENGTHS, shape=SHAPES)
def test_the_busiest_program_does_little_more_than_its_share(lengths: list[int], shape: PlanShape) -> None:
    """A share of everything, the start of a piece cut off from the program before, a piece too short to cut, and SPLIT_COST."""
    total = sum(tiles_of(lengths, shape.tile)) + OVERHEAD.value * len(lengths)
    share = max(-(-total // shape.parts), 2 * MIN_PIECE.value)
    assert max(work(plan_of(lengths, shape))) <= share + 2 * (OVERHEAD.value + MIN_PIECE.value) + SPLIT_COST.value


@pytest.mark.parametrize(
    ("lengths", "parts", "busiest", "pieces"),
    [
        ([8192], 132, 4, 64),  # pieces of MIN_PIECE tiles
        ([131072], 132, 18, 128),
        ([4096] * 16, 132, 10, 128),
        ([4096] * 64, 132, 34, 128),  # halves: nothing left over from a cut
        ([4096] * 128, 132, 66, 128),  # whole, one each
        ([1024] * 256, 132, 36, 256),  # whole, two each
        ([8192] * 128, 66, 255, 192),  # 128 requests for 66 programs: some are cut
        ([4096] * 16, 16, 66, 16),
        ([0] * 5, 4, 6, 5),
    ],
)
def test_known_shares(lengths: list[int], parts: int, busiest: int, pieces: int) -> None:
    """The batches of the benchmark on a device of 132 multiprocessors; figures of an exhaustive search over payloads."""
    plan = plan_of(lengths, PlanShape(parts, 64))
    assert (max(work(plan)), int(plan.pieces_of_part[-1])) == (busiest, pieces)


@pytest.mark.parametrize(
    "lengths",
    [[5], [9000, 0, 1], [64] * 40, [70 * i for i in range(20)], [100 + i % 7 for i in range(300)], [(997 * i) % 8192 for i in range(300)]],
    ids=["one", "three", "whole", "ragged", "300 alike", "300 ragged"],
)
@pytest.mark.parametrize("parts", [1, 4, 132])
def test_kernel_equals_closed_form(device: torch.device, lengths: list[int], parts: int) -> None:
    """Interpreted on a CPU; every entry, slack included, over several chunks of requests and in each of the three ways."""
    shape = PlanShape(parts, 64)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    expected = balanced_plan(seq_lens, shape)
    got = allocate_plan(len(lengths), shape, device)
    for name in TENSORS:
        getattr(got, name).fill_(-77)
    launch_plan(seq_lens.to(device), shape, got)
    for name in TENSORS:
        assert torch.equal(getattr(got, name).cpu(), getattr(expected, name)), name


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=9), parts=st.integers(1, 12))
def test_kernel_equals_closed_form_on_any_lengths(lengths: list[int], parts: int) -> None:
    from support import DEVICE

    shape = PlanShape(parts, 64)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    expected, got = balanced_plan(seq_lens, shape), allocate_plan(len(lengths), shape, DEVICE)
    launch_plan(seq_lens.to(DEVICE), shape, got)
    for name in TENSORS:
        assert torch.equal(getattr(got, name).cpu(), getattr(expected, name)), name


def test_a_plan_is_written_into_given_buffers(device: torch.device) -> None:
    """A part of larger buffers, and the very numbers of a plan made for itself."""
    shape = PlanShape(4, 64)
    seq_lens = torch.tensor([500, 3, 900], dtype=torch.int32, device=device)
    buffers = allocate_plan(10, shape, device)
    plan = balanced_plan(seq_lens, shape, out=buffers.of(3))
    fresh = balanced_plan(seq_lens, shape)
    for name in TENSORS:
        assert torch.equal(getattr(plan, name), getattr(fresh, name)), name
        assert getattr(plan, name).data_ptr() == getattr(buffers, name).data_ptr(), name
    assert (plan.slots, plan.tile, plan.parts) == (fresh.slots, fresh.tile, fresh.parts)


@given(lengths=LENGTHS, splits=st.sampled_from([1, 2, 5]))
def test_fixed_splits_depend_on_the_request_alone(lengths: list[int], splits: int) -> None:
    """As many pieces for each, cut where they are cut when the request is alone."""
    plan = fixed_plan(torch.tensor(lengths, dtype=torch.int32), splits=splits, tile=64)
    found = pieces_by_request(plan)
    for request, length in enumerate(lengths):
        alone = fixed_plan(torch.tensor([length], dtype=torch.int32), splits=splits, tile=64)
        assert [piece[:2] for piece in found[request]] == [piece[:2] for piece in pieces_by_request(alone)[0]]
        assert len(found[request]) == splits
        assert found[request][-1][1] == -(-length // 64)
    assert plan.slots == (splits * len(lengths) if splits > 1 else 0)
    if splits > 1:
        assert plan.splits.tolist() == [[request, splits * request, splits * (request + 1)] for request in range(len(lengths))]
        assert plan.pieces[:, 3].tolist() == list(range(plan.slots))
    else:
        assert plan.splits.eq(-1).all()
        assert plan.pieces[:, 3].eq(-1).all()


@pytest.mark.parametrize(("requests", "splits"), [(64, 1023), (64, 1024), (130, 1024), (70000, 1)])
def test_no_more_fixed_parts_than_a_grid_may_have(requests: int, splits: int) -> None:
    """Past the 65535 programs of CUDA's second axis a program does several pieces; each is done once."""
    plan = fixed_plan(torch.full((requests,), 100, dtype=torch.int32), splits=splits, tile=64)
    pieces = plan.pieces_of_part.diff()
    assert plan.parts <= 65535
    assert int(pieces.sum()) == requests * splits == plan.pieces.shape[0]
    assert int(pieces.min()) >= 1
    assert int(pieces.max()) == -(-requests * splits // 65535)


@pytest.mark.parametrize("splits", [1, 2, 7, 1024])
@pytest.mark.parametrize("lengths", [[0], [65, 64, 1], [(997 * i) % 8192 for i in range(90)]], ids=["empty", "three", "90"])
def test_fixed_kernel_equals_closed_form(device: torch.device, lengths: list[int], splits: int) -> None:
    """Every entry, over several programs of the kernel."""
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    expected = fixed_plan(seq_lens, splits=splits, tile=64)
    got = SplitPlan(*(torch.full_like(getattr(expected, name), -77).to(device) for name in TENSORS), slots=expected.slots, tile=64)
    launch_fixed_plan(seq_lens.to(device), splits, got)
    for name in TENSORS:
        assert torch.equal(getattr(got, name).cpu(), getattr(expected, name)), name
