"""Facts about a PostgreSQL source: its identity, and the tables that match a stream's patterns.

This module only reads. It reads the tables as they are now. The columns that a row had when it was
written are in the stream's relation messages only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from millstream.capture.connection import Connection, all_rows, connect, first_row, one_row
from millstream.codec.pgoutput import Relation, RelationColumn
from millstream.errors import ConfigError, SourceError
from millstream.model.column_rules import Rule
from millstream.model.names import TablePatterns, qualified_name
from millstream.model.pgtypes import builtin_name
from millstream.model.positions import Lsn, parse_lsn
from millstream.model.schema import ReplicaIdentity
from millstream.protocol.copy_conflicts import Snapshot, extend_xid

if TYPE_CHECKING:
    from millstream.catalog import SourceRow

STANDBY_VERSION_MIN: Final = 160000
ORIGIN_VERSION_MIN: Final = 160000
PAGE_BYTES: Final = 8192
_PAGE_HEADER_BYTES_MAX: Final = 40
_XID_MIN: Final = 3  # the first id of an ordinary transaction


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """The server and database behind a DSN: one history of one database."""

    system_identifier: int
    database: str
    timeline: int
    on_standby: bool
    server_version: int


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """A column of a table's key, in the order of the index that backs it."""

    name: str
    type: str
    """The type that a literal is cast to: its schema and name without a modifier; for a domain, the base type.

    A cast to a domain would run its checks, including `NOT VALID` ones. A name without its schema
    would depend on the search path."""
    operator_namespace: str
    """Schema of the index's ordering operators; not `pg_catalog` for types of extensions."""
    collation: tuple[str, str] | None = None
    """Schema and name of the index's collation, if it differs from the column's.

    Values that the index's collation distinguishes may be equal under the column's."""


