"""What our modules may import from outside (read from their source), and what importing dualmla does (in a subprocess).

The direction of imports inside the project is import-linter's: its contracts are in pyproject.toml.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
from support import RunPython

ROOT = Path(__file__).parents[1]

# The longest prefix of a module's name counts. Everything not named here lives on torch alone.
ALLOWED_OUTSIDE = {
    "dualmla": {"torch"},
    "dualmla.backends.aiter": {"torch", "aiter", "dualmla_kernels"},  # block tables are cut into tokens by a kernel of ours
    "dualmla.backends.kernels": {"torch", "dualmla_kernels"},
    "dualmla.backends.triton": {"torch", "triton", "dualmla_kernels"},
    "dualmla.bench": {"torch", "rich", "matplotlib"},
    "dualmla.buffers": {"torch", "dualmla_kernels"},  # on a GPU, where a kernel writes them
    "dualmla.cli": {"torch", "typer", "rich"},
    "dualmla.demo": {"torch", "rich", "transformers"},
    "dualmla.differential": {"torch", "rich", "safetensors", "jinja2"},
    "dualmla.differential.emulated": {"torch", "dualmla_kernels"},  # our launchers, asked what they launch on a chip
    "dualmla.differential.profile_plot": {"matplotlib"},
    "dualmla.emulator": {"torch", "numpy", "numba"},
    "dualmla.emulator.aiter_release": {"torch", "numpy", "dualmla_kernels"},
    "dualmla.emulator.aiter_stand_ins": {"dualmla_kernels"},
    "dualmla.emulator.decoder": {"tinygrad"},
    "dualmla.emulator.tensors": {"torch", "dualmla_kernels"},
    "dualmla_kernels": {"torch", "triton"},
}


def allowed_outside(module: str) -> set[str]:
    """The foreign top-level packages that `module` may import, wherever in its body."""
    prefixes = [prefix for prefix in ALLOWED_OUTSIDE if module == prefix or module.startswith(prefix + ".")]
    return ALLOWED_OUTSIDE[max(prefixes, key=len)]


def outside_imports(source: str, *, package: str) -> dict[str, int]:
    """Foreign top-level packages that `source`, a module of `package`, imports anywhere: name -> first line.

    Lazy imports inside functions count, and so do `importlib.import_module` and `__import__` with a literal name.
    """
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}:
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        else:
            continue
        for name in names:
            top = name.partition(".")[0]
            if top and top != package and top not in sys.stdlib_module_names:
                found.setdefault(top, node.lineno)
    return found


def modules() -> dict[str, Path]:
    """Every module of the two packages: dotted name -> file."""
    found = {}
    for root, package in ((ROOT, "dualmla"), (ROOT / "kernels", "dualmla_kernels")):
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_it_may(module: str) -> None:
    imports = outside_imports(MODULES[module].read_text(), package=module.partition(".")[0])
    refused = {f"{name} (line {line})" for name, line in imports.items() if name not in allowed_outside(module)}
    assert not refused, f"{module} may import {sorted(allowed_outside(module))} from outside, not {sorted(refused)}"


@pytest.mark.parametrize(
    "source",
    [
        "import aiter",
        "import aiter.mla as mla",
        "from aiter.mla import mla_decode_fwd",
        "def lazy():\n    from aiter import mla",
        "import importlib\nimportlib.import_module('aiter.mla')",
        "from importlib import import_module\nimport_module('aiter')",
        "__import__('aiter')",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import aiter",
    ],
)
def test_every_way_to_import_is_seen(source: str) -> None:
    assert set(outside_imports(source, package="dualmla")) == {"aiter"}


@pytest.mark.parametrize("source", ["import os.path", "from dualmla import config", "from . import aiter", "from .aiter import probe"])
def test_own_and_standard_modules_are_not_foreign(source: str) -> None:
    assert outside_imports(source, package="dualmla") == {}


# Run in a fresh interpreter, after torch and whatever torch itself does at import. `sys.argv[1]` is the module to import,
# the other arguments name modules that cannot be imported. Devices raise when asked, and the environment keeps a record.
WATCHED_IMPORT = """
import importlib, json, os, sys

module, *blocked = sys.argv[1:]
import torch

def refuse(*args, **kwargs):
    raise AssertionError("a device was touched")

for name in ("_lazy_init", "is_available", "device_count", "current_device", "get_device_properties", "get_device_capability"):
    setattr(torch.cuda, name, refuse)

reads = []

class Recording(type(os.environ)):
    def __getitem__(self, key):
        reads.append(key)
        return super().__getitem__(key)

    def __iter__(self):
        reads.append("*")
        return super().__iter__()

os.environ.__class__ = Recording
sys.modules.update(dict.fromkeys(blocked))
before = set(sys.modules)
importlib.import_module(module)
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
print(json.dumps({"loaded": sorted(loaded), "reads": reads, "cuda": torch.cuda.is_initialized()}))
"""


def test_import_needs_torch_alone_and_touches_nothing(run_python: RunPython) -> None:
    assert json.loads(run_python(WATCHED_IMPORT, "dualmla")) == {"loaded": ["dualmla"], "reads": [], "cuda": False}


# Everything foreign that some module of ours may import, but for torch.
BLOCKED = sorted(set().union(*ALLOWED_OUTSIDE.values()) - {"torch"})


def test_reference_needs_torch_alone(run_python: RunPython) -> None:
    report = json.loads(run_python(WATCHED_IMPORT, "dualmla.backends.reference", *BLOCKED))
    assert report == {"loaded": ["dualmla"], "reads": [], "cuda": False}


# One token in the cache: its latent is the output, and its score the LSE.
DECODE_ON_TORCH_ALONE = """
import json, sys

sys.modules.update(dict.fromkeys(sys.argv[1:]))
import torch
import dualmla

kv_cache = torch.randn(4, 1, 576, generator=torch.Generator().manual_seed(0))
q = torch.ones(1, 2, 576)
meta = dualmla.decode_metadata(torch.tensor([[3]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32), page_size=1, device="cpu")
out, lse = dualmla.mla_decode(q, kv_cache, meta, 0.5, return_lse=True)
torch.testing.assert_close(out, kv_cache[3, :, :512].expand(1, 2, 512))
torch.testing.assert_close(lse, 0.5 * kv_cache[3].sum().expand(2, 1))
cfg = dualmla.MLAConfig(num_heads=2, softmax_scale=0.5, dtype=torch.float32)
reports = {report.name: report.reasons for report in dualmla.explain(cfg, device="cpu")}
print(json.dumps([dualmla.select_backend(cfg, device="cpu").get_name(), reports]))
"""


def test_decode_works_on_torch_alone_and_says_what_is_missing(run_python: RunPython) -> None:
    name, reasons = json.loads(run_python(DECODE_ON_TORCH_ALONE, *BLOCKED))
    assert name == "REFERENCE_MLA"
    assert reasons["reference"] == []
    assert any("Triton is not installed" in reason for reason in reasons["triton"])
    assert reasons["aiter"]
