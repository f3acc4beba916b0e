"""The facts of a stream that the home's catalog lacks: those of its log, as on a node that has only followed.

The leader's catalog has the stream's writers, its source and the states of its tables; a follower takes it over when it is
promoted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.app.lag import capture_lag, lake_lag
from millstream.catalog.lake_state import WORKS
from millstream.model.schema import TableKind

if TYPE_CHECKING:
    from millstream.model.schema import TableSchema
    from millstream.wal.reader import StreamReader


def facts_of_log(reader: StreamReader) -> dict[str, Any]:
    """Return the facts of a stream's log in the form of a stream's status; what only a catalog has is None or empty.

    Raises:
        LogError: the log is empty, or damaged.
        OSError: it can't be read.
    """
    schemas = sorted(reader.schemas().values(), key=lambda schema: schema.full_name)
    nothing = (
        "number",
        "reached",
        "database",
        "timeline",
        "mode",
        "received",
        "end",
        "slot_holds_bytes",
        "spilled_bytes",
    )
    return {
        "id": str(reader.stream_id),
        "state": "stopped",
        "writer": None,
        "writers": [],
        "source": {**dict.fromkeys(nothing), "slot_dropped": False, "left": []},
        "buffer": None,
        "tokens": {"durable": str(reader.token()), "landed": None},
        "lag": {
            "capture": capture_lag({}),
            "lake": lake_lag(None),
            "fold": {"records": None, "seconds": None},
        },
        "replay": None,
        "pipeline": {"log_access": None, "waits_for": None},
        "lake": {"state": WORKS},
        "ring": [],
        "sinks": {},
        "log": {"held": {}, "cut_off": {}, "oldest": None, "retention": None},
        "tables": [_table(schema) for schema in schemas if schema.kind is TableKind.TABLE],
    }


def _table(schema: TableSchema) -> dict[str, Any]:
    figures = ("fold_lag_s", "fold_lag_records", "landed_rows", "rows_per_s", "live_bytes", "disk_bytes", "disk_factor")
    return {
        "name": schema.full_name,
        "id": int(schema.table_id),
        "state": "follows",
        "reason": "",
        "hint": "",
        "captured": schema.source != 0,
        "shard": None,
        "copy": None,
        **dict.fromkeys(figures),
        "last_change": None,
        "last_figures": None,
        "paths": {},
        "raw_values": None,
        "refused": None,
    }
