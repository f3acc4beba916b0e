"""The rules: which conditions of a home need an operator. `status`, `doctor`, the console and alerts judge by them.

They read a status, as `collect_status` returns it, and what was observed over time. They do no I/O.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from millstream.app.alerts.observations import Observations
from millstream.app.status_words import TRIED_AGAIN
from millstream.capture.noted_slots import NotedSlot
from millstream.config.alerts_model import AlertsConfig
from millstream.config.quantities import size_bytes
from millstream.model.durations import duration_s
from millstream.model.human_text import counted, human_seconds
from millstream.model.replication import follower_of_holder
from millstream.writers.left_slots import left_hint, left_words


class Kind(StrEnum):
    """The kinds of conditions."""

    SLOT_LAG = "slot_lag"
    SLOT_INACTIVE = "slot_inactive"
    SLOT_DROPPED = "slot_dropped"
    SLOT_LEFT = "slot_left"
    TABLE_QUARANTINED = "table_quarantined"
    TABLE_HELD = "table_held"
    KEY_CHANGED = "key_changed"
    MERGE_CHANGED = "merge_changed"
    BUFFER_UNDECODABLE = "buffer_undecodable"
    CAPTURE_STALLED = "capture_stalled"
    PIPELINE_STALLED = "pipeline_stalled"
    PIPELINE_DOWN = "pipeline_down"
    LAKE_WAITS = "lake_waits"
    SERVER_DOWN = "server_down"
    WRITER_EXPIRED = "writer_expired"
    FOLLOWER_CUT_OFF = "follower_cut_off"
    FOLLOWER_APART = "follower_apart"
    FENCED = "fenced"
    OTHER_STREAM = "other_stream"
    NOT_FOLLOWING = "not_following"
    REPLICATION_STALLED = "replication_stalled"
    CONSUMER_CUT_OFF = "consumer_cut_off"
    CONSUMER_STALLED = "consumer_stalled"
    CONSUMER_DEAD_LETTERS = "consumer_dead_letters"
    SOURCE_SILENT = "source_silent"
    STREAM_SILENT = "stream_silent"


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that lasts. Kind, stream and subject identify it."""

    kind: Kind
    stream: str
    """Its name; empty if it concerns the whole home."""
    subject: str
    """The slot, table, write buffer, writer, consumer, follower or node; the log's name if it concerns the whole log."""
    message: str
    hint: str
    is_alert: bool = True
    """Whether alerts are sent about it. False for what an operator chose, and for what may still pass on its own."""

    @property
    def key(self) -> str:
        """Its identity, as one text."""
        return f"{self.kind}/{self.stream}/{self.subject}"

    def as_dict(self) -> dict[str, Any]:
        """Return it, JSON-able."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of `[alerts]`."""

    slot_lag_bytes: int
    stalled_s: float
    silent_s: float
    no_records_s: float | None

    @classmethod
    def of(cls, alerts: AlertsConfig) -> Bounds:
        """Return those of a configuration."""
        no_records_s = None if alerts.no_records_after is None else duration_s(alerts.no_records_after)
        return cls(
            size_bytes(alerts.slot_lag), duration_s(alerts.stalled_after), duration_s(alerts.silent_after), no_records_s
        )


