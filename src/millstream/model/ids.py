"""Names and numbers that identify things: streams, shards, sources, tables, writers.

All are plain ints, strings or UUIDs at run time; the NewTypes distinguish them in signatures.
"""

from __future__ import annotations

import re
from typing import Final, NewType
from uuid import UUID

from millstream.errors import UsageError

StreamId = NewType("StreamId", UUID)
"""A stream's identity; a stream whose folder and catalog are both gone gets a new one."""
ShardId = NewType("ShardId", int)
RegionId = NewType("RegionId", int)
"""The region's number; 0 on a single site."""
WriterId = NewType("WriterId", int)
SourceId = NewType("SourceId", int)
"""The catalog's number (from 1) for one history of one PostgreSQL database; 0 for none (applications)."""
TableId = NewType("TableId", int)
"""The catalog's number (from 1) for one relation of one source; survives renames and a new timeline."""
SchemaVersion = NewType("SchemaVersion", int)
"""Number of a table's schema, counted from 1."""
Epoch = NewType("Epoch", int)
"""A writer incarnation's fencing epoch; it only grows. 0 belongs to no writer."""
GroupNumber = NewType("GroupNumber", int)
"""A commit group's number within its writer's shards; it only grows, also across epochs."""

_STREAM_NAME: Final = re.compile(r"[a-z][a-z0-9_]*\Z")


def can_name_stream(name: str) -> bool:
    """Whether a text is a valid stream name."""
    return _STREAM_NAME.match(name) is not None and len(name) <= 63


def check_stream_name(name: str) -> str:
    """Return the name if it is a valid stream name; else raise `UsageError`."""
    said: object = name  # a public call, whose callers may have no types
    if not isinstance(said, str) or not can_name_stream(name):
        raise UsageError(
            f"{name!r} can't name a stream",
            hint="Stream names are lower-case letters, digits and _, start with a letter, and have at most 63 characters.",
        )
    return name


def default_name(stream: str) -> str:
    """Return the name of what a stream has elsewhere, a slot, a publication or a topic, unless one is configured."""
    return f"millstream_{stream}"


_REGION_LOG: Final = re.compile(r"([^@]*)@([0-9]{1,10})\Z")


def region_log_name(stream: str, region: RegionId) -> str:
    """Return the name of the folder in which another region's log of a stream is followed."""
    return f"{check_stream_name(stream)}@{int(region)}"


def parse_region_log_name(name: str) -> tuple[str, RegionId] | None:
    """Return the stream and region whose log a folder of this name holds; None if it isn't another region's log.

    Raises `UsageError` for a name with an `@` that no region's log can have.
    """
    if "@" not in name:
        return None
    found = _REGION_LOG.match(name)
    if found is None or str(int(found[2])) != found[2] or int(found[2]) >= 1 << 32:
        raise UsageError(
            f"{name!r} can't name the log of another region", hint="It is named stream@region, such as shop@2."
        )
    return check_stream_name(found[1]), RegionId(int(found[2]))
