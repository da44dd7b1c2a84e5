"""What the judge, the shrinker and the repro files need of an operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from dualmla.differential.verdict import Kind
from dualmla.testing import Exact

DEEPSEEK_SCALES = {"192 ** -0.5, from DeepSeek's head": 192**-0.5, "576 ** -0.5, from DeepSeek's latent row": 576**-0.5, "1": 1.0}
"""Scales that a faulty backend might have hard-coded, by what they are."""


class Result(NamedTuple):
    """What a backend returned: out [T, H, D_v] and lse fp32 [H, T]; lse None where the operation has none."""

    out: torch.Tensor
    lse: torch.Tensor | None


@dataclass(frozen=True)
class Question:
    """What a call might have been asked instead. A wrong result that is the truth of another question names its fault.

    Attributes:
        softmax_scale: None: the call's own.
        shift: keys that each query sees beyond its causal limit.
        last_page: False: without the keys in each request's last page.
    """

    softmax_scale: float | None = None
    shift: int = 0
    last_page: bool = True


ASKED = Question()
"""What was asked."""


class Call(Protocol):
    """A problem laid out in memory. To be run once: the result lies in its memory."""

    def run(self, backend: str | None) -> Result:
        """The result of `backend`, everything it allocates poisoned.

        Raises:
            BackendUnavailable: it refuses.
        """
        ...

    def exact(self, question: Question = ASKED) -> Exact:
        """The truth of a question, by default of the one that was asked; what an operation does not know is left out of account."""
        ...


class Problem(ABC):
    """The numbers of one call, apart from memory. Immutable, and pickled to reach a worker."""

    operation: ClassVar[str]
    order_one: bool = True
    """Scores are of order 1, so that FlashMLA's tolerances apply."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Short and telling."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Rows of the result that belong to a request; rows after them are padding."""

    @abstractmethod
    def lay_out(self, device: torch.device | str, *, poison: bool) -> Call:
        """Into adversarial memory (poison) or harmless memory; a right result has the same bits."""

    @abstractmethod
    def pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What JSON can hold, and the numbers; `problems.unpack` turns it back."""

    @classmethod
    @abstractmethod
    def unpack(cls, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Problem:
        """The reverse of `pack`."""

    @property
    def softmax_scale(self) -> float | None:
        """None where there is none."""
        return None

    @property
    def wrong_scales(self) -> dict[str, float]:
        """Scales that a faulty backend might use, by what they are."""
        return {}

    @property
    def paths(self) -> Sequence[slice]:
        """Tokens that go through the same kernels: a fault may be in those of one path alone."""
        return (slice(None),)

    def questions(self) -> Iterator[tuple[Kind, str, Question]]:
        """(kind of failure, sentence, question): a result that answers the question has failed in that way."""
        for name, scale in self.wrong_scales.items():
            if scale != self.softmax_scale:
                yield (
                    "scale",
                    f"softmax_scale {self.softmax_scale} is not used: this is the result for {name}",
                    Question(softmax_scale=scale),
                )
        if self.softmax_scale is not None:
            yield "mask", "queries see one key too few", Question(shift=-1)
            yield "mask", "queries see one key too many", Question(shift=1)

    def alternatives(self) -> Iterator[tuple[Kind, str, Problem]]:
        """(kind of failure, sentence, problem): if the problem passes where this one fails, the failure is of that kind."""
        yield from ()

    def alone(self) -> Iterator[tuple[slice, Problem]]:
        """Tokens and the problem of their request alone, where the same bits are promised alone and in the batch."""
        yield from ()

    def smaller(self) -> Iterator[Problem]:
        """Simpler problems to try, the greatest step first."""
        yield from ()


def fewer_heads(num_heads: int) -> list[int]:
    """Head counts to shrink to, the greatest step first; two, because some faults need another head."""
    return [heads for heads in dict.fromkeys((1, 2, num_heads // 2, num_heads - 1)) if 0 < heads < num_heads]
