"""Is it right? `check`, `replay` and `certify`."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dualmla.cli.options import Backend, Device, Emulate, Load, default_device, emulated_names, seconds_of
from dualmla.cli.terminal import AGREE, COULD_NOT_RUN, DISAGREE, fail, open_console, say_written, write

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from dualmla.differential.check import Plan, Report
    from dualmla.differential.grids import Draw

TELL_EVERY = 10.0
"""Seconds between two lines about a check whose output is no terminal."""


def check(
    backend: Backend = None,
    against: Annotated[str, typer.Option(metavar="NAME", help="A second backend; float64 judges both.")] = "reference",
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="quick (with --emulate: emulated), aiter, flashmla, vllm or peers; can be repeated; the first unless --cases or --time "
            "ask for random ones",
        ),
    ] = None,
    cases: Annotated[int | None, typer.Option(min=1, metavar="N", help="So many random cases.")] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="Of the random cases.")] = 0,
    time: Annotated[
        float | None,
        typer.Option(parser=seconds_of, metavar="SECONDS", help="60 or 60s: begin no case after that; random ones until then."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Processes that share the work; else one a core and 25 cases."),
    ] = None,
    emulate: Emulate = None,
    device: Device = None,
    load: Load = None,
    save_failures: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a repro of each kind of failure there.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the whole report there.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="The same as JUnit XML.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="The same as one page for a browser.")] = None,
) -> None:
    """Hold a backend against float64, and against another one, case by case.

    A wrong result is named by the contract it breaks and shrunk to a small case. Exit status: 0 agree, 1 disagree, 2 could not run
    or was interrupted before anything disagreed.
    """
    import itertools

    from dualmla.differential.check import Plan, default_jobs
    from dualmla.differential.emulated_grid import emulated_grid, for_chip
    from dualmla.differential.files import check_destinations, to_html, to_json, to_junit
    from dualmla.differential.grids import GRIDS
    from dualmla.differential.random_problems import random_problems
    from dualmla.differential.report import print_report

    grids = {**GRIDS, "emulated": emulated_grid}
    for name in grid or ():
        if name not in grids:
            fail(f"--grid must be one of {', '.join(grids)}, got {name!r}")
    others = [] if against == "reference" else [against]
    names = emulated_names(emulate, [backend or "triton", *others], device) if emulate else [backend, *others]
    asked_random = cases is not None or (time is not None and not grid)
    wanted = list(dict.fromkeys(grid or ([] if asked_random else ["emulated" if emulate else "quick"])))
    try:
        check_destinations(files={"--json": json, "--junit": junit, "--html": html}, repros=save_failures)
    except (ImportError, OSError) as error:
        fail(str(error))
    draws = [draw for name in wanted for draw in grids[name]()]
    total: int | None = len(draws)
    titles = [f"grid {name}" for name in wanted]
    if asked_random:
        total = None if cases is None else len(draws) + cases
        titles.append(f"{'' if cases is None else f'{cases} '}random cases of seed {seed}")
    problems = itertools.chain(draws, itertools.islice(random_problems(seed), cases)) if asked_random else draws
    small = {*wanted} <= {"quick", "emulated"}  # a problem of the others grows to gigabytes, and to minutes of a CPU
    usual = default_jobs(total) if small else 1
    plan = Plan(
        backends=names,
        device="cpu" if emulate else device or default_device(),
        title=" and ".join(titles),
        load=tuple(load or ()),
        seconds=time,
        save=save_failures,
        limit=600.0 if emulate or not small else 120.0,  # the emulator and each kernel are compiled when they are first needed
        jobs=min(jobs or usual, total or usual),
    )
    console = open_console()
    report = _run_check(console, for_chip(problems, emulate) if emulate else problems, plan, total)
    print_report(console, report)
    for path, convert in ((json, to_json), (junit, to_junit), (html, to_html)):
        if path is not None:
            write(console, path, convert(report))
    raise typer.Exit(_status(report))


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A repro: its .safetensors or its .json.")],
    backend: Annotated[str | None, typer.Option(metavar="NAME", help="Run it there; else on the backend that failed.")] = None,
    device: Device = None,
    load: Load = None,
) -> None:
    """Run a repro that `check --save-failures` or shadow mode wrote. Exit status as of check."""
    from dualmla.differential import repro
    from dualmla.differential.check import Plan
    from dualmla.differential.emulated import is_emulated
    from dualmla.differential.report import print_report

    try:
        saved = repro.load(file)
    except (ImportError, OSError, ValueError) as error:
        fail(str(error))
    console = open_console()
    console.print(f"{saved.problem.operation} {saved.problem.title}", style="bold", markup=False, highlight=False)
    for finding in saved.findings:
        console.print(f"{saved.backend} then, {finding['contract']}: {finding['sentence']}", style="dim", markup=False, highlight=False)
    name = backend or saved.backend
    place = device or ("cpu" if is_emulated(name) else default_device())
    plan = Plan([name], place, f"replay of {file}", tuple(load or ()), shrink_seconds=0)
    report = _run_check(console, [lambda: saved.problem], plan, 1)
    print_report(console, report)
    raise typer.Exit(_status(report))


def certify(
    heads: Annotated[list[int] | None, typer.Option(min=1, metavar="H", help="Query heads on a rank; can be repeated. [16, 128]")] = None,
    max_query_len: Annotated[int, typer.Option(min=1, max=4, help="Most query tokens of a decode.")] = 1,
    return_lse: Annotated[bool, typer.Option("--return-lse", help="Decodes with the LSE too.")] = False,
    float8_cache: Annotated[bool, typer.Option("--float8-cache", help="Decodes over a float8 cache too, of the GPU's flavour.")] = False,
    limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Of one case, AITER's import and builds included.")] = 600,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Else DUALMLA_CERTIFICATE, else a file in the user's cache.")] = None,
    device: Device = None,
) -> None:
    """Run AITER over an engine's shapes, each in a process of its own, and write what auto may trust it with.

    Exit status: 0 every shape passed, 1 some did not, 2 could not run.
    """
    import torch
    from rich.progress import Progress

    from dualmla.backends.aiter.certificate import default_path
    from dualmla.backends.base import BackendUnavailable
    from dualmla.differential.certify import certify as run
    from dualmla.differential.certify import groups, machine_of
    from dualmla.differential.files import check_destinations
    from dualmla.differential.report import print_certificate
    from dualmla.validation import checked_device, device_float8

    console = open_console()
    place = device or default_device()
    path = out or default_path()
    try:
        check_destinations(files={"--out": out})
        where = checked_device(torch.device(place))
        machine = machine_of(where)
        caches = [torch.bfloat16, device_float8(where)] if float8_cache else [torch.bfloat16]
        wanted = groups(heads or [16, 128], max_query_len=max_query_len, return_lse=return_lse, kv_cache_dtypes=caches)
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("certifying", total=len(wanted))
            found = run(wanted, machine, device=place, limit=limit, on_entry=lambda entry: progress.advance(task))
        found.write(path)
    except (BackendUnavailable, RuntimeError, OSError) as error:
        fail(str(error))
    print_certificate(console, found)
    say_written(console, path)
    raise typer.Exit(AGREE if all(entry.passed for entry in found.entries) else DISAGREE)


def _status(report: Report) -> int:
    """A failure tells, also when the check was interrupted; that nothing failed does not tell then."""
    return DISAGREE if report.failed else AGREE if report.ran and not report.interrupted else COULD_NOT_RUN


def _run_check(console: Console, problems: Iterable[Draw], plan: Plan, total: int | None) -> Report:
    """`run_check` behind a progress bar; to a file or a pipe, a line on standard error every ten seconds."""
    from time import monotonic

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from dualmla.differential.check import Row, fails, run_check
    from dualmla.differential.worker import WorkerFailed

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress, _ended_by(signal.SIGTERM):
        task = progress.add_task("checking", total=total)
        done = wrong = executed = 0
        begin = told_at = monotonic()

        def on_row(row: Row) -> None:
            nonlocal done, wrong, executed, told_at
            done += 1
            wrong += fails(row)
            executed += sum(verdict.execution.instructions for verdict in row if verdict.execution)
            told = f"checking{f', {executed / 1e6:.1f} M instructions' if executed else ''}{f', [red]{wrong} wrong[/]' if wrong else ''}"
            progress.update(task, advance=1, description=told)
            if not console.is_terminal and monotonic() - told_at >= TELL_EVERY:
                told_at = monotonic()
                of = "" if total is None else f" of {total}"
                print(f"checked {done}{of} cases, {wrong} wrong, {told_at - begin:.0f} s", file=sys.stderr, flush=True)

        try:
            return run_check(problems, plan, on_row)
        except (WorkerFailed, ImportError, OSError) as error:
            fail(str(error))


@contextlib.contextmanager
def _ended_by(number: signal.Signals) -> Iterator[None]:
    """Within, that signal is as good as Ctrl-C: `timeout` and batch systems end a command in this way."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)
