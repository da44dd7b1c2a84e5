"""What does it cost? `bench`, in time on this machine, and `profile`, in instructions on an emulated chip."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dualmla.cli.options import Device, Load, default_device, emulated_names
from dualmla.cli.terminal import AGREE, COULD_NOT_RUN, DISAGREE, fail, open_console, say_written

if TYPE_CHECKING:
    from rich.console import Console

    from dualmla.bench.results import Report
    from dualmla.bench.shapes import Asked


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
    emulated_names(emulate, names, None)
    console = open_console()
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
        fail(str(error))
    except RuntimeError as error:
        fail(str(error), DISAGREE)
    for path in (json, plot):
        if path is not None:
            say_written(console, path)


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

    console = open_console()
    try:
        check_destinations(files={"--json": json, "--plot": plot})
        if plot is not None:
            check_plot(plot)
        if replot is not None:
            report = from_json(replot.read_text())
        else:
            asked = Asked(op, batch or (), kv or (), query_len or (), heads or (), page_size or (), dtype, kv_dtype)
            report = _run_bench(console, asked, grid, backend, peers, load, rounds, device or default_device())
        print_bench(console, report)
        if json is not None:
            json.write_text(to_json(report))
            say_written(console, json)
        if plot is not None:
            draw_plot(report, plot)
            say_written(console, plot)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        fail(str(error))
    raise typer.Exit(DISAGREE if report.wrong else AGREE if report.ran and not report.ended else COULD_NOT_RUN)


def _run_bench(
    console: Console,
    asked: Asked,
    grid: str | None,
    backends: list[str] | None,
    peers: Path | None,
    load: list[Path] | None,
    rounds: int,
    device: str,
) -> Report:
    """What was asked, made sure of before anything is run, then `run_bench` behind a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dualmla.bench.choice import chosen, load_files
    from dualmla.bench.clock import Clock
    from dualmla.bench.peers import load_peers
    from dualmla.bench.run import run_bench
    from dualmla.bench.shapes import asked_cases
    from dualmla.validation import checked_device

    place = checked_device(device)
    cases = asked_cases(asked, grid, place)
    load_files(load or ())
    subjects, absent = chosen(backends, load_peers(peers) if peers else [], cases[0].case, place)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("timing", total=len(cases))
        return run_bench(cases, subjects, Clock(place, rounds=rounds), absent=absent, on_case=lambda rows: progress.advance(task))
