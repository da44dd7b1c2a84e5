"""What surrounds the arithmetic: execution mask, signs, clamp, packed halves, SDWA, DPP, literals, lane access and swaps."""

from __future__ import annotations

import numpy as np
import pytest
from one_wave import Instruction, V, run, vop3

from dualmla.emulator.errors import UnsupportedInstructionError

LANES = np.arange(64, dtype=np.uint32)
A = (LANES * 0x01010101 + 0x80C04020).astype(np.uint32)
B = (LANES * 0x00030507 + 0x10000001).astype(np.uint32)
X = (LANES.astype(np.float32) - 30) / 7
Y = (LANES.astype(np.float32) - 11) / 3


def vop2(name: str, **fields: int) -> Instruction:
    return Instruction(0, 8, name, "VOP2", {"vdst": V + 20, "src0": V, "vsrc1": V + 1, **fields})


def test_inactive_lanes_keep_their_value():
    mask = 0xF0F0_0000_0000_00FF
    end = run([vop3("V_ADD_U32", V + 20, V, V + 1)], v={0: A, 1: B, 20: np.uint32(7)}, execute=mask)
    active = np.array([mask >> lane & 1 for lane in range(64)], bool)
    assert (end.v(20) == np.where(active, A + B, 7)).all()


def test_inactive_lanes_of_a_comparison_are_zero():
    end = run([vop3("V_CMP_LE_U32", 40, V, V, encoding="VOP3_SDST")], v={0: A}, s={40: 0xFFFFFFFF, 41: 0xFFFFFFFF}, execute=0xFF00)
    assert end.s64(40) == 0xFF00


@pytest.mark.parametrize("neg", range(8))
@pytest.mark.parametrize("absolute", [0, 1, 2, 4, 7])
def test_signs(neg, absolute):
    operands = []
    for k, value in enumerate((X, Y, X * Y)):
        magnitude = np.abs(value) if absolute >> k & 1 else value
        operands.append(-magnitude if neg >> k & 1 else magnitude)
    end = run([vop3("V_MAX3_F32", V + 20, V, V + 1, V + 2, neg=neg, abs=absolute)], v={0: X, 1: Y, 2: X * Y})
    assert (end.f(20) == np.maximum(np.maximum(*operands[:2]), operands[2])).all()


def test_clamp_limits_to_0_and_1_and_makes_nan_0():
    x = X.copy()
    x[3] = np.nan
    end = run([vop3("V_ADD_F32", V + 20, V, 128, clmp=1)], v={0: x})
    assert (end.f(20) == np.clip(np.nan_to_num(x, nan=0.0), 0, 1)).all()


def test_scalar_and_constant_operands_are_broadcast():
    end = run([vop3("V_ADD3_U32", V + 20, 5, 140, V + 1)], v={1: B}, s={5: 1000})
    assert (end.v(20) == B + 1012).all()


def test_literals():
    literal = 0x12340000
    add = Instruction(0, 8, "V_ADD_U32", "VOP2_LIT", {"vdst": V + 20, "src0": 255, "vsrc1": V + 1, "literal": literal})
    assert (run([add], v={1: B}).v(20) == B + np.uint32(literal)).all()


def test_fma_with_a_literal():
    """FMAAK: a * b + K; FMAMK: a * K + b."""
    k = int(np.float32(2.5).view(np.uint32))
    fields = {"vdst": V + 20, "src0": V, "vsrc1": V + 1, "literal": k}
    a = run([Instruction(0, 8, "V_FMAAK_F32", "VOP2_LIT", fields)], v={0: X, 1: Y}).f(20)
    b = run([Instruction(0, 8, "V_FMAMK_F32", "VOP2_LIT", fields)], v={0: X, 1: Y}).f(20)
    exact = X.astype(np.float64), Y.astype(np.float64)
    assert (a == (exact[0] * exact[1] + 2.5).astype(np.float32)).all()
    assert (b == (exact[0] * 2.5 + exact[1]).astype(np.float32)).all()


