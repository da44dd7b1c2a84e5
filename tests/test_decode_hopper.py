"""The decode in Gluon on a Hopper GPU: against float64 in hostile memory, against the plain kernel, and when it is not taken.

That it compiles for Hopper without a GPU: tests/test_static_gates.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import dualmla
from dualmla.testing import DecodeCase, assert_bits_equal, compare, exact_decode, make_decode_inputs, run_decode

pytest.importorskip("triton")

from dualmla_kernels import decode
from dualmla_kernels.launch import Prepared

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.fail("needs a Hopper GPU")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernel was launched for each decode of a test."""
    kernels: list[str] = []
    launch = Prepared.__call__

    def watched(prepared: Prepared, *inputs: object) -> None:
        kernels.append(prepared.kernel.__name__)
        launch(prepared, *inputs)

    monkeypatch.setattr(Prepared, "__call__", watched)
    return kernels


CASES = [
    DecodeCase(num_heads=128, seq_lens=(1000,), page_size=64),
    DecodeCase(num_heads=128, seq_lens=(1, 63, 64, 65, 127, 128, 129, 191, 192, 193), page_size=64),
    DecodeCase(num_heads=128, seq_lens=tuple(range(1, 130, 3)), page_size=64, seed=1),
    DecodeCase(num_heads=128, seq_lens=(20000, 3), page_size=64, seed=2),
    DecodeCase(num_heads=64, seq_lens=(700, 0, 300, 0), page_size=128, padding_tokens=3),
    DecodeCase(num_heads=32, seq_lens=(4096,) * 5, page_size=256),
    DecodeCase(num_heads=17, seq_lens=(77, 500), page_size=64, padding_tokens=1),
    DecodeCase(num_heads=24, seq_lens=(77, 500, 1), page_size=64),
    DecodeCase(num_heads=96, seq_lens=(77, 1500), page_size=64),
    DecodeCase(num_heads=200, seq_lens=(300, 5), page_size=64),
    DecodeCase(num_heads=16, seq_lens=(1, 9, 0, 65, 130, 2, 4000), query_lens=(9, 1, 4, 0, 7, 3, 2), page_size=64, padding_tokens=2),
    DecodeCase(num_heads=128, seq_lens=(130, 70, 3000), query_lens=(4, 3, 1), page_size=64),
    DecodeCase(num_heads=3, seq_lens=(150, 1000), query_lens=(40, 90), page_size=64),
    DecodeCase(num_heads=5, seq_lens=(30, 200), query_lens=(64, 13), page_size=64),
    DecodeCase(num_heads=128, seq_lens=(0, 0), page_size=64),
    DecodeCase(num_heads=128, seq_lens=(5, 9, 70), query_lens=(0, 1, 0), page_size=64, padding_tokens=3),
    DecodeCase(num_heads=128, seq_lens=(1500, 64), page_size=64, data="peaked"),
    DecodeCase(num_heads=128, seq_lens=(1500, 64), page_size=64, data="huge"),
    DecodeCase(num_heads=128, seq_lens=(1500, 64), page_size=64, data="flat"),
    DecodeCase(num_heads=128, seq_lens=(1500, 64), page_size=64, data="denormal"),
    DecodeCase(num_heads=64, seq_lens=(129, 900), page_size=64, softmax_scale=0.01),
]


