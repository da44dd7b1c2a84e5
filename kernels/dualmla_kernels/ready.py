"""Kernels launched before, launched again without most of what Triton's own launch costs the host.

At each launch Triton works out from every argument what the kernel has to be compiled for, reads its environment variables and
looks the kernel up by a text of it all; the driver takes a fifth of that time. Here arguments are sorted into kinds that tell
apart at least what Triton tells apart, and what Triton launched for the same kinds before is launched:

    tensor   its dtype; whether it is aligned to 16 bytes; on AMD also whether its memory is within 2 GiB (buffer instructions)
    int      1; a multiple of 16; any other; and the integer type that holds it
    float, bool, None   their type

These are the rules of Triton 3.6 to 3.9; tests/test_launch.py holds them against Triton's own. Other versions, arguments that
are none of these, and launches that somebody wants to hear of or has instrumented go Triton's way.

Tensors that a kernel takes by descriptor are encoded for the TMA unit once an address (boxes.py), not at each launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from dualmla_kernels.boxes import Box, described, launcher_of_encoded
from dualmla_kernels.target import TRITON_VERSION

RULES_KNOWN = (3, 6) <= TRITON_VERSION <= (3, 9)

MOST = 1024
"""Kinds of launches remembered of a kernel with its constants: more than come up, and a bound of the memory they take."""


@dataclass(frozen=True)
class _Compiled:
    """What launches a kernel that Triton has compiled.

    Attributes:
        kernel: Triton's own object, with which the code would be unloaded.
        run: called with grid, stream, `between` and the arguments.
        boxes: what the kernel was compiled to of each of its descriptors.
    """

    kernel: CompiledKernel
    run: Callable[..., None]
    between: tuple[Any, ...]
    boxes: Sequence[Any]


def sort(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """The kind of each argument, and its value as a launch takes it: tensors as their addresses. Ends before what has no kind."""
    kinds: list[Any] = []
    values: list[Any] = []
    add_kind, add_value = kinds.append, values.append
    tensor, on_amd = torch.Tensor, torch.version.hip is not None
    for arg in args:  # at every launch: no call that can be saved
        kind = type(arg)
        if kind is tensor or isinstance(arg, tensor):
            address = arg.data_ptr()
            if on_amd:
                add_kind((arg.dtype, address % 16 == 0, arg.untyped_storage().size() < 2**31))
            else:
                add_kind((arg.dtype,) if address % 16 else arg.dtype)
            add_value(address)
        elif kind is int:
            if not -(2**31) <= arg < 2**31:
                add_kind((arg % 16 == 0, arg < 2**63))
            else:
                add_kind(1 if arg == 1 else 0 if arg % 16 else 16)
            add_value(arg)
        elif arg is None or kind is float or kind is bool:
            add_kind(kind)
            add_value(arg)
        else:
            break
    return kinds, values


class Decided:
    """What launches have in common: the last arguments before the constants, and how the first ones are copied from.

    Arguments:
        numbers: ints.
        boxes: of the first arguments, where the kernel takes them by descriptors.
    """

    def __init__(self, numbers: tuple[int, ...] = (), boxes: Sequence[Box] = ()) -> None:
        self.numbers, self.boxes = numbers, boxes
        kinds, _ = sort(numbers)
        self.kinds = (*(box.kind for box in boxes), *kinds)


NOTHING = Decided()


class Settled:
    """A kernel with all that it is compiled for settled: takes addresses that are multiples of 16, and floats, and asks for no more."""

    __slots__ = ("_after", "_before", "_between", "_boxes", "_compiled", "_kernel", "_run")

    def __init__(self, kernel: Any, compiled: _Compiled, grid: tuple[int, int, int], after: tuple[Any, ...], boxes: Sequence[Box]) -> None:
        self._kernel, self._compiled, self._run = kernel, compiled, compiled.run
        self._before, self._between, self._after = grid, compiled.between, after
        self._boxes = [*zip(boxes, compiled.boxes, strict=True)]

    @property
    def heard(self) -> bool:
        """Whether its launches have to go Triton's way for now."""
        return _left_to_triton(self._kernel)

    def encoded(self, *tensors: torch.Tensor) -> list[Any]:
        """What stands for the tensors that are taken by descriptors."""
        return [value for (box, metadata), tensor in zip(self._boxes, tensors, strict=True) for value in box.encoded(tensor, metadata)]

    def __call__(self, stream: int, *values: Any) -> None:
        """Launch it on a stream of the current device."""
        self._run(*self._before, stream, *self._between, *values, *self._after)


