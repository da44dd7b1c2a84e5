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

from dualmla.backends.aiter import AiterMLABackend
from dualmla.backends.base import BackendReport, BackendUnavailable, DecodeCall, MLABackend, PrefillCall
from dualmla.backends.reference import ReferenceMLABackend
from dualmla.backends.triton import TritonMLABackend
from dualmla.config import MLAConfig
from dualmla.fallback import answers, chained, log_once
from dualmla.validation import checked_device, variable

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
    _candidates.cache_clear()


def is_registered(name: str) -> bool:
    """Whether a backend is known as `name`."""
    return name in _registry


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
    return _watched(chained(_candidates(cfg, device, _requested(backend), _flags_off())), device)


def backend_for_decode(device: torch.device, backend: str | None, call: Callable[[], DecodeCall]) -> type[MLABackend]:
    """The backend of one `mla_decode`: under auto it hands the call on where it does not take it; watched as `select_backend`'s.

    Arguments:
        call: describes it, to a backend that may refuse.

    Raises:
        BackendUnavailable: the forced backend refuses, or none is usable on the device.
        ValueError: an unknown name, or `DUALMLA_SHADOW` is no share.
    """
    return _watched(_willing(device, backend, "decode_refusals", call), device)


def backend_for_prefill(device: torch.device, backend: str | None, call: Callable[[], PrefillCall]) -> type[MLABackend]:
    """The backend of one `mla_prefill`, as `backend_for_decode`.

    Raises:
        BackendUnavailable, ValueError: as `backend_for_decode`.
    """
    return _willing(device, backend, "prefill_refusals", call)


def backend_for_device(device: torch.device, backend: str | None) -> type[MLABackend]:
    """The backend of a function that any backend which runs on the device can do.

    Raises:
        BackendUnavailable, ValueError: as `backend_for_decode`.
    """
    return _runnable(device, _requested(backend))[0]


def _watched(chosen: type[MLABackend], device: torch.device) -> type[MLABackend]:
    """As `DUALMLA_SHADOW` says. Shadow mode stands above this module, on the judge and the repro files: imported when asked for."""
    if not variable("DUALMLA_SHADOW"):
        return chosen
    watched: type[MLABackend] = importlib.import_module("dualmla.differential.environment").from_environment(chosen, device)
    return watched


def _willing(device: torch.device, backend: str | None, hook: str, call: Callable[[], DecodeCall | PrefillCall]) -> type[MLABackend]:
    requested = _requested(backend)
    candidates = _runnable(device, requested)
    if requested == "auto":
        return chained(candidates)
    forced = candidates[0]
    if answers(forced, hook) and (reasons := getattr(forced, hook)(call())):
        raise BackendUnavailable(requested, reasons)
    return forced


def _runnable(device: torch.device, requested: str) -> tuple[type[MLABackend], ...]:
    """What can run on the device, in order; vLLM's flags are read where they count."""
    return _candidates(None, device, requested, _flags_off() if requested == "auto" else ())


def _requested(backend: str | None) -> str:
    """The argument, else the variable, else "auto"; in lower case and known."""
    _warn_of_unknown_variables()
    source, value = ("backend", backend) if backend is not None else ("DUALMLA_BACKEND", variable("DUALMLA_BACKEND") or "auto")
    if not isinstance(value, str):
        raise TypeError(f"backend must be None or a str, got {value!r}")
    name = value.lower()
    if name != "auto" and name not in _registry:
        raise ValueError(f"{source} is {value!r}; it must be one of auto, {', '.join(_registry)}")
    return name


def _flags_off() -> tuple[str, ...]:
    """Those of vLLM's flags that are off, as `NAME=value`. As in vLLM, only 1 and true are on; unset counts as on."""
    values = [(name, variable(name) or "1") for name in _AITER_FLAGS]
    return tuple([f"{name}={value}" for name, value in values if value != "1" and value.lower() != "true"])


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
def _candidates(cfg: MLAConfig | None, device: torch.device, requested: str, flags_off: tuple[str, ...]) -> tuple[type[MLABackend], ...]:
    """What can serve `cfg` on the device (None: what can run there at all), in order; at least one."""
    names = _preference if requested == "auto" else [requested]
    reports = [_report(name, cfg, device, requested, flags_off) for name in names]
    usable = tuple(_registry[report.name] for report in reports if report.usable)
    if not usable:
        said_by = "{0}: {1}" if requested == "auto" else "{1}"
        raise BackendUnavailable(requested, [said_by.format(report.name, reason) for report in reports for reason in report.reasons])
    if requested == "auto":
        _say_chosen(usable[0], reports, device)
    return usable


def _say_chosen(chosen: type[MLABackend], reports: list[BackendReport], device: torch.device) -> None:
    """One line: which backend, and why each better one was refused."""
    refused = list(itertools.takewhile(lambda report: not report.usable, reports))
    because = "".join(f"; {report.name} refused: {', '.join(report.reasons)}" for report in refused)
    expected = any(_registry[report.name].expected_on(device) for report in refused)
    log_once(logging.WARNING if expected else logging.INFO, f"using {chosen.get_name()} on {device}{because}")


@functools.cache
def _warn_of_unknown_variables() -> None:
    for name in os.environ:
        if name.startswith("DUALMLA_") and name not in VARIABLES:
            logger.warning("unknown environment variable %s; known: %s", name, ", ".join(VARIABLES))
