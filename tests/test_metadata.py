"""The metadata builder against a rebuild in plain Python, its two views, its lease, and its edges."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualmla
from dualmla import MLAMetadata

GARBAGE = 2147480000


def config(page_size: int = 1, **changes: Any) -> dualmla.MLAConfig:
    return dualmla.MLAConfig(num_heads=2, softmax_scale=0.1, page_size=page_size, **changes)


def table_for(seq_lens: Sequence[int], page_size: int, spare: int = 2) -> list[list[int]]:
    """Distinct page ids from 7 on, backwards; garbage past each request's last page."""
    pages = [-(-length // page_size) for length in seq_lens]
    width = max(pages, default=0) + spare
    ids = iter(range(7 + sum(pages), 7, -1))
    return [[next(ids) for _ in range(count)] + [GARBAGE] * (width - count) for count in pages]


def as_table(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device).view(len(rows), -1 if rows else 0)


def rebuild(table: list[list[int]], seq_lens: Sequence[int], query_lens: Sequence[int], page_size: int) -> dict[str, list[int]]:
    """The fields as vLLM 0.9.2 defines them, token by token."""
    fields: dict[str, list[int]] = {
        "seq_lens": list(seq_lens),
        "query_lens": list(query_lens),
        "qo_indptr": [0],
        "paged_kv_indptr": [0],
        "paged_kv_indices": [],
        "paged_kv_last_page_lens": [],
        "slot_mapping": [],
    }
    for pages, length, new in zip(table, seq_lens, query_lens, strict=True):
        count = 0
        while count * page_size < length:
            fields["paged_kv_indices"].append(pages[count])
            count += 1
        fields["qo_indptr"].append(fields["qo_indptr"][-1] + new)
        fields["paged_kv_indptr"].append(fields["paged_kv_indptr"][-1] + count)
        fields["paged_kv_last_page_lens"].append(length - (count - 1) * page_size if count else 0)
        for position in range(length - new, length):
            slot = pages[position // page_size] * page_size + position % page_size if position >= 0 else -1
            fields["slot_mapping"].append(slot)
    return fields


def check(meta: MLAMetadata, table: list[list[int]], seq_lens: Sequence[int], query_lens: Sequence[int], page_size: int) -> None:
    """Every field holds what the rebuild says, in the dtype and on the device promised."""
    device = meta.device
    for name, wanted in rebuild(table, seq_lens, query_lens, page_size).items():
        got = getattr(meta, name)
        assert got.dtype == (torch.int64 if name == "slot_mapping" else torch.int32), name
        assert got.device == device, name
        live = got.tolist()
        assert (live[: len(wanted)] if name == "paged_kv_indices" else live) == wanted, name
    assert (meta.num_reqs, meta.num_tokens, meta.page_size) == (len(seq_lens), sum(query_lens), page_size)
    assert meta.max_query_len == max(query_lens, default=0)
    assert meta.block_table.tolist() == [row[: meta.block_table.shape[1]] for row in table]


requests = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 9)), min_size=0, max_size=8)
page_sizes = st.sampled_from([1, 3, 16, 64])


@given(requests=requests, page_size=page_sizes, threshold=st.integers(1, 4))
def test_build_and_views_match_the_rebuild(device: torch.device, requests: list[tuple[int, int]], page_size: int, threshold: int) -> None:
    """Any order of any lengths, empty requests and kv < q among them; both views are what building each half alone gives."""
    seq_lens, query_lens = [s for s, _ in requests], [q for _, q in requests]
    table = table_for(seq_lens, page_size)
    builder = dualmla.MLAMetadataBuilder(config(page_size), device, max_num_seqs=8, max_num_pages_per_seq=72, decode_threshold=threshold)
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    meta = builder.build(as_table(table, device), lengths, query_lens)
    check(meta, table, seq_lens, query_lens, page_size)

    n = next((i for i, new in enumerate(query_lens) if new > threshold), len(requests))
    assert (meta.num_decodes, meta.num_prefills, meta.num_decode_tokens) == (n, len(requests) - n, sum(query_lens[:n]))
    for view, half in ((meta.decode_metadata, slice(None, n)), (meta.prefill_metadata, slice(n, None))):
        if not requests[half]:
            assert view is None
            continue
        assert view is not None
        check(view, table[half], seq_lens[half], query_lens[half], page_size)
        assert view.config is builder.cfg


