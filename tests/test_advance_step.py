"""advance_step: a batch moved on where it lies equals the batch built again, step after step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dualmla
from dualmla import MLAMetadata, MLAMetadataBuilder, advance_step
from dualmla.buffers import _advance_with_torch

INDICES = ("seq_lens", "query_lens", "qo_indptr", "paged_kv_indptr", "paged_kv_last_page_lens", "slot_mapping")
PLAN = ("pieces_of_part", "pieces", "splits")


def config(page_size: int) -> dualmla.MLAConfig:
    return dualmla.MLAConfig(num_heads=16, softmax_scale=0.1, page_size=page_size)


def builder(page_size: int, device: torch.device, max_pages: int = 40) -> MLAMetadataBuilder:
    return MLAMetadataBuilder(config(page_size), device, max_num_seqs=8, max_num_pages_per_seq=max_pages)


def table_of(requests: int, pages: int, device: torch.device) -> torch.Tensor:
    ids = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(0))
    return ids.view(requests, pages).to(device, torch.int32)


def lengths(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def assert_equal(got: MLAMetadata, expected: MLAMetadata) -> None:
    for name in INDICES:
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    live = int(expected.paged_kv_indptr[-1])
    assert torch.equal(got.paged_kv_indices[:live], expected.paged_kv_indices[:live])
    assert (got.plan is None) == (expected.plan is None)
    if got.plan is not None:
        for name in PLAN:
            assert torch.equal(getattr(got.plan, name), getattr(expected.plan, name)), name


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_hundred_steps_equal_hundred_rebuilds(device: torch.device, page_size: int) -> None:
    """Across page edges; new lengths make other plans; the tokens and positions are those of the next step."""
    start, steps = [1, 2, page_size, page_size + 1, 60], 100
    pages = -(-(max(start) + steps) // page_size)
    table = table_of(len(start), pages, device)
    stepping, rebuilding = (builder(page_size, device, pages) for _ in range(2))
    meta = stepping.build(table, lengths(start, device), [1] * len(start))
    tokens = torch.zeros(len(start), dtype=torch.int64, device=device)
    positions = torch.zeros(len(start), dtype=torch.int64, device=device)
    for step in range(1, steps + 1):
        sampled = torch.arange(len(start), device=device) + 1000 * step
        advance_step(meta, sampled, tokens, positions)
        now = [length + step for length in start]
        assert_equal(meta, rebuilding.build(table, lengths(now, device), [1] * len(start)))
        assert torch.equal(tokens, sampled)
        assert positions.tolist() == [length - 1 for length in now]
    assert meta.decode_metadata is meta


def test_requests_without_a_new_token_stay(device: torch.device) -> None:
    """As the padding of a captured batch does; the tokens of the others follow one another."""
    table = table_of(4, 20, device)
    meta = builder(1, device).build(table, lengths([5, 7, 9, 0], device), [1, 0, 1, 0])
    tokens, positions = (torch.full((4,), -1, dtype=torch.int64, device=device) for _ in range(2))
    advance_step(meta, lengths([11, 12, 13, 14], device), tokens, positions)
    assert_equal(meta, builder(1, device).build(table, lengths([6, 7, 10, 0], device), [1, 0, 1, 0]))
    assert tokens.tolist() == [11, 12, -1, -1]
    assert positions.tolist() == [5, 9, -1, -1]


def test_a_request_may_begin_empty(device: torch.device) -> None:
    """Its first token comes with the first step."""
    table = table_of(2, 4, device)
    meta = builder(2, device).build(table, lengths([0, 4], device), [1, 1])
    assert meta.slot_mapping[0] == -1
    position = torch.zeros(2, dtype=torch.int32, device=device)
    advance_step(meta, lengths([1, 2], device), torch.zeros_like(position), position)
    assert_equal(meta, builder(2, device).build(table, lengths([1, 5], device), [1, 1]))
    assert position.tolist() == [0, 4]


def test_a_new_page_is_read_from_the_table_as_it_is_then(device: torch.device) -> None:
    """The engine fills it in between building and stepping."""
    table = table_of(1, 4, device)
    meta = builder(2, device).build(table, lengths([2], device), [1])
    table[0, 1] = 77
    one = torch.zeros(1, dtype=torch.int64, device=device)
    advance_step(meta, one, one.clone(), one.clone())
    assert meta.paged_kv_indices[:2].tolist() == [int(table[0, 0]), 77]
    assert meta.slot_mapping.tolist() == [77 * 2]


def test_past_the_table_nothing_is_written(device: torch.device) -> None:
    meta = builder(2, device).build(table_of(1, 2, device), lengths([4], device), [1])
    one = torch.zeros(1, dtype=torch.int64, device=device)
    advance_step(meta, one, one.clone(), one.clone())
    assert meta.slot_mapping.tolist() == [-1]


def test_metadata_without_a_builder_steps_too(device: torch.device) -> None:
    table = table_of(2, 8, device)
    meta = dualmla.decode_metadata(table, [3, 4], page_size=2, device=device)
    tokens, positions = (torch.zeros(2, 1, dtype=torch.int64, device=device)[:, 0] for _ in range(2))
    advance_step(meta, torch.tensor([[5], [6]], device=device), tokens, positions)
    assert_equal(meta, dualmla.decode_metadata(table, [4, 5], page_size=2, device=device))
    assert tokens.tolist() == [5, 6], "sampled tokens may be a column, as samplers return them"


def test_the_caller_s_lengths_are_not_touched(device: torch.device) -> None:
    given = lengths([3, 4], device)
    meta = builder(1, device).build(table_of(2, 8, device), given, [1, 1])
    token = torch.zeros(2, dtype=torch.int64, device=device)
    advance_step(meta, token, token.clone(), token.clone())
    assert given.tolist() == [3, 4]


def test_empty_batch(device: torch.device) -> None:
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    meta = dualmla.decode_metadata(nothing.view(0, 4), [], page_size=1, device=device)
    advance_step(meta, nothing, nothing.clone(), nothing.clone())
    assert meta.qo_indptr.tolist() == [0]


@pytest.mark.parametrize(("dtype", "stride"), [(torch.int32, 1), (torch.int64, 2)])
def test_kernel_equals_torch_form(device: torch.device, dtype: torch.dtype, stride: int) -> None:
    """More requests than a program moves, some of them without a new token."""
    from dualmla_kernels.metadata import advance

    requests = 300
    seq_lens, query_lens = torch.arange(requests, dtype=torch.int32), (torch.arange(requests) % 3 > 0).int()
    qo_indptr = torch.cat([torch.zeros(1, dtype=torch.int32), query_lens.cumsum(0).int()])
    sampled = (torch.arange(stride * requests, dtype=dtype) + 5)[::stride]
    results = []
    for move, where in ((_advance_with_torch, torch.device("cpu")), (advance, device)):
        given = [tensor.to(where) for tensor in (seq_lens.clone(), query_lens, qo_indptr)]
        written = [torch.full((requests,), -1, dtype=dtype, device=where) for _ in range(2)]
        move(*given, sampled.to(where), *written)
        results.append([tensor.cpu() for tensor in (given[0], *written)])
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected)


# --- refusals


def call(device: torch.device, **changes: Any) -> None:
    meta = builder(1, device).build(table_of(2, 8, device), lengths([3, 4], device), [1, 1])
    arguments: dict[str, Any] = {"meta": meta} | {
        name: torch.zeros(2, dtype=torch.int64, device=device) for name in ("sampled_token_ids", "input_tokens", "input_positions")
    }
    advance_step(**arguments | changes)


def mixed(device: torch.device) -> MLAMetadata:
    return builder(1, device).build(table_of(2, 8, device), lengths([3, 4], device), [1, 2])


def test_refused(device: torch.device) -> None:
    call(device)
    several = MLAMetadataBuilder(config(1), device, max_num_seqs=2, max_num_pages_per_seq=8, decode_threshold=2)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"meta": None}, TypeError, "meta must be MLAMetadata, got NoneType"),
        ({"meta": mixed(device)}, ValueError, "meta must be of decodes alone"),
        ({"meta": mixed(device).decode_metadata}, ValueError, "meta must be of decodes alone"),
        (
            {"meta": several.build(table_of(2, 8, device), lengths([3, 4], device), [2, 1])},
            ValueError,
            "one new token a request, it holds up to 2",
        ),
        ({"sampled_token_ids": [1, 2]}, TypeError, "sampled_token_ids must be a tensor, got list"),
        (
            {"sampled_token_ids": torch.zeros(2, 2, dtype=torch.int64, device=device)},
            ValueError,
            "sampled_token_ids must have 1 dimensions",
        ),
        (
            {"input_tokens": torch.zeros(1, dtype=torch.int64, device=device)},
            ValueError,
            "input_tokens has 1 entries, the batch has 2 tokens",
        ),
        ({"input_positions": torch.zeros(2, device=device)}, TypeError, "input_positions must be int32 or int64, got float32"),
        (
            {"input_positions": torch.zeros(1, dtype=torch.int64, device=device).expand(2)},
            ValueError,
            "input_positions must be contiguous in its last dimension",
        ),
    ]
    for changes, error, message in cases:
        with pytest.raises(error, match=message):
            call(device, **changes)


def test_a_refused_step_moves_nothing(device: torch.device) -> None:
    meta = builder(1, device).build(table_of(2, 8, device), lengths([3, 4], device), [1, 1])
    token = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="input_positions has 1 entries"):
        advance_step(meta, token, token.clone(), token[:1].clone())
    assert meta.seq_lens.tolist() == [3, 4]


def test_stale_metadata_does_not_step(device: torch.device) -> None:
    owner = builder(1, device)
    table, token = table_of(2, 8, device), torch.zeros(2, dtype=torch.int64, device=device)
    old = owner.build(table, lengths([3, 4], device), [1, 1])
    owner.build(table, lengths([3, 4], device), [1, 1])
    with pytest.raises(RuntimeError, match="stale"):
        advance_step(old, token, token.clone(), token.clone())
