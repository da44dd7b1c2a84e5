"""Whether AITER can be used: gates, the trial in a subprocess, the import; each failure one reason, once, and nothing left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import aiter_stand_in as stand_in
import pytest
import torch

from dualmla import AiterMLABackend, BackendUnavailable, MLAConfig, decode_metadata, explain, select_backend, selection
from dualmla.backends.aiter import probe, trial
from dualmla.backends.base import PrefillCall
from dualmla.backends.triton import TritonMLABackend

CFG = MLAConfig(num_heads=16, softmax_scale=0.1)
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install(files, dist)`: the package `aiter` of these sources first on `sys.path`, with a dist-info; returns its folder."""

    def write(files: dict[str, str], dist: str | None = "amd-aiter", version: str = "9.9.9") -> Path:
        site = tmp_path / "site"
        for name, text in files.items():
            path = site / "aiter" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if dist is not None:
            info = site / f"{dist.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(site))
        return site / "aiter"

    return write


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], torch.device]]:
    """`rocm(arch)`: from then on the process sees a GPU of that arch under ROCm, and AITER has not been asked about yet."""

    def pretend(arch: str) -> torch.device:
        properties = SimpleNamespace(gcnArchName=f"{arch}:sramecc+:xnack-", multi_processor_count=304)
        monkeypatch.setattr(torch.version, "hip", "6.4.43482")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return torch.device("cuda:0")

    monkeypatch.setattr(probe, "_verdict", None)
    _forget_choices()
    yield pretend
    _forget_choices()


def _forget_choices() -> None:
    for cached in (selection._candidates, selection.log_once, probe.device_arch):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def no_aiter_left() -> Iterator[None]:
    """Stand-ins leave with their test."""
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
        del sys.modules[name]


WORKS = {"__init__.py": "from . import mla", "mla.py": "import aiter_stand_in as stand_in; globals().update(vars(stand_in.module('S2')))"}

