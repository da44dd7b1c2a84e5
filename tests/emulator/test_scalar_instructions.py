"""Every registered scalar instruction against a plain-Python statement of its meaning; branches, waits and EXEC."""

from __future__ import annotations

import itertools

import pytest
from one_wave import Instruction, V, run, vop3

from dualmla.emulator import state
from dualmla.emulator.errors import UnsupportedInstructionError
from dualmla.emulator.registry import SCALAR

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
WORDS = [0, 1, 31, 0x00080004, 0x00200010, 0x8000, 0x12345678, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, M32]
LONGS = [0, 1, 63, M32, 1 << 32, 1 << 63, M64, 0x123456789ABCDEF0, 0x8000000000000001]
IMMEDIATES = [0, 1, 0x7FFF, 0x8000, 0xFFFF, 0x1234]


def i32(x):
    return (x & M32) - (1 << 32) if x & 0x80000000 else x & M32


def i64(x):
    return (x & M64) - (1 << 64) if x >> 63 & 1 else x & M64


def overflow(x):
    return int(not -(1 << 31) <= x < 1 << 31)


def nonzero(function, bits):
    def apply(*arguments):
        result = function(*arguments[:-1]) & ((1 << bits) - 1)
        return result, int(result != 0)

    return apply


def field(a, b, signed):
    width = min(b >> 16 & 127, 32)
    value = (i32(a) if signed else a) >> b % 32 & ((1 << width) - 1)
    return value - (1 << width) if signed and width and value >> (width - 1) else value


EXPECTED = {
    "S_MOV_B32": lambda a, scc: (a, scc),
    "S_MOV_B64": lambda a, scc: (a, scc),
    "S_MOVK_I32": lambda k, scc: (k, scc),
    "S_CSELECT_B32": lambda a, b, scc: (a if scc else b, scc),
    "S_CSELECT_B64": lambda a, b, scc: (a if scc else b, scc),
    "S_ADD_U32": lambda a, b, scc: (a + b, int(a + b > M32)),
    "S_ADDC_U32": lambda a, b, scc: (a + b + scc, int(a + b + scc > M32)),
    "S_SUB_U32": lambda a, b, scc: (a - b, int(a < b)),
    "S_SUBB_U32": lambda a, b, scc: (a - b - scc, int(a < b + scc)),
    "S_ADD_I32": lambda a, b, scc: (a + b, overflow(i32(a) + i32(b))),
    "S_ADDK_I32": lambda a, k, scc: (a + k, overflow(i32(a) + k)),
    "S_SUB_I32": lambda a, b, scc: (a - b, overflow(i32(a) - i32(b))),
    "S_MUL_I32": lambda a, b, scc: (a * b, scc),
    "S_MULK_I32": lambda a, k, scc: (a * k, scc),
    "S_MUL_HI_U32": lambda a, b, scc: (a * b >> 32, scc),
    "S_MUL_HI_I32": lambda a, b, scc: (i32(a) * i32(b) >> 32, scc),
    "S_MIN_U32": lambda a, b, scc: (min(a, b), int(a < b)),
    "S_MAX_U32": lambda a, b, scc: (max(a, b), int(a > b)),
    "S_MIN_I32": lambda a, b, scc: (min(i32(a), i32(b)), int(i32(a) < i32(b))),
    "S_MAX_I32": lambda a, b, scc: (max(i32(a), i32(b)), int(i32(a) > i32(b))),
    "S_ABS_I32": nonzero(lambda a: abs(i32(a)), 32),
    "S_LSHL_B32": nonzero(lambda a, b: a << b % 32, 32),
    "S_LSHR_B32": nonzero(lambda a, b: a >> b % 32, 32),
    "S_ASHR_I32": nonzero(lambda a, b: i32(a) >> b % 32, 32),
    "S_LSHL_B64": nonzero(lambda a, b: a << b % 64, 64),
    "S_LSHR_B64": nonzero(lambda a, b: a >> b % 64, 64),
    "S_ASHR_I64": nonzero(lambda a, b: i64(a) >> b % 64, 64),
    "S_BFE_U32": nonzero(lambda a, b: field(a, b, False), 32),
    "S_BFE_I32": nonzero(lambda a, b: field(a, b, True), 32),
    "S_BFM_B32": lambda a, b, scc: (((1 << a % 32) - 1) << b % 32, scc),
    "S_BREV_B32": lambda a, scc: (int(f"{a:032b}"[::-1], 2), scc),
    "S_BCNT1_I32_B32": nonzero(lambda a: bin(a).count("1"), 32),
    "S_BCNT1_I32_B64": nonzero(lambda a: bin(a).count("1"), 32),
    "S_FF1_I32_B32": lambda a, scc: ((a & -a).bit_length() - 1, scc),
    "S_FF1_I32_B64": lambda a, scc: ((a & -a).bit_length() - 1, scc),
    "S_FLBIT_I32_B32": lambda a, scc: (32 - a.bit_length() if a else -1, scc),
    "S_SEXT_I32_I8": lambda a, scc: (i32(a << 24) >> 24, scc),
    "S_SEXT_I32_I16": lambda a, scc: (i32(a << 16) >> 16, scc),
    "S_PACK_LL_B32_B16": lambda a, b, scc: (a & 0xFFFF | b << 16, scc),
    "S_PACK_LH_B32_B16": lambda a, b, scc: (a & 0xFFFF | b & 0xFFFF0000, scc),
    "S_PACK_HH_B32_B16": lambda a, b, scc: (a >> 16 | b & 0xFFFF0000, scc),
    "S_BITSET0_B32": lambda a, old, scc: (old & ~(1 << a % 32), scc),
    "S_BITSET1_B32": lambda a, old, scc: (old | 1 << a % 32, scc),
    "S_BITCMP0_B32": lambda a, b, scc: (None, int(not a >> b % 32 & 1)),
    "S_BITCMP1_B32": lambda a, b, scc: (None, a >> b % 32 & 1),
}
for bits, suffix in ((32, "B32"), (64, "B64")):
    logic = {"AND": lambda a, b: a & b, "OR": lambda a, b: a | b, "XOR": lambda a, b: a ^ b, "ANDN2": lambda a, b: a & ~b}
    logic |= {"ORN2": lambda a, b: a | ~b, "NAND": lambda a, b: ~(a & b), "NOR": lambda a, b: ~(a | b), "NOT": lambda a: ~a}
    EXPECTED |= {f"S_{name}_{suffix}": nonzero(function, bits) for name, function in logic.items()}
