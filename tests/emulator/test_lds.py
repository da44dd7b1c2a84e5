"""The LDS: every access width, the cross-lane instructions in it, and what the race detector sees."""

from __future__ import annotations

import numpy as np
import pytest
from one_wave import Instruction, V, launch, run

from dualmla.emulator import MemoryFaultError, Mode, UnsupportedInstructionError
from dualmla.emulator.state import POISON_LDS

LANES = np.arange(64, dtype=np.uint32)


def ds(name: str, offset: int = 0, **fields: int) -> Instruction:
    operands = {"addr": V, "data0": V + 1, "data1": V + 5, "vdst": V + 20, "acc": 0, "gds": 0}
    return Instruction(0, 8, name, "DS", {**operands, "offset0": offset & 255, "offset1": offset >> 8, **fields})


def data(first: int, count: int) -> dict[int, np.ndarray]:
    return {first + k: (LANES * 1000003 + 77 * k + 0x9ABC0000).astype(np.uint32) for k in range(count)}


@pytest.mark.parametrize(("width", "count"), [("B32", 1), ("B64", 2), ("B96", 3), ("B128", 4)])
@pytest.mark.parametrize("acc", [0, 1])
def test_write_and_read_back(width, count, acc):
    registers = data(1 + 256 * acc, count)
    listing = [ds(f"DS_WRITE_{width}", 16, acc=acc), ds(f"DS_READ_{width}", 16, acc=acc)]
    end = run(listing, v={0: LANES * 16, **registers})
    for k in range(count):
        assert (end.v(20 + 256 * acc + k) == registers[1 + 256 * acc + k]).all()
    assert end.group["lds"][4 + 4 * 9] == registers[1 + 256 * acc][9]


@pytest.mark.parametrize(("suffix", "stride"), [("2", 1), ("2ST64", 64)])
@pytest.mark.parametrize(("width", "count"), [("B32", 1), ("B64", 2)])
def test_two_accesses_in_one(suffix, stride, width, count):
    """Offsets count elements (64 of them in the ST64 form)."""
    step = count * stride
    registers = data(1, count) | {5 + k: x + np.uint32(3) for k, x in enumerate(data(1, count).values())}
    listing = [ds(f"DS_WRITE{suffix}_{width}", offset0=1, offset1=3), ds(f"DS_READ{suffix}_{width}", offset0=3, offset1=1)]
    spread = LANES * 32 if stride == 1 else LANES * 4 * count  # apart, so that no lane writes over another
    end = run(listing, v={0: spread, **registers}, lds_bytes=16384)
    for k in range(count):
        assert (end.v(20 + k) == registers[5 + k]).all()
        assert (end.v(20 + count + k) == registers[1 + k]).all()
        assert end.group["lds"][step + k] == registers[1 + k][0]
        assert end.group["lds"][3 * step + k] == registers[5 + k][0]


@pytest.mark.parametrize(
    ("name", "select"),
    [
        ("DS_READ_U8", lambda w: w & 0xFF),
        ("DS_READ_I8", lambda w: (w & 0xFF) - 256 * (w >> 7 & 1)),
        ("DS_READ_U16", lambda w: w & 0xFFFF),
        ("DS_READ_I16", lambda w: (w & 0xFFFF) - 65536 * (w >> 15 & 1)),
    ],
)
def test_narrow_reads(name, select):
    registers = data(1, 1)
    for shift in (0, 1, 2, 3) if name.endswith("8") else (0, 2):
        end = run([ds("DS_WRITE_B32"), ds(name, shift)], v={0: LANES * 4, **registers})
        assert end.v(20).tolist() == [select(int(w) >> 8 * shift) & 0xFFFFFFFF for w in registers[1]]


def test_narrow_writes_change_their_bytes_alone():
    registers = data(1, 1)
    listing = [ds("DS_WRITE_B32", data0=V + 2), ds("DS_WRITE_B16", 2), ds("DS_WRITE_B8", 1), ds("DS_READ_B32")]
    end = run(listing, v={0: LANES * 4, 2: np.uint32(0x11223344), **registers})
    word = registers[1]
    assert (end.v(20) == (word & 0xFFFF) << 16 | (word & 0xFF) << 8 | 0x44).all()


def test_d16_forms_touch_one_half():
    registers = data(1, 1)
    listing = [
        ds("DS_WRITE_B32"),
        ds("DS_READ_U16_D16"),
        ds("DS_READ_U16_D16_HI", 2, vdst=V + 21),
        ds("DS_WRITE_B16_D16_HI"),
        ds("DS_READ_U16", vdst=V + 22),
    ]
    end = run(listing, v={0: LANES * 4, 20: np.uint32(0xAAAABBBB), 21: np.uint32(0xAAAABBBB), **registers})
    assert (end.v(20) == 0xAAAA0000 | registers[1] & 0xFFFF).all()
    assert (end.v(21) == registers[1] & 0xFFFF0000 | 0xBBBB).all()
    assert (end.v(22) == registers[1] >> np.uint32(16)).all()


def test_inactive_lanes_neither_write_nor_receive():
    registers = data(1, 1)
    end = run([ds("DS_WRITE_B32"), ds("DS_READ_B32")], v={0: LANES * 4, 20: np.uint32(5), **registers}, execute=0xF0)
    assert end.v(20).tolist() == [registers[1][lane] if 4 <= lane < 8 else 5 for lane in range(64)]
    assert end.group["lds"][0] == POISON_LDS


