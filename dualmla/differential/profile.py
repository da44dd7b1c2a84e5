"""How many wave-instructions a decode takes on an emulated chip, by kind and kernel, AITER beside ours.

What is measured is one request in one piece, which is what a workgroup does on a full chip: AITER with one split, ours with
`num_kv_splits=1`, cache writes and the choice of a plan for a whole batch left out. A result that is wrong has no profile.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from dualmla.differential.emulated import EmulatedAiter, emulated_name, know
from dualmla.differential.instruments import Recording, recording
from dualmla.differential.machine import versions
from dualmla.selection import backend_for_device
from dualmla.testing import DecodeCase, compare_decode, make_decode_inputs

TILE = 64
"""Keys that increments are told for."""


@dataclass(frozen=True)
class Profile:
    """One decode of one request.

    Attributes:
        arch: the emulated chip.
        backend: aiter or triton.
        num_heads, kv_len, page_size: its size.
        kernels: executed wave-instructions by kind, for each kernel in the order of launches.
    """

    arch: str
    backend: str
    num_heads: int
    kv_len: int
    page_size: int
    kernels: dict[str, dict[str, int]]

    @property
    def kinds(self) -> dict[str, int]:
        """Of all kernels together."""
        total: Counter[str] = Counter()
        for kinds in self.kernels.values():
            total.update(kinds)
        return dict(total)

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Slope:
    """What each further `TILE` keys of a long request cost, from two lengths.

    Attributes:
        backend, num_heads: of both profiles.
        kv_lens: the lengths.
        kinds: wave-instructions by kind.
    """

    backend: str
    num_heads: int
    kv_lens: tuple[int, int]
    kinds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.kinds.values())


def measure(arch: str, backend: str, num_heads: int, kv_len: int, page_size: int) -> Profile:
    """Run the decode on the emulated chip, in this process.

    Raises:
        BackendUnavailable: the backend can't do it, or it can't be emulated.
        RuntimeError: the result is wrong.
    """
    name = emulated_name(backend, arch)
    know(name)
    chosen = backend_for_device(torch.device("cpu"), name)
    inputs = make_decode_inputs(DecodeCase(num_heads=num_heads, seq_lens=(kv_len,), page_size=page_size))
    lse, splits = None, None
    if issubclass(chosen, EmulatedAiter):
        chosen.compute_units = 1  # one workgroup is all there is room for, so its splits are one
    else:
        lse, splits = torch.empty(num_heads, 1), 1
    seen = Recording()
    with recording(seen):
        chosen.mla_decode(
            inputs.q, inputs.kv_cache, inputs.meta, inputs.case.softmax_scale,
            causal=True, out=inputs.out, lse=lse, k_scale=1.0, num_kv_splits=splits,
        )  # fmt: skip
    if failures := compare_decode(inputs.out, lse, inputs).failures:
        raise RuntimeError(f"{name} is wrong in {inputs.case}: {'; '.join(failures)}")
    return Profile(arch, backend, num_heads, kv_len, page_size, {launched.kernel: launched.instructions for launched in seen.launches})


def profiles(arch: str, backends: Sequence[str], heads: Sequence[int], kv_lens: Sequence[int], page_size: int) -> Iterator[Profile]:
    """All combinations, as they are done, in a process of their own: importing AITER leaves traces.

    Raises:
        BackendUnavailable, RuntimeError: as `measure`.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_silence) as pool:
        wanted = [
            pool.submit(measure, arch, backend, num_heads, kv_len, page_size)
            for num_heads in heads
            for kv_len in kv_lens
            for backend in backends
        ]
        try:
            for done in wanted:
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _silence() -> None:
    """What AITER says of its import and at its end; errors travel as results."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def slopes(done: Iterable[Profile]) -> list[Slope]:
    """Of each backend and head count, from its shortest to its longest request; none where there is one length."""
    groups: dict[tuple[str, int], list[Profile]] = {}
    for profile in sorted(done, key=lambda profile: (profile.num_heads, profile.backend, profile.kv_len)):
        groups.setdefault((profile.backend, profile.num_heads), []).append(profile)
    return [
        Slope(
            backend,
            num_heads,
            (group[0].kv_len, group[-1].kv_len),
            {kind: TILE * (count - group[0].kinds[kind]) / (group[-1].kv_len - group[0].kv_len) for kind, count in group[-1].kinds.items()},
        )
        for (backend, num_heads), group in groups.items()
        if len(group) > 1
    ]


def to_json(done: Sequence[Profile]) -> str:
    """All of it, with the versions that it holds for."""
    rows = [{**asdict(profile), "total": profile.total, "per_key": profile.total / profile.kv_len} for profile in done]
    further = [{**asdict(slope), "total": slope.total} for slope in slopes(done)]
    return json.dumps({"versions": versions(), "profiles": rows, "each_further_64_keys": further}, indent=1)


def print_profiles(console: Console, done: Sequence[Profile]) -> None:
    """A table for each length: a row a kernel, a row a backend; one more for what further keys cost."""
    for kv_len in sorted({profile.kv_len for profile in done}):
        rows = sorted((p for p in done if p.kv_len == kv_len), key=lambda p: (p.num_heads, p.backend))
        title = f"one request of {kv_len:,} keys on {rows[0].arch}, page size {rows[0].page_size}: wave-instructions executed"
        table = _table(title, list(rows[0].kinds), "per key", f"per {TILE} keys")
        for profile in rows:
            _add(table, f"{profile.num_heads} heads, {profile.backend}", profile.kinds, profile.kv_len, "bold")
            for kernel, kinds in profile.kernels.items():
                _add(table, f"    {kernel}", kinds, profile.kv_len, "dim")
        console.print(table)
    further = slopes(done)
    if further:
        first, last = further[0].kv_lens
        table = _table(f"each further {TILE} keys, from {first:,} to {last:,}", list(further[0].kinds))
        for slope in further:
            cells = [f"{count:,.1f}" for count in slope.kinds.values()]
            table.add_row(f"{slope.num_heads} heads, {slope.backend}", *cells, f"{slope.total:,.1f}", style="bold")
        console.print(table)


def _table(title: str, kinds: Sequence[str], *more: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    for name in (*kinds, "total", *more):
        table.add_column(name, justify="right")
    return table


def _add(table: Table, name: str, kinds: dict[str, int], kv_len: int, style: str) -> None:
    total = sum(kinds.values())
    table.add_row(
        name,
        *(f"{count:,}" for count in kinds.values()),
        f"{total:,}",
        f"{total / kv_len:,.1f}",
        f"{TILE * total / kv_len:,.0f}",
        style=style,
    )
