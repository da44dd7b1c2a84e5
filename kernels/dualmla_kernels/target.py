"""What the kernels are compiled for, and by which Triton: the chip of a device, or one that is only spoken of.

On the device "meta", whose tensors have shapes and no memory, a launch is noted instead of done. So every launcher can be
asked what it would launch on a chip that this machine lacks:

    with launches_on(CHIPS["gfx942"]) as launches:
        mla_decode(...)  # tensors on "meta"
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton

TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
"""Major and minor: what there is, and what fits into the registers of a chip, differs between them."""


@dataclass(frozen=True, eq=False)
class Target:
    """A chip; one object each, so that it is quickly looked up by.

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
"""What static checks compile for."""


@dataclass(frozen=True)
class Launch:
    """`kernel[grid](*args, **kwargs)`, not done."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_spoken_of: list[tuple[Target, list[Launch]]] = []


@contextlib.contextmanager
def launches_on(target: Target) -> Iterator[list[Launch]]:
    """Within, the device "meta" stands for `target`; the list fills with what is launched on it."""
    launches: list[Launch] = []
    _spoken_of.append((target, launches))
    try:
        yield launches
    finally:
        _spoken_of.pop()


def note(launch: Launch) -> None:
    """Add a launch on "meta" to the list of the innermost `launches_on`."""
    _spoken_of[-1][1].append(launch)


def target_of(device: torch.device) -> Target:
    """The chip of `device`."""
    return _spoken_of[-1][0] if _spoken_of and device.type == "meta" else _target_of(device)


@functools.cache
def _target_of(device: torch.device) -> Target:
    if device.type == "cpu":
        return Target("cpu", 4)
    properties = torch.cuda.get_device_properties(device)
    # a name of AMD's goes on with features: gfx942:sramecc+:xnack-
    arch = properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    return Target(arch, properties.multi_processor_count)
