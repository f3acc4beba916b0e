"""The ledger of a stream's writers: the range of numbers that each is given next, and the epochs that fence older ones.

`Ledger` is the store's state of a stream's writers and numbers, with the steps that change it. It is immutable: a step
returns the ledger after it. The memory store is this very object behind a lock. The PostgreSQL store
(`catalog.shared_sequence`) does the same in SQL, and both pass one conformance suite that compares them with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from millstream.errors import SequencingError, StaleEpoch
from millstream.model.ids import Epoch, WriterId
from millstream.model.positions import NO_NUMBERS, SEQ_MAX, Seq, SeqRange
from millstream.protocol.sequencer.persisted_upto import LedgerView


class WriterPhase(StrEnum):
    """The phase of a writer's newest incarnation."""

    RECOVERING = "recovering"
    """Registered, or taken over: the log of the earlier incarnations is being read."""
    JOINING = "joining"
    """Its log is recovered, and its marks may not stand yet. Others count its position until it draws or reports that
    they do."""
    OPEN = "open"
    """Gives out numbers; holds linear readers at its position."""
    SETTLED = "settled"
    """All its numbers are decided, and it is given none until it registers again."""


_GIVES_NUMBERS: Final = (WriterPhase.JOINING, WriterPhase.OPEN)


@dataclass(frozen=True, slots=True)
class WriterEntry:
    """One writer of a stream."""

    writer: WriterId
    name: str
    location: str
    """Location of its log: distinguishes two homes that use one name by mistake."""
    epoch: Epoch
    phase: WriterPhase
    position: Seq
    """The number up to which all its numbers are settled."""
    last: SeqRange = NO_NUMBERS
    """The newest range given to this incarnation, which asks for it if a draw's reply was lost."""
    given_to: Seq = Seq(0)
    """The greatest number ever given to any of its incarnations."""
    lease_until_us: int = 0
    """Time by the store's clock from which it may be taken over."""
    cut_at: Seq | None = None
    """Position at which it was forgotten: its numbers above will never be, and the process that recovers its log sets
    them aside."""