for shift in (1, 2, 3, 4):
    EXPECTED[f"S_LSHL{shift}_ADD_U32"] = lambda a, b, scc, n=shift: ((a << n) + b, int((a << n) + b > M32))
for op, sign in {"EQ": "==", "LG": "!=", "GT": ">", "GE": ">=", "LT": "<", "LE": "<="}.items():
    compare = eval(f"lambda a, b: (None, int(a {sign} b))")
    EXPECTED[f"S_CMP_{op}_U32"] = lambda a, b, scc, f=compare: f(a, b)
    EXPECTED[f"S_CMP_{op}_I32"] = lambda a, b, scc, f=compare: f(i32(a), i32(b))
    EXPECTED[f"S_CMPK_{op}_U32"] = lambda a, k, scc, f=compare: f(a, k)
    EXPECTED[f"S_CMPK_{op}_I32"] = lambda a, k, scc, f=compare: f(i32(a), k)
    if op in ("EQ", "LG"):
        EXPECTED[f"S_CMP_{op}_U64"] = lambda a, b, scc, f=compare: f(a, b)

SOPK = ("S_MOVK_I32", "S_ADDK_I32", "S_MULK_I32")


def sop(name: str, *sources: int, dst: int = 20) -> Instruction:
    return Instruction(0, 4, name, "SOP2", {"sdst": dst, **{f"ssrc{k}": code for k, code in enumerate(sources)}})


def test_every_registered_instruction_is_tested():
    assert set(EXPECTED) == set(SCALAR)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_scalar_instruction(name):
    letters = SCALAR[name].arguments
    immediate, keeps = name in SOPK or "CMPK" in name, name.startswith("S_BITSET")
    pools = [LONGS if letter == "q" else WORDS for letter in letters]
    if immediate:
        pools[-1] = IMMEDIATES
    for values in itertools.product(*pools):
        for scc in (0, 1):
            s = {2 * k + part: value >> 32 * part for k, value in enumerate(values) for part in (0, 1)}
            if immediate:
                fields = {"sdst": 0 if len(values) == 2 else 20, "simm16": values[-1]}
                end = run([Instruction(0, 4, name, "SOPK", fields)], s=s, scc=scc)
                signed = values[-1] - 0x10000 if values[-1] & 0x8000 and not name.endswith("U32") else values[-1]
                arguments = (*values[:-1], signed)
            elif keeps:  # the second operand is the destination's old value
                end = run([sop(name, 0, dst=2)], s=s, scc=scc)
                arguments = values
            else:
                end = run([sop(name, *range(0, 2 * len(values), 2))], s=s, scc=scc)
                arguments = values
            result, condition = EXPECTED[name](*arguments, scc)
            assert end.scc == condition, (values, scc)
            destination = 2 if keeps else 0 if immediate and len(values) == 2 else 20
            if result is not None and SCALAR[name].results == "q":
                assert end.s64(destination) == result & M64, (values, scc)
            elif result is not None:
                assert end.s(destination) == result & M32, (values, scc)


