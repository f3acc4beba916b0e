"""The state of Forage: a fold of the records of its stream.

`State.apply` takes a batch of one table's records. A start takes whole tables of a million records, an answer a single
record: both go through the same code, so the state depends on the records alone. A table's records come in the log's
order, and a record after those that it refers to. Between the logs of two regions it may come before them: it waits.

Nothing here depends on time: what decays is computed from this state as of a moment (`feed`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream_forage.columns import Column, Ids, Index, Ints, Names, Records
from millstream_forage.tables import DIMENSIONS, ITEMS, KINDS, SCHEMAS, TARGETS

KIND_CODES: Final[dict[str, int]] = {kind: code for code, kind in enumerate(KINDS)}
DWELL: Final = KIND_CODES["dwell"]
NO_ROW: Final = -1
REFERRED_TO: Final = ("items", "impressions")
"""Tables whose records others refer to."""
NUMBER_IN_TOKEN: Final = re.compile(r"\.[sm](\d+)", re.ASCII)


class Items:
    """The items, a row each in the log's order, and the arms that they belong to."""

    def __init__(self) -> None:
        self.ids: Final = Ids()
        self.arms: Final = Column(np.int64)
        self.creators: Final = Column(np.int64)
        self.embeddings: Final = Column(np.float32, width=DIMENSIONS)
        self.signals: Final = Column(np.int64, width=len(KINDS))
        """Number of signals of each kind that count."""
        self.rest: Final = Records()
        """All columns, except embeddings."""
        self.arm_names: Final[list[tuple[str, str]]] = []
        """Category and source of each arm."""
        self.categories: Final = Names()
        self.arm_categories: Final = Column(np.int64)
        """Number of each arm's category."""
        self.creator_names: Final = Names()
        self.by_id: Final = Index(self.ids)
        self.by_arm: Final = Index(self.arms)
        self.by_creator: Final = Index(self.creators)
        self.last_seq = 0
        """Number of the newest item's record."""
        self.arm_sizes: Ints = np.zeros(0, np.int64)
        """Number of items of each arm."""
        self.arm_first_ids: Ints = np.zeros(0, np.int64)
        """The least id of each arm's items."""
        self._arm_codes: dict[tuple[str, str], int] = {}
        self._rows_by_url: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def row_of_url(self, url: str) -> int | None:
        """Return the row of the first item with a URL."""
        return self._rows_by_url.get(url)

    def apply(self, batch: pa.RecordBatch) -> None:
        """Take new items. An id that came before is skipped."""
        self.last_seq = max(self.last_seq, pc.max(batch["__seq"]).as_py())
        batch = _without_known(batch, self.by_id)
        for row, url in enumerate(batch["url"].to_pylist(), len(self)):
            self._rows_by_url.setdefault(url, row)
        ids, arms = batch["id"].to_numpy(), self._arms_of(batch)
        self.ids.extend(ids)
        self.arms.extend(arms)
        grown = np.bincount(arms, minlength=len(self.arm_names))
        grown[: len(self.arm_sizes)] += self.arm_sizes
        firsts = np.full(len(grown), np.iinfo(np.int64).max)
        firsts[: len(self.arm_sizes)] = self.arm_first_ids
        np.minimum.at(firsts, arms, ids)
        self.arm_sizes, self.arm_first_ids = grown, firsts
        self.creators.extend(self.creator_names.codes(batch["creator"]))
        self.embeddings.extend(batch["embedding"].flatten().to_numpy().reshape(-1, DIMENSIONS))
        self.signals.extend(np.zeros((batch.num_rows, len(KINDS)), np.int64))
        self.rest.extend(batch.select([name for name in ITEMS.names if name != "embedding"]))

    def _arms_of(self, batch: pa.RecordBatch) -> Ints:
        categories, sources = batch["category"].dictionary_encode(), batch["source"].dictionary_encode()
        width = max(1, len(sources.dictionary))
        pairs = categories.indices.to_numpy().astype(np.int64) * width + sources.indices.to_numpy()
        found, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
        codes = np.zeros(len(found), np.int64)
        for at in np.argsort(first):
            pair = divmod(int(found[at]), width)
            name = category, _ = (categories.dictionary[pair[0]].as_py(), sources.dictionary[pair[1]].as_py())
            if name not in self._arm_codes:
                self._arm_codes[name] = len(self.arm_names)
                self.arm_names.append(name)
                self.arm_categories.extend([self.categories.of(category)])
            codes[at] = self._arm_codes[name]
        arms: Ints = codes[inverse]
        return arms


