"""Errors of routing: rows that no rule takes, invalid rules, and writes of which some sinks failed."""

from __future__ import annotations

from millstream.errors._root import MillstreamError, Retry


class RoutingError(MillstreamError):
    """Rows have no target; nothing of the call was appended."""

    code = "routing"


class NoRouteMatches(RoutingError):
    """No rule and no hash ring takes some rows; details: table, row (the first of them, from 0), rows (how many)."""

    code = "no_route_matches"
    retry = Retry.OPERATOR
    default_hint = 'Add a rule that takes them to [streams.S.routing] (to drop them, `to = "devnull"`), or columns for the hash ring.'


class InvalidRoute(RoutingError):
    """A rule doesn't fit a table: its columns have other types, or one key's rows would go to several shards.

    Details: table.
    """

    code = "invalid_route"
    retry = Retry.OPERATOR
    exit_code = 2
    default_hint = "`millstream route explain TABLE` shows which rule it is; mend [streams.S.routing]."


class PartialWrite(RoutingError):
    """The log or a sink took a write's rows, and another sink didn't.

    Details: succeeded (each result, by sink), failed (the error of each).
    """

    code = "partial_write"
    default_hint = (
        "What succeeded stays written. Send it again under its session number or idempotency key: it goes to those that lack it; without one it goes "
        "to all of them anew. Sinks that may fail are named in `ignore_errors`."
    )


class ReshardRefused(RoutingError):
    """The requested change of a stream's number of shards isn't possible; nothing was changed. Details: stream."""

    code = "reshard_refused"
    retry = Retry.OPERATOR
