"""The contracts on the AITER backend, whole: public functions and the layer, over stand-ins for what AITER exports, on the CPU.

The judge runs each problem among poison and among harmless memory, wants the same bits, and holds them against float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import aiter_stand_in as stand_in
import pytest
import test_adapter_prefill
import torch

import dualmla
from dualmla import fallback, selection
from dualmla.backends.aiter import probe
from dualmla.backends.aiter.signatures import describe
from dualmla.differential.judge import judge
from dualmla.differential.problems import DecodeProblem, LayerProblem, PrefillProblem, Problem
from dualmla.testing import DecodeCase, make_decode_inputs, run_decode
from dualmla.testing.layer import LayerCase
from dualmla.testing.prefill import PrefillCase


@pytest.fixture
def aiter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """`aiter(generation)`: from then on AITER of that generation runs on the CPU, by its stand-in, which is returned."""

    def pretend(generation: str) -> ModuleType:
        package, mla = stand_in.package(), stand_in.module(generation)
        package.flash_attn_varlen_func = test_adapter_prefill.flash_attn_varlen_func  # type: ignore[attr-defined]
        monkeypatch.setattr(probe, "usable", lambda device: probe.Usable(describe(package, mla, "stand-in"), "gfx942"))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setenv("DUALMLA_CERTIFICATE", str(tmp_path / "none.json"))
        return mla

    _forget()
    yield pretend
    _forget()


def _forget() -> None:
    fallback._broken.clear()
    for cached in (selection._candidates, selection.log_once):
        cached.cache_clear()


DECODES = [
    DecodeCase(seq_lens=(70, 1, 64), padding_tokens=2),
    DecodeCase(num_heads=3, seq_lens=(5, 0, 130), page_size=16, strided=False),
    DecodeCase(num_heads=8, seq_lens=(66, 9, 20), query_lens=(3, 0, 2), page_size=3, padding_tokens=1),
    DecodeCase(num_heads=17, seq_lens=(20, 2), query_lens=(2, 4), shared_pages=1, page_size=2),
    DecodeCase(seq_lens=(9, 33), query_lens=(1, 2), causal=False),
    DecodeCase(seq_lens=(70, 8), data="peaked"),
    DecodeCase(seq_lens=(9, 7, 20), query_lens=(1, 0, 1), padding_tokens=2, data="flat"),
]


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("case", DECODES, ids=str)
def test_decode(case: DecodeCase, with_lse: bool, aiter: Callable[[str], ModuleType]) -> None:
    mla = aiter("S6" if with_lse else "S2")
    verdict = judge(DecodeProblem.draw(dataclasses.replace(case, return_lse=with_lse)), "aiter")
    assert (verdict.status, verdict.findings, verdict.refusals) == ("pass", (), ())
    assert mla.calls


FLOAT8 = {"kv_cache_dtype": torch.float8_e4m3fnuz, "return_lse": False}


@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(seq_lens=(70, 0, 300), padding_tokens=2, k_scale=0.375, **FLOAT8),
        DecodeCase(num_heads=17, seq_lens=(66, 9, 20), query_lens=(3, 0, 2), page_size=3, padding_tokens=1, **FLOAT8),
        DecodeCase(num_heads=3, seq_lens=(9, 33), query_lens=(1, 2), causal=False, page_size=2, shared_pages=1, **FLOAT8),
    ],
    ids=str,
)
def test_decode_over_a_float8_cache(case: DecodeCase, aiter: Callable[[str], ModuleType]) -> None:
    mla = aiter("S2")
    verdict = judge(DecodeProblem.draw(case), "aiter")
    assert (verdict.status, verdict.findings, verdict.refusals) == ("pass", (), ())
    assert all(call["work_meta_data"] is not None for call in mla.calls)


PROBLEMS: list[Callable[[], Problem]] = [
    lambda: PrefillProblem.draw(PrefillCase(query_lens=(8, 0, 3), key_lens=(8, 4, 70), padding_tokens=2)),
    lambda: PrefillProblem.draw(PrefillCase(query_lens=(9, 5), key_lens=(3, 0), strided=True)),
    lambda: PrefillProblem.draw(PrefillCase(query_lens=(4, 7), key_lens=(9, 0), causal=False)),
    lambda: LayerProblem(LayerCase(seq_lens=(9, 5), query_lens=(1, 5))),
    lambda: LayerProblem(
        LayerCase(seq_lens=(9, 40, 33), query_lens=(1, 1, 5), page_size=4, kv_cache_dtype=torch.float8_e4m3fnuz, k_scale=0.3)
    ),
    lambda: LayerProblem(LayerCase(seq_lens=(40, 20, 33, 2), query_lens=(2, 1, 9, 2), decode_threshold=2, padding_tokens=3, page_size=3)),
]


@pytest.mark.parametrize("draw", PROBLEMS)
def test_prefill_and_the_layer(draw: Callable[[], Problem], aiter: Callable[[str], ModuleType]) -> None:
    aiter("S2")
    verdict = judge(draw(), "aiter")
    assert (verdict.status, verdict.findings, verdict.refusals) == ("pass", (), ())


def test_auto_hands_on_what_it_must_refuse(aiter: Callable[[str], ModuleType], caplog: pytest.LogCaptureFixture) -> None:
    mla = aiter("S2")
    for refused in ({"num_kv_splits": 2}, {"return_lse": True}, {"dtype": torch.float16}, {"query_lens": (5,), "seq_lens": (9,)}):
        case = dataclasses.replace(DecodeCase(num_heads=2, seq_lens=(9,), return_lse=False), **refused)
        assert judge(DecodeProblem.draw(case), "auto").status == "pass"
        with pytest.raises(dualmla.BackendUnavailable):  # the judge itself would ask again without the LSE
            run_decode(make_decode_inputs(case, torch.device("cpu")), "aiter")
    assert not mla.calls
    assert len([message for message in caplog.messages if "goes to the next backend, aiter refused it" in message]) == 4
    assert judge(DecodeProblem.draw(DecodeCase(num_heads=2, seq_lens=(9,), return_lse=False)), "auto").status == "pass"
    assert mla.calls


def test_auto_survives_what_aiter_raises(aiter: Callable[[str], ModuleType], caplog: pytest.LogCaptureFixture) -> None:
    mla = aiter("S2")
    case = DecodeCase(num_heads=5, seq_lens=(9,), return_lse=False)

    def wrong(q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, sm_scale=None, num_kv_splits=None):
        raise RuntimeError("asm_mla.cu: unsupport")

    mla.mla_decode_fwd = wrong
    assert judge(DecodeProblem.draw(case), "aiter").kind == "exception"
    for _ in range(2):
        assert judge(DecodeProblem.draw(case), "auto").status == "pass"
    assert len([message for message in caplog.messages if "from now on, aiter: it raised RuntimeError" in message]) == 1


def test_a_forced_layer_names_its_backend(aiter: Callable[[str], ModuleType]) -> None:
    aiter("S2")
    cfg = dualmla.MLAConfig(num_heads=4, softmax_scale=0.1)
    assert dualmla.select_backend(cfg, "cpu", "aiter") is dualmla.AiterMLABackend
    assert dualmla.select_backend(cfg, "cpu").get_name() == "ROCM_AITER_MLA"
