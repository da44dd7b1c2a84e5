"""Running problems through backends: what `dualmla check` does, without the terminal."""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from dualmla.differential import repro
from dualmla.differential.grids import Draw
from dualmla.differential.machine import device_name, versions
from dualmla.differential.problems import Problem
from dualmla.differential.shrink import shrink
from dualmla.differential.verdict import Kind, Verdict
from dualmla.differential.worker import Worker, WorkerAbandoned

MOST_DEATHS = 10
"""A check ends after this many crashes and hangs of one backend: the rest would tell nothing new, slowly."""

PER_JOB = 25
"""Problems that are worth starting a process for."""

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
        jobs: processes of each backend that judge at once, sharing the device.
    """

    backends: Sequence[str | None]
    device: str
    title: str = ""
    load: tuple[Path, ...] = ()
    limit: float = 120.0
    seconds: float | None = None
    save: Path | None = None
    shrink_seconds: float = 20.0
    jobs: int = 1


@dataclass(frozen=True)
class Report:
    """What was asked, where, and every verdict.

    Attributes:
        backends: by name, the one under test first; float64 judges them all.
        rows: a problem each, with a verdict of each backend.
        failures: the first of each kind and backend.
        ended: why not everything was run; empty when it was.
        interrupted: by the user, or by who ran the command.
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
    interrupted: bool = False

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if fails(row)]

    @property
    def ran(self) -> bool:
        """Some case ran on the backend under test."""
        return any(row[0].status != "refused" for row in self.rows)


def fails(row: Row) -> bool:
    """One of the backends is wrong."""
    return any(verdict.status == "fail" for verdict in row)


def run_check(draws: Iterable[Draw], plan: Plan, on_row: Callable[[Row], None] = lambda row: None) -> Report:
    """Judge each problem on each backend, and shrink the first failure of each kind.

    After a `KeyboardInterrupt` the report has what had been judged until then.

    Raises:
        WorkerFailed: a backend can't run at all.
        ImportError: repros are to be saved and safetensors is missing.
    """
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    begin = time.perf_counter()
    run = _Run(draws, plan, on_row, date)
    with ThreadPoolExecutor(plan.jobs, "dualmla-check") as lanes:
        try:
            for lane in [lanes.submit(run.judge_until_done) for _ in range(plan.jobs)]:
                lane.result()
        except KeyboardInterrupt:
            run.abandon()
        finally:
            run.stop()  # the other lanes, where one has failed
    rows = [row for _, row in sorted(run.rows.items())]
    seconds = time.perf_counter() - begin
    return replace(
        run.about, rows=rows, failures=list(run.failures.values()), seconds=seconds, ended=run.ended, interrupted=run.interrupted
    )


def default_jobs(problems: int | None) -> int:
    """How many processes share so many problems (None: no end of them): one a core, and no more than have `PER_JOB` each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if problems is None else max(min(cores, problems // PER_JOB), 1)


class _Run:
    """A check under way: what its lanes, a thread with a process for each backend, take from and report to."""

    def __init__(self, draws: Iterable[Draw], plan: Plan, on_row: Callable[[Row], None], date: str) -> None:
        self.plan, self.on_row = plan, on_row
        names = tuple(backend or "auto" for backend in plan.backends)
        self.about = Report(names, device_name(torch.device(plan.device)), plan.title, versions(), date, [])
        self.rows: dict[int, Row] = {}
        self.failures: dict[tuple[str, Kind | None], Failure] = {}
        self.ended = ""
        self.interrupted = False
        self._workers: list[Worker] = []
        self._draws = enumerate(draws)
        self._deaths: Counter[str] = Counter()
        self._start: float | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self._seen: set[tuple[str, Kind | None]] = set()

    def stop(self) -> None:
        """No lane begins another problem."""
        self._stopped = True

    def abandon(self) -> None:
        """The lanes end at once, in the middle of what they do."""
        self._stopped = self.interrupted = True
        self.ended = "interrupted"
        for worker in self._workers:
            worker.abandon()

    def judge_until_done(self) -> None:
        """A lane."""
        with contextlib.suppress(WorkerAbandoned):
            self._judge_until_done()

    def _judge_until_done(self) -> None:
        plan = self.plan
        threads = max((os.cpu_count() or 1) // plan.jobs, 1) if plan.jobs > 1 else None
        with contextlib.ExitStack() as stack:
            workers = [Worker(backend, plan.device, plan.load, plan.limit, threads) for backend in plan.backends]
            self._workers += workers
            if self._stopped:
                return
            for worker in workers:
                stack.enter_context(worker)
            with self._lock:
                self.about = replace(self.about, backends=tuple(worker.name for worker in workers))
            while (turn := self._next()) is not None:
                place, problem = turn[0], turn[1]()
                row = tuple(worker.judge(problem) for worker in workers)
                new = self._report(place, row)
                for worker, verdict in zip(workers, row, strict=True):
                    if (key := (worker.name, verdict.kind)) in new:
                        self.failures[key] = _investigate(problem, verdict, worker, plan, self.about)

    def _next(self) -> tuple[int, Draw] | None:
        """The next problem and its place; None: there is none, or the check has come to its end."""
        with self._lock:
            now = time.perf_counter()
            self._start = self._start or now
            if self.plan.seconds is not None and now - self._start > self.plan.seconds:
                self.ended = f"time was up after {self.plan.seconds:g} s"
                self._stopped = True
            return None if self._stopped else next(self._draws, None)

    def _report(self, place: int, row: Row) -> set[tuple[str, Kind | None]]:
        """Note a row; returns which of its failures are the first of their kind."""
        with self._lock:
            self.rows[place] = row
            self.on_row(row)
            new = {(verdict.backend, verdict.kind) for verdict in row if verdict.status == "fail"} - self._seen
            self._seen |= new
            self._deaths.update(verdict.backend for verdict in row if verdict.kind in ("crash", "hang"))
            for backend, deaths in self._deaths.items():
                if deaths >= MOST_DEATHS:
                    self.ended = f"{backend} crashed or hung {MOST_DEATHS} times"
                    self._stopped = True
            return new


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
