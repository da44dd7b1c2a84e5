"""What is timed: registered backends, and kernels of others behind a file each.

A folder of peers holds modules with `make(batch, seq_lens, heads, page_size, dtype, inputs)` for decode and
`make_prefill(seq_lens, heads, dtype, inputs)`, one or both. Each plans and returns a callable, which is what is timed: it returns out
[T, heads, D_v], or has an attribute `result`, a callable that does. `inputs` is `PeerInputs`.
"""

from __future__ import annotations

import ast
import importlib.util
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch

from dualmla.backends.base import BackendUnavailable
from dualmla.bench.clock import Call
from dualmla.bench.inputs import Inputs
from dualmla.config import MLAConfig
from dualmla.ops import mla_decode, mla_prefill
from dualmla.selection import explain
from dualmla.testing import DecodeCase, DecodeInputs, PrefillCase, PrefillInputs

Result = tuple[torch.Tensor, torch.Tensor | None]

MOST_INTERPRETED = 300_000
"""Scores, of a head for a query and a key each, that Triton's interpreter is given: some ten seconds."""


class Refused(Exception):  # noqa: N818 - a state
    """The case is not one for this backend. Says why."""


@dataclass(frozen=True)
class Prepared:
    """A backend ready to run a case.

    Attributes:
        call: what is timed.
        result: runs it, all of its output NaN before; out and, where there is one, lse.
        note: what a reader of the time must know.
    """

    call: Call
    result: Callable[[], Result]
    note: str = ""


class Subject(Protocol):
    """Something that can be timed."""

    @property
    def name(self) -> str:
        """For tables and for `--backend`."""
        ...

    @property
    def interpreted(self) -> bool:
        """Its time says nothing: it is only checked."""
        ...

    def prepare(self, inputs: Inputs) -> Prepared:
        """Plans; what it raises is its failure.

        Raises:
            Refused: the case is not one for it.
        """
        ...


@dataclass(frozen=True)
class Registered:
    """A backend of `dualmla.register_backend`, called through the public functions, the LSE included where it has one."""

    name: str
    device: torch.device

    @property
    def interpreted(self) -> bool:
        return self.name == "triton" and self.device.type == "cpu"

    def prepare(self, inputs: Inputs) -> Prepared:
        try:
            return self._prepare(inputs, return_lse=True)
        except BackendUnavailable as refusal:
            try:
                return self._prepare(inputs, return_lse=False)
            except BackendUnavailable:
                raise Refused("; ".join(refusal.reasons)) from refusal

    def _prepare(self, inputs: Inputs, *, return_lse: bool) -> Prepared:
        call = _decode(inputs, self.name, return_lse) if isinstance(inputs, DecodeInputs) else _prefill(inputs, self.name, return_lse)

        def result() -> Result:
            inputs.out.fill_(torch.nan)
            got = call()
            return got if isinstance(got, tuple) else (got, None)

        if not self.interpreted:  # there, a call too many is minutes; and Triton refuses no LSE
            call()
        return Prepared(call, result, "" if return_lse else "without the LSE, which it refuses")


def _decode(inputs: DecodeInputs, backend: str, return_lse: bool) -> Call:
    q, kv_cache, meta, out, scale = inputs.q, inputs.kv_cache, inputs.meta, inputs.out, inputs.case.softmax_scale
    return lambda: mla_decode(q, kv_cache, meta, scale, out=out, return_lse=return_lse, backend=backend)


def _prefill(inputs: PrefillInputs, backend: str, return_lse: bool) -> Call:
    q, k, v, out, scale = inputs.q, inputs.k, inputs.v, inputs.out, inputs.case.softmax_scale
    bounds, longest = (inputs.cu_seqlens_q, inputs.cu_seqlens_k), (max(inputs.case.query_lens), max(inputs.case.keys))
    return lambda: mla_prefill(q, k, v, *bounds, *longest, scale, out=out, return_lse=return_lse, backend=backend)


@dataclass(frozen=True)
class PeerInputs:
    """A case as peers take it. A decode has q [batch, heads, 576], kv [pages, page, 576], block_table and seq_lens; a prefill q, k, v
    [T, heads, 192 or 128] and cu, int32 [requests + 1]; both have the lengths as a list and the scale.
    """

    q: torch.Tensor
    seq_lens_list: list[int]
    scale: float
    batch: int
    heads: int
    page: int = 1
    kv: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    cu: torch.Tensor | None = None


