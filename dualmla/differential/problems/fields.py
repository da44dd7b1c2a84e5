"""A case as JSON and back."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch

CaseT = TypeVar("CaseT")


def to_fields(case: Any) -> dict[str, Any]:
    """The fields of a case dataclass; a dtype becomes its name."""
    return {
        field.name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for field in dataclasses.fields(case)
        for value in [getattr(case, field.name)]
    }


def from_fields(cls: type[CaseT], fields: dict[str, Any]) -> CaseT:
    """The reverse of `to_fields`."""
    values = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        value = fields[field.name]
        if isinstance(value, list):
            value = tuple(value)
        elif isinstance(value, str) and "dtype" in field.name:
            value = getattr(torch, value)
        values[field.name] = value
    return cls(**values)


def check_shapes(tensors: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    """The numbers of a case are as many as it says, and no others.

    Raises:
        ValueError: they are not.
    """
    got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if got != shapes:
        raise ValueError(f"the numbers of this case must be {shapes}, got {got}")
