"""The builder on the device: its kernel against the torch form, what it may wait for and allocate, and that it compiles for GPUs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualmla
from dualmla.buffers import MetadataBuffers
from dualmla.lengths import as_tensor, bound_batch, count_batch, host_lengths
from dualmla_kernels.plan import PlanShape, SplitPlan, allocate_plan
from dualmla_kernels.target import CHIPS, launches_on

GARBAGE = 2147480000
PAGE_SIZES = st.sampled_from([1, 3, 16])
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: on a CPU nothing is asynchronous")


@dataclass
class Written:
    """Buffers that one of the two writers wrote; everything else in them is poison."""

    buffers: MetadataBuffers
    plan: SplitPlan | None

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: value for name, value in vars(self.buffers).items() if isinstance(value, torch.Tensor)}
        if self.plan is not None:
            found |= {name: value for name, value in vars(self.plan).items() if isinstance(value, torch.Tensor)}
        return found


def written(
    writer: str,
    device: torch.device,
    table: torch.Tensor,
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | int,
    *,
    page_size: int,
    num_reqs: int,
    num_decodes: int,
    num_tokens: int,
    own_table: bool,
    shape: PlanShape | None,
) -> Written:
    buffers = MetadataBuffers(
        device,
        page_size=page_size,
        max_num_reqs=num_reqs,
        max_num_pages=table.shape[1],
        num_tokens=num_tokens,
        prefills=True,
        own_table=own_table,
    )
    plan = None if shape is None or num_decodes == 0 else allocate_plan(num_decodes, shape, device)
    result = Written(buffers, plan)
    for tensor in result.tensors().values():
        tensor.fill_(-77)
    new = query_lens if isinstance(query_lens, int) else torch.tensor(query_lens, dtype=torch.int32, device=device)
    getattr(buffers, writer)(
        table.to(device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        new,
        num_reqs=num_reqs,
        num_decodes=num_decodes,
        num_tokens=num_tokens,
        plan=plan,
    )
    return result


def compare(device: torch.device, table: torch.Tensor, seq_lens: Sequence[int], query_lens: Sequence[int] | int, **options: Any) -> None:
    """The kernel, interpreted on a CPU, leaves the very memory that the torch form leaves: poison included."""
    by_kernel = written("_write_with_kernel", device, table, seq_lens, query_lens, **options).tensors()
    by_torch = written("_write_with_torch", torch.device("cpu"), table, seq_lens, query_lens, **options).tensors()
    assert by_kernel.keys() == by_torch.keys()
    for name, expected in by_torch.items():
        got = by_kernel[name].cpu()
        assert torch.equal(got, expected), f"{name}: first difference at {(got != expected).nonzero()[0].tolist()}"


def random_table(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1 << 20, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


@settings(max_examples=25)
@given(data=st.data(), page_size=PAGE_SIZES, padding=st.integers(0, 3), own_table=st.booleans(), planned=st.booleans())
def test_kernel_and_torch_form_leave_the_same_memory(
    data: st.DataObject, page_size: int, padding: int, own_table: bool, planned: bool
) -> None:
    """Any lengths: empty requests, more queries than keys, prefills, padding requests and padding tokens."""
    from support import DEVICE as device  # noqa: N811 - hypothesis takes no fixtures

    live = data.draw(st.integers(0, 6))
    columns = data.draw(st.integers(1, 400))
    seq_lens = data.draw(st.lists(st.integers(0, columns * page_size), min_size=live, max_size=live))
    query_lens = data.draw(st.one_of(st.integers(0, 3), st.lists(st.integers(0, 40), min_size=live, max_size=live)))
    tokens = live * query_lens if isinstance(query_lens, int) else sum(query_lens)
    num_decodes = data.draw(st.integers(0, live))
    compare(
        device,
        random_table(live, columns),
        seq_lens,
        query_lens,
        page_size=page_size,
        num_reqs=live + padding,
        num_decodes=live + padding if num_decodes == live else num_decodes,
        num_tokens=tokens + data.draw(st.integers(0, 5)),
        own_table=own_table,
        shape=PlanShape(parts=data.draw(st.sampled_from([1, 4, 33])), tile=16) if planned else None,
    )


@pytest.mark.parametrize("query_lens", [1, [1 + i % 3 for i in range(140)]], ids=["uniform", "ragged"])
def test_more_requests_and_pages_than_a_block(device: torch.device, query_lens: Sequence[int] | int) -> None:
    """Several chunks of requests, several blocks of a row's pages: the running sums are carried over."""
    compare(
        device,
        random_table(140, 4100),
        [(37 * i) % 180 for i in range(139)] + [4099],
        query_lens,
        page_size=1,
        num_reqs=140,
        num_decodes=133,
        num_tokens=290,
        own_table=False,
        shape=PlanShape(parts=132, tile=64),
    )


