"""The selection policy: every combination of the flags in fresh processes, forced and auto, the log lines, the registry."""

from __future__ import annotations

import itertools
import json
import logging
import pickle
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import RunPython

import dualmla
from dualmla import selection
from dualmla.backends.reference import ReferenceMLABackend
from dualmla.backends.triton import TritonMLABackend

CPU = torch.device("cpu")

# One process imports dualmla, and each row of the table gets a fork of it: nothing said, cached or registered by one row
# is met by the next. `aiter` true: AITER's own probe is replaced by one that finds nothing wrong.
ROWS = r"""
import json
import re, logging, os, sys, traceback
import dualmla

class Lines(logging.Handler):
    def emit(self, record):
        lines.append([record.levelname, record.getMessage()])

def outcome(function):
    try:
        return function()
    except (ValueError, dualmla.BackendUnavailable) as error:
        return f"{type(error).__name__}: {error}"

def answer(row):
    os.environ.update(row["env"])
    if row["aiter"]:
        dualmla.AiterMLABackend.not_supported_reasons = classmethod(lambda cls, cfg, device: [])
    cfg = dualmla.MLAConfig(num_heads=16, softmax_scale=0.1)
    return {
        "selected": outcome(lambda: dualmla.select_backend(cfg, "cpu", row.get("argument")).get_name()),
        "enabled": outcome(dualmla.is_aiter_mla_enabled),
        "usable": outcome(lambda: {r.name: r.usable for r in dualmla.explain(cfg, "cpu")}),
        "lines": lines,
        "imported": "aiter" in sys.modules,
    }

lines = []
logging.getLogger("dualmla").addHandler(Lines())
logging.getLogger("dualmla").setLevel(logging.INFO)
for line in sys.stdin:
    row = json.loads(line)
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            os.write(write, json.dumps(answer(row)).encode())
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        print(pipe.read(), flush=True)
    os.wait()
"""

NAMES = {"aiter": "ROCM_AITER_MLA", "triton": "TRITON_MLA", "reference": "REFERENCE_MLA"}
BACKEND_VALUES = {
    None: "auto", "": "auto", "auto": "auto", "AUTO": "auto",
    "aiter": "aiter", "Aiter": "aiter", "triton": "triton", "TRITON": "triton", "reference": "reference",
}  # fmt: skip
FLAG_VALUES = {None: True, "": True, "1": True, "True": True, "0": False, "false": False}


def environment(backend: str | None, flag: str | None, mla_flag: str | None) -> dict[str, str]:
    values = {"DUALMLA_BACKEND": backend, "VLLM_ROCM_USE_AITER": flag, "VLLM_ROCM_USE_AITER_MLA": mla_flag}
    return {name: value for name, value in values.items() if value is not None}


Ask = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ask(start_python: Callable[[str], subprocess.Popen[str]]) -> Iterator[Ask]:
    """A function from rows to answers, over one process for the whole file."""
    with start_python(ROWS) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def answers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            lines = []
            for row in rows:
                process.stdin.write(json.dumps(row) + "\n")
                process.stdin.flush()
                lines.append(process.stdout.readline())
            return [json.loads(line) for line in lines]

        yield answers
        process.stdin.close()


@pytest.mark.parametrize("aiter", [True, False], ids=["aiter usable", "aiter unusable"])
def test_flag_truth_table(ask: Ask, aiter: bool) -> None:
    """`DUALMLA_BACKEND` x vLLM's two flags x whether AITER can be used: what is selected, enabled and explained."""
    table = list(itertools.product(BACKEND_VALUES, FLAG_VALUES, FLAG_VALUES))
    answers = ask([{"env": environment(*values), "aiter": aiter} for values in table])
    for (value, flag, mla_flag), answer in zip(table, answers, strict=True):
        requested, flags_on = BACKEND_VALUES[value], FLAG_VALUES[flag] and FLAG_VALUES[mla_flag]
        enabled = flags_on if requested == "auto" else requested == "aiter"
        chosen = requested if requested != "auto" else "aiter" if flags_on and aiter else "triton"
        where = f"DUALMLA_BACKEND={value!r} VLLM_ROCM_USE_AITER={flag!r} VLLM_ROCM_USE_AITER_MLA={mla_flag!r}"
        if chosen == "aiter" and not aiter:
            assert answer["selected"].startswith("BackendUnavailable: backend 'aiter' can't be used: "), where
        else:
            assert answer["selected"] == NAMES[chosen], where
        assert answer["enabled"] is enabled, where
        assert answer["usable"] == {"aiter": enabled and aiter, "triton": True, "reference": True}, where
        assert not answer["imported"], where


