"""Lives of a log drawn from a seed: appends, seals, restarts and retention, with failures at any operation.

The disk fails, or the process or machine crashes.

`python -m tests.wal.crash_search FIRST COUNT` plays that many seeds and prints what it found; a seed
repeats its life exactly.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from tests.seeds import main
from tests.wal.drawn_log import PLENTY, DrawnLog
from tests.wal.truth import FOLDER

from millstream.errors import AppendOutcomeUnknown, DiskFull, MillstreamError, WriterClosed
from millstream.model.positions import Seq
from millstream.protocol.retention import HolderKind, Retention, RetentionBounds
from millstream.testing.files import Crash
from millstream.wal.mending.inspect import verify
from millstream.wal.reader import StreamReader
from millstream.wal.segment_deletion import drop_segments
from millstream.wal.writing.group_commit import GroupCommitter


@dataclass
class Life(DrawnLog):
    """The life of one log, from one seed."""

    log: GroupCommitter | None = None
    dropped_upto: int = 0
    """Greatest number up to which retention may have dropped records."""
    seen: list[int] = field(default_factory=list)

    def play(self) -> None:
        """Play the whole life; raise `AssertionError` if a promise is broken."""
        for _ in range(self.chance.randint(2, 5)):
            self._begin()
            self._work()
            self._end()
        self._begin(trouble=False)
        assert self.log is not None
        self.truth.commit(self.log, self.truth.ops([(1, 1), (2, 2)], [(3, 1)]))
        self.log.close()
        self._judge()
        assert verify(FOLDER, files=self.files).is_whole

    # --- a writer's life -------------------------------------------------------------------------------------------

    def _begin(self, *, trouble: bool = True) -> None:
        """Open the log, even if the disk fails or the power goes during it; what was readable before stays readable."""
        while self.log is None:
            breaks = trouble and self.chance.random() < 0.4
            if breaks:
                self._break_within(self.files, 60, crashes=0.6)
            try:
                self.log = self.truth.open(self.files, options=self._options(), clock=self.clock)
            except Crash:
                self._crash("crash of recovery")
            except (OSError, MillstreamError):
                if not breaks:
                    raise
                self._count("failed recovery")
                self._die()
            finally:
                self._mend(self.files)
        self._judge()

    def _work(self) -> None:
        if self.chance.random() < 0.85:
            self._break_within(self.files, 120, crashes=0.6)
        try:
            for _ in range(self.chance.randint(1, 8)):
                self.chance.choice([self._append, self._append, self._append, self._spill, self._retain, self._wait])()
                if self.chance.random() < 0.1:
                    self._fill()
            if self.chance.random() < 0.4:
                assert self.log is not None
                self.log.close()
                self.log = None
        except Crash:
            self._crash("crash")
        except (AppendOutcomeUnknown, WriterClosed, OSError) as error:
            if isinstance(error, AppendOutcomeUnknown):
                self._takes_no_more()
            self._count("failed disk")
            self._die()

    def _end(self) -> None:
        """End the process in one way or another, if it hasn't ended."""
        self._mend(self.files)
        if self.log is not None and self.log.failure is not None:
            self._die()
        elif self.log is not None and self.chance.random() < 0.5:
            self._crash("kill")

    def _append(self) -> None:
        assert self.log is not None
        group = [self._ops() for _ in range(self.chance.randint(1, 3))]
        self._refusable(lambda log: self.truth.commit(log, *group))

    def _spill(self) -> None:
        chunks = [self._pieces() for _ in range(self.chance.randint(1, 4))]
        op = self.truth.spilled(*chunks)
        self._refusable(lambda log: self.truth.commit(log, op))

    def _refusable(self, commit: object) -> None:
        """Commit, though the disk may have no room. Nothing of a refused commit may ever be there."""
        before = len(self.truth.attempted)
        try:
            commit(self.log)  # type: ignore[operator]
            self._count("groups")
        except (DiskFull, WriterClosed) as error:
            self.truth.refused.update(self.truth.attempted[before:])
            self._count("full disk" if isinstance(error, DiskFull) else "closed writer")
            if isinstance(error, WriterClosed):
                raise

    def _takes_no_more(self) -> None:
        """Check that a writer with an unknown outcome refuses every commit: only recovery decides."""
        self.files.plan.fail_at = frozenset()
        try:
            self._refusable(lambda log: self.truth.commit(log, self._ops()))
        except WriterClosed:
            return
        raise AssertionError("a writer that failed went on")

    def _retain(self) -> None:
        """Run retention next to the writer, with a reader that needs everything from some number on."""
        assert self.log is not None
        needed = self.chance.randint(1, int(self.log.persisted_upto) + 1)
        self.dropped_upto = max(self.dropped_upto, needed - 1)
        tracker = Retention()
        tracker.needs("reader", HolderKind.BACKLOG, Seq(needed))
        drop_segments(FOLDER, tracker, RetentionBounds(0.0, 0, 0), files=self.files, clock=self.clock)
        self._count("retentions")

    def _wait(self) -> None:
        assert self.log is not None
        self.clock.advance(self.chance.choice([1, 4000]))
        self.log.roll()

    def _fill(self) -> None:
        self.files.capacity_bytes = self.files.used_bytes() + self.chance.randint(0, 4000)

    # --- trouble ---------------------------------------------------------------------------------------------------

    def _crash(self, what: str) -> None:
        """Cut the power: the disk keeps none, all, or any of the unsynced writes."""
        self._count(what)
        self._look()
        self.files = self.files.crash(self._kept())
        self.files.capacity_bytes = PLENTY
        self.log = None

    def _die(self) -> None:
        """End the process. Either the system lives and keeps every write, or the power goes too."""
        if self.chance.random() < 0.5:
            self._crash("crash behind a failure")
            return
        self._look()
        self.files = self.files.crash(process_only=True)
        self.files.capacity_bytes = PLENTY
        self.log = None

    # --- judging ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Read next to the writer, and check that everything the last look saw is still there."""
        try:
            self.seen = sorted({*self.seen, *self._still_there(self.truth.shown(self.files))})
        except (MillstreamError, FileNotFoundError):
            assert self.counts["groups"] == 0 or self.log is None or self.log.failure is not None

    def _still_there(self, xids: list[int]) -> list[int]:
        """Return the xids that retention can't have dropped."""
        acks = self.truth.acknowledged
        return [xid for xid in xids if xid not in acks or acks[xid].seqs.first > self.dropped_upto]

    def _judge(self) -> None:
        gone = {xid: ack for xid, ack in self.truth.acknowledged.items() if ack.seqs.first <= self.dropped_upto}
        for xid in gone:
            del self.truth.acknowledged[xid]
        self.seen = [xid for xid in self.seen if xid not in gone and not self._dropped(xid)]
        self.seen = self.truth.judge(self.files, seen=self.seen)
        reader = StreamReader(FOLDER, files=self.files)
        assert reader.persisted_upto() >= self.dropped_upto

    def _dropped(self, xid: int) -> bool:
        numbers = [seq for seq, (other, _, _) in self.truth.seqs_seen.items() if other == xid]
        return bool(numbers) and min(numbers) <= self.dropped_upto


if __name__ == "__main__":
    sys.exit(main(Life, sys.argv[1:]))
