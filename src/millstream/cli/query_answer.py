"""The answer to one statement: its rows on stdout, their position on stderr, and an end by Ctrl-C."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import wait
from threading import Event
from traceback import clear_frames
from typing import TYPE_CHECKING, Final

from millstream.cli.context import note
from millstream.lake.query.sql_keywords import CATALOG_WORDS, LIST, stands_in
from millstream.model.names import parse_qualified_name
from millstream.model.region_ages import as_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.cli.query_output import Style
    from millstream.lake.query.query_session import LakeSession

_LOOK_S: Final = 0.1
"""How soon Ctrl-C is noticed."""


def answer(lake: LakeSession, sql: str, style: Style, begins: Callable[[], object] = lambda: None) -> int:
    """Print one statement's rows on stdout, and their position on stderr; return how many there were.

    Ctrl-C ends the query in DuckDB too, and raises KeyboardInterrupt.

    Args:
        begins: called before the first output.
    """
    count = _cancellable(lake, lambda: _print(lake, sql, style, begins))
    for reason in lake.reasons:
        note(str(reason))
    is_listing = LIST.fullmatch(sql) or CATALOG_WORDS.search(sql)
    for name, said in lake.missing.items():
        is_named = is_listing or stands_in(parse_qualified_name(name)[1], sql.lower())
        if is_named and f'history."{name}"' not in sql:  # what the note advises
            note(f"not readable: {name}: {said}")
    if lake.regions and style in {"table", "csv"}:
        note(as_line(lake.regions))
    if lake.is_left_behind:
        note(
            f"{lake.landed_by} leads the stream and writes its tables; the tables in this node's folder are as old as "
            "the token"
        )
    note(f"at {lake.token}{'' if lake.moved_from is None else f' ({lake.moved_from} is inside an operation)'}")
    return count


def _print(lake: LakeSession, sql: str, style: Style, begins: Callable[[], object]) -> int:
    from millstream.cli.query_output import write_result

    with lake.stream(sql) as reader:
        begins()
        count = write_result(reader, style)
    sys.stdout.flush()
    return count


def _cancellable(lake: LakeSession, work: Callable[[], int]) -> int:
    """Run the work on a thread: while the main thread is inside DuckDB, Python can't run the handler of Ctrl-C."""

    def run() -> int:
        try:
            return work()
        except BaseException as error:
            # Its frames hold DuckDB's half-read result, and DuckDB complains on stderr about objects that
            # outlive the interpreter.
            clear_frames(error.__traceback__)
            raise

    from millstream.workers import call_in_thread

    cancelled = Event()
    # A handler that raises would do so anywhere, also while the first Ctrl-C is being handled.
    before = signal.signal(signal.SIGINT, lambda _number, _frame: cancelled.set())
    try:
        outcome = call_in_thread("millstream-query", run)
        # Not by joining the thread: Python 3.11 takes it for ended after a signal.
        while not wait([outcome], _LOOK_S).done:
            if cancelled.is_set():
                # More than once: between two of its steps DuckDB runs nothing that could be interrupted.
                lake.interrupt()
    finally:
        signal.signal(signal.SIGINT, before)
    if cancelled.is_set():
        raise KeyboardInterrupt
    return outcome.result()
