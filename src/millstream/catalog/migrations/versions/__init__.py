"""Alembic finds the migrations here: one file a revision."""
