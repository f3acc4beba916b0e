"""Prometheus metrics, collected on request: a home's status as gauges, its processes' counters and histograms.

Positions in the log are gauges: a restored or cut log has smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from millstream.process_metrics import MEASURES, Counter, Histogram

Named: TypeAlias = Mapping[str, tuple[str, str]]
"""A metric's name and text, by the key of its value in a status."""
Facts: TypeAlias = tuple[Sequence[str], Mapping[str, Any]]
"""The values of labels, and what a status has about them."""

_PARTS: Final = ("owner", "pipeline", "serve")
"""The parts that should always run."""
_DISK: Final[Named] = {
    "disk_free_bytes": ("millstream_disk_free_bytes", "Room left on the disk of the home's data."),
    "disk_size_bytes": ("millstream_disk_size_bytes", "Size of the disk of the home's data."),
}
_LAG: Final[Named] = {
    "records": ("millstream_lag_records", "Records between two stages."),
    "bytes": ("millstream_lag_bytes", "Bytes between two stages."),
    "seconds": ("millstream_lag_seconds", "Age of the oldest record between two stages."),
}
_OF_A_LOG: Final[Named] = {
    "bytes": ("millstream_log_bytes", "Bytes of the log on disk."),
    "segments": ("millstream_log_segments", "Segments of the log."),
    "first_seq": ("millstream_log_first_seq", "The oldest number that the log still has."),
}
_POSITIONS: Final[Named] = {
    "durable": ("millstream_durable_seq", "Everything up to here is durable."),
    "landed": ("millstream_landed_seq", "Everything up to here is in the lake."),
}
_OF_A_WRITER: Final[Named] = {"epoch": ("millstream_writer_epoch", "Fencing epoch.")}
_HELD: Final[Named] = {
    "bytes": ("millstream_log_held_bytes", "Bytes of the log that a holder still needs."),
    "seconds": ("millstream_log_held_seconds", "Age of the oldest record that a holder still needs."),
}
_OLDEST: Final[Named] = {
    "segment": ("millstream_log_oldest_segment", "Number (first offset) of the oldest sealed segment."),
    "seconds": ("millstream_log_oldest_segment_seconds", "For how long the oldest sealed segment has been the oldest."),
}
_RETENTION: Final[Named] = {
    "bytes": (
        "millstream_log_retention_bytes",
        "Size of the log above which its oldest segments are deleted if no holder needs them.",
    ),
    "bytes_max": ("millstream_log_retention_bytes_max", "Size of the log past which followers are cut off."),
}
_REPLAY_TIMES: Final[Named] = {
    "eta_s": ("millstream_replay_eta_seconds", "How long the rest of a replay takes at its rate so far."),
    "seconds": ("millstream_replay_elapsed_seconds", "How long a replay has taken so far."),
}
_OF_A_REPLICA: Final[Named] = {
    "records_behind": ("millstream_replica_behind_records", "Records that the leader has and this follower hasn't."),
    "bytes_behind": ("millstream_replica_behind_bytes", "Bytes that the leader has and this follower hasn't."),
}
_OF_A_FOLLOWER: Final[Named] = {
    "records_behind": ("millstream_follower_behind_records", "Records that this leader has and a follower hasn't."),
    "bytes_behind": ("millstream_follower_behind_bytes", "Bytes that this leader has and a follower hasn't."),
}
_OF_A_TABLE: Final[Named] = {
    "fold_lag_s": ("millstream_table_fold_lag_seconds", "How long the oldest record that waits for a fold has waited."),
    "fold_lag_records": ("millstream_table_fold_lag_records", "Records that wait for a fold."),
    "live_bytes": ("millstream_table_live_bytes", "Bytes of current's files."),
    "disk_bytes": (
        "millstream_table_disk_bytes",
        "Bytes in current's folder, replaced files that readers may need among them.",
    ),
    "disk_factor": ("millstream_table_disk_factor", "Bytes in current's folder over live bytes."),
}
_OF_A_COPY: Final[Named] = {
    "rows": ("millstream_table_copy_rows", "Rows of a table's running copy that are in the log."),
    "rows_estimate": (
        "millstream_table_copy_rows_estimate",
        "Rows of the table by the source's statistics, while it is copied.",
    ),
    "bytes": (
        "millstream_table_copy_bytes",
        "Bytes, as text, of the rows of a table's running copy that are in the log.",
    ),
    "rows_per_s": ("millstream_table_copy_rows_per_second", "Rows copied a second, over half a minute."),
    "bytes_per_s": ("millstream_table_copy_bytes_per_second", "Bytes copied a second, over half a minute."),
    "eta_s": ("millstream_table_copy_eta_seconds", "How long the rest of a copy takes at its rate so far."),
}
_LAG_OF_A_CONSUMER: Final[Named] = {
    "records": ("millstream_consumer_lag_records", "Records of a consumer's tables after its cursor."),
    "bytes": (
        "millstream_consumer_lag_bytes",
        "Bytes in the log of the records of a consumer's tables after its cursor.",
    ),
    "seconds": ("millstream_consumer_lag_seconds", "Age of the oldest record of a consumer's tables after its cursor."),
}
_OF_A_CONSUMER: Final[Named] = {
    "in_flight": ("millstream_consumer_in_flight", "Messages that were delivered and aren't settled."),
    "dead": ("millstream_consumer_dead", "Dead letters."),
}
_COUNTED_OF_A_CONSUMER: Final[Named] = {
    "delivered": ("millstream_consumer_delivered", "First deliveries of messages."),
    "redelivered": ("millstream_consumer_redelivered", "Further deliveries of messages."),
    "acked": ("millstream_consumer_acked", "Messages that were acknowledged."),
}
_CONSUMER_STATES: Final = ("active", "paused", "cut_off")


