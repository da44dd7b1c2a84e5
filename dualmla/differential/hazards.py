"""What the emulator's instruments see, as hazards: of which kind, and which of them are known."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dualmla.differential.instruments import Hazard, Launched
from dualmla.differential.verdict import Kind
from dualmla.emulator import EmulatorError, Finding, Report, findings
from dualmla.emulator.counting import by_group

KINDS: dict[int, Kind] = {
    findings.UNWRITTEN_READ: "unwritten read",
    findings.UNWRITTEN_LDS: "unwritten read",
    findings.WRITE_WRITE: "race",
    findings.READ_WRITE: "race",
    findings.LOAD_IN_FLIGHT: "wait",
    findings.MISSING_WAIT: "wait",
    findings.MISALIGNED: "fault",
}

KNOWN: tuple[tuple[str, tuple[int, ...], str], ...] = (
    (
        r"mla_(dec_stage1_bf16_a16w16_subQ128_mqa128|a16w16_qh16_m16x4_n16x1_coex0_mask1)\.co",
        (findings.MISSING_WAIT,),
        "a page index is used with no wait that covers its load, wrong only where that takes some 260 instructions: "
        "docs/aiter-findings.md, number 10",
    ),
    (
        r"mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps\.co",
        (findings.MISSING_WAIT,),
        "page indices, operands read from the LDS and scales are used with no wait that covers their loads: "
        "docs/aiter-findings.md, numbers 10 and 17",
    ),
    (
        r"fwd_hd192_hd128_bf16.*\.co",
        (findings.READ_WRITE, findings.LOAD_IN_FLIGHT),
        "waves load into LDS that others still read, with no barrier between: docs/aiter-findings.md, number 14",
    ),
    (r".*", (findings.MISALIGNED,), "misaligned accesses, legal in the mode that ROCm uses"),
)
"""(kernel, kinds of finding, why they are no news)."""

REPLICATED = "waves that hold the same numbers store them to the same place of the LDS, as Triton lets them"


def launched(report: Report) -> Launched:
    """What a launch did."""
    kernel = report.program.code.name
    return Launched(kernel, by_group(report), _hazards(kernel, report.findings))


def stopped(error: EmulatorError) -> Launched:
    """What the instruments had seen when an error stopped a launch, and the error."""
    kernel = str(error).partition(", ")[0]  # it begins with the kernel's name
    return Launched(kernel, {}, (*_hazards(kernel, error.findings), Hazard("fault", str(error))))


def _hazards(kernel: str, found: Sequence[Finding]) -> tuple[Hazard, ...]:
    hazards = []
    for finding in found:
        number = findings.KINDS.index(finding.kind)
        known = next((why for pattern, kinds, why in KNOWN if number in kinds and re.fullmatch(pattern, kernel)), "")
        if number == findings.WRITE_WRITE and finding.instruction == finding.other:
            known = REPLICATED
        hazards.append(Hazard(KINDS[number], f"{kernel}: {finding}", f"{kernel}: {known}" if known else ""))
    return tuple(hazards)
