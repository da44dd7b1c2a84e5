"""Bad input: every refusal names the argument, its value and what is allowed, and happens before anything is launched or written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import dualmla
from dualmla.testing import assert_bits_equal
from dualmla.validation import check_written, reads_allowed

BF16, FP32 = torch.bfloat16, torch.float32
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every backend only notes here the calls that reach it."""
    reached: list[str] = []
    for backend in (dualmla.TritonMLABackend, dualmla.ReferenceMLABackend, dualmla.AiterMLABackend):
        for function in ("mla_decode", "concat_and_cache_mla"):
            monkeypatch.setattr(backend, function, classmethod(lambda cls, *a, function=function, **k: reached.append(function)))
    return reached


Refuses = Callable[[Callable[[], object], type[Exception], str], None]


@pytest.fixture
def refuses(launched: list[str]) -> Refuses:
    """Asserts that a call raises, and that nothing reached a backend before it did."""

    def check(call: Callable[[], object], error: type[Exception], message: str) -> None:
        launched.clear()
        with pytest.raises(error, match=message):
            call()
        assert launched == []

    return check


def config(**changes: Any) -> dualmla.MLAConfig:
    return dualmla.MLAConfig(**{"num_heads": 2, "softmax_scale": 0.1, "page_size": 4} | changes)


def decodes(device: torch.device, cfg: dualmla.MLAConfig | None = None, **changes: Any) -> dualmla.MLAMetadata:
    """Two requests of 5 and 3 tokens on pages 1, 2 and 0; built for `cfg`, or from lengths alone."""
    table = torch.tensor([[1, 2], [0, 99]], dtype=torch.int32, device=device)
    lengths = torch.tensor([5, 3], dtype=torch.int32, device=device)
    if cfg is None:
        return dualmla.decode_metadata(table, lengths, page_size=4, device=device)
    return dualmla.MLAMetadataBuilder(cfg, device, max_num_seqs=2, max_num_pages_per_seq=2).build(table, lengths, [1, 1])


def decode_arguments(device: torch.device) -> dict[str, Any]:
    return {
        "q": torch.zeros(2, 2, 576, dtype=BF16, device=device),
        "kv_cache": torch.zeros(3, 4, 576, dtype=BF16, device=device),
        "meta": decodes(device),
        "softmax_scale": 0.1,
    }


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


