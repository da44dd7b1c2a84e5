"""What the benchmarks share: the device, and the machine and versions that every figure carries."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch

import dualmla

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return DEVICE


def machine() -> dict[str, Any]:
    """What a figure depends on beside the code."""
    try:
        import triton
    except ImportError:
        triton = None
    return {
        "device": torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "dualmla": dualmla.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__ if triton else None,
    }


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Into the JSON that `--benchmark-json` writes."""
    machine_info["dualmla"] = machine()


def pytest_report_header(config: pytest.Config) -> str:
    return "benchmark on " + ", ".join(f"{name} {value}" for name, value in machine().items())
