"""Gluon, by the names it has in the Triton that is installed: some changed between 3.6 and 3.9.

Importing this needs Triton 3.6 at least. Kernels that use it are imported where they are launched, so that everything else
works with what Triton there is.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""`barrier()`: all threads of the partition have come this far."""

async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""`async_load(descriptor, coordinates, mbarrier, buffer)`: a copy from global to shared memory by the TMA unit."""

_REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(buffer, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory in another shape and layout."""
    if _REINTERPRETS:
        return buffer.reinterpret(buffer.dtype, shape, layout)
    else:
        return buffer._reinterpret(buffer.dtype, shape, layout)
