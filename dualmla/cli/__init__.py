"""The command `dualmla`. Everything heavy is imported by the subcommand that needs it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import typer

from dualmla.cli.checks import certify, check, replay
from dualmla.cli.figures import bench, profile
from dualmla.cli.options import Backend, Device
from dualmla.cli.terminal import AGREE, DISAGREE, fail, open_console, print_json

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from dualmla.backends.base import BackendReport

app = typer.Typer(
    help="One MLA backend interface, two implementations: see which runs here, and whether it is right.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


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
        fail(str(error))
    packages, place, variables = versions(), device_name(device), environment()
    usable = any(report.name == "aiter" and report.usable for report in reports)
    certificate = _certificate(device) if usable else None
    if json:
        told = {"versions": packages, "device": place, "environment": variables, "config": str(config), "certificate": certificate}
        print_json({**told, "backends": [vars(report) for report in reports]})
        return
    console = open_console()
    console.print("  ".join(f"[bold]{name}[/] {version or '[dim]not installed[/]'}" for name, version in packages.items()), highlight=False)
    console.print(f"[bold]device[/] {place}", highlight=False)
    for name, value in variables.items():
        console.print(f"[bold]{name}[/]={value}", highlight=False)
    console.print("\nfor DeepSeek's layer with 16 heads in bfloat16 and page size 1:", highlight=False)
    for report in reports:
        _print_backend(console, report)
        if report.name == "aiter" and certificate is not None:
            console.print(f"      {certificate}", style="dim", markup=False, highlight=False)


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
        fail(str(error))
    raise typer.Exit(AGREE if agrees else DISAGREE)


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


for command in (info, check, replay, certify, profile, bench, demo):
    app.command()(command)
