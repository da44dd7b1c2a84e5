"""The local data share (LDS): reads, writes, transposing reads, lane permutes, loads straight into it; the race detector.

An LDS instruction is issued (addresses and data captured), fetched (the LDS read or written) and delivered (registers
written). Normally all three happen at once. In delayed mode the fetch waits until `s_waitcnt lgkmcnt` asks for it or a
barrier is reached (the LDS works in order, so what was issued before a barrier is done before what follows it) and the
delivery until the wait.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from dualmla.emulator import findings, state
from dualmla.emulator.lanes import pair


class LocalMemory(NamedTuple):
    """One workgroup's LDS and its shadows, one entry a 32-bit word where the race detector is on (else length 1)."""

    words: NDArray[np.uint32]
    size: int
    """Bytes."""
    written: NDArray[np.uint8]
    """1 where somebody wrote."""
    write_epoch: NDArray[np.int64]
    """Barrier epoch of the last write times 16, plus the wave that wrote."""
    write_record: NDArray[np.int32]
    read_epoch: NDArray[np.int64]
    """[16 waves, words] barrier epoch of each wave's last read."""
    read_record: NDArray[np.int32]
    in_flight: NDArray[np.int32]
    """1 + record number of the load into LDS that has not arrived (delayed mode), else 0."""


@numba.njit
def track(local: LocalMemory, wave: Any, notes: Any, record: Any, word: Any, writes: Any, epoch: Any) -> Any:
    """Race detector: same word, same epoch, two waves, at least one write."""
    me = wave.number
    if local.write_epoch[word] >> 4 == epoch and local.write_epoch[word] & 15 != me:
        findings.note(notes, findings.WRITE_WRITE if writes else findings.READ_WRITE, local.write_record[word], record, 4 * word)
    if writes:
        for other in range(16):
            if other != me and local.read_epoch[other, word] == epoch:
                findings.note(notes, findings.READ_WRITE, local.read_record[other, word], record, 4 * word)
        local.write_epoch[word] = epoch << 4 | me
        local.write_record[word] = record
    else:
        local.read_epoch[me, word] = epoch
        local.read_record[me, word] = record


@numba.njit
def valid(local: LocalMemory, wave: Any, address: Any, nbytes: Any, align: Any) -> Any:
    if address & (align - 1):
        wave.error, wave.error_address = state.E_MISALIGNED, address
        return False
    if address < 0 or address + nbytes > local.size:
        wave.error, wave.error_address = state.E_LDS, address
        return False
    return True


@numba.njit
def read_word(local: LocalMemory, wave: Any, notes: Any, record: Any, address: Any, epoch: Any) -> Any:
    word = address >> 2
    if local.written.size > 1:
        if not local.written[word]:
            findings.note(notes, findings.UNWRITTEN_LDS, record, -1, address)
        track(local, wave, notes, record, word, False, epoch)
    if local.in_flight.size > 1 and local.in_flight[word]:
        findings.note(notes, findings.LOAD_IN_FLIGHT, local.in_flight[word] - 1, record, address)
    return local.words[word]


@numba.njit
def write_word(local: LocalMemory, wave: Any, notes: Any, record: Any, address: Any, value: Any, epoch: Any) -> Any:
    word = address >> 2
    if local.written.size > 1:
        local.written[word] = 1
        track(local, wave, notes, record, word, True, epoch)
    local.words[word] = value


@numba.njit
def fetch(local: LocalMemory, wave: Any, ins: Any, slot: Any, notes: Any, epoch: Any) -> Any:
    """Access the LDS for the operation captured in queue slot `slot`: `wave.lg_data` is read or filled."""
    mask, record = wave.lg_mask[slot], wave.lg_record[slot]
    wave.lg_fetched[slot] = 1
    for lane in range(64):
        if not mask >> lane & 1:
            continue
        for access in range(ins.passes):
            address = (np.int64(wave.lg_address[slot, lane]) + ins.offset[access]) & 0xFFFFFFFF
            if not valid(local, wave, address, ins.count * ins.size, ins.size):
                return
            for k in range(ins.count):
                row = access * ins.count + k
                if ins.size == 4 and ins.kind == state.LDS_WRITE:
                    write_word(local, wave, notes, record, address + 4 * k, wave.lg_data[slot, row, lane], epoch)
                elif ins.size == 4:
                    wave.lg_data[slot, row, lane] = read_word(local, wave, notes, record, address + 4 * k, epoch)
                else:
                    _narrow(local, wave, ins, slot, lane, address, notes, record, epoch)
    if ins.kind == state.LDS_TRANSPOSE:
        transpose(wave, slot, ins.op)


@numba.njit
def _narrow(local: LocalMemory, wave: Any, ins: Any, slot: Any, lane: Any, address: Any, notes: Any, record: Any, epoch: Any) -> Any:
    """One byte or short."""
    shift, width = 8 * (address & 3), 0xFF if ins.size == 1 else 0xFFFF
    if ins.kind == state.LDS_WRITE:
        value = np.int64(wave.lg_data[slot, 0, lane]) >> (16 if ins.flags & state.F_HIGH_HALF else 0) & width
        word = np.int64(local.words[address >> 2]) & ~(width << shift) | value << shift
        write_word(local, wave, notes, record, address & ~3, word, epoch)
    else:
        value = np.int64(read_word(local, wave, notes, record, address & ~3, epoch)) >> shift & width
        sign = (width >> 1) + 1
        wave.lg_data[slot, 0, lane] = ((value ^ sign) - sign if ins.signed else value) & 0xFFFFFFFF


@numba.njit
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


@numba.njit
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


@numba.njit
def permute(wave: Any, ins: Any, slot: Any) -> Any:
    """DS_BPERMUTE_B32 (op 0): lane l reads lane address/4, 0 from an inactive one. DS_PERMUTE_B32 (op 1): it sends there."""
    mask = wave.lg_mask[slot]
    for lane in range(64):
        wave.lg_data[slot, 0, lane] = 0
    for lane in range(64):
        other = (np.int64(wave.lg_address[slot, lane]) + ins.offset[0]) >> 2 & 63
        if ins.op == 0 and mask >> other & 1:
            wave.lg_data[slot, 0, lane] = wave.v[ins.src[1], other]
        elif ins.op == 1 and mask >> lane & 1:
            wave.lg_data[slot, 0, other] = wave.v[ins.src[1], lane]


@numba.njit
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


@numba.njit
def merge_half(old: Any, value: Any, flags: Any) -> Any:
    """D16 loads change one half of the register and keep the other."""
    if flags & state.F_HIGH_HALF:
        return old & 0xFFFF | (value & 0xFFFF) << 16
    return old & 0xFFFF0000 | value & 0xFFFF
