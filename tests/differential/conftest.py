"""What the tests of the differential share."""

import runpy
from pathlib import Path

import pytest

from dualmla import selection

FAULTS_FILE = Path(__file__).parent / "faults.py"


@pytest.fixture(scope="session")
def faulty():
    """The registry of backends, the faulty ones of faults.py registered."""
    if "fault-sound" not in selection._registry:
        runpy.run_path(str(FAULTS_FILE))
    return selection._registry
