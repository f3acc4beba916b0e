"""The rule that takes a row, and where the row goes: an explanation for people, without a writing process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from millstream.catalog.hash_ring_history import RingEras
from millstream.errors import UnknownTable, UsageError
from millstream.home.config_mapping import shard_of, write_rules
from millstream.home.home import Home
from millstream.ingest.fit_to_schema import fitted
from millstream.ingest.python_rows import table_of
from millstream.ingest.schema_on_write import grown
from millstream.leadership.known_leaders import leader_facts, leaders_of
from millstream.model.as_of_parsing import parse_as_of, parse_moment
from millstream.model.ids import SchemaVersion, ShardId, SourceId, TableId
from millstream.model.names import parse_qualified_name, qualified_name
from millstream.model.operations import FIRST_SHARD, append_rows
from millstream.model.schema import Column, TableSchema
from millstream.routing.rules import DEVNULL, ShardConfig
from millstream.routing.shard_map import ShardMap
from millstream.writers.stream_routing import plain_name, ring_router, router_of, wanted_era

if TYPE_CHECKING:
    from millstream.catalog.hash_ring_history import RingEra
    from millstream.config.model import StreamConfig
    from millstream.model.ids import StreamId

_NO_MOMENTS: Final[Mapping[str, datetime]] = MappingProxyType({})


def explain_route(
    home: Home,
    stream: str | None,
    table: str,
    row: Mapping[str, Any] | None,
    *,
    moments: Mapping[str, datetime] = _NO_MOMENTS,
    as_of: str | None = None,
) -> dict[str, Any]:
    """Return what takes a row of a table, and where it goes.

    Args:
        row: as applications append it; None: everything that may take one is listed.
        moments: columns of the row that are moments, with a time zone, which JSON can't express.
        as_of: a token or a moment as `parse_as_of` reads it: uses the hash ring of that time, and today's
            rules.

    Returns:
        JSON-able: `stream`, `table`, `captured`.
        `tried`: what takes the row or may, each with its `rule` (from 1; None after the rules), `why`,
            `where` and `to`.
        The ring's `era` and `shards`, None if there is none; `leader`: the node that it is written at, as
        `leader_facts` returns it, None if the home is no node.
        For a row its `shard` (None: not in the log), `partition` and `sinks`.

    Raises:
        UnknownStream, UsageError: there is no such stream, or the text is no table's name; no ring was in
            force then.
        PositionError (`invalid_time`, `invalid_token`): `as_of` is neither a token of the stream nor a moment.
        RoutingError (`no_route_matches`, `invalid_route`): as an append of the row would.
        InvalidValue, UnknownTable, IngestError (`unknown_column`) …: likewise.
    """
    name, config = home.stream_config(stream)
    namespace, own = parse_qualified_name(table)
    known, era = _known(home, name, namespace, own, as_of)
    if as_of is None:
        era = wanted_era(config, era)
    places = (ShardMap.single(FIRST_SHARD) if era is None else ring_router(era)).led_by(leaders_of(home, name))
    facts: dict[str, Any] = {
        "stream": name,
        "table": qualified_name(namespace, own),
        "captured": known is not None and known.source != 0,
        "era": None if era is None else era.number,
        "shards": None if era is None else era.shards,
        "leader": leader_facts(home, places.leaders),
    }
    if facts["captured"]:
        shard = int(shard_of(config, FIRST_SHARD)(plain_name(table)))
        told = {
            "rule": None,
            "why": "it is captured, and lies whole on its shard",
            "where": None,
            "to": f"shard:{shard}",
        }
        return facts | {"tried": [told], "shard": shard, "partition": None, "sinks": []}
    empty = TableSchema(TableId(0), SchemaVersion(0), SourceId(0), namespace, own, ())
    router = router_of(config, ShardId(0), era)
    if row is None:
        schema = known or _imagined(empty, config, router.rules)
        return facts | {"tried": _told(router.explain(schema))}
    rows = table_of({**row, **_typed(moments, known)})
    schema = grown(known or empty, rows.schema, write_rules(config)(namespace, own))
    batch = append_rows(schema, fitted(schema, rows), [rows.num_rows])
    tried = _told(router.explain(schema, batch))
    placed = router.place(schema, batch)
    local = next((entry for entry in placed if entry.sink is None), None)
    sinks = [entry.sink for entry in placed if entry.sink is not None]
    return facts | {
        "tried": tried,
        "shard": None if local is None else int(local.shard),
        "partition": None if local is None else local.partition,
        "sinks": sinks or ([DEVNULL] if local is None else []),
    }


def _typed(moments: Mapping[str, datetime], known: TableSchema | None) -> dict[str, datetime | date]:
    """Return moments as a table's columns store them: some are dates, some have no time zone."""
    types = {} if known is None else {column.name: column.arrow for column in known.columns}
    typed: dict[str, datetime | date] = {}
    for column, moment in moments.items():
        arrow = types.get(column)
        if arrow is not None and pa.types.is_date(arrow):
            typed[column] = moment.date()
        elif arrow is not None and pa.types.is_timestamp(arrow) and arrow.tz is None:
            typed[column] = moment.replace(tzinfo=None)
        else:
            typed[column] = moment
    return typed


def _era_of(eras: Sequence[RingEra], stream: StreamId | None, as_of: str) -> RingEra:
    """Return the era in force at a token's position, or at a moment."""
    when = (
        parse_moment(as_of, now=datetime.now(UTC))
        if stream is None
        else parse_as_of(as_of, stream, now=datetime.now(UTC))
    )
    if isinstance(when, datetime):
        found = [era for era in eras if era.since_us <= when.timestamp() * 1_000_000]
    else:
        found = [era for era in eras if era.cut < when.linear()]
    if not found:
        raise UsageError(
            f"no hash ring was in force at {as_of}",
            hint="Run `millstream status --json`: `ring` lists all of them." if eras else "The stream never had one.",
        )
    return found[-1]


def _known(
    home: Home, stream: str, namespace: str, name: str, as_of: str | None
) -> tuple[TableSchema | None, RingEra | None]:
    """Return a table's newest schema and the stream's ring, now or then, from the catalog."""
    if not home.has_catalog():
        return None, None if as_of is None else _era_of((), None, as_of)
    with home.open_catalog() as catalog:
        found = next((row.id for row in catalog.streams() if row.name == stream), None)
        if found is None:
            return None, None if as_of is None else _era_of((), None, as_of)
        eras = RingEras(catalog, found)
        era = eras.newest() if as_of is None else _era_of(eras.all(), found, as_of)
        try:
            table = catalog.find_table(found, namespace, name)
        except UnknownTable:
            return None, era
        return catalog.latest_schemas(found).get(table.id), era


def _imagined(empty: TableSchema, config: StreamConfig, rules: object) -> TableSchema:
    """Return a schema for a table that doesn't exist yet, with the columns that the configuration names."""
    key = write_rules(config)(empty.namespace, empty.name).key
    ring = rules.hash_ring if isinstance(rules, ShardConfig) else None
    columns = key if ring is None else ring.columns_for(f"{empty.namespace}.{empty.name}", key)
    named = dict.fromkeys((*key, *columns))
    return replace(empty, columns=tuple(Column(name, pa.null()) for name in named), key=key, identity=key)


def _told(chosen: list[Any]) -> list[dict[str, Any]]:
    return [{"rule": one.number, "why": one.why, "where": one.where, "to": str(one.target)} for one in chosen]
