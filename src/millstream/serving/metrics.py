"""Prometheus metrics, collected on request: a home's status as gauges, its processes' counters and histograms.

Positions in the log are gauges: a restored or cut log has smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from millstream.process_metrics import MEASURES, Counter, Histogram

_PARTS: Final = ("owner", "pipeline", "serve")
"""The parts that should always run."""
_LAG: Final = {
    "records": ("millstream_lag_records", "Records between two stages."),
    "bytes": ("millstream_lag_bytes", "Bytes between two stages."),
    "seconds": ("millstream_lag_seconds", "Age of the oldest record between two stages."),
}
_LAG_OF_A_CONSUMER: Final = {
    "records": ("millstream_consumer_lag_records", "Records of a consumer's tables behind its cursor."),
    "bytes": ("millstream_consumer_lag_bytes", "Bytes of these records in the log."),
    "seconds": ("millstream_consumer_lag_seconds", "Age of the oldest of these records."),
}


class _Status(Collector):
    def __init__(self, collect: Callable[[], dict[str, Any]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        status = self._collect()
        yield from _measured(status)
        up = GaugeMetricFamily("millstream_up", "Whether a part runs.", labels=["part"])
        for part in _PARTS:
            up.add_metric([part], float(status["processes"].get(part) is not None))
        yield up
        yield GaugeMetricFamily(
            "millstream_problems", "Things that status could not read.", value=float(len(status["problems"]))
        )
        if "age_s" in status:
            yield GaugeMetricFamily("millstream_status_age_seconds", "Age of these figures.", value=status["age_s"])
        yield from _resources(status["resources"])
        yield from _nodes([stream for stream in status["streams"] if stream.get("replication")])
        streams = [stream for stream in status["streams"] if stream.get("id")]
        yield _errors(streams)
        yield from _lags(streams)
        yield from _replays(streams)
        yield _gauge(streams, "millstream_log_bytes", "Bytes of the log on disk.", lambda s: s["log"]["bytes"])
        yield _gauge(streams, "millstream_log_segments", "Segments of the log.", lambda s: s["log"]["segments"])
        yield _gauge(streams, "millstream_durable_seq", "Everything up to here is durable.", lambda s: _n(s, "durable"))
        yield _gauge(
            streams, "millstream_landed_seq", "Everything up to here is in the lake.", lambda s: _n(s, "landed")
        )
        yield _gauge(streams, "millstream_writer_epoch", "Fencing epoch.", lambda s: (s["writer"] or {}).get("epoch"))
        yield _gauge(
            streams,
            "millstream_log_first_seq",
            "The oldest number that the log still has.",
            lambda s: s["log"]["first_seq"],
        )
        yield from _sources(streams)
        yield from _held(streams)
        yield from _retention(streams)
        yield _tables(streams)
        yield from _each_table(streams)
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


def _resources(resources: dict[str, Any]) -> Iterable[GaugeMetricFamily]:
    """Yield the memory of the home's processes, and the room on its disk."""
    text = "Resident memory of a process of the home and of its own children; pages that they share count repeatedly."
    memory = GaugeMetricFamily("millstream_process_memory_bytes", text, labels=["process"])
    for process, size in resources["memory_bytes"].items():
        memory.add_metric([process], float(size))
    yield memory
    for key, text in (("free", "Room left on the disk of the home's data."), ("size", "Size of that disk.")):
        if resources[f"disk_{key}_bytes"] is not None:
            yield GaugeMetricFamily(f"millstream_disk_{key}_bytes", text, value=float(resources[f"disk_{key}_bytes"]))


