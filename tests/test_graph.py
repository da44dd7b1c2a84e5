"""Graph state: a replay sees the live batch and nothing of the ones before it, bit for bit what eager gives at the same padding.

On a CPU a replay calls the captured function again, so all but the streams and the capture itself runs there too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import dualmla
from dualmla import DecodeGraphs, MLAGraphState, MLAMetadata, MLAMetadataBuilder, advance_step

GARBAGE = 2147480000
PAGES = 40
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: there are no graphs and streams on a CPU")


def config(page_size: int = 1, **changes: Any) -> dualmla.MLAConfig:
    return dualmla.MLAConfig(
        **{"num_heads": 4, "softmax_scale": 0.1, "page_size": page_size, "kv_lora_rank": 32, "qk_rope_head_dim": 16} | changes
    )


def state_for(device: torch.device, page_size: int = 1, max_query_len: int = 1, max_batch_size: int = 8) -> MLAGraphState:
    return MLAGraphState(config(page_size), device, max_batch_size=max_batch_size, max_num_pages_per_seq=PAGES, max_query_len=max_query_len)


def builder_for(device: torch.device, page_size: int = 1, threshold: int = 1) -> MLAMetadataBuilder:
    return MLAMetadataBuilder(config(page_size), device, max_num_seqs=8, max_num_pages_per_seq=PAGES, decode_threshold=threshold)


def table_for(seq_lens: Sequence[int], page_size: int, rng: random.Random, width: int = PAGES) -> torch.Tensor:
    """Distinct pages of a cache of 8 * PAGES; garbage where nothing is live."""
    ids = rng.sample(range(8 * PAGES), 8 * PAGES)
    rows = []
    for length in seq_lens:
        count = -(-length // page_size)
        rows.append([ids.pop() for _ in range(count)] + [GARBAGE] * (width - count))
    return torch.tensor(rows, dtype=torch.int32).view(len(seq_lens), width)


def build(
    device: torch.device,
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    page_size: int = 1,
    threshold: int = 1,
    seed: int = 0,
) -> MLAMetadata:
    table = table_for(seq_lens, page_size, random.Random(seed)).to(device)
    new = [1] * len(seq_lens) if query_lens is None else list(query_lens)
    return builder_for(device, page_size, threshold).build(table, torch.tensor(seq_lens, dtype=torch.int32, device=device), new)


def capture(state: MLAGraphState, batch_size: int) -> tuple[MLAMetadata, dict[str, torch.Tensor]]:
    with state.graph_capture(batch_size):
        meta = state.graph_capture_get_metadata_for_batch(batch_size)
    return meta, state.get_graph_input_buffers(meta)


def padded(device: torch.device, live: MLAMetadata, batch_size: int, max_query_len: int) -> MLAMetadata:
    """The live batch built anew with empty requests up to `batch_size`: what a captured batch of that size must look like."""
    empty = batch_size - live.num_reqs
    table = torch.cat([live.block_table, live.block_table.new_full((empty, live.block_table.shape[1]), GARBAGE)])
    seq_lens = torch.cat([live.seq_lens, live.seq_lens.new_zeros(empty)])
    query_lens = live.query_lens.tolist() + [0] * empty
    return builder_for(device, live.page_size, max_query_len).build(table, seq_lens, query_lens)


def assert_prepared(buffers: dict[str, torch.Tensor], live: MLAMetadata, max_query_len: int = 1) -> None:
    """Each entry of each buffer that can be read: the live batch, then padding."""
    batch_size, device = buffers["seq_lens"].shape[0], buffers["seq_lens"].device
    eager = padded(device, live, batch_size, max_query_len)
    for name in ("seq_lens", "query_lens", "qo_indptr", "paged_kv_indptr", "paged_kv_last_page_lens"):
        assert torch.equal(buffers[name], getattr(eager, name)), name
    for name in ("qo_indptr", "paged_kv_indptr"):
        indptr = buffers[name]
        assert indptr[0] == 0, name
        assert (indptr.diff() >= 0).all(), name
        assert (indptr[live.num_reqs :] == indptr[live.num_reqs]).all(), f"{name} stays where the live requests end"
    pages = int(live.paged_kv_indptr[-1])
    assert torch.equal(buffers["paged_kv_indices"][:pages], live.paged_kv_indices[:pages])
    for row, expected, count in zip(buffers["block_table"], live.block_table, live.paged_kv_indptr.diff().tolist(), strict=False):
        assert torch.equal(row[:count], expected[:count])
    slots = buffers["slot_mapping"]
    assert slots.shape == (batch_size * max_query_len,)
    assert torch.equal(slots[: live.num_tokens], live.slot_mapping)
    assert (slots[live.num_tokens :] == -1).all(), "a captured cache write must not write for padding"
    if "plan_pieces" in buffers:
        ends, pieces = buffers["plan_pieces_of_part"].tolist(), buffers["plan_pieces"]
        assert ends == sorted(ends)
        assert sorted(set(pieces[: ends[-1], 0].tolist())) == list(range(batch_size))
        if max_query_len == eager.max_query_len:  # else the plan of an eager batch has another shape
            assert eager.plan is not None
            for name in ("pieces_of_part", "pieces", "splits"):
                assert torch.equal(buffers[f"plan_{name}"], getattr(eager.plan, name)), name


# --- the four verbs


def test_buffers_live_where_attention_runs(device: torch.device) -> None:
    """The last page lengths too, which the seed left on the CPU (S7)."""
    _, buffers = capture(state_for(device), 4)
    assert {"paged_kv_last_page_lens", "block_table", "plan_pieces"} <= buffers.keys()
    assert {name: tensor.device for name, tensor in buffers.items()} == dict.fromkeys(buffers, device)
    assert {name: tensor.dtype for name, tensor in buffers.items()} == {
        name: torch.int64 if name == "slot_mapping" else torch.int32 for name in buffers
    }


def test_captured_metadata_is_all_padding(device: torch.device) -> None:
    """The first time, and when a batch was prepared in its memory."""
    state = state_for(device, max_query_len=3)
    capture(state, 4)
    state.prepare_graph_input_buffers(capture(state, 8)[1], build(device, [9] * 8))
    meta, buffers = capture(state, 4)
    assert (meta.num_reqs, meta.num_tokens, meta.max_query_len, meta.num_decodes) == (4, 12, 3, 4)
    assert meta.decode_metadata is meta
    assert meta.prefill_metadata is None
    assert not buffers["seq_lens"].any()
    assert not buffers["qo_indptr"].any()
    assert (buffers["slot_mapping"] == -1).all()
    assert_prepared(buffers, build(device, []), 3)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_three_live_in_a_batch_of_four(device: torch.device, page_size: int) -> None:
    """The live tensors are shorter than the captured ones (S9)."""
    state = state_for(device, page_size)
    _, buffers = capture(state, 4)
    live = build(device, [7, 30, 1], page_size=page_size)
    state.prepare_graph_input_buffers(buffers, live)
    assert_prepared(buffers, live)


def test_splits_follow_the_live_lengths(device: torch.device) -> None:
    """They are those of an eager batch of these lengths, never the capacity's (S10)."""
    state = state_for(device, page_size=64)
    _, buffers = capture(state, 2)
    seen = []
    for seq_lens in ([2000, 1], [1, 2000], [64, 64], [2500, 2500]):
        live = build(device, seq_lens, page_size=64)
        state.prepare_graph_input_buffers(buffers, live)
        assert_prepared(buffers, live)
        seen.append(buffers["plan_pieces"].tolist())
    assert len({str(pieces) for pieces in seen}) == 4
    assert [len([s for s in pieces if s[3] >= 0]) > 0 for pieces in seen] == [True, True, False, True]


