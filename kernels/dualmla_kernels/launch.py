"""Launching a kernel where its tensors are: on a GPU as compiled code, on a CPU in Triton's interpreter, on "meta" by name only.

Triton decides at decoration time whether a function is compiled or interpreted, by an environment variable that would
have to be set before anybody imports it. Here the decision is made at launch, for our kernels alone: an interpreted
twin of the kernel is made once. While it runs, the functions it calls (`tl.max`, `tl.sum`, ... are themselves compiled
functions once triton was imported for compiling) are replaced by interpreted twins too. Afterwards everything that was
replaced, by us or by the interpreter itself, is put back: the user's own kernels never change.

The interpreter sets attributes of `triton.language` itself, which all threads share, and Triton has no place where a compilation
could be made to wait: until an interpreted launch returns, no other thread can compile a kernel. Interpreted launches of several
threads wait for one another. Compiled ones, on a GPU, replace nothing.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton.language as tl
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from dualmla_kernels.boxes import Box, described
from dualmla_kernels.ready import NOTHING, Decided, Ready, Settled
from dualmla_kernels.target import TRITON_VERSION, Launch, note

HAS_GLUON = TRITON_VERSION >= (3, 6)
"""Whether the Triton that is installed has the Gluon that kernels are written in: they are imported only where it has."""

# One interpreted launch at a time: the interpreter keeps its program ids and its patches in module globals.
_interpreter_lock = threading.RLock()

# Namespaces of the functions called in this launch, for which the interpreter has patched the language.
_patched: set[int] = set()


MOST = 1024
"""Kernels with constants remembered: more than come up, and a bound of the memory they take."""

_ready: dict[tuple[Any, ...], Ready] = {}


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **kwargs: Any) -> None:
    """Run `kernel[grid](*args, **kwargs)` with `device` current. The interpreter ignores launch options."""
    kind = device.type  # made a string of each time
    if kind == "cpu":
        with _interpreter_lock, _interpreting():
            _interpreted(kernel)[grid](*args, **kwargs)
    elif kind == "meta":
        note(Launch(_compiled(kernel), grid, args, kwargs))
    else:
        _launch_on(device, _ready_for(_compiled(kernel), device, kwargs), grid, args)


class Prepared:
    """`kernel[grid](*inputs, *numbers, **constants)` on a device with all but the inputs decided: for what is launched again and again.

    Arguments:
        numbers: ints, the last arguments before the constants.
        boxes: of the first inputs, where the kernel takes them by descriptors.
        constants: of the kernel, and options of the compiler.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        device: torch.device,
        numbers: tuple[int, ...],
        boxes: Sequence[Box] = (),
        /,
        **constants: Any,
    ) -> None:
        self.kernel, self._grid, self._device, self._constants = _compiled(kernel), grid, device, constants
        self._decided = Decided(numbers, boxes)
        self._ready = _ready_for(self.kernel, device, constants) if device.type == "cuda" else None

    def __call__(self, *inputs: Any) -> None:
        """Launch it with these inputs: tensors, floats, None."""
        if self._ready is None:
            given = (*described(self._decided.boxes, inputs), *self._decided.numbers)
            launch(self.kernel, self._grid, self._device, *given, **self._constants)
        else:
            _launch_on(self._device, self._ready, self._grid, inputs, self._decided)

    def settled(self, *inputs: Any) -> Settled | None:
        """What launches it for inputs of the same kinds, after it was launched for these; None where it can't be known."""
        return self._ready.settled(self._grid, inputs, self._decided) if self._ready else None


def stream_of(device: torch.device) -> int | None:
    """The current stream of the device, None where another device is the current one."""
    return driver.active.get_current_stream(device.index) if device.index == torch.cuda.current_device() else None


def _ready_for(kernel: Any, device: torch.device, constants: dict[str, Any]) -> Ready:
    """The same for the same kernel, GPU and constants."""
    key = (id(kernel), device.index, *constants, *constants.values())
    ready = _ready.get(key)
    if ready is None:
        if len(_ready) >= MOST:
            _ready.clear()
        ready = _ready[key] = Ready(kernel, device.index, constants)
    return ready


def _launch_on(device: torch.device, ready: Ready, grid: tuple[int, ...], args: tuple[Any, ...], decided: Decided = NOTHING) -> None:
    """With the device current."""
    if device.index == torch.cuda.current_device():
        ready.launch(grid, args, decided)
    else:
        with torch.cuda.device(device):
            ready.launch(grid, args, decided)


Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor: what a launch is worked out from, remembered by."""


def layout_of(tensor: torch.Tensor) -> Layout:
    """All that is known of a tensor but where it is."""
    return tensor.shape, tensor.stride(), tensor.dtype


def without_memory(layout: Layout) -> torch.Tensor:
    """A tensor of that layout on the device "meta"."""
    shape, strides, dtype = layout
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def cdiv(n: int, size: int) -> int:
    """Blocks of `size` that hold `n`. On the host: Triton's own, made for kernels too, costs microseconds a call."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below `n`, at least 1. On the host, as `cdiv`."""
    return 1 << max(n - 1, 0).bit_length()


def _interpreted(function: Any) -> Any:
    """The interpreted twin of a `@triton.jit` function; the function itself where it is one (TRITON_INTERPRET=1)."""
    if not isinstance(function, JITFunction):
        return function
    twin = _twin(function.fn)
    twin.compiled = function
    return twin


def _compiled(kernel: Any) -> Any:
    """What a twin is the twin of, else the kernel itself: while another thread interprets, names of kernels stand for twins."""
    return getattr(kernel, "compiled", kernel)


@functools.cache
def _twin(function: Callable[..., Any]) -> Any:
    from triton.runtime.interpreter import InterpretedFunction  # needs numpy: imported when first used

    class Twin(InterpretedFunction):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """A call by another kernel. The interpreter patches the language anew each time, at a higher cost than the call's own."""
            scope = id(self.fn.__globals__)
            if scope in _patched:
                return self.rewrite()(*args, **kwargs)
            _patched.add(scope)
            return super().__call__(*args, **kwargs)

    return Twin(function)


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """Within: every `@triton.jit` function that our kernels can name is its interpreted twin."""
    # the interpreter imports Gluon at its first launch, and Gluon wants the compiled functions: now, before they are replaced
    import triton.experimental.gluon  # noqa: F401

    scopes = list(_scopes())
    before = [dict(vars(scope)) for scope in scopes]
    try:
        for scope, names in zip(scopes, before, strict=True):
            for name, value in names.items():
                if isinstance(value, JITFunction):
                    setattr(scope, name, _interpreted(value))
        yield
    finally:
        _patched.clear()
        for scope, names in zip(scopes, before, strict=True):
            now = vars(scope)
            for name, value in names.items():  # names that are new stay: the interpreter's rewritten functions use them
                if now.get(name) is not value:
                    setattr(scope, name, value)


def _scopes() -> Iterator[Any]:
    """Every module and class whose names our kernels, or the interpreter on their behalf, replace."""
    yield from (tl, tl.core, tl.standard, tl.math, tl.tensor, tl.dtype, tl.condition, tl.core.tensor_descriptor_base)
    yield from (module for name, module in list(sys.modules.items()) if name.startswith("dualmla_kernels."))
