"""Matrix instructions against a float64 product, with every operand layout spelled out element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from one_wave import Instruction, V, run

from dualmla.emulator.errors import UnsupportedInstructionError
from dualmla.emulator.matrix import SHAPES

TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
TORCH |= {("fp8", "gfx942"): torch.float8_e4m3fnuz, ("fp8", "gfx950"): torch.float8_e4m3fn}
TORCH |= {("bf8", "gfx942"): torch.float8_e5m2fnuz, ("bf8", "gfx950"): torch.float8_e5m2}


def mfma(name: str, **fields: int) -> Instruction:
    operands = {"vdst": V + 100, "src0": V, "src1": V + 16, "src2": V + 100, "cbsz": 0, "abid": 0, "blgp": 0, "acc": 0, "acc_cd": 0}
    return Instruction(0, 8, name, "VOP3P_MFMA", {**operands, **fields})


def matrix(rows: int, depth: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(rows, depth, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operand(x: torch.Tensor) -> np.ndarray:
    """[registers, 64] of a matrix [dim, depth]: lane l holds row l % dim and `per` k's from per * (l // dim) on."""
    dim, depth = x.shape
    per = depth * dim // 64
    lanes = torch.stack([x[lane % dim, per * (lane // dim) : per * (lane // dim + 1)] for lane in range(64)])
    return np.ascontiguousarray(lanes.contiguous().view(torch.uint8).numpy().view(np.uint32).T)


def place(dim: int, register: int, lane: int) -> tuple[int, int]:
    """Row and column of the result in `register` of `lane`."""
    if dim == 16:
        return 4 * (lane // 16) + register, lane % 16
    return 8 * (register // 4) + 4 * (lane // 32) + register % 4, lane % 32


def dtype_of(kind: str, arch: str) -> torch.dtype:
    return TORCH[(kind, arch) if (kind, arch) in TORCH else kind]


PLAIN = [name for name in SHAPES if "SCALE" not in name]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", PLAIN)
def test_matrix_instruction(name, arch):
    shape = SHAPES[name]
    a = matrix(shape.dim, shape.depth, dtype_of(shape.left, arch), 1)
    b = matrix(shape.dim, shape.depth, dtype_of(shape.right, arch), 2)
    c = matrix(shape.dim, shape.dim, torch.float32, 3).numpy()
    registers = dict(enumerate(operand(a))) | {16 + r: x for r, x in enumerate(operand(b))}
    for register in range(shape.results):
        registers[100 + register] = np.array([c[place(shape.dim, register, lane)] for lane in range(64)], np.float32)
    end = run([mfma(name)], v=registers, arch=arch, execute=1)
    expected = (a.double() @ b.double().T).numpy() + c
    for register in range(shape.results):
        wanted = np.array([expected[place(shape.dim, register, lane)] for lane in range(64)])
        assert np.allclose(end.f(100 + register), wanted, rtol=2e-7, atol=1e-6), (register, end.f(100 + register), wanted)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", [name for name in PLAIN if SHAPES[name].results == 4])
@pytest.mark.parametrize("c_at", [97, 98, 99, 101, 102, 103])
def test_c_and_d_overlap_in_part(name, arch, c_at):
    """LLVM allocates C and a D of four registers so: no row of D may be written before all of C is read."""
    shape = SHAPES[name]
    a = matrix(shape.dim, shape.depth, dtype_of(shape.left, arch), 1)
    b = matrix(shape.dim, shape.depth, dtype_of(shape.right, arch), 2)
    registers = dict(enumerate(operand(a))) | {16 + r: x for r, x in enumerate(operand(b))}
    registers |= {c_at + r: np.float32(1000 * (r + 1)) for r in range(4)}
    end = run([mfma(name, src2=V + c_at)], v=registers, arch=arch)
    expected = (a.double() @ b.double().T).numpy()
    for register in range(4):
        wanted = [expected[place(16, register, lane)] + 1000 * (register + 1) for lane in range(64)]
        assert np.allclose(end.f(100 + register), wanted, rtol=2e-7, atol=1e-6), register


@pytest.mark.parametrize("acc", range(4))
@pytest.mark.parametrize("acc_cd", [0, 1])
def test_accumulation_registers(acc, acc_cd):
    """`acc` bits move A and B, `acc_cd` moves C and D, into the second 256 registers."""
    name = "V_MFMA_F32_16X16X16_BF16"
    a, b = matrix(16, 16, torch.bfloat16, 4), matrix(16, 16, torch.bfloat16, 5)
    registers = {256 * (acc & 1) + r: x for r, x in enumerate(operand(a))}
    registers |= {16 + 256 * (acc >> 1) + r: x for r, x in enumerate(operand(b))}
    registers |= {100 + 256 * acc_cd + r: np.float32(r) for r in range(4)}
    end = run([mfma(name, acc=acc, acc_cd=acc_cd)], v=registers)
    expected = (a.double() @ b.double().T).numpy()
    for register in range(4):
        wanted = [expected[place(16, register, lane)] + register for lane in range(64)]
        assert np.allclose(end.f(100 + 256 * acc_cd + register), wanted, rtol=2e-7, atol=1e-6)


def test_a_constant_as_c():
    a, b = matrix(16, 16, torch.bfloat16, 6), matrix(16, 16, torch.bfloat16, 7)
    registers = dict(enumerate(operand(a))) | {16 + r: x for r, x in enumerate(operand(b))}
    end = run([mfma("V_MFMA_F32_16X16X16_BF16", src2=242)], v=registers)
    expected = (a.double() @ b.double().T).numpy() + 1.0
    assert np.allclose(end.f(101), [expected[place(16, 1, lane)] for lane in range(64)], rtol=2e-7, atol=1e-6)


def test_mixed_byte_formats():
    """F8F6F4: cbsz and blgp choose e4m3 (0) or e5m2 (1) for A and B."""
    a, b = matrix(16, 128, torch.float8_e5m2, 8), matrix(16, 128, torch.float8_e4m3fn, 9)
    registers = dict(enumerate(operand(a))) | {16 + r: x for r, x in enumerate(operand(b))}
    end = run([mfma("V_MFMA_F32_16X16X128_F8F6F4", cbsz=1, blgp=0, src2=128)], v=registers, arch="gfx950")
    expected = (a.double() @ b.double().T).numpy()
    assert np.allclose(end.f(100), [expected[place(16, 0, lane)] for lane in range(64)], rtol=2e-7, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("V_MFMA_F32_16X16X16_BF16", {"cbsz": 1}),
        ("V_MFMA_F32_16X16X16_BF16", {"abid": 1}),
        ("V_MFMA_F32_16X16X16_BF16", {"src0": 5}),
        ("V_MFMA_F32_16X16X128_F8F6F4", {"cbsz": 4}),
        ("V_MFMA_F32_4X4X4_16B_BF16", {}),
    ],
)
def test_what_is_not_implemented_is_refused(name, fields):
    with pytest.raises(UnsupportedInstructionError, match=name):
        run([mfma(name, **fields)], arch="gfx950")