def _nodes(streams: list[dict[str, Any]]) -> Iterable[GaugeMetricFamily]:
    """Yield metrics of nodes: followers' own lag, which grows while their link is dead, and leaders' followers."""
    yield _gauge(
        streams, "millstream_node_leads", "1 if this node leads.", lambda s: s["replication"]["role"] == "leads"
    )
    yield _gauge(
        streams,
        "millstream_replica_age_seconds",
        "Greatest age of the data that this follower shows.",
        lambda s: s["replication"]["age_s"],
    )
    for unit in ("records", "bytes"):
        yield _gauge(
            streams,
            f"millstream_replica_behind_{unit}",
            f"{unit.capitalize()} that the leader has and this follower hasn't.",
            partial(_behind_of_own, f"{unit}_behind"),
        )
        family = GaugeMetricFamily(
            f"millstream_follower_behind_{unit}",
            f"{unit.capitalize()} that this leader has and a follower hasn't.",
            labels=["stream", "follower"],
        )
        for stream in streams:
            for follower in stream["replication"]["followers"]:
                if follower[f"{unit}_behind"] is not None:
                    family.add_metric([stream["name"], follower["node"]], float(follower[f"{unit}_behind"]))
        yield family
    text = "1 if a follower is connected to this leader, 0 if it isn't."
    connected = GaugeMetricFamily("millstream_follower_connected", text, labels=["stream", "follower"])
    for stream in streams:
        for follower in stream["replication"]["followers"]:
            connected.add_metric([stream["name"], follower["node"]], float(follower["phase"] != "apart"))
    yield connected


def _behind_of_own(key: str, stream: dict[str, Any]) -> Any:
    return (stream["replication"]["following"] or {}).get(key)


def _errors(streams: list[dict[str, Any]]) -> GaugeMetricFamily:
    """Return one series, with the cause, for each part of a stream that makes no progress."""
    names = ["stream", "part", "code", "reason", "hint", "gave_up"]
    text = "1 for each error that stops a part of a stream; gave_up: whether the part isn't tried again automatically."
    family = GaugeMetricFamily("millstream_stream_error", text, labels=names)
    for stream in streams:
        for part, error in stream["errors"].items():
            gave_up = str(bool(error.get("gave_up"))).lower()
            told = [str(error.get(key, "")) for key in ("code", "message", "hint")]
            family.add_metric([stream["name"], part, *told, gave_up], 1.0)
    return family


def _lags(streams: list[dict[str, Any]]) -> Iterable[GaugeMetricFamily]:
    for unit, (name, text) in _LAG.items():
        family = GaugeMetricFamily(name, text, labels=["stream", "stage"])
        for stream in streams:
            for stage, lag in stream["lag"].items():
                if lag.get(unit) is not None:
                    family.add_metric([stream["name"], stage], float(lag[unit]))
        yield family


def _sources(streams: list[dict[str, Any]]) -> Iterable[Metric]:
    """Yield metrics of streams that are captured now."""
    yield _gauge(
        streams,
        "millstream_slot_held_bytes",
        "WAL that the slot keeps at the source.",
        lambda s: s["source"]["slot_holds_bytes"],
    )
    spilled = CounterMetricFamily(
        "millstream_slot_spilled_bytes", "Bytes that decoding has spilled to the source's disk.", labels=["stream"]
    )
    for stream in streams:
        if stream["source"]["spilled_bytes"] is not None:
            spilled.add_metric([stream["name"]], float(stream["source"]["spilled_bytes"]))
    yield spilled
    yield _gauge(
        streams,
        "millstream_catching_up",
        "1 while a backlog is read in chunks, 0 while the stream is read.",
        lambda s: None if s["source"]["mode"] is None else s["source"]["mode"] == "catching up",
    )


def _replays(streams: list[dict[str, Any]]) -> Iterable[GaugeMetricFamily]:
    """Yield metrics of pipelines that are replaying, and of no others."""
    replays = [(stream["name"], stream["replay"]) for stream in streams if stream["replay"] is not None]
    for key in ("segments", "records", "bytes"):
        text = f"{key.capitalize()} of the replay with which a pipeline began."
        family = GaugeMetricFamily(f"millstream_replay_{key}", text, labels=["stream", "state"])
        for name, replay in replays:
            done, total = replay[key]["done"], replay[key]["total"]
            family.add_metric([name, "done"], float(done))
            family.add_metric([name, "left"], float(total - done))
        yield family
    for key, text in (
        ("eta", "How long the rest of a replay takes at its rate so far."),
        ("elapsed", "How long a replay has taken so far."),
    ):
        family = GaugeMetricFamily(f"millstream_replay_{key}_seconds", text, labels=["stream"])
        for name, replay in replays:
            seconds = replay["eta_s" if key == "eta" else "seconds"]
            if seconds is not None:
                family.add_metric([name], float(seconds))
        yield family


