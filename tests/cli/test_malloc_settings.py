"""A process's memory follows its use: large buffers go back to the system when they are freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

_HOLD_ONE_OF_MANY = """
import sys
import numpy as np
from pathlib import Path
from millstream.cli.malloc_settings import return_large_buffers

if sys.argv[1] == "tuned":
    return_large_buffers()

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

np.ones(30 << 20, np.uint8)  # a map of this size is freed: glibc takes all that is smaller out of an arena from here on
before = held()
buffers = [np.ones(3 << 19, np.uint8) for _ in range(64)]
del buffers[:-1]
print(held() - before)
"""


@pytest.mark.parametrize(("as_run", "is_returned"), [("tuned", True), ("untuned", False)])
def test_a_buffer_that_lives_keeps_no_freed_ones(as_run: str, is_returned: bool) -> None:
    """The second case shows that the first one can fail."""
    done = subprocess.run(
        [sys.executable, "-c", _HOLD_ONE_OF_MANY, as_run], check=True, capture_output=True, text=True, timeout=60
    )
    assert (int(done.stdout) < 16 << 20) is is_returned, done.stdout
