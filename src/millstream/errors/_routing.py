"""Errors of routing: rows that no rule takes, invalid rules, and writes of which some sinks failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from millstream.errors._root import Code, MillstreamError, Retry


class RoutingError(MillstreamError):
    """Rows have no target; nothing of the call was appended."""

    code = "routing"
    codes: ClassVar[Mapping[str, Code]] = {
        "no_route_matches": Code(
            "No rule and no hash ring matches some rows; details: table, row (the first of them, from 0), rows "
            "(their number).",
            Retry.OPERATOR,
            'Add a matching rule to [streams.S.routing] (to drop the rows, `to = "devnull"`), or columns for the '
            "hash ring.",
        ),
        "invalid_route": Code(
            "A rule doesn't fit a table: its columns have other types, or one key's rows would go to several "
            "shards. Details: table.",
            Retry.OPERATOR,
            "Run `millstream route explain TABLE` to find the rule, and correct [streams.S.routing].",
            exit_code=2,
        ),
        "not_one_operation": Code(
            "The tables of one operation go to different places: to the log and to sinks, to different sinks, or to "
            "different shards of a write buffer. Nothing was appended. Details: tables.",
            hint="Append the tables in separate calls.",
        ),
        "reshard_refused": Code(
            "The requested change of a stream's number of shards isn't possible; nothing was changed. Details: stream.",
            Retry.OPERATOR,
        ),
    }


class PartialWrite(RoutingError):
    """The log or a sink took a write's rows, and another sink didn't.

    Details: succeeded (each result, by sink), failed (the error of each).
    """

    code = "partial_write"
    default_hint = (
        "Send the write again under its session number or idempotency key, which reaches only the sinks that "
        "lack it; without one, all sinks get it again."
    )
