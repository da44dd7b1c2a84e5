"""numba's decorators as this package uses them, typed.

numba optimises a compiled function again with every function that calls it, so how deep compiled functions nest decides
how long the first run takes. `merged` functions add no level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])


def njit(function: F) -> F:
    """Compile in nopython mode."""
    return numba.njit(function)  # type: ignore[no-any-return]


def inlined(function: F) -> F:
    """Compile, and always inline the machine code: for small functions called once a lane."""
    return numba.njit(forceinline=True)(function)  # type: ignore[no-any-return]


def merged(function: F) -> F:
    """Insert into the caller before it is compiled: for functions with one place of call."""
    return numba.njit(inline="always")(function)  # type: ignore[no-any-return]