@dataclass(frozen=True, slots=True)
class AttributeFacts:
    """Facts that show whether a column was renamed, retyped or added: a column's number never changes."""

    number: int
    name: str
    type_oid: int
    type_modifier: int
    filled: bool
    """Whether rows that were there before the column show its first default, without having been rewritten.

    PostgreSQL keeps it apart from the rows (`attmissingval`) until the table is rewritten."""
    missing: str | None
    """The text of that default; None if there is none, or it isn't known: a partitioned table has none of its own."""
    generated: str
    """How the column is generated; empty if it isn't.

    `s`: stored (sent from PostgreSQL 18 on, if a publication includes it). `v`: virtual (never sent)."""
    written_by: int
    """The transaction that last wrote the column's `pg_attribute` row, as every `ALTER COLUMN … TYPE` does."""
    parts: tuple[tuple[str, str], ...] = ()
    """Parts of the type that decide the text of existing values: enum values by OID, fields of row types."""


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """A table below a partitioned one, at any depth."""

    oid: int
    name: str
    """`schema.name` as PostgreSQL quotes it."""
    attached_by: int
    """The transaction that made the table a partition."""
    born: bool
    """Whether the table was created as a partition, so that it had no rows before; False if unknown."""
    leaf: bool
    size_bytes: int
    """Size of the table's own file; 0: it has no rows."""
    relfilenode: int
    refiled: bool
    """Whether it may have another file than when it became a partition: it may have been truncated since."""
    readable: bool
    """Whether our role may read all of its rows under its own name, and not only as rows of its root."""
    columns: tuple[str, ...]
    """The names of its columns in their order, if they have another one than those of its root; empty if not."""


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table as the source's catalogs describe it now."""

    oid: int
    namespace: str
    name: str
    partitioned: bool
    replica_identity: ReplicaIdentity
    usable: bool
    """Whether updates and deletes carry an identity. If not, publishing them makes the application's own fail."""
    generated_identity: tuple[str, ...]
    """Stored generated columns in the identity of the table or of a partition (18+).

    The table is usable only if a publication sends them."""
    relation: Relation
    """The stream's next Relation message, as far as the catalogs show it.

    It has the columns that a publication can send: not dropped, and from 18 on stored generated ones too."""
    key: tuple[KeyColumn, ...]
    """The identity's columns (FULL: the primary key's); empty if there are none."""
    row_estimate: int
    size_bytes: int
    relfilenode: int
    layout: tuple[AttributeFacts, ...]
    """All columns of the table, including generated ones."""
    key_constraint: int
    """OID of the primary key's constraint, which REINDEX keeps; 0 without a primary key."""
    partitions: tuple[PartitionFacts, ...]
    numbers_max: int
    """The greatest number that a column of the table ever had."""
    ancestors: tuple[tuple[str, str], ...] = ()
    """Schemas and names of the partitioned tables above it, if it is a partition."""
    rules: Mapping[str, Rule] = field(default_factory=dict)
    """Rules of the columns that have one, by name, once they are applied.

    `relation` then lacks excluded columns, and hashed and redacted ones are text."""
    ruled_names: Mapping[str, Rule] = field(default_factory=dict)  # that any column has under it: names had, configured
    refusal: ConfigError | None = None
    """Why its rules can't be applied: nothing of the table may be stored."""

    @property
    def key_is_hashed(self) -> bool:
        """Whether a column of the key has a rule, so that rows can't be looked up by the log's keys."""
        return any(column.name in self.rules for column in self.key)

    @property
    def column_numbers(self) -> tuple[int, ...]:
        """The numbers of the relation's columns, in their order."""
        numbers = {column.name: column.number for column in self.layout}
        return tuple(numbers[column.name] for column in self.relation.columns)

    @property
    def full_name(self) -> str:
        """`schema.name` as PostgreSQL quotes it."""
        return qualified_name(self.namespace, self.name)

    def same_definition(self, other: SourceTable) -> bool:
        """Return whether both are the same table with the same name, columns, key and partitions; ignore sizes."""

        def without_sizes(table: SourceTable) -> SourceTable:
            parts = tuple(replace(p, size_bytes=0, refiled=False, readable=True) for p in table.partitions)
            return replace(table, row_estimate=0, size_bytes=0, partitions=parts, refusal=None)

        return without_sizes(self) == without_sizes(other)


# ATTACH rewrites all columns of a partition. If one command wrote a column and the system columns, the table was
# created as a partition.
_BORN: Final = """EXISTS (SELECT FROM pg_attribute a JOIN pg_attribute b ON b.attrelid = a.attrelid AND b.attnum = -1
                                 WHERE a.attrelid = {0} AND a.attnum > 0 AND NOT a.attisdropped
                                   AND (a.xmin::text, a.cmin::text) = (b.xmin::text, b.cmin::text))"""

