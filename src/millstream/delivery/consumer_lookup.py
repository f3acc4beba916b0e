"""A consumer by its name, for one call at a time; and the errors of calls that name no consumer, or no place of the log."""

from __future__ import annotations

from collections.abc import Callable

from millstream.delivery.definition import START_HINT, Definition
from millstream.delivery.running_consumer import Running
from millstream.errors import DeliveryError, InvalidValue, MillstreamError


class Locked:
    """A consumer for the caller alone; raises `unknown_consumer` if it was deleted."""

    def __init__(self, running: Running, unknown: Callable[[str], DeliveryError]) -> None:
        self._running = running
        self._unknown = unknown

    def __enter__(self) -> Running:
        running = self._running
        running.lock.acquire()
        if running.is_deleted:
            running.lock.release()
            raise self._unknown(running.definition.name)
        return running

    def __exit__(self, *_: object) -> None:
        self._running.lock.release()


def unknown_consumer(stream: str, name: str) -> DeliveryError:
    """Return the error for a name that no consumer of the stream has."""
    return DeliveryError(
        f"stream {stream} has no consumer {name[:80]!r}", code="unknown_consumer", stream=stream, consumer=name[:80]
    )


def invalid_place(code: str, field: str, what: str) -> MillstreamError:
    """Return the error for a text that names no place of the log, in a definition or in another request."""
    if code == "invalid_consumer":
        return DeliveryError(what, code=code, hint=START_HINT, field=field)
    return InvalidValue(what, hint=START_HINT, column=field)


def exists_already(stream: str, known: Definition, wanted: Definition) -> DeliveryError:
    """Return the error for making a consumer that is there with another definition; it names what differs."""
    return DeliveryError(
        f"stream {stream} has a consumer {wanted.name} with another {', '.join(known.differences(wanted))}",
        code="consumer_exists",
        hint="Make it under another name, or remove the one that is there.",
        stream=stream,
        consumer=wanted.name,
    )
