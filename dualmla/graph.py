"""Decode under captured graphs: buffers at fixed addresses, rewritten to the last entry before each replay.

A captured batch of B requests has `B * max_query_len` tokens whatever is live. Before a replay the live batch is written into
its buffers by the launch that builds metadata, split plan included; what is left of the B requests is padding: no keys, no
tokens, slot -1, and indptr that stay where the live ones end. Nothing that depends on a length is ever frozen in a graph.

On a CPU there are no graphs: everything here runs the same way, and a replay calls the captured function again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

from dualmla.buffers import MetadataBuffers, PlanBuffers
from dualmla.config import MLAConfig
from dualmla.lengths import counts_of_decodes
from dualmla.metadata import MLAMetadata, metadata_of
from dualmla.validation import check_count, checked_device

T = TypeVar("T")

INPUTS = (
    "block_table",
    "seq_lens",
    "query_lens",
    "qo_indptr",
    "paged_kv_indptr",
    "paged_kv_indices",
    "paged_kv_last_page_lens",
    "slot_mapping",
)
PLAN_INPUTS = ("pieces_of_part", "pieces", "splits")


class MLAGraphState:
    """Owns the metadata of captured decodes; for one stream at a time.

    All batch sizes share one set of buffers, so a batch is prepared right before it is replayed.

    Arguments:
        cfg: the layer.
        device: of the buffers, and of every live batch.
        max_batch_size: most requests of a captured batch.
        max_num_pages_per_seq: most pages a request.
        max_query_len: most new tokens a request; each captured batch has room for as many of every request.

    Raises:
        ValueError: a number that is no int of at least 1.
    """

    def __init__(
        self,
        cfg: MLAConfig,
        device: torch.device | str,
        *,
        max_batch_size: int,
        max_num_pages_per_seq: int,
        max_query_len: int = 1,
    ) -> None:
        for name, value in (
            ("max_batch_size", max_batch_size),
            ("max_num_pages_per_seq", max_num_pages_per_seq),
            ("max_query_len", max_query_len),
        ):
            check_count(name, value, least=1)
        self.cfg = cfg
        self.device = checked_device(device)
        self.max_batch_size = max_batch_size
        self.max_num_pages_per_seq = max_num_pages_per_seq
        self.max_query_len = max_query_len
        self._buffers = MetadataBuffers(
            self.device,
            page_size=cfg.page_size,
            max_num_reqs=max_batch_size,
            max_num_pages=max_num_pages_per_seq,
            num_tokens=max_batch_size * max_query_len,
            own_table=True,
            replayed=True,
        )
        self._plans = PlanBuffers(cfg, self.device, max_batch_size)
        self._capturing: int | None = None
        self._captured: dict[int, MLAMetadata] = {}
        self._inputs: dict[int, dict[str, torch.Tensor]] = {}

    @contextmanager
    def graph_capture(self, max_batch_size: int) -> Iterator[None]:
        """Within: metadata of batches of up to `max_batch_size` may be asked for. What was captured stays valid afterwards.

        Raises:
            ValueError: more than the state has buffers for.
            RuntimeError: a capture is going on already.
        """
        if not isinstance(max_batch_size, int) or not 1 <= max_batch_size <= self.max_batch_size:
            raise ValueError(f"max_batch_size must be an int from 1 to {self.max_batch_size}, got {max_batch_size!r}")
        if self._capturing is not None:
            raise RuntimeError(f"a capture of up to {self._capturing} requests is going on already")
        self._capturing = max_batch_size
        try:
            yield
        finally:
            self._capturing = None

    def graph_capture_get_metadata_for_batch(self, batch_size: int) -> MLAMetadata:
        """Metadata of `batch_size` requests at fixed addresses, to capture a decode with; all padding until prepared.

        Raises:
            ValueError: more than the capture was opened for.
            RuntimeError: outside of `graph_capture`, or within a captured stream, where making it padding would be captured too.
        """
        if self._capturing is None:
            raise RuntimeError("graph_capture_get_metadata_for_batch is for use within `with state.graph_capture(max_batch_size):`")
        if not isinstance(batch_size, int) or not 1 <= batch_size <= self._capturing:
            raise ValueError(f"batch_size must be an int from 1 to {self._capturing}, got {batch_size!r}")
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("graph_capture_get_metadata_for_batch must be called before the stream is captured")
        assert self._buffers.table is not None
        counts = counts_of_decodes(batch_size, batch_size * self.max_query_len, self.max_query_len)
        if batch_size not in self._captured:
            plan = self._plans.of(batch_size, self.max_query_len)
            meta = metadata_of(self._buffers, self._buffers.table[:batch_size], counts, config=self.cfg, plan=plan)
            self._captured[batch_size], self._inputs[batch_size] = meta, self.get_graph_input_buffers(meta)
        meta = self._captured[batch_size]
        self._write(meta.block_table[:0], meta.seq_lens[:0], meta.query_lens[:0], meta)
        return meta

    def get_graph_input_buffers(self, meta: MLAMetadata) -> dict[str, torch.Tensor]:
        """What a graph captured with `meta` reads, by name: the tensors of the metadata, and `plan_*` of its split plan.

        Raises:
            ValueError: `meta` is not from this state.
        """
        if meta.buffers is not self._buffers:
            raise ValueError("meta must come from graph_capture_get_metadata_for_batch of this state")
        buffers: dict[str, torch.Tensor] = {name: getattr(meta, name) for name in INPUTS}
        if meta.plan is not None:
            buffers |= {f"plan_{name}": getattr(meta.plan, name) for name in PLAN_INPUTS}
        return buffers

    def prepare_graph_input_buffers(self, buffers: dict[str, torch.Tensor], meta: MLAMetadata) -> None:
        """Write the live batch `meta` into what a captured batch reads, and padding into all the rest of it. One launch.

        Of the block table the live pages are copied and up to 256 more of each request, for `advance_step` within a graph.

        Arguments:
            buffers: of `get_graph_input_buffers`.
            meta: of decodes alone, of at most as many requests, pages and new tokens as were captured.

        Raises:
            ValueError: naming what does not fit, or a buffer that is not this state's.
            RuntimeError: the metadata is stale.
        """
        captured = self._captured_with(buffers)
        meta.check_current()
        for name, live, most in (
            ("requests", meta.num_reqs, captured.num_reqs),
            ("pages a request", meta.block_table.shape[1], self.max_num_pages_per_seq),
            ("new tokens a request", meta.max_query_len, self.max_query_len),
        ):
            if live > most:
                raise ValueError(f"meta has {live} {name}, the graph was captured for {most}")
        if meta.num_prefills:
            raise ValueError(f"meta holds {meta.num_prefills} prefills, a graph is captured for decodes alone: pass meta.decode_metadata")
        if (meta.page_size, meta.device) != (self.cfg.page_size, self.device):
            raise ValueError(
                f"meta is of page_size={meta.page_size} on {meta.device}, the graph of page_size={self.cfg.page_size} on {self.device}"
            )
        if meta.buffers is self._buffers:
            raise ValueError("meta is of this graph state itself, it must be of the live batch")
        self._write(meta.block_table, meta.seq_lens, meta.query_lens, captured)

    def replayed(self, batch_size: int) -> None:
        """A graph captured with the metadata of `batch_size` requests has been replayed on the current stream, just now.

        `DecodeGraphs` says so itself; an engine that replays graphs of its own does after each, for shadow mode to sample them.
        """
        for told in self._buffers.on_replay:
            told(batch_size)

    def _captured_with(self, buffers: dict[str, torch.Tensor]) -> MLAMetadata:
        """The captured metadata whose buffers these are: a graph reads those and no others."""
        batch_size = buffers["seq_lens"].shape[0] if "seq_lens" in buffers else 0
        captured = self._captured.get(batch_size)
        if captured is None:
            raise ValueError(f"buffers are of a batch of {batch_size}, captured were {sorted(self._captured)}")
        own = self._inputs[batch_size]
        if buffers.keys() != own.keys():
            raise ValueError(f"buffers must be {', '.join(own)}, got {', '.join(buffers)}")
        for name, tensor in buffers.items():
            if tensor is not own[name] and (tensor.data_ptr(), tensor.shape) != (own[name].data_ptr(), own[name].shape):
                raise ValueError(
                    f"buffers[{name!r}] {list(tensor.shape)} on {tensor.device} is not the one that was captured, "
                    f"{list(own[name].shape)} on {own[name].device}"
                )
        return captured

    def _write(self, block_table: torch.Tensor, seq_lens: torch.Tensor, query_lens: torch.Tensor, captured: MLAMetadata) -> None:
        self._buffers.write(
            block_table,
            seq_lens,
            query_lens,
            num_reqs=captured.num_reqs,
            num_decodes=captured.num_reqs,
            num_tokens=captured.num_tokens,
            plan=captured.plan,
        )


class DecodeGraphs(Generic[T]):
    """A decode step captured at several batch sizes; a replay takes the smallest that the live batch fits in.

    Arguments:
        state: whose metadata the step is captured with.
        batch_sizes: to capture at.
        step: called with the captured metadata of each size. All else that it reads lies in tensors at fixed addresses, of
            which it takes the first `meta.num_tokens` rows; what it returns is at fixed addresses too, and rewritten by each
            replay.

    Raises:
        ValueError: no batch size, or one that the state has no buffers for.
    """

    def __init__(self, state: MLAGraphState, batch_sizes: Sequence[int], step: Callable[[MLAMetadata], T]) -> None:
        if not batch_sizes:
            raise ValueError("batch_sizes must name at least one")
        self._state = state
        self._sizes = sorted(set(batch_sizes))
        self._pool = torch.cuda.graph_pool_handle() if state.device.type == "cuda" else None
        self._buffers: dict[int, dict[str, torch.Tensor]] = {}
        self._run: dict[int, Callable[[], T]] = {}
        self._last: int | None = None
        with state.graph_capture(self._sizes[-1]):
            for size in reversed(self._sizes):  # the largest first: the others fit into its memory
                meta = state.graph_capture_get_metadata_for_batch(size)
                self._buffers[size] = state.get_graph_input_buffers(meta)
                self._run[size] = self._capture(step, meta)

    def replay(self, meta: MLAMetadata) -> T:
        """What the step returned at the batch size that `meta` is padded to, for the requests of `meta`.

        Raises:
            ValueError: more requests than the largest captured batch, or as `prepare_graph_input_buffers`.
            RuntimeError: the metadata is stale.
        """
        size = next((size for size in self._sizes if size >= meta.num_reqs), None)
        if size is None:
            raise ValueError(f"meta has {meta.num_reqs} requests, the largest captured batch has {self._sizes[-1]}")
        self._state.prepare_graph_input_buffers(self._buffers[size], meta)
        self._last = size
        return self._replay(size)

    def replay_again(self) -> T:
        """The batch of the last replay as it lies: for a step that moves it on itself, with `advance_step`.

        Raises:
            RuntimeError: nothing was replayed yet.
        """
        if self._last is None:
            raise RuntimeError("replay_again needs a batch that replay has prepared")
        return self._replay(self._last)

    def _replay(self, size: int) -> T:
        result = self._run[size]()
        self._state.replayed(size)
        return result

    def _capture(self, step: Callable[[MLAMetadata], T], meta: MLAMetadata) -> Callable[[], T]:
        device = self._state.device
        if device.type != "cuda":
            return lambda: step(meta)
        with torch.cuda.device(device):
            # once outside: kernels are compiled and libraries wake up, neither of which can be captured
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                step(meta)
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                result = step(meta)

        def replay() -> T:
            if torch.cuda.current_device() == device.index:
                graph.replay()
            else:
                with torch.cuda.device(device):
                    graph.replay()
            return result

        return replay