META_DEVICE = torch.device("meta")
WRONG_DECODES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q a list": ({"q": [1.0]}, TypeError, "q must be a tensor, got list"),
    "q None": ({"q": None}, TypeError, "q must be a tensor, got NoneType"),
    "q of rank 2": ({"q": zeros(2, 576)}, ValueError, r"q must have 3 dimensions, got shape \[2, 576\]"),
    "q float64": ({"q": zeros(2, 2, 576, dtype=torch.float64)}, TypeError, "q must be bfloat16 or float16 or float32, got float64"),
    "q float8": ({"q": zeros(2, 2, 576).to(E4M3)}, TypeError, "q must be .*, got float8_e4m3fn"),
    "q int": ({"q": zeros(2, 2, 576, dtype=torch.int32)}, TypeError, "q must be .*, got int32"),
    "q without heads": ({"q": zeros(2, 0, 576)}, ValueError, r"q must have at least one head, got shape \[2, 0, 576\]"),
    "q strided": (
        {"q": zeros(2, 2, 1152)[..., ::2]},
        ValueError,
        r"q must be contiguous in its last dimension, got strides \(2304, 1152, 2\)",
    ),
    "q wants grad": ({"q": zeros(2, 2, 576).requires_grad_()}, ValueError, "q requires grad"),
    "q of fewer tokens": ({"q": zeros(1, 2, 576)}, ValueError, "q has 1 tokens, the metadata describes 2"),
    "cache of other rows": ({"kv_cache": zeros(3, 4, 512)}, ValueError, r"kv_cache must have shape \[any, any, 576\], got \[3, 4, 512\]"),
    "cache of rank 4": ({"kv_cache": zeros(3, 4, 1, 576)}, ValueError, r"kv_cache must have 3 dimensions, got shape \[3, 4, 1, 576\]"),
    "cache of another dtype": (
        {"kv_cache": zeros(3, 4, 576, dtype=FP32)},
        TypeError,
        "kv_cache must be bfloat16 or float8_e4m3fn or float8_e4m3fnuz, got float32",
    ),
    "cache of e5m2": ({"kv_cache": zeros(3, 4, 576).to(torch.float8_e5m2)}, TypeError, "kv_cache must be .*, got float8_e5m2"),
    "cache of bytes": ({"kv_cache": zeros(3, 4, 576, dtype=torch.uint8)}, TypeError, "kv_cache must be .*, got uint8"),
    "cache elsewhere": (
        {"kv_cache": torch.empty(3, 4, 576, dtype=BF16, device="meta")},
        ValueError,
        "kv_cache is on meta, it must be on cpu",
    ),
    "cache of other pages": (
        {"kv_cache": zeros(6, 2, 576)},
        ValueError,
        "kv_cache has pages of 2 tokens, the metadata was built for page_size=4",
    ),
    "cache of endless pages": (
        {"kv_cache": zeros(1, 1, 576).expand(1, 2**24 + 1, 576)},
        ValueError,
        r"kv_cache must be .* with pages of 1 to 16777216 tokens, got \[1, 16777217, 576\]",
    ),
    "cache of empty pages": (
        {"kv_cache": zeros(6, 0, 576)},
        ValueError,
        r"kv_cache must be \[num_pages, page_size, latent_dim\] with pages of 1 to 16777216 tokens, got \[6, 0, 576\]",
    ),
    "cache strided": ({"kv_cache": zeros(3, 4, 1152)[..., ::2]}, ValueError, "kv_cache must be contiguous in its last dimension"),
    "cache wants grad": ({"kv_cache": zeros(3, 4, 576).requires_grad_()}, ValueError, "kv_cache requires grad"),
    "cache of too few pages": (
        {"kv_cache": zeros(2, 4, 576)},
        ValueError,
        r"block_table\[0, 1\] is 2, inside the live length of request 0; kv_cache has 2 pages",
    ),
    "cache without pages": ({"kv_cache": zeros(0, 4, 576)}, ValueError, r"block_table\[0, 0\] is 1.*kv_cache has 0 pages"),
    "rows of no known size": (
        {"q": zeros(2, 2, 700), "kv_cache": zeros(3, 4, 700)},
        ValueError,
        "kv_cache has rows of 700; they must be kv_lora_rank",
    ),
    "rows of two sizes": (
        {"q": zeros(2, 2, 160), "kv_cache": zeros(3, 4, 160)},
        ValueError,
        r"rows of 160.*may be 128 \+ 32, 64 \+ 96, 32 \+ 128",
    ),
    "meta None": ({"meta": None}, TypeError, "meta must be MLAMetadata, got NoneType"),
    "meta a dict": ({"meta": {}}, TypeError, "meta must be MLAMetadata, got dict"),
    "scale None": ({"softmax_scale": None}, TypeError, "softmax_scale must be a float, got NoneType"),
    "scale a tensor": ({"softmax_scale": torch.tensor(0.1)}, TypeError, "softmax_scale must be a float, got Tensor"),
    "scale True": ({"softmax_scale": True}, TypeError, "softmax_scale must be a float, got bool: True"),
    "scale 0": ({"softmax_scale": 0.0}, ValueError, "softmax_scale must be finite and positive, got 0.0"),
    "scale negative": ({"softmax_scale": -0.1}, ValueError, "softmax_scale must be finite and positive, got -0.1"),
    "scale NaN": ({"softmax_scale": math.nan}, ValueError, "softmax_scale must be finite and positive, got nan"),
    "scale inf": ({"softmax_scale": math.inf}, ValueError, "softmax_scale must be finite and positive, got inf"),
    "scale 0 in fp32": ({"softmax_scale": 1e-50}, ValueError, "softmax_scale must be finite and positive in fp32, got 1e-50"),
    "scale inf in fp32": ({"softmax_scale": 1e39}, ValueError, r"softmax_scale must be finite and positive in fp32, got 1e\+39"),
    "k_scale 0": ({"k_scale": 0}, ValueError, "k_scale must be finite and positive, got 0"),
    "k_scale 0 in fp32": ({"k_scale": 1e-50}, ValueError, "k_scale must be finite and positive in fp32, got 1e-50"),
    "k_scale inf in fp32": ({"k_scale": 1e39}, ValueError, r"k_scale must be finite and positive in fp32, got 1e\+39"),
    "k_scale no double": ({"k_scale": 10**309}, ValueError, "k_scale must be finite and positive, got 1000"),
    "k_scale a string": ({"k_scale": "1"}, TypeError, "k_scale must be a float, got str: '1'"),
    "k_scale of two": (
        {"k_scale": torch.ones(2)},
        ValueError,
        r"k_scale must be a float or an fp32 tensor of one element on cpu, got float32 \[2\]",
    ),
    "k_scale bf16": (
        {"k_scale": zeros(1)},
        ValueError,
        r"k_scale must be a float or an fp32 tensor of one element on cpu, got bfloat16 \[1\]",
    ),
    "k_scale elsewhere": ({"k_scale": torch.ones(1, device="meta")}, ValueError, r"k_scale must be .* on cpu, got float32 \[1\] on meta"),
    "k_scale wants grad": ({"k_scale": torch.ones(1).requires_grad_()}, ValueError, "k_scale requires grad"),
    "k_scale NaN on a CPU": ({"k_scale": torch.full((1,), math.nan)}, ValueError, "k_scale must be finite and positive, got nan"),
    "k_scale 0 on a CPU": ({"k_scale": torch.zeros(())}, ValueError, "k_scale must be finite and positive, got 0.0"),
    "out a list": ({"out": [0.0]}, TypeError, "out must be a tensor, got list"),
    "out of another rank": ({"out": zeros(2, 1024)}, ValueError, r"out must have 3 dimensions, got shape \[2, 1024\]"),
    "out of other heads": ({"out": zeros(2, 3, 512)}, ValueError, r"out must have shape \[2, 2, 512\], got \[2, 3, 512\]"),
    "out of latent rows": ({"out": zeros(2, 2, 576)}, ValueError, "kv_lora_rank must be a power of two from 32 to 512, got 576"),
    "out of another dtype": ({"out": zeros(2, 2, 512, dtype=FP32)}, TypeError, "out must be bfloat16, got float32"),
    "out elsewhere": ({"out": torch.empty(2, 2, 512, dtype=BF16, device="meta")}, ValueError, "out is on meta, it must be on cpu"),
    "out strided": ({"out": zeros(2, 2, 1024)[..., ::2]}, ValueError, "out must be contiguous in its last dimension"),
    "out expanded": (
        {"out": zeros(1, 2, 512).expand(2, 2, 512)},
        ValueError,
        r"out is written, but its elements share memory: .* strides \(0, 512, 1\)",
    ),
    "out overlapping": (
        {"out": zeros(2048).as_strided((2, 2, 512), (512, 511, 1))},
        ValueError,
        r"out is written, but its elements share memory: .* strides \(512, 511, 1\)",
    ),
    "out wants grad": ({"out": zeros(2, 2, 512).requires_grad_()}, ValueError, "out requires grad"),
    "splits 0": ({"num_kv_splits": 0}, ValueError, "num_kv_splits must be None or an int from 1 to 1024, got 0"),
    "splits 1025": ({"num_kv_splits": 1025}, ValueError, "num_kv_splits must be None or an int from 1 to 1024, got 1025"),
    "splits 2.0": ({"num_kv_splits": 2.0}, ValueError, "num_kv_splits must be None or an int from 1 to 1024, got 2.0"),
    "splits True": ({"num_kv_splits": True}, ValueError, "num_kv_splits must be None or an int from 1 to 1024, got True"),
    "backend unknown": ({"backend": "cuda"}, ValueError, "backend is 'cuda'; it must be one of auto, aiter, triton, reference"),
}


