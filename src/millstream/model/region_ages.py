"""The regions of merged rows, and the age of each: how an answer lists them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from millstream.model.ids import RegionId

REGIONS_METADATA: Final = b"millstream.regions"
"""Key of the list, as JSON, in the metadata of an Arrow schema."""
REGIONS_HEADER: Final = "Millstream-Regions"


@dataclass(frozen=True, slots=True)
class RegionAge:
    """One region of an answer."""

    region: RegionId
    age_s: float | None
    """The greatest age in seconds of the rows read from this region's log, when they were read. 0: this node writes the
    log. None: unknown, or nothing has come from the region."""

    def as_dict(self) -> dict[str, Any]:
        """Return the region, JSON-able."""
        return {"region": int(self.region), "age_s": None if self.age_s is None else round(self.age_s, 3)}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """Return the value that `as_dict` made JSON-able."""
        return cls(RegionId(facts["region"]), facts["age_s"])

    def __str__(self) -> str:
        return f"{self.region} ({'of unknown age' if self.age_s is None else f'{self.age_s:.1f} s old'})"


def regions_as_json(ages: Iterable[RegionAge]) -> str:
    """Return the list as an answer has it: `[{"region": 1, "age_s": 0.0}, …]`."""
    return json.dumps([age.as_dict() for age in ages])


def regions_in(metadata: Mapping[bytes, bytes] | None) -> tuple[RegionAge, ...]:
    """Return the list in the metadata of an Arrow schema; empty if it has none."""
    return tuple(map(RegionAge.from_dict, json.loads((metadata or {}).get(REGIONS_METADATA, b"[]"))))


def as_line(ages: Iterable[RegionAge]) -> str:
    """Return the list for people."""
    return f"merged from region {', '.join(map(str, ages))}"


def oldest(ages: Iterable[RegionAge]) -> tuple[RegionAge, ...]:
    """Return each region once, with the greatest of its ages; an unknown age is greater than any other."""
    found: dict[RegionId, RegionAge] = {}
    for one in ages:
        held = found.setdefault(one.region, one)
        if held.age_s is not None and (one.age_s is None or one.age_s > held.age_s):
            found[one.region] = one
    return tuple(found[region] for region in sorted(found))


def with_regions(metadata: Mapping[bytes, bytes] | None, ages: Sequence[RegionAge]) -> dict[bytes, bytes]:
    """Return the metadata of an Arrow schema with the list in it."""
    return {**(metadata or {}), REGIONS_METADATA: regions_as_json(ages).encode()}
