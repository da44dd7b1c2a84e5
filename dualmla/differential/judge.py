"""The judge: float64 decides what is right, and where a result is wrong, which contract it breaks.

A call runs twice: among poison (NaN and huge page ids wherever nobody owns the memory) and among harmless memory. The
truth is the same, and so must be the bits. What differs was read from memory that nobody owns, or is not deterministic;
what is equal and wrong is diagnosed (`diagnose`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from dualmla.backends.base import BackendUnavailable
from dualmla.differential.bits import difference, first, same_bits
from dualmla.differential.diagnose import Wrong, diagnose
from dualmla.differential.emulated import know
from dualmla.differential.instruments import Recording, findings_of, recording
from dualmla.differential.problems.base import Problem, Result
from dualmla.differential.verdict import Finding, Verdict
from dualmla.testing import compare


def judge(problem: Problem, backend: str | None, device: torch.device | str = "cpu") -> Verdict:
    """Run `problem` on `backend` and say what is wrong with the result.

    A Python exception of the backend is a finding; an abort or a hang takes this process with it: see `worker`.
    """
    about = (problem.operation, problem.title, backend or "auto")
    know(backend)
    plain = Recording()
    try:
        call, calm = (problem.lay_out(device, poison=poison) for poison in (True, False))
    except torch.OutOfMemoryError as error:
        return Verdict(*about, refusals=(f"no room on {device} to lay the case out: {str(error).splitlines()[0]}",))
    start = time.perf_counter()
    try:
        with recording(plain):
            result = call.run(backend)
        seconds = time.perf_counter() - start
        quiet = calm.run(backend)
        exact = call.exact()
        comparison = compare(*result, exact, flashmla_gate=problem.order_one)
        wrong = Wrong(problem, call, result, exact, "; ".join(comparison.failures))
        findings = tuple(_findings(wrong, quiet, backend, device))
        hazards, notes = _hazards(problem, backend, device, result, plain)
    except BackendUnavailable as refusal:
        return Verdict(*about, refusals=tuple(refusal.reasons))
    except Exception as error:
        hazards, notes = findings_of(plain)
        return Verdict(*about, findings=hazards or (Finding("exception", f"{type(error).__name__}: {error}"),), notes=notes)
    return Verdict(*about, findings + hazards, (), comparison, seconds, plain.execution(), notes)


def _findings(wrong: Wrong, quiet: Result, backend: str | None, device: torch.device | str) -> Iterator[Finding]:
    problem, result, exact = wrong.problem, wrong.result, wrong.exact
    if result.out.shape != exact.out.shape:
        yield Finding("accuracy", wrong.facts)
        return
    if result.lse is not None and result.lse.shape != exact.lse.shape:
        yield Finding("lse", wrong.facts)
        return
    unwritten = (result.out.isnan() & (quiet.out == 7.0)).all(-1)  # what `out` held before each call
    if bool(unwritten.any()):
        yield Finding("unwritten", f"out{list(first(unwritten))} [token, head] was never written; {int(unwritten.sum())} rows were not")
        return
    if all(run.lse is not None and run.lse.numel() and bool(run.lse.isnan().all()) for run in (result, quiet)):  # poison in both
        yield Finding("unwritten", f"lse was never written; {wrong.facts}")
        return
    if not same_bits(result, quiet):
        yield _why_different(problem, backend, device, result, quiet)
        if not compare(*quiet, exact, flashmla_gate=problem.order_one).failures:
            return  # right among harmless memory: there is no other fault
    if wrong.facts:
        yield from diagnose(wrong, lambda other: judge(other, backend, device).status == "pass")
    yield from _alone(problem, backend, device, result)


def _hazards(
    problem: Problem, backend: str | None, device: torch.device | str, result: Result, plain: Recording
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """What the machine code of an emulated device rests on: seen in the run, and in one where waves and loads are slow."""
    if not plain.launches:
        return (), ()
    slow = Recording(instrumented=True)
    try:
        with recording(slow):
            late = problem.lay_out(device, poison=True).run(backend)
    except Exception:
        findings, notes = findings_of(plain, slow)
        if not findings:
            raise
        return findings, notes
    findings, notes = findings_of(plain, slow)
    if not findings and not notes and not same_bits(result, late):
        told = f"waves in short turns and loads as late as they may be give other bits: {difference(result, late)}"
        findings = (Finding("determinism", told),)
    return findings, notes


def _why_different(problem: Problem, backend: str | None, device: torch.device | str, result: Result, quiet: Result) -> Finding:
    """Two runs gave different bits: because the memory around differs, or because no two runs are alike."""
    for before, poison in ((result, True), (quiet, False)):
        again = problem.lay_out(device, poison=poison).run(backend)
        if not same_bits(before, again):
            return Finding("determinism", f"the same call twice gives other bits: {difference(before, again)}")
    return Finding("unowned memory", f"what nobody owns changes the result: {difference(quiet, result)}")


def _alone(problem: Problem, backend: str | None, device: torch.device | str, result: Result) -> Iterator[Finding]:
    """With fixed splits, a request has the same bits alone and in a batch."""
    for tokens, lonely in problem.alone():
        alone = lonely.lay_out(device, poison=True).run(backend)
        batch = Result(result.out[tokens], None if result.lse is None else result.lse[:, tokens])
        if not same_bits(alone, batch):
            where = f"tokens {tokens.start}..{tokens.stop - 1}"
            yield Finding("splits", f"with fixed splits, {where} have other bits alone than in the batch: {difference(alone, batch)}")
            return
