"""What the benchmarks share: the device, and the machine and versions that every figure carries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dualmla.differential.machine import device_name, versions

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return DEVICE


def machine() -> dict[str, str | None]:
    """What a figure depends on beside the code."""
    return {"device": device_name(DEVICE), **versions()}


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Into the JSON that `--benchmark-json` writes."""
    machine_info["dualmla"] = machine()


def pytest_report_header(config: pytest.Config) -> str:
    return "benchmark on " + ", ".join(f"{name} {value}" for name, value in machine().items())
