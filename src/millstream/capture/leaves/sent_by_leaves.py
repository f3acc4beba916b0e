"""The publications' side: whether leaf partitions are sent under their own OIDs, and the change that makes them so.

Only publications that are ours are read by leaves: they name their tables, and they have the comment that capture gave
them with the change, or our role owns them and they have `publish_via_partition_root` and no comment, as those of earlier
versions. A superuser counts as the owner of those alone that it made. A
row filter or a column list of a partitioned table needs that option; such a publication stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from psycopg import sql

from millstream.capture.connection import Connection, all_rows, one_row, translated

MARK: Final = "made for Millstream, which reads partitions under their own names"
"""The comment of a publication that is ours."""
# Publications of schemas exist from PostgreSQL 15 on.
_SCHEMAS: Final = "OR EXISTS (SELECT FROM pg_publication_namespace s WHERE s.pnpubid = p.oid)"
# A superuser has the privileges of every role.
_OWNED: Final = (
    "CASE WHEN current_setting('is_superuser') = 'on' THEN pg_get_userbyid(p.pubowner) = current_user"
    " ELSE pg_has_role(p.pubowner, 'USAGE') END"
)
_LIMITS: Final = "coalesce(to_jsonb(r) ->> 'prqual', to_jsonb(r) ->> 'prattrs') IS NOT NULL"  # from 15 on


def others(server_version: int) -> str:
    """Return the SQL condition that a publication `p` isn't ours; its parameter `mark` is `MARK`."""
    schemas = _SCHEMAS if server_version >= 150000 else ""
    comment = "obj_description(p.oid, 'pg_publication')"
    earlier = f"p.pubviaroot AND {comment} IS NULL AND {_OWNED}"
    return f"(p.puballtables {schemas} OR NOT ({comment} IS NOT DISTINCT FROM %(mark)s OR ({earlier})))"


def reads_leaves(connection: Connection, publications: Sequence[str]) -> bool:
    """Return whether those of the publications that exist are all ours."""
    condition = others(connection.info.server_version)
    row = one_row(
        connection,
        f"SELECT bool_or({condition}) FROM pg_publication p WHERE p.pubname = ANY(%(names)s)",
        {"mark": MARK, "names": list(publications)},
    )
    return not row[0]


def leaves_published(name: str) -> list[sql.Composed]:
    """Return the statements that let a publication send leaf partitions under their own OIDs, and mark it as ours."""
    named = sql.Identifier(name)
    return [
        sql.SQL("COMMENT ON PUBLICATION {} IS {}").format(named, sql.Literal(MARK)),
        sql.SQL("ALTER PUBLICATION {} SET (publish_via_partition_root = false)").format(named),
    ]


def sent_by_leaves(connection: Connection, publications: Sequence[str]) -> dict[int, str]:
    """Return the partitioned tables that publications which are ours send as their leaf partitions, by OID.

    Each has a text that another `ALTER PUBLICATION … SET` changes, even if it sets what is set already.
    """
    rows = all_rows(
        connection,
        "SELECT r.prrelid::bigint, string_agg(p.oid || ' ' || p.xmin, ', ' ORDER BY p.oid) FROM pg_publication_rel r"
        " JOIN pg_publication p ON p.oid = r.prpubid JOIN pg_class c ON c.oid = r.prrelid WHERE c.relkind = 'p'"
        " AND p.pubname = ANY(%s) GROUP BY r.prrelid HAVING NOT bool_or(p.pubviaroot)",
        [list(publications)],
    )
    return {int(oid): str(setting) for oid, setting in rows}


def publish_leaves(connection: Connection, publications: Sequence[str]) -> None:
    """Let publications that are ours send partitioned tables as their leaf partitions.

    Transactions that commit after this, and only those, are sent so, also if they began before.

    Raises:
        SourceError: the change failed; nothing else depends on it.
    """
    with translated():
        rows = connection.execute(
            "SELECT p.pubname FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid"
            " JOIN pg_class c ON c.oid = r.prrelid WHERE c.relkind = 'p' AND p.pubname = ANY(%s)"
            " AND pg_has_role(p.pubowner, 'USAGE')"
            f" AND NOT pg_is_in_recovery() GROUP BY p.oid, p.pubname, p.pubviaroot HAVING p.pubviaroot AND NOT bool_or({_LIMITS})",
            [list(publications)],
        ).fetchall()
        for (name,) in rows:
            with connection.transaction():
                connection.execute("SET LOCAL lock_timeout = '2s'")
                for statement in leaves_published(name):
                    connection.execute(statement)
