"""Cache write and gather: every bit against plain indexing, float8 against its own table of values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualmla
from dualmla.testing import UNUSED_PAGE, assert_bits_equal
from dualmla.validation import device_float8, float8_refusal

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3FN, E4M3FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
RANK, ROPE = 512, 64


def flavours(device: torch.device) -> list[torch.dtype]:
    """Those the device computes with."""
    return [E4M3FN, E4M3FNUZ] if device.type == "cpu" else [device_float8(device)]


def poisoned(pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A cache that shows by NaN (0x7f in float8) where nothing was written."""
    if dtype.itemsize == 1:
        return torch.full((pages, page_size, width), 0x7F, dtype=torch.uint8, device=device).view(dtype)
    return torch.full((pages, page_size, width), math.nan, dtype=dtype, device=device)


def rows(
    tokens: int, device: torch.device, dtype: torch.dtype = BF16, rank: int = RANK, rope: int = ROPE
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    both = torch.randn(tokens, rank + rope, generator=generator).to(dtype).to(device)
    return both[:, :rank].contiguous(), both[:, rank:].contiguous()


# write -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (32, 16), (64, 48)])
def test_rows_land_in_their_slots(dtype: torch.dtype, page_size: int, rank: int, rope: int, device: torch.device, backend: str) -> None:
    """To the bit, -1 skipped, every other slot as it was."""
    kv_c, k_pe = rows(6, device, dtype, rank, rope)
    cache = poisoned(8, page_size, rank + rope, dtype, device)
    slots = [3, -1, 0, 8 * page_size - 1, -1, 5]  # all different: on a GPU rows are written at once
    want = cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            want[slot // page_size, slot % page_size] = torch.cat([kv_c[token], k_pe[token]])
    dualmla.concat_and_cache_mla(kv_c, k_pe, cache, torch.tensor(slots, device=device), backend=backend)
    assert_bits_equal(cache, want, "kv_cache")


def test_fewer_slots_than_tokens_leave_the_rest_alone(device: torch.device, backend: str) -> None:
    """Rows of padding have no slot."""
    kv_c, k_pe = rows(6, device)
    cache = poisoned(4, 2, RANK + ROPE, BF16, device)
    dualmla.concat_and_cache_mla(kv_c, k_pe, cache, torch.tensor([3, 1], device=device), backend=backend)
    assert bool(cache.view(8, -1)[[0, 2, 4, 5, 6, 7]].isnan().all())
    assert_bits_equal(cache.view(8, -1)[3, :RANK], kv_c[0], "row 0")


def test_write_honours_strides(device: torch.device, backend: str) -> None:
    kv_c, k_pe = rows(5, device)
    both = torch.cat([k_pe, kv_c, kv_c], 1)
    base = poisoned(4, 5, RANK + ROPE + 32, BF16, device)
    cache = base[:, :3, : RANK + ROPE]
    slots = torch.tensor([11, 0, 5, -1, 2], device=device)
    dualmla.concat_and_cache_mla(both[:, ROPE : ROPE + RANK], both[:, :ROPE], cache, slots, backend=backend)
    want = poisoned(4, 3, RANK + ROPE, BF16, device)
    dualmla.concat_and_cache_mla(kv_c, k_pe, want, slots, backend="reference")
    assert_bits_equal(cache, want, "kv_cache")
    assert bool(base[:, 3:].isnan().all())
    assert bool(base[..., RANK + ROPE :].isnan().all())


def test_write_past_int32_offsets(device: torch.device, backend: str) -> None:
    """A page beyond 2^31 elements; the pages before it take no memory."""
    width = 32 + 16
    pages = 2**31 // (16 * width) + 2
    cache = torch.empty(pages, 16, width, dtype=BF16, device=device)
    kv_c, k_pe = rows(1, device, BF16, 32, 16)
    slot = pages * 16 - 1
    dualmla.concat_and_cache_mla(kv_c, k_pe, cache, torch.tensor([slot], device=device), backend=backend)
    assert_bits_equal(cache[-1, -1], torch.cat([kv_c[0], k_pe[0]]), "last row")
    out = torch.full((1, width), math.nan, dtype=BF16, device=device)
    ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([[pages - 1]], [0, 1], [15])]
    dualmla.gather_kv_cache(cache, *ints, out, backend=backend)
    assert_bits_equal(out[0], cache[-1, -1], "gathered row")


# float8 ------------------------------------------------------------------------------------------------------------------


def nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The code of the value of `dtype` that is nearest to each of `x`, the even code of two, by looking at all of them."""
    codes = torch.arange(128, dtype=torch.uint8)  # without a sign; their values increase
    codes = codes[codes.view(dtype).float().isfinite()]
    values = codes.view(dtype).double()
    distance = (x.abs().clamp(max=float(values[-1]))[:, None] - values).abs()
    best = distance == distance.amin(1, keepdim=True)
    code = torch.where(best & (codes % 2 == 0), codes.int(), -1).amax(1)
    code = torch.where(code < 0, torch.where(best, codes.int(), -1).amax(1), code)
    sign = torch.signbit(x) & ((code > 0) | (dtype == E4M3FN))  # e4m3fnuz has no -0
    return torch.where(x.isnan(), 0x7F if dtype == E4M3FN else 0x80, code + 128 * sign).to(torch.uint8)


@pytest.mark.parametrize("flavour", [E4M3FN, E4M3FNUZ])
def test_float8_is_rounded_to_nearest_even_and_saturated(flavour: torch.dtype, device: torch.device, backend: str) -> None:
    """Every value, every midpoint of neighbours and its two fp32 neighbours, subnormals, what is too large, infinities, NaN, zeros."""
    if flavour not in flavours(device):
        pytest.skip(f"{device} computes with the other flavour")
    table = torch.arange(256, dtype=torch.uint8).view(flavour).float()
    values = table[table.isfinite()].unique()
    midpoints = (values[1:] + values[:-1]) / 2
    up, down = (midpoints.nextafter(torch.tensor(to)) for to in (math.inf, -math.inf))
    special = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e-45, 449.0, 464.0, 480.0, 1e5, -1e5, 3e38, math.inf, -math.inf, math.nan, 1.98])
    x = torch.cat([values, midpoints, up, down, special])
    x = torch.nn.functional.pad(x, (0, -len(x) % 32)).view(-1, 32)
    cache = poisoned(len(x), 1, 48, flavour, device)
    k_pe = torch.zeros(len(x), 16, device=device)
    dualmla.concat_and_cache_mla(x.to(device), k_pe, cache, torch.arange(len(x), device=device), backend=backend)
    got = cache[:, 0, :32].contiguous().view(torch.uint8).cpu()
    assert_bits_equal(got.flatten(), nearest(x.flatten().double(), flavour), "codes")


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("k_scale", [0.5, 0.3, 7.0])
def test_float8_holds_the_row_divided_by_k_scale(k_scale: float, dtype: torch.dtype, device: torch.device, backend: str) -> None:
    """A float and a tensor write the same bits, those of the quotient rounded once; the way back multiplies again."""
    kv_c, k_pe = rows(9, device, dtype)
    slots = torch.arange(9, device=device)
    tensor = torch.tensor(k_scale, device=device)
    for flavour in flavours(device):
        caches = [poisoned(3, 3, RANK + ROPE, flavour, device) for _ in range(2)]
        for cache, scale in zip(caches, (k_scale, tensor), strict=True):
            dualmla.concat_and_cache_mla(kv_c, k_pe, cache, slots, k_scale=scale, backend=backend)
        quotient = torch.cat([kv_c, k_pe], 1).double() / tensor.double()
        want = nearest(quotient.flatten().cpu(), flavour).view_as(quotient.cpu())
        for cache in caches:
            assert_bits_equal(cache.view(torch.uint8).view(9, -1).cpu(), want, "codes")
        ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0, 1, 2]], [0, 9], [0])]
        out = torch.full((9, RANK + ROPE), math.nan, dtype=dtype, device=device)
        dualmla.gather_kv_cache(caches[0], *ints, out, k_scale=k_scale, backend=backend)
        back = (caches[0].view(9, -1).float() * tensor).to(dtype)
        assert_bits_equal(out, back, "gathered rows")


def test_nan_is_gathered_from_a_float8_cache(device: torch.device, backend: str) -> None:
    """From the columns that are gathered first and from the others."""
    for flavour in flavours(device):
        nan = torch.tensor([0x7F, 0xFF] if flavour == E4M3FN else [0x80, 0x80], dtype=torch.uint8, device=device)
        cache = torch.zeros(1, 1, RANK + ROPE, dtype=torch.uint8, device=device)
        cache[0, 0, [3, RANK + ROPE - 1]] = nan
        ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0]], [0, 1], [0])]
        out = torch.empty(1, RANK + ROPE, device=device)
        dualmla.gather_kv_cache(cache.view(flavour), *ints, out, backend=backend)
        assert out[0].isnan().nonzero().flatten().tolist() == [3, RANK + ROPE - 1]


def test_the_wrong_flavour_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """gfx942 takes e4m3fnuz, gfx950 and CUDA e4m3fn; the same bits are other numbers in the other. A CPU takes both."""
    gpu = torch.device("cuda", 0)

    class Properties:
        gcnArchName = "gfx942:sramecc+:xnack-"  # noqa: N815 - torch's name

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert float8_refusal(E4M3FNUZ, gpu) is None
    assert float8_refusal(E4M3FN, gpu) == "float8_e4m3fn; cuda:0 computes with float8_e4m3fnuz"
    Properties.gcnArchName = "gfx950:sramecc+:xnack-"
    assert float8_refusal(E4M3FN, gpu) is None
    assert float8_refusal(E4M3FNUZ, gpu) == "float8_e4m3fnuz; cuda:0 computes with float8_e4m3fn"
    monkeypatch.setattr(torch.version, "hip", None)
    assert float8_refusal(E4M3FN, gpu) is None
    assert float8_refusal(E4M3FNUZ, gpu) is not None
    assert float8_refusal(E4M3FNUZ, torch.device("cpu")) is None
    assert float8_refusal(BF16, gpu) is None


@pytest.mark.gpu
def test_the_wrong_flavour_is_refused_by_every_function(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("a CPU takes both")
    wrong = E4M3FNUZ if device_float8(device) == E4M3FN else E4M3FN
    cache = poisoned(2, 16, RANK + ROPE, wrong, device)
    kv_c, k_pe = rows(1, device)
    with pytest.raises(ValueError, match="computes with"):
        dualmla.concat_and_cache_mla(kv_c, k_pe, cache, torch.tensor([0], device=device))
    ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0]], [0, 1], [0])]
    with pytest.raises(ValueError, match="computes with"):
        dualmla.gather_kv_cache(cache, *ints, torch.empty(1, RANK + ROPE, dtype=BF16, device=device))


# gather ------------------------------------------------------------------------------------------------------------------


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), min_size=1, max_size=9)


@settings(max_examples=30)
@given(spans=spans, page_size=st.sampled_from([1, 3, 16]), slack=st.integers(0, 70))
def test_gather_any_spans(spans: list[tuple[int, int]], page_size: int, slack: int, device: torch.device, backend: str) -> None:
    """Row by row; pages that no span touches have ids far away, rows past the last are 0."""
    ends = [start + length for start, length in spans]
    width = max(-(-end // page_size) for end in ends) + 1
    pages = torch.randperm(len(spans) * width, generator=torch.Generator().manual_seed(1)).int().view(len(spans), width)
    cache = poisoned(len(spans) * width, page_size, 48, BF16, device)
    want = torch.zeros(sum(length for _, length in spans) + slack, 48, dtype=BF16, device=device)
    row = 0
    table = torch.full_like(pages, UNUSED_PAGE)
    for request, (start, length) in enumerate(spans):
        for position in range(start, start + length):
            page = int(pages[request, position // page_size])
            table[request, position // page_size] = page
            cache[page, position % page_size] = want[row] = torch.randn(48).to(BF16).to(device)
            row += 1
    cu_seqlens = torch.tensor([0, *(length for _, length in spans)], device=device).cumsum(0).int()
    starts = torch.tensor([start for start, _ in spans], dtype=torch.int32, device=device)
    out = torch.full_like(want, math.nan)
    assert dualmla.gather_kv_cache(cache, table.to(device), cu_seqlens, starts, out, backend=backend) is out
    assert_bits_equal(out, want, "out")


@pytest.mark.parametrize("width", [576, 512, 48, 160])
def test_gather_honours_strides(width: int, device: torch.device, backend: str) -> None:
    cache = torch.randn(4, 6, width + 8, device=device).to(BF16)[:, :4, :width]
    out = torch.full((7, width + 16), math.nan, dtype=BF16, device=device)
    table = torch.tensor([[3, UNUSED_PAGE, 1, UNUSED_PAGE], [0, UNUSED_PAGE, UNUSED_PAGE, 0]], dtype=torch.int32, device=device)[:, ::2]
    table = torch.cat([table, table], 1)[:, :2]
    ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 5, 7], [1, 2])]
    dualmla.gather_kv_cache(cache, table, *ints, out[:, :width], backend=backend)
    assert_bits_equal(out[:, :width], torch.cat([cache[3, 1:], cache[1, :2], cache[0, 2:]]), "out")
    assert bool(out[:, width:].isnan().all())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_k_scale_of_any_rank(shape: tuple[int, ...], device: torch.device, backend: str) -> None:
    """One element is one element, however many dimensions it comes with."""
    kv_c, k_pe = rows(3, device, FP32)
    cache = torch.zeros(3, 1, RANK + ROPE, device=device)
    scale, slots = torch.full(shape, 2.0, device=device), torch.arange(3, device=device)
    dualmla.concat_and_cache_mla(kv_c, k_pe, cache, slots, k_scale=scale, backend=backend)
    assert_bits_equal(cache[:, 0], torch.cat([kv_c, k_pe], 1) / 2, "cache")
    ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0, 1, 2]], [0, 3], [0])]
    out = torch.full((3, RANK + ROPE), math.nan, device=device)
    dualmla.gather_kv_cache(cache, *ints, out, k_scale=scale, backend=backend)
    assert_bits_equal(out, torch.cat([kv_c, k_pe], 1), "gathered rows")


def test_gather_nothing(device: torch.device, backend: str) -> None:
    cache = poisoned(2, 4, 48, BF16, device)
    out = torch.full((3, 48), math.nan, dtype=BF16, device=device)
    for table, cu_seqlens, starts in ((torch.empty(0, 2), [0], []), (torch.empty(2, 0), [0, 0, 0], [0, 0])):
        ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in (cu_seqlens, starts)]
        dualmla.gather_kv_cache(cache, table.int().to(device), *ints, out, backend=backend)
        assert bool((out == 0).all())
        out.fill_(math.nan)


# contract 9 --------------------------------------------------------------------------------------------------------------

BAD_WRITE = {
    "slots of int32": ({"slot_mapping": lambda s: s.int()}, TypeError, "slot_mapping must be int64, got int32"),
    "slots past the cache": ({"slot_mapping": lambda s: s + 100}, ValueError, r"must be -1 or 0\.\.7, got values from 100 to 102"),
    "slots below -1": ({"slot_mapping": lambda s: s - 2}, ValueError, r"slot_mapping must be -1 or 0\.\.7, got values from -2 to 0"),
    "more slots than tokens": ({"slot_mapping": lambda s: s.repeat(2)}, ValueError, "slot_mapping has 6 slots, there are 3 tokens"),
    "k_pe of other dtype": ({"k_pe": lambda x: x.half()}, TypeError, "k_pe must be bfloat16, got float16"),
    "k_pe of fewer tokens": ({"k_pe": lambda x: x[:2]}, ValueError, r"k_pe must have shape \[3, any\], got \[2, 64\]"),
    "kv_c not dense": ({"kv_c": lambda x: x.repeat(1, 2)[:, ::2]}, ValueError, "kv_c must be contiguous in its last dimension"),
    "rows of other width": ({"kv_c": lambda x: x[:, :256]}, ValueError, r"kv_cache must have shape \[any, any, 320\], got \[4, 2, 576\]"),
    "cache of other dtype": ({"kv_cache": lambda x: x.float()}, TypeError, "kv_cache must be bfloat16 or float8_e4m3fn or float8_e4m3fnuz"),
    "cache expanded": ({"kv_cache": lambda x: x[:1].expand(4, -1, -1)}, ValueError, "kv_cache is written, but its elements share memory"),
    "k_scale negative": ({"k_scale": lambda _: -1.0}, ValueError, "k_scale must be finite and positive, got -1"),
    "k_scale a string": ({"k_scale": lambda _: "1"}, TypeError, "k_scale must be a float, got str"),
    "k_scale of int": ({"k_scale": lambda _: torch.tensor([1])}, ValueError, "k_scale must be a float or an fp32 tensor of one element"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_WRITE)
def test_bad_writes_are_refused(name: str, device: torch.device, backend: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("DUALMLA_DEBUG", "1")
    changes, error, message = BAD_WRITE[name]
    kv_c, k_pe = rows(3, device)
    cache = poisoned(4, 2, RANK + ROPE, BF16, device)
    arguments = {"kv_c": kv_c, "k_pe": k_pe, "kv_cache": cache, "slot_mapping": torch.arange(3, device=device), "k_scale": None}
    arguments |= {argument: change(arguments[argument]) for argument, change in changes.items()}
    with pytest.raises(error, match=message):
        dualmla.concat_and_cache_mla(**arguments, backend=backend)
    assert bool(cache.isnan().all())


BAD_GATHER = {
    "table of int64": ({"block_table": lambda x: x.long()}, TypeError, "block_table must be int32, got int64"),
    "table of other requests": ({"block_table": lambda x: x[:1]}, ValueError, "2 requests, cu_seqlens has 2 and block_table 1"),
    "span past the table": ({"seq_starts": lambda x: x + 3}, ValueError, r"seq_starts\[0\] is 3: 6 tokens .* not within the 2 pages"),
    "span before the first token": ({"seq_starts": lambda x: x - 1}, ValueError, r"seq_starts\[0\] is -1"),
    "page past the cache": ({"block_table": lambda x: x + 2}, ValueError, r"block_table\[0\] has pages \[5, 2\] .* pages 0\.\.3"),
    "more rows than out has": ({"out": lambda x: x[:5]}, ValueError, "cu_seqlens ends at 8, there are 5 tokens"),
    "cu_seqlens not from 0": ({"cu_seqlens": lambda x: x + 1}, ValueError, r"cu_seqlens must start at 0 and not decrease, got \[1, 7, 9\]"),
    "out of other width": ({"out": lambda x: x[:, :64]}, ValueError, r"kv_cache must have shape \[any, any, 64\], got \[4, 4, 576\]"),
    "out of other dtype": ({"out": lambda x: x.half()}, TypeError, "kv_cache must be float16 or float8_e4m3fn .*, got bfloat16"),
    "out expanded": ({"out": lambda x: x[:1].expand(8, -1)}, ValueError, "out is written, but its elements share memory"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_GATHER)
def test_bad_gathers_are_refused(name: str, device: torch.device, backend: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("DUALMLA_DEBUG", "1")
    changes, error, message = BAD_GATHER[name]
    out = torch.full((8, RANK + ROPE), math.nan, dtype=BF16, device=device)
    arguments: dict[str, torch.Tensor] = {
        "kv_cache": torch.zeros(4, 4, RANK + ROPE, dtype=BF16, device=device),
        "block_table": torch.tensor([[3, 0], [2, 1]], dtype=torch.int32, device=device),
        "cu_seqlens": torch.tensor([0, 6, 8], dtype=torch.int32, device=device),
        "seq_starts": torch.tensor([0, 0], dtype=torch.int32, device=device),
        "out": out,
    }
    arguments |= {argument: change(arguments[argument]) for argument, change in changes.items()}
    with pytest.raises(error, match=message):
        dualmla.gather_kv_cache(**arguments, backend=backend)
    assert bool(out.isnan().all())