SEQUENCES = {
    "5 after 8": ([9, 8, 7, 6, 5, 4, 3, 2], [3, 1, 4, 1, 5]),
    "growing": ([1, 2], [9, 20], [30, 40]),
    "shrinking": ([40, 40, 40], [20, 10, 5], [1, 1, 1]),
    "an empty request": ([5, 0, 5], [0, 0], [0, 9]),
    "none after all": ([1] * 8, [], [2]),
}


@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES.keys())
def test_nothing_of_the_last_batch_is_left(device: torch.device, sequence: Sequence[list[int]]) -> None:
    state = state_for(device)
    _, buffers = capture(state, 8)
    for seed, seq_lens in enumerate(sequence):
        live = build(device, seq_lens, seed=seed)
        scratch = torch.full((1 << 16,), GARBAGE, dtype=torch.int32, device=device)  # memory changes hands between replays
        state.prepare_graph_input_buffers(buffers, live)
        assert_prepared(buffers, live)
        del scratch


@pytest.mark.parametrize("max_query_len", [1, 3])
@pytest.mark.parametrize("page_size", [1, 16])
def test_two_hundred_random_batches(device: torch.device, page_size: int, max_query_len: int) -> None:
    """At whatever captured size they fit in, in one set of buffers."""
    rng = random.Random(page_size * 10 + max_query_len)
    state = state_for(device, page_size, max_query_len)
    with state.graph_capture(8):
        captured = {size: state.get_graph_input_buffers(state.graph_capture_get_metadata_for_batch(size)) for size in (8, 4, 1)}
    for replay in range(200):
        size = rng.choice([1, 4, 8])
        requests = rng.randint(0, size)
        seq_lens = [rng.randint(0, PAGES * page_size) for _ in range(requests)]
        query_lens = [rng.randint(0, min(length, max_query_len)) for length in seq_lens]
        live = build(device, seq_lens, query_lens, page_size=page_size, threshold=max_query_len, seed=replay)
        state.prepare_graph_input_buffers(captured[size], live)
        assert_prepared(captured[size], live, max_query_len)