def _held(streams: list[dict[str, Any]]) -> Iterable[GaugeMetricFamily]:
    """Yield metrics of held segments: a constantly growing one has a holder that makes no progress."""
    for key, text in (
        ("bytes", "Bytes of the log that a holder still needs."),
        ("seconds", "Age of the oldest record that a holder still needs."),
    ):
        family = GaugeMetricFamily(f"millstream_log_held_{key}", text, labels=["stream", "holder", "kind"])
        for stream in streams:
            for holder, facts in stream["log"]["held"].items():
                if facts[key] is not None:
                    family.add_metric([stream["name"], holder, facts["kind"]], float(facts[key]))
        yield family


def _retention(streams: list[dict[str, Any]]) -> Iterable[GaugeMetricFamily]:
    """Yield metrics of the oldest segment: if its number doesn't change while the log grows, a holder leaks."""
    for key, name, text in (
        ("segment", "millstream_log_oldest_segment", "Number (first offset) of the oldest sealed segment."),
        ("seconds", "millstream_log_oldest_segment_seconds", "For how long it has been the oldest one."),
    ):
        family = GaugeMetricFamily(name, text, labels=["stream", "shard"])
        for stream in streams:
            oldest = stream["log"]["oldest"]
            if oldest is not None:
                family.add_metric([stream["name"], str(oldest["shard"])], float(oldest[key]))
        yield family
    needed_by = GaugeMetricFamily(
        "millstream_log_oldest_needed_by",
        "1 for each holder that needs the oldest sealed segment.",
        labels=["stream", "holder"],
    )
    cut_off = GaugeMetricFamily(
        "millstream_log_cut_off", "1 for each holder that was cut off.", labels=["stream", "holder", "kind"]
    )
    for stream in streams:
        for holder in (stream["log"]["oldest"] or {"needed_by": []})["needed_by"]:
            needed_by.add_metric([stream["name"], holder], 1.0)
        for holder, facts in stream["log"]["cut_off"].items():
            cut_off.add_metric([stream["name"], holder, facts["kind"]], 1.0)
    yield needed_by
    yield cut_off
    for key, text in (
        ("bytes", "Size of the log above which its oldest segments are deleted if no holder needs them."),
        ("bytes_max", "Size of the log past which followers are cut off."),
    ):
        family = GaugeMetricFamily(f"millstream_log_retention_{key}", text, labels=["stream"])
        for stream in streams:
            if stream["log"]["retention"] is not None:
                family.add_metric([stream["name"]], float(stream["log"]["retention"][key]))
        yield family