# An index's first `indnkeyatts` columns are its key, numbered from 0. INCLUDE columns follow; no identity has them.
# A deferrable primary key doesn't count: two rows may share a key within a transaction, and PostgreSQL rejects it
# as an identity.
# A table's first file is named by its OID, and what makes it a partition writes its row in pg_class.
# `attmissingval` is an array of the column's type with one element. A box's array has no quotes, and can't be taken
# apart. A database without an encoding may have any bytes in a text.
# From 18 on a publication can send stored generated columns. The application's updates fail if the identity has a
# generated column that isn't published.
_TABLES: Final = f"""
SELECT c.oid, n.nspname, c.relname, c.relkind = 'p', c.relreplident::text,
       (SELECT bool_and(CASE r.relreplident
                          WHEN 'f' THEN true
                          WHEN 'd' THEN EXISTS (SELECT FROM pg_index i WHERE i.indrelid = r.oid AND i.indisprimary AND i.indimmediate)
                          WHEN 'i' THEN EXISTS (SELECT FROM pg_index i WHERE i.indrelid = r.oid AND i.indisreplident)
                          ELSE false END)
          FROM pg_class r
         WHERE r.oid = c.oid OR (c.relkind = 'p' AND r.oid IN
               (SELECT p.relid FROM pg_partition_tree(c.oid) p WHERE p.isleaf))),
       (SELECT json_agg(json_build_array(a.attname, a.atttypid::bigint, a.atttypmod, y.nspname, t.typname, c.relreplident = 'f'
                        OR EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
                                   AND CASE c.relreplident WHEN 'd' THEN i.indisprimary AND i.indimmediate
                                       WHEN 'i' THEN i.indisreplident ELSE false END)) ORDER BY a.attnum)
          FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid JOIN pg_namespace y ON y.oid = t.typnamespace
         WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
           AND (a.attgenerated = '' OR (a.attgenerated = 's' AND current_setting('server_version_num')::int >= 180000))),
       (SELECT json_agg(json_build_array(a.attname,
                                         (WITH RECURSIVE base AS (
                                            SELECT t.* FROM pg_type t WHERE t.oid = a.atttypid
                                            UNION ALL SELECT t.* FROM base JOIN pg_type t ON t.oid = base.typbasetype)
                                          SELECT quote_ident(y.nspname) || '.' || quote_ident(b.typname)
                                            FROM base b JOIN pg_namespace y ON y.oid = b.typnamespace WHERE b.typbasetype = 0),
                                         (SELECT n2.nspname FROM pg_opclass oc JOIN pg_namespace n2 ON n2.oid = oc.opcnamespace
                                           WHERE oc.oid = i.indclass[k.n - 1]),
                                         (SELECT json_build_array(n3.nspname, co.collname) FROM pg_collation co
                                            JOIN pg_namespace n3 ON n3.oid = co.collnamespace
                                           WHERE co.oid = i.indcollation[k.n - 1] AND co.oid <> a.attcollation))
                        ORDER BY k.n)
          FROM pg_index i
          CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, n)
          JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.attnum
         WHERE i.indrelid = c.oid AND k.n <= i.indnkeyatts
           AND CASE c.relreplident WHEN 'i' THEN i.indisreplident WHEN 'n' THEN false
               ELSE i.indisprimary AND i.indimmediate END),
       greatest(0, CASE c.relkind WHEN 'p' THEN
           (SELECT sum(greatest(0, l.reltuples)) FROM pg_partition_tree(c.oid) p JOIN pg_class l ON l.oid = p.relid
             WHERE p.isleaf) ELSE c.reltuples END)::bigint,
       CASE c.relkind WHEN 'p' THEN
           (SELECT coalesce(sum(pg_relation_size(p.relid)), 0) FROM pg_partition_tree(c.oid) p WHERE p.isleaf)
           ELSE pg_relation_size(c.oid) END::bigint,
       c.relfilenode::bigint,
       (SELECT json_agg(json_build_array(p.relid::oid::bigint, an.nspname, a.relname))
          FROM pg_partition_ancestors(c.oid) p JOIN pg_class a ON a.oid = p.relid
          JOIN pg_namespace an ON an.oid = a.relnamespace WHERE p.relid <> c.oid),
       (SELECT json_agg(json_build_array(a.attnum, a.attname, a.atttypid::bigint, a.atttypmod,
                        a.atthasmissing OR (c.relkind = 'p' AND EXISTS (SELECT FROM pg_attribute l WHERE l.attname = a.attname AND l.atthasmissing
                            AND l.attrelid IN (SELECT p.relid FROM pg_partition_tree(c.oid) p WHERE p.isleaf))),
                        CASE WHEN a.atthasmissing AND current_setting('server_encoding') <> 'SQL_ASCII'
                              AND (SELECT t.typdelim = ',' FROM pg_type t WHERE t.oid = a.atttypid)
                             THEN (a.attmissingval::text::text[])[1] END,
                        a.attgenerated, a.xmin::text::bigint, CASE WHEN a.atttypid >= 16384 THEN
                          (WITH RECURSIVE part (oid) AS (
                             SELECT a.atttypid UNION
                             SELECT x.oid FROM part JOIN pg_type t ON t.oid = part.oid CROSS JOIN LATERAL (
                                 SELECT t.typelem UNION ALL SELECT t.typbasetype
                                 UNION ALL SELECT rngsubtype FROM pg_range WHERE rngtypid = t.oid
                                 UNION ALL SELECT rngtypid FROM pg_range WHERE rngmultitypid = t.oid
                                 UNION ALL SELECT f.atttypid FROM pg_attribute f
                                  WHERE f.attrelid = t.typrelid AND f.attnum > 0 AND NOT f.attisdropped) x (oid)
                              WHERE x.oid >= 16384)
                           SELECT json_agg(json_build_array(p.key, p.value) ORDER BY p.key) FROM
                             (SELECT 'value ' || e.oid, e.enumlabel::text FROM part JOIN pg_enum e ON e.enumtypid = part.oid
                              UNION ALL SELECT 'fields ' || t.typrelid, array_to_string(ARRAY(SELECT f.attnum FROM pg_attribute f
                                 WHERE f.attrelid = t.typrelid AND f.attnum > 0 AND NOT f.attisdropped ORDER BY f.attnum), ',')
                                FROM part JOIN pg_type t ON t.oid = part.oid WHERE t.typrelid <> 0) p (key, value)) END)
                        ORDER BY a.attnum)
          FROM pg_attribute a
         WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
       (SELECT k.oid::bigint FROM pg_constraint k WHERE k.conrelid = c.oid AND k.contype = 'p'),
       (SELECT json_agg(json_build_array(p.relid::oid::bigint, ln.nspname, l.relname, h.xmin::text::bigint,
                        {_BORN.format("p.relid")},
                        p.isleaf, coalesce(pg_relation_size(p.relid), 0), l.relfilenode::bigint,
                        l.relfilenode NOT IN (0, l.oid) AND l.xmin <> h.xmin, coalesce(has_table_privilege(p.relid, 'SELECT'), false) AND NOT row_security_active(p.relid),
                        NULLIF(ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = p.relid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum),
                               ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum))) ORDER BY p.relid)
          FROM pg_partition_tree(CASE c.relkind WHEN 'p' THEN c.oid END) p JOIN pg_class l ON l.oid = p.relid
          JOIN pg_namespace ln ON ln.oid = l.relnamespace JOIN pg_inherits h ON h.inhrelid = p.relid
         WHERE p.relid <> c.oid),
       (SELECT json_agg(DISTINCT json_build_array(a.attname, a.attgenerated)::jsonb)
          FROM pg_class r JOIN pg_attribute a ON a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> ''
         WHERE current_setting('server_version_num')::int >= 180000
           AND (r.oid = c.oid OR (c.relkind = 'p' AND r.oid IN
                (SELECT p.relid FROM pg_partition_tree(c.oid) p WHERE p.isleaf)))
           AND (r.relreplident = 'f' OR EXISTS (SELECT FROM pg_index i WHERE i.indrelid = r.oid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
                AND CASE r.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident ELSE false END))),
       c.relnatts::int
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
   AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast') AND n.nspname NOT LIKE 'pg\\_temp\\_%%'
"""
_ORDER: Final = " ORDER BY n.nspname, c.relname"
_ONE: Final = " AND c.oid = %s"


