"""How the plain decode is compiled for each chip, and for how many programs. Evidence: docs/compiled.md, docs/performance.md."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from dualmla_kernels.target import TRITON_VERSION, Target, target_of


@dataclass(frozen=True)
class DecodeConfig:
    """How the kernel is compiled, and for how many programs.

    Attributes:
        block_m: rows a tile.
        block_n: keys a tile.
        slices: the latent row is held in as many slices of columns.
        stages: tiles of keys under way.
        lazy: whether a piece is weighed against the maximum of its last tiles alone (`_attend_fixed`); fp16 weights would overflow.
        programs: for the whole device.
        warps: of a program; waves of 64 lanes on AMD.
        pairs: whether `decode_hopper` does it, two tiles at a time, where it can.
        chains: sums of products that a score is added up from: a product waits for the one before it in its chain alone.
        paired: whether float8 numbers are read two at a time and multiplied in fp16 (`numbers`), where they can be.
        options: of the compiler for AMD.
    """

    block_m: int
    block_n: int
    slices: int
    stages: int
    lazy: bool
    programs: int
    warps: int
    pairs: bool = False
    chains: int = 1
    paired: bool = False
    options: Mapping[str, int] = field(default_factory=dict)

    @property
    def tile(self) -> int:
        """Keys that a plan never cuts."""
        return 2 * self.block_n if self.pairs else self.block_n


def decode_config(rows: int, dtype: torch.dtype, device: torch.device, float8: bool = False) -> DecodeConfig:
    """The configuration for `rows` (token, head) pairs a request. Evidence: docs/compiled.md, docs/performance.md.

    Arguments:
        dtype: of the queries.
        float8: whether the cache is. A plan made without knowing is right too: keys a tile divide those without float8.
    """
    return _config(rows > 16, dtype, target_of(device), float8)


@functools.cache
def _config(wide: bool, dtype: torch.dtype, target: Target, float8: bool) -> DecodeConfig:
    if target.platform == "cpu":
        return _cpu_config(wide, dtype, float8)
    if target.platform == "hip":
        return _amd_config(wide, dtype, target, float8)
    if dtype == torch.float32:  # without tensor cores a lane holds whole rows: with four warps they are spilled
        return DecodeConfig(16, 32, slices=8, stages=2, lazy=False, programs=target.processors, warps=8)
    if wide:
        return DecodeConfig(64, 64, slices=1, stages=2, lazy=False, programs=target.processors, warps=8, pairs=target.arch == "sm_90")
    if not float8:
        return DecodeConfig(16, 64, slices=8, stages=3, lazy=False, programs=target.processors, warps=4)
    # two programs to a multiprocessor: while one waits for its warps or for a product, the other does not
    return DecodeConfig(16, 64, slices=8, stages=3, lazy=False, programs=2 * target.processors, warps=4, chains=2, paired=True)


def _cpu_config(wide: bool, dtype: torch.dtype, float8: bool) -> DecodeConfig:
    """Four programs, so that split rows are met in small tests too; the sizes show every way to weigh tiles, float8 smaller ones."""
    block_n = 32 if float8 else 64
    if wide:
        return DecodeConfig(64, block_n, slices=2, stages=1, lazy=dtype != torch.float16, programs=4, warps=1)
    paired = float8 and dtype != torch.float32
    return DecodeConfig(16, block_n, slices=1, stages=1, lazy=False, programs=4, warps=1, chains=1 + paired, paired=paired)


def _amd_config(wide: bool, dtype: torch.dtype, target: Target, float8: bool) -> DecodeConfig:
    """For CDNA. A lane has 512 registers, vector and accumulation ones together, and everything here is about fitting into them.

    Slices of 128 columns, one tile at a time and 16 x 16 products keep what is in flight small. Two tiles at a time would
    make gfx942, which can't read LDS transposed, fetch values by two bytes. On gfx950 the next tile's loads are under way while
    this one is multiplied, where there are registers for it: not with Triton 3.6, nor for float8, which would come by four bytes.
    """
    lazy, programs = dtype != torch.float16, target.processors
    # kpack: two steps of a product are read from LDS at once. Triton 3.6 has no registers for it beside 64 rows, and CDNA4 has
    # products of twice the depth instead. With one wave to a SIMD the compiler may use all registers, which it does not always know
    two_steps = target.arch != "gfx950" and dtype != torch.float32 and not (wide and TRITON_VERSION <= (3, 6))
    options = {"matrix_instr_nonkdim": 16, "kpack": 2 if two_steps else 1, "waves_per_eu": 1}
    if target.arch == "gfx950" and dtype == torch.float16:
        options["waves_per_eu"] = 0  # told, it keeps a register in another one
    stages = 2 if target.arch == "gfx950" and not float8 and TRITON_VERSION > (3, 6) else 1
    if dtype == torch.float32:
        return DecodeConfig(16, 16, slices=8, stages=1, lazy=lazy, programs=programs, warps=4, options=options)
    if wide:
        slices = 8 if target.arch == "gfx90a" else 4  # its products are of half the depth, and their operands take more registers
        return DecodeConfig(64, 16 if float8 else 32, slices=slices, stages=stages, lazy=lazy, programs=programs, warps=4, options=options)
    # A wave alone multiplies nothing twice and waits for nobody. Each has a SIMD to itself: four of them keep a compute unit's
    # memory busy while one waits, and each has its own share of the plan.
    return DecodeConfig(16, 16, slices=4, stages=stages, lazy=lazy, programs=4 * programs, warps=1, options=options)
