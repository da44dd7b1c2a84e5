"""Which AITER is met, told by the parameters of its `mla_decode_fwd`."""

from __future__ import annotations

import inspect
import types

import aiter_stand_in as stand_in
import pytest
import test_adapter_prefill

from dualmla.backends.aiter.signatures import GENERATIONS, UnknownSignature, describe, read_signature


def parameters(text: str) -> list[inspect.Parameter]:
    namespace: dict[str, object] = {}
    exec(f"def f({text}): ...", namespace)
    return list(inspect.signature(namespace["f"]).parameters.values())


@pytest.mark.parametrize("generation", GENERATIONS)
def test_each_generation_is_told_by_its_parameters(generation: str) -> None:
    signature = describe(stand_in.PACKAGE, stand_in.module(generation), "any").signature
    assert signature.generation == generation
    assert signature.writes_lse == (generation >= "S6")
    assert signature.honours_split_indptr == (generation >= "S3")


def test_a_backport_counts_by_what_it_takes() -> None:
    # page_size came with S5, causal with S8: a branch with both and without the ones between
    text = stand_in.S1.replace("max_seqlen_q, ", "max_seqlen_q, page_size=1, ") + ", causal=True"
    assert read_signature(parameters(text), writes_lse=False).generation == "S8"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (stand_in.S2.replace("kv_last_page_lens, ", ""), "no parameter kv_last_page_lens"),
        (stand_in.S2.replace("q, kv_buffer", "q, kv_buffer, workspace"), "demands workspace"),
        (stand_in.S2.replace("qo_indptr, ", ""), "only one of"),
    ],
)
def test_an_unknown_signature_is_refused_with_what_differs(text: str, complaint: str) -> None:
    with pytest.raises(UnknownSignature, match=complaint):
        read_signature(parameters(text), writes_lse=False)


def test_a_prefill_that_does_not_take_our_names_is_none() -> None:
    package = types.ModuleType("aiter")
    package.flash_attn_varlen_func = test_adapter_prefill.flash_attn_varlen_func  # type: ignore[attr-defined]
    assert describe(package, stand_in.module("S2"), "any").attention is test_adapter_prefill.flash_attn_varlen_func
    package.flash_attn_varlen_func = lambda q, k, v, softmax_scale: None  # type: ignore[attr-defined]
    assert describe(package, stand_in.module("S2"), "any").attention is None