@pytest.mark.parametrize("value", ["tritn", "rocm", "TRITON_MLA", "auto,triton", " "])
def test_unknown_backend_raises_with_the_list(ask: Ask, value: str) -> None:
    """Selection, explanation and `is_aiter_mla_enabled` all refuse a name nobody knows; an argument beside it is heeded."""
    rows = [{"env": {"DUALMLA_BACKEND": value}, "aiter": False}, {"env": {"DUALMLA_BACKEND": value}, "aiter": False, "argument": "triton"}]
    answer, with_argument = ask(rows)
    wanted = f"ValueError: DUALMLA_BACKEND is {value!r}; it must be one of auto, aiter, triton, reference"
    assert [answer["selected"], answer["enabled"], answer["usable"]] == [wanted] * 3
    assert with_argument["selected"] == "TRITON_MLA"


def test_argument_beats_variable(ask: Ask) -> None:
    """Also an argument `auto`, and in any case."""
    cases = [("triton", "reference"), ("reference", "TRITON"), ("reference", "auto"), ("aiter", "auto"), ("triton", "aiter")]
    answers = ask([{"env": {"DUALMLA_BACKEND": value}, "aiter": False, "argument": argument} for value, argument in cases])
    assert [answer["selected"].split(":")[0] for answer in answers] == [
        "REFERENCE_MLA", "TRITON_MLA", "TRITON_MLA", "TRITON_MLA", "BackendUnavailable",
    ]  # fmt: skip


def test_unknown_variable_warns_once(ask: Ask) -> None:
    """A mistyped `DUALMLA_*` is named together with the known ones, once, though three functions read the environment."""
    env = {"DUALMLA_BACKENDS": "triton", "DUALMLA_DEBUG": "0", "OTHER_DUALMLA": "1"}
    (answer,) = ask([{"env": env, "aiter": False}])
    warnings = [message for level, message in answer["lines"] if level == "WARNING"]
    assert len(warnings) == 1
    assert "unknown environment variable DUALMLA_BACKENDS" in warnings[0]
    assert "DUALMLA_BACKEND," in warnings[0]


@pytest.mark.parametrize(
    "read", [dualmla.is_aiter_mla_enabled, lambda: dualmla.explain(dualmla.MLAConfig(num_heads=1, softmax_scale=1.0), CPU)]
)
def test_whoever_reads_the_environment_warns(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, read: Callable[[], object]
) -> None:
    monkeypatch.setenv("DUALMLA_BACKNED", "triton")
    read(), read()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "DUALMLA_BACKNED" in caplog.text


def test_known_variables_do_not_warn(ask: Ask) -> None:
    env = dict.fromkeys(
        ("DUALMLA_DEBUG", "DUALMLA_CERTIFICATE", "DUALMLA_REQUIRE_CERTIFICATE", "DUALMLA_PROBE_TIMEOUT", "DUALMLA_SHADOW"), ""
    )
    (answer,) = ask([{"env": env, "aiter": False}])
    assert [level for level, _ in answer["lines"]] == ["INFO"]


def test_auto_says_in_one_line_which_and_why_not(ask: Ask) -> None:
    """INFO on a device that is not AITER's; the flag that kept it out is named with its value."""
    rows = [{"env": {}, "aiter": False}, {"env": {"VLLM_ROCM_USE_AITER": "0"}, "aiter": True}]
    for answer, reason in zip(ask(rows), ["aiter refused: ", "aiter refused: VLLM_ROCM_USE_AITER=0 turns it off"], strict=True):
        ((level, message),) = answer["lines"]
        assert level == "INFO"
        assert message.startswith("using TRITON_MLA on cpu; ")
        assert reason in message


