"""A client of `/tail`: events as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Event:
    """An event with data."""

    id: str
    data: dict[str, Any]
    kind: str = "message"


class Events:
    """The events of an answer, and its comments."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.comments = 0
        self._events = self._read()

    def take(self, count: int) -> list[Event]:
        """Return the next events."""
        return [next(self._events) for _ in range(count)]

    def rest(self) -> list[Event]:
        """Return the events up to the answer's end."""
        return list(self._events)

    def _read(self) -> Iterator[Event]:
        fields: dict[str, str] = {}
        for line in self.response.iter_lines():
            if line.startswith(":"):
                self.comments += 1
            elif line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif fields:
                yield Event(fields.get("id", ""), json.loads(fields["data"]), fields.get("event", "message"))
                fields = {}


@contextmanager
def tailing(url: str, stream: str = "web", *, last: str | None = None, **params: Any) -> Iterator[Events]:
    """Open a tail; the answer has begun."""
    headers = {} if last is None else {"Last-Event-ID": last}
    with (
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
        client.stream("GET", f"/v1/streams/{stream}/tail", params=params, headers=headers) as response,
    ):
        if response.status_code != 200:
            response.read()
        yield Events(response)


def refusal(url: str, stream: str = "web", **params: Any) -> tuple[int, str]:
    """Return the status and the code of a tail that is refused."""
    with tailing(url, stream, **params) as events:
        return events.response.status_code, events.response.json()["code"]
