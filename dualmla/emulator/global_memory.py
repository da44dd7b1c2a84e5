"""Vector accesses to device memory (buffer, global, flat) and scalar loads.

A load is issued (memory read, the data kept in a queue slot) and delivered (registers or LDS written): at once, or in
delayed mode when `s_waitcnt` asks for it. A store writes memory at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dualmla.emulator import lds, memory, state
from dualmla.emulator.jit import inlined, njit
from dualmla.emulator.lanes import pair, scalar_operand


@inlined
def lane_address(wave: Any, ins: Any, lane: Any) -> Any:
    """Byte address of a global or flat access, before the element index."""
    if ins.flags & state.F_SADDR:
        return np.int64(wave.v[ins.src[0], lane]) + pair(wave, ins.src[1] - state.SGPR) + ins.offset[0]
    return (np.int64(wave.v[ins.src[0], lane]) | np.int64(wave.v[ins.src[0] + 1, lane]) << 32) + ins.offset[0]


@njit
def issue(wave: Any, ins: Any, slot: Any, group: Any, arena: Any, record: Any) -> Any:
    """Run a load up to its data in `wave.vm_data[slot]`, or a store completely.

    Buffers are raw (stride 0): an element is in range if its last byte lies below num_records - soffset; out of range
    loads give 0 and stores are dropped.
    """
    active, buffer, is_store = pair(wave, state.EXEC), ins.flags & state.F_BUFFER, ins.flags & state.F_STORE
    wave.vm_record[slot], wave.vm_mask[slot] = -1 if is_store else record, active
    base, limit, scalar_offset = np.int64(0), np.int64(0), np.int64(0)
    if ins.flags & state.F_TO_LDS:
        wave.vm_base[slot] = (np.int64(wave.s[state.M0]) & group.lds_mask) + ins.offset[0]
    if buffer:
        descriptor = ins.src[1] - state.SGPR
        scalar_offset = scalar_operand(wave, ins, 2)
        base = pair(wave, descriptor) & 0xFFFFFFFFFFFF
        limit = np.int64(wave.s[descriptor + 2]) - scalar_offset
    for lane in range(64):
        if not active >> lane & 1:
            continue
        if buffer:
            inside = (np.int64(wave.v[ins.src[0], lane]) if ins.flags & state.F_OFFEN else np.int64(0)) + ins.offset[0]
            address = base + scalar_offset + inside
        else:
            inside, address = np.int64(0), lane_address(wave, ins, lane)
        plain = ins.size == 4 and (not buffer or inside + 4 * ins.count <= limit)
        if plain and not is_store and memory.load_words(arena, address, ins.count, wave.vm_data[slot], lane):
            continue
        elements(wave, ins, slot, arena, group, record, lane, address, limit - inside if buffer else np.int64(1 << 62))
        if wave.error:
            return


@njit
def elements(wave: Any, ins: Any, slot: Any, arena: Any, group: Any, record: Any, lane: Any, address: Any, room: Any) -> Any:
    """One lane's accesses one by one; those that do not fit the `room` bytes left are out of the buffer's range."""
    is_store = ins.flags & state.F_STORE
    for k in range(ins.count):
        in_range = ins.size * (k + 1) <= room
        if is_store:
            if in_range:
                value = np.int64(wave.v[ins.src[3] + k, lane]) >> (16 if ins.flags & state.F_HIGH_HALF else 0)
                memory.store(arena, wave, group, record, address + 4 * k, ins.size, value)
        else:
            value = memory.load(arena, wave, group, record, address + 4 * k, ins.size) if in_range else np.int64(0)
            if ins.signed:
                sign = 1 << (8 * ins.size - 1)
                value = ((value ^ sign) - sign) & 0xFFFFFFFF
            wave.vm_data[slot, k, lane] = value
        if wave.error:
            return


@inlined
def lds_span(wave: Any, ins: Any, slot: Any, lane: Any) -> Any:
    """LDS byte address a load into LDS writes for `lane`."""
    return wave.vm_base[slot] + 4 * ins.count * lane


@njit
def deliver(wave: Any, ins: Any, slot: Any, group: Any) -> Any:
    """Write the registers, or the LDS, that the load in queue slot `slot` is for."""
    mask = wave.vm_mask[slot]
    if ins.flags & state.F_TO_LDS:
        for lane in range(64):
            if mask >> lane & 1:
                address = lds_span(wave, ins, slot, lane)
                if not lds.valid(group, wave, address, 4 * ins.count):
                    return
                for k in range(ins.count):
                    lds.write_word(group, wave, wave.vm_record[slot], address + 4 * k, wave.vm_data[slot, k, lane])
                    if group.delayed:
                        group.in_flight[(address >> 2) + k] = 0
        return
    for k in range(ins.count):
        for lane in range(64):
            if mask >> lane & 1:
                value = np.int64(wave.vm_data[slot, k, lane])
                if ins.flags & state.F_KEEP_HALF:
                    value = lds.merge_half(np.int64(wave.v[ins.dst, lane]), value, ins.flags)
                wave.v[ins.dst + k, lane] = value


@njit
def scalar_load(wave: Any, ins: Any, slot: Any, group: Any, arena: Any, record: Any) -> Any:
    """S_LOAD_DWORD*, S_BUFFER_LOAD_DWORD*: the data into `wave.lg_data[slot, 0]`."""
    base = pair(wave, ins.src[0] - state.SGPR)
    if ins.flags & state.F_BUFFER:
        base &= 0xFFFFFFFFFFFF
    address = (base + ins.offset[0] + scalar_operand(wave, ins, 1)) & ~np.int64(3)
    for k in range(ins.count):
        wave.lg_data[slot, 0, k] = memory.load(arena, wave, group, record, address + 4 * k, 4)
        if wave.error:
            return


@njit
def deliver_scalar(wave: Any, ins: Any, slot: Any) -> Any:
    for k in range(ins.count):
        wave.s[ins.dst + k] = wave.lg_data[slot, 0, k]
