"""Times that folds commit with a table of versions: its clock, and when its table took over the name."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.lake.folded.scd2_rules import BEGAN_BY, VALID_FROM, VALID_TO
from millstream.lake.history_scan import read_history
from millstream.lake.schema_history import Eras, table_of
from millstream.lake.table_format import OpenTable
from millstream.model.positions import Seq
from millstream.model.records import INSTANT

_ENTERED: Final = "entered"
_SINCE: Final = "since"
"""Suffixes of the app ids under which the time (µs since 1970) and the first record of taking over a name are
committed."""


def clock_of(opened: OpenTable) -> int | None:
    """Return the greatest time so far, µs since 1970, of all tables that have had the name; None if there was none."""
    return opened.number(_clock_app(opened))


def taken_since(history: OpenTable) -> Seq:
    """Return the number from which on the owner of a name has had it; 0 if no other table did before."""
    eras = Eras.of(history)
    return eras.taken_since if eras.taken_over else Seq(0)


def continues(opened: OpenTable, history: OpenTable) -> bool:
    """Return whether the versions are the table's own, from the period in which it has had the name until now."""
    if not opened.held:
        return False
    since = taken_since(history)
    assert opened.n is not None, "it holds them"
    return opened.n >= since or opened.number(f"{opened.app}/{_SINCE}") == since


def entry_us(opened: OpenTable | None, history: OpenTable) -> int | None:
    """Return when the history's table took over the name, µs since 1970; None if no other had it before.

    It is the time that its first fold recorded. Otherwise it is the time of its first record under the name, or the
    greatest time before that here.
    """
    since = taken_since(history)
    if not since:
        return None
    if opened is not None and opened.held and opened.number(f"{opened.app}/{_SINCE}") == since:
        return opened.number(f"{opened.app}/{_ENTERED}")
    found = read_history(
        history, after=Seq(since - 1), upto=since, columns=["__commit_ts"], table=table_of(history)
    ).column("__commit_ts")
    times = [moment for moment in found.cast(INSTANT).cast(pa.int64()).to_pylist() if moment is not None]
    clock = None if opened is None else clock_of(opened)
    return max([*times, *([] if clock is None else [clock])], default=None)


def new_times(opened: OpenTable, clock_us: int | None, entered_us: int | None, since: Seq) -> dict[str, int]:
    """Return the numbers that a fold commits in addition to its position."""
    times = {} if clock_us is None else {_clock_app(opened): clock_us}
    if entered_us is not None:
        times |= {f"{opened.app}/{_ENTERED}": entered_us, f"{opened.app}/{_SINCE}": int(since)}
    return times


def at_entry(ended: pa.Table, entered_us: int, since: Seq) -> pa.ChunkedArray:
    """Return which versions have no length at the moment of entry, and began before it by number."""
    began, ends = (ended.column(name).cast(INSTANT).cast(pa.int64()) for name in (VALID_FROM.name, VALID_TO.name))
    before = pc.less(ended.column(BEGAN_BY.name), int(since))
    return pc.and_(before, pc.and_(pc.equal(began, entered_us), pc.equal(ends, entered_us)))


def _clock_app(opened: OpenTable) -> str:
    return opened.app.rpartition("/")[0] + "/clock"
