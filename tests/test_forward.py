"""The whole layer against float64: mixed batches, prefix hits, chunked context, absorbed and up-projected prefill, fp8 caches.

Free cache slots, rows of padding, `output`, and everything allocated on the way are NaN, unused page ids huge: each test is
also one of contracts 3 and 4. Structure is tested in fp32, where a missing key is thousands of budgets.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualmla
import dualmla.attention
from dualmla.attention import absorbed_is_cheaper
from dualmla.context import prefill_plan
from dualmla.testing import Exact, assert_bits_equal, compare
from dualmla.testing.layer import LayerCase, LayerInputs, exact_layer, make_layer, make_layer_inputs, run_layer
from dualmla.validation import float8_refusal

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3FN, E4M3FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def native(device: torch.device) -> torch.dtype:
    """The float8 flavour that the device computes with."""
    return E4M3FNUZ if float8_refusal(E4M3FN, device) else E4M3FN


@functools.lru_cache(maxsize=2)
def truth(case: LayerCase, device: torch.device) -> Exact:
    """Worked out once for all backends and workspaces."""
    return exact_layer(make_layer_inputs(case, device))


def check(case: LayerCase, device: torch.device, backend: str, **keywords: Any) -> torch.Tensor:
    """The forward of a case is within budget and writes exactly the new tokens' rows of the cache."""
    inputs = make_layer_inputs(case, device)
    before = inputs.kv_cache.clone()
    out = run_layer(inputs, backend, **keywords)
    assert out is inputs.output
    comparison = compare(out.unflatten(1, (case.num_heads, -1)), None, truth(case, device), flashmla_gate=False)
    assert comparison.agrees, f"{case}: {comparison.failures}"
    slots = inputs.meta.slot_mapping
    written = slots[slots >= 0]
    dualmla.concat_and_cache_mla(inputs.kv_c, inputs.k_pe, before, slots, k_scale=case.k_scale, backend="reference")
    assert len(written.unique()) == len(written)
    assert_bits_equal(inputs.kv_cache, before, "kv_cache")
    return out


