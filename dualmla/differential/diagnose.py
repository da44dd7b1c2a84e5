"""Naming the fault behind a wrong result.

The result is held against the truths of other questions: a wrong scale, a shifted mask, another head, another base of
the logarithm. The one that explains every wrong row names the fault; otherwise it is the error budget that is broken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from dualmla.differential.bits import first
from dualmla.differential.problems.base import Call, Problem, Result
from dualmla.differential.verdict import Finding
from dualmla.testing import Exact, budget_used

DISTINCT = 10.0
"""Two heads whose truths are within this many allowances everywhere can't be told apart."""


@dataclass(frozen=True)
class Wrong:
    """A result beside the truth; `facts` are what `compare` said about it, empty when it agrees."""

    problem: Problem
    call: Call
    result: Result
    exact: Exact
    facts: str

    @cached_property
    def empty(self) -> torch.Tensor:
        """[H, T]: the row sees no key."""
        return self.exact.lse.isneginf()

    @cached_property
    def out_rows(self) -> torch.Tensor:
        """[H, T]: the row of out is wrong."""
        return ~_right(self.result.out, self.exact)

    @cached_property
    def lse_rows(self) -> torch.Tensor:
        """[H, T]: the LSE is wrong."""
        if self.result.lse is None:
            return torch.zeros_like(self.empty)
        return budget_used(self.result.lse, self.exact.lse, self.exact.lse_allowed) > 1

    @cached_property
    def bad(self) -> torch.Tensor:
        """[H, T]: one of the two is."""
        return self.out_rows | self.lse_rows


def diagnose(wrong: Wrong, passes: Callable[[Problem], bool]) -> Iterator[Finding]:
    """The faults of a result that does not agree, each with the plain facts.

    Arguments:
        wrong: the result.
        passes: whether the backend passes another problem.
    """
    if bool(wrong.lse_rows.any()) and not bool(wrong.out_rows.any()) and (reading := _other_reading(wrong)):
        yield Finding("lse", f"{reading}; {wrong.facts}")
        return
    empty, filled = wrong.bad & wrong.empty, wrong.bad & ~wrong.empty
    findings = []
    if bool(filled.any()):
        findings.append(_filled_row(wrong, passes, only_lse=not bool((filled & wrong.out_rows).any())))
    elif not bool(empty.any()):
        findings.append(Finding("accuracy", wrong.facts))  # within budget, beyond FlashMLA's gate
    if bool(empty.any()):
        explained = bool(findings) and findings[0].sentence != wrong.facts  # and so are the empty rows
        findings.insert(1 if explained else 0, _empty_row(wrong, *first(empty)))
    yield from findings


def _empty_row(wrong: Wrong, head: int, token: int) -> Finding:
    lse = "" if wrong.result.lse is None else f", lse {float(wrong.result.lse[head, token])}"
    values = wrong.result.out[token, head].float()
    got = f"has out {float(values[values.abs().nan_to_num(torch.inf).argmax()])}{lse}; it must have 0 and -inf"
    if token >= wrong.problem.tokens:
        return Finding("unwritten", f"row {token} of padding, head {head}, {got}")
    return Finding("empty row", f"token {token}, head {head}, which sees no key, {got}")


def _filled_row(wrong: Wrong, passes: Callable[[Problem], bool], only_lse: bool) -> Finding:
    if answered := _other_question(wrong):
        return answered
    if only_lse:
        return Finding("lse", wrong.facts)
    if swapped := _swapped_heads(wrong):
        return Finding("heads", f"{swapped}; {wrong.facts}")
    alternatives = ((kind, words) for kind, words, other in wrong.problem.alternatives() if passes(other))
    kind, words = next(alternatives, ("accuracy", ""))
    return Finding(kind, f"{words}; {wrong.facts}" if words else wrong.facts)


def _other_question(wrong: Wrong) -> Finding | None:
    """The question whose truth this is."""
    explained = ((kind, words) for kind, words, question in wrong.problem.questions() if _explains(wrong, wrong.call.exact(question)))
    kind, words = next(explained, (None, ""))
    return Finding(kind, f"{words}; {wrong.facts}") if kind else None


def _other_reading(wrong: Wrong) -> str | None:
    """Beside a right output: how the LSE must be read to be right, if it can."""
    exact, lse = wrong.exact, wrong.result.lse
    if lse is None:
        return None
    heads, tokens = lse.shape
    readings = {
        "lse is in base 2, not natural": lse.double() * math.log(2),
        "lse is laid out [num_tokens, num_heads], not [num_heads, num_tokens]": lse.reshape(tokens, heads).T,
        "lse has softmax_scale twice": lse.double() / (wrong.problem.softmax_scale or 1.0),
    }
    return next((words for words, x in readings.items() if bool((budget_used(x, exact.lse, exact.lse_allowed) <= 1).all())), None)


def _right(out: torch.Tensor, exact: Exact) -> torch.Tensor:
    """[H, T]: the row of out is right."""
    return budget_used(out, exact.out, exact.out_allowed).amax(-1).T <= 1


def _explains(wrong: Wrong, other: Exact) -> bool:
    """Whether another truth is what every row with keys holds; of a call with several paths, of those that are wrong anywhere."""
    right = _right(wrong.result.out, other)
    if wrong.result.lse is not None:
        right &= budget_used(wrong.result.lse, other.lse, other.lse_allowed) <= 1
    wrongs = [path for path in wrong.problem.paths if bool((wrong.bad & ~wrong.empty)[:, path].any())]
    return all(bool((right | wrong.empty)[:, path].all()) for path in wrongs)


def _swapped_heads(wrong: Wrong) -> str | None:
    """Whose attention the wrong heads hold, if each holds that of another one; few keys make two heads alike now and then."""
    heads = (wrong.out_rows & ~wrong.empty).any(1).nonzero().flatten().tolist()
    for head in reversed(heads):
        if (held := _held(wrong, head)) is None:
            return None
    return f"head {heads[0]} holds the attention of head {held}"


def _held(wrong: Wrong, head: int) -> int | None:
    """The head whose attention `head` holds."""
    exact = wrong.exact
    for other in range(wrong.empty.shape[0]):
        truth, allowed = exact.out[:, other], exact.out_allowed[:, other]
        alike = bool((budget_used(exact.out[:, head], truth, allowed) < DISTINCT).all())
        if other != head and not alike and bool((budget_used(wrong.result.out[:, head], truth, allowed) <= 1).all()):
            return other
    return None
