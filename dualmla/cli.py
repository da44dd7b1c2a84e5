"""The command `dualmla`. Everything heavy is imported by the subcommand that needs it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from dualmla.backends.base import BackendReport
    from dualmla.bench.results import Report as BenchReport
    from dualmla.bench.shapes import Asked
    from dualmla.differential.check import Plan, Report
    from dualmla.differential.grids import Draw

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
    usable = any(report.name == "aiter" and report.usable for report in reports)
    certificate = _certificate(device) if usable else None
    if json:
        told = {"versions": packages, "device": place, "environment": variables, "config": str(config), "certificate": certificate}
        _print_json({**told, "backends": [vars(report) for report in reports]})
        return
    console = _console()
    console.print("  ".join(f"[bold]{name}[/] {version or '[dim]not installed[/]'}" for name, version in packages.items()), highlight=False)
    console.print(f"[bold]device[/] {place}", highlight=False)
    for name, value in variables.items():
        console.print(f"[bold]{name}[/]={value}", highlight=False)
    console.print("\nfor DeepSeek's layer with 16 heads in bfloat16 and page size 1:", highlight=False)
    for report in reports:
        _print_backend(console, report)
        if report.name == "aiter" and certificate is not None:
            console.print(f"      {certificate}", style="dim", markup=False, highlight=False)


Load = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE.py", exists=True, dir_okay=False, help="Run first; may register a backend. Can be repeated."),
]


Emulate = Annotated[
    str | None,
    typer.Option(metavar="ARCH", help="gfx942 or gfx950: execute the machine code of aiter or triton (the default) on an emulated one."),
]


def _seconds(text: str) -> float:
    """`60` or `60s`."""
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise typer.BadParameter(f"it must be a number of seconds, such as 60 or 60s, got {text!r}")
    return seconds


@app.command()
def check(
    backend: Backend = None,
    against: Annotated[str, typer.Option(metavar="NAME", help="A second backend; float64 judges both.")] = "reference",
    grid: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="quick (with --emulate: emulated), aiter, flashmla, vllm or peers; the first unless --cases or --time ask for random ones",
        ),
    ] = None,
    cases: Annotated[int | None, typer.Option(min=1, metavar="N", help="So many random cases.")] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="Of the random cases.")] = 0,
    time: Annotated[
        float | None,
        typer.Option(parser=_seconds, metavar="SECONDS", help="60 or 60s: begin no case after that; random ones until then."),
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

    A wrong result is named by the contract it breaks and shrunk to a small case. Exit status: 0 agree, 1 disagree, 2 could not run.
    """
    import itertools

    from dualmla.differential.check import Plan, default_jobs
    from dualmla.differential.emulated_grid import emulated_grid, for_chip
    from dualmla.differential.files import check_destinations, to_html, to_json, to_junit
    from dualmla.differential.grids import GRIDS, random_problems
    from dualmla.differential.report import print_report

    grids = {**GRIDS, "emulated": emulated_grid}
    if grid is not None and grid not in grids:
        _fail(f"--grid must be one of {', '.join(grids)}, got {grid!r}")
    others = [] if against == "reference" else [against]
    names = _emulated(emulate, [backend or "triton", *others], device) if emulate else [backend, *others]
    usual = "emulated" if emulate else "quick"
    asked_random = cases is not None or (time is not None and grid is None)
    try:
        check_destinations(files={"--json": json, "--junit": junit, "--html": html}, repros=save_failures)
    except (ImportError, OSError) as error:
        _fail(str(error))
    draws = grids[grid or usual]() if grid or not asked_random else []
    title = f"grid {grid or usual}" if draws else ""
    total: int | None = len(draws)
    if asked_random:
        total = None if cases is None else len(draws) + cases
        title = " and ".join(filter(None, (title, f"{'' if cases is None else f'{cases} '}random cases of seed {seed}")))
    problems = itertools.chain(draws, itertools.islice(random_problems(seed), cases)) if asked_random else draws
    plan = Plan(
        backends=names,
        device="cpu" if emulate else device or _default_device(),
        title=title,
        load=tuple(load or ()),
        seconds=time,
        save=save_failures,
        limit=600.0 if emulate else 120.0,  # the emulator and each kernel are compiled when they are first needed
        jobs=jobs or (default_jobs(total) if grid in (None, "quick", "emulated") else 1),  # a problem of the others grows to gigabytes
    )
    console = _console()
    report = _run_check(console, for_chip(problems, emulate) if emulate else problems, plan, total)
    print_report(console, report)
    for path, convert in ((json, to_json), (junit, to_junit), (html, to_html)):
        if path is not None:
            path.write_text(convert(report))
            console.print(f"wrote {path}", style="dim", highlight=False)
    raise typer.Exit(DISAGREE if report.failed else AGREE if report.ran else COULD_NOT_RUN)


