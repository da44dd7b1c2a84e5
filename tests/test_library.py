"""The operators behind `torch.compile`: their schemas and fakes, and graphs without a break that give the same bits."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.library import opcheck

import dualmla
from dualmla.testing import DecodeCase, assert_bits_equal, make_decode_inputs
from dualmla.testing.layer import LayerCase, LayerInputs, make_layer, make_layer_inputs
from dualmla.testing.prefill import PrefillCase, PrefillInputs, make_prefill_inputs
from dualmla.validation import float8_refusal

FP32 = torch.float32
OPS = torch.ops.dualmla


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One graph or an error; aot_eager traces, functionalises and runs without a C++ compiler."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def prefill_inputs(device: torch.device, seed: int = 0) -> PrefillInputs:
    return make_prefill_inputs(PrefillCase(query_lens=(8, 5), key_lens=(9, 30), dtype=FP32, seed=seed), device)


def layer_inputs(device: torch.device, seed: int = 0, **changes: Any) -> LayerInputs:
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    arguments = {"seq_lens": (9, 20), "query_lens": (1, 5), "dtype": FP32, "seed": seed} | sizes | changes
    return make_layer_inputs(LayerCase(**arguments), device)


def cache_arguments(device: torch.device) -> list[torch.Tensor]:
    """kv_c, k_pe, kv_cache, slot_mapping."""
    kv_c, k_pe = torch.randn(4, 64, device=device), torch.randn(4, 16, device=device)
    return [kv_c, k_pe, torch.zeros(4, 2, 80, device=device), torch.tensor([5, -1, 0, 3], device=device)]


def gather_arguments(device: torch.device) -> list[torch.Tensor]:
    """kv_cache, block_table, cu_seqlens, seq_starts, out."""
    ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([[3, 1], [0, 2]], [0, 3, 4], [1, 2])]
    return [torch.randn(4, 2, 80, device=device), *ints, torch.full((6, 80), math.nan, device=device)]


def merge_arguments(device: torch.device) -> list[torch.Tensor]:
    """out_a, lse_a, out_b, lse_b."""
    return [torch.randn(*shape, device=device) for shape in ((5, 3, 32), (3, 5), (5, 3, 32), (3, 5))]


# the operators -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("return_lse", "given_out"), [(True, False), (False, True)])
def test_opcheck_decode(return_lse: bool, given_out: bool, device: torch.device, backend: str) -> None:
    inputs = make_decode_inputs(DecodeCase(num_heads=2, seq_lens=(9, 5), dtype=FP32), device)
    inputs.kv_cache.nan_to_num_()  # opcheck compares arguments, and NaN is not itself
    out = torch.zeros_like(inputs.out) if given_out else None
    opcheck(OPS.mla_decode, (inputs.q, inputs.kv_cache, inputs.meta.handle, 512, 0.1, True, return_lse, None, None, None, out, backend))


@pytest.mark.parametrize(("return_lse", "given_out"), [(True, False), (False, True)])
def test_opcheck_prefill(return_lse: bool, given_out: bool, device: torch.device, backend: str) -> None:
    inputs = prefill_inputs(device)
    out = torch.zeros_like(inputs.out) if given_out else None
    opcheck(
        OPS.mla_prefill,
        (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, 8, 30, 0.1, True, return_lse, out, backend),
    )


def test_opcheck_cache_functions(device: torch.device, backend: str) -> None:
    opcheck(OPS.concat_and_cache_mla, (*cache_arguments(device), torch.tensor(0.5, device=device), None, backend))
    opcheck(OPS.concat_and_cache_mla, (*cache_arguments(device), None, 0.5, backend))
    opcheck(OPS.gather_kv_cache, (*gather_arguments(device), None, None, backend))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_opcheck_merge(dtype: torch.dtype | None, device: torch.device, backend: str) -> None:
    arguments = merge_arguments(device)
    opcheck(OPS.merge_attn_states, (*arguments, None if dtype is None else torch.zeros_like(arguments[0], dtype=dtype), backend))


def test_opcheck_forward(device: torch.device, backend: str) -> None:
    inputs = layer_inputs(device)
    inputs.kv_cache.nan_to_num_()
    layer = make_layer(inputs, backend)
    output = torch.zeros_like(inputs.output)
    opcheck(OPS.mla_forward, (inputs.q, inputs.kv_c, inputs.k_pe, inputs.kv_cache, output, layer.handle, inputs.meta.handle, None, None))


# graphs ------------------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """What an engine compiles: projections around the attention."""

    def __init__(self, impl: Any, width: int) -> None:
        super().__init__()
        self.impl = impl
        self.o_proj = torch.nn.Linear(width, 16).requires_grad_(False)

    def forward(self, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, meta: dualmla.MLAMetadata) -> Any:
        return self.o_proj(self.impl.forward(q * 1.5, kv_c, k_pe, kv_cache, meta))


@pytest.mark.parametrize("query_lens", [(1, 5), (1, 1), (4, 5)])
def test_a_layer_compiles_without_a_break(query_lens: tuple[int, int], device: torch.device, backend: str) -> None:
    """The same bits and the same cache as without compiling; the next batch, of other lengths, runs the same graph."""
    batches = [layer_inputs(device, seed, query_lens=query_lens, seq_lens=(9 + seed, 20)) for seed in range(2)]
    eager = [layer_inputs(device, seed, query_lens=query_lens, seq_lens=(9 + seed, 20)) for seed in range(2)]
    layer = Layer(make_layer(batches[0], backend), 64).to(device)
    graph = compiled(layer)
    with torch.no_grad():
        for number, (batch, same) in enumerate(zip(batches, eager, strict=True)):
            want = layer(same.q, same.kv_c, same.k_pe, same.kv_cache, same.meta)
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                got = graph(batch.q, batch.kv_c, batch.k_pe, batch.kv_cache, batch.meta)
            assert_bits_equal(got, want, "output")
            assert_bits_equal(batch.kv_cache, same.kv_cache, "kv_cache")


def test_a_layer_with_fp8_cache_and_given_output(device: torch.device, backend: str) -> None:
    flavour = torch.float8_e4m3fn if float8_refusal(torch.float8_e4m3fn, device) is None else torch.float8_e4m3fnuz
    changes: dict[str, Any] = {"kv_cache_dtype": flavour, "dtype": torch.bfloat16}
    inputs, same = (layer_inputs(device, **changes) for _ in range(2))
    layer = make_layer(inputs, backend)
    scale = torch.tensor(0.5, device=device)
    want = layer.forward(same.q, same.kv_c, same.k_pe, same.kv_cache, same.meta, k_scale=scale)

    def step(*tensors: torch.Tensor, meta: dualmla.MLAMetadata, output: torch.Tensor) -> torch.Tensor:
        return layer.forward(*tensors, meta, k_scale=scale, output=output)

    got = compiled(step)(inputs.q, inputs.kv_c, inputs.k_pe, inputs.kv_cache, meta=inputs.meta, output=inputs.output)
    assert_bits_equal(got, want, "output")
    assert_bits_equal(inputs.output, want, "the given output")
    assert_bits_equal(inputs.kv_cache.view(torch.uint8), same.kv_cache.view(torch.uint8), "kv_cache")


@pytest.mark.parametrize("given_out", [True, False])
def test_each_function_compiles_without_a_break(given_out: bool, device: torch.device, backend: str) -> None:
    """Alone, with and without a given out."""
    p, d = prefill_inputs(device), make_decode_inputs(DecodeCase(num_heads=2, seq_lens=(9, 5), dtype=FP32), device)
    kv_c, k_pe, cache, slots = cache_arguments(device)
    args = (p.q, p.k, p.v, p.cu_seqlens_q, p.cu_seqlens_k)
    merge_args = merge_arguments(device)

    def prefill(*tensors: torch.Tensor, out: torch.Tensor | None) -> Any:
        return dualmla.mla_prefill(*tensors, 8, 30, 0.1, out=out, return_lse=True, backend=backend)

    def decode(q: torch.Tensor, kv_cache: torch.Tensor, meta: dualmla.MLAMetadata, out: torch.Tensor | None) -> Any:
        return dualmla.mla_decode(q, kv_cache, meta, 0.1, out=out, backend=backend)

    def write_and_gather(*tensors: torch.Tensor, out: torch.Tensor) -> Any:
        dualmla.concat_and_cache_mla(*tensors[:4], backend=backend)
        return dualmla.gather_kv_cache(tensors[2], *tensors[4:], out, backend=backend)

    def merge(*tensors: torch.Tensor, out: torch.Tensor | None) -> Any:
        return dualmla.merge_attn_states(*tensors, out=out, backend=backend)

    empty = torch.empty_like if given_out else lambda _: None
    for name, function, arguments, out in (
        ("prefill", prefill, args, empty(p.out)),
        ("decode", decode, (d.q, d.kv_cache, d.meta), empty(d.out)),
        ("gather", write_and_gather, (kv_c, k_pe, cache, slots, *gather_arguments(device)[1:4]), torch.empty(6, 80, device=device)),
        ("merge", merge, merge_args, empty(merge_args[0])),
    ):
        want = function(*arguments, out=None if name != "gather" else torch.empty(6, 80, device=device))
        got = compiled(function)(*arguments, out=out)
        for i, (x, y) in enumerate(zip(_tuple(got), _tuple(want), strict=True)):
            assert_bits_equal(x, y, f"{name} {i}")
        if out is not None:
            assert_bits_equal(out, _tuple(want)[0], f"{name}'s out")


def _tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_what_is_refused_is_refused_in_a_graph_too(device: torch.device, backend: str) -> None:
    """The operator's implementation is the function with its checks."""
    inputs = layer_inputs(device)
    layer = make_layer(inputs, backend)
    graph = compiled(lambda *tensors, meta: layer.forward(*tensors, meta))
    with pytest.raises(ValueError, match=r"kv_c must have shape \[6, 64\], got \[6, 32\]"):
        graph(inputs.q, inputs.kv_c[:, :32], inputs.k_pe, inputs.kv_cache, meta=inputs.meta)