class Impressions:
    """The impressions, a row each in the log's order, with the signals that each has."""

    def __init__(self) -> None:
        self.ids: Final = Ids()
        self.feeds: Final = Ids()
        self.users: Final = Column(np.int64)
        self.items: Final = Column(np.int64)
        """Rows of `Items`."""
        self.arms: Final = Column(np.int64)
        self.explore: Final = Column(np.bool_)
        self.shown_ns: Final = Column(np.int64)
        self.seeds: Final = Column(np.int64)
        self.limits: Final = Column(np.int64)
        self.policies: Final = Column(np.int64)
        self.tokens: Final = Column(np.int64)
        """Numbers of the tokens that the feeds were computed at."""
        self.propensities: Final = Column(np.float64)
        self.kinds: Final = Column(np.int64)
        """Kinds of its signals, a bit each; 0 for an impression without signals."""
        self.rewards: Final = Column(np.float64)
        """The greatest reward of its signals."""
        self.dwells: Final = Column(np.int64)
        """Row of its longest dwell in `Signals`."""
        self.policy_names: Final = Names()
        self.by_id: Final = Index(self.ids)
        self.by_user: Final = Index(self.users)

    def __len__(self) -> int:
        return len(self.ids)

    def apply(self, batch: pa.RecordBatch, items: Items) -> None:
        """Take new impressions, all of items that are known. An id that came before is skipped."""
        batch = _without_known(batch, self.by_id)
        rows = items.by_id.first_rows(batch["item"].to_numpy())
        self.ids.extend(batch["id"].to_numpy())
        self.feeds.extend(batch["feed"].to_numpy())
        self.users.extend(batch["user"].to_numpy())
        self.items.extend(rows)
        self.arms.extend(items.arms.values[rows])
        self.explore.extend(batch["explore"].to_numpy(zero_copy_only=False))
        self.propensities.extend(batch["propensity"].to_numpy())
        self.shown_ns.extend(batch["now"].to_numpy())
        self.seeds.extend(batch["seed"].to_numpy())
        self.limits.extend(batch["limit"].to_numpy())
        self.policies.extend(self.policy_names.codes(batch["policy"]))
        self.tokens.extend(_numbers_of(batch["token"]))
        self.kinds.extend(np.zeros(len(rows), np.int64))
        self.rewards.extend(np.zeros(len(rows), np.float64))
        self.dwells.extend(np.full(len(rows), NO_ROW))


class Signals:
    """The signals, a row each in the log's order."""

    def __init__(self) -> None:
        self.ids: Final = Ids()
        self.users: Final = Column(np.int64)
        self.items: Final = Column(np.int64)
        """Rows of `Items`."""
        self.kinds: Final = Column(np.int64)
        self.weights: Final = Column(np.float64)
        self.impressions: Final = Column(np.int64)
        """Rows of `Impressions`, or NO_ROW."""
        self.given_ns: Final = Column(np.int64)
        self.durations_ms: Final = Column(np.int64)
        """NO_ROW if it has none."""
        self.seqs: Final = Column(np.int64)
        self.counts: Final = Column(np.bool_)
        """Whether it counts: of an impression one signal of a kind does, of its dwells the longest; of a signal that two
        regions got under one key the first."""
        self.by_id: Final = Index(self.ids)
        self.by_user: Final = Index(self.users)
        self.by_key: Final[dict[tuple[int, str], int]] = {}
        """Row of each user's idempotency key."""
        self._sent: Final[set[tuple[Any, ...]]] = set()
        """Signals with a key and without impression: two regions may have got the same one."""

    def __len__(self) -> int:
        return len(self.ids)

    def apply(self, batch: pa.RecordBatch, impressions: Impressions, items: Items) -> None:
        """Take new signals, all of items and impressions that are known. An id that came before is skipped."""
        batch = _without_known(batch, self.by_id)
        begin, count = len(self), batch.num_rows
        repeats = np.zeros(count, np.bool_)
        if batch["idempotency_key"].null_count < count:
            names = ("user", "idempotency_key", "impression", "item", "kind", "duration_ms")
            for at, sent in enumerate(zip(*(batch[name].to_pylist() for name in names), strict=True)):
                user, key, impression, *_ = sent
                if key is not None:
                    self.by_key.setdefault((user, key), begin + at)
                    if impression is None:
                        repeats[at] = sent in self._sent
                        self._sent.add(sent)
        self.ids.extend(batch["id"].to_numpy())
        self.users.extend(batch["user"].to_numpy())
        self.items.extend(items.by_id.first_rows(batch["item"].to_numpy()))
        self.kinds.extend(_codes(batch["kind"], KIND_CODES))
        self.weights.extend(batch["weight"].to_numpy())
        self.impressions.extend(impressions.by_id.first_rows(batch["impression"].fill_null(NO_ROW).to_numpy()))
        self.given_ns.extend(batch["now"].to_numpy())
        self.durations_ms.extend(batch["duration_ms"].fill_null(NO_ROW).to_numpy())
        self.seqs.extend(batch["__seq"].to_numpy())
        self.counts.extend(np.zeros(count, np.bool_))
        self._count(begin + np.flatnonzero(~repeats), impressions, items)

    def _count(self, rows: Ints, impressions: Impressions, items: Items) -> None:
        """Find the signals that count among new ones, and give their impressions the rewards."""
        shown, kinds = self.impressions.values[rows], self.kinds.values[rows]
        of_one = shown != NO_ROW
        on, bits = shown[of_one], np.left_shift(1, kinds[of_one])
        pairs = on * (1 << len(KINDS)) + bits
        first = _first_of_each(pairs) & (impressions.kinds.values[on] & bits == 0)
        is_new = ~of_one
        is_new[of_one] = first
        self.counts.values[rows] = is_new
        np.add.at(items.signals.values, (self.items.values[rows[is_new]], kinds[is_new]), 1)
        np.bitwise_or.at(impressions.kinds.values, on, bits)
        np.maximum.at(impressions.rewards.values, on, self.weights.values[rows[of_one]])
        self._longest_dwells(rows[of_one & (kinds == DWELL)], impressions)

    def _longest_dwells(self, rows: Ints, impressions: Impressions) -> None:
        """Let the longest dwell of each impression count, and of equal ones the first."""
        shown, durations = self.impressions.values[rows], self.durations_ms.values[rows]
        order = np.lexsort((rows, -durations, shown))
        longest = order[_first_of_each(shown[order])]
        self.counts.values[rows] = False
        rows, shown, durations = rows[longest], shown[longest], durations[longest]
        before = impressions.dwells.values[shown]
        longer = (before == NO_ROW) | (durations > self.durations_ms.values[before])
        self.counts.values[before[longer & (before != NO_ROW)]] = False
        impressions.dwells.values[shown[longer]] = rows[longer]
        self.counts.values[impressions.dwells.values[shown]] = True


