"""Fixtures of the emulator's tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dualmla.emulator.aiter_objects import AiterNotFoundError, find_code_objects


@pytest.fixture(scope="session")
def hsa() -> Path:
    """AITER's code objects from the installed `amd-aiter` distribution. Absent: skip, but fail under CI."""
    try:
        return find_code_objects()
    except AiterNotFoundError as error:
        if os.environ.get("CI"):
            pytest.fail(f"the test dependency is missing: {error}")
        pytest.skip(str(error))
