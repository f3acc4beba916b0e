"""Work that no signal may interrupt: a catalog transaction, opening or closing a log, a step of a consumer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from millstream.workers import call_in_thread

_Made = TypeVar("_Made")


def uninterruptible(call: Callable[[], _Made], *, leave: Callable[[], object] = lambda: None) -> _Made:
    """Return a call's result, computed where no signal handler runs: what a handler raises comes after the call.

    Handlers run on the main thread only; on any other thread the call is simply made. They raise KeyboardInterrupt,
    or whatever the application's own raise: SystemExit, or the end of a time limit. An interrupted call's result is
    lost: the call itself has to keep what must be kept.

    Args:
        call: the call.
        leave: called at an interruption, to end a wait of the call.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    made: Future[_Made] = Future()
    interrupted: BaseException | None = None
    try:
        call_in_thread("uninterruptible", call, made)
    except BaseException as error:
        if made.cancel():
            raise  # it hasn't begun, and won't
        interrupted = error
    while not made.done():
        try:
            if interrupted is not None:
                leave()
            made.exception()  # returns the call's failure, so only a handler's exception is raised here
        except BaseException as error:  # noqa: BLE001 (raised below)
            interrupted = error
    if interrupted is not None:
        raise interrupted
    return made.result()