def test_the_arguments_are_right_but_for_the_changed_one(device: torch.device, launched: list[str]) -> None:
    dualmla.mla_decode(**decode_arguments(device))
    dualmla.concat_and_cache_mla(**write_arguments(device))
    assert launched == ["mla_decode", "concat_and_cache_mla"]


@pytest.mark.parametrize("wrong", WRONG_DECODES)
def test_mla_decode_refuses(refuses: Refuses, wrong: str) -> None:
    """On a CPU, where every check is made."""
    changes, error, message = WRONG_DECODES[wrong]
    arguments = decode_arguments(torch.device("cpu")) | changes
    given = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor) and value.device.type == "cpu"}
    before = {name: memory_of(value).clone() for name, value in given.items()}
    refuses(lambda: dualmla.mla_decode(**arguments), error, message)
    for name, value in given.items():
        assert_bits_equal(memory_of(value), before[name], name)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes that a tensor is in, each once however often its strides meet it."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def test_a_refused_decode_leaves_out_as_it_was(refuses: Refuses, device: torch.device) -> None:
    arguments = decode_arguments(device) | {"num_kv_splits": -1, "out": torch.full((2, 2, 512), math.nan, dtype=BF16, device=device)}
    refuses(lambda: dualmla.mla_decode(**arguments), ValueError, "num_kv_splits")
    assert arguments["out"].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads is 2, the metadata was built for a config of num_heads=3"),
        ({"dtype": torch.float16}, "dtype is torch.bfloat16, the metadata was built for a config of dtype=torch.float16"),
        ({"kv_cache_dtype": E4M3}, "kv_cache_dtype is torch.bfloat16, .* kv_cache_dtype=torch.float8_e4m3fn"),
        ({"page_size": 8}, "kv_cache has pages of 4 tokens, the metadata was built for page_size=8"),
        ({"kv_lora_rank": 256}, "kv_cache has rows of 576, the metadata was built for kv_lora_rank .* = 320"),
        ({"qk_rope_head_dim": 32}, "kv_cache has rows of 576, the metadata was built for kv_lora_rank .* = 544"),
    ],
    ids=str,
)
def test_metadata_of_another_config(refuses: Refuses, change: dict[str, Any], message: str, device: torch.device) -> None:
    arguments = decode_arguments(device)
    dualmla.mla_decode(**arguments | {"meta": decodes(device, config())})
    refuses(lambda: dualmla.mla_decode(**arguments | {"meta": decodes(device, config(**change))}), ValueError, message)


