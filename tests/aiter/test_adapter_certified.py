"""Certification from end to end over a stand-in for AITER: the command, the certificate, and what auto then does with a call."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiter_pretended
import pytest
import torch
from test_adapter_contracts import _forget
from typer.testing import CliRunner

from dualmla.backends.aiter import adapter, certificate, probe
from dualmla.backends.aiter.certificate import Shape
from dualmla.backends.reference import ReferenceMLABackend
from dualmla.cli import app
from dualmla.differential.certify import Group, certify, groups, machine_of
from dualmla.differential.problems import DecodeProblem
from dualmla.testing import DecodeCase, make_decode_inputs, run_decode

CPU = torch.device("cpu")
HEADS, FNUZ = aiter_pretended.HEADS, torch.float8_e4m3fnuz


def small(group: Group) -> Group:
    """Of a group that `groups` made, one batch."""
    if group.shape.operation == "prefill":
        return Group(group.shape, group.draws[:1])
    n, dtype = group.shape.query_len, getattr(torch, group.shape.kv_cache_dtype)
    float8 = {"kv_cache_dtype": dtype, "k_scale": 0.375} if dtype == FNUZ else {}
    case = DecodeCase(num_heads=HEADS, seq_lens=(40, n), query_lens=(n, n), return_lse=group.shape.return_lse, **float8)
    return Group(group.shape, (lambda: DecodeProblem.draw(case),))


def few(*args: Any, **named: Any) -> list[Group]:
    """`groups`, small, and not all: with the LSE one, and of several tokens over a float8 cache one."""

    def wanted(shape: Shape) -> bool:
        if shape.operation == "prefill":
            return True
        lens = (1,) if shape.return_lse else (1, 2, 3, 4) if shape.kv_cache_dtype == "bfloat16" else (1, 3)
        return shape.query_len in lens

    return [small(group) for group in groups(*args, **named) if wanted(group.shape)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for owner, name in ((probe, "usable"), (torch.cuda, "get_device_properties"), (torch.cuda, "is_current_stream_capturing")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # to be put back
    aiter_pretended.pretend()
    _forget()
    adapter._say_uncertified.cache_clear()
    yield
    _forget()


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """The certificate that the command wrote, what it said, and its exit status."""
    path = tmp_path_factory.mktemp("certified") / "certificate.json"
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((probe, "usable"), (torch.cuda, "get_device_properties"), (torch.cuda, "is_current_stream_capturing")):
            patch.setattr(owner, name, getattr(owner, name))
        aiter_pretended.pretend()
        patch.setattr("dualmla.validation.device_float8", lambda device: FNUZ)
        patch.setattr("dualmla.differential.certify.groups", few)
        run = functools.partial(certify, load=(Path(aiter_pretended.__file__),))
        patch.setattr("dualmla.differential.certify.certify", run)
        command = [
            "certify",
            "--heads",
            str(HEADS),
            "--max-query-len",
            "4",
            "--return-lse",
            "--float8-cache",
            "--device",
            "cpu",
            "--limit",
            "20",
        ]
        done = CliRunner().invoke(app, [*command, "--out", str(path)])
    return path, done.output, done.exit_code


def call(query_len: int, *, heads: int = HEADS, cache: torch.dtype | None = None, backend: str = "auto") -> torch.Tensor:
    lens = {"seq_lens": (40,), "query_lens": (query_len,), "return_lse": False}
    float8 = {"kv_cache_dtype": cache, "k_scale": 0.375} if cache else {}
    inputs = make_decode_inputs(DecodeCase(num_heads=heads, **lens, **float8), CPU)
    return run_decode(inputs, backend)[0]


def test_a_death_costs_its_group_alone(certified: tuple[Path, str, int]) -> None:
    path, said, status = certified
    assert status == 1, said
    entries = json.loads(path.read_text())["entries"]
    found = {certificate.Shape(**entry["shape"]): (entry["passed"], entry["why"]) for entry in entries}
    assert found.pop(Shape("decode", HEADS, 1, False)) == (True, "")
    deaths = ((2, False, "SIGABRT"), (3, False, "no answer within 20 s"), (4, False, "SIGSEGV"), (1, True, "no compiler"))
    for n, with_lse, death in deaths:
        passed, why = found.pop(Shape("decode", HEADS, n, with_lse))
        assert not passed
        assert death in why
        assert death in said
    assert found == {  # several tokens over a float8 cache go one by one: what dies of several does not meet them
        **{Shape("decode", HEADS, n, False, "float8_e4m3fnuz"): (True, "") for n in (1, 3)},
        Shape("prefill", HEADS, 0, True): (True, ""),
    }


@pytest.mark.usefixtures("machine")
def test_auto_uses_aiter_where_it_passed(
    certified: tuple[Path, str, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DUALMLA_CERTIFICATE", str(certified[0]))
    mla = []
    monkeypatch.setattr("dualmla.backends.aiter.launch.decode", functools.partial(_recorded, mla))
    call(1), call(3, cache=FNUZ)
    assert len(mla) == 2
    call(2), call(3), call(1, heads=HEADS + 1)  # would abort; would hang; was not certified
    assert len(mla) == 2
    assert [message for message in caplog.messages if "2 query tokens failed when it was certified" in message]
    assert [message for message in caplog.messages if f"does not cover a decode of {HEADS + 1} heads" in message]
    call(1, heads=HEADS + 1, backend="aiter")  # a forced one is not held to it
    assert len(mla) == 3


def _recorded(calls: list[object], *args: object, **named: object) -> None:
    calls.append(args)
    ReferenceMLABackend.mla_decode(
        *args[2:], causal=named["causal"], out=named["out"], lse=named["lse"], k_scale=named["k_scale"], num_kv_splits=None
    )  # type: ignore[arg-type]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("name", "other"), [("release", "0.1.14"), ("arch", "gfx950")])
def test_a_certificate_of_another_machine_is_ignored(
    name: str,
    other: str,
    certified: tuple[Path, str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "other.json"
    found = certificate._parsed(json.loads(certified[0].read_text()))
    dataclasses.replace(found, machine=dataclasses.replace(found.machine, **{name: other})).write(path)
    monkeypatch.setenv("DUALMLA_CERTIFICATE", str(path))
    calls: list[object] = []
    monkeypatch.setattr("dualmla.backends.aiter.launch.decode", functools.partial(_recorded, calls))
    reason = f"is of {name} {other}, here is {getattr(machine_of(CPU), name)}: make one with `dualmla certify`"
    call(1), call(1)
    assert len([message for message in caplog.messages if reason in message]) == 1
    assert len(calls) == 2, "the support table decides"
    assert reason.split(": ", maxsplit=1)[0] in " ".join(CliRunner().invoke(app, ["info"]).output.split())

    monkeypatch.setenv("DUALMLA_REQUIRE_CERTIFICATE", "1")
    caplog.clear()
    call(1)
    assert len(calls) == 2
    (message,) = [message for message in caplog.messages if "goes to the next backend" in message]
    assert reason in message
    assert "(DUALMLA_REQUIRE_CERTIFICATE=1)" in message


@pytest.mark.usefixtures("machine")
def test_info_shows_it(certified: tuple[Path, str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALMLA_CERTIFICATE", str(certified[0]))
    done = CliRunner().invoke(app, ["info"])
    assert done.exit_code == 0, done.output
    assert ": 4 of 8 shapes passed" in done.output
    told = json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)
    assert ": 4 of 8 shapes passed" in told["certificate"]
    monkeypatch.setenv("DUALMLA_CERTIFICATE", str(tmp_path / "none.json"))
    assert "there is no certificate at" in json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)["certificate"]


@pytest.mark.usefixtures("machine")
def test_without_one_that_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("DUALMLA_CERTIFICATE", str(tmp_path / "none.json"))
    call(1), call(1), call(1, heads=3)
    assert len([message for message in caplog.messages if "uncertified: there is no certificate at" in message]) == 1
