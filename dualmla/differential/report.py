"""A check's report on the terminal."""

from __future__ import annotations

from collections import Counter

from rich import box
from rich.console import Console
from rich.table import Table

from dualmla.backends.aiter.certificate import Certificate
from dualmla.differential.check import Failure, Report, Row, fails
from dualmla.differential.verdict import Finding, Verdict

SHOWN = 15
"""Rows of each status in the terminal's table: of the passing ones, those that used most of their allowance."""


def print_report(console: Console, report: Report) -> None:
    """The failing rows, the passing ones nearest to their budget, each kind of failure, and one line of verdict."""
    passing = sorted((row for row in report.rows if not fails(row)), key=used, reverse=True)
    table = Table(title=f"{', '.join(report.backends)} against float64, on {report.device}", title_justify="left", box=box.SIMPLE)
    instructions = ("instructions",) if executed(report) else ()
    # a long case is cut short here: its whole name is with its finding, and in the files
    others = 96 + max(map(len, report.backends)) + 15 * len(instructions)
    table.add_column("case", no_wrap=True, max_width=max(console.width - others, 24))
    for name in ("backend", "verdict"):
        table.add_column(name, no_wrap=True)
    for name in ("max error", "allowed", "used", "cosine diff.", "LSE error", "used", "seconds", *instructions):
        table.add_column(name, justify="right", no_wrap=True)
    for row in [*report.failed[:SHOWN], *passing[:SHOWN]]:
        for verdict in row:
            table.add_row(*_cells(verdict))
    console.print(table)
    failed, calm = max(len(report.failed) - SHOWN, 0), max(len(passing) - SHOWN, 0)
    if failed or calm:
        console.print(f"not shown: {failed} more that failed, {calm} that used less of their allowance or were refused", style="dim")
    _print_findings(console, report)
    for reason in sorted({reason for row in report.rows for verdict in row for reason in verdict.refusals}):
        console.print(f"refused: {reason}", style="yellow", markup=False, highlight=False)
    for note in notes(report):
        console.print(f"known: {note}", style="yellow", markup=False, highlight=False)
    colour = "red" if report.failed else "green" if report.ran else "yellow"
    console.print(f"\n{summary(report)}", style=f"bold {colour}", highlight=False)


def print_certificate(console: Console, certificate: Certificate) -> None:
    """A row a shape, and why those that failed did."""
    machine = certificate.machine
    title = f"AITER {machine.release} ({machine.generation}) on {machine.arch}, {machine.driver}, {certificate.date}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for name in ("shape", "verdict", "cases", "used", "seconds"):
        table.add_column(name, justify="left" if name in ("shape", "verdict") else "right", no_wrap=True)
    for entry in certificate.entries:
        verdict = "[green]pass[/]" if entry.passed else "[red]FAIL[/]"
        table.add_row(str(entry.shape), verdict, str(entry.cases), share(entry.budget_used), f"{entry.seconds:.1f}")
    console.print(table)
    for entry in certificate.entries:
        if not entry.passed:
            console.print(f"{entry.shape}: {entry.why}", style="red", markup=False, highlight=False)


def summary(report: Report) -> str:
    """One sentence."""
    count = {status: sum(verdict.status == status for row in report.rows for verdict in row) for status in ("pass", "fail", "refused")}
    calls = " and ".join(report.backends)
    told = f"{calls}: {count['pass']} passed, {count['fail']} failed, {count['refused']} refused; {report.seconds:.0f} s"
    if instructions := executed(report):
        told += f"; {instructions:,} wave-instructions executed"
    return f"{told}; {report.ended}" if report.ended else told


def executed(report: Report) -> int:
    """Wave-instructions that emulated devices executed for the first run of each case; 0 where there were none."""
    return sum(verdict.execution.instructions for row in report.rows for verdict in row if verdict.execution)


def notes(report: Report) -> list[str]:
    """What is known to be strange about the machine code that ran, and in how many cases it was seen."""
    counts = Counter(note for row in report.rows for verdict in row for note in verdict.notes)
    return [f"{note} ({count} case{'s' if count > 1 else ''})" for note, count in sorted(counts.items())]


def used(row: Row) -> float:
    """The largest share of its allowance that a verdict of the row used; -1 without a result."""
    return max((max(v.comparison.budget_used, v.comparison.lse_budget_used) for v in row if v.comparison), default=-1.0)


def share(used: float) -> str:
    """A share of the allowance, short also where it is absurd."""
    return f"{used:.0%}" if used < 100 else f"{used:.0e}x"


def _print_findings(console: Console, report: Report) -> None:
    """For each backend and contract the first finding, how many cases share it, and what it shrank to."""
    found: dict[tuple[str, str], list[tuple[Verdict, Finding]]] = {}
    for row in report.failed:
        for verdict in row:
            for finding in verdict.findings[:1]:
                found.setdefault((verdict.backend, finding.contract), []).append((verdict, finding))
    for (backend, contract), cases in found.items():
        console.print(f"\n[bold red]{backend} breaks: {contract}[/], in {len(cases)} case{'s'[: len(cases) > 1]}", highlight=False)
        for failure in report.failures:
            if failure.found.backend == backend and failure.found.findings[0].contract == contract:
                _print_failure(console, failure)


def _print_failure(console: Console, failure: Failure) -> None:
    console.print(f"  found in {failure.found.operation} {failure.found.title}", markup=False, highlight=False)
    if failure.shrunk is None:
        console.print("  it did not come back in two more runs: not shrunk", highlight=False)
    elif failure.tried:
        console.print(f"  shrunk to {failure.problem.title}, {failure.tried} tried", markup=False, highlight=False)
    for finding in (failure.shrunk or failure.found).findings:
        console.print(f"  {finding.contract}: {finding.sentence}", markup=False, highlight=False)
    if failure.path:
        console.print(f"  repro: {failure.path}, with .json and .py beside it", markup=False, highlight=False, soft_wrap=True)


def _cells(verdict: Verdict) -> list[str]:
    colour = {"pass": "green", "fail": "red", "refused": "yellow"}[verdict.status]
    cells = [f"{verdict.operation} {verdict.title}", verdict.backend, f"[{colour}]{verdict.status}[/]"]
    if (c := verdict.comparison) is not None:
        numbers = (f"{c.max_error:.1e}", f"{c.allowed:.1e}", share(c.budget_used), f"{c.cosine_difference:.1e}")
        cells += [*numbers, f"{c.lse_error:.1e}", share(c.lse_budget_used), f"{verdict.seconds:.2f}"]
        cells += [f"{verdict.execution.instructions:,}"] if verdict.execution else []
    return cells