def test_metadata_with_prefills(refuses: Refuses, device: torch.device) -> None:
    builder = dualmla.MLAMetadataBuilder(config(), device, max_num_seqs=2, max_num_pages_per_seq=2)
    lengths = torch.tensor([5, 3], dtype=torch.int32, device=device)
    meta = builder.build(torch.zeros(2, 2, dtype=torch.int32, device=device), lengths, [1, 3])
    arguments = decode_arguments(device) | {"meta": meta, "q": torch.zeros(4, 2, 576, dtype=BF16, device=device)}
    refuses(
        lambda: dualmla.mla_decode(**arguments), ValueError, "meta holds 1 prefills beside 1 decodes; mla_decode wants meta.decode_metadata"
    )
    refuses(lambda: dualmla.mla_decode(**arguments | {"meta": meta.prefill_metadata}), ValueError, "meta holds 1 prefills beside 0 decodes")
    dualmla.mla_decode(**arguments | {"meta": meta.decode_metadata})


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("block_table", [[1, -1], [0, 99]], r"block_table\[0, 1\] is -1, inside the live length of request 0; kv_cache has 3 pages"),
        ("block_table", [[1, 2], [3, 99]], r"block_table\[1, 0\] is 3, inside the live length of request 1; kv_cache has 3 pages"),
        ("qo_indptr", [0, 2, 1], r"qo_indptr must begin at 0 and not decrease, got \[0, 2, 1\]"),
        ("qo_indptr", [0, 1, 3], r"qo_indptr ends at 3, q has 2 tokens"),
        ("qo_indptr", [-1, 1, 2], r"qo_indptr must begin at 0 and not decrease, got \[-1, 1, 2\]"),
        ("seq_lens", [5, -3], "seq_lens must not be negative, got -3"),
        ("seq_lens", [9, 3], r"seq_lens reach 9 tokens, block_table has 2 pages of 4 a request"),
    ],
)
def test_contents_are_looked_at_where_that_costs_no_sync(
    refuses: Refuses, field: str, values: list[Any], message: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only a device read can tell: on a CPU always, on a GPU under DUALMLA_DEBUG=1. An engine may change these in place."""
    monkeypatch.setenv("DUALMLA_DEBUG", "1")
    arguments = decode_arguments(device)
    getattr(arguments["meta"], field).copy_(torch.tensor(values))
    refuses(lambda: dualmla.mla_decode(**arguments), ValueError, message)


def test_when_contents_may_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is not on a CPU is read under DUALMLA_DEBUG alone; `meta` stands in for a GPU."""
    here, there = torch.empty(1), torch.empty(1, device="meta")
    for value, allowed in ((None, False), ("", False), ("0", False), ("1", True)):
        monkeypatch.delenv("DUALMLA_DEBUG", raising=False)
        if value is not None:
            monkeypatch.setenv("DUALMLA_DEBUG", value)
        assert reads_allowed(here)
        assert reads_allowed(there) is allowed


# --- the cache write


def write_arguments(device: torch.device) -> dict[str, Any]:
    return {
        "kv_c": torch.ones(3, 512, dtype=BF16, device=device),
        "k_pe": torch.ones(3, 64, dtype=BF16, device=device),
        "kv_cache": torch.zeros(3, 4, 576, dtype=BF16, device=device),
        "slot_mapping": torch.tensor([0, -1, 11], device=device),
    }


WRONG_WRITES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "kv_c of rank 3": ({"kv_c": zeros(3, 1, 512)}, ValueError, r"kv_c must have 2 dimensions, got shape \[3, 1, 512\]"),
    "kv_c int": ({"kv_c": zeros(3, 512, dtype=torch.int64)}, TypeError, "kv_c must be bfloat16 or float16 or float32, got int64"),
    "kv_c strided": ({"kv_c": zeros(512, 3).t()}, ValueError, "kv_c must be contiguous in its last dimension"),
    "kv_c wants grad": ({"kv_c": zeros(3, 512).requires_grad_()}, ValueError, "kv_c requires grad"),
    "k_pe of other tokens": ({"k_pe": zeros(2, 64)}, ValueError, r"k_pe must have shape \[3, any\], got \[2, 64\]"),
    "k_pe of another dtype": ({"k_pe": zeros(3, 64, dtype=FP32)}, TypeError, "k_pe must be bfloat16, got float32"),
    "k_pe elsewhere": ({"k_pe": torch.empty(3, 64, dtype=BF16, device="meta")}, ValueError, "k_pe is on meta, it must be on cpu"),
    "cache of other rows": ({"kv_cache": zeros(3, 4, 512)}, ValueError, r"kv_cache must have shape \[any, any, 576\], got \[3, 4, 512\]"),
    "cache of another dtype": ({"kv_cache": zeros(3, 4, 576, dtype=torch.float16)}, TypeError, "kv_cache must be .*, got float16"),
    "cache expanded": ({"kv_cache": zeros(1, 4, 576).expand(3, 4, 576)}, ValueError, "kv_cache is written, but its elements share memory"),
    "cache of pages that overlap": (
        {"kv_cache": zeros(9000).as_strided((3, 4, 576), (4 * 576 - 64, 576, 1))},
        ValueError,
        "kv_cache is written, but its elements share memory",
    ),
    "slots int32": ({"slot_mapping": torch.zeros(3, dtype=torch.int32)}, TypeError, "slot_mapping must be int64, got int32"),
    "slots a list": ({"slot_mapping": [0, 1, 2]}, TypeError, "slot_mapping must be a tensor, got list"),
    "slots for more tokens": (
        {"slot_mapping": torch.zeros(4, dtype=torch.int64)},
        ValueError,
        "slot_mapping has 4 slots, there are 3 tokens",
    ),
    "slot past the cache": (
        {"slot_mapping": torch.tensor([0, 12, 1])},
        ValueError,
        "slot_mapping must be -1 or 0..11, got values from 0 to 12",
    ),
    "slot -2": ({"slot_mapping": torch.tensor([0, -2, 1])}, ValueError, "slot_mapping must be -1 or 0..11, got values from -2 to 1"),
    "k_scale negative": ({"k_scale": -1.0}, ValueError, "k_scale must be finite and positive, got -1.0"),
    "sizes of no model": ({"k_pe": zeros(3, 72), "kv_cache": zeros(3, 4, 584)}, ValueError, "qk_rope_head_dim must be a multiple of 16"),
    "backend unknown": ({"backend": "cuda"}, ValueError, "backend is 'cuda'; it must be one of auto, aiter, triton, reference"),
}


