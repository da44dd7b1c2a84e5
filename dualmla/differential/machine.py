"""What a report must say about where it was made."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

import dualmla

PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton-rocm", "pytorch-triton"),
    "aiter": ("amd-aiter",),
    "transformers": ("transformers",),
    "numpy": ("numpy",),
}
"""Distributions by what they install; on PyPI `aiter` is something else."""


def versions() -> dict[str, str | None]:
    """Of Python, dualmla and the packages it can use; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "dualmla": dualmla.__version__}
    for name, distributions in PACKAGES.items():
        found[name] = next((version for version in map(_version, distributions) if version), None)
    return found


def device_name(device: torch.device) -> str:
    """The GPU with its architecture, or the CPU."""
    if device.type != "cuda":
        return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
    properties = torch.cuda.get_device_properties(device)
    # on CUDA torch has a gcnArchName too: the marketing name once more
    arch = properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    return f"{properties.name} ({arch}, {properties.total_memory / 2**30:.0f} GiB)"


def environment() -> dict[str, str]:
    """The variables that are set and decide which backend runs and how."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("DUALMLA_", "VLLM_ROCM_USE_AITER")) or name == "TRITON_INTERPRET"
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
