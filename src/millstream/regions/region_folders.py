"""The logs of a stream's regions at a home."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.errors import ReplicationError
from millstream.model.ids import RegionId
from millstream.wal.reader import StreamReader

if TYPE_CHECKING:
    from millstream.config.model import StreamConfig
    from millstream.home.home import Home
    from millstream.home.paths import HomePaths


def region_readers(home: Home, stream: str, config: StreamConfig | None) -> dict[RegionId, StreamReader]:
    """Return a home's logs of a stream's regions, its own first.

    Raises:
        ReplicationError (`other_region`): another region's log is named like the home's own region.
    """
    return {region: StreamReader(folder) for region, folder in region_logs(home, stream, config).items()}


def region_logs(home: HomePaths, stream: str, config: StreamConfig | None) -> dict[RegionId, str]:
    """Return the folders of a home's logs of a stream's regions, its own first. Raises as `region_readers`."""
    own = RegionId(0 if config is None else config.region)
    names = home.regions_on_disk(stream)
    if own in names:
        raise ReplicationError(
            f"data/wal/{names[own]} is named for region {own}, which is this home's own",
            code="other_region",
            hint=f"Set `region` in [streams.{stream}] to a number of this home's own, or move the folder away.",
        )
    return {region: str(home.wal_folder(name)) for region, name in ({own: stream} | names).items()}


def check_region(found: RegionId, expected: RegionId) -> None:
    """Raise `ReplicationError` (`other_region`) unless a log belongs to the region that its folder names."""
    if found != expected:
        raise ReplicationError(
            f"the log that stands for region {expected} is that of region {found}",
            code="other_region",
            found=int(found),
            expected=int(expected),
        )
