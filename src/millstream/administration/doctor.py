"""`doctor`: every problem that would keep a home from running, each with its fix. It changes only caches.

It writes an object of its own into object stores, reads it and deletes it. The checks are `capture.source_table_checks`
and `capture.server_checks` of the source and its server, `administration.lake_checks` of lakes, `nodes.node_checks` of other nodes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream.administration.address_checks import examine_addresses
from millstream.administration.consumer_checks import check_consumer_state, has_consumers
from millstream.administration.initialize import holds_password
from millstream.administration.lake_checks import (
    BEFORE_THE_FIRST_RUN,
    LATER,
    check_lake,
    check_lake_owner,
    has_todays_catalog,
    id_in,
    probe_lake_catalog,
)
from millstream.app.status import collect_status, live_progress
from millstream.app.status_words import undelivered, why_and_since
from millstream.app.table_checks import refused_tables
from millstream.app.table_status import tables_of
from millstream.app.trouble_rules import Kind, what_to_run
from millstream.errors import LogError, MillstreamError, UnknownStream
from millstream.home.config_mapping import capture_config
from millstream.home.home import Home
from millstream.home.machine_code_folder import place_compiled_code
from millstream.home.missing_logs import check_log
from millstream.home.paths import HomePaths
from millstream.home.rows_before_rules import until_words
from millstream.leadership.node_roles import Roles
from millstream.model.addresses import mask_address
from millstream.model.human_text import counted
from millstream.nodes.node_checks import examine_nodes
from millstream.private_files import is_open_to_others, make_folder
from millstream.protocol.replication.node_promises import Role
from millstream.wal.files import error_of_os
from millstream.writers.allowed_writers import examine_writers
from millstream.writers.stall_reasons import troubles

if TYPE_CHECKING:
    from millstream.capture.column_rules.binding import ColumnRules
    from millstream.capture.config import CaptureConfig
    from millstream.capture.server_checks import Finding
    from millstream.config.model import StreamConfig
    from millstream.model.column_rules import SourceRules

_TO_DECIDE: Final = frozenset(
    {
        "publication_replaced",
        "slot_ahead",
        "slot_lost",
        "source_replaced",
        "offset_expired",
        "lake_of_another_log",
        "lake_of_another_stream",
        "lake_table_foreign",
    }
)
"""Errors that end capture or the pipeline at each start, until an operator decides how to go on."""
_CHECKED_ELSEWHERE: Final = frozenset(
    {Kind.SLOT_LAG, Kind.TABLE_QUARANTINED, Kind.KEY_CHANGED, Kind.MERGE_CHANGED, Kind.OTHER_STREAM}
)
"""Conditions that the checks of a source, of tables and of nodes find."""
_CLUSTER_CHECKS: Final = ("spark.master", "spark.python", "executor.log", "executor.lake", "clocks")
"""The checks of a cluster, in their order. After one that fails, those that couldn't be asked are no findings of their own."""
_FREE_BYTES_MIN: Final = 2 << 30
"""Room for some segments, Spark's scratch space and a first load of tables of a usual size."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding.

    `blocks` is `home`, `source`, `table`, `current` (one table goes into history only) or `nothing` (a
    warning, or all is well).
    """

    check: str
    code: str
    """`ok`, or the problem's code."""
    message: str
    blocks: str = "nothing"
    fix: str = ""
    sql: str = ""
    table: str = ""

    @property
    def is_ok(self) -> bool:
        """Return whether there is no problem."""
        return self.code == "ok"

    @property
    def is_wrong(self) -> bool:
        """Return whether something doesn't run because of it; otherwise it is right, or worth a note."""
        return self.blocks not in {"nothing", "current"}

    def as_dict(self) -> dict[str, Any]:
        """Return the finding, JSON-able."""
        return asdict(self)


