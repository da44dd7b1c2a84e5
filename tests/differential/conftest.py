"""What the tests of the differential share."""

import runpy
from pathlib import Path

import pytest

from dualmla import selection

FAULTS_FILE = Path(__file__).parent / "faults.py"


@pytest.fixture
def faulty():
    """The registry of backends with the faulty ones of faults.py."""
    runpy.run_path(str(FAULTS_FILE))
    return selection._registry
