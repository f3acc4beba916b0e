"""Set up Forage's tests as the project's others: `tests/conftest.py` has the tiers and hypothesis's profiles."""

from __future__ import annotations

import tests.conftest  # noqa: F401 - it registers hypothesis's profiles
