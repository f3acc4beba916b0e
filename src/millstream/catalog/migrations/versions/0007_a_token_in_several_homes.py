"""Homes that share a catalog can know one token: nodes of a stream authenticate one another by it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make home and id the key. SQLite can't change a key in place: there the table is created again, with its rows."""
    if op.get_bind().dialect.name == "postgresql":
        op.drop_constraint("access_tokens_pkey", "access_tokens", type_="primary")
        op.create_primary_key("access_tokens_pkey", "access_tokens", ["home", "id"])
        return
    op.create_table(
        "access_tokens_anew",
        sa.Column("home", sa.Text, primary_key=True, server_default=""),
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("rights", sa.Text, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("expires_us", sa.BigInteger),
        sa.UniqueConstraint("home", "name", name="uq_access_tokens_name"),
    )
    op.execute(
        "INSERT INTO access_tokens_anew (home, id, name, digest, rights, created_us, expires_us) "
        "SELECT home, id, name, digest, rights, created_us, expires_us FROM access_tokens"
    )
    op.drop_table("access_tokens")
    op.rename_table("access_tokens_anew", "access_tokens")