@pytest.mark.parametrize("wrong", WRONG_WRITES)
def test_concat_and_cache_mla_refuses(refuses: Refuses, wrong: str) -> None:
    changes, error, message = WRONG_WRITES[wrong]
    arguments = write_arguments(torch.device("cpu"))
    refuses(lambda: dualmla.concat_and_cache_mla(**arguments | changes), error, message)
    assert not arguments["kv_cache"].any()


# --- configs and layers


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        *(
            ({name: value}, error, f"{name} must be {wanted}, got {value!r}")
            for name in ("num_heads", "page_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            for value, error, wanted in ((0, ValueError, "at least 1"), (16.0, TypeError, "an int"), (True, TypeError, "an int"))
        ),
        ({"softmax_scale": 10**309}, ValueError, "softmax_scale must be finite and positive, got 1000"),
        ({"softmax_scale": None}, TypeError, "softmax_scale must be a float, got None"),
        ({"softmax_scale": "0.1"}, TypeError, "softmax_scale must be a float, got str: '0.1'"),
        ({"softmax_scale": 0}, ValueError, "softmax_scale must be finite and positive, got 0"),
        ({"softmax_scale": 1e-50}, ValueError, "softmax_scale must be finite and positive in fp32, got 1e-50"),
        ({"softmax_scale": 1e39}, ValueError, r"softmax_scale must be finite and positive in fp32, got 1e\+39"),
        ({"page_size": 2**33}, ValueError, "page_size must be 1 to 16777216 tokens, got 8589934592"),
        ({"softmax_scale": math.nan}, ValueError, "softmax_scale must be finite and positive, got nan"),
        ({"v_head_dim": 528}, ValueError, "v_head_dim must be at most 512, got 528"),
        ({"qk_nope_head_dim": 464}, ValueError, "qk_head_dim must be at most 512, got 528"),
        ({"kv_lora_rank": 16}, ValueError, "kv_lora_rank must be a power of two from 32 to 512, got 16"),
        ({"kv_lora_rank": 1024}, ValueError, "kv_lora_rank must be a power of two from 32 to 512, got 1024"),
        ({"kv_lora_rank": 384}, ValueError, "kv_lora_rank must be a power of two from 32 to 512, got 384"),
        ({"qk_rope_head_dim": 8}, ValueError, "qk_rope_head_dim must be a multiple of 16 from 16 to 128, got 8"),
        ({"qk_rope_head_dim": 144}, ValueError, "qk_rope_head_dim must be a multiple of 16 from 16 to 128, got 144"),
        ({"qk_nope_head_dim": 120}, ValueError, "qk_nope_head_dim must be a multiple of 16, got 120"),
        ({"v_head_dim": 127}, ValueError, "v_head_dim must be a multiple of 16, got 127"),
        ({"dtype": torch.float64}, ValueError, "dtype must be one of bfloat16, float16, float32, got torch.float64"),
        ({"dtype": "bf16"}, ValueError, "dtype must be one of bfloat16, float16, float32, got bf16"),
        ({"kv_cache_dtype": torch.float16}, ValueError, "kv_cache_dtype must be None or one of bfloat16, float8_e4m3fn, float8_e4m3fnuz"),
        ({"kv_cache_dtype": torch.float8_e5m2}, ValueError, "kv_cache_dtype must be None or one of .*, got torch.float8_e5m2"),
    ],
    ids=str,
)
def test_config_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        config(**change)


