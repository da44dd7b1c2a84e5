"""What is remembered of calls: what launches are worked out from, and which arguments were found right.

Each change of a call must be met as if nothing had been called before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dualmla

pytest.importorskip("triton")

from dualmla_kernels import decode, launch, metadata, prefill
from dualmla_kernels.plan import SplitPlan
from dualmla_kernels.target import CHIPS, launches_on

BF16, FP16, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
META = torch.device("meta")
Pad = tuple[int, ...]


def empty(*shape: int, dtype: torch.dtype = BF16, pad: Pad = ()) -> torch.Tensor:
    """On "meta", within memory that is wider by `pad` in each dimension."""
    wide = [n + p for n, p in zip(shape, pad or (0,) * len(shape), strict=True)]
    return torch.empty(wide, dtype=dtype, device=META)[tuple(slice(n) for n in shape)]


def decoded(
    *, heads: int = 128, tokens: int = 4, requests: int = 4, rank: int = 512, rope: int = 64, page: int = 64, pages: int = 9,
    columns: int = 8, query_len: int = 1, dtype: torch.dtype = BF16, cache_dtype: torch.dtype = BF16, causal: bool = True,
    q_pad: Pad = (), cache_pad: Pad = (), out_pad: Pad = (), lse: bool = True, lse_pad: Pad = (), k_scale: Any = 1.0, scale: float = 0.1,
    splits: int | None = None, parts: int = 100, most_splits: int = 3, slots: int = 198, tile: int = 128,
) -> None:  # fmt: skip
    plan = SplitPlan(
        empty(parts + 1, dtype=INT32), empty(requests + parts, 4, dtype=INT32), empty(most_splits, 3, dtype=INT32), slots, tile
    )
    decode.mla_decode(
        empty(tokens, heads, rank + rope, dtype=dtype, pad=q_pad), empty(pages, page, rank + rope, dtype=cache_dtype, pad=cache_pad),
        empty(requests, columns, dtype=INT32), empty(requests, dtype=INT32), empty(requests + 1, dtype=INT32), query_len, scale,
        causal=causal,
        out=empty(tokens, heads, rank, dtype=dtype, pad=out_pad), lse=empty(heads, tokens, dtype=FP32, pad=lse_pad) if lse else None,
        k_scale=k_scale, num_kv_splits=splits, plan=None if splits else plan,
    )  # fmt: skip


DECODES: list[dict[str, Any]] = [
    {"heads": 16}, {"tokens": 5}, {"requests": 3}, {"rank": 256}, {"rope": 32}, {"page": 128}, {"columns": 9},
    {"query_len": 2}, {"dtype": FP16, "cache_dtype": FP16}, {"cache_dtype": torch.float8_e4m3fn}, {"causal": False},
    {"q_pad": (0, 1, 0)}, {"q_pad": (0, 0, 64)}, {"cache_pad": (0, 1, 0)}, {"cache_pad": (0, 0, 64)}, {"pages": 10},
    {"out_pad": (0, 1, 0)}, {"out_pad": (0, 0, 16)}, {"lse": False}, {"lse_pad": (0, 1)}, {"k_scale": 0.5},
    {"k_scale": torch.empty(1, device=META)}, {"splits": 2}, {"splits": 3}, {"parts": 50}, {"most_splits": 2}, {"slots": 99},
    {"scale": 0.2},
]  # fmt: skip
PLAIN_DECODES = [*(change for change in DECODES if change != {"pages": 10}), {"tile": 64}]


def prefilled(
    *, heads: int = 16, dim: int = 192, v_dim: int = 128, tokens: int = 300, keys: int = 500, requests: int = 2, longest: int = 200,
    dtype: torch.dtype = BF16, causal: bool = True, lse: bool = True, lse_pad: Pad = (), scale: float = 0.1,
    q_pad: Pad = (), k_pad: Pad = (), v_pad: Pad = (), out_pad: Pad = (),
) -> None:  # fmt: skip
    bounds = empty(requests + 1, dtype=INT32), empty(requests + 1, dtype=INT32)
    prefill.mla_prefill(
        empty(tokens, heads, dim, dtype=dtype, pad=q_pad), empty(keys, heads, dim, dtype=dtype, pad=k_pad),
        empty(keys, heads, v_dim, dtype=dtype, pad=v_pad), *bounds, longest, scale, causal=causal,
        out=empty(tokens, heads, v_dim, dtype=dtype, pad=out_pad), lse=empty(heads, tokens, dtype=FP32, pad=lse_pad) if lse else None,
    )  # fmt: skip


PADS = [{f"{name}_pad": pad} for name in ("q", "k", "v", "out") for pad in ((0, 1, 0), (0, 0, 8))]
PREFILLS: list[dict[str, Any]] = [
    {"heads": 8}, {"dim": 128}, {"v_dim": 64}, {"tokens": 301}, {"keys": 501}, {"requests": 3}, {"longest": 20},
    {"dtype": FP16}, {"causal": False}, {"lse": False}, {"lse_pad": (0, 1)}, {"scale": 0.2}, *PADS,
]  # fmt: skip
PLAIN_PREFILLS = [*(change for change in PREFILLS if change != {"keys": 501}), {"longest": 100}]


def described(
    *, requests: int = 3, columns: int = 5, table_pad: int = 0, query_lens: int | None = 1, padded: int = 4, decodes: int = 4,
    tokens: int = 40, page: int = 16, most: int = 8, ahead: int = 256, own: int | None = 7, prefills: bool = False,
    parts: int | None = 100, tile: int = 64,
) -> None:  # fmt: skip
    plan = None
    if parts is not None:
        plan = SplitPlan(empty(parts + 1, dtype=INT32), empty(decodes + parts, 4, dtype=INT32), empty(decodes, 3, dtype=INT32), 9, tile)
    metadata.build(
        empty(requests, columns, dtype=INT32, pad=(0, table_pad)), empty(requests, dtype=INT32),
        empty(requests, dtype=INT32) if query_lens is None else query_lens, num_reqs=padded, num_decodes=decodes, num_tokens=tokens,
        page_size=page, fields=empty(7, most, dtype=INT32), indices=empty(90, dtype=INT32),
        prefill_indices=empty(90, dtype=INT32) if prefills else None, slots=empty(tokens, dtype=torch.int64),
        own_table=None if own is None else empty(padded, own, dtype=INT32), pages_ahead=ahead, plan=plan,
    )  # fmt: skip


BUILDS: list[dict[str, Any]] = [
    {"requests": 2}, {"columns": 6}, {"table_pad": 1}, {"query_lens": 2}, {"query_lens": None}, {"padded": 5}, {"decodes": 3},
    {"tokens": 41}, {"page": 1}, {"most": 9}, {"ahead": 0}, {"own": 8}, {"own": None}, {"prefills": True}, {"parts": 50},
    {"parts": None}, {"tile": 32},
]  # fmt: skip


def seen(argument: Any) -> Any:
    """What a launcher has made of its arguments: of tensors it was given, no more than which there are."""
    if hasattr(argument, "block_shape"):
        return argument.base.dtype, argument.shape, argument.strides, argument.block_shape, argument.layout
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.numel() if argument.dtype == FP32 and argument.dim() == 1 else None  # partial results
    return argument


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize(
    ("call", "memory", "changes", "plain_changes"),
    [
        (decoded, decode._launches, DECODES, PLAIN_DECODES),
        (prefilled, prefill._prepare, PREFILLS, PLAIN_PREFILLS),
        (described, metadata._prepare, BUILDS, BUILDS),
    ],
    ids=["decode", "prefill", "metadata"],
)
def test_launches_are_as_if_worked_out_anew(
    call: Callable[..., None], memory: Any, changes: list[dict[str, Any]], plain_changes: list[dict[str, Any]], arch: str
) -> None:
    """Whatever differs from call to call; each change is one that a launch shows."""
    calls = [{}, *(changes if arch == "sm_90" else plain_changes)]

    def launched(change: dict[str, Any]) -> list[Any]:
        with launches_on(CHIPS[arch]) as launches:
            call(**change)
        return [(launch.kernel, launch.grid, [seen(arg) for arg in launch.args], launch.kwargs) for launch in launches]

    anew = []
    for change in calls:
        memory.cache_clear()
        anew.append(launched(change))
    for change, expected in zip(calls[1:], anew[1:], strict=True):
        assert expected != anew[0], f"{change} shows nowhere"
    memory.cache_clear()
    for _ in range(2):
        for change, expected in zip(calls, anew, strict=True):
            assert launched(change) == expected, change
    assert memory.cache_info().hits >= len(calls)


def test_what_is_not_aligned_is_not_copied_by_tma() -> None:
    """The same tensors otherwise; a tensor on "meta" has no address that could tell."""
    plan = (100, 3, 198, 128)
    layouts = [(x.shape, x.stride(), x.dtype) for x in (empty(4, 128, 576), empty(9, 64, 576), empty(4, 128, 512))]
    kernels = []
    for alignment in (16, 8, 16):
        with launches_on(CHIPS["sm_90"]):
            launches = decode._launches(META, CHIPS["sm_90"], *layouts, (4, 1), 8, 4, 1, plan, True, False, alignment)
        kernels.append(launches.decode.kernel.__name__)
    assert kernels == ["_decode_pairs", "_decode", "_decode_pairs"]


@pytest.mark.parametrize(
    ("q", "kv_cache"),
    [
        (empty(4, 128, 576), empty(0, 64, 576)),
        (empty(4, 128, 576), empty(9, 128, 576)[:0, :64]),
        (empty(0, 128, 576), empty(9, 64, 576)),
        (empty(4, 128, 576), empty(1, 1, 576).expand(9, 64, 576)),
        (empty(1, 1, 576).expand(4, 128, 576), empty(9, 64, 576)),
    ],
    ids=["no pages", "no pages of others", "no tokens", "one row in all slots", "one query in all rows"],
)
def test_what_has_no_box_is_not_copied_by_tma(q: torch.Tensor, kv_cache: torch.Tensor) -> None:
    """Nothing, or the same row again: what memory has to be like for the faster kernel is no condition of a decode."""
    layouts = [(x.shape, x.stride(), x.dtype) for x in (q, kv_cache, empty(q.shape[0], 128, 512))]
    with launches_on(CHIPS["sm_90"]):
        launches = decode._launches(META, CHIPS["sm_90"], *layouts, (4, 1), 8, 4, 1, (100, 3, 198, 128), True, False, 16)
    assert launches.decode.kernel.__name__ == "_decode"


def test_what_is_remembered_while_another_thread_interprets() -> None:
    """The kernels themselves, though their names stand for interpreted twins then."""
    for call, memory in ((decoded, decode._launches), (prefilled, prefill._prepare), (described, metadata._prepare)):
        memory.cache_clear()
        with launch._interpreting(), launches_on(CHIPS["gfx942"]) as meanwhile:
            call()
        memory.cache_clear()
        with launches_on(CHIPS["gfx942"]) as anew:
            call()
        assert [one.kernel for one in meanwhile] == [one.kernel for one in anew]


def expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(x.shape)


def sparse_columns(x: torch.Tensor) -> torch.Tensor:
    """The same shape, its last dimension not dense."""
    return torch.zeros(*x.shape, 2, dtype=x.dtype)[..., 0]


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "dtype": lambda x: x.double() if x.is_floating_point() else x.long(),
    "rank": lambda x: x[None],
    "device": lambda x: x.to("meta"),
    "columns": sparse_columns,
    "shorter": lambda x: x[:-1],
    "a list": lambda x: x.tolist(),
}
FLOATS = {"gradient": lambda x: x.clone().requires_grad_(), "width": lambda x: torch.zeros(*x.shape[:-1], x.shape[-1] + 16, dtype=x.dtype)}


def decode_arguments() -> dict[str, Any]:
    table = torch.arange(6, dtype=INT32).view(2, 3)
    meta = dualmla.decode_metadata(table, [9, 12], page_size=4, device="cpu")
    q, cache = torch.rand(2, 3, 48), torch.rand(6, 4, 48)
    return {"q": q, "kv_cache": cache, "meta": meta, "softmax_scale": 0.1, "out": torch.empty(2, 3, 32), "backend": "reference"}


def prefill_arguments() -> dict[str, Any]:
    q, k, v = (torch.rand(5, 3, dim) for dim in (32, 32, 16))
    bounds = torch.tensor([0, 2, 5], dtype=INT32)
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds.clone(), "max_seqlen_q": 3, "max_seqlen_k": 3,
            "softmax_scale": 0.1, "out": torch.empty(5, 3, 16), "backend": "reference"}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "arguments", "name", "wrong"),
    [
        pytest.param(function, arguments, name, wrong, id=f"{function.__name__} {name} {title}")
        for function, arguments in ((dualmla.mla_decode, decode_arguments), (dualmla.mla_prefill, prefill_arguments))
        for name, tensor in arguments().items()
        if isinstance(tensor, torch.Tensor)
        for title, wrong in (WRONG | (FLOATS if tensor.is_floating_point() else {})).items()
    ],
)
def test_accepted_arguments_vouch_for_no_others(
    function: Callable[..., Any], arguments: Callable[[], dict[str, Any]], name: str, wrong: Callable[[torch.Tensor], Any]
) -> None:
    """Refused after a call that differs in this alone as it is without one."""
    given = arguments()
    spoilt = given | {name: wrong(given[name])}
    with pytest.raises((ValueError, TypeError)) as first:
        function(**spoilt)
    function(**given)
    function(**given)
    with pytest.raises((ValueError, TypeError)) as then:
        function(**spoilt)
    assert str(then.value) == str(first.value)


@pytest.mark.parametrize(("function", "arguments"), [(dualmla.mla_decode, decode_arguments), (dualmla.mla_prefill, prefill_arguments)])
def test_out_that_shares_memory_with_itself_is_no_out(function: Callable[..., Any], arguments: Callable[[], dict[str, Any]]) -> None:
    given = arguments()
    function(**given)
    with pytest.raises(ValueError, match="out is written, but its elements share memory"):
        function(**given | {"out": expanded(given["out"])})


def test_values_are_looked_at_in_each_call() -> None:
    """Of tensors on a CPU, which tell without a wait; and a scale is a number."""
    given = decode_arguments()
    dualmla.mla_decode(**given)
    given["meta"].block_table[1, 2] = 6
    with pytest.raises(ValueError, match=r"block_table\[1, 2\] is 6"):
        dualmla.mla_decode(**given)
    given = prefill_arguments()
    dualmla.mla_prefill(**given)
    given["cu_seqlens_k"][2] = 6
    with pytest.raises(ValueError, match="cu_seqlens_k ends at 6, there are 5 tokens"):
        dualmla.mla_prefill(**given)
    with pytest.raises(ValueError, match="max_seqlen_q must be an int of at least 0, got True"):
        dualmla.mla_prefill(**prefill_arguments() | {"max_seqlen_q": True})
    for function, arguments in ((dualmla.mla_decode, decode_arguments()), (dualmla.mla_prefill, prefill_arguments())):
        for wrong in (0.0, -1.0, 1e-46, 1e39, float("nan"), float("inf"), "0.1", True):
            with pytest.raises((ValueError, TypeError), match="softmax_scale must be"):
                function(**arguments | {"softmax_scale": wrong})


def test_accepted_arguments_are_those_of_one_metadata() -> None:
    """Another page size, other tokens: the same tensors are wrong for it."""
    given = decode_arguments()
    dualmla.mla_decode(**given)
    other = dualmla.decode_metadata(torch.arange(6, dtype=INT32).view(3, 2), [3, 3, 3], page_size=4, device="cpu")
    with pytest.raises(ValueError, match="q has 2 tokens, the metadata describes 3"):
        dualmla.mla_decode(**given | {"meta": other})
    other = dualmla.decode_metadata(torch.arange(6, dtype=INT32).view(2, 3), [3, 3], page_size=8, device="cpu")
    with pytest.raises(ValueError, match="the metadata was built for page_size=8"):
        dualmla.mla_decode(**given | {"meta": other})


def test_stale_metadata_is_refused_whatever_was_accepted() -> None:
    cfg = dualmla.MLAConfig(
        num_heads=3, softmax_scale=0.1, page_size=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, dtype=FP32
    )
    builder = dualmla.MLAMetadataBuilder(cfg, "cpu", max_num_seqs=2, max_num_pages_per_seq=3)
    given = decode_arguments()
    table, seq_lens = given["meta"].block_table, torch.tensor([9, 12], dtype=INT32)
    given["meta"] = builder.build(table, seq_lens, [1, 1])
    dualmla.mla_decode(**given)
    builder.build(table, seq_lens, [1, 1])
    with pytest.raises(RuntimeError, match="stale"):
        dualmla.mla_decode(**given)


def test_what_is_accepted_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualmla.ops.MOST_ACCEPTED", 2)
    monkeypatch.setattr("dualmla.ops._accepted_prefills", accepted := set())
    given, prefills = decode_arguments(), prefill_arguments()
    for tokens in (2, 3, 4, 2):
        dualmla.mla_decode(**given | {"q": torch.rand(tokens, 3, 48), "out": None})
        assert len(given["meta"].accepted) <= 2
        more = {name: torch.rand(tokens + 3, *prefills[name].shape[1:]) for name in ("q", "k", "v")}
        dualmla.mla_prefill(**prefills | more | {"out": None})
        assert 0 < len(accepted) <= 2


def test_what_is_accepted_is_bounded_though_threads_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that each saw room for one more have left one too many; one may forget what another has just found right."""
    monkeypatch.setattr("dualmla.ops.MOST_ACCEPTED", 2)
    accepted: set[object] = {1, 2, 3}
    monkeypatch.setattr("dualmla.ops._accepted_prefills", accepted)
    given = decode_arguments()
    given["meta"].accepted |= {1: 32, 2: 32, 3: 32}
    dualmla.mla_decode(**given)
    dualmla.mla_prefill(**prefill_arguments())
    assert len(given["meta"].accepted) == len(accepted) == 1
    monkeypatch.setattr(dualmla.MLAMetadata, "check_current", lambda meta: meta.accepted.clear())
    dualmla.mla_decode(**given)
