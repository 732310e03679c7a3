"""What needs `torchao`, in a process of its own: `transformers` imports it wherever it is."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.iterators.registry import TORCHAO
from tests.repository.imports import ROOT


def test_in_a_process_of_its_own(tmp_path):
    """Cases of its own, and the contract of all iterators."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["tests/iterators/torchao_cases.py", "tests/iterators/test_contract.py"]
    command += [f"--basetemp={tmp_path / 'in'}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, TORCHAO: "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
