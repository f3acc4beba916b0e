"""Spark sessions of benches: a session that the process has already is used and stays open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from millstream.spark.session import SparkOptions, open_context


@contextmanager
def session(options: SparkOptions) -> Iterator[SparkSession]:
    """Yield a session, and stop it at the end unless it was there before."""
    is_own = SparkSession.getActiveSession() is None
    open_context(options)
    opened = SparkSession.builder.getOrCreate()
    try:
        yield opened
    finally:
        if is_own:
            opened.stop()
