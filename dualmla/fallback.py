"""Backends in a row, as auto uses them: each call goes to the first that takes it.

A call is handed on when a backend must refuse it, when it may be done but is not to be trusted (`MLABackend.doubts`), or when
the backend's own library raised on a call of that shape before: the circuit breaker, for backends that ask for it. It does not
hide a broken GPU, a lack of memory, or a failure while a graph is captured: those raise.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from dualmla.attention import MLAImpl
from dualmla.backends.base import BackendUnavailable, DecodeCall, MLABackend, PrefillCall
from dualmla.config import MLAConfig
from dualmla.metadata import MLAMetadata

logger = logging.getLogger("dualmla")

Call = DecodeCall | PrefillCall

SILENT = {hook: getattr(MLABackend, hook).__func__ for hook in ("decode_refusals", "prefill_refusals", "doubts")}
"""What asks for refusals and doubts, and the answer of a backend that has none of its own."""

_broken: dict[tuple[str, Call], str] = {}  # what each backend raised, by the shape of the call


@functools.cache
def log_once(level: int, message: str) -> None:
    """For what is true of every step and needs saying once."""
    logger.log(level, message)


@functools.cache
def chained(backends: tuple[type[MLABackend], ...]) -> type[MLABackend]:
    """The first backend, but it and its impl hand the calls that it does not take to the next ones.

    Arguments:
        backends: at least one. One that never hands a call on ends the row, and is returned as it is when it comes first.
    """
    first = backends[0]
    if len(backends) == 1 or not (first.may_raise or may_refuse(first)):
        return first
    rest = chained(backends[1:])

    class Chained(first):  # type: ignore[valid-type, misc]
        @classmethod
        def get_impl_cls(cls) -> type[MLAImpl]:
            impl = first.get_impl_cls()
            return type(impl.__name__, (impl,), {"ops": cls})

        @classmethod
        def check_forward(cls, cfg: MLAConfig, kv_cache: torch.Tensor, meta: MLAMetadata) -> None:
            """Nothing is refused: it is handed on."""

        @classmethod
        def mla_decode(
            cls,
            q: torch.Tensor,
            kv_cache: torch.Tensor,
            meta: MLAMetadata,
            softmax_scale: float,
            *,
            causal: bool,
            out: torch.Tensor,
            lse: torch.Tensor | None,
            k_scale: float | torch.Tensor,
            num_kv_splits: int | None,
        ) -> None:
            call = DecodeCall.of(
                q, kv_cache, meta, kv_lora_rank=out.shape[2], causal=causal, return_lse=lse is not None, num_kv_splits=num_kv_splits
            )
            _take(
                "decode", first, rest, call, first.decode_refusals(call),
                lambda backend: backend.mla_decode(
                    q, kv_cache, meta, softmax_scale, causal=causal, out=out, lse=lse, k_scale=k_scale, num_kv_splits=num_kv_splits
                ),
            )  # fmt: skip

        @classmethod
        def mla_prefill(
            cls,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            cu_seqlens_q: torch.Tensor,
            cu_seqlens_k: torch.Tensor,
            max_seqlen_q: int,
            max_seqlen_k: int,
            softmax_scale: float,
            *,
            causal: bool,
            out: torch.Tensor,
            lse: torch.Tensor | None,
        ) -> None:
            call = PrefillCall.of(q, v)
            _take(
                "prefill", first, rest, call, first.prefill_refusals(call),
                lambda backend: backend.mla_prefill(
                    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal=causal, out=out, lse=lse
                ),
            )  # fmt: skip

    Chained.__name__ = Chained.__qualname__ = first.__name__
    return Chained


def may_refuse(backend: type[MLABackend]) -> bool:
    """Whether it has an answer of its own to what asks for refusals and doubts."""
    return any(answers(backend, hook) for hook in SILENT)


def answers(backend: type[MLABackend], hook: str) -> bool:
    """Whether it has an answer of its own to one of them."""
    return getattr(backend, hook).__func__ is not SILENT[hook]


def _take(
    kind: str, first: type[MLABackend], rest: type[MLABackend], call: Call, refusals: list[str], run: Callable[[type[MLABackend]], None]
) -> None:
    """`run` on `first`, or on `rest` where there are refusals, doubts or an exception to survive."""
    broken = _broken.get((first.name, call.shape))
    reasons = refusals or first.doubts(call) or ([broken] if broken else [])
    if reasons:
        log_once(logging.WARNING, f"a {kind} goes to the next backend, {first.name} refused it: {', '.join(reasons)}")
        run(rest)
        return
    try:
        run(first)
    except (BackendUnavailable, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not first.may_raise or not _survivable(call.device):
            raise
        message = f"it raised {type(error).__name__} on a call of this shape: {' '.join(str(error).split()) or 'without a word'}"
        _broken[first.name, call.shape] = message
        logger.warning("a %s goes to the next backend, and so do all of its shape from now on, %s: %s", kind, first.name, message)
        run(rest)


def _survivable(device: torch.device) -> bool:
    """Whether the device still works and no graph is being captured, which the exception has spoiled."""
    if device.type != "cuda":
        return True
    if torch.cuda.is_current_stream_capturing():
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:  # what follows a fault of the GPU, on every call
        return False
    return True
