"""The live areas of the overview and of the lists: tables, consumers, nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

from millstream.app.record_rates import Status, consumer_key
from millstream.app.trouble_rules import what_to_run
from millstream.console.html import Content, Html, Part, Piece, described, escaped, opened, tag, with_code
from millstream.console.page_frame import link
from millstream.console.troubles import Trouble, troubles_of
from millstream.model.human_text import copy_words, counted, human_bytes, human_seconds, lag_words

_LEVELS: Final = {
    "quarantined": "error",
    "cut_off": "error",
    "fenced": "error",
    "paused": "warning",
    "copy_held": "warning",
    "stopped": "warning",
    "apart": "warning",
    "copying": "busy",
    "copy_requested": "busy",
}
"""How a state is marked, next to its name: a color alone would tell some readers nothing."""
_MARKS: Final = {"error": "✖ ", "warning": "▲ ", "busy": "… ", "": ""}


def state_mark(state: str) -> Html:
    """Return a state with its mark."""
    level = _LEVELS.get(state, "")
    return tag("span", f"{_MARKS[level]}{state.replace('_', ' ')}", class_=f"state {level}".strip())


def overview(status: Status, rates: Mapping[str, float]) -> Iterator[Piece]:
    """Yield the overview: what is wrong, then each stream as its way from source to readers."""
    yield Part("troubles", _troubles(troubles_of(status), at_rest=_is_at_rest(status)))
    for number, stream in enumerate(status["streams"]):
        yield Part(f"stream-{number}", _stream(f"stream-{number}", stream, rates))
    if not status["streams"]:
        yield tag("p", "This home has no streams. Add one to millstream.toml: ", tag("code", "[streams.NAME]"))
    yield Part("processes", _processes(status["processes"]))


def _is_at_rest(status: Status) -> bool:
    """Return whether streams have a source, and no process that captures or lands."""
    captured = any(stream["source"]["configured"] for stream in status["streams"] if stream.get("id"))
    return captured and all(status["processes"].get(role) is None for role in ("run", "owner", "pipeline", "follow"))


def _troubles(troubles: Sequence[Trouble], *, at_rest: bool) -> Html:
    if not troubles:
        rest = " But nothing is captured and nothing lands: `millstream run` isn't running." if at_rest else ""
        return tag(
            "section",
            tag("p", "✓ Nothing is wrong.", *with_code(rest), class_="well"),
            id="troubles",
            aria_label="Troubles",
            data_count=0,
        )
    items = [
        tag(
            "li",
            tag(
                "p",
                tag("strong", _MARKS["error" if one.is_error else "warning"], tag("code", one.code)),
                f" {one.stream}: " if one.stream else " ",
                with_code(one.message),
            ),
            tag("p", with_code(one.hint), class_="hint") if one.hint else None,
            class_=f"trouble {'error' if one.is_error else 'warning'}",
        )
        for one in troubles
    ]
    return tag(
        "section",
        tag("h2", counted(len(troubles), "trouble")),
        tag("ul", *items),
        id="troubles",
        data_count=len(troubles),
    )


def _stream(key: str, stream: Mapping[str, Any], rates: Mapping[str, float]) -> Html:
    heading = tag("h2", "Stream ", stream["name"], " ", state_mark(stream["state"]), id=f"{key}-name")
    if not stream.get("id"):
        return tag("section", heading, id=key, aria_labelledby=f"{key}-name")
    steps = [
        step for step in (_source(stream), _log(stream, rates.get(stream["name"])), _lake(stream)) if step is not None
    ]
    readers = [*_consumers_step(stream, rates), *_nodes_steps(stream)]
    return tag(
        "section",
        heading,
        tag("ol", *steps, *readers, class_="way"),
        id=key,
        class_="stream",
        aria_labelledby=f"{key}-name",
    )


def _step(title: Content, main: str, *lines: str | None, level: str = "") -> Html:
    return tag(
        "li",
        tag("h3", _MARKS[level], title),
        tag("p", main, class_="figure"),
        *(tag("p", line) for line in lines if line),
        class_=level or None,
    )


def _source(stream: Mapping[str, Any]) -> Html | None:
    source = stream["source"]
    if not _leads(stream):
        return None
    if not source["configured"]:
        return _step("Applications", "append to it", "no source is configured")
    lag = stream["lag"]["capture"]
    known = lag["bytes"] is not None
    holds = source["slot_holds_bytes"]
    return _step(
        f"Source {source['database'] or ''}",
        *(_lag_lines(lag) if known else ["not read now"]),
        source["mode"],
        None if holds is None else f"its slot holds {human_bytes(holds)}",
        None if source["reached"] is None else f"read up to {source['reached']}",
        level="error" if "capture" in stream["errors"] else "" if known else "warning",
    )


def _log(stream: Mapping[str, Any], rate: float | None) -> Html:
    log = stream["log"]
    size = (
        "can't be read"
        if log["segments"] is None
        else f"{human_bytes(log['bytes'])} in {counted(log['segments'], 'segment')}"
    )
    return _step(
        "Log",
        "…" if rate is None else f"{rate:,.0f} records/s",
        size,
        None if stream["tokens"]["durable"] is None else f"durable {stream['tokens']['durable']}",
        level="error" if log["segments"] is None else "",
    )


def _leads(stream: Mapping[str, Any]) -> bool:
    """Return whether this node captures and lands a stream: another node's part is for that node to show."""
    return (stream["replication"] or {"role": "leads"})["role"] in {None, "leads"}


