"""Mistakes in a stream's settings that are each valid, or that only other parts of the program detect: `clashes_of_…` yield paths and descriptions."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from millstream.config.alerts_model import clashes_of_alerts
from millstream.config.consumer_model import ConsumerConfig
from millstream.config.model import Config, LakeConfig, SourceConfig, StreamConfig
from millstream.config.replication_model import ReplicationConfig
from millstream.config.routing_model import RoutingSection
from millstream.config.rule_checks import Clash
from millstream.config.serving_model import HttpConfig
from millstream.config.toml_lines import KeyPath
from millstream.errors import DeliveryError, MillstreamError, UsageError
from millstream.libpq import describe_parameters, is_address, parse_address
from millstream.model.addresses import MASK, is_brokers, mask_address, split_url
from millstream.model.ids import check_stream_name, default_name
from millstream.model.names import TablePatterns, parse_column, parse_qualified_name
from millstream.model.replication import AckLevel, Reach

_NAME_BYTES_MAX: Final = 63
"""Bytes of a name in PostgreSQL."""


def clashes(config: Config, disk: int) -> Iterator[tuple[KeyPath, str]]:
    """Yield conflicts between valid settings, and mistakes that only other parts of the program can detect."""
    yield from _clashes_of_http(config.http)
    if config.flight.listen == config.http.listen and not config.http.listen.endswith(":0"):
        yield ("flight", "listen"), "is the address of [http] listen, too: name another port"
    yield from clashes_of_alerts(config.alerts)
    slots: dict[str, tuple[str, str]] = {}
    for name, stream in config.streams.items():
        at: KeyPath = ("streams", name)
        yield from refusals(at, check_stream_name, name)
        yield from _clashes_of_source(at, name, stream.source, slots)
        log = stream.log
        if log.retention_bytes_max_of(disk) < log.retention_bytes_of(disk):
            yield (
                (*at, "log", "retention_bytes_max"),
                f"{log.retention_bytes_max} is below retention_bytes, {log.retention_bytes}, on this disk of {disk} bytes",
            )
        if log.frame_version == 1 and (stream.region or log.shards > 1 or config.writer.name is not None):
            yield (
                (*at, "log", "frame_version"),
                "must be 2 for a stream with a region, several shards or several writers",
            )
        yield from _clashes_of_names(at, name, stream)
        yield from clashes_of_addresses(at, stream)
        yield from _clashes_of_buffer(at, name, stream, config.writer.name)
        yield from clashes_of_format(at, stream.lake, is_local=config.spark.is_local)
        yield from clashes_of_level(at, stream.acks, config.replication)
        yield from clashes_of_routing(at, name, stream)
        yield from clashes_of_consumers(at, stream.consumers)
        yield from clashes_of_regions(at, stream, config.writer.name)


def _clashes_of_names(at: KeyPath, name: str, stream: StreamConfig) -> Iterator[tuple[KeyPath, str]]:
    from millstream.model.pgtypes import parse_lake_override

    for table, shard in stream.shards.items():
        yield from refusals((*at, "shards", table), parse_qualified_name, table)
        if not 0 <= shard < stream.log.shards:
            yield (
                (*at, "shards", table),
                f"the stream has shards 0 to {stream.log.shards - 1} ([streams.{name}.log] shards)",
            )
    for column, kind in stream.types.items():
        yield from refusals((*at, "types", column), parse_lake_override, kind)
        try:
            parse_column(column)
        except UsageError:
            yield (*at, "types", column), "must name a column as schema.table.column"
    for table, key in stream.keys.items():
        yield from refusals((*at, "keys", table), parse_qualified_name, table)
        if not key or len(set(key)) < len(key):
            yield (*at, "keys", table), "must name one column or more, each once"


def _clashes_of_buffer(
    at: KeyPath, name: str, stream: StreamConfig, writer: str | None
) -> Iterator[tuple[KeyPath, str]]:
    """Yield those of the write buffer: a stream has its rows from one place."""
    buffer = stream.buffer
    if buffer is None:
        return
    if stream.source is not None:
        yield (
            (*at, "buffer", "role"),
            f"stream {name} captures a database, whose order its log keeps: it can't {'write to' if buffer.role == 'writes' else 'read from'} a buffer",
        )
    if stream.routing is not None and stream.routing.sinks:
        yield (
            (*at, "buffer", "role"),
            f"stream {name} has sinks and a write buffer; it can have only one of the two",
        )
    if buffer.role == "reads" and writer is not None:
        yield (
            (*at, "buffer", "role"),
            "a stream that reads from a buffer has one writer: with several, two would take the same operations",
        )


def _clashes_of_http(http: HttpConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield those of the protection of `[http]`."""
    for one, other in (
        ("tls_certificate", "tls_key"),
        ("tls_key", "tls_certificate"),
        ("client_ca", "tls_certificate"),
    ):
        if getattr(http, one) is not None and getattr(http, other) is None:
            yield ("http", one), f"is nothing without {other}"
    if http.clients and http.client_ca is None:
        yield ("http", "clients"), "no client shows a certificate without client_ca"


