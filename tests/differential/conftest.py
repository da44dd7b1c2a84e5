"""What the tests of the differential share."""

import runpy
from pathlib import Path

import pytest

from dualmla import selection

FAULTS_FILE = Path(__file__).parent / "faults.py"


@pytest.fixture(scope="module")
def faulty():
    """The registry of backends with the faulty ones of faults.py; as it was afterwards."""
    before = dict(selection._registry)
    runpy.run_path(str(FAULTS_FILE))
    yield selection._registry
    selection._registry.clear()
    selection._registry.update(before)
    selection._candidates.cache_clear()
