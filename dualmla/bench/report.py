"""A run on the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dualmla.bench.clock import Timing
from dualmla.bench.results import Report, Row
from dualmla.differential.report import share


def print_bench(console: Console, report: Report) -> None:
    """A table a group of cases, what went wrong, and how backends stand to one another."""
    rates = ", ".join(f"{rate / 1e12:.3g} TFLOP/s ({dtype} product)" for dtype, rate in report.ceilings.rates.items())
    console.print(f"[bold]{report.device}[/], {report.date}", highlight=False)
    versions = "  ".join(f"{name} {version}" for name, version in report.versions.items() if version)
    console.print(versions, style="dim", highlight=False)
    console.print(f"measured ceilings: {report.ceilings.bandwidth / 1e12:.3g} TB/s (copy), {rates}\n", highlight=False)
    for group, rows in groupby(report.rows, key=lambda row: row.group):
        console.print(_table(group, list(rows)))
    for row in report.rows:
        if row.status == "wrong":
            why = row.why.split("; out ")[0]  # the first of its failures; all are in the JSON
            console.print(f"WRONG: {row.backend}, {row.group}, {row.title}: {why}", style="red", markup=False, highlight=False)
    for sentence in dict.fromkeys(f"{row.backend} {row.status}: {row.why}" for row in report.rows if row.status not in ("timed", "wrong")):
        console.print(sentence, style="yellow", markup=False, highlight=False)
    for sentence in dict.fromkeys(f"{row.backend}: {row.note}" for row in report.rows if row.note):
        console.print(sentence, style="dim", markup=False, highlight=False)
    for sentence in report.absent:
        console.print(sentence, style="dim", markup=False, highlight=False)
    for sentence in comparisons(report):
        console.print(sentence, style="bold", markup=False, highlight=False)
    if report.ended:
        console.print(f"ended early: {report.ended}", style="bold red", markup=False, highlight=False)


def comparisons(report: Report) -> list[str]:
    """Of each of our backends against the best peer of each case: a sentence a group."""
    told = []
    ours = dict.fromkeys(row.backend for row in report.rows if row.backend not in report.peers)
    for group, rows in groupby(report.rows, key=lambda row: row.group):
        timed = [row for row in rows if row.status == "timed"]
        peers: dict[str, float] = {}
        for row in timed:
            if row.backend in report.peers:
                peers[row.title] = min(row.seconds, peers.get(row.title, math.inf))
        for name in ours:
            ratios = {row.title: peers[row.title] / row.seconds for row in timed if row.backend == name and row.title in peers}
            if ratios:
                mean, least = geometric_mean(ratios.values()), min(ratios, key=ratios.__getitem__)
                told.append(f"{name} against the best peer, {group}: {mean:.3f} (geometric mean), least {ratios[least]:.3f} at {least}")
    return told


def geometric_mean(values: Iterable[float]) -> float:
    """Of ratios."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def _table(group: str, rows: list[Row]) -> Table:
    table = Table(title=group, title_justify="left", title_style="bold", box=box.SIMPLE)
    table.add_column("requests x length", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for name in ("eager ms", "graph ms", "spread", "host us", "GB/s", "TFLOP/s", "of ceiling", "of fastest", "error used"):
        table.add_column(name, justify="right", no_wrap=True)
    for title, of_title in groupby(rows, key=lambda row: row.title):
        some = list(of_title)
        fastest = min((row.seconds for row in some if row.status == "timed"), default=math.nan)
        for index, row in enumerate(some):
            table.add_row(title if index == 0 else "", escape(row.backend), *_cells(row, fastest), end_section=index == len(some) - 1)
    return table


def _cells(row: Row, fastest: float) -> list[str]:
    used = "" if row.budget_used is None else share(row.budget_used)
    if row.best is None:
        colour = {"wrong": "bold red", "checked": "green", "refused": "yellow", "failed": "yellow"}[row.status]
        told = {"wrong": "WRONG", "checked": "not timed"}.get(row.status, row.status)
        return [f"[{colour}]{told}[/]", "", "", "", "", "", "", "", used]
    numbers = [_short(row.bandwidth / 1e9), _short(row.rate / 1e12), f"{row.of_roof:.0%}", f"{fastest / row.seconds:.2f}"]
    if row.seconds == fastest:
        numbers[-1] = f"[bold green]{numbers[-1]}[/]"
    return [_ms(row.eager), _ms(row.graph), f"{row.best.spread:.1%}", _us(row.host), *numbers, used]


def _ms(timing: Timing | None) -> str:
    return f"{timing.median * 1e3:.4f}" if timing else "-"


def _us(timing: Timing | None) -> str:
    return f"{timing.median * 1e6:.1f}" if timing else "-"


def _short(value: float) -> str:
    """Three digits, as far as there are any."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
