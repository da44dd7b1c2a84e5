# `make demo` runs the main job, `make test` checks everything. Both set themselves up in .venv and need nothing
# but Python >= 3.10 with venv. What can be changed on the command line:
#
#   make test PYTHON=python3.12       another interpreter
#   make test VENV=~/envs/mla         another environment; an existing one keeps its torch
#   make test TORCH_FROM=             a new torch although PYTHON has one (a torch that PYTHON has is used)
#   make test TORCH='torch==2.14.0'   another torch to install when there is none
#   make pytest JOBS=8 ARGS='-k lse'  more processes, other arguments of pytest

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= 2
ARGS ?=
# Debian packages that the tests need (LLVM disassembles AMD code); installed where there is apt and the right to use it.
APT_PACKAGES ?= llvm-22

# A torch that the machine came with knows its GPU. The environment then sees the packages beside that torch, whether
# PYTHON is the system's or itself in a virtual environment (which --system-site-packages would look past).
TORCH_FROM ?= $(shell $(PYTHON) -c 'import os, torch; print(os.path.dirname(torch.__path__[0]))' 2>/dev/null)

# Tools are run as modules: a script lies beside the Python that a package was installed for, which TORCH_FROM may make another one.
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Builds of torch for CUDA and for ROCm bring their own Triton (ROCm's under another name): a second one is never put
# over it, and the CPU build, which brings none, gets the extra `cpu`. On ROCm AITER too is the machine's business.
extra_unless = $$($(BIN)/python -W ignore -c 'from torch.version import cuda, hip; print("" if $(1) else ",$(2)")')
TRITON_EXTRA = $(call extra_unless,cuda or hip,cpu)
AITER_EXTRA = $(call extra_unless,hip,aiter)

.PHONY: demo test lint types imports pytest wheel format clean

demo: $(VENV)/.demo
	$(BIN)/python -m dualmla demo

test: lint types imports pytest

lint: $(VENV)/.test
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check

types: $(VENV)/.test
	$(BIN)/python -m mypy

imports: $(VENV)/.test
	$(BIN)/python -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

# One thread a process: the small tensors of the tests are slower with more. The wheel's tests share one build.
pytest: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m 'not gpu' --dist loadgroup --durations=10 $(ARGS)

wheel: $(VENV)/.test
	$(BIN)/python -m build --wheel --no-isolation

format: $(VENV)/.test
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

clean:
	rm -rf build dist .venv .hypothesis .benchmarks .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find dualmla kernels tests bench -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# Torch first and alone. `+cpu` is the CPU build where pip is told of a place that has one; PyPI's Linux wheel brings CUDA.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' || \
	    { echo 'dualmla needs Python >= 3.10 with venv (Debian: apt install python3-venv); choose one with PYTHON=...'; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@from='$(TORCH_FROM)'; test -z "$$from" || \
	    echo "$$from" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch_from.pth"
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install '$(TORCH)+cpu' || $(PIP) install '$(TORCH)'
	touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	@echo 'Setting up $(VENV) for the demo'
	$(PIP) install --quiet --editable ".[demo$(TRITON_EXTRA)]"
	touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.torch
	@echo 'Setting up $(VENV) for the tests'
ifneq ($(APT_PACKAGES),)
	if command -v apt-get >/dev/null && test "$$(id -u)" = 0; then apt-get update -qq && apt-get install -qq --no-install-recommends $(APT_PACKAGES); fi
endif
	$(PIP) install --quiet --editable ".[test,lint,demo,emulator$(TRITON_EXTRA)$(AITER_EXTRA)]"
	touch $@