def test_garbage_in_the_table_does_not_matter(device: torch.device) -> None:
    """A narrow live table, a slice of a larger one; what lies past the live pages is anything."""
    state = state_for(device, page_size=4)
    _, buffers = capture(state, 2)
    wide = table_for([20, 3], 4, random.Random(0), width=PAGES).to(device)
    lens = torch.tensor([20, 3], dtype=torch.int32, device=device)
    live = builder_for(device, 4).build(wide[:, :5], lens, [1, 1])
    state.prepare_graph_input_buffers(buffers, live)
    assert_prepared(buffers, live)


# --- replay


class Layer:
    """One decode over a cache, with its queries at a fixed address."""

    def __init__(self, device: torch.device, page_size: int, tokens: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.zeros(tokens, 4, 48, dtype=torch.bfloat16, device=device)
        self.cache = torch.randn(8 * PAGES, page_size, 48, generator=generator).to(device, torch.bfloat16)
        self.out = torch.full((tokens, 4, 32), float("nan"), dtype=torch.bfloat16, device=device)
        self.generator = generator

    def new_queries(self) -> None:
        self.q.copy_(torch.randn(self.q.shape, generator=self.generator))

    def decode(self, meta: MLAMetadata, tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        n = tokens or meta.num_tokens
        out, lse = dualmla.mla_decode(self.q[:n], self.cache, meta, 0.1, out=self.out[:n], return_lse=True, backend="triton")
        return out, lse


@pytest.mark.parametrize("max_query_len", [1, 3])
def test_replays_equal_eager_bit_for_bit(device: torch.device, max_query_len: int) -> None:
    """Eager at the same padded batch; 5 live after 8 live, an empty request, growing and shrinking lengths in between."""
    rng = random.Random(max_query_len)
    page_size = 16
    state = state_for(device, page_size, max_query_len)
    layer = Layer(device, page_size, 8 * max_query_len)
    graphs = DecodeGraphs(state, [4, 8], layer.decode)
    batches = [[600] * 8, [30, 1, 400, 7, 600], [0, 5], [300, 0, 20]]
    if device.type == "cuda":
        batches += [[rng.randint(0, 640) for _ in range(rng.randint(0, 8))] for _ in range(200)]
    for seed, seq_lens in enumerate(batches):
        query_lens = [rng.randint(0, min(length, max_query_len)) for length in seq_lens]
        live = build(device, seq_lens, query_lens, page_size=page_size, threshold=max_query_len, seed=seed)
        layer.new_queries()
        layer.out.fill_(float("nan"))
        noise = torch.full((1 << 18,), float("nan"), device=device)
        out, lse = (tensor.clone() for tensor in graphs.replay(live))
        del noise
        size = 4 if live.num_reqs <= 4 else 8
        assert out.shape[0] == size * max_query_len
        eager = padded(device, live, size, max_query_len)
        if eager.max_query_len != max_query_len:  # a captured launch is sized by the most there may be
            eager.max_query_len, eager.plan = max_query_len, None
        expected, expected_lse = layer.decode(eager, size * max_query_len)
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))
        assert torch.equal(lse.view(torch.int32), expected_lse.view(torch.int32))
        assert not out[live.num_tokens :].any(), "padding rows are written, with zeros"
        assert lse[:, live.num_tokens :].isneginf().all()


