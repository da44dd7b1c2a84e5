"""Our decode as its launcher launches it on gfx942 and gfx950, compiled by Triton: plan, decode and combine against float64."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from emulator_problems import Latent, latent
from our_code import CASES, SCALE, Case

from dualmla.emulator import Device, Finding, Mode, load_code_object
from dualmla.emulator.aiter_kernels import from_bf16
from dualmla.emulator.kernargs import pack_triton

pytest.importorskip("triton")
HERE = Path(__file__).parent
NAN = 0x7FFF
"""A bf16."""
DTYPES = {"int32": np.int32, "float32": np.float32, "bfloat16": np.uint16}


@pytest.fixture(scope="module", params=["gfx942", "gfx950"])
def compiled(request, tmp_path_factory):
    """(arch, what `our_code.compiled_case` gives for each case), compiled in a process where Triton's interpreter is off."""
    target = tmp_path_factory.mktemp("triton") / "kernels.pickle"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(target.parent / "cache")
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, HERE / "our_code.py", request.param, target], check=True, env=environment, cwd=HERE)
    return request.param, pickle.loads(target.read_bytes())


def paged(p: Latent, case: Case) -> dict[str, np.ndarray]:
    """The inputs of a decode. Slots past a request's end hold NaN, table entries past its pages name no page."""
    order = np.random.default_rng(1).permutation(sum(case.pages)).astype(np.int32)
    cache = np.full((len(order), case.page_size, 576), NAN, np.uint16)
    table = np.full((len(case.kv_lens), max(case.pages)), 2**31 - 1, np.int32)
    for request, (length, pages) in enumerate(zip(case.kv_lens, case.pages, strict=True)):
        table[request, :pages], order = order[:pages], order[pages:]
        rows = np.full((pages * case.page_size, 576), NAN, np.uint16)
        rows[:length] = p.kv[p.kv_indices[p.kv_indptr[request] : p.kv_indptr[request + 1]]]
        cache[table[request, :pages]] = rows.reshape(pages, case.page_size, 576)
    q = np.concatenate([p.q, np.full((case.padding, *p.q.shape[1:]), NAN, np.uint16)])
    lengths, indptr = np.asarray(case.kv_lens, np.int32), np.asarray(p.qo_indptr, np.int32)
    return {"q": q, "kv_cache": cache, "block_table": table, "seq_lens": lengths, "qo_indptr": indptr}


def replicated(finding: Finding) -> bool:
    """Where waves hold the same numbers twice, Triton lets each store them: one instruction that two waves run."""
    return finding.kind == "LDS race: two waves write, no barrier between" and finding.instruction == finding.other


@pytest.mark.parametrize("mode", [Mode(), Mode(turn=8, delayed=True, watch_lds=True)], ids=["plain", "instrumented"])
@pytest.mark.parametrize("name", CASES)
def test_decode(compiled, name, mode):
    """Every element inside the error budget; no finding: nothing unwritten is read, every load is waited for."""
    arch, cases = compiled
    case, (launches, tensors) = CASES[name], cases[name]
    p = latent(case.kv_lens, heads=case.heads, query_lens=case.query_lens)
    assert p.softmax_scale == SCALE
    device, inputs = Device(arch), paged(p, case)
    buffers = {
        tensor: device.put(inputs[tensor]) if tensor in inputs else device.empty(shape, DTYPES[dtype])
        for tensor, (shape, dtype) in tensors.items()
    }
    for launch in launches:
        code = load_code_object(launch.binary, name=launch.name)
        values = {key: buffers[value].address if isinstance(value, str) else value for key, value in launch.values.items()}
        kernarg = pack_triton(launch.signature, values, launch.grid)
        report = device.launch(code, grid=launch.grid, block=64 * launch.warps, kernarg=kernarg, lds_bytes=launch.shared, mode=mode)
        assert report.program.unsupported == {}
        assert [str(finding) for finding in report.findings if not replicated(finding)] == []

    expected, owned = p.reference(), sum(case.query_lens)
    out, lse = from_bf16(buffers["out"].numpy()), buffers["lse"].numpy().T
    assert (np.abs(out[:owned] - expected.out) / expected.budget(7, bf16_result=True)).max() < 1
    np.testing.assert_allclose(lse[:owned], expected.lse, rtol=0, atol=1e-5)
    assert (out[owned:] == 0).all()
    assert (lse[owned:] == -np.inf).all()
