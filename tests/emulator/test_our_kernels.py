"""Our kernels as their launchers launch them on gfx942 and gfx950, compiled by Triton and executed, against float64.

The judge runs each problem among poison, among harmless memory, and once more with waves and loads as slow as they may be; it
holds every element to the error budget. Here each case of the emulated grid runs on one chip at least, for Triton compiles each anew;
`dualmla check --emulate gfx950` runs all of them. A process in which TRITON_INTERPRET is set can't compile.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mutations import without_barriers, without_waits_before

from dualmla.differential.emulated_grid import DECODES, LAYERS, MERGES, PREFILLS, REPLAYS, WRITES, for_chip
from dualmla.differential.hazards import REPLICATED
from dualmla.differential.judge import judge
from dualmla.differential.problems import CacheProblem, DecodeProblem, LayerProblem, MergeProblem, PrefillProblem
from dualmla.emulator import Device, Mode, tensors
from dualmla.emulator.tensors import Tensors, run_launcher
from dualmla.testing import DecodeCase, compare_decode, make_decode_inputs
from dualmla_kernels.decode import mla_decode

pytest.importorskip("triton")
GFX942, GFX950 = "gfx942", "gfx950"
SLOW = Mode(turn=8, delayed=True, watch_lds=True)


def judged(problem, arch):
    (draw,) = for_chip([lambda: problem], arch)
    return judge(draw(), f"triton-{arch}")


def check(problem, arch):
    verdict = judged(problem, arch)
    assert verdict.status == "pass", (verdict.findings, verdict.refusals)
    assert verdict.execution.instructions > 0
    assert all(note.endswith(REPLICATED) for note in verdict.notes)


@pytest.mark.parametrize(("arch", "case"), [*((GFX942, case) for case in DECODES), *((GFX950, case) for case in DECODES[::3])], ids=str)
def test_decode(arch, case):
    check(DecodeProblem.draw(case), arch)


@pytest.mark.parametrize(("arch", "case"), [*((GFX942, case) for case in PREFILLS), (GFX950, PREFILLS[1])], ids=str)
def test_prefill(arch, case):
    check(PrefillProblem.draw(case), arch)


@pytest.mark.parametrize(("arch", "case"), [(GFX942, WRITES[0]), *((GFX950, case) for case in WRITES)], ids=str)
def test_cache_write(arch, case):
    check(CacheProblem.draw(case), arch)


@pytest.mark.parametrize("arch", [GFX942, GFX950])
def test_merge(arch):
    check(MergeProblem.draw(MERGES[0]), arch)


@pytest.mark.parametrize(
    ("arch", "problem"),
    [(GFX942, LayerProblem(LAYERS[0])), (GFX950, LayerProblem(LAYERS[1])), (GFX942, REPLAYS[0])],
    ids=["batch", "prefix", "replay"],
)
def test_layer(arch, problem):
    """Cache write, prefill, gather, merge and decode together; a graph's replays."""
    check(problem, arch)


def test_a_kernel_for_a_cache_over_2_gib():
    """It is compiled for 40,000 pages, of which only the first ones are there to be touched."""
    inputs = make_decode_inputs(DecodeCase(seq_lens=(65, 130), page_size=64))
    lse = torch.empty(16, 2)
    reports = run_launcher(
        GFX942, SLOW, mla_decode, inputs.q, block_table=inputs.meta.block_table, seq_lens=inputs.meta.seq_lens,
        qo_indptr=inputs.meta.qo_indptr, max_query_len=1, softmax_scale=inputs.case.softmax_scale, causal=True, out=inputs.out, lse=lse,
        kv_cache=inputs.kv_cache, written=("out", "lse"), rows={"kv_cache": 40_000},
    )  # fmt: skip
    assert compare_decode(inputs.out, lse, inputs).failures == []
    small = run_launcher(
        GFX942, Mode(), mla_decode, inputs.q, inputs.kv_cache, inputs.meta.block_table, inputs.meta.seq_lens, inputs.meta.qo_indptr, 1,
        inputs.case.softmax_scale, causal=True, out=inputs.out, lse=lse, written=("out", "lse"),
    )  # fmt: skip
    (big,), (usual,) = ([r.program.code.image for r in found if "decode" in r.program.code.name] for found in (reports, small))
    assert big != usual


@pytest.mark.parametrize(
    ("mutate", "kind", "told"),
    [
        (without_barriers, "race", "no barrier between"),
        (lambda code: without_waits_before(code, "V_MFMA_F32_16X16X16_BF16"), "wait", "register used before its load was waited for"),
    ],
    ids=["barriers", "wait"],
)
def test_a_dropped_instruction_of_the_decode_is_found_and_named(monkeypatch, mutate, kind, told):
    load = tensors.load_code_object
    tensors._load.cache_clear()
    monkeypatch.setattr(
        tensors, "load_code_object", lambda data, name: mutate(load(data, name=name)) if name == "decode" else load(data, name=name)
    )
    verdict = judged(DecodeProblem.draw(DecodeCase(num_heads=128, seq_lens=(1, 40, 130))), "gfx942")
    tensors._load.cache_clear()
    assert verdict.status == "fail"
    sentences = [finding.sentence for finding in verdict.findings if finding.kind == kind]
    assert len(sentences) == 1, verdict.findings
    assert sentences[0].startswith("decode: ")
    assert told in sentences[0]


def test_what_the_chip_can_not_run_is_refused_with_the_reason():
    wrong_float8 = DecodeCase(seq_lens=(5,), kv_cache_dtype=torch.float8_e4m3fn, k_scale=0.5)
    assert any("gfx942 computes with torch.float8_e4m3fnuz" in r for r in judge(DecodeProblem.draw(wrong_float8), "triton-gfx942").refusals)


def test_code_with_an_unknown_instruction_is_refused_before_it_runs(monkeypatch):
    load = tensors.load_code_object

    def with_trap(data, name):
        """The first instruction becomes `s_trap 0`."""
        code = load(data, name=name)
        image = bytearray(code.image)
        image[code.descriptor.entry : code.descriptor.entry + 4] = 0xBF920000.to_bytes(4, "little")
        return replace(code, image=bytes(image))

    tensors._load.cache_clear()
    monkeypatch.setattr(tensors, "load_code_object", with_trap)
    verdict = judged(MergeProblem.draw(MERGES[0]), "gfx942")
    tensors._load.cache_clear()
    assert verdict.status == "refused"
    assert verdict.refusals[0].startswith("merge, compiled for gfx942, can't be emulated: S_TRAP")


def test_views_share_memory_and_what_is_not_written_stays():
    device = Device("gfx942")
    placed = Tensors(device)
    whole = torch.arange(64.0)
    twin, view = placed.place(whole), placed.place(whole[8:].view(7, 8)[:, 2:5])
    assert placed.address(view) == placed.address(twin) + 10 * 4
    assert (view.shape, view.stride(), view.dtype) == ((7, 3), (8, 1), torch.float32)
    result = torch.full((4,), 7.0)
    address = placed.address(placed.place(result, written=False))
    assert not device.memory.written(address, 16).any()
    placed.fetch()
    assert result.tolist() == [7.0] * 4
    made = torch.empty(3, device="meta")  # by a launcher
    assert not device.memory.written(placed.address(made), 12).any()
    assert placed.address(made[1:]) == placed.address(made) + 4
