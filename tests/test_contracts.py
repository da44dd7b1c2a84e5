"""The contracts of a decode, one by one, on numbers whose answer is known without any attention code."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import pytest
import torch

import dualmla
from dualmla.testing import DecodeCase, DecodeInputs, assert_bits_equal, assert_decode_agrees, make_decode_inputs, run_decode

FP32 = torch.float32


def ladder(
    device: torch.device, heads: int, length: int, query_len: int = 1, page_size: int = 4
) -> tuple[torch.Tensor, torch.Tensor, dualmla.MLAMetadata]:
    """q . k is (head + 1) * key, and the first value of a key is its number: q [T, H, 576], cache, meta."""
    q = torch.zeros(query_len, heads, 576, device=device)
    q[..., 0] = torch.arange(1, heads + 1, device=device)
    pages = -(-length // page_size)
    cache = torch.zeros(max(pages, 1), page_size, 576, device=device)
    cache[..., 0] = torch.arange(cache.shape[0] * page_size, device=device).view(-1, page_size)
    table = torch.arange(max(pages, 1), dtype=torch.int32).view(1, -1)
    return q, cache, dualmla.decode_metadata(table, [length], [query_len], page_size=page_size, device=device)


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("scale", [1e-3, 0.1352337788608801, 192**-0.5, 1.0, 2.5])
def test_scale_and_lse(scale: float, splits: int | None, device: torch.device, backend: str) -> None:
    """Contracts 1 and 2: the scale given, natural logarithm, of the scaled scores, [num_heads, num_tokens], fp32."""
    heads, length = 5, 130
    q, cache, meta = ladder(device, heads, length)
    out, lse = dualmla.mla_decode(q, cache, meta, scale, return_lse=True, num_kv_splits=splits, backend=backend)
    assert (lse.shape, lse.dtype) == ((heads, 1), FP32)
    for head in range(heads):
        step = scale * (head + 1)  # scores 0, step, 2 step, ...
        total = sum(math.exp(step * (key - length + 1)) for key in range(length))
        mean = sum(key * math.exp(step * (key - length + 1)) for key in range(length)) / total
        assert float(lse[head, 0]) == pytest.approx(step * (length - 1) + math.log(total), rel=1e-5)
        assert float(out[0, head, 0]) == pytest.approx(mean, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("length", [0, 1, 3, 8, 9, 64, 66, 200])
def test_causal_is_bottom_right(length: int, splits: int | None, device: torch.device, backend: str) -> None:
    """Contract 5: with equal scores, query i of n is the mean of the first length - n + i + 1 keys, and its LSE their logarithm."""
    q, cache, meta = ladder(device, heads=2, length=length, query_len=9)
    for causal in (True, False):
        out, lse = dualmla.mla_decode(
            torch.zeros_like(q), cache, meta, 0.1, causal=causal, return_lse=True, num_kv_splits=splits, backend=backend
        )
        for token in range(9):
            seen = max(length - 9 + token + 1, 0) if causal else length
            mean, log = ((seen - 1) / 2, math.log(seen)) if seen else (0.0, -math.inf)
            assert out[token, :, 0].tolist() == pytest.approx([mean] * 2, rel=1e-6)
            assert lse[:, token].tolist() == pytest.approx([log] * 2, rel=1e-6)
    assert not out[..., 1:].any()


def test_scores_past_the_range_of_exp(device: torch.device, backend: str) -> None:
    """Scores of +-10000: exp overflows and vanishes, the softmax does not."""
    q, cache, meta = ladder(device, heads=2, length=9)
    for sign in (1, -1):
        out, lse = dualmla.mla_decode(sign * q, cache, meta, 1250.0, return_lse=True, backend=backend)
        assert out[0, :, 0].tolist() == ([8.0, 8.0] if sign > 0 else [0.0, 0.0])
        assert lse[:, 0].tolist() == ([10000.0, 20000.0] if sign > 0 else [0.0, 0.0])


CASE = DecodeCase(
    num_heads=3, seq_lens=(130, 5, 0, 64), query_lens=(2, 1, 1, 3), page_size=16, padding_tokens=2, kv_lora_rank=64, qk_rope_head_dim=48
)
SPLITS = (None, 1, 3)


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("fill", [math.nan, math.inf, 1e30])
def test_every_row_of_out_is_written(fill: float, splits: int | None, device: torch.device, backend: str) -> None:
    """Contract 3: whatever `out` held; rows without keys, padding included, are exactly 0 and -inf."""
    inputs = make_decode_inputs(dataclasses.replace(CASE, num_kv_splits=splits), device)
    inputs.out.fill_(fill)
    out, lse = run_decode(inputs, backend)
    assert_decode_agrees(out, lse, inputs)
    for token in (3, 7, 8):  # the empty request's, and the padding
        assert out[token].abs().max() == 0
        assert lse[:, token].isneginf().all()
    assert lse[:, [0, 1, 2, 4, 5, 6]].isfinite().all()


Change = Callable[[DecodeInputs], None]


def refill_free_slots(value: float) -> Change:
    """Every slot of the cache that no request owns, the rest of last pages included, holds `value`."""

    def change(inputs: DecodeInputs) -> None:
        cache, meta, page_size = inputs.kv_cache, inputs.meta, inputs.case.page_size
        owned = torch.zeros(cache.shape[:2], dtype=torch.bool, device=cache.device)
        for request, length in enumerate(inputs.case.seq_lens):
            for token in range(length):
                owned[int(meta.block_table[request, token // page_size]), token % page_size] = True
        cache[~owned] = value

    return change


def rename_unused_pages(value: int) -> Change:
    def change(inputs: DecodeInputs) -> None:
        for request, length in enumerate(inputs.case.seq_lens):
            inputs.meta.block_table[request, -(-length // inputs.case.page_size) :] = value

    return change


def spoil_slack(inputs: DecodeInputs) -> None:
    meta = inputs.meta
    meta.paged_kv_indices[int(meta.paged_kv_indptr[-1]) :] = -7


UNUSED: dict[str, Change] = {
    "free slots inf": refill_free_slots(math.inf),
    "free slots -inf": refill_free_slots(-math.inf),
    "free slots 3e38": refill_free_slots(3e38),
    "free slots 0": refill_free_slots(0.0),
    "unused pages -1": rename_unused_pages(-1),
    "unused pages most": rename_unused_pages(2**31 - 1),
    "unused pages 0": rename_unused_pages(0),
    "slack": spoil_slack,
}


@functools.lru_cache(maxsize=2)
def untouched(case: DecodeCase, device: torch.device, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The result with the memory as `make_decode_inputs` poisons it."""
    return run_decode(make_decode_inputs(case, device), backend)


