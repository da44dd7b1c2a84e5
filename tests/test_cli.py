"""The command line: what it prints, writes and returns."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dualmla
from dualmla.cli import app
from dualmla.differential import grids
from dualmla.differential.problems import DecodeProblem
from dualmla.testing import DecodeCase

FAULTS = str(Path(__file__).parent / "differential" / "faults.py")
CASES = (
    DecodeCase(num_heads=2, seq_lens=(5, 0), query_lens=(2, 1), page_size=3),
    DecodeCase(num_heads=3, seq_lens=(70,), dtype=torch.float16),
)


SLOW = """
import os, pathlib, time
import dualmla
from dualmla.backends.reference import ReferenceMLABackend

class Slow(ReferenceMLABackend):
    name, calls = "slow", 0

    @classmethod
    def mla_decode(cls, *args, **rest):
        super().mla_decode(*args, **rest)
        cls.calls += 1
        if cls.calls > 2:
            pathlib.Path(__file__).with_name("hangs").write_text(str(os.getpid()))
            time.sleep(100)

dualmla.register_backend("slow", Slow)
"""


def dualmla_(*args, env=None):
    return CliRunner().invoke(app, args, env=env)


@pytest.fixture
def small_grid(monkeypatch):
    monkeypatch.setitem(grids.GRIDS, "quick", lambda: [lambda case=case: DecodeProblem.draw(case) for case in CASES])


def test_version():
    assert dualmla_("--version").stdout.strip() == dualmla.__version__


def test_info_names_every_backend_and_every_reason():
    result = dualmla_("info")
    assert result.exit_code == 0
    for report in dualmla.explain(dualmla.MLAConfig(num_heads=16, softmax_scale=0.1)):
        assert f"{report.name} {'usable' if report.usable else 'not usable'}" in result.stdout
        for reason in report.reasons:
            assert " ".join(reason.split()) in " ".join(result.stdout.split())
    assert torch.__version__ in result.stdout


def test_info_for_machines_and_its_environment():
    result = dualmla_("info", "--json", env={"DUALMLA_BACKEND": "reference"})
    fields = json.loads(result.stdout)
    assert fields["versions"]["torch"] == torch.__version__
    assert fields["environment"]["DUALMLA_BACKEND"] == "reference"
    assert {backend["name"] for backend in fields["backends"]} >= {"aiter", "triton", "reference"}
    assert all(backend["usable"] == (not backend["reasons"]) for backend in fields["backends"])


def test_info_says_what_is_wrong_with_the_environment():
    result = dualmla_("info", env={"DUALMLA_BACKEND": "tritn"})
    assert result.exit_code == 2
    assert "DUALMLA_BACKEND is 'tritn'" in result.stderr


@pytest.mark.usefixtures("small_grid")
def test_check_agrees(tmp_path):
    result = dualmla_("check", "--backend", "triton", "--against", "reference", "--device", "cpu", "--json", str(tmp_path / "r.json"))
    assert result.exit_code == 0, result.output
    assert "triton: 2 passed, 0 failed, 0 refused" in result.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["backends"] == ["triton"]
    assert [row[0]["title"] for row in report["rows"]] == [str(case) for case in CASES]
    assert all(row[0]["status"] == "pass" and 0 <= row[0]["comparison"]["budget_used"] <= 1 for row in report["rows"])


@pytest.mark.usefixtures("small_grid")
def test_check_disagrees_and_names_the_contract(tmp_path):
    args = ("--load", FAULTS, "--backend", "fault-sound", "--against", "fault-scale", "--device", "cpu", "--json", str(tmp_path / "r.json"))
    result = dualmla_("check", *args)
    assert result.exit_code == 1, result.output
    assert "fault-scale breaks: 1 Scale, in 2 cases" in result.stdout
    assert "fault-sound breaks" not in result.stdout
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [[verdict["status"] for verdict in row] for row in rows] == [["pass", "fail"]] * 2
    assert rows[0][1]["findings"][0]["contract"] == "1 Scale"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--backend", "tritn"), "must be one of auto, aiter, triton, reference"),
        (("--backend", "aiter", "--device", "cpu"), "backend 'aiter' can't be used"),
        (("--grid", "slow"), "--grid must be"),
        (("--time", "1 minute"), "it must be a number of seconds"),
        (("--time", "-1"), "it must be a number of seconds"),
        (("--jobs", "0"), "Invalid value for '--jobs'"),
        (("--cases", "0"), "Invalid value for '--cases'"),
        (("--device", "cpux"), "Invalid value for '--device': it must be cpu"),
        (("--device", "meta"), "got 'meta'"),
        (("--device", "cuda:99"), "got 'cuda:99'"),
        (("--grid", "quick", "--grid", "slow"), "--grid must be one of"),
        (("--against", "tritn", "--backend", "reference"), "backend is 'tritn'; it must be one of auto"),
    ],
)
def test_check_could_not_run(args, words):
    result = dualmla_("check", *args)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())


def test_grids_can_be_asked_for_together(monkeypatch, tmp_path):
    for name, case in zip(("quick", "vllm"), CASES, strict=True):
        monkeypatch.setitem(grids.GRIDS, name, lambda case=case: [lambda: DecodeProblem.draw(case)])
    report = tmp_path / "r.json"
    result = dualmla_(
        "check", "--backend", "reference", "--device", "cpu", "--grid", "vllm", "--grid", "quick", "--jobs", "50", "--json", str(report)
    )
    assert result.exit_code == 0, result.output
    told = json.loads(report.read_text())
    assert told["title"] == "grid vllm and grid quick"
    assert [row[0]["title"] for row in told["rows"]] == [str(case) for case in reversed(CASES)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_check_reports_what_it_judged(tmp_path, number):
    """The reports are there, and nothing runs on."""
    (tmp_path / "slow.py").write_text(SLOW)
    report = tmp_path / "r.json"
    command = [sys.executable, "-m", "dualmla", "check", "--device", "cpu", "--load", str(tmp_path / "slow.py"), "--backend", "slow"]
    paths = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        [*command, "--cases", "9", "--jobs", "1", "--json", str(report)],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "hangs").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(number)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 2, said
    assert "interrupted" in said
    told = json.loads(report.read_text())
    assert told["interrupted"]
    assert {verdict["status"] for (verdict,) in told["rows"]} == {"pass"}
    assert len(told["rows"]) < 9
    child = int((tmp_path / "hangs").read_text())
    while runs(child) and time.monotonic() < deadline + 10:
        time.sleep(0.1)
    assert not runs(child)


def runs(pid: int) -> bool:
    """Whether that process is there, and not only its exit status, which its adopted parent may be slow to ask for."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0].startswith("Z")
    return False


