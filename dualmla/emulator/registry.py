"""One table of instruction semantics: opcode name -> function.

The meaning of an arithmetic instruction is written once, as a small Python function of one lane (`vector.py`) or of one
wave (`scalar.py`), under a decorator that gives its opcode names and its signature:

    @vector("u u -> u", "V_ADD_U32")
    def add_u32(a, b):
        return a + b

The same function is called with plain integers by the unit tests, and compiled by numba into the interpreter:
`lane_dispatcher` and `scalar_dispatcher` generate one `if op == ...` chain over all of them, whose loops over the 64 lanes
LLVM turns into SIMD code. To find an instruction, search for its name in quotes.

Signature letters, arguments left of the arrow and results right of it:

    u  32-bit pattern, an integer 0 .. 2**32-1      f  float32
    i  32-bit two's complement, an integer          d  float64
    q  64-bit pattern as a signed integer           m  one bit of a lane mask, 0 or 1
    l  the lane's number (last, and no operand)

Integer results may be any integer; they are stored modulo 2**32 (u, i) or 2**64 (q). Numbers reach compiled code as
int64, so an intermediate must fit 64 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np

from dualmla.emulator import state

F = TypeVar("F", bound=Callable[..., Any])

WIDTH = {"u": 1, "i": 1, "f": 1, "m": 1, "q": 2, "d": 2}
"""How many 32-bit registers an operand of each signature letter takes."""


@dataclass(frozen=True)
class Semantics:
    """What one opcode does. `number` is its place in the dispatcher."""

    name: str
    number: int
    function: Callable[..., Any]
    arguments: str
    results: str


VECTOR: dict[str, Semantics] = {}
SCALAR: dict[str, Semantics] = {}


def vector(signature: str, *names: str) -> Callable[[F], F]:
    """Register the per-lane semantics of the vector opcodes `names` (no `_E32`/`_E64` suffix)."""
    arguments, _, results = signature.partition("->")

    def register(function: F) -> F:
        for name in names:
            assert name not in VECTOR, name
            VECTOR[name] = Semantics(name, len(VECTOR), function, "".join(arguments.split()), "".join(results.split()))
        return function

    return register


def scalar(signature: str, *names: str) -> Callable[[F], F]:
    """Register the semantics of the scalar opcodes `names`: `(a, b, scc) -> (value, scc)`, letters u, i and q."""
    arguments, _, results = signature.partition("->")

    def register(function: F) -> F:
        for name in names:
            assert name not in SCALAR, name
            SCALAR[name] = Semantics(name, len(SCALAR), function, "".join(arguments.split()), "".join(results.split()))
        return function

    return register


def fingerprint() -> str:
    """Changes with every source file of this package. It goes into the names of compiled functions, because numba's cache
    on disk looks at the one file a function stands in."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def compiled(signature: Any, function: Callable[..., Any]) -> Any:
    """`function` compiled for the numba signature, kept in numba's cache, callable from compiled code by address: what calls
    it is not compiled again with it."""
    function.__name__ = function.__qualname__ = f"{function.__name__}_{fingerprint()}"
    return numba.cfunc(signature, cache=True)(function)


_ROW = {"u": "np.int64(wave.{0}[lane])", "i": "np.int64(wave.{0}_i[lane])", "f": "wave.{0}_f[lane]", "q": "wave.{0}_q[lane]"}
_ROW |= {"d": "wave.{0}_d[lane]", "m": "np.int64(wave.{0}[lane])", "l": "np.int64(lane)"}
_RESULT = {"u": "wave.out[lane]", "i": "wave.out[lane]", "f": "wave.out_f[lane]", "q": "wave.out_q[lane]", "d": "wave.out_d[lane]"}
_RESULT |= {"m": "wave.out_mask[lane]"}
_SCALAR = {"u": "{0} & 0xFFFFFFFF", "i": "np.int64(np.int32({0}))", "q": "{0}"}


def lane_dispatcher() -> Any:
    """Compile `execute(op, wave)`: apply vector opcode number `op` to the operand rows `wave.a, b, c, d` (their letters'
    views, see `state.py`) of all 64 lanes, leaving results in `wave.out` and `wave.out_mask`."""
    lines = ["def execute_lanes(op, wave):"]
    for entry in VECTOR.values():
        arguments = ", ".join(_ROW[letter].format(name) for letter, name in zip(entry.arguments, "abcd", strict=False))
        lines += [f"    {'el' if entry.number else ''}if op == {entry.number}:  # {entry.name}", "        for lane in range(64):"]
        lines += [f"            {', '.join(_RESULT[letter] for letter in entry.results)} = {entry.function.__name__}({arguments})"]
    wave = numba.typeof(np.zeros(1, state.WAVE)).dtype
    return compiled(numba.types.void(numba.int64, wave), _generated(lines, "execute_lanes", VECTOR))


def scalar_dispatcher() -> Any:
    """Compile `execute(op, a, b, scc) -> (value, scc)` over every scalar opcode; operands are int64 bit patterns."""
    lines = ["def execute_scalar(op, a, b, scc):"]
    for entry in SCALAR.values():
        arguments = ", ".join(_SCALAR[letter].format(name) for letter, name in zip(entry.arguments, "ab", strict=False))
        lines += [f"    {'el' if entry.number else ''}if op == {entry.number}:  # {entry.name}"]
        lines += [f"        value, condition = {entry.function.__name__}({arguments}, scc)"]
    lines += ["    return np.int64(value), np.int64(condition)"]
    pair = numba.types.UniTuple(numba.int64, 2)
    return compiled(pair(numba.int64, numba.int64, numba.int64, numba.int64), _generated(lines, "execute_scalar", SCALAR))


def _generated(lines: list[str], name: str, table: dict[str, Semantics]) -> Callable[..., Any]:
    """The function defined by `lines`, with every registered function of the table compiled in its globals."""
    namespace: dict[str, Any] = {entry.function.__name__: entry.function for entry in table.values()}
    namespace = {key: numba.njit(function) for key, function in namespace.items()} | {"np": np, "__name__": __name__}
    exec(compile("\n".join(lines), __file__, "exec"), namespace)  # numba caches what stands in a file that exists
    return namespace[name]  # type: ignore[no-any-return]
