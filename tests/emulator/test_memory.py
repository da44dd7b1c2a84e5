"""Device memory: allocation, every access path, range checks, and what is reported or stopped."""

from __future__ import annotations

import numpy as np
import pytest
from one_wave import Instruction, V, launch, run

from dualmla.emulator import Device, MemoryFaultError, Mode
from dualmla.emulator.memory import BASE, PAGE, Memory

LANES = np.arange(64, dtype=np.uint32)
WORDS = (np.arange(4096, dtype=np.uint32) * 2654435761 + 12345).astype(np.uint32)


def address_registers(base: int, offsets: np.ndarray, register: int = 0) -> dict[int, np.ndarray]:
    """64-bit addresses in a register pair."""
    address = np.uint64(base) + offsets.astype(np.uint64)
    return {register: (address & np.uint64(0xFFFFFFFF)).astype(np.uint32), register + 1: (address >> np.uint64(32)).astype(np.uint32)}


def vmem(name: str, encoding: str = "GLOBAL", **fields: int) -> Instruction:
    operands = {"addr": V, "data": V + 10, "vdst": V + 20, "saddr": 127, "offset": 0, "acc": 0}
    return Instruction(0, 8, name, encoding, {**operands, **fields})


def mubuf(name: str, **fields: int) -> Instruction:
    operands = {"vdata": V + 20, "vaddr": V, "srsrc": 4, "soffset": 128, "offset": 0, "offen": 1, "idxen": 0, "lds": 0, "acc": 0}
    return Instruction(0, 8, name, "MUBUF", {**operands, **fields})


def descriptor(address: int, size: int) -> dict[int, int]:
    """A raw buffer resource in s[4:7]."""
    return {4: address & 0xFFFFFFFF, 5: address >> 32, 6: size, 7: 0x00027000}


def test_allocations_lie_apart_and_start_on_pages():
    memory = Memory()
    a, b = memory.allocate(10), memory.allocate(3 * PAGE)
    assert a % PAGE == b % PAGE == 0
    assert b >= a + 2 * PAGE
    with pytest.raises(MemoryFaultError, match="allocated already"):
        memory.allocate(1, address=b + PAGE)
    with pytest.raises(MemoryFaultError, match="not all allocated"):
        memory.read(a, (11,), np.uint8)


def test_allocations_can_lie_gigabytes_apart():
    device = Device("gfx942")
    near, far = device.put(WORDS, address=BASE + (1 << 33)), device.put(WORDS + 1, address=BASE + (1 << 33) + (5 << 32))
    end = run([vmem("GLOBAL_LOAD_DWORD")], v=address_registers(far.address, LANES * 4), device=device)
    assert (end.v(20) == WORDS[:64] + 1).all()
    assert (near.numpy() == WORDS).all()


def test_host_arrays_come_back():
    device = Device("gfx942")
    assert (device.put(WORDS.reshape(64, 64)).numpy() == WORDS.reshape(64, 64)).all()
    empty = device.empty((3, 5), np.float32)
    assert np.isnan(empty.numpy()).all()
    assert not empty.written().any()


@pytest.mark.parametrize(("suffix", "count"), [("DWORD", 1), ("DWORDX2", 2), ("DWORDX3", 3), ("DWORDX4", 4)])
@pytest.mark.parametrize("acc", [0, 1])
def test_global_load_and_store(suffix, count, acc):
    device = Device("gfx942")
    source, target = device.put(WORDS), device.empty((4096,), np.uint32)
    listing = [
        vmem(f"GLOBAL_LOAD_{suffix}", offset=0x1FF0, acc=acc),
        vmem(f"GLOBAL_STORE_{suffix}", addr=V + 4, data=V + 20, offset=16, acc=acc),
    ]
    registers = address_registers(source.address, LANES * 16 + 16) | address_registers(target.address, LANES * 16, 4)
    end = run(listing, v=registers, device=device)
    for k in range(count):
        assert (end.v(20 + 256 * acc + k) == WORDS[4 * LANES + k]).all()
        assert (target.numpy()[4 + 4 * LANES + k] == WORDS[4 * LANES + k]).all()
    assert target.written().sum() == 64 * count


