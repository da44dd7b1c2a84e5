"""The graph state under the AITER backend: one capture, replays of other batches, against the reference on what is live."""

from __future__ import annotations

import aiter_stand_in as stand_in
import pytest
import torch
from aiter_case import SCALE, Case

from dualmla import MLAConfig, MLAGraphState
from dualmla.backends.aiter import launch
from dualmla.backends.aiter.signatures import describe
from dualmla.backends.aiter.support import launch_shape

LIVE = [
    ([9, 70, 33, 5], [1, 1, 1, 1]),
    ([70], [1]),
    ([5, 0, 66], [1, 1, 1]),
    ([9, 7, 5], [1, 0, 1]),  # a request without a token: the kernel for one token would misplace what follows
    ([9, 7, 70], [3, 1, 2]),
    ([2, 3], [3, 3]),  # fewer keys than queries
]


@pytest.mark.parametrize("generation", ["S2", "S8"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("seq_lens", "query_lens"), LIVE)
def test_a_replay_decodes_what_is_live_and_zeroes_the_rest(
    generation: str, page_size: int, seq_lens: list[int], query_lens: list[int]
) -> None:
    case = Case(seq_lens, query_lens, page_size=page_size)
    longest = 1 if max(query_lens) == 1 else 3
    cfg = MLAConfig(num_heads=16, softmax_scale=SCALE, page_size=page_size)
    state = MLAGraphState(cfg, "cpu", max_batch_size=4, max_num_pages_per_seq=80, max_query_len=longest)
    with state.graph_capture(4):
        captured = state.graph_capture_get_metadata_for_batch(4)
    aiter = describe(stand_in.PACKAGE, stand_in.module(generation), "stand-in")
    shape = launch_shape(aiter.signature, "gfx942", 16)
    assert shape is not None
    q = torch.full((4 * longest, 16, 576), 7.0, dtype=torch.bfloat16)
    out = torch.full((4 * longest, 16, 512), float("nan"), dtype=torch.bfloat16)

    def replay() -> None:
        launch.decode(
            aiter, shape, q, case.kv_cache, captured, SCALE,
            causal=True, out=out, lse=None, k_scale=1.0, compute_units=304, captured=True,
        )  # fmt: skip

    replay()  # all padding, as while capturing
    assert torch.equal(out, torch.zeros_like(out))
    state.prepare_graph_input_buffers(state.get_graph_input_buffers(captured), case.meta)
    live = sum(query_lens)
    q[:live] = case.q
    replay()
    torch.testing.assert_close(out[:live].float(), case.reference()[0].float(), rtol=2**-7, atol=1e-6)
    assert torch.equal(out[live:], torch.zeros_like(out[live:]))


@pytest.mark.parametrize("generation", ["S2", "S8"])
def test_captured_sizes_share_the_memory_of_the_keys(generation: str) -> None:
    """Replayed in turn: what a size reads was written for it, and layers of a replay write nothing."""
    cfg, mla = MLAConfig(num_heads=16, softmax_scale=SCALE, page_size=4), stand_in.module(generation)
    state = MLAGraphState(cfg, "cpu", max_batch_size=4, max_num_pages_per_seq=80)
    captured = {}
    with torch.inference_mode(), state.graph_capture(4):  # prepared outside of it
        for size in (4, 2):
            captured[size] = state.graph_capture_get_metadata_for_batch(size)
            padding = Case([1], [1], page_size=4)
            padding.meta, padding.q = captured[size], torch.zeros(size, 16, 576, dtype=torch.bfloat16)
            padding.decoded(mla, captured=True)
    places = {(call["kv_indices"].data_ptr(), call["kv_indptr"].shape[0]) for call in mla.calls}
    assert len({place for place, _ in places}) == 1
    for seq_lens in ([9, 70, 33], [20, 5], [66, 9, 5, 40], [7]):
        case = Case(seq_lens, [1] * len(seq_lens), page_size=4)
        size = 2 if len(seq_lens) <= 2 else 4
        state.prepare_graph_input_buffers(state.get_graph_input_buffers(captured[size]), case.meta)
        expected, live = case.reference()[0], len(seq_lens)
        case.meta, case.q = captured[size], torch.cat([case.q, torch.zeros(size - live, 16, 576, dtype=torch.bfloat16)])
        for _ in range(2):
            out = case.decoded(mla, captured=True)[0]
            torch.testing.assert_close(out[:live].float(), expected.float(), rtol=2**-7, atol=1e-6)
    assert {(call["kv_indices"].data_ptr(), call["kv_indptr"].shape[0]) for call in mla.calls} == places
