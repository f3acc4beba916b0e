"""The memory of a home's processes, by the role that each was started for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millstream.app.resources import resources_of


@pytest.mark.parametrize("more", [{"append": os.getpid()}, {"delivery": os.getpid()}, {"alerts": os.getpid()}, {}])
def test_a_process_is_named_by_the_role_that_it_was_started_for(tmp_path: Path, more: dict[str, int]) -> None:
    roles = {"run": None, "serve": None} | {"delivery": None, "serve-2": os.getpid()} | more
    assert list(resources_of(tmp_path, roles)["memory_bytes"]) == ["serve-2"]
