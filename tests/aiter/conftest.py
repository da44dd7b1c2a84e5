"""Fake installations of AITER, and a machine that looks as if it had AMD's GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dualmla import selection
from dualmla.backends.aiter import probe

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install(files, dist)`: the package `aiter` of these sources first on `sys.path`, with a dist-info; returns its folder."""

    def write(files: dict[str, str], dist: str | None = "amd-aiter", version: str = "9.9.9") -> Path:
        site = tmp_path / "site"
        for name, text in files.items():
            path = site / "aiter" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if dist is not None:
            info = site / f"{dist.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(site))
        return site / "aiter"

    return write


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], torch.device]]:
    """`rocm(arch)`: from then on the process sees a GPU of that arch under ROCm, and AITER has not been asked about yet."""

    def pretend(arch: str) -> torch.device:
        properties = SimpleNamespace(gcnArchName=f"{arch}:sramecc+:xnack-", multi_processor_count=304)
        monkeypatch.setattr(torch.version, "hip", "6.4.43482")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return torch.device("cuda:0")

    monkeypatch.setattr(probe, "_verdict", None)
    _forget_choices()
    yield pretend
    _forget_choices()


def _forget_choices() -> None:
    for cached in (selection._choose, selection._candidates, selection._log_once):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def no_aiter_left() -> Iterator[None]:
    """Stand-ins leave with their test."""
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
        del sys.modules[name]
