"""Records written to each stream and messages delivered to each consumer: counts, and rates from successive statuses."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from millstream.process_metrics import LOG_RECORDS

Status: TypeAlias = Mapping[str, Any]
"""As `collect_status` returns it."""
_WINDOW_S: Final = 5.0
"""Time over which a rate is taken: over one second it would jump with each batch."""
_OLD_S: Final = 30.0
"""Age above which a sample is dropped: a rate over a longer time isn't the present one."""


def records_written(status: Status) -> dict[str, int]:
    """Return by stream the number of records that entered its log, from a time on that only a restart changes."""
    written = {stream["id"]: stream["name"] for stream in status["streams"] if stream.get("id")}
    counted: dict[str, int] = {}
    for series in status["measures"].values():
        for one in series.get(LOG_RECORDS.name, ()):
            name = written.get(one["labels"][0])
            if name is not None:
                counted[name] = counted.get(name, 0) + int(one["value"])
    # A writer counts records; where none runs, as on a follower, numbers are about as many.
    numbers = {
        stream["name"]: int(token.partition(".s")[2])
        for stream in status["streams"]
        if (token := (stream.get("tokens") or {}).get("durable")) is not None
    }
    return numbers | counted


def consumer_key(stream: str, consumer: str) -> str:
    """Return the key of a consumer's rate; no stream has such a name."""
    return f"{stream}/{consumer}"


def _delivered(status: Status) -> dict[str, int]:
    """Return by consumer the number of messages that were delivered for the first time."""
    return {
        consumer_key(stream["name"], one["name"]): one["delivered"]
        for stream in status["streams"]
        for one in stream.get("consumers", ())
    }


class Rates:
    """Records a second that enter each stream's log, and messages a second of each consumer, from successive statuses."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, int]]] = deque()

    def take(self, status: Status, now_s: float) -> dict[str, float]:
        """Take a status; return the rate by stream and by `consumer_key`, of those for which one is known."""
        counts = records_written(status) | _delivered(status)
        samples = self._samples
        while samples and (now_s - samples[0][0] > _OLD_S or (len(samples) > 1 and now_s - samples[1][0] >= _WINDOW_S)):
            samples.popleft()
        before_s, before = samples[0] if samples else (now_s, {})
        samples.append((now_s, counts))
        took_s = now_s - before_s
        if took_s <= 0:
            return {}
        return {
            name: (count - before[name]) / took_s
            for name, count in counts.items()
            if name in before and count >= before[name]
        }