def test_fmac_adds_to_its_destination():
    end = run([vop2("V_FMAC_F32")], v={0: X, 1: Y, 20: np.float32(3)})
    assert (end.f(20) == (X.astype(np.float64) * Y + 3).astype(np.float32)).all()
    double = {
        k: v
        for r, x in ((0, X), (2, Y), (20, X))
        for k, v in zip((r, r + 1), x.astype(np.float64).view(np.uint32).reshape(64, 2).T, strict=True)
    }
    end = run([vop3("V_FMAC_F64", V + 20, V, V + 2)], v=double)
    got = np.stack([end.v(20), end.v(21)], 1).copy().view(np.float64)[:, 0]
    assert np.allclose(got, X.astype(np.float64) * Y.astype(np.float64) + X, rtol=1e-15, atol=0)


@pytest.mark.parametrize("table", [0x00, 0xFF, 0x96, 0xE8, 0xCA, 0x1B, 0x80, 0x01])
def test_bitop3(table):
    """The 16-bit form leaves the upper half to chance."""
    fields = {"omod": table >> 6, "abs": table >> 3 & 7, "neg": table & 7}
    listing = [vop3(f"V_BITOP3_B{bits}", V + 20 + bits, V, V + 1, V + 2, **fields) for bits in (32, 16)]
    end = run(listing, v={0: A, 1: B, 2: ~A + B})
    for lane in range(64):
        a, b, c = int(A[lane]), int(B[lane]), int((~A + B)[lane])
        expected = sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))
        assert int(end.v(52)[lane]) == expected
        assert int(end.v(36)[lane]) == expected & 0xFFFF | 0x7FC00000


def test_bitop3_of_upper_halves_is_refused():
    with pytest.raises(UnsupportedInstructionError, match="V_BITOP3_B16"):
        run([vop3("V_BITOP3_B16", V + 20, V, V + 1, V + 2, opsel=1)])


def test_mbcnt_counts_the_mask_bits_below_each_lane():
    low, high = 0xF0F01234, 0x8001FFFF
    listing = [vop3("V_MBCNT_LO_U32_B32", V + 20, 4, 128), vop3("V_MBCNT_HI_U32_B32", V + 21, 5, V + 20)]
    end = run(listing, s={4: low, 5: high})
    assert end.v(21).tolist() == [bin((high << 32 | low) & ((1 << lane) - 1)).count("1") for lane in range(64)]


@pytest.mark.parametrize("opsel", [0, 1, 2, 3])
@pytest.mark.parametrize("opsel_hi", [0, 1, 2, 3])
@pytest.mark.parametrize("neg", [0, 1, 2])
def test_packed_float_halves(opsel, opsel_hi, neg):
    registers = {0: X, 1: Y, 2: X * 2, 3: Y + 1}
    multiply = vop3(
        "V_PK_MUL_F32", V + 20, V, V + 2, encoding="VOP3P", opsel=opsel, opsel_hi=opsel_hi, opsel_hi2=1, neg=neg, neg_hi=3 - neg
    )
    end = run([multiply], v=registers)
    for half, (select, sign) in enumerate(((opsel, neg), (opsel_hi, 3 - neg))):
        a, b = registers[select & 1], registers[2 + (select >> 1 & 1)]
        assert (end.f(20 + half) == (-a if sign & 1 else a) * (-b if sign & 2 else b)).all()


def test_packed_instructions_read_before_they_write():
    multiply = vop3("V_PK_MUL_F32", V + 1, V, V + 2, encoding="VOP3P", opsel=0, opsel_hi=3, opsel_hi2=1, neg_hi=0)
    end = run([multiply], v={0: X, 1: Y, 2: X, 3: Y})
    assert (end.f(1) == X * X).all()
    assert (end.f(2) == Y * Y).all()


def test_packed_move_picks_one_half_of_each_source():
    move = vop3("V_PK_MOV_B32", V + 20, V, V + 2, encoding="VOP3P", opsel=2, opsel_hi=0, opsel_hi2=0, neg_hi=0)
    end = run([move], v={0: A, 1: B, 2: A + 1, 3: B + 1})
    assert (end.v(20) == A).all()
    assert (end.v(21) == B + 1).all()


