"""Compile every registered kernel for every chip and write what the machine code is like: `python bench/compiled.py`.

Needs no GPU, only Triton, and some ten minutes of a processor. Ends with 1 where a gate is broken that is not known to be.

    --arch gfx942      for this chip alone; may be repeated
    --quick            the cases of the tests alone
    --jobs 8           processes
    --write FILE       the tables as Markdown, with what other versions of Triton last wrote there kept
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import re
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import triton

from dualmla_kernels.compiled import Facts, compile_launch, faults, measure
from dualmla_kernels.registry import known_fault, registered
from dualmla_kernels.target import CHIPS

HEAD = """# What our kernels become

Written by `python bench/compiled.py --write docs/compiled.md`, once for each version of Triton. Every kernel of
`dualmla_kernels.registry`, compiled for each chip as a launch there would compile it; nothing is executed.

- registers: of a lane, out of 512 (AMD: vector and accumulation registers) or 255 (NVIDIA)
- spilled: registers that are saved elsewhere (AMD) / bytes of memory of a lane
- LDS: bytes of a program, out of 64 KiB (gfx90a, gfx942), 160 KiB (gfx950), 227 KiB (sm_90)
- matrix: matrix instructions in the code, and of which family
- 16-byte loads: share of the bytes loaded from global memory, each instruction counted once, that comes 16 at a time
"""


@dataclass(frozen=True)
class Code:
    """The machine code of one registered launch; `digest` tells codes apart."""

    item: str
    case: str
    digest: str
    facts: Facts
    faults: list[str]


def compile_one(arch: str, number: int, quick: bool) -> Code:
    """What launch `number` of a chip's registry becomes."""
    target = CHIPS[arch]
    item = next(itertools.islice(registered(target, quick=quick), number, None))
    kernel = compile_launch(item.launch, target)
    facts = measure(kernel, target)
    return Code(item.kernel, item.case, kernel.hash, facts, faults(facts, target, matrix=item.matrix, wide=item.wide))


def table(arch: str, codes: Iterable[Code]) -> tuple[list[str], list[str]]:
    """Rows of Markdown for a chip, one a distinct piece of machine code, and the faults that nobody knew of."""
    rows = ["| kernel | case | registers | spilled | LDS | matrix | 16-byte loads |", "|---|---|---|---|---|---|---|"]
    broken, seen = [], set()
    for code in codes:
        if code.digest in seen:
            continue
        seen.add(code.digest)
        facts, known = code.facts, known_fault(arch, code.item, code.case)
        if code.faults and known is None:
            broken += [f"{arch}, {code.item} ({code.case}): {fault}" for fault in code.faults]
        row = (code.item, code.case, *columns(facts, known if code.faults else None))
        rows.append(f"| {' | '.join(row)} |")
        print(arch, *row, *code.faults, sep=" · ", flush=True)
    return rows, broken


def columns(facts: Facts, known: str | None = None) -> tuple[str, ...]:
    """What a row says of machine code; `known`: why it may break a gate."""
    spilled = f"{facts.spilled} / {facts.scratch_bytes} B" + (f" ({known})" if known else "")
    matrix = ", ".join(f"{count} {name}" for name, count in facts.matrix.items() if count) or "-"
    return str(facts.registers), spilled, str(facts.shared_bytes), matrix, f"{facts.wide_share:.0%}"


def write(path: Path, sections: dict[str, list[str]]) -> None:
    """Put the sections in place of those of the same title, beside the others."""
    old = dict(re.findall(r"^## (.+?)\n\n(.*?)(?=^## |\Z)", path.read_text(), re.MULTILINE | re.DOTALL)) if path.exists() else {}
    texts = {title: body.strip() for title, body in old.items()} | {title: "\n".join(rows) for title, rows in sections.items()}
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sorted(texts.items()))
    path.write_text(f"{HEAD}\n{body}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", choices=CHIPS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    broken: list[str] = []
    sections = {}
    # in processes of their own: Triton's driver is a global, and a compiler is one thread
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        for arch in arguments.arch or CHIPS:
            count = sum(1 for _ in registered(CHIPS[arch], quick=arguments.quick))
            codes = pool.map(compile_one, itertools.repeat(arch), range(count), itertools.repeat(arguments.quick))
            rows, found = table(arch, codes)
            sections[f"{arch}, Triton {triton.__version__}"] = rows
            broken += found
            if arguments.write is not None:
                write(arguments.write, sections)
    print(*broken, sep="\n", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