def test_the_smallest_captured_batch_is_taken(device: torch.device) -> None:
    state = state_for(device)
    sizes: list[int] = []

    def step(meta: MLAMetadata) -> torch.Tensor:
        sizes.append(meta.num_reqs)
        return meta.seq_lens + 0

    graphs = DecodeGraphs(state, [4, 1, 8, 4], step)
    for requests in range(9):
        live = build(device, list(range(1, requests + 1)))
        got = graphs.replay(live)
        assert got.tolist()[:requests] == list(range(1, requests + 1))
        assert got.shape == (next(size for size in (1, 4, 8) if size >= requests),)
    with pytest.raises(ValueError, match="meta has 8 requests, the largest captured batch has 4"):
        DecodeGraphs(state, [4], step).replay(build(device, [1] * 8))
    with pytest.raises(ValueError, match="batch_sizes must name at least one"):
        DecodeGraphs(state, [], step)


def test_steps_within_a_graph_equal_rebuilds(device: torch.device) -> None:
    """One prepared batch, then many replays that each move it on: across page edges, padding staying padding."""
    page_size, steps = 3, 50
    state = state_for(device, page_size)
    tokens, positions, sampled = (torch.zeros(4, dtype=torch.int64, device=device) for _ in range(3))

    def step(meta: MLAMetadata) -> MLAMetadata:
        advance_step(meta, sampled, tokens, positions)
        return meta

    graphs = DecodeGraphs(state, [4], step)
    start = [1, 3, 50]
    table = table_for([length + steps for length in start], page_size, random.Random(0)).to(device)

    def eager(grown: int) -> MLAMetadata:
        lens = torch.tensor([length + grown for length in start], dtype=torch.int32, device=device)
        return builder_for(device, page_size).build(table, lens, [1, 1, 1])

    with pytest.raises(RuntimeError, match="needs a batch that replay has prepared"):
        graphs.replay_again()
    for grown in range(1, steps + 1):
        sampled.copy_(torch.arange(4) + grown)
        captured = graphs.replay(eager(0)) if grown == 1 else graphs.replay_again()
        assert_prepared(state.get_graph_input_buffers(captured), eager(grown))
        assert tokens.tolist() == [grown, grown + 1, grown + 2, 0]
        assert positions.tolist() == [length + grown - 1 for length in start] + [0]


# --- refusals


def test_capture_refuses(device: torch.device) -> None:
    state = state_for(device, max_batch_size=4)
    with pytest.raises(RuntimeError, match="within `with state"):
        state.graph_capture_get_metadata_for_batch(1)
    for size in (0, 5, 2.0):
        with pytest.raises(ValueError, match=f"max_batch_size must be an int from 1 to 4, got {size}"), state.graph_capture(size):
            pass
    with state.graph_capture(2):
        with pytest.raises(ValueError, match="batch_size must be an int from 1 to 2, got 3"):
            state.graph_capture_get_metadata_for_batch(3)
        with pytest.raises(RuntimeError, match="going on already"), state.graph_capture(2):
            pass
    with state.graph_capture(1):
        state.graph_capture_get_metadata_for_batch(1)
    for name in ("max_batch_size", "max_num_pages_per_seq", "max_query_len"):
        sizes = {"max_batch_size": 1, "max_num_pages_per_seq": 1, "max_query_len": 1} | {name: 0}
        with pytest.raises(ValueError, match=f"{name} must be an int of at least 1, got 0"):
            MLAGraphState(config(), device, **sizes)


def test_prepare_refuses_what_does_not_fit(device: torch.device) -> None:
    """And writes nothing then."""
    state = state_for(device, page_size=2)
    captured, buffers = capture(state, 2)
    state.prepare_graph_input_buffers(buffers, build(device, [5, 6], page_size=2))
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    wide = torch.zeros(1, PAGES + 1, dtype=torch.int32, device=device)
    builder = builder_for(device, 2)
    stale = builder.build(wide[:, :PAGES], torch.ones(1, dtype=torch.int32, device=device), [1])
    builder.build(wide[:, :PAGES], torch.ones(1, dtype=torch.int32, device=device), [1])
    refused: list[tuple[MLAMetadata, type[Exception], str]] = [
        (build(device, [1, 2, 3], page_size=2), ValueError, "meta has 3 requests, the graph was captured for 2"),
        (build(device, [9], [2], page_size=2, threshold=2), ValueError, "meta has 2 new tokens a request, the graph was captured for 1"),
        (build(device, [1]), ValueError, "meta is of page_size=1"),
        (
            dualmla.decode_metadata(wide, [1], page_size=2, device=device),
            ValueError,
            f"meta has {PAGES + 1} pages a request, the graph was captured for {PAGES}",
        ),
        (captured, ValueError, "meta is of this graph state itself"),
        (stale, RuntimeError, "stale"),
    ]
    for meta, error, message in refused:
        with pytest.raises(error, match=message):
            state.prepare_graph_input_buffers(buffers, meta)
    mixed = build(device, [9, 5], [1, 1], page_size=2)
    mixed.num_decodes = 1
    with pytest.raises(ValueError, match="meta holds 1 prefills, a graph is captured for decodes alone"):
        state.prepare_graph_input_buffers(buffers, mixed)
    for name, tensor in buffers.items():
        assert torch.equal(tensor, before[name]), name


