"""Tables with older records from before a rule for a column (exclude, hash, redact), and how long their values stay.

After `tables copy --forget` only the log has older records. The log's segments go by retention, and so do days of the lake's history if `history_retention` is set.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from millstream.model.names import qualified_name

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.config.model import StreamConfig
    from millstream.home.home import Home
    from millstream.model.ids import ShardId, StreamId, TableId


def kept_raw_values(
    home: Home, catalog: Catalog, name: str, stream: StreamId, now_s: float
) -> dict[TableId, dict[str, Any]]:
    """Return the tables whose older values may still be on disk, by id.

    Returns:
        The name of the `table`, its `columns` with a rule that older records don't have, or none if all older records are meant; `since`, when the rule began to hold; whether the `log`
        has such records, and about when it drops them: `log_until`; whether the `history` in the lake has them, and
        `history_until`, which is None without `history_retention`. Moments are in ISO 8601, in UTC.

    Raises:
        LogError: the log is damaged.
        OSError: it can't be read.
    """
    from millstream.capture.column_rules.rows_before_rules import raw_values_scope

    facts = catalog.facts(raw_values_scope(stream))
    config = home.config.streams.get(name)
    if not facts or config is None:
        return {}
    found: dict[TableId, dict[str, Any]] = {}
    for row in catalog.tables(stream):
        if (fact := facts.get(str(row.id))) is None:
            continue
        since_s = fact["since_us"] / 1e6
        in_log = _is_in_log(home, name, row.shard, since_s)
        until_s = _history_until_s(config, since_s)
        in_history = not fact.get("is_in_log_alone") and _has_history(config) and (until_s is None or until_s > now_s)
        if in_log or in_history:
            found[row.id] = {
                "table": qualified_name(row.namespace, row.name),
                "columns": fact["columns"],
                "since": _iso(since_s),
                "log": in_log,
                "log_until": _iso(since_s + config.log.retention_age_s) if in_log else None,
                "history": in_history,
                "history_until": _iso(until_s) if in_history and until_s is not None else None,
            }
    return found


def until_words(raw: dict[str, Any]) -> str:
    """Return in words where older values are, and until when."""
    where = [f"the log until retention drops it (about {raw['log_until']})"] if raw["log"] else []
    if raw["history"]:
        until = raw["history_until"]
        where.append(f"the lake's history {f'until {until}' if until else 'for ever (history_retention is unset)'}")
    what = f"{', '.join(raw['columns'])}: older values" if raw["columns"] else "older records"
    return f"{what} are in {' and in '.join(where)}"


def _is_in_log(home: Home, name: str, shard: ShardId, since_s: float) -> bool:
    from millstream.wal.segment_deletion import oldest_created_ns

    created_ns = oldest_created_ns(str(home.wal_folder(name)), shard)
    return created_ns is not None and created_ns / 1e9 <= since_s


def _has_history(config: StreamConfig) -> bool:
    return bool({"history", "scd2", "changes"}.intersection(config.lake.shown))


def _history_until_s(config: StreamConfig, since_s: float) -> float | None:
    kept_s = config.lake.history_retention_s
    return None if kept_s is None else since_s + kept_s


def _iso(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).isoformat(timespec="seconds")
