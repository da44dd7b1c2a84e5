"""Results compared bit by bit."""

from __future__ import annotations

import torch

from dualmla.differential.problems.base import Result


def same_bits(one: Result, two: Result) -> bool:
    """Whether two results are the same, every NaN being the same NaN."""
    return all(x is None or y is None or torch.equal(_bits(x), _bits(y)) for x, y in zip(one, two, strict=True))


def difference(before: Result, after: Result) -> str:
    """The first coordinate that differs, with both values, as a phrase."""
    for name, x, y in (("out", before.out, after.out), ("lse", before.lse, after.lse)):
        if x is not None and y is not None and bool((differ := _bits(x) != _bits(y)).any()):
            at = first(differ)
            return f"{name}{list(at)} is {float(x[at])!r}, then {float(y[at])!r}; {int(differ.sum())} of {differ.numel()} elements differ"
    return "nothing differs"


def first(flags: torch.Tensor) -> tuple[int, ...]:
    """The first coordinate that is set."""
    return tuple(flags.nonzero()[0].tolist())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.where(tensor.isnan(), torch.nan, tensor).contiguous()
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])