@pytest.mark.parametrize("unused", UNUSED)
@pytest.mark.parametrize(("causal", "splits"), [(True, None), (True, 3), (False, 1), (False, 3)])
def test_unused_memory_is_never_read_into_a_result(
    unused: str, causal: bool, splits: int | None, device: torch.device, backend: str
) -> None:
    """Contract 4: other garbage where nobody's data is, the same bits out; and nothing but the outputs is written."""
    case = dataclasses.replace(CASE, num_kv_splits=splits, causal=causal)
    want = untouched(case, device, backend)
    inputs = make_decode_inputs(case, device)
    UNUSED[unused](inputs)
    before = {name: tensor.clone() for name, tensor in tensors(inputs).items()}
    got = run_decode(inputs, backend)
    assert_bits_equal(got[0], want[0], "out")
    assert_bits_equal(got[1], want[1], "lse")
    for name, tensor in tensors(inputs).items():
        assert_bits_equal(tensor, before[name], name)


def tensors(inputs: DecodeInputs) -> dict[str, torch.Tensor]:
    """What a decode is given to read."""
    meta = inputs.meta
    fields = {field.name: getattr(meta, field.name) for field in dataclasses.fields(meta)}
    of_meta = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
    return {"q": inputs.q, "kv_cache": inputs.kv_cache, **of_meta}


