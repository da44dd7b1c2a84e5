"""A backend that dies or hangs is a finding, and the next case is judged all the same."""

from pathlib import Path

import pytest

from dualmla.differential.problems.decode import DecodeProblem
from dualmla.differential.worker import Worker, WorkerFailed
from dualmla.testing import DecodeCase

FAULTS = (Path(__file__).parent / "faults.py",)
FINE = DecodeProblem.draw(DecodeCase(num_heads=2, seq_lens=(5,)))
FATAL = DecodeProblem.draw(DecodeCase(num_heads=2, seq_lens=(5,), query_lens=(2,)))


def test_an_abort_is_a_crash_with_the_stack():
    with Worker("fault-abort", load=FAULTS) as worker:
        assert worker.judge(FINE).status == "pass"
        verdict = worker.judge(FATAL)
        assert verdict.kind == "crash"
        assert "SIGABRT" in verdict.findings[0].sentence
        assert "faults.py" in verdict.findings[0].sentence
        assert worker.judge(FINE).status == "pass"


def test_a_hang_is_ended():
    with Worker("fault-hang", load=FAULTS, limit=20) as worker:
        assert worker.judge(FINE).status == "pass"
        verdict = worker.judge(FATAL)
        assert (verdict.kind, verdict.findings[0].sentence) == ("hang", "no answer within 20 s")
        assert worker.judge(FINE).status == "pass"


def test_the_name_behind_the_policy_is_known(monkeypatch):
    monkeypatch.setenv("DUALMLA_BACKEND", "reference")
    with Worker(None) as worker:
        assert worker.name == "reference"


def test_a_backend_that_does_not_exist():
    with pytest.raises(WorkerFailed, match="must be one of auto, aiter"), Worker("tritn"):
        pass
