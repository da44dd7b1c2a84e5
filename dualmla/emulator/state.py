"""Layout of what the compiled interpreter works on: one wave, one encoded instruction, one workgroup's instruments.

Everything is a NumPy structured array, so a wave is a plain record to numba and to a debugger alike: `wave.v[r, lane]`,
`wave.s[r]`, `wave.pc`. Registers are seen through several types at once (`v` bits, `v_f` float32, ...): those fields
overlap on purpose.
"""

from __future__ import annotations

import numpy as np

LANES = 64
VGPRS = 512
"""Vector registers of a lane: 0..255 are v0..v255, 256..511 are a0..a255 (accumulation registers)."""

VCC, M0, EXEC = 106, 124, 126
"""Scalar registers by number, as the ISA encodes them; the 64-bit ones take two."""

SGPR, SCC, EXECZ, VCCZ, LITERAL = 1000, 1253, 1252, 1251, 2000
"""Operand codes of an encoded instruction: below SGPR a vector register, from SGPR on scalar register `code - SGPR`."""

VMEM_QUEUE, LGKM_QUEUE = 63, 15
"""Outstanding memory operations a wave can have: vmcnt has 6 bits and lgkmcnt 4; issue stalls when they are full."""

POISON_REGISTER, POISON_LDS, POISON_MEMORY = 0x7FC0DEAD, 0x7FC0BEEF, 0x7FC0F00D
"""Bit patterns (float32 NaNs) of what nobody has written yet."""

# --- kinds of encoded instruction, one executor each (see `interpreter.step`) ---
KINDS = (
    "UNSUPPORTED",
    "SCALAR",
    "SAVE_EXEC",
    "BRANCH",
    "WAIT",
    "BARRIER",
    "END",
    "NOTHING",
    "GPR_INDEX",
    "SCALAR_LOAD",
    "VECTOR",
    "LANE_ACCESS",
    "LANE_SWAP",
    "MATRIX",
    "LDS_READ",
    "LDS_WRITE",
    "LDS_TRANSPOSE",
    "LDS_PERMUTE",
    "GLOBAL",
)
(
    UNSUPPORTED,
    SCALAR,
    SAVE_EXEC,
    BRANCH,
    WAIT,
    BARRIER,
    END,
    NOTHING,
    GPR_INDEX,
    SCALAR_LOAD,
    VECTOR,
    LANE_ACCESS,
    LANE_SWAP,
    MATRIX,
    LDS_READ,
    LDS_WRITE,
    LDS_TRANSPOSE,
    LDS_PERMUTE,
    GLOBAL,
) = range(len(KINDS))

# --- why a wave stopped (`wave.status`) ---
RUNNING, AT_BARRIER, DONE, STOPPED = range(4)

# --- what stopped it (`wave.error`) ---
ERRORS = (
    "",
    "instruction not supported",
    "access to memory outside every allocation",
    "LDS access outside the allocation",
    "register index out of range",
)
E_NONE, E_UNSUPPORTED, E_OUTSIDE, E_LDS, E_REGISTER = range(len(ERRORS))

INSTRUCTION = np.dtype(
    [
        ("kind", "i4"),
        ("op", "i4"),  # number in the dispatcher, or what the executor of this kind says
        ("dst", "i4"),  # vector register, scalar register (SCALAR), or -1
        ("dst_width", "i4"),  # 32-bit registers written
        ("sdst", "i4"),  # scalar register pair that takes a mask result, or -1
        ("src", "i4", (4,)),  # operand codes
        ("form", "i4", (4,)),  # 0 absent, 1 32-bit, 2 64-bit, 3 lane mask
        ("registers", "i4", (4,)),  # consecutive registers read
        ("literal", "i8", (4,)),
        ("negate", "i4"),  # one bit an operand: flip the sign
        ("absolute", "i4"),
        ("clamp", "i4"),
        ("passes", "i4"),  # 2 for packed float32: the second pass uses the fields below
        ("high", "i4"),  # one bit an operand and pass: use the upper register of the pair
        ("negate_high", "i4"),
        ("dpp", "i4"),  # DPP control of source 0, or -1
        ("dpp_zero", "i4"),  # lanes without a source read 0 (else the write is dropped)
        ("dpp_rows", "i4"),
        ("dpp_banks", "i4"),
        ("select", "i4", (2,)),  # SDWA source selects (6: the whole register)
        ("extend", "i4", (2,)),  # SDWA sign extension
        ("dst_select", "i4"),
        ("dst_keep", "i4"),  # 1: bits not selected keep their value, 0: they become zero
        ("count", "i4"),  # dwords of a memory operation
        ("size", "i4"),  # bytes an element: 4, or 1, 2 for byte and short
        ("signed", "i4"),
        ("offset", "i8", (2,)),
        ("flags", "i4"),
        ("target", "i4"),  # record number a branch goes to
        ("executed", "i8"),  # how often it ran
    ],
    align=True,
)

