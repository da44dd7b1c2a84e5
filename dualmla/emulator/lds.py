"""The local data share (LDS): reads, writes, transposing reads, lane permutes, loads straight into it; the race detector.

An LDS instruction is issued (addresses and data captured), fetched (the LDS read or written) and delivered (registers
written). Normally all three happen at once. In delayed mode the fetch waits until `s_waitcnt lgkmcnt` asks for it or a
barrier is reached (the LDS works in order, so what was issued before a barrier is done before what follows it) and the
delivery until the wait.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dualmla.emulator import findings, state
from dualmla.emulator.jit import inlined, njit
from dualmla.emulator.lanes import pair


@njit
def track(group: Any, wave: Any, record: Any, word: Any, writes: Any) -> Any:
    """Race detector: same word, same epoch, two waves, at least one write."""
    me = wave.number
    if group.write_epoch[word] >> 4 == group.epoch and group.write_epoch[word] & 15 != me:
        findings.note(group, findings.WRITE_WRITE if writes else findings.READ_WRITE, group.write_record[word], record, 4 * word)
    if writes:
        for other in range(16):
            if other != me and group.read_epoch[other, word] == group.epoch:
                findings.note(group, findings.READ_WRITE, group.read_record[other, word], record, 4 * word)
        group.write_epoch[word] = group.epoch << 4 | me
        group.write_record[word] = record
    else:
        group.read_epoch[me, word] = group.epoch
        group.read_record[me, word] = record


@inlined
def valid(group: Any, wave: Any, address: Any, nbytes: Any) -> Any:
    if address < 0 or address + nbytes > group.lds_bytes:
        wave.error, wave.error_address = state.E_LDS, address
        return False
    return True


@inlined
def read_word(group: Any, wave: Any, record: Any, address: Any) -> Any:
    word = address >> 2
    if group.watch:
        if not group.written[word]:
            findings.note(group, findings.UNWRITTEN_LDS, record, -1, address)
        track(group, wave, record, word, False)
    if group.delayed and group.in_flight[word]:
        findings.note(group, findings.LOAD_IN_FLIGHT, group.in_flight[word] - 1, record, address)
    return group.lds[word]


@inlined
def write_word(group: Any, wave: Any, record: Any, address: Any, value: Any) -> Any:
    word = address >> 2
    if group.watch:
        group.written[word] = 1
        track(group, wave, record, word, True)
    group.lds[word] = value


@njit
def fetch(group: Any, wave: Any, ins: Any, slot: Any) -> Any:
    """Access the LDS for the operation captured in queue slot `slot`: `wave.lg_data` is read or filled."""
    mask, record = wave.lg_mask[slot], wave.lg_record[slot]
    wave.lg_fetched[slot] = 1
    for lane in range(64):
        if not mask >> lane & 1:
            continue
        for access in range(ins.passes):
            address = (np.int64(wave.lg_address[slot, lane]) + ins.offset[access]) & 0xFFFFFFFF
            if not valid(group, wave, address, ins.count * ins.size):
                return
            for k in range(ins.count):
                row = access * ins.count + k
                if ins.size == 4 and address & 3:
                    _misaligned(group, wave, ins, slot, lane, row, address + 4 * k, record)
                elif ins.size == 4 and ins.kind == state.LDS_WRITE:
                    write_word(group, wave, record, address + 4 * k, wave.lg_data[slot, row, lane])
                elif ins.size == 4:
                    wave.lg_data[slot, row, lane] = read_word(group, wave, record, address + 4 * k)
                else:
                    _narrow(group, wave, ins, slot, lane, address, record)
    if ins.kind == state.LDS_TRANSPOSE:
        transpose(wave, slot, ins.op)


@njit
def _misaligned(group: Any, wave: Any, ins: Any, slot: Any, lane: Any, row: Any, address: Any, record: Any) -> Any:
    """One 32-bit access at any address (works under ROCm): across two words of the LDS."""
    findings.note(group, findings.MISALIGNED, record, -1, address)
    first, shift = address & ~3, 8 * (address & 3)
    both = np.int64(group.lds[first >> 2]) | np.int64(group.lds[(first >> 2) + 1]) << 32
    if ins.kind == state.LDS_WRITE:
        keep = both & ~(np.int64(0xFFFFFFFF) << shift)
        both = keep | np.int64(wave.lg_data[slot, row, lane]) << shift
        write_word(group, wave, record, first, both & 0xFFFFFFFF)
        write_word(group, wave, record, first + 4, both >> 32 & 0xFFFFFFFF)
    else:
        low = np.int64(read_word(group, wave, record, first)) >> shift
        high = np.int64(read_word(group, wave, record, first + 4)) << (32 - shift)
        wave.lg_data[slot, row, lane] = (low | high) & 0xFFFFFFFF


@inlined
def _narrow(group: Any, wave: Any, ins: Any, slot: Any, lane: Any, address: Any, record: Any) -> Any:
    """One byte or short."""
    shift, width = 8 * (address & 3), 0xFF if ins.size == 1 else 0xFFFF
    if ins.kind == state.LDS_WRITE:
        value = np.int64(wave.lg_data[slot, 0, lane]) >> (16 if ins.flags & state.F_HIGH_HALF else 0) & width
        word = np.int64(group.lds[address >> 2]) & ~(width << shift) | value << shift
        write_word(group, wave, record, address & ~3, word)
    else:
        value = np.int64(read_word(group, wave, record, address & ~3)) >> shift & width
        sign = (width >> 1) + 1
        wave.lg_data[slot, 0, lane] = ((value ^ sign) - sign if ins.signed else value) & 0xFFFFFFFF


@njit
def transpose(wave: Any, slot: Any, elements: Any) -> Any:
    """gfx950 DS_READ_B64_TR: each 16 lanes hold a matrix of 16 columns, row-major in chunks of 64 bits (`elements` to a
    lane); lane l receives column l."""
    bits = 64 // elements
    for lane in range(64):
        group, column = lane & ~15, lane & 15
        low, high = np.int64(0), np.int64(0)
        for row in range(elements):
            source = group + (column + 16 * row) // elements
            position = bits * (column % elements)
            value = np.int64(wave.lg_data[slot, position >> 5, source]) >> (position & 31) & ((1 << bits) - 1)
            if bits * row < 32:
                low |= value << (bits * row)
            else:
                high |= value << (bits * row - 32)
        wave.lg_data[slot, 2, lane] = low
        wave.lg_data[slot, 3, lane] = high
    for lane in range(64):
        wave.lg_data[slot, 0, lane] = wave.lg_data[slot, 2, lane]
        wave.lg_data[slot, 1, lane] = wave.lg_data[slot, 3, lane]


@njit
def issue(wave: Any, ins: Any, slot: Any) -> Any:
    """Capture addresses and, for a write, data of an LDS operation into queue slot `slot`."""
    wave.lg_mask[slot] = pair(wave, state.EXEC)
    for lane in range(64):
        wave.lg_address[slot, lane] = wave.v[ins.src[0], lane]
    if ins.kind == state.LDS_WRITE:
        for access in range(ins.passes):
            for k in range(ins.count):
                for lane in range(64):
                    wave.lg_data[slot, access * ins.count + k, lane] = wave.v[ins.src[1 + access] + k, lane]
    elif ins.kind == state.LDS_PERMUTE:
        permute(wave, ins, slot)


@inlined
def swizzled(lane: Any, pattern: Any) -> Any:
    """The lane that DS_SWIZZLE_B32 reads: picked out of the quad by two bits each, or the number within 32 lanes masked (bits
    0-4 of the pattern), set (5-9) and flipped (10-14)."""
    if pattern >> 15:
        return lane & ~3 | pattern >> 2 * (lane & 3) & 3
    return lane & 32 | (lane & pattern | pattern >> 5) & 31 ^ pattern >> 10


@njit
def permute(wave: Any, ins: Any, slot: Any) -> Any:
    """DS_BPERMUTE_B32 (op 0): lane l reads lane address/4, 0 from an inactive one. DS_PERMUTE_B32 (op 1): it sends there.
    DS_SWIZZLE_B32 (op 2): it reads the lane the pattern in the offset names; its address operand is the data."""
    mask = wave.lg_mask[slot]
    for lane in range(64):
        wave.lg_data[slot, 0, lane] = 0
    if ins.op == 2:
        for lane in range(64):
            other = swizzled(lane, ins.offset[0])
            if mask >> other & 1:
                wave.lg_data[slot, 0, lane] = wave.lg_address[slot, other]
        return
    for lane in range(64):
        other = (np.int64(wave.lg_address[slot, lane]) + ins.offset[0]) >> 2 & 63
        if ins.op == 0 and mask >> other & 1:
            wave.lg_data[slot, 0, lane] = wave.v[ins.src[1], other]
        elif ins.op == 1 and mask >> lane & 1:
            wave.lg_data[slot, 0, other] = wave.v[ins.src[1], lane]


@njit
def deliver(wave: Any, ins: Any, slot: Any) -> Any:
    """Write the registers an LDS read or permute loads."""
    if ins.kind == state.LDS_WRITE:
        return
    mask = wave.lg_mask[slot]
    for row in range(ins.count * ins.passes):
        for lane in range(64):
            if mask >> lane & 1:
                value = np.int64(wave.lg_data[slot, row, lane])
                if ins.flags & state.F_KEEP_HALF:
                    value = merge_half(np.int64(wave.v[ins.dst, lane]), value, ins.flags)
                wave.v[ins.dst + row, lane] = value


@njit
def merge_half(old: Any, value: Any, flags: Any) -> Any:
    """D16 loads change one half of the register and keep the other."""
    if flags & state.F_HIGH_HALF:
        return old & 0xFFFF | (value & 0xFFFF) << 16
    return old & 0xFFFF0000 | value & 0xFFFF