def test_misaligned_access_works_and_is_reported():
    registers = data(1, 1)
    end = run([ds("DS_WRITE_B32", 1), ds("DS_READ_B32", 1)], v={0: LANES * 8, **registers})
    assert (end.v(20) == registers[1]).all()
    assert {finding.kind for finding in end.report.findings} == {"misaligned access"}


def test_bpermute_reads_another_lane_and_0_from_an_inactive_one():
    registers = data(1, 1)
    address = (LANES * 12 + 8).astype(np.uint32)
    end = run([ds("DS_BPERMUTE_B32")], v={0: address, **registers}, execute=0x0FFFFFFFFFFFFFFF)
    for lane in range(60):
        source = int(address[lane]) // 4 % 64
        assert end.v(20)[lane] == (registers[1][source] if source < 60 else 0)


def test_permute_sends_to_another_lane():
    registers = data(1, 1)
    end = run([ds("DS_PERMUTE_B32")], v={0: (63 - LANES) * 4, **registers})
    assert (end.v(20) == registers[1][::-1]).all()


SWIZZLES = {
    0x401F: lambda lane: lane ^ 16,  # swap groups of 16
    0x7C1F: lambda lane: lane ^ 31,  # reverse 32 lanes
    0x0078: lambda lane: lane & ~7 | 3,  # broadcast lane 3 of each 8: and 0x18, or 3
    0x801B: lambda lane: lane ^ 3,  # quad_perm 3, 2, 1, 0
    0x80E4: lambda lane: lane,
}


@pytest.mark.parametrize("pattern", SWIZZLES)
def test_swizzle_reads_the_lane_its_pattern_names(pattern):
    """0 from an inactive one."""
    registers = data(1, 1)
    swizzle = ds("DS_SWIZZLE_B32", pattern & 255, offset1=pattern >> 8, addr=V + 1)
    active = 0x0FFFFFFFFFFFFFFF
    end = run([swizzle], v={20: np.uint32(7), **registers}, execute=active)
    for lane in range(64):
        source = SWIZZLES[pattern](lane)
        expected = registers[1][source] if active >> source & 1 else 0
        assert end.v(20)[lane] == (expected if active >> lane & 1 else 7)


def test_other_swizzles_are_refused():
    with pytest.raises(UnsupportedInstructionError, match=r"DS_SWIZZLE_B32.*0xc000"):
        run([ds("DS_SWIZZLE_B32", offset1=0xC0)])


@pytest.mark.parametrize(("bits", "dtype"), [(16, np.uint16), (8, np.uint8)])
def test_transposing_reads(bits, dtype):
    """Each 16 lanes read a row-major matrix of 16 columns, 64 bits a lane; lane l receives column l."""
    per = 64 // bits
    contents = (LANES[:, None] * 7 + np.arange(2) * 131071 + 0x01234567).astype(np.uint32)
    listing = [ds("DS_WRITE_B64"), ds(f"DS_READ_B64_TR_B{bits}")]
    end = run(listing, v={0: LANES * 8, 1: contents[:, 0].copy(), 2: contents[:, 1].copy()}, arch="gfx950")
    elements = contents.reshape(-1).view(dtype).reshape(4, per, 16)
    got = np.ascontiguousarray(np.stack([end.v(20), end.v(21)], 1)).view(dtype).reshape(4, 16, per)
    assert (got == elements.transpose(0, 2, 1)).all()


def test_an_access_past_the_allocation_stops_the_run():
    with pytest.raises(MemoryFaultError, match=r"DS_READ_B32 at 0x0: LDS access outside the allocation \(0x1000\)"):
        run([ds("DS_READ_B32")], v={0: np.uint32(4096)}, lds_bytes=4096)


def test_gds_and_atomics_are_refused():
    for instruction in (ds("DS_READ_B32", gds=1), ds("DS_ADD_U32")):
        with pytest.raises(UnsupportedInstructionError, match=instruction.name):
            run([instruction], v={0: LANES})


# --- several waves ---

OWN_SLOT = Instruction(0, 8, "V_LSHLREV_B32", "VOP2", {"vdst": V, "src0": 130, "vsrc1": V})  # v0 = 4 * thread
BARRIER = Instruction(0, 4, "S_BARRIER", "SOPP", {"simm16": 0})


def findings(listing: list[Instruction], waves: int = 2) -> list[str]:
    report = launch(listing, block=64 * waves, mode=Mode(watch_lds=True))
    return [finding.kind for finding in report.findings]


def zero(register: int) -> Instruction:
    return Instruction(0, 4, "V_MOV_B32", "VOP1", {"vdst": V + register, "src0": 128})


def test_two_waves_writing_one_word_is_a_race():
    assert findings([zero(0), ds("DS_WRITE_B32", data0=V)]) == ["LDS race: two waves write, no barrier between"]


def test_a_read_beside_another_waves_write_is_a_race_and_a_barrier_ends_it():
    write_own_slot = [OWN_SLOT, ds("DS_WRITE_B32", data0=V)]
    assert findings([*write_own_slot, BARRIER, zero(0), ds("DS_READ_B32")]) == []
    kinds = findings([*write_own_slot, zero(0), ds("DS_READ_B32")])
    assert kinds == ["LDS race: one wave writes what another reads, no barrier between"]


def test_a_read_of_what_nobody_wrote_is_reported():
    assert findings([zero(0), ds("DS_READ_B32")], waves=1) == ["read of LDS nobody wrote"]
