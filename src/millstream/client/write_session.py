"""Sessions: an application's numbered writes, so that one with unknown outcome is resent and not appended twice.

`Session` has the calls of threads; `millstream.aio` makes coroutines of them.
"""

from __future__ import annotations

import heapq
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from millstream.client.appends import APPEND_DEADLINE_S, NOTHING_KNOWN, AppendRequest, KnownTables, check_deadline
from millstream.errors import (
    AppendOutcomeUnknown,
    BufferOutcomeUnknown,
    DedupWindowExpired,
    HomeBusy,
    HomeClosed,
    IdempotencyKeyReused,
    InvalidValue,
    MillstreamError,
    NotEnoughReplicas,
    PartialWrite,
    Retry,
    SessionExpired,
    SessionGap,
    UsageError,
    WriterClosed,
)
from millstream.model.steps import Steps, blocking

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.ingest.python_rows import Rows
    from millstream.model.operations import Appended, AppendedTables
    from millstream.model.writes import SessionFacts

ASK_AGAIN_S: Final = 0.05
"""First wait in seconds before a session resends a write with unknown outcome; it doubles up to …"""
ASK_AGAIN_MAX_S: Final = 1.0
"""… this."""


def session_of(name: str | None, next_number: int | None) -> tuple[str, int | None]:
    """Return a session's name and first number; the default name is unique.

    Raises:
        InvalidValue: the name is empty, or no text.
    """
    said: object = name
    if said is not None and (not isinstance(said, str) or not said.strip()):
        raise InvalidValue(
            f"{name!r} can't name a session",
            hint="Pass a name, or None for a new unique one.",
        )
    return (uuid.uuid4().hex, 1 if next_number is None else next_number) if name is None else (name, next_number)


_DOUBTFUL: Final = frozenset(
    {
        AppendOutcomeUnknown.code,
        BufferOutcomeUnknown.code,
        PartialWrite.code,
        "answer_cut_off",
        "answer_unreadable",
        NotEnoughReplicas.code,
    }
)
"""Codes of errors after which a write, or a part of it, may be stored: another one under its number would be taken for a resend."""


class Numbers:
    """The numbers of a session's writes: each is used once, and again only if its write was refused.

    Args:
        next_number: the first to use; None: `begin` sets it.

    Concurrency: any number of threads.
    """

    def __init__(self, name: str, next_number: int | None) -> None:
        said: object = next_number
        if said is not None and (not isinstance(said, int) or isinstance(said, bool) or said < 1):
            raise UsageError(f"a session's writes are numbered from 1, and {said!r} was asked for")
        self._name = name
        self._next = next_number
        self._given_back: list[int] = []
        self._doubtful: set[int] = set()
        """Numbers of writes with unknown outcome."""
        self._lock = threading.Lock()

    @property
    def is_known(self) -> bool:
        """Return whether the next number is known."""
        return self._next is not None

    @property
    def next(self) -> int:
        """Return the smallest number that no write of this session has."""
        with self._lock:
            assert self._next is not None, "it has begun"
            return self._given_back[0] if self._given_back else self._next

    def begin(self, facts: SessionFacts) -> None:
        """Continue after the log's last number, gaps first. `SessionExpired` if it no longer knows the session."""
        if facts.expired:
            raise SessionExpired(
                f"session {self._name} was forgotten: it hasn't written for too long", session=self._name
            )
        with self._lock:
            if self._next is None:
                self._next = max((facts.mark, *facts.above)) + 1
                self._given_back = sorted(set(range(facts.mark + 1, self._next)) - set(facts.above))

    def fill(self, facts: SessionFacts) -> bool:
        """Reuse the numbers of doubtful writes that the log lacks; return whether there are any."""
        with self._lock:
            lacking = {number for number in self._doubtful if number > facts.mark and number not in facts.above}
            self._doubtful.clear()
            for number in lacking:
                heapq.heappush(self._given_back, number)
            return bool(lacking)

    @contextmanager
    def one(self, named: int | None) -> Iterator[int]:
        """Yield a number for one write, or the named one.

        A refused write returns it, so that the next one fills the gap.
        """
        if named is not None:
            yield named
            self._doubtful.discard(named)
            return
        with self._lock:
            assert self._next is not None, "it has begun"
            if self._given_back:
                number = heapq.heappop(self._given_back)
            else:
                number, self._next = self._next, self._next + 1
        try:
            yield number
        except (DedupWindowExpired, IdempotencyKeyReused):
            raise  # it is another write's, or was durable
        except MillstreamError as error:
            if error.code in _DOUBTFUL:
                self._doubtful.add(number)  # it may be stored, under this number
            else:
                with self._lock:
                    heapq.heappush(self._given_back, number)
            raise
        except BaseException:
            self._doubtful.add(number)
            raise


