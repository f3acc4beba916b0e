"""Many writers, one order: which writer may give out a number, and up to where every number of a stream is decided.

Four machines, none of which does I/O:

- `EmbeddedNumbers`: the numbers of a stream with one writer, as most homes have it. The rest is for several.
- `Ledger`: the store's state of a stream. Each of its methods is one atomic step of the store, whatever the store is
  made of.
- `WriterNumbers`: one writer incarnation's own numbers: in flight, ended, and the position that follows from them.
- `LedgerView`: what the store shows of all writers at one moment, and the cut that readers may read to.

A writer's *position* is the greatest number n such that all numbers up to n that were ever given to it are settled:
durable and readable, or never to be. The stream's *persisted_upto* is the same over all writers.

Premises
--------
1. A store's steps are atomic and durable, and each sees all those before it. Its clock is one clock. A crash of the
   store may undo its newest draws, if no other step came after them and no writer counts their positions; the newest
   number then goes up, and never back.
2. A number is given once. Ranges are given whole, one behind the other, so every end of a range is the end of an
   operation.
3. A writer shows a group to readers (its mark moves) before it calls `finish`; so records that a position covers can
   be read.
4. Before a process reads a writer's log for recovery, it makes sure that no older incarnation can write to that log
   again (the shards' locks are the kernel's). It reads the log to its end.
5. Messages between processes may be lost, doubled, late and in any order. If a reply is lost, its outcome is unknown.

Transitions of a writer in the ledger (position: p; "newest" is the newest number given to any writer, at that step):

    | step                      | no such name      | recovering        | open                | settled            |
    |---------------------------|-------------------|-------------------|---------------------|--------------------|
    | register                  | recovering,       | recovering,       | recovering,         | recovering,        |
    |                           | new epoch, newest | new epoch, p      | new epoch, p        | new epoch, newest  |
    | recovered (of its epoch)  | refused           | open, newest      | refused             | refused            |
    | draw (of its epoch)       | refused           | refused           | open, p given up to | refused            |
    | report (of its epoch)     | refused           | p                 | open, greater p     | refused            |
    | take_over (lease ran out) | refused           | recovering,       | recovering,         | refused            |
    |                           |                   | new epoch, p      | new epoch, p        |                    |
    | settle (of its epoch)     | refused           | settled           | settled             | refused            |
    | forget (lease ran out)    | refused           | settled, cut at p | settled, cut at p   | refused            |

Rules that follow, each held by a test that fails without it:

- Registering comes before the first number, and the position that it writes lies below every number that the writer
  will be given.
- A new epoch fences: an older incarnation draws and reports no more. Its position stays where it is until its log has
  been recovered, because its last group may be durable though it wasn't acknowledged.
- With nothing in flight, and no draw whose outcome is unknown, a writer's position follows the newest number; else it
  stands below the first that is undecided.
- A writer that was unknown when a view was taken is given numbers above the view's newest only. So hints from other
  processes lift a view no further than that. The exception is ranges that are reported as ended and follow one
  another without a gap, whichever writers they belong to.
- A forgotten writer's numbers above its position will never be: the process that recovers its log sets them aside.
"""

from __future__ import annotations

from millstream.protocol.sequencer.announcements import Announcement
from millstream.protocol.sequencer.embedded import RESERVE_BLOCK, EmbeddedNumbers
from millstream.protocol.sequencer.ledger import (
    Drawn,
    Ledger,
    Registration,
    WriterEntry,
    WriterPhase,
    check_count,
)
from millstream.protocol.sequencer.persisted_upto import LedgerView
from millstream.protocol.sequencer.writer_numbers import WriterNumbers

__all__ = [
    "RESERVE_BLOCK",
    "Announcement",
    "Drawn",
    "EmbeddedNumbers",
    "Ledger",
    "LedgerView",
    "Registration",
    "WriterEntry",
    "WriterNumbers",
    "WriterPhase",
    "check_count",
]