def _lake(stream: Mapping[str, Any]) -> Html | None:
    if not _leads(stream):
        return None
    lag, fold = stream["lag"]["lake"], stream["lag"]["fold"]
    states = [table["state"] for table in stream["tables"]]
    held = states.count("quarantined")
    rates = [table["rows_per_s"] for table in stream["tables"] if table["rows_per_s"] is not None]
    return _step(
        "Lake",
        *(_lag_lines(lag) if lag["records"] is not None else ["unknown"]),
        f"{sum(rates):,.0f} rows/s" if rates else None,
        None if fold["seconds"] is None else f"folds {human_seconds(fold['seconds'])} behind",
        counted(len(states), "table") + (f", {held} quarantined" if held else ""),
        level="error" if held or "pipeline" in stream["errors"] else "",
    )


def _consumers_step(stream: Mapping[str, Any], rates: Mapping[str, float]) -> Iterator[Html]:
    consumers = stream["consumers"]
    if consumers:
        dead = sum(one["dead"] for one in consumers)
        lags = [one["lag"] for one in consumers if one["lag"]["records"] is not None]
        last = max(lags, key=lambda lag: lag["records"], default=None)
        keys = [consumer_key(stream["name"], one["name"]) for one in consumers]
        per_s = [rates[key] for key in keys if key in rates]
        yield _step(
            tag("a", counted(len(consumers), "consumer"), href="/consumers"),
            *(["unknown"] if last is None else _lag_lines(last) if last["records"] else ["nothing waits"]),
            "the last of them" if len(consumers) > 1 and last is not None and last["records"] else None,
            f"{sum(per_s):,.0f} messages/s" if per_s else None,
            f"{sum(one['in_flight'] for one in consumers):,} in flight",
            f"{dead:,} dead letters" if dead else None,
            level="error" if dead or any(one["state"] == "cut_off" for one in consumers) else "",
        )


def _nodes_steps(stream: Mapping[str, Any]) -> Iterator[Html]:
    its = stream["replication"]
    if its is not None:
        for one in its["followers"]:
            level = _LEVELS.get(one["phase"], "")
            yield _step(f"Follower {one['node']}", _behind(one), _age(one["lag_s"]), level and "apart", level=level)
        if its["following"]:
            yield _step(f"Follows {its['leader']}", _behind(its["following"]), _age(its["age_s"]))
    for region in stream["regions"]:
        yield _step(f"Region {region['stream']}", _behind(region["following"] or {}), _age(region["age_s"]))


def _lag_lines(lag: Mapping[str, Any]) -> list[str]:
    """Return a stage's lag in words: the figure that says most, and the others."""
    first, _, rest = lag_words(lag).partition(", ")
    return [f"{first} behind", rest.removesuffix(" behind")] if rest else [first]


def _behind(lag: Mapping[str, Any]) -> str:
    records = lag.get("records_behind")
    if records is None:
        return "unknown"
    return f"{records:,} records, {human_bytes(lag['bytes_behind'])} behind" if records else "nothing waits"


def _age(seconds: float | None) -> str:
    return "of unknown age" if seconds is None else f"{human_seconds(seconds)} old"


def _processes(processes: Mapping[str, Any]) -> Html:
    running = [f"{part} (process {pid})" for part, pid in processes.items() if pid is not None]
    return tag("p", "Running: ", ", ".join(running) or "nothing", id="processes", class_="note")


TABLE_HEADS: Final = (
    "Table",
    "State",
    "Lag",
    "Landed records",
    "Rows/s",
    "Size",
    "Last change (UTC)",
    "Reason, and what to do",
)
_TABLE_NUMBERS: Final = frozenset({2, 3, 4, 5})
_TROUBLED: Final = ("error", "warning", "busy", "")