@app.command()
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
        _fail(str(error))
    console = _console()
    console.print(f"{saved.problem.operation} {saved.problem.title}", style="bold", markup=False, highlight=False)
    for finding in saved.findings:
        console.print(f"{saved.backend} then, {finding['contract']}: {finding['sentence']}", style="dim", markup=False, highlight=False)
    name = backend or saved.backend
    place = device or ("cpu" if is_emulated(name) else _default_device())
    plan = Plan([name], place, f"replay of {file}", tuple(load or ()), shrink_seconds=0)
    report = _run_check(console, [lambda: saved.problem], plan, 1)
    print_report(console, report)
    raise typer.Exit(DISAGREE if report.failed else AGREE if report.ran else COULD_NOT_RUN)


@app.command()
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

    console = _console()
    place = device or _default_device()
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
        _fail(str(error))
    print_certificate(console, found)
    console.print(f"wrote {path}", style="dim", highlight=False)
    raise typer.Exit(AGREE if all(entry.passed for entry in found.entries) else DISAGREE)


@app.command()
def profile(
    emulate: Annotated[str, typer.Option(metavar="ARCH", help="The chip: gfx942 or gfx950.")],
    backend: Annotated[list[str] | None, typer.Option(metavar="NAME", help="aiter or triton; both, side by side, when not given.")] = None,
    heads: Annotated[list[int] | None, typer.Option(min=1, metavar="H", help="Query heads; can be repeated. [16]")] = None,
    kv: Annotated[list[int] | None, typer.Option(min=1, metavar="N", help="Keys of the request; can be repeated. [1024, 4096]")] = None,
    page_size: Annotated[int, typer.Option(min=1, metavar="N", help="Of the cache; AITER is told of pages of one token.")] = 1,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all counts there.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="A picture of them: .png, .svg or .pdf.")] = None,
) -> None:
    """Executed wave-instructions of a decode on an emulated chip, by kind and kernel, AITER beside ours.

    Two lengths tell what each further key costs. Exit status: 0 done, 1 a result was wrong, 2 could not run.
    """
    from rich.progress import Progress

    from dualmla.backends.base import BackendUnavailable
    from dualmla.bench.plot import check_plot
    from dualmla.differential.files import check_destinations
    from dualmla.differential.profile import print_profiles, profiles, to_json
    from dualmla.differential.profile_plot import save_plot

    names, counts, lengths = backend or ["aiter", "triton"], heads or [16], kv or [1024, 4096]
    _emulated(emulate, names, None)
    console = _console()
    done = []
    try:
        check_destinations(files={"--json": json, "--plot": plot})
        if plot is not None:
            check_plot(plot)
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("executing", total=len(names) * len(counts) * len(lengths))
            for measured in profiles(emulate, names, counts, lengths, page_size):
                done.append(measured)
                progress.update(task, advance=1)
        print_profiles(console, done)
        if json is not None:
            json.write_text(to_json(done))
        if plot is not None:
            save_plot(plot, done)
    except (BackendUnavailable, ImportError, OSError, ValueError) as error:
        _fail(str(error))
    except RuntimeError as error:
        _fail(str(error), DISAGREE)
    for path in (json, plot):
        if path is not None:
            console.print(f"wrote {path}", style="dim", highlight=False)


@app.command()
def bench(
    op: Annotated[str, typer.Option(metavar="decode|prefill", help="What is timed; with --grid, the part of it.")] = "",
    batch: Annotated[list[int] | None, typer.Option(metavar="N", help="Requests. [1, 16, 64, 128; a prefill 1, 8]")] = None,
    kv: Annotated[list[str] | None, typer.Option(metavar="N|A..B", help="Keys of a request, or as many as A to B of them. [4096]")] = None,
    heads: Annotated[list[int] | None, typer.Option(metavar="H", help="Query heads; with --grid, the part of it. [16]")] = None,
    page_size: Annotated[list[int] | None, typer.Option(metavar="P", help="Tokens a page. [64]")] = None,
    query_len: Annotated[
        list[str] | None, typer.Option(metavar="N|A..B", help="New tokens of a request. [1; a prefill as --kv, else 2048]")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="bf16|fp16|fp32", help="Of everything but the cache. [bf16]")] = "",
    kv_dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Of the cache: fp8, e4m3fn, e4m3fnuz; else as --dtype.")] = "",
    grid: Annotated[str | None, typer.Option(metavar="NAME", help="Instead of shapes of yours: peers, fp8, heads or pages.")] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A backend or a peer; else all that are usable. The reference only by name on a GPU."),
    ] = None,
    peers: Annotated[
        Path | None, typer.Option(metavar="DIR", exists=True, file_okay=False, help="Kernels of others: files with make or make_prefill.")
    ] = None,
    load: Load = None,
    rounds: Annotated[int, typer.Option(min=2, metavar="N", help="Repetitions of each call, taking turns.")] = 100,
    device: Device = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the run there.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the roofline there: .png, .svg or .pdf.")] = None,
    replot: Annotated[
        Path | None, typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Run nothing: show what --json wrote before.")
    ] = None,
) -> None:
    """How fast each backend is on your shapes, beside one another and beside what this machine can do.

    Each result is held against float64 first, and a wrong one is not timed. Options in lists are repeated, and all combinations are run.
    Exit status: 0 all were right, 1 one was not, 2 could not run.
    """
    from dualmla.bench.plot import check_plot, draw_plot
    from dualmla.bench.report import print_bench
    from dualmla.bench.results import from_json, to_json
    from dualmla.bench.shapes import Asked
    from dualmla.differential.files import check_destinations

    console = _console()
    try:
        check_destinations(files={"--json": json, "--plot": plot})
        if plot is not None:
            check_plot(plot)
        if replot is not None:
            report = from_json(replot.read_text())
        else:
            asked = Asked(op, batch or (), kv or (), query_len or (), heads or (), page_size or (), dtype, kv_dtype)
            report = _run_bench(console, asked, grid, backend, peers, load, rounds, device or _default_device())
        print_bench(console, report)
        if json is not None:
            json.write_text(to_json(report))
            console.print(f"wrote {json}", style="dim", highlight=False)
        if plot is not None:
            draw_plot(report, plot)
            console.print(f"wrote {plot}", style="dim", highlight=False)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        _fail(str(error))
    raise typer.Exit(DISAGREE if report.wrong else AGREE if report.ran and not report.ended else COULD_NOT_RUN)


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