@given(requests=requests, page_size=page_sizes)
def test_decode_metadata_matches_the_rebuild(device: torch.device, requests: list[tuple[int, int]], page_size: int) -> None:
    seq_lens, query_lens = [s for s, _ in requests], [q for _, q in requests]
    table = table_for(seq_lens, page_size)
    meta = dualmla.decode_metadata(as_table(table, torch.device("cpu")), seq_lens, query_lens, page_size=page_size, device=device)
    check(meta, table, seq_lens, query_lens, page_size)
    assert meta.num_decodes == len(requests)
    assert meta.prefill_metadata is None
    assert meta.decode_metadata is (meta if requests else None)


Give = Callable[[list[int], torch.device], Any]


@pytest.mark.parametrize(
    "give",
    [
        lambda lens, device: lens,
        lambda lens, device: tuple(lens),
        lambda lens, device: torch.tensor(lens, dtype=torch.int32),
        lambda lens, device: torch.tensor(lens, dtype=torch.int32, device=device),
    ],
    ids=["list", "tuple", "CPU tensor", "device tensor"],
)
def test_query_lens_in_every_form(device: torch.device, give: Give) -> None:
    builder = dualmla.MLAMetadataBuilder(config(), device, max_num_seqs=4, max_num_pages_per_seq=16)
    table, seq_lens, query_lens = table_for([9, 5, 4], 1), [9, 5, 4], [1, 5, 2]
    meta = builder.build(as_table(table, device), torch.tensor(seq_lens, dtype=torch.int32, device=device), give(query_lens, device))
    check(meta, table, seq_lens, query_lens, 1)


def test_query_lens_default_to_one_each(device: torch.device) -> None:
    table = table_for([4, 2], 1)
    meta = dualmla.decode_metadata(as_table(table, device), torch.tensor([4, 2], dtype=torch.int32), page_size=1, device=device)
    check(meta, table, [4, 2], [1, 1], 1)


def mixed(device: torch.device, query_lens: Sequence[int] = (1, 5), **build: Any) -> tuple[dualmla.MLAMetadataBuilder, MLAMetadata]:
    builder = dualmla.MLAMetadataBuilder(config(), device, max_num_seqs=4, max_num_pages_per_seq=16)
    seq_lens = [9, 5][: len(query_lens)]
    table = as_table(table_for(seq_lens, 1), device)
    return builder, builder.build(table, torch.tensor(seq_lens, dtype=torch.int32, device=device), list(query_lens), **build)


def test_views_are_the_same_object_on_each_access(device: torch.device) -> None:
    """An in-place update of a view is there at the next look (S8)."""
    _, meta = mixed(device)
    assert meta.decode_metadata is meta.decode_metadata
    assert meta.prefill_metadata is meta.prefill_metadata
    assert meta.decode_metadata is not None
    assert meta.prefill_metadata is not None
    meta.decode_metadata.seq_lens += 1
    meta.prefill_metadata.qo_indptr[1] = 4
    assert meta.decode_metadata.seq_lens.tolist() == [10]
    assert meta.prefill_metadata.qo_indptr.tolist() == [0, 4]
    assert meta.seq_lens.tolist() == [10, 5], "the view shares the memory of the whole"


def test_num_decodes_given(device: torch.device) -> None:
    """Fewer than the leading run: the rest goes the prefill path."""
    for given_decodes in (0, 1, 2):
        _, meta = mixed(device, (1, 1), num_decodes=given_decodes)
        assert (meta.num_decodes, meta.num_prefills) == (given_decodes, 2 - given_decodes)
    with pytest.raises(ValueError, match=r"num_decodes must be between 0 and 1.*got 2"):
        mixed(device, (1, 5), num_decodes=2)
    with pytest.raises(ValueError, match=r"num_decodes must be between 0 and 1.*got -1"):
        mixed(device, (1, 5), num_decodes=-1)