def test_forced_says_nothing(ask: Ask) -> None:
    rows = [{"env": {"DUALMLA_BACKEND": name}, "aiter": True} for name in NAMES]
    assert [answer["lines"] for answer in ask(rows)] == [[], [], []]


ABSENT = r"""
import logging, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "aiter":
            attempts.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

attempts = []
sys.meta_path.insert(0, Blocked())
import torch, dualmla

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
cfg = dualmla.MLAConfig(num_heads=2, softmax_scale=0.1)
backend = dualmla.select_backend(cfg)
print("selected", backend.get_name())
(report,) = [report for report in dualmla.explain(cfg) if report.name == "aiter"]
print("aiter usable", report.usable, report.reasons)
meta = dualmla.decode_metadata(torch.tensor([[1]], dtype=torch.int32), [1], page_size=1, device="cpu")
cache = torch.arange(2.0).repeat_interleave(576).view(2, 1, 576).bfloat16()
print("decode", dualmla.mla_decode(torch.ones(1, 2, 576, dtype=torch.bfloat16), cache, meta, 0.1).unique().tolist())
impl = backend.get_impl_cls()(cfg, torch.zeros(2, 128, 512).bfloat16(), torch.zeros(2, 512, 128).bfloat16())
try:
    dualmla.select_backend(cfg, backend="aiter")
except dualmla.BackendUnavailable as error:
    print("forced", len(error.reasons))
print("imported", "aiter" in sys.modules, "attempts", attempts)
"""


def test_without_aiter_everything_works_and_says_why(run_python: RunPython) -> None:
    """In a process that blocks the import: no import is even tried, since the device is asked first."""
    lines = run_python(ABSENT).splitlines()
    assert "selected TRITON_MLA" in lines
    assert "decode [1.0]" in lines
    assert "imported False attempts []" in lines
    assert any(line.startswith("INFO using TRITON_MLA on cpu; aiter refused: ") for line in lines)
    assert any(re.match(r"aiter usable False \[.+\]", line) for line in lines)
    assert any(line.startswith("forced ") and line != "forced 0" for line in lines)


OFF = r"""
import sys, torch, dualmla
cfg = dualmla.MLAConfig(num_heads=2, softmax_scale=0.1)
dualmla.select_backend(cfg), dualmla.explain(cfg), dualmla.is_aiter_mla_enabled()
meta = dualmla.decode_metadata(torch.tensor([[1]], dtype=torch.int32), [1], page_size=1, device="cpu")
dualmla.mla_decode(torch.ones(1, 2, 576), torch.ones(2, 1, 576), meta, 0.1)
assert "aiter" not in sys.modules
"""


@pytest.mark.parametrize(
    "variables",
    [{"VLLM_ROCM_USE_AITER": "0"}, {"VLLM_ROCM_USE_AITER_MLA": "0"}, {"DUALMLA_BACKEND": "triton"}, {"DUALMLA_BACKEND": "reference"}],
    ids=str,
)
def test_aiter_turned_off_is_never_imported(run_python: RunPython, tmp_path: Any, variables: dict[str, str]) -> None:
    """Though a package of that name lies first on the path; importing it would end the process."""
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("import os\nos._exit(7)\n")
    run_python("import sys; sys.path.insert(0, sys.argv[1])\n" + OFF, str(tmp_path), **variables)


# --- in this process: the caches are put back after each test, as the registry is after every test (conftest.py)


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy of a CPU, on every machine: where there is a GPU, CPU tensors are the reference's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing said yet."""
    caches = (selection._candidates, selection.log_once, selection._warn_of_unknown_variables)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def cfg() -> dualmla.MLAConfig:
    return dualmla.MLAConfig(num_heads=2, softmax_scale=0.1)


