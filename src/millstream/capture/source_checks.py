"""The checks that `doctor` runs on the source: `server_checks` of its settings, `table_checks` of its tables.

Each finding says whether it stops the source or only one table, and which SQL to run. Only `drop_slot`
changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from millstream.capture.column_rules.binding import ColumnRules
from millstream.capture.config import CaptureConfig
from millstream.capture.connection import connect
from millstream.capture.server_checks import Finding, check_replication, check_server
from millstream.capture.slot import SlotState, check_slot, drop_slot_of, read_slot
from millstream.capture.table_checks import check_tables
from millstream.catalog import Catalog
from millstream.errors import MillstreamError, SourceError
from millstream.model.ids import SourceId
from millstream.model.positions import Lsn
from millstream.wal.reader import StreamReader

_SETTING: Final = "ALTER SYSTEM "


def check_source(config: CaptureConfig, rules: ColumnRules | None = None) -> list[Finding]:
    """Find everything at the source that would stop capture or a table, or deserves a warning; change nothing.

    Args:
        rules: the stream's, bound as its next start finds them; None: they aren't checked.
    """
    try:
        return _ask(config, rules)
    except MillstreamError as error:
        return [_of_error(error)]


def doctor_sql(config: CaptureConfig) -> str:
    """Return one script for a DBA that repairs everything that SQL can; empty if there is nothing to do.

    It may run in one transaction, except server settings, which come last as comments.

    Raises:
        MillstreamError: the source can't be queried, so the needed statements are unknown.
    """
    parts: list[str] = []
    settings: list[str] = []
    for finding in _ask(config):
        if finding.sql.startswith(_SETTING):
            needed = "optional" if finding.blocks == "nothing" else "needed"
            settings.append(sql_comment(f"{needed}, outside a transaction: {finding.message}\n{finding.sql}"))
        elif finding.sql and f"{finding.sql}\n" not in parts:
            parts += [sql_comment(finding.message), f"{finding.sql}\n"]
    return "".join([*parts, *settings])


def sql_comment(text: str) -> str:
    """Return the text as an SQL comment; names may contain line ends, so each line begins with `-- `."""
    return "".join(f"-- {line}\n" for line in text.splitlines())


def _ask(config: CaptureConfig, rules: ColumnRules | None = None) -> list[Finding]:
    with connect(config.dsn, purpose="doctor") as connection:
        return [
            *check_server(connection, config),
            *check_replication(config),
            *check_tables(connection, config, rules),
        ]


def look_at_slot(config: CaptureConfig) -> SlotState | None:
    """Return the state of the stream's slot at the source; None if it has none.

    Raises:
        SourceError: the source can't be asked.
    """
    with connect(config.dsn, purpose="alerts") as connection:
        return read_slot(connection, config.slot)


def reached_in_log(reader: StreamReader) -> dict[SourceId, Lsn]:
    """Return the positions of sources that the log's own group headers have reached."""
    found: dict[SourceId, Lsn] = {}
    for header in reader.newest_headers(reader.persisted_upto(), readable=True):
        for source, lsn in header.reached.items():
            found[source] = max(lsn, found.get(source, lsn))
    return found


def check_slot_of_log(
    config: CaptureConfig, catalog: Catalog, log: Callable[[], Mapping[SourceId, Lsn]]
) -> list[Finding]:
    """Find whether the next start would refuse the slot, because it is gone or no longer follows the log.

    Args:
        catalog: the home's, with the stream.
        log: returns the positions that the log's own group headers have reached.

    Raises:
        MillstreamError: the source can't be queried, or the log can't be read.
    """
    stream = catalog.stream(config.stream).id
    source = catalog.current_source(stream)
    if source is None or catalog.fact(f"capture/{stream}", "slot_dropped"):
        return []
    # Read the slot first: a running capture stores its position before it confirms it.
    slot = look_at_slot(config)
    if slot is not None and (
        slot.active_pid is not None or slot.synced or slot.invalidation or slot.wal_status == "lost"
    ):
        return []  # in use, or reported by `check_server`
    try:
        check_slot(
            slot,
            name=config.slot,
            database=source.database,
            reached=catalog.reached_in(source.id, log()),
        )
    except SourceError as error:
        return [_of_error(error)]
    return []


def drop_slot(config: CaptureConfig, catalog: Catalog | None = None) -> int | None:
    """Drop the stream's slot, so that the source can free its WAL.

    Args:
        catalog: catalog in which to record that this was on purpose. The next run then makes a new slot
            and copies every table again; without the record it stops with `slot_lost`. A stream that was never
            captured needs none: its first run does so.

    Returns:
        Bytes of WAL that the slot held; None if there was no such slot (a captured stream's record is made all the same).

    Raises:
        SourceError (`slot_active`): the slot is in use.
        SourceError: the source can't be reached, or refuses.
    """
    held = drop_slot_of(config.dsn, config.slot)
    if catalog is not None:
        stream = catalog.stream(config.stream).id
        if catalog.current_source(stream) is not None:
            catalog.put_fact(f"capture/{stream}", "slot_dropped", value=True)
    return held


def _of_error(error: MillstreamError) -> Finding:
    return Finding(error.code, error.message, "source", fix=error.hint)