@pytest.mark.parametrize("wrong", [1.0, True, "1", torch.tensor(1)])
def test_num_decodes_is_an_int(wrong: Any, device: torch.device) -> None:
    """Refused before the buffers of the batch before it are touched."""
    builder, meta = mixed(device, (1, 5))
    with pytest.raises(TypeError, match="num_decodes must be None or an int, got "):
        builder.build(meta.block_table, meta.seq_lens, [1, 5], num_decodes=wrong)
    meta.check_current()


def test_stale_metadata_raises(device: torch.device) -> None:
    """The metadata and both its views, once its builder has built again; another builder's does not."""
    builder, old = mixed(device)
    _, other = mixed(device)
    views = old.decode_metadata, old.prefill_metadata
    new = builder.build(old.block_table, old.seq_lens, [1, 5])
    q, cache = torch.zeros(1, 2, 576, dtype=torch.bfloat16, device=device), torch.zeros(32, 1, 576, dtype=torch.bfloat16, device=device)
    for use in (
        lambda: old.decode_metadata,
        lambda: old.prefill_metadata,
        old.check_current,
        lambda: dualmla.mla_decode(q, cache, views[0], 0.1),
        views[1].check_current,
    ):
        with pytest.raises(RuntimeError, match="stale"):
            use()
    for meta in (new, other):
        assert dualmla.mla_decode(q, cache, meta.decode_metadata, 0.1).shape == (1, 2, 512)


def test_refused_build_leaves_the_last_metadata_valid(device: torch.device) -> None:
    """Nothing was overwritten, so nothing is stale."""
    builder, meta = mixed(device)
    before = meta.paged_kv_indices.clone()
    with pytest.raises(ValueError, match="query_lens must not be negative"):
        builder.build(meta.block_table, meta.seq_lens, [1, -1])
    with pytest.raises(ValueError, match="num_decodes must be between"):
        builder.build(meta.block_table, meta.seq_lens, [1, 5], num_decodes=2)
    meta.check_current()
    assert torch.equal(meta.paged_kv_indices, before)


def test_building_again_leaves_no_trace_of_the_larger_batch(device: torch.device) -> None:
    builder = dualmla.MLAMetadataBuilder(config(), device, max_num_seqs=4, max_num_pages_per_seq=64)
    for seq_lens in ([60, 50, 40, 30], [2, 0], [], [64]):
        table = table_for(seq_lens, 1, spare=0)
        meta = builder.build(as_table(table, device), torch.tensor(seq_lens, dtype=torch.int32, device=device), [1] * len(seq_lens))
        check(meta, table, seq_lens, [1] * len(seq_lens), 1)


def test_empty_batch(device: torch.device) -> None:
    """No requests: both views are None, indptr are [0], and a decode writes every row all the same."""
    builder = dualmla.MLAMetadataBuilder(config(), device, max_num_seqs=4, max_num_pages_per_seq=16)
    none = torch.empty(0, dtype=torch.int32, device=device)
    for make in (
        lambda: builder.build(none.view(0, 0), none, []),
        lambda: builder.build(none.view(0, 4), none, none),
        lambda: dualmla.decode_metadata(none.view(0, 4), [], page_size=1, device=device),
    ):
        meta = make()
        assert meta.decode_metadata is None
        assert meta.prefill_metadata is None
        assert meta.qo_indptr.tolist() == meta.paged_kv_indptr.tolist() == [0]
        assert meta.slot_mapping.shape == (0,)


