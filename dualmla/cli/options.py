"""Options that several subcommands take, and what stands for one that is not given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dualmla.cli.terminal import fail

Backend = Annotated[str | None, typer.Option(metavar="NAME", help="A registered backend; else DUALMLA_BACKEND, else auto.")]


def device_of(text: str) -> str:
    """`cpu`, or a GPU that is there."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    allowed = ["cpu", *["cuda"][:gpus], *(f"cuda:{index}" for index in range(gpus))]
    if text not in allowed:
        there = "" if gpus else "; torch sees no GPU"
        raise typer.BadParameter(f"it must be {' or '.join(allowed)}{there}, got {text!r}")
    return text


Device = Annotated[str | None, typer.Option(parser=device_of, metavar="DEVICE", help="cpu, cuda, cuda:1, ...; else cuda if there is one.")]

Load = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE.py", exists=True, dir_okay=False, help="Run first; may register a backend. Can be repeated."),
]

Emulate = Annotated[
    str | None,
    typer.Option(metavar="ARCH", help="gfx942 or gfx950: execute the machine code of aiter or triton (the default) on an emulated one."),
]


def seconds_of(text: str) -> float:
    """`60` or `60s`."""
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise typer.BadParameter(f"it must be a number of seconds, such as 60 or 60s, got {text!r}")
    return seconds


def emulated_names(arch: str, backends: list[str], device: str | None) -> list[str | None]:
    """What the backends are called on an emulated chip."""
    from dualmla.differential.emulated import emulated_name

    if device not in (None, "cpu"):
        fail(f"--emulate works on tensors of the CPU: --device must be cpu, got {device!r}")
    try:
        return [emulated_name(name, arch) for name in backends]
    except ValueError as error:
        fail(str(error))


def default_device() -> str:
    """A GPU where there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
