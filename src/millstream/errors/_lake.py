"""Errors of the lake's tables, in files or in a database, and of queries over them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from millstream.errors._root import Code, MillstreamError, Retry

_IN_CATALOG: Final = "catalog://lake"
"""Millstream's own address of a lake that lies where its catalog says (`model.addresses.IN_CATALOG`)."""


class LakeError(MillstreamError):
    """An error about the lake's tables.

    Tables that lie where the catalog says are named by their folders: `shop/current/public.orders`.
    """

    code = "lake"
    codes: ClassVar[Mapping[str, Code]] = {
        "lake_history_lost": Code(
            "A table can't be built from its history, which is damaged or doesn't reach back; details: table.",
            Retry.OPERATOR,
        ),
        "lake_table_exists": Code(
            "A new table's location already holds a table or other files; nothing is overwritten. Details: path.",
            hint="Choose another name, or delete that folder.",
        ),
        "lake_schema_conflict": Code(
            "A lake table can't follow a schema change; details: table, column.",
            Retry.OPERATOR,
        ),
        "lake_view_incomplete": Code(
            "A view of a table in PostgreSQL lacks records: `views` in [streams.S.lake] hadn't the view while they landed. The table "
            "waits.",
            Retry.OPERATOR,
            "Run `millstream tables copy T`.",
        ),
        "lake_in_database": Code(
            "The command works on lakes of files, and the stream's tables are in PostgreSQL.",
            Retry.OPERATOR,
            "Query that database with psql or another client; run `millstream tables copy T` to write a table's "
            "rows again.",
            exit_code=2,
        ),
        "lake_moved": Code(
            "An Iceberg lake lies elsewhere than its catalog says: the home or the lake's folder was moved, or `pipeline move` was "
            "interrupted at its end; details: path.",
            Retry.OPERATOR,
            "Run `millstream pipeline move` with the `location` that millstream.toml names, or repeat the interrupted move.",
        ),
        "lake_of_another_format": Code(
            "`format` in [streams.S.lake] was changed, and the lake's tables have the other format; details: path.",
            Retry.OPERATOR,
            "Set `format` back: a lake keeps its format. For another format, begin a new home.",
        ),
        "lake_of_another_log": Code(
            "The log has records below the lake's position that were written after the lake had reached it: they would never "
            "land. The log was restored from an older copy than the lake, or is another one.",
            Retry.OPERATOR,
            "Restore the lake and the log from one backup; or begin a new lake: the error tells how for its format.",
        ),
        "lake_format_unsupported": Code(
            "The command doesn't support the format of the lake's tables; details: path.",
            Retry.OPERATOR,
            "The guide to the lake's format lists what works with it.",
            exit_code=2,
        ),
        "destination": Code(
            "The PostgreSQL database in which a stream's tables land is unusable; nothing of the batch was written.",
            Retry.OPERATOR,
        ),
        "destination_unavailable": Code(
            "The destination doesn't answer, is read-only or full; the failed step is retried.",
            Retry.BACKOFF,
            "Check the destination's server.",
        ),
        "destination_refused": Code(
            "The destination rejects a value or a definition; nothing of the table's batch was written. Details: "
            "table, sqlstate.",
            Retry.OPERATOR,
        ),
        "destination_went_back": Code(
            "The destination lacks commits that it had acknowledged: it was restored to an earlier state, or "
            "failed over to a server that lacked them. Details: has.",
            Retry.REOPEN,
            "Wait for the pipeline, which continues from the destination's state if the log still has the missing "
            "records.",
        ),
        "query_memory_full": Code(
            "A query, or reading a table's changes, needs more memory than one query may have; details: size_max "
            "(bytes).",
            hint=("Query less data (fewer columns, a narrower WHERE), or raise `[http] query_memory_bytes_max`."),
        ),
        "query_spill_full": Code(
            "A query spills more to disk than one query may, to sort, join or group. Details: size_max (bytes).",
            hint=("Query less data (fewer columns, a narrower WHERE), or raise `[http] query_spill_bytes_max`."),
        ),
        "query_timeout": Code(
            "A query wasn't computed and read by its caller in time; details: time_s.",
            hint="Query less data, read the answer faster, or raise `[http] query_timeout`.",
        ),
        "query_crashed": Code(
            "DuckDB failed in the process that ran a query, before the answer was complete. Other queries "
            "continue. Details: status.",
            hint="Write the query in another form, and report the failing query.",
        ),
    }

    def __init__(self, message: str, *, code: str | None = None, hint: str | None = None, **details: Any) -> None:
        facts = {name: _shown(value) if isinstance(value, str) else value for name, value in details.items()}
        super().__init__(_shown(message), code=code, hint=hint, **facts)


