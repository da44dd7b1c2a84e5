"""Our decoding of every MLA code object of the wheel, and of our own kernels, word for word against LLVM's disassembler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from dualmla.emulator.aiter_objects import KERNELS, path_of
from dualmla.emulator.decoder import instructions
from dualmla.emulator.disassembly import text
from dualmla.emulator.elf import load_code_object
from dualmla.emulator.translate import translate

OBJDUMP = shutil.which("llvm-objdump-22") or shutil.which("llvm-objdump-21")

OBJECTS = [pytest.param(arch, name, id=f"{arch}-{name}") for name, kernel in KERNELS.items() for arch in kernel.archs]


def llvm_listing(path) -> dict[int, str]:
    """Address -> text, branches with their target's address: LLVM names a label there, or counts words where it knows none."""
    output = subprocess.run([OBJDUMP, "-d", "--no-leading-headers", path], check=True, capture_output=True, text=True).stdout
    labels = {name: int(address, 16) for address, name in re.findall(r"^([0-9a-fA-F]{16}) <(\w+)>:", output, re.MULTILINE)}
    listing = {}
    for line, address in re.findall(r"^\t(.*?)\s*// ([0-9A-F]{12}):", output, re.MULTILINE):
        mnemonic, _, operands = line.partition(" ")
        if "branch" in mnemonic:
            words = int(operands) if operands.isdigit() else None
            away = labels[operands] if words is None else int(address, 16) + 4 + 4 * (words - (words >> 15 << 16))
            line = f"{mnemonic} {away:#x}"  # noqa: PLW2901 - the same line, resolved
        listing[int(address, 16)] = " ".join(line.split())
    return listing


@pytest.mark.skipif(OBJDUMP is None, reason="llvm-objdump of LLVM 21 or 22 is not here; `apt-get install llvm-22` brings it")
@pytest.mark.parametrize(("arch", "name"), OBJECTS)
def test_decoding_agrees_with_llvm(hsa, arch, name):
    code = load_code_object(path_of(hsa, arch, name))
    llvm = llvm_listing(path_of(hsa, arch, name))
    listing = list(instructions(code))
    differences = [
        (f"{instruction.address:#x}", text(instruction), llvm.get(instruction.address))
        for instruction in listing
        if text(instruction) != llvm.get(instruction.address)
    ]
    assert differences[:5] == [], f"{len(differences)} of {len(listing)} differ"
    assert len(listing) > 2500


COMPILE = """
import sys
from pathlib import Path
from dualmla_kernels.compiled import compile_launch
from dualmla_kernels.registry import registered
from dualmla_kernels.target import CHIPS

for number, item in enumerate(registered(CHIPS[sys.argv[1]], quick=True)):
    if item.case in ("decode, 16 heads", "decode, 16 heads, float8 cache", "prefill, 16 heads") or "decode" not in item.case:
        code = compile_launch(item.launch, CHIPS[sys.argv[1]]).asm["hsaco"]
        Path(sys.argv[2], f"{number}-{item.kernel}.hsaco").write_bytes(code)
"""


@pytest.mark.skipif(OBJDUMP is None, reason="llvm-objdump of LLVM 21 or 22 is not here; `apt-get install llvm-22` brings it")
# beside the static gates of the chip, which compile the same kernels
@pytest.mark.parametrize("arch", [pytest.param(arch, marks=pytest.mark.xdist_group(f"gates of {arch}")) for arch in ("gfx942", "gfx950")])
def test_decoding_of_our_kernels_agrees_with_llvm(arch, tmp_path):
    """Compiled in a process where nothing is interpreted; and each of their instructions can be run."""
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILE, arch, tmp_path], check=True, env=environment)
    paths = sorted(tmp_path.glob("*.hsaco"))
    assert len(paths) > 10
    for path in paths:
        code, llvm = load_code_object(path), llvm_listing(path)
        listing = list(instructions(code))
        differences = [(hex(i.address), text(i), llvm.get(i.address)) for i in listing if text(i) != llvm.get(i.address)]
        assert differences[:5] == [], f"{path.name}: {len(differences)} of {len(listing)} differ"
        assert translate(code).unsupported == {}


@pytest.mark.parametrize(("arch", "name"), OBJECTS)
def test_every_instruction_can_be_run(hsa, arch, name):
    assert translate(load_code_object(path_of(hsa, arch, name))).unsupported == {}