def _tables(streams: list[dict[str, Any]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily("millstream_tables", "Tables by state.", labels=["stream", "state"])
    for stream in streams:
        states = [table["state"] for table in stream["tables"]]
        for state in sorted(set(states) | {"quarantined"}):
            family.add_metric([stream["name"], state], float(states.count(state)))
    return family


_OF_A_TABLE: Final = {
    "fold_lag_s": ("millstream_table_fold_lag_seconds", "How long the oldest record that waits for a fold has waited."),
    "fold_lag_records": ("millstream_table_fold_lag_records", "Records that wait for a fold."),
    "live_bytes": ("millstream_table_live_bytes", "Bytes of current's files."),
    "disk_bytes": (
        "millstream_table_disk_bytes",
        "Bytes in current's folder, replaced files that readers may need among them.",
    ),
    "disk_factor": ("millstream_table_disk_factor", "Bytes in current's folder over live bytes."),
}


_OF_A_COPY: Final = {
    "rows": ("millstream_table_copy_rows", "Rows of a table's running copy that are in the log."),
    "rows_estimate": (
        "millstream_table_copy_rows_estimate",
        "Rows that the table has, as the source's statistics say, while it is copied.",
    ),
    "bytes": ("millstream_table_copy_bytes", "Bytes of those rows, as text."),
    "rows_per_s": ("millstream_table_copy_rows_per_second", "Rows copied a second, over half a minute."),
    "bytes_per_s": ("millstream_table_copy_bytes_per_second", "Bytes copied a second, over half a minute."),
    "eta_s": ("millstream_table_copy_eta_seconds", "How long the rest of a copy takes at its rate so far."),
}


def _each_table(streams: list[dict[str, Any]]) -> Iterable[GaugeMetricFamily]:
    yield from _copies(streams)
    for key, (name, text) in _OF_A_TABLE.items():
        family = GaugeMetricFamily(name, text, labels=["stream", "table"])
        for stream in streams:
            for table in stream["tables"]:
                if table.get(key) is not None:
                    family.add_metric([stream["name"], table["name"]], float(table[key]))
        yield family


def _copies(streams: list[dict[str, Any]]) -> Iterable[GaugeMetricFamily]:
    """Yield metrics of tables that are being copied, and of no others."""
    for key, (name, text) in _OF_A_COPY.items():
        family = GaugeMetricFamily(name, text, labels=["stream", "table"])
        for stream in streams:
            for table in stream["tables"]:
                value = (table.get("copy") or {}).get(key)
                if value is not None:
                    family.add_metric([stream["name"], table["name"]], float(value))
        yield family


_OF_A_CONSUMER: Final = {
    "in_flight": ("millstream_consumer_in_flight", "Messages that were delivered and aren't settled."),
    "dead": ("millstream_consumer_dead", "Dead letters."),
}
_COUNTED_OF_A_CONSUMER: Final = {
    "delivered": ("millstream_consumer_delivered", "First deliveries of messages."),
    "redelivered": ("millstream_consumer_redelivered", "Further deliveries of messages."),
    "acked": ("millstream_consumer_acked", "Messages that were acknowledged."),
}
_CONSUMER_STATES: Final = ("active", "paused", "cut_off")


def _consumers(streams: list[dict[str, Any]]) -> Iterable[Metric]:
    """Yield metrics of consumers; the counters last as long as a consumer and don't begin again with a process."""
    found = [(stream["name"], consumer) for stream in streams for consumer in stream["consumers"]]
    labels = ["stream", "consumer"]
    for unit, (name, text) in _LAG_OF_A_CONSUMER.items():
        family = GaugeMetricFamily(name, text, labels=labels)
        for stream, consumer in found:
            if consumer["lag"][unit] is not None:
                family.add_metric([stream, consumer["name"]], float(consumer["lag"][unit]))
        yield family
    for key, (name, text) in _OF_A_CONSUMER.items():
        family = GaugeMetricFamily(name, text, labels=labels)
        for stream, consumer in found:
            family.add_metric([stream, consumer["name"]], float(consumer[key]))
        yield family
    for key, (name, text) in _COUNTED_OF_A_CONSUMER.items():
        counter = CounterMetricFamily(name, text, labels=labels)
        for stream, consumer in found:
            counter.add_metric([stream, consumer["name"]], float(consumer[key]))
        yield counter
    states = GaugeMetricFamily(
        "millstream_consumer_state", "1 for the state that a consumer is in.", labels=[*labels, "state"]
    )
    errors = GaugeMetricFamily(
        "millstream_consumer_error",
        "1 for a consumer that fails or waits, with the reason.",
        labels=[*labels, "reason"],
    )
    for stream, consumer in found:
        for state in _CONSUMER_STATES:
            states.add_metric([stream, consumer["name"], state], float(consumer["state"] == state))
        if consumer["error"] is not None:
            errors.add_metric([stream, consumer["name"], consumer["error"]], 1.0)
    yield states
    yield errors


def _gauge(
    streams: list[dict[str, Any]], name: str, text: str, value: Callable[[dict[str, Any]], Any]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["stream"])
    for stream in streams:
        found = value(stream)
        if found is not None:
            family.add_metric([stream["name"]], float(found))
    return family


def _n(stream: dict[str, Any], which: str) -> int | None:
    token = stream["tokens"].get(which)
    return None if token is None else int(token.partition(".s")[2])


def prometheus_text(collect: Callable[[], dict[str, Any]]) -> bytes:
    """Return the metrics of a status (`collect_status`), in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Status(collect))
    return generate_latest(registry)
