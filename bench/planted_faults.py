"""How `dualmla check --cases 400` fares with each planted fault: `python bench/planted_faults.py --write docs/differential.md`.

Needs no GPU; some ten minutes of two cores. Ends with 1 where a fault is not found, is put down to another contract, is not shrunk to
two requests and two heads though it allows it, or takes longer than it may.

    --fault NAME       this one alone; may be repeated
    --write FILE       the table as Markdown, between the two marks in that file
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

FAULTS_FILE = Path(__file__).parents[1] / "tests" / "differential" / "faults.py"
CASES, MOST_SECONDS = 400, 180.0
BEGIN, END = "<!-- planted faults -->", "<!-- end of planted faults -->"


@dataclass(frozen=True)
class Fault:
    """What is planted: its name in faults.py, in words, the contracts that it may be found to break, and whether it can be shrunk.

    A fault that shows in one call of many, or through what calls before have left, is not there when a call is tried alone.
    """

    name: str
    words: str
    contracts: tuple[str, ...]
    shrinks: bool = True


PLANTED = (
    Fault("scale", "scale dropped", ("1 Scale",)),
    Fault("base2", "base-2 LSE", ("2 LSE",)),
    Fault("transposed", "LSE transposed", ("2 LSE",)),
    Fault("mask", "mask off by one", ("5 Causal is bottom-right",)),
    Fault("over-read", "last page over-read", ("4 Unused memory is never read into a result",)),
    Fault("int32", "page offset as int32", ("6 Offsets are int64",)),
    Fault("stale-split", "stale split", ("8 Determinism", "2 LSE", "Error budget"), shrinks=False),
    Fault("empty-nan", "NaN for an empty row", ("2 LSE",)),
    Fault("fp8-p", "P in fp8", ("Error budget",)),
    Fault("heads", "one head swapped", ("Error budget",)),
    Fault("flipped", "one element flipped in one call of 200", ("8 Determinism",), shrinks=False),
)


@dataclass(frozen=True)
class Row:
    """What a check said of a fault. `found` has (contract, cases, operation and title of what it shrank to) of each kind."""

    fault: Fault
    found: list[tuple[str, int, str]]
    wrong: list[str]
    seconds: float
    cpu_seconds: float


def run(fault: Fault) -> Row:
    """The command, as a user types it, and what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        check = [sys.executable, "-m", "dualmla", "check", "--device", "cpu"]
        command = [*check, "--load", str(FAULTS_FILE), "--backend", f"fault-{fault.name}"]
        before, begin = _cpu_seconds(), time.perf_counter()
        done = subprocess.run(
            [*command, "--cases", str(CASES), "--save-failures", folder, "--json", str(report)], capture_output=True, text=True, check=False
        )
        seconds, cpu_seconds = time.perf_counter() - begin, _cpu_seconds() - before
        if done.returncode != 1:
            return Row(fault, [], [f"exit status {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}"], seconds, cpu_seconds)
        told = json.loads(report.read_text())
    kinds = [verdict["findings"][0]["kind"] for row in told["rows"] for verdict in row if verdict["status"] == "fail"]
    found = []
    wrong = [] if seconds <= MOST_SECONDS else [f"took {seconds:.0f} s, it may take {MOST_SECONDS:.0f} s"]
    for failure in told["failures"]:
        first, case = failure["found"]["findings"][0], failure["case"]
        contract, shrunk = first["contract"], failure["shrunk"] is not None
        problem = re.sub(r"-seed=\d+", "", f"{failure['operation']} {failure['problem']}")
        found.append((contract, kinds.count(first["kind"]), problem if shrunk else "it did not come back"))
        if contract not in fault.contracts:
            wrong.append(f"found to break {contract!r}")
        if fault.shrinks and (case["num_heads"] > 2 or len(case.get("seq_lens", case.get("query_lens", ()))) > 2):
            wrong.append(f"shrunk to {failure['problem']}")
    return Row(fault, found, wrong, seconds, cpu_seconds)


def _cpu_seconds() -> float:
    """Of all processes that have ended and were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def table(rows: list[Row]) -> str:
    """As Markdown."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = f"{platform.machine()}, {cores} cores, load {os.getloadavg()[1]:.1f}"
    lines = [
        f"`python bench/planted_faults.py --write docs/differential.md` wrote this on {datetime.date.today()} ({machine}):",
        "",
        f"| planted | breaks | in so many of {CASES} cases | shrunk to | seconds | of the CPU |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        columns = ["<br>".join(str(kind[column]) for kind in row.found) for column in range(3)]
        lines.append(f"| {row.fault.words} | {' | '.join(columns)} | {row.seconds:.0f} | {row.cpu_seconds:.0f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", action="append", choices=[fault.name for fault in PLANTED])
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if arguments.write is not None and (arguments.fault or not arguments.write.is_file()):
        parser.error("--write takes a page that is there, and the table of all faults")
    rows = []
    for fault in PLANTED:
        if arguments.fault is None or fault.name in arguments.fault:
            rows.append(run(fault))
            print(
                f"{fault.name}: {rows[-1].seconds:.0f} s, {rows[-1].cpu_seconds:.0f} of the CPU; {rows[-1].found} {rows[-1].wrong}",
                flush=True,
            )
    print(table(rows))
    if arguments.write is not None:
        page = arguments.write.read_text()
        between = re.compile(f"(?<={BEGIN}\n).*?(?={END})", re.DOTALL)
        if len(between.findall(page)) != 1:
            parser.error(f"--write {arguments.write} has no place for the table, between {BEGIN} and {END}")
        arguments.write.write_text(between.sub(lambda _: f"\n{table(rows)}\n\n", page))
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
