"""Errors of the catalog. A lake's catalog shares a code with it: across a process border that is this class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from millstream.errors._root import Code, MillstreamError, Retry


class CatalogError(MillstreamError):
    """The catalog can't be read or written."""

    code = "catalog"
    retry = Retry.OPERATOR
    codes: ClassVar[Mapping[str, Code]] = {
        "catalog_too_new": Code(
            "The catalog's schema is newer than this Millstream.",
            Retry.OPERATOR,
            "Upgrade this Millstream.",
        ),
        "catalog_older": Code(
            "The catalog is older than the log, or belongs to another home: the log has tables or sources that "
            "the catalog lacks, or describes differently.",
            Retry.OPERATOR,
            "Restore a catalog as new as the log, or the log that belongs to this catalog (`data/wal`); to give "
            "up the log, move its folder away and start a new stream.",
        ),
        "catalog_unreachable": Code(
            "The catalog's server doesn't answer, is starting or stopping, has no free connection, or is a standby.",
            Retry.BACKOFF,
            "Check host, port and that the catalog's server runs.",
        ),
        "catalog_replaced": Code(
            "The catalog's file, or its `-wal` or `-shm`, was removed or replaced while it was open, or the home was moved; "
            "details: `file`.",
            Retry.OPERATOR,
            "Stop every process of this home, restore its catalog from the newest copy, and start them again.",
        ),
        "catalog_busy": Code("The catalog stayed locked past the busy timeout.", Retry.BACKOFF),
    }
