"""Conflicts between valid settings of a stream's routing and partitions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from millstream.config.model import StreamConfig
from millstream.config.routing_model import RoutingSection
from millstream.config.toml_lines import KeyPath
from millstream.errors import MillstreamError, UsageError
from millstream.model.names import TablePatterns, parse_qualified_name


def clashes_of_routing(at: KeyPath, name: str, stream: StreamConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of each mistake, and its description."""
    from millstream.routing.partitions import PartitionTemplate

    for table, text in stream.partitions.items():
        where: KeyPath = (*at, "partitions", table)
        yield from clashes_of_table(where, table, stream)
        try:
            PartitionTemplate.parse(text)
        except UsageError as error:
            yield where, _said(error)
    if stream.routing is not None:
        yield from _clashes_of_section((*at, "routing"), name, stream, stream.routing)


def clashes_of_table(at: KeyPath, table: str, stream: StreamConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield the faults in the name of a table that applications write."""
    try:
        namespace, name = parse_qualified_name(table)
    except UsageError as error:
        yield at, _said(error)
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
            yield (*where, "table" if "regular expression" in error.message else "where"), _said(error)
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
        yield at, _said(error)
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
                f"a stream that {stream.buffer.role} a write buffer has no sinks beside it: who takes the operations sends them on",
            )


def _said(error: MillstreamError) -> str:
    return f"{error.message}. {error.hint}" if error.hint else error.message
