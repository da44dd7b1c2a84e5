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
