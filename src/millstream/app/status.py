"""The status of a home: from the catalog, the log's marks and the lake, with live figures from running parts.

Nothing here needs a running process. A missing or damaged part doesn't keep the rest from being shown:
`problems` lists what couldn't be read.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from millstream.app.alerts.alert_file import delivery_facts, found_conditions
from millstream.app.lag import backlog_counter, capture_lag, held_log, lake_lag
from millstream.app.open_home import home_consumers
from millstream.app.repeated_status import StatusCache
from millstream.app.resources import resources_of
from millstream.app.table_checks import with_checks
from millstream.app.table_status import lake_paths, tables_of
from millstream.catalog.lake_state import lake_state
from millstream.catalog.snapshot import CatalogSnapshot
from millstream.errors import ConfigError, Fenced, LogError, MillstreamError, ReadOnly
from millstream.home.home import Home
from millstream.home.missing_logs import check_log
from millstream.home.paths import PIPELINE, HomePaths
from millstream.model.ids import StreamId, default_name
from millstream.model.positions import Lsn, Seq, StreamToken, format_lsn
from millstream.process_metrics import SINK_IGNORED_ERRORS, SINK_ROWS
from millstream.processes.control_socket import ask, measures_of
from millstream.processes.role_locks import Role, holder, server_roles, writer_role, writer_roles
from millstream.writers.left_slots import left_slots
from millstream.writers.stall_reasons import part_errors, server_errors
from millstream.writers.writer_facts import writer_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from millstream.catalog import Catalog
    from millstream.config.model import StreamConfig
    from millstream.wal.backlog import Backlog, Backlogs
    from millstream.wal.reader import StreamReader


def collect_status(home: Home, cache: StatusCache | None = None) -> dict[str, Any]:
    """Return a home's status, JSON-able.

    It has `home`, `processes`, `errors` (of `serve`, if `run` can't keep it up), `streams`, `conditions`, `alerts`, `problems`, `measures` and `resources`.

    Args:
        cache: kept by a caller that asks repeatedly; None: everything is read.
    """
    if cache is None:
        with contextlib.closing(StatusCache()) as own:
            return collect_status(home, own)
    problems: list[str] = []
    nodes = _nodes(home, problems)
    owner, pipeline = ask(home, "owner", "status") or {}, ask(home, "pipeline", "status") or {}
    counted = measures_of(home)
    streams: list[dict[str, Any]] = []
    names = set(home.streams_on_disk())
    try:
        names |= set(home.config.streams)
    except MillstreamError as error:
        problems.append(f"configuration: {error.message}")
    try:
        if home.has_catalog():
            with cache.catalog(home) as opened:
                catalog = CatalogSnapshot(opened, pipeline=PIPELINE, names=names, known_names=cache.table_names)
                known = {row.name: row.id for row in catalog.streams()}
                for name in sorted(names | set(known)):
                    live = (owner.get("streams", {}).get(name), pipeline.get("streams", {}).get(name))
                    errors = part_errors(home, catalog, name, live)
                    if name in known:
                        found = _stream(home, catalog, name, known[name], live, cache.backlogs, problems)
                        streams.append(found | {"errors": errors, "sinks": _sinks(found["id"], counted.values())})
                    else:
                        streams.append(_followed(home, name, cache.readers, problems) | {"errors": errors})
        else:
            streams = [_followed(home, name, cache.readers, problems) for name in sorted(names)]
    except MillstreamError as error:  # such as a catalog on a read-only or full disk
        problems.append(error.message)
        shown = {one["name"] for one in streams}
        streams += [_without_catalog(home, name, cache.readers, problems) for name in sorted(names - shown)]
    for one in streams:
        one["replication"] = its = nodes.get(one["name"])
        one["consumers"] = _consumers(home, one, problems)
        one["regions"] = [nodes[log] for log in nodes if log.startswith(f"{one['name']}@")]
        if its is not None and its["role"] not in {None, "leads"}:
            one["state"] = its["role"]
            if "lag" in one:  # the leader lands: nothing waits here
                one["lag"] |= {"lake": lake_lag(None)}
    processes = {role: holder(home.run_folder, role).get("pid") for role in get_args(Role)}
    processes |= {role: holder(home.run_folder, role).get("pid") for role in server_roles(home.run_folder)}
    processes |= _appending(home)
    status = {
        "home": str(home.path),
        "processes": processes,
        "errors": server_errors(home),
        "streams": streams,
        "conditions": [],
        "alerts": None,
        "problems": list(dict.fromkeys(problems)),
        "measures": counted,
        "resources": resources_of(home.data, processes),
    }
    status["conditions"] = [condition.as_dict() for condition in found_conditions(home, status)]
    with contextlib.suppress(MillstreamError):  # reported already: the configuration can't be read
        status["alerts"] = delivery_facts(home)
    return status


def _consumers(home: Home, of_stream: dict[str, Any], problems: list[str]) -> list[dict[str, Any]]:
    """Return a stream's consumers; as its leader had them a second ago if this node follows."""
    from millstream.writers.home_consumers import find_missing_state

    stream = of_stream["name"]
    missing = find_missing_state(home, stream, of_stream.get("log", {}).get("held", ()))
    if missing is not None:
        problems.append(f"consumers of {stream}: {missing.message}")
    has_some = home.delivery_folder(stream).exists() or home.consumers_document(stream).exists()
    try:
        if not has_some or stream not in home.config.streams:
            return []
    except ConfigError:
        return []  # reported already
    try:
        with contextlib.closing(home_consumers(home)) as consumers:
            found: list[dict[str, Any]] = consumers.call(stream, "list").body["consumers"]
            return found
    except (ReadOnly, Fenced):
        return []
    except (MillstreamError, OSError) as error:
        problems.append(f"consumers of {stream}: {error}")
        return []


def _nodes(home: Home, problems: list[str]) -> dict[str, dict[str, Any]]:
    """Return by stream the facts of `millstream replicas`; empty if the home is no node, or they can't be read."""
    from millstream.nodes.replicas import list_replicas

    try:
        if home.config.replication.node is not None:
            return {one["stream"]: one for one in list_replicas(home)["streams"]}
    except ConfigError:
        pass  # reported already
    except (MillstreamError, OSError) as error:
        problems.append(f"replication: {error}")
    return {}


def _appending(home: HomePaths) -> dict[str, int | None]:
    """Return the writers of the home's streams other than `run`'s own parts: applications that append."""
    found = (holder(home.run_folder, role) for role in writer_roles(home.run_folder))
    named = [facts for facts in found if "what" in facts]
    return {" ".join(filter(None, ("append", facts.get("writer")))): facts.get("pid") for facts in named}


Live: TypeAlias = tuple[dict[str, Any] | None, dict[str, Any] | None]
"""Reports of the running capture and pipeline about a stream; None for one that doesn't run."""


def _followed(home: Home, name: str, readers: dict[str, StreamReader], problems: list[str]) -> dict[str, Any]:
    """Return the facts of a stream that the catalog lacks: a node that follows has its log nevertheless."""
    from millstream.app.status_from_log import facts_of_log
    from millstream.wal.reader import StreamReader

    found: dict[str, Any] = {"name": name, "id": None, "state": "never run", "errors": {}}
    folder = home.wal_folder(name)
    try:
        if folder.is_dir():
            reader = readers.setdefault(str(folder), StreamReader(str(folder)))
            found |= facts_of_log(reader)
            found["source"] |= {"configured": _has_source(home, name), "slot": _slot(home, name)}
            found["log"] |= _log(home, None, name, problems)
    except (LogError, OSError) as error:
        readers.pop(str(folder), None)
        if not isinstance(error, LogError) or error.code != "log_empty":
            problems.append(f"log of {name}: {error}")
    return found


def _without_catalog(home: Home, name: str, readers: dict[str, StreamReader], problems: list[str]) -> dict[str, Any]:
    """Return the facts of a stream while the catalog can't be read: those of its log."""
    found = _followed(home, name, readers, problems)
    tables = [table | {"state": "unknown"} for table in found.get("tables", ())]
    return found | {"state": "unknown"} | ({"tables": tables} if tables else {})


def _stream(
    home: Home,
    catalog: Catalog,
    name: str,
    stream: StreamId,
    live: Live,
    backlogs: dict[str, Backlogs],
    problems: list[str],
) -> dict[str, Any]:
    capture, pipeline = live
    captured, landing = (capture or {}).get("progress") or {}, (pipeline or {}).get("progress") or {}
    # In this order: what has landed was durable before, also if both move between the two.
    landed = _landed(home, catalog, name, stream, problems)
    durable = _durable(home, catalog, name, problems)
    counted = backlog_counter(home, name, durable, backlogs, problems)
    writers, own_name = catalog.writers(stream), _own_name(home)
    writer = next((one for one in writers if one.name == own_name), writers[-1] if writers else None)
    is_written = capture is not None or bool(holder(home.run_folder, writer_role(own_name)))
    source, is_served = _source(home, catalog, name, stream, captured), bool(holder(home.run_folder, "serve"))
    tables = tables_of(
        catalog, stream, captured, landing, lake_paths(home, _readable_config(home, name), catalog, name, stream)
    )
    return {
        "name": name,
        "id": str(stream),
        "state": "running" if is_written or (is_served and not source["configured"]) else "stopped",
        "writer": None
        if writer is None
        else {
            "name": writer.name,
            "epoch": int(writer.epoch),
            "pid": writer.pid or None,
            "alive": is_written,
        },
        "writers": writer_facts(home, catalog, stream)["writers"],
        "source": source,
        "buffer": (capture or {}).get("buffer"),
        "tokens": {
            "durable": None if durable is None else str(StreamToken.scalar(stream, durable)),
            "landed": None if landed is None else str(StreamToken.scalar(stream, landed)),
        },
        "lag": {
            "capture": capture_lag(captured),
            "lake": lake_lag(None if landed is None else counted(landed)),
            "fold": {
                "records": sum(t["fold_lag_records"] for t in landing["tables"]) if "tables" in landing else None,
                "seconds": max((t["fold_lag_s"] or 0.0 for t in landing.get("tables", ())), default=None),
            },
        },
        "replay": landing.get("replay"),
        "pipeline": {
            "log_access": catalog.fact(f"pipeline/{stream}", "log_access"),
            "waits_for": (pipeline or {}).get("waits_for"),
        },
        "lake": {"state": lake_state(catalog, stream)},
        "ring": _ring(catalog, stream, problems),
        "log": _log(home, catalog, name, problems) | _retention(home, catalog, name, stream, counted, problems),
        "tables": with_checks(tables, home, catalog, name, stream, problems),
    }


def _source(home: Home, catalog: Catalog, name: str, stream: StreamId, captured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a stream's source, those of the catalog and those of the running capture."""
    source = catalog.current_source(stream)
    return {
        "number": int(source.id) if source else None,
        "reached": format_lsn(source.reached) if source else None,
        "database": source.database if source else None,
        "timeline": source.timeline if source else None,
        "slot_dropped": bool(catalog.fact(f"capture/{stream}", "slot_dropped")),
        "configured": _has_source(home, name),
        "left": [asdict(noted) for noted in left_slots(home, catalog, stream)],
        "slot": _slot(home, name),
        "mode": captured.get("mode"),
        "received": _lsn_text(captured.get("received")),
        "end": _lsn_text(captured.get("source_end")),
        "slot_holds_bytes": captured.get("slot_holds_bytes"),
        "spilled_bytes": captured.get("source_spilled_bytes"),
    }


def _lsn_text(lsn: int | None) -> str | None:
    return None if lsn is None else format_lsn(Lsn(lsn))


def _ring(catalog: Catalog, stream: StreamId, problems: list[str]) -> list[dict[str, Any]]:
    """Return the stream's hash rings, each in force from its `token` on; the last is current.

    Empty if it never had one.
    """
    from millstream.catalog.hash_ring_history import RingEras, eras_as_facts

    try:
        return eras_as_facts(stream, RingEras(catalog, stream).all())
    except MillstreamError as error:
        problems.append(f"hash ring: {error.message}")
        return []


def _sinks(stream: str, processes: Iterable[Mapping[str, list[dict[str, Any]]]]) -> dict[str, dict[str, int]]:
    """Return by sink its `rows` and `ignored_errors`, summed over the processes that run now."""
    found: dict[str, dict[str, int]] = {}
    for series in processes:
        for key, counter in (("rows", SINK_ROWS), ("ignored_errors", SINK_IGNORED_ERRORS)):
            for one in series.get(counter.name, ()):
                of, sink = one["labels"]
                if of == stream and one["value"]:
                    sums = found.setdefault(sink, {"rows": 0, "ignored_errors": 0})
                    sums[key] += int(one["value"])
    return found


def _has_source(home: Home, name: str) -> bool:
    """Return whether the readable configuration gives the stream a source; if not, applications append to it."""
    with contextlib.suppress(MillstreamError):  # reported already
        return name in home.config.streams and home.config.streams[name].source is not None
    return True


def _slot(home: Home, name: str) -> str | None:
    """Return the name of the slot of a stream's source, if the readable configuration gives it one."""
    config = _readable_config(home, name)
    return None if config is None or config.source is None else config.source.slot or default_name(name)


def _readable_config(home: Home, name: str) -> StreamConfig | None:
    """Return a stream's configuration; None if the home has none of it, or it can't be read, which is reported already."""
    with contextlib.suppress(MillstreamError):
        return home.config.streams.get(name)
    return None


def _own_name(home: Home) -> str | None:
    """Return the writer's name in the home's configuration, if it can be read."""
    with contextlib.suppress(MillstreamError):  # reported already
        return home.config.writer.name
    return None


def _durable(home: Home, catalog: Catalog, name: str, problems: list[str]) -> Seq | None:
    from millstream.wal.reader import StreamReader

    try:
        check_log(home, name, catalog)
        return StreamReader(str(home.wal_folder(name))).persisted_upto()
    except (LogError, OSError) as error:
        problems.append(f"log of {name}: {error}")
        return None


def _landed(home: Home, catalog: Catalog, name: str, stream: StreamId, problems: list[str]) -> Seq | None:
    """Return the last cut of the lake that this home names; None if it is unknown.

    The catalog may be one batch behind after a crash. And its position may be another node's, which
    landed elsewhere: a promoted node has it from the old leader, or shares it, until its own pipeline has
    begun.
    """
    from millstream.home.config_mapping import last_cut_of

    try:
        config = home.config.streams.get(name)
        if config is not None:
            cut = last_cut_of(home, name, config, stream)
            return Seq(0) if cut is None else cut.n
    except ConfigError:
        pass  # reported already
    except (MillstreamError, OSError) as error:
        problems.append(f"lake of {name}: {error}")
        if home.config.replication.nodes:
            return None
    return catalog.landed(stream, PIPELINE)


def _log(home: Home, catalog: Catalog | None, name: str, problems: list[str]) -> dict[str, Any]:
    from millstream.wal.backlog import log_size
    from millstream.wal.reader import StreamReader

    try:
        check_log(home, name, catalog)
        segments, size = log_size(str(home.wal_folder(name)))
        first = int(StreamReader(str(home.wal_folder(name))).first_seq())
    except (LogError, OSError) as error:
        problems.append(f"log of {name}: {error}")
        return {"segments": None, "bytes": None, "first_seq": None}
    return {"segments": segments, "bytes": size, "first_seq": first}


def _retention(
    home: Home,
    catalog: Catalog,
    name: str,
    stream: StreamId,
    counted: Callable[[Seq], Backlog | None],
    problems: list[str],
) -> dict[str, Any]:
    """Return what prevents the log's segments from being dropped.

    Returns:
        `held`: by holder its `kind`, the number `from` which it needs the log, how many `bytes` that is
            and how many `seconds` old.
        `cut_off`: by holder its `kind`, and the `first` number that the log had left for it.
        `oldest`: the oldest sealed segment (`shard` and number: `segment`), for how many `seconds` it has
            been the oldest, and the holders that it is `needed_by`; None if none is sealed.
        `retention`: the bounds in force, `age_s`, `bytes`, `bytes_max`; None if the configuration can't
            be read or doesn't name the stream.
    """
    from millstream.home.retention import bounds_of, moved_us, tracker_of
    from millstream.protocol.retention import HolderKind
    from millstream.regions.region_retention import merge_needs
    from millstream.regions.state_files import KeptVectors
    from millstream.wal.segment_deletion import hold_for_sessions, oldest_sealed

    positions = catalog.pipelines(stream)
    folder = home.wal_folder(name)
    config = _readable_config(home, name)
    merges = {} if config is None else merge_needs(catalog, name, stream, config, KeptVectors(home))
    tracker = tracker_of(positions, merges)
    bounds = None if config is None else bounds_of(config.log, folder)
    oldest: dict[str, Any] | None = None
    try:
        hold_for_sessions(str(folder), tracker)
        segment = oldest_sealed(str(folder))
        if segment is not None:
            since_s = max(segment.sealed_ns / 1e9, moved_us(catalog, stream) / 1e6)
            oldest = {
                "shard": int(segment.shard),
                "segment": int(segment.base_offset),
                "seconds": max(0.0, time.time() - since_s),
                "needed_by": list(tracker.needed_by(segment)),
            }
    except FileNotFoundError:
        pass  # it is dropped at this very moment: the next look finds its successor
    except (LogError, OSError) as error:
        problems.append(f"log of {name}: {error}")
    return {
        "held": {
            # The tracker's: a pipeline without a reported position holds everything.
            name: {"kind": holder.kind.value, **held_log(needed, counted(Seq(needed - 1)))}
            for name, holder in sorted(tracker.holders.items())
            if holder.kind is not HolderKind.SESSIONS  # the log's own: it gives way within a round of retention
            if (needed := Seq(max(1, holder.needed_from)))
        },
        "cut_off": {
            position.name: {"kind": position.kind.value, "first": int(position.cut_off_at)}
            for position in positions
            if position.cut_off_at is not None
        },
        "oldest": oldest,
        "retention": None
        if bounds is None
        else {"age_s": bounds.age_s, "bytes": bounds.size_bytes, "bytes_max": bounds.bytes_max},
    }


def live_progress(home: Home, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a stream's progress from the running capture and pipeline; empty for those that don't run."""
    owner, pipeline = ((ask(home, role, "status") or {}).get("streams", {}).get(name) for role in ("owner", "pipeline"))
    return (owner or {}).get("progress") or {}, (pipeline or {}).get("progress") or {}
