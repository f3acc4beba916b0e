"""A viewer's part of a home's status, with everything that is wrong in it, and the rates of its streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from millstream.app.status_words import how_it_stands, why_and_since
from millstream.model.access import ALL_STREAMS, Right
from millstream.process_metrics import LOG_RECORDS
from millstream.serving.access import Caller

Status: TypeAlias = Mapping[str, Any]
"""As `collect_status` returns it."""
_WINDOW_S: Final = 5.0
"""Time over which a rate is taken: over one second it would jump with each batch."""
_OLD_S: Final = 30.0
"""Age of a sample that no rate is taken from: there were no viewers since."""
_STOPPED: Final = ("capture_stalled", "pipeline_stalled")
"""Conditions that repeat a stream's own error."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The streams that a viewer may read."""

    streams: frozenset[str] | None
    """Names; None for every stream, and what concerns the whole home."""

    @classmethod
    def of(cls, caller: Caller, names: Iterator[str]) -> Sight:
        """Return a caller's sight. Raises `AccessError` (`forbidden`) if it may read none of the streams."""
        if caller.may(Right.READ):
            return cls(None)
        found = frozenset(name for name in names if caller.may(Right.READ, name))
        if not found:
            caller.check(Right.READ, ALL_STREAMS)
        return cls(found)

    def has(self, stream: str) -> bool:
        """Return whether the viewer may read a stream."""
        return self.streams is None or stream in self.streams

    def part_of(self, status: Status) -> Status:
        """Return the status without what the viewer may not read."""
        if self.streams is None:
            return status
        return {
            **status,
            "streams": [stream for stream in status["streams"] if self.has(stream["name"])],
            "conditions": [one for one in status["conditions"] if self.has(one["stream"])],
            # Their texts may name other streams.
            "alerts": None,
            "problems": [],
            "measures": {},
            "resources": {"memory_bytes": {}, "disk_free_bytes": None, "disk_size_bytes": None},
        }


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that is wrong, and what to do about it."""

    code: str
    message: str
    hint: str
    stream: str = ""
    is_error: bool = True
    """False for what an operator chose, or what passes on its own."""


def troubles_of(status: Status) -> list[Trouble]:
    """Return everything that is wrong, errors first."""
    found = [Trouble("problem", text, "Run `millstream doctor`.") for text in status["problems"]]
    for stream in status["streams"]:
        found += _of_stream(stream)
    processes = status["processes"]
    waits = any(stream["lag"]["lake"]["records"] for stream in status["streams"] if stream.get("id"))
    if processes.get("run") is not None and processes.get("pipeline") is None and waits:
        message = "the pipeline's process isn't running, and records wait for the lake"
        hint = "`millstream run` starts it again within seconds; if it doesn't, read its log."
        found.append(Trouble("pipeline_down", message, hint, is_error=False))
    for one in status["conditions"]:
        failing = {part for s in status["streams"] if s["name"] == one["stream"] for part in s.get("errors", ())}
        if one["kind"] not in _STOPPED or one["kind"].removesuffix("_stalled") not in failing:
            found.append(Trouble(one["kind"], one["message"], one["hint"], one["stream"]))
    alerts = status["alerts"] or {}
    if alerts.get("error") is not None:
        message = f"{alerts['receiver']} has taken no alert since {alerts['failing_since']}: {alerts['error']}"
        found.append(Trouble("alerts", message, "Check `[alerts]` in millstream.toml.", is_error=False))
    return sorted(found, key=lambda trouble: not trouble.is_error)


def _of_stream(stream: Mapping[str, Any]) -> Iterator[Trouble]:
    name = stream["name"]
    for part, error in stream.get("errors", {}).items():
        hint = error.get("hint") or ""
        if "`" not in hint:  # an operator gets a command in any case
            hint = f"{hint} Run `millstream doctor`.".strip()
        yield Trouble(error["code"], f"{part} {how_it_stands(error)}: {why_and_since(error)}", hint, name)
    for its in filter(None, [stream.get("replication"), *stream.get("regions", ())]):
        yield from _of_node(its, name)
    if not stream.get("id"):
        return
    if stream["source"]["slot_dropped"]:
        message = "the slot was dropped: the next run makes a new one and copies every table again"
        yield Trouble("slot_dropped", message, "Run `millstream run`.", name)
    for writer in stream["writers"]:
        if writer["state"] == "expired" and writer["behind"]:
            message = f"readers wait for {writer['name']}, a writer with an expired lease ({writer['location']})"
            hint = f"Start it again. If its log is lost for good: `millstream writers forget {writer['name']}`."
            yield Trouble("writer_expired", message, hint, name)
    for holder, facts in stream["log"].get("cut_off", {}).items():
        if facts["kind"] != "consumer":  # a consumer's is a condition
            message = f"the {facts['kind']} {holder} was cut off: the log began at {facts['first']} then"
            yield Trouble("cut_off", message, "Build the follower again: `millstream restore`.", name)


def _of_node(its: Mapping[str, Any], stream: str) -> Iterator[Trouble]:
    for error in (its["error"], (its.get("following") or {}).get("error")):
        if error is not None:
            yield Trouble(error["code"], error["message"], error.get("hint") or "", stream)
    if its["role"] == "fenced":
        message = f"writes go to {its['leader']}"
        yield Trouble("fenced", message, f"Run `millstream follow {its['leader']}` to follow it.", stream)
    if its["role"] == "follows" and not its["following"]:
        message = f"this node follows {its['leader']}, but no process of it does"
        yield Trouble("not_following", message, "Run `millstream run` or `millstream follow`.", stream)


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


class Rates:
    """Records a second that enter each stream's log, from successive statuses."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, int]]] = deque()

    def take(self, status: Status, now_s: float) -> dict[str, float]:
        """Take a status; return the rate by stream, of those for which one is known."""
        counts = records_written(status)
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