def facts_of(status: Mapping[str, Any], seen: Observations) -> dict[str, Any]:
    """Return, by key, the facts of a status that matter by how long they last. None as a value: there is nothing to wait for."""
    found: dict[str, Any] = {"serve": True if status.get("errors") else None}
    for its in (one for stream in status["streams"] for one in _nodes(stream)):
        found[f"follow/{its['stream']}"] = True if _is_apart(its) else None
        found[f"replication/{its['stream']}"] = True if node_errors(its) else None
    for stream in led_streams(status):
        name = stream["name"]
        found[f"capture/{name}"] = _capture_fails(status, stream)
        found[f"pipeline_error/{name}"] = True if "pipeline" in stream["errors"] else None
        if not stream["id"]:
            continue
        for one in _apart_followers(stream):
            found[f"follower/{name}/{one['node']}"] = True
        for writer in stream["writers"]:
            found[f"writer/{name}/{writer['name']}"] = True if _is_waited_for(writer) else None
        found[f"undecodable/{name}"] = _undecodable(stream) or None
        found[f"slot/{name}"] = _is_unread(stream, seen)
        found[f"source/{name}"] = _awaited(stream)
        found[f"pipeline/{name}"] = _unlanded(status, stream)
        found[f"records/{name}"] = None if stream["source"]["mode"] == "catching up" else stream["tokens"]["durable"]
        for consumer in stream["consumers"]:
            found[f"consumer/{name}/{consumer['name']}"] = _unsettled(consumer)
    return found


def judge(status: Mapping[str, Any], seen: Observations, bounds: Bounds, now_s: float) -> list[Condition]:
    """Return the conditions of a home.

    Args:
        status: its status. If another node leads a stream, only the part of this node is judged: that node reports the rest.
        seen: what was observed; without an observation, only conditions of the moment are found.
        now_s: seconds since 1970-01-01 UTC.
    """
    facts = facts_of(status, seen)

    def lasts_s(key: str) -> float:
        return 0.0 if facts.get(key) is None else seen.unchanged_s(key, facts[key], now_s)

    found: list[Condition] = []
    several = len(status["streams"]) > 1
    for stream in status["streams"]:
        for its in _nodes(stream):
            apart_s, failing_s = (lasts_s(f"{what}/{its['stream']}") for what in ("follow", "replication"))
            found += _of_node(stream["name"], its, bounds, apart_s, failing_s)
    for stream in led_streams(status):
        name = stream["name"]
        found += _of_capture(stream, bounds, lasts_s(f"capture/{name}"))
        found += _of_pipeline(stream, bounds, lasts_s(f"pipeline/{name}"), lasts_s(f"pipeline_error/{name}"))
        if not stream["id"]:
            continue
        found += _of_slot(stream, seen, bounds, lasts_s(f"slot/{name}"))
        found += _of_silence(stream, bounds, lasts_s(f"source/{name}"), lasts_s(f"records/{name}"))
        found += _of_tables(stream, name if several else "")
        found += _of_buffer(stream, name if several else "", bounds, lasts_s(f"undecodable/{name}"))
        for writer in stream["writers"]:
            is_long = lasts_s(f"writer/{name}/{writer['name']}") >= bounds.stalled_s
            found += _of_writer(name, writer, is_long=is_long)
        found += _of_cut_off(stream)
        for one in _apart_followers(stream):
            # After a restart of the leader followers are back within seconds: a single look says nothing.
            is_long = not seen.looked_s or lasts_s(f"follower/{name}/{one['node']}") > 0
            found.append(_of_follower(stream, one, is_long=is_long))
        for consumer in stream["consumers"]:
            found += _of_consumer(name, consumer, bounds, lasts_s(f"consumer/{name}/{consumer['name']}"))
    if _is_down(status) and all(condition.kind is not Kind.PIPELINE_STALLED for condition in found):
        message = "the pipeline's process isn't running, and records wait for the lake"
        hint = "`millstream run` starts it again within seconds; if it doesn't, read its log."
        found.append(Condition(Kind.PIPELINE_DOWN, "", "", message, hint, is_alert=False))
    for error in status.get("errors", {}).values():
        is_long = error["gave_up"] or lasts_s("serve") >= bounds.stalled_s
        again = "" if error["gave_up"] else "; `millstream run` tries again"
        message = f"the server doesn't run: {error['code']}: {error['message']}{again}"
        found.append(Condition(Kind.SERVER_DOWN, "", "", message, error["hint"], is_alert=is_long))
    return found


