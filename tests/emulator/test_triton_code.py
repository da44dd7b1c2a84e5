"""Machine code that Triton generates for gfx942 and gfx950, run against float64."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from emulator_problems import latent

from dualmla.emulator import Device, Mode, load_code_object
from dualmla.emulator.aiter_kernels import from_bf16
from dualmla.emulator.kernargs import pack_triton

pytest.importorskip("triton")
HERE = Path(__file__).parent


@pytest.fixture(scope="module", params=[("gfx942", 1), ("gfx942", 2), ("gfx950", 1), ("gfx950", 2)], ids=lambda p: f"{p[0]}-stages{p[1]}")
def compiled(request, tmp_path_factory):
    """(arch, {name: (code object, LDS bytes)}), compiled in a process where Triton's interpreter is off."""
    arch, stages = request.param
    target = tmp_path_factory.mktemp("triton") / "kernels.pickle"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(target.parent / "cache")
    subprocess.run([sys.executable, HERE / "triton_code.py", arch, str(stages), target], check=True, env=environment, cwd=HERE)
    with target.open("rb") as file:
        return arch, {name: (load_code_object(binary, name=name), shared) for name, (binary, shared) in pickle.load(file).items()}


@pytest.mark.parametrize("mode", [Mode(), Mode(turn=8, delayed=True, watch_lds=True)], ids=["plain", "instrumented"])
def test_decode_and_merge(compiled, mode):
    """Two sequences in two splits; every load waited for, no race, nothing read that nobody wrote."""
    import triton_kernels

    arch, kernels = compiled
    p, splits = latent([200, 333]), 2
    device = Device(arch)
    buffers = {"q": device.put(p.q), "kv": device.put(p.kv), "indices": device.put(p.kv_indices)}
    buffers |= {"indptr": device.put(np.asarray(p.kv_indptr, np.int32)), "out": device.empty((2, 16, 512), np.uint16)}
    buffers |= {"partial": device.empty((2, splits, 16, 512), np.float32), "lse": device.empty((2, splits, 16), np.float32)}
    values = {name: buffer.address for name, buffer in buffers.items()} | {"scale": p.softmax_scale, "splits": splits}
    for name, grid in (("split_decode", (2, splits, 1)), ("merge", (2, 16, 1))):
        code, shared = kernels[name]
        kernarg = pack_triton(triton_kernels.KERNELS[name][1], values, grid)
        report = device.launch(code, grid=grid, block=256, kernarg=kernarg, lds_bytes=shared, mode=mode)
        assert report.program.unsupported == {}
        assert report.findings == []
    expected = p.reference()
    got = from_bf16(buffers["out"].numpy())
    assert (np.abs(got - expected.out) / expected.budget(7, bf16_result=True)).max() < 1
    lse = np.logaddexp.reduce(buffers["lse"].numpy().astype(np.float64), axis=1)
    assert np.abs(lse - expected.lse).max() < 1e-5
