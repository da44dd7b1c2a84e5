"""The defects of the seed, vLLM 0.9.2's AITER MLA backend, each on its smallest input; what graphs bring is tested with them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import dualmla
from dualmla.testing import DecodeCase, assert_decode_agrees, compare, make_decode_inputs, run_decode
from dualmla.testing.layer import LayerCase, LayerInputs, exact_layer, make_layer_inputs, run_layer

DIMENSION_SCALE = 192**-0.5
"""What a backend that drops the scale falls back to."""


def failures(output: torch.Tensor, inputs: LayerInputs, case: LayerCase) -> list[str]:
    """How the layer's output disagrees with the truth of `case`, which may be another than the inputs' own."""
    exact = exact_layer(dataclasses.replace(inputs, case=case))
    return compare(output.view(exact.out.shape), None, exact, flashmla_gate=False).failures


def check_layer(case: LayerCase, device: torch.device, backend: str) -> tuple[LayerInputs, torch.Tensor]:
    inputs = make_layer_inputs(case, device)
    output = run_layer(inputs, backend)
    assert failures(output, inputs, case) == []
    return inputs, output


@pytest.mark.parametrize(("seq_lens", "query_lens"), [((8,), (8,)), ((8,), (1,)), ((9, 8), (1, 8))], ids=["prefill", "decode", "both"])
def test_s1_the_scale_is_kept(seq_lens: tuple[int, ...], query_lens: tuple[int, ...], device: torch.device, backend: str) -> None:
    """DeepSeek's YaRN scale in prefill and decode alike; the scale of the head dimension would be noticed."""
    case = LayerCase(seq_lens=seq_lens, query_lens=query_lens)
    inputs, output = check_layer(case, device, backend)
    assert failures(output, inputs, dataclasses.replace(case, softmax_scale=DIMENSION_SCALE)) != []


@pytest.mark.parametrize("context", [1, 16, 70])
def test_s2_two_new_tokens_over_a_context(context: int, device: torch.device, backend: str) -> None:
    """The LSE that merges context and new tokens is kept; a pair (out, lse) of exactly 2 tokens is not unpacked as its rows."""
    check_layer(LayerCase(seq_lens=(context + 2,), query_lens=(2,)), device, backend)


MIXED = [((9, 5), (1, 5)), ((5, 9), (5, 1)), ((9, 5, 7), (1, 5, 1))]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("seq_lens", "query_lens"), MIXED, ids=str)
def test_s3_s4_s5_mixed_batches(
    seq_lens: tuple[int, ...], query_lens: tuple[int, ...], page_size: int, device: torch.device, backend: str
) -> None:
    """Each request gets what it gets alone: its own pages, query length and tokens, in either order."""
    case = LayerCase(seq_lens=seq_lens, query_lens=query_lens, page_size=page_size)
    inputs, _ = check_layer(case, device, backend)
    meta, decodes = inputs.meta, inputs.meta.decode_metadata
    assert meta.qo_indptr.tolist() == [0, *torch.tensor(query_lens).cumsum(0).tolist()]
    if query_lens[0] == 1:
        assert decodes is not None
        assert decodes.max_query_len == 1
        assert decodes.qo_indptr.tolist() == [0, 1]
        assert decodes.paged_kv_indptr.tolist() == [0, -(-seq_lens[0] // page_size)]
    else:
        assert decodes is None, "a decode behind a prefill takes the prefill's path"


def test_s6_no_sequence_of_a_profile_run_vanishes(device: torch.device, backend: str) -> None:
    """Two sequences without block tables: each of their tokens has a row of output, and nothing is written to the cache."""
    cfg = dualmla.MLAConfig(num_heads=2, softmax_scale=0.1)
    builder = dualmla.MLAMetadataBuilder(cfg, device, max_num_seqs=2, max_num_pages_per_seq=8)
    lengths = torch.tensor([3, 4], dtype=torch.int32, device=device)
    meta = builder.build(torch.empty(2, 0, dtype=torch.int32, device=device), lengths, [3, 4])
    assert (meta.num_reqs, meta.num_tokens, meta.slot_mapping.tolist()) == (2, 7, [-1] * 7)

    inputs = make_layer_inputs(LayerCase(seq_lens=(3, 4), query_lens=(3, 4), page_size=1), device)
    inputs.kv_cache.fill_(float("nan"))
    output = run_layer(dataclasses.replace(inputs, meta=meta), backend)
    assert failures(output, inputs, inputs.case) == []
    assert inputs.kv_cache.isnan().all()


def test_s8_views_are_one_object_each(device: torch.device) -> None:
    inputs = make_layer_inputs(LayerCase(seq_lens=(9, 5), query_lens=(1, 5)), device)
    assert inputs.meta.decode_metadata is inputs.meta.decode_metadata
    assert inputs.meta.prefill_metadata is inputs.meta.prefill_metadata


@pytest.mark.parametrize("page_size", [1, 16])
def test_s11_the_flag_is_on_and_there_is_no_aiter(page_size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto falls back and says so; what AITER was forced for raises instead."""
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    monkeypatch.setenv("VLLM_ROCM_USE_AITER_MLA", "1")
    monkeypatch.setattr(dualmla.AiterMLABackend, "not_supported_reasons", classmethod(lambda cls, cfg, device: ["aiter is not installed"]))
    inputs = make_decode_inputs(DecodeCase(num_heads=16, seq_lens=(20, 3), page_size=page_size), device)
    assert_decode_agrees(*run_decode(inputs), inputs)
    with pytest.raises(dualmla.BackendUnavailable, match="aiter is not installed"):
        run_decode(inputs, "aiter")


@pytest.mark.parametrize("heads", [4, 8, 24, 32, 96])
def test_s12_head_counts_that_aiter_does_not_have(heads: int, device: torch.device, backend: str) -> None:
    inputs = make_decode_inputs(DecodeCase(num_heads=heads, seq_lens=(20, 3), page_size=16), device)
    assert_decode_agrees(*run_decode(inputs, backend), inputs)


def test_s13_a_batch_without_decodes_has_no_decode_view(device: torch.device) -> None:
    """An indptr always has an entry: its length says nothing."""
    prefills = make_layer_inputs(LayerCase(seq_lens=(5,), query_lens=(5,)), device).meta
    assert prefills.decode_metadata is None
    assert prefills.prefill_metadata is prefills