@pytest.mark.parametrize("query_lens", [[1, 1], [3, 2]])
def test_empty_block_tables_are_a_profile_run(device: torch.device, backend: str, query_lens: list[int]) -> None:
    """Before an engine has a cache: each sequence of the group is there, nothing is written, every output row is 0 (S6)."""
    builder = dualmla.MLAMetadataBuilder(config(16), device, max_num_seqs=4, max_num_pages_per_seq=16, decode_threshold=4)
    tables = torch.empty(2, 0, dtype=torch.int32, device=device)
    meta = builder.build(tables, torch.tensor([40, 30], dtype=torch.int32, device=device), query_lens)
    tokens = sum(query_lens)
    assert meta.slot_mapping.tolist() == [-1] * tokens
    assert meta.paged_kv_indptr.tolist() == [0, 0, 0]
    assert meta.num_reqs == 2
    assert meta.qo_indptr.tolist() == [0, query_lens[0], tokens]
    q = torch.ones(tokens, 2, 576, dtype=torch.bfloat16, device=device)
    cache = torch.full((4, 16, 576), float("nan"), dtype=torch.bfloat16, device=device)
    for causal in (True, False):
        out, lse = dualmla.mla_decode(q, cache, meta, 0.1, causal=causal, return_lse=True, backend=backend)
        assert not out.any()
        assert lse.isneginf().all()
    dualmla.concat_and_cache_mla(q[:, 0, :512], q[:, 0, 512:], cache, meta.slot_mapping, backend=backend)
    assert cache.isnan().all()


@pytest.mark.parametrize("query_lens", [(1, 5), (1, 1), (5, 5)], ids=["mixed", "decodes", "prefills"])
def test_metadata_is_freed_at_once(device: torch.device, query_lens: tuple[int, int]) -> None:
    """Looking at a view makes no cycle: device memory would wait for the collector, step after step."""
    gc.disable()
    try:
        _, meta = mixed(device, query_lens)
        assert meta.decode_metadata or meta.prefill_metadata
        alive = weakref.ref(meta)
        del meta
        assert alive() is None
    finally:
        gc.enable()


# --- what the builder refuses


def build(device: torch.device, **changes: Any) -> MLAMetadata:
    arguments: dict[str, Any] = {
        "block_table": torch.zeros(2, 4, dtype=torch.int32, device=device),
        "seq_lens": torch.tensor([3, 4], dtype=torch.int32, device=device),
        "query_lens": [1, 2],
    }
    options = {name: changes.pop(name) for name in ("max_num_tokens", "num_decodes") if name in changes}
    builder = dualmla.MLAMetadataBuilder(
        config(), device, max_num_seqs=3, max_num_pages_per_seq=5, max_num_tokens=options.pop("max_num_tokens", None)
    )
    return builder.build(**arguments | changes, **options)


