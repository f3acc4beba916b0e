"""The machine of a consumer of kind `latest`: a newer message of a key replaces the older ones that wait.

Each message has one group, its key, or is a barrier. A message replaces the waiting one of its group unless a barrier
stands between them; one that is in flight is replaced when it comes back. The newer message then stands for both: it
holds the cursor where the older one held it, so that a restart reads both again, and once it is settled both are. A
truncate drops the waiting messages of its table, and those in flight when they come back; the cursor stays before them
until it is settled, since a promotion may lose it. A partition that left (`x`) drops the messages that stand for
records of that partition alone. If a message stands for another partition's records, too, it is delivered before the
`x`: the receiver may know the row as one of the other partition, and an `x` wouldn't remove it there.

Memory is bounded. If more keys wait than it holds, the caller looks for newer messages of these keys in the rest of the
log, which the machine then drops: the log has what memory hasn't. Until everything up to there is settled the cursor
stays, and if a promotion loses that part of the log, the consumer begins again at the cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import Final

from millstream.protocol.delivery.consumer import Consumer
from millstream.protocol.delivery.entries import Entry, EntryState, fact_of
from millstream.protocol.delivery.messages import (
    DeadLetter,
    Delivery,
    DeliveryId,
    Limits,
    Message,
    Phase,
    Status,
    seq_of,
)
from millstream.protocol.delivery.state import Fact, State
from millstream.protocol.delivery.state_changes import (
    Change,
    Delayed,
    Dropped,
    Extended,
    Overtaken,
    Relied,
    Returned,
    Settled,
)

_WAITING, _IN_FLIGHT, _GONE = EntryState.WAITING, EntryState.IN_FLIGHT, EntryState.GONE


ENTRY_BYTES: Final = 1100
"""Memory of a waiting message with its id and its group, without its record; measured."""


def newer(_older: Message, message: Message) -> Message:
    """Return the newer of two messages of a key."""
    return message


class LatestConsumer(Consumer):
    """The machine; see `Consumer` for its methods.

    Args:
        limits: the consumer's numbers.
        state: a new consumer's state, or a restart's.
        run: number of this run.
        now: as of `Consumer`.
        merge: returns the message that replaces both an older and a newer one of a key. It takes the values of columns
            that the newer record left unchanged from the older one, and keeps the newer one's position, group and id.
    """

    _replaces = True

    def __init__(
        self,
        limits: Limits,
        state: State,
        *,
        run: int,
        now: int = 0,
        merge: Callable[[Message, Message], Message] = newer,
    ) -> None:
        self._merge = merge
        self._newest: dict[str, Entry] = {}
        """The last unsettled message of each group."""
        self._heirs: dict[int, tuple[Entry, tuple[int, int]]] = {}
        """Delivered messages that were replaced, by position: the message that replaced each, and its last delivery."""
        self._end = 0
        """The `seq` up to which the log is read before anything is delivered."""
        self.waiting_bytes = 0
        """Memory of the messages that aren't settled."""
        self._is_full = self._has_looked = False
        self._relied = state.relied
        """The `seq` up to which the log has newer messages than those that were dropped; 0: none was."""
        self._floor = state.cursor
        """The cursor while messages up to `_relied` aren't settled."""
        self._dead_groups: dict[str, set[str]] = {}
        """Ids of dead letters by group; some are gone."""
        for letter in state.dead.values():
            self._note_dead(letter)
        last = max((*state.facts, *state.unread), default=0)
        super().__init__(limits, state, run=run, now=now)
        # A message that was delivered replaces older ones, which are offered before it.
        self._unread.restore_upto = max(self._unread.restore_upto, last)

    # --- reading the log ---------------------------------------------------------------------------------------------

    def read_to(self, end: int) -> None:
        """Note the log's readable end: newer messages replace those that wait until it is reached.

        An end that was noted earlier holds until it is reached. Nothing is delivered until then, unless there is no room.

        Args:
            end: the `seq` of the last operation; `read_upto` if there is nothing to read now.
        """
        if self._read_upto >= self._end or end <= self._read_upto:
            self._end = end

    def wants(self, count: int) -> bool:
        """Whether there is room, and the log's end wasn't reached; else as `Consumer`."""
        if self.phase is not Phase.ACTIVE or not self.is_restored:
            return super().wants(count)
        self._note_room()
        return not self._is_full and (self._read_upto < self._end or super().wants(count))

    @property
    def looks_upto(self) -> int | None:
        """The `seq` up to which newer messages of the waiting keys are to be looked for; None if they needn't be."""
        self._note_room()
        wants = self._is_full and not self._has_looked and self.phase is Phase.ACTIVE and self.is_restored
        return self._end if wants and self._read_upto < self._end else None

    @property
    def waiting_keys(self) -> set[tuple[str, int | None]]:
        """The groups that have a message, each with the message's `leaf`: `drop_older` takes those of newer messages."""
        messages = (entry.message for entry in self._pending.entries.values())
        return {(message.groups[0], message.leaf) for message in messages if message.groups}

    def drop_older(
        self, keys: Container[tuple[str, int | None]], tables: Container[tuple[int, int | None]], upto: int
    ) -> None:
        """Drop waiting messages that weren't delivered so far, since the log has newer ones: call it after a look.

        Args:
            keys: groups of which the log has newer messages that leave no column unchanged, each with the message's
                `leaf`: only a message of the same partition makes an older one superfluous, see `Message.takes`.
            tables: tables that were truncated, each with None, or with the partition that left.
            upto: `looks_upto`, where these messages are at most.
        """
        self._has_looked = True
        dropped = []
        for entry in self._pending.entries.values():
            own, table, leaf = entry.message.groups, entry.message.table, entry.message.leaf
            is_older = bool(own) and (own[0], leaf) in keys
            is_taken = table is not None and ((table, None) in tables or (table, leaf) in tables)
            if (is_older or is_taken) and self._was_never_seen(entry):
                dropped.append(entry)
        if not dropped:
            return
        self._rely_on(upto)
        positions = [position for entry in dropped for position in (entry.position, *entry.replaced)]
        for entry in dropped:
            self._forget(entry)
        self._changes.append(Settled(positions, 0))

    def _rely_on(self, upto: int) -> None:
        """Hold the cursor until everything up to a `seq` is settled: messages are dropped for newer ones up to there.

        A promotion may lose the newer ones, and the dropped ones are read again then.
        """
        if self.cursor >= self._relied:
            self._floor = self.cursor
        if upto > self._relied:
            self._relied = upto
            self._changes.append(Relied(upto))

    def _was_never_seen(self, entry: Entry) -> bool:
        """Whether nothing is known of a message but its record: no delivery, no delay, no older message in flight."""
        is_free = entry.state is _WAITING and not entry.message.barrier and not entry.is_retried
        is_new = entry.last is None and not entry.not_before and not entry.failures
        is_alone = _unsettled_before(entry) is None and not any(position in self._heirs for position in entry.replaced)
        return is_free and is_new and is_alone

    def _note_room(self) -> None:
        """Note whether there is room for more messages: from half of the bound on, so that looks are few."""
        most, most_bytes = self.limits.unsettled_max, self.limits.unsettled_bytes_max
        count, size = len(self._pending.entries), self.waiting_bytes
        if count >= most or size >= most_bytes:
            self._is_full = True
        elif 2 * count < most and 2 * size < most_bytes:
            self._is_full = self._has_looked = False

    def receive(self, now: int, count: int) -> list[Delivery]:
        """Deliver the newest messages that wait: nothing while `wants` or `looks_upto` has work. See `Consumer`."""
        self._note_room()
        is_behind = self._read_upto < self._end and not (self._is_full and self._has_looked)
        if is_behind and self.phase is Phase.ACTIVE:
            self.expire(now)
            return []
        return super().receive(now, count)

    @property
    def cursor(self) -> int:
        """The `seq` of the token before which every message is settled, and needs no newer one that may be lost."""
        cursor = super().cursor
        return self._floor if cursor < self._relied else cursor

    def take_changes(self) -> list[Change]:
        """Return the changes since the last call. See `Consumer`."""
        if self._relied and super().cursor >= self._relied:
            self._relied = 0
            self._changes.append(Relied(0))
        return super().take_changes()

    def cut_back(self, end: int) -> bool:
        """Note where the log ends, after a promotion, also if it lost messages for which older ones were dropped."""
        if super().cut_back(end):
            return True
        if self._relied <= end:
            return False
        self._begin_generation(min(self.cursor, end), end)
        return True

    def _append(self, message: Message) -> Entry:
        self.waiting_bytes += _size(message)
        return super()._append(message)

    def _offer(self, message: Message) -> None:
        is_settled, is_acked = self._unread.is_settled(message.position), self._unread.is_acked(message.position)
        if message.truncates and message.table is not None:
            self._truncate(message, is_acked=is_acked)
        group = message.groups[0] if message.groups else None
        if group is not None:
            self._overtake(group, message.position)
        if is_settled:
            if not is_acked:
                return
            # Its ack came for a delivery that a kill forgot: older messages that are back are void.
            older = self._newest.get(group) if group is not None else None
            if older is not None and older.position < message.position:
                self._void_all(older)
            self._void_truncates(message)
            return
        entry, fact = self._newest.get(group) if group is not None else None, self._unread.take(message.position)
        if entry is not None and entry.state is _WAITING and not self._is_parted(entry, message.position):
            if entry.is_retried:
                message = self._joined(entry.message, message)
                self._forget(entry)
                self._changes.append(Dropped((entry.message.id,)))
                entry = self._append(message)
            else:
                self._replace(entry, self._joined(entry.message, message), fact)
        else:
            older, entry = entry, self._append(message)
            entry.older = older
        if group is not None:
            self._newest[group] = entry
            older = entry.older
            if older is not None and older.state is _WAITING and not self._is_parted(older, entry.position):
                self._replace_returned(older)  # the barrier between them is settled
                entry = self._newest[group]
        self._restore(entry, fact)

    def _joined(self, older: Message, newer: Message) -> Message:
        """Return the message that stands for both: it has a partition if both have the same."""
        message = self._merge(older, newer)
        return message if older.leaf == newer.leaf else message._replace(leaf=None)

    def _overtake(self, group: str, position: int) -> None:
        """Note that a group has a message at a position, for its dead letters."""
        ids = self._dead_groups.get(group)
        if ids is None:
            return
        older = [id_ for id_ in ids if id_ not in self.dead or self.dead[id_].message.position < position]
        ids.difference_update(older)
        if not ids:
            del self._dead_groups[group]
        overtaken = self._letters.overtake(older)
        if overtaken:
            self._changes.append(Overtaken(overtaken))

    def _is_parted(self, older: Entry, position: int) -> bool:
        """Whether a barrier stands between a message and a later place in its table."""
        table = self._pending.table(older.message.table)
        return table is not None and any(older.position < one.position < position for one, _ in table.barriers)

    def _replace(self, entry: Entry, message: Message, fact: Fact | None = None) -> None:
        """Let a newer message stand for a waiting one: it waits as long, unless it has its own fact, and its deliveries begin."""
        entry.replaced = entry.replaced or []
        entry.replaced.append(entry.position)
        if entry.last is not None:
            self._heirs[entry.position] = entry, entry.last
        self._exchange(entry, message)
        entry.deliveries = entry.failures = 0
        entry.last, entry.has_failed = None, False
        if fact is not None:
            self._delay(entry, fact.not_before)
        elif entry.not_before:
            self._delay(entry, entry.not_before)
            self._changes.append(Delayed((entry.position,), entry.not_before))

    def _exchange(self, entry: Entry, message: Message) -> None:
        self.waiting_bytes += _size(message) - _size(entry.message)
        self._pending.replace(entry, message)

    def _truncate(self, truncate: Message, *, is_acked: bool) -> None:
        """Drop messages that are older than a truncate which takes them: those that wait, or all once it was acknowledged."""
        taken = [
            entry
            for entry in self._pending.entries.values()
            if entry.message.table == truncate.table
            and entry.position < truncate.position
            and truncate.takes(entry.message)
            and (is_acked or entry.state is _WAITING)
        ]
        if taken and not is_acked:
            self._rely_on(seq_of(truncate.position))
        for entry in sorted(taken, key=_is_barrier):  # a barrier that goes lets other messages join
            self._void(entry)

    def _void_all(self, entry: Entry | None) -> None:
        """Settle a message, and those of its key before it."""
        while entry is not None:
            older = entry.older
            if entry.state is not _GONE:
                self._void(entry)
            entry = older

    def _void(self, entry: Entry) -> None:
        """Settle a message that a later one made void."""
        self._forget(entry)
        if entry.is_retried:
            self._changes.append(Dropped((entry.message.id,)))
        else:
            self._changes.append(Settled((entry.position, *entry.replaced), 0))

    def _forget(self, entry: Entry) -> None:
        """Remove a message that isn't to be delivered."""
        self._settled(entry)
        held = self._held_by(entry)
        self._pending.remove(entry)
        if entry.is_retried:
            del self._letters.retried[entry.message.id]
        else:
            self._order.note_gone()
        self._join(held)

    def _held_by(self, barrier: Entry) -> list[Entry]:
        """Return the messages that a barrier holds up; none if the message isn't one."""
        table = self._pending.table(barrier.message.table) if barrier.message.barrier else None
        return [] if table is None else next(list(held) for one, held in table.barriers if one is barrier)

    def _join(self, released: list[Entry]) -> None:
        """Let messages stand for older ones that wait: no barrier parts them any longer.

        A barrier is delivered once all before it is settled, which a kill may forget.
        """
        for entry in released:
            older = _unsettled_before(entry)
            if older is not None and older.state is _WAITING and not self._is_parted(older, entry.position):
                self._replace_returned(older)

    def _settled(self, entry: Entry) -> None:
        """Forget what stands for a message that is settled, dead or replaced."""
        self.waiting_bytes -= _size(entry.message)
        for position in entry.replaced:
            self._heirs.pop(position, None)
        entry.older = _unsettled_before(entry)
        groups = entry.message.groups
        if groups and self._newest.get(groups[0]) is entry:
            if entry.older is None:
                del self._newest[groups[0]]
            else:  # it is in flight: a truncate took only those away that wait
                self._newest[groups[0]] = entry.older

    def _note_unread(self, change: Settled | Returned | Extended) -> None:
        super()._note_unread(change)
        self._unread.restore_upto = max(self._unread.restore_upto, *change.positions)

    # --- settling and failing ----------------------------------------------------------------------------------------

    def _find(self, delivery: DeliveryId) -> tuple[Status, Entry | None]:
        status, entry = super()._find(delivery)
        if status is Status.ALREADY_ACKED and delivery.position in self._heirs:
            status = Status.SUPERSEDED
        return status, entry

    def _settle(self, entry: Entry) -> bool:
        self._void_older(entry)
        if not entry.message.truncates and not entry.is_retried:
            self._void_truncates(entry.message)
        self._settled(entry)
        held = self._held_by(entry)
        is_noted = super()._settle(entry)
        self._join(held)
        return is_noted

    def _drop_acked(self, position: int) -> None:
        if (id_ := self._letters.at(position, self._generation)) is not None:
            message = self.dead[id_].message
            if not message.truncates:
                self._void_truncates(message)
        super()._drop_acked(position)

    def _void_older(self, entry: Entry) -> None:
        """Settle what is older than a message that ends: a kill forgot that it came back before this one was delivered."""
        self._void_all(entry.older)
        if entry.message.truncates:
            self._truncate(entry.message, is_acked=True)

    def _void_truncates(self, message: Message) -> None:
        """Settle the truncates before an acknowledged message that may take its row, and everything that they take.

        They were settled when it was delivered, which a kill forgot: delivered again, they would take its row away.
        A message that died has no row, so that one that had died before it, too, is delivered again.
        """
        table = self._pending.table(message.table)
        if table is None:
            return
        older = [
            barrier
            for barrier, _ in table.barriers
            if barrier.message.truncates and not barrier.is_retried and barrier.position < message.position
        ]
        for barrier in sorted(older, key=_position, reverse=True):
            may_take = message.leaf is None or barrier.message.takes(message)
            if may_take and barrier.state is not _GONE:
                self._truncate(barrier.message, is_acked=True)
                self._void(barrier)

    def _come_back(self, entry: Entry) -> list[int]:
        came = self._pending.come_back(entry)
        positions = [one.position for one in came]
        for one in came:
            self._replace_returned(one)
        return positions

    def _replace_returned(self, entry: Entry) -> None:
        """Replace a message that came back, if there is a newer one."""
        message = entry.message
        table = self._pending.table(message.table)
        for barrier, _ in () if table is None else table.barriers:
            if barrier.message.truncates and barrier.position > entry.position and barrier.message.takes(message):
                self._rely_on(seq_of(barrier.position))
                self._void(entry)
                return
        heir, younger = self._newest.get(message.groups[0]) if message.groups else None, None
        while heir is not None and heir is not entry and not self._stands_for(heir, entry):
            heir, younger = heir.older, heir
        if heir is None or heir is entry:
            return
        merged = self._joined(message, heir.message)
        if entry.is_retried:
            self._exchange(heir, merged)
            self._forget(entry)
            self._changes.append(Dropped((message.id,)))
            return
        replaced, until = heir.replaced, max(entry.not_before, heir.not_before)
        if until > heir.not_before:
            self._changes.append(Delayed((heir.position,), until))
        heir.replaced = ()
        self._forget(heir)
        self._replace(entry, merged, replace(fact_of(heir), not_before=until))
        entry.deliveries, entry.failures = heir.deliveries, heir.failures
        entry.last, entry.has_failed = heir.last, heir.has_failed
        entry.replaced = [*replaced, *entry.replaced]
        for position in replaced:
            if position in self._heirs:
                self._heirs[position] = entry, self._heirs[position][1]
        if younger is None:
            self._newest[merged.groups[0]] = entry
        else:
            younger.older = entry

    def _stands_for(self, heir: Entry, older: Entry) -> bool:
        """Whether a later message of a key may replace one that waits: no barrier holds it, or none that doesn't hold both."""
        is_near = heir.is_released or not (older.is_released or self._is_parted(older, heir.position))
        return heir.state is _WAITING and is_near

    def _bury(self, entry: Entry, letter: DeadLetter) -> None:
        self._void_older(entry)
        self._settled(entry)
        held = self._held_by(entry)
        super()._bury(entry, letter)
        self._note_dead(letter)
        self._join(held)

    # --- steering ----------------------------------------------------------------------------------------------------

    def adopt(self, letter: DeadLetter) -> None:
        """Take a message that died in a backfill as a dead letter; see `Consumer`."""
        super().adopt(letter)
        self._note_dead(self._letters.dead[letter.message.id])

    def retry(self, ids: Iterable[str] | None = None) -> list[tuple[str, bool]]:
        """Let dead messages be delivered again; those whose key has a newer message are dropped. See `Consumer`."""
        wanted = self._letters.wanted(ids)
        self._letters.overtake(self.overtaken(wanted))
        return super().retry(wanted)

    def overtaken(self, ids: Iterable[str] | None = None) -> set[str]:
        """Return the ids of the dead letters that a retry of these, or of all, drops: their keys have newer messages."""
        letters = [self.dead[id_] for id_ in self._letters.wanted(ids) if id_ in self.dead]
        newest: dict[tuple[str, ...], str] = {}
        for letter in sorted(letters, key=lambda letter: letter.message.position):
            if not letter.is_overtaken:
                newest[letter.message.groups] = letter.message.id
        return {
            letter.message.id
            for letter in letters
            if letter.is_overtaken
            or (
                (groups := letter.message.groups) and (groups[0] in self._newest or newest[groups] != letter.message.id)
            )
        }

    def _add_retried(self, letter: DeadLetter) -> Entry:
        entry = super()._add_retried(letter)
        self.waiting_bytes += _size(entry.message)
        if letter.message.groups:
            self._newest[letter.message.groups[0]] = entry
        return entry

    def _begin_generation(self, cursor: int, end: int | None = None) -> None:
        super()._begin_generation(cursor, end)
        self._end = self._relied = self.waiting_bytes = 0
        self._is_full = self._has_looked = False
        self._newest.clear()
        self._heirs.clear()
        self._dead_groups.clear()
        for letter in self.dead.values():
            self._note_dead(letter)

    def _note_dead(self, letter: DeadLetter) -> None:
        if letter.message.groups and not letter.is_overtaken:
            self._dead_groups.setdefault(letter.message.groups[0], set()).add(letter.message.id)

    # --- durable state -----------------------------------------------------------------------------------------------

    def snapshot(self) -> State:
        """Return the state after all changes, taken or not: call `take_changes` first."""
        state = super().snapshot()
        for position, (_, (run, answer)) in self._heirs.items():
            state.facts[position] = Fact(deliveries=1, run=run, answer=answer)
        state.relied = self._relied
        return state


def _position(entry: Entry) -> int:
    return entry.position


def _is_barrier(entry: Entry) -> bool:
    return entry.message.barrier


def _unsettled_before(entry: Entry) -> Entry | None:
    """Return the last unsettled message of an entry's key before it."""
    older = entry.older
    while older is not None and older.state is _GONE:
        older = older.older
    return older


def _size(message: Message) -> int:
    """Return the memory of a waiting message in bytes."""
    return ENTRY_BYTES + message.size
