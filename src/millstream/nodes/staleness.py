"""The age of a follower's data, published by the following process to all others of the machine.

It is a moment of a clock that all processes share and no one sets. So the age keeps growing if the
follower is dead, and means nothing after a reboot. Never synced: it is published again five times a
second.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millstream.errors import ReplicationError
from millstream.leadership.node_roles import Roles, replication_folder
from millstream.model.durations import duration_s
from millstream.model.ids import RegionId, parse_region_log_name, region_log_name
from millstream.model.region_ages import RegionAge
from millstream.nodes.home_identity import boot_id
from millstream.private_files import replace_file
from millstream.protocol.replication.node_promises import Role

if TYPE_CHECKING:
    from millstream.home.home import Home

_NAME: Final = "age.json"


def note_age(folder: Path, age_s: float | None) -> None:
    """Publish the greatest age of the shown data; None: unknown. `OSError` if the disk fails, or is full."""
    fresh_ns = None if age_s is None else _boot_ns() - int(age_s * 1e9)
    replace_file(folder / _NAME, json.dumps({"fresh_ns": fresh_ns, "boot": boot_id()}).encode(), durable=False)


def age_of_replica(home: Home, stream: str) -> float | None:
    """Return the greatest age in seconds of what this node shows of a stream; None if it is unknown."""
    try:
        facts = json.loads((replication_folder(home, stream) / _NAME).read_bytes())
        if facts["boot"] != boot_id():
            return None
        return max(0.0, (_boot_ns() - int(facts["fresh_ns"])) / 1e9)
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None  # none was published yet, or it was unknown; or the file is damaged, and will be rewritten soon


def has_followed_since_boot(home: Home, stream: str) -> bool:
    """Return whether a follower has had the log open since the machine's boot.

    If so, it has found everything that lay beyond the marks after a power cut.
    """
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
        return bool(json.loads((replication_folder(home, stream) / _NAME).read_bytes())["boot"] == boot_id() != "")
    return False


def check_age(home: Home, stream: str) -> None:
    """Check that a stream's data here is as new as `[replication] max_staleness` asks; a leader's always is.

    The age is unknown for a fenced node until it follows, as others may write since. It is also unknown
    for another region's log (`shop@2`) that hasn't been followed yet.

    Raises:
        ReplicationError (`replica_too_stale`): it is older, or the age is unknown.
    """
    if not home.config_file.exists():
        return  # a copied folder: no limit on its age is configured
    text = home.config.replication.max_staleness
    if text is None or (parse_region_log_name(stream) is None and Roles(home).of(stream).role is Role.LEADS):
        return
    age_s, most_s = age_of_replica(home, stream), duration_s(text)
    if age_s is None or age_s > most_s:
        age = "of unknown age" if age_s is None else f"{age_s:.1f} s old"
        raise ReplicationError(
            f"what this node has of stream {stream} is {age}; max_staleness is {text}",
            code="replica_too_stale",
            stream=stream,
            age_s=age_s,
        )


def check_ages(home: Home, stream: str) -> None:
    """Check as `check_age` every log that a merged table is read from.

    These are the stream's own log, and those of the other regions, present or to come.

    Raises:
        ReplicationError (`replica_too_stale`): for the first that is too old; its `stream` names the region (`shop@2`).
        UsageError: a log's folder has an invalid name.
    """
    config = home.config if home.config_file.exists() else None
    if config is None or config.replication.max_staleness is None:
        return
    for log in (stream, *(region_log_name(stream, region) for region in _other_regions(home, stream))):
        check_age(home, log)


def ages_of_regions(home: Home, stream: str) -> tuple[RegionAge, ...]:
    """Return the age of each region's rows here: of the home's own, of those that it follows, and of those configured.

    Raises:
        UsageError: a log's folder has an invalid name.
    """
    config = home.configured(stream)
    own = RegionId(0 if config is None else config.region)
    leads = config is not None and Roles(home).of(stream).role is Role.LEADS
    ages = {own: 0.0 if leads else age_of_replica(home, stream)}
    ages |= {one: age_of_replica(home, region_log_name(stream, one)) for one in _other_regions(home, stream)}
    return tuple(RegionAge(region, ages[region]) for region in sorted(ages))


def _other_regions(home: Home, stream: str) -> list[RegionId]:
    """Return the other regions whose logs the home has, or that are configured.

    Nothing is shown of one that has never come, which is as old as can be.
    """
    regions = set(home.regions_on_disk(stream))
    config = home.configured(stream)
    if config is not None and config.region:
        regions |= {region for region in home.config.replication.region_addresses if region != config.region}
    return sorted(regions)


def _boot_ns() -> int:
    """Return a clock that all processes of this machine share, and that no one sets."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME if hasattr(time, "CLOCK_BOOTTIME") else time.CLOCK_MONOTONIC)
