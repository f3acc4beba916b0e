"""Readers of a home's logs, as its calls and its servers open them: only of data that is new enough to show."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from millstream.errors import UnknownStream, UsageError
from millstream.errors.missing_extras import missing_extra
from millstream.model.ids import parse_region_log_name
from millstream.model.names import parse_qualified_name

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.model.ids import TableId
    from millstream.model.schema import TableSchema
    from millstream.wal.frame_index import OnDamage
    from millstream.wal.reader import StreamReader


def open_reader(
    home: Home,
    stream: str,
    *,
    without_mark: bool = False,
    on_damage: OnDamage | None = None,
    of_any_age: bool = False,
    definitions: bool = False,
) -> StreamReader:
    """Return a reader of a stream's log.

    Args:
        of_any_age: read the log even if it is older than this node may show: for tools that inspect the
            log itself.

    Raises:
        UnknownStream: the home has none of that name.
        ReplicationError (`replica_too_stale`): as `check_age_of_copy`.
        LogError: as `StreamReader`.
    """
    from millstream.wal.reader import StreamReader

    name = home.pick_stream(stream)
    if not of_any_age:
        check_age_of_copy(home, name)
    folder = str(home.wal_folder(name))
    return StreamReader(folder, without_mark=without_mark, on_damage=on_damage, definitions=definitions)


def tables_named(home: Home, stream: str, table: str) -> list[TableId]:
    """Return the ids of the tables of a name that the home's catalog has for a stream; none without a catalog."""
    wanted = parse_qualified_name(table)
    if not home.has_catalog():
        return []
    with home.open_catalog() as catalog, contextlib.suppress(UnknownStream):
        rows = catalog.tables(catalog.stream(home.pick_stream(stream)).id, gone=True)
        return [row.id for row in rows if (row.namespace, row.name) == wanted]
    return []


def schemas_named(home: Home, stream: str, table: str) -> list[TableSchema]:
    """Return the newest schemas that the home's catalog has of tables of a name; none without a catalog."""
    found = {*tables_named(home, stream, table)}
    if not found:
        return []
    with home.open_catalog() as catalog:
        newest = catalog.latest_schemas(catalog.stream(home.pick_stream(stream)).id)
    return [schema for table_id, schema in newest.items() if table_id in found]


def check_age_of_copy(home: Home, stream: str) -> None:
    """Raise `ReplicationError` (`replica_too_stale`) if this follower's data is older than `[replication] max_staleness`."""
    # This home can't lead another region's log, whether it was followed yet or not.
    if home.role_file(stream).exists() or (parse_region_log_name(stream) and home.config_file.exists()):
        from millstream.nodes.staleness import check_age

        try:
            check_age(home, stream)
        except ModuleNotFoundError as error:
            raise needs_run(error, "to tell whether a follower is new enough") from error


def needs_run(error: ModuleNotFoundError, what: str = "appending") -> UsageError:
    """Return the error for a module that only `millstream[run]` brings."""
    return missing_extra(f"{what} needs {error.name}", "run")