def examine(
    home: Home,
    say: Callable[[str], None],
    serving: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Iterator[Diagnosis]:
    """Yield the finding of each check; a failed check is a finding too.

    An error that several checks meet, such as a configuration that can't be read, is one finding.

    Args:
        say: announces slow checks.
        serving: runs the home's Flight server: a cluster's executors may read the log from it.
    """
    seen: set[tuple[str, str]] = set()
    for found in _examine(home, say, serving):
        if found.is_ok or (found.code, found.message) not in seen:
            yield found
        seen.add((found.code, found.message))


def _examine(
    home: Home,
    say: Callable[[str], None],
    serving: Callable[[], contextlib.AbstractContextManager[object]],
) -> Iterator[Diagnosis]:
    yield from _one("configuration", lambda: _configuration(home))
    yield from _one("home", lambda: _folder(home))
    yield _private(home)
    yield from _one("catalog", lambda: _catalog(home))
    yield from _one("java", lambda: _java(home))
    yield from _one("spark", _spark)
    yield from _one("compiled code", lambda: _compiled(home, say))
    try:
        streams = dict(home.config.streams)
    except MillstreamError:
        return
    yield from _cluster(home, say, serving)
    for name, stream in streams.items():
        try:
            yield from _of_stream(home, name, stream)
        except OSError as error:  # of a folder that this user may not look into
            yield _failed(f"stream {name}", error, "home")
    yield from _alerts(home)
    for check, result in examine_addresses(home):
        # A run continues without its server.
        yield Diagnosis(check, "ok", result) if isinstance(result, str) else _failed(check, result, "nothing")
    for found in examine_nodes(home):
        # A node works without the others: no finding about them keeps it from running.
        failure = None if found.error is None else _failed(found.check, found.error, "nothing")
        yield failure or Diagnosis(found.check, "ok", found.message)


def _of_stream(home: Home, name: str, stream: StreamConfig) -> Iterator[Diagnosis]:
    yield from _lake_checks(home, name, stream)
    yield from _one(f"log of {name}", partial(_log, home, name))
    yield from _one(f"writers of {name}", partial(_writers, home, name))
    yield from _given_up(home, name)
    if has_consumers(home, name, stream):
        yield from _one(f"consumers of {name}", partial(check_consumer_state, home, name))
        yield from _sinks(home, name)
    if stream.region or stream.merge or home.regions_on_disk(name):
        yield from _one(f"regions of {name}", partial(_regions, home, name, stream))
        yield from _clocks_of_regions(home, name, stream)
    yield from _tables(home, name)
    if stream.source is None:
        yield Diagnosis(f"source of {name}", "ok", "none: it has what applications append")
        return
    try:
        yield from _source(home, name)
    except (MillstreamError, ImportError) as error:
        yield _failed(f"source of {name}", error, "source")


def as_checks(home: Home, found: Iterable[Diagnosis]) -> list[dict[str, Any]]:
    """Return the checks of a cluster and of stores among the findings: `name`, `ok`, `detail`, `hint`.

    A cluster's checks are complete if there are any: a check that isn't among the findings has the failure before it.
    """
    found = list(found)
    checks = [
        {"name": name, "ok": one.is_ok, "detail": one.message, "hint": one.fix}
        for name, one in _of_cluster({one.check: one for one in found if one.check in _CLUSTER_CHECKS})
    ]
    for one in found:
        ok = {}
        if any(one.check == f"lake of {name}" and "://" in home.lake_location(s) for name, s in _streams(home).items()):
            # The store names a bucket or a right only to keys that it accepts.
            accepted = one.is_ok or one.code in {"lake_bucket_missing", "lake_forbidden"}
            ok = {"lake.credentials": accepted, "lake.bucket": one.is_ok}
        if any(one.check == f"catalog of {name}" for name in _streams(home)):
            ok = {"lake.catalog": one.is_ok}
        checks += [{"name": name, "ok": is_ok, "detail": one.message, "hint": one.fix} for name, is_ok in ok.items()]
    return checks


def _of_cluster(found: Mapping[str, Diagnosis]) -> Iterator[tuple[str, Diagnosis]]:
    """Yield each check of a cluster with its finding, or with the failure that kept it from being asked."""
    failed = None
    for name in _CLUSTER_CHECKS:
        finding = found.get(name, failed)
        if finding is not None:
            yield name, finding
            failed = failed if finding.is_ok else finding


def _streams(home: Home) -> dict[str, StreamConfig]:
    with contextlib.suppress(MillstreamError):
        return dict(home.config.streams)
    return {}


def repair_script(home: Home) -> tuple[str, list[Diagnosis]]:
    """Return one SQL script for a DBA, for all streams; and the sources that it lacks, since they couldn't be asked.

    The script is empty if SQL can fix nothing.
    """
    from millstream.capture.source_table_checks import doctor_sql, sql_comment

    scripts = []
    unasked = []
    for name, stream in home.config.streams.items():
        if stream.source is None:
            continue
        try:
            script = doctor_sql(capture_config(home, name, stream))
        except (MillstreamError, ImportError) as error:
            unasked.append(_failed(f"source of {name}", error, "source"))
        else:
            if script:
                scripts.append(sql_comment(f"stream {name}") + script)
    return "\n".join(scripts), unasked


def _private(home: Home) -> Diagnosis:
    """Check whether other users of the machine may read the home; that doesn't keep it from running."""
    with contextlib.suppress(MillstreamError):
        lakes = [home.lake_location(stream) for stream in home.config.streams.values()]
        places = [home.data, *(Path(lake) for lake in lakes if "://" not in lake)]
        if holds_password(home.config_file.read_text(encoding="utf-8")):
            places.append(home.config_file)
        found = list(dict.fromkeys(str(place) for place in places if is_open_to_others(place)))
        if found:
            return Diagnosis(
                "privacy",
                "open_to_others",
                f"every user of this machine may read {', '.join(found)}",
                fix=f"Run `chmod -R go= {shlex.join(found)}`; for a group, `chmod -R g+rX,o= {shlex.join(found)}`.",
            )
    return Diagnosis("privacy", "ok", "no other user of this machine may read data or lake")


def _one(check: str, look: Callable[[], str]) -> Iterator[Diagnosis]:
    try:
        yield Diagnosis(check, "ok", look())
    except (MillstreamError, OSError, ImportError) as error:
        yield _failed(check, error, "home")


def _failed(check: str, error: Exception, blocks: str) -> Diagnosis:
    if isinstance(error, OSError) and error.errno is not None:
        error = error_of_os(error)
    if isinstance(error, MillstreamError):
        return Diagnosis(check, error.code, error.message, blocks, error.hint)
    if isinstance(error, ImportError):
        return Diagnosis(check, "missing_extra", str(error), blocks, "pip install 'millstream[spark]'")
    return Diagnosis(check, "os", str(error), blocks, "Free space on the disk.")


def _configuration(home: Home) -> str:
    home.check_names_stream()
    return f"{home.config_file}: {counted(len(home.config.streams), 'stream')}"


def _folder(home: Home) -> str:
    home.prepare()
    free = shutil.disk_usage(home.data).free
    if free < _FREE_BYTES_MIN:
        raise OSError(f"{home.data}: only {free >> 20} MiB are free on its disk")
    return f"{home.data} can be written, {free >> 30} GiB are free"


def _catalog(home: Home) -> str:
    from millstream.catalog import examine_catalog

    found = examine_catalog(home.catalog_place())
    if found.revision is None:
        return f"{found.place}: there is none yet; the first run makes it"
    if found.revision != found.known:
        return (
            f"{found.place}: schema {found.revision}; the next run makes it {found.known}, which older versions refuse"
        )
    return f"{found.place}: schema {found.revision}"


def _java(home: HomePaths) -> str:
    from millstream.spark.java import find_java

    cache = home.data / "cache" / "java"
    make_folder(cache)
    java = find_java(cache)
    return f"Java {java.version} ({java.origin})"


def _spark() -> str:
    if importlib.util.find_spec("pyspark") is None:
        raise ModuleNotFoundError("pyspark isn't installed", name="pyspark")
    from importlib.metadata import version

    return f"pyspark {version('pyspark')}"


def _compiled(home: Home, say: Callable[[str], None]) -> str:
    place_compiled_code(home)
    if not any(Path(os.environ["NUMBA_CACHE_DIR"]).glob("pgoutput*")):  # other commands compile other modules
        say("compiling the decoders: half a minute or less, once for all homes …")
    from millstream.codec.pgoutput import warm

    warm()
    return f"decoders are compiled, kept in {os.environ['NUMBA_CACHE_DIR']}"


def _cluster(
    home: Home, say: Callable[[str], None], serving: Callable[[], contextlib.AbstractContextManager[object]]
) -> Iterator[Diagnosis]:
    """Yield the checks of a master that isn't local, and its warnings."""
    from millstream.app.cluster import UNTESTED, cluster_facts, lacks_encryption

    spark = home.config.spark
    if spark.is_local or importlib.util.find_spec("pyspark") is None:
        return
    if spark.is_untested:
        yield Diagnosis("spark", "master_untested", f"{mask_address(spark.master)}: {UNTESTED}")
    missing = lacks_encryption(spark.master, spark.conf)
    if missing:
        yield Diagnosis(
            "spark",
            "cluster.encryption",
            f"the driver and its executors talk without {' and '.join(missing)}: the network can read store keys and tokens",
            fix="Set both to true in [spark.conf], with a spark.authenticate.secret, and on master and workers alike.",
        )
    say(f"asking the executors at {mask_address(spark.master)}: a minute or two …")
    try:
        checks = cluster_facts(home, serving)
    except (MillstreamError, OSError) as error:
        yield _failed("spark.master", error, "home")
        return
    for check in checks:
        wrong = check["error"]
        if wrong is None:
            yield Diagnosis(check["name"], "ok", check["detail"])
        else:
            yield Diagnosis(check["name"], wrong["code"], wrong["message"], "home", wrong["hint"])


def _lake_checks(home: Home, name: str, stream: StreamConfig) -> Iterator[Diagnosis]:
    has_catalog = stream.lake.catalog_type is not None
    of_catalog = (
        list(_one(f"catalog of {name}", partial(probe_lake_catalog, home, name, stream))) if has_catalog else []
    )
    found = list(of_catalog)
    # Only the catalog knows the store of a lake that lies in it.
    if not stream.lake.lies_in_catalog or all(one.is_ok for one in of_catalog):
        found = [*_one(f"lake of {name}", partial(check_lake, home, name, stream)), *of_catalog]
    yield from found
    if stream.lake.format != "postgres" and all(one.is_ok for one in found):
        yield from _one(f"tables in the lake of {name}", partial(check_lake_owner, home, name, stream))


def _log(home: Home, name: str) -> str:
    from millstream.wal.reader import StreamReader

    folder = home.wal_folder(name)
    check_log(home, name)
    try:
        if folder.is_dir():
            reader = StreamReader(str(folder))
            return f"it can be read, from number {reader.first_seq():,} to {reader.persisted_upto():,}"
    except LogError as error:
        if error.code != "log_empty":
            raise
    return "there is none yet"


def _writers(home: Home, name: str) -> str:
    fact = Roles(home).of(name)
    if fact.role is not Role.LEADS:
        return f"none here: {fact.leader or 'another node'} leads"
    return examine_writers(home, name)


def _sinks(home: Home, name: str) -> Iterator[Diagnosis]:
    """Yield each consumer of `millstream.toml` whose sink is another package's and can't be opened here.

    It delivers nothing; everything else runs.
    """
    from millstream.delivery.sinks import OURS, open_sink
    from millstream.writers.home_consumers import configured_consumers

    try:
        sinks = {consumer: wanted.sink for consumer, wanted in configured_consumers(home, name).items()}
    except MillstreamError:
        return  # the check of the consumers reports it
    for consumer, sink in sinks.items():
        if sink is None or sink.kind in OURS:
            continue
        try:
            open_sink(sink.kind, sink.settings, stream=name, consumer=consumer).close()
        except MillstreamError as error:
            yield _failed(f"sink of consumer {consumer} of {name}", error, "nothing")


def _given_up(home: Home, name: str) -> Iterator[Diagnosis]:
    """Yield each part of a stream that was given up in its last run: an error if the next run ends the same way."""
    for trouble in troubles(home):
        if trouble["stream"] == name and trouble["gave_up"]:
            code, message = trouble["code"], f"given up: {why_and_since(trouble)}"
            blocks = "nothing" if code not in _TO_DECIDE else "source" if trouble["part"] == "capture" else "home"
            yield Diagnosis(f"{trouble['part']} of {name}", code, message, blocks, trouble["hint"])


def _tables(home: Home, name: str) -> Iterator[Diagnosis]:
    """Yield the tables that capture or the lake quarantined; one line if there are none."""
    check = f"tables of {name}"
    try:
        if not has_todays_catalog(home):
            yield Diagnosis(check, "ok", LATER)
            return
        with home.open_catalog() as catalog:
            stream = id_in(catalog, name)
            tables = [] if stream is None else tables_of(catalog, stream, *live_progress(home, name))
            refused = [] if stream is None else [one for _, one in refused_tables(home, catalog, name, stream)]
    except (MillstreamError, OSError) as error:
        yield _failed(check, error, "home")
        return
    aside = [table for table in tables if table["state"] == "quarantined"]
    for table in aside:
        yield Diagnosis(
            check,
            "table_quarantined",
            f"{table['name']} is quarantined: {table['reason']}",
            "table",
            what_to_run(table, name if len(home.config.streams) > 1 else ""),
            table=table["name"],
        )
    for one in refused:
        yield Diagnosis(check, one.code, one.message, "table", one.hint, table=one.details["table"])
    if not aside and not refused:
        yield Diagnosis(check, "ok", f"none of {len(tables)} is quarantined")


def _alerts(home: Home) -> Iterator[Diagnosis]:
    """Yield the conditions that no other check finds, and whether alerts about them are delivered."""
    try:
        status = collect_status(home)
    except (MillstreamError, OSError) as error:
        yield _failed("conditions", error, "nothing")
        return
    for stream, table in ((s["name"], t) for s in status["streams"] for t in s.get("tables", ()) if t["raw_values"]):
        yield Diagnosis(
            f"tables of {stream}",
            "raw_values_kept",
            f"{table['name']}: {until_words(table['raw_values'])}",
            fix=f"Lower retention_age if the values have to go earlier; `millstream tables copy {shlex.quote(table['name'])} --forget` deletes "
            "them from the lake at once.",
            table=table["name"],
        )
    for condition in status["conditions"]:
        if condition["kind"] not in _CHECKED_ELSEWHERE:
            yield Diagnosis(
                f"conditions of {condition['stream'] or 'the home'}",
                str(condition["kind"]),
                condition["message"],
                fix=condition["hint"],
            )
    alerts = status["alerts"]
    if alerts is None:
        yield Diagnosis("alerts", "ok", "none are sent: [alerts] has no url")
    elif alerts["error"] is not None:
        yield Diagnosis(
            "alerts",
            "alerts_undelivered",
            undelivered(alerts),
            fix="Mend the receiver, or [alerts] url; the alerts are sent again until it takes them.",
        )
    elif status["processes"].get("alerts") is None:
        yield Diagnosis("alerts", "ok", f"sent to {alerts['receiver']} while `millstream run` or `serve` runs")
    else:
        yield Diagnosis("alerts", "ok", f"sent to {alerts['receiver']}")


def _regions(home: Home, name: str, stream: StreamConfig) -> str:
    """Check that each log belongs to its region, and that tables can merge as configured."""
    from millstream.regions.declared_merges import check_merges
    from millstream.regions.region_clocks import newest_time
    from millstream.regions.region_folders import region_readers

    if home.has_catalog():
        with home.open_catalog() as catalog, contextlib.suppress(UnknownStream):
            check_merges(stream, catalog.latest_schemas(catalog.stream(name).id).values())
    copies = []
    for region, reader in region_readers(home, name, stream).items():
        if region != stream.region:
            copies.append(region)
        elif not home.wal_folder(name).exists():
            continue
        newest_time(reader, region)
    words = [f"this is region {stream.region}"] if stream.region else []
    words += [f"has the log of region {region}" for region in copies]
    words += [f"{counted(len(stream.merge), 'table')} can merge"] if stream.merge else []
    return ", ".join(words)


def _clocks_of_regions(home: Home, name: str, stream: StreamConfig) -> Iterator[Diagnosis]:
    from millstream.regions.region_clocks import clocks_ahead

    with contextlib.suppress(MillstreamError):  # a log that can't be read is another finding
        for error in clocks_ahead(home, name, stream):
            yield _failed(f"clocks of {name}", error, "nothing")


@contextlib.contextmanager
def _rules(home: Home, name: str, rules: SourceRules) -> Iterator[ColumnRules | None]:
    """Yield a stream's rules as its next start finds them; None if the catalog can't be read as it is."""
    from millstream.capture.column_rules.binding import ColumnRules

    with contextlib.ExitStack() as opened:
        bound = None
        with contextlib.suppress(MillstreamError):  # the check of the catalog reports it
            catalog, stream_id = None, None
            is_todays = has_todays_catalog(home)
            if is_todays:
                catalog = opened.enter_context(home.open_catalog())
                stream_id = id_in(catalog, name)
            if is_todays is not False:
                known = catalog if stream_id is not None else None
                bound = ColumnRules(known, stream_id or BEFORE_THE_FIRST_RUN, rules)
        yield bound


def _slot_of_log(home: Home, name: str, config: CaptureConfig) -> list[Finding]:
    """Return what of the slot would stop the next start; a start that did is another finding."""
    from millstream.capture.source_table_checks import check_slot_of_log, reached_in_log
    from millstream.wal.reader import StreamReader

    if not has_todays_catalog(home) or Roles(home).of(name).role is not Role.LEADS:
        return []
    # A source that can't be asked, or a log that can't be read, is another finding.
    with home.open_catalog() as catalog, contextlib.suppress(MillstreamError):
        if id_in(catalog, name) is not None:
            found = check_slot_of_log(
                config, catalog, partial(reached_in_log, StreamReader(str(home.wal_folder(name))))
            )
            given_up = {one.code for one in _given_up(home, name)}
            return [one for one in found if one.code not in given_up]
    return []


def _source(home: Home, name: str) -> Iterator[Diagnosis]:
    from millstream.capture.source_table_checks import check_source

    check = f"source of {name}"
    config = capture_config(home, name, home.config.streams[name])
    with _rules(home, name, config.rules) as rules:
        findings = [*check_source(config, rules), *_slot_of_log(home, name, config)]
    in_database = home.config.streams[name].lake.format == "postgres"  # whose types hold values that files' types can't
    for found in findings:
        if found.code == "column_is_text" and in_database:
            continue
        yield Diagnosis(check, found.code, found.message, found.blocks, found.fix, found.sql, found.table)
    if not any(found.blocks in {"source", "table"} for found in findings):
        yield Diagnosis(check, "ok", "it can be captured")
