"""Holding a result against the truth."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from dualmla.testing.cases import DecodeInputs
from dualmla.testing.exact import Exact, exact_decode
from dualmla.testing.layer import LayerInputs, exact_layer
from dualmla.testing.prefill import PrefillInputs, exact_prefill


@dataclass(frozen=True)
class Comparison:
    """How a result stands against the truth.

    Attributes:
        max_error: largest |out - exact|, where both are finite.
        allowed: what was allowed at the coordinate that used most of its allowance.
        budget_used: error / allowed there; above 1 is a failure.
        worst: (token, head, column) of it.
        cosine_difference: 1 - 2 sum(xy) / sum(x^2 + y^2).
        lse_error, lse_budget_used, lse_worst: the same of the LSE, (head, token).
        failures: sentences, each with a coordinate; empty when the result agrees.
    """

    max_error: float
    allowed: float
    budget_used: float
    worst: tuple[int, ...]
    cosine_difference: float
    lse_error: float = 0.0
    lse_budget_used: float = 0.0
    lse_worst: tuple[int, ...] = ()
    failures: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return not self.failures


FLASHMLA_ABSOLUTE, FLASHMLA_RELATIVE, FLASHMLA_COSINE = 8e-4, 2.01 / 128, 5e-6
"""FlashMLA's own gate. An element passes by either of the first two; the absolute one is for values of rms 0.1."""


def compare(out: torch.Tensor, lse: torch.Tensor | None, exact: Exact, *, flashmla_gate: bool = True) -> Comparison:
    """Judge a result.

    Arguments:
        out: [T, H, D_v] and lse: fp32 [H, T] or None, of the backend.
        exact: the truth.
        flashmla_gate: also hold out against FlashMLA's tolerances, which are made for scores of order 1.
    """
    wrong_shapes = [
        f"{name} has shape {list(got.shape)}, it must be {list(want.shape)}"
        for name, got, want in (("out", out, exact.out), ("lse", lse, exact.lse))
        if got is not None and got.shape != want.shape
    ]
    if wrong_shapes:
        return Comparison(math.inf, 0.0, math.inf, (), math.inf, failures=wrong_shapes)
    failures: list[str] = []
    errors = _within("out", out, exact.out, exact.out_allowed, ("token", "head", "column"), failures)
    got = torch.nan_to_num(out.double(), nan=0.0, posinf=0.0, neginf=0.0)
    cosine = cosine_difference(got, exact.out)
    if flashmla_gate:
        error = (got - exact.out).abs()
        beyond = (error > FLASHMLA_ABSOLUTE * max(exact.value_rms / 0.1, 1.0)) & (error > FLASHMLA_RELATIVE * exact.out.abs())
        if bool(beyond.any()):
            failures.append(f"out is beyond FlashMLA's absolute and relative tolerance at {_first(beyond)} [token, head, column]")
        if cosine > FLASHMLA_COSINE:
            failures.append(f"out has a cosine difference of {cosine:.2e}, FlashMLA allows {FLASHMLA_COSINE}")
    if lse is None:
        return Comparison(*errors, cosine, failures=failures)
    lse_error, _, lse_used, lse_worst = _within("lse", lse, exact.lse, exact.lse_allowed, ("head", "token"), failures)
    return Comparison(*errors, cosine, lse_error, lse_used, lse_worst, failures)


def compare_decode(out: torch.Tensor, lse: torch.Tensor | None, inputs: DecodeInputs) -> Comparison:
    """Judge what a backend returned for a case. FlashMLA's gate stands on top where the data is of its kind."""
    return compare(out, lse, exact_decode(inputs), flashmla_gate=inputs.case.data in ("normal", "flashmla"))


def assert_decode_agrees(out: torch.Tensor, lse: torch.Tensor | None, inputs: DecodeInputs) -> None:
    """Raise AssertionError with the case and every failure unless the result is within budget."""
    _assert_agrees(inputs.case, compare_decode(out, lse, inputs))


