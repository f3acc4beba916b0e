"""The format of a home on disk, in its `home.json`: a home that a newer Millstream wrote is refused.

The file also has who made the home, its id, and whether its catalog is elsewhere. The formats of the catalog and of
the log are their own.
"""

from __future__ import annotations

import fcntl
import json
from typing import Any, Final
from uuid import uuid4

from millstream.errors import CatalogError, UsageError
from millstream.home.paths import HomePaths
from millstream.private_files import open_private, replace_file

FORMAT: Final = 1
"""The format of the home's folder; a later Millstream may write a higher one."""


def check_format(home: HomePaths) -> None:
    """Refuse a home that a newer Millstream wrote.

    Raises:
        UsageError (`home_too_new`): its format is above ours.
        CatalogError: the file with the format is damaged.
    """
    found = int(read_facts(home).get("format", FORMAT))
    if found > FORMAT:
        raise UsageError(
            f"{home.path} has format {found}; this Millstream reads up to {FORMAT}",
            code="home_too_new",
            found=found,
            known=FORMAT,
        )


def read_facts(home: HomePaths) -> dict[str, Any]:
    """Return the facts in `home.json`; empty without the file.

    They are `format`, `made_by`, `id`, and `catalog` if that isn't embedded.

    Raises:
        CatalogError: it is damaged.
        MillstreamError (`home_unreadable`): this user may not read it.
    """
    file = home.data / "home.json"
    try:
        facts: dict[str, Any] = json.loads(file.read_bytes())
        return facts | {"format": int(facts["format"])}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        from millstream.wal.files import error_of_os

        raise error_of_os(error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CatalogError(
            f"{file} can't be read: {error}", hint='Restore it; for this version it reads {"format": 1}.'
        ) from error


def write_facts(home: HomePaths, *, has_own_catalog: bool) -> None:
    """Give the home its format and its id, and note where its catalog is: once, by one of several processes."""
    from millstream import __version__

    catalog = {} if has_own_catalog else {"catalog": "postgresql"}
    fresh = {"format": FORMAT, "made_by": __version__, "id": str(uuid4())}
    if (facts := read_facts(home)) == fresh | facts | catalog:
        return
    with open(home.run_folder / "home.lock", "w", opener=open_private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (facts := read_facts(home)) != fresh | facts | catalog:
            replace_file(home.data / "home.json", json.dumps(fresh | facts | catalog).encode() + b"\n")
