"""Kernels compiled for a chip that need not be here, and what their machine code is like.

`compile_launch` takes a noted launch (target.py) the way Triton's own launch would: the same specialisation of the
arguments, the same options, the same cache. `measure` reads the result, `faults` judges it:

    no spills      a register that moves to memory and back in the inner loop costs more than any tuning wins; scalar
                   registers of AMD that move to lanes of vector registers are counted and allowed
    LDS            what a program wants must fit into the chip
    matrix         the products run on the matrix units, by the instruction that the registry declares
    wide loads     most bytes of the latent rows come 16 at a time

This works where nothing was interpreted: a process that ran kernels in Triton's interpreter with TRITON_INTERPRET=1 can't compile.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from dualmla_kernels.target import Launch, Target

SHARED_BYTES = {"gfx90a": 64 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10, "sm_90": 227 << 10}
"""LDS of a compute unit, or shared memory that a block may ask for."""


@dataclass(frozen=True)
class Facts:
    """What machine code is like.

    Attributes:
        registers: vector registers of a lane.
        spilled: vector registers that are saved elsewhere, in accumulation registers or in memory; AMD only.
        scalars_moved: scalar registers that are saved in lanes of vector registers; AMD only.
        scratch_bytes: memory of a lane (AMD: scratch, NVIDIA: stack), for what is spilled to memory.
        shared_bytes: LDS or shared memory of a program.
        matrix: matrix instructions in the code by family: v_mfma, wgmma, mma.sync.
        loads: instructions that load from global memory, by bytes of a lane.
        instructions: all of them (AMD), 0 where the code is not disassembled (NVIDIA).
    """

    registers: int
    spilled: int
    scalars_moved: int
    scratch_bytes: int
    shared_bytes: int
    matrix: dict[str, int]
    loads: dict[int, int]
    instructions: int

    @property
    def wide_share(self) -> float:
        """Share of the bytes loaded, every instruction counted once, that comes 16 at a time."""
        total = sum(size * count for size, count in self.loads.items())
        return 16 * self.loads.get(16, 0) / total if total else 0.0


def compile_launch(launch: Launch, target: Target, **options: int) -> Any:
    """Triton's `CompiledKernel` for a launch; `options` replace constants of the kernel and options of the compiler.

    Raises Triton's own errors where the kernel can't be compiled for the chip.
    """
    with _active(target):
        return launch.kernel.run(*launch.args, grid=launch.grid, warmup=True, **(launch.kwargs | options))


class _Absent:
    """In place of Triton's driver of a GPU: says for what it would compile. Triton keeps one cache of kernels a device."""

    def __init__(self, target: Target) -> None:
        self.arch = target.arch
        self.target = GPUTarget("hip", target.arch, 64) if target.platform == "hip" else GPUTarget("cuda", int(target.arch[3:]), 32)

    def get_current_device(self) -> str:
        return self.arch

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextlib.contextmanager
def _active(target: Target) -> Iterator[None]:
    triton.runtime.driver.set_active(_Absent(target))
    try:
        yield
    finally:
        triton.runtime.driver.set_active(None)  # the driver of this machine's GPU is found again when it is next asked for


def measure(kernel: Any, target: Target) -> Facts:
    """The facts of what `compile_launch` returned."""
    return _measure_amd(kernel) if target.platform == "hip" else _measure_nvidia(kernel)


_AMD_LOAD = re.compile(r"^\s(?:global|buffer)_load_[us]?(dwordx4|dwordx3|dwordx2|dword|short|byte)\w*\s", re.MULTILINE)
_AMD_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "byte": 1}


def _measure_amd(kernel: Any) -> Facts:
    code = kernel.asm["amdgcn"]

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", code)
        if found is None:
            raise RuntimeError(f"Triton {triton.__version__} says nothing of {name}")
        return int(found[1])

    return Facts(
        registers=field("vgpr_count"),
        spilled=field("vgpr_spill_count"),
        scalars_moved=field("sgpr_spill_count"),
        scratch_bytes=field("private_segment_fixed_size"),
        shared_bytes=kernel.metadata.shared,
        matrix={"v_mfma": len(re.findall(r"^\sv_mfma_", code, re.MULTILINE))},
        loads=dict(Counter(_AMD_BYTES[kind] for kind in _AMD_LOAD.findall(code))),
        instructions=len(re.findall(r"^\s[a-z]\w+", code, re.MULTILINE)),
    )


_PTX_LOAD = re.compile(r"\bld\.global[.\w:]*?(?:\.v(\d))?\.[a-z](\d+)\b")
_PTX_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\b.*?\]\s*,\s*(?:\[[^]]*\]\s*,\s*)?(0x[0-9a-f]+|\d+)")


def _measure_nvidia(kernel: Any) -> Facts:
    code = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    loads = Counter(int(width or 1) * int(bits) // 8 for width, bits in _PTX_LOAD.findall(code))
    loads += Counter(int(size, 0) for size in _PTX_COPY.findall(code))
    return Facts(
        registers=registers,
        spilled=0,
        scalars_moved=0,
        scratch_bytes=stack,
        shared_bytes=kernel.metadata.shared,
        matrix={"wgmma": code.count("wgmma.mma_async"), "mma.sync": code.count("mma.sync")},
        loads=dict(loads),
        instructions=0,
    )


def faults(facts: Facts, target: Target, *, matrix: str | None, wide: bool) -> list[str]:
    """What is wrong with machine code, as sentences.

    Arguments:
        matrix: the family of matrix instructions that must be there; None: there is nothing to multiply.
        wide: whether the kernel moves rows of numbers.
    """
    found = []
    if facts.spilled or facts.scratch_bytes:
        found.append(f"{facts.spilled} registers are spilled, {facts.scratch_bytes} bytes of a lane's memory are used; it must be none")
    if facts.shared_bytes > SHARED_BYTES[target.arch]:
        found.append(f"{facts.shared_bytes} bytes of LDS; {target.arch} has {SHARED_BYTES[target.arch]}")
    if matrix is not None and not facts.matrix.get(matrix):
        found.append(f"no {matrix} in the code, which has {facts.matrix}")
    if wide and facts.wide_share < 0.5:
        found.append(f"{facts.wide_share:.0%} of the bytes are loaded 16 at a time, it must be half; loads by bytes: {facts.loads}")
    return found
