"""What the kernels are compiled for: the chip of a device, or one that is only spoken of."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Target:
    """A chip.

    Attributes:
        arch: as compilers name it, "gfx942" or "sm_90"; "cpu" for Triton's interpreter.
        processors: multiprocessors (NVIDIA) or compute units (AMD).
    """

    arch: str
    processors: int

    @property
    def platform(self) -> Literal["cpu", "hip", "cuda"]:
        return "cpu" if self.arch == "cpu" else "hip" if self.arch.startswith("gfx") else "cuda"


CHIPS = {
    "gfx90a": Target("gfx90a", 104),  # one die of an MI250X
    "gfx942": Target("gfx942", 304),  # MI300X
    "gfx950": Target("gfx950", 256),  # MI355X
    "sm_90": Target("sm_90", 132),  # H200
}

_spoken_of: list[Target] = []


@contextlib.contextmanager
def meta_device_is(target: Target) -> Iterator[None]:
    """Within: the device "meta", whose tensors have shapes and no memory, stands for `target`."""
    _spoken_of.append(target)
    try:
        yield
    finally:
        _spoken_of.pop()


def target_of(device: torch.device) -> Target:
    """The chip of `device`. A name of AMD's may be followed by features ("gfx942:sramecc+:xnack-"), which are left out."""
    return _spoken_of[-1] if device.type == "meta" else _target_of(device)


@functools.cache
def _target_of(device: torch.device) -> Target:
    if device.type == "cpu":
        return Target("cpu", 4)
    properties = torch.cuda.get_device_properties(device)
    arch = properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    return Target(arch, properties.multi_processor_count)
