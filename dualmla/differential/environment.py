"""Shadow mode by `DUALMLA_SHADOW`: what `select_backend` calls when it is set."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import tempfile
from pathlib import Path

import torch

from dualmla.backends.base import BackendUnavailable, MLABackend
from dualmla.differential.shadow import Shadow
from dualmla.selection import backend_for_device

logger = logging.getLogger("dualmla")


def from_environment(backend: type[MLABackend], device: torch.device) -> type[MLABackend]:
    """`backend`, watched as `DUALMLA_SHADOW` says: the share of decodes, above 0 and at most 1.

    The second backend is triton; where triton runs, it is aiter, or where that can't run the reference on a CPU and none on
    a GPU (the reference would stall it). Repros go to `dualmla-shadow` in the directory for temporary files.

    Raises:
        ValueError: the variable is no such number.
    """
    value = os.environ["DUALMLA_SHADOW"]
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"DUALMLA_SHADOW is {value!r}; it must be a share of calls, above 0 and at most 1, such as 0.001")
    key = (backend, device, share)
    if key not in _from_environment:
        second = _second(backend, device)
        _from_environment[key] = backend if second is None else _watched(backend, second, share)
    return _from_environment[key]


_from_environment: dict[tuple[type[MLABackend], torch.device, float], type[MLABackend]] = {}


def _watched(backend: type[MLABackend], second: str, share: float) -> type[MLABackend]:
    save = Path(tempfile.gettempdir()) / "dualmla-shadow"
    shadow = Shadow(second, share=share, save=save)
    atexit.register(shadow.drain)
    logger.warning("shadow: %g of the decodes of %s run again on %s; divergences go to %s", share, backend.name, second, save)
    return shadow.watch(backend)


def _second(backend: type[MLABackend], device: torch.device) -> str | None:
    names = ["triton", "aiter", *(["reference"] if device.type == "cpu" else [])]
    for name in names:
        with contextlib.suppress(BackendUnavailable):
            if name != backend.name and backend_for_device(device, name):
                return name
    logger.warning("shadow: DUALMLA_SHADOW is set, but on %s nothing can run beside %s", device, backend.name)
    return None
