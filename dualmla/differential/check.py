"""Running problems through backends: what `dualmla check` does, without the terminal."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dualmla.differential.machine import device_name, versions
from dualmla.differential.problem import Problem
from dualmla.differential.verdict import Verdict
from dualmla.differential.worker import Worker


@dataclass(frozen=True)
class Report:
    """What was asked, where, and every verdict.

    Attributes:
        backends: by name, the one under test first; float64 judges them all.
        rows: a problem each, with a verdict of each backend.
    """

    backends: tuple[str, ...]
    device: str
    grid: str
    versions: dict[str, str | None]
    date: str
    rows: list[tuple[Verdict, ...]]
    seconds: float

    @property
    def failed(self) -> list[tuple[Verdict, ...]]:
        return [row for row in self.rows if any(verdict.status == "fail" for verdict in row)]

    @property
    def ran(self) -> bool:
        """Some case ran on the backend under test."""
        return any(row[0].status != "refused" for row in self.rows)


def run_check(
    problems: Iterable[Problem],
    backends: Sequence[str | None],
    *,
    grid: str,
    device: str,
    load: tuple[Path, ...] = (),
    limit: float = 120.0,
    on_row: Callable[[tuple[Verdict, ...]], None] = lambda row: None,
) -> Report:
    """Judge each problem on each backend.

    Arguments:
        problems: what to run, in order.
        backends: names; None for what the policy picks.
        grid: what the problems are, for the report.
        device: where they run.
        load, limit: as in `Worker`.
        on_row: called after each problem.

    Raises:
        WorkerFailed: a backend can't run at all.
    """
    start = time.perf_counter()
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    rows = []
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(backend, device, load, limit)) for backend in backends]
        for problem in problems:
            rows.append(tuple(worker.judge(problem) for worker in workers))
            on_row(rows[-1])
    names = tuple(worker.name for worker in workers)
    return Report(names, device_name(torch.device(device)), grid, versions(), date, rows, time.perf_counter() - start)
