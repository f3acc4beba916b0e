"""Sizes as people write them in a configuration: `64MiB`, `20%` of a disk."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

_SIZE: Final = re.compile(r"\s*(\d{1,20}(?:\.\d+)?)\s*(B|[kKMGT]B|[KMGT]iB|%)?\s*\Z")
_BYTES: Final = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def size_bytes(text: str, *, whole: int | None = None) -> int:
    """Return bytes; a percentage is taken of `whole`.

    `ValueError` for text that is no size, a share without `whole`, or one above 100%.
    """
    found = _SIZE.match(text)
    if found is None:
        raise ValueError(f"{text!r} is not a size; write a number with B, KB, MB, GB, KiB, MiB, GiB, such as 64MiB")
    number, unit = float(found[1]), found[2] or "B"
    if unit == "%":
        if whole is None:
            raise ValueError(f"{text!r} can't be a share here; write a size such as 64MiB")
        if number > 100:
            raise ValueError(f"{text!r} is more than the whole disk; a share goes up to 100%")
        return int(whole * number / 100)
    return int(number * _BYTES[unit.replace("k", "K")])


def disk_bytes(folder: Path) -> int:
    """Return the size of the disk on which a folder is, or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).total
