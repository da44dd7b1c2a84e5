"""The loop that runs encoded instructions: one `step` a wave-instruction, one executor a kind.

`compile_interpreter()` compiles everything on first use (about half a minute) and keeps the result in numba's cache on disk.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np

from dualmla.emulator import findings, global_memory, lanes, lds, matrix, scalar, state, vector_compare, vector_float, vector_integer
from dualmla.emulator.jit import merged, njit
from dualmla.emulator.registry import compiled, fingerprint, lane_dispatcher, scalar_dispatcher

SEMANTICS = (scalar, vector_integer, vector_float, vector_compare)
"""Importing these filled the registry, which the dispatchers compile."""


class Arithmetic(NamedTuple):
    """The compiled semantics, called by address."""

    lanes: Any
    scalar: Any
    matrix: Any


@njit
def vector(wave: Any, ins: Any, arithmetic: Any) -> Any:  # noqa: PLR0912 - one branch an operand row
    """Lane-wise instructions: fetch the operands, apply the registered function, write what it returned."""
    for second in range(ins.passes):
        for k in range(4):
            if ins.form[k]:
                if k == 0:
                    lanes.fetch(wave, ins, 0, second, wave.a, wave.a_q)
                elif k == 1:
                    lanes.fetch(wave, ins, 1, second, wave.b, wave.b_q)
                elif k == 2:
                    lanes.fetch(wave, ins, 2, second, wave.c, wave.c_q)
                else:
                    lanes.fetch(wave, ins, 3, second, wave.d, wave.d_q)
        arithmetic.lanes(np.int64(ins.op), wave)
        if ins.clamp:
            lanes.clamp(wave, ins.dst_width == 2)
        if ins.passes == 2 and second == 0:  # the second pass may read what the first is to overwrite
            for lane in range(64):
                wave.d[lane] = wave.out[lane]
    if ins.passes == 2:
        lanes.write(wave, ins, ins.dst, wave.d)
        lanes.write(wave, ins, ins.dst + 1, wave.out)
    elif ins.dst_width == 2:
        lanes.write_wide(wave, ins.dst)
    elif ins.dst >= 0:
        lanes.write(wave, ins, ins.dst, wave.out)
    if ins.sdst >= 0:
        lanes.write_mask(wave, ins.sdst)


@merged
def scalar_arithmetic(wave: Any, ins: Any, arithmetic: Any) -> Any:
    a = lanes.scalar_operand(wave, ins, 0) if ins.form[0] else np.int64(0)
    b = lanes.scalar_operand(wave, ins, 1) if ins.form[1] else np.int64(0)
    value, wave.scc = arithmetic.scalar(np.int64(ins.op), a, b, wave.scc)
    if ins.dst >= 0:
        if ins.dst_width == 2:
            lanes.set_pair(wave, ins.dst, value)
        else:
            wave.s[ins.dst] = value & 0xFFFFFFFF


@merged
def save_exec(wave: Any, ins: Any, arithmetic: Any) -> Any:
    """S_<op>_SAVEEXEC_B64: keep EXEC in the destination, then EXEC = source <op> EXEC."""
    old = lanes.pair(wave, state.EXEC)
    value, wave.scc = arithmetic.scalar(np.int64(ins.op), lanes.scalar_operand(wave, ins, 0), old, wave.scc)
    lanes.set_pair(wave, ins.dst, old)
    lanes.set_pair(wave, state.EXEC, value)


@merged
def taken(wave: Any, condition: Any) -> Any:
    """Branch conditions, in the order of `translate._CONDITIONS`."""
    if condition == 6:
        return True
    if condition < 2:
        return wave.scc == condition
    zero = lanes.pair(wave, state.VCC if condition < 4 else state.EXEC) == 0
    return zero == (condition % 2 == 0)


@merged
def gpr_index(wave: Any, ins: Any) -> Any:
    """S_SET_GPR_IDX_ON / _OFF, source 0 only: M0 takes the index and the mode."""
    if ins.op == 0:
        wave.gpr_index = 0
        return
    wave.gpr_index = lanes.scalar_operand(wave, ins, 0) & 255
    wave.s[state.M0] = (np.int64(wave.s[state.M0]) & 0xFFFF0F00) | wave.gpr_index | 1 << 12


@njit
def set_pending(wave: Any, ins: Any, value: Any) -> Any:
    """Mark the registers a load is for (`value` = 1 + its record number) or clear them (0)."""
    if ins.kind == state.SCALAR_LOAD:
        for k in range(ins.count):
            wave.pending_scalar[ins.dst + k] = value
    elif ins.kind != state.LDS_WRITE and not ins.flags & (state.F_TO_LDS | state.F_STORE):
        for k in range(ins.count * ins.passes):
            wave.pending[ins.dst + k] = value


@njit
def check_pending(wave: Any, ins: Any, group: Any, record: Any) -> Any:
    """Report operands whose load has been issued but not waited for."""
    for k in range(4):
        code = ins.src[k]
        for i in range(ins.registers[k]):
            load = 0
            if code < state.SGPR:
                load = wave.pending[code + i]
            elif code + i < state.SGPR + 128:
                load = wave.pending_scalar[code + i - state.SGPR]
            if load:
                findings.note(group, findings.MISSING_WAIT, load - 1, record, code + i)


@njit
def drain_vector_memory(wave: Any, group: Any, records: Any, keep: Any) -> Any:
    """Deliver the oldest loads until at most `keep` operations are outstanding."""
    while wave.vm_count > keep and not wave.error:
        slot = wave.vm_head
        record = wave.vm_record[slot]
        if record >= 0:
            ins = records[record]
            set_pending(wave, ins, 0)
            global_memory.deliver(wave, ins, slot, group)
        wave.vm_head = (slot + 1) % (state.VMEM_QUEUE + 1)
        wave.vm_count -= 1


@njit
def fetch_lds(wave: Any, group: Any, records: Any, slot: Any) -> Any:
    ins = records[wave.lg_record[slot]]
    if not wave.lg_fetched[slot] and ins.kind not in (state.SCALAR_LOAD, state.LDS_PERMUTE):
        lds.fetch(group, wave, ins, slot)


@njit
def drain_lds(wave: Any, group: Any, records: Any, keep: Any) -> Any:
    """Deliver the oldest LDS operations and scalar loads until at most `keep` are outstanding."""
    while wave.lg_count > keep and not wave.error:
        slot = wave.lg_head
        ins = records[wave.lg_record[slot]]
        set_pending(wave, ins, 0)
        if ins.kind == state.SCALAR_LOAD:
            global_memory.deliver_scalar(wave, ins, slot)
        else:
            fetch_lds(wave, group, records, slot)
            lds.deliver(wave, ins, slot)
        wave.lg_head = (slot + 1) % (state.LGKM_QUEUE + 1)
        wave.lg_count -= 1


@njit
def issue_lds(wave: Any, group: Any, records: Any, arena: Any, ins: Any, record: Any) -> Any:
    """Queue an LDS operation or scalar load, and finish it at once unless loads are delayed."""
    drain_lds(wave, group, records, state.LGKM_QUEUE - 1)
    slot = (wave.lg_head + wave.lg_count) % (state.LGKM_QUEUE + 1)
    wave.lg_record[slot], wave.lg_fetched[slot] = record, 0
    if ins.kind == state.SCALAR_LOAD:
        global_memory.scalar_load(wave, ins, slot, group, arena, record)
    else:
        lds.issue(wave, ins, slot)
    wave.lg_count += 1
    if group.delayed:
        set_pending(wave, ins, record + 1)
    else:
        drain_lds(wave, group, records, 0)


@merged
def issue_vector_memory(wave: Any, group: Any, records: Any, arena: Any, ins: Any, record: Any) -> Any:
    drain_vector_memory(wave, group, records, state.VMEM_QUEUE - 1)
    slot = (wave.vm_head + wave.vm_count) % (state.VMEM_QUEUE + 1)
    global_memory.issue(wave, ins, slot, group, arena, record)
    wave.vm_count += 1
    if not group.delayed:
        drain_vector_memory(wave, group, records, 0)
        return
    set_pending(wave, ins, record + 1)
    if ins.flags & state.F_TO_LDS:
        for lane in range(64):
            if wave.vm_mask[slot] >> lane & 1:
                address = global_memory.lds_span(wave, ins, slot, lane)
                if lds.valid(group, wave, address, 4 * ins.count):
                    for k in range(ins.count):
                        group.in_flight[(address >> 2) + k] = record + 1


@merged
def memory_step(wave: Any, group: Any, records: Any, arena: Any, ins: Any, record: Any) -> Any:
    """The kinds that touch memory, waits and barriers."""
    if ins.kind == state.GLOBAL:
        issue_vector_memory(wave, group, records, arena, ins, record)
    elif ins.kind == state.WAIT:
        drain_vector_memory(wave, group, records, ins.offset[0])
        if ins.offset[1] < 15:
            drain_lds(wave, group, records, ins.offset[1])
    elif ins.kind == state.BARRIER:
        for k in range(wave.lg_count):
            fetch_lds(wave, group, records, (wave.lg_head + k) % (state.LGKM_QUEUE + 1))
        wave.status = state.AT_BARRIER
    elif ins.kind == state.END:
        drain_vector_memory(wave, group, records, 0)
        drain_lds(wave, group, records, 0)
        wave.status = state.DONE
    else:
        issue_lds(wave, group, records, arena, ins, record)


@merged
def step(wave: Any, group: Any, records: Any, arena: Any, arithmetic: Any) -> Any:  # noqa: PLR0912 - one branch a kind
    """Execute the instruction at `wave.pc`."""
    record = wave.pc
    ins = records[record]
    ins.executed += 1
    wave.pc += 1
    if group.delayed:
        check_pending(wave, ins, group, record)
    kind = ins.kind
    if kind == state.VECTOR:
        vector(wave, ins, arithmetic)
    elif kind == state.SCALAR:
        scalar_arithmetic(wave, ins, arithmetic)
    elif kind == state.MATRIX:
        arithmetic.matrix(wave, ins, group)
    elif kind == state.BRANCH:
        if taken(wave, ins.op):
            wave.pc = np.int64(ins.target)
    elif kind == state.LANE_ACCESS:
        lanes.lane_access(wave, ins)
    elif kind == state.LANE_SWAP:
        lanes.lane_swap(wave, ins)
    elif kind == state.GPR_INDEX:
        gpr_index(wave, ins)
    elif kind == state.SAVE_EXEC:
        save_exec(wave, ins, arithmetic)
    elif kind == state.UNSUPPORTED:
        wave.error = state.E_UNSUPPORTED
    elif kind != state.NOTHING:
        memory_step(wave, group, records, arena, ins, record)
    if wave.error:
        wave.pc, wave.status = record, state.STOPPED


@merged
def run_wave(wave: Any, group: Any, records: Any, arena: Any, arithmetic: Any, budget: Any) -> Any:
    """Run until a barrier, the end, an error, or `budget` instructions."""
    for _ in range(budget):
        step(wave, group, records, arena, arithmetic)
        if wave.status != state.RUNNING:
            return


def _run_workgroup(waves: Any, groups: Any, records: Any, arena: Any, arithmetic: Any, order: Any, turn: Any) -> Any:
    """Run all waves to their end, `turn` instructions at a time in the given order. Returns the number of the wave that
    stopped with an error, or -1."""
    group = groups[0]
    while True:
        live = 0
        for wave in order:
            if waves[wave].status == state.AT_BARRIER:
                waves[wave].status = state.RUNNING
            live += waves[wave].status == state.RUNNING
        if live == 0:
            return -1
        group.epoch += 1
        running = True
        while running:
            running = False
            for wave in order:
                if waves[wave].status == state.RUNNING:
                    run_wave(waves[wave], group, records, arena, arithmetic, turn)
                    if waves[wave].status == state.STOPPED:
                        return wave
                    running = running or waves[wave].status == state.RUNNING


def _record_type(dtype: np.dtype[np.void]) -> Any:
    return numba.typeof(np.zeros(1, dtype)).dtype


@lru_cache(maxsize=1)
def compile_interpreter() -> tuple[Any, Arithmetic]:
    """Compile, or take from numba's cache: `run_workgroup(waves, groups, records, arena, arithmetic, order, turn)` and the
    arithmetic to hand to it."""
    wave, group, instruction = (_record_type(dtype) for dtype in (state.WAVE, state.GROUP, state.INSTRUCTION))
    execute_matrix = compiled(numba.types.void(wave, instruction, group), matrix.execute)
    _run_workgroup.__name__ = _run_workgroup.__qualname__ = f"run_workgroup_{fingerprint()}"
    run = numba.njit(cache=True, nogil=True)(_run_workgroup)
    return run, Arithmetic(lane_dispatcher(), scalar_dispatcher(), execute_matrix)