@pytest.mark.parametrize("opsel", [0, 8])
def test_fp8_conversion_changes_one_half_of_its_destination(opsel):
    convert = vop3("V_CVT_PK_FP8_F32", V + 20, 242, 244, opsel=opsel)
    end = run([convert], v={20: A})
    packed = 0x40 | 0x48 << 8  # 1.0 and 2.0 in e4m3fnuz
    assert (end.v(20) == (A & 0xFFFF | packed << 16 if opsel else A & 0xFFFF0000 | packed)).all()


E4M3FN = {0x38: 1.0, 0xB8: -1.0, 0x40: 2.0, 0x01: 2.0**-9, 0x7E: 448.0, 0xFE: -448.0, 0x30: 0.5, 0x3C: 1.5}


@pytest.mark.parametrize("opsel", [0, 1])
def test_scaled_conversion_of_fp8_reads_one_half(opsel):
    """Of gfx950, with the constant 1.0 for a scale; the NaN pattern stays one."""
    codes = np.resize(np.array([*E4M3FN, 0x7F], np.uint32), 256).reshape(64, 4)
    packed = codes[:, 0] | codes[:, 1] << np.uint32(8) | codes[:, 2] << np.uint32(16) | codes[:, 3] << np.uint32(24)
    names = ("V_CVT_SCALEF32_PK_BF16_FP8", "V_CVT_SCALEF32_PK_F32_FP8")
    listing = [vop3(name, V + 20 + 2 * k, V, 242, opsel=opsel) for k, name in enumerate(names)]
    end = run(listing, v={0: packed}, arch="gfx950")
    expected = [np.array([E4M3FN.get(int(c), np.nan) for c in codes[:, 2 * opsel + k]], np.float32) for k in range(2)]
    np.testing.assert_array_equal((end.v(20) << np.uint32(16)).view(np.float32), expected[0])
    np.testing.assert_array_equal((end.v(20) & np.uint32(0xFFFF0000)).view(np.float32), expected[1])
    np.testing.assert_array_equal(np.stack([end.f(22), end.f(23)]), expected)


@pytest.mark.parametrize(("scale", "opsel", "reason"), [(244, 0, "scale other than the constant 1.0"), (242, 2, "operand selects")])
def test_other_scaled_conversions_are_refused(scale, opsel, reason):
    with pytest.raises(UnsupportedInstructionError, match=f"V_CVT_SCALEF32_PK_BF16_FP8.*{reason}"):
        run([vop3("V_CVT_SCALEF32_PK_BF16_FP8", V + 20, V, scale, opsel=opsel)], v={0: A}, arch="gfx950")


@pytest.mark.parametrize("neg", range(8))
@pytest.mark.parametrize("absolute", [0, 1, 6])
def test_mixed_precision_signs(neg, absolute):
    """neg_hi of a mixed-precision FMA takes operands without their sign."""
    operands = []
    for k, value in enumerate((X, Y, X * Y)):
        magnitude = np.abs(value) if absolute >> k & 1 else value
        operands.append((-magnitude if neg >> k & 1 else magnitude).astype(np.float64))
    mixed = {"encoding": "VOP3P", "neg": neg, "neg_hi": absolute, "opsel_hi": 0, "opsel_hi2": 0}
    listing = [vop3(f"V_MAD_MIX{half}_F16", V + 20, V, V + 1, V + 2, **mixed) for half in ("LO", "HI")]
    end = run(listing, v={0: X, 1: Y, 2: X * Y})
    expected = (operands[0] * operands[1] + operands[2]).astype(np.float32).astype(np.float16).view(np.uint16)
    assert (end.v(20) == expected | expected.astype(np.uint32) << np.uint32(16)).all()


def test_mixed_precision_with_halves_is_refused():
    with pytest.raises(UnsupportedInstructionError, match=r"V_MAD_MIXLO_F16.*operands of 16 bits"):
        run([vop3("V_MAD_MIXLO_F16", V + 20, V, V + 1, V + 2, encoding="VOP3P", neg_hi=0, opsel_hi=1, opsel_hi2=0)])


SDWA = {"omod": 0, "clmp": 0, "src0_neg": 0, "src0_abs": 0, "src1_neg": 0, "src1_abs": 0, "src0_sext": 0, "src1_sext": 0, "s0": 0, "s1": 0}
SDWA |= {"src0_sel": 6, "src1_sel": 6, "dst_sel": 6, "dst_unused": 0}