def test_scalar_base_address():
    device = Device("gfx942")
    source = device.put(WORDS)
    end = run(
        [vmem("GLOBAL_LOAD_DWORD", saddr=8, offset=8)],
        v={0: LANES * 4},
        s={8: source.address & 0xFFFFFFFF, 9: source.address >> 32},
        device=device,
    )
    assert (end.v(20) == WORDS[2 + LANES]).all()


NARROW = {
    "UBYTE": (1, lambda x: x & 0xFF),
    "SBYTE": (1, lambda x: (x & 0xFF) - 256 * (x >> 7 & 1)),
    "USHORT": (2, lambda x: x & 0xFFFF),
    "SSHORT": (2, lambda x: (x & 0xFFFF) - 65536 * (x >> 15 & 1)),
}


@pytest.mark.parametrize("width", NARROW)
@pytest.mark.parametrize("instruction", ["GLOBAL_LOAD_{}", "BUFFER_LOAD_{}", "FLAT_LOAD_{}"])
def test_narrow_loads(width, instruction):
    size, expected = NARROW[width]
    device = Device("gfx942")
    source = device.put(WORDS)
    name = instruction.format(width)
    if name.startswith("BUFFER"):
        end = run([mubuf(name)], v={0: LANES * size}, s=descriptor(source.address, 4096), device=device)
    else:
        end = run([vmem(name, encoding=name.split("_")[0])], v=address_registers(source.address, LANES * size), device=device)
    raw = WORDS.view(np.uint8 if size == 1 else np.uint16)
    assert end.v(20).tolist() == [expected(int(raw[lane])) & 0xFFFFFFFF for lane in range(64)]


def test_narrow_stores_and_d16_halves():
    device = Device("gfx942")
    target = device.put(np.zeros(64, np.uint32))
    source = device.put(WORDS)
    where = address_registers(target.address, LANES * 4)
    listing = [
        vmem("GLOBAL_STORE_BYTE"),
        vmem("GLOBAL_STORE_SHORT_D16_HI", offset=2),
        vmem("GLOBAL_LOAD_SHORT_D16", addr=V + 4),
        vmem("GLOBAL_LOAD_SHORT_D16_HI", addr=V + 4, vdst=V + 21),
    ]
    value = WORDS[64:128].copy()
    with pytest.raises(Exception, match="GLOBAL_LOAD_SHORT_D16"):
        run(listing[2:3], v=where, device=device)
    run(listing[:2], v={**where, 10: value}, device=device)
    assert (target.numpy() == value & 0xFF | value & 0xFFFF0000).all()
    assert source.numpy()[0] == WORDS[0]


def test_buffer_addressing():
    """Offset register, scalar offset and immediate add up; without `offen` the register is not used."""
    device = Device("gfx942")
    source = device.put(WORDS)
    s = descriptor(source.address, 16384) | {12: 256}
    end = run([mubuf("BUFFER_LOAD_DWORD", soffset=12, offset=8)], v={0: LANES * 4}, s=s, device=device)
    assert (end.v(20) == WORDS[64 + 2 + LANES]).all()
    end = run([mubuf("BUFFER_LOAD_DWORD", offen=0, offset=8)], v={0: LANES * 4}, s=s, device=device)
    assert (end.v(20) == WORDS[2]).all()


def test_buffer_range_check_is_per_element():
    """Past the last byte of the buffer loads give 0 and stores are dropped, element by element."""
    device = Device("gfx942")
    source = device.put(WORDS)
    end = run([mubuf("BUFFER_LOAD_DWORDX4")], v={0: LANES * 16}, s=descriptor(source.address, 16 * 10 + 8), device=device)
    for k in range(4):
        inside = LANES * 16 + 4 * k + 4 <= 168
        assert (end.v(20 + k) == np.where(inside, WORDS[4 * LANES + k], 0)).all()
    run([mubuf("BUFFER_STORE_DWORD")], v={0: LANES * 4, 20: np.uint32(1)}, s=descriptor(source.address, 40), device=device)
    assert (source.numpy()[:10] == 1).all()
    assert (source.numpy()[10:] == WORDS[10:]).all()