@pytest.mark.parametrize("wrong", ["dtype", "shape"])
def test_a_wrong_out_is_refused_in_a_graph_too(wrong: str, device: torch.device, backend: str) -> None:
    """Copied into as it is, one of another dtype would be rounded to and one of a batch of results filled with copies."""
    p, d = prefill_inputs(device), make_decode_inputs(DecodeCase(num_heads=2, seq_lens=(9, 5), dtype=FP32), device)
    merge_args = merge_arguments(device)

    def prefill(out: torch.Tensor) -> Any:
        return dualmla.mla_prefill(p.q, p.k, p.v, p.cu_seqlens_q, p.cu_seqlens_k, 8, 30, 0.1, out=out, backend=backend)

    def decode(out: torch.Tensor) -> Any:
        return dualmla.mla_decode(d.q, d.kv_cache, d.meta, 0.1, out=out, backend=backend)

    def merge(out: torch.Tensor) -> Any:
        return dualmla.merge_attn_states(*merge_args, out=out, backend=backend)

    for function, right in ((prefill, p.out), (decode, d.out), (merge, merge_args[0])):
        out = torch.zeros_like(right, dtype=torch.float64) if wrong == "dtype" else right.new_zeros(2, *right.shape)
        with pytest.raises(
            (TypeError, ValueError), match=r"out must be .*float32, got float64|out must have 3 dimensions, got shape \[2, "
        ):
            compiled(function)(out)
        assert not out.any(), "nothing was written"


