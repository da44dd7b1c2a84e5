"""docs/differential.md as written: its kernel is found out, its tests run in a directory that holds nothing else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "differential.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
KERNEL, OWN_TESTS = (next(block for block in BLOCKS if block.startswith(f'"""{title}')) for title in ("My decode", "My kernel's tests"))


@pytest.fixture
def run(tmp_path):
    """A command of Python in a directory with the page's two files, and what it printed."""
    (tmp_path / "my_kernel.py").write_text(KERNEL)
    (tmp_path / "test_my_kernel.py").write_text(OWN_TESTS)
    paths = [path for path in sys.path if path]

    def run(*command, fixed=False):
        if fixed:
            (tmp_path / "my_kernel.py").write_text(KERNEL.replace("rows[: limit + 1]", "rows[:limit]"))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DUALMLA_")} | {"PYTHONPATH": os.pathsep.join(paths)}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


def test_the_kernel_is_found_out(run):
    status, said = run("-m", "dualmla", "check", "--load", "my_kernel.py", "--backend", "my-kernel", "--cases", "12", "--jobs", "1")
    assert status == 1, said
    assert "my-kernel breaks: 4 Unused memory is never read into a result" in said
    assert "my-kernel breaks: 5 Causal is bottom-right" in said
    assert said.count("my-kernel breaks") == 2
    assert re.search(r"shrunk to h1-q\S+-kv\S+-p\d+-", said)


def test_and_right_once_it_is_fixed(run):
    command = ("-m", "dualmla", "check", "--load", "my_kernel.py", "--backend", "my-kernel", "--cases", "12", "--jobs", "1")
    status, said = run(*command, fixed=True)
    assert (status, "12 passed, 0 failed, 0 refused" in said) == (0, True), said


def test_its_tests_run_outside_of_the_repository(run):
    pytest_ = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "bf16 and not p64")
    status, said = run(*pytest_)
    assert status == 1, said
    assert re.search(r"AssertionError: h\d+-q\S+:\n.* out is \S+ at \(\d+, \d+, \d+\) \[token, head, column\]", said)
    status, said = run(*pytest_, fixed=True)
    assert status == 0, said
    assert int(re.search(r"(\d+) passed", said)[1]) > 20
