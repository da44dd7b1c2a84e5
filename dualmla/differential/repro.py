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

Found by dualmla {version} on {device}. Needs dualmla and, beside this script, {files}.
"""
from pathlib import Path
from dualmla.differential.repro import load
from dualmla.differential.judge import judge
{registration}
repro = load(Path(__file__).with_name({numbers!r}))
verdict = judge(repro.problem, {backend!r}, {place!r})
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
    """Write the three files of a failure, and copies of what registers the backend: together they run anywhere.

    Arguments:
        directory: created when missing.
        problem, verdict: the failure.
        device: where it failed.
        made: versions and machine, for the record.
        load_files: what registers the backend, copied and run by the script.

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
    path.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    beside = [_beside(directory, file) for file in load_files]
    path.with_suffix(".py").write_text(
        SCRIPT.format(
            headline=_in_docstring(f"{verdict.backend} is wrong in {problem.operation} {problem.title}"),
            findings=_in_docstring("\n".join(f"{finding['contract']}: {finding['sentence']}" for finding in findings)),
            version=made.get("dualmla"),
            device=made.get("device", device),
            files=", ".join([path.name, f"{stem}.json", *beside]),
            registration="".join(
                f"import runpy; runpy.run_path(str(Path(__file__).with_name({name!r})))  # registers the backend\n" for name in beside
            ),
            numbers=path.name,
            backend=verdict.backend,
            place=device,
        ),
        encoding="utf-8",
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
    about_path, numbers_path = path.with_suffix(".json"), path.with_suffix(".safetensors")
    for needed in (about_path, numbers_path):
        if not needed.is_file():
            raise FileNotFoundError(f"{path} is not a repro, or not all of it: there is no {needed}")
    try:
        about = json.loads(about_path.read_text(encoding="utf-8"))
        if about["format"] != FORMAT:
            raise ValueError(f"it has format {about['format']!r}, this version reads format {FORMAT}")
        tensors = load_file(numbers_path)
        tensors.pop("none", None)
        problem = unpack(about["operation"], about["case"], tensors)
        problem.lay_out("cpu", poison=False)  # numbers of other sizes than the case says
        findings = [{name: str(finding[name]) for name in ("contract", "kind", "sentence")} for finding in about["findings"]]
        return Repro(problem, str(about["backend"]), findings, dict(about["made"]))
    except OSError:
        raise
    except Exception as error:  # whatever a damaged file leads to: of JSON, of safetensors, of a case that can't be
        raise ValueError(f"{path} is not a repro, or is damaged: {type(error).__name__}: {error}") from error


def _beside(directory: Path, file: Path) -> str:
    """The name in `directory` of a copy of `file`, as it is now: a repro is of a backend that may be mended tomorrow."""
    number, text = 1, file.read_bytes()
    copy = directory / file.name
    while copy.exists() and copy.read_bytes() != text:
        number += 1
        copy = directory / f"{file.stem}-{number}{file.suffix}"
    if not copy.exists():
        copy.write_bytes(text)
    return copy.name


def _in_docstring(text: str) -> str:
    """What a backend said may hold anything."""
    return text.replace("\\", "\\\\").replace('"', "'")


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
