"""What subcommands say, and the status that they leave with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

AGREE, DISAGREE, COULD_NOT_RUN = 0, 1, 2
"""Exit statuses."""


def open_console() -> Console:
    """Standard output; wide enough for a table where it is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=150)


def write(console: Console, path: Path, text: str) -> None:
    """A file of the user's, and that it is there; the place was tried before, the disk may have filled since."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{path} can't be written: {error.strerror}")
    say_written(console, path)


def say_written(console: Console, path: Path) -> None:
    """A file of the user's is there."""
    console.print(f"wrote {path}", style="dim", highlight=False)


def print_json(value: object) -> None:
    """For machines, on standard output."""
    print(json.dumps(value, indent=1))


def fail(message: str, status: int = COULD_NOT_RUN) -> NoReturn:
    """Say why on standard error, and leave."""
    Console(stderr=True).print(message, style="bold red", markup=False, highlight=False)
    raise typer.Exit(status)
