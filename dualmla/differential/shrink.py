"""Reducing a failing problem while it fails the same way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dualmla.differential.problems import Problem
from dualmla.differential.verdict import Verdict


@dataclass(frozen=True)
class Shrunk:
    """The smallest problem found, its verdict, and how many were tried; `verdict` is None when the failure did not come back."""

    problem: Problem
    verdict: Verdict | None
    tried: int


def shrink(problem: Problem, verdict: Verdict, judge: Callable[[Problem], Verdict], *, seconds: float = 20.0, most: int = 1000) -> Shrunk:
    """Take the first simpler problem that fails in the same kind, again and again, until none does.

    Arguments:
        problem: fails.
        verdict: how.
        judge: of a problem, on the failing backend.
        seconds, most: when to stop looking, with the smallest so far.

    A failure that two more runs do not show again is not shrunk: nothing could be learned from a problem that passes.
    """
    kind = verdict.kind
    deadline = time.perf_counter() + seconds
    tried = 0
    if not any(judge(problem).kind == kind for _ in range(2)):
        return Shrunk(problem, None, 2)
    progress = True
    while progress:
        progress = False
        for candidate in problem.smaller():
            if tried >= most or time.perf_counter() > deadline:
                return Shrunk(problem, verdict, tried)
            tried += 1
            result = judge(candidate)
            if result.kind == kind:
                problem, verdict, progress = candidate, result, True
                break
    return Shrunk(problem, verdict, tried)