@pytest.mark.parametrize(("name", "count"), [("BUFFER_LOAD_DWORD", 1), ("BUFFER_LOAD_DWORDX4", 4)])
def test_buffer_load_into_lds(name, count):
    """LDS address = M0 + immediate + 4 * count * lane; the memory address takes the immediate too."""
    device = Device("gfx950")
    source = device.put(WORDS)
    s = descriptor(source.address, 16384) | {124: 512}
    end = run([mubuf(name, lds=1, offset=16)], v={0: LANES * 16}, s=s, device=device, arch="gfx950")
    for k in range(count):
        assert (end.group["lds"][(512 + 16) // 4 + count * LANES + k] == WORDS[4 + 4 * LANES + k]).all()


@pytest.mark.parametrize(("arch", "place"), [("gfx942", 0x400), ("gfx950", 0x10400)])
def test_the_lds_address_in_m0_is_wider_on_gfx950(arch, place):
    device = Device(arch)
    source = device.put(WORDS)
    s = descriptor(source.address, 16384) | {124: 0x10400}
    end = run(
        [mubuf("BUFFER_LOAD_DWORD", lds=1)],
        v={0: LANES * 4},
        s=s,
        device=device,
        arch=arch,
        lds_bytes=0x10800 if arch == "gfx950" else 0x1000,
    )
    assert (end.group["lds"][place // 4 + LANES] == WORDS[LANES]).all()


def test_global_load_into_lds():
    device = Device("gfx950")
    source = device.put(WORDS)
    end = run([vmem("GLOBAL_LOAD_LDS_DWORDX4")], v=address_registers(source.address, LANES * 16), s={124: 64}, device=device, arch="gfx950")
    assert (end.group["lds"][16 + np.arange(256)] == WORDS[:256]).all()


@pytest.mark.parametrize(("suffix", "count"), [("DWORD", 1), ("DWORDX2", 2), ("DWORDX4", 4), ("DWORDX8", 8), ("DWORDX16", 16)])
@pytest.mark.parametrize("form", ["immediate", "negative", "register in the offset field", "soffset"])
def test_scalar_loads(suffix, count, form):
    device = Device("gfx942")
    source = device.put(WORDS)
    fields = {"sdata": 32, "sbase": 8, "soffset": 0, "soffset_en": 0, "imm": 1, "offset": 12}
    start = source.address + 64
    if form == "negative":
        fields["offset"] = -8 & 0x1FFFFF
    elif form == "register in the offset field":
        fields |= {"imm": 0, "offset": 20}
    elif form == "soffset":
        fields |= {"soffset_en": 1, "soffset": 20}
    expected = {"immediate": 12, "negative": -8, "register in the offset field": 40, "soffset": 52}[form]
    load = Instruction(0, 8, f"S_LOAD_{suffix}", "SMEM", fields)
    end = run([load], s={8: start & 0xFFFFFFFF, 9: start >> 32, 20: 40}, device=device)
    first = (64 + expected) // 4
    assert [end.s(32 + k) for k in range(count)] == WORDS[first : first + count].tolist()


def test_an_access_outside_every_allocation_names_the_instruction():
    device = Device("gfx942")
    source = device.put(WORDS)
    beyond = address_registers(source.address + WORDS.nbytes, LANES * 0)
    with pytest.raises(
        MemoryFaultError,
        match=rf"GLOBAL_LOAD_DWORD at 0x0: access to memory outside every allocation \({source.address + WORDS.nbytes:#x}\)",
    ):
        run([vmem("GLOBAL_LOAD_DWORD")], v=beyond, device=device)
    with pytest.raises(MemoryFaultError, match="GLOBAL_STORE_DWORD"):
        run([vmem("GLOBAL_STORE_DWORD")], v={**beyond, 10: LANES}, device=device)
    with pytest.raises(MemoryFaultError, match="S_LOAD_DWORD"):
        run(
            [Instruction(0, 8, "S_LOAD_DWORD", "SMEM", {"sdata": 32, "sbase": 8, "soffset_en": 0, "imm": 1, "offset": 0})],
            s={8: 64, 9: 0},
            device=device,
        )


def test_a_read_of_memory_nobody_wrote_is_reported():
    device = Device("gfx942")
    empty = device.empty((64,), np.float32)
    end = run([vmem("GLOBAL_LOAD_DWORD")], v=address_registers(empty.address, LANES * 4), device=device)
    (finding,) = end.report.findings
    assert finding.kind == "read of memory nobody wrote"
    assert (finding.count, finding.where, finding.instruction) == (64, empty.address, "GLOBAL_LOAD_DWORD at 0x0")
    assert np.isnan(end.f(20)).all()


def test_a_misaligned_access_works_and_is_reported():
    device = Device("gfx942")
    source = device.put(WORDS)
    end = run([vmem("GLOBAL_LOAD_DWORD", offset=1)], v=address_registers(source.address, LANES * 4), device=device)
    raw = WORDS.view(np.uint8)
    assert (end.v(20) == np.array([raw[4 * lane + 1 : 4 * lane + 5].view(np.uint32)[0] for lane in range(64)])).all()
    assert [finding.kind for finding in end.report.findings] == ["misaligned access"]


# --- delayed loads ---

DELAYED = Mode(delayed=True)


def wait(vmcnt: int = 63, lgkmcnt: int = 15) -> Instruction:
    return Instruction(0, 4, "S_WAITCNT", "SOPP", {"simm16": vmcnt & 15 | (vmcnt & 0x30) << 10 | lgkmcnt << 8 | 0x70})


def copy(source: int, target: int) -> Instruction:
    return Instruction(0, 4, "V_MOV_B32", "VOP1", {"vdst": V + target, "src0": V + source})


def test_a_load_arrives_when_a_wait_asks_for_it():
    device = Device("gfx942")
    source = device.put(WORDS)
    listing = [
        vmem("GLOBAL_LOAD_DWORD"),
        vmem("GLOBAL_LOAD_DWORD", vdst=V + 21, offset=4),
        wait(vmcnt=1),
        copy(20, 30),
        copy(21, 31),
        wait(vmcnt=0),
        copy(21, 32),
    ]
    end = run(listing, v={**address_registers(source.address, LANES * 4), 21: np.uint32(7)}, device=device, mode=DELAYED)
    assert (end.v(30) == WORDS[LANES]).all()
    assert (end.v(31) == 7).all()
    assert (end.v(32) == WORDS[LANES + 1]).all()
    (finding,) = end.report.findings
    assert finding.kind == "register used before its load was waited for"
    assert (finding.instruction, finding.other, finding.where) == ("GLOBAL_LOAD_DWORD at 0x8", "V_MOV_B32 at 0x20", 21)


def test_scalar_loads_are_delayed_too():
    device = Device("gfx942")
    source = device.put(WORDS)
    load = Instruction(0, 8, "S_LOAD_DWORD", "SMEM", {"sdata": 32, "sbase": 8, "soffset_en": 0, "imm": 1, "offset": 0})
    move = [Instruction(0, 4, "S_MOV_B32", "SOP1", {"sdst": 40 + k, "ssrc0": 32}) for k in range(2)]
    s = {8: source.address & 0xFFFFFFFF, 9: source.address >> 32, 32: 5}
    end = run([load, move[0], wait(lgkmcnt=0), move[1]], s=s, device=device, mode=DELAYED)
    assert (end.s(40), end.s(41)) == (5, WORDS[0])
    assert [finding.kind for finding in end.report.findings] == ["register used before its load was waited for"]


def test_stores_count_in_vmcnt():
    device = Device("gfx942")
    source, target = device.put(WORDS), device.empty((64,), np.uint32)
    registers = {**address_registers(source.address, LANES * 4), **address_registers(target.address, LANES * 4, 4), 10: LANES}
    listing = [vmem("GLOBAL_LOAD_DWORD"), vmem("GLOBAL_STORE_DWORD", addr=V + 4), wait(vmcnt=1), copy(20, 30)]
    end = run(listing, v=registers, device=device, mode=DELAYED)
    assert (end.v(30) == WORDS[LANES]).all()
    assert end.report.findings == []


def test_the_lds_works_in_order_up_to_a_barrier():
    """An LDS read before a barrier has happened when another wave writes after it, waited for or not."""

    def ds(name, **fields):
        return Instruction(
            0,
            8,
            name,
            "DS",
            {"addr": V + 1, "data0": V + 2, "data1": V, "vdst": V + 20, "acc": 0, "gds": 0, "offset0": 0, "offset1": 0, **fields},
        )

    def constant(register, code):
        return Instruction(0, 4, "V_MOV_B32", "VOP1", {"vdst": V + register, "src0": code})

    barrier = Instruction(0, 4, "S_BARRIER", "SOPP", {"simm16": 0})
    listing = [
        constant(1, 128),
        constant(2, 129),
        ds("DS_WRITE_B32"),
        wait(lgkmcnt=0),
        ds("DS_READ_B32"),
        barrier,
        constant(2, 130),
        ds("DS_WRITE_B32"),
        wait(lgkmcnt=0),
        copy(20, 30),
    ]
    end = run(listing, mode=DELAYED)
    assert (end.v(30) == 1).all()


def test_the_lgkm_counter_stalls_when_it_is_full():
    """The sixteenth outstanding LDS read waits for the first."""

    def read(target):
        return Instruction(
            0,
            8,
            "DS_READ_B32",
            "DS",
            {"addr": V + 1, "data0": V, "data1": V, "vdst": V + target, "acc": 0, "gds": 0, "offset0": 0, "offset1": 0},
        )

    end = run([*[read(40 + k) for k in range(16)], copy(40, 30), copy(41, 31)], v={1: np.uint32(0), 41: np.uint32(5)}, mode=DELAYED)
    assert (end.v(30) != 5).all()
    assert (end.v(31) == 5).all()


def test_a_read_of_lds_with_a_load_in_flight_is_reported():
    device = Device("gfx950")
    source = device.put(WORDS)
    read = Instruction(
        0, 8, "DS_READ_B32", "DS", {"addr": V + 2, "data0": V, "data1": V, "vdst": V + 20, "acc": 0, "gds": 0, "offset0": 0, "offset1": 0}
    )
    listing = [vmem("GLOBAL_LOAD_LDS_DWORD"), read, wait(lgkmcnt=0), wait(vmcnt=0), read]
    end = run(
        listing, v={**address_registers(source.address, LANES * 4), 2: LANES * 4}, s={124: 0}, device=device, arch="gfx950", mode=DELAYED
    )
    assert [finding.kind for finding in end.report.findings] == ["LDS read while a load into it is in flight"]


def test_waves_of_a_partial_workgroup_have_fewer_lanes():
    device = Device("gfx942")
    target = device.empty((100,), np.uint32)
    high, low = target.address >> 32, target.address & 0xFFFFFFFF
    listing = [
        Instruction(0, 8, "S_MOV_B32", "SOP1_LIT", {"sdst": 8, "ssrc0": 255, "literal": low}),
        Instruction(0, 8, "S_MOV_B32", "SOP1_LIT", {"sdst": 9, "ssrc0": 255, "literal": high}),
        Instruction(0, 8, "V_LSHLREV_B32", "VOP2", {"vdst": V + 1, "src0": 130, "vsrc1": V}),
        vmem("GLOBAL_STORE_DWORD", addr=V + 1, data=V, saddr=8),
    ]
    report = launch(listing, block=100, mode=Mode(turn=1), device=device)
    assert target.numpy().tolist() == list(range(100))
    assert report.by_opcode()["GLOBAL_STORE_DWORD"] == 2