def test_prepare_refuses_other_buffers(device: torch.device) -> None:
    """A graph reads the memory that was captured: a copy of it would be prepared in vain."""
    state = state_for(device)
    _, buffers = capture(state, 4)
    live = build(device, [5, 6])
    copies = {name: tensor.clone() for name, tensor in buffers.items()}
    short = buffers | {"slot_mapping": buffers["slot_mapping"][:2]}
    for wrong, message in (
        (copies, r"buffers\['block_table'\] \[4, 40\].* is not the one that was captured"),
        (short, r"buffers\['slot_mapping'\] \[2\].* is not the one that was captured, \[4\]"),
        ({"seq_lens": buffers["seq_lens"]}, "buffers must be block_table, seq_lens"),
        ({}, r"buffers are of a batch of 0, captured were \[4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            state.prepare_graph_input_buffers(wrong, live)
    with pytest.raises(ValueError, match="meta must come from graph_capture_get_metadata_for_batch of this state"):
        state.get_graph_input_buffers(live)


def test_every_backend_has_the_hook() -> None:
    for backend in (dualmla.AiterMLABackend, dualmla.TritonMLABackend, dualmla.ReferenceMLABackend):
        assert backend.get_state_cls() is MLAGraphState


# --- what only a GPU can show


@pytest.mark.gpu
@needs_gpu
def test_replay_neither_waits_nor_allocates(device: torch.device) -> None:
    state = state_for(device, 16)
    layer = Layer(device, 16, 8)
    layer.new_queries()
    graphs = DecodeGraphs(state, [8], layer.decode)
    builder, table = builder_for(device, 16), table_for([600] * 8, 16, random.Random(0)).to(device)
    seq_lens = torch.full((8,), 500, dtype=torch.int32, device=device)
    for _ in range(3):
        graphs.replay(builder.build(table, seq_lens, [1] * 8))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            seq_lens.add_(1)
            graphs.replay(builder.build(table, seq_lens, [1] * 8))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before


@pytest.mark.gpu
@needs_gpu
def test_metadata_is_not_made_within_a_captured_stream(device: torch.device) -> None:
    """What makes it padding would be captured too, and undo each prepared batch."""
    state = state_for(device)
    graph = torch.cuda.CUDAGraph()
    with state.graph_capture(4), torch.cuda.graph(graph), pytest.raises(RuntimeError, match="before the stream is captured"):
        state.graph_capture_get_metadata_for_batch(4)


@pytest.mark.gpu
@needs_gpu
def test_two_streams_at_once(device: torch.device) -> None:
    """Scratch is never shared: what two streams decode at the same time is what each decodes alone."""
    layers = [Layer(device, 16, 8, seed) for seed in range(2)]
    metas = [build(device, [600 - 7 * seed] * 8, page_size=16, seed=seed) for seed in range(2)]
    alone = []
    for layer, meta in zip(layers, metas, strict=True):
        layer.new_queries()
        alone.append(layer.decode(meta)[0].clone())
    streams = [torch.cuda.Stream(device) for _ in layers]
    torch.cuda.synchronize()
    for _ in range(50):
        for layer, meta, stream in zip(layers, metas, streams, strict=True):
            with torch.cuda.stream(stream):
                layer.decode(meta)
    torch.cuda.synchronize()
    for layer, expected in zip(layers, alone, strict=True):
        assert torch.equal(layer.out[:8].view(torch.int16), expected.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one() -> None:
    """Built, captured, replayed and moved on where the tensors are."""
    other = torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    state, layer = state_for(other, 16), Layer(other, 16, 8)
    layer.new_queries()
    graphs = DecodeGraphs(state, [8], layer.decode)
    live = build(other, [600, 1, 30], page_size=16)
    out = graphs.replay(live)[0].clone()
    expected = layer.decode(padded(other, live, 8, 1))[0]
    assert torch.equal(out.view(torch.int16), expected.view(torch.int16))
    token = torch.zeros(3, dtype=torch.int64, device=other)
    advance_step(live, token, token.clone(), token.clone())
    assert live.seq_lens.tolist() == [601, 2, 31]
    assert torch.cuda.current_device() == 0