def assert_prefill_agrees(out: torch.Tensor, lse: torch.Tensor | None, inputs: PrefillInputs) -> None:
    """As `assert_decode_agrees`, of a prefill."""
    _assert_agrees(inputs.case, compare(out, lse, exact_prefill(inputs)))


def assert_layer_agrees(output: torch.Tensor, inputs: LayerInputs) -> None:
    """As `assert_decode_agrees`, of a layer's `output` [T, num_heads * v_head_dim]."""
    out = output.view(len(output), inputs.case.num_heads, inputs.case.v_head_dim)
    _assert_agrees(inputs.case, compare(out, None, exact_layer(inputs), flashmla_gate=False))


def _assert_agrees(case: object, comparison: Comparison) -> None:
    if comparison.failures:
        raise AssertionError(f"{case}:\n  " + "\n  ".join(comparison.failures))


def assert_bits_equal(got: torch.Tensor, want: torch.Tensor, name: str = "tensor") -> None:
    """Raise AssertionError naming the first coordinate whose bits differ; NaN equals the same NaN."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(f"{name} is {got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    differ = got.contiguous().view(bits) != want.contiguous().view(bits)
    if bool(differ.any()):
        at = _first(differ)
        raise AssertionError(
            f"{name}{list(at)} is {got[at].item()!r}, not {want[at].item()!r}; {int(differ.sum())} of {differ.numel()} differ"
        )


def cosine_difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 - 2 sum(xy) / sum(x^2 + y^2) in float64; 0 when both are 0."""
    x, y = x.double(), y.double()
    largest = max(float(x.abs().amax()), float(y.abs().amax())) if x.numel() else 0.0
    if largest == 0.0:
        return 0.0
    x, y = x / largest, y / largest  # squares of denormal numbers would vanish
    return 1.0 - 2.0 * float((x * y).sum()) / float((x * x + y * y).sum())


def _first(flags: torch.Tensor) -> tuple[int, ...]:
    """The first coordinate that is set."""
    return tuple(flags.nonzero()[0].tolist())


def _within(
    name: str, got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor, axes: tuple[str, ...], failures: list[str]
) -> tuple[float, float, float, tuple[int, ...]]:
    """(largest error, allowance and share of it used at the worst coordinate, that coordinate); what is wrong goes to `failures`."""
    if not got.numel():
        return 0.0, 0.0, 0.0, ()
    got = got.double()
    strange = _strange(got, want)
    if bool(strange.any()):
        at = _first(strange)
        failures.append(
            f"{name} is {float(got[at])} at {at} [{', '.join(axes)}], it must be {float(want[at]):.6g}; "
            f"{int(strange.sum())} of {got.numel()} elements are inf or nan where they must not be, or the reverse"
        )
    error = torch.where(strange | (got == want), 0.0, (got - want).abs())
    used = torch.where(strange, 0.0, budget_used(got, want, allowed))
    worst = tuple(int(i) for i in torch.unravel_index(used.argmax(), used.shape))
    if float(used[worst]) > 1:
        failures.append(
            f"{name} is {float(got[worst]):.9g} at {worst} [{', '.join(axes)}], exact is {float(want[worst]):.9g}: "
            f"error {float(error[worst]):.2e}, allowed {float(allowed[worst]):.2e}; {int((used > 1).sum())} of {got.numel()} elements"
        )
    return float(error.max()), float(allowed[worst]), float(used[worst]), worst


def budget_used(got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """|got - want| / allowed of each element, float64: above 1 is wrong; inf where one is inf or nan and the other is not."""
    got = got.double()
    used = torch.where(got == want, 0.0, (got - want).abs() / allowed)  # 0 allowed and inf - inf: equal is right
    return torch.where(_strange(got, want), torch.inf, used)


def _strange(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return ~(got.isfinite() & want.isfinite()) & (got != want)
