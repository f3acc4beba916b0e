"""The pages of the log: its retention and holders, its writers, its shards and segments, and a live tail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream.app.status_words import holder_words, retention_waits
from millstream.console.html import Content, Html, Part, Piece, described, grid, tag
from millstream.console.page_frame import link
from millstream.console.pages import listed, state_mark
from millstream.model.human_text import counted, human_bytes, human_seconds

if TYPE_CHECKING:
    from millstream.app.record_rates import Status
    from millstream.home.home import Home

_SEGMENTS_SHOWN: Final = 200
_RECORDS_SHOWN: Final = 200


def logs(status: Status) -> Iterator[Piece]:
    """Yield the list of all streams' logs."""
    rows: list[tuple[str, list[Content]]] = []
    for stream in status["streams"]:
        if not stream.get("id"):
            continue
        log = stream["log"]
        held = {holder: facts["bytes"] or 0 for holder, facts in log["held"].items()}
        most = max(held, key=lambda holder: held[holder], default=None)
        rows.append(
            (
                f"l-{stream['name']}",
                [
                    link(stream["name"], "log", stream["name"]),
                    "can't be read" if log["segments"] is None else f"{log['segments']:,}",
                    human_bytes(log["bytes"]),
                    stream["tokens"]["durable"],
                    None if most is None else f"{human_bytes(held[most])}, by {holder_words(stream, most)}",
                    retention_waits(stream) or "nothing waits",
                ],
            )
        )
    heads = ("Stream", "Segments", "Size", "Durable up to", "Held most", "Retention")
    yield from listed(heads, rows, empty="No stream has a log so far.", numbers=frozenset({1, 2}), caption="Logs")


def area(status: Status, name: str) -> Iterator[Piece]:
    """Yield the live area of one stream's log."""
    stream = next((one for one in status["streams"] if one["name"] == name and one.get("id")), None)
    if stream is None:
        yield Part("facts", tag("p", f"Stream {name} has no log.", id="facts"))
        return
    log = stream["log"]
    bounds, oldest = log["retention"], log["oldest"]
    facts: list[tuple[str, Content]] = [
        ("Durable up to", tag("code", stream["tokens"]["durable"])),
        ("Size", f"{human_bytes(log['bytes'])} in {counted(log['segments'], 'segment')}"),
        ("Begins at number", None if log["first_seq"] is None else f"{log['first_seq']:,}"),
        (
            "Retention keeps",
            None if bounds is None else f"{human_seconds(bounds['age_s'])}, {human_bytes(bounds['bytes'])} at most",
        ),
        (
            "Oldest sealed segment",
            None if oldest is None else f"shard {oldest['shard']}, {human_seconds(oldest['seconds'])} old",
        ),
        ("Retention waits", retention_waits(stream) or "for nothing"),
    ]
    yield described(facts)
    yield tag("h2", "Holders")
    yield from listed(
        ("Holder", "Kind", "From number", "Holds", "Oldest record"),
        [
            (
                f"h-{holder}",
                [
                    holder_words(stream, holder),
                    facts["kind"],
                    f"{facts['from']:,}",
                    human_bytes(facts["bytes"]),
                    "none" if facts["seconds"] is None else f"{human_seconds(facts['seconds'])} ago",
                ],
            )
            for holder, facts in log["held"].items()
        ],
        empty="No reader holds it.",
        numbers=frozenset({2, 3, 4}),
        caption="Holders",
    )
    yield tag("h2", "Writers")
    yield from listed(
        ("Writer", "State", "Epoch", "Position", "Behind", "Log"),
        list(_writers(stream)),
        empty="No writer here has opened it so far.",
        numbers=frozenset({2, 3, 4}),
        caption="Writers",
    )


def _writers(stream: Mapping[str, Any]) -> Iterator[tuple[str, list[Content]]]:
    for one in stream["writers"]:
        cells = [
            state_mark(one["state"]),
            *(f"{one[key]:,}" for key in ("epoch", "position", "behind")),
            one["location"],
        ]
        yield f"w-{one['name']}", [one["name"], *cells]
    writer = stream["writer"]
    if writer is not None and not stream["writers"]:
        state = f"process {writer['pid']}" if writer["alive"] and writer["pid"] else "none runs now"
        yield (
            "w-own",
            [writer["name"] or "the owner", state, f"{writer['epoch']:,}", stream["tokens"]["durable"], "", ""],
        )


def details(home: Home, status: Status, name: str) -> list[Content]:
    """Return a log's shards and segments, and its live tail. Blocks."""
    tables = [table["name"] for one in status["streams"] if one["name"] == name for table in one["tables"]]
    return [_segments(home, name), _tail(name, tables)]


def _segments(home: Home, name: str) -> Html:
    from millstream.wal.files import RealFiles
    from millstream.wal.layout import list_segments, list_shards, shard_folder

    folder = str(home.wal_folder(name))
    parts: list[Content] = [tag("h2", "Shards and segments")]
    for shard in list_shards(RealFiles(), folder):
        segments = list_segments(RealFiles(), shard_folder(folder, shard))
        rows = []
        for segment in segments[: -_SEGMENTS_SHOWN - 1 : -1]:
            try:
                facts = Path(segment.path).stat()
            except FileNotFoundError:
                continue  # retention has just dropped it
            written = datetime.fromtimestamp(facts.st_mtime, UTC).isoformat(" ", "seconds")
            size = tag("td", human_bytes(facts.st_size), class_="number")
            rows.append(tag("tr", tag("th", f"{segment.base_offset:,}", scope="row"), size, tag("td", written)))
        shown = f", the newest {_SEGMENTS_SHOWN}" if len(segments) > _SEGMENTS_SHOWN else ""
        summary = f"Shard {shard}: {counted(len(segments), 'segment')}{shown}"
        table = grid(("First offset", "Size", "Last written (UTC)"), rows)
        parts.append(tag("details", tag("summary", summary), table))
    return tag("section", *parts)


def _tail(name: str, tables: Sequence[str]) -> Html:
    options = [tag("option", "all tables", value=""), *(tag("option", table, value=table) for table in tables)]
    return tag(
        "section",
        tag("h2", "Live tail", id="tail-name"),
        tag(
            "form",
            tag("label", "Table ", tag("select", *options, name="table")),
            tag("label", "Where ", tag("input", name="where", placeholder="id = 17", size=24, autocomplete="off")),
            tag("button", "Start", type="submit"),
            class_="row",
        ),
        tag("p", "Records appear here as they become durable.", class_="note"),
        tag("ol", class_="records"),
        id="tail",
        aria_labelledby="tail-name",
        data_stream=name,
        data_shown=_RECORDS_SHOWN,
    )
