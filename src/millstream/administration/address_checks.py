"""The check whether `serve` can listen on the addresses that a home configures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from millstream.errors import MillstreamError
from millstream.processes.listening import listen
from millstream.processes.role_locks import holder

if TYPE_CHECKING:
    from millstream.home.home import Home


def examine_addresses(home: Home) -> Iterator[tuple[str, str | MillstreamError]]:
    """Yield each address's check, with its result or its error; none for addresses that the home's own server has."""
    if holder(home.run_folder, "serve"):
        return
    for section, address in (("http", home.config.http.address), ("flight", home.config.flight.address)):
        if address is not None:
            try:
                listen(*address).close()
            except MillstreamError as error:
                yield f"[{section}] listen", error
            else:
                yield f"[{section}] listen", f"{address[0]}:{address[1]} is free"
