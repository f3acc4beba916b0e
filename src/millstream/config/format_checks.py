"""Settings of a stream's lake that its tables' format doesn't have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from millstream.config.model import LakeConfig
from millstream.config.toml_lines import KeyPath
from millstream.libpq import is_address

_VIEWS: Final = {
    "delta": {"current", "history", "scd2", "merged"},
    "iceberg": {"current", "history", "scd2", "merged"},
    "postgres": {"changes", "current"},
}


def clashes_of_format(at: KeyPath, lake: LakeConfig, *, is_local: bool) -> Iterator[tuple[KeyPath, str]]:
    """Yield each setting of a stream's lake that doesn't go with its format."""
    in_database = lake.format == "postgres"
    if in_database and not is_address(lake.location) and not lake.location.startswith("${"):
        yield (*at, "lake", "location"), "must be a PostgreSQL address such as postgresql://user@host/database"
    if not in_database and is_address(lake.location):
        yield (*at, "lake", "location"), 'is a PostgreSQL address: set format = "postgres", or name a folder'
    possible = _VIEWS[lake.format]
    for view in sorted(set(lake.shown) - possible):
        yield (
            (*at, "lake", "views"),
            f"{view!r} isn't a view of {lake.format!r}, which has {', '.join(sorted(possible))}",
        )
    if not in_database and lake.schema_prefix:
        yield (*at, "lake", "schema_prefix"), 'is for format = "postgres" alone'
    if lake.format == "iceberg":
        yield from _clashes_of_iceberg(at, lake, is_local=is_local)
    elif lake.catalog:
        yield (*at, "lake", "catalog"), 'is for format = "iceberg" alone'


def _clashes_of_iceberg(at: KeyPath, lake: LakeConfig, *, is_local: bool) -> Iterator[tuple[KeyPath, str]]:
    """Yield what isn't supported yet with Iceberg: other catalogs, and an SQL catalog with executors elsewhere."""
    if lake.catalog_type not in {"sql", "rest"}:
        yield (
            (*at, "lake", "catalog", "type"),
            f'must be "sql" or "rest": a catalog of type {lake.catalog_type!r} isn\'t supported',
        )
    if lake.catalog_type == "rest" and "uri" not in lake.catalog:
        yield (*at, "lake", "catalog", "type"), 'is "rest", which needs `uri`: the address of the catalog\'s server'
    if lake.catalog_type == "sql" and not is_local:
        yield (
            (*at, "lake", "catalog", "type"),
            'can\'t be "sql" with a Spark master elsewhere: executors don\'t reach the catalog in the home; set "rest"',
        )
