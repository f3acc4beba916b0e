"""The catalog's tables for SQLAlchemy. The migrations create them; a test holds the two together.

64-bit numbers that are unsigned in PostgreSQL (the system identifier) are text: SQLite's integers are signed.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, ForeignKey, Integer, LargeBinary, MetaData, Table, Text, UniqueConstraint

metadata = MetaData()

streams = Table(
    "streams",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("created_us", BigInteger, nullable=False),
    # The newest epoch given to any writer of the stream.
    Column("epoch", BigInteger, nullable=False, server_default="0"),
    # The greatest number that may have been given out.
    Column("reserved", BigInteger, nullable=False, server_default="0"),
)

writers = Table(
    "writers",
    metadata,
    Column("stream", Text, ForeignKey("streams.id"), primary_key=True),
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("name", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("registered_us", BigInteger, nullable=False),
    # For a writer that shares its stream's numbers: fields of protocol.sequencer.WriterEntry.
    Column("location", Text, nullable=False, server_default=""),
    Column("phase", Text, nullable=False, server_default="settled"),
    Column("position", BigInteger, nullable=False, server_default="0"),
    Column("last_first", BigInteger, nullable=False, server_default="0"),
    Column("last_count", BigInteger, nullable=False, server_default="0"),
    Column("given_to", BigInteger, nullable=False, server_default="0"),
    Column("lease_until_us", BigInteger, nullable=False, server_default="0"),
    Column("cut_at", BigInteger),
    UniqueConstraint("stream", "name", name="uq_writers_name"),
)

sources = Table(
    "sources",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("stream", Text, ForeignKey("streams.id"), nullable=False),
    Column("system_identifier", Text, nullable=False),
    Column("database", Text, nullable=False),
    Column("timeline", BigInteger, nullable=False),
    Column("reached", BigInteger, nullable=False, server_default="0"),
    UniqueConstraint("stream", "system_identifier", "database", "timeline", name="uq_sources_branch"),
    sqlite_autoincrement=True,
)

tables = Table(
    "tables",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("stream", Text, ForeignKey("streams.id"), nullable=False, index=True),
    Column("source", Integer, nullable=False),
    Column("relation_oid", BigInteger, nullable=False),
    Column("namespace", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("shard", Integer, nullable=False, server_default="0"),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False, server_default=""),
    Column("details", Text, nullable=False, server_default="{}"),
    Column("schema_version", Integer, nullable=False, server_default="0"),
    Column("copy_id", Text, nullable=False, server_default=""),
    Column("changed_us", BigInteger, nullable=False),
    # A table id is never given twice, even after rows were deleted.
    sqlite_autoincrement=True,
)

schema_versions = Table(
    "schema_versions",
    metadata,
    Column("table_id", Integer, ForeignKey("tables.id"), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    # SHA-256 over the facts without the version: equal facts are the same version.
    Column("fingerprint", Text, nullable=False),
    # TableSchema.to_arrow(), serialized as Arrow IPC.
    Column("arrow", LargeBinary, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    UniqueConstraint("table_id", "fingerprint", name="uq_schema_versions_facts"),
)

copy_chunks = Table(
    "copy_chunks",
    metadata,
    Column("table_id", Integer, ForeignKey("tables.id"), primary_key=True),
    Column("copy_id", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("lower", Text),
    Column("upper", Text),
    Column("state", Text, nullable=False),
    Column("snapshot", Text),
    Column("lsn", BigInteger),
    Column("row_count", BigInteger, nullable=False, server_default="0"),
    Column("size_bytes", BigInteger, nullable=False, server_default="0"),
    Column("facts", Text, nullable=False, server_default="{}"),
)

pipelines = Table(
    "pipelines",
    metadata,
    Column("stream", Text, ForeignKey("streams.id"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("needed_from", BigInteger),
    Column("landed", BigInteger, nullable=False, server_default="0"),
    Column("changed_us", BigInteger, nullable=False),
    Column("kind", Text, nullable=False, server_default="pipeline"),
    Column("cut_off_at", BigInteger),
    Column("position", Text),
)

facts = Table(
    "facts",
    metadata,
    Column("scope", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

access_tokens = Table(
    "access_tokens",
    metadata,
    # Its home, if several homes share the catalog, which may know one token; empty in an embedded one.
    Column("home", Text, primary_key=True, server_default=""),
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    # SHA-256 of its secret; the secret itself isn't stored.
    Column("digest", LargeBinary, nullable=False),
    # JSON: rights by stream, or "*".
    Column("rights", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger),
    UniqueConstraint("home", "name", name="uq_access_tokens_name"),
)
