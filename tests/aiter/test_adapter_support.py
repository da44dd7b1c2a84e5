"""What is refused before a launch, and the sentence it is refused with."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import aiter_stand_in as stand_in
import pytest
import torch

from dualmla import MLAConfig
from dualmla.backends.aiter.signatures import describe
from dualmla.backends.aiter.support import (
    ARCHS,
    TABLE,
    LaunchShape,
    config_refusals,
    decode_shape,
    launch_shape,
    prefill_refusals,
)
from dualmla.backends.base import DecodeCall, PrefillCall

CALL = DecodeCall(
    device=torch.device("cuda:0"),
    dtype=torch.bfloat16,
    kv_cache_dtype=torch.bfloat16,
    num_heads=16,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    page_size=16,
    num_tokens=128,
    batch_size=32,
    max_query_len=4,
    cache_bytes=1 << 30,
    cache_is_dense=True,
    causal=True,
    return_lse=False,
    fixed_splits=False,
)


def refusals(generation: str = "S2", arch: str = "gfx942", *, plans: bool = True, **changed: Any) -> list[str]:
    signature = describe(stand_in.package() if plans else stand_in.PACKAGE, stand_in.module(generation), "").signature
    shape = decode_shape(dataclasses.replace(CALL, **changed), signature, arch)
    return shape if isinstance(shape, list) else []


@pytest.mark.parametrize("generation", stand_in.GENERATIONS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("changed", [{}, {"num_heads": 4}, {"num_heads": 128}, {"page_size": 1}, {"causal": False}, {"max_query_len": 1}])
def test_what_is_accepted(generation: str, arch: str, changed: dict[str, Any]) -> None:
    assert refusals(generation, arch, **changed) == []


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"dtype": torch.float16, "kv_cache_dtype": torch.float16}, "queries are float16; AITER computes in bfloat16 alone"),
        ({"dtype": torch.float32, "kv_cache_dtype": torch.float32}, "queries are float32; AITER computes in bfloat16 alone"),
        (
            {"kv_cache_dtype": torch.float8_e4m3fnuz, "plans": False},
            "the cache is float8_e4m3fnuz .* persistent mode alone, which generation S2 .* use a bfloat16 cache",
        ),
        (
            {"kv_cache_dtype": torch.float8_e4m3fnuz, "generation": "S1"},
            "the cache is float8_e4m3fnuz .* persistent mode alone, which generation S1 .* use a bfloat16 cache",
        ),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "the cache is float8_e4m3fn; gfx942 computes with float8_e4m3fnuz"),
        ({"kv_cache_dtype": torch.float8_e4m3fnuz, "arch": "gfx950"}, "the cache is float8_e4m3fnuz; gfx950 computes with float8_e4m3fn"),
        (
            {"kv_cache_dtype": torch.float8_e4m3fnuz, "generation": "S8", "return_lse": True},
            "the LSE is asked for; .* persistent decode, which a float8 cache takes, writes none .* or the triton backend",
        ),
        ({"num_heads": 129}, "num_heads is 129; .* at most 128"),
        ({"kv_lora_rank": 256}, "kv_lora_rank and qk_rope_head_dim are 256 and 64; AITER has 512 and 64 alone"),
        ({"max_query_len": 5}, "up to 5 query tokens; .* at most 4"),
        ({"cache_bytes": 4 << 30}, "the cache has 4.0 GiB; .* less than 4 GiB a layer is right on gfx942"),
        ({"cache_is_dense": False}, "the cache is not contiguous"),
        ({"return_lse": True}, "the LSE is asked for; AITER of generation S2 returns memory that it never wrote"),
        ({"fixed_splits": True}, "num_kv_splits is fixed; .* the triton backend does"),
        ({"num_heads": 128, "num_tokens": 8193}, "8193 query tokens of 128 heads need more than 2 GiB .* fewer at a time"),
    ],
)
def test_one_sentence_each(changed: dict[str, Any], sentence: str) -> None:
    (reason,) = refusals(**changed)
    assert re.search(sentence, reason), reason


def test_limits_are_exact() -> None:
    assert refusals(cache_bytes=(4 << 30) - 1) == []
    assert refusals(arch="gfx950", cache_bytes=(2 << 30) - 1) == []
    assert len(refusals(arch="gfx950", cache_bytes=2 << 30)) == 1
    assert refusals(num_heads=128, num_tokens=8192) == []
    assert refusals("S6", return_lse=True) == []
    # the LSE takes two splits: half as many rows fit
    assert len(refusals("S6", num_heads=128, num_tokens=8192, return_lse=True)) == 1


def test_every_reason_is_given_at_once() -> None:
    assert len(refusals(dtype=torch.float16, kv_cache_dtype=torch.float16, num_heads=200, max_query_len=9, return_lse=True)) == 4


def test_the_table_leaves_no_generation_or_arch_out() -> None:
    for generation in stand_in.GENERATIONS:
        for arch in ARCHS:
            rows = [row for row in TABLE if generation in row.generations and arch in row.archs]
            assert [row.cache for row in rows] == ["bfloat16", "float8"][: len(rows)]
            assert len(rows) == 1 + (generation >= "S2")


@pytest.mark.parametrize("generation", stand_in.GENERATIONS[2:])
@pytest.mark.parametrize(("arch", "dtype"), [("gfx942", torch.float8_e4m3fnuz), ("gfx950", torch.float8_e4m3fn)])
def test_a_float8_cache_takes_one_persistent_kernel_whatever_is_asked(generation: str, arch: str, dtype: torch.dtype) -> None:
    """One query token of 16 heads: no several tokens in one launch (finding 9), no float8 queries (findings 7, 15 and 16)."""
    signature = describe(stand_in.package(), stand_in.module(generation), "").signature
    for heads, query_len in itertools.product((1, 16, 17, 64, 128), (1, 2, 3, 4)):
        shape = decode_shape(dataclasses.replace(CALL, num_heads=heads, max_query_len=query_len, kv_cache_dtype=dtype), signature, arch)
        assert shape == LaunchShape(-(-heads // 16) * 16, 1, persistent=True)
    for kernels in TABLE:
        assert not kernels.persistent or set(kernels.heads.values()) == {1}
        assert kernels.persistent == (kernels.cache == "float8")


@pytest.mark.parametrize(
    ("generation", "arch", "heads", "shape"),
    [
        ("S1", "gfx942", 16, LaunchShape(16, 1)),
        ("S2", "gfx942", 1, LaunchShape(16, 4)),
        ("S2", "gfx950", 17, LaunchShape(128, 1)),
        ("S8", "gfx942", 33, LaunchShape(128, 1)),  # 64 heads fault there
        ("S8", "gfx950", 33, LaunchShape(64, 1)),
    ],
)
def test_the_smallest_kernel_that_holds_the_heads(generation: str, arch: str, heads: int, shape: LaunchShape) -> None:
    signature = describe(stand_in.PACKAGE, stand_in.module(generation), "").signature
    assert launch_shape(signature, arch, heads) == shape
    assert decode_shape(dataclasses.replace(CALL, num_heads=heads), signature, arch) == shape


def test_what_a_config_is_refused_for() -> None:
    signature = describe(stand_in.PACKAGE, stand_in.module("S2"), "").signature
    assert config_refusals(MLAConfig(num_heads=128, softmax_scale=0.1), signature, "gfx942") == []
    cfg = MLAConfig(num_heads=256, softmax_scale=0.1, v_head_dim=192, kv_cache_dtype=torch.float8_e4m3fn)
    dims, dtype, heads = config_refusals(cfg, signature, "gfx950")
    assert "512, 64, 192, 192; AITER has 512, 64, 192, 128 alone" in dims
    assert "float8_e4m3fn" in dtype
    assert "num_heads is 256" in heads


def test_what_a_prefill_is_refused_for() -> None:
    aiter = describe(stand_in.PACKAGE, stand_in.module("S2"), "1.2.3")
    able = dataclasses.replace(aiter, attention=print)
    call = PrefillCall(torch.device("cuda:0"), torch.bfloat16, 16, 192, 128)
    assert prefill_refusals(call, able) == []
    assert "AITER 1.2.3 has no flash_attn_varlen_func" in prefill_refusals(call, aiter)[0]
    (sizes, dtype) = prefill_refusals(dataclasses.replace(call, dtype=torch.float16, v_head_dim=192), able)
    assert "qk_head_dim and v_head_dim are 192 and 192; AITER's prefill has 192 and 128 alone" in sizes
    assert "float16; AITER computes in bfloat16 alone" in dtype
