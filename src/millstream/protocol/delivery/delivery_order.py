"""The unsettled messages of a consumer, and which of them may be delivered now."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from millstream.protocol.delivery.entries import Answer, Entry, EntryState, Group, Table
from millstream.protocol.delivery.messages import Message

_WAITING, _IN_FLIGHT, _GONE = EntryState.WAITING, EntryState.IN_FLIGHT, EntryState.GONE


class Pending:
    """Messages from their offer until they are settled. Each step costs the same however many there are.

    A message is *free* if it can be delivered: it is the first waiting one of each of its groups, none of which is in
    flight, it waits for no time, and no barrier holds it. Free messages stand in a queue, by position.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        """All unsettled messages, by position."""
        self.answers: dict[tuple[int, int], Answer] = {}
        """Answers with messages in flight, by run and number."""
        self.in_flight = 0
        """Number of messages in flight."""
        self.records_bytes = 0
        """Size of the records that messages refer to."""
        self.free = 0
        """Number of messages that can be delivered."""
        self.groups: dict[str, Group] = {}
        """Groups of the messages that no barrier holds, by name."""
        self.barriers = 0
        """Number of unsettled barriers."""
        self._tables: dict[int, Table] = {}
        self.held: frozenset[int] = frozenset()
        """Tables of which nothing is delivered."""
        self._queue: list[int] = []
        """A heap of positions: those of queued messages, and of others that no longer are."""
        self._followers: list[Entry] = []
        """Queued messages that are free for the present answer alone."""

    def add(self, message: Message) -> Entry:
        """Add a message that is later than all others."""
        entry = self._entry(message)
        if message.table is None:
            self._release(entry, None)
            return entry
        table = self._tables.get(message.table)
        if table is None:
            table = self._tables[message.table] = Table()
        if message.barrier:
            self.barriers += 1
            entry.is_released = True
            table.barriers.append((entry, []))
            self._check(entry)
        elif table.barriers:
            table.barriers[-1][1].append(entry)
        else:
            self._release(entry, table)
        return entry

    def add_retried(self, message: Message) -> Entry:
        """Add a message that was dead: in its groups before the waiting messages that are later."""
        if message.table is None or message.table not in self._tables:
            return self.add(message)
        entry = self._entry(message)
        table = self._tables[message.table]
        behind = table.barriers[0][0] if table.barriers else None
        is_behind = behind is not None and (behind.state is _IN_FLIGHT or behind.position < entry.position)
        if message.barrier:
            self.barriers += 1
            entry.is_released = True
            table.barriers.insert(1 if is_behind else 0, (entry, []))
            if behind is not None:
                self._check(behind)
            self._check(entry)
        elif is_behind:
            table.barriers[0][1].insert(0, entry)
        else:
            self._release(entry, table)
            if behind is not None:
                self._check(behind)
        return entry

    def next_free(self) -> Entry | None:
        """Take the first message that the present answer can hold out of the queue; None if there is none."""
        queue, entries = self._queue, self.entries
        while queue:
            entry = entries.get(heappop(queue))
            if entry is not None and entry.is_queued:
                entry.is_queued = False
                self.free -= 1
                return entry
        return None

    def take(self, entry: Entry, answer: Answer) -> None:
        """Put a message that `next_free` returned in flight; its groups' next messages are free for this answer."""
        self._fly(entry, answer)
        for group in entry.groups:
            follower = group.first
            if follower is not None and not follower.is_queued and self._is_free(follower, answer):
                self._enqueue(follower)
                self._followers.append(follower)

    def put_back(self, entry: Entry) -> None:
        """Return a message of `next_free` to the queue, untaken. The answer ends."""
        self._enqueue(entry)
        self._followers.append(entry)

    def end_answer(self, answer: Answer) -> None:
        """Note that the answer is complete: the messages behind it in its groups aren't free for another one."""
        if answer.flying:
            self.answers[answer.run, answer.number] = answer
        for follower in self._followers:
            if follower.state is _WAITING:
                self._check(follower)
        self._followers.clear()

    def come_back(self, entry: Entry) -> list[Entry]:
        """Return a message in flight, and the later ones in flight of its groups, to the waiting ones.

        Returns:
            The messages that came back.
        """
        came = [entry]
        lowest: dict[Group, int] = {}
        for one in came:  # grows
            if one.state is not _IN_FLIGHT:
                continue
            self._land(one)
            one.state = _WAITING
            for group in one.groups:
                if group not in lowest or one.position < lowest[group]:
                    came.extend(other for other in group.flying.values() if other.position > one.position)
                    lowest[group] = one.position
        came = sorted({one.position: one for one in came}.values(), key=_position, reverse=True)
        for one in came:
            for group in one.groups:
                group.insert(one)
        for one in came:
            self._check(one)
            for group in one.groups:
                self._check_first(group)
        return came

    def revive(self, entry: Entry, run: int, number: int, deadline: int) -> None:
        """Put a waiting message in flight again by an earlier answer.

        If a barrier holds it, it waits until the deadline instead.
        """
        if self._is_held(entry):
            self.delay(entry, deadline)
            return
        answer = self.answers.get((run, number))
        if answer is None:
            answer = self.answers[run, number] = Answer(run, number)
        self._dequeue(entry)
        entry.not_before, entry.deadline = 0, deadline
        self._fly(entry, answer)
        for group in entry.groups:
            self._check_first(group)

    def delay(self, entry: Entry, until: int) -> None:
        """Let a waiting message wait until a time; 0: no longer."""
        entry.not_before = until
        self._check(entry)

    def replace(self, entry: Entry, message: Message) -> None:
        """Put a newer message of the same group in the place of a waiting one."""
        self._dequeue(entry)
        del self.entries[entry.position]
        self.records_bytes += _referred(message) - _referred(entry.message)
        entry.message, entry.position = message, message.position
        self.entries[entry.position] = entry
        self._check(entry)

    def remove(self, entry: Entry) -> None:
        """Remove a message that is settled or dead."""
        if entry.state is _IN_FLIGHT:
            self._land(entry)
        elif entry.is_released:
            self._dequeue(entry)
            for group in entry.groups:
                group.remove(entry)
        entry.state = _GONE
        del self.entries[entry.position]
        self.records_bytes -= _referred(entry.message)
        for group in entry.groups:
            if group.is_empty:
                del self.groups[group.name]
            else:
                self._check_first(group)
        number = entry.message.table
        if number is not None and entry.is_released:
            table = self._tables[number]
            if entry.message.barrier:
                self._lift(entry, table)
            else:
                table.live -= 1
            if table.barriers:
                self._check(table.barriers[0][0])
            elif not table.live:
                del self._tables[number]

    def bound_records(self, entry: Entry, size_max: int | None) -> None:
        """Forget the reference to the record of a message that waits behind others, if records have too many bytes."""
        is_behind = entry.state is _WAITING and not entry.is_queued
        if size_max is not None and is_behind and self.records_bytes > size_max:
            self.records_bytes -= _referred(entry.message)
            entry.message = entry.message._replace(origin=None)

    def hold(self, tables: frozenset[int]) -> None:
        """Hold the messages of these tables, and of no others."""
        changed = self.held ^ tables
        self.held = tables
        if changed:
            for entry in self.entries.values():
                if entry.message.table in changed:
                    self._check(entry)

    def table(self, number: int | None) -> Table | None:
        """Return a table that has unsettled messages."""
        return None if number is None else self._tables.get(number)

    def in_flight_entries(self) -> Iterator[Entry]:
        """Yield the messages in flight."""
        for answer in self.answers.values():
            yield from answer.flying.values()

    # --- parts -------------------------------------------------------------------------------------------------------

    def _entry(self, message: Message) -> Entry:
        entry = self.entries[message.position] = Entry(message)
        self.records_bytes += _referred(message)
        return entry

    def _release(self, entry: Entry, table: Table | None) -> None:
        """Let a message into its groups: no barrier holds it."""
        if table is not None:
            table.live += 1
        entry.is_released = True
        groups, names = self.groups, entry.message.groups
        if names:
            found = []
            for name in names:
                group = groups.get(name)
                if group is None:
                    group = groups[name] = Group(name)
                first = group.first
                group.insert(entry)
                found.append(group)
                if first is not None and first.is_queued:
                    self._check(first)
            entry.groups = tuple(found)
        self._check(entry)

    def _lift(self, barrier: Entry, table: Table) -> None:
        """Remove a barrier, and let the messages that it held go on."""
        index = next(index for index, (entry, _) in enumerate(table.barriers) if entry is barrier)
        held = [entry for entry in table.barriers[index][1] if entry.state is not _GONE]
        del table.barriers[index]
        self.barriers -= 1
        if index:
            table.barriers[index - 1][1].extend(held)
            return
        for entry in held:
            self._release(entry, table)

    def _is_held(self, entry: Entry) -> bool:
        """Whether a barrier holds a message, or it is a barrier and earlier messages hold it."""
        message = entry.message
        if message.barrier and message.table is not None:
            return self._tables[message.table].next_barrier is not entry
        return not entry.is_released

    def _is_free(self, entry: Entry, answer: Answer | None) -> bool:
        if entry.state is not _WAITING or entry.not_before or self._is_held(entry):
            return False
        for group in entry.groups:
            if group.first is not entry or (group.flying and group.owner is not answer):
                return False
        return not self.held or entry.message.table not in self.held

    def _check(self, entry: Entry) -> None:
        """Put a message into the queue, or take it out, as it is free or not."""
        if self._is_free(entry, None):
            if not entry.is_queued:
                self._enqueue(entry)
        else:
            self._dequeue(entry)

    def _check_first(self, group: Group) -> None:
        first = group.first
        if first is not None:
            self._check(first)

    def _enqueue(self, entry: Entry) -> None:
        entry.is_queued = True
        self.free += 1
        heappush(self._queue, entry.position)

    def _dequeue(self, entry: Entry) -> None:
        if entry.is_queued:
            entry.is_queued = False
            self.free -= 1

    def _fly(self, entry: Entry, answer: Answer) -> None:
        position = entry.position
        entry.state = _IN_FLIGHT
        entry.answer = answer
        answer.flying[position] = entry
        self.in_flight += 1
        for group in entry.groups:
            group.remove(entry)
            if not group.flying:
                group.owner = answer
            group.flying[position] = entry

    def _land(self, entry: Entry) -> None:
        answer, position = entry.answer, entry.position
        if answer is None:
            raise AssertionError(f"{entry.message.id} isn't in flight")
        entry.answer = None
        self.in_flight -= 1
        del answer.flying[position]
        if not answer.flying:
            self.answers.pop((answer.run, answer.number), None)
        for group in entry.groups:
            del group.flying[position]
            if not group.flying:
                group.owner = None


def _referred(message: Message) -> int:
    return 0 if message.origin is None else message.size


def _position(entry: Entry) -> int:
    return entry.position
