"""The first catalog: streams, writers, sources, tables, schema versions, copy chunks, pipelines, facts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
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
    )
    op.create_table(
        "facts",
        sa.Column("scope", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