def _clashes_of_source(
    at: KeyPath, name: str, source: SourceConfig | None, slots: dict[str, tuple[str, str]]
) -> Iterator[tuple[KeyPath, str]]:
    """Yield those of a stream's source; `slots` has the DSN and the slot of each stream before it."""
    if source is None:
        return
    slot = source.slot or default_name(name)
    other = next((one for one, (dsn, used) in slots.items() if used == slot and _same_database(dsn, source.dsn)), None)
    slots.setdefault(name, (source.dsn, slot))
    if other is not None:
        yield (*at, "source", "slot"), f"stream {other} uses the slot {slot} of the same server: each needs its own"
    # PostgreSQL cuts a longer name without an error: both publications would be one.
    for key, named, of in (
        ("publication", source.publication or default_name(name), "_inserts"),
        ("slot", slot, ""),
    ):
        most = _NAME_BYTES_MAX - len(of)
        if len(named.encode()) > most:
            yield (
                (*at, "source", key),
                f"{named} is longer than the {most} bytes that PostgreSQL leaves it: set a shorter one",
            )
    try:
        TablePatterns.parse(source.tables)
    except MillstreamError as error:
        yield (*at, "source", "tables"), in_words(error)


def _same_database(one: str, other: str) -> bool:
    """Return whether two DSNs name one database, by whatever user and in whatever form."""
    if one == other:
        return True
    try:
        first, second = (describe_parameters(parse_address(dsn)) for dsn in (one, other))
    except (ValueError, ImportError):  # reported where it is needed
        first, second = mask_address(one), mask_address(other)  # another password makes no other server
    return first == second != MASK


