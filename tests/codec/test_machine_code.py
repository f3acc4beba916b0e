"""Functions in machine code, whatever became of the files in which it is kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from numba.core import config

from millstream.codec.machine_code import compiled


def doubled(number: int) -> int:
    return 2 * number


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", ["empty", "cut", "other bytes"])
def test_damaged_files_are_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, damage: str
) -> None:
    """After a full disk or a power cut no home of the user could capture."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    assert compiled(doubled)(21) == 42
    (file,) = tmp_path.rglob(f"*.{suffix}")
    if damage == "other bytes":
        file.write_bytes(os.urandom(file.stat().st_size))
    else:
        os.truncate(file, 0 if damage == "empty" else file.stat().st_size // 2)
    assert compiled(doubled)(21) == 42
    again = compiled(doubled)
    assert again(21) == 42
    assert sum(again.stats.cache_hits.values()) == 1  # type: ignore[attr-defined] # numba's
