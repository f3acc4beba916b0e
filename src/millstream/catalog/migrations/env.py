"""Alembic's entry: runs migrations on the connection that `upgrade` passes, in its transaction."""

from __future__ import annotations

from alembic import context

from millstream.catalog.sql_tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