class Attempts:
    """Decides when a session's write is resent, and when no longer.

    Args:
        deadline_s: the limit, in seconds from now. `UsageError` if it is invalid.
    """

    def __init__(self, deadline_s: float) -> None:
        check_deadline(deadline_s)
        self._give_up_s = time.monotonic() + deadline_s
        self._nap_s = ASK_AGAIN_S
        self._unknown: AppendOutcomeUnknown | BufferOutcomeUnknown | None = None
        self._missing: NotEnoughReplicas | None = None

    @property
    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return max(0.0, self._give_up_s - time.monotonic())

    def nap_after(self, error: MillstreamError, number: int = 0) -> float:
        """Return how many seconds to wait before the write with the number is resent.

        Raises the caller's error if it isn't.
        """
        if isinstance(error, AppendOutcomeUnknown | BufferOutcomeUnknown):
            self._unknown = error
        elif isinstance(error, NotEnoughReplicas):
            error.details.setdefault("number", number)
            self._missing = error if number else None
        elif isinstance(error, DedupWindowExpired | IdempotencyKeyReused | SessionExpired):
            raise error
        again = not isinstance(error, HomeClosed) and (
            isinstance(error, AppendOutcomeUnknown | BufferOutcomeUnknown | WriterClosed | HomeBusy)
            or error.retry is Retry.BACKOFF
        )
        nap_s, self._nap_s = self._nap_s, min(2 * self._nap_s, ASK_AGAIN_MAX_S)
        if again and nap_s < self.left_s:
            return nap_s
        if isinstance(error, NotEnoughReplicas):
            raise error
        if self._missing is not None:
            # An earlier try is known to be stored, whatever the last one reports, for example that
            # another node leads now.
            raise self._missing from error
        if self._unknown is not None:
            # An earlier try may be stored, whatever the last one reports.
            raise still_unknown(self._unknown, number) from error
        raise error


class NumberedWrites:
    """The writes of a session, for threads (`Session`) and for tasks (`AsyncSession`)."""

    _sleep: Callable[[float], Any]
    _lock: Callable[[], Any]
    _columns: Callable[[AppendRequest], Any]
    resume: Callable[[], Any]

    def __init__(
        self,
        append: Callable[[AppendRequest, Mapping[str, pa.Table]], Any],
        facts: Callable[[str, str], Any],
        stream: str,
        name: str,
        next_number: int | None,
        known: KnownTables = NOTHING_KNOWN,
    ) -> None:
        self._append = append
        self._known = known
        self._facts = partial(facts, stream, name)
        self._stream = stream
        self._numbers = Numbers(name, next_number)
        self.name: Final = name
        """The session's name in the stream."""
        self._asking = self._lock()

    def __repr__(self) -> str:
        known = self._numbers.next if self._numbers.is_known else None
        return f"{type(self).__name__}({self._stream!r}, {self.name!r}, next_number={known})"

    def _write(self, request: AppendRequest) -> Steps[Any]:
        tables, rejected = yield self._columns(request)
        if request.number is None and not self._numbers.is_known:
            yield self.resume()
        with request.naming(rejected, tables):
            return request.result((yield from self._written(request, tables)), rejected)

    def _written(self, request: AppendRequest, tables: Mapping[str, pa.Table]) -> Steps[Any]:
        """Append a write, and resend it; return its result."""
        attempts = Attempts(request.deadline_s)
        while True:
            try:
                with self._numbers.one(request.number) as given:
                    while True:
                        now = replace(request, deadline_s=attempts.left_s, number=given)
                        try:
                            appended = yield self._append(now, tables)
                        except SessionGap:
                            raise
                        except MillstreamError as error:
                            yield self._sleep(attempts.nap_after(error, given))
                        else:
                            return appended
            except SessionGap as error:
                # Numbers of lost writes are used first.
                if request.number is not None or not self._numbers.fill((yield self._facts())):
                    yield self._sleep(attempts.nap_after(error))


