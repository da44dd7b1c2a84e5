"""One table of instruction semantics: opcode name -> function.

The meaning of an arithmetic instruction is written once, as a small Python function of one lane (`vector.py`) or of one
wave (`scalar.py`), under a decorator that gives its opcode names and its signature:

    @vector("u u -> u", "V_ADD_U32")
    def add_u32(a, b):
        return a + b

The same function is called with plain integers by the unit tests, and compiled by numba into the interpreter:
`lane_dispatcher` and `scalar_dispatcher` write one `if op == ...` chain over all of them, whose loops over the 64 lanes
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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numba

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


def _compile(source: list[str], name: str, namespace: dict[str, Any]) -> Any:
    exec(compile("\n".join(source), f"<{name}>", "exec"), namespace)
    return numba.njit(namespace[name])


def _unique(table: Iterable[Semantics]) -> dict[str, Callable[..., Any]]:
    """Every distinct function of the table under a name usable in generated source."""
    return {f"f_{entry.function.__name__}": entry.function for entry in table}


def lane_dispatcher() -> Any:
    """Compile `execute(op, wave)`: apply vector opcode number `op` to the operand rows `wave.a, b, c, d` (their letters'
    views, see `state.py`) of all 64 lanes, leaving results in `wave.out` and `wave.out_mask`."""
    row = {"u": "np.int64(wave.{0}[l])", "i": "np.int64(wave.{0}_i[l])", "f": "wave.{0}_f[l]"}
    row |= {"q": "wave.{0}_q[l]", "d": "wave.{0}_d[l]", "m": "np.int64(wave.{0}[l])", "l": "np.int64(l)"}
    target = {"u": "wave.out[l]", "i": "wave.out[l]", "f": "wave.out_f[l]", "q": "wave.out_q[l]", "d": "wave.out_d[l]", "m": "wave.out_mask[l]"}
    lines = ["def execute(op, wave):"]
    for entry in VECTOR.values():
        call = f"f_{entry.function.__name__}({', '.join(row[t].format(n) for t, n in zip(entry.arguments, 'abcd', strict=False))})"
        lines += [f"    {'el' if entry.number else ''}if op == {entry.number}:", "        for l in range(64):"]
        lines += [f"            {', '.join(target[t] for t in entry.results)} = {call}"]
    functions = {name: numba.njit(function) for name, function in _unique(VECTOR.values()).items()}
    return _compile(lines, "execute", {**functions, **_numpy()})


def scalar_dispatcher() -> Any:
    """Compile `execute(op, a, b, scc) -> (value, scc)` over every scalar opcode; operands are int64 bit patterns."""
    lines = ["def execute(op, a, b, scc):"]
    convert = {"u": "{0} & 0xFFFFFFFF", "i": "np.int64(np.int32({0}))", "q": "{0}"}
    for entry in SCALAR.values():
        arguments = ", ".join(convert[t].format(n) for t, n in zip(entry.arguments, "ab", strict=False))
        lines += [f"    {'el' if entry.number else ''}if op == {entry.number}:"]
        lines += [f"        return f_{entry.function.__name__}({arguments}, scc)"]
    lines += ["    return np.int64(0), scc"]
    functions = {name: numba.njit(function) for name, function in _unique(SCALAR.values()).items()}
    return _compile(lines, "execute", {**functions, **_numpy()})


def _numpy() -> dict[str, Any]:
    import numpy

    return {"np": numpy}
