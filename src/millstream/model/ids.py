"""Names and numbers that identify things: streams, shards, sources, tables, writers.

All are plain ints, strings or UUIDs at run time; the NewTypes keep them apart in signatures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NewType
from uuid import UUID

from millstream.errors import UsageError

StreamId = NewType("StreamId", UUID)
"""A stream's identity; a stream whose folder and catalog are both gone gets a new one."""
ShardId = NewType("ShardId", int)
RegionId = NewType("RegionId", int)
"""0 on a single site."""
WriterId = NewType("WriterId", int)
SourceId = NewType("SourceId", int)
"""The catalog's number (from 1) for one PostgreSQL database's one history; 0 for none (applications)."""
TableId = NewType("TableId", int)
"""The catalog's number (from 1) for one relation of one source; survives renames and a new timeline."""
SchemaVersion = NewType("SchemaVersion", int)
"""Counts a table's schemas from 1."""
Epoch = NewType("Epoch", int)
"""A writer incarnation's fencing epoch; it only grows. 0 is nobody's."""
GroupNumber = NewType("GroupNumber", int)
"""A commit group's number within its writer's shards; it only grows, also across epochs."""

_STREAM_NAME: Final = re.compile(r"[a-z][a-z0-9_]*\Z")


def can_name_stream(name: str) -> bool:
    """Whether a text is a name that a stream may have."""
    return _STREAM_NAME.match(name) is not None and len(name) <= 63


def check_stream_name(name: str) -> str:
    """The name itself, where it is one that a stream may have; else `UsageError`."""
    said: object = name  # of a public call, whose callers may have no types
    if not isinstance(said, str) or not can_name_stream(name):
        raise UsageError(
            f"{name!r} can't name a stream",
            hint="Stream names are lower-case letters, digits and _, start with a letter, and have at most 63 characters.",
        )
    return name


_REGION_LOG: Final = re.compile(r"([^@]*)@([0-9]{1,10})\Z")


def region_log_name(stream: str, region: RegionId) -> str:
    """The folder's name of another region's log of a stream, where that is followed."""
    return f"{check_stream_name(stream)}@{int(region)}"


def parse_region_log_name(name: str) -> tuple[str, RegionId] | None:
    """Whose log a folder holds, by its name; None where it isn't another region's. `UsageError` where it can't be one's either."""
    if "@" not in name:
        return None
    found = _REGION_LOG.match(name)
    if found is None or str(int(found[2])) != found[2] or int(found[2]) >= 1 << 32:
        raise UsageError(
            f"{name!r} can't name the log of another region", hint="It is named stream@region, such as shop@2."
        )
    return check_stream_name(found[1]), RegionId(int(found[2]))


@dataclass(frozen=True, slots=True)
class Source:
    """One PostgreSQL database's one history.

    A promotion that branched off at or above what the log has reached makes a new branch of the same system and
    database; the catalog numbers each branch.
    """

    id: SourceId
    system_identifier: int
    """`pg_control_system().system_identifier`, as IDENTIFY_SYSTEM gives it."""
    database: str
    timeline: int