def tables(status: Status) -> Iterator[Piece]:
    """Yield the list of all tables, those in trouble first."""
    several = len(status["streams"]) > 1
    found = [(stream["name"], table) for stream in status["streams"] for table in stream.get("tables", ())]
    found.sort(key=lambda one: _TROUBLED.index(_LEVELS.get(one[1]["state"], "")))
    rows = [(f"t-{stream}-{table['id']}", table_cells(stream, table, several=several)) for stream, table in found]
    yield from listed(TABLE_HEADS, rows, empty="There are no tables so far.", numbers=_TABLE_NUMBERS, caption="Tables")


def table_cells(stream: str, table: Mapping[str, Any], *, several: bool) -> list[Content]:
    """Return the row of a table, as in `TABLE_HEADS`."""
    lag, rate, copy = table["fold_lag_s"], table["rows_per_s"], table["copy"] or {}
    landed, size, last = known_figure(table, "landed_rows"), known_figure(table, "live_bytes"), table["last_figures"]
    age = tag("p", f"{_about(last['as_of'])} ago", class_="note") if last else None
    hint = what_to_run(table, stream if several else "")
    is_copied = table["state"] in {"copying", "paused"} and copy.get("rows") is not None
    return [
        link(f"{stream}: {table['name']}" if several else table["name"], "tables", stream, table["name"]),
        state_mark(table["state"]),
        "" if lag is None else "none" if lag == 0 else f"{human_seconds(lag)}, {table['fold_lag_records']:,} records",
        "" if landed is None else [f"{landed:,}", age],
        "" if rate is None else f"{rate:,.0f}",
        "" if size is None else [human_bytes(size), age],
        (table["last_change"] or "")[:19].replace("T", " "),
        [
            copy_words(copy) if is_copied else table["reason"],
            tag("p", with_code(hint), class_="hint") if hint else None,
        ],
    ]


def known_figure(table: Mapping[str, Any], name: str) -> Any:
    """Return a table's figure; the one that the last run of the pipeline left if none runs, None if there is none."""
    return table[name] if table[name] is not None else (table["last_figures"] or {}).get(name)


