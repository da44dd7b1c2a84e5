"""Cases through backends: drawn, checked against float64, then timed in turns."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dualmla.backends.base import current
from dualmla.bench.clock import Call, Ceilings, Clock, measure_ceilings
from dualmla.bench.inputs import Inputs, draw
from dualmla.bench.peers import Peer
from dualmla.bench.results import Report, Row, Status
from dualmla.bench.subjects import MOST_INTERPRETED, Prepared, Refused, Subject, told
from dualmla.bench.truth import Judge, judge_of
from dualmla.differential.machine import device_name, environment, versions
from dualmla.differential.problems.fields import to_fields
from dualmla.testing.timed import TimedCase


class DeviceLost(RuntimeError):  # noqa: N818 - a state
    """After a backend's error the device answers nothing any more."""


def run_bench(
    cases: Sequence[TimedCase],
    subjects: Sequence[Subject],
    clock: Clock,
    *,
    absent: Iterable[str] = (),
    on_case: Callable[[list[Row]], None] = lambda rows: None,
) -> Report:
    """Every case on every subject, after the machine's own ceilings.

    Arguments:
        absent: goes into the report.
        on_case: called with the rows of each case as it ends.
    """
    device = clock.device
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    rows: list[Row] = []
    ended = ""
    with current(device):
        ceilings = measure_ceilings(clock, {timed.case.dtype for timed in cases})
        for timed in cases:
            try:
                done = measure([(timed, subject) for subject in subjects], clock, ceilings)
            except (DeviceLost, torch.OutOfMemoryError) as error:
                ended = f"{timed.group}, {timed.title}: {told(error)}"
                break
            rows += done
            on_case(done)
    peers = [subject.name for subject in subjects if isinstance(subject, Peer)]
    return Report(device_name(device), versions(), environment(), date, ceilings, rows, peers, list(absent), ended)


def measure(jobs: Sequence[tuple[TimedCase, Subject]], clock: Clock, ceilings: Ceilings) -> list[Row]:
    """Each case on its subject, a row each: checked, and those that are right timed in turns.

    Raises:
        DeviceLost: a subject has left the device unusable.
    """
    drawn = {timed: draw(timed.case, clock.device) for timed, _ in jobs}
    judges = {timed: judge_of(inputs) for timed, inputs in drawn.items()}
    rows: list[Row] = []
    calls: dict[tuple[int, str], Call] = {}
    for job, (timed, subject) in enumerate(jobs):
        row, prepared = _checked(timed, subject, drawn[timed], judges[timed], ceilings)
        if prepared is not None:
            row, replay = _captured(row, prepared, judges[timed], clock)
            if row.status == "timed":
                calls[job, "eager"] = prepared.call
                if replay is not None:
                    calls[job, "graph"] = replay
        if row.status == "failed":
            _check_alive(clock.device, row)
        rows.append(row)
    for (job, way), timing in clock.times(calls).items():
        rows[job] = replace(rows[job], **{way: timing})  # type: ignore[arg-type]
    for (job, way), call in calls.items():
        if way == "eager":
            rows[job] = replace(rows[job], host=clock.host_time(call))
    return rows


def _checked(timed: TimedCase, subject: Subject, inputs: Inputs, judge: Judge, ceilings: Ceilings) -> tuple[Row, Prepared | None]:
    """What became of the subject, and what is to be timed, where it is right and its time says something."""
    fields = to_fields(timed.case)

    def row(status: Status, why: str = "", **found: Any) -> Row:
        roof = ceilings.roof(timed.least_bytes, timed.flops, fields["dtype"])
        about = (timed.operation, timed.group, timed.title, fields, subject.name, status, timed.least_bytes, timed.flops, roof)
        return Row(*about, why=why, **found)

    if subject.interpreted and timed.scores > MOST_INTERPRETED:
        return row(
            "refused", f"Triton interprets it on a CPU, where {timed.scores:,} scores would take minutes: at most {MOST_INTERPRETED:,}"
        ), None
    try:
        prepared = subject.prepare(inputs)
        comparison = judge(*prepared.result())
    except Refused as refusal:
        return row("refused", str(refusal)), None
    except Exception as error:
        return row("failed", told(error)), None
    found: dict[str, Any] = {"max_error": comparison.max_error, "budget_used": comparison.budget_used, "note": prepared.note}
    if comparison.failures:
        return row("wrong", "; ".join(comparison.failures), **found), None
    if subject.interpreted:
        return row("checked", "Triton interprets it on a CPU: right, and not timed", **found), None
    return row("timed", **found), prepared


def _captured(row: Row, prepared: Prepared, judge: Judge, clock: Clock) -> tuple[Row, Call | None]:
    """The replay of a graph of the call, checked as the call was; None where it can't be captured, and then the row says why."""
    try:
        captured = clock.captured(prepared.call)
        if captured is None:
            return row, None
        returned = captured.returned[0] if isinstance(captured.returned, tuple) else captured.returned
        if isinstance(returned, torch.Tensor):
            returned.fill_(torch.nan)
            captured.replay()
            if failures := judge(returned, None).failures:
                return replace(row, status="wrong", why=f"replayed from a graph: {'; '.join(failures)}"), None
        return row, captured.replay
    except Exception as error:
        _check_alive(clock.device, row)
        note = f"no graph: {told(error)}"
        return replace(row, note=f"{row.note}; {note}" if row.note else note), None


def _check_alive(device: torch.device, row: Row) -> None:
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except Exception as error:
            raise DeviceLost(f"{row.backend} left the device unusable: {row.why or told(error)}") from error
