"""Durations and sizes as people write them in a configuration: `500ms`, `7d`, `64MiB`, `20%` of a disk."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

from millstream.errors import UsageError
from millstream.model.durations import duration_s
from millstream.model.replication import AckLevel

_SIZE: Final = re.compile(r"\s*(\d{1,20}(?:\.\d+)?)\s*(B|[kKMGT]B|[KMGT]iB|%)?\s*\Z")
_DAY_S: Final = 86_400
_BYTES: Final = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def check_level(text: str) -> str:
    """Return the text of an acknowledgement level; `ValueError` for text that is none."""
    try:
        return str(AckLevel.parse(text))
    except UsageError as error:
        raise ValueError(f"{error.message}; there are local, durable(1), durable(2) …, and object") from None


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


def check_duration(text: str) -> str:
    """Return the text itself, if it is a duration."""
    duration_s(text)
    return text


def check_days(text: str) -> str:
    """Return the text itself, if it is a duration of whole days, and of at least one."""
    seconds = duration_s(text)
    if seconds <= 0 or seconds % _DAY_S:
        raise ValueError(f"{text!r} isn't a number of whole days; write one such as 90d")
    return text


def check_duration_or_auto(text: str) -> str:
    """Return the text itself, if it is `auto` or a duration."""
    if text == "auto":
        return text
    try:
        return check_duration(text)
    except ValueError as error:
        raise ValueError(f'{error}; or "auto"') from None


def check_size(text: str) -> str:
    """Return the text itself, if it is a size in bytes."""
    size_bytes(text)
    return text


def check_size_above_zero(text: str) -> str:
    """Return the text itself, if it is a size of a byte or more."""
    if size_bytes(text) < 1:
        raise ValueError(f"{text!r} is nothing; leave it out for no bound")
    return text


def check_size_or_share(text: str) -> str:
    """Return the text itself, if it is a size in bytes or a percentage."""
    size_bytes(text, whole=100)
    return text


def disk_bytes(folder: Path) -> int:
    """Return the size of the disk on which a folder is, or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).total