def test_config_wants_heads_and_scale() -> None:
    """The scale is never derived from a head dimension."""
    for given, missing in (({"num_heads": 2}, "softmax_scale"), ({"softmax_scale": 0.1}, "num_heads")):
        with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{missing}'"):
            dualmla.MLAConfig(**given)


def test_config_is_a_value() -> None:
    cfg = config()
    assert (cfg.kv_lora_rank, cfg.qk_rope_head_dim, cfg.qk_nope_head_dim, cfg.v_head_dim, cfg.dtype) == (512, 64, 128, 128, BF16)
    assert (cfg.latent_dim, cfg.qk_head_dim, cfg.kv_cache_dtype) == (576, 192, BF16)
    assert cfg == config()
    assert hash(cfg) == hash(config(kv_cache_dtype=BF16))
    assert config(kv_cache_dtype=E4M3).cache_dtype == E4M3
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.num_heads = 3  # type: ignore[misc]


IMPLS = [dualmla.TritonMLAImpl, dualmla.ReferenceMLAImpl, dualmla.AiterMLAImpl]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["alibi_slopes", "sliding_window", "blocksparse_params", "logits_soft_cap"])
def test_layer_refuses_what_mla_models_do_not_use(impl: type[dualmla.TritonMLAImpl], name: str) -> None:
    weights = zeros(2, 128, 512), zeros(2, 512, 128)
    impl(config(), *weights, **{name: None})
    with pytest.raises(NotImplementedError, match=f"{name} must be None.*got 0"):
        impl(config(), *weights, **{name: 0})


