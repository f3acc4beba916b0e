"""A stream's routing at run time: from the configuration to rules, the ring in force, and `reshard`.

The catalog holds the number of shards that the ring spreads rows over, never the configuration alone:
`reshard` changes it, at a cut. The ring's other settings (its columns, its virtual nodes) take effect
when the log is opened, which is a cut as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import structlog

from millstream import failpoints
from millstream.catalog.hash_ring_history import RingEra, RingEras
from millstream.errors import ConfigError, MillstreamError, RoutingError
from millstream.home.config_mapping import shard_of, shards_by_table
from millstream.model.ids import ShardId, StreamId
from millstream.model.names import parse_qualified_name
from millstream.model.positions import Seq, StreamToken
from millstream.process_metrics import SINK_ROWS
from millstream.routing.partitions import PartitionTemplate
from millstream.routing.router import Router
from millstream.routing.rules import (
    HashRing,
    Matcher,
    RoutingConfig,
    RoutingRules,
    RuleTarget,
    ShardConfig,
    SpecificTarget,
)
from millstream.routing.shard_map import ShardMap

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.catalog import Catalog
    from millstream.config.model import StreamConfig
    from millstream.config.routing_model import RoutingSection
    from millstream.model.operations import TableRows
    from millstream.model.schema import TableSchema
    from millstream.wal.writing.writer import LogWriter

logger = structlog.get_logger("millstream.routing")

SHARDS_MAX: Final = 1024
_ASK_AGAIN_S: Final = 0.2
_UNDECIDED_MAX_S: Final = 30.0
"""How long appends wait for a catalog that can't confirm whether a new ring is recorded."""


def plain_name(table: str) -> str:
    """Return a table's name as rules know it: `schema.table` without quotes. `UsageError` if the text is no name."""
    namespace, name = parse_qualified_name(table)
    return f"{namespace}.{name}"


def rules_of(config: StreamConfig, first: ShardId = ShardId(0)) -> RoutingRules | None:
    """Return a stream's rules; `UsageError` if one can't be parsed. Shards are counted from the writer's first."""
    routing = config.routing
    if routing is None:
        return None
    if routing.to is not None:
        return RoutingConfig(_target((routing.to,) if isinstance(routing.to, str) else tuple(routing.to), first))
    specific = tuple(
        SpecificTarget(Matcher.parse(rule.table, rule.where), _target(rule.targets, first)) for rule in routing.rules
    )
    shards = tuple(ShardId(first + n) for n in range(config.log.shards))
    return ShardConfig(specific, ring_of(routing), shards, frozenset(routing.ignore_errors))


def _target(words: tuple[str, ...], first: ShardId) -> RuleTarget:
    target = RuleTarget.parse(*words)
    return target if target.shard is None else replace(target, shard=ShardId(first + target.shard))


def ring_of(routing: RoutingSection | None) -> HashRing | None:
    """Return the configured hash ring, if there is one."""
    found = None if routing is None else routing.hash_ring
    if found is None:
        return None
    columns_of = {plain_name(table): tuple(columns) for table, columns in found.columns_of.items()}
    return HashRing(tuple(found.columns), columns_of, found.virtual_nodes)


def router_of(
    config: StreamConfig, first: ShardId, era: RingEra | None, count: Callable[[str, int], None] | None = None
) -> Router:
    """Return the router of a stream under the ring of an era, over that ring's columns; `count` as for `Router`."""
    ring = None if era is None else ring_router(era)
    rules = rules_of(config, first)
    if era is not None and isinstance(rules, ShardConfig):
        rules = replace(rules, hash_ring=HashRing(era.columns, era.columns_of, era.virtual_nodes))
    return Router(
        rules,
        shard_of_table=_OwnShards(config, first),
        partitions={plain_name(table): PartitionTemplate.parse(text) for table, text in config.partitions.items()},
        ring=ring,
        era=0 if era is None else era.number,
        count=count,
    )


def ring_router(era: RingEra) -> ShardMap:
    """Return the ring of an era."""
    return ShardMap.ring([ShardId(n) for n in range(era.shards)], virtual_nodes=era.virtual_nodes)


