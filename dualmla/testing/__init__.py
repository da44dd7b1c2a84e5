"""What tests, benchmarks, the command line and other people's tests share: cases, adversarial inputs, one judge, one error budget.

from dualmla.testing import QUICK_GRID, assert_decode_agrees, make_decode_inputs, run_decode

@pytest.mark.parametrize("case", QUICK_GRID, ids=str)
def test_my_kernel(case):
    inputs = make_decode_inputs(case, "cuda")
    out, lse = run_decode(inputs, backend="triton")  # or your kernel on inputs.q, inputs.kv_cache, inputs.meta
    assert_decode_agrees(out, lse, inputs)
"""

from dualmla.testing.cases import (
    UNUSED_PAGE,
    YARN_SCALE,
    DecodeCase,
    DecodeInputs,
    DecodeValues,
    draw_decode_values,
    lay_out_decode,
    make_decode_inputs,
    poisoned_allocations,
    run_decode,
)
from dualmla.testing.compare import (
    Comparison,
    assert_bits_equal,
    assert_decode_agrees,
    assert_layer_agrees,
    assert_prefill_agrees,
    budget_used,
    compare,
    compare_decode,
    cosine_difference,
)
from dualmla.testing.exact import SAFETY, U32, Exact, exact_attention, exact_decode
from dualmla.testing.grids import LAYER_GRID, PREFILL_GRID, QUICK_GRID
from dualmla.testing.layer import LayerCase, LayerInputs, exact_layer, make_layer, make_layer_inputs, run_layer
from dualmla.testing.prefill import PrefillCase, PrefillInputs, exact_prefill, make_prefill_inputs, run_prefill

__all__ = [
    "LAYER_GRID",
    "PREFILL_GRID",
    "QUICK_GRID",
    "SAFETY",
    "U32",
    "UNUSED_PAGE",
    "YARN_SCALE",
    "Comparison",
    "DecodeCase",
    "DecodeInputs",
    "DecodeValues",
    "Exact",
    "LayerCase",
    "LayerInputs",
    "PrefillCase",
    "PrefillInputs",
    "assert_bits_equal",
    "assert_decode_agrees",
    "assert_layer_agrees",
    "assert_prefill_agrees",
    "budget_used",
    "compare",
    "compare_decode",
    "cosine_difference",
    "draw_decode_values",
    "exact_attention",
    "exact_decode",
    "exact_layer",
    "exact_prefill",
    "lay_out_decode",
    "make_decode_inputs",
    "make_layer",
    "make_layer_inputs",
    "make_prefill_inputs",
    "poisoned_allocations",
    "run_decode",
    "run_layer",
    "run_prefill",
]
