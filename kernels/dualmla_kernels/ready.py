"""Kernels launched before, launched again without most of what Triton's own launch costs the host.

At each launch Triton works out from every argument what the kernel has to be compiled for, reads its environment variables and
looks the kernel up by a text of it all; the driver takes a fifth of that time. Here arguments are sorted into kinds that tell
apart at least what Triton tells apart, and what Triton launched for the same kinds before is launched:

    tensor   its dtype; whether it is aligned to 16 bytes; on AMD also whether its memory is within 2 GiB (buffer instructions)
    int      1; a multiple of 16; any other; and the integer type that holds it
    float, bool, None   their type
    tensor descriptor   the dtype of its tensor, its block, and its layout where Gluon gives it one

These are the rules of Triton 3.6 to 3.9; tests/test_launch.py holds them against Triton's own. Other versions, arguments that
are none of these, and launches that a profiler's hooks want to hear of go Triton's way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from dualmla_kernels.target import TRITON_VERSION

RULES_KNOWN = (3, 6) <= TRITON_VERSION <= (3, 9)

MOST = 4096
"""Kinds of launches remembered: more than come up, and a bound of the memory they take."""

_launched: dict[tuple[Any, ...], tuple[Any, Any, Any, Any, tuple[None, ...]]] = {}
"""A kernel, what runs it compiled, two arguments of that, and what stands for its constants, which are compiled in."""


def launch_ready(kernel: Any, grid: tuple[int, ...], device_index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`kernel[grid](*args, **kwargs)` on the current device, which is `device_index`.

    Arguments:
        args: what the kernel takes before its constants.
        kwargs: its constants, and options of the compiler.
    """
    kinds, values = sort(args)
    key = (id(kernel), device_index, len(kinds), *kinds, *kwargs, *kwargs.values())
    found = _launched.get(key)
    if found is None or _hooked():
        compiled = kernel[grid](*args, **kwargs)
        if RULES_KNOWN and isinstance(compiled, CompiledKernel) and len(kinds) == len(args) and _constants_last(kernel, len(args)):
            if len(_launched) >= MOST:
                _launched.clear()
            constants = (None,) * (len(kernel.arg_names) - len(args))
            _launched[key] = kernel, compiled.run, compiled.function, compiled.packed_metadata, constants
        return
    _, run, function, metadata, constants = found
    x, y, z = (*grid, 1, 1)[:3]
    run(x, y, z, driver.active.get_current_stream(device_index), function, metadata, None, None, None, *values, *constants)


def sort(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """The kind of each argument, and its value as a launch takes it: tensors as their addresses. Ends before what has no kind."""
    kinds: list[Any] = []
    values: list[Any] = []
    add_kind, add_value = kinds.append, values.append
    tensor, on_amd = torch.Tensor, torch.version.hip is not None
    for arg in args:  # at every launch: no call that can be saved
        kind = type(arg)
        if kind is int:
            if not -(2**31) <= arg < 2**31:
                add_kind((arg % 16 == 0, arg < 2**63))
            else:
                add_kind(1 if arg == 1 else 0 if arg % 16 else 16)
            add_value(arg)
        elif isinstance(arg, tensor):
            address = arg.data_ptr()
            dtype = arg.dtype
            if on_amd:
                add_kind((dtype, address % 16 == 0, arg.untyped_storage().size() < 2**31))
            else:
                add_kind((dtype,) if address % 16 else dtype)
            add_value(address)
        elif arg is None or kind is float or kind is bool:
            add_kind(kind)
            add_value(arg)
        elif hasattr(arg, "block_shape"):
            add_kind((kind, arg.base.dtype, *arg.block_shape, getattr(arg, "layout", None)))
            add_value(arg)
        else:
            break
    return kinds, values


def _hooked() -> bool:
    """Whether somebody listens to launches."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _constants_last(kernel: Any, count: int) -> bool:
    """Whether the first `count` parameters are arguments and the others constants."""
    return list(kernel.constexprs) == list(range(count, len(kernel.arg_names)))
