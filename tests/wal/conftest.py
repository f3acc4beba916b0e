"""A fresh `Truth` for each test of the log."""

from __future__ import annotations

import pytest
from tests.wal.truth import Truth


@pytest.fixture
def truth() -> Truth:
    return Truth()
