"""Which backends and peers a run times."""

from __future__ import annotations

import runpy
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from dualmla.backends.base import BackendUnavailable
from dualmla.bench.peers import Peer
from dualmla.bench.subjects import Registered, Subject, told
from dualmla.config import MLAConfig
from dualmla.selection import explain
from dualmla.testing import DecodeCase, PrefillCase


def chosen(
    names: Sequence[str] | None, peers: Sequence[Peer], case: DecodeCase | PrefillCase, device: torch.device
) -> tuple[list[Subject], list[str]]:
    """What is timed, and a sentence of each backend that nobody named and that can't be used here.

    Arguments:
        names: of registered backends and of peers; None: all that are usable, without the reference on a GPU: it is truth, not speed.
        case: what backends are asked about.

    Raises:
        ValueError: a name is unknown, or a peer has that of a backend.
        BackendUnavailable: a backend that was named can't be used.
    """
    cache_dtype = case.cache_dtype if isinstance(case, DecodeCase) else None
    config = MLAConfig(num_heads=case.num_heads, softmax_scale=case.softmax_scale, dtype=case.dtype, kv_cache_dtype=cache_dtype)
    reports = {report.name: report for report in explain(config, device)}
    others = {peer.name: peer for peer in peers}
    if clash := sorted(set(others) & set(reports)):
        raise ValueError(f"--peers has {clash[0]}.py, and a backend is registered by that name")
    if unknown := [name for name in names or () if name not in reports and name not in others]:
        raise ValueError(f"--backend must be one of {', '.join([*reports, *others])}, got {unknown[0]!r}")
    for name in names or ():
        if name in reports and not reports[name].usable:
            raise BackendUnavailable(name, reports[name].reasons)
    wanted = list(dict.fromkeys(names or [*reports, *others]))
    if not names and device.type != "cpu":
        wanted.remove("reference")
    subjects: list[Subject] = [
        others[name] if name in others else Registered(name, device) for name in wanted if name in others or reports[name].usable
    ]
    absent = [f"{name} not usable: {'; '.join(reports[name].reasons)}" for name in wanted if name in reports and not reports[name].usable]
    return subjects, absent


def load_files(files: Iterable[Path]) -> None:
    """Run files that register backends.

    Raises:
        ValueError: one can't be run.
    """
    for file in files:
        try:
            runpy.run_path(str(file))
        except Exception as error:
            raise ValueError(f"--load {file} can't be run: {told(error)}") from error
