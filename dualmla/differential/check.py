"""Running problems through backends: what `dualmla check` does, without the terminal."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from dualmla.differential import repro
from dualmla.differential.grids import Draw
from dualmla.differential.machine import device_name, versions
from dualmla.differential.problems import Problem
from dualmla.differential.shrink import shrink
from dualmla.differential.verdict import Verdict
from dualmla.differential.worker import Worker

MOST_DEATHS = 10
"""A check ends after this many crashes and hangs of one backend: the rest would tell nothing new, slowly."""

Row = tuple[Verdict, ...]


@dataclass(frozen=True)
class Failure:
    """The first failure of its kind, shrunk.

    Attributes:
        found: the verdict on the problem it was found in.
        shrunk: on the smallest problem that fails the same way; None when the failure did not come back.
        problem: that smallest problem.
        tried: problems judged while shrinking.
        path: of the repro, where one was saved.
        script: of the repro, to paste.
    """

    found: Verdict
    shrunk: Verdict | None
    problem: Problem
    tried: int
    path: Path | None = None
    script: str = ""


@dataclass(frozen=True)
class Plan:
    """What to run and where.

    Attributes:
        backends: names, the one under test first; None for what the policy picks.
        device: where cases run.
        title: of the problems, such as "grid quick".
        load: files that register backends.
        limit: seconds a case may take.
        seconds: from when the backends are up; no new problem is begun after that; None: no such limit.
        save: directory for repros; None: none are written.
        shrink_seconds: for each kind of failure; 0 leaves failures as they were found.
    """

    backends: Sequence[str | None]
    device: str
    title: str = ""
    load: tuple[Path, ...] = ()
    limit: float = 120.0
    seconds: float | None = None
    save: Path | None = None
    shrink_seconds: float = 20.0


@dataclass(frozen=True)
class Report:
    """What was asked, where, and every verdict.

    Attributes:
        backends: by name, the one under test first; float64 judges them all.
        rows: a problem each, with a verdict of each backend.
        failures: the first of each kind and backend.
        ended: why not everything was run; empty when it was.
    """

    backends: tuple[str, ...]
    device: str
    title: str
    versions: dict[str, str | None]
    date: str
    rows: list[Row]
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    ended: str = ""

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if any(verdict.status == "fail" for verdict in row)]

    @property
    def ran(self) -> bool:
        """Some case ran on the backend under test."""
        return any(row[0].status != "refused" for row in self.rows)


def run_check(draws: Iterable[Draw], plan: Plan, on_row: Callable[[Row], None] = lambda row: None) -> Report:
    """Judge each problem on each backend, and shrink the first failure of each kind.

    Raises:
        WorkerFailed: a backend can't run at all.
        ImportError: repros are to be saved and safetensors is missing.
    """
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    rows: list[Row] = []
    failures: dict[tuple[str, str | None], Failure] = {}
    deaths: Counter[str] = Counter()
    ended = ""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(backend, plan.device, plan.load, plan.limit)) for backend in plan.backends]
        names = tuple(worker.name for worker in workers)
        start = time.perf_counter()
        report = Report(names, device_name(torch.device(plan.device)), plan.title, versions(), date, rows)
        for draw in draws:
            if plan.seconds is not None and time.perf_counter() - start > plan.seconds:
                ended = f"time was up after {plan.seconds:g} s"
                break
            problem = draw()
            row = tuple(worker.judge(problem) for worker in workers)
            rows.append(row)
            on_row(row)
            for worker, verdict in zip(workers, row, strict=True):
                if verdict.status == "fail" and (worker.name, verdict.kind) not in failures:
                    failures[worker.name, verdict.kind] = _investigate(problem, verdict, worker, plan, report)
            deaths.update(verdict.backend for verdict in row if verdict.kind in ("crash", "hang"))
            if any(count >= MOST_DEATHS for count in deaths.values()):
                ended = f"{deaths.most_common(1)[0][0]} crashed or hung {MOST_DEATHS} times"
                break
    return replace(report, failures=list(failures.values()), seconds=time.perf_counter() - start, ended=ended)


def _investigate(problem: Problem, verdict: Verdict, worker: Worker, plan: Plan, report: Report) -> Failure:
    """Shrunk and saved, as far as the plan wants it."""
    shrunk: Verdict | None = verdict
    tried = 0
    if plan.shrink_seconds:
        result = shrink(problem, verdict, worker.judge, seconds=plan.shrink_seconds)
        problem, shrunk, tried = result.problem, result.verdict, result.tried
    if plan.save is None:
        return Failure(verdict, shrunk, problem, tried)
    made = {**report.versions, "device": report.device, "date": report.date}
    path = repro.save(plan.save, problem, shrunk or verdict, device=plan.device, made=made, load_files=plan.load)
    return Failure(verdict, shrunk, problem, tried, path, path.with_suffix(".py").read_text())