# AITER.md's table "how an import fails", and what a kernel can do
FAILURES = {
    "no ROCm tools": (
        {"__init__.py": "raise RuntimeError('ROCm version file not found')", "mla.py": ""},
        "can't be imported or run: RuntimeError: ROCm version file not found",
    ),
    "no rocminfo": (
        {"__init__.py": "raise RuntimeError('Get GPU arch from rocminfo failed')", "mla.py": ""},
        "RuntimeError: Get GPU arch from rocminfo failed",
    ),
    "no compiler": (
        {"__init__.py": "raise SystemExit('[aiter] build [module_aiter_enum] failed !!!!!!')", "mla.py": ""},
        r"SystemExit: \[aiter\] build \[module_aiter_enum\] failed",
    ),
    "no gfx": (
        {
            "__init__.py": "",
            "mla.py": f"def mla_decode_fwd({stand_in.S2}): raise AssertionError('')",
        },
        "can't be imported or run: AssertionError$",
    ),
    "packaging is missing": (
        {"__init__.py": "raise ModuleNotFoundError(\"No module named 'packaging'\")", "mla.py": ""},
        "ModuleNotFoundError: No module named 'packaging'",
    ),
    "truncated namespace": ({"__init__.py": "", "mla.py": "x = 1"}, "AttributeError: .*mla_decode_fwd"),
    "foreign library": ({"__init__.py": "raise OSError('GLIBCXX_3.4.32 not found')", "mla.py": ""}, "OSError: GLIBCXX_3.4.32 not found"),
    "exit": ({"__init__.py": "import os; print('dying', flush=True); os._exit(3)", "mla.py": ""}, "with code 3 in its trial: dying"),
    "abort": ({"__init__.py": "import os; os.abort()", "mla.py": ""}, "takes the process down: SIGABRT in its trial"),
    "segfault": (
        {"__init__.py": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "mla.py": ""},
        "takes the process down: SIGSEGV in its trial",
    ),
    "wrong numbers": (
        {"__init__.py": "", "mla.py": WORKS["mla.py"] + "\nright = mla_decode_fwd\nimport functools\n"
         "@functools.wraps(right)\ndef mla_decode_fwd(**given):\n    result = right(**given); given['o'][:, 3] *= 1.1; return result\n"},
        "decodes wrongly: off by",
    ),
    "another signature": (
        {"__init__.py": "", "mla.py": "def mla_decode_fwd(q, workspace): ..."},
        "UnknownSignature: its mla_decode_fwd has no parameter kv_buffer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES)
def test_each_failure_is_one_reason_and_the_fallback(
    failure: str, install: Callable[..., Path], rocm: Callable[[str], torch.device], caplog: pytest.LogCaptureFixture
) -> None:
    files, expected = FAILURES[failure]
    install(files)
    device = rocm("gfx942")
    path, modules, environment = list(sys.path), set(sys.modules), dict(os.environ)
    (reason,) = AiterMLABackend.not_supported_reasons(CFG, device)
    assert re.search(expected, reason), reason
    assert reason.startswith("AITER 9.9.9 ")
    assert (sys.path, dict(os.environ)) == (path, environment)
    assert not any(name.split(".")[0] == "aiter" for name in set(sys.modules) - modules)
    assert select_backend(CFG, device).get_name() == "TRITON_MLA"
    with pytest.raises(BackendUnavailable) as caught:
        select_backend(CFG, device, backend="aiter")
    assert caught.value.reasons == [reason]
    assert any(record.levelname == "WARNING" and reason in record.message for record in caplog.records)


def test_a_verdict_is_found_once(install: Callable[..., Path], rocm: Callable[[str], torch.device], tmp_path: Path) -> None:
    count = tmp_path / "count"
    install({"__init__.py": f"open({str(count)!r}, 'a').write('x'); raise RuntimeError('no')", "mla.py": ""})
    device = rocm("gfx950")
    for _ in range(3):
        assert "RuntimeError: no" in AiterMLABackend.not_supported_reasons(CFG, device)[0]
    assert count.read_text() == "x"


def test_an_aiter_that_works_is_used(install: Callable[..., Path], rocm: Callable[[str], torch.device]) -> None:
    install(WORKS)
    device = rocm("gfx942")
    assert AiterMLABackend.not_supported_reasons(CFG, device) == []
    assert AiterMLABackend.expected_on(device)
    found = probe.usable(device)
    assert isinstance(found, probe.Usable)
    assert (found.aiter.signature.generation, found.aiter.version, found.arch) == ("S2", "9.9.9", "gfx942")
    assert select_backend(CFG, device).get_name() == "ROCM_AITER_MLA"
    (reason,) = AiterMLABackend.not_supported_reasons(MLAConfig(num_heads=192, softmax_scale=0.1), device)
    assert "num_heads is 192" in reason


def test_calls_that_it_refuses_go_to_the_next_under_auto_alone(
    install: Install, rocm: Callable[[str], torch.device], caplog: pytest.LogCaptureFixture
) -> None:
    install(WORKS)
    device = rocm("gfx942")
    call = PrefillCall(device, torch.bfloat16, 16, 192, 128)
    reason = "AITER 9.9.9 has no flash_attn_varlen_func that takes softmax_scale, causal and return_lse by name"
    with pytest.raises(BackendUnavailable, match=reason):
        selection.backend_for_prefill(device, "aiter", lambda: call)
    handed: list[object] = []
    q, v, cu = torch.zeros(1, 16, 192, dtype=torch.bfloat16), torch.zeros(1, 16, 128, dtype=torch.bfloat16), torch.zeros(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonMLABackend, "mla_prefill", lambda *given, **rest: handed.append(given))
        for ops in (select_backend(CFG, device).get_impl_cls().ops, selection.backend_for_prefill(device, "auto", lambda: call)):
            ops.mla_prefill(q, q, v, cu, cu, 1, 1, 0.1, causal=True, out=v, lse=None)
    assert len(handed) == 2
    assert "a prefill goes to the next backend, aiter refused it: the device is of type cpu" in caplog.text


def test_an_import_that_fails_here_alone_is_undone(
    install: Callable[..., Path], rocm: Callable[[str], torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install(
        {
            **WORKS,
            "stray_of_aiter.py": "",
            "__init__.py": "import os, sys; sys.path.insert(0, os.path.dirname(__file__)); import stray_of_aiter\n"
            "os.environ['AITER_ASM_DIR'] = 'x'; from . import mla\n"
            f"if os.getpid() == {os.getpid()}: raise SystemExit('only here')",
        }
    )
    device = rocm("gfx942")
    path, environment = list(sys.path), dict(os.environ)
    (reason,) = AiterMLABackend.not_supported_reasons(CFG, device)
    assert "passed its trial in a subprocess, yet can't be imported here: SystemExit: only here" in reason
    assert (sys.path, dict(os.environ)) == (path, environment)
    assert not {"aiter", "aiter.mla", "stray_of_aiter"} & set(sys.modules)
    assert package.exists()


def test_an_interrupt_is_passed_on_and_is_no_verdict(install: Callable[..., Path], rocm: Callable[[str], torch.device]) -> None:
    install({**WORKS, "__init__.py": f"import os\nif os.getpid() == {os.getpid()}: raise KeyboardInterrupt"})
    device = rocm("gfx942")
    with pytest.raises(KeyboardInterrupt):
        AiterMLABackend.not_supported_reasons(CFG, device)
    assert probe._verdict is None
    assert "aiter" not in sys.modules


@pytest.mark.parametrize(
    ("arch", "reason"),
    [("gfx90a", "the device is gfx90a; AITER's MLA kernels are for gfx942 and gfx950"), ("gfx1250", "the device is gfx1250; ")],
)
def test_another_arch_is_refused_before_aiter_is_looked_for(
    arch: str, reason: str, install: Callable[..., Path], rocm: Callable[[str], torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FAILURES["abort"][0])
    device = rocm(arch)
    monkeypatch.setattr(trial, "run", lambda *_: pytest.fail("AITER was tried"))
    assert AiterMLABackend.not_supported_reasons(CFG, device)[0].startswith(reason)
    assert not AiterMLABackend.expected_on(device)


def test_cuda_and_cpu_are_no_devices_of_aiter() -> None:
    assert AiterMLABackend.not_supported_reasons(CFG, torch.device("cpu")) == [
        "the device is of type cpu; AITER's MLA kernels are for gfx942 and gfx950"
    ]
    assert AiterMLABackend.not_supported_reasons(CFG, torch.device("cuda:0")) == [
        "the device is an NVIDIA GPU; AITER's MLA kernels are for gfx942 and gfx950"
    ]
    assert "aiter" not in sys.modules


def test_absent(rocm: Callable[[str], torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiter", None)  # what blocks an import
    device = rocm("gfx942")
    (reason,) = AiterMLABackend.not_supported_reasons(CFG, device)
    assert reason.startswith("AITER is not installed; install `dualmla[aiter]`")
    assert not AiterMLABackend.expected_on(device)
    assert {report.name: report.usable for report in explain(CFG, device)} == {"aiter": False, "triton": True, "reference": True}


def test_the_unrelated_package(install: Callable[..., Path], rocm: Callable[[str], torch.device]) -> None:
    install({"__init__.py": "def aiter(x): ...", "helpers.py": ""}, dist="aiter", version="0.13.20191203")
    device = rocm("gfx942")
    (reason,) = AiterMLABackend.not_supported_reasons(CFG, device)
    assert "is not AITER, it has neither mla.py nor jit (PyPI's `aiter` is an unrelated asyncio library): remove it" in reason
    assert not AiterMLABackend.expected_on(device)


def test_a_folder_that_happens_to_be_called_aiter_is_no_aiter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aiter" / "jit").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert "AITER is not installed" in str(probe.find_aiter())


@pytest.mark.parametrize(("dist", "version"), [("amd-aiter", "9.9.9"), ("aiter", "9.9.9"), (None, "unknown")])
def test_the_version_is_that_of_either_distribution(dist: str | None, version: str, tmp_path: Path, install: Callable[..., Path]) -> None:
    package = install(WORKS, dist=dist)
    if dist is None and isinstance(probe.find_aiter(), probe.Installed):
        # the test extra installs the real one, whose metadata then is the one found
        version = probe.find_aiter().version  # type: ignore[union-attr]
    assert probe.find_aiter() == probe.Installed(package, version)


def test_a_direct_call_is_refused_with_every_reason() -> None:
    q, kv_cache = torch.zeros(1, 16, 576, dtype=torch.bfloat16), torch.zeros(1, 1, 576, dtype=torch.bfloat16)
    meta = decode_metadata(torch.zeros(1, 1, dtype=torch.int32), [1], page_size=1, device="cpu")
    out = torch.empty(1, 16, 512, dtype=torch.bfloat16)
    with pytest.raises(BackendUnavailable, match="the device is of type cpu"):
        AiterMLABackend.mla_decode(q, kv_cache, meta, 0.1, causal=True, out=out, lse=None, k_scale=1.0, num_kv_splits=None)


HANGS = "import time\nopen({marker!r}, 'w').close()\ntime.sleep(600)\n"


def test_a_hang_ends_at_the_limit(
    install: Callable[..., Path], rocm: Callable[[str], torch.device], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install({"__init__.py": HANGS.format(marker=str(tmp_path / "reached")), "mla.py": ""})
    monkeypatch.setattr(trial, "_watch", _limited(tmp_path / "reached", trial._watch))
    begin = time.monotonic()
    (reason,) = AiterMLABackend.not_supported_reasons(CFG, rocm("gfx942"))
    assert "did not come up within 1 s: it said nothing" in reason
    assert time.monotonic() - begin < 60


def _limited(reached: Path, watch: Callable[..., str | None]) -> Callable[..., str | None]:
    """`watch` with a limit of one second that begins when the fake AITER has been reached: importing torch takes longer than that."""

    def wait_then_watch(child: subprocess.Popen[bytes], log: Path, package: Path, limit: float) -> str | None:
        deadline = time.monotonic() + 60
        while not reached.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return watch(child, log, package, 1.0)

    return wait_then_watch


def test_a_lock_that_nobody_holds_is_told_at_once(install: Callable[..., Path], rocm: Callable[[str], torch.device]) -> None:
    package = install({"__init__.py": "", "mla.py": ""})
    lock = package / "jit" / "build" / "lock_module_aiter_enum"
    (package / "__init__.py").write_text(
        f"import os, sys, time\nprint('[aiter] waiting for baton release at {lock}', file=sys.stderr, flush=True)\n"
        f"while os.path.exists({str(lock)!r}): time.sleep(0.2)"
    )
    lock.parent.mkdir(parents=True)
    lock.touch()
    (reason,) = AiterMLABackend.not_supported_reasons(CFG, rocm("gfx942"))
    assert reason.endswith(f"waits for a lock that no process holds, left by a build that was killed: remove {lock}")


def test_a_lock_seen_in_the_moment_between_closing_and_removing_is_not_stale(
    install: Callable[..., Path], rocm: Callable[[str], torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install({"__init__.py": "", "mla.py": ""})
    lock = package / "jit" / "build" / "lock_module_aiter_enum"
    (package / "__init__.py").write_text(
        f"import os, sys, time\nprint('waiting for baton release at {lock}', file=sys.stderr, flush=True)\n"
        f"while os.path.exists({str(lock)!r}): time.sleep(0.05)\nraise RuntimeError('went on')"
    )
    lock.parent.mkdir(parents=True)
    lock.touch()
    looks: list[Path] = []

    def seen_once(lock: Path) -> bool:
        looks.append(lock)
        if len(looks) > 1:
            lock.unlink(missing_ok=True)
        return len(looks) > 1

    monkeypatch.setattr(trial, "held", seen_once)
    (reason,) = AiterMLABackend.not_supported_reasons(CFG, rocm("gfx942"))
    assert reason.endswith("RuntimeError: went on")
    assert len(looks) > 1


def test_a_build_that_goes_on_is_never_killed(
    install: Callable[..., Path], rocm: Callable[[str], torch.device], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = install({"__init__.py": "", "mla.py": ""})
    lock, reached, done = package / "jit" / "build" / "lock_module_mla_asm", tmp_path / "reached", tmp_path / "done"
    (package / "__init__.py").write_text(
        f"import os, time\nfd = os.open({str(lock)!r}, os.O_CREAT | os.O_EXCL)\nopen({str(reached)!r}, 'w').close()\ntime.sleep(3)\n"
        f"os.close(fd); os.remove({str(lock)!r}); open({str(done)!r}, 'w').close()"
    )
    lock.parent.mkdir(parents=True)
    monkeypatch.setattr(trial, "_watch", _limited(reached, trial._watch))
    (reason,) = AiterMLABackend.not_supported_reasons(CFG, rocm("gfx942"))
    assert "is still being built (process " in reason
    assert reason.endswith(f"goes on, lock {lock}): start again when it is done")
    child = trial._left_building.pop()
    child.wait(timeout=60)
    assert done.exists()
    assert not lock.exists()


def test_something_is_said_while_it_takes_long(
    install: Callable[..., Path], rocm: Callable[[str], torch.device], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install({"__init__.py": "raise RuntimeError('no')", "mla.py": ""})
    monkeypatch.setattr(trial, "FIRST_WORD", 0.0)
    AiterMLABackend.not_supported_reasons(CFG, rocm("gfx942"))
    (said,) = [record.getMessage() for record in caplog.records if "trying AITER" in record.getMessage()]
    assert "of at most 600 s" in said


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan"])
def test_a_limit_that_is_no_number_of_seconds(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALMLA_PROBE_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"DUALMLA_PROBE_TIMEOUT is '{value}'; it must be a positive number of seconds"):
        trial.time_limit()
    monkeypatch.setenv("DUALMLA_PROBE_TIMEOUT", "")
    assert trial.time_limit() == 600
    monkeypatch.setenv("DUALMLA_PROBE_TIMEOUT", "1.5")
    assert trial.time_limit() == 1.5
