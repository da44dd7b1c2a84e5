"""Which backend runs: the environment's flags, the reports, and the whole policy.

- An argument beats `DUALMLA_BACKEND`, which beats `auto`. Variables are read at call time; an empty one is unset.
- auto: the first registered backend with no reason against it, said in one line, with why each better one was refused.
- forced: that backend, or `BackendUnavailable` carrying every reason. Never a silent fallback.
- vLLM's `VLLM_ROCM_USE_AITER` and `VLLM_ROCM_USE_AITER_MLA` count under auto alone: either one off keeps AITER out.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import os
from collections.abc import Callable

import torch

from dualmla.attention import MLAImpl
from dualmla.backends.aiter import AiterMLABackend
from dualmla.backends.base import BackendReport, BackendUnavailable, DecodeCall, MLABackend, PrefillCall
from dualmla.backends.reference import ReferenceMLABackend
from dualmla.backends.triton import TritonMLABackend
from dualmla.config import MLAConfig
from dualmla.metadata import MLAMetadata
from dualmla.validation import checked_device

logger = logging.getLogger("dualmla")

VARIABLES = (
    "DUALMLA_BACKEND",
    "DUALMLA_DEBUG",
    "DUALMLA_CERTIFICATE",
    "DUALMLA_REQUIRE_CERTIFICATE",
    "DUALMLA_PROBE_TIMEOUT",
    "DUALMLA_SHADOW",
)
_AITER_FLAGS = ("VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MLA")

_registry: dict[str, type[MLABackend]] = {backend.name: backend for backend in (AiterMLABackend, TritonMLABackend, ReferenceMLABackend)}
_preference: list[str] = list(_registry)  # what auto tries, in order


def register_backend(name: str, backend_cls: type[MLABackend], *, before: str | None = None) -> None:
    """Make `backend_cls` known as `name`.

    Arguments:
        name: for `DUALMLA_BACKEND` and `backend=`; lower case, not taken yet.
        before: the registered name that auto tries after it; None: auto never picks it, it must be named.

    Raises:
        ValueError: the name is taken or not lower case, or `before` is unknown.
    """
    if name != name.lower() or not name or name == "auto":
        raise ValueError(f"name must be lower case and not 'auto', got {name!r}")
    if name in _registry:
        raise ValueError(f"name {name!r} is taken; registered: {', '.join(_registry)}")
    if before is not None and before not in _preference:
        raise ValueError(f"before must be one of {', '.join(_preference)}, got {before!r}")
    _registry[name] = backend_cls
    if before is not None:
        _preference.insert(_preference.index(before), name)
    _choose.cache_clear()
    _candidates.cache_clear()


def is_aiter_mla_enabled() -> bool:
    """Whether the environment lets AITER be used: True when forced, False when another is, else what vLLM's flags say.

    Raises:
        ValueError: `DUALMLA_BACKEND` has an unknown value.
    """
    forced = _requested(None)
    return forced == "aiter" if forced != "auto" else not _flags_off()


def explain(cfg: MLAConfig, device: torch.device | str | None = None) -> list[BackendReport]:
    """One report a registered backend, in the order of auto, environment included.

    Raises:
        ValueError: the environment has an unknown value.
    """
    device, requested, flags_off = _device(device), _requested(None), _flags_off()
    return [_report(name, cfg, device, requested, flags_off) for name in _registry]


def select_backend(cfg: MLAConfig, device: torch.device | str | None = None, backend: str | None = None) -> type[MLABackend]:
    """The backend for a layer.

    Arguments:
        cfg: the layer.
        device: None: cuda if there is one, else cpu.
        backend: "auto" or a registered name; None: `DUALMLA_BACKEND`, else auto.

    Returns:
        The backend class, bound to its policy: under auto, its impl hands a call that the backend must refuse to the
        next one; a forced one raises. With `DUALMLA_SHADOW`, watched by `dualmla.differential.shadow`.

    Raises:
        BackendUnavailable: the forced backend has reasons against it, or no backend is usable.
        ValueError: an unknown name, or `DUALMLA_SHADOW` is no share.
    """
    device = _device(device)
    chosen = _choose(cfg, device, _requested(backend), _flags_off())
    if not os.environ.get("DUALMLA_SHADOW"):
        return chosen
    # Shadow mode stands above this module, on the judge and the repro files; nothing of it is imported until it is asked for.
    watched: type[MLABackend] = importlib.import_module("dualmla.differential.shadow").from_environment(chosen, device)
    return watched


def backend_for_decode(call: DecodeCall, backend: str | None) -> type[MLABackend]:
    """The backend of one `mla_decode`: under auto the first that does not refuse the call.

    Raises:
        BackendUnavailable: the forced backend, or every backend, refuses.
        ValueError: an unknown name.
    """
    return _first_willing("decode", call.device, backend, lambda candidate: candidate.decode_refusals(call))


def backend_for_prefill(call: PrefillCall, backend: str | None) -> type[MLABackend]:
    """The backend of one `mla_prefill`, as `backend_for_decode`.

    Raises:
        BackendUnavailable, ValueError: as `backend_for_decode`.
    """
    return _first_willing("prefill", call.device, backend, lambda candidate: candidate.prefill_refusals(call))


def backend_for_device(device: torch.device, backend: str | None) -> type[MLABackend]:
    """The backend of a function that any backend which runs on the device can do.

    Raises:
        BackendUnavailable, ValueError: as `backend_for_decode`.
    """
    return _candidates(device, _requested(backend), _flags_off())[0]


def _first_willing(
    kind: str, device: torch.device, backend: str | None, refusals_of: Callable[[type[MLABackend]], list[str]]
) -> type[MLABackend]:
    requested = _requested(backend)
    refusals: list[str] = []
    for candidate in _candidates(device, requested, _flags_off()):
        reasons = refusals_of(candidate)
        if not reasons:
            return candidate
        refusals += [f"{candidate.name}: {reason}" for reason in reasons] if requested == "auto" else reasons
        if requested == "auto":
            _say_delegated(kind, candidate.name, tuple(reasons))
    raise BackendUnavailable(requested, refusals)


def _requested(backend: str | None) -> str:
    """The argument, else the variable, else "auto"; in lower case and known."""
    _warn_of_unknown_variables()
    source, value = ("backend", backend) if backend is not None else ("DUALMLA_BACKEND", os.environ.get("DUALMLA_BACKEND") or "auto")
    if not isinstance(value, str):
        raise TypeError(f"backend must be None or a str, got {value!r}")
    name = value.lower()
    if name != "auto" and name not in _registry:
        raise ValueError(f"{source} is {value!r}; it must be one of auto, {', '.join(_registry)}")
    return name


def _flags_off() -> tuple[str, ...]:
    """Those of vLLM's flags that are off, as `NAME=value`. As in vLLM, only 1 and true are on; unset counts as on."""
    values = ((name, os.environ.get(name) or "1") for name in _AITER_FLAGS)
    return tuple(f"{name}={value}" for name, value in values if value.lower() not in ("1", "true"))


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return checked_device(device)


