"""Training data for models, in the order of the log: signals, and preferences between items of one feed.

A process of its own reads the log and folds it. It appends nothing, so it works while a server has the home.

If the home follows other regions, their logs are read too: first this region's log, then the others by region. So a signal is
there wherever its impression was shown, and counts once over all regions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream import OpenHome
from millstream_forage.columns import Index, Ints
from millstream_forage.folded_log import ends_of, log_of, whole_table
from millstream_forage.folded_state import DWELL, KIND_CODES, NO_ROW, State
from millstream_forage.tables import KINDS, SCHEMAS, STREAM

CHOSEN_DWELL_MS: Final = 30_000
"""The least dwell by which a reader chose an item."""
CHOOSING: Final = [KIND_CODES["save"], KIND_CODES["share"]]
_SHOWN: Final = ["__commit_ts", "__seq", "id", "slot", "propensity", "policy"]
"""Columns of impressions that the state doesn't keep."""

Moment: TypeAlias = tuple[datetime, int]
"""Time of a record's commit, by which logs compare, and its number, which orders one log."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The signals to export. A preference has the moment, the user and the kind of the signal that chose."""

    since_ns: int | None = None
    """Inclusive."""
    until_ns: int | None = None
    """Exclusive."""
    user: int | None = None
    kinds: tuple[str, ...] = ()
    """None of them: all."""
    limit: int | None = None
    """Most rows: the first of the log's order."""