@pytest.mark.parametrize(("dtype", "causal", "splits"), [(BF16, True, None), (FP16, False, None), (BF16, True, 1), (BF16, False, 3)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(
    case: DecodeCase, dtype: torch.dtype, causal: bool, splits: int | None, device: torch.device, taken: list[str]
) -> None:
    """Within the one budget, the same bits twice; free slots, unused pages, `out` and scratch start as NaN."""
    if splits is not None and case.num_heads <= 16:
        case = dataclasses.replace(case, num_heads=case.num_heads + 16)  # a fixed split is planned by the heads alone
    case = dataclasses.replace(case, dtype=dtype, causal=causal, num_kv_splits=splits)
    inputs = make_decode_inputs(case, device)
    out, lse = run_decode(inputs, "triton")
    assert "_decode_pairs" in taken
    comparison = compare(out, lse, exact_decode(inputs), flashmla_gate=case.data == "normal")
    assert comparison.agrees, comparison.failures
    first = out.clone()
    out.fill_(float("nan"))
    again, lse_again = run_decode(inputs, "triton")
    assert_bits_equal(again, first)
    assert lse is not None
    assert lse_again is not None
    assert_bits_equal(lse_again, lse)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_plain_kernel(case: DecodeCase, device: torch.device, taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both walk the same plan; each is within the budget of float64, so they are within two of each other."""
    inputs = make_decode_inputs(case, device)
    out, lse = (x.clone() for x in run_decode(inputs, "triton") if x is not None)
    monkeypatch.setattr(decode, "HAS_GLUON", False)
    monkeypatch.setattr(decode, "_launches", decode._launches.__wrapped__)
    inputs.out.fill_(float("nan"))
    plain, plain_lse = run_decode(inputs, "triton")
    assert [kernel for kernel in taken if kernel.startswith("_decode")] == ["_decode_pairs", "_decode"]
    exact = exact_decode(inputs)
    for got in ((out, lse), (plain, plain_lse)):
        comparison = compare(*got, exact, flashmla_gate=case.data == "normal")
        assert comparison.agrees, comparison.failures


@pytest.mark.parametrize("page_size", [64, 128])
def test_a_cache_past_2_gib(page_size: int, device: torch.device, taken: list[str]) -> None:
    """Live pages lie past 2^31 elements."""
    first_page = 2**31 // (576 * page_size) + 1
    case = DecodeCase(num_heads=64, seq_lens=(100, 300), page_size=page_size, first_page=first_page)
    inputs = make_decode_inputs(case, device)
    out, lse = run_decode(inputs, "triton")
    assert "_decode_pairs" in taken
    comparison = compare(out, lse, exact_decode(inputs))
    assert comparison.agrees, comparison.failures


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("splits", [None, 1, 4])
def test_a_live_number_that_is_not_finite_is_seen(value: float, splits: int | None, device: torch.device, taken: list[str]) -> None:
    """No split hides it; the neighbour's numbers stay what they were."""
    torch.manual_seed(0)
    table = torch.arange(26, dtype=torch.int32, device=device).view(2, 13)
    meta = dualmla.decode_metadata(table, [800, 600], page_size=64, device=device)
    q = torch.rand(2, 64, 576, device=device).to(BF16) + 0.1
    cache = torch.rand(26, 64, 576, device=device).to(BF16)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return dualmla.mla_decode(q, cache, meta, 0.02, return_lse=True, num_kv_splits=splits, backend="triton")

    good, good_lse = run()
    cache[5, 7, 3] = value
    out, lse = run()
    assert taken.count("_decode_pairs") == 2
    assert bool(out[0].isnan().all())
    assert bool(lse[:, 0].isnan().all())
    assert_bits_equal(out[1], good[1])
    assert_bits_equal(lse[:, 1], good_lse[:, 1])


def test_k_scale(device: torch.device, taken: list[str]) -> None:
    """Of a cache that is not float8 too, as a float and on the device."""
    case = DecodeCase(num_heads=64, seq_lens=(300, 5), page_size=64, k_scale=0.375)
    inputs = make_decode_inputs(case, device)
    for k_scale in (0.375, torch.tensor(0.375, device=device)):
        inputs.out.fill_(float("nan"))
        decode.mla_decode(
            inputs.q,
            inputs.kv_cache,
            inputs.meta.block_table,
            inputs.meta.seq_lens,
            inputs.meta.qo_indptr,
            1,
            case.softmax_scale,
            causal=True,
            out=inputs.out,
            lse=None,
            k_scale=k_scale,
        )
        comparison = compare(inputs.out, None, exact_decode(inputs))
        assert comparison.agrees, comparison.failures
    assert taken.count("_decode_pairs") == 2


def relaid(tensor: torch.Tensor, pad: tuple[int, int, int]) -> torch.Tensor:
    """The same values in wider memory."""
    memory = torch.full([n + p for n, p in zip(tensor.shape, pad, strict=True)], float("nan"), dtype=tensor.dtype, device=tensor.device)
    return memory[: tensor.shape[0], : tensor.shape[1], : tensor.shape[2]].copy_(tensor)


@pytest.mark.parametrize(
    ("name", "pad", "kernel"),
    [
        ("q", (1, 0, 0), "_decode_pairs"),
        ("q", (0, 0, 64), "_decode_pairs"),
        ("q", (0, 1, 0), "_decode"),  # pairs are not at equal distances
        ("q", (0, 0, 4), "_decode"),  # rows not at multiples of 16 bytes
        ("kv_cache", (0, 5, 0), "_decode_pairs"),
        ("kv_cache", (0, 0, 64), "_decode_pairs"),
        ("kv_cache", (0, 0, 4), "_decode"),
        ("out", (1, 3, 16), "_decode_pairs"),
    ],
    ids=str,
)
def test_memory_layouts(name: str, pad: tuple[int, int, int], kernel: str, device: torch.device, taken: list[str]) -> None:
    case = DecodeCase(num_heads=40, seq_lens=(200, 5, 0, 900), query_lens=(2, 1, 1, 3), page_size=64, padding_tokens=1)
    inputs = make_decode_inputs(case, device)
    exact = exact_decode(inputs)
    inputs = dataclasses.replace(inputs, **{name: relaid(getattr(inputs, name), pad)})
    out, lse = run_decode(inputs, "triton")
    assert kernel in taken
    comparison = compare(out, lse, exact)
    assert comparison.agrees, comparison.failures


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 16},
        {"page_size": 1},
        {"num_heads": 16},
        {"dtype": torch.float32},
        {"kv_cache_dtype": torch.float8_e4m3fn, "k_scale": 1.0},
        {"kv_lora_rank": 256},
        {"qk_rope_head_dim": 32},
    ],
    ids=str,
)
def test_what_the_plain_kernel_does(change: dict[str, object], device: torch.device, taken: list[str]) -> None:
    case = dataclasses.replace(DecodeCase(num_heads=64, seq_lens=(200, 5, 0, 900), page_size=64), **change)  # type: ignore[arg-type]
    inputs = make_decode_inputs(case, device)
    out, lse = run_decode(inputs, "triton")
    assert "_decode" in taken
    assert "_decode_pairs" not in taken
    comparison = compare(out, lse, exact_decode(inputs))
    assert comparison.agrees, comparison.failures
