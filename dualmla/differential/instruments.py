"""What emulated devices did while a result was made: instructions executed, and hazards that the instruments saw.

Backends that run on one note each launch; whoever wants to know opens a `recording` around the call. Nothing here needs the
emulator.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from dualmla.differential.verdict import Execution, Finding, Kind


@dataclass(frozen=True)
class Hazard:
    """Something about the machine code that may go wrong elsewhere, where waves or loads are faster or slower.

    Attributes:
        kind: of the finding that it makes.
        sentence: with the kernel, the instructions and their addresses.
        known: why it is expected; empty: it is not.
    """

    kind: Kind
    sentence: str
    known: str = ""


@dataclass(frozen=True)
class Launched:
    """One launch.

    Attributes:
        kernel: its name.
        instructions: executed wave-instructions by kind.
        hazards: seen in it.
    """

    kernel: str
    instructions: dict[str, int]
    hazards: tuple[Hazard, ...] = ()


@dataclass
class Recording:
    """What was launched.

    Attributes:
        instrumented: loads arrive as late as they may, and accesses to the LDS are watched.
        launches: in order.
    """

    instrumented: bool = False
    launches: list[Launched] = field(default_factory=list)

    def execution(self) -> Execution | None:
        """What was executed, None where no emulated device took part."""
        if not self.launches:
            return None
        kinds: Counter[str] = Counter()
        kernels: Counter[str] = Counter()
        for launched in self.launches:
            kinds.update(launched.instructions)
            kernels[launched.kernel] += sum(launched.instructions.values())
        return Execution(dict(kinds), dict(kernels))


_open: list[Recording] = []


@contextlib.contextmanager
def recording(into: Recording) -> Iterator[None]:
    """Within, launches on emulated devices are done and noted as `into` says."""
    _open.append(into)
    try:
        yield
    finally:
        _open.remove(into)


def is_instrumented() -> bool:
    """Whether the innermost recording wants the instruments."""
    return bool(_open) and _open[-1].instrumented


def note(launched: Launched) -> None:
    """Add a launch to the innermost recording, if there is one."""
    if _open:
        _open[-1].launches.append(launched)


def findings_of(*recordings: Recording) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Findings, one a kind, and the known hazards as sentences."""
    hazards = dict.fromkeys(hazard for recorded in recordings for launched in recorded.launches for hazard in launched.hazards)
    unknown: dict[Kind, list[str]] = {}
    for hazard in hazards:
        if not hazard.known:
            unknown.setdefault(hazard.kind, []).append(hazard.sentence)
    findings = (
        Finding(kind, sentences[0] + (f"; {len(sentences) - 1} more of the kind" if len(sentences) > 1 else ""))
        for kind, sentences in unknown.items()
    )
    return tuple(findings), tuple(dict.fromkeys(hazard.known for hazard in hazards if hazard.known))
