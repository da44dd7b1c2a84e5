"""Whether AITER can be used in this process: gates in order of cost, then a trial in a subprocess, then the import.

AITER does much at import: it runs ROCm tools, builds and loads extensions, waits for locks. It may raise anything, SystemExit
included, build for minutes, hang or take the process down, and a failed import leaves entries in `sys.path`, stray modules
and environment variables. So it is tried elsewhere first, what a failure left here is undone, and the verdict is final:
nothing is tried twice in a process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from dualmla.backends.aiter import trial
from dualmla.backends.aiter.signatures import Aiter, UnknownSignature, describe
from dualmla.backends.aiter.support import ARCHS

HOW_TO_INSTALL = "install `dualmla[aiter]`, or AITER's own wheel for your ROCm"


@dataclass(frozen=True)
class Usable:
    """AITER, imported, and what it runs on.

    Attributes:
        aiter: the release.
        arch: such as "gfx942".
    """

    aiter: Aiter
    arch: str


@dataclass(frozen=True)
class Installed:
    """An AITER found on `sys.path`, not imported.

    Attributes:
        package: its directory.
        version: of the distribution, "unknown" without one; for messages alone.
    """

    package: Path
    version: str


@functools.cache
def device_arch(device: torch.device) -> str:
    """Such as "gfx942"; empty where the device is not a ROCm GPU. `torch.cuda.is_available()` would be no gate: CUDA has it too."""
    if device.type != "cuda" or torch.version.hip is None:
        return ""
    return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]


def device_refusal(device: torch.device) -> str | None:
    """Why AITER has no kernels for the device; None where it has."""
    arch = device_arch(device)
    if arch in ARCHS:
        return None
    what = arch or ("an NVIDIA GPU" if device.type == "cuda" else f"of type {device.type}")
    return f"the device is {what}; AITER's MLA kernels are for {' and '.join(ARCHS)}"


def find_aiter() -> Installed | str:
    """AITER as installed, without importing it, or why it is not there."""
    try:
        spec = importlib.util.find_spec("aiter")
    except (ImportError, ValueError) as error:
        return f"AITER can't be looked for: {error}"
    if spec is None or spec.origin is None:  # without an origin: a folder that happens to be called aiter
        return f"AITER is not installed; {HOW_TO_INSTALL}"
    package = Path(spec.origin).parent
    if not (package / "mla.py").exists() and not (package / "jit").exists():
        return (
            f"the package `aiter` in {package.parent} is not AITER, it has neither mla.py nor jit (PyPI's `aiter` is an unrelated "
            f"asyncio library): remove it and {HOW_TO_INSTALL}"
        )
    for path in ([str(package.parent)], sys.path):  # beside the package first: there may be another one
        for name in ("amd-aiter", "aiter"):
            for distribution in importlib.metadata.distributions(name=name, path=path):
                return Installed(package, distribution.version)
    return Installed(package, "unknown")


_lock = threading.Lock()
_verdict: Aiter | str | None = None  # None: not found out yet; a string: why it can't be used


def usable(device: torch.device) -> Usable | str:
    """AITER on `device`, or the one sentence that says why not. The device is asked each time, AITER is tried once in a process.

    Raises:
        ValueError: `DUALMLA_PROBE_TIMEOUT` is not a number of seconds.
    """
    global _verdict  # noqa: PLW0603 - one process, one verdict
    if refusal := device_refusal(device):
        return refusal
    with _lock:
        if _verdict is None:
            _verdict = _find_out(device)
    return _verdict if isinstance(_verdict, str) else Usable(_verdict, device_arch(device))


def _find_out(device: torch.device) -> Aiter | str:
    installed = find_aiter()
    if isinstance(installed, str):
        return installed
    called = f"AITER {installed.version}"
    if failure := trial.run(installed.package, device):
        return f"{called} {failure}"
    return imported(installed, yet="passed its trial in a subprocess, yet ")


def imported(installed: Installed, yet: str = "") -> Aiter | str:
    """AITER as `find_aiter` found it, imported into this process, or why it can't be. What a failure leaves is undone.

    Arguments:
        yet: what the reason says before that it can't be imported.
    """
    called = f"AITER {installed.version}"
    try:
        with undone_on_failure(installed.package):
            return describe(importlib.import_module("aiter"), importlib.import_module("aiter.mla"), installed.version)
    except UnknownSignature as error:
        return f"{called} can't be used: {error}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit is one of the ways it fails
        return f"{called} {yet}can't be imported here: {trial.described(error)}"


@contextlib.contextmanager
def undone_on_failure(package: Path) -> Iterator[None]:
    """When the block raises, `sys.path`, the environment and AITER's modules are put back as they were.

    Modules of other packages that it was the first to import stay: numpy and its like can't be imported twice.
    """
    path, modules, environment = list(sys.path), set(sys.modules), dict(os.environ)
    try:
        yield
    except BaseException:
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)
        for name in set(sys.modules) - modules:
            if name.split(".")[0] == "aiter" or _lies_under(sys.modules[name], (package, package.parent / "aiter_meta")):
                del sys.modules[name]
        raise


def _lies_under(module: object, directories: tuple[Path, ...]) -> bool:
    file = getattr(module, "__file__", None)
    return bool(file) and any(directory in Path(str(file)).parents for directory in directories)