def wanted_era(config: StreamConfig, newest: RingEra | None) -> RingEra | None:
    """Return the era that a stream's writer starts with.

    It is the newest, one with the ring that is configured now, or none without a ring.
    """
    ring = ring_of(config.routing)
    if ring is None:
        return None
    wanted = RingEra(
        number=1 if newest is None else newest.number + 1,
        shards=config.log.shards if newest is None else newest.shards,
        virtual_nodes=ring.virtual_nodes,
        columns=ring.columns,
        columns_of=dict(ring.columns_of),
        cut=Seq(0),
    )
    return newest if newest is not None and newest.has_ring_of(wanted) else wanted


def shards_to_open(catalog: Catalog, stream: StreamId, config: StreamConfig) -> list[ShardId]:
    """Return the shards that a stream's only writer needs: the configured ones, and those of the ring in force."""
    newest = None if ring_of(config.routing) is None else RingEras(catalog, stream).newest()
    return [ShardId(n) for n in range(max(config.log.shards, 0 if newest is None else newest.shards))]


class StreamRouting:
    """The routing of a stream that this process writes.

    Concurrency: any number of threads place rows; `reshard` takes turns with itself by its callers.
    """

    def __init__(
        self,
        catalog: Catalog,
        stream: StreamId,
        name: str,
        config: StreamConfig,
        log: LogWriter,
        *,
        first_shard: ShardId,
        is_shared: bool,
    ) -> None:
        """Take over the configured routing.

        Raises:
            ConfigError: the stream is one of several writers' and has a hash ring; or a captured table is
                to be hashed or partitioned.
        """
        self._eras = RingEras(catalog, stream)
        self._stream, self._name, self._config, self._log = stream, name, config, log
        self._is_shared = is_shared
        self._changing = threading.Lock()
        """Held while the ring is changed: commands come in threads of their own."""
        _refuse_captured(catalog, stream, name, config)
        era = None
        if ring_of(config.routing) is not None:
            if is_shared:
                raise ConfigError(
                    f"stream {name} has several writers, each with shards of its own: a hash ring ([streams.{name}.routing]) can't keep rows of one "
                    "key on one shard there",
                    hint='Add rules for the tables (`to = "shard:0"`), or write with one writer.',
                )
            newest = self._eras.newest()
            era = wanted_era(config, newest)
            assert era is not None
            if era is not newest:
                era = self._eras.begin(replace(era, cut=log.persisted_upto()))
                logger.info(
                    "a hash ring is in force", stream=name, shards=era.shards, behind=int(era.cut), era=era.number
                )
        self._era = era
        label = str(stream)
        self.router = router_of(config, first_shard, era, lambda sink, rows: SINK_ROWS.of(label, sink).add(rows))

    def place(self, schema: TableSchema, rows: pa.RecordBatch) -> tuple[TableRows, ...]:
        """Place rows as `Router.place`, by the ring in force."""
        return self.router.place(schema, rows)

    def check(self, schema: TableSchema, rows: pa.RecordBatch) -> tuple[TableRows, ...]:
        """Place rows as `Router.check`, by the ring in force."""
        return self.router.check(schema, rows)

    def reshard(self, shards: int) -> dict[str, Any]:
        """Spread rows over another number of shards from a cut on; see `LogWriter.reshard`.

        Returns:
            JSON-able: `era`, `shards`, `before`, `token` (the cut), and whether anything `changed`.

        Raises:
            RoutingError (`reshard_refused`): the change isn't possible; nothing was changed.
            DiskFull, WriterClosed, AppendOutcomeUnknown, CatalogError …: it wasn't done. After the last
                two the writer may have failed: then the catalog decides which ring is in force when it is
                opened again.
        """
        with self._changing:
            return self._reshard(shards)

    def _reshard(self, shards: int) -> dict[str, Any]:
        era = check_reshard(self._name, self._config, self._era, shards, is_shared=self._is_shared)
        if era is self._era:
            return self._facts(era, before=era.shards, changed=False)
        before = self._era
        assert before is not None
        router = self.router.with_ring(ring_router(era), era=era.number)

        def record(cut: Seq) -> None:
            failpoints.hit("routing.shards_made")
            begun = self._recorded(replace(era, cut=cut))
            failpoints.hit("routing.recorded")
            self._era, self.router = begun, router
            done.append(begun)

        done: list[RingEra] = []
        self._log.reshard(
            [ShardId(n) for n in range(shards)], era=era.number, place_anew=router.place_anew, record=record
        )
        failpoints.hit("routing.in_force")
        logger.info(
            "rows have other shards now", stream=self._name, shards=shards, before=before.shards, era=era.number
        )
        return self._facts(done[0], before=before.shards, changed=True)

    def _recorded(self, era: RingEra) -> RingEra:
        """Record an era.

        If an error leaves it open whether it is recorded, ask the catalog, and write nothing until it
        answers.
        """
        try:
            return self._eras.begin(era)
        except MillstreamError as error:
            deadline = time.monotonic() + _UNDECIDED_MAX_S
            while True:
                try:
                    newest = self._eras.newest()
                except MillstreamError:
                    if time.monotonic() > deadline:
                        self._log.give_up(error)
                        raise
                    time.sleep(_ASK_AGAIN_S)
                else:
                    if newest is not None and newest.number == era.number:
                        return newest
                    raise

    def _facts(self, era: RingEra, *, before: int, changed: bool) -> dict[str, Any]:
        token = StreamToken.scalar(self._stream, era.cut)
        return {
            "stream": self._name,
            "era": era.number,
            "shards": era.shards,
            "before": before,
            "token": str(token),
            "changed": changed,
        }


