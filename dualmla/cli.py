"""The command `dualmla`. Everything heavy is imported by the subcommand that needs it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

if TYPE_CHECKING:
    from dualmla.backends.base import BackendReport

app = typer.Typer(
    help="One MLA backend interface, two implementations: see which runs here, and whether it is right.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

AGREE, DISAGREE, COULD_NOT_RUN = 0, 1, 2

Backend = Annotated[str | None, typer.Option(metavar="NAME", help="A registered backend; else DUALMLA_BACKEND, else auto.")]
Device = Annotated[str | None, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1, ...; else cuda if there is one.")]


def main() -> None:
    """Entry point."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        import dualmla

        print(dualmla.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options of the command itself; `_print_version` does its work."""


@app.command()
def info(json: Annotated[bool, typer.Option("--json", help="For machines.")] = False) -> None:
    """Versions, the device, and each backend: usable, or every reason against it."""
    import torch

    import dualmla
    from dualmla.differential.machine import device_name, environment, versions
    from dualmla.testing import YARN_SCALE

    config = dualmla.MLAConfig(num_heads=16, softmax_scale=YARN_SCALE)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        reports = dualmla.explain(config, device)
    except ValueError as error:
        _fail(str(error))
    packages, place, variables = versions(), device_name(device), environment()
    if json:
        backends = [vars(report) for report in reports]
        _print_json({"versions": packages, "device": place, "environment": variables, "config": str(config), "backends": backends})
        return
    console = _console()
    console.print("  ".join(f"[bold]{name}[/] {version or '[dim]not installed[/]'}" for name, version in packages.items()), highlight=False)
    console.print(f"[bold]device[/] {place}", highlight=False)
    for name, value in variables.items():
        console.print(f"[bold]{name}[/]={value}", highlight=False)
    console.print("\nfor DeepSeek's layer with 16 heads in bfloat16 and page size 1:", highlight=False)
    for report in reports:
        _print_backend(console, report)


@app.command()
def check(
    backend: Backend = None,
    against: Annotated[str, typer.Option(metavar="NAME", help="A second backend; float64 judges both.")] = "reference",
    grid: Annotated[str, typer.Option(metavar="NAME", help="The cases: quick.")] = "quick",
    device: Device = None,
    load: Annotated[list[Path] | None, typer.Option(metavar="FILE.py", exists=True, help="Run first; may register a backend.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the whole report there.")] = None,
) -> None:
    """Hold a backend against float64, and against another one, over a grid of cases. Exit status: 0 agree, 1 disagree, 2 could not run."""
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from dualmla.differential.check import run_check
    from dualmla.differential.decode import DecodeProblem
    from dualmla.differential.report import print_report, to_json
    from dualmla.differential.verdict import Verdict
    from dualmla.differential.worker import WorkerFailed
    from dualmla.testing import QUICK_GRID

    if grid != "quick":
        _fail(f"--grid must be quick, got {grid!r}")
    cases = [DecodeProblem.draw(case) for case in QUICK_GRID]
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    backends = [backend] if against == "reference" else [backend, against]
    console = _console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("checking", total=len(cases))
        wrong = 0

        def on_row(row: tuple[Verdict, ...]) -> None:
            nonlocal wrong
            wrong += any(verdict.status == "fail" for verdict in row)
            progress.update(task, advance=1, description=f"checking, [red]{wrong} wrong[/]" if wrong else "checking")

        try:
            report = run_check(cases, backends, grid=grid, device=place, load=tuple(load or ()), on_row=on_row)
        except WorkerFailed as error:
            _fail(str(error))
    print_report(console, report)
    if json:
        json.write_text(to_json(report))
    raise typer.Exit(DISAGREE if report.failed else AGREE if report.ran else COULD_NOT_RUN)


@app.command()
def demo(
    backend: Backend = None,
    device: Device = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Decoded after each prompt.")] = 32,
) -> None:
    """A small DeepSeek-V3 decodes through dualmla, beside transformers' own attention: same tokens?"""
    import dualmla
    from dualmla.demo import run

    logging.basicConfig(format="%(message)s")
    try:
        agrees = run(backend=backend, device=device, new_tokens=new_tokens)
    except (ImportError, ValueError, dualmla.BackendUnavailable) as error:
        _fail(str(error))
    raise typer.Exit(AGREE if agrees else DISAGREE)


def _console() -> Console:
    """Standard output; wide enough for a table where it is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def _print_backend(console: Console, report: BackendReport) -> None:
    console.print(f"  [bold {'green' if report.usable else 'yellow'}]{report.name}[/] {'usable' if report.usable else 'not usable'}")
    for reason in report.reasons:
        console.print(f"      {reason}", style="dim", markup=False, highlight=False)


def _print_json(value: object) -> None:
    import json

    print(json.dumps(value, indent=1))


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(message, style="bold red", markup=False, highlight=False)
    raise typer.Exit(COULD_NOT_RUN)
