"""A check's report as files: JSON, JUnit XML, and one self-contained HTML page."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from dualmla.differential import repro
from dualmla.differential.check import Failure, Report, fails
from dualmla.differential.report import executed, notes, share, summary, used
from dualmla.differential.verdict import Verdict

MISSING = "jinja2 is not installed, which the HTML page needs; install `dualmla[check]`"

PLOT_FLOOR, PLOT_CEILING = 1e-4, 1e4
"""Shares of the allowance that the page's plot shows; what is outside sits on the edge."""


def check_destinations(*, files: dict[str, Path | None], repros: Path | None = None) -> None:
    """Whether a report and repros can be written, before anything runs.

    Arguments:
        files: by the option that names them; that of `--html` needs jinja2.
        repros: a directory, which need not exist yet.

    Raises:
        OSError: naming the option and what is in the way.
        ImportError: a package is missing.
    """
    taken: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        if path.is_file() or not path.exists():  # what is neither, /dev/stdout say, takes several
            other = taken.setdefault(path.resolve(), option)
            if other != option:
                raise FileExistsError(f"{option} {path} is the file of {other} too")
        if path.is_dir():
            raise IsADirectoryError(f"{option} {path} is a directory, it must be a file to write")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{option} {path}: there is no directory {path.parent}")
        _try_writing(option, path, path.parent)
    if files.get("--html") is not None:
        _jinja2()
    if repros is not None:
        repro.safetensors_torch()
        existing = next(place for place in (repros, *repros.absolute().parents) if place.exists())
        if not existing.is_dir():
            raise NotADirectoryError(f"--save-failures {repros}: {existing} is not a directory")
        _try_writing("--save-failures", repros, existing)


def _try_writing(option: str, path: Path, directory: Path) -> None:
    """By writing: permissions say little to root and on a file system that is read-only."""
    try:
        if path.is_file():
            path.open("a").close()
        else:
            tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise type(error)(f"{option} {path} can't be written: {error.strerror}") from error


def to_json(report: Report) -> str:
    """All of the report; inf and nan as strings."""
    fields = {name: value for name, value in vars(report).items() if name not in ("rows", "failures")}
    rows = [[_verdict(verdict) for verdict in row] for row in report.rows]
    return json.dumps(plain({**fields, "rows": rows, "failures": [_failure(failure) for failure in report.failures]}), indent=1)


def to_junit(report: Report) -> str:
    """A suite a backend; a refused case is a skipped one."""
    root = ElementTree.Element("testsuites", name="dualmla check", time=f"{report.seconds:.3f}")
    for index, backend in enumerate(report.backends):
        verdicts = [row[index] for row in report.rows]
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=backend,
            timestamp=report.date,
            hostname=report.device,
            tests=str(len(verdicts)),
            failures=str(sum(v.status == "fail" for v in verdicts)),
            skipped=str(sum(v.status == "refused" for v in verdicts)),
            errors="0",
            time=f"{sum(v.seconds for v in verdicts):.3f}",
        )
        for v in verdicts:
            case = ElementTree.SubElement(suite, "testcase", classname=f"{backend}.{v.operation}", name=v.title, time=f"{v.seconds:.3f}")
            if v.findings:
                failure = ElementTree.SubElement(case, "failure", type=v.findings[0].contract, message=_clean(v.findings[0].sentence))
                failure.text = _clean("\n".join(f"{finding.contract}: {finding.sentence}" for finding in v.findings))
            elif v.refusals:
                ElementTree.SubElement(case, "skipped", message="; ".join(v.refusals))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def to_html(report: Report) -> str:
    """One page that needs nothing else: the matrix of cases and backends, the errors as a plot, each failure with its repro.

    Raises:
        ImportError: jinja2 is missing.
    """
    jinja2 = _jinja2()
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dualmla.differential", "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    rows = sorted(report.rows, key=lambda row: (not fails(row), -used(row)))
    template = environment.get_template("report.html")
    known, count = notes(report), executed(report)
    return str(
        template.render(report=report, rows=rows, summary=summary(report), dots=_dots(report), share=share, known=known, executed=count)
    )


def _jinja2() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(MISSING) from error
    return jinja2


def _dots(report: Report) -> list[dict[str, Any]]:
    """The plot: a dot a verdict, x by its place among the cases, y by the share of the allowance used, both from 0 to 1."""
    dots = []
    for x, row in enumerate(report.rows):
        for verdict in row:
            if verdict.comparison is not None:
                share = max(verdict.comparison.budget_used, verdict.comparison.lse_budget_used, PLOT_FLOOR)
                y = math.log(min(share, PLOT_CEILING) / PLOT_FLOOR) / math.log(PLOT_CEILING / PLOT_FLOOR)
                dots.append(
                    {"x": (x + 0.5) / len(report.rows), "y": y, "verdict": verdict, "backend": report.backends.index(verdict.backend)}
                )
    return dots


def _verdict(verdict: Verdict) -> dict[str, Any]:
    findings = [{**asdict(finding), "contract": finding.contract} for finding in verdict.findings]
    execution = verdict.execution and {**asdict(verdict.execution), "instructions": verdict.execution.instructions}
    return {**asdict(verdict), "findings": findings, "status": verdict.status, "execution": execution}


def _failure(failure: Failure) -> dict[str, Any]:
    return {
        "found": _verdict(failure.found),
        "shrunk": failure.shrunk and _verdict(failure.shrunk),
        "operation": failure.problem.operation,
        "problem": failure.problem.title,
        "case": failure.problem.pack()[0],
        "tried": failure.tried,
        "repro": failure.path and str(failure.path),
    }


def plain(value: Any) -> Any:
    """The same with inf and nan as strings: JSON has neither."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _clean(text: str) -> str:
    """Without the control characters that XML can't hold; a crash's last words may have them."""
    return "".join(c for c in text if c in "\n\t" or c >= " ")
