"""Loading code objects, kernel arguments, and what a device refuses."""

from __future__ import annotations

import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from one_wave import code_object

from dualmla.emulator import CodeObjectError, Device, EmulatorError, load_code_object
from dualmla.emulator.aiter_objects import KERNELS, AiterNotFoundError, find_code_objects, path_of
from dualmla.emulator.decoder import instructions
from dualmla.emulator.kernargs import DECODE, PREFILL, pack_slots, pack_triton

MQA16 = "mla_dec_stage1_bf16_a16w16_subQ16_mqa16"


@pytest.mark.parametrize(("arch", "lds"), [("gfx942", 65536), ("gfx950", 65536)])
def test_a_code_object_of_the_wheel(hsa, arch, lds):
    code = load_code_object(path_of(hsa, arch, MQA16))
    assert (code.arch, code.kernel, code.name) == (arch, f"_ZN5aiter39{MQA16}E", f"{MQA16}.co")
    assert code.descriptor.lds_bytes == lds
    assert code.descriptor.kernarg_sgpr == 0
    assert code.descriptor.workgroup_id == (True, True, True)
    assert code.code[0] <= code.descriptor.entry < code.code[1]


def test_every_mla_code_object_of_the_wheel_is_in_the_table(hsa):
    """16 for gfx942 and 20 for gfx950, and the four prefill ones: a new release's kernels are noticed here."""
    for arch, count in (("gfx942", 16), ("gfx950", 20)):
        found = {path.stem for path in (hsa / arch / "mla").glob("*.co")}
        assert found == {name for name, kernel in KERNELS.items() if arch in kernel.archs and not name.startswith("fwd_")}
        assert len(found) == count
    assert all(path_of(hsa, "gfx950", name).is_file() for name in KERNELS if name.startswith("fwd_"))


def test_what_is_no_code_object_is_refused(hsa):
    data = bytearray(path_of(hsa, "gfx942", MQA16).read_bytes())
    with pytest.raises(CodeObjectError, match="not a little-endian ELF-64 file"):
        load_code_object(b"\x7fELF\x01\x01 and so on")
    data[48] = 0x3F
    with pytest.raises(CodeObjectError, match="mine is for machine 0x3f; the emulator knows gfx942, gfx950"):
        load_code_object(bytes(data), name="mine")


def test_a_missing_wheel_says_what_to_install(tmp_path):
    with pytest.raises(AiterNotFoundError, match="no unpacked amd-aiter wheel"):
        find_code_objects(tmp_path)


def test_a_device_refuses_what_it_cannot_run(hsa):
    with pytest.raises(EmulatorError, match="'gfx90a' is not emulated; known are gfx942, gfx950"):
        Device("gfx90a")
    code = load_code_object(path_of(hsa, "gfx942", MQA16))
    launch = {"grid": (1, 1, 1), "block": 64, "kernarg": b""}
    with pytest.raises(EmulatorError, match="is for gfx942, the device is a gfx950"):
        Device("gfx950").launch(code, **launch)
    with pytest.raises(EmulatorError, match="wants 70000 bytes of LDS, gfx942 has 65536"):
        Device("gfx942").launch(code, lds_bytes=70000, **launch)
    spilling, program = code_object([], scratch_bytes=64)
    with pytest.raises(EmulatorError, match="spills"):
        Device("gfx942").launch(spilling, program=program, **launch)


def test_slots_are_16_bytes():
    values = {name: index + 1 for index, (name, _) in enumerate(DECODE)}
    packed = pack_slots(DECODE, values)
    assert len(packed) == 304
    assert struct.unpack_from("<I", packed, 0xB0)[0] == values["kv_row_stride"]
    assert struct.unpack_from("<f", packed, 0x70)[0] == values["softmax_scale"]
    assert len(pack_slots(PREFILL, dict.fromkeys((name for name, _ in PREFILL), 0))) == 512
    with pytest.raises(KeyError, match="no such fields"):
        pack_slots(DECODE, values | {"kv_stride": 0})


def test_triton_arguments_are_naturally_aligned():
    signature = {"n": "i32", "p": "*fp32", "BLOCK": "constexpr", "scale": "fp32", "wide": "i64"}
    packed = pack_triton(signature, {"n": 7, "p": 1 << 40, "scale": 0.5, "wide": -1}, grid=(4, 5, 6))
    assert packed == struct.pack("<i4xQf4xq", 7, 1 << 40, 0.5, -1) + bytes(16) + struct.pack("<III", 4, 5, 6)


def test_the_decoder_alone_knows_tinygrad():
    """Importing the emulator loads neither tinygrad nor AITER nor Triton."""
    program = "import sys, dualmla.emulator; print(sorted({'tinygrad', 'aiter', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_host_arrays_of_any_shape():
    device = Device("gfx942")
    assert device.put(np.float32(3)).numpy() == 3
    assert device.put(np.zeros((0, 4), np.int32)).numpy().shape == (0, 4)


def test_code_after_the_last_end_of_program_is_read():
    """LLVM lays blocks there, which jump back; what follows them is padding."""
    words = [0xBF820001, 0xBF810000, 0xBEA00081, 0xBF82FFFD, 0xBF800000, 0xBF800000]  # s_branch over the end; s_mov_b32; s_branch back
    image = struct.pack("<6I", *words)
    code, _ = code_object([])
    listing = list(instructions(replace(code, image=image, code=(0, len(image)))))
    assert [instruction.name for instruction in listing] == ["S_BRANCH", "S_ENDPGM", "S_MOV_B32", "S_BRANCH"]
