"""Captured graphs over a stand-in for AITER that never looks at a number on the host: what is captured is what a GPU replays.

On a CPU a replay calls the step again; on a GPU it is a graph, and any wait of the host for the device while it is prepared and
replayed is an error.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from aiter_case import SCALE, Case
from aiter_stand_in import M22, S4, STRAIGHT

from dualmla import MLAConfig, MLAGraphState, advance_step, decode_metadata
from dualmla.backends.aiter import launch
from dualmla.backends.aiter.signatures import describe
from dualmla.backends.aiter.support import launch_shape
from dualmla.backends.reference import ReferenceMLABackend
from dualmla.graph import DecodeGraphs
from dualmla.metadata import MLAMetadata

MAX_KEYS = 96
LIVE = [([9, 70, 33, 5], [1, 1, 1, 1]), ([80], [1]), ([5, 0, 66], [1, 1, 1]), ([9, 7, 33], [1, 0, 1])]


def aiter_on_device() -> Any:
    """Of generation S4: a plan of one item a request, and a decode that follows it, or `kv_indptr` where there is none."""
    package, mla = types.ModuleType("aiter"), types.ModuleType("aiter.mla")

    def plan(given: dict[str, Any]) -> None:
        kv_indptr, work = given["seqlens_kv_indptr"], given["work_info_set"]
        n = kv_indptr.shape[0] - 1
        work[:n, 4], work[:n, 5] = kv_indptr[:-1], kv_indptr[1:]

    def sizes(batch: int, *rest: Any) -> Any:
        return tuple((shape, torch.int32) for shape in (2, 2, (batch, 8), batch + 1, (batch, 2), 1))

    def decode(given: dict[str, Any]) -> tuple[None, torch.Tensor]:
        q, work, kv_indptr = given["q"], given["work_info_set"], given["kv_indptr"]
        n = kv_indptr.shape[0] - 1
        first, last = (kv_indptr[:-1], kv_indptr[1:]) if work is None else (work[:n, 4], work[:n, 5])
        if work is None:  # its own split indptr would have been made by another call
            splits = given["num_kv_splits"]
            right = given["num_kv_splits_indptr"] == torch.arange(n + 1, device=q.device) * splits
            last = torch.where(right.all(), last, first)
        place = first[:, None] + torch.arange(MAX_KEYS, device=q.device)
        live = place < last[:, None]
        slots = given["kv_indices"][torch.where(live, place, 0).long()]
        scale = 1.0 if given["kv_scale"] is None else given["kv_scale"].double()
        keys = given["kv_buffer"][torch.where(live, slots, 0).long(), 0, 0].double() * scale
        keys = torch.where(live[..., None], keys, 0.0)
        scores = given["sm_scale"] * torch.einsum("nhd,nkd->nhk", q[:n].double(), keys)
        weights = torch.softmax(scores.masked_fill(~live[:, None], float("-inf")), -1)
        given["o"][:n] = torch.einsum("nhk,nkd->nhd", weights, keys[..., :512]).bfloat16()
        return None, torch.zeros(0)

    namespace: dict[str, Any] = {"plan": plan, "decode": decode}
    exec(f"def get_mla_metadata_v1({M22.format(STRAIGHT)}):\n    return plan(locals())", namespace)
    exec(f"def mla_decode_fwd({S4}):\n    return decode(locals())", namespace)
    package.get_mla_metadata_v1, package.get_mla_metadata_info_v1 = namespace["get_mla_metadata_v1"], sizes  # type: ignore[attr-defined]
    mla.mla_decode_fwd = namespace["mla_decode_fwd"]  # type: ignore[attr-defined]
    return describe(package, mla, "stand-in")


@contextlib.contextmanager
def no_wait(device: torch.device) -> Iterator[None]:
    """A wait of the host for the device raises."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn"])
def test_captured_decodes_follow_what_is_live(cache: str, page_size: int, device: torch.device) -> None:
    """Batches of several sizes in turn, and two steps on within the graph: the plan, or our split indptr, is the batch's own."""
    aiter = aiter_on_device()
    cfg = MLAConfig(num_heads=16, softmax_scale=SCALE, page_size=page_size, kv_cache_dtype=getattr(torch, cache))
    shape = launch_shape(aiter.signature, "gfx950", 16, cfg.cache_dtype)
    assert shape is not None
    assert shape.persistent == (cache != "bfloat16")
    state = MLAGraphState(cfg, device, max_batch_size=4, max_num_pages_per_seq=MAX_KEYS // page_size)
    q = torch.zeros(4, 16, 576, dtype=torch.bfloat16, device=device)
    rows = 100 * page_size
    latents = torch.randn(rows, 576, generator=torch.Generator().manual_seed(3))
    kv_cache = latents.bfloat16().to(cfg.cache_dtype).view(-1, page_size, 576).to(device)
    token = torch.zeros(4, dtype=torch.int64, device=device)

    def step(meta: MLAMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        """Two layers, and on to the next token."""
        outs = torch.full((2, meta.num_tokens, 16, 512), float("nan"), dtype=torch.bfloat16, device=device)
        for out in outs:
            launch.decode(
                aiter, shape, q[: meta.num_tokens], kv_cache, meta, SCALE, causal=True, out=out, lse=None, k_scale=1.0,
                compute_units=8, captured=device.type == "cpu" or torch.cuda.is_current_stream_capturing(),
            )  # fmt: skip
        advance_step(meta, token[: meta.num_tokens], token[: meta.num_tokens], token[: meta.num_tokens])
        return outs[0], outs[1]

    graphs = DecodeGraphs(state, [4, 2], step)
    for seq_lens, query_lens in LIVE:
        case = Case(seq_lens, query_lens, page_size=page_size)
        table = case.meta.block_table.clamp(max=99)  # the pages stepped into are there
        live = sum(query_lens)
        q[:live] = case.q.to(device)
        for on in range(3):
            lengths = [n + on * new for n, new in zip(seq_lens, query_lens, strict=True)]
            meta = decode_metadata(table, lengths, query_lens, page_size=page_size, device=device)
            with no_wait(device):
                outs = graphs.replay(meta) if on == 0 else graphs.replay_again()
            expected = torch.empty_like(outs[0][:live])
            ReferenceMLABackend.mla_decode(
                q[:live], kv_cache, meta, SCALE, causal=True, out=expected, lse=None, k_scale=1.0, num_kv_splits=None
            )
            for out in outs:
                torch.testing.assert_close(out[:live].float(), expected.float(), rtol=2**-7, atol=1e-6)
                assert torch.equal(out[live:], torch.zeros_like(out[live:]))
