"""The export, against an oracle that goes through the records of the log one by one."""

from __future__ import annotations

from typing import Any

from apps.forage.tests.memory_home import MemoryHome, SetClock, engine_on, seeded_home
from hypothesis import given
from hypothesis import strategies as st

from millstream_forage.export import RecordedLog, Selection
from millstream_forage.tables import KINDS

BEGIN_NS = 1_700_000_000_000_000_000

moves = st.lists(
    st.tuples(
        st.integers(1, 2),
        st.sampled_from(["feed", "bare", "hide", "mute", "block", "unhide", *KINDS]),
        st.integers(0, 6),
        st.sampled_from([0, 29_999, 30_000, 60_000]),
        st.integers(0, 5),
    ),
    max_size=40,
)
selections = st.builds(
    Selection,
    since_ns=st.none() | st.integers(BEGIN_NS, BEGIN_NS + 60),
    until_ns=st.none() | st.integers(BEGIN_NS, BEGIN_NS + 60),
    user=st.none() | st.integers(1, 2),
    kinds=st.lists(st.sampled_from(KINDS), max_size=3, unique=True).map(tuple),
    limit=st.none() | st.integers(1, 5),
)


def played(played_moves: list[tuple[int, str, int, int, int]]) -> MemoryHome:
    """Return the log of an engine that users moved."""
    home, clock = seeded_home(), SetClock(BEGIN_NS)
    with engine_on(home, clock) as engine:
        feeds = {user: engine.feed(user, seed=user) for user in (1, 2)}
        for user, kind, slot, duration_ms, seconds in played_moves:
            clock.now_ns += seconds
            shown = feeds[user].items
            item = shown[slot % len(shown)]
            dwell = {"duration_ms": duration_ms} if kind == "dwell" else {}
            match kind:
                case "feed":
                    feeds[user] = engine.feed(user, seed=slot)
                case "bare":
                    engine.signal(user, item.item_id, "save")
                case "hide" | "unhide":
                    engine.change_hidden(user, {"item": item.item_id}, kind)
                case "mute":
                    engine.mute(user, item.source)
                case "block":
                    engine.block(user, item.creator)
                case _:
                    engine.signal(user, item.item_id, kind, impression_id=item.impression_id, **dwell)
    return home


def counting(home: MemoryHome) -> list[dict[str, Any]]:
    """Return the signals that count: all without an impression, else the first of each kind, of dwells the longest."""
    best: dict[tuple[int, str], dict[str, Any]] = {}
    rows = home.rows("signals")
    for row in rows:
        if row["impression"] is not None:
            known = best.setdefault((row["impression"], row["kind"]), row)
            if row["kind"] == "dwell" and row["duration_ms"] > known["duration_ms"]:
                best[row["impression"], row["kind"]] = row
    counted = {row["id"] for row in best.values()}
    return [row for row in rows if row["impression"] is None or row["id"] in counted]


def selected(rows: list[dict[str, Any]], selection: Selection) -> list[dict[str, Any]]:
    """Return the rows that a selection asks for, whatever its limit."""
    return [
        row
        for row in rows
        if (selection.since_ns is None or row["now"] >= selection.since_ns)
        and (selection.until_ns is None or row["now"] < selection.until_ns)
        and selection.user in (None, row["user"])
        and (not selection.kinds or row["kind"] in selection.kinds)
    ]


@given(moves, selections)
def test_exported_signals_are_those_of_the_log_that_count(
    made: list[tuple[int, str, int, int, int]], selection: Selection
) -> None:
    home = played(made)
    shown = {row["id"]: row for row in home.rows("impressions")}
    wanted = []
    for row in selected(counting(home), selection)[: selection.limit]:
        impression = shown.get(row["impression"], {})
        wanted.append(
            {
                "entity_id": row["item"],
                "signal_type": row["kind"],
                "weight": row["weight"],
                "timestamp_ns": row["now"],
                "user_id": row["user"],
                "slot": impression.get("slot"),
                "propensity": impression.get("propensity"),
                "policy": impression.get("policy"),
            }
        )
    log = RecordedLog(home)  # type: ignore[arg-type]
    assert list(log.signals(selection, with_impressions=True)) == wanted
    plain = list(log.signals(selection))
    assert plain == [{name: row[name] for name in plain[0]} for row in wanted]
    assert all(list(row) == ["entity_id", "signal_type", "weight", "timestamp_ns", "user_id"] for row in plain)


@given(moves, selections)
def test_pairs_are_items_chosen_over_rejected_ones_of_the_same_feed(
    made: list[tuple[int, str, int, int, int]], selection: Selection
) -> None:
    home = played(made)
    shown = home.rows("impressions")
    by_id = {row["id"]: row for row in shown}
    reacted = {row["impression"] for row in home.rows("signals")}
    items = {row["id"]: row for row in home.rows("items")}

    def why(row: dict[str, Any]) -> str | None:
        targets = {
            ("item", str(row["item"])),
            ("source", items[row["item"]]["source"]),
            ("creator", items[row["item"]]["creator"]),
        }
        for hide in home.rows("hides"):
            is_later = hide["__seq"] > row["__seq"] and hide["user"] == row["user"]
            if hide["hidden"] and is_later and (hide["target"], hide["value"]) in targets:
                return str(hide["kind"])
        return None if row["id"] in reacted else "ignored"

    wanted, done = [], set()
    for signal in selected(counting(home), selection):
        chose = signal["kind"] in {"save", "share"} or (signal["kind"] == "dwell" and signal["duration_ms"] >= 30_000)
        chosen = by_id.get(signal["impression"])
        if not chose or chosen is None or chosen["id"] in done:
            continue
        done.add(chosen["id"])
        wanted += [
            {
                "user_id": signal["user"],
                "chosen": chosen["item"],
                "rejected": row["item"],
                "feed_id": chosen["feed"],
                "reason": reason,
                "timestamp_ns": signal["now"],
            }
            for row in shown
            if row["feed"] == chosen["feed"] and row["id"] != chosen["id"] and (reason := why(row)) is not None
        ]
    assert list(RecordedLog(home).pairs(selection)) == wanted[: selection.limit]  # type: ignore[arg-type]


def test_an_empty_log_exports_nothing() -> None:
    home = MemoryHome()
    log = RecordedLog(home)  # type: ignore[arg-type]
    assert list(log.signals(Selection(), with_impressions=True)) == []
    assert list(log.pairs(Selection())) == []