def _family(
    kind: Callable[..., Any], name: str, text: str, labels: Sequence[str], series: Iterable[tuple[Sequence[str], Any]]
) -> Metric:
    """Return a metric with a value for each series, given with the values of its labels; not where it is None."""
    family: Metric = kind(name, text, labels=labels)
    for values, number in series:
        if number is not None:
            family.add_metric(values, float(number))  # type: ignore[attr-defined] # each kind of family has it
    return family


_gauge: Final = partial(_family, GaugeMetricFamily)
_counter: Final = partial(_family, CounterMetricFamily)


def _each(
    named: Named, labels: Sequence[str], facts: Sequence[Facts], family: Callable[..., Metric] = _gauge
) -> Iterable[Metric]:
    """Yield a metric for each key, with its value in each of the facts that have one."""
    for key, (name, text) in named.items():
        yield family(name, text, labels, ((values, some.get(key)) for values, some in facts))


class _Status(Collector):
    def __init__(self, collect: Callable[[], dict[str, Any]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        status = self._collect()
        yield from _measured(status)
        processes = status["processes"]
        yield _gauge(
            "millstream_up", "Whether a part runs.", ["part"], (([p], processes.get(p) is not None) for p in _PARTS)
        )
        yield _gauge("millstream_problems", "Things that status could not read.", (), [((), len(status["problems"]))])
        if "age_s" in status:
            yield _gauge("millstream_status_age_seconds", "Age of these figures.", (), [((), status["age_s"])])
        yield from _resources(status["resources"])
        yield from _nodes([stream for stream in status["streams"] if stream.get("replication")])
        streams = [stream for stream in status["streams"] if stream.get("id")]
        yield _errors(streams)
        lags = [([s["name"], stage], lag) for s in streams for stage, lag in s["lag"].items()]
        yield from _each(_LAG, ["stream", "stage"], lags)
        yield from _replays(streams)
        yield from _each(_OF_A_LOG, ["stream"], [([s["name"]], s["log"]) for s in streams])
        yield from _each(_POSITIONS, ["stream"], [([s["name"]], _positions(s["tokens"])) for s in streams])
        yield from _each(_OF_A_WRITER, ["stream"], [([s["name"]], s["writer"] or {}) for s in streams])
        yield from _sources(streams)
        yield from _holders(streams)
        yield from _tables(streams)
        yield from _consumers(streams)


def _measured(status: dict[str, Any]) -> Iterable[Metric]:
    """Yield what each process has counted and timed itself, with the process as a label.

    A sum over processes would fall when one of them ends.
    """
    for measure in MEASURES:
        labels = ["process", *measure.labels]
        if isinstance(measure, Histogram):
            bounds = [*map(str, measure.bounds_s), "+Inf"]
            durations = HistogramMetricFamily(measure.name, measure.text, labels=labels)
            for values, one in _series(status, measure):
                durations.add_metric(values, list(zip(bounds, accumulate(one["counts"]), strict=True)), one["sum_s"])
            yield durations
        else:
            count = CounterMetricFamily(measure.name, measure.text, labels=labels)
            for values, one in _series(status, measure):
                count.add_metric(values, one["value"])
            yield count


def _series(status: dict[str, Any], measure: Counter | Histogram) -> Iterable[tuple[list[str], dict[str, Any]]]:
    """Yield the series of a measure with the values of their labels, without those of other homes' streams."""
    names = {stream["id"]: stream["name"] for stream in status["streams"] if stream.get("id")}
    for process, series in status["measures"].items():
        for one in series.get(measure.name, ()):
            own = dict(zip(measure.labels, one["labels"], strict=True))
            if "stream" in own:
                own["stream"] = names.get(own["stream"])
            if None not in own.values():
                yield [process, *own.values()], one


def _resources(resources: dict[str, Any]) -> Iterable[Metric]:
    """Yield the memory of the home's processes, and the room on its disk."""
    text = "Resident memory of a process of the home and of its own children; pages that they share count repeatedly."
    sizes = (([process], size) for process, size in resources["memory_bytes"].items())
    yield _gauge("millstream_process_memory_bytes", text, ["process"], sizes)
    yield from _each(_DISK, (), [((), resources)])


def _nodes(streams: list[dict[str, Any]]) -> Iterable[Metric]:
    """Yield metrics of nodes: followers' own lag, which grows while their link is dead, and leaders' followers."""
    nodes = [([stream["name"]], stream["replication"]) for stream in streams]
    leads = ((of, its["role"] == "leads") for of, its in nodes)
    yield _gauge("millstream_node_leads", "1 if this node leads.", ["stream"], leads)
    text = "Greatest age of the data that this follower shows."
    yield _gauge("millstream_replica_age_seconds", text, ["stream"], ((of, its["age_s"]) for of, its in nodes))
    yield from _each(_OF_A_REPLICA, ["stream"], [(of, its["following"] or {}) for of, its in nodes])
    followers = [([*of, one["node"]], one) for of, its in nodes for one in its["followers"]]
    yield from _each(_OF_A_FOLLOWER, ["stream", "follower"], followers)
    text = "1 if a follower is connected to this leader, 0 if it isn't."
    connected = ((of, one["phase"] != "apart") for of, one in followers)
    yield _gauge("millstream_follower_connected", text, ["stream", "follower"], connected)


def _errors(streams: list[dict[str, Any]]) -> Metric:
    """Return one series, with the cause, for each part of a stream that makes no progress."""
    labels = ["stream", "part", "code", "reason", "hint", "gave_up"]
    text = "1 for each error that stops a part of a stream; gave_up: whether the part isn't tried again automatically."

    def values(stream: str, part: str, error: Mapping[str, Any]) -> list[str]:
        told = [str(error.get(key, "")) for key in ("code", "message", "hint")]
        return [stream, part, *told, str(bool(error.get("gave_up"))).lower()]

    errors = ((values(s["name"], part, error), 1) for s in streams for part, error in s["errors"].items())
    return _gauge("millstream_stream_error", text, labels, errors)


def _sources(streams: list[dict[str, Any]]) -> Iterable[Metric]:
    """Yield metrics of streams that are captured now."""
    sources = [([stream["name"]], stream["source"]) for stream in streams]
    text = "WAL that the slot keeps at the source."
    held = ((of, source["slot_holds_bytes"]) for of, source in sources)
    yield _gauge("millstream_slot_held_bytes", text, ["stream"], held)
    text = "Bytes that decoding has spilled to the source's disk."
    spilled = ((of, source["spilled_bytes"]) for of, source in sources)
    yield _counter("millstream_slot_spilled_bytes", text, ["stream"], spilled)
    text = "1 while a backlog is read in chunks, 0 while the stream is read."
    modes = ((of, source["mode"] == "catching up") for of, source in sources if source["mode"] is not None)
    yield _gauge("millstream_catching_up", text, ["stream"], modes)


def _replays(streams: list[dict[str, Any]]) -> Iterable[Metric]:
    """Yield metrics of pipelines that are replaying, and of no others."""
    replays = [([stream["name"]], stream["replay"]) for stream in streams if stream["replay"] is not None]
    for key in ("segments", "records", "bytes"):
        text = f"{key.capitalize()} of the replay with which a pipeline began."
        counts = [(of, replay[key]["done"], replay[key]["total"]) for of, replay in replays]
        series = [
            ([*of, state], count)
            for of, done, total in counts
            for state, count in (("done", done), ("left", total - done))
        ]
        yield _gauge(f"millstream_replay_{key}", text, ["stream", "state"], series)
    yield from _each(_REPLAY_TIMES, ["stream"], replays)


def _holders(streams: list[dict[str, Any]]) -> Iterable[Metric]:
    """Yield metrics of what retention keeps, and for which holder.

    If the bytes of a holder only grow, it makes no progress. If the oldest segment's number doesn't change while the log
    grows, a holder leaks.
    """
    logs = [(stream["name"], stream["log"]) for stream in streams]
    held = [([of, holder, facts["kind"]], facts) for of, log in logs for holder, facts in log["held"].items()]
    yield from _each(_HELD, ["stream", "holder", "kind"], held)
    oldest = [([of, str(log["oldest"]["shard"])], log["oldest"]) for of, log in logs if log["oldest"] is not None]
    yield from _each(_OLDEST, ["stream", "shard"], oldest)
    text = "1 for each holder that needs the oldest sealed segment."
    needing = (([of, holder], 1) for (of, _), segment in oldest for holder in segment["needed_by"])
    yield _gauge("millstream_log_oldest_needed_by", text, ["stream", "holder"], needing)
    gone = (([of, holder, facts["kind"]], 1) for of, log in logs for holder, facts in log["cut_off"].items())
    yield _gauge("millstream_log_cut_off", "1 for each holder that was cut off.", ["stream", "holder", "kind"], gone)
    yield from _each(_RETENTION, ["stream"], [([of], log["retention"] or {}) for of, log in logs])


def _tables(streams: list[dict[str, Any]]) -> Iterable[Metric]:
    """Yield metrics of tables; those of a copy only while the table is being copied."""
    states = [(stream["name"], [table["state"] for table in stream["tables"]]) for stream in streams]
    counts = (([of, one], some.count(one)) for of, some in states for one in sorted({*some, "quarantined"}))
    yield _gauge("millstream_tables", "Tables by state.", ["stream", "state"], counts)
    tables = [([stream["name"], table["name"]], table) for stream in streams for table in stream["tables"]]
    yield from _each(_OF_A_COPY, ["stream", "table"], [(of, table.get("copy") or {}) for of, table in tables])
    yield from _each(_OF_A_TABLE, ["stream", "table"], tables)


def _consumers(streams: list[dict[str, Any]]) -> Iterable[Metric]:
    """Yield metrics of consumers; the counters last as long as a consumer and don't begin again with a process."""
    consumers = [([stream["name"], one["name"]], one) for stream in streams for one in stream["consumers"]]
    labels = ["stream", "consumer"]
    yield from _each(_LAG_OF_A_CONSUMER, labels, [(of, one["lag"]) for of, one in consumers])
    yield from _each(_OF_A_CONSUMER, labels, consumers)
    yield from _each(_COUNTED_OF_A_CONSUMER, labels, consumers, _counter)
    states = (([*of, state], one["state"] == state) for of, one in consumers for state in _CONSUMER_STATES)
    yield _gauge("millstream_consumer_state", "1 for the state that a consumer is in.", [*labels, "state"], states)
    text = "1 for a consumer that fails or waits, with the reason."
    errors = (([*of, one["error"]], 1) for of, one in consumers if one["error"] is not None)
    yield _gauge("millstream_consumer_error", text, [*labels, "reason"], errors)


def _positions(tokens: Mapping[str, str | None]) -> dict[str, int]:
    return {key: int(token.partition(".s")[2]) for key, token in tokens.items() if token is not None}


def prometheus_text(collect: Callable[[], dict[str, Any]]) -> bytes:
    """Return the metrics of a status (`collect_status`), in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Status(collect))
    return generate_latest(registry)