INT = torch.int32
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"block_table": [[0] * 4] * 2}, TypeError, "block_table must be a tensor, got list"),
    ({"block_table": torch.zeros(2, 4)}, TypeError, "block_table must be int32, got float32"),
    ({"block_table": torch.zeros(2, 4, dtype=torch.int64)}, TypeError, "block_table must be int32, got int64"),
    ({"block_table": torch.zeros(8, dtype=INT)}, ValueError, r"block_table must have 2 dimensions, got shape \[8\]"),
    ({"block_table": torch.zeros(4, 2, dtype=INT).t()}, ValueError, r"block_table must be contiguous in its last dimension"),
    ({"block_table": torch.zeros(2, 6, dtype=INT)}, ValueError, "block_table has 6 pages a request.*max_num_pages_per_seq=5"),
    (
        {"block_table": torch.zeros(4, 4, dtype=INT), "seq_lens": torch.ones(4, dtype=INT), "query_lens": [1] * 4},
        ValueError,
        "4 requests.*max_num_seqs=3",
    ),
    ({"seq_lens": [3, 4]}, TypeError, "seq_lens must be a tensor, got list"),
    ({"seq_lens": torch.tensor([3, 4])}, TypeError, "seq_lens must be int32, got int64"),
    ({"seq_lens": torch.ones(3, dtype=INT)}, ValueError, "seq_lens has 3 requests, block_table has 2"),
    ({"seq_lens": torch.ones(2, 1, dtype=INT)}, ValueError, "seq_lens must have 1 dimensions"),
    ({"seq_lens": torch.tensor([3, -1], dtype=INT)}, ValueError, "seq_lens must not be negative, got -1"),
    ({"seq_lens": torch.tensor([3, 5], dtype=INT)}, ValueError, "seq_lens reach 5 tokens, block_table has 4 pages of 1"),
    ({"query_lens": [1, -2]}, ValueError, "query_lens must not be negative, got -2"),
    ({"query_lens": [1]}, ValueError, "query_lens has 1 requests, block_table has 2"),
    ({"query_lens": [1, 1.5]}, TypeError, "query_lens must be ints, got 1.5"),
    ({"query_lens": [1, torch.tensor(1.5)]}, TypeError, r"query_lens must be ints, got \[1, tensor\(1.5"),
    ({"query_lens": [1, None]}, TypeError, "query_lens must be ints, got None"),
    ({"query_lens": 3}, TypeError, "query_lens must be a tensor or a sequence of ints, got int"),
    ({"query_lens": None}, TypeError, "query_lens must be a tensor or a sequence of ints, got NoneType"),
    ({"query_lens": torch.tensor([1, 1])}, TypeError, "query_lens must be int32, got int64"),
    ({"query_lens": [2, 2], "max_num_tokens": 3}, ValueError, "query_lens sum to 4.*max_num_tokens=3"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_builder_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    """On a CPU, where the values may be looked at."""
    build(torch.device("cpu"))
    with pytest.raises(error, match=message):
        build(torch.device("cpu"), **changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"block_table": None}, TypeError, "block_table must be an int32 tensor, got NoneType"),
        ({"block_table": torch.zeros(2, 4)}, TypeError, "block_table must be int32, got float32"),
        ({"seq_lens": 3}, TypeError, "seq_lens must be a tensor or a sequence of ints, got int"),
        ({"seq_lens": [3, 2.5]}, TypeError, "seq_lens must be ints, got 2.5"),
        ({"seq_lens": torch.tensor([3, 4])}, TypeError, "seq_lens must be int32, got int64"),
        ({"seq_lens": [3]}, ValueError, "seq_lens has 1 requests, block_table has 2"),
        ({"seq_lens": [3, -4]}, ValueError, "seq_lens must not be negative, got -4"),
        ({"seq_lens": [3, 9]}, ValueError, "seq_lens reach 9 tokens, block_table has 4 pages of 2"),
        ({"query_lens": [1, "2"]}, TypeError, "query_lens must be ints, got '2'"),
        ({"page_size": 0}, ValueError, "page_size must be an int of at least 1, got 0"),
        ({"page_size": 2**33}, ValueError, "page_size must be 1 to 16777216 tokens, got 8589934592"),
        ({"page_size": 1.0}, ValueError, "page_size must be an int of at least 1, got 1.0"),
    ],
    ids=str,
)
def test_decode_metadata_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"block_table": torch.zeros(2, 4, dtype=torch.int32), "seq_lens": [3, 8], "page_size": 2, "device": "cpu"}
    dualmla.decode_metadata(**arguments)
    with pytest.raises(error, match=message):
        dualmla.decode_metadata(**arguments | changes)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_pages_per_seq", "max_num_tokens", "decode_threshold"])
@pytest.mark.parametrize("value", [0, -1, 2.0])
def test_builder_limits(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an int of at least 1, got {value}"):
        dualmla.MLAMetadataBuilder(config(), "cpu", **{name: value})


def test_what_grew_under_inference_mode_is_written_outside_of_it() -> None:
    cfg = dualmla.MLAConfig(num_heads=4, softmax_scale=0.1, page_size=16)
    builder = dualmla.TritonMLABackend.get_builder_cls()(cfg, "cpu", max_num_seqs=2, max_num_pages_per_seq=8)
    table, lengths = torch.zeros(2, 8, dtype=torch.int32), torch.tensor([60, 40], dtype=torch.int32)
    with torch.inference_mode():
        builder.build(table, lengths, [1, 40])
    meta = builder.build(table, lengths, [1, 40])
    assert meta.slot_mapping.tolist() == [59 % 16, *(position % 16 for position in range(40))]
