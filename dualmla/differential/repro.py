"""A failing problem as files: numbers (.safetensors), the rest (.json beside it), and a script to paste into a bug report."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dualmla.differential.problems import Problem, unpack
from dualmla.differential.verdict import Verdict

FORMAT = 1

MISSING = "safetensors is not installed, which repro files need; install `dualmla[check]`"

SCRIPT = '''"""{headline}

{findings}

Found by dualmla {version} on {device}. Needs dualmla and the two files {stem}.safetensors and {stem}.json beside this script.
"""
from pathlib import Path
from dualmla.differential.repro import load
from dualmla.differential.judge import judge
{registration}
repro = load(Path(__file__).with_name("{stem}.safetensors"))
verdict = judge(repro.problem, "{backend}", "{place}")
print(*(f"{{finding.contract}}: {{finding.sentence}}" for finding in verdict.findings), sep="\\n")
assert verdict.status == "pass"
'''


@dataclass(frozen=True)
class Repro:
    """What a repro file holds.

    Attributes:
        problem: the call.
        backend: that failed.
        findings: what was wrong then: contract, kind and sentence of each.
        made: where and with which versions.
    """

    problem: Problem
    backend: str
    findings: list[dict[str, str]]
    made: dict[str, Any]


def save(
    directory: Path, problem: Problem, verdict: Verdict, *, device: str, made: dict[str, Any], load_files: tuple[Path, ...] = ()
) -> Path:
    """Write the three files of a failure.

    Arguments:
        directory: created when missing.
        problem, verdict: the failure.
        device: where it failed.
        made: versions and machine, for the record.
        load_files: what registers the backend, named in the script.

    Returns:
        The .safetensors file; its neighbours have its stem.

    Raises:
        ImportError: safetensors is missing.
    """
    save_file = safetensors_torch().save_file
    directory.mkdir(parents=True, exist_ok=True)
    kind = (verdict.kind or "pass").replace(" ", "-")
    stem = _unused(directory, f"{verdict.backend}-{problem.operation.replace(' ', '-')}-{kind}")
    fields, tensors = problem.pack()
    findings = [{**asdict(finding), "contract": finding.contract} for finding in verdict.findings]
    path = directory / f"{stem}.safetensors"
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()} or {"none": torch.zeros(0)}, path)
    about = {
        "format": FORMAT, "operation": problem.operation, "title": problem.title, "backend": verdict.backend, "device": device,
        "load": [str(file) for file in load_files], "findings": findings, "made": made, "case": fields,
    }  # fmt: skip
    path.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")
    path.with_suffix(".py").write_text(
        SCRIPT.format(
            headline=f"{verdict.backend} is wrong in {problem.operation} {problem.title}",
            findings="\n".join(f"{finding['contract']}: {finding['sentence']}" for finding in findings),
            version=made.get("dualmla"),
            device=made.get("device", device),
            stem=stem,
            registration="".join(f'import runpy; runpy.run_path("{file}")  # registers the backend\n' for file in load_files),
            backend=verdict.backend,
            place=device,
        )
    )
    return path


def load(path: Path) -> Repro:
    """Read a repro; `path` is any of its files.

    Raises:
        ImportError: safetensors is missing.
        ValueError: it is not a repro of this format.
        FileNotFoundError: one of the two files is missing.
    """
    load_file = safetensors_torch().load_file
    try:
        about = json.loads(path.with_suffix(".json").read_text())
        if about["format"] != FORMAT:
            raise ValueError(f"{path} has format {about['format']!r}, this version reads format {FORMAT}")
        tensors = load_file(path.with_suffix(".safetensors"))
        tensors.pop("none", None)
        problem = unpack(about["operation"], about["case"], tensors)
        return Repro(problem, about["backend"], about["findings"], about["made"])
    except (KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a repro: {type(error).__name__}: {error}") from error


def _unused(directory: Path, stem: str) -> str:
    """`stem`, numbered until no file has it."""
    number = 1
    while (directory / f"{stem}-{number}.json").exists():
        number += 1
    return f"{stem}-{number}"


def safetensors_torch() -> Any:
    """The package that repro files need.

    Raises:
        ImportError: it is missing.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(MISSING) from error
    return safetensors.torch
