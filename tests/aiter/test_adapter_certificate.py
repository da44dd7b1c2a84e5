"""Certificates: written, read, bound to a machine, and what they let auto do."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import aiter_stand_in as stand_in
import pytest
import test_adapter_support
import torch

from dualmla import AiterMLABackend
from dualmla.backends.aiter import certificate, probe
from dualmla.backends.aiter.certificate import Certificate, Entry, Machine, Shape, doubts, in_force
from dualmla.backends.aiter.signatures import describe
from dualmla.backends.base import PrefillCall

HERE = Machine("0.1.7", "S2", "gfx942", "ROCm 6.4, amdgpu 6.12")
GOOD = Entry(Shape("decode", 16, 4, False), True, 12, 0.4, 1.5)
BAD = Entry(Shape("decode", 128, 1, False), False, 3, 7.0, 0.5, "case h128-kv65: out[0, 3, 9] is 0.1, not 0.4")
FOUND = Certificate(HERE, "2026-09-01T10:00:00+00:00", (GOOD, BAD, Entry(Shape("prefill", 16, 0, True), True, 4, 0.2, 0.1)))
CALL = test_adapter_support.CALL


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "deep" / "certificate.json"
    monkeypatch.setenv("DUALMLA_CERTIFICATE", str(path))
    return path


def test_what_is_written_is_read(path: Path) -> None:
    FOUND.write(path)
    assert in_force(HERE) == FOUND
    assert [file.name for file in path.parent.iterdir()] == ["certificate.json"]


@pytest.mark.parametrize(("name", "value"), [("release", "0.1.8"), ("generation", "S3"), ("arch", "gfx950"), ("driver", "ROCm 7.0")])
def test_another_machine_makes_it_none(path: Path, name: str, value: str) -> None:
    FOUND.write(path)
    reason = in_force(dataclasses.replace(HERE, **{name: value}))
    assert f"is of {name} {getattr(HERE, name)}, here is {value}: make one with `dualmla certify`" in str(reason)


@pytest.mark.parametrize(
    ("text", "error"), [("{", "JSONDecodeError"), ("{}", "KeyError"), ('{"format": 2}', "format 2, not 1"), ("[]", "TypeError")]
)
def test_a_file_that_is_no_certificate_is_none(path: Path, text: str, error: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    reason = in_force(HERE)
    assert isinstance(reason, str)
    assert "can't be read" in reason
    assert error in reason


def test_a_new_file_counts_from_the_next_call_on(path: Path) -> None:
    assert "there is no certificate at" in str(in_force(HERE))
    FOUND.write(path)
    assert in_force(HERE) == FOUND
    later = dataclasses.replace(FOUND, date="2026-09-02")
    later.write(path)
    os.utime(path, ns=(1, 1))
    assert in_force(HERE) == later


def test_where_it_lies_when_nobody_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert certificate.default_path() == tmp_path / "dualmla" / "aiter-certificate.json"


def test_what_passed_and_nothing_else_is_trusted() -> None:
    assert doubts(CALL, FOUND) == []
    (failed,) = doubts(dataclasses.replace(CALL, num_heads=128, max_query_len=1), FOUND)
    assert failed == (
        "a decode of 128 heads, 1 query tokens failed when it was certified on 2026-09-01T10:00:00+00:00: "
        "case h128-kv65: out[0, 3, 9] is 0.1, not 0.4"
    )
    for other in ({"num_heads": 8}, {"max_query_len": 3}, {"return_lse": True}):
        (unknown,) = doubts(dataclasses.replace(CALL, **other), FOUND)
        assert "does not cover a decode of " in unknown
    prefill = PrefillCall(CALL.device, torch.bfloat16, 16, 192, 128)
    assert doubts(prefill, FOUND) == []
    assert "does not cover a prefill of 8 heads" in doubts(dataclasses.replace(prefill, num_heads=8), FOUND)[0]


def test_it_says_what_it_is() -> None:
    assert str(FOUND) == "2 of 3 shapes passed on 2026-09-01T10:00:00+00:00 (AITER 0.1.7 of generation S2, gfx942, ROCm 6.4, amdgpu 6.12)"


def test_without_a_mask_a_decode_is_one_of_single_rows() -> None:
    assert Shape.of(dataclasses.replace(CALL, causal=False)) == Shape("decode", 16, 1, False)


def test_without_one_it_depends_on_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doubts(CALL, "there is none") == []
    monkeypatch.setenv("DUALMLA_REQUIRE_CERTIFICATE", "1")
    assert doubts(CALL, "there is none") == ["there is none (DUALMLA_REQUIRE_CERTIFICATE=1)"]
    assert doubts(CALL, FOUND) == []
    monkeypatch.setenv("DUALMLA_REQUIRE_CERTIFICATE", "yes")
    with pytest.raises(ValueError, match="DUALMLA_REQUIRE_CERTIFICATE is 'yes'; it must be 0 or 1"):
        doubts(CALL, "there is none")


def test_the_backend_asks_the_certificate_of_its_machine(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    aiter = describe(stand_in.PACKAGE, stand_in.module("S2"), HERE.release)
    monkeypatch.setattr(probe, "usable", lambda device: probe.Usable(aiter, HERE.arch))
    for _ in range(2):
        assert AiterMLABackend.doubts(CALL) == []
    assert [message for message in caplog.messages if str(path) in message] == [
        f"AITER is used as far as the support table goes, uncertified: there is no certificate at {path}: make one with `dualmla certify`"
    ]
    dataclasses.replace(FOUND, machine=Machine.here(aiter, HERE.arch)).write(path)
    assert AiterMLABackend.doubts(CALL) == []
    assert "failed when it was certified" in AiterMLABackend.doubts(dataclasses.replace(CALL, num_heads=128, max_query_len=1))[0]
    assert json.loads(path.read_text())["machine"]["release"] == HERE.release
