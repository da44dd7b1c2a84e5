"""What a run of `dualmla bench` found, and its JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dualmla.bench.clock import Ceilings, Timing
from dualmla.differential.files import plain

Status = Literal["timed", "checked", "wrong", "refused", "failed"]
"""timed: right, and its time is there · checked: right, and a time would say nothing · wrong: beyond the error budget, and no time is
reported · refused: not a case for this backend · failed: it raised."""

TIMINGS = ("eager", "graph", "host")
"""Fields of a row that are timings."""

DERIVED = ("gb_s", "tflop_s", "of_roof")
"""What the JSON has of a row beside its fields."""


@dataclass(frozen=True)
class Row:
    """A case on a backend.

    Attributes:
        operation: decode or prefill.
        group, title: of the case, as in `TimedCase`.
        case: its fields.
        backend: by name; `status` says what became of it, and `why` why that is not "timed".
        note: what a reader of the time must know.
        max_error, budget_used: against float64, where there was an output.
        eager, graph: time on the device of a call and of its replay from a graph. host: until the call returns.
        least_bytes, flops, roof: of the case, as in `TimedCase` and `Ceilings`; roof in seconds.
    """

    operation: str
    group: str
    title: str
    case: dict[str, Any]
    backend: str
    status: Status
    least_bytes: int
    flops: int
    roof: float
    why: str = ""
    note: str = ""
    max_error: float | None = None
    budget_used: float | None = None
    eager: Timing | None = None
    graph: Timing | None = None
    host: Timing | None = None

    @property
    def best(self) -> Timing | None:
        """The better of eager and graph."""
        return min((timing for timing in (self.eager, self.graph) if timing), key=lambda timing: timing.median, default=None)

    @property
    def seconds(self) -> float:
        """The median of the better of eager and graph; nan where nothing was timed."""
        return self.best.median if self.best else math.nan

    @property
    def bandwidth(self) -> float:
        """bytes/s."""
        return self.least_bytes / self.seconds

    @property
    def rate(self) -> float:
        """flop/s."""
        return self.flops / self.seconds

    @property
    def of_roof(self) -> float:
        """Share of what the machine itself does: the ceiling that is met first."""
        return self.roof / self.seconds

    @property
    def intensity(self) -> float:
        """flop a byte."""
        return self.flops / self.least_bytes


@dataclass(frozen=True)
class Report:
    """A run: where, when, against which ceilings, and a row a case and backend.

    Attributes:
        device, versions, environment, date: of the run; the date in UTC.
        ceilings: of the machine, measured in the run.
        peers: which of the backends are others' kernels.
        absent: sentences of backends that were not asked for and can't be used here.
        ended: why not everything was run; empty when it was.
    """

    device: str
    versions: dict[str, str | None]
    environment: dict[str, str]
    date: str
    ceilings: Ceilings
    rows: list[Row]
    peers: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    ended: str = ""

    @property
    def wrong(self) -> list[Row]:
        """Rows beyond the error budget."""
        return [row for row in self.rows if row.status == "wrong"]

    @property
    def ran(self) -> bool:
        """Some backend gave a right result."""
        return any(row.status in ("timed", "checked") for row in self.rows)


def to_json(report: Report) -> str:
    """All of it, with what the table shows of each row beside what it follows from."""
    document = asdict(report)
    for fields, row in zip(document["rows"], report.rows, strict=True):
        if row.best is not None:
            fields |= {"gb_s": row.bandwidth / 1e9, "tflop_s": row.rate / 1e12, "of_roof": row.of_roof}
    return json.dumps(plain(document), indent=1)


def from_json(text: str) -> Report:
    """The reverse of `to_json`, for a picture drawn elsewhere.

    Raises:
        ValueError: it is not what `to_json` wrote.
    """
    try:
        document = json.loads(text)
        rows = []
        for fields in document["rows"]:
            timings = {name: Timing(**fields[name]) if fields[name] else None for name in TIMINGS}
            rows.append(Row(**{name: value for name, value in {**fields, **timings}.items() if name not in DERIVED}))
        return Report(**{**document, "rows": rows, "ceilings": Ceilings(**document["ceilings"])})
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a report of `dualmla bench --json`: {error}") from error