def clashes_of_routing(at: KeyPath, name: str, stream: StreamConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of each mistake, and its description."""
    from millstream.routing.partitions import PartitionTemplate

    for table, text in stream.partitions.items():
        where: KeyPath = (*at, "partitions", table)
        yield from clashes_of_table(where, table, stream)
        yield from refusals(where, PartitionTemplate.parse, text)
    if stream.routing is not None:
        yield from _clashes_of_section((*at, "routing"), name, stream, stream.routing)


def clashes_of_table(at: KeyPath, table: str, stream: StreamConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield the faults in the name of a table that applications write."""
    try:
        namespace, name = parse_qualified_name(table)
    except UsageError as error:
        yield at, in_words(error)
        return
    if stream.source is not None:
        # Mistakes in the patterns are reported at the patterns.
        with suppress(MillstreamError):
            named = [
                pattern
                for pattern in TablePatterns.parse(stream.source.tables).patterns
                if not set(pattern.text) & set("!*?")
            ]
            if any(pattern.matches(namespace, name) for pattern in named):
                yield (
                    at,
                    "is captured ([streams.S.source] tables): a captured table lies whole on one shard, as [streams.S.shards] says",
                )


def _clashes_of_section(
    at: KeyPath, name: str, stream: StreamConfig, routing: RoutingSection
) -> Iterator[tuple[KeyPath, str]]:
    from millstream.routing.rules import DEVNULL, Matcher

    for sink in routing.sinks:
        if sink in {DEVNULL, "ring", "log"} or ":" in sink:
            yield (*at, "sinks", sink), "is the name of something else: take another"
    for number, sink in enumerate(routing.ignore_errors):
        if sink not in routing.sinks:
            yield (*at, "ignore_errors", number), f"there is no sink {sink}"
    if routing.to is not None:
        if routing.rules or routing.hash_ring is not None:
            yield (*at, "to"), "takes all rows: rules and hash_ring would never be asked"
        words = (routing.to,) if isinstance(routing.to, str) else tuple(routing.to)
        yield from _clashes_of_target((*at, "to"), name, stream, words)
    elif not routing.rules and routing.hash_ring is None:
        yield at, "needs rules, a hash_ring or `to`: without them no row would have a place"
    for number, rule in enumerate(routing.rules):
        where = (*at, "rules", number)
        try:
            Matcher.parse(rule.table, rule.where)
        except UsageError as error:
            yield (*where, "table" if "regular expression" in error.message else "where"), in_words(error)
        yield from _clashes_of_target((*where, "to"), name, stream, rule.targets)
    if routing.hash_ring is not None:
        ring = (*at, "hash_ring")
        if len(set(routing.hash_ring.columns)) < len(routing.hash_ring.columns):
            yield (*ring, "columns"), "must name each column once"
        for table, columns in routing.hash_ring.columns_of.items():
            yield from clashes_of_table((*ring, "columns_of", table), table, stream)
            if not columns or len(set(columns)) < len(columns):
                yield (*ring, "columns_of", table), "must name one column or more, each once"


def _clashes_of_target(
    at: KeyPath, name: str, stream: StreamConfig, words: tuple[str, ...]
) -> Iterator[tuple[KeyPath, str]]:
    from millstream.routing.rules import DEVNULL, RuleTarget

    try:
        target = RuleTarget.parse(*words)
    except UsageError as error:
        yield at, in_words(error)
        return
    if target.shard is not None and target.shard >= stream.log.shards:
        yield at, f"the stream has shards 0 to {stream.log.shards - 1} ([streams.{name}.log] shards)"
    if target.ring and (stream.routing is None or stream.routing.hash_ring is None):
        yield at, f"there is no ring: configure [streams.{name}.routing.hash_ring]"
    known = {} if stream.routing is None else stream.routing.sinks
    for sink in target.sinks:
        if sink != DEVNULL and sink not in known:
            configured = "".join(f", {one}" for one in sorted(known))
            yield (
                at,
                f"there is no sink {sink} ([streams.{name}.routing.sinks.{sink}]): `shard:N`, `ring`, `{DEVNULL}`{configured} are",
            )
        elif sink != DEVNULL and stream.buffer is not None:
            yield (
                at,
                f"a stream that {stream.buffer.role} a write buffer can't have sinks",
            )


def refusals(at: KeyPath, read: Callable[[str], object], text: str) -> Iterator[tuple[KeyPath, str]]:
    """Yield the mistake of a text that a function can't read."""
    try:
        read(text)
    except MillstreamError as error:
        yield at, in_words(error)


def in_words(error: MillstreamError) -> str:
    """Return an error as the description of a mistake."""
    return f"{error.message}. {error.hint}" if error.hint else error.message


def clashes_of_regions(at: KeyPath, stream: StreamConfig, writer: str | None) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of each mistake, and its description."""
    from millstream.crdt.declared import ColumnMerge

    if stream.region and writer is not None:
        yield (*at, "region"), "a stream that several regions write has one writer in each: take `name` out of [writer]"
    for table, words in stream.merge.items():
        where: KeyPath = (*at, "merge", table)
        found = False
        for one in clashes_of_table(where, table, stream):
            found = True
            yield one
        if found:
            continue
        key = key_of(stream, table)
        if not key:
            yield where, f'has no key to tell its rows by: give it one in [streams.{at[-1]}.keys], such as ["id"]'
        for column, word in words.items():
            if column in key:
                yield (*where, column), "is of the key: rows that differ in it are different rows"
            yield from refusals((*where, column), ColumnMerge.parse, word)


def key_of(stream: StreamConfig, table: str) -> tuple[str, ...]:
    """Return the key of a table that applications write, however its name is written; empty if it has none."""
    wanted = parse_qualified_name(table)
    return next((tuple(key) for name, key in stream.keys.items() if parse_qualified_name(name) == wanted), ())


def reach_of(replication: ReplicationConfig) -> Reach:
    """Return which machines can ever hold what this node writes."""
    return Reach(len(replication.nodes.keys() - {replication.node}), replication.object_store is not None)


def clashes_of_level(at: KeyPath, acks: str, replication: ReplicationConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield a stream's level that can never be reached: no append would be answered."""
    lacking = reach_of(replication).lacks(AckLevel.parse(acks))
    if lacking is not None:
        yield (*at, "acks"), lacking


def clashes_of_consumers(at: KeyPath, consumers: Mapping[str, ConsumerConfig]) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of each mistake, and its description."""
    if not consumers:
        return
    from millstream.delivery.definition import Definition

    for name, consumer in consumers.items():
        where: KeyPath = (*at, "consumers", name)
        try:
            Definition.parse(consumer.body(name), is_trusted=True)
        except DeliveryError as error:
            field = str(error.details.get("field") or "name")
            place = where if field == "name" else (*where, *field.split("."))
            yield place, in_words(error)


_ENCODE: Final = "%-encode special characters in user and password (@ is %40, / is %2F)"


def clashes_of_addresses(at: KeyPath, stream: StreamConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of each mistake, and its description; never the address."""
    location = stream.lake.location
    if stream.lake.format != "postgres" and not is_address(location) and mask_address(location) != location:
        yield (
            (*at, "lake", "location"),
            "is neither a folder nor the URL of an object store, or has a user, a password or a key in it: those belong into storage_options",
        )
    places: list[tuple[KeyPath, str, str]] = []
    if stream.buffer is not None:
        places.append(((*at, "buffer", "location"), stream.buffer.kind, stream.buffer.location))
    if stream.routing is not None:
        for name, sink in stream.routing.sinks.items():
            places.append(((*at, "routing", "sinks", name, "location"), sink.kind, sink.location))
    for path, kind, place in places:
        if (fault := _address_fault(kind, place)) is not None:
            yield path, fault


def _address_fault(kind: str, place: str) -> str | None:
    """The fault in the place of a buffer or a sink; None if nothing is, or its kind is another package's."""
    shown = mask_address(place)
    if kind == "kafka" and not is_brokers(place):
        return "isn't a list of brokers, host:9092,host:9092; user and password belong into client (`sasl.username`, `sasl.password`)"
    if kind == "redis" and (split_url(place) is None or shown == MASK):
        return f"isn't an address such as redis://host:6379/0, or can be read in two ways: {_ENCODE}"
    if kind == "log" and (shown != place or "://" in place):
        return 'isn\'t a folder: set kind = "redis" or "kafka" if it is a server\'s address'
    if kind == "millstream" and shown != place:
        return "is neither https://host:8787 nor a folder, or has a user or a password in it: an access token belongs into token"
    return None


_VIEWS: Final = {
    "delta": {"current", "history", "scd2", "merged"},
    "iceberg": {"current", "history", "scd2", "merged"},
    "postgres": {"changes", "current"},
}


def clashes_of_format(at: KeyPath, lake: LakeConfig, *, is_local: bool) -> Iterator[tuple[KeyPath, str]]:
    """Yield each setting of a stream's lake that doesn't go with its format."""
    in_database = lake.format == "postgres"
    if in_database and not is_address(lake.location) and not lake.location.startswith("${"):
        yield (*at, "lake", "location"), "must be a PostgreSQL address such as postgresql://user@host/database"
    if not in_database and is_address(lake.location):
        yield (*at, "lake", "location"), 'is a PostgreSQL address: set format = "postgres", or name a folder'
    possible = _VIEWS[lake.format]
    for view in sorted(set(lake.shown) - possible):
        yield (
            (*at, "lake", "views"),
            f"{view!r} isn't a view of {lake.format!r}, which has {', '.join(sorted(possible))}",
        )
    if not in_database and lake.schema_prefix:
        yield (*at, "lake", "schema_prefix"), 'is for format = "postgres" alone'
    if lake.format == "iceberg":
        yield from _clashes_of_iceberg(at, lake, is_local=is_local)
    elif lake.catalog:
        yield (*at, "lake", "catalog"), 'is for format = "iceberg" alone'


def _clashes_of_iceberg(at: KeyPath, lake: LakeConfig, *, is_local: bool) -> Iterator[tuple[KeyPath, str]]:
    """Yield what isn't supported yet with Iceberg: other catalogs, and an SQL catalog with executors elsewhere."""
    if lake.catalog_type not in {"sql", "rest"}:
        yield (
            (*at, "lake", "catalog", "type"),
            f'must be "sql" or "rest": a catalog of type {lake.catalog_type!r} isn\'t supported',
        )
    if lake.catalog_type == "rest" and "uri" not in lake.catalog:
        yield (*at, "lake", "catalog", "type"), 'is "rest", which needs `uri`: the address of the catalog\'s server'
    elif lake.catalog_type == "rest" and not _WEB.match(lake.catalog["uri"]):
        yield (*at, "lake", "catalog", "uri"), f"must begin with {_SCHEMES}"
    if lake.catalog_type == "sql" and not is_local:
        yield (
            (*at, "lake", "catalog", "type"),
            'can\'t be "sql" with a Spark master elsewhere: executors don\'t reach the catalog in the home; set "rest"',
        )


OPTIONS: Final = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_REGION",
        "AWS_ENDPOINT_URL",
        "AWS_ALLOW_HTTP",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
        "AWS_PROFILE",
    ),
}
"""The options of each store in which tests put a lake, by the scheme of its addresses. A library would ignore a misspelt one."""


