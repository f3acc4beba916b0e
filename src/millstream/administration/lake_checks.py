"""The checks of `doctor` on a stream's lake: it can be written, its catalog answers, and its tables are the stream's.

A check returns what it found, or raises the error that a run would meet. It makes nothing that stays, and opens no catalog
of another schema than today's: that would change it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import UUID

from millstream.errors import MillstreamError
from millstream.home.home import Home
from millstream.model.addresses import mask_address
from millstream.model.ids import StreamId
from millstream.private_files import make_folder

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.config.model import StreamConfig
    from millstream.model.schema import TableSchema

BEFORE_THE_FIRST_RUN: Final = StreamId(UUID(int=0))
"""In place of a stream's id: nothing has it."""
LATER: Final = "looked at once there is a catalog of today's schema"


def check_lake(home: Home, name: str, stream: StreamConfig) -> str:
    """Check that a stream's lake can be written: a folder, an object store or a database."""
    if stream.lake.format == "postgres":
        return _destination(home, name, stream)
    location = home.lake_location(stream)
    if "://" in location:
        return _object_store(home, name, stream)
    folder = Path(location)
    make_folder(folder)
    if os.path.lexists(folder / name):  # from an earlier run, perhaps of another user
        folder /= name
    try:
        with tempfile.TemporaryFile(dir=folder):
            return f"{folder} can be written"
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error


def probe_lake_catalog(home: Home, name: str, stream: StreamConfig) -> str:
    """Check that an Iceberg lake's catalog answers."""
    from millstream.home.config_mapping import lake_layout
    from millstream.lake.table_format import format_of

    layout = lake_layout(home, name, stream, BEFORE_THE_FIRST_RUN)  # nothing of the stream's is touched
    return format_of(layout).probe_catalog(layout) or "the format has none"


def _object_store(home: Home, name: str, stream: StreamConfig) -> str:
    from millstream.home.config_mapping import lake_layout
    from millstream.lake.data_files import probe_storage

    layout = lake_layout(home, name, stream, BEFORE_THE_FIRST_RUN)  # nothing of the stream's is touched
    probe_storage(layout)
    place = "the place that the catalog names" if stream.lake.lies_in_catalog else mask_address(layout.location)
    return f"{place}: an object could be written, read and deleted"


def check_lake_owner(home: Home, name: str, stream: StreamConfig) -> str:
    """Check that the lake's tables are the stream's; those of a lake before the stream's first run are another's."""
    from millstream.home.config_mapping import lake_layout
    from millstream.lake.table_format import open_table

    stream_id = _stream_id(home, name)
    if stream_id is None and home.config.replication.node is not None:
        return "looked at once this node has the stream's log"
    if stream_id is None and has_todays_catalog(home) is False:
        return LATER
    layout = lake_layout(home, name, stream, stream_id or BEFORE_THE_FIRST_RUN)
    opened = open_table(layout, layout.commits_path, layout.commits_app_id)
    return "there are none yet" if opened is None else "they are this stream's"


def _stream_id(home: Home, name: str) -> StreamId | None:
    """Return a stream's id, from its log or the catalog; None before its first run."""
    from millstream.wal.reader import StreamReader

    with contextlib.suppress(MillstreamError):
        return StreamReader(str(home.wal_folder(name))).stream_id
    if has_todays_catalog(home):
        with home.open_catalog() as catalog:
            return id_in(catalog, name)
    return None


def id_in(catalog: Catalog, name: str) -> StreamId | None:
    """Return a stream's id; None before its first run."""
    return next((row.id for row in catalog.streams() if row.name == name), None)


def has_todays_catalog(home: Home) -> bool | None:
    """Whether the catalog has today's schema, so that opening it changes nothing; None if there is no catalog yet."""
    from millstream.catalog import examine_catalog

    found = examine_catalog(home.catalog_place())
    return None if found.revision is None else found.revision == found.known


def _destination(home: Home, name: str, stream: StreamConfig) -> str:
    from millstream.home.config_mapping import postgres_target
    from millstream.lake.postgres.land import look

    sources: set[tuple[int, str]] = set()
    stream_id = BEFORE_THE_FIRST_RUN
    schemas: list[TableSchema] = []
    if has_todays_catalog(home):
        with home.open_catalog() as catalog:
            stream_id = id_in(catalog, name) or BEFORE_THE_FIRST_RUN
            sources = {(source.system_identifier, source.database) for source in catalog.sources(stream_id)}
            schemas = list(catalog.latest_schemas(stream_id).values())
    return look(postgres_target(name, stream, stream_id), sources, schemas)
