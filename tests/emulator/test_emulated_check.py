"""`dualmla check --emulate` and `dualmla profile`, from the command line to the chip, and what they say of planted faults."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dualmla.backends.aiter import probe
from dualmla.cli import app
from dualmla.differential import emulated, emulated_grid
from dualmla.differential.problems import CacheProblem, DecodeProblem, MergeProblem
from dualmla.testing import DecodeCase, lay_out_decode

HERE = Path(__file__).parent
MQA16, MQA128 = "mla_dec_stage1_bf16_a16w16_subQ16_mqa16.co", "mla_dec_stage1_bf16_a16w16_subQ128_mqa128.co"
TAIL = DecodeCase(seq_lens=(130,), page_size=16, seed=3)
"""Its tail reads cache row 0, which nobody owns."""


def dualmla_(*args, env=None):
    return CliRunner().invoke(app, [str(arg) for arg in args], env=env)


def grid_of(monkeypatch, *cases):
    monkeypatch.setattr(emulated_grid, "emulated_grid", lambda: [lambda case=case: DecodeProblem.draw(case) for case in cases])


def test_both_backends_agree_and_every_report_says_what_was_executed(hsa, monkeypatch, tmp_path):
    grid_of(monkeypatch, DecodeCase(seq_lens=(70, 0, 3), page_size=16), DecodeCase(num_heads=128, seq_lens=(40,), page_size=16))
    files = {name: tmp_path / f"report.{name}" for name in ("json", "html", "junit")}
    options = [part for name, path in files.items() for part in (f"--{name}", path)]
    result = dualmla_("check", "--emulate", "gfx942", "--backend", "aiter", "--against", "triton", *options)
    assert result.exit_code == 0, result.output
    report = json.loads(files["json"].read_text())
    assert report["backends"] == ["aiter-gfx942", "triton-gfx942"]
    (first_aiter, first_ours), (second_aiter, second_ours) = report["rows"]
    assert {"fwd_kernel_stage2_asm", MQA16} == set(first_aiter["execution"]["kernels"])
    assert {"balanced_kernel", "decode", "combine"} == set(first_ours["execution"]["kernels"])
    for verdict in (first_aiter, first_ours, second_aiter, second_ours):
        assert verdict["status"] == "pass", verdict
        execution = verdict["execution"]
        assert sum(execution["kinds"].values()) == sum(execution["kernels"].values()) == execution["instructions"]
        assert execution["kinds"]["matrix"] > 0
    assert first_aiter["notes"] == []
    (known,) = second_aiter["notes"]
    assert known.startswith(MQA128)
    assert "number 10" in known
    total = f"{sum(verdict['execution']['instructions'] for row in report['rows'] for verdict in row):,}"
    assert f"{total} wave-instructions executed" in result.output
    assert "number 10 (1 case)" in " ".join(result.output.split())
    page = files["html"].read_text()
    assert total in page
    assert "number 10" in page
    assert f"{first_ours['execution']['instructions']:,}</td>" in page


def test_a_dropped_wait_and_a_poisoned_tail_are_found_and_replayed(hsa, monkeypatch, tmp_path):
    assert not (lay_out_decode(DecodeProblem.draw(TAIL).values).meta.block_table == 0).any(), "page 0 must be nobody's"
    grid_of(monkeypatch, TAIL)
    report, repros = tmp_path / "report.json", tmp_path / "repros"
    asked = ("--emulate", "gfx942", "--backend", "aiter")
    result = dualmla_("check", *asked, "--load", HERE / "aiter_faults.py", "--json", report, "--save-failures", repros)
    assert result.exit_code == 1, result.output
    ((verdict,),) = json.loads(report.read_text())["rows"]
    found = {finding["kind"]: finding["sentence"] for finding in verdict["findings"]}
    assert {"unowned memory", "wait"} <= set(found)
    assert "nan" in found["unowned memory"]
    assert f"{MQA16}: register used before its load was waited for: DS_READ_B32 at " in found["wait"]
    assert " / V_MAX3_F32 at " in found["wait"]
    (saved,) = repros.glob("*.safetensors")
    assert saved.name.startswith("aiter-gfx942-decode-unowned-memory")
    sound = dualmla_("replay", saved)  # the same memory, without the faults
    assert sound.exit_code == 0, sound.output
    assert "aiter-gfx942: 1 passed" in sound.output


def test_a_persistent_decode_of_a_float8_cache_runs_too(hsa, monkeypatch, tmp_path):
    """AITER's own code object and argument checks; the HIP that plans it, in parts here, and adds these up is restated."""
    ps, case = "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps.co", {"kv_cache_dtype": torch.float8_e4m3fnuz, "k_scale": 0.5}
    grid_of(
        monkeypatch,
        DecodeCase(seq_lens=(70, 300), page_size=64, **case),
        DecodeCase(num_heads=20, seq_lens=(33, 0, 2), query_lens=(1, 1, 2), padding_tokens=1, **case),  # findings 9 and 11 on the way
    )
    report = tmp_path / "report.json"
    result = dualmla_("check", "--emulate", "gfx942", "--backend", "aiter", "--json", report)
    assert result.exit_code == 0, result.output
    for (verdict,) in json.loads(report.read_text())["rows"]:
        assert verdict["status"] == "pass", verdict
        assert set(verdict["execution"]["kernels"]) == {ps}
        (known,) = verdict["notes"]
        assert known.startswith(ps)
        assert known.endswith("numbers 10 and 17")


