"""A profile as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualmla.differential.profile import TILE, Profile, slopes

COLOURS = {
    "matrix": "#4c72b0",
    "vector": "#dd8452",
    "LDS": "#55a868",
    "global load": "#8172b3",
    "global store": "#c4b7dc",
    "scalar": "#937860",
    "branch and wait": "#b8b8b8",
}


def save_plot(path: Path, done: Sequence[Profile]) -> None:
    """A bar a backend and head count, by kind: one request of the shortest length, and what further keys cost."""
    from matplotlib.figure import Figure  # no pyplot: it would choose a window system

    shortest = min(profile.kv_len for profile in done)
    bars = sorted((p for p in done if p.kv_len == shortest), key=lambda p: (-p.num_heads, p.backend))
    panels: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = [
        (f"one request of {shortest:,} keys", [(f"{p.num_heads} heads, {p.backend}", dict(p.kinds)) for p in reversed(bars)])
    ]
    if further := slopes(done):
        ordered = sorted(further, key=lambda s: (-s.num_heads, s.backend), reverse=True)
        named = [(f"{s.num_heads} heads, {s.backend}", dict(s.kinds)) for s in ordered]
        panels.append((f"each further {TILE} keys, from {further[0].kv_lens[0]:,} to {further[0].kv_lens[1]:,}", named))
    figure = Figure(figsize=(6.2 * len(panels), 1.6 + 0.55 * len(bars)), layout="constrained")
    figure.suptitle(f"Wave-instructions executed by a decode on {done[0].arch}, page size {done[0].page_size}")
    for place, (title, rows) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        names = [name for name, _ in rows]
        left = [0.0] * len(rows)
        for kind, colour in COLOURS.items():
            counts = [kinds[kind] for _, kinds in rows]
            axes.barh(names, counts, left=left, color=colour, label=kind, edgecolor="white", linewidth=0.4)
            left = [start + count for start, count in zip(left, counts, strict=True)]
        for row, total in enumerate(left):
            axes.annotate(f" {total:,.0f}", (total, row), va="center", fontsize=9)
        axes.set_title(title, fontsize=10)
        axes.set_xlim(0, 1.16 * max(left))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.tick_params(labelsize=9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.savefig(path, dpi=160)
