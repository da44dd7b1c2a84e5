"""The kernels that make metadata (index arrays, slots, split plans, a step on), compiled by Triton for gfx942 and gfx950 and
executed with waves and loads as slow as they may be, against plain Python and the plan's closed form."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from dualmla.emulator import Mode
from dualmla.emulator.tensors import run_launcher
from dualmla_kernels import metadata, plan, token_slots

pytest.importorskip("triton")
SLOW = Mode(turn=8, delayed=True, watch_lds=True)
NOBODY = 2**31 - 1
"""A page id that names no page."""
PAGE, MAX_PAGES = 4, 40
KEYS = (9, 1, 0, 130, 33, 64)


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def unwritten(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, -77, dtype=dtype)


def pages_of(keys: int) -> int:
    return -(-keys // PAGE)


def block_table() -> torch.Tensor:
    table = torch.full((len(KEYS), MAX_PAGES), NOBODY, dtype=torch.int32)
    order = torch.randperm(sum(map(pages_of, KEYS)), generator=torch.Generator().manual_seed(0)).int()
    for row, part in zip(table, order.split([pages_of(keys) for keys in KEYS]), strict=True):
        row[: len(part)] = part
    return table


def run(arch: str, launcher, *args, written: tuple[str, ...], **kwargs) -> None:
    """Without a finding but waves that store the same numbers."""
    for report in run_launcher(arch, SLOW, launcher, *args, written=written, **kwargs):
        assert report.program.unsupported == {}
        told = [f for f in report.findings if not (f.kind.startswith("LDS race: two waves write") and f.instruction == f.other)]
        assert told == []


def build(block_table, seq_lens, query_lens, *, pieces_of_part=None, pieces=None, splits=None, tile=0, **rest) -> None:
    made = None if pieces is None else plan.SplitPlan(pieces_of_part, pieces, splits, slots=0, tile=tile)
    metadata.build(block_table, seq_lens, query_lens, plan=made, **rest)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("query_lens", [1, (1, 1, 1, 5, 33, 2)], ids=["decodes", "mixed"])
def test_metadata_of_a_step(arch: str, query_lens: int | tuple[int, ...]) -> None:
    """One launch: lengths, indptr, packed page ids, slots, and the plan of the decodes."""
    live, num_reqs, num_tokens = len(KEYS), len(KEYS) + 2, 48
    table, keys = block_table(), int32(KEYS)
    new = [query_lens] * live if isinstance(query_lens, int) else list(query_lens)
    decodes = live if isinstance(query_lens, int) else 3
    shape = plan.PlanShape(parts=8, tile=16)
    made = plan.allocate_plan(decodes, shape, torch.device("cpu"))
    out = {
        "fields": unwritten(7, num_reqs + 1),
        "indices": unwritten(live * MAX_PAGES),
        "prefill_indices": unwritten(live * MAX_PAGES),
        "slots": unwritten(num_tokens, dtype=torch.int64),
        "own_table": unwritten(live, MAX_PAGES),
        "pieces_of_part": made.pieces_of_part,
        "pieces": made.pieces,
        "splits": made.splits,
    }
    run(
        arch, build, table, keys, query_lens if isinstance(query_lens, int) else int32(query_lens), written=tuple(out),
        num_reqs=num_reqs, num_decodes=decodes, num_tokens=num_tokens, page_size=PAGE, pages_ahead=1, tile=shape.tile, **out,
    )  # fmt: skip
    held = [pages_of(n) for n in KEYS] + [0, 0]
    fields, token_ends, page_ends = out["fields"].tolist(), list(accumulate(new)), list(accumulate(held))
    assert fields[0][:num_reqs] == [*KEYS, 0, 0]
    assert fields[1][:num_reqs] == [*new, 0, 0]
    assert fields[2][:num_reqs] == [(n - 1) % PAGE + 1 if n else 0 for n in KEYS] + [0, 0]
    assert fields[3] == [0, *token_ends, token_ends[-1], token_ends[-1]]
    assert fields[4] == [0, *page_ends]
    prefills = [end - (token_ends[decodes - 1]) for end in [*token_ends, token_ends[-1], token_ends[-1]][decodes:]]
    assert fields[5][: num_reqs - decodes + 1] == [0, *prefills]
    assert fields[6][: num_reqs - decodes + 1] == [0, *(end - page_ends[decodes - 1] for end in page_ends[decodes:])]
    packed = [page for row, count in zip(table.tolist(), held, strict=False) for page in row[:count]]
    assert out["indices"][: len(packed)].tolist() == packed
    assert out["prefill_indices"][: len(packed) - page_ends[decodes - 1]].tolist() == packed[page_ends[decodes - 1] :]
    slots = []
    for row, n, q in zip(table.tolist(), KEYS, new, strict=True):
        slots += [row[i // PAGE] * PAGE + i % PAGE if i >= 0 else -1 for i in range(n - q, n)]
    assert out["slots"].tolist() == slots + [-1] * (num_tokens - len(slots))
    for row, own, count in zip(table, out["own_table"], held, strict=False):
        assert own[:count].equal(row[:count])
    expected = plan.balanced_plan(keys[:decodes], shape)
    for name in ("pieces_of_part", "pieces", "splits"):
        assert out[name].equal(getattr(expected, name)), name


def launch_plan(seq_lens, *, pieces_of_part, pieces, splits, shape: plan.PlanShape | int) -> None:
    if isinstance(shape, int):
        plan.launch_fixed_plan(seq_lens, shape, plan.SplitPlan(pieces_of_part, pieces, splits, slots=0, tile=16))
    else:
        plan.launch_plan(seq_lens, shape, plan.SplitPlan(pieces_of_part, pieces, splits, slots=0, tile=shape.tile))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("shape", [plan.PlanShape(parts=33, tile=16), plan.PlanShape(parts=4, tile=64), 1, 3], ids=str)
def test_split_plan(arch: str, shape: plan.PlanShape | int) -> None:
    """300 requests, more than a chunk of them, of every kind of length; balanced over programs, or in a fixed number of pieces."""
    keys = int32([*range(0, 280, 2), *[0] * 20, *range(3000, 3140)])
    expected = plan.fixed_plan(keys, splits=shape, tile=16) if isinstance(shape, int) else plan.balanced_plan(keys, shape)
    names = ("pieces_of_part", "pieces", "splits")
    out = {name: torch.full_like(getattr(expected, name), -77) for name in names}
    run(arch, launch_plan, keys, written=names, shape=shape, **out)
    for name in names:
        assert out[name].equal(getattr(expected, name)), name


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_a_step_on(arch: str) -> None:
    """Requests of one new token move; the others, and what belongs to no request, stay."""
    new = int32([1] * 150 + [0] * 3 + [1] * 150)
    keys = torch.arange(300, 300 + len(new), dtype=torch.int32)
    indptr = torch.cat([int32([0]), torch.cumsum(new, 0, dtype=torch.int32)])
    sampled, tokens, positions = (torch.arange(n, n + 301) for n in (5000, 7000, 9000))
    moved, told, placed = keys + new, sampled.clone(), positions.clone()
    told[300], placed[:300] = tokens[300], keys[new > 0].long()
    run(arch, metadata.advance, keys, new, indptr, sampled, tokens, positions, written=())
    assert keys.equal(moved)
    assert tokens.equal(told)
    assert positions.equal(placed)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_token_slots(arch: str) -> None:
    """Rows of the cache of each request's keys, in the table's row that owns it, and zeros after the last."""
    table, owner = block_table(), [3, 0, 4, 5]
    keys = [min(KEYS[row], limit) for row, limit in zip(owner, (130, 5, 33, 61), strict=True)]
    indptr = int32([0, *accumulate(keys)])
    out = unwritten(token_slots.num_slots(len(owner), MAX_PAGES, PAGE))
    run(arch, token_slots.token_slots, table, int32(owner), indptr, PAGE, written=("out",), out=out)
    rows = [int(table[row, i // PAGE]) * PAGE + i % PAGE for row, n in zip(owner, keys, strict=True) for i in range(n)]
    tail = int(token_slots.TAIL.value)
    assert out[: len(rows) + tail].tolist() == rows + [0] * tail
