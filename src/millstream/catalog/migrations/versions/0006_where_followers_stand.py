"""Followers hold segments by where they stand on each shard, too."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column: JSON, by shard the segment and the place in it."""
    op.add_column("pipelines", sa.Column("position", sa.Text))