def _run_bench(
    console: Console,
    asked: Asked,
    grid: str | None,
    backends: list[str] | None,
    peers: Path | None,
    load: list[Path] | None,
    rounds: int,
    device: str,
) -> BenchReport:
    """What was asked, made sure of before anything is run, then `run_bench` behind a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dualmla.bench.choice import chosen, load_files
    from dualmla.bench.clock import Clock
    from dualmla.bench.peers import load_peers
    from dualmla.bench.run import run_bench
    from dualmla.bench.shapes import asked_cases, bench_device

    place = bench_device(device)
    cases = asked_cases(asked, grid, place)
    load_files(load or ())
    subjects, absent = chosen(backends, load_peers(peers) if peers else [], cases[0].case, place)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("timing", total=len(cases))
        return run_bench(cases, subjects, Clock(place, rounds=rounds), absent=absent, on_case=lambda rows: progress.advance(task))


def _run_check(console: Console, problems: Iterable[Draw], plan: Plan, total: int | None) -> Report:
    """`run_check` behind a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from dualmla.differential.check import Row, fails, run_check
    from dualmla.differential.worker import WorkerFailed

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("checking", total=total)
        wrong = executed = 0

        def on_row(row: Row) -> None:
            nonlocal wrong, executed
            wrong += fails(row)
            executed += sum(verdict.execution.instructions for verdict in row if verdict.execution)
            told = f"checking{f', {executed / 1e6:.1f} M instructions' if executed else ''}{f', [red]{wrong} wrong[/]' if wrong else ''}"
            progress.update(task, advance=1, description=told)

        try:
            return run_check(problems, plan, on_row)
        except (WorkerFailed, ImportError, OSError) as error:
            _fail(str(error))


def _emulated(arch: str, backends: list[str], device: str | None) -> list[str | None]:
    """What the backends are called on an emulated chip."""
    from dualmla.differential.emulated import emulated_name

    if device not in (None, "cpu"):
        _fail(f"--emulate works on tensors of the CPU: --device must be cpu, got {device!r}")
    try:
        return [emulated_name(name, arch) for name in backends]
    except ValueError as error:
        _fail(str(error))


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _console() -> Console:
    """Standard output; wide enough for a table where it is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=150)


def _print_backend(console: Console, report: BackendReport) -> None:
    console.print(f"  [bold {'green' if report.usable else 'yellow'}]{report.name}[/] {'usable' if report.usable else 'not usable'}")
    for reason in report.reasons:
        console.print(f"      {reason}", style="dim", markup=False, highlight=False)


def _certificate(device: torch.device) -> str:
    """Which certificate auto goes by on a device that AITER runs on, or why there is none."""
    from dualmla.backends.aiter.certificate import in_force
    from dualmla.differential.certify import machine_of

    found = in_force(machine_of(device))
    if isinstance(found, str):
        return found
    return f"certificate of {found.date}: {sum(entry.passed for entry in found.entries)} of {len(found.entries)} shapes passed"


def _print_json(value: object) -> None:
    import json

    print(json.dumps(value, indent=1))


def _fail(message: str, status: int = COULD_NOT_RUN) -> NoReturn:
    Console(stderr=True).print(message, style="bold red", markup=False, highlight=False)
    raise typer.Exit(status)