@dataclass(frozen=True, slots=True)
class Registration:
    """The store's answer to a new incarnation, or to a process that takes a writer over."""

    writer: WriterId
    epoch: Epoch
    newest: Seq
    """No number above it was given when the earlier incarnations were fenced; none of their numbers is above it."""
    given_to: Seq
    """The greatest number ever given to this writer; 0: its log may be empty."""
    cut_at: Seq | None
    """Number at which the log has to be cut when it is recovered; None: it isn't cut."""
    lease_us: int
    """How long the new incarnation lives without a report."""
    waits_us: int
    """How long the earlier incarnation may still answer its callers: until then it keeps its own locks."""
    seizes: bool = False
    """Whether locks that are held after that may be taken: an earlier incarnation was fenced and may hang. Otherwise
    the holder of a lock isn't an incarnation of this writer."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The store's answer to a draw, or to the end of a recovery."""

    given: SeqRange
    """The range; after a recovery an empty one at the floor: the numbers begin behind it."""
    elsewhere: Seq
    """The lowest position of the writers that the folder's marks may not show: writers whose logs lie at other
    locations, and writers that are joining. `SEQ_MAX` if there are none."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """A stream's writers and its newest number.

    Raises (from the steps):
        StaleEpoch: the caller's epoch isn't the writer's newest, or its phase doesn't allow the step; nothing was changed.
        SequencingError (`unknown_writer`): the stream has no such writer.
    """

    newest: Seq = Seq(0)
    """The greatest number given to any writer."""
    epoch: Epoch = Epoch(0)
    """The newest epoch given to any writer."""
    writers: tuple[WriterEntry, ...] = ()
    """Writers by their numbers, which run from 1."""

    def register(
        self, name: str, location: str, *, now_us: int, lease_us: int, above: Epoch = Epoch(0)
    ) -> tuple[Ledger, Registration]:
        """Register a writer's newest incarnation; the earlier one is fenced.

        Args:
            name: distinguishes writers of a stream.
            location: location of its log.
            now_us: the store's clock.
            lease_us: how long until it has to report.
            above: an epoch that its log has, if the store is older than the log.

        Raises:
            SequencingError (`writer_name_taken`): a writer of that name lives at another location.
        """
        before = next((entry for entry in self.writers if entry.name == name), None)
        if before is None:
            writer = WriterId(len(self.writers) + 1)
            before = WriterEntry(writer, name, location, Epoch(0), WriterPhase.SETTLED, self.newest)
        elif before.location != location:
            if before.phase is not WriterPhase.SETTLED and now_us < before.lease_until_us:
                raise SequencingError(
                    f"writer {name} of this stream lives, and its log lies in {before.location}, not in {location}",
                    code="writer_name_taken",
                    writer=name,
                    location=before.location,
                )
            if before.phase is not WriterPhase.SETTLED or before.cut_at is not None:
                # Its last group may lie in a log at the other location: recovery of this log doesn't decide it.
                raise SequencingError(
                    f"writer {name} of this stream left numbers undecided in {before.location}, which is not {location}",
                    code="writer_name_taken",
                    hint="Start it there once, or run `millstream writers forget` for it and use another name here.",
                    writer=name,
                    location=before.location,
                )
        return self._begin(before, now_us, lease_us, location, above)

    def take_over(self, writer: WriterId, *, now_us: int, lease_us: int) -> tuple[Ledger, Registration]:
        """Fence a writer that has died, to recover its log for it.

        Args:
            writer: a writer whose lease has run out.
            now_us: the store's clock.
            lease_us: how long the recovery may take.

        Raises:
            SequencingError (`writer_alive`): its lease hasn't run out.
        """
        entry = self.entry(writer)
        if entry.phase is WriterPhase.SETTLED:
            raise StaleEpoch(f"writer {entry.name} is settled: there is nothing to take over", epoch=int(entry.epoch))
        _check_expired(entry, now_us, "taken over")
        return self._begin(entry, now_us, lease_us, entry.location)

    def _begin(
        self, before: WriterEntry, now_us: int, lease_us: int, location: str, above: Epoch = Epoch(0)
    ) -> tuple[Ledger, Registration]:
        epoch = Epoch(max(self.epoch, above) + 1)
        settled = before.phase is WriterPhase.SETTLED
        waits_us = 0 if settled else max(0, before.lease_until_us - now_us)
        entry = replace(
            before,
            location=location,
            epoch=epoch,
            phase=WriterPhase.RECOVERING,
            position=self.newest if settled else before.position,
            last=NO_NUMBERS,
            lease_until_us=now_us + max(lease_us, waits_us),
        )
        after = self._with(entry, epoch=epoch)
        seizes = not settled or entry.cut_at is not None
        told = Registration(entry.writer, epoch, self.newest, entry.given_to, entry.cut_at, lease_us, waits_us, seizes)
        return after, told

    def recovered(self, writer: WriterId, epoch: Epoch, *, now_us: int, lease_us: int) -> tuple[Ledger, Drawn]:
        """End a recovery: earlier incarnations' numbers are settled, and it may draw once its marks stand."""
        entry = self._own(writer, epoch, WriterPhase.RECOVERING)
        entry = replace(
            entry, phase=WriterPhase.JOINING, position=self.newest, lease_until_us=now_us + lease_us, cut_at=None
        )
        return self._with(entry), Drawn(SeqRange(Seq(self.newest + 1), 0), self.elsewhere(entry))

    def draw(
        self, writer: WriterId, epoch: Epoch, count: int, *, position: Seq, now_us: int, lease_us: int
    ) -> tuple[Ledger, Drawn]:
        """Give the next `count` numbers, note the writer's position, and renew its lease.

        Raises:
            SequencingError (`invalid_count`): such a range can't be given.
        """
        check_count(count, self.newest)
        entry = self._own(writer, epoch, *_GIVES_NUMBERS)
        given = SeqRange(Seq(self.newest + 1), count)
        lifted = Seq(max(entry.position, position))
        entry = replace(entry, phase=WriterPhase.OPEN, position=lifted, last=given, given_to=given.last)
        entry = replace(entry, lease_until_us=now_us + lease_us)
        return self._with(entry, newest=given.last), Drawn(given, self.elsewhere(entry))

    def last(self, writer: WriterId, epoch: Epoch) -> SeqRange:
        """Return the newest range given to an incarnation."""
        return self._own(writer, epoch, *_GIVES_NUMBERS).last

    def report(
        self, writer: WriterId, epoch: Epoch, *, position: Seq, now_us: int, lease_us: int, is_shown: bool = True
    ) -> tuple[Ledger, LedgerView]:
        """Note a writer's position, renew its lease, and return all positions.

        Args:
            writer: the writer that reports.
            epoch: epoch of its incarnation.
            position: the number up to which all its numbers are settled.
            now_us: the store's clock.
            lease_us: how long until it has to report again.
            is_shown: whether its marks stand, so that readers of its folder see its position.
        """
        entry = self._own(writer, epoch, *_GIVES_NUMBERS, WriterPhase.RECOVERING)
        lease_until_us = now_us + lease_us
        if entry.phase is not WriterPhase.RECOVERING:
            phase = WriterPhase.OPEN if is_shown else entry.phase
            entry = replace(entry, phase=phase, position=Seq(max(entry.position, position)))
        else:
            # The earlier incarnation may have the longer lease: the next one has to wait for that as well.
            lease_until_us = max(entry.lease_until_us, lease_until_us)
        after = self._with(replace(entry, lease_until_us=lease_until_us))
        return after, after.view(now_us)

    def settle(self, writer: WriterId, epoch: Epoch) -> Ledger:
        """Settle a writer that goes with all numbers decided; also called by a process that has recovered its log."""
        entry = self._own(writer, epoch, *_GIVES_NUMBERS, WriterPhase.RECOVERING)
        return self._with(replace(entry, phase=WriterPhase.SETTLED, cut_at=None))

    def forget(self, writer: WriterId, *, now_us: int) -> Ledger:
        """Give up the undecided numbers of a dead writer whose log can't be reached; linear readers pass it.

        Raises:
            SequencingError (`writer_alive`): its lease hasn't run out.
        """
        entry = self.entry(writer)
        if entry.phase is WriterPhase.SETTLED:
            raise StaleEpoch(f"writer {entry.name} is settled: there is nothing to forget", epoch=int(entry.epoch))
        _check_expired(entry, now_us, "forgotten")
        epoch = Epoch(self.epoch + 1)
        cut_at = entry.position if entry.cut_at is None else entry.cut_at
        return self._with(replace(entry, epoch=epoch, phase=WriterPhase.SETTLED, cut_at=cut_at), epoch=epoch)

    def view(self, now_us: int) -> LedgerView:
        """Return the view of readers and writers, at one moment."""
        positions = {e.writer: self.newest if e.phase is WriterPhase.SETTLED else e.position for e in self.writers}
        expired = (e for e in self.writers if e.phase is not WriterPhase.SETTLED and e.lease_until_us <= now_us)
        return LedgerView(self.newest, MappingProxyType(positions), frozenset(e.writer for e in expired))

    def elsewhere(self, entry: WriterEntry) -> Seq:
        """Return the lowest position of the other writers that have their logs at other locations, or are joining.

        A settled writer has nothing undecided. Readers of a folder see its writers' positions by their marks. A
        joining writer's marks may not stand yet, and show its present position once they do. If the others' marks
        showed more until then, readers would see the stream's position go back.
        """
        hidden = (
            e
            for e in self.writers
            if e.writer != entry.writer
            and e.phase is not WriterPhase.SETTLED
            and (e.location != entry.location or e.phase is WriterPhase.JOINING)
        )
        return min((e.position for e in hidden), default=SEQ_MAX)

    def entry(self, writer: WriterId) -> WriterEntry:
        """Return one writer; raise `unknown_writer` if there is none."""
        if not 1 <= writer <= len(self.writers):
            known = [entry.name for entry in self.writers]
            raise SequencingError(
                f"the stream has no writer {writer}", code="unknown_writer", writer=int(writer), known=known
            )
        return self.writers[writer - 1]

    def _own(self, writer: WriterId, epoch: Epoch, *phases: WriterPhase) -> WriterEntry:
        entry = self.entry(writer)
        if entry.epoch != epoch or entry.phase not in phases:
            raise stale(entry, epoch)
        return entry

    def _with(self, entry: WriterEntry, *, newest: Seq | None = None, epoch: Epoch | None = None) -> Ledger:
        place = entry.writer - 1
        writers = (*self.writers[:place], entry, *self.writers[place + 1 :])
        return Ledger(self.newest if newest is None else newest, self.epoch if epoch is None else epoch, writers)


