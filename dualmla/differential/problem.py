"""What the judge, the shrinker and the repro files need of an operation. One module each: `decode`, ..."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from dualmla.differential.verdict import Kind
from dualmla.testing import Exact


class Result(NamedTuple):
    """What a backend returned: out [T, H, D_v] and lse fp32 [H, T]; lse None where the operation has none."""

    out: torch.Tensor
    lse: torch.Tensor | None


class Call(Protocol):
    """A problem laid out in memory. May be run once: the result lies in its memory."""

    def run(self, backend: str | None) -> Result:
        """The result of `backend`, everything it allocates poisoned.

        Raises:
            BackendUnavailable: it refuses.
        """
        ...

    def exact(self, *, softmax_scale: float | None = None, shift: int = 0) -> Exact:
        """The truth; with another scale or a mask off by `shift`, what a backend with that fault would compute."""
        ...


class Problem(Protocol):
    """The numbers of one call, apart from memory."""

    @property
    def operation(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def softmax_scale(self) -> float | None:
        """None where there is none."""
        ...

    @property
    def wrong_scales(self) -> dict[str, float]:
        """Scales that a faulty backend might use, by what they are."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens that belong to a request; rows after them are padding."""
        ...

    @property
    def order_one(self) -> bool:
        """Scores are of order 1, so that FlashMLA's tolerances apply."""
        ...

    def lay_out(self, device: torch.device | str, *, poison: bool) -> Call:
        """Into adversarial memory (poison) or harmless memory; a right result has the same bits."""
        ...

    def alternatives(self) -> Iterator[tuple[Kind, str, Problem]]:
        """(kind of failure, sentence, problem): if the problem passes where this one fails, the failure is of that kind."""
        ...

    def alone(self) -> Iterator[tuple[slice, Problem]]:
        """Tokens and the problem of their request alone, where the same bits are promised alone and in the batch."""
        ...

    def smaller(self) -> Iterator[Problem]:
        """Simpler problems to try, the greatest step first."""
        ...
