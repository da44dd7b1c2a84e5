"""What the instruments saw: races, reads of memory nobody wrote, missing waits. Facts about the program, not errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dualmla.emulator import state
from dualmla.emulator.jit import njit

KINDS = (
    "read of memory nobody wrote",
    "read of LDS nobody wrote",
    "LDS race: two waves write, no barrier between",
    "LDS race: one wave writes what another reads, no barrier between",
    "LDS read while a load into it is in flight",
    "register used before its load was waited for",
    "misaligned access",
)
UNWRITTEN_READ, UNWRITTEN_LDS, WRITE_WRITE, READ_WRITE, LOAD_IN_FLIGHT, MISSING_WAIT, MISALIGNED = range(len(KINDS))


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


@njit
def note(group: Any, kind: Any, first: Any, second: Any, address: Any) -> Any:
    """Count an event of `kind` between records `first` and `second` (-1: none)."""
    for row in range(state.NOTES):
        if group.note_count[row] == 0 or row == state.NOTES - 1:
            group.note_kind[row], group.note_first[row], group.note_second[row] = kind, first, second
            group.note_address[row] = address
        if group.note_kind[row] == kind and group.note_first[row] == first and group.note_second[row] == second:
            group.note_count[row] += 1
            return