@pytest.mark.parametrize(
    ("w_uk", "w_uv", "error", "message"),
    [
        (zeros(2, 512, 128), zeros(2, 512, 128), ValueError, r"w_uk must have shape \[2, 128, 512\], got \[2, 512, 128\]"),
        (zeros(2, 128, 512), zeros(3, 512, 128), ValueError, r"w_uv must have shape \[2, 512, 128\], got \[3, 512, 128\]"),
        (zeros(2, 128, 512, dtype=FP32), zeros(2, 512, 128), TypeError, "w_uk must be bfloat16, got float32"),
        (zeros(2, 128, 512), torch.empty(2, 512, 128, dtype=BF16, device="meta"), ValueError, "w_uv is on meta, it must be on cpu"),
        (zeros(256, 512), zeros(2, 512, 128), ValueError, r"w_uk must have 3 dimensions, got shape \[256, 512\]"),
        (None, zeros(2, 512, 128), TypeError, "w_uk must be a tensor, got NoneType"),
        (zeros(2, 128, 512).requires_grad_(), zeros(2, 512, 128), ValueError, "w_uk requires grad"),
    ],
)
def test_layer_refuses_other_weights(w_uk: Any, w_uv: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dualmla.TritonMLAImpl(config(), w_uk, w_uv)


FORWARD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q of other heads": ({"q": zeros(2, 3, 192)}, ValueError, r"q must have shape \[any, 2, 192\], got \[2, 3, 192\]"),
    "q absorbed": ({"q": zeros(2, 2, 576)}, ValueError, r"q must have shape \[any, 2, 192\], got \[2, 2, 576\]"),
    "kv_c of other tokens": ({"kv_c": zeros(1, 512)}, ValueError, r"kv_c must have shape \[2, 512\], got \[1, 512\]"),
    "k_pe with heads": ({"k_pe": zeros(2, 1, 64)}, ValueError, r"k_pe must have 2 dimensions, got shape \[2, 1, 64\]"),
    "cache of another dtype": ({"kv_cache": zeros(3, 4, 576, dtype=FP32)}, TypeError, "kv_cache must be bfloat16, got float32"),
    "cache of other pages": (
        {"kv_cache": zeros(3, 8, 576)},
        ValueError,
        "kv_cache has pages of 8 tokens, the metadata was built for page_size=4",
    ),
    "cache expanded": ({"kv_cache": zeros(1, 4, 576).expand(3, 4, 576)}, ValueError, "kv_cache is written, but its elements share memory"),
    "meta None": ({"meta": None}, TypeError, "meta must be MLAMetadata, got NoneType"),
    "output of another shape": ({"output": zeros(2, 2, 128)}, ValueError, r"output must have 2 dimensions, got shape \[2, 2, 128\]"),
    "output of another width": ({"output": zeros(2, 128)}, ValueError, r"output must have shape \[2, 256\], got \[2, 128\]"),
    "k_scale None of two": ({"k_scale": torch.ones(2)}, ValueError, "k_scale must be a float or an fp32 tensor of one element"),
}