@pytest.mark.parametrize(
    ("code", "value"), [(128, 0), (129, 1), (192, 64), (193, M32), (208, M32 - 15), (240, 0x3F000000), (247, 0xC0800000)]
)
def test_inline_constants(code, value):
    assert run([sop("S_MOV_B32", code)]).s(20) == value


def test_a_negative_inline_constant_fills_64_bits():
    assert run([sop("S_MOV_B64", 193)]).s64(20) == M64


def test_literal():
    move = Instruction(0, 8, "S_MOV_B32", "SOP1_LIT", {"sdst": 20, "ssrc0": 255, "literal": 0xCAFEF00D})
    assert run([move]).s(20) == 0xCAFEF00D


@pytest.mark.parametrize(("name", "combine"), [("AND", lambda a, b: a & b), ("OR", lambda a, b: a | b), ("ANDN2", lambda a, b: a & ~b)])
def test_saveexec(name, combine):
    before, source = 0xF0F0, 0xFF00
    end = run([sop(f"S_{name}_SAVEEXEC_B64", 4)], s={4: source, 5: 0}, execute=before)
    assert end.s64(20) == before
    assert end.s64(state.EXEC) == combine(source, before) & M64
    assert end.scc == int(combine(source, before) & M64 != 0)


def branch(name: str, simm16: int) -> Instruction:
    return Instruction(0, 4, name, "SOPP", {"simm16": simm16})


@pytest.mark.parametrize(
    ("name", "setup", "jumps"),
    [
        ("S_BRANCH", {}, True),
        ("S_CBRANCH_SCC0", {"scc": 0}, True),
        ("S_CBRANCH_SCC0", {"scc": 1}, False),
        ("S_CBRANCH_SCC1", {"scc": 1}, True),
        ("S_CBRANCH_VCCZ", {"s": {106: 0, 107: 0}}, True),
        ("S_CBRANCH_VCCZ", {"s": {106: 0, 107: 1}}, False),
        ("S_CBRANCH_VCCNZ", {"s": {106: 1, 107: 0}}, True),
        ("S_CBRANCH_EXECZ", {"execute": 0}, True),
        ("S_CBRANCH_EXECZ", {"execute": 1}, False),
        ("S_CBRANCH_EXECNZ", {"execute": 1}, True),
    ],
)
def test_branch(name, setup, jumps):
    """The branch skips the move after it (instructions lie 8 bytes apart)."""
    end = run(
        [branch(name, 2), sop("S_MOV_B32", 129), sop("S_MOV_B32", 130, dst=21)],
        **{"s": {20: 0}, **setup} if "s" not in setup else {**setup, "s": {20: 0, **setup["s"]}},
    )
    assert end.s(20) == (0 if jumps else 1)
    assert end.s(21) == 2


def test_a_loop_counts_its_instructions():
    """s0 = 5; while --s0: ..."""
    loop = [
        Instruction(0, 4, "S_MOVK_I32", "SOPK", {"sdst": 0, "simm16": 5}),
        Instruction(0, 4, "S_ADDK_I32", "SOPK", {"sdst": 0, "simm16": 0xFFFF}),
        Instruction(0, 4, "S_CMPK_LG_U32", "SOPK", {"sdst": 0, "simm16": 0}),
        branch("S_CBRANCH_SCC1", -6 & 0xFFFF),
    ]
    end = run(loop)
    assert end.report.by_opcode()["S_ADDK_I32"] == 5
    assert end.report.executed == 1 + 3 * 5 + 1
    assert end.report.by_kind()["BRANCH"] == 5


def test_a_branch_to_nowhere_is_refused_when_reached():
    with pytest.raises(UnsupportedInstructionError, match=r"0x0: S_BRANCH .*no instruction starts"):
        run([branch("S_BRANCH", 3)])


def test_an_unknown_instruction_stops_the_run_only_when_reached():
    unknown = sop("S_GETPC_B64", 4)
    assert run([branch("S_BRANCH", 2), unknown]).s(20) == state.POISON_REGISTER
    with pytest.raises(UnsupportedInstructionError, match=r"workgroup \(0, 0, 0\), wave 0: 0x8: S_GETPC_B64 \(SOP2\)"):
        run([sop("S_MOV_B32", 128), unknown])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"omod": 1}, "output modifiers"),
        ({"opsel": 1}, "operand selects 0x1"),
        ({"clmp": 1}, "clamp on an integer"),
        ({"neg": 1}, "sign modifiers on an integer"),
        ({"src0": 239}, "operand code 239 "),
    ],
)
def test_a_modifier_or_operand_nobody_implemented_is_refused(fields, reason):
    """By its address, its name and what there is about it."""
    add = vop3("V_ADD_I32", V, *(() if "src0" in fields else (V,)), **fields)
    with pytest.raises(UnsupportedInstructionError, match=rf"wave 0: 0x8: V_ADD_I32 \(VOP3\): .*{reason}"):
        run([sop("S_MOV_B32", 128), add])
