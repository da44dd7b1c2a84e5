"""What every test file shares: the device, the backends that run on it, a clean environment, and fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Generator

import pytest
import torch
from hypothesis import settings
from support import DEVICE, USABLE, RunPython

import dualmla
from dualmla import selection

# shapes come from a fixed seed and a slow interpreter runs them: no deadline, no database beside the sources
settings.register_profile("dualmla", deadline=None, derandomize=True, database=None)
settings.load_profile("dualmla")

VARIABLES = ("TRITON_INTERPRET", "VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MLA")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `backend` runs on every backend usable here."""
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", USABLE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """AITER refuses many a case in advance, with reasons: no failure of a test that runs on every backend."""
    try:
        return (yield)
    except dualmla.BackendUnavailable as refusal:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.callspec.params.get("backend") == "aiter":
            pytest.skip(str(refusal))
        raise


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return DEVICE


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The developer's own flags decide nothing in a test."""
    for name in [*VARIABLES, *(name for name in os.environ if name.startswith("DUALMLA_"))]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _own_backends() -> Generator[None, None, None]:
    """What a test registers leaves with it: the file that `--load` names, a backend of its own, an emulated chip's."""
    before = dict(selection._registry), list(selection._preference)
    yield
    if before != (selection._registry, selection._preference):
        selection._registry.clear()
        selection._registry.update(before[0])
        selection._preference[:] = before[1]
        selection._candidates.cache_clear()


def _environment() -> dict[str, str]:
    """This process's, without the variables that decide something and without a GPU."""
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES and not k.startswith("DUALMLA_")}
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return environment | hidden | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.fixture(scope="session")
def run_python() -> RunPython:
    """A function that runs code in a fresh interpreter and returns what it printed; fails when it fails."""

    def run(code: str, *arguments: str, **variables: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, env=_environment() | variables, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def start_python() -> Callable[[str], subprocess.Popen[str]]:
    """A function that starts code in a fresh interpreter which one then talks to over pipes."""

    def start(code: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", code], env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    return start
