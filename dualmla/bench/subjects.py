"""What can be timed, and the first kind of it: registered backends."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from dualmla.backends.base import BackendUnavailable
from dualmla.bench.clock import Call
from dualmla.bench.inputs import Inputs
from dualmla.ops import mla_decode, mla_prefill
from dualmla.testing import DecodeInputs, PrefillInputs

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


def told(error: Exception) -> str:
    """An exception in a line; an assertion without words by its source."""
    words = str(error).strip().split("\n")[0]
    if not words and (trace := traceback.extract_tb(error.__traceback__)):
        words = trace[-1].line or ""
    return f"{type(error).__name__}: {words}"
