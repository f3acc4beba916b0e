"""Forage's engine: it appends to the log what users and agents do, and answers from the fold of the log.

One engine has a home at a time. Each call that changes something appends one operation and returns once that is durable
and folded, so every later call of any thread sees it. The answers depend on the log, the arguments and the clock alone:
an engine that was killed continues where its log ends.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from millstream import OpenHome
from millstream_forage.answers import (
    BrowseTasks,
    Feed,
    Heartbeat,
    HideAnswer,
    ItemAnswer,
    ItemsPage,
    ListedItem,
    SignalAnswer,
)
from millstream_forage.browsing import INTERVAL_MINUTES, browse_tasks
from millstream_forage.clock import MINUTE_NS, Clock, clock_of
from millstream_forage.corpus import default_corpus
from millstream_forage.embedding import Embedder, HashedGrams, item_vectors
from millstream_forage.errors import InvalidField, KeyReused, UnknownImpression, UnknownItem
from millstream_forage.feed import Feeder, FeedRequest, Policy
from millstream_forage.folded_log import FoldedLog
from millstream_forage.folded_state import DWELL, KIND_CODES, NO_ROW
from millstream_forage.homes import CONFIG_FILE, opened_home
from millstream_forage.items import NewItem, new_item
from millstream_forage.requests import Reaction, hide_change, reaction, whole_number
from millstream_forage.tables import ID_MAX, KINDS, REGION_BITS, arm_name, other_regions, region_of
from millstream_forage.taste import MATCH_THRESHOLD

LIMIT: Final = 7
"""Slots of a feed if the caller names no limit."""
LIMIT_MAX: Final = 50
PAGE: Final = 100
"""Items of a page if the caller names no limit."""
PAGE_MAX: Final = 1000
REPEATED_FOR_NS: Final = 10 * MINUTE_NS
"""How long a feed is repeated to a user for whom nothing has changed."""


class ForageEngine:
    """The engine of one home. Any number of threads may call it; their calls take turns."""

    def __init__(
        self,
        home: OpenHome,
        *,
        region: int,
        clock: Clock,
        embedder: Embedder,
        match_threshold: float,
        others: Iterable[int] = (),
    ) -> None:
        """Fold the log of a home; `open` and `ephemeral` make an engine.

        Args:
            clock: the time that decay goes by.
            embedder: the model of the items that this engine adds.
            match_threshold: least similarity of a `match`.
        """
        self._region: Final = region
        self._clock: Final = clock
        self._embedder: Final = embedder
        self._held: Final = ExitStack()
        """Closed with the engine."""
        self._turn: Final = threading.RLock()
        self._log: Final = FoldedLog(home, others)
        self._state: Final = self._log.state
        self._policy: Final = Policy(embedder.name, match_threshold)
        self._feeder: Final = Feeder(self._state, self._policy)

    @classmethod
    def open(
        cls,
        home: str | Path,
        *,
        clock: Clock | None = None,
        embedder: Embedder | None = None,
        match_threshold: float = MATCH_THRESHOLD,
    ) -> Self:
        """Open the engine of a home, and make the home if there is none.

        Args:
            home: the folder.
            clock: the time in nanoseconds since 1970; None: the system's, or the moment that FORAGE_NOW fixes.
            embedder: the model of the items that are added; None: the one that is built in.
            match_threshold: least similarity of a `match`.

        Raises:
            HomeBusy: another process has an engine of this home.
            HomeUnusable: the folder can't be made, written or read.
            NotForagesHome: the folder is another home.
            OffsetExpired: a part of the log is gone. Nothing is served, because hidden items would show again.
            MillstreamError: the log can't be read or written.
        """
        with ExitStack() as held:
            return cls._opened(Path(home), held, clock=clock, embedder=embedder, match_threshold=match_threshold)

    @classmethod
    def ephemeral(
        cls,
        *,
        clock: Clock | None = None,
        embedder: Embedder | None = None,
        match_threshold: float = MATCH_THRESHOLD,
    ) -> Self:
        """Open an engine whose home is gone once it is closed; the arguments are those of `open`."""
        with ExitStack() as held:
            folder = Path(tempfile.mkdtemp(prefix="forage-"))
            held.callback(shutil.rmtree, folder, ignore_errors=True)
            return cls._opened(folder, held, clock=clock, embedder=embedder, match_threshold=match_threshold)

    @classmethod
    def _opened(
        cls,
        folder: Path,
        held: ExitStack,
        *,
        clock: Clock | None,
        embedder: Embedder | None,
        match_threshold: float,
    ) -> Self:
        """Return the engine of a home. It takes over what is held; if it fails, that stays with the caller."""
        home = opened_home(folder, held)
        config = (folder / CONFIG_FILE).read_text()
        engine = cls(
            home,
            region=region_of(config),
            others=other_regions(config),
            clock=clock or clock_of(os.environ),
            embedder=embedder or HashedGrams(),
            match_threshold=match_threshold,
        )
        engine._held.push(held.pop_all())
        return engine

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the home. Another engine may open it from here on."""
        with self._turn:
            self._log.close()
            self._held.close()

    @property
    def path(self) -> Path:
        """The home's folder."""
        return self._log.path

    @property
    def policy(self) -> Policy:
        """The settings of every feed of this engine."""
        return self._policy

    # --- items ---

    def seed_default_corpus(self) -> int:
        """Add the default corpus, except items whose URL is there; return how many were added."""
        with self._turn:
            self._log.catch_up()
            missing = [item for item in default_corpus() if self._state.items.row_of_url(item.url) is None]
            self._add(missing)
            return len(missing)

    def add_item(self, item: NewItem | Mapping[str, object]) -> ItemAnswer:
        """Add an item, unless one of its URL is there.

        Raises:
            InvalidField: it breaks a rule (`items`).
        """
        checked = item if isinstance(item, NewItem) else new_item(item)
        with self._turn:
            self._log.catch_up()
            row = self._state.items.row_of_url(checked.url)
            if row is not None:
                return ItemAnswer(int(self._state.items.ids.values[row]), str(self._log.at), duplicate=True)
            (item_id,) = self._add([checked])
            return ItemAnswer(item_id, str(self._log.at), duplicate=False)

    def items(self, after: int | None = None, limit: int = PAGE) -> ItemsPage:
        """Return a page of items by id.

        Args:
            after: the id before the first of the page; None: from the beginning.
            limit: most items of the page, from 1 to 1000.
        """
        begin = -1 if after is None else whole_number("after", after)
        size = whole_number("limit", limit, least=1, most=PAGE_MAX)
        with self._turn:
            self._log.catch_up()
            rows = self._state.items.ids.after(begin, size + 1)
            listed = [self._listed(int(row)) for row in rows[:size]]
            return ItemsPage(listed, listed[-1].item_id if len(rows) > size else None)

    def _listed(self, row: int) -> ListedItem:
        values = self._state.items.rest.row(row)
        counts = self._state.items.signals.values[row].tolist()
        return ListedItem(item_id=values.pop("id"), **values, signals=dict(zip(KINDS, counts, strict=True)))

    def _add(self, items: Iterable[NewItem]) -> list[int]:
        added = list(items)
        first, now_ns = self._state.items.ids.next_of(self._region), self._clock()
        rows = [
            asdict(item) | {"id": number, "embedding": vector, "added": now_ns}
            for number, (item, vector) in enumerate(zip(added, item_vectors(self._embedder, added), strict=True), first)
        ]
        self._log.append({"items": rows})
        return [row["id"] for row in rows]

    # --- signals and hides ---

    def signal(
        self,
        user_id: int,
        item_id: int,
        signal_type: str,
        *,
        duration_ms: int | None = None,
        impression_id: int | None = None,
        idempotency_key: str | None = None,
    ) -> SignalAnswer:
        """Record a user's reaction to an item: one operation with the reward of its impression.

        A skip also hides the item from the user. A signal that doesn't count, such as a double click, is answered as a
        duplicate of the one that does.

        Args:
            user_id: the user, from 0.
            item_id: the item.
            signal_type: view, dwell, save, skip or share.
            duration_ms: length of a dwell in milliseconds; for a dwell alone.
            impression_id: the impression that the user reacted to.
            idempotency_key: a text that the user's client gives to no other signal.

        Raises:
            InvalidField: an argument is out of range, or the impression is another user's or item's.
            UnknownItem, UnknownImpression: there is none.
            KeyReused: the user gave the key to another signal.
        """
        asked = reaction(
            user_id=user_id,
            item_id=item_id,
            signal_type=signal_type,
            duration_ms=duration_ms,
            impression_id=impression_id,
            idempotency_key=idempotency_key,
        )
        with self._turn:
            self._log.catch_up()
            known = self._same_key(asked)
            self._item_row(asked.item_id)
            impression = self._impression_row(asked)
            if known is None and asked.idempotency_key is None:
                known = self._counted_already(asked, impression)
            is_new = known is None
            ids = self._state.signals.ids
            signal_id = ids.next_of(self._region) if known is None else int(ids.values[known])
            rows: dict[str, list[dict[str, Any]]] = {}
            if is_new:
                rows["signals"] = [asked.record(signal_id, self._clock())]
            if asked.kind == "skip" and (is_new or asked.idempotency_key is None):
                # Also if it hides the item already, as in `change_hidden`.
                hidden = {"user": asked.user_id, "target": "item", "value": str(asked.item_id), "hidden": True}
                rows["hides"] = [hidden | {"kind": "skip"}]
            self._log.append(rows)
            return SignalAnswer(signal_id, str(self._log.at), duplicate=not is_new)

    def signal_dwell(
        self,
        user_id: int,
        item_id: int,
        duration_ms: int,
        *,
        impression_id: int | None = None,
        idempotency_key: str | None = None,
    ) -> SignalAnswer:
        """Record how long a user stayed with an item; as `signal`."""
        return self.signal(
            user_id,
            item_id,
            "dwell",
            duration_ms=duration_ms,
            impression_id=impression_id,
            idempotency_key=idempotency_key,
        )

    def hide(self, user_id: int, item_id: int) -> HideAnswer:
        """Hide an item from a user; `UnknownItem` if there is none."""
        return self.change_hidden(user_id, {"item": item_id}, "hide")

    def mute(self, user_id: int, source: str) -> HideAnswer:
        """Hide all items of a source, those to come included."""
        return self.change_hidden(user_id, {"source": source}, "mute")

    def block(self, user_id: int, creator: str) -> HideAnswer:
        """Hide all items of a creator, those to come included."""
        return self.change_hidden(user_id, {"creator": creator}, "block")

    def unhide(
        self, user_id: int, item_id: int | None = None, *, source: str | None = None, creator: str | None = None
    ) -> HideAnswer:
        """Lift what hides one target: an item (its skips too), a source or a creator. Others stay."""
        named = {"item": item_id, "source": source, "creator": creator}
        return self.change_hidden(
            user_id, {kind: value for kind, value in named.items() if value is not None}, "unhide"
        )

    def change_hidden(self, user_id: int, target: Mapping[str, object], kind: str) -> HideAnswer:
        """Hide one target from a user, or lift that.

        Args:
            target: one of `item` with an id, `source` and `creator` with a name.
            kind: `hide` for an item, `mute` for a source, `block` for a creator, or `unhide`.

        Raises:
            InvalidField: the arguments don't fit.
            UnknownItem: there is none.
        """
        change = hide_change(user_id=user_id, target=target, kind=kind)
        with self._turn:
            self._log.catch_up()
            if change.target == "item":
                self._item_row(int(change.value))
            # Also if it changes nothing here: another region may have lifted what hides the target, and it isn't known here yet.
            self._log.append({"hides": [change.record()]})
            return HideAnswer(str(self._log.at))

    def _item_row(self, item_id: int) -> int:
        row = self._state.items.by_id.first(item_id)
        if row is None:
            raise UnknownItem(f"there is no item {item_id}")
        return row

    def _impression_row(self, asked: Reaction) -> int:
        """Return the row of a signal's impression; NO_ROW if it names none."""
        if asked.impression_id is None:
            return NO_ROW
        row = self._state.impressions.by_id.first(asked.impression_id)
        if row is None:
            raise UnknownImpression(f"there is no impression {asked.impression_id}")
        shown, items = self._state.impressions, self._state.items
        if shown.users.values[row] != asked.user_id or items.ids.values[shown.items.values[row]] != asked.item_id:
            raise InvalidField(
                "impression_id", f"{asked.impression_id} is not an impression of item {asked.item_id} for this user"
            )
        return row

    def _same_key(self, asked: Reaction) -> int | None:
        """Return the row of the signal that has the same key; `KeyReused` if it is another signal."""
        signals = self._state.signals
        row = None if asked.idempotency_key is None else signals.by_key.get((asked.user_id, asked.idempotency_key))
        if row is None:
            return None
        impression = int(signals.impressions.values[row])
        duration_ms = int(signals.durations_ms.values[row])
        found = Reaction(
            user_id=asked.user_id,
            item_id=int(self._state.items.ids.values[signals.items.values[row]]),
            kind=KINDS[signals.kinds.values[row]],
            duration_ms=None if duration_ms == NO_ROW else duration_ms,
            impression_id=None if impression == NO_ROW else int(self._state.impressions.ids.values[impression]),
            idempotency_key=asked.idempotency_key,
        )
        if found != asked:
            raise KeyReused(f"user {asked.user_id} gave the key {asked.idempotency_key!r} to another signal")
        return row

    def _counted_already(self, asked: Reaction, impression: int) -> int | None:
        """Return the row of the signal that counts in place of this one."""
        shown, signals = self._state.impressions, self._state.signals
        code = KIND_CODES[asked.kind]
        if impression == NO_ROW or not shown.kinds.values[impression] >> code & 1:
            return None
        if code == DWELL and asked.duration_ms is not None:
            longest = int(shown.dwells.values[impression])
            return longest if signals.durations_ms.values[longest] >= asked.duration_ms else None
        given = signals.by_user.rows(asked.user_id)
        same = (signals.impressions.values[given] == impression) & (signals.kinds.values[given] == code)
        return int(given[np.flatnonzero(same)[0]])

    # --- feeds ---

    def feed(self, user: int, limit: int = LIMIT, seed: int | None = None, *, preview: bool = False) -> Feed:
        """Return a user's feed, after its impressions are durable.

        Without a seed the user's last feed of the same limit is repeated for up to ten minutes, until items or the
        user's signals or hides change: nothing is appended.

        Args:
            user: the user, from 0.
            limit: most items, from 1 to 50.
            seed: the seed of the draws; None: a random one.
            preview: whether to append nothing, and leave out the ids of the feed and its impressions.

        Raises:
            InvalidField: an argument is out of range.
        """
        whole_number("user", user)
        whole_number("limit", limit, least=1, most=LIMIT_MAX)
        if seed is not None:
            whole_number("seed", seed)
        with self._turn:
            self._log.catch_up()
            if seed is None and not preview:
                repeated = self._repeated(user, limit)
                if repeated is not None:
                    return repeated
            chosen = secrets.randbelow(ID_MAX + 1) if seed is None else seed
            asked = FeedRequest(user, limit, chosen, self._clock())
            filled = self._feeder.compute(asked)
            shown = [slot.item for slot in filled]
            feed = Feed(None, self._policy.name, chosen, str(self._log.at), asked.now_ns, shown)
            return feed if preview or not filled else self._shown(feed, user, limit)

    def _shown(self, feed: Feed, user: int, limit: int) -> Feed:
        """Append the impressions of a feed, and return it with their ids."""
        impressions = self._state.impressions
        feed_id = impressions.feeds.next_of(self._region)
        items = [
            replace(item, impression_id=number)
            for number, item in enumerate(feed.items, impressions.ids.next_of(self._region))
        ]
        common = {"feed": feed_id, "user": user, "policy": feed.policy, "seed": feed.seed, "limit": limit}
        rows = [
            {
                "id": item.impression_id,
                "item": item.item_id,
                "slot": item.slot,
                "arm": arm_name(item.category, item.source),
                "label": item.label,
                "explore": item.explore,
                "propensity": item.propensity,
                "token": feed.token,
                "now": feed.now,
            }
            | common
            for item in items
        ]
        self._log.append({"impressions": rows})
        return replace(feed, feed_id=feed_id, items=items)

    def _repeated(self, user: int, limit: int) -> Feed | None:
        """Return the user's last feed of a limit in this region if nothing has changed for the user since; it is computed again."""
        shown = self._state.impressions
        rows = shown.by_user.rows(user)
        # Another region's feed has a token of that region's log.
        rows = rows[(shown.limits.values[rows] == limit) & (shown.ids.values[rows] >> REGION_BITS == self._region)]
        if not len(rows):
            return None
        rows = rows[shown.feeds.values[rows] == shown.feeds.values[rows[-1]]]
        first = int(rows[0])
        token = int(shown.tokens.values[first])
        asked = FeedRequest(user, limit, int(shown.seeds.values[first]), int(shown.shown_ns.values[first]))
        given = self._state.signals.by_user.rows(user)
        changed = max(
            self._state.items.last_seq,
            self._state.hides.of(user).last_seq,
            int(self._state.signals.seqs.values[given].max(initial=0)),
        )
        policy = shown.policy_names.names[shown.policies.values[first]]
        if changed > token or policy != self._policy.name or self._clock() - asked.now_ns > REPEATED_FOR_NS:
            return None
        filled = self._feeder.compute(asked, impressions=first)
        logged = [shown.items, shown.explore, shown.propensities]
        slots = list(zip(*(column.values[rows].tolist() for column in logged), strict=True))
        if [(slot.row, slot.item.explore, slot.item.propensity) for slot in filled] != slots:
            return None  # another build of numpy or scipy computed it
        items = [
            replace(slot.item, impression_id=int(shown.ids.values[row])) for slot, row in zip(filled, rows, strict=True)
        ]
        text = f"{self._log.at.stream}.s{token}"
        return Feed(int(shown.feeds.values[first]), policy, asked.seed, text, asked.now_ns, items)

    # --- discovery ---

    def browse_tasks(self, user: int | None = None) -> BrowseTasks:
        """Return what an agent should look for: by all users' reactions, or by one user's."""
        if user is not None:
            whole_number("user", user)
        with self._turn:
            self._log.catch_up()
            return browse_tasks(self._state, user, self._clock())

    def heartbeat(self) -> Heartbeat:
        """Record that an agent has run, and return when the next run is due."""
        with self._turn:
            self._log.catch_up()
            now_ns = self._clock()
            self._log.append({"heartbeats": [{"now": now_ns}]})
            return Heartbeat(now_ns + INTERVAL_MINUTES * MINUTE_NS)
