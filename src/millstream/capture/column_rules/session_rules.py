"""The rules of columns in one session of capture: checked at the start, and applied to the messages that come."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from millstream.capture.column_rules.apply_to_changes import RuleMessages, Rules
from millstream.capture.column_rules.binding import ColumnRules
from millstream.capture.config import CaptureConfig
from millstream.capture.connection import Connection, first_row
from millstream.capture.publication import inserts_name, list_published, restriction
from millstream.capture.source_tables import SourceIdentity, SourceTable, connect_same, read_table
from millstream.capture.table_directory import TableDirectory
from millstream.codec.pgoutput import Relation
from millstream.errors import ConfigError, TableUndecodable, UnknownTable
from millstream.model.names import TablePatterns, qualified_name

_REUSE_S: Final = 5.0
"""Relation messages come in bursts; an older connection may have been ended by the server."""


def check_rules(rules: ColumnRules, control: Connection, config: CaptureConfig, *, at_start: bool) -> None:
    """Refuse rules that can't be applied, before anything is stored. Later such a table is quarantined instead.

    Raises:
        UnknownTable, ConfigError: as `ColumnRules.check`.
    """
    if rules and at_start:
        rules.check(list_published(control, TablePatterns.parse(config.tables), config.publication, foreseen=True))


def rule_messages(
    rules: ColumnRules,
    directory: TableDirectory,
    config: CaptureConfig,
    identity: SourceIdentity,
    quarantine: Callable[[int, Callable[[], None]], None],
    session: ExitStack,
) -> RuleMessages | None:
    """Return what applies the rules to a session's messages; None if the stream has no rules.

    Args:
        directory: quarantines tables whose rules can't be applied.
        config: capture's; its DSN is that of the one server that the session reads.
        quarantine: calls the function that quarantines a table; no copy of the table goes on.
        session: closes at its end the connection that looks at tables.
    """
    if not rules and not rules.has_bound:
        return None

    held = session.enter_context(ExitStack())
    connection: Connection | None = None
    used_at = 0.0

    def look(oid: int) -> tuple[SourceTable, int] | None:
        nonlocal connection, used_at
        if connection is None or time.monotonic() - used_at > _REUSE_S:
            held.close()
            connection = held.enter_context(connect_same(config.dsn, identity, purpose="rules"))
        found = _present(connection, oid, config.publication)
        used_at = time.monotonic()
        return found

    def rules_of(relation: Relation) -> Rules | None:
        """Return the rules of a relation's columns; a leaf partition has those of the table that its changes belong to."""
        root = directory.leaves.root_of(relation)
        if root is None:
            return () if directory.leaves.is_left_out(relation.oid) else rules_of_table(relation)
        try:
            as_root, order = directory.as_root(relation, root)
        except TableUndecodable as error:
            refused = ConfigError(error.message, code="layout_unclear", table=qualified_name(root.namespace, root.name))
            quarantine(
                root.relation_oid, lambda: directory.refuse(root.relation_oid, root.namespace, root.name, refused)
            )
            return ()
        found = rules_of_table(as_root)
        if not found or order is None:
            return found
        by_place = dict(zip(order, found, strict=True))
        return tuple(by_place[place] for place in range(len(order)))

    def rules_of_table(relation: Relation) -> Rules | None:
        refused: ConfigError | UnknownTable
        try:
            # Its rules went with it. The changes until its end come without them, and aren't stored.
            if not rules.had_rules(relation) or directory.selects(relation):
                return rules.rules_of(relation, look)
            refused = UnknownTable(f"table {relation.qualified_name} is left out now, and had rules")
        except ConfigError as error:
            refused = error
        name = (relation.oid, relation.namespace, relation.name)
        quarantine(relation.oid, lambda: directory.refuse(*name, refused))
        return ()

    return RuleMessages(rules_of, rules.rules.hashed, directory.is_undecoded)


def _present(connection: Connection, oid: int, publication: str) -> tuple[SourceTable, int] | None:
    """Return a table with the columns that are sent, and the greatest number that a column of it ever had."""
    table = read_table(connection, oid)
    row = first_row(connection, "SELECT relnatts FROM pg_class WHERE oid = %s", [oid])
    if table is None or row is None:
        return None
    sent = restriction(connection, (publication, inserts_name(publication)), table)
    return sent.applied_to(table), int(row[0])
