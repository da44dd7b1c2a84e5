"""A float8 cache to the last bit: every number there is, NaN, queries of any size, rows at odd addresses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import dualmla
from dualmla.testing import DecodeCase, DecodeInputs, compare, exact_decode, make_decode_inputs, run_decode

E4M3FN, E4M3FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
NAN = {E4M3FN: (0x7F, 0xFF), E4M3FNUZ: (0x80,)}
PAGE = 16

pytestmark = pytest.mark.parametrize("cache_dtype", [E4M3FN, E4M3FNUZ], ids=str)
both_types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def laid_out(device: torch.device, cache_dtype: torch.dtype, dtype: torch.dtype = torch.bfloat16, **changes: object) -> DecodeInputs:
    case = DecodeCase(num_heads=3, seq_lens=(200, 64, 3), page_size=PAGE, kv_lora_rank=64, qk_rope_head_dim=32)
    case = dataclasses.replace(case, kv_cache_dtype=cache_dtype, dtype=dtype, **changes)  # type: ignore[arg-type]
    cfg = dualmla.MLAConfig(num_heads=1, softmax_scale=1.0, kv_cache_dtype=cache_dtype)
    if not all(report.usable for report in dualmla.explain(cfg, device) if report.name in ("triton", "reference")):
        pytest.skip(f"this device does not compute with {cache_dtype}")
    return make_decode_inputs(case, device)


def check(inputs: DecodeInputs, backend: str) -> None:
    comparison = compare(*run_decode(inputs, backend), exact_decode(inputs), flashmla_gate=False)
    assert comparison.agrees, comparison.failures


def live_slots(inputs: DecodeInputs, request: int) -> torch.Tensor:
    """int64 [length]: rows of a cache [slots, latent_dim]."""
    length = inputs.case.seq_lens[request]
    pages = inputs.meta.block_table[request, : -(-length // PAGE)].long()
    return (pages[:, None] * PAGE + torch.arange(PAGE, device=pages.device)).flatten()[:length]


@both_types
@pytest.mark.parametrize("heads", [3, 24])
@pytest.mark.parametrize("below", [0x08, 0x80])
def test_every_number(cache_dtype: torch.dtype, below: int, heads: int, dtype: torch.dtype, device: torch.device, backend: str) -> None:
    """Bytes below 8, but for the sign: subnormal numbers alone. Below 128: all, the largest 2^18 times the smallest."""
    inputs = laid_out(device, cache_dtype, dtype, num_heads=heads, softmax_scale=1.0 if below == 0x08 else 1e-3)
    numbers = torch.tensor([byte for byte in range(256) if byte & 0x7F < below and byte not in NAN[cache_dtype]], dtype=torch.uint8)
    rows = inputs.kv_cache.view(torch.uint8).flatten(0, 1)
    generator = torch.Generator().manual_seed(0)
    for request, length in enumerate(inputs.case.seq_lens):
        drawn = numbers[torch.randint(len(numbers), (length, rows.shape[1]), generator=generator)]
        rows[live_slots(inputs, request)] = drawn.to(device)
    check(inputs, backend)


@both_types
@pytest.mark.parametrize("column", [0, 1, 63, 64, 95])
def test_nan_is_seen(cache_dtype: torch.dtype, column: int, dtype: torch.dtype, device: torch.device, backend: str) -> None:
    """In the values or in the rope, in the first or in the second number of a pair: the request's rows are NaN, others are not."""
    inputs = laid_out(device, cache_dtype, dtype)
    before, before_lse = run_decode(inputs, backend)
    before, before_lse = before.clone(), before_lse.clone()
    for byte in NAN[cache_dtype]:
        inputs.kv_cache.view(torch.uint8).flatten(0, 1)[live_slots(inputs, 0)[70], column] = byte
        out, lse = run_decode(inputs, backend)
        assert bool(out[0].isnan().all())
        assert bool(lse[:, 0].isnan().all())
        assert torch.equal(out[1:], before[1:])
        assert torch.equal(lse[:, 1:], before_lse[:, 1:])


@pytest.mark.parametrize("powers", [(-133, -20), (-20, 8), (8, 100)])
def test_queries_of_any_size(cache_dtype: torch.dtype, powers: tuple[int, int], device: torch.device, backend: str) -> None:
    """Rows of bf16 queries whose sizes are powers of two apart, and one of zeros: more than fp16 has numbers for."""
    inputs = laid_out(device, cache_dtype, num_heads=16, softmax_scale=2.0 ** min(-powers[1], 0))
    least, most = powers
    sizes = torch.linspace(least, most, inputs.q.shape[0] * 16).round().view(-1, 16, 1).to(device)
    inputs.q.copy_((inputs.q.double() * torch.exp2(sizes.double())).to(inputs.q.dtype))
    inputs.q[1, 3] = 0.0
    check(inputs, backend)


@pytest.mark.parametrize("pad", [(0, 1), (0, 2), (1, 0)])
def test_rows_at_odd_addresses(cache_dtype: torch.dtype, pad: tuple[int, int], device: torch.device, backend: str) -> None:
    """Pages, or rows, an odd number of bytes apart, and an even one."""
    inputs = laid_out(device, cache_dtype)
    pages, size, width = inputs.kv_cache.shape
    slots, columns = size + pad[0], width + pad[1]
    memory = torch.full((pages * slots * columns + 1,), NAN[cache_dtype][0], dtype=torch.uint8, device=device)
    view = memory[pad[1] % 2 :][: pages * slots * columns].view(pages, slots, columns)[:, :size, :width]
    view.copy_(inputs.kv_cache.view(torch.uint8))
    check(dataclasses.replace(inputs, kv_cache=view.view(cache_dtype)), backend)


def test_a_small_weight_alone_in_its_column(cache_dtype: torch.dtype, device: torch.device, backend: str) -> None:
    """2^-99 of the largest, which has 0 there: far from the smallest number of fp32, and as exact as any other result."""
    inputs = laid_out(device, cache_dtype, num_heads=3, seq_lens=(2,), softmax_scale=0.27)
    inputs.q.fill_(1.0)
    rows = torch.zeros(2, inputs.kv_cache.shape[2])
    rows[0, 64:] = 8.0  # the rope alone
    rows[1, 5] = 1.0
    slots = inputs.kv_cache.view(torch.uint8).flatten(0, 1)
    slots[live_slots(inputs, 0)] = rows.to(cache_dtype).view(torch.uint8).to(device)
    out, _lse = run_decode(inputs, backend)
    assert 0 < out[0, 0, 5].abs() < 2.0**-90
    check(inputs, backend)