def sdwa(name: str, **fields: int) -> Instruction:
    return Instruction(0, 8, name, "VOP2_SDWA", {"vdst": V + 20, "vsrc0": 0, "vsrc1": 1, **SDWA, **fields})


def selected(x: np.ndarray, select: int, extend: int) -> np.ndarray:
    if select == 6:
        return x
    width, shift = (8, 8 * select) if select < 4 else (16, 16 * (select - 4))
    value = x >> np.uint32(shift) & np.uint32((1 << width) - 1)
    return np.where(extend & (value >> np.uint32(width - 1)), value - np.uint32(1 << width), value).astype(np.uint32)


@pytest.mark.parametrize("select", range(7))
@pytest.mark.parametrize("extend", [0, 1])
def test_sdwa_source_selects(select, extend):
    end = run([sdwa("V_ADD_U32", src0_sel=select, src0_sext=extend, src1_sel=6 - select)], v={0: A, 1: B})
    assert (end.v(20) == selected(A, select, extend) + selected(B, 6 - select, 0)).all()


@pytest.mark.parametrize("select", range(6))
@pytest.mark.parametrize("unused", [0, 2])
def test_sdwa_destination_selects(select, unused):
    old = np.uint32(0xA1B2C3D4)
    end = run([sdwa("V_XOR_B32", dst_sel=select, dst_unused=unused)], v={0: A, 1: B, 20: old})
    width, shift = (0xFF, 8 * select) if select < 4 else (0xFFFF, 16 * (select - 4))
    kept = int(old) & ~(width << shift) & 0xFFFFFFFF if unused == 2 else 0
    assert (end.v(20) == ((A ^ B) & width) << np.uint32(shift) | np.uint32(kept)).all()


def test_sdwa_comparison_and_scalar_source():
    compare = Instruction(
        0, 8, "V_CMP_EQ_U32", "VOPC_SDWA_SDST", {**SDWA, "vsrc0": 4, "s0": 1, "vsrc1": 1, "sdst": 40, "sd": 1, "src1_sel": 4}
    )
    del compare.fields["dst_sel"]
    end = run([compare], v={1: B}, s={4: int(B[9]) & 0xFFFF})
    assert end.s64(40) == sum(int(B[lane] & 0xFFFF == B[9] & 0xFFFF) << lane for lane in range(64))


def dpp(control: int, **fields: int) -> Instruction:
    modifiers = {"bc": 0, "row_mask": 15, "bank_mask": 15, "src0_neg": 0, "src0_abs": 0, "src1_neg": 0, "src1_abs": 0}
    return Instruction(0, 8, "V_MOV_B32", "VOP1_DPP16", {"vdst": V + 20, "vsrc0": V, "dpp": control, **modifiers, **fields})


def row(lane: int) -> int:
    return lane & ~15


PATTERNS = {
    0x1B: lambda lane: (lane & ~3) + 3 - (lane & 3),  # quad_perm:[3,2,1,0]
    0x4E: lambda lane: (lane & ~3) + [2, 3, 0, 1][lane & 3],
    0x103: lambda lane: lane + 3 if lane % 16 + 3 < 16 else None,  # row_shl:3
    0x111: lambda lane: lane - 1 if lane % 16 >= 1 else None,  # row_shr:1
    0x12F: lambda lane: row(lane) + (lane - 15) % 16,  # row_ror:15
    0x138: lambda lane: lane - 1 if lane else None,  # wave_shr:1
    0x140: lambda lane: row(lane) + 15 - lane % 16,  # row_mirror
    0x141: lambda lane: (lane & ~7) + 7 - lane % 8,  # row_half_mirror
    0x142: lambda lane: row(lane) - 1 if lane >= 16 else None,  # row_bcast:15
    0x143: lambda lane: 31 if lane >= 32 else None,  # row_bcast:31
    0x155: lambda lane: row(lane) + 5,  # row_newbcast:5
}


