"""What the benchmarks share: the device and its clock, others' kernels, and the machine and versions that every figure carries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dualmla.bench.clock import Ceilings, Clock, measure_ceilings
from dualmla.bench.peers import Peer, load_peers
from dualmla.differential.machine import device_name, versions

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return DEVICE


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--peers", type=Path, metavar="DIR", help="kernels of others, as in `dualmla bench --peers`")


@pytest.fixture(scope="session")
def clock() -> Clock:
    """Times calls in turns on the device."""
    return Clock(DEVICE)


@pytest.fixture(scope="session")
def ceilings(clock: Clock) -> Ceilings:
    """What the machine itself does in this run."""
    return measure_ceilings(clock, {torch.bfloat16})


@pytest.fixture(scope="session")
def peers(request: pytest.FixtureRequest) -> list[Peer]:
    """Those of `--peers`."""
    folder = request.config.getoption("--peers")
    if folder is None:
        pytest.skip("needs --peers DIR, kernels of others to be compared with")
    return load_peers(folder)


def machine() -> dict[str, str | None]:
    """What a figure depends on beside the code."""
    return {"device": device_name(DEVICE), **versions()}


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Into the JSON that `--benchmark-json` writes."""
    machine_info["dualmla"] = machine()


def pytest_report_header(config: pytest.Config) -> str:
    return "benchmark on " + ", ".join(f"{name} {value}" for name, value in machine().items())
