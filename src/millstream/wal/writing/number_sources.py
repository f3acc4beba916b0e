"""Sources of a writer's sequence numbers: its own reserved blocks, or a store that several writers share.

Only the thread that writes uses them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from millstream.errors import CatalogError, SequencingError, StaleEpoch
from millstream.model.ids import Epoch
from millstream.model.positions import SEQ_MAX, Seq, SeqRange
from millstream.ports import Clock, SeqReservations, SequenceStore
from millstream.protocol.sequencer import (
    Drawn,
    EmbeddedNumbers,
    LedgerView,
    Registration,
    WriterNumbers,
    check_count,
)
from millstream.wal.files import SystemClock

_TRIES: Final = 3


class GroupNumbers(ABC):
    """The numbers that commit groups are given. The answers given here are those of a stream's only writer."""

    shared = False
    """Whether other writers have numbers of the same stream, and shards in the same folder."""
    _numbers: EmbeddedNumbers | WriterNumbers

    @property
    @abstractmethod
    def position(self) -> Seq:
        """Greatest number up to which all of this writer's numbers are durable and readable, or never will be."""

    @property
    def newest(self) -> Seq:
        """The newest number known to have been given to any writer."""
        return self._numbers.newest

    @property
    @abstractmethod
    def reserved_to(self) -> Seq:
        """Greatest number that may have been given."""

    @property
    def elsewhere(self) -> Seq:
        """Lowest position of the writers that this folder's marks may not show.

        Their logs lie in other folders, or they are joining.
        """
        return SEQ_MAX

    @abstractmethod
    def given_before(self) -> Seq:
        """Return the greatest number that this writer's log must have, if it has any; 0: the log may be empty."""

    @property
    def cut_at(self) -> Seq | None:
        """Position of this writer when it was forgotten; None if it wasn't.

        Readers have passed the records that its log has above it.
        """
        return None

    def may_seize(self) -> bool:
        """Return whether the previous incarnation can no longer answer callers.

        The shards that it holds locked may then be taken over. Without a lease, ownership rests on these locks alone.
        """
        return False

    @abstractmethod
    def begin(self, *, reserved_to: Seq, persisted_upto: Seq) -> None:
        """Begin with what the recovered log has of the numbers given before.

        Raises:
            SequencingError (`sequence_unusable`): the store is behind the log.
            StaleEpoch: a newer incarnation has taken over.
        """

    @abstractmethod
    def allocate(self, count: int) -> SeqRange:
        """Return the next numbers, in flight from now on. After an error the set of numbers in flight is unchanged.

        Raises:
            StaleEpoch: a newer incarnation has taken over.
            CatalogError: the store can't be asked now; a later call may succeed.
            SequencingError (`invalid_count`): the stream hasn't so many left.
        """

    def confirm(self) -> None:  # noqa: B027 - no other process takes over shards whose locks are held
        """Confirm that what was fsynced belongs to the log: no other incarnation has recovered the log without it.

        Raises:
            StaleEpoch: a newer incarnation has taken over; its recovered log may or may not have
                it.
            CatalogError: that can't be found out now.
        """

    def finish(self, given: SeqRange) -> None:
        """Note that the range is durable, and shown to readers."""
        self._numbers.finish(given)

    def abort(self, given: SeqRange) -> None:
        """Note that the range never will be durable."""
        self._numbers.abort(given)

    def sign(self) -> LedgerView | None:
        """Renew the lease while another thread writes a group; positions don't move. Returns and raises as `follow`."""
        return None

    def follow(self) -> LedgerView | None:
        """Report this writer's position to the others, and advance to the newest number if nothing is in flight.

        Returns:
            The positions of all writers; None if this is the only one.

        Raises:
            StaleEpoch, CatalogError: as `allocate`.
        """
        return None

    def settle(self) -> None:  # noqa: B027 - no other writer waits for it
        """Report, at a clean end, that nothing is in flight and no more numbers will be drawn."""