class RecordedLog:
    """The logs as they were at one moment. Nothing of them changes while they are exported."""

    def __init__(self, home: OpenHome, regions: Iterable[int] = ()) -> None:
        """Read them.

        Raises:
            UnknownStream: the home has no log of Forage.
            OffsetExpired: a part of the log is gone, and with it signals that decide which ones count.
        """
        self._state: Final = State()
        logs = {STREAM: home.token(STREAM)} | ends_of(home, map(log_of, regions))
        shown, hides = [], []
        for table in SCHEMAS:
            before = 0
            for name, token in logs.items():
                for batch in whole_table(home, name, table, token):
                    numbered = renumbered(batch, before)
                    self._state.apply(table, numbered)
                    if table == "impressions":
                        shown.append(numbered.select(_SHOWN))
                    elif table == "hides":
                        hides.append(numbered)
                before += int(token.minimum)
        self._shown: Final = pa.Table.from_batches(shown) if shown else None
        ids = np.zeros(0, np.int64) if self._shown is None else self._shown["id"].to_numpy()
        self._shown_order: Final = np.argsort(ids, kind="stable")
        self._shown_ids: Final = ids[self._shown_order]
        self._feeds: Final = Index(self._state.impressions.feeds)
        self._rejections: Final = rejections(hides)

    def signals(self, selection: Selection, *, with_impressions: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the signals that count.

        Args:
            selection: which of them.
            with_impressions: whether to add `slot`, `propensity` and `policy` of the impression; they are null for a signal
                without one.
        """
        signals, items = self._state.signals, self._state.items
        rows = self._selected(selection)[: selection.limit]
        shown: list[dict[str, Any]] = [{}] * len(rows)
        if with_impressions:
            shown = self._impressions_of(signals.impressions.values[rows])
        for row, impression in zip(rows.tolist(), shown, strict=True):
            yield {
                "entity_id": int(items.ids.values[signals.items.values[row]]),
                "signal_type": KINDS[signals.kinds.values[row]],
                "weight": float(signals.weights.values[row]),
                "timestamp_ns": int(signals.given_ns.values[row]),
                "user_id": int(signals.users.values[row]),
            } | impression

    def pairs(self, selection: Selection) -> Iterator[dict[str, Any]]:
        """Yield preferences: an item that a reader chose over another of the same feed.

        Each chosen impression counts once, by the first selected signal that chose it. Its pairs come in the order of the
        rejected items' slots.

        Args:
            selection: which signals choose.
        """
        signals, shown = self._state.signals, self._state.impressions
        left = selection.limit
        seen: set[int] = set()
        for row in self._selected(selection).tolist():
            chosen, kind = int(signals.impressions.values[row]), int(signals.kinds.values[row])
            long = kind == DWELL and signals.durations_ms.values[row] >= CHOSEN_DWELL_MS
            if chosen == NO_ROW or chosen in seen or not (kind in CHOOSING or long):
                continue
            seen.add(chosen)
            feed = int(shown.feeds.values[chosen])
            for rejected, reason in self._rejected(feed):
                if rejected == chosen:
                    continue
                if left == 0:
                    return
                left = None if left is None else left - 1
                yield {
                    "user_id": int(signals.users.values[row]),
                    "chosen": self._item_id(chosen),
                    "rejected": self._item_id(rejected),
                    "feed_id": feed,
                    "reason": reason,
                    "timestamp_ns": int(signals.given_ns.values[row]),
                }

    def _selected(self, selection: Selection) -> Ints:
        """Return the rows of the selected signals in the order of the log, whatever the limit."""
        signals = self._state.signals
        chosen = signals.counts.values.copy()
        if selection.since_ns is not None:
            chosen &= signals.given_ns.values >= selection.since_ns
        if selection.until_ns is not None:
            chosen &= signals.given_ns.values < selection.until_ns
        if selection.user is not None:
            chosen &= signals.users.values == selection.user
        if selection.kinds:
            chosen &= np.isin(signals.kinds.values, [KIND_CODES[kind] for kind in selection.kinds])
        rows = np.flatnonzero(chosen)
        ordered: Ints = rows[np.argsort(signals.seqs.values[rows], kind="stable")]
        return ordered

    def _impressions_of(self, rows: Ints) -> list[dict[str, Any]]:
        """Return the exported columns of impressions; nulls for NO_ROW."""
        nothing: dict[str, Any] = {"slot": None, "propensity": None, "policy": None}
        found = [nothing] * len(rows)
        named = np.flatnonzero(rows != NO_ROW)
        if len(named):
            assert self._shown is not None
            taken = self._shown.select(list(nothing)).take(pa.array(self._shown_at(rows[named])))
            for at, values in zip(named.tolist(), taken.to_pylist(), strict=True):
                found[at] = values
        return found

    def _shown_at(self, rows: Ints) -> Ints:
        """Return where in `_shown` impressions of the state are: the state may have taken some later than the log has them."""
        found: Ints = self._shown_order[np.searchsorted(self._shown_ids, self._state.impressions.ids.values[rows])]
        return found

    def _rejected(self, feed: int) -> list[tuple[int, str]]:
        """Return the impressions of a feed that its reader rejected, and why."""
        assert self._shown is not None
        shown, items = self._state.impressions, self._state.items
        rows = self._feeds.rows(feed)
        found = []
        for row, at in zip(rows.tolist(), self._shown_at(rows).tolist(), strict=True):
            user, item = int(shown.users.values[row]), int(shown.items.values[row])
            moment = self._shown["__commit_ts"][at].as_py(), self._shown["__seq"][at].as_py()
            targets = (
                ("item", str(items.ids.values[item])),
                ("source", items.arm_names[items.arms.values[item]][1]),
                ("creator", items.creator_names.names[items.creators.values[item]]),
            )
            after = [
                rejection
                for target, value in targets
                if (rejection := first_after(self._rejections.get((user, target, value), []), moment)) is not None
            ]
            if after:
                found.append((row, min(after)[1]))
            elif not shown.kinds.values[row]:
                found.append((row, "ignored"))
        return found

    def _item_id(self, impression: int) -> int:
        return int(self._state.items.ids.values[self._state.impressions.items.values[impression]])


def renumbered(batch: pa.RecordBatch, before: int) -> pa.RecordBatch:
    """Return records with numbers that continue after those of the logs before."""
    at = batch.schema.get_field_index("__seq")
    return batch.set_column(at, "__seq", pc.add(batch["__seq"], before)) if before else batch


def rejections(hides: list[pa.RecordBatch]) -> dict[tuple[int, str, str], list[tuple[Moment, str]]]:
    """Return the moment and the kind of each record that hides a target, by user and target, in order."""
    found: dict[tuple[int, str, str], list[tuple[Moment, str]]] = defaultdict(list)
    for batch in hides:
        for record in batch.to_pylist():
            if record["hidden"]:
                key = (record["user"], record["target"], record["value"])
                found[key].append(((record["__commit_ts"], record["__seq"]), record["kind"]))
    for records in found.values():
        records.sort()
    return found


def first_after(records: list[tuple[Moment, str]], moment: Moment) -> tuple[Moment, str] | None:
    """Return the first of the records that comes after a moment."""
    at = bisect_right(records, moment, key=lambda record: record[0])
    return records[at] if at < len(records) else None
