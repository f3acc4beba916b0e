"""Why a stream makes no progress: from the process that writes it, or from its notes if it has ended."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import MillstreamError
from millstream.processes.control_socket import ask

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.home.home import Home
    from millstream.model.ids import StreamId

_GIVEN_UP: Final = "given_up"


def note_given_up(catalog: Catalog, name: str, error: MillstreamError) -> None:
    """Record why a stream was given up, for after its process has ended; an unwritable catalog is ignored."""
    with contextlib.suppress(MillstreamError):
        catalog.put_fact(_scope(catalog.stream(name).id), _GIVEN_UP, error.as_dict())


def forget_given_up(catalog: Catalog, stream: StreamId) -> None:
    """Clear the record: the stream makes progress, or an operator has decided.

    An unwritable catalog is ignored.
    """
    with contextlib.suppress(MillstreamError):
        if catalog.fact(_scope(stream), _GIVEN_UP) is not None:
            catalog.drop_fact(_scope(stream), _GIVEN_UP)


def capture_trouble(catalog: Catalog, stream: StreamId, live: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return why a stream isn't captured; None if it is, or was told to stop.

    Args:
        catalog: the home's.
        stream: the stream's id.
        live: the facts of the process that writes it; None if none runs.

    Returns:
        The error's `code`, `message`, `hint`, `retry` and `details`, and `gave_up`: whether it isn't
        retried automatically.
    """
    error = catalog.fact(_scope(stream), _GIVEN_UP) if live is None else live.get("error")
    return {**error, "gave_up": live is None or bool(live.get("gave_up"))} if error else None


def troubles(home: Home) -> list[dict[str, Any]]:
    """Return the troubles of streams: each with `stream`, `part`, `code`, `message`, `hint`, `gave_up`.

    Asks the running processes and the catalog, not the lake. A catalog that can't be read yields nothing.
    """
    owner, pipeline = ((ask(home, role, "status") or {}).get("streams", {}) for role in ("owner", "pipeline"))
    found = [(name, "pipeline", facts.get("error")) for name, facts in pipeline.items()]
    with contextlib.suppress(MillstreamError):
        if home.has_catalog():
            with home.open_catalog() as catalog:
                known = catalog.streams()
                found += [(row.name, "capture", capture_trouble(catalog, row.id, owner.get(row.name))) for row in known]
    return [
        {
            "stream": stream,
            "part": part,
            **{key: error.get(key, "") for key in ("code", "message", "hint")},
            "gave_up": bool(error.get("gave_up")),
        }
        for stream, part, error in sorted(found, key=lambda one: one[:2])
        if error
    ]


def _scope(stream: StreamId) -> str:
    return f"capture/{stream}"