class Ready:
    """A kernel and its constants on one device: launched through Triton once for each kind of arguments, and then without.

    Arguments:
        kernel: a `@triton.jit` function.
        device_index: of the GPU, which is current in every launch.
        constants: by name, and options of the compiler.
    """

    def __init__(self, kernel: Any, device_index: int, constants: dict[str, Any]) -> None:
        self._kernel, self._device_index, self._constants = kernel, device_index, constants
        # for the constants, which are compiled in; a kernel that Triton interprets (TRITON_INTERPRET=1) does not tell them
        self._nothings = (None,) * len(getattr(kernel, "constexprs", ()))
        self._compiled: dict[tuple[Any, ...], _Compiled] = {}

    def launch(self, grid: tuple[int, ...], args: tuple[Any, ...], decided: Decided = NOTHING) -> None:
        """`kernel[grid](*args, *decided.numbers, **constants)`, the first of `args` by `decided.boxes`."""
        boxes = decided.boxes
        kinds, values = sort(args[len(boxes) :] if boxes else args)
        key = (*kinds, *decided.kinds)
        compiled = self._compiled.get(key)
        if compiled is None or _left_to_triton(self._kernel):
            self._launch_by_triton(grid, args, decided, key)
            return
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(self._device_index)
        if boxes:
            encoded = [box.encoded(tensor, metadata) for box, tensor, metadata in zip(boxes, args, compiled.boxes, strict=False)]
            values[:0] = chain.from_iterable(encoded)
        compiled.run(x, y, z, stream, *compiled.between, *values, *decided.numbers, *self._nothings)

    def settled(self, grid: tuple[int, ...], args: tuple[Any, ...], decided: Decided) -> Settled | None:
        """What launches arguments of these kinds at other addresses, all multiples of 16; None where that is not all to be known.

        An int would have to be of the same kind too: none is taken.
        """
        if torch.version.hip is not None:  # asked at every launch there
            return None
        kinds, _ = sort(args[len(decided.boxes) :])
        compiled = self._compiled.get((*kinds, *decided.kinds))
        if compiled is None or any(isinstance(kind, tuple | int) or kind is bool for kind in kinds):
            return None
        x, y, z = (*grid, 1, 1)[:3]
        return Settled(self._kernel, compiled, (x, y, z), (*decided.numbers, *self._nothings), decided.boxes)

    def _launch_by_triton(self, grid: tuple[int, ...], args: tuple[Any, ...], decided: Decided, key: tuple[Any, ...]) -> None:
        boxes, left = decided.boxes, _left_to_triton(self._kernel)
        given = (*described(boxes, args), *decided.numbers)
        compiled = self._kernel[grid](*given, **self._constants)
        if left or not RULES_KNOWN or not isinstance(compiled, CompiledKernel) or not _constants_last(self._kernel, len(given)):
            return
        metadata = (compiled.metadata.tensordesc_meta or ()) if boxes else ()
        if len(key) != len(given) or len(metadata) != len(boxes):
            return
        if len(self._compiled) >= MOST:
            self._compiled.clear()
        launcher = launcher_of_encoded(compiled, boxes) if boxes else compiled.run
        self._compiled[key] = _Compiled(compiled, *past_python(launcher, compiled.function, compiled.packed_metadata), metadata)


def past_python(launcher: Any, function: Any, packed: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What launches, and what it takes between the stream and the arguments.

    In Triton 3.6 for CUDA that is the launcher's own C function: the Python around it sees to scratch memory, which most kernels
    don't want, in over a microsecond.
    """
    is_cuda = type(launcher).__name__ == "CudaLauncher"
    if TRITON_VERSION == (3, 6) and is_cuda and not launcher.global_scratch_size and not launcher.profile_scratch_size:
        options = launcher.launch_cooperative_grid, launcher.launch_pdl
        return launcher.launch, (function, *options, None, None, packed, None, None, None)
    return launcher, (function, packed, None, None, None)


def _left_to_triton(kernel: Any) -> bool:
    """Whether somebody listens to launches, or has them compiled for debugging."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or kernel.pre_run_hooks
        or runtime.debug
        or knobs.compilation.instrumentation_mode
        or getattr(runtime, "add_stages_inspection_hook", None)
    )


def _constants_last(kernel: Any, count: int) -> bool:
    """Whether the first `count` parameters are arguments and the others constants."""
    return list(kernel.constexprs) == list(range(count, len(kernel.arg_names)))