@dataclass(frozen=True)
class Peer:
    """A module of the form above."""

    name: str
    module: ModuleType
    interpreted: bool = False

    def prepare(self, inputs: Inputs) -> Prepared:
        call = self._decode(inputs) if isinstance(inputs, DecodeInputs) else self._prefill(inputs)
        run: Callable[[], torch.Tensor] = getattr(call, "result", call)

        def result() -> Result:
            run().fill_(torch.nan)
            return run(), None

        return Prepared(call, result)

    def _decode(self, inputs: DecodeInputs) -> Call:
        case = inputs.case
        if not hasattr(self.module, "make"):
            raise Refused("it has no decode")
        if case.kv_lora_rank != 512 or case.qk_rope_head_dim != 64:
            raise Refused(f"peers know latent rows of 512 + 64 numbers, not of {case.kv_lora_rank} + {case.qk_rope_head_dim}")
        if max(case.new_tokens) > 1:
            raise Refused(f"peers know decodes of one token, not of {max(case.new_tokens)}")
        if case.cache_dtype != case.dtype:
            raise Refused(f"peers know caches of the queries' dtype, not {case.cache_dtype}")
        lens, batch = list(case.seq_lens), len(case.seq_lens)
        given = PeerInputs(
            q=inputs.q,
            seq_lens_list=lens,
            scale=case.softmax_scale,
            batch=batch,
            heads=case.num_heads,
            page=case.page_size,
            kv=inputs.kv_cache,
            block_table=inputs.meta.block_table,
            seq_lens=inputs.meta.seq_lens,
        )
        made: Call = self.module.make(batch, lens, case.num_heads, case.page_size, case.dtype, inputs=given)
        return made

    def _prefill(self, inputs: PrefillInputs) -> Call:
        case = inputs.case
        if not hasattr(self.module, "make_prefill"):
            raise Refused("it has no prefill")
        if case.keys != case.query_lens:
            raise Refused("peers know prefills of as many keys as queries")
        if (case.qk_head_dim, case.v_head_dim) != (192, 128):
            raise Refused(f"peers know heads of 192 and 128 numbers, not of {case.qk_head_dim} and {case.v_head_dim}")
        lens = list(case.query_lens)
        given = PeerInputs(
            q=inputs.q,
            seq_lens_list=lens,
            scale=case.softmax_scale,
            batch=len(lens),
            heads=case.num_heads,
            k=inputs.k,
            v=inputs.v,
            cu=inputs.cu_seqlens_q,
        )
        made: Call = self.module.make_prefill(lens, case.num_heads, case.dtype, inputs=given)
        return made


def chosen(
    names: Sequence[str] | None, peers: Sequence[Peer], case: DecodeCase | PrefillCase, device: torch.device
) -> tuple[list[Subject], list[str]]:
    """What is timed, and a sentence of each backend that nobody named and that can't be used here.

    Arguments:
        names: of registered backends and of peers; None: all that are usable, without the reference on a GPU: it is truth, not speed.
        case: what backends are asked about.

    Raises:
        ValueError: a name is unknown, or a peer has that of a backend.
        BackendUnavailable: a backend that was named can't be used.
    """
    cache_dtype = case.cache_dtype if isinstance(case, DecodeCase) else None
    config = MLAConfig(num_heads=case.num_heads, softmax_scale=case.softmax_scale, dtype=case.dtype, kv_cache_dtype=cache_dtype)
    reports = {report.name: report for report in explain(config, device)}
    others = {peer.name: peer for peer in peers}
    if clash := sorted(set(others) & set(reports)):
        raise ValueError(f"--peers has {clash[0]}.py, and a backend is registered by that name")
    if unknown := [name for name in names or () if name not in reports and name not in others]:
        raise ValueError(f"--backend must be one of {', '.join([*reports, *others])}, got {unknown[0]!r}")
    for name in names or ():
        if name in reports and not reports[name].usable:
            raise BackendUnavailable(name, reports[name].reasons)
    wanted = list(dict.fromkeys(names or [*reports, *others]))
    if not names and device.type != "cpu":
        wanted.remove("reference")
    subjects: list[Subject] = [
        others[name] if name in others else Registered(name, device) for name in wanted if name in others or reports[name].usable
    ]
    absent = [f"{name} not usable: {'; '.join(reports[name].reasons)}" for name in wanted if name in reports and not reports[name].usable]
    return subjects, absent


def load_files(files: Iterable[Path]) -> None:
    """Run files that register backends.

    Raises:
        ValueError: one can't be run.
    """
    for file in files:
        try:
            runpy.run_path(str(file))
        except Exception as error:
            raise ValueError(f"--load {file} can't be run: {told(error)}") from error


def load_peers(folder: Path) -> list[Peer]:
    """The modules of a folder that define `make` or `make_prefill`, by name. They may import one another.

    Raises:
        ValueError: there are none, or one can't be imported.
    """
    found = [path for path in sorted(folder.glob("*.py")) if {"make", "make_prefill"} & _defined(path)]
    if not found:
        raise ValueError(f"--peers must be a folder with modules that define make or make_prefill, got {folder}")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return [Peer(path.stem, _imported(path)) for path in found]


def _defined(path: Path) -> set[str]:
    """Functions that a file defines; what is no peer is not even imported."""
    try:
        return {node.name for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.FunctionDef)}
    except SyntaxError as error:
        raise ValueError(f"--peers has {path}, which is no Python: {error}") from error


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"dualmla_peer_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"--peers has {path}, which can't be imported: {told(error)}") from error
    return module


def told(error: Exception) -> str:
    """An exception in a line; an assertion without words by its source."""
    words = str(error).strip().split("\n")[0]
    if not words and (trace := traceback.extract_tb(error.__traceback__)):
        words = trace[-1].line or ""
    return f"{type(error).__name__}: {words}"