@pytest.fixture(params=["up-projected", "absorbed"])
def path(request: pytest.FixtureRequest, backend: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whichever the rule would choose, prefills of a backend that can do both take this path."""
    if request.param == "absorbed" and backend != "triton":
        pytest.skip(f"{backend} has no other path than the up-projected one")
    monkeypatch.setattr(dualmla.attention, "absorbed_is_cheaper", lambda *_: request.param == "absorbed")
    return str(request.param)


up_projected = pytest.mark.parametrize("path", ["up-projected"], indirect=True)

MIXED = (
    LayerCase(seq_lens=(9, 5), query_lens=(1, 5), dtype=FP32),  # S3, S4, S5: one decode, one prefill
    LayerCase(seq_lens=(5, 9), query_lens=(5, 1), dtype=FP32),  # and the other order
    LayerCase(seq_lens=(6,), query_lens=(2,), dtype=FP32),  # S2: two new tokens over a context
    LayerCase(seq_lens=(32, 40, 48, 56), query_lens=(1, 1, 5, 5), dtype=FP32, page_size=1),  # vLLM's
    LayerCase(seq_lens=(520, 8, 80, 96, 8), query_lens=(8, 8, 16, 16, 8), num_heads=1, dtype=FP32),  # vLLM's
    LayerCase(seq_lens=(40, 1, 30, 2), query_lens=(3, 1, 4, 2), decode_threshold=4, dtype=FP32),  # decodes alone, ragged
    LayerCase(seq_lens=(7, 70, 0, 3, 65), query_lens=(1, 66, 0, 3, 1), padding_tokens=3, page_size=3, dtype=FP32),
    LayerCase(seq_lens=(3, 2, 0, 9), query_lens=(5, 2, 4, 6), page_size=3, dtype=FP32),  # kv shorter than the query
    LayerCase(seq_lens=(40, 50), query_lens=(1, 9), strided=True, padding_tokens=1, dtype=FP32),
    LayerCase(seq_lens=(40, 50), query_lens=(1, 9), kv_lora_rank=64, qk_nope_head_dim=48, qk_rope_head_dim=16, v_head_dim=32, dtype=FP32),
    *(LayerCase(seq_lens=(40, 50, 9), query_lens=(1, 9, 9), dtype=dtype) for dtype in (BF16, FP16)),
)


@pytest.mark.parametrize("case", MIXED, ids=str)
def test_mixed_batches(case: LayerCase, path: str, device: torch.device, backend: str) -> None:
    check(case, device, backend)


def test_vllms_largest_batch(device: torch.device, backend: str) -> None:
    case = LayerCase(seq_lens=(1568, 520, 8, 80, 96, 8), query_lens=(32, 8, 8, 16, 16, 8), num_heads=1, dtype=FP32)
    check(case, device, backend, context_workspace_tokens=600)


@pytest.mark.parametrize("threshold", [1, 5])
def test_mixed_metadata_is_sliced(threshold: int, device: torch.device) -> None:
    """S3, S4, S5, S8: each view has its own lengths, its own indptr from 0, its own longest query, and is one object."""
    meta = make_layer_inputs(LayerCase(seq_lens=(9, 8), query_lens=(1, 5), page_size=1, decode_threshold=threshold), device).meta
    if threshold == 5:
        assert meta.prefill_metadata is None
        assert meta.decode_metadata is meta
        return
    decodes, prefills = meta.decode_metadata, meta.prefill_metadata
    assert decodes is not None
    assert prefills is not None
    assert decodes is meta.decode_metadata
    assert prefills is meta.prefill_metadata
    assert (decodes.qo_indptr.tolist(), decodes.paged_kv_indptr.tolist(), decodes.max_query_len) == ([0, 1], [0, 9], 1)
    assert (prefills.qo_indptr.tolist(), prefills.paged_kv_indptr.tolist(), prefills.max_query_len) == ([0, 5], [0, 8], 5)
    assert prefills.paged_kv_indices[:8].tolist() == meta.block_table[1, :8].tolist()


# chunk sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [16, 64, 1000, None])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@up_projected
def test_result_does_not_depend_on_the_workspace(
    tokens: int | None, dtype: torch.dtype, path: str, device: torch.device, backend: str
) -> None:
    """Each workspace within the same budget of the same truth; one request without context, one with 250 tokens of it."""
    case = LayerCase(seq_lens=(33, 290, 6, 50), query_lens=(1, 40, 6, 7), padding_tokens=2, dtype=dtype)
    check(case, device, backend, context_workspace_tokens=tokens)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@up_projected
def test_merged_lse_does_not_depend_on_the_workspace(
    dtype: torch.dtype, path: str, device: torch.device, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 1e-4 of each other, and in fp32, where keys are not rounded, of the truth."""
    case = LayerCase(seq_lens=(90, 6, 50), query_lens=(40, 6, 7), dtype=dtype)
    merged: list[torch.Tensor] = []
    ops = make_layer(make_layer_inputs(case, device), backend).ops
    merge = ops.merge_attn_states

    def watched(*args: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        merge(*args, out=out, lse=lse)
        merged.append(lse)

    monkeypatch.setattr(ops, "merge_attn_states", watched)
    results = []
    for workspace, pieces in ((16, 6), (64, 2), (1000, 1)):
        run_layer(make_layer_inputs(case, device), backend, context_workspace_tokens=workspace)
        assert len(merged) == pieces
        whole = merged[0]._base  # what is merged piece by piece is one tensor
        assert whole is not None
        results.append(whole)
        merged.clear()
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=1e-4)
    if dtype == FP32:
        torch.testing.assert_close(results[0].double(), truth(case, device).lse, rtol=0, atol=1e-4)


def test_chunks_cover_every_context_token_once(device: torch.device) -> None:
    """The plan: full pieces, each context token in one of them, requests without context counted as empty."""
    case = LayerCase(seq_lens=(20, 6, 45, 9), query_lens=(3, 6, 5, 4), dtype=FP32)
    meta = make_layer_inputs(case, device).meta
    for workspace in (1, 7, 16, 61, 62, 63, 1000):
        chunks = prefill_plan(meta, workspace).chunks
        assert [chunk.num_keys for chunk in chunks[:-1]] == [workspace] * (len(chunks) - 1)
        assert len(chunks) == math.ceil(62 / workspace)
        covered: dict[int, list[int]] = {0: [], 1: [], 2: [], 3: []}
        for chunk in chunks:
            lengths = chunk.cu_seqlens_k.diff().tolist()
            assert (sum(lengths), max(lengths)) == (chunk.num_keys, chunk.max_seqlen_k)
            assert chunk.cu_seqlens_q.diff().tolist() == list(case.query_lens[chunk.requests])
            assert chunk.tokens.start == sum(case.query_lens[: chunk.requests.start])
            assert chunk.tokens.stop - chunk.tokens.start == int(chunk.cu_seqlens_q[-1])
            for request, start, length in zip(range(4)[chunk.requests], chunk.seq_starts.tolist(), lengths, strict=True):
                covered[request] += range(start, start + length)
        assert covered == {0: list(range(17)), 1: [], 2: list(range(40)), 3: list(range(5))}


def test_the_plan_is_made_once_a_step(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of a step share it: only the first waits for the device."""
    meta = make_layer_inputs(LayerCase(seq_lens=(20, 6), query_lens=(3, 6)), device).meta
    assert meta.prefill_metadata is not None
    assert prefill_plan(meta.prefill_metadata, 16) is prefill_plan(meta.prefill_metadata, 16)
    assert prefill_plan(meta.prefill_metadata, 16) is not prefill_plan(meta.prefill_metadata, 8)


@up_projected
def test_workspace_is_bounded(path: str, device: torch.device, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_layer_inputs(LayerCase(seq_lens=(90, 50), query_lens=(4, 7), dtype=FP32), device)
    layer = make_layer(inputs, backend, context_workspace_tokens=32)
    gathered = []
    gather = layer.ops.gather_kv_cache
    monkeypatch.setattr(
        layer.ops, "gather_kv_cache", lambda *args, k_scale: (gathered.append(len(args[4])), gather(*args, k_scale=k_scale))
    )
    layer.forward(inputs.q, inputs.kv_c, inputs.k_pe, inputs.kv_cache, inputs.meta)
    assert gathered == [32, 32, 32, 32, 1]


# prefix hits and shared pages --------------------------------------------------------------------------------------------


@up_projected
@pytest.mark.parametrize("hit", [1, 16, 33, 47])
def test_prefix_hit_equals_recompute(hit: int, path: str, device: torch.device, backend: str) -> None:
    """48 tokens in one prefill, and the last of them over the first `hit` found in the cache: both near the same truth."""
    whole = make_layer_inputs(LayerCase(seq_lens=(48,), query_lens=(48,), dtype=FP32), device)
    out = run_layer(whole, backend)
    cfg = whole.case.config
    builder = dualmla.MLAMetadataBuilder(cfg, device, max_num_seqs=1, max_num_pages_per_seq=8, decode_threshold=1)
    table, seq_lens = whole.meta.block_table.clone(), torch.tensor([48], dtype=torch.int32, device=device)
    meta = builder.build(table, seq_lens, [48 - hit])
    layer = make_layer(whole, backend, context_workspace_tokens=20)
    again = layer.forward(whole.q[hit:], whole.kv_c[hit:], whole.k_pe[hit:], whole.kv_cache, meta)
    exact = truth(whole.case, device)
    tail = Exact(exact.out[hit:], exact.lse[:, hit:], exact.out_allowed[hit:], exact.lse_allowed[:, hit:], exact.value_rms)
    for got, want in ((out, exact), (again, tail)):
        comparison = compare(got.unflatten(1, (2, -1)), None, want, flashmla_gate=False)
        assert comparison.agrees, comparison.failures


@pytest.mark.parametrize("case", [
    LayerCase(seq_lens=(40, 39, 60), query_lens=(1, 5, 12), shared_pages=2, dtype=FP32),
    LayerCase(seq_lens=(37, 36), query_lens=(4, 3), shared_pages=2, dtype=FP32),
], ids=str)  # fmt: skip
def test_requests_share_the_pages_of_a_prefix(case: LayerCase, path: str, device: torch.device, backend: str) -> None:
    inputs = make_layer_inputs(case, device)
    assert bool((inputs.meta.block_table[:, :2] == inputs.meta.block_table[:1, :2]).all())
    check(case, device, backend, context_workspace_tokens=24)


# fp8 caches --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k_scale", [None, 0.3])
@pytest.mark.parametrize("flavour", [E4M3FN, E4M3FNUZ])
def test_fp8_cache(flavour: torch.dtype, k_scale: float | None, device: torch.device, backend: str) -> None:
    """Decodes and contexts see what the cache gives back, new tokens of a prefill what was given."""
    case = LayerCase(seq_lens=(40, 9, 50, 16), query_lens=(1, 1, 9, 16), kv_cache_dtype=flavour, k_scale=k_scale, padding_tokens=1)
    if float8_refusal(flavour, device):
        pytest.skip(f"{device} computes with the other flavour")
    check(case, device, backend, context_workspace_tokens=24)
    check(dataclasses.replace(case, dtype=FP32), device, backend)


def test_k_scale_on_the_device(device: torch.device, backend: str) -> None:
    case = LayerCase(seq_lens=(40, 50), query_lens=(1, 9), kv_cache_dtype=native(device), k_scale=0.5)
    want = check(case, device, backend).clone()
    inputs = make_layer_inputs(case, device)
    scale = torch.tensor([0.5], device=device)
    layer = make_layer(inputs, backend)
    got = layer.forward(inputs.q, inputs.kv_c, inputs.k_pe, inputs.kv_cache, inputs.meta, k_scale=scale)
    assert_bits_equal(got, want, "output")


# what is around the attention ----------------------------------------------------------------------------------------------


def test_profile_run_without_block_tables(device: torch.device, backend: str) -> None:
    """S6: two sequences, empty block tables: both are there, attend to themselves, and nothing is written to the cache."""
    inputs = make_layer_inputs(LayerCase(seq_lens=(5, 9), query_lens=(5, 9), dtype=FP32), device)
    builder = dualmla.MLAMetadataBuilder(inputs.case.config, device, max_num_seqs=4, max_num_pages_per_seq=4)
    empty = torch.empty(2, 0, dtype=torch.int32, device=device)
    meta = builder.build(empty, inputs.meta.seq_lens, [5, 9])
    assert (meta.num_reqs, meta.qo_indptr.tolist()) == (2, [0, 5, 14])
    before = inputs.kv_cache.clone()
    out = run_layer(dataclasses.replace(inputs, meta=meta), backend)
    comparison = compare(out.unflatten(1, (2, -1)), None, truth(inputs.case, device), flashmla_gate=False)
    assert comparison.agrees, comparison.failures
    assert_bits_equal(inputs.kv_cache, before, "kv_cache")


@pytest.mark.parametrize("query_lens", [[1, 1], [1, 9], [5, 9]])
def test_profile_run_of_any_batch_writes_every_row(query_lens: list[int], device: torch.device, backend: str) -> None:
    """Contexts that no page holds can't be attended to; the output is finite, and the cache as it was."""
    inputs = make_layer_inputs(LayerCase(seq_lens=(20, 30), query_lens=tuple(query_lens), dtype=FP32), device)
    builder = dualmla.MLAMetadataBuilder(inputs.case.config, device, max_num_seqs=4, max_num_pages_per_seq=4)
    meta = builder.build(torch.empty(2, 0, dtype=torch.int32, device=device), inputs.meta.seq_lens, query_lens)
    before = inputs.kv_cache.clone()
    out = run_layer(dataclasses.replace(inputs, meta=meta), backend)
    assert bool(out.isfinite().all())
    assert_bits_equal(inputs.kv_cache, before, "kv_cache")


def test_an_empty_batch(device: torch.device, backend: str) -> None:
    check(LayerCase(seq_lens=(), query_lens=(), padding_tokens=3, dtype=FP32), device, backend)


def test_output_is_made_where_none_is_given(device: torch.device, backend: str) -> None:
    case = LayerCase(seq_lens=(9, 20), query_lens=(1, 5), padding_tokens=2)
    want = check(case, device, backend)
    inputs = make_layer_inputs(case, device)
    out = run_layer(dataclasses.replace(inputs, output=None), backend)  # type: ignore[arg-type]
    assert (out.shape, out.dtype) == ((8, 2 * 128), BF16)
    assert_bits_equal(out, want, "output")


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_autocast_changes_no_bits(dtype: torch.dtype, path: str, device: torch.device, backend: str) -> None:
    """The layer's dtype is its config's: a region of autocast around it neither rounds its projections nor mixes its dtypes."""
    case = LayerCase(seq_lens=(9, 50), query_lens=(1, 5), dtype=dtype)
    want = run_layer(make_layer_inputs(case, device), backend)
    with torch.autocast(device.type, dtype=BF16):
        got = run_layer(make_layer_inputs(case, device), backend)
    assert_bits_equal(got, want, "output")


def test_same_bits_each_time(path: str, device: torch.device, backend: str) -> None:
    case = LayerCase(seq_lens=(70, 40, 90), query_lens=(1, 5, 20), padding_tokens=1)
    want = run_layer(make_layer_inputs(case, device), backend, context_workspace_tokens=32)
    for _ in range(2):
        assert_bits_equal(run_layer(make_layer_inputs(case, device), backend, context_workspace_tokens=32), want, "output")


requests = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=5)


@settings(max_examples=12)
@given(requests=requests, page_size=st.sampled_from([1, 3, 16]), workspace=st.sampled_from([5, 16, 1000]), threshold=st.integers(1, 3),
       padding=st.integers(0, 2), absorbed=st.booleans())  # fmt: skip
def test_any_mixed_batch(
    requests: list[tuple[int, int]], page_size: int, workspace: int, threshold: int, padding: int, absorbed: bool,
    device: torch.device, backend: str,
) -> None:  # fmt: skip
    """Any order of any context and query lengths; small sizes, for the interpreter's sake."""
    case = LayerCase(
        seq_lens=tuple(context + new for context, new in requests), query_lens=tuple(new for _, new in requests),
        page_size=page_size, decode_threshold=threshold, padding_tokens=padding, dtype=FP32,
        kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dualmla.attention, "absorbed_is_cheaper", lambda *_: absorbed)
        check(case, device, backend, context_workspace_tokens=workspace)


# the rule ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 8])
def test_which_path_is_cheaper(requests: int) -> None:
    """As measured with DeepSeek's sizes, 16 heads and 128 (docs/performance.md): the table's clear cases."""
    cfg = dualmla.MLAConfig(num_heads=16, softmax_scale=0.1)

    def absorbs(queries: int, context: int) -> bool:
        return absorbed_is_cheaper(cfg, [queries] * requests, [context] * requests)

    for queries in (2, 16, 64, 128, 512):
        assert not absorbs(queries, 0), queries
    for queries in (2, 16, 64):
        assert absorbs(queries, 1024), queries
        assert absorbs(queries, 8192), queries
    for queries in (128, 256, 512):
        assert not absorbs(queries, 1024), queries
    for queries in (256, 512):
        assert not absorbs(queries, 8192), queries


def test_the_batch_goes_one_way() -> None:
    cfg = dualmla.MLAConfig(num_heads=16, softmax_scale=0.1)
    assert absorbed_is_cheaper(cfg, [8, 8], [1024, 0])
    assert not absorbed_is_cheaper(cfg, [8, 300], [1024, 0])
    assert not absorbed_is_cheaper(cfg, [], [])
    assert not absorbed_is_cheaper(cfg, [5], [-3]), "tokens before the first position are no context"


def test_the_rule_is_followed_but_for_fp8(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, absorbed in (({}, True), ({"seq_lens": (6, 6)}, False), ({"kv_cache_dtype": native(device)}, False)):
        inputs = make_layer_inputs(LayerCase(**{"seq_lens": (60, 60), "query_lens": (6, 6)} | changes), device)  # type: ignore[arg-type]
        layer = make_layer(inputs, "triton")
        calls: list[str] = []
        for name in ("mla_decode", "mla_prefill"):
            original = getattr(layer.ops, name)
            monkeypatch.setattr(layer.ops, name, functools.partial(_note, calls, name, original))
        layer.forward(inputs.q, inputs.kv_c, inputs.k_pe, inputs.kv_cache, inputs.meta)
        assert set(calls) == ({"mla_decode"} if absorbed else {"mla_prefill"}), changes
        monkeypatch.undo()


def _note(calls: list[str], name: str, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    calls.append(name)
    original(*args, **kwargs)


# contract 9 --------------------------------------------------------------------------------------------------------------

BAD = {
    "q as [T, H * D]": ({"q": lambda x: x.flatten(1)}, ValueError, "q must have 3 dimensions"),
    "q of other heads": ({"q": lambda x: x[:, :1]}, ValueError, r"q must have shape \[any, 2, 192\], got \[6, 1, 192\]"),
    "q of other dtype": ({"q": lambda x: x.half()}, TypeError, "q must be bfloat16, got float16"),
    "kv_c of fewer tokens": ({"kv_c": lambda x: x[:5]}, ValueError, r"kv_c must have shape \[6, 512\], got \[5, 512\]"),
    "k_pe not dense": ({"k_pe": lambda x: x.repeat(1, 2)[:, ::2]}, ValueError, "k_pe must be contiguous in its last dimension"),
    "cache of other dtype": ({"kv_cache": lambda x: x.float()}, TypeError, "kv_cache must be bfloat16, got float32"),
    "cache of other pages": ({"kv_cache": lambda x: x[:, :8]}, ValueError, "kv_cache has pages of 8 tokens, the metadata .* page_size=16"),
    "cache elsewhere": ({"kv_cache": lambda x: x.to("meta")}, ValueError, "kv_cache is on meta"),
    "cache too small": ({"kv_cache": lambda x: x[:1]}, ValueError, r"block_table\[\d, \d\] is \d+, inside the live length"),
    "fewer tokens than the metadata": (
        {name: lambda x: x[:4] for name in ("q", "kv_c", "k_pe", "output")}, ValueError, "q has 4 tokens, the metadata describes 6",
    ),
    "output of other width": ({"output": lambda x: x[:, :128]}, ValueError, r"output must have shape \[6, 256\], got \[6, 128\]"),
    "k_scale of two": ({"k_scale": lambda _: torch.ones(2)}, ValueError, "k_scale must be a float or an fp32 tensor of one element"),
    "k_scale 0": ({"k_scale": lambda _: 0.0}, ValueError, "k_scale must be finite and positive"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_the_cache_is_written(
    name: str, device: torch.device, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALMLA_DEBUG", "1")
    changes, error, message = BAD[name]
    inputs = make_layer_inputs(LayerCase(seq_lens=(20, 30), query_lens=(1, 5)), device)
    before = inputs.kv_cache.clone()
    arguments = {n: getattr(inputs, n) for n in ("q", "kv_c", "k_pe", "kv_cache", "meta", "output")} | {"k_scale": None}
    arguments |= {argument: change(arguments[argument]) for argument, change in changes.items()}
    with pytest.raises(error, match=message):
        make_layer(inputs, backend).forward(**arguments)
    assert_bits_equal(inputs.kv_cache, before, "kv_cache")
    assert bool(inputs.output.isnan().all())


@pytest.mark.parametrize("refused", ["decode_refusals", "prefill_refusals"])
def test_a_forced_backend_refuses_before_the_cache_is_written(refused: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """AITER, asked by name for a batch of which it can't do one half."""
    aiter = dualmla.AiterMLABackend
    for hook in ("decode_refusals", "prefill_refusals"):
        monkeypatch.setattr(aiter, hook, lambda call, hook=hook: [f"{hook}: {call.num_heads} heads"] if hook == refused else [])
    inputs = make_layer_inputs(LayerCase(seq_lens=(20, 30), query_lens=(1, 5)), device)
    before = inputs.kv_cache.clone()
    layer = aiter.get_impl_cls()(inputs.case.config, inputs.w_uk, inputs.w_uv)
    with pytest.raises(dualmla.BackendUnavailable, match=f"{refused}: 2 heads"):
        layer.forward(inputs.q, inputs.kv_c, inputs.k_pe, inputs.kv_cache, inputs.meta, output=inputs.output)
    assert_bits_equal(inputs.kv_cache, before, "kv_cache")
    assert bool(inputs.output.isnan().all())


def test_stale_metadata_is_refused(device: torch.device, backend: str) -> None:
    inputs = make_layer_inputs(LayerCase(seq_lens=(20,), query_lens=(5,)), device)
    builder = dualmla.MLAMetadataBuilder(inputs.case.config, device, max_num_seqs=1, max_num_pages_per_seq=4)
    stale = builder.build(inputs.meta.block_table, inputs.meta.seq_lens, [5])
    builder.build(inputs.meta.block_table, inputs.meta.seq_lens, [5])
    with pytest.raises(RuntimeError, match="stale"):
        run_layer(dataclasses.replace(inputs, meta=stale), backend)


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True])
def test_bad_workspace_is_refused(tokens: Any, device: torch.device, backend: str) -> None:
    inputs: LayerInputs = make_layer_inputs(LayerCase(seq_lens=(20,), query_lens=(5,)), device)
    with pytest.raises(ValueError, match=f"context_workspace_tokens must be None or an int of at least 1, got {tokens}"):
        make_layer(inputs, backend, context_workspace_tokens=tokens)


@pytest.mark.parametrize("workspace", [16, None])
@up_projected
def test_a_context_that_is_not_finite_is_seen(path: str, workspace: int | None, device: torch.device, backend: str) -> None:
    """The merge of the context's pieces drops none that went wrong."""
    inputs = make_layer_inputs(LayerCase(seq_lens=(50,), query_lens=(20,), page_size=1, dtype=FP32), device)
    inputs.kv_cache[int(inputs.meta.block_table[0, 9]), 0, 5] = math.nan
    assert bool(run_layer(inputs, backend, context_workspace_tokens=workspace).isnan().all())


def test_output_of_inference_mode_is_refused_outside(device: torch.device, backend: str) -> None:
    """torch can't write it there; the cache is still as it was when that is said."""
    inputs = make_layer_inputs(LayerCase(seq_lens=(9, 5), query_lens=(1, 5), dtype=FP32), device)
    before = inputs.kv_cache.clone()
    with torch.inference_mode():
        output = torch.empty_like(inputs.output)
    with pytest.raises(ValueError, match=r"output was made under torch.inference_mode\(\)"):
        run_layer(dataclasses.replace(inputs, output=output), backend)
    assert_bits_equal(inputs.kv_cache, before, "kv_cache")
