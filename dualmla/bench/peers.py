"""Kernels of others, behind a file each.

A folder of peers holds modules with `make(batch, seq_lens, heads, page_size, dtype, inputs)` for decode and
`make_prefill(seq_lens, heads, dtype, inputs)`, one or both. Each plans and returns a callable, which is what is timed: it returns out
[T, heads, D_v], or has an attribute `result`, a callable that does. `inputs` is `PeerInputs`.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from dualmla.bench.clock import Call
from dualmla.bench.inputs import Inputs
from dualmla.bench.subjects import Prepared, Refused, Result, told
from dualmla.testing import DecodeInputs, PrefillInputs


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