_WEB: Final = re.compile(r"https?://")
"""The beginning of a server's address."""
_SCHEMES: Final = "https:// (or http://, without TLS)"
_NAMED: Final = re.compile(r"\w+://[^/?#]")
"""An address with a bucket."""


def clashes_of_storage(at: KeyPath, lake: LakeConfig, home: Path) -> Iterator[Clash]:
    """Yield each mistake of a stream's `lake.location` and `lake.storage_options`; `home` is the home's folder."""
    if lake.format == "postgres":
        return
    if (fault := fault_of_location(lake.location, str(at[-1]), home)) is not None:
        yield ((*at, "lake", "location"), *fault)
        return
    scheme, separator, _ = lake.location.partition("://")
    if not _WEB.match(lake.storage_options.get("AWS_ENDPOINT_URL", "https://")):
        yield (*at, "lake", "storage_options", "AWS_ENDPOINT_URL"), "config", f"must begin with {_SCHEMES}"
    # The options may stay while a lake lies in a folder.
    allowed = OPTIONS[scheme] if separator else [name for names in OPTIONS.values() for name in names]
    for name in lake.storage_options:
        if name not in allowed:
            (nearest,) = difflib.get_close_matches(_spelled(name), allowed, n=1, cutoff=0.0)
            yield (
                (*at, "lake", "storage_options", name),
                "storage_option_unknown",
                f"unknown option; did you mean {nearest}? allowed here: {', '.join(allowed)}",
            )