class BlockNumbers(GroupNumbers):
    """Numbers of a stream that one writer owns, from durably reserved blocks."""

    def __init__(self, reservations: SeqReservations, epoch: Epoch) -> None:
        self._reservations = reservations
        self._epoch = epoch
        self._numbers: EmbeddedNumbers = EmbeddedNumbers(reserved_to=Seq(0), persisted_upto=Seq(0))

    @property
    def position(self) -> Seq:
        return self._numbers.persisted_upto

    @property
    def reserved_to(self) -> Seq:
        return self._numbers.reserved_to

    def given_before(self) -> Seq:
        return self._reservations.reserved()

    def begin(self, *, reserved_to: Seq, persisted_upto: Seq) -> None:
        # The log may have reservations that the catalog has lost.
        floor = max(reserved_to, persisted_upto, self._reservations.reserved())
        self._numbers = EmbeddedNumbers(reserved_to=floor, persisted_upto=persisted_upto)

    def allocate(self, count: int) -> SeqRange:
        check_count(count, self._numbers.newest)
        upto = self._numbers.to_reserve(count)
        if upto is not None:
            self._reservations.reserve_to(upto, epoch=self._epoch)
            self._numbers.reserved(upto)
        return self._numbers.allocate(count)


class SharedNumbers(GroupNumbers):
    """Numbers of a stream that several writers share.

    Args:
        store: the stream's store of numbers.
        registration: of this incarnation, or of the one that it takes over; just made.
        clock: measures the lease here. It starts before the request to the store, so it ends before
            the store's lease.
    """

    shared = True

    def __init__(self, store: SequenceStore, registration: Registration, clock: Clock | None = None) -> None:
        self._store = store
        self._registration = registration
        self._clock: Clock = SystemClock() if clock is None else clock
        self._others_end_ns = self._clock.monotonic_ns() + 1000 * registration.waits_us
        self._lease_end_ns = 0
        self._numbers: WriterNumbers = WriterNumbers(registration.writer, registration.epoch, Seq(0))
        self._elsewhere = Seq(0)
        self._is_lost = False
        """Whether the reply to a draw was lost, so that its numbers aren't known yet."""

    @property
    def position(self) -> Seq:
        return self._numbers.position

    @property
    def reserved_to(self) -> Seq:
        """As `GroupNumbers`: nothing is reserved ahead."""
        return self._numbers.newest

    @property
    def elsewhere(self) -> Seq:
        return self._elsewhere

    def given_before(self) -> Seq:
        return self._registration.given_to

    @property
    def cut_at(self) -> Seq | None:
        return self._registration.cut_at

    def may_seize(self) -> bool:
        """As `GroupNumbers`: there was a previous incarnation, and its lease has run out."""
        return self._registration.seizes and self._clock.monotonic_ns() >= self._others_end_ns

    def waits_on(self) -> bool:
        """Return whether the previous incarnation may still answer its callers: recovery then waits for its locks."""
        return self._clock.monotonic_ns() < self._others_end_ns

    def keep_lease(self) -> None:
        """Renew the lease while waiting for the shards of the previous incarnation."""
        own = self._registration
        self._store.report(own.writer, own.epoch, position=Seq(0), is_shown=False)

    def _lives_on(self, asked_ns: int) -> None:
        """Extend the lease: the store renewed it at some time after it was asked."""
        self._lease_end_ns = max(self._lease_end_ns, asked_ns + 1000 * self._registration.lease_us)

    def begin(self, *, reserved_to: Seq, persisted_upto: Seq) -> None:
        known, newest = max(reserved_to, persisted_upto), self._registration.newest
        if known > newest:
            # Other writers may have been given numbers since this one registered.
            newest = self._store.view().newest
        if known > newest:
            raise SequencingError(
                f"the log has numbers up to {known}, but the catalog has allocated numbers only up to {newest}",
                code="sequence_unusable",
                hint="Restore the catalog that goes with the log: this one is older.",
                log=int(known),
                store=int(newest),
            )
        asked_ns = self._clock.monotonic_ns()
        told = self._store.recovered(self._registration.writer, self._registration.epoch)
        self._lives_on(asked_ns)
        self._numbers = WriterNumbers(self._registration.writer, self._registration.epoch, told.given.last)
        self._elsewhere = told.elsewhere

    def allocate(self, count: int) -> SeqRange:
        """As `GroupNumbers`; if the reply to a draw was lost, the store is asked again for its numbers."""
        for left in reversed(range(_TRIES)):
            try:
                found = self._find_lost()
                if found is not None and found.count == count:
                    return found
                if found is not None:
                    self._numbers.abort(found)
                return self._draw(count)
            except CatalogError:
                if not left:
                    raise
        raise AssertionError("unreachable")

    def _draw(self, count: int) -> SeqRange:
        own = self._registration
        position = self._numbers.asks()
        asked_ns = self._clock.monotonic_ns()
        self._is_lost = True
        try:
            drawn = self._store.draw(own.writer, own.epoch, count, position=position)
        except CatalogError:
            raise
        except Exception:
            self._is_lost = False
            self._numbers.refused()
            raise
        self._is_lost = False
        self._lives_on(asked_ns)
        return self._take(drawn)

    def _take(self, drawn: Drawn) -> SeqRange:
        if drawn.given.first <= self._numbers.newest:
            self._numbers.refused()
            raise SequencingError(
                f"the catalog allocated number {drawn.given.first}, though it had allocated numbers up to {self._numbers.newest} before",
                code="sequence_unusable",
                hint="Stop all writers and run `millstream doctor`: the sequence was set back, or the catalog is an older "
                "copy.",
                found=int(drawn.given.first),
                given=int(self._numbers.newest),
            )
        self._numbers.given(drawn.given)
        self._elsewhere = drawn.elsewhere
        return drawn.given

    def _find_lost(self) -> SeqRange | None:
        """Return the numbers of a draw whose reply was lost; None if there was no such draw, or it gave none."""
        if not self._is_lost:
            return None
        own = self._registration
        last = self._store.last(own.writer, own.epoch)
        # The lost reply also had this position.
        _, self._elsewhere = self._store.report(own.writer, own.epoch, position=self._numbers.position)
        self._is_lost = False
        return self._numbers.resolved(last)

    def confirm(self) -> None:
        """As `GroupNumbers`: no one takes over while the lease runs.

        After that, the store is asked which incarnation is current.
        """
        if self._clock.monotonic_ns() >= self._lease_end_ns:
            self._report()

    def sign(self) -> LedgerView | None:
        """As `GroupNumbers`; reports a position that certainly holds."""
        own = self._registration
        asked_ns = self._clock.monotonic_ns()
        view, _ = self._store.report(own.writer, own.epoch, position=self._numbers.position)
        self._lives_on(asked_ns)
        return view

    def follow(self) -> LedgerView | None:
        found = self._find_lost()
        if found is not None:
            self._numbers.abort(found)
        before = self._numbers.position
        view = self._report()
        if self._numbers.position > before:
            view = self._report()
        return view

    def _report(self) -> LedgerView:
        own = self._registration
        asked_ns = self._clock.monotonic_ns()
        view, elsewhere = self._store.report(own.writer, own.epoch, position=self._numbers.position)
        self._lives_on(asked_ns)
        self._numbers.observe(view.newest)
        self._elsewhere = elsewhere
        return view

    def settle(self) -> None:
        """As `GroupNumbers`.

        If the store can't be reached, the lease runs out, and another incarnation recovers what is
        whole.
        """
        try:
            self._store.settle(self._registration.writer, self._registration.epoch)
        except (StaleEpoch, CatalogError):
            return
