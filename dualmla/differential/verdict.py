"""What can be wrong with a backend, and the verdict on one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dualmla.testing import Comparison

Kind = Literal[
    "scale", "lse", "empty row", "unwritten", "unowned memory", "mask", "indices", "determinism", "splits", "heads", "accuracy",
    "exception", "crash", "hang", "race", "wait", "unwritten read", "fault",
]  # fmt: skip

CONTRACTS: dict[Kind, str] = {
    "scale": "1 Scale",
    "lse": "2 LSE",
    "empty row": "2 LSE",
    "unwritten": "3 Every output row is written",
    "unowned memory": "4 Unused memory is never read into a result",
    "mask": "5 Causal is bottom-right",
    "indices": "6 Offsets are int64",
    "determinism": "8 Determinism",
    "splits": "8 Determinism",
    "heads": "Error budget",
    "accuracy": "Error budget",
    "exception": "9 Only bad input raises",
    "crash": "The process survives",
    "hang": "The call ends",
    "race": "Machine code: waves share the LDS behind barriers",
    "wait": "Machine code: loads are waited for",
    "unwritten read": "Machine code: memory is written before it is read",
    "fault": "Machine code: only allocated memory is accessed",
}
"""The contract of the specification that each kind of failure breaks; numbered ones are its Contracts."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: what; a shrunk case must fail in the same kind.
        sentence: with coordinates and values.
    """

    kind: Kind
    sentence: str

    @property
    def contract(self) -> str:
        return CONTRACTS[self.kind]


@dataclass(frozen=True)
class Execution:
    """What emulated devices executed for one call, in wave-instructions.

    Attributes:
        kinds: by what they keep busy, such as "matrix" and "global load".
        kernels: by the kernel's name.
    """

    kinds: dict[str, int]
    kernels: dict[str, int]

    @property
    def instructions(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Verdict:
    """The judge's word on one call.

    Attributes:
        operation: such as "decode".
        title: of the case.
        backend: that ran.
        findings: what is wrong, the telling one first; empty: it agrees.
        refusals: why the backend did not take the call; it was not run then.
        comparison: the numbers, where there was a result.
        seconds: the backend's first run.
        execution: of the first run, on an emulated device.
        notes: what is known to be strange about the machine code that ran, and is no failure.
    """

    operation: str
    title: str
    backend: str
    findings: tuple[Finding, ...] = ()
    refusals: tuple[str, ...] = ()
    comparison: Comparison | None = None
    seconds: float = 0.0
    execution: Execution | None = None
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> Literal["pass", "fail", "refused"]:
        return "fail" if self.findings else "refused" if self.refusals else "pass"

    @property
    def kind(self) -> Kind | None:
        """Of the telling finding."""
        return self.findings[0].kind if self.findings else None
