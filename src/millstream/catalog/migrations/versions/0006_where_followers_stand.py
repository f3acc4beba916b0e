"""Followers also hold segments by their position on each shard."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column: JSON, by shard the segment and the position in it."""
    op.add_column("pipelines", sa.Column("position", sa.Text))
