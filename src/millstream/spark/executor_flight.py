"""The options `flight`, `token` and `verify` of the source: executors that don't see the log's folder read it from a home's server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from millstream.errors import UsageError
from millstream.spark.local_folders import folder_of
from millstream.wal.flight_log import FlightLog

OPTIONS: Final = ("flight", "token", "verify")
_ADDRESS: Final = re.compile(r"(grpc|grpc\+tls)://([^/@\s]+:[0-9]+)/?")


def flight_of(given: Mapping[str, str], stream: str) -> FlightLog | None:
    """Return the server that options name, in lower case; None if they name none.

    Raises:
        UsageError: an option is malformed or can't be read, or stands without `flight`.
    """
    place = given.get("flight")
    if place is None:
        for name in OPTIONS:
            if name in given:
                raise UsageError(f"{name} goes with flight only", hint="Add the address of the home's Flight server.")
        return None
    found = _ADDRESS.fullmatch(place)
    if found is None:
        raise UsageError(
            "flight isn't an address of a Flight server",
            hint="Name it as grpc+tls://host:8788, or grpc:// without TLS.",
        )
    authority = None
    if "verify" in given:
        file = folder_of(given["verify"])
        try:
            authority = file.read_bytes()
        except OSError as error:
            raise UsageError(f"{file} can't be read: {error.strerror}", hint="Name a file of certificates.") from error
    return FlightLog(found[2], stream, found[1] == "grpc+tls", authority, given.get("token"))
