"""The command line: what it prints, writes and returns."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dualmla
import dualmla.testing
from dualmla.cli import app
from dualmla.testing import DecodeCase

FAULTS = str(Path(__file__).parent / "differential" / "faults.py")
CASES = (
    DecodeCase(num_heads=2, seq_lens=(5, 0), query_lens=(2, 1), page_size=3),
    DecodeCase(num_heads=3, seq_lens=(70,), dtype=torch.float16),
)


def dualmla_(*args, env=None):
    return CliRunner().invoke(app, args, env=env)


@pytest.fixture
def small_grid(monkeypatch):
    monkeypatch.setattr(dualmla.testing, "QUICK_GRID", CASES)


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
    ],
)
def test_check_could_not_run(args, words):
    result = dualmla_("check", *args)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_a_file_that_can_not_be_loaded_is_said(tmp_path):
    (tmp_path / "broken.py").write_text("raise OSError('no such kernel')")
    result = dualmla_("check", "--load", str(tmp_path / "broken.py"), "--device", "cpu")
    assert result.exit_code == 2
    assert "OSError: no such kernel" in result.stderr