def stale(entry: WriterEntry, epoch: Epoch) -> StaleEpoch:
    """Return the error for an incarnation that isn't the newest, or a step that its phase doesn't allow."""
    if entry.epoch != epoch:
        what = f"epoch {epoch} of writer {entry.name} is fenced: epoch {entry.epoch} has taken over"
    else:
        what = f"writer {entry.name} is {entry.phase}: it can't do that now"
    return StaleEpoch(what, epoch=int(entry.epoch), writer=entry.name)


def check_count(count: int, newest: Seq) -> None:
    """Raise `invalid_count` if a range of that many numbers can't be given."""
    if count < 1:
        raise SequencingError(
            f"{count} numbers can't be given out", code="invalid_count", hint="Ask for at least 1.", count=count
        )
    if newest + count > SEQ_MAX:
        raise SequencingError(f"{count} numbers are more than the stream has left", code="invalid_count", count=count)


def _check_expired(entry: WriterEntry, now_us: int, done: str) -> None:
    left_us = entry.lease_until_us - now_us
    if left_us > 0:
        raise SequencingError(
            f"writer {entry.name} can't be {done}: its lease runs for {left_us / 1e6:.1f} s more",
            code="writer_alive",
            writer=entry.name,
            lease_s=left_us / 1e6,
        )
