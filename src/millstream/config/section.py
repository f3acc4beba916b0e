"""The building blocks of the configuration's sections: a strict base, and texts for durations, sizes and levels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict

from millstream.config.quantities import size_bytes
from millstream.errors import UsageError
from millstream.model.durations import duration_s
from millstream.model.replication import AckLevel

_DAY_S: Final = 86_400


def _read_by(read: Callable[[str], object]) -> AfterValidator:
    """Return the check of a text that stays as it is written: it is one that a function reads."""

    def checked(text: str) -> str:
        read(text)
        return text

    return AfterValidator(checked)


def _check_days(text: str) -> None:
    seconds = duration_s(text)
    if seconds <= 0 or seconds % _DAY_S:
        raise ValueError(f"{text!r} isn't a number of whole days; write one such as 90d")


def _check_duration_or_auto(text: str) -> None:
    if text != "auto":
        try:
            duration_s(text)
        except ValueError as error:
            raise ValueError(f'{error}; or "auto"') from None


def _check_above_zero(text: str) -> None:
    if size_bytes(text) < 1:
        raise ValueError(f"{text!r} is nothing; leave it out for no bound")


def _level(text: str) -> str:
    try:
        return str(AckLevel.parse(text))
    except UsageError as error:
        raise ValueError(f"{error.message}; there are local, durable(1), durable(2) …, and object") from None


Duration = Annotated[str, _read_by(duration_s)]
"""`500ms`, `10s`, `7d`."""
Days = Annotated[str, _read_by(_check_days)]
"""`90d`."""
DurationOrAuto = Annotated[str, _read_by(_check_duration_or_auto)]
"""`500ms`, or `auto`."""
Level = Annotated[str, AfterValidator(_level)]
"""`local`, `durable(1)`, `object`."""
Size = Annotated[str, _read_by(size_bytes)]
"""`64MiB`."""
SizeAboveZero = Annotated[str, _read_by(_check_above_zero)]
"""A size greater than zero."""
SizeOrShare = Annotated[str, _read_by(partial(size_bytes, whole=100))]
"""`64MiB`, or a share of the disk such as `20%`."""


class Section(BaseModel):
    """A section: unknown keys are refused, and it is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)