def _report(name: str, cfg: MLAConfig | None, device: torch.device, requested: str, flags_off: tuple[str, ...]) -> BackendReport:
    """What speaks against `name`. AITER that the environment keeps out is not even probed."""
    reasons = []
    if name == "aiter" and requested == "auto":
        reasons = [f"{flag} turns it off" for flag in flags_off]
    elif name == "aiter" and requested != "aiter":
        reasons = [f"{requested} was asked for"]
    reasons = reasons or _registry[name].not_supported_reasons(cfg, device)
    return BackendReport(name, usable=not reasons, reasons=reasons)


@functools.cache
def _choose(cfg: MLAConfig, device: torch.device, requested: str, flags_off: tuple[str, ...]) -> type[MLABackend]:
    if requested != "auto":
        report = _report(requested, cfg, device, requested, flags_off)
        if not report.usable:
            raise BackendUnavailable(requested, report.reasons)
        return _registry[requested]
    reports = [_report(name, cfg, device, requested, flags_off) for name in _preference]
    usable = [_registry[report.name] for report in reports if report.usable]
    if not usable:
        raise BackendUnavailable("auto", [f"{report.name}: {reason}" for report in reports for reason in report.reasons])
    _say_chosen(usable[0], reports, device)
    return _delegating(usable[0], usable[1]) if len(usable) > 1 and _refuses(usable[0]) else usable[0]


@functools.cache
def _candidates(device: torch.device, requested: str, flags_off: tuple[str, ...]) -> list[type[MLABackend]]:
    """What can run on the device, in order; at least one."""
    names = _preference if requested == "auto" else [requested]
    reports = [_report(name, None, device, requested, flags_off) for name in names]
    usable = [_registry[report.name] for report in reports if report.usable]
    if not usable:
        raise BackendUnavailable(requested, [reason for report in reports for reason in report.reasons])
    if requested == "auto":
        _say_chosen(usable[0], reports, device)
    return usable


def _refuses(backend: type[MLABackend]) -> bool:
    return any(
        getattr(backend, name).__func__ is not getattr(MLABackend, name).__func__ for name in ("decode_refusals", "prefill_refusals")
    )


def _delegating(backend: type[MLABackend], fallback: type[MLABackend]) -> type[MLABackend]:
    """`backend`, but with an impl that hands the calls it must refuse to `fallback`."""

    def willing(kind: str, reasons: list[str]) -> type[MLABackend]:
        if reasons:
            _say_delegated(kind, backend.name, tuple(reasons))
        return fallback if reasons else backend

    class Delegating(backend):  # type: ignore[valid-type, misc]
        @classmethod
        def get_impl_cls(cls) -> type[MLAImpl]:
            impl = backend.get_impl_cls()
            return type(impl.__name__, (impl,), {"ops": cls})

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
            chosen = willing("decode", backend.decode_refusals(call))
            chosen.mla_decode(
                q, kv_cache, meta, softmax_scale, causal=causal, out=out, lse=lse, k_scale=k_scale, num_kv_splits=num_kv_splits
            )

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
            chosen = willing("prefill", backend.prefill_refusals(PrefillCall.of(q, v)))
            chosen.mla_prefill(
                q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal=causal, out=out, lse=lse
            )

    Delegating.__name__ = Delegating.__qualname__ = backend.__name__
    return Delegating


def _say_chosen(chosen: type[MLABackend], reports: list[BackendReport], device: torch.device) -> None:
    """One line: which backend, and why each better one was refused."""
    refused = list(itertools.takewhile(lambda report: not report.usable, reports))
    because = "".join(f"; {report.name} refused: {', '.join(report.reasons)}" for report in refused)
    expected = any(_registry[report.name].expected_on(device) for report in refused)
    _log_once(logging.WARNING if expected else logging.INFO, f"using {chosen.get_name()} on {device}{because}")


def _say_delegated(kind: str, name: str, reasons: tuple[str, ...]) -> None:
    _log_once(logging.WARNING, f"a {kind} goes to the next backend, {name} refused it: {', '.join(reasons)}")


@functools.cache
def _log_once(level: int, message: str) -> None:
    logger.log(level, message)


@functools.cache
def _warn_of_unknown_variables() -> None:
    for name in os.environ:
        if name.startswith("DUALMLA_") and name not in VARIABLES:
            logger.warning("unknown environment variable %s; known: %s", name, ", ".join(VARIABLES))
