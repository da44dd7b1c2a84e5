"""Certification: what passes, what fails and why, and that a shape which kills its process costs no other."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dualmla.backends.aiter.certificate import Entry, Machine, Shape
from dualmla.backends.base import BackendUnavailable
from dualmla.cli import app
from dualmla.differential.certify import Group, certify, groups, machine_of
from dualmla.differential.problems import DecodeProblem
from dualmla.testing import DecodeCase

FAULTS = (Path(__file__).parent / "faults.py",)
HERE = Machine("0.1.7", "S2", "gfx942", "ROCm 6.4")


def small(shape: Shape) -> Group:
    """Two little decodes of the shape."""
    cases = [
        DecodeCase(num_heads=shape.num_heads, seq_lens=(n,), query_lens=(shape.query_len,), return_lse=shape.return_lse) for n in (5, 66)
    ]
    return Group(shape, tuple(lambda case=case: DecodeProblem.draw(case) for case in cases))  # type: ignore[misc]


SINGLE, PAIR, WITH_LSE = Shape("decode", 2, 1, False), Shape("decode", 2, 2, False), Shape("decode", 2, 1, True)


@pytest.fixture(scope="module")
def sound() -> tuple[Entry, ...]:
    told: list[Entry] = []
    certificate = certify(map(small, (SINGLE, WITH_LSE)), HERE, device="cpu", backend="triton", on_entry=told.append)
    assert certificate.machine == HERE
    assert certificate.entries == tuple(told)
    return certificate.entries


def test_what_agrees_passes(sound: tuple[Entry, ...]) -> None:
    for entry, shape in zip(sound, (SINGLE, WITH_LSE), strict=True):
        assert (entry.shape, entry.passed, entry.cases, entry.why) == (shape, True, 2, "")
        assert 0 < entry.budget_used <= 1
        assert entry.seconds > 0


def test_a_death_costs_its_shape_alone() -> None:
    """fault-abort aborts on two query tokens."""
    entries = certify(map(small, (PAIR, SINGLE)), HERE, device="cpu", backend="fault-abort", load=FAULTS).entries
    assert [entry.passed for entry in entries] == [False, True]
    assert "SIGABRT" in entries[0].why
    assert entries[0].cases == 1  # the first failure says enough


def test_a_hang_is_a_failure() -> None:
    (entry,) = certify([small(PAIR)], HERE, device="cpu", backend="fault-hang", load=FAULTS, limit=8).entries
    assert not entry.passed
    assert "no answer within 8 s" in entry.why


def test_wrong_numbers_are_named() -> None:
    (entry,) = certify([small(SINGLE)], HERE, device="cpu", backend="fault-scale", load=FAULTS).entries
    assert not entry.passed
    assert entry.budget_used > 1
    assert "h2-q1-kv5" in entry.why


def test_a_refusal_and_a_backend_that_does_not_run_are_failures() -> None:
    (entry,) = certify([small(SINGLE)], HERE, device="cpu", backend="aiter").entries
    assert not entry.passed
    assert "AITER's MLA kernels are for gfx942 and gfx950" in entry.why


def test_without_aiter_there_is_nothing_to_certify() -> None:
    with pytest.raises(BackendUnavailable, match="AITER's MLA kernels are for gfx942 and gfx950"):
        machine_of(torch.device("cpu"))


def test_the_shapes_of_an_engine() -> None:
    made = groups([16, 8], max_query_len=2, return_lse=True, seeds=1)
    assert {group.shape for group in made} == {
        *(Shape("decode", heads, n, lse) for heads in (16, 8) for n in (1, 2) for lse in (False, True)),
        *(Shape("prefill", heads, 0, True) for heads in (16, 8)),
    }
    decode, prefill = (next(group for group in made if group.shape == shape) for shape in (Shape("decode", 8, 2, True), made[-1].shape))
    decodes, prefills = ([draw().case for draw in group.draws] for group in (decode, prefill))  # type: ignore[attr-defined]
    assert {(case.num_heads, case.return_lse, case.page_size, max(case.query_lens)) for case in decodes} == {
        (8, True, 1, 2),
        (8, True, 16, 2),
    }
    assert {(case.num_heads, case.causal) for case in prefills} == {(8, True), (8, False)}
    assert len(groups([16], seeds=3)[0].draws) == 3 * len(groups([16], seeds=1)[0].draws)


def test_the_command_needs_aiter() -> None:
    """Where AITER can't run there is nothing to certify: exit status 2 and the reason, and no file."""
    done = CliRunner().invoke(app, ["certify", "--heads", "16", "--device", "cpu", "--out", "unwritten.json"])
    assert done.exit_code == 2
    assert "AITER" in done.stderr
    assert not Path("unwritten.json").exists()


def test_the_command_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a stand-in: one shape passes, one dies; the file holds both and the exit status says so."""
    monkeypatch.setattr("dualmla.differential.certify.machine_of", lambda device: HERE)
    monkeypatch.setattr("dualmla.differential.certify.groups", lambda heads, **kwargs: [small(PAIR), small(SINGLE)])
    judge = functools.partial(certify, backend="fault-abort", load=FAULTS)
    monkeypatch.setattr("dualmla.differential.certify.certify", judge)
    path = tmp_path / "certificate.json"
    done = CliRunner().invoke(app, ["certify", "--device", "cpu", "--out", str(path)])
    assert done.exit_code == 1, done.output
    assert "SIGABRT" in done.output
    entries = json.loads(path.read_text())["entries"]
    assert [entry["passed"] for entry in entries] == [False, True]