def identify(connection: Connection) -> tuple[int, str, int | None]:
    """Return system identifier, database and timeline as an ordinary connection sees them.

    The timeline is None on a standby. This needs no privilege.
    """
    # For a while after a promotion the last checkpoint has the old timeline; names of WAL files have the new one.
    row = one_row(
        connection,
        "SELECT system_identifier, current_database(), CASE WHEN NOT pg_is_in_recovery()"
        " THEN pg_walfile_name(pg_current_wal_insert_lsn()) END FROM pg_control_system()",
    )
    # IDENTIFY_SYSTEM returns the system identifier unsigned.
    return int(row[0]) & (2**64 - 1), str(row[1]), None if row[2] is None else int(row[2][:8], 16)


def identify_replication(connection: Connection) -> SourceIdentity:
    """Return the identity of the server that this replication connection streams from (IDENTIFY_SYSTEM)."""
    row = one_row(connection, "IDENTIFY_SYSTEM")
    recovery = one_row(connection, "SELECT pg_is_in_recovery()")
    return SourceIdentity(
        system_identifier=int(row[0]),
        timeline=int(row[1]),
        database=str(row[3]),
        on_standby=bool(recovery[0]),
        server_version=connection.info.server_version,
    )


def connect_same(dsn: str, identity: SourceIdentity, *, purpose: str) -> Connection:
    """Open an ordinary connection to the server that a session streams from; the caller closes it.

    The address may lead by now to a standby that lags, or to a primary on another timeline. Data read
    there doesn't match the stream.

    Raises:
        SourceError (`source_switched`): another server, or another timeline, answers.
        SourceError: the connection failed; the subclass says why.
    """
    connection = connect(dsn, purpose=purpose)
    try:
        found = identify(connection)
        timeline = None if identity.on_standby else identity.timeline
        if found != (identity.system_identifier, identity.database, timeline):
            raise SourceError(
                f"system {found[0]}, database {found[1]}, {'a standby' if found[2] is None else f'timeline {found[2]}'}"
                f" answers now; this session streams from system {identity.system_identifier}, database {identity.database},"
                f" {'a standby' if timeline is None else f'timeline {timeline}'}",
                code="source_switched",
            )
    except BaseException:
        connection.close()
        raise
    return connection


