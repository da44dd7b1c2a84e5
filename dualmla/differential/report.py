"""A check's report for the terminal and as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dualmla.differential.check import Report
from dualmla.differential.verdict import Finding, Verdict

SHOWN = 15
"""Passing rows in the terminal's table: those that used most of their allowance."""


def print_report(console: Console, report: Report) -> None:
    """The failing rows, the passing ones nearest to their budget, and one line of verdict."""
    passing = sorted((row for row in report.rows if row not in report.failed), key=_used, reverse=True)
    table = Table(title=f"{', '.join(report.backends)} against float64, on {report.device}", title_justify="left", box=box.SIMPLE)
    table.add_column("case", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    table.add_column("verdict")
    for name in ("max error", "allowed", "used", "cosine diff.", "LSE error", "used", "seconds"):
        table.add_column(name, justify="right")
    for row in [*report.failed[:SHOWN], *passing[:SHOWN]]:
        for verdict in row:
            table.add_row(*_cells(verdict))
    console.print(table)
    hidden = max(len(report.failed) - SHOWN, 0), max(len(passing) - SHOWN, 0)
    if any(hidden):
        console.print(
            f"not shown: {hidden[0]} more that failed, {hidden[1]} more that used less of their allowance or were refused", style="dim"
        )
    _print_findings(console, report)
    refused = {reason for row in report.rows for verdict in row for reason in verdict.refusals}
    for reason in sorted(refused):
        console.print(f"refused: {reason}", style="yellow", markup=False, highlight=False)
    console.print(
        f"\n{summary(report)}", style="bold red" if report.failed else "bold green" if report.ran else "bold yellow", highlight=False
    )


def _print_findings(console: Console, report: Report) -> None:
    """For each backend and contract the first finding, and how many cases share it."""
    found: dict[tuple[str, str], list[tuple[Verdict, Finding]]] = {}
    for row in report.failed:
        for verdict in row:
            for finding in verdict.findings:
                found.setdefault((verdict.backend, finding.contract), []).append((verdict, finding))
    for (backend, contract), cases in found.items():
        verdict, finding = cases[0]
        console.print(f"\n[bold red]{backend} breaks: {contract}[/], in {len(cases)} cases; the first, {verdict.title}:", highlight=False)
        console.print(f"  {finding.sentence}", markup=False, highlight=False)


def summary(report: Report) -> str:
    """One sentence."""
    count = {status: sum(verdict.status == status for row in report.rows for verdict in row) for status in ("pass", "fail", "refused")}
    calls = " and ".join(report.backends)
    return f"{calls}: {count['pass']} passed, {count['fail']} failed, {count['refused']} refused; {report.seconds:.0f} s"


def to_json(report: Report) -> str:
    """All of the report; inf and nan as strings."""
    fields: dict[str, Any] = dataclasses.asdict(report)
    for row, verdicts in zip(fields["rows"], report.rows, strict=True):
        for entry, verdict in zip(row, verdicts, strict=True):
            entry["status"] = verdict.status
            for finding, of in zip(entry["findings"], verdict.findings, strict=True):
                finding["contract"] = of.contract
    return json.dumps(_plain(fields), indent=1)


def _cells(verdict: Verdict) -> list[str]:
    colour = {"pass": "green", "fail": "red", "refused": "yellow"}[verdict.status]
    cells = [verdict.title, verdict.backend, f"[{colour}]{verdict.status}[/]"]
    if (c := verdict.comparison) is not None:
        numbers = (f"{c.max_error:.1e}", f"{c.allowed:.1e}", f"{c.budget_used:.0%}", f"{c.cosine_difference:.1e}")
        cells += [*numbers, f"{c.lse_error:.1e}", f"{c.lse_budget_used:.0%}", f"{verdict.seconds:.2f}"]
    return cells


def _used(row: tuple[Verdict, ...]) -> float:
    return max((max(v.comparison.budget_used, v.comparison.lse_budget_used) for v in row if v.comparison), default=-1.0)


def _plain(value: Any) -> Any:
    """JSON has no inf and no nan."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value
