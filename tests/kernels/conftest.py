"""Where the tests of the Triton kernels run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture
def device() -> Iterator[str]:
    """The CPU in Triton's interpreter, else a GPU."""
    with warnings.catch_warnings():
        # NumPy warns of what GPUs do in silence: inf - inf, log 0.
        warnings.simplefilter("ignore", RuntimeWarning)
        yield "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