def check_same(known: SourceIdentity | SourceRow, found: SourceIdentity) -> None:
    """Raise `source_replaced` unless both are the same history of the same database."""
    if (known.system_identifier, known.database, known.timeline) == (
        found.system_identifier,
        found.database,
        found.timeline,
    ):
        return
    what = "system" if known.system_identifier != found.system_identifier else "database"
    hint = (
        "Point the DSN back to the source that this stream follows. A database that was moved to another server is another "
        "source: begin another stream for it (a home of its own)."
    )
    if (known.system_identifier, known.database) == (found.system_identifier, found.database):
        what = "timeline"
        hint = "Let `millstream run` follow it first: it says whether it can."
    raise SourceError(
        f"another {what} answers under this DSN: system {found.system_identifier}, database {found.database}, timeline "
        f"{found.timeline}; the log follows system {known.system_identifier}, database {known.database}, timeline "
        f"{known.timeline}",
        code="source_replaced",
        hint=hint,
    )


def check_standby(identity: SourceIdentity) -> None:
    """Raise `source_on_standby` if the server is a standby that can't decode its WAL."""
    if identity.on_standby and identity.server_version < STANDBY_VERSION_MIN:
        raise SourceError(
            f"the source is a standby of PostgreSQL {identity.server_version // 10000}, which can't decode its WAL (16 and newer can)",
            code="source_on_standby",
            hint="Point the DSN at the primary.",
        )


def check_origin(identity: SourceIdentity, origin: str) -> None:
    """Raise `source_version_unsupported` if the server is too old to leave out changes that have an origin."""
    if origin != "any" and identity.server_version < ORIGIN_VERSION_MIN:
        raise SourceError(
            f"the source is PostgreSQL {identity.server_version // 10000}, which can't leave out what replication wrote (16 and newer can)",
            code="source_version_unsupported",
            hint='Set origin = "any" in [streams.S.source], or upgrade the server.',
        )