def _refuse_captured(catalog: Catalog, stream: StreamId, name: str, config: StreamConfig) -> None:
    """Raise `ConfigError` if the configuration names a captured table that it can't route."""
    if config.source is None:
        return
    ring = None if config.routing is None else config.routing.hash_ring
    named = {plain_name(table): f"routing.hash_ring.columns_of: {table}" for table in (ring.columns_of if ring else ())}
    named |= {plain_name(table): f"partitions: {table}" for table in config.partitions}
    for table in catalog.tables(stream) if named else ():
        key = named.get(f"{table.namespace}.{table.name}")
        if table.is_captured and key is not None:
            raise ConfigError(
                f"[streams.{name}] {key} is captured: a captured table lies whole on one shard",
                hint=f"Remove it; [streams.{name}.shards] sets the table's shard.",
                table=f"{table.namespace}.{table.name}",
            )


def check_reshard(name: str, config: StreamConfig, era: RingEra | None, shards: int, *, is_shared: bool) -> RingEra:
    """Return the era that would begin, or the current one if it has as many shards; raises `reshard_refused`."""

    def refused(what: str, hint: str) -> RoutingError:
        return RoutingError(
            f"stream {name} can't be spread over {shards} shards: {what}",
            code="reshard_refused",
            hint=hint,
            stream=name,
        )

    if is_shared:
        raise refused(
            "it has several writers, each with shards of its own",
            "Give each table to one of them; a hash ring needs one writer.",
        )
    if era is None:
        raise refused(
            "nothing spreads its rows, each table lies on a shard",
            f"Configure [streams.{name}.routing.hash_ring] first; `log.shards` says how many shards it begins with.",
        )
    if config.buffer is not None and config.buffer.role == "writes":
        raise refused(
            "what applications append goes into its write buffer, where shards have no order among each other",
            "Reshard the stream that reads from the buffer.",
        )
    if not 1 <= shards <= SHARDS_MAX:
        raise refused(f"a stream has 1 to {SHARDS_MAX}", "Take another number.")
    if shards == era.shards:
        return era
    for what, shard in named_shards(config):
        if shards <= shard < era.shards:
            raise refused(
                f"{what} is on shard {shard}, which wouldn't be among them",
                "Take it elsewhere first, or take more shards.",
            )
    return replace(era, number=era.number + 1, shards=shards)


def named_shards(config: StreamConfig) -> list[tuple[str, int]]:
    """Return the configuration's settings that name a shard by number, in words, each with that number."""
    found = [(f"table {table} ([streams.S.shards])", shard) for table, shard in config.shards.items()]
    rules = rules_of(config)
    targets: Mapping[str, RuleTarget] = {}
    if isinstance(rules, RoutingConfig):
        targets = {"all of it ([streams.S.routing] to)": rules.to}
    elif rules is not None:
        targets = {f"rule {n} ({rule.matcher})": rule.to for n, rule in enumerate(rules.specific_targets, 1)}
    return found + [(what, int(target.shard)) for what, target in targets.items() if target.shard is not None]


class _OwnShards:
    """The shard that the configuration assigns to a table by name; one for all tables if no routing is configured."""

    def __init__(self, config: StreamConfig, first: ShardId) -> None:
        self._shard: Callable[[str], ShardId] = shard_of(config, first)
        self._named = None if config.routing is None else frozenset(shards_by_table(config))

    def __call__(self, table: str) -> ShardId | None:
        return self._shard(table) if self._named is None or table in self._named else None
