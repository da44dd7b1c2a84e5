"""What the instruments saw: races, reads of memory nobody wrote, missing waits. Facts about the program, not errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

KINDS = (
    "read of memory nobody wrote",
    "read of LDS nobody wrote",
    "LDS race: two waves write, no barrier between",
    "LDS race: one wave writes what another reads, no barrier between",
    "LDS read while a load into it is in flight",
    "register used before its load was waited for",
)
UNWRITTEN_READ, UNWRITTEN_LDS, WRITE_WRITE, READ_WRITE, LOAD_IN_FLIGHT, MISSING_WAIT = range(len(KINDS))

CAPACITY = 512
"""Different findings kept apart in one launch; what comes after is counted in the last row."""

NOTE = np.dtype([("kind", "i8"), ("first", "i8"), ("second", "i8"), ("count", "i8"), ("address", "i8")])


@dataclass(frozen=True)
class Finding:
    """One kind of event between one pair of instructions. `count` is how many times, `where` the first memory, LDS or
    register address."""

    kind: str
    instruction: str
    other: str | None
    count: int
    where: int

    def __str__(self) -> str:
        other = f" / {self.other}" if self.other else ""
        return f"{self.kind}: {self.instruction}{other}, {self.count} times, first at {self.where:#x}"


def empty_notes() -> NDArray[np.void]:
    """Room for the findings of one launch."""
    notes = np.zeros(CAPACITY, NOTE)
    notes["kind"] = -1
    return notes


@numba.njit
def note(notes: Any, kind: Any, first: Any, second: Any, address: Any) -> Any:
    """Count an event of `kind` between records `first` and `second` (-1: none)."""
    for row in range(notes.size):
        entry = notes[row]
        if entry.kind < 0 or row == notes.size - 1:
            entry.kind, entry.first, entry.second, entry.address = kind, first, second, address
        if entry.kind == kind and entry.first == first and entry.second == second:
            entry.count += 1
            return