def test_profile_counts_are_exact_and_add_up(hsa, tmp_path):
    numbers, picture = tmp_path / "profile.json", tmp_path / "profile.png"
    result = dualmla_("profile", "--emulate", "gfx942", "--kv", 64, "--kv", 192, "--json", numbers, "--plot", picture)
    assert result.exit_code == 0, result.output
    said = json.loads(numbers.read_text())
    aiter, ours, longer_aiter, longer = said["profiles"]
    assert [(p["backend"], p["kv_len"]) for p in said["profiles"]] == [("aiter", 64), ("triton", 64), ("aiter", 192), ("triton", 192)]
    assert sum(aiter["kernels"][MQA16].values()) == 5236  # as in test_aiter_decode.py
    assert aiter["kernels"][MQA16]["matrix"] == ours["kernels"]["decode"]["matrix"] == 4 * (576 // 16 + 512 // 16)
    for profile in said["profiles"]:
        assert profile["total"] == sum(sum(kinds.values()) for kinds in profile["kernels"].values())
        assert profile["per_key"] == profile["total"] / profile["kv_len"]
    slopes = {slope["backend"]: slope for slope in said["each_further_64_keys"]}
    assert slopes["aiter"]["total"] == pytest.approx((longer_aiter["total"] - aiter["total"]) / 2)
    assert slopes["triton"]["total"] == pytest.approx((longer["total"] - ours["total"]) / 2)
    for number in (f"{aiter['total']:,}", f"{longer['total']:,}", f"{slopes['triton']['total']:,.1f}", MQA16):
        assert number in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "--emulate", "gfx90a"), "'gfx90a' is not emulated; emulated are gfx942 and gfx950"),
        (("check", "--emulate", "gfx942", "--backend", "reference"), "backend 'reference' has no machine code"),
        (("check", "--emulate", "gfx942", "--device", "cuda"), "got 'cuda'"),
        (("profile", "--emulate", "gfx942", "--backend", "nobody"), "backend 'nobody' has no machine code for gfx942"),
        (("profile", "--emulate", "gfx942", "--plot", "picture.gif"), "--plot must end in .png, .svg, .pdf, got 'picture.gif'"),
    ],
)
def test_what_can_not_be_asked_is_refused_at_once(arguments, message):
    result = dualmla_(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_what_is_missing_is_said_with_what_to_install(monkeypatch):
    backend = type("Ours", (emulated.EmulatedTriton,), {"name": "triton-gfx942", "arch": "gfx942"})
    present = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("numba", "tinygrad") else present(name))
    emulated._obstacles.cache_clear()
    try:
        (reason,) = backend.not_supported_reasons(None, torch.device("cpu"))
        assert reason == "tinygrad and numba are not installed, which running machine code needs; install `dualmla[emulator]`"
        monkeypatch.undo()
        emulated._obstacles.cache_clear()
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        (reason,) = backend.not_supported_reasons(None, torch.device("cpu"))
        assert "TRITON_INTERPRET is set" in reason
    finally:
        emulated._obstacles.cache_clear()


def test_without_the_wheel_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert probe.HOW_TO_INSTALL in emulated._aiter.__wrapped__("gfx942")


def test_a_process_that_can_not_compile_says_so(monkeypatch):
    result = dualmla_("check", "--emulate", "gfx942", env={"TRITON_INTERPRET": "1"})
    assert result.exit_code == 2
    assert "TRITON_INTERPRET is set" in " ".join(result.output.split())


def test_the_grid_has_the_chips_own_float8():
    problems = [draw() for draw in emulated_grid.for_chip(emulated_grid.emulated_grid(), "gfx942")]
    float8 = [p.case.kv_cache_dtype for p in problems if isinstance(p, DecodeProblem | CacheProblem) and p.case.kv_cache_dtype]
    assert set(float8) == {torch.float8_e4m3fnuz}
    assert any(isinstance(p, MergeProblem) for p in problems)