@pytest.mark.parametrize("wrong", FORWARD)
def test_forward_refuses_before_it_writes(refuses: Refuses, wrong: str) -> None:
    """No row reaches the cache of a call that is refused."""
    changes, error, message = FORWARD[wrong]
    device = torch.device("cpu")
    cache = zeros(3, 4, 576)
    impl = dualmla.TritonMLAImpl(config(), zeros(2, 128, 512), zeros(2, 512, 128))
    arguments: dict[str, Any] = {
        "q": zeros(2, 2, 192),
        "kv_c": zeros(2, 512) + 1,
        "k_pe": zeros(2, 64),
        "kv_cache": cache,
        "meta": decodes(device, config()),
    }
    refuses(lambda: impl.forward(**arguments | changes), error, message)
    assert not cache.any()


def test_forward_refuses_metadata_of_rows_cut_elsewhere(refuses: Refuses) -> None:
    """64 + 16 and 32 + 48 make rows of the same length."""
    device, cfg = torch.device("cpu"), config(kv_lora_rank=64, qk_rope_head_dim=16)
    other = decodes(device, config(kv_lora_rank=32, qk_rope_head_dim=48))
    impl = dualmla.TritonMLAImpl(cfg, zeros(2, 128, 64), zeros(2, 64, 128))
    arguments = zeros(2, 2, 144), zeros(2, 64), zeros(2, 16), zeros(3, 4, 80)
    refuses(lambda: impl.forward(*arguments, other), ValueError, "kv_lora_rank is 64, the metadata was built for .* kv_lora_rank=32")


# --- memory that is written


@hypothesis.given(shape=st.lists(st.integers(0, 4), min_size=1, max_size=3), strides=st.lists(st.integers(0, 13), min_size=3, max_size=3))
def test_what_may_be_written_shares_no_memory(shape: list[int], strides: list[int]) -> None:
    """Of any strides: each element of an accepted tensor has an address of its own."""
    tensor = torch.zeros(128).as_strided(shape, strides[: len(shape)])
    addresses = torch.arange(128).as_strided(shape, strides[: len(shape)]).flatten().tolist()
    try:
        check_written("out", tensor)
    except ValueError:
        assert len(addresses) > 1
    else:
        assert len(set(addresses)) == len(addresses)


@hypothesis.given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=3, max_size=3))
def test_views_of_memory_of_their_own_may_be_written(data: st.DataObject, shape: list[int]) -> None:
    """Slices with steps, turned around any way: a tensor that was not expanded or unfolded is never refused."""
    cut = tuple(slice(data.draw(st.integers(0, n - 1)), None, data.draw(st.integers(1, 3))) for n in shape)
    view = torch.zeros(shape)[cut].permute(data.draw(st.permutations(range(3))))
    check_written("out", view)
    check_written("out", view.unsqueeze(data.draw(st.integers(0, 3))))