# --- flags of a GLOBAL (buffer, global, flat) operation ---
F_STORE, F_TO_LDS, F_BUFFER, F_OFFEN, F_SADDR, F_HIGH_HALF, F_KEEP_HALF = 1, 2, 4, 8, 16, 32, 64


def _wave() -> np.dtype[np.void]:
    """Fields with their offsets; a name repeated with a suffix is the same memory through another type."""
    fields: list[tuple[str, str, tuple[int, ...], int]] = []
    offset = 0

    def add(names: str, formats: str, shape: tuple[int, ...]) -> None:
        nonlocal offset
        for name, form in zip(names.split(), formats.split(), strict=True):
            fields.append((name, form, shape, offset))
        offset += int(np.prod(shape, dtype=int)) * np.dtype(formats.split(maxsplit=1)[0]).itemsize

    add("v v_f v_i", "u4 f4 i4", (VGPRS, LANES))
    for name in "abcd":  # operands of the instruction being executed; 64-bit ones share the memory
        add(f"{name}_q {name}_d", "i8 f8", (LANES,))
        fields.extend(
            [(f"{name}{suffix}", form, (LANES,), offset - 8 * LANES) for suffix, form in (("", "u4"), ("_f", "f4"), ("_i", "i4"))]
        )
    add("out_q out_d", "i8 f8", (LANES,))
    fields.extend([(f"out{suffix}", form, (LANES,), offset - 8 * LANES) for suffix, form in (("", "u4"), ("_f", "f4"))])
    add("out_mask", "u1", (LANES,))
    add("left", "f8", (32 * 128,))  # a matrix instruction's operands, unpacked: A [row, k], B [k, column] ...
    add("right", "f8", (32 * 128,))
    add("product", "f8", (32 * 32,))
    add("s", "u4", (128,))
    for name in ("pc", "scc", "gpr_index", "status", "error", "error_address", "executed", "number"):
        add(name, "i8", ())
    add("pending", "i4", (VGPRS,))  # 1 + record number of the load in flight into a register, 0 if none (delayed mode)
    add("pending_scalar", "i4", (128,))
    # memory operations whose results have not arrived (delayed mode)
    add("vm_head", "i8", ())
    add("vm_count", "i8", ())
    add("lg_head", "i8", ())
    add("lg_count", "i8", ())
    add("vm_record", "i8", (VMEM_QUEUE + 1,))  # record number, -1 for a store
    add("vm_mask", "i8", (VMEM_QUEUE + 1,))
    add("vm_base", "i8", (VMEM_QUEUE + 1,))  # LDS byte address of lane 0 for a load into LDS
    add("vm_data", "u4", (VMEM_QUEUE + 1, 4, LANES))
    add("lg_record", "i8", (LGKM_QUEUE + 1,))
    add("lg_mask", "i8", (LGKM_QUEUE + 1,))
    add("lg_fetched", "i8", (LGKM_QUEUE + 1,))  # 1 once the LDS has been accessed
    add("lg_address", "u4", (LGKM_QUEUE + 1, LANES))
    add("lg_data", "u4", (LGKM_QUEUE + 1, 4, LANES))
    return np.dtype(
        {
            "names": [f[0] for f in fields],
            "formats": [(f[1], f[2]) if f[2] else f[1] for f in fields],
            "offsets": [f[3] for f in fields],
            "itemsize": offset,
        }
    )


WAVE = _wave()
"""One wave: 64 lanes' registers, the scalar registers, and the operations in flight."""


NOTES = 512
"""Different findings kept apart in one launch; what comes after is counted in the last."""

LDS_WORDS = 160 << 8
WAVES = 16

GROUP = np.dtype(
    [
        ("lds", "u4", (LDS_WORDS + 1,)),
        ("lds_bytes", "i8"),
        ("lds_mask", "i8"),  # bits of M0 that address the LDS in a load into it
        ("epoch", "i8"),  # barriers passed
        ("delayed", "i8"),  # 1: results of loads arrive only when a wait asks for them
        ("watch", "i8"),  # 1: LDS accesses are checked for races and for reads of what nobody wrote
        ("written", "u1", (LDS_WORDS,)),
        ("write_epoch", "i8", (LDS_WORDS,)),  # epoch of the last write * 16 + the wave that wrote
        ("write_record", "i4", (LDS_WORDS,)),
        ("read_epoch", "i8", (WAVES, LDS_WORDS)),  # epoch of each wave's last read
        ("read_record", "i4", (WAVES, LDS_WORDS)),
        ("in_flight", "i4", (LDS_WORDS,)),  # 1 + record number of a load into LDS that has not arrived (delayed mode)
        ("byte_values", "f8", (4, 256)),  # see `matrix.byte_values`
        ("note_kind", "i8", (NOTES,)),  # findings: kind, the two instructions, how often, first address
        ("note_first", "i8", (NOTES,)),
        ("note_second", "i8", (NOTES,)),
        ("note_count", "i8", (NOTES,)),
        ("note_address", "i8", (NOTES,)),
    ],
    align=True,
)
"""What the waves of a workgroup share: the LDS with its shadows (one entry a 32-bit word), and the launch's findings."""
