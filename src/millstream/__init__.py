"""Millstream: an ordered, durable change log for PostgreSQL, with its data pipeline on Spark."""

__version__ = "0.1.0"
