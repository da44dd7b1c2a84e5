"""The built wheel, used from outside the source tree."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# All on one worker: the wheel is built once.
pytestmark = pytest.mark.xdist_group("wheel")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source tree."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT), cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with nothing but the installed wheel; what it depends on comes from the environment of the tests."""
    target = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=target)
    return target


@pytest.fixture(scope="module")
def installed(site: Path) -> importlib.metadata.Distribution:
    """What the installed wheel says of itself."""
    (distribution,) = importlib.metadata.distributions(name="dualmla", path=[str(site)])
    return distribution


def run(*command: str, cwd: Path, pythonpath: Path | None = None) -> str:
    """The standard output of `command`, run in `cwd` with no PYTHONPATH but the given one."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if pythonpath is not None:
        env["PYTHONPATH"] = str(pythonpath)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_wheel_holds_both_packages_typed_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"dualmla", "dualmla_kernels"}
    assert {"dualmla/py.typed", "dualmla_kernels/py.typed"} <= names
    in_tree = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dualmla").rglob("*.py")}
    in_tree |= {path.relative_to(ROOT / "kernels").as_posix() for path in (ROOT / "kernels").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == in_tree


def test_wheel_works_outside_the_source_tree(site: Path, installed: importlib.metadata.Distribution, tmp_path: Path) -> None:
    code = "import dualmla, dualmla_kernels; print(dualmla.__version__, dualmla.__file__, dualmla_kernels.__file__, sep='\\n')"
    version, *files = run(sys.executable, "-c", code, cwd=tmp_path, pythonpath=site).splitlines()
    assert all(Path(file).is_relative_to(site) for file in files)
    assert installed.version == version
    assert "demo" in run(str(site / "bin" / "dualmla"), "--help", cwd=tmp_path, pythonpath=site)


def test_dependencies_never_force_a_triton_or_an_aiter(installed: importlib.metadata.Distribution) -> None:
    required = [requirement for requirement in installed.requires or [] if "extra ==" not in requirement]
    assert {requirement.partition(">")[0] for requirement in required} == {"torch", "typer", "rich"}