@pytest.mark.parametrize("layout", ["narrowed", "expanded", "one row"])
def test_tables_of_any_row_stride(device: torch.device, layout: str) -> None:
    base = random_table(6, 20)
    table = {"narrowed": base[::2, 3:15], "expanded": base[:1].expand(3, 20), "one row": base[4:5, 5:9]}[layout]
    rows = table.shape[0]
    seq_lens = [4, 0, 3][:rows]
    on_device = base.to(device)
    view = {"narrowed": on_device[::2, 3:15], "expanded": on_device[:1].expand(3, 20), "one row": on_device[4:5, 5:9]}[layout]
    meta = dualmla.decode_metadata(view, seq_lens, page_size=1, device=device)
    wanted = [page for row, length in zip(table.tolist(), seq_lens, strict=True) for page in row[:length]]
    assert meta.paged_kv_indices[: len(wanted)].tolist() == wanted
    compare(
        device, table, seq_lens, 1,
        page_size=1, num_reqs=rows, num_decodes=rows, num_tokens=rows, own_table=True, shape=None,
    )  # fmt: skip


def config(**changes: Any) -> dualmla.MLAConfig:
    return dualmla.MLAConfig(**{"num_heads": 16, "softmax_scale": 0.1, "page_size": 1} | changes)


def test_buffers_live_where_attention_runs(device: torch.device) -> None:
    """Each index tensor, of both views and of the plan too (S7)."""
    builder = dualmla.MLAMetadataBuilder(config(), device, max_num_seqs=4, max_num_pages_per_seq=16)
    seq_lens = torch.tensor([9, 5], dtype=torch.int32, device=device)
    meta = builder.build(random_table(2, 16).to(device), seq_lens, [1, 5])
    assert meta.decode_metadata is not None
    assert meta.decode_metadata.plan is not None
    for part in (meta, meta.decode_metadata, meta.prefill_metadata, meta.decode_metadata.plan):
        tensors = {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
        tensors.pop("handle", None)  # a name for torch.compile, read on the host
        assert len(tensors) >= 3
        assert {name: value.device for name, value in tensors.items()} == dict.fromkeys(tensors, device)


def test_lengths_may_be_slices_of_the_last_batch(device: torch.device) -> None:
    """A finished request drops out: its builder is given the rest of its own tensors."""
    builder = dualmla.MLAMetadataBuilder(config(), device, max_num_seqs=4, max_num_pages_per_seq=16)
    table = random_table(3, 16).to(device)
    old = builder.build(table, torch.tensor([9, 5, 7], dtype=torch.int32, device=device), [3, 1, 2])
    new = builder.build(table[1:], old.seq_lens[1:], old.query_lens[1:])
    assert (new.seq_lens.tolist(), new.query_lens.tolist()) == ([5, 7], [1, 2])
    assert new.qo_indptr.tolist() == [0, 1, 3]
    assert new.paged_kv_indptr.tolist() == [0, 5, 12]


@pytest.mark.parametrize("prefills", [0, 1])
def test_launches_do_not_grow_with_the_batch(prefills: int) -> None:
    """One to describe a batch, one to prepare a graph's buffers, two to move on; noted on a device that has no memory."""
    device, pages = torch.device("meta"), 64
    with launches_on(CHIPS["sm_90"]) as launches:
        for times in (1, 8):
            requests = 4 * times
            builder = dualmla.MLAMetadataBuilder(config(), device, max_num_seqs=requests, max_num_pages_per_seq=pages * times)
            table = torch.empty(requests, pages * times, dtype=torch.int32, device=device)
            seq_lens = torch.empty(requests, dtype=torch.int32, device=device)
            launches.clear()
            meta = builder.build(table, seq_lens, seq_lens.clone(), num_decodes=requests - prefills)
            assert [launch.kernel.fn.__name__ for launch in launches] == ["_build"]
            if prefills:
                continue
            state = dualmla.MLAGraphState(config(), device, max_batch_size=requests, max_num_pages_per_seq=pages * times)
            with state.graph_capture(requests):
                buffers = state.get_graph_input_buffers(state.graph_capture_get_metadata_for_batch(requests))
            launches.clear()
            state.prepare_graph_input_buffers(buffers, meta)
            assert [launch.kernel.fn.__name__ for launch in launches] == ["_build"]
            launches.clear()
            dualmla.advance_step(meta, seq_lens, seq_lens.clone(), seq_lens.clone())
            assert [launch.kernel.fn.__name__ for launch in launches] == ["_advance", "_build"]


# --- what the host knows


def test_bounds_without_the_lengths() -> None:
    """Upper bounds of what counting would give, wherever `num_decodes` may stand in for the lengths."""
    decodes = bound_batch(4, 4, 2, max_seq_len=100, max_num_tokens=None)
    assert decodes is not None
    assert (decodes.num_tokens, decodes.max_query_len, decodes.max_decode_query_len, decodes.exact) == (8, 2, 2, False)
    mixed = bound_batch(4, 3, 1, max_seq_len=100, max_num_tokens=64)
    assert mixed is not None
    assert (mixed.num_tokens, mixed.num_decode_tokens, mixed.max_query_len, mixed.max_decode_query_len) == (64, 3, 64, 1)
    prefills = bound_batch(4, 0, 1, max_seq_len=100, max_num_tokens=None)
    assert prefills is not None
    assert (prefills.num_tokens, prefills.num_decode_tokens, prefills.max_query_len, prefills.max_decode_query_len) == (400, 0, 100, 0)
    assert bound_batch(4, 3, 2, max_seq_len=100, max_num_tokens=None) is None, "where the decodes' tokens end is anybody's guess"
    with pytest.raises(ValueError, match=r"num_decodes must be between 0 and 4.*got 5"):
        bound_batch(4, 5, 1, max_seq_len=100, max_num_tokens=None)


@given(lens=st.lists(st.integers(0, 5), max_size=6), threshold=st.integers(1, 3), data=st.data())
def test_bounds_bound(lens: list[int], threshold: int, data: st.DataObject) -> None:
    counts = count_batch(host_lengths("query_lens", lens), threshold, None)
    num_decodes = data.draw(st.integers(0, counts.num_decodes))
    counts = count_batch(host_lengths("query_lens", lens), threshold, num_decodes)
    bounds = bound_batch(len(lens), num_decodes, threshold, max_seq_len=5, max_num_tokens=None)
    if bounds is not None:
        for name in ("num_tokens", "max_query_len", "num_decode_tokens", "max_decode_query_len"):
            assert getattr(bounds, name) >= getattr(counts, name), name


@given(lens=st.one_of(st.lists(st.integers(0, 300), max_size=6), st.integers(0, 300).flatmap(lambda n: st.lists(st.just(n), max_size=6))))
def test_lengths_are_read_whatever_holds_them(lens: list[int]) -> None:
    """A list of equal small numbers is read another way than other lists, arrays and tensors."""
    given = [lens, tuple(lens), array("i", lens), torch.tensor(lens, dtype=torch.int32), [torch.tensor(n) for n in lens]]
    for lengths in given:
        read = host_lengths("query_lens", lengths)  # type: ignore[arg-type]
        assert list(read) == lens
        assert all(type(n) is int for n in read)
        assert as_tensor(read).tolist() == lens
        assert as_tensor(read).dtype == torch.int32
        counts = count_batch(read, 1, None)
        assert (counts.num_tokens, counts.each) == (sum(lens), None if len(set(lens)) > 1 else max(lens, default=0))


@pytest.mark.parametrize("wrong", [[1, 1.0], [1.0, 1.0], ["1"], [None, None]], ids=str)
def test_lengths_that_are_no_ints_are_refused(wrong: list[Any]) -> None:
    with pytest.raises(TypeError, match="query_lens must be ints, got"):
        host_lengths("query_lens", wrong)


def test_lengths_past_int32_are_refused() -> None:
    with pytest.raises(ValueError, match="query_lens must fit into int32, got 4294967297"):
        host_lengths("query_lens", [1, 2**32 + 1])


# --- what only a GPU can show


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("where", ["list", "ragged list", "CPU tensor", "device tensor"])
def test_build_neither_waits_nor_allocates(device: torch.device, where: str) -> None:
    builder = dualmla.MLAMetadataBuilder(config(), device, max_num_seqs=256, max_num_pages_per_seq=8192)
    table = random_table(256, 8192).to(device)
    seq_lens = torch.full((256,), 8000, dtype=torch.int32, device=device)
    ragged = [1] * 250 + [7, 1, 30, 2, 2, 1]
    give: dict[str, Any] = {
        "list": [1] * 256,
        "ragged list": ragged,
        "CPU tensor": torch.tensor(ragged, dtype=torch.int32),
        "device tensor": torch.tensor([1] * 256, dtype=torch.int32, device=device),
    }
    num_decodes = 256 if where == "device tensor" else None
    for _ in range(3):
        meta = builder.build(table, seq_lens, give[where], num_decodes=num_decodes)
        assert meta.prefill_metadata is not None or where in ("list", "device tensor")
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            seq_lens.add_(1)
            meta = builder.build(table, seq_lens, give[where], num_decodes=num_decodes)
            assert (meta.decode_metadata, meta.prefill_metadata) != (None, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before
    assert meta.seq_lens.tolist() == [8020] * 256
    assert meta.paged_kv_indptr.tolist() == [8020 * i for i in range(257)]
    assert torch.equal(meta.paged_kv_indices[: 256 * 8020], table[:, :8020].flatten())


@pytest.mark.gpu
@needs_gpu
def test_lengths_on_the_gpu_are_not_read(device: torch.device) -> None:
    """A batch of both kinds: every tensor is that of the counted batch, numbers of tokens are bounds."""
    builders = [dualmla.MLAMetadataBuilder(config(), device, max_num_seqs=8, max_num_pages_per_seq=64, max_num_tokens=99) for _ in range(2)]
    table, lens = random_table(3, 64).to(device), torch.tensor([1, 1, 5], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([9, 3, 5], dtype=torch.int32, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        bounded = builders[0].build(table, seq_lens, lens, num_decodes=2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    counted = builders[1].build(table, seq_lens, lens)
    assert (bounded.exact, counted.exact) == (False, True)
    assert (bounded.num_tokens, counted.num_tokens) == (66, 7)
    for name in ("seq_lens", "query_lens", "qo_indptr", "paged_kv_indptr", "paged_kv_last_page_lens"):
        assert torch.equal(getattr(bounded, name), getattr(counted, name)), name
    assert bounded.slot_mapping.tolist() == counted.slot_mapping.tolist() + [-1] * 59


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import dualmla_kernels.metadata as metadata
import dualmla_kernels.plan_kernel as plan

kernel, target = getattr(sys.modules["dualmla_kernels." + sys.argv[1]], sys.argv[2]), sys.argv[3]
constants = dict(PAGE=1, TILE=64, PARTS=256, BLOCK=plan.BLOCK, TOKENS=32, COLUMNS=4096, AHEAD=256, CHUNK=128)
constants = {name: constants[name] for name in kernel.arg_names if name in constants}
absent = sys.argv[4:]
signature = {}
for name in kernel.arg_names:
    if name in constants or name in absent:
        signature[name] = "constexpr"
    elif name.endswith("_ptr"):
        signature[name] = "*i64" if name in ("slots_ptr", "sampled_ptr", "tokens_ptr", "positions_ptr") else "*i32"
    else:
        signature[name] = "i32"
constants |= dict.fromkeys(absent)
gpu = GPUTarget("cuda", 90, 32) if target == "sm_90" else GPUTarget("hip", target, 64)
compiled = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants), target=gpu, options={"num_warps": 4})
print(len(compiled.asm["ptx" if target == "sm_90" else "amdgcn"]))
"""


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize(
    ("module", "kernel", "absent"),
    [
        ("metadata", "_build", []),
        (
            "metadata",
            "_build",
            ["query_lens_ptr", "prefill_indices_ptr", "own_table_ptr", "pieces_of_part_ptr", "pieces_ptr", "splits_ptr"],
        ),
        ("metadata", "_advance", []),
        ("plan_kernel", "balanced_kernel", []),
        ("plan_kernel", "fixed_kernel", []),
    ],
    ids=["everything", "the least", "advance", "plan", "fixed plan"],
)
def test_compiles_without_a_gpu(run_python: Callable[..., str], module: str, kernel: str, absent: list[str], target: str) -> None:
    """For both vendors, in a fresh interpreter."""
    assert int(run_python(COMPILE, module, kernel, target, *absent)) > 1000
