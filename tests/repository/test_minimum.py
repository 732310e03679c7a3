"""The lowest versions that `pyproject.toml` allows are versions that work."""

import subprocess

import pytest

from tests.repository.imports import ROOT


@pytest.mark.minimum
@pytest.mark.timeout(3600)
def test_the_fast_suite_passes_on_the_lowest_versions():
    """`.ci/minimum` installs them into a fresh environment and runs the fast suite there."""
    subprocess.run([ROOT / ".ci" / "minimum", "-q"], cwd=ROOT, check=True, timeout=3500)
