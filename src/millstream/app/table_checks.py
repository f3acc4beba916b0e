"""Facts of tables that disagree with the configuration: values from before a rule, and appends that are refused."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from millstream.errors import ConfigError, IngestError, LogError
from millstream.home.config_mapping import write_rules
from millstream.home.rows_before_rules import kept_raw_values
from millstream.ingest.schema_on_write import check_rules
from millstream.model.ids import TableId

if TYPE_CHECKING:
    from collections.abc import Iterator

    from millstream.catalog import Catalog
    from millstream.home.home import Home
    from millstream.model.ids import StreamId


def with_checks(
    tables: list[dict[str, Any]], home: Home, catalog: Catalog, name: str, stream: StreamId, problems: list[str]
) -> list[dict[str, Any]]:
    """Return the tables with two more facts, each None if nothing is wrong.

    Returns:
        `raw_values`: what is left of values from before a rule.
        `refused`: the error of each append, as `code`, `message` and `hint`.
    """
    kept: dict[TableId, dict[str, Any]] = {}
    refused: dict[TableId, IngestError] = {}
    with contextlib.suppress(ConfigError):  # reported already
        refused = dict(refused_tables(home, catalog, name, stream))
        try:
            kept = kept_raw_values(home, catalog, name, stream, time.time())
        except (LogError, OSError) as error:
            problems.append(f"log of {name}: {error}")
    return [
        table | {"raw_values": kept.get(id_), "refused": _facts(refused.get(id_))}
        for table in tables
        for id_ in (TableId(table["id"]),)
    ]


def refused_tables(home: Home, catalog: Catalog, name: str, stream: StreamId) -> Iterator[tuple[TableId, IngestError]]:
    """Yield the tables whose appends the configuration's keys or merges refuse, each with the error."""
    config = home.config.streams.get(name)
    if config is None:
        return
    rules = write_rules(config)
    for id_, named in catalog.newest_names(stream).items():
        if named.written is not None and named.written.columns:
            try:
                check_rules(named.written, rules(named.namespace, named.name))
            except IngestError as error:
                yield id_, error


def _facts(error: IngestError | None) -> dict[str, Any] | None:
    return None if error is None else {"code": error.code, "message": error.message, "hint": error.hint}