def list_tables(connection: Connection, patterns: TablePatterns) -> list[SourceTable]:
    """List the tables that match the patterns, by name; skip partitions of a table that matches, or that `!` leaves out."""
    found = all_rows(connection, _TABLES + _ORDER, [])
    # A table dropped since the statement began still has its catalog rows, but no files to measure.
    rows = [row for row in found if row[9] is not None]
    taken = {int(row[0]) for row in rows if patterns.select_partition(row[1], row[2], _ancestors(row))}
    return [_table(row) for row in rows if int(row[0]) in taken and not taken.intersection(a[0] for a in row[11] or ())]


def read_table(connection: Connection, oid: int) -> SourceTable | None:
    """Return the table with an OID, as the connection's transaction sees it; None if there is none."""
    row = first_row(connection, _TABLES + _ONE, [oid])
    return None if row is None or row[9] is None else _table(row)


def possible_ancestors(connection: Connection, oid: int) -> tuple[list[tuple[str, str]], bool]:
    """Return schemas and names of the partitioned tables above a table; of all partitioned tables if it is gone.

    Also returns whether those are its ancestors.
    """
    rows = all_rows(
        connection,
        "SELECT n.nspname::text, c.relname::text, EXISTS (SELECT FROM pg_class WHERE oid = %(oid)s) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.relkind = 'p' AND (c.oid IN (SELECT relid FROM pg_partition_ancestors(%(oid)s::oid::regclass))"
        " OR NOT EXISTS (SELECT FROM pg_class WHERE oid = %(oid)s))",
        {"oid": oid},
    )
    return [(namespace, name) for namespace, name, _ in rows], any(exists for _, _, exists in rows)


@dataclass(frozen=True, slots=True)
class PartitionPlace:
    """Where a relation of the stream stands among the source's tables now."""

    exists: bool
    is_published: bool
    """Whether one of the publications names it, so that it may be sent as a table of its own."""
    above: tuple[tuple[int, tuple[str, ...]], ...]
    """The relation itself and the partitioned tables above it, from below, with their columns' names; empty if it is no
    partition."""
    was_attached: bool
    """Whether it, or a partition that it is below, was a table of its own before, and may have brought rows."""


def partition_place(connection: Connection, oid: int, publications: Sequence[str]) -> PartitionPlace:
    """Return where a relation stands, as the connection's transaction sees it."""
    row = one_row(
        connection,
        "SELECT EXISTS (SELECT FROM pg_class WHERE oid = %(oid)s), EXISTS (SELECT FROM pg_publication_rel r JOIN pg_publication p"
        " ON p.oid = r.prpubid WHERE r.prrelid = %(oid)s AND p.pubname = ANY(%(names)s)),"
        " (SELECT json_agg(json_build_array(relid::oid::bigint, ARRAY(SELECT a.attname::text FROM pg_attribute a"
        " WHERE a.attrelid = relid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum)) ORDER BY place)"
        " FROM pg_partition_ancestors(%(oid)s::oid::regclass) WITH ORDINALITY t (relid, place)),"
        " EXISTS (SELECT FROM pg_partition_ancestors(%(oid)s::oid::regclass) t (relid) JOIN pg_inherits h ON h.inhrelid = t.relid"
        f" WHERE NOT {_BORN.format('t.relid')})",
        {"oid": oid, "names": list(publications)},
    )
    above = tuple((int(relid), tuple(columns)) for relid, columns in row[2] or ())
    return PartitionPlace(bool(row[0]), bool(row[1]), above, bool(row[3]))


def dropped(connection: Connection, oids: Collection[int]) -> set[int]:
    """Return those of the OIDs that no relation has."""
    if not oids:
        return set()
    rows = all_rows(connection, "SELECT oid::bigint FROM pg_class WHERE oid = ANY(%s)", [list(oids)])
    return {*oids} - {int(row[0]) for row in rows}


def name_of(connection: Connection, oid: int) -> tuple[str, str] | None:
    """Return a relation's schema and name, as the connection's transaction sees them; None if there is none."""
    row = first_row(
        connection,
        "SELECT n.nspname::text, c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s",
        [oid],
    )
    return None if row is None else (str(row[0]), str(row[1]))