class Session(NumberedWrites):
    """Writes under one name, each with a number from 1: a write resent under its number isn't appended twice.

    Made by `home.session`. An application that restarts continues under the same name: with the first
    number that the log lacks, or the one that it gives. It resends a write with unknown outcome under its
    number.

    Concurrency: any number of threads.
    """

    _sleep = staticmethod(time.sleep)
    _lock = staticmethod(threading.Lock)

    @property
    def next_number(self) -> int:
        """Return the number of the next write, as `resume` does."""
        return self.resume()

    def resume(self) -> int:
        """Return the next number, from the log unless one was given. The first write calls it automatically.

        Raises:
            SessionExpired: the log no longer knows the session.
            MillstreamError: as `session_facts` of the home.
        """
        with self._asking:
            if not self._numbers.is_known:
                self._numbers.begin(self._facts())
        return self._numbers.next

    @blocking
    def append(
        self,
        table: str,
        rows: Rows,
        *,
        deadline_s: float = APPEND_DEADLINE_S,
        number: int | None = None,
        keep_valid_rows: bool = False,
        acks: str | None = None,
    ) -> Steps[Appended]:
        """Append as `append` of the home.

        If the outcome is unknown, or there is no room, the write is resent until the deadline.

        Args:
            table: as there.
            rows: as there.
            deadline_s: as there, for all tries together.
            number: the number to resend, with the same rows, from `append_outcome_unknown`
                (`details["number"]`).
            keep_valid_rows: as there.
            acks: as there.

        Raises:
            AppendOutcomeUnknown: the outcome is unknown even at the deadline; details: number.
            NotEnoughReplicas: it is durable, but others didn't confirm by the deadline that they have it;
                details: number.
            SessionExpired: the session hasn't written for too long: continue under another name.
            IdempotencyKeyReused: another client writes under this name.
            DedupWindowExpired: an earlier call appended it; its position is no longer known.
            MillstreamError: as `append` of the home. Nothing was appended, and the next write has this
                number.
        """
        return self._write(
            AppendRequest(self._stream, table, rows, deadline_s, self.name, number, None, keep_valid_rows, acks)
        )

    @blocking
    def append_all(
        self,
        tables: Mapping[str, Rows],
        *,
        deadline_s: float = APPEND_DEADLINE_S,
        number: int | None = None,
        keep_valid_rows: bool = False,
        acks: str | None = None,
    ) -> Steps[AppendedTables]:
        """Append as `append_all` of the home: one write of the session. Arguments and errors as `append`."""
        return self._write(
            AppendRequest(self._stream, None, tables, deadline_s, self.name, number, None, keep_valid_rows, acks)
        )

    def _columns(self, request: AppendRequest) -> Any:
        return request.columns(self._known)


def still_unknown(error: AppendOutcomeUnknown | BufferOutcomeUnknown, number: int) -> AppendOutcomeUnknown:
    """Return the error of a session's write that may be stored, with the number for a resend."""
    return AppendOutcomeUnknown(
        f"write {number} of the session: {error.message}",
        hint=f"Send the same rows again, with number={number}: they aren't appended twice.",
        **{**error.details, "number": number},
    )
