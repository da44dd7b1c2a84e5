"""A backend that dies or hangs is a finding, and the next case is judged all the same."""

import threading
from pathlib import Path

import pytest

from dualmla.differential.problems.decode import DecodeProblem
from dualmla.differential.worker import Worker, WorkerAbandoned, WorkerFailed
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


def test_a_backend_that_leaves_the_process_is_a_crash():
    with Worker("fault-leave", load=FAULTS) as worker:
        verdict = worker.judge(FATAL)
        assert (verdict.kind, verdict.findings[0].sentence) == ("crash", "the process ended with exit status 0")
        assert worker.judge(FINE).status == "pass"


def test_an_abandoned_worker_answers_nobody():
    """Whether it is in the middle of a case, or was never started."""
    with Worker("fault-hang", load=FAULTS) as worker:
        threading.Timer(2, worker.abandon).start()
        with pytest.raises(WorkerAbandoned):
            worker.judge(FATAL)
    late = Worker("fault-hang", load=FAULTS)
    late.abandon()
    with pytest.raises(WorkerAbandoned), late:
        pass


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


FAULTING = """
import torch
import dualmla
from dualmla.backends.triton import TritonMLABackend


class Faulting(TritonMLABackend):
    name = "fault-gpu"

    @classmethod
    def mla_decode(cls, q, kv_cache, meta, *args, **rest):
        super().mla_decode(q, kv_cache, meta, *args, **rest)
        if meta.max_query_len > 1:
            torch.arange(3, device=q.device)[meta.seq_lens.long() + 1000]  # asserts on the device: every later call of the process fails


dualmla.register_backend("fault-gpu", Faulting)
"""


@pytest.mark.gpu
def test_a_fault_of_the_gpu_costs_its_case_alone(tmp_path):
    path = tmp_path / "faulting.py"
    path.write_text(FAULTING)
    with Worker("fault-gpu", "cuda", load=(path,)) as worker:
        assert worker.judge(FINE).status == "pass"
        verdict = worker.judge(FATAL)
        assert verdict.kind == "crash", verdict
        assert "device-side assert" in verdict.findings[0].sentence
        assert worker.judge(FINE).status == "pass"
