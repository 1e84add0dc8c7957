"""Runs tests of the Triton kernels in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_in_interpreter(cases: str) -> str:
    """Run a file of tests with pytest in the interpreter, which an import of the kernels has to find chosen.

    Returns:
        Pytest's last line. Fails with all it said if a test failed.
    """
    path = Path(__file__).with_name(cases)
    command = [sys.executable, "-m", "pytest", str(path), "-q", "--no-header", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    root = path.parent.parent.parent
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.fail(result.stdout[-8000:] + result.stderr[-2000:], pytrace=False)
    return result.stdout.strip().splitlines()[-1]
