"""The release of AITER on PyPI itself: its own signatures, guards and second stage, with its assembly replaced."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiter_extensions as extensions
import pytest

from dualmla.backends.aiter.signatures import read_signature
from dualmla.emulator.aiter_stand_ins import EMULATED

RELEASE = "0.1.7.post2.dev18"
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def site() -> Path:
    """Where the pinned release is installed. Where it is not, that is a failure in CI, which installs it."""
    try:
        found = importlib.metadata.distribution("amd-aiter")
        missing = "" if found.version == RELEASE else f"amd-aiter is {found.version}; these tests are about {RELEASE}, the release on PyPI"
    except importlib.metadata.PackageNotFoundError:
        missing = f"amd-aiter=={RELEASE} is not installed; it comes with `dualmla[aiter]`"
    if missing and os.environ.get("CI"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
    return Path(str(found.locate_file("")))


def run(folder: Path, first_stage: str, *cases: int | str) -> dict[str, Any]:
    """What the program `real_release.py` prints of these cases, else of all."""
    environment = extensions.lay_out(folder, first_stage)
    done = subprocess.run(
        [sys.executable, str(HERE / "real_release.py"), *map(str, cases)],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def said(site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases with the first stage in float64."""
    return run(tmp_path_factory.mktemp("rocm"), extensions.MLA)


def test_its_own_machine_code_gives_the_reference(site: Path, tmp_path: Path) -> None:
    """Its first stage in our emulator, its second in Triton's interpreter: empty and padded requests, one without a query, ragged."""
    said = run(tmp_path, EMULATED, 1, 2, 4)
    assert said["reasons"] == []
    # P and the result are rounded to bf16, once each
    assert [result["case"] for result in said["results"] if not result["error"] < 2**-7] == []
    assert len(said["results"]) == 3


def test_its_own_persistent_machine_code_gives_the_reference(site: Path, tmp_path: Path) -> None:
    """bf16 queries over a float8 cache: its `mla_decode_fwd`, argument checks and code object, its two HIP kernels restated in Python."""
    said = run(tmp_path, EMULATED, "p0", "p1", "p2", "p3")
    assert said["reasons"] == []
    # P and the result are rounded to bf16, once each
    assert [result["case"] for result in said["results"] if not result["error"] < 2**-7] == []
    assert len(said["results"]) == 4
    assert len(said["plans"]) == 17
    assert said["plans"][6:8] == ["work_indptr", "work_info"]  # the names are exchanged: by position it is right


def test_its_source_reads_as_s2(site: Path) -> None:
    tree = ast.parse((site / "aiter" / "mla.py").read_text())
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "mla_decode_fwd")
    (second_stage,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "_fwd_kernel_stage2_asm")
    assert "Final_lse" not in {argument.arg for argument in second_stage.args.args}
    namespace: dict[str, Any] = {}
    exec(f"def f({ast.unparse(function.args)}): ...", namespace)
    assert read_signature(inspect.signature(namespace["f"]).parameters.values(), writes_lse=False).generation == "S2"


def test_it_passes_the_gates_and_its_trial(said: dict[str, Any], site: Path) -> None:
    assert said["reasons"] == []
    assert (said["generation"], said["version"], said["lse"]) == ("S2", RELEASE, False)
    assert said["prefill"]  # its flash_attn_varlen_func takes what we pass
    assert Path(said["file"]) == site / "aiter" / "mla.py"


def test_its_decode_gives_the_reference(said: dict[str, Any]) -> None:
    assert [result for result in said["results"] if result["wrong"]] == []
    # one split and several, for each kernel: they write different things to different places
    shapes = {(result["case"].get("heads") == 128, result["q"], result["splits"] > 1) for result in said["results"]}
    wide = True  # 128 heads
    assert shapes == {
        *((not wide, 1, False), (not wide, 1, True), (not wide, 2, True), (not wide, 3, False), (not wide, 4, False), (not wide, 4, True)),
        *((wide, 1, False), (wide, 1, True)),
    }


def test_the_cache_of_its_split_indptr_is_the_one_we_clear(said: dict[str, Any]) -> None:
    assert said["cleared"] == 1  # it holds the last call alone, and we can empty it


def test_its_launcher_takes_what_ours_assumes(said: dict[str, Any]) -> None:
    names = [argument.split()[-1].split("=")[0] for argument in said["schema"].split("(", 1)[1].rsplit(") ->", 1)[0].split(", ")]
    assert names[:6] == ["Q", "KV", "qo_indptr", "kv_indptr", "kv_page_indices", "kv_last_page_lens"]
    assert names[6:10] == ["num_kv_splits_indptr", "work_metadata", "work_indptr", "work_info_set"]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_its_launcher_has_the_kernels_of_our_table(site: Path, arch: str) -> None:
    """bf16, not persistent: 16 heads of one token, 16 heads of up to four, 128 heads; persistent over float8: 16 heads."""
    source = (site / "aiter_meta" / "csrc" / "py_itfs_cu" / "asm_mla.cu").read_text()
    kernels = site / "aiter_meta" / "hsa" / arch / "mla"
    for name in (
        "mla_dec_stage1_bf16_a16w16_subQ16_mqa16",
        "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1",
        "mla_dec_stage1_bf16_a16w16_subQ128_mqa128",
        "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps",
    ):
        assert f"/mla/{name}.co" in source
        assert (kernels / f"{name}.co").exists()