def _shown(text: str) -> str:
    """Return a text without Millstream's own address of a lake, which no configuration has."""
    return text.replace(f"{_IN_CATALOG}/", "").replace(_IN_CATALOG, "the lake in the catalog")


class LakeTableForeign(LakeError):
    """A lake table holds data that Millstream didn't write; it is quarantined. Details: table, path, version."""

    code = "lake_table_foreign"
    retry = Retry.OPERATOR
    codes: ClassVar[Mapping[str, Code]] = {
        "lake_of_another_stream": Code(
            "A table of the lake was made by another stream; or, in the catalog of an Iceberg lake, by another program. Details: "
            "path, version.",
            Retry.OPERATOR,
            "Name another catalog or another lake location, or give the stream another name.",
        ),
    }


class LakeFilesGone(LakeError):
    """Files of a lake table don't exist: they were deleted or vacuumed; details: path."""

    code = "lake_files_gone"
    retry = Retry.OPERATOR
    default_hint = "Rebuild the table from its history or its source: `millstream pipeline rebuild T [--from source]`."
    codes: ClassVar[Mapping[str, Code]] = {
        "lake_catalog_lost": Code(
            "A folder has the metadata of an Iceberg table that the catalog lacks: the catalog was deleted or replaced. Details: path.",
            Retry.OPERATOR,
            "Put the catalog back: the home's data/iceberg.db, or the file that [streams.S.lake.catalog] names. If it lacks this table "
            "alone, run `millstream pipeline rebuild T [--from source]`.",
        ),
    }


class LakeConflict(LakeError):
    """Another writer committed first; nothing was written."""

    code = "lake_conflict"
    retry = Retry.BACKOFF


class LakeUnavailable(LakeError):
    """The lake can't be read or written at present: a full disk, a lost mount, or an object store that doesn't answer. The step is retried."""

    code = "lake_unavailable"
    retry = Retry.BACKOFF
    default_hint = "Check the lake's disk or object store."
    codes: ClassVar[Mapping[str, Code]] = {
        "lake_credentials": Code(
            "The lake's object store doesn't accept the keys, or there are none; details: path.",
            Retry.OPERATOR,
            "Set the keys in `[streams.S.lake.storage_options]`, or in the environment of `millstream run`; try them with "
            "`millstream doctor`, and start `run` again.",
        ),
        "lake_forbidden": Code(
            "The keys of the lake's object store don't have a right that it needs; details: path.",
            Retry.OPERATOR,
            "Allow the keys to list, read, write and delete objects under the lake's `location`, and start `millstream run` "
            "again.",
        ),
        "lake_tls_differs": Code(
            "The address of the lake's object store begins with https:// and the store has no TLS, or with http:// and it needs "
            "TLS; details: path.",
            Retry.OPERATOR,
            "Correct AWS_ENDPOINT_URL in `[streams.S.lake.storage_options]` or in the environment, and start `millstream run` again.",
        ),
        "catalog_unreachable": Code(
            "The catalog of an Iceberg lake doesn't answer; details: path.",
            Retry.BACKOFF,
            "Check `[streams.S.lake.catalog]`, and that the catalog runs.",
        ),
        "lake_bucket_missing": Code(
            "The bucket of the lake's object store doesn't exist; details: path.",
            Retry.BACKOFF,
            "Create the bucket, or name another one in the lake's `location`.",
        ),
    }


class LakeBehind(LakeError):
    """The lake lags behind the source, and won't catch up in time; details: needs."""

    code = "lake_behind"
    retry = Retry.BACKOFF
    default_hint = "Start `millstream run`, or wait for it to catch up; `millstream status` shows the lag."
