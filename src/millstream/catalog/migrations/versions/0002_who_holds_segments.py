"""Holders of segments have a kind, and may have been cut off."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; an existing holder with a `/` in its name is a table that a pipeline has set aside."""
    op.add_column("pipelines", sa.Column("kind", sa.Text, nullable=False, server_default="pipeline"))
    op.add_column("pipelines", sa.Column("cut_off_at", sa.BigInteger))
    op.execute("UPDATE pipelines SET kind = 'backlog' WHERE name LIKE '%/%'")
