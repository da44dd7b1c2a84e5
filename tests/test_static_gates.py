"""What our kernels become on gfx90a, gfx942, gfx950 and Hopper: compiled without a GPU, in a process where nothing is interpreted.

The cases that stand for the others; `python bench/compiled.py` does all of them.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

import dualmla_kernels
from bench.compiled import columns
from dualmla_kernels.compiled import Facts, faults
from dualmla_kernels.registry import KNOWN_FAULTS, known_fault, registered
from dualmla_kernels.target import CHIPS

SOURCES = Path(dualmla_kernels.__file__).parent

COMPILE = """
import json, sys
from dualmla_kernels.compiled import compile_launch, faults, measure
from dualmla_kernels.compiled import Facts, faults
from dualmla_kernels.registry import registered
from dualmla_kernels.target import CHIPS

arch, kernel, case, options = sys.argv[1:]
target = CHIPS[arch]
for item in registered(target, quick=True):
    if kernel in ("", item.kernel) and case in ("", item.case):
        facts = measure(compile_launch(item.launch, target, **json.loads(options)), target)
        report = {"kernel": item.kernel, "case": item.case, "facts": vars(facts)}
        print(json.dumps(report | {"faults": faults(facts, target, matrix=item.matrix, wide=item.wide)}))
"""

Reports = list[dict[str, Any]]


@pytest.fixture(scope="session")
def compile_registered() -> Callable[..., Reports]:
    """A function that compiles registered launches of the quick cases in a fresh process."""

    def compile_(arch: str, kernel: str = "", case: str = "", **options: int) -> Reports:
        command = [sys.executable, "-W", "ignore", "-c", COMPILE, arch, kernel, case, json.dumps(options)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, cwd=SOURCES.parent)
        assert done.returncode == 0, done.stderr
        reports = [json.loads(line) for line in done.stdout.splitlines()]
        assert reports, "nothing is registered under these names"
        return reports

    return compile_


ON_EACH_CHIP = pytest.mark.parametrize("arch", [pytest.param(arch, marks=pytest.mark.xdist_group(f"gates of {arch}")) for arch in CHIPS])
"""In one process for each chip, so that Triton finds what it compiled for the test before."""


@ON_EACH_CHIP
def test_gates(arch: str, compile_registered: Callable[..., Reports]) -> None:
    """No spills, LDS within the chip, products on the matrix units, wide loads."""
    reports = compile_registered(arch)
    broken = [
        (report["kernel"], report["case"], report["faults"])
        for report in reports
        if report["faults"] and known_fault(arch, report["kernel"], report["case"]) is None
    ]
    assert not broken
    assert any(sum(report["facts"]["matrix"].values()) for report in reports)


@ON_EACH_CHIP
def test_the_table_of_the_docs_is_of_this_code(arch: str, compile_registered: Callable[..., Reports]) -> None:
    """Each launch that CI compiles has its row, or that of another case with the same machine code, under this version of Triton."""
    rows = {(row[0], row[2:]) for row in table_of(arch, triton.__version__)}
    if not rows:
        pytest.skip(f"docs/compiled.md has no table of {arch}, Triton {triton.__version__}: write it with bench/compiled.py")
    for report in compile_registered(arch):
        facts = report["facts"] | {"loads": {int(size): count for size, count in report["facts"]["loads"].items()}}
        known = known_fault(arch, report["kernel"], report["case"]) if report["faults"] else None
        wanted = (report["kernel"], columns(Facts(**facts), known))
        assert wanted in rows, f"{report['case']}: bench/compiled.py --write docs/compiled.md"


def table_of(arch: str, version: str) -> list[tuple[str, ...]]:
    """Rows of docs/compiled.md for a chip and a version of Triton."""
    page = (Path(__file__).parents[1] / "docs/compiled.md").read_text()
    section = page.partition(f"## {arch}, Triton {version}\n")[2].partition("\n## ")[0]
    return [tuple(line.strip("| ").split(" | ")) for line in section.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("arch", CHIPS)
def test_the_docs_have_each_chip_and_no_spill_that_is_not_known(arch: str) -> None:
    """With Triton 3.6 and the newest, every row: a reason stands behind each number that is not 0."""
    for version in ("3.6.0", "3.9.0"):
        rows = table_of(arch, version)
        assert {"decode", "combine", "build", "concat_and_cache", "merge"} <= {row[0] for row in rows}
        assert not [row for row in rows if row[3] != "0 / 0 B" and known_fault(arch, row[0], row[1]) is None]


def test_every_known_fault_is_still_one() -> None:
    spilled = [(arch, row) for arch in CHIPS for version in ("3.6.0", "3.9.0") for row in table_of(arch, version) if row[3] != "0 / 0 B"]
    for (arch, kernel, case), why in KNOWN_FAULTS.items():
        still = [row for chip, row in spilled if (chip, row[0]) == (arch, kernel) and fnmatch.fnmatch(row[1], case)]
        assert still, (arch, kernel, case, why)


def test_pairs_of_tiles_on_hopper(compile_registered: Callable[..., Reports]) -> None:
    """Products by wgmma, asynchronous; nothing but addresses is kept in memory, and all of shared memory is used."""
    (report,) = compile_registered("sm_90", "decode_pairs", "decode, 128 heads")
    facts = report["facts"]
    assert not [fault for fault in report["faults"] if "registers are spilled" not in fault]
    assert facts["matrix"]["wgmma"] == 2 * (32 + 4 + 16), "one warpgroup's products of a pair: latent scores, rope scores, values"
    assert facts["scratch_bytes"] < 64


def test_a_bad_configuration_breaks_a_gate(compile_registered: Callable[..., Reports]) -> None:
    """Twice the rows do not fit into the registers of gfx942."""
    (report,) = compile_registered("gfx942", "decode", "decode, 128 heads", BM=128)
    assert any("registers are spilled" in found for found in report["faults"]), report


GOOD = Facts(
    registers=500,
    spilled=0,
    scalars_moved=9,
    scratch_bytes=0,
    shared_bytes=65536,
    matrix={"v_mfma": 8},
    loads={16: 8, 4: 32},
    instructions=999,
)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"spilled": 1}, "1 registers are spilled"),
        ({"scratch_bytes": 4}, "4 bytes of a lane's memory"),
        ({"shared_bytes": 65537}, "65537 bytes of LDS; gfx942 has 65536"),
        ({"matrix": {"v_mfma": 0}}, "no v_mfma"),
        ({"loads": {16: 8, 4: 33}}, "49% of the bytes"),
        ({"loads": {}}, "0% of the bytes"),
    ],
    ids=str,
)
def test_each_gate(change: dict[str, Any], fault: str | None) -> None:
    found = faults(dataclasses.replace(GOOD, **change), CHIPS["gfx942"], matrix="v_mfma", wide=True)
    assert [fault] == [fault for sentence in found if fault in sentence] if fault else found == []


def test_every_kernel_is_registered() -> None:
    """Each first argument of a `launch(...)` or `Prepared(...)` in the package is launched by some case, on some chip."""
    launched = {
        call.args[0].id.lstrip("_")
        for path in SOURCES.glob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("launch", "Prepared")
        and isinstance(call.args[0], ast.Name)
        and call.args[0].id.startswith("_")  # a launch that was worked out before takes tensors alone
    }
    assert len(launched) > 8, "the launches are no longer found"
    assert launched == {item.kernel for target in CHIPS.values() for item in registered(target, quick=True)} & launched