def tiny_decode(backend: str | None = None) -> torch.Tensor:
    meta = dualmla.decode_metadata(torch.tensor([[1]], dtype=torch.int32), [1], page_size=1, device=CPU)
    out = dualmla.mla_decode(torch.ones(1, 2, 576), torch.ones(2, 1, 576), meta, 0.1, backend=backend)
    assert isinstance(out, torch.Tensor)
    return out


def test_the_backends_of_this_machine() -> None:
    """The other files run on `USABLE`: it must not shrink unseen."""
    from support import USABLE

    assert {"triton", "reference"} <= set(USABLE)


def test_variable_is_read_at_call_time(monkeypatch: pytest.MonkeyPatch, cfg: dualmla.MLAConfig) -> None:
    for value, name in [("reference", "REFERENCE_MLA"), ("triton", "TRITON_MLA"), ("Reference", "REFERENCE_MLA")]:
        monkeypatch.setenv("DUALMLA_BACKEND", value)
        assert dualmla.select_backend(cfg, CPU).get_name() == name
    monkeypatch.setenv("DUALMLA_BACKEND", "nothing")
    with pytest.raises(ValueError, match="DUALMLA_BACKEND is 'nothing'"):
        tiny_decode()


def test_functions_follow_the_variable_and_the_argument(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mla_decode` and `concat_and_cache_mla` end in the backend that was asked for."""
    seen = []

    class Spy(ReferenceMLABackend):
        name = "spy"

        @classmethod
        def mla_decode(cls, *args: Any, **kwargs: Any) -> None:
            seen.append("decode")
            super().mla_decode(*args, **kwargs)

        @classmethod
        def concat_and_cache_mla(cls, *args: Any, **kwargs: Any) -> None:
            seen.append("write")
            super().concat_and_cache_mla(*args, **kwargs)

    def write(backend: str | None) -> None:
        row = torch.ones(1, 512), torch.ones(1, 64)
        dualmla.concat_and_cache_mla(*row, torch.zeros(2, 1, 576), torch.tensor([1]), backend=backend)

    dualmla.register_backend("spy", Spy)
    tiny_decode("reference"), write("reference")
    assert seen == []
    tiny_decode("spy"), write("SPY")
    assert seen == ["decode", "write"]
    monkeypatch.setenv("DUALMLA_BACKEND", "Spy")
    tiny_decode(), write(None)
    assert seen == ["decode", "write"] * 2
    tiny_decode("reference"), write("auto")
    assert seen == ["decode", "write"] * 2


@pytest.mark.parametrize("argument", ["Tritn", "", "ROCM_AITER_MLA"])
def test_unknown_argument_raises_with_the_list(cfg: dualmla.MLAConfig, argument: str) -> None:
    for call in (lambda: dualmla.select_backend(cfg, CPU, argument), lambda: tiny_decode(argument)):
        with pytest.raises(ValueError, match=f"backend is '{argument}'; it must be one of auto, aiter, triton, reference"):
            call()


@pytest.mark.parametrize("argument", [3, TritonMLABackend])
def test_argument_of_another_type(cfg: dualmla.MLAConfig, argument: Any) -> None:
    with pytest.raises(TypeError, match="backend must be None or a str"):
        dualmla.select_backend(cfg, CPU, argument)


def test_explain_reports_every_backend_with_sentences(cfg: dualmla.MLAConfig) -> None:
    reports = dualmla.explain(cfg, "cpu")
    assert [report.name for report in reports] == ["aiter", "triton", "reference"]
    for report in reports:
        assert report.usable == (not report.reasons)
        assert all(isinstance(reason, str) and len(reason.split()) > 3 for reason in report.reasons)


def test_forced_error_carries_every_reason(fresh: None, cfg: dualmla.MLAConfig) -> None:
    reasons = ["num_heads is 2; it takes 16 or 128", "page_size is 3; it takes 1"]

    class Picky(ReferenceMLABackend):
        name = "picky"

        @classmethod
        def not_supported_reasons(cls, cfg: dualmla.MLAConfig | None, device: torch.device) -> list[str]:
            return reasons

    dualmla.register_backend("picky", Picky, before="triton")
    with pytest.raises(dualmla.BackendUnavailable) as caught:
        dualmla.select_backend(cfg, CPU, "picky")
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.reasons == reasons
    assert all(reason in str(caught.value) for reason in reasons)
    assert dualmla.select_backend(cfg, CPU) is TritonMLABackend


def test_nothing_usable_names_every_backend(fresh: None, monkeypatch: pytest.MonkeyPatch, cfg: dualmla.MLAConfig) -> None:
    for name, backend in list(selection._registry.items()):
        monkeypatch.setattr(backend, "not_supported_reasons", classmethod(lambda cls, cfg, device, name=name: [f"no {name} today"]))
    with pytest.raises(dualmla.BackendUnavailable) as caught:
        dualmla.select_backend(cfg, CPU)
    assert caught.value.reasons == [f"{name}: no {name} today" for name in selection._registry]
    with pytest.raises(dualmla.BackendUnavailable):
        tiny_decode()


def test_selection_is_said_once(fresh: None, caplog: pytest.LogCaptureFixture, cfg: dualmla.MLAConfig) -> None:
    """However often one asks, for however many layers, through whichever function."""
    with caplog.at_level(logging.INFO, "dualmla"):
        for _ in range(3):
            dualmla.select_backend(cfg, CPU)
            dualmla.select_backend(dualmla.MLAConfig(num_heads=4, softmax_scale=0.1), CPU)
            tiny_decode()
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("using ")]
    assert len(lines) == 1


def test_being_interpreted_is_said_once(fresh: None, caplog: pytest.LogCaptureFixture) -> None:
    from dualmla.backends.kernels import say_interpreted

    say_interpreted.cache_clear()
    with caplog.at_level(logging.INFO, "dualmla"):
        tiny_decode("triton"), tiny_decode("triton")
    slow = [record for record in caplog.records if "interpreter" in record.getMessage()]
    assert [record.levelname for record in slow] == ["WARNING"]


def test_a_better_backend_passed_over_warns_where_it_is_expected(
    fresh: None, caplog: pytest.LogCaptureFixture, cfg: dualmla.MLAConfig
) -> None:
    class Broken(ReferenceMLABackend):
        name = "broken"

        @classmethod
        def not_supported_reasons(cls, cfg: dualmla.MLAConfig | None, device: torch.device) -> list[str]:
            return ["its library does not load"]

        @classmethod
        def expected_on(cls, device: torch.device) -> bool:
            return True

    dualmla.register_backend("broken", Broken, before="triton")
    with caplog.at_level(logging.INFO, "dualmla"):
        dualmla.select_backend(cfg, CPU)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "broken refused: its library does not load" in record.getMessage()


def test_register_backend_places_and_reports(fresh: None, cfg: dualmla.MLAConfig, caplog: pytest.LogCaptureFixture) -> None:
    """Known by the name it was registered under, whatever the class calls itself; auto takes it only with `before`."""

    class Mine(ReferenceMLABackend):
        name = "what it calls itself"

    assert dualmla.select_backend(cfg, CPU) is TritonMLABackend
    dualmla.register_backend("named", Mine)
    assert dualmla.select_backend(cfg, CPU) is TritonMLABackend
    assert dualmla.select_backend(cfg, CPU, "named") is Mine
    with caplog.at_level(logging.INFO, "dualmla"):
        dualmla.register_backend("first", Mine, before="triton")
        assert dualmla.select_backend(cfg, CPU) is Mine
    assert "triton" not in caplog.text
    assert "named" in {report.name for report in dualmla.explain(cfg, CPU)}
    assert torch.equal(tiny_decode("first"), tiny_decode("named"))


@pytest.mark.parametrize(
    ("name", "before", "message"),
    [
        ("triton", None, "'triton' is taken"),
        ("auto", None, "not 'auto'"),
        ("", None, "got ''"),
        ("Mine", None, "lower case"),
        ("mine", "tritn", "before must be one of aiter, triton, reference, got 'tritn'"),
    ],
)
def test_register_backend_refuses(fresh: None, name: str, before: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dualmla.register_backend(name, ReferenceMLABackend, before=before)
    assert list(selection._registry) == ["aiter", "triton", "reference"]


@pytest.mark.parametrize("turn", [1, 2])
def test_a_backend_leaves_with_the_test_that_registered_it(turn: int, cfg: dualmla.MLAConfig) -> None:
    """Its name is free again, and auto does not try it."""
    assert dualmla.select_backend(cfg, CPU) is TritonMLABackend
    dualmla.register_backend("guest", ReferenceMLABackend, before="triton")
    assert dualmla.select_backend(cfg, CPU) is ReferenceMLABackend


class Refusing(ReferenceMLABackend):
    """Takes every layer, but no decode that wants the LSE."""

    name = "refusing"

    @classmethod
    def get_name(cls) -> str:
        return "REFUSING_MLA"

    @classmethod
    def decode_refusals(cls, call: Any) -> list[str]:
        return ["the LSE is wanted; it writes none"] if call.return_lse else []


def test_auto_hands_a_refused_decode_on_and_forced_raises(fresh: None, caplog: pytest.LogCaptureFixture) -> None:
    meta = dualmla.decode_metadata(torch.tensor([[1]], dtype=torch.int32), [1], page_size=1, device=CPU)
    q, cache = torch.ones(1, 2, 576), torch.ones(2, 1, 576)
    dualmla.register_backend("refusing", Refusing, before="triton")
    with caplog.at_level(logging.INFO, "dualmla"):
        for _ in range(2):
            _, lse = dualmla.mla_decode(q, cache, meta, 0.1, return_lse=True)
            assert torch.allclose(lse, torch.full((2, 1), 57.6))
    said = [record.getMessage() for record in caplog.records if "refused it" in record.getMessage()]
    assert len(said) == 1
    assert "the LSE is wanted; it writes none" in said[0]
    with pytest.raises(dualmla.BackendUnavailable) as caught:
        dualmla.mla_decode(q, cache, meta, 0.1, return_lse=True, backend="refusing")
    assert caught.value.reasons == ["the LSE is wanted; it writes none"]


def test_selected_backend_is_bound_to_its_policy(fresh: None, cfg: dualmla.MLAConfig) -> None:
    """auto: the impl hands on; forced: the class itself. Hooks and names are the backend's own either way."""
    dualmla.register_backend("refusing", Refusing, before="triton")
    bound, forced = dualmla.select_backend(cfg, CPU), dualmla.select_backend(cfg, CPU, "refusing")
    assert forced is Refusing
    assert issubclass(bound, Refusing)
    assert bound.get_name() == "REFUSING_MLA"
    assert bound.get_builder_cls() is dualmla.MLAMetadataBuilder
    assert bound.get_metadata_cls() is dualmla.MLAMetadata
    meta = dualmla.decode_metadata(torch.tensor([[1]], dtype=torch.int32), [1], page_size=1, device=CPU)
    out, lse = torch.empty(1, 2, 512), torch.empty(2, 1)
    bound.mla_decode(
        torch.ones(1, 2, 576), torch.ones(2, 1, 576), meta, 0.1, causal=True, out=out, lse=lse, k_scale=1.0, num_kv_splits=None
    )
    assert torch.equal(out, torch.ones(1, 2, 512))
    assert torch.allclose(lse, torch.full((2, 1), 57.6))


def test_cpu_tensors_on_a_gpu_machine_go_to_the_reference(
    fresh: None, monkeypatch: pytest.MonkeyPatch, cfg: dualmla.MLAConfig, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with caplog.at_level(logging.INFO, "dualmla"):
        assert dualmla.select_backend(cfg, CPU) is ReferenceMLABackend
    assert "triton refused: the tensors are on a CPU and this machine has a GPU" in caplog.text


def test_unavailable_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(dualmla.BackendUnavailable("aiter", ["it is absent", "so is its device"])))
    assert (error.name, error.reasons) == ("aiter", ["it is absent", "so is its device"])
    assert str(error) == "backend 'aiter' can't be used: it is absent; so is its device"
