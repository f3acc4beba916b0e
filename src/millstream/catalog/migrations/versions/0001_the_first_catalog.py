"""The first catalog: its tables and, on PostgreSQL, the functions that draw a stream's numbers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Draws don't wait for the server's disk. The first draw of a million numbers raises the stream's ceiling durably; the
# draws below it commit asynchronously. A server that crashes may forget them, and its sequence goes back. It also
# empties the unlogged table, so that the numbers go on above the ceiling. (The start time says the same of a server
# that keeps unlogged tables, or of a dump that is restored.)
CEILINGS = "CREATE TABLE number_ceilings (stream text PRIMARY KEY, upto bigint NOT NULL)"
SERVERS = "CREATE UNLOGGED TABLE number_servers (stream text PRIMARY KEY, started timestamptz NOT NULL)"


def upgrade() -> None:
    """Create the tables, and the functions."""
    op.create_table(
        "streams",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("reserved", sa.BigInteger, nullable=False, server_default="0"),
    )
    op.create_table(
        "writers",
        sa.Column("stream", sa.Text, sa.ForeignKey("streams.id"), primary_key=True),
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("registered_us", sa.BigInteger, nullable=False),
        sa.Column("location", sa.Text, nullable=False, server_default=""),
        sa.Column("phase", sa.Text, nullable=False, server_default="settled"),
        sa.Column("position", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("last_first", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("last_count", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("given_to", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("lease_until_us", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("cut_at", sa.BigInteger),
        sa.UniqueConstraint("stream", "name", name="uq_writers_name"),
    )
    op.create_table(
        "sources",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("stream", sa.Text, sa.ForeignKey("streams.id"), nullable=False),
        sa.Column("system_identifier", sa.Text, nullable=False),
        sa.Column("database", sa.Text, nullable=False),
        sa.Column("timeline", sa.BigInteger, nullable=False),
        sa.Column("reached", sa.BigInteger, nullable=False, server_default="0"),
        sa.UniqueConstraint("stream", "system_identifier", "database", "timeline", name="uq_sources_branch"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "tables",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("stream", sa.Text, sa.ForeignKey("streams.id"), nullable=False),
        sa.Column("source", sa.Integer, nullable=False),
        sa.Column("relation_oid", sa.BigInteger, nullable=False),
        sa.Column("namespace", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("shard", sa.Integer, nullable=False, server_default="0"),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False, server_default=""),
        sa.Column("details", sa.Text, nullable=False, server_default="{}"),
        sa.Column("schema_version", sa.Integer, nullable=False, server_default="0"),
        sa.Column("copy_id", sa.Text, nullable=False, server_default=""),
        sa.Column("changed_us", sa.BigInteger, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_tables_stream", "tables", ["stream"])
    op.create_table(
        "schema_versions",
        sa.Column("table_id", sa.Integer, sa.ForeignKey("tables.id"), primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("fingerprint", sa.Text, nullable=False),
        sa.Column("arrow", sa.LargeBinary, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("table_id", "fingerprint", name="uq_schema_versions_facts"),
    )
    op.create_table(
        "copy_chunks",
        sa.Column("table_id", sa.Integer, sa.ForeignKey("tables.id"), primary_key=True),
        sa.Column("copy_id", sa.Text, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("lower", sa.Text),
        sa.Column("upper", sa.Text),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("snapshot", sa.Text),
        sa.Column("lsn", sa.BigInteger),
        sa.Column("row_count", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("size_bytes", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("facts", sa.Text, nullable=False, server_default="{}"),
    )
    op.create_table(
        "pipelines",
        sa.Column("stream", sa.Text, sa.ForeignKey("streams.id"), primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("needed_from", sa.BigInteger),
        sa.Column("landed", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("changed_us", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.Text, nullable=False, server_default="pipeline"),
        sa.Column("cut_off_at", sa.BigInteger),
        sa.Column("position", sa.Text),
    )
    op.create_table(
        "facts",
        sa.Column("scope", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
    op.create_table(
        "access_tokens",
        sa.Column("home", sa.Text, primary_key=True, server_default=""),
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("rights", sa.Text, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("expires_us", sa.BigInteger),
        sa.UniqueConstraint("home", "name", name="uq_access_tokens_name"),
    )
    if op.get_bind().dialect.name == "postgresql":
        # It imports psycopg, which the embedded catalog does without.
        from millstream.catalog.shared_sequence import DRAW_NUMBERS, NEWEST_NUMBER

        for statement in (CEILINGS, SERVERS, NEWEST_NUMBER, DRAW_NUMBERS):
            op.execute(statement)