def test_a_file_that_can_not_be_loaded_is_said(tmp_path):
    (tmp_path / "broken.py").write_text("raise OSError('no such kernel')")
    result = dualmla_("check", "--load", str(tmp_path / "broken.py"), "--device", "cpu")
    assert result.exit_code == 2
    assert "can't be loaded: OSError: no such kernel" in " ".join(result.stderr.split())


def test_random_cases_instead_of_the_grid(tmp_path):
    args = ("--backend", "reference", "--device", "cpu", "--cases", "5", "--seed", "3", "--json", str(tmp_path / "r.json"))
    result = dualmla_("check", *args)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["title"] == "5 random cases of seed 3"
    assert len(report["rows"]) == 5


@pytest.mark.parametrize("time", ["0.5", "0.5s"])
def test_time_bounds_random_cases(time):
    result = dualmla_("check", "--backend", "reference", "--device", "cpu", "--jobs", "1", "--time", time)
    assert result.exit_code == 0, result.output
    assert "time was up after 0.5 s" in result.stdout


@pytest.mark.usefixtures("small_grid")
def test_a_failure_is_saved_and_replayed(tmp_path):
    """A kernel author's way: check, repro, replay on the faulty backend and on a right one."""
    files = ("--junit", str(tmp_path / "r.xml"), "--html", str(tmp_path / "r.html"), "--save-failures", str(tmp_path / "repros"))
    result = dualmla_("check", "--load", FAULTS, "--backend", "fault-base2", "--device", "cpu", "--grid", "quick", *files)
    assert result.exit_code == 1, result.output
    assert 'type="2 LSE"' in (tmp_path / "r.xml").read_text()
    assert "lse is in base 2" in (tmp_path / "r.html").read_text()
    (saved,) = (tmp_path / "repros").glob("*.safetensors")
    assert f"repro: {saved}" in result.stdout

    again = dualmla_("replay", str(saved), "--load", FAULTS, "--device", "cpu")
    assert again.exit_code == 1, again.output
    assert "fault-base2 then, 2 LSE: lse is in base 2, not natural" in again.stdout
    assert "fault-base2 breaks: 2 LSE" in again.stdout
    healed = dualmla_("replay", str(saved.with_suffix(".json")), "--backend", "reference", "--device", "cpu")
    assert healed.exit_code == 0, healed.output
    assert "reference: 1 passed, 0 failed" in healed.stdout