# --- contract 6: offsets past 2^31


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("splits", [1, 3])
def test_cache_past_two_to_the_31_elements(page_size: int, splits: int, device: torch.device, backend: str) -> None:
    """Live pages that begin at element 2^31; the pages before them are never touched and take no memory on a CPU."""
    first = -(-(2**31) // (page_size * 576))
    case = DecodeCase(num_heads=3, seq_lens=(130, 5), page_size=page_size, first_page=first, num_kv_splits=splits)
    inputs = make_decode_inputs(case, device)
    assert int(inputs.meta.block_table[0, 0]) * inputs.kv_cache.stride(0) >= 2**31
    assert_decode_agrees(*run_decode(inputs, backend), inputs)


FAR = 2_200_000_000
"""Elements between the first and the last token, head or slot."""


@pytest.mark.parametrize(
    ("far", "page_size"),
    [("q by token", 3), ("q by head", 3), ("out by token", 3), ("out by head", 3), ("cache by slot", 3), ("cache by slot", 64)],
)
@pytest.mark.parametrize("splits", [1, 3])
def test_strides_past_two_to_the_31_elements(far: str, page_size: int, splits: int, device: torch.device, backend: str) -> None:
    """One untouched allocation of 4.4 GB, in which the last token, head or slot lies past 2^31 elements."""
    case = DecodeCase(num_heads=3, seq_lens=(200,), query_lens=(3,), page_size=page_size, num_kv_splits=splits)
    inputs = make_decode_inputs(case, device)
    memory = torch.empty(FAR + 10_000_000, dtype=case.dtype, device=device)
    name, by = far.split(" by ")
    field = "kv_cache" if name == "cache" else name
    tensor = getattr(inputs, field)
    first, second, row = tensor.shape
    strides = (FAR // (first - 1), row, 1) if by == "token" else (row, FAR // (second - 1), 1)
    inputs = dataclasses.replace(inputs, **{field: memory.as_strided(tensor.shape, strides).copy_(tensor)})
    assert_decode_agrees(*run_decode(inputs, backend), inputs)


# --- contract 8


@pytest.mark.parametrize("splits", SPLITS)
def test_the_same_call_gives_the_same_bits(splits: int | None, device: torch.device, backend: str) -> None:
    case = dataclasses.replace(CASE, num_heads=17, num_kv_splits=splits)
    out, lse = run_decode(make_decode_inputs(case, device), backend)
    for _ in range(20 if device.type == "cuda" else 2):
        again = run_decode(make_decode_inputs(case, device), backend)
        assert_bits_equal(again[0], out, "out")
        assert_bits_equal(again[1], lse, "lse")


@pytest.fixture
def _tiles_by_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU too, tiles as GPUs have them: another size for many rows, so that a choice by the batch shows in the bits."""
    from dualmla_kernels import decode

    choose = decode.decode_config
    if device.type == "cpu":
        monkeypatch.setattr(
            decode, "decode_config", lambda rows, *rest: dataclasses.replace(choose(rows, *rest), block_n=32 if rows > 16 else 64)
        )


@pytest.mark.usefixtures("_tiles_by_rows")
@pytest.mark.parametrize(("heads", "splits"), [(3, 1), (3, 2), (3, 5), (17, 2)])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(heads: int, splits: int, device: torch.device, backend: str) -> None:
    """With fixed splits; ragged queries, and each request in any place of the batch."""
    lens = {"seq_lens": (330, 7, 64, 0, 129), "query_lens": (2, 1, 7, 1, 4)}
    sizes = {"kv_lora_rank": 64, "qk_rope_head_dim": 16}
    inputs = make_decode_inputs(DecodeCase(num_heads=heads, page_size=16, num_kv_splits=splits, **lens, **sizes), device)
    scale = inputs.case.softmax_scale

    def decode(order: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(out, lse) of each request of a batch of those in `order`."""
        first, meta = inputs.meta.qo_indptr.tolist(), inputs.meta
        query = [inputs.q[first[r] : first[r + 1]] for r in order]
        lengths = [len(q) for q in query]
        batch = dualmla.decode_metadata(meta.block_table[order], [lens["seq_lens"][r] for r in order], lengths, page_size=16, device=device)
        q = torch.cat(query)
        out = torch.empty(len(q), heads, 64, dtype=q.dtype, device=device)
        _, lse = dualmla.mla_decode(q, inputs.kv_cache, batch, scale, out=out, return_lse=True, num_kv_splits=splits, backend=backend)
        return list(zip(out.split(lengths), lse.split(lengths, 1), strict=True))

    alone = [decode([r])[0] for r in range(5)]
    for order in ([0, 1, 2, 3, 4], [4, 0, 3, 1]):
        for request, (out, lse) in zip(order, decode(order), strict=True):
            assert_bits_equal(out, alone[request][0], f"out of request {request} in {order}")
            assert_bits_equal(lse, alone[request][1], f"lse of request {request} in {order}")


def test_splits_agree_among_themselves(device: torch.device) -> None:
    """Cutting a row changes its rounding, so that the kernel is seen to cut at all."""
    inputs = make_decode_inputs(DecodeCase(num_heads=3, seq_lens=(600,), page_size=16, dtype=FP32), device)
    results = [
        dualmla.mla_decode(inputs.q, inputs.kv_cache, inputs.meta, 0.1, num_kv_splits=splits, backend="triton") for splits in (1, 2, 3, 9)
    ]
    assert len({result.double().sum().item() for result in results}) > 1
    for result in results:
        assert torch.allclose(result, results[0], atol=1e-5)
