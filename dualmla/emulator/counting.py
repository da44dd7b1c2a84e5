"""Executed wave-instructions by what they keep busy, the way a profile shows them."""

from __future__ import annotations

from dualmla.emulator import state
from dualmla.emulator.launch import Report

GROUPS = ("matrix", "vector", "LDS", "global load", "global store", "scalar", "branch and wait")

_GROUP_OF = {
    **dict.fromkeys((state.MATRIX,), "matrix"),
    **dict.fromkeys((state.VECTOR, state.LANE_ACCESS, state.LANE_SWAP), "vector"),
    **dict.fromkeys((state.LDS_READ, state.LDS_WRITE, state.LDS_TRANSPOSE, state.LDS_PERMUTE), "LDS"),
    **dict.fromkeys((state.SCALAR, state.SAVE_EXEC, state.GPR_INDEX, state.SCALAR_LOAD), "scalar"),
    **dict.fromkeys((state.BRANCH, state.WAIT, state.BARRIER, state.END, state.NOTHING), "branch and wait"),
}


def by_group(report: Report) -> dict[str, int]:
    """Wave-instructions of a launch for each of `GROUPS`; together they are `report.executed`.

    A load into LDS is a global load; `s_load` is scalar; `s_nop` and its like are waits.
    """
    counts = dict.fromkeys(GROUPS, 0)
    for record, executed in zip(report.program.records, report.counts, strict=True):
        if executed:
            counts[_group(int(record["kind"]), int(record["flags"]))] += int(executed)
    return counts


def _group(kind: int, flags: int) -> str:
    if kind == state.GLOBAL:
        return "global store" if flags & state.F_STORE else "global load"
    return _GROUP_OF[kind]