def nothing_hidden() -> dict[str, set[str]]:
    """Return no hidden value of any kind of target."""
    return {target: set() for target in TARGETS}


@dataclass(slots=True)
class Hidden:
    """The targets that a user hides."""

    by_target: dict[str, set[str]] = field(default_factory=nothing_hidden)
    """The hidden values of each kind of target, as the records have them."""
    last_seq: int = 0
    """Number of the newest record that changed it."""


class Hides:
    """The targets that each user hides: the newest record of a target decides."""

    def __init__(self) -> None:
        self.by_user: Final[dict[int, Hidden]] = {}

    def apply(self, batch: pa.RecordBatch) -> None:
        """Take new records of `hides`."""
        for record in batch.select(["user", "target", "value", "hidden", "__seq"]).to_pylist():
            hidden = self.by_user.setdefault(record["user"], Hidden())
            values = hidden.by_target[record["target"]]
            if record["hidden"] != (record["value"] in values):
                (values.add if record["hidden"] else values.discard)(record["value"])
                hidden.last_seq = record["__seq"]

    def replace(self, rows: pa.Table, seq: int) -> None:
        """Take merged rows in place of all records so far.

        Args:
            seq: the number in this region's log at which a user's targets changed, if they differ from before.
        """
        before = {user: hidden.by_target for user, hidden in self.by_user.items()}
        for hidden in self.by_user.values():
            hidden.by_target = nothing_hidden()
        for row in rows.filter(rows["hidden"]).select(["user", "target", "value"]).to_pylist():
            self.by_user.setdefault(row["user"], Hidden()).by_target[row["target"]].add(row["value"])
        for user, hidden in self.by_user.items():
            if hidden.by_target != before.get(user, nothing_hidden()):
                hidden.last_seq = max(seq, hidden.last_seq)

    def of(self, user: int) -> Hidden:
        """Return the targets that a user hides."""
        return self.by_user.get(user) or Hidden()


