"""The operations that can be checked. A module each; adding one is adding it to `OPERATIONS`."""

from __future__ import annotations

from typing import Any

import torch

from dualmla.differential.problems.base import Call, Problem, Result
from dualmla.differential.problems.cache import CacheCase, CacheProblem
from dualmla.differential.problems.decode import DecodeProblem
from dualmla.differential.problems.layer import LayerProblem
from dualmla.differential.problems.merge import MergeCase, MergeProblem
from dualmla.differential.problems.prefill import PrefillProblem
from dualmla.differential.problems.replay import ReplayProblem

OPERATIONS: dict[str, type[Problem]] = {
    kind.operation: kind for kind in (DecodeProblem, PrefillProblem, LayerProblem, ReplayProblem, CacheProblem, MergeProblem)
}
"""By the name that repro files and reports use."""

__all__ = [
    "OPERATIONS",
    "CacheCase",
    "CacheProblem",
    "Call",
    "DecodeProblem",
    "LayerProblem",
    "MergeCase",
    "MergeProblem",
    "PrefillProblem",
    "Problem",
    "ReplayProblem",
    "Result",
    "unpack",
]


def unpack(operation: str, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Problem:
    """The problem that `Problem.pack` took apart.

    Raises:
        ValueError: the operation is unknown.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation must be one of {', '.join(OPERATIONS)}, got {operation!r}")
    return OPERATIONS[operation].unpack(fields, tensors)
