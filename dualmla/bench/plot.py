"""A run as a picture: the roofline of this machine with every case on it, and beside it how near each came to its ceiling."""

from __future__ import annotations

import math
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualmla.bench.results import Report, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MISSING = "matplotlib is not installed, which --plot needs; install `dualmla[plot]`"
SUFFIXES = (".png", ".svg", ".pdf")

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which a colour-blind reader can tell apart too."""

MARKERS = {"decode": "o", "prefill": "s"}
INK, FAINT = "#333333", "#bbbbbb"
LABEL_HEIGHT, COLUMN, NAME_WIDTH = 0.021, 0.03, 0.09
"""Of a number in the roofline, how near points are one column of numbers, and of a group's name, as shares of the axes."""

LEAST_LINES = 14
"""Of the shares: fewer cases are not spread over all of the height."""

Case = tuple[str, str]
"""Group and title."""


def check_plot(path: Path) -> None:
    """Before anything is run: can the picture be drawn?

    Raises:
        ImportError: matplotlib is missing.
        ValueError: the file's name has no known ending.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(MISSING) from error
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot must end in {', '.join(SUFFIXES)}, got {str(path)!r}")


def draw_plot(report: Report, path: Path) -> None:
    """Write the picture.

    Raises:
        ImportError, ValueError: as `check_plot`; ValueError also where nothing was timed.
        OSError: the file can't be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.status == "timed"]
    if not rows:
        raise ValueError("--plot has nothing to draw: nothing was timed")
    numbers = {case: number for number, case in enumerate(dict.fromkeys(map(_case, rows)), start=1)}
    groups = len({row.group for row in rows})
    figure = Figure(figsize=(15, max(6.0, 1.8 + 0.2 * (len(numbers) + 2 * groups))), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    backends = list(dict.fromkeys(row.backend for row in rows))
    colour_of = {backend: COLOURS[index % len(COLOURS)] for index, backend in enumerate(backends)}
    _draw_shares(right, rows, numbers, colour_of)
    _draw_roofline(left, report, rows, numbers, colour_of)
    versions = ", ".join(
        f"{name} {version}" for name, version in report.versions.items() if version and name in ("torch", "triton", "aiter")
    )
    figure.suptitle(f"{report.device}   {report.date[:10]}   {versions}", x=0.01, ha="left", fontsize=11, color=INK)
    figure.savefig(path, dpi=150)


def _case(row: Row) -> Case:
    return row.group, row.title


def _draw_roofline(axes: Axes, report: Report, rows: list[Row], numbers: dict[Case, int], colour_of: dict[str, str]) -> None:
    """TFLOP/s over flop/byte, both logarithmic, under the measured ceilings."""
    bandwidth, rates = report.ceilings.bandwidth, report.ceilings.rates
    ridge = max(rates.values()) / bandwidth
    xs = [row.intensity for row in rows] + [ridge]
    low, high = min(min(xs) / 3, ridge / 12), max(max(xs) * 2.5, ridge * 6)
    top = max(*rates.values(), *(row.rate for row in rows)) / 1e12 * 1.6
    bottom = min(row.rate for row in rows) / 1e12 / 3
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, top), xlabel="flop / byte", ylabel="TFLOP/s")
    for dtype, rate in rates.items():
        knee = rate / bandwidth
        axes.plot([low, knee, high], [low * bandwidth / 1e12, rate / 1e12, rate / 1e12], color=INK, linewidth=1.2, zorder=1)
        axes.annotate(
            f"{dtype} product {rate / 1e12:.4g} TFLOP/s",
            (high, rate / 1e12),
            (-4, 4),
            textcoords="offset points",
            ha="right",
            color=INK,
            fontsize=8,
        )
    start = max(low, bottom * 1e12 / bandwidth)
    axes.annotate(
        f"copy {bandwidth / 1e12:.3g} TB/s", (start * 1.15, start * 1.15 * bandwidth / 1e12), (0, 6), textcoords="offset points",
        rotation=_slope(axes), rotation_mode="anchor", transform_rotates_text=False, color=INK, fontsize=8,
    )  # fmt: skip
    for row in rows:
        axes.plot(row.intensity, row.rate / 1e12, MARKERS[row.operation], color=colour_of[row.backend], markersize=5, alpha=0.85, zorder=3)
    _label(axes, rows, numbers)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.grid(which="major", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _slope(axes: Axes) -> float:
    """Degrees of a line of slope 1, as it is drawn."""
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # the layout decides the size of the axes
    (x0, y0), (x1, y1) = axes.transData.transform([(1.0, 1.0), (10.0, 10.0)])
    return math.degrees(math.atan2(y1 - y0, x1 - x0))


def _label(axes: Axes, rows: list[Row], numbers: dict[Case, int]) -> None:
    """Each case's number beside its fastest backend, those of neighbours below one another; a group's name, where it stands alone."""
    best: dict[Case, Row] = {}
    for row in rows:
        if _case(row) not in best or row.rate > best[_case(row)].rate:
            best[_case(row)] = row
    columns: list[list[tuple[float, float, Row]]] = []
    to_axes = axes.transData + axes.transAxes.inverted()
    for row in sorted(best.values(), key=lambda row: row.intensity):
        x, y = to_axes.transform((row.intensity, row.rate / 1e12))
        if columns and x - columns[-1][-1][0] < COLUMN:
            columns[-1].append((x, y, row))
        else:
            columns.append([(x, y, row)])
    for column in columns:
        column.sort(key=lambda point: point[1])
        edge = max(x for x, _, _ in column)
        for (_, _, row), height in zip(column, _spread([y for _, y, _ in column]), strict=True):
            axes.annotate(
                str(numbers[_case(row)]), (row.intensity, row.rate / 1e12), (edge + 0.014, height), textcoords="axes fraction", va="center",
                fontsize=8, color=INK, arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
            )  # fmt: skip
    for group in dict.fromkeys(row.group for row in rows):
        lowest = min((row for row in rows if row.group == group), key=lambda row: row.rate)
        x = to_axes.transform((lowest.intensity, 1.0))[0]
        reach = [row for row in rows if abs(to_axes.transform((row.intensity, 1.0))[0] - x) < NAME_WIDTH]
        if all(row.group == group for row in reach):
            name, at = group.replace(", ", "\n"), (lowest.intensity, lowest.rate / 1e12)
            axes.annotate(name, at, (0, -10), textcoords="offset points", ha="center", va="top", fontsize=8, color=INK)


def _spread(heights: list[float]) -> list[float]:
    """Rising heights moved apart to `LABEL_HEIGHT`, as little as may be: those that touch share a centre."""
    runs: list[tuple[float, int]] = []  # (mean of what was wanted, how many)
    for height in heights:
        centre, count = height, 1
        while runs and centre - runs[-1][0] < LABEL_HEIGHT * (count + runs[-1][1]) / 2:
            other, others = runs.pop()
            centre, count = (centre * count + other * others) / (count + others), count + others
        runs.append((centre, count))
    return [centre + (index - (count - 1) / 2) * LABEL_HEIGHT for centre, count in runs for index in range(count)]


def _draw_shares(axes: Axes, rows: list[Row], numbers: dict[Case, int], colour_of: dict[str, str]) -> None:
    """A line a case, under its number: each backend's share of the ceiling."""
    ticks: list[tuple[float, str]] = []
    y = 0.0
    for group, of_group in groupby(rows, key=lambda row: row.group):
        axes.text(0, y, group, fontsize=8, fontweight="bold", color=INK, va="center")
        y += 1
        for title, of_title in groupby(of_group, key=lambda row: row.title):
            some = list(of_title)
            shares = [100 * row.of_roof for row in some]
            axes.plot([min(shares), max(shares)], [y, y], color=FAINT, linewidth=1, zorder=1)
            for row, share in zip(some, shares, strict=True):
                axes.plot(share, y, MARKERS[row.operation], color=colour_of[row.backend], markersize=6, alpha=0.9, zorder=3)
            ticks.append((y, f"{title}   ({numbers[group, title]})"))
            y += 1
        y += 0.4
    most = max(100.0, *(100 * row.of_roof for row in rows))
    axes.set(ylim=(max(y, LEAST_LINES), -1), xlim=(0, most * 1.03), xlabel="% of the measured ceiling that is met first")
    axes.set_yticks([at for at, _ in ticks], [title for _, title in ticks], fontsize=8)
    axes.axvline(100, color=INK, linewidth=1)
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles: list[Any] = [axes.plot([], [], "o", color=colour, markersize=6, label=backend)[0] for backend, colour in colour_of.items()]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 1.06), ncols=4, frameon=False, fontsize=9)
