"""What every test stands on: how thorough hypothesis is, and where Spark's workers find their Python.

`HYPOTHESIS_PROFILE` chooses; without it, `ci`: the same examples on every run, so that a red build is a change of
ours. `soak` draws new ones for as long as it is let, and prints what repeats a failure.
"""

from __future__ import annotations

import os
import sys

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,  # a loaded machine is no failure; pytest-timeout ends what hangs
    max_examples=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("soak", parent=settings.get_profile("ci"), derandomize=False, max_examples=100_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "ci")

# Spark starts `python3` from the PATH otherwise, which is not this one and lacks Millstream.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
