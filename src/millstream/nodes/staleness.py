"""How old what a follower shows is, told from the process that follows to all others of the machine.

It is a moment of the clock that all processes share and nobody sets; so it goes on growing where the follower is dead, and means nothing after the
machine has started anew. Never synced: it is told again five times a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millstream.config.quantities import duration_s
from millstream.errors import ReplicaTooStale
from millstream.leadership.roles import Roles, replication_folder
from millstream.model.ids import parse_region_log_name, region_log_name
from millstream.nodes.instances import boot_id
from millstream.protocol.replication.roles import Role

if TYPE_CHECKING:
    from millstream.home.home import Home

_NAME: Final = "age.json"


def note_age(folder: Path, age_s: float | None) -> None:
    """Tell how old what is shown is at most, now; None: nobody knows. `OSError` where the disk fails, or is full."""
    fresh_ns = None if age_s is None else _boot_ns() - int(age_s * 1e9)
    fresh = folder / f".{_NAME}.{os.getpid()}"
    fresh.write_text(json.dumps({"fresh_ns": fresh_ns, "boot": boot_id()}))
    fresh.rename(folder / _NAME)


def age_of_replica(home: Home, stream: str) -> float | None:
    """How old what this node shows of a stream is at most, in seconds; None where nobody knows."""
    try:
        facts = json.loads((replication_folder(home, stream) / _NAME).read_bytes())
        if facts["boot"] != boot_id():
            return None
        return max(0.0, (_boot_ns() - int(facts["fresh_ns"])) / 1e9)
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None  # none was told yet, or nobody knew; or what stands there is damaged, and told anew soon


def has_followed_since_boot(home: Home, stream: str) -> bool:
    """Whether who follows has had the log open since the machine was started: what lay behind its marks after a power cut was found then."""
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
        return bool(json.loads((replication_folder(home, stream) / _NAME).read_bytes())["boot"] == boot_id() != "")
    return False


def check_age(home: Home, stream: str) -> None:
    """Return where what this node shows of a stream is as new as `[replication] max_staleness` asks; a leader's always is.

    Of one that was fenced it isn't known, until it follows: others may write since. Nor of another region's log (`shop@2`) that nobody has followed yet.

    Raises:
        ReplicaTooStale: it is older, or nobody knows.
    """
    if not home.config_file.exists():
        return  # a copied folder: nobody has said how old it may be
    text = home.config.replication.max_staleness
    if text is None or (parse_region_log_name(stream) is None and Roles(home).of(stream).role is Role.LEADS):
        return
    age_s, most_s = age_of_replica(home, stream), duration_s(text)
    if age_s is None or age_s > most_s:
        age = "of unknown age" if age_s is None else f"{age_s:.1f} s old"
        raise ReplicaTooStale(
            f"what this node has of stream {stream} is {age}; max_staleness is {text}", stream=stream, age_s=age_s
        )


def check_ages(home: Home, stream: str) -> None:
    """As `check_age` of all that a merged table is read from: the stream's own log, and those of the other regions, as they are here or are to be.

    Raises:
        ReplicaTooStale: of the first that is too old; its `stream` names the region (`shop@2`).
        UsageError: a log's folder has a name that is none.
    """
    config = home.config if home.config_file.exists() else None
    if config is None or config.replication.max_staleness is None:
        return
    regions = set(home.regions_on_disk(stream))
    if stream in config.streams and (own := config.streams[stream].region):
        # Of one that has never come nothing is shown, which is as old as can be.
        regions |= {region for region in config.replication.region_addresses if region != own}
    for log in (stream, *(region_log_name(stream, region) for region in sorted(regions))):
        check_age(home, log)


def _boot_ns() -> int:
    """A clock that all processes of this machine share, and that nobody sets."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME if hasattr(time, "CLOCK_BOOTTIME") else time.CLOCK_MONOTONIC)