def test_replay_of_what_is_no_repro(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    result = dualmla_("replay", str(tmp_path / "x.json"))
    assert result.exit_code == 2
    assert "is not a repro" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("option", "place", "words"),
    [
        *((option, "no/r", "there is no directory") for option in ("--json", "--junit", "--html")),
        ("--json", ".", "is a directory, it must be a file"),
        ("--json", "file/r", "there is no directory"),
        ("--html", "closed/r", "can't be written"),
        ("--save-failures", "file/repros", "file is not a directory"),
        ("--save-failures", "closed/a/b", "can't be written"),
    ],
)
def test_where_nothing_can_be_written_nothing_runs(tmp_path, monkeypatch, option, place, words):
    """Root may write everywhere: a file that can't be made stands for a directory that is closed."""
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir()
    right = tempfile.TemporaryFile

    def temporary_file(dir):
        if Path(dir).name == "closed":
            raise PermissionError(13, "Permission denied")
        return right(dir=dir)

    monkeypatch.setattr("dualmla.differential.files.tempfile.TemporaryFile", temporary_file)
    monkeypatch.setattr("dualmla.differential.check.run_check", lambda *rest: pytest.fail("it ran"))
    result = dualmla_("check", "--backend", "reference", "--device", "cpu", "--cases", "1", option, str(tmp_path / place))
    assert result.exit_code == 2
    said = "".join(result.stderr.split())
    assert option in said
    assert "".join(words.split()) in said
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("command", "function"),
    [
        (("bench", "--batch", "1", "--kv", "3", "--json"), "dualmla.bench.run.run_bench"),
        (("bench", "--batch", "1", "--kv", "3", "--plot"), "dualmla.bench.run.run_bench"),
        (("certify", "--out"), "dualmla.differential.certify.machine_of"),
    ],
    ids=lambda value: "".join(value[:1] + value[-1:]) if isinstance(value, tuple) else "",
)
def test_every_command_that_writes_tries_first(tmp_path, monkeypatch, command, function):
    monkeypatch.setattr(function, lambda *rest: pytest.fail("it ran"))
    result = dualmla_(*command, str(tmp_path / "no" / "r.png"), "--device", "cpu")
    assert result.exit_code == 2
    assert "there is no directory" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("option", "package", "hidden"), [("--html", "jinja2", "jinja2"), ("--save-failures", "safetensors", "safetensors")]
)
def test_a_missing_package_is_said_before_anything_runs(tmp_path, monkeypatch, option, package, hidden):
    for name in [name for name in sys.modules if name.partition(".")[0] == hidden]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, hidden, None)
    monkeypatch.setattr("dualmla.differential.check.run_check", lambda *rest: pytest.fail("it ran"))
    result = dualmla_("check", "--backend", "reference", "--device", "cpu", "--cases", "1", option, str(tmp_path / "r"))
    assert result.exit_code == 2
    assert f"{package} is not installed" in " ".join(result.stderr.split())


def test_an_older_report_is_replaced_only_by_a_new_one(tmp_path):
    (tmp_path / "r.json").write_text("old")
    args = ("check", "--device", "cpu", "--cases", "1", "--json", str(tmp_path / "r.json"))
    assert dualmla_(*args, "--backend", "tritn").exit_code == 2
    assert (tmp_path / "r.json").read_text() == "old"
    assert dualmla_(*args, "--backend", "reference").exit_code == 0
    assert json.loads((tmp_path / "r.json").read_text())["backends"] == ["reference"]