def fault_of_location(location: str, stream: str, home: Path) -> tuple[str, str] | None:
    """Return why a stream's lake of files can't lie there, as a code and a description; None if it can."""
    scheme, separator, _ = location.partition("://")
    stores = " or ".join(f"{name}://bucket/folder" for name in OPTIONS)
    if separator and scheme not in OPTIONS:
        words = f"a lake can't lie at {scheme}://…, in which it isn't tested: name a folder, or {stores}"
        return "lake_scheme_unsupported", words
    if separator and not _NAMED.match(location):
        return "config", f"{location} names no bucket: write {stores}"
    fault = None if separator else _fault_of_folder(location, stream, home)
    return None if fault is None else ("config", fault)


def _fault_of_folder(location: str, stream: str, home: Path) -> str | None:
    """Return why the stream's tables can't lie in a folder: it isn't one, or they would lie among the home's own files."""
    try:
        tables, data = (home / Path(location).expanduser() / stream).resolve(), (home / "data").resolve()
    except (RuntimeError, ValueError, OSError) as error:  # an unknown user's home, a character that no path has
        return f"names no folder: {error}"
    if tables.is_relative_to(data) or data.is_relative_to(tables):
        return f"would put the tables into {tables}, among the log and the catalog in {data}: name another folder"
    return None


def _spelled(name: str) -> str:
    """Return an option's name as this file spells them, for names of other libraries."""
    name = name.upper().replace("-", "_").replace(".", "_")
    return name if name.startswith(("AWS_", "AZURE_", "GOOGLE_")) else f"AWS_{name}"
