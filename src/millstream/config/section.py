"""The building blocks of the configuration's sections: a strict base, and texts for durations and sizes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from millstream.config.quantities import (
    check_days,
    check_duration,
    check_duration_or_auto,
    check_level,
    check_size,
    check_size_above_zero,
    check_size_or_share,
)

Duration = Annotated[str, AfterValidator(check_duration)]
"""`500ms`, `10s`, `7d`."""
Days = Annotated[str, AfterValidator(check_days)]
"""`90d`."""
DurationOrAuto = Annotated[str, AfterValidator(check_duration_or_auto)]
"""`500ms`, or `auto`."""
Level = Annotated[str, AfterValidator(check_level)]
"""`local`, `durable(1)`, `object`."""
Size = Annotated[str, AfterValidator(check_size)]
"""`64MiB`."""
SizeAboveZero = Annotated[str, AfterValidator(check_size_above_zero)]
"""A size greater than zero."""
SizeOrShare = Annotated[str, AfterValidator(check_size_or_share)]
"""`64MiB`, or a share of the disk such as `20%`."""


class Section(BaseModel):
    """A section: unknown keys are refused, and it is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)