def led_streams(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the streams that no other node leads. One without an `id` has never run: it has errors, and nothing else."""
    return [
        stream
        for stream in status["streams"]
        if (stream["replication"] or {"role": "leads"})["role"] in {None, "leads"}
    ]


def _nodes(stream: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return this node's part in a stream's log and in those of other regions; empty if the home is no node."""
    return [its for its in (stream["replication"], *stream["regions"]) if its is not None]


def _is_apart(its: Mapping[str, Any]) -> bool:
    """Return whether this node should follow, and no process does."""
    return its["role"] == "follows" and not its["following"]


def _apart_followers(stream: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the nodes that should follow a stream's leader and aren't connected; not those that retention has cut off."""
    cut_off = {follower_of_holder(holder) for holder in stream["log"]["cut_off"]}
    followers = (stream["replication"] or {}).get("followers", ())
    return [one for one in followers if one["counts"] and one["phase"] == "apart" and one["node"] not in cut_off]


def node_errors(its: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the errors of this node's part in a log: its own, its follower's and that of its object store."""
    parts = (its["following"] or {}, its.get("object_store") or {})
    return [error for error in (its["error"], *(part.get("error") for part in parts)) if error is not None]


def _undecodable(stream: Mapping[str, Any]) -> int:
    """Return the number of items that the reader of the stream's write buffer has left out since it began."""
    return sum(shard["undecodable"] for shard in (stream["buffer"] or {}).get("shards", {}).values())


def _is_waited_for(writer: Mapping[str, Any]) -> bool:
    """Return whether readers wait for a writer whose log no process recovers."""
    return writer["state"] == "expired" and bool(writer["behind"])


def _is_captured(stream: Mapping[str, Any]) -> bool:
    """Return whether capture reads the stream's source now."""
    return stream["source"]["mode"] is not None and "capture" not in stream["errors"]


def _is_unread(stream: Mapping[str, Any], seen: Observations) -> bool | None:
    source = stream["source"]
    if not source["configured"] or source["slot_dropped"] or _is_captured(stream):
        return None
    slot = seen.slots.get(stream["name"])
    return True if slot is not None and slot["is_read"] is False else None


def _capture_fails(status: Mapping[str, Any], stream: Mapping[str, Any]) -> bool | None:
    if "capture" in stream["errors"]:  # also of a stream that reads from a write buffer
        return True
    is_due = stream["id"] and stream["source"]["configured"] and status["processes"].get("owner") is not None
    return True if is_due and not _is_captured(stream) else None


def _awaited(stream: Mapping[str, Any]) -> str | None:
    """Return up to where the source's WAL was received, if the source has more."""
    source = stream["source"]
    if not _is_captured(stream) or source["mode"] == "catching up" or source["received"] == source["end"]:
        return None
    received: str | None = source["received"]
    return received


def _unlanded(status: Mapping[str, Any], stream: Mapping[str, Any]) -> str | None:
    """Return up to where the lake has the stream, if records wait and a pipeline should land them."""
    landed: str | None = stream["tokens"]["landed"]
    # `run` has a pipeline, also while its process is down; it may be down each time that one looks.
    has_process = any(status["processes"].get(role) is not None for role in ("run", "pipeline"))
    has_pipeline = has_process or (landed is not None and not landed.endswith(".s0"))
    return landed if has_pipeline and stream["lag"]["lake"]["records"] else None


def _is_down(status: Mapping[str, Any]) -> bool:
    """Return whether records wait for a pipeline that `run` has to start again."""
    processes = status["processes"]
    waits = any(stream["id"] and stream["lag"]["lake"]["records"] for stream in led_streams(status))
    return processes.get("run") is not None and processes.get("pipeline") is None and waits


def _unsettled(consumer: Mapping[str, Any]) -> list[Any] | None:
    """Return the consumer's progress, if it should make some and has some left to make."""
    if consumer["state"] == "active" and consumer["lag"]["records"]:
        return [consumer["cursor"], consumer["acked"]]
    return [consumer["error"]] if consumer["state"] == "paused" and consumer["error"] else None


def _of_slot(stream: Mapping[str, Any], seen: Observations, bounds: Bounds, unread_s: float) -> Iterator[Condition]:
    name, source = stream["name"], stream["source"]
    slot = source["slot"]
    for noted in (NotedSlot(**left) for left in source["left"]):
        yield Condition(Kind.SLOT_LEFT, name, noted.slot, left_words(noted), left_hint(name, noted))
    if source["slot_dropped"] and source["configured"]:
        yield Condition(
            Kind.SLOT_DROPPED,
            name,
            slot or name,
            "the slot was dropped: the next run makes a new one and copies every table again",
            "Run `millstream run`.",
            is_alert=False,
        )
        return
    if slot is None:
        return
    holds = source["slot_holds_bytes"] if _is_captured(stream) else seen.slots.get(name, {}).get("holds")
    if holds is not None and holds > bounds.slot_lag_bytes:
        yield Condition(
            Kind.SLOT_LAG,
            name,
            slot,
            f"the slot {slot} holds {holds >> 20} MiB of WAL at its source",
            "Let `millstream run` catch up, or drop the slot with `millstream slot drop`; the tables are copied again then.",
        )
    if unread_s and unread_s >= bounds.stalled_s:
        yield Condition(
            Kind.SLOT_INACTIVE,
            name,
            slot,
            f"the slot {slot} hasn't been read for {human_seconds(unread_s)}, and its source keeps WAL for it",
            "Run `millstream run`, or drop the slot with `millstream slot drop`.",
        )


def _of_capture(stream: Mapping[str, Any], bounds: Bounds, failing_s: float) -> Iterator[Condition]:
    error = stream["errors"].get("capture") or {}
    if error.get("gave_up"):
        message = f"capture has given up: {error['message']}"
    elif failing_s and failing_s >= bounds.stalled_s:
        reason = error.get("message") or "it has not begun to read its source"
        message = f"capture has made no progress for {human_seconds(failing_s)}: {reason}"
    else:
        return
    hint = error.get("hint") or "Look at the log of `millstream run`, and at `millstream doctor`."
    yield Condition(Kind.CAPTURE_STALLED, stream["name"], stream["name"], message, hint)


def _of_pipeline(stream: Mapping[str, Any], bounds: Bounds, unlanded_s: float, failing_s: float) -> Iterator[Condition]:
    error = stream["errors"].get("pipeline") or {}
    if error.get("gave_up"):
        message = f"the pipeline has given up: {error['message']}"
    elif failing_s and failing_s >= bounds.stalled_s:
        message = f"the pipeline has failed for {human_seconds(failing_s)}: {error.get('message', '')}"
    elif unlanded_s and unlanded_s >= bounds.stalled_s:
        records = stream["lag"]["lake"]["records"]
        message = f"the pipeline has landed nothing for {human_seconds(unlanded_s)}, and {records:,} records wait"
    else:
        return
    hint = error.get("hint") or "Look at the log of `millstream run`, and at `millstream doctor`."
    yield Condition(Kind.PIPELINE_STALLED, stream["name"], stream["name"], message, hint)


def _of_silence(stream: Mapping[str, Any], bounds: Bounds, awaited_s: float, quiet_s: float) -> Iterator[Condition]:
    name = stream["name"]
    if awaited_s and awaited_s >= bounds.silent_s:
        yield Condition(
            Kind.SOURCE_SILENT,
            name,
            name,
            f"the source has sent nothing for {human_seconds(awaited_s)}, though its WAL ends at {stream['source']['end']}",
            "Look at the source's load and at the network: `pg_stat_replication` shows the connection.",
        )
    if bounds.no_records_s is not None and quiet_s and quiet_s >= bounds.no_records_s:
        yield Condition(
            Kind.STREAM_SILENT,
            name,
            name,
            f"the stream has had no record for {human_seconds(quiet_s)}",
            "Look at its source, or at the applications that append to it.",
        )


def _of_tables(stream: Mapping[str, Any], of: str) -> Iterator[Condition]:
    """Yield the conditions of a stream's tables."""
    name = stream["name"]
    for table in stream["tables"]:
        if table["state"] == "quarantined":
            message = f"{table['name']} is quarantined: {table['reason']}"
            yield Condition(Kind.TABLE_QUARANTINED, name, table["name"], message, what_to_run(table, of))
        if (error := table.get("refused")) is not None:
            yield Condition(Kind(error["code"]), name, table["name"], error["message"], error["hint"])
    waiting = [table for table in stream["tables"] if (table["reason"] or "").startswith(TRIED_AGAIN)]
    if waiting:
        # Within minutes the table is quarantined, the pipeline has an error, or it has passed.
        more = f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""
        message = f"{waiting[0]['name']}{more}: {waiting[0]['reason']}"
        yield Condition(Kind.LAKE_WAITS, name, name, message, "Run `millstream doctor`.", is_alert=False)


def _of_buffer(stream: Mapping[str, Any], of: str, bounds: Bounds, undecodable_s: float) -> Iterator[Condition]:
    """Yield the conditions of the reader of a stream's write buffer; see `_of_tables`."""
    buffer = stream["buffer"] or {}
    for table, reason in buffer.get("held", {}).items():
        message = f"{table} is held, and the write buffer {buffer['name']} keeps its rows: {reason}"
        facts = {"name": table, "state": "quarantined", "reason": reason, "hint": ""}
        yield Condition(Kind.TABLE_HELD, stream["name"], table, message, what_to_run(facts, of))
    if left_out := _undecodable(stream):
        yield Condition(
            Kind.BUFFER_UNDECODABLE,
            stream["name"],
            buffer["name"],
            f"{counted(left_out, 'item')} of the write buffer {buffer['name']} held no operation and were left out",
            "Find the program that writes into it; the log of `millstream run` names each item.",
            is_alert=undecodable_s < bounds.stalled_s,  # nothing ends it but a restart
        )


def _of_writer(stream: str, writer: Mapping[str, Any], *, is_long: bool) -> Iterator[Condition]:
    if _is_waited_for(writer):
        name = writer["name"]
        forget = shlex.join(["millstream", "writers", "forget", name, "--stream", stream])
        yield Condition(
            Kind.WRITER_EXPIRED,
            stream,
            name,
            f"readers wait for {name}, a writer with an expired lease; its log is in {writer['location']}",
            f"Start it there, or any other writer of that home. If its log is lost for good, run `{forget}`.",
            is_alert=is_long,  # another writer of its home recovers its log within seconds
        )


def _of_cut_off(stream: Mapping[str, Any]) -> Iterator[Condition]:
    """Yield each consumer and follower that needed records which retention has dropped."""
    name = stream["name"]
    consumers = {one["name"] for one in stream["consumers"] if one["state"] == "cut_off"}
    for holder, facts in stream["log"]["cut_off"].items():
        if facts["kind"] == "consumer":
            consumers.add(holder.removeprefix("consumer:"))
            continue
        node = follower_of_holder(holder) or holder
        yield Condition(
            Kind.FOLLOWER_CUT_OFF,
            name,
            node,
            f"the follower {node} was cut off: the log began at {facts['first']} then",
            "Run `millstream follow --rebuild` there, if it doesn't get the missing part from [replication] object_store.",
        )
    for consumer in sorted(consumers):
        rewind = ["millstream", "consumer", "rewind", consumer, "--to", "earliest", "--stream", name]
        yield Condition(
            Kind.CONSUMER_CUT_OFF,
            name,
            consumer,
            f"consumer {consumer} was cut off: retention has dropped records that it hadn't settled",
            f"Run `{shlex.join(rewind)}`.",
        )


def _of_node(
    stream: str, its: Mapping[str, Any], bounds: Bounds, apart_s: float, failing_s: float
) -> Iterator[Condition]:
    subject, leader = its["stream"], its["leader"]
    if its["role"] == "fenced":
        message = f"another node was promoted: writes go to {leader}"
        yield Condition(Kind.FENCED, stream, subject, message, f"Run `millstream follow {leader}` to follow it.")
    for node, error in its["other_streams"].items():
        yield Condition(Kind.OTHER_STREAM, stream, node, error["message"], error["hint"])
    if _is_apart(its):
        message = f"this node follows {leader}, but no process of it does"
        hint = "Run `millstream run` or `millstream follow`."
        yield Condition(Kind.NOT_FOLLOWING, stream, subject, message, hint, is_alert=apart_s >= bounds.stalled_s)
    if failing_s and failing_s >= bounds.stalled_s:
        error = node_errors(its)[0]
        message = f"replication has failed for {human_seconds(failing_s)}: {error['message']}"
        yield Condition(Kind.REPLICATION_STALLED, stream, subject, message, error["hint"])


def _of_follower(stream: Mapping[str, Any], follower: Mapping[str, Any], *, is_long: bool) -> Condition:
    """Return the condition of a follower that isn't connected: an alert if appends fail without it."""
    node, its, lacks = follower["node"], stream["replication"], follower["records_behind"]
    message = f"node {node} doesn't follow this one"
    if lacks is None:
        message += ", and hasn't since the server here started"
    elif lacks:
        message += f", and lacks {counted(lacks, 'record')}"
    if its["too_few_followers"]:
        message += f": appends at {its['acks']} fail until it does"
    hint = f"Run `millstream run` on {node}, and check that it reaches this node's address in [replication.nodes]."
    is_alert = its["too_few_followers"] and is_long
    return Condition(Kind.FOLLOWER_APART, stream["name"], node, message, hint, is_alert=is_alert)


def _of_consumer(stream: str, consumer: Mapping[str, Any], bounds: Bounds, unsettled_s: float) -> Iterator[Condition]:
    name, lag = consumer["name"], consumer["lag"]
    option = ["--stream", stream]
    if unsettled_s and unsettled_s >= bounds.stalled_s:
        reason = "" if consumer["error"] is None else f": {consumer['error']}"
        if consumer["state"] == "paused":
            message, hint = f"consumer {name} is paused{reason}", ["millstream", "consumer", "resume", name, *option]
        else:
            what = f"{lag['records']:,} records wait"
            message = f"consumer {name} has acknowledged nothing for {human_seconds(unsettled_s)}, and {what}{reason}"
            hint = ["millstream", "consumer", "show", name, *option]
        text = f"Mend the cause, then run `{shlex.join(hint)}`."
        yield Condition(Kind.CONSUMER_STALLED, stream, name, message, text)
    if consumer["dead"]:
        letters = counted(consumer["dead"], "dead letter")
        yield Condition(
            Kind.CONSUMER_DEAD_LETTERS,
            stream,
            name,
            f"consumer {name} has {letters}",
            f"Run `{shlex.join(['millstream', 'consumer', 'dead', 'ls', name, *option])}`, then retry or drop them.",
        )


def what_to_run(table: Mapping[str, Any], stream: str = "") -> str:
    """Return what to do about a table that is quarantined or waits; empty if nothing has to be done.

    Args:
        table: its facts, as `table_facts` returns them.
        stream: the stream's name, if the command has to name it.
    """
    hint = str(table["hint"])
    if table["state"] != "quarantined" or (hint and table["reason"].startswith("lake: ")):
        return hint
    of = ["--stream", stream] if stream else []
    retry = f"run `{shlex.join(['millstream', 'tables', 'retry', table['name'], *of])}`."
    return f"{hint} Then {retry}" if hint else f"Mend the cause, then {retry}"