def _table(row: tuple[Any, ...]) -> SourceTable:
    identity = ReplicaIdentity(row[4])
    generated = {str(name): kind for name, kind in row[15] or ()}
    columns = tuple(
        RelationColumn(name, oid, modifier, in_identity, builtin_name(oid) or qualified_name(namespace, type_name))
        for name, oid, modifier, namespace, type_name, in_identity in row[6] or ()
    )
    return SourceTable(
        oid=int(row[0]),
        namespace=row[1],
        name=row[2],
        partitioned=bool(row[3]),
        replica_identity=identity,
        usable=bool(row[5]) and "v" not in generated.values(),
        generated_identity=tuple(sorted(name for name, kind in generated.items() if kind == "s")),
        relation=Relation(int(row[0]), row[1], row[2], identity, columns, b""),
        key=tuple(
            KeyColumn(name, type_name, namespace, None if collation is None else (collation[0], collation[1]))
            for name, type_name, namespace, collation in row[7] or ()
        ),
        row_estimate=int(row[8]),
        size_bytes=int(row[9]),
        relfilenode=int(row[10]),
        layout=tuple(AttributeFacts(*[*facts, _parts(parts)]) for *facts, parts in row[12] or ()),
        key_constraint=int(row[13] or 0),
        partitions=tuple(_partition(*partition) for partition in row[14] or ()),
        numbers_max=int(row[16]),
        ancestors=_ancestors(row),
    )


def _partition(oid: int, namespace: str, name: str, *facts: Any) -> PartitionFacts:
    return PartitionFacts(*[oid, qualified_name(namespace, name), *facts[:-1], tuple(facts[-1] or ())])


def _ancestors(row: tuple[Any, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((namespace, name) for _, namespace, name in row[11] or ())


def _parts(found: list[list[str]] | None) -> tuple[tuple[str, str], ...]:
    return tuple((part, text) for part, text in found or ())


def insert_lsn(connection: Connection) -> Lsn:
    """Return the end of the WAL written so far, as a record's end.

    PostgreSQL returns the position where the next record will begin. If the last record ended with a
    page, that is right behind the next page's header. No record ends in a header, so a stream that has
    everything would never seem to reach that position.
    """
    function = "pg_last_wal_replay_lsn()" if on_standby(connection) else "pg_current_wal_insert_lsn()"
    row = one_row(connection, f"SELECT {function}::text")
    return as_record_end(parse_lsn(row[0]))


def source_time_us(connection: Connection) -> int:
    """Return the time by the source's clock, in microseconds since 1970."""
    row = one_row(connection, "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
    return int(row[0])


def current_snapshot(connection: Connection) -> Snapshot:
    """Return a snapshot that shows which transactions have ended by now."""
    row = one_row(connection, "SELECT pg_current_snapshot()::text")
    return Snapshot.parse(row[0])


def running_bound(connection: Connection) -> int:
    """Return an id above every transaction that runs now, or has just committed and isn't visible yet.

    A snapshot's xmax isn't enough, because it counts from the latest *ended* transaction. A transaction that has written
    its commit record and waits for a standby may have a greater id. `age` counts from the next id, also on a standby.
    """
    row = one_row(connection, f"SELECT pg_current_snapshot()::text, age('{_XID_MIN}'::xid)")
    return extend_xid((int(row[1]) + _XID_MIN) % 2**32, Snapshot.parse(row[0]).xmax)


def on_standby(connection: Connection) -> bool:
    """Return whether the server replays another server's WAL."""
    row = one_row(connection, "SELECT pg_is_in_recovery()")
    return bool(row[0])


def as_record_end(lsn: Lsn) -> Lsn:
    """Return the greatest LSN at or below `lsn` at which a record can end."""
    return Lsn(lsn - lsn % PAGE_BYTES) if lsn % PAGE_BYTES <= _PAGE_HEADER_BYTES_MAX else lsn