def _about(moment: str) -> str:
    """Return the age of a moment in whole minutes, so that a list of tables doesn't change each second."""
    minutes = int((datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds() // 60)
    return human_seconds(60 * minutes) if minutes > 0 else "less than a minute"


_COUNTS: Final = {
    "in_flight": "In flight",
    "dead": "Dead",
    "delivered": "Delivered",
    "redelivered": "Redelivered",
    "acked": "Acknowledged",
}


def _per_s(rates: Mapping[str, float], stream: str, consumer: str) -> str:
    """Return how many messages a second a consumer gets for the first time."""
    rate = rates.get(consumer_key(stream, consumer))
    return "" if rate is None else f"{rate:,.0f}"


def consumers(status: Status, rates: Mapping[str, float]) -> Iterator[Piece]:
    """Yield the list of all consumers, those in trouble first."""
    found = [(stream["name"], one) for stream in status["streams"] for one in stream["consumers"]]
    found.sort(key=lambda one: (one[1]["state"] == "active" and not one[1]["dead"] and not one[1]["error"], one[0]))
    hints = {(one["stream"], one["subject"]): one["hint"] for one in status["conditions"] if "consumer" in one["kind"]}
    rows: list[tuple[str, list[Content]]] = []
    for stream, one in found:
        hint = hints.get((stream, one["name"]))
        rows.append(
            (
                f"c-{stream}-{one['name']}",
                [
                    link(one["name"], "consumers", stream, one["name"]),
                    stream,
                    state_mark(one["state"]),
                    "unknown" if one["lag"]["records"] is None else lag_words(one["lag"]),
                    *(f"{one[key]:,}" for key in _COUNTS),
                    _per_s(rates, stream, one["name"]),
                    [one["error"], tag("p", with_code(hint), class_="hint") if hint else None],
                ],
            )
        )
    heads = ("Consumer", "Stream", "State", "Lag", *_COUNTS.values(), "Messages/s", "Error, and what to do")
    empty = "There are no consumers. `millstream consumer create` makes one."
    yield from listed(heads, rows, empty=empty, numbers=frozenset(range(4, 10)), caption="Consumers")


def find_consumer(status: Status, stream: str, name: str) -> Mapping[str, Any] | None:
    """Return a consumer's facts in a status."""
    found = (one for each in status["streams"] if each["name"] == stream for one in each["consumers"])
    return next((one for one in found if one["name"] == name), None)


def consumer(status: Status, stream: str, name: str, rates: Mapping[str, float]) -> Iterator[Piece]:
    """Yield one consumer."""
    one = find_consumer(status, stream, name)
    if one is None:
        yield Part("facts", tag("p", f"{name} is no longer among the consumers of {stream}.", id="facts"))
        return
    facts: list[tuple[str, Content]] = [
        ("Stream", stream),
        ("State", state_mark(one["state"])),
        ("Lag", "unknown" if one["lag"]["records"] is None else lag_words(one["lag"])),
        *((title, f"{one[key]:,}") for key, title in _COUNTS.items()),
        ("Messages/s", _per_s(rates, stream, name)),
        ("Tables", "all" if one["tables"] is None else ", ".join(one["tables"])),
        ("Where", one["where"]),
        ("Cursor", tag("code", one["cursor"])),
        ("Error", one["error"]),
    ]
    yield described(facts)


def nodes(status: Status) -> Iterator[Piece]:
    """Yield who leads and follows each stream, and which regions it is read from."""
    rows: list[tuple[str, list[Content]]] = []
    for stream in status["streams"]:
        for its in filter(None, [stream["replication"], *stream["regions"]]):
            rows += _node_rows(its)
    heads = ("Stream", "Node", "Role", "Behind", "Age", "Position", "Error, and what to do")
    empty = "This home is on one node. `[replication]` in millstream.toml makes it one of several."
    yield from listed(heads, rows, empty=empty, numbers=frozenset({3, 4, 5}), caption="Nodes and regions")


def _node_rows(its: Mapping[str, Any]) -> Iterator[tuple[str, list[Content]]]:
    name, own = its["stream"], its["following"] or {}
    role = str(its["role"] or "unknown")
    position = "" if its["persisted_upto"] is None else f"{its['persisted_upto']:,}"
    age = "" if role == "leads" else _age(its["age_s"])
    behind = "" if role == "leads" else _behind(own)
    leads = "" if role == "leads" else f" (leader: {its['leader'] or 'none known'})"
    yield (
        f"n-{name}",
        [name, "this node", [state_mark(role), leads], behind, age, position, _told(its["error"], own.get("error"))],
    )
    for one in its["followers"]:
        state = "apart" if one["phase"] == "apart" else "follows"
        yield (
            f"n-{name}-{one['node']}",
            [name, one["node"], state_mark(state), _behind(one), _age(one["lag_s"]), "", ""],
        )
    if (store := its["object_store"]) is not None:
        yield f"o-{name}", [name, "object store", "", _behind(store), "", "", _told(store.get("error"))]


def _told(*errors: Mapping[str, Any] | None) -> Content:
    """Return errors with their codes and hints, each in a paragraph."""
    return [
        tag("p", tag("code", error["code"]), " ", error["message"], " ", *with_code(error.get("hint") or ""))
        for error in errors
        if error is not None
    ]


def listed(
    heads: Sequence[str],
    rows: Iterable[tuple[str, list[Content]]],
    *,
    empty: str,
    numbers: frozenset[int],
    caption: str,
) -> Iterator[Piece]:
    """Yield a table whose rows change one by one.

    Args:
        empty: what to show if there are none; its `…` is code.
        numbers: columns that are aligned to the right.
        caption: its name, for screen readers.
    """
    pieces = [Part(_id(key), _row(_id(key), tuple(heads), tuple(map(_cell, cells)), numbers)) for key, cells in rows]
    if not pieces:
        yield tag("p", with_code(empty))
        return
    titles = [tag("th", head, scope="col", class_="number" if n in numbers else None) for n, head in enumerate(heads)]
    yield Html(
        opened("div", class_="scroll", tabindex=0, role="region", aria_label=caption)
        + opened("table")
        + tag("thead", tag("tr", *titles))
        + "<tbody>"
    )
    yield from pieces
    yield Html("</tbody></table></div>")


def _cell(content: Content) -> Html:
    return Html(escaped(content))


def _id(key: str) -> str:
    """Return a key as the id of an element: spaces can't be in one."""
    return "".join(one if one.isalnum() or one in "-_" else f".{ord(one):x}" for one in key)


@lru_cache(maxsize=8192)
def _row(key: str, heads: tuple[str, ...], cells: tuple[Html, ...], numbers: frozenset[int]) -> Html:
    """Return a row. Most rows are the same as a second ago."""
    first, *rest = cells
    return tag(
        "tr",
        tag("th", first, scope="row"),
        *(
            tag("td", cell, data_head=heads[n], class_="number" if n in numbers else None)
            for n, cell in enumerate(rest, 1)
        ),
        id=key,
    )