# handles -----------------------------------------------------------------------------------------------------------------


def test_handles_keep_nothing_alive(device: torch.device) -> None:
    inputs = layer_inputs(device)
    layer = make_layer(inputs)
    meta_handle, layer_handle = inputs.meta.handle, layer.handle
    assert dualmla.MLAMetadata.of_handle(meta_handle) is inputs.meta
    assert type(layer).of_handle(layer_handle) is layer
    del inputs, layer
    gc.collect()
    with pytest.raises(KeyError):
        dualmla.MLAMetadata.of_handle(meta_handle)
    with pytest.raises(KeyError):
        dualmla.AiterMLAImpl.of_handle(layer_handle)


def test_calls_without_a_graph_pass_by_the_operators(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their cost, small as it is, falls only where `torch.compile` traces."""
    inputs = prefill_inputs(device)
    monkeypatch.setattr(torch.ops, "dualmla", None)
    dualmla.mla_prefill(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, 8, 30, 0.1)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda original: pickle.loads(pickle.dumps(original))])
def test_a_copy_has_a_handle_of_its_own(duplicate: Callable[[Any], Any], device: torch.device) -> None:
    """Else the compiled graph of a copied layer would run the first one's weights."""
    inputs = layer_inputs(device)
    layer = make_layer(inputs, "reference")
    for original in (layer, inputs.meta):
        twin = duplicate(original)
        assert type(original).of_handle(twin.handle) is twin
        assert type(original).of_handle(original.handle) is original