class State:
    """Everything that Forage's answers are computed from, except the time."""

    def __init__(self) -> None:
        self.items: Final = Items()
        self.impressions: Final = Impressions()
        self.signals: Final = Signals()
        self.hides: Final = Hides()
        self.applied = 0
        """Grows with every change: what was computed from this state is as good as new until then."""
        self.heartbeat_ns: int | None = None
        """Time of the newest heartbeat."""
        self._folds: Final[dict[str, Callable[[pa.RecordBatch], None]]] = {
            "items": self.items.apply,
            "impressions": lambda batch: self.impressions.apply(batch, self.items),
            "signals": lambda batch: self.signals.apply(self._fitting(batch), self.impressions, self.items),
            "hides": self.hides.apply,
            "heartbeats": self._apply_heartbeats,
        }
        # By table: records of an item or impression that hasn't come.
        self._early: dict[str, list[pa.RecordBatch]] = {}

    def apply(self, table: str, batch: pa.RecordBatch) -> None:
        """Take a batch of one table's records: its own columns, and `__seq`. Other tables' records are skipped."""
        if table not in self._folds or not batch.num_rows:
            return
        self.applied += batch.num_rows
        self._apply_ready(table, batch)
        if table in REFERRED_TO and self._early:
            waiting, self._early = self._early, {}
            for early_table, batches in sorted(waiting.items()):  # impressions, then signals
                # As one batch: a look at each would cost every answer some 80 µs, for as long as it waits.
                (early,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
                self._apply_ready(early_table, early)

    def replace_hides(self, rows: pa.Table, seq: int) -> None:
        """Take merged rows in place of all records of `hides` so far; `Hides.replace` has the arguments."""
        self.applied += 1
        self.hides.replace(rows, seq)

    def index(self) -> None:
        """Index everything that was taken, so that the next answer needn't."""
        for part in (self.items, self.impressions, self.signals):
            for index in vars(part).values():
                if isinstance(index, Index):
                    index.catch_up()

    def _apply_ready(self, table: str, batch: pa.RecordBatch) -> None:
        """Take the records of a batch whose item and impression are known, and keep the others for later."""
        ready = np.ones(batch.num_rows, np.bool_)
        if table in {"signals", "impressions"}:
            ready = self.items.by_id.first_rows(batch["item"].to_numpy()) != NO_ROW
        if table == "signals":
            named = batch["impression"]
            known = self.impressions.by_id.first_rows(named.fill_null(NO_ROW).to_numpy()) != NO_ROW
            ready &= known | pc.is_null(named).to_numpy(zero_copy_only=False)
        if not ready.all():
            schema = SCHEMAS[table].append(pa.field("__seq", pa.int64()))
            early = pa.RecordBatch.from_arrays([batch[name] for name in schema.names], schema=schema)
            self._early.setdefault(table, []).append(early.filter(pa.array(~ready)))
            batch = batch.filter(pa.array(ready))
        if batch.num_rows:
            self._folds[table](batch)

    def _fitting(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return signals without those of another user's or item's impression: the engine appends none."""
        rows = self.impressions.by_id.first_rows(batch["impression"].fill_null(NO_ROW).to_numpy())
        leaves_out = rows != NO_ROW
        rows, items = rows[leaves_out], self.items.by_id.first_rows(batch["item"].to_numpy()[leaves_out])
        is_other = batch["user"].to_numpy()[leaves_out] != self.impressions.users.values[rows]
        leaves_out[leaves_out] = is_other | (items != self.impressions.items.values[rows])
        return batch.filter(pa.array(~leaves_out)) if leaves_out.any() else batch

    def _apply_heartbeats(self, batch: pa.RecordBatch) -> None:
        newest = pc.max(batch["now"]).as_py()
        self.heartbeat_ns = newest if self.heartbeat_ns is None else max(newest, self.heartbeat_ns)


def _first_of_each(values: Ints) -> npt.NDArray[np.bool_]:
    """Return which values are the first of their kind."""
    is_first = np.zeros(len(values), np.bool_)
    is_first[np.unique(values, return_index=True)[1]] = True
    return is_first


def _without_known(batch: pa.RecordBatch, index: Index) -> pa.RecordBatch:
    ids = batch["id"].to_numpy()
    fresh = _first_of_each(ids) & (index.first_rows(ids) == NO_ROW)
    return batch if fresh.all() else batch.filter(pa.array(fresh))


def _numbers_of(tokens: pa.Array) -> Ints:
    """Return the number in each token. Impressions of a feed have one token, so few are read."""
    encoded = tokens.dictionary_encode()
    numbers = np.array([int(NUMBER_IN_TOKEN.findall(token)[0]) for token in encoded.dictionary.to_pylist()], np.int64)
    found: Ints = numbers[encoded.indices.to_numpy()]
    return found


def _codes(column: pa.Array, codes: dict[str, int]) -> Ints:
    encoded = column.dictionary_encode()
    numbers = np.array([codes[name] for name in encoded.dictionary.to_pylist()], np.int64)
    found: Ints = numbers[encoded.indices.to_numpy()]
    return found