@pytest.mark.parametrize("control", PATTERNS)
@pytest.mark.parametrize("bound_control", [0, 1])
def test_dpp_patterns(control, bound_control):
    """A lane without a source reads 0 under bound_ctrl, and is not written without it."""
    end = run([dpp(control, bc=bound_control)], v={0: A, 20: np.uint32(99)})
    sources = [PATTERNS[control](lane) for lane in range(64)]
    assert end.v(20).tolist() == [(0 if bound_control else 99) if source is None else A[source] for source in sources]


def test_dpp_masks_leave_rows_and_banks_alone():
    end = run([dpp(0x140, row_mask=0b0101, bank_mask=0b0110)], v={0: A, 20: np.uint32(99)})
    for lane in range(64):
        written = 0b0101 >> lane // 16 & 1 and 0b0110 >> lane % 16 // 4 & 1
        assert end.v(20)[lane] == (A[row(lane) + 15 - lane % 16] if written else 99)


def test_an_unknown_dpp_control_is_refused():
    with pytest.raises(UnsupportedInstructionError, match="DPP control 0x130"):
        run([dpp(0x130)])


def test_lane_reads_and_writes():
    listing = [
        vop3("V_READFIRSTLANE_B32", 10, V),
        vop3("V_READLANE_B32", 11, V, 5),
        vop3("V_WRITELANE_B32", V + 20, 5, 128 + 7),
    ]
    end = run(listing, v={0: A, 20: np.uint32(0)}, s={5: 64 + 33}, execute=0xFFFFFFFFFFFFFFF0)
    assert end.s(10) == A[4]
    assert end.s(11) == A[33]
    assert end.v(20)[7] == 97
    assert np.count_nonzero(end.v(20)) == 1


@pytest.mark.parametrize("width", [16, 32])
def test_lane_swap(width):
    swap = Instruction(0, 4, f"V_PERMLANE{width}_SWAP_B32", "VOP1", {"vdst": V + 20, "src0": V})
    end = run([swap], v={0: A, 20: B}, arch="gfx950")
    a, b = A.copy().reshape(-1, 2, width), B.copy().reshape(-1, 2, width)
    expected_b, expected_a = b.copy(), a.copy()
    expected_b[:, 1], expected_a[:, 0] = a[:, 0], b[:, 1]
    assert (end.v(20) == expected_b.reshape(-1)).all()
    assert (end.v(0) == expected_a.reshape(-1)).all()


def test_swap_of_registers():
    swap = Instruction(0, 4, "V_SWAP_B32", "VOP1", {"vdst": V + 20, "src0": V})
    end = run([swap], v={0: A, 20: B}, execute=0xF0)
    assert (end.v(20)[4:8] == A[4:8]).all()
    assert (end.v(0)[4:8] == B[4:8]).all()
    assert (np.delete(end.v(20), slice(4, 8)) == np.delete(B, slice(4, 8))).all()
    assert (np.delete(end.v(0), slice(4, 8)) == np.delete(A, slice(4, 8))).all()


def test_indexed_source_registers():
    """s_set_gpr_idx_on adds M0[7:0] to source 0's register number until it is switched off."""
    on = Instruction(0, 4, "S_SET_GPR_IDX_ON", "SOPC", {"ssrc0": 4, "ssrc1": 1})
    off = Instruction(0, 4, "S_SET_GPR_IDX_OFF", "SOPP", {"simm16": 0})
    move = Instruction(0, 4, "V_MOV_B32", "VOP1", {"vdst": V + 20, "src0": V + 2})
    after = Instruction(0, 4, "V_MOV_B32", "VOP1", {"vdst": V + 21, "src0": V + 2})
    end = run([on, move, off, after], v={2: A, 7: B}, s={4: 5})
    assert (end.v(20) == B).all()
    assert (end.v(21) == A).all()
    assert end.s(124) & 0xF0FF == 0x1005


def test_scc_and_zero_flags_are_operands():
    listing = [Instruction(0, 4, "S_MOV_B32", "SOP1", {"sdst": 20 + k, "ssrc0": code}) for k, code in enumerate((251, 252, 253))]
    end = run(listing, s={106: 0, 107: 0}, scc=1, execute=1)
    assert (end.s(20), end.s(21), end.s(22)) == (1, 0, 1)
